#ifndef FA_TEMPLATES_COMMON_FORWARD_COMBINE_CUH_
#define FA_TEMPLATES_COMMON_FORWARD_COMBINE_CUH_

#include <common/constants.cuh>
#include <common/forward_params.cuh>
#include <common/log_sum.cuh>
#include <common/variant.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// Merges the partial results of the splits of a query row: O = sum_i exp(lse_i - lse) O_i with
/// lse = log sum_i exp(lse_i), to which a sink adds its logit once. One warp a row; rows are numbered [b, h_q, s_q].
///
/// Config: Element, kHeadDimV, kWarps, Variant (optional).
template <class Config>
FA_DEVICE void forward_combine(const ForwardParamsOf<Config>& params) {
  using T = typename Config::Element;
  const int64_t rows = static_cast<int64_t>(params.b) * params.h_q * params.s_q;
  const int64_t row = static_cast<int64_t>(ptx::block_index()) * Config::kWarps + ptx::thread_index() / kWarpSize;
  const int lane = ptx::thread_index() % kWarpSize;
  if (row >= rows) return;

  LogSum base{0.f, 0.f};  // the greatest
  float largest = -kInfinity;
  bool has_nan = false;
  const auto join = [&](const LogSum& part) {
    const float lse = part.value();
    if (lse > largest) base = part;
    largest = ptx::max(largest, lse);
    has_nan = has_nan || lse != lse;
  };
  for (int i = 0; i < params.splits; ++i) join(LogSum::load(params.partial_lse, i * rows + row));
  [[maybe_unused]] LogSum sink{-kInfinity, 0.f};
  if constexpr (VariantOf<Config>::kSink) {
    sink.high = sink_of(params.variant, static_cast<int>(row / params.s_q % params.h_q));
    join(sink);
  }
  float sum = has_nan ? kInfinity - kInfinity : 0.f;  // max drops a NaN, so it is carried here
  constexpr int kSlots = ceil_div(Config::kHeadDimV, kWarpSize);
  float o[kSlots] = {};
  for (int i = 0; i < params.splits; ++i) {
    const float weight = LogSum::load(params.partial_lse, i * rows + row).over(base);
    sum += weight;
    const float* partial = params.partial_o + (i * rows + row) * Config::kHeadDimV;  // [d_v]
    FA_UNROLL
    for (int slot = 0; slot < kSlots; ++slot) {
      const int column = slot * kWarpSize + lane;
      if (column < Config::kHeadDimV) o[slot] += weight * ptx::ld_global(partial + column);
    }
  }

  if constexpr (VariantOf<Config>::kSink) sum += sink.over(base);
  const int position = static_cast<int>(row % params.s_q);
  const int head = static_cast<int>(row / params.s_q % params.h_q);
  const int batch = static_cast<int>(row / params.s_q / params.h_q);
  const float inverse = sum == 0.f ? 0.f : 1.f / sum;
  T* target =
      static_cast<T*>(params.o) + batch * params.stride_o_b + head * params.stride_o_h + position * params.stride_o_s;
  FA_UNROLL
  for (int slot = 0; slot < kSlots; ++slot) {
    const int column = slot * kWarpSize + lane;
    if (column < Config::kHeadDimV) ptx::st_global(target + column, ptx::convert<T>(o[slot] * inverse));
  }
  if (params.lse != nullptr && lane == 0) {
    ptx::st_global(
        params.lse + batch * params.stride_lse_b + head * params.stride_lse_h + position * params.stride_lse_s,
        sum == 0.f ? -kInfinity : base.high + (base.low + kLn2 * ptx::lg2(sum)));
  }
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_FORWARD_COMBINE_CUH_
