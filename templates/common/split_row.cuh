#ifndef FA_TEMPLATES_COMMON_SPLIT_ROW_CUH_
#define FA_TEMPLATES_COMMON_SPLIT_ROW_CUH_

#include <common/constants.cuh>
#include <common/forward_params.cuh>
#include <common/log_sum.cuh>
#include <common/partial_merge.cuh>
#include <common/variant.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// Merges the partial results of a query row, in their order: O = sum_i exp(lse_i - lse) O_i with
/// lse = log sum_i exp(lse_i), to which a sink adds its logit once, as forward_combine does. Done by a warp. `index(i)`
/// is where the row of partial result i lies; `row` says its query head, and where it lies in o and lse, in elements.
template <class T, class Variant, int kHeadDimV, class Params, class Row, class Index>
FA_DEVICE void merge_splits(const Params& params, int splits, const Row& row, Index index) {
  PartialMerge<kHeadDimV> merge;
  merge.join_all(params.partial_o, params.partial_lse, splits, index);
  [[maybe_unused]] SplitSum sink;
  if constexpr (Variant::kSink) {
    sink = SplitSum::of_term(sink_of(params.variant, row.head()));
    merge.join(sink);
  }
  merge.begin();
  merge.add_all(params.partial_o, params.partial_lse, splits, index);
  if constexpr (Variant::kSink) merge.total.sum += merge.weight_of(sink);
  const float inverse = merge.inverse_sum();
  T* target = static_cast<T*>(params.o) + row.offset(params.stride_o_b, params.stride_o_h, params.stride_o_s);
  FA_UNROLL
  for (int slot = 0; slot < merge.kSlots; ++slot) {
    const int column = merge.column_of(slot);
    if (column < kHeadDimV) ptx::st_global(target + column, ptx::convert<T>(merge.o[slot] * inverse));
  }
  if (params.lse != nullptr && merge.lane == 0) {
    ptx::st_global(params.lse + row.offset(params.stride_lse_b, params.stride_lse_h, params.stride_lse_s),
                   merge.total.value());
  }
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_SPLIT_ROW_CUH_
