#ifndef FA_TEMPLATES_COMMON_FIXED_SPLITS_CUH_
#define FA_TEMPLATES_COMMON_FIXED_SPLITS_CUH_

#include <common/constants.cuh>
#include <common/forward_params.cuh>
#include <common/log_sum.cuh>
#include <common/variant.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

// Splits of a fixed size (kSplitKeys, docs/invariance.md). The softmax of keys [i kSplitKeys, (i + 1) kSplitKeys) of a
// row is formed alone, as a normalised O and its log-sum-exp. What a row comes to is a fold over these, from the last
// split to the first. A block that walks all keys does it, and one that finds the partial results of others, by the
// same operations in the same order. A split without keys changes nothing: how many of them are folded is free.
namespace fa::kernel {

/// A row of O, and of the denominator, relative to the greatest number that a sum of its splits so far is relative to.
struct FoldedRow {
  SplitSum total = SplitSum::of_no_keys();

  /// What O so far is multiplied with, and the O of the split that is added.
  struct Weights {
    float so_far, split;
  };

  FA_DEVICE Weights add(const SplitSum& split) {
    if (split.sum == 0.f) return {1.f, 0.f};
    const SplitSum base = split.is_above(total) ? split : total;
    const Weights weights{total.sum == 0.f ? 0.f : total.over(base), ptx::multiply(split.over(base), split.sum)};
    total = {base.high, base.low, ptx::fma(total.sum, weights.so_far, weights.split)};
    return weights;
  }

  FA_DEVICE static float join(float so_far, float split, const Weights& weights) {
    return ptx::fma(split, weights.split, ptx::multiply(so_far, weights.so_far));
  }

  FA_DEVICE float inverse_sum() const { return total.sum == 0.f ? 0.f : 1.f / total.sum; }

  /// What O is multiplied with, and the log-sum-exp, of a row whose head has a sink or none.
  struct Whole {
    float factor, lse;
  };
  template <class Variant, class Params>
  FA_DEVICE Whole whole(const Params& params, int head) const {
    Whole result{inverse_sum(), total.value()};
    if constexpr (Variant::kSink) {
      const float keys = result.lse;
      result.lse = log_add(keys, sink_of(params.variant, head));
      result.factor = ptx::multiply(result.factor, weight_of(keys, result.lse));
    }
    return result;
  }
};

/// O as it is rounded: a zero is +0, whichever tiles without keys were added to it.
FA_DEVICE float folded_output(float o, float factor) {
  return ptx::multiply(o, factor) + 0.f;
}

/// Folds the partial results of a query row, `splits` of them, which lie at `index(i)` of partial_o and partial_lse.
/// Done by a warp.
template <class T, class Variant, int kHeadDimV, class Params, class Row, class Index>
FA_DEVICE void fold_splits(const Params& params, int splits, const Row& row, Index index) {
  const int lane = ptx::thread_index() % kWarpSize;
  constexpr int kSlots = ceil_div(kHeadDimV, kWarpSize);
  FoldedRow folded;
  float o[kSlots] = {};
  for (int i = splits - 1; i >= 0; --i) {
    const FoldedRow::Weights weights = folded.add(SplitSum::load(params.partial_lse, index(i)));
    const float* const partial = params.partial_o + index(i) * kHeadDimV;  // [d_v]
    FA_UNROLL
    for (int slot = 0; slot < kSlots; ++slot) {
      const int column = slot * kWarpSize + lane;
      if (column < kHeadDimV) o[slot] = FoldedRow::join(o[slot], ptx::ld_global(partial + column), weights);
    }
  }
  const FoldedRow::Whole whole = folded.template whole<Variant>(params, row.head());
  T* const target = static_cast<T*>(params.o) + row.offset(params.stride_o_b, params.stride_o_h, params.stride_o_s);
  FA_UNROLL
  for (int slot = 0; slot < kSlots; ++slot) {
    const int column = slot * kWarpSize + lane;
    if (column < kHeadDimV) ptx::st_global(target + column, ptx::convert<T>(folded_output(o[slot], whole.factor)));
  }
  if (params.lse != nullptr && lane == 0) {
    ptx::st_global(params.lse + row.offset(params.stride_lse_b, params.stride_lse_h, params.stride_lse_s), whole.lse);
  }
}

/// Floats of a thread in partial_o, [blocks, floats, threads], where what is folded so far waits for the next split.
template <int kMTiles, int kOTiles>
inline constexpr int kFoldedFloats = kMTiles*(4 * kOTiles + 2 * kSplitSumFloats);

/// Splits that a query tile of the call may have, at most.
template <int kSplitKeys>
FA_DEVICE int most_splits(const ForwardParams& params) {
  return ceil_div(params.s_kv, kSplitKeys);
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_FIXED_SPLITS_CUH_
