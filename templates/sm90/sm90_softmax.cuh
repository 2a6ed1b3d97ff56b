#ifndef FA_TEMPLATES_SM90_SM90_SOFTMAX_CUH_
#define FA_TEMPLATES_SM90_SM90_SOFTMAX_CUH_

#include <common/constants.cuh>
#include <ptx/math.cuh>
#include <ptx/thread.cuh>

namespace fa::sm90 {

using kernel::kInfinity;

/// Running softmax statistics of the two rows (lane / 4 and lane / 4 + 8 of a warp's 16) that a thread shares with the
/// other three lanes of its quad. Accumulator register 4j + 2r + e belongs to row r.
///
/// The maximum that P is computed with trails the true one by up to 2^kSlack: O is rescaled only when it fell further
/// behind, which is rare. P <= 2^kSlack then, and neither the rounding of P (floating point) nor the sums in float lose
/// anything by it.
struct TrailingSoftmax {
  static constexpr float kSlack = 8.f;

  float max[2] = {-kInfinity, -kInfinity};  // in units of the raw score
  float sum[2] = {0.f, 0.f};                // of this thread's columns
  float factor[2] = {1.f, 1.f};             // what O has to be multiplied with after `update` returned true

  /// Turns scores into P = exp2(scale_log2 * (S - max)) in place. True when O must be rescaled by `factor`.
  template <int kCount>
  FA_DEVICE bool update(float (&s)[kCount], float scale_log2) {
    float next[2];
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const float highest = row_max(s, r);
      next[r] = (highest - max[r]) * scale_log2 > kSlack ? highest : max[r];
    }
    const bool rescale = ptx::vote_any(next[0] != max[0] || next[1] != max[1]);
    if (rescale) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        factor[r] = max[r] == -kInfinity ? 0.f : ptx::ex2((max[r] - next[r]) * scale_log2);
        max[r] = next[r];
        sum[r] *= factor[r];
      }
    }
    FA_UNROLL
    for (int r = 0; r < 2; ++r) sum[r] += exponentiate(s, r, scale_log2);
    return rescale;
  }

  /// Sums over the quad; afterwards `sum` is the softmax denominator relative to `max`.
  FA_DEVICE void finish() {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      sum[r] += ptx::shfl_xor(sum[r], 1);
      sum[r] += ptx::shfl_xor(sum[r], 2);
    }
  }

  /// 1 / sum, and 0 for a row without keys. A NaN sum stays NaN.
  FA_DEVICE float inverse_sum(int r) const { return sum[r] == 0.f ? 0.f : 1.f / sum[r]; }

  /// The natural log-sum-exp of the scaled scores; -inf for a row without keys.
  FA_DEVICE float lse(int r, float scale) const {
    if (sum[r] == 0.f) return -kInfinity;
    const float base = max[r] == -kInfinity ? 0.f : max[r] * scale;
    return base + kernel::kLn2 * ptx::lg2(sum[r]);
  }

 private:
  template <int kCount>
  FA_DEVICE float row_max(const float (&s)[kCount], int r) const {
    float result[4];  // short dependency chains
    FA_UNROLL
    for (int i = 0; i < 4; ++i) result[i] = s[8 * (i / 2) + 2 * r + i % 2];
    FA_UNROLL
    for (int j = 2; j < kCount / 4; ++j) {
      FA_UNROLL
      for (int e = 0; e < 2; ++e) {
        result[j % 2 * 2 + e] = ptx::max(result[j % 2 * 2 + e], s[4 * j + 2 * r + e]);
      }
    }
    float all = ptx::max(ptx::max(result[0], result[1]), ptx::max(result[2], result[3]));
    all = ptx::max(all, ptx::shfl_xor(all, 1));
    return ptx::max(all, ptx::shfl_xor(all, 2));
  }

  template <int kCount>
  FA_DEVICE float exponentiate(float (&s)[kCount], int r, float scale_log2) {
    const float offset = max[r] == -kInfinity ? 0.f : max[r] * scale_log2;  // never inf - inf
    float total[2] = {0.f, 0.f};
    FA_UNROLL
    for (int j = 0; j < kCount / 4; ++j) {
      FA_UNROLL
      for (int e = 0; e < 2; ++e) {
        float& x = s[4 * j + 2 * r + e];
        x = ptx::ex2(ptx::fma(x, scale_log2, -offset));
        total[e] += x;
      }
    }
    return total[0] + total[1];
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_SOFTMAX_CUH_
