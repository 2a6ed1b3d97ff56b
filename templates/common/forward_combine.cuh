#ifndef FA_TEMPLATES_COMMON_FORWARD_COMBINE_CUH_
#define FA_TEMPLATES_COMMON_FORWARD_COMBINE_CUH_

#include <common/accumulate.cuh>
#include <common/constants.cuh>
#include <common/forward_params.cuh>
#include <common/log_sum.cuh>
#include <common/partial_merge.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// Where row `row` of [b, h_q, s_q] is in a tensor.
template <class Params>
FA_DEVICE int64_t offset_of_row(const Params& params, int64_t row, int64_t stride_b, int64_t stride_h,
                                int64_t stride_s) {
  const int64_t head = row / params.s_q;
  return head / params.h_q * stride_b + head % params.h_q * stride_h + row % params.s_q * stride_s;
}

/// Merges the partial results of the splits of a query row: O = sum_i exp(lse_i - lse) O_i with
/// lse = log sum_i exp(lse_i), to which a sink adds its logit once. One warp a row; rows are numbered [b, h_q, s_q].
///
/// With kAccumulate it is added to the state that o and lse hold, as a kernel without splits adds its keys: a state
/// beside a large maximum has lost what its sum was.
///
/// Config: Element, kHeadDimV, kWarps; optionally Variant, kAccumulate and kOverlaps.
template <class Config>
FA_DEVICE void forward_combine(const ForwardParamsOf<Config>& params) {
  using T = typename Config::Element;
  const int64_t rows = static_cast<int64_t>(params.b) * params.h_q * params.s_q;
  const int64_t row = static_cast<int64_t>(ptx::block_index()) * Config::kWarps + ptx::thread_index() / kWarpSize;
  const int lane = ptx::thread_index() % kWarpSize;
  if (row >= rows) return;
  if constexpr (kOverlaps<Config>) ptx::griddepcontrol_wait();  // for the partial results

  PartialMerge<Config::kHeadDimV> merge;
  const auto index = [&](int i) { return i * rows + row; };
  merge.join_all(params.partial_lse, params.splits, index);
  [[maybe_unused]] float state = -kInfinity;
  if constexpr (kAccumulate<Config>) {
    state = state_lse(params.lse +
                      offset_of_row(params, row, params.stride_lse_b, params.stride_lse_h, params.stride_lse_s));
  }
  [[maybe_unused]] SplitSum sink;
  if constexpr (VariantOf<Config>::kSink) {
    sink = SplitSum::of_term(sink_of(params.variant, static_cast<int>(row / params.s_q % params.h_q)));
    merge.join(sink);
  }
  merge.begin();
  merge.add_all(params.partial_o, params.partial_lse, params.splits, index);
  if constexpr (VariantOf<Config>::kSink) merge.total.sum += merge.weight_of(sink);
  float inverse = merge.inverse_sum();
  float lse = merge.total.value();

  if constexpr (kAccumulate<Config>) {
    const Joined joined = join(lse, state);
    inverse *= joined.keys;
    lse = joined.lse;
    if (counts(joined.state)) {
      const T* const old = static_cast<const T*>(params.o) +
                           offset_of_row(params, row, params.stride_o_b, params.stride_o_h, params.stride_o_s);
      FA_UNROLL
      for (int slot = 0; slot < merge.kSlots; ++slot) {
        const int column = slot * kWarpSize + lane;
        if (column < Config::kHeadDimV) {
          merge.o[slot] = ptx::fma(merge.o[slot], inverse, joined.state * to_float(ptx::ld_global(old + column)));
        }
      }
      inverse = 1.f;
    }
    ptx::sync_warp();  // every lane has read the state's log-sum-exp, in whose place the result goes
  }
  const int position = static_cast<int>(row % params.s_q);
  const int head = static_cast<int>(row / params.s_q % params.h_q);
  const int batch = static_cast<int>(row / params.s_q / params.h_q);
  T* target =
      static_cast<T*>(params.o) + batch * params.stride_o_b + head * params.stride_o_h + position * params.stride_o_s;
  FA_UNROLL
  for (int slot = 0; slot < merge.kSlots; ++slot) {
    const int column = slot * kWarpSize + lane;
    if (column < Config::kHeadDimV) ptx::st_global(target + column, ptx::convert<T>(merge.o[slot] * inverse));
  }
  if (params.lse != nullptr && lane == 0) {
    ptx::st_global(
        params.lse + batch * params.stride_lse_b + head * params.stride_lse_h + position * params.stride_lse_s, lse);
  }
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_FORWARD_COMBINE_CUH_
