#ifndef FA_TEMPLATES_COMMON_FORWARD_COMBINE_CUH_
#define FA_TEMPLATES_COMMON_FORWARD_COMBINE_CUH_

#include <common/accumulate.cuh>
#include <common/constants.cuh>
#include <common/encode.cuh>
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

/// Merges the partial results of the splits of a query row: O = sum_i exp(lse_i - lse) O_i with
/// lse = log sum_i exp(lse_i), to which a sink adds its logit once. Rows are numbered [b, h_q, s_q]. kWarpsOfRow warps
/// have 32 columns each, and all of a row's loads are in flight together: a merge takes as long as one of them.
///
/// With kAccumulate it is added to the state that o and lse hold, as a kernel without splits adds its keys: a state
/// beside a large maximum has lost what its sum was. A warp has the row then, whose result takes the state's place.
///
/// Config: Element, kHeadDimV, kWarps; optionally Variant, kAccumulate and kOverlaps.
template <class Config>
struct ForwardCombine {
  using T = typename Config::Element;
  using Params = ForwardParamsOf<Config>;
  static constexpr int kWarpsOfRow = combine_warps(Config::kHeadDimV, kAccumulate<Config>);
  static constexpr int kColumnsOfLane = ceil_div(ceil_div(Config::kHeadDimV, kWarpSize), kWarpsOfRow);
  using Even = typename Either<EvenFold<Config::kHeadDimV>, EvenMerge<Config::kHeadDimV>, kFoldsSplits<Config>>::type;
  using Merge = typename Either<PartialMerge<Config::kHeadDimV, kColumnsOfLane>, Even, kAccumulate<Config>>::type;
  static_assert(!kFoldsSplits<Config> || !kAccumulate<Config>, "a fold has no state before it");

  const Params& params;
  const int64_t rows;
  const int64_t row;
  const int slice;  // of the row's columns
  int batch, head, position;
  T* o;
  float* lse;

  FA_DEVICE explicit ForwardCombine(const Params& p) : ForwardCombine(p, own_warp() / kWarpsOfRow) {}
  FA_DEVICE ForwardCombine(const Params& p, int64_t of)
      : params(p), rows(int64_t{p.b} * p.h_q * p.s_q), row(of), slice(static_cast<int>(own_warp() % kWarpsOfRow)) {
    const int64_t of_head = row / p.s_q;
    position = static_cast<int>(row - of_head * p.s_q);
    batch = static_cast<int>(of_head / p.h_q);
    head = static_cast<int>(of_head - int64_t{batch} * p.h_q);
    o = static_cast<T*>(p.o) + batch * p.stride_o_b + head * p.stride_o_h + position * p.stride_o_s;
    lse = p.lse + batch * p.stride_lse_b + head * p.stride_lse_h + position * p.stride_lse_s;
  }

  FA_DEVICE void run() const {
    if constexpr (kAccumulate<Config>) {
      start(merges_few_rows(params), false);
      if (row < rows) add_to_state();
    } else if (kFoldsSplits<Config> && params.merge.some_whole) {
      start(false, false);
      if constexpr (kFoldsSplits<Config>) fold_rows_left();
    } else {
      // Found ahead of the wait. What comes behind it is a trip to the L2 cache, and little else.
      Merge merge = merge_of_row();
      int few = merges_few_rows(params) ? 1 : 0;
      ptx::compute_ahead(few);
      if (row >= rows) return;  // other warps of the block wait
      start(few != 0, params.merge.beside_lone);
      if constexpr (kFoldsSplits<Config>) {
        fold(merge);
      } else {
        merge.join_all();
        [[maybe_unused]] const SplitSum sink = join_sink(merge);
        merge.begin();
        merge.add_all();
        if constexpr (VariantOf<Config>::kSink) merge.total.sum += merge.weight_of(sink);
        store(merge, -kInfinity);
      }
    }
  }

 private:
  static FA_DEVICE int64_t own_warp() {
    return static_cast<int64_t>(ptx::block_index()) * Config::kWarps + ptx::thread_index() / kWarpSize;
  }

  FA_DEVICE Merge merge_of_row() const {
    return Merge(params.partial_o, params.partial_lse, slice * kWarpSize, row, rows, params.splits);
  }

