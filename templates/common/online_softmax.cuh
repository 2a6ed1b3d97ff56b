#ifndef FA_TEMPLATES_COMMON_ONLINE_SOFTMAX_CUH_
#define FA_TEMPLATES_COMMON_ONLINE_SOFTMAX_CUH_

#include <common/constants.cuh>
#include <common/log_sum.cuh>
#include <common/row_entropy.cuh>
#include <ptx/math.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// Accumulator fragments of one warp, [m tile of 16 rows][n tile of 8 columns][4]: registers 0 and 1 belong to row
/// lane / 4, registers 2 and 3 to row lane / 4 + 8.
template <int kMTiles, int kNTiles>
using Fragment = float[kMTiles][kNTiles][4];

/// Multiplies a row of O by a factor that the row's quad has, where O is transposed: its rows are columns, and those of
/// lanes t of quads are 2t and 2t + 1. Called by a whole warp.
template <int kOTiles>
FA_DEVICE void multiply_columns(float (&o)[kOTiles][4], float factor) {
  const int first = ptx::lane_index() % 4 * 8;
  float factors[2];
  FA_UNROLL
  for (int e = 0; e < 2; ++e) factors[e] = ptx::from_bits(ptx::shfl(ptx::bits(factor), first + 4 * e));
  FA_UNROLL
  for (int i = 0; i < 4 * kOTiles; ++i) o[i / 4][i % 4] *= factors[i % 2];
}

/// The running statistics of the rows that a thread shares with the other three lanes of its quad (Milakov and
/// Gimelshein, "Online normalizer calculation for softmax", 2018; base 2 as in FlashAttention-2). The maximum is kept
/// in units of the raw score, and the sum stays split over the quad until `finish`. With kEntropy the rows' entropy is
/// taken along (row_entropy.cuh). P, and with it the sum, are 2^kLogFactor times what they are elsewhere. With one half
/// (kHalves) a tile of S has no rows from 8 on: nothing is made of their registers. O is transposed then
/// (multiply_columns).
template <int kMTiles, bool kEntropy = false, int kLogFactor = 0, int kHalves = 2>
struct OnlineSoftmax : RowEntropy<kMTiles, kEntropy> {
  float max[kMTiles][2];
  float sum[kMTiles][2];
  float offsets[kMTiles][2];  // of one half: what is subtracted from scaled scores
  bool far = false;  // one of the thread's rows has a maximum that no float is near enough to, once it is scaled

