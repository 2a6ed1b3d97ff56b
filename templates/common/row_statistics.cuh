#ifndef FA_TEMPLATES_COMMON_ROW_STATISTICS_CUH_
#define FA_TEMPLATES_COMMON_ROW_STATISTICS_CUH_

#include <common/constants.cuh>
#include <common/online_softmax.cuh>
#include <common/variant.cuh>
#include <ptx/atomic.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>

namespace fa::kernel {

// Statistics of rows that a forward kernel stores besides O and the log-sum-exp. A Config that leaves them out has
// none.

enum class MaxLogitOf { none, softmax, scaled };

template <class Config>
FA_DEVICE constexpr MaxLogitOf max_logit_of() {
  if constexpr (requires { Config::kMaxLogit; })
    return Config::kMaxLogit == 2 ? MaxLogitOf::scaled : MaxLogitOf::softmax;
  return MaxLogitOf::none;
}
template <class Config>
FA_DEVICE constexpr bool wants_max_logit_by_head() {
  if constexpr (requires { Config::kMaxLogitByHead; }) return Config::kMaxLogitByHead;
  return false;
}
template <class Config>
FA_DEVICE constexpr bool wants_entropy() {
  if constexpr (requires { Config::kEntropy; }) return Config::kEntropy;
  return false;
}

template <class Config>
inline constexpr bool kMaxLogit = max_logit_of<Config>() != MaxLogitOf::none;
template <class Config>
inline constexpr bool kMaxLogitByHead = wants_max_logit_by_head<Config>();
template <class Config>
inline constexpr bool kEntropy = wants_entropy<Config>();
/// Whether the maxima of the softmax are not those that are asked for.
template <class Config>
inline constexpr bool kTracksScaled = max_logit_of<Config>() == MaxLogitOf::scaled&& VariantOf<Config>::kScore;

/// A softmax beside which the greatest scaled scores in front of a score function are kept.
template <int kMTiles, bool kWithEntropy>
struct SoftmaxOfScaled : OnlineSoftmax<kMTiles, kWithEntropy> {
  float scaled[kMTiles][2];  // split over the quad until join_lanes

  FA_DEVICE SoftmaxOfScaled() {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) scaled[m][r] = -kInfinity;
    }
  }

  /// Hidden scores are -inf, whatever the sign of the scale.
  template <int kNTiles>
  FA_DEVICE void track(const Fragment<kMTiles, kNTiles>& s, float scale) {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int n = 0; n < kNTiles; ++n) {
        FA_UNROLL
        for (int e = 0; e < 4; ++e) {
          const float score = s[m][n][e];
          scaled[m][e / 2] = ptx::max(scaled[m][e / 2], score == -kInfinity ? -kInfinity : score * scale);
        }
      }
    }
  }

  FA_DEVICE void join_lanes() {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        scaled[m][r] = ptx::max(scaled[m][r], ptx::shfl_xor(scaled[m][r], 1));
        scaled[m][r] = ptx::max(scaled[m][r], ptx::shfl_xor(scaled[m][r], 2));
      }
    }
  }
};

template <class Config, int kMTiles, int kHalves = 2>
using SoftmaxOf = typename Either<SoftmaxOfScaled<kMTiles, kEntropy<Config>>,
                                  OnlineSoftmax<kMTiles, kEntropy<Config>, 0, kHalves>, kTracksScaled<Config>>::type;

/// Where a row's statistic is: in [b, h_q, s_q], of packed batches [h_q, total_q]; `first` is that of the batch entry.
template <bool kVarlen, class Params>
FA_DEVICE int64_t statistic_of_row(const Params& params, int64_t first, int head, int position) {
  const int rows = kVarlen ? params.sequences.total_q : params.s_q;
  return first + static_cast<int64_t>(head) * rows + position;
}

/// A maximum in natural units, of one relative to a factor. A row without keys keeps -inf.
FA_DEVICE float natural_max(float max, float factor) {
  return max == -kInfinity ? -kInfinity : max * factor;
}

/// Raises the maximum of a head, which is -inf when the kernel starts. Whatever the order, the result is the same.
FA_DEVICE void raise_max(float* max, float value) {
  if (value == -kInfinity) return;
  const uint32_t bits = ptx::bits(value);
  // Floats are ordered as their bits, negative ones in the opposite order.
  if (static_cast<int32_t>(bits) >= 0) {
    ptx::red_max_s32(reinterpret_cast<int32_t*>(max), static_cast<int32_t>(bits));
  } else {
    ptx::red_min_u32(reinterpret_cast<uint32_t*>(max), bits);
  }
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_ROW_STATISTICS_CUH_