  /// Of no more blocks than run at once: the rows that are not whole. Each lane looks at one.
  FA_DEVICE void fold_rows_left() const {
    const int64_t step = int64_t{ptx::block_count()} * Config::kWarps / kWarpsOfRow;  // or all rows in one
    FA_UNROLL_BY(1)
    for (int64_t first = row; first < rows; first += kWarpSize * step) {
      const int64_t own = first + ptx::thread_index() % kWarpSize * step;
      const bool left = own < rows && !SplitSum::is_of_whole(params.partial_lse, (params.splits - 1) * rows + own);
      uint32_t wanted = ptx::vote_ballot(left);
      FA_UNROLL_BY(1)
      for (int i = 0; i < kWarpSize && wanted != 0; ++i) {
        const ForwardCombine next(params, first + ptx::popc((wanted & (0 - wanted)) - 1) * step);
        wanted &= wanted - 1;
        Merge merge = next.merge_of_row();
        next.fold(merge);
      }
    }
  }

  FA_DEVICE void fold(Merge& merge) const {
    merge.load_first();
    merge.add_all();
    store_folded(merge);
  }

  /// `alone`: blocks of the next forward find no place before those of this one leave theirs, one each.
  FA_DEVICE void start(bool few, bool alone) const {
    if constexpr (kOverlaps<Config>) {
      if (alone) ptx::griddepcontrol_launch_dependents();
      ptx::griddepcontrol_wait();                        // for the partial results
      if (few) ptx::griddepcontrol_launch_dependents();  // what is left takes no time
    }
  }

  FA_DEVICE void add_to_state() const {
    Merge merge;
    const auto index = [&](int i) { return i * rows + row; };
    merge.join_all(params.partial_o, params.partial_lse, params.splits, index);
    const float state = state_lse(lse);
    [[maybe_unused]] const SplitSum sink = join_sink(merge);
    merge.begin();
    merge.add_all(params.partial_o, params.partial_lse, params.splits, index);
    if constexpr (VariantOf<Config>::kSink) merge.total.sum += merge.weight_of(sink);
    store(merge, state);
  }

  FA_DEVICE SplitSum join_sink([[maybe_unused]] Merge& merge) const {
    SplitSum sink = SplitSum::of_no_keys();
    if constexpr (VariantOf<Config>::kSink) {
      sink = SplitSum::of_term(sink_of(params.variant, head));
      merge.join(sink);
    }
    return sink;
  }

  FA_DEVICE void store_folded(const Merge& merge) const {
    const FoldedRow::Whole whole = merge.folded.template whole<VariantOf<Config>>(params, head);
    const int column = merge.column_of(0);
    if (column < Config::kHeadDimV)
      ptx::st_global(o + column, element_of(T{}, folded_output(merge.o[0], whole.factor)));
    if (params.lse != nullptr && slice == 0 && merge.lane == 0) ptx::st_global(lse, whole.lse);
  }

  FA_DEVICE void store(Merge& merge, [[maybe_unused]] float state) const {
    float inverse = merge.inverse_sum();
    float whole = merge.total.value();
    if constexpr (kAccumulate<Config>) {
      const Joined joined = join(whole, state);
      inverse *= joined.keys;
      whole = joined.lse;
      if (counts(joined.state)) {
        FA_UNROLL
        for (int slot = 0; slot < merge.kSlots; ++slot) {
          const int column = merge.column_of(slot);
          if (column >= Config::kHeadDimV) continue;
          merge.o[slot] = ptx::fma(merge.o[slot], inverse, joined.state * to_float(ptx::ld_global(o + column)));
        }
        inverse = 1.f;
      }
      ptx::sync_warp();  // every lane has read the state's log-sum-exp, in whose place the result goes
    }
    FA_UNROLL
    for (int slot = 0; slot < merge.kSlots; ++slot) {
      const int column = merge.column_of(slot);
      if (column < Config::kHeadDimV) ptx::st_global(o + column, element_of(T{}, merge.o[slot] * inverse));
    }
    if (params.lse != nullptr && slice == 0 && merge.lane == 0) ptx::st_global(lse, whole);
  }
};

template <class Config>
FA_DEVICE void forward_combine(const ForwardParamsOf<Config>& params) {
  ForwardCombine<Config>(params).run();
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_FORWARD_COMBINE_CUH_
