#ifndef FA_TEMPLATES_COMMON_ROW_ENTROPY_CUH_
#define FA_TEMPLATES_COMMON_ROW_ENTROPY_CUH_

#include <common/constants.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// What an online softmax has besides for the entropy of its rows: nothing without kEntropy.
///
/// P = exp2(t) is relative to the maximum, or what is near it. With l the sum of P, the entropy of the row is
///   H = log(l) - log(2) * (the sum of P t) / l.
/// From a maximum to a greater one every t changes by log2(shrink), and P by the factor shrink.
template <int kMTiles, bool kEntropy>
struct RowEntropy {};

template <int kMTiles>
struct RowEntropy<kMTiles, true> {
  float weighted[kMTiles][2] = {};  // the sum of P t, split over the quad like the sum of P

  // Below it exp2 is 0 in float. A hidden key's t is -inf, which P = 0 must not be multiplied with.
  static constexpr float kLowest = -160.f;

  /// `sum` is that of P before it shrinks.
  FA_DEVICE void shrink_entropy(int m, int r, float sum, float shrink) {
    weighted[m][r] = shrunk(weighted[m][r], sum, shrink);
  }

  /// A sum of P t, of P that sums to `sum`.
  FA_DEVICE static float shrunk(float weighted_sum, float sum, float shrink) {
    const float lower = shrink == 0.f ? 0.f : ptx::lg2(shrink);
    return shrink * ptx::fma(lower, sum, weighted_sum);
  }

  /// What OnlineSoftmax::exponentiate does.
  template <int kNTiles>
  FA_DEVICE float exponentiate_weighted(float (&s)[kNTiles][4], int m, int r, float scale_log2, float offset) {
    float total = 0.f;
    FA_UNROLL
    for (int n = 0; n < kNTiles; ++n) {
      FA_UNROLL
      for (int e = 2 * r; e < 2 * r + 2; ++e) {
        const float t = ptx::fma(s[n][e], scale_log2, -offset);
        s[n][e] = ptx::ex2(t);
        total += s[n][e];
        add_weighted(m, r, s[n][e], t);
      }
    }
    return total;
  }

  /// P = exp2(t) of one score.
  FA_DEVICE void add_weighted(int m, int r, float p, float t) {
    weighted[m][r] = ptx::fma(p, ptx::max(t, kLowest), weighted[m][r]);
  }

  /// The sums of P t of a thread's two rows, where a hidden key has made one NaN, 0 times -inf: by the logarithms of
  /// the first `count` of P. That is rare, and a comparison for each score would not be. P of element i is of row i / 2
  /// % 2.
  template <int kCount>
  FA_DEVICE static void mend(const float (&p)[kCount], int count, float (&of_tile)[2]) {
    if (!ptx::vote_any(of_tile[0] != of_tile[0] || of_tile[1] != of_tile[1])) return;
    of_tile[0] = of_tile[1] = 0.f;
    FA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if (i >= count || p[i] == 0.f) continue;  // nor is a NaN
      of_tile[i / 2 % 2] = ptx::fma(p[i], ptx::lg2(p[i]), of_tile[i / 2 % 2]);
    }
  }

  FA_DEVICE void add_of_tile(const float (&of_tile)[2]) {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) weighted[0][r] += of_tile[r];
  }

  FA_DEVICE void add_lanes() {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        weighted[m][r] += ptx::shfl_xor(weighted[m][r], 1);
        weighted[m][r] += ptx::shfl_xor(weighted[m][r], 2);
      }
    }
  }

  /// In nats, of a row whose P sums to `sum`. `weight`: what the keys are of a row that has a sink, too.
  FA_DEVICE float entropy(int m, int r, float sum, float weight) const {
    if (sum == 0.f || weight == 0.f) return 0.f;
    const float keys = (ptx::lg2(sum) - weighted[m][r] / sum) * kLn2;
    return weight * (keys - ptx::lg2(weight) * kLn2);
  }
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_ROW_ENTROPY_CUH_