  FA_DEVICE OnlineSoftmax() {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < kHalves; ++r) {
        max[m][r] = -kInfinity;
        sum[m][r] = 0.f;
        if constexpr (kHalves == 1) offsets[m][r] = 0.f;
      }
    }
  }

  /// Turns scores S into P = exp2(scale_log2 * (S - max)) in place. With kConditional, O and the sum are
  /// rescaled only when the maximum of one of the warp's rows grew, which becomes rare as the loop goes on; the result
  /// is the same bit for bit.
  template <bool kConditional, int kNTiles, int kOTiles>
  FA_DEVICE void update(Fragment<kMTiles, kNTiles>& s, Fragment<kMTiles, kOTiles>& o, float scale_log2) {
    float new_max[kMTiles][2];
    if constexpr (kHalves == 1 && kConditional) {
      // Of few rows latencies count: lanes ask each other only where one has a greater score.
      const float own = lane_max<kNTiles>(s[0], 0, max[0][0]);
      if (ptx::vote_any(own > max[0][0] || far)) {
        new_max[0][0] = quad_max(own);
        offsets[0][0] = offset(new_max[0][0], scale_log2);
        raise<kNTiles, kOTiles>(s, o, new_max, offsets, scale_log2);
      }
      exponentiate_rows<kNTiles>(s, scale_log2, offsets);
    } else {
      FA_UNROLL
      for (int m = 0; m < kMTiles; ++m) {
        FA_UNROLL
        for (int r = 0; r < kHalves; ++r) new_max[m][r] = quad_max(lane_max<kNTiles>(s[m], r, max[m][r]));
      }
      update_to<kConditional, kNTiles>(s, o, new_max, scale_log2);
    }
  }

  /// The same with row maxima, no smaller than those so far, that the caller knows.
  template <bool kConditional, int kNTiles, int kOTiles>
  FA_DEVICE void update_to(Fragment<kMTiles, kNTiles>& s, Fragment<kMTiles, kOTiles>& o,
                           const float (&new_max)[kMTiles][2], float scale_log2) {
    bool grew = false;
    float subtracted[kMTiles][2];
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < kHalves; ++r) {
        grew = grew || new_max[m][r] > max[m][r];
        subtracted[m][r] = offset(new_max[m][r], scale_log2);
      }
    }
    if constexpr (!kConditional) {
      rescale_always<kNTiles>(s, o, new_max, scale_log2);
      return;
    }
    // One branch in the usual case. Whether a row is far changes only where its maximum grows.
    if (ptx::vote_any(grew || far)) raise<kNTiles, kOTiles>(s, o, new_max, subtracted, scale_log2);
    exponentiate_rows<kNTiles>(s, scale_log2, subtracted);
  }

  /// Sums over the quad; afterwards `sum` is the softmax denominator relative to `max`.
  FA_DEVICE void finish() {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < kHalves; ++r) {
        sum[m][r] += ptx::shfl_xor(sum[m][r], 1);
        sum[m][r] += ptx::shfl_xor(sum[m][r], 2);
      }
    }
    if constexpr (kEntropy) this->add_lanes();
  }

  /// 1 / sum, and 0 for a row without keys. A NaN sum stays NaN.
  FA_DEVICE float inverse_sum(int m, int r) const { return sum[m][r] == 0.f ? 0.f : 1.f / sum[m][r]; }

  /// What P relative to a maximum is multiplied by, to be relative to another that is no smaller.
  static FA_DEVICE float shrink_between(float from, float to, float scale_log2) {
    if (from == -kInfinity) return 0.f;
    const float before = offset(from, scale_log2);
    const float next = offset(to, scale_log2);
    if (!is_far(before) && !is_far(next)) return ptx::ex2(before - next);
    const float score = is_far(before) ? from : 0.f;
    const float next_score = is_far(next) ? to : 0.f;
    return ptx::ex2(
        ptx::fma(score - next_score, scale_log2, (is_far(before) ? kFar : before) - (is_far(next) ? kFar : next)));
  }

  /// The natural log-sum-exp of the scaled scores; -inf for a row without keys.
  template <class Sum = LogSum>
  FA_DEVICE Sum log_sum(int m, int r, float scale_log2) const {
    if (sum[m][r] == 0.f) return Sum::of_no_keys();
    const float subtracted = offset(max[m][r], scale_log2);
    if (is_far(subtracted)) {
      constexpr float kUnshift = 1.f / static_cast<float>(1 << kLogFactor);
      return Sum::of(max[m][r], scale_log2 * kLn2, kUnshift * sum[m][r]);
    }
    return Sum::of(subtracted, kLn2, sum[m][r]);
  }

 private:
  static constexpr float kFar = kLogFactor == 0 ? 0.f : -static_cast<float>(kLogFactor);  // offset of far rows

  /// A row without keys so far subtracts 0 instead of -inf, so that exp2(-inf) = 0 and never inf - inf.
  static FA_DEVICE float offset(float row_max, float scale_log2) {
    if (row_max == -kInfinity) return 0.f;
    if constexpr (kLogFactor != 0) return ptx::fma(row_max, scale_log2, kFar);
    return ptx::multiply(row_max, scale_log2);
  }

  /// Whether no float is near enough to a row's scaled maximum.
  static FA_DEVICE bool is_far(float subtracted) { return !(ptx::abs(subtracted) <= kLargestOffset); }

  static FA_DEVICE bool has_far(const float (&subtracted)[kMTiles][2]) {
    bool any = false;
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < kHalves; ++r) any = any || is_far(subtracted[m][r]);
    }
    return any;
  }

  /// What update_to does where every step rescales, with no array but the maxima alive: head dims that take it have no
  /// register for one.
  template <int kNTiles, int kOTiles>
  FA_DEVICE void rescale_always(Fragment<kMTiles, kNTiles>& s, Fragment<kMTiles, kOTiles>& o,
                                const float (&new_max)[kMTiles][2], float scale_log2) {
    bool any_far = false;
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < kHalves; ++r) {
        any_far = any_far || is_far(offset(max[m][r], scale_log2)) || is_far(offset(new_max[m][r], scale_log2));
      }
    }
    if (ptx::vote_any(any_far)) {
      float subtracted[kMTiles][2];
      float shrink[kMTiles][2];
      FA_UNROLL
      for (int m = 0; m < kMTiles; ++m) {
        FA_UNROLL
        for (int r = 0; r < kHalves; ++r) subtracted[m][r] = offset(new_max[m][r], scale_log2);
      }
      shrinks(shrink, subtracted, scale_log2);
      far_shrinks(shrink, new_max, scale_log2);
      subtract_far<kNTiles>(s, new_max, subtracted);
      rescale<kOTiles>(o, new_max, shrink);
      exponentiate_rows<kNTiles>(s, scale_log2, subtracted);
      return;
    }
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < kHalves; ++r) {
        const float next = offset(new_max[m][r], scale_log2);
        const float shrink = max[m][r] == -kInfinity ? 0.f : ptx::ex2(offset(max[m][r], scale_log2) - next);
        max[m][r] = new_max[m][r];
        shrink_row<kOTiles>(o[m], m, r, shrink);
      }
    }
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < kHalves; ++r) add_row<kNTiles>(s[m], m, r, scale_log2, offset(max[m][r], scale_log2));
    }
  }

  /// Goes from the maxima so far to others, whose offsets are `subtracted`.
  template <int kNTiles, int kOTiles>
  FA_DEVICE void raise(Fragment<kMTiles, kNTiles>& s, Fragment<kMTiles, kOTiles>& o, const float (&new_max)[kMTiles][2],
                       float (&subtracted)[kMTiles][2], float scale_log2) {
    float shrink[kMTiles][2];
    shrinks(shrink, subtracted, scale_log2);
    const bool was_far = far;
    far = has_far(subtracted);
    if (ptx::vote_any(was_far || far)) {
      far_shrinks(shrink, new_max, scale_log2);
      subtract_far<kNTiles>(s, new_max, subtracted);
    }
    rescale<kOTiles>(o, new_max, shrink);
  }

  /// In far rows the maximum is subtracted before the scale, and nothing of it behind.
  template <int kNTiles>
  static FA_DEVICE void subtract_far(Fragment<kMTiles, kNTiles>& s, const float (&new_max)[kMTiles][2],
                                     float (&subtracted)[kMTiles][2]) {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < kHalves; ++r) {
        const float before_scale = is_far(subtracted[m][r]) ? new_max[m][r] : 0.f;
        FA_UNROLL
        for (int n = 0; n < kNTiles; ++n) {
          FA_UNROLL
          for (int e = 2 * r; e < 2 * r + 2; ++e) s[m][n][e] -= before_scale;
        }
        if (is_far(subtracted[m][r])) subtracted[m][r] = kFar;
      }
    }
  }

  /// What P shrinks by from the maximum so far to a greater one: from the very offsets that P was and will be computed
  /// with, so exactly 1 for a row whose maximum stayed.
  FA_DEVICE void shrinks(float (&shrink)[kMTiles][2], const float (&subtracted)[kMTiles][2], float scale_log2) const {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < kHalves; ++r) {
        shrink[m][r] = max[m][r] == -kInfinity ? 0.f : ptx::ex2(offset(max[m][r], scale_log2) - subtracted[m][r]);
      }
    }
  }

  /// The same in far rows: as P, from the maximum itself.
  FA_DEVICE void far_shrinks(float (&shrink)[kMTiles][2], const float (&new_max)[kMTiles][2], float scale_log2) const {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < kHalves; ++r) {
        const float before = offset(max[m][r], scale_log2);
        const float next = offset(new_max[m][r], scale_log2);
        if (max[m][r] == -kInfinity || !(is_far(before) || is_far(next))) continue;
        const float score = is_far(before) ? max[m][r] : 0.f;
        const float next_score = is_far(next) ? new_max[m][r] : 0.f;
        shrink[m][r] = ptx::ex2(
            ptx::fma(score - next_score, scale_log2, (is_far(before) ? kFar : before) - (is_far(next) ? kFar : next)));
      }
    }
  }

  template <int kOTiles>
  FA_DEVICE void rescale(Fragment<kMTiles, kOTiles>& o, const float (&new_max)[kMTiles][2],
                         const float (&shrink)[kMTiles][2]) {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < kHalves; ++r) {
        max[m][r] = new_max[m][r];
        shrink_row<kOTiles>(o[m], m, r, shrink[m][r]);
      }
    }
  }

  template <int kOTiles>
  FA_DEVICE void shrink_row(float (&o)[kOTiles][4], int m, int r, float shrink) {
    if constexpr (kEntropy) this->shrink_entropy(m, r, sum[m][r], shrink);
    sum[m][r] *= shrink;
    if constexpr (kHalves == 1) {
      multiply_columns<kOTiles>(o, shrink);
    } else {
      FA_UNROLL
      for (int n = 0; n < kOTiles; ++n) {
        o[n][2 * r] *= shrink;
        o[n][2 * r + 1] *= shrink;
      }
    }
  }

  /// Makes scores P, and adds them to the sums of rows.
  template <int kNTiles>
  FA_DEVICE void exponentiate_rows(Fragment<kMTiles, kNTiles>& s, float scale_log2,
                                   const float (&subtracted)[kMTiles][2]) {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < kHalves; ++r) add_row<kNTiles>(s[m], m, r, scale_log2, subtracted[m][r]);
    }
  }

  /// Makes the scores of a row P, and adds them to its sum.
  template <int kNTiles>
  FA_DEVICE void add_row(float (&s)[kNTiles][4], int m, int r, float scale_log2, float subtracted) {
    if constexpr (kEntropy) {
      sum[m][r] += this->template exponentiate_weighted<kNTiles>(s, m, r, scale_log2, subtracted);
    } else {
      sum[m][r] += exponentiate<kNTiles>(s, r, scale_log2, subtracted);
    }
  }

  template <int kNTiles>
  static FA_DEVICE float lane_max(const float (&s)[kNTiles][4], int r, float start) {
    float result = start;
    FA_UNROLL
    for (int n = 0; n < kNTiles; ++n) result = ptx::max(result, ptx::max(s[n][2 * r], s[n][2 * r + 1]));
    return result;
  }
  static FA_DEVICE float quad_max(float x) {
    x = ptx::max(x, ptx::shfl_xor(x, 1));
    return ptx::max(x, ptx::shfl_xor(x, 2));
  }

  template <int kNTiles>
  static FA_DEVICE float exponentiate(float (&s)[kNTiles][4], int r, float scale_log2, float offset) {
    float total = 0.f;
    FA_UNROLL
    for (int n = 0; n < kNTiles; ++n) {
      FA_UNROLL
      for (int e = 2 * r; e < 2 * r + 2; ++e) {
        s[n][e] = ptx::ex2(ptx::fma(s[n][e], scale_log2, -offset));
        total += s[n][e];
      }
    }
    return total;
  }
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_ONLINE_SOFTMAX_CUH_
