#ifndef FA_TEMPLATES_SM90_SM90_FP8_SOFTMAX_CUH_
#define FA_TEMPLATES_SM90_SM90_FP8_SOFTMAX_CUH_

#include <common/constants.cuh>
#include <common/exponential.cuh>
#include <common/int8.cuh>
#include <common/log_sum.cuh>
#include <ptx/math.cuh>
#include <ptx/thread.cuh>

namespace fa::sm90 {

/// P = 2^8 exp2(scale_log2 * S - greatest) for the exact maximum so far: P from 0 to 256 has the most of what e4m3
/// tells apart, and no score that comes later exceeds it. Each row has a scale of its own. A thread has row lane / 4
/// and row lane / 4 + 8 of a warp's 16; accumulator register 4j + 2r + e belongs to row r. With kBiased scores are sums
/// of products of i8 above kernel::kInt8Bias, which the fma that subtracts the greatest takes away.
///
/// kLogFactor: log2 of what P is multiplied with, 8, or 0 where its bytes are of 2^8 times P. kPolynomials of 8
/// exponentials are polynomials. kLateSums: `update` leaves sums to `add_sums`, and what follows a greater maximum is
/// behind a branch of its own.
template <bool kBiased, int kLogFactor, int kPolynomials, bool kLateSums>
struct Fp8Softmax {
  static constexpr float kShift = static_cast<float>(kLogFactor);
  static constexpr int kChains = 2;  // of dependent maxima, of a row

  float greatest[2] = {-kernel::kInfinity, -kernel::kInfinity};  // score of the row, before the scale; -inf: no key yet
  float sum[2] = {0.f, 0.f};                                     // of this thread's columns
  float factor[2] = {1.f, 1.f};                                  // what O has to be multiplied with after `update`

  /// Turns scores into P in place. True when one of the warp's rows has a greater maximum.
  template <int kCount>
  FA_DEVICE bool update(float (&s)[kCount], const float (&scale_log2)[2]) {
    int own[2][kChains];
    find_own_greatest(own, s);
    float subtracted[2];
    bool rises = false;
    if constexpr (kLateSums) factor[0] = factor[1] = 1.f;
    if constexpr (kLateSums) {
      if (!stays(own, subtracted, scale_log2)) rises = ptx::vote_any(follow(s, own, subtracted, scale_log2));
    } else {
      rises = follow(s, own, subtracted, scale_log2);
    }
    float total[2][2] = {};
    FA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const int r = i / 2 % 2;
      s[i] = exponential(ptx::fma(s[i], scale_log2[r], -subtracted[r]), i % 8 < kPolynomials);
      if constexpr (!kLateSums) total[r][i % 2] += s[i];
    }
    if constexpr (kLateSums) return rises;
    add(total);
    return ptx::vote_any(rises);
  }

  /// P of a KV tile, in place of its scores.
  template <int kCount>
  FA_DEVICE void add_sums(const float (&p)[kCount]) {
    float total[2][2] = {};
    FA_UNROLL
    for (int i = 0; i < kCount; ++i) total[i / 2 % 2][i % 2] += p[i];
    add(total);
  }

