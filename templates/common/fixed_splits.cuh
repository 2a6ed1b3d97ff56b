#ifndef FA_TEMPLATES_COMMON_FIXED_SPLITS_CUH_
#define FA_TEMPLATES_COMMON_FIXED_SPLITS_CUH_

#include <common/constants.cuh>
#include <common/forward_params.cuh>
#include <common/forward_schedule.cuh>
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

  /// O of the split is normalised, or else as its products left it.
  template <bool kNormalised = true>
  FA_DEVICE Weights add(const SplitSum& split) {
    if (split.sum == 0.f) return {1.f, 0.f};
    const SplitSum base = split.is_above(total) ? split : total;
    const float over = split.over(base);
    const float sum = ptx::multiply(over, split.sum);
    const Weights weights{total.sum == 0.f ? 0.f : total.over(base), kNormalised ? sum : over};
    total = {base.high, base.low, ptx::fma(total.sum, weights.so_far, sum)};
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
/// Done by a warp, with the loads of kAhead results in flight.
template <class T, class Variant, int kHeadDimV, bool kNormalised = true, int kAhead = 1, class Params, class Row,
          class Index>
FA_DEVICE void fold_splits(const Params& params, int splits, const Row& row, Index index) {
  const int lane = ptx::thread_index() % kWarpSize;
  constexpr int kSlots = ceil_div(kHeadDimV, kWarpSize);
  FoldedRow folded;
  float o[kSlots] = {};
  FA_UNROLL_BY(1)
  for (int last = splits - 1; last >= 0; last -= kAhead) {
    SplitSum own = SplitSum::of_no_keys();  // of split last - lane
    const int place = kAhead == 1 ? 0 : lane;
    if (place < kAhead && place <= last) own = SplitSum::load(params.partial_lse, index(last - place));
    float partial[kAhead][kSlots] = {};
    FA_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      if (last < i) continue;
      const int64_t at = index(last - i);
      FA_UNROLL
      for (int slot = 0; slot < kSlots; ++slot) {
        const int column = slot * kWarpSize + lane;
        if (column < kHeadDimV) partial[i][slot] = ptx::ld_global(params.partial_o + at * kHeadDimV + column);
      }
    }
    FA_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      const SplitSum sums = kAhead == 1 ? own : own.of_lane(i);
      const FoldedRow::Weights weights = folded.add<kNormalised>(sums);
      FA_UNROLL
      for (int slot = 0; slot < kSlots; ++slot) {
        if (slot * kWarpSize + lane < kHeadDimV) o[slot] = FoldedRow::join(o[slot], partial[i][slot], weights);
      }
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

/// Splits of a query tile whose KV tiles are `range`, from that of position 0 on.
template <int kSplitTiles>
FA_DEVICE int splits_of(const KvRange& range) {
  return ceil_div(range.end, kSplitTiles);
}

/// The first split of block `share` where `shares` have those of a query tile: the nearest to an even share of its KV
/// tiles, as the last split may be short. Where there are fewer splits than blocks, the first blocks have one.
template <int kSplitTiles>
FA_DEVICE int start_of_share(int tiles, int shares, int share) {
  const int splits = ceil_div(tiles, kSplitTiles);
  if (splits < 2 * shares || share == shares) return start_of_part(splits, shares, share);
  return static_cast<int>((2 * int64_t{share} * tiles + shares * kSplitTiles) / (2 * shares * kSplitTiles));
}

/// The part of block `share`, one behind the other.
template <int kSplitTiles>
FA_DEVICE KvRange shared_splits(KvRange range, int shares, int share) {
  const int end = start_of_share<kSplitTiles>(range.end, shares, share + 1) * kSplitTiles;
  range.begin = start_of_share<kSplitTiles>(range.end, shares, share) * kSplitTiles;
  if (range.end > end) range.end = end;
  return range;
}

/// Splits that a query tile of the call may have, at most.
template <int kSplitKeys>
FA_DEVICE int most_splits(const ForwardParams& params) {
  return ceil_div(params.s_kv, kSplitKeys);
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_FIXED_SPLITS_CUH_