  /// Sums over the quad; afterwards `sum` is the softmax denominator.
  FA_DEVICE void finish() {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      sum[r] += ptx::shfl_xor(sum[r], 1);
      sum[r] += ptx::shfl_xor(sum[r], 2);
    }
  }

  /// 1 / sum of P times 2^8, as it is in products; 0 for a row without keys. A NaN sum stays NaN.
  FA_DEVICE float inverse_sum(int r) const {
    return sum[r] == 0.f ? 0.f : ptx::rcp(kLogFactor == 8 ? sum[r] : 256.f * sum[r]);
  }

  /// The natural log-sum-exp of the scaled scores; -inf for a row without keys.
  FA_DEVICE float log_sum(int r, float scale_log2) const {
    if (sum[r] == 0.f) return -kernel::kInfinity;
    const float subtracted = reference(greatest[r], scale_log2);
    if (is_far(greatest[r], subtracted)) {
      return kernel::LogSum::of(greatest_score(r), scale_log2 * kernel::kLn2, sum[r] * kUnshift).value();
    }
    return kernel::LogSum::of(without_bias(subtracted, scale_log2), kernel::kLn2, sum[r]).value();
  }

  /// The same of a split.
  FA_DEVICE kernel::SplitSum split_sum(int r, float scale_log2) const {
    if (sum[r] == 0.f) return kernel::SplitSum::of_no_keys();
    const float subtracted = reference(greatest[r], scale_log2);
    if (is_far(greatest[r], subtracted)) {
      return kernel::SplitSum::of(greatest_score(r), scale_log2 * kernel::kLn2, sum[r] * kUnshift);
    }
    return kernel::SplitSum::of(without_bias(subtracted, scale_log2), kernel::kLn2, sum[r]);
  }

 private:
  FA_DEVICE void add(const float (&total)[2][2]) {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) sum[r] = ptx::fma(sum[r], factor[r], total[r][0] + total[r][1]);
  }

  static constexpr float kUnshift = kLogFactor == 8 ? 1.f / 256.f : 1.f;
  static_assert(kLogFactor == 0 || kLogFactor == 8);
  static constexpr float kLeast = -3.4e38f;  // finite: a row without keys subtracts it from -inf
  static constexpr int kBitsBelowAll = -0x7fffffff - 1;
  // Scaled scores from here on are looked at: far ones, and all whose P counts beside them.
  static constexpr float kLarge = kernel::kLargestOffset / 2;

  /// 2^x, by the units of products as a polynomial, where those of exponentials are what others wait for.
  FA_DEVICE static float exponential(float x, bool polynomial) {
    return polynomial ? kernel::ex2_of_products(x) : ptx::ex2(x);
  }

  /// What is subtracted from a row's scores in log2 units.
  FA_DEVICE static float reference(float score, float scale_log2) {
    return ptx::max(ptx::fma(score, scale_log2, -kShift), kLeast);
  }

  FA_DEVICE float greatest_score(int r) const { return kBiased ? greatest[r] - kernel::kInt8Bias : greatest[r]; }
  FA_DEVICE static float without_bias(float subtracted, float scale_log2) {
    return kBiased ? ptx::fma(-kernel::kInt8Bias, scale_log2, subtracted) : subtracted;
  }

  /// Whether no float is near enough to what has to be subtracted.
  FA_DEVICE static bool is_far(float score, float reference) {
    return score != -kernel::kInfinity && !(ptx::abs(reference) <= kernel::kLargestOffset);
  }

  /// Bits of a thread's greatest scores, which are searched as whole numbers, three at a time: of negative floats these
  /// have another order.
  template <int kCount>
  FA_DEVICE static void find_own_greatest(int (&own)[2][kChains], const float (&s)[kCount]) {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      FA_UNROLL
      for (int c = 0; c < kChains; ++c) own[r][c] = kBitsBelowAll;
    }
    FA_UNROLL
    for (int i = 0; i < kCount; i += 2) {
      int& chain = own[i / 2 % 2][i / 4 % kChains];
      chain = ptx::max3(chain, static_cast<int>(ptx::bits(s[i])), static_cast<int>(ptx::bits(s[i + 1])));
    }
  }
  FA_DEVICE static int greater(const int (&chains)[kChains]) { return ptx::max3(chains[0], chains[1], kBitsBelowAll); }

  /// True when no row of the warp has a score above its maximum, and none is what `follow` looks at. Maxima below 0 are
  /// left to it, since bits of what is below them may not be found.
  FA_DEVICE bool stays(const int (&own)[2][kChains], float (&subtracted)[2], const float (&scale_log2)[2]) const {
    bool all = true;
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      subtracted[r] = ptx::fma(greatest[r], scale_log2[r], -kShift);
      all = all && ptx::from_bits(static_cast<uint32_t>(greater(own[r]))) <= greatest[r] && greatest[r] >= 0.f &&
            subtracted[r] <= kLarge;
    }
    return !ptx::vote_any(!all);
  }

  /// Takes the maxima of a KV tile. True when one of the thread's rows has a greater one.
  template <int kCount>
  FA_DEVICE bool follow(float (&s)[kCount], const int (&own)[2][kChains], float (&subtracted)[2],
                        const float (&scale_log2)[2]) {
    float before[2];
    float score[2];
    FA_UNROLL
    for (int r = 0; r < 2; ++r) before[r] = greatest[r];
    const bool rare = find_greatest(score, own, s, scale_log2);
    bool rises = false;
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      greatest[r] = ptx::max(score[r], greatest[r]);
      rises = rises || greatest[r] > before[r];
      subtracted[r] = reference(greatest[r], scale_log2[r]);
      // From the very numbers that P was and will be computed with: exactly 1 for a row whose maximum stayed.
      factor[r] = ptx::ex2(reference(before[r], scale_log2[r]) - subtracted[r]);
    }
    if (rare) subtract_first(s, subtracted, before, scale_log2);
    return rises;
  }

  /// Of a KV tile's rows, or what is less than `greatest`. True where `subtract_first` has to look.
  template <int kCount>
  FA_DEVICE bool find_greatest(float (&score)[2], const int (&own)[2][kChains], const float (&s)[kCount],
                               const float (&scale_log2)[2]) const {
    bool rare = false;
    int bits[2];
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      bits[r] = greater(own[r]);
      rare = rare || (bits[r] <= 0 && greatest[r] < 0.f);
      rare = rare || !(ptx::from_bits(static_cast<uint32_t>(bits[r])) * scale_log2[r] <= kLarge);
    }
    rare = ptx::vote_any(rare);  // of lanes: the quad's answer is on its way
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      bits[r] = ptx::max3(bits[r], ptx::shfl_xor(bits[r], 1), kBitsBelowAll);
      bits[r] = ptx::max3(bits[r], ptx::shfl_xor(bits[r], 2), kBitsBelowAll);
      score[r] = ptx::from_bits(static_cast<uint32_t>(bits[r]));
    }
    if (rare) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) score[r] = row_greatest(s, r);
    }
    return rare;
  }

  template <int kCount>
  FA_DEVICE static float row_greatest(const float (&s)[kCount], int r) {
    float result = s[2 * r];
    FA_UNROLL
    for (int i = 2 * r; i < kCount; i += (i % 2 == 0 ? 1 : 3)) result = ptx::max(result, s[i]);
    result = ptx::max(result, ptx::shfl_xor(result, 1));
    return ptx::max(result, ptx::shfl_xor(result, 2));
  }

  /// In rows whose scaled maximum no float is near enough to, the maximum is subtracted before the scale.
  template <int kCount>
  FA_DEVICE void subtract_first(float (&s)[kCount], float (&subtracted)[2], const float (&before)[2],
                                const float (&scale_log2)[2]) {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const float last = reference(before[r], scale_log2[r]);
      const bool was_far = is_far(before[r], last);
      const bool far = is_far(greatest[r], subtracted[r]);
      if (before[r] != -kernel::kInfinity) {
        if (far) {
          factor[r] = was_far ? ptx::ex2((before[r] - greatest[r]) * scale_log2[r])
                              : ptx::ex2(ptx::fma(-greatest[r], scale_log2[r], last) + kShift);
        } else if (was_far) {
          factor[r] = ptx::ex2(ptx::fma(before[r], scale_log2[r], -kShift - subtracted[r]));
        }
      }
      const float base = far ? greatest[r] : 0.f;
      if (far) subtracted[r] = -kShift;
      FA_UNROLL
      for (int i = 2 * r; i < kCount; i += (i % 2 == 0 ? 1 : 3)) s[i] -= base;
    }
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_FP8_SOFTMAX_CUH_
