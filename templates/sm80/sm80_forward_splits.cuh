#ifndef FA_TEMPLATES_SM80_SM80_FORWARD_SPLITS_CUH_
#define FA_TEMPLATES_SM80_SM80_FORWARD_SPLITS_CUH_

#include <common/constants.cuh>
#include <common/fixed_splits.cuh>
#include <common/forward_schedule.cuh>
#include <common/online_softmax.cuh>
#include <common/work_lists.cuh>
#include <ptx/atomic.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <sm80/sm80_forward_epilogue.cuh>

namespace fa::sm80 {

using namespace kernel;

template <class Forward>
struct NotConst {
  using Type = Forward;
};
template <class Forward>
struct NotConst<const Forward> {
  using Type = Forward;
};

/// What the mma.sync forward does of fixed splits (common/fixed_splits.cuh). `Forward` may be const.
template <class Forward>
struct ForwardSplits {
  using Plain = typename NotConst<Forward>::Type;
  using Variant = typename Plain::Variant;
  static constexpr int kTileM = Plain::kTileM;
  static constexpr int kHeadDimV = Plain::kHeadDimV;
  static constexpr int kThreads = Plain::kThreads;
  static constexpr int kMTiles = Plain::kMTiles;
  static constexpr int kOTiles = Plain::kOTiles;
  static constexpr int kSplitKeys = Plain::kSplitKeys;
  static constexpr int kSplitTiles = kSplitKeys / Plain::kTileN;
  static constexpr bool kPackGqa = Plain::kPacks;
  static constexpr bool kShares = Plain::kShares;

  using Epilogue = ForwardEpilogue<Plain>;

  Forward& f;

  FA_DEVICE Epilogue epilogue() const { return {f}; }

  FA_DEVICE float* folded_floats() const {
    return f.params.partial_o +
           (static_cast<int64_t>(f.item()) * kFoldedFloats<kMTiles, kOTiles> * kThreads + f.thread);
  }

  /// What a row came to so far, of this thread's floats.
  static FA_DEVICE FoldedRow load_folded(const float* floats, int m, int r) {
    const float* const row = floats + (kMTiles * 4 * kOTiles + kSplitSumFloats * (2 * m + r)) * kThreads;
    return {{ptx::ld_global(row), ptx::ld_global(row + kThreads), ptx::ld_global(row + 2 * kThreads)}};
  }
  static FA_DEVICE void store_folded_row(float* floats, int m, int r, const FoldedRow& folded) {
    float* const row = floats + (kMTiles * 4 * kOTiles + kSplitSumFloats * (2 * m + r)) * kThreads;
    ptx::st_global(row, folded.total.high);
    ptx::st_global(row + kThreads, folded.total.low);
    ptx::st_global(row + 2 * kThreads, folded.total.sum);
  }

  /// Adds the split in registers, whose sums are finished, to a row of what is folded; `first`: nothing is. O goes to
  /// `put(n, e, o)`.
  template <class Put>
  FA_DEVICE FoldedRow fold_row(bool first, const float* floats, int m, int r, const Fragment<kMTiles, kOTiles>& o,
                               const OnlineSoftmax<kMTiles>& softmax, const Put& put) const {
    FoldedRow folded;
    if (!first) folded = load_folded(floats, m, r);
    const float inverse = epilogue().normaliser(softmax, m, r);
    const FoldedRow::Weights weights = folded.add(softmax.template log_sum<SplitSum>(m, r, f.softmax_scale_log2()));
    FA_UNROLL
    for (int n = 0; n < kOTiles; ++n) {
      FA_UNROLL
      for (int e = 2 * r; e < 2 * r + 2; ++e) {
        const float so_far = first ? 0.f : ptx::ld_global(floats + ((m * kOTiles + n) * 4 + e) * kThreads);
        put(n, e, FoldedRow::join(so_far, ptx::multiply(o[m][n][e], inverse), weights));
      }
    }
    return folded;
  }

  /// Puts a split that is complete to those before it, and starts anew.
  FA_DEVICE void fold_away(bool first, Fragment<kMTiles, kOTiles>& o, OnlineSoftmax<kMTiles>& softmax) const {
    softmax.finish();
    float* const floats = folded_floats();
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        const FoldedRow folded = fold_row(first, floats, m, r, o, softmax, [&](int n, int e, float value) {
          ptx::st_global(floats + ((m * kOTiles + n) * 4 + e) * kThreads, value);
          o[m][n][e] = 0.f;
        });
        store_folded_row(floats, m, r, folded);
      }
    }
    softmax = OnlineSoftmax<kMTiles>();
  }

  /// The last split of a block that walks over all of them, with those before it.
  FA_DEVICE void store_folded(const KvRange& range, Fragment<kMTiles, kOTiles>& o,
                              const OnlineSoftmax<kMTiles>& softmax) const {
    const bool first = kShares || range.begin >= range.end || f.split_at(range.begin) == f.split_at(range.end - 1);
    const float* const floats = first ? nullptr : folded_floats();
    ptx::sync_warp();  // this warp's Q has been read, whose place O takes
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        const FoldedRow folded =
            fold_row(first, floats, m, r, o, softmax, [&](int n, int e, float value) { o[m][n][e] = value; });
        const int row = f.fragment_row(m, r);
        const FoldedRow::Whole whole = folded.template whole<Variant>(f.params, f.rows.query_head(row));
        FA_UNROLL
        for (int n = 0; n < kOTiles; ++n) {
          Epilogue::stage_pair(
              f.q_shared + Plain::OWarpTile::offset(16 * m + 8 * r + f.lane / 4, 8 * n + 2 * (f.lane % 4)),
              folded_output(o[m][n][2 * r], whole.factor), folded_output(o[m][n][2 * r + 1], whole.factor));
        }
        if (f.params.lse != nullptr && row < f.row_count && f.lane % 4 == 0)
          ptx::st_global(epilogue().lse_row(row), whole.lse);
      }
    }
    ptx::sync_warp();  // all lanes have staged their rows of O
    epilogue().store_rows();
  }

  /// Of blocks that share a query tile's splits each takes every `sharing`th, from the last on, and leaves partial
  /// results. The last block to finish folds them. A tile with one split is stored by the first.
  FA_DEVICE void run(const KvRange& range) {
    const bool empty = range.begin >= range.end;
    const int first = empty ? 0 : f.split_at(range.begin);
    const int count = empty ? 0 : f.split_at(range.end - 1) - first + 1;
    const int sharing = f.params.sequences.wave < count ? f.params.sequences.wave : count;
    if (f.tile.split >= (sharing > 0 ? sharing : 1)) return;
    if (!empty) f.read_what_stays();
    if (count <= 1) {
      Fragment<kMTiles, kOTiles> o = {};
      OnlineSoftmax<kMTiles> softmax;
      if (!empty) f.attend(range, o, softmax);
      softmax.finish();
      const Plain stored(f.params, f.index);
      ForwardSplits<const Plain>{stored}.store_folded(range, o, softmax);
      return;
    }
    for (int split = count - 1 - f.tile.split; split >= 0; split -= sharing) {
      KvRange part = range;
      const int begin = (first + split) * kSplitTiles;
      if (part.begin < begin) part.begin = begin;
      if (part.end > begin + kSplitTiles) part.end = begin + kSplitTiles;
      Fragment<kMTiles, kOTiles> o = {};
      OnlineSoftmax<kMTiles> softmax;
      f.attend(part, o, softmax);
      softmax.finish();
      store_split(split, o, softmax);
      ptx::sync_threads();  // the buffers of this split have been left
    }
    fold_if_last(count, sharing);
  }

  /// Of a partial result: [tiles, splits, rows] in partial_o and partial_lse.
  FA_DEVICE int64_t split_row(int split, int row) const {
    const int64_t query_tile = f.item() / f.params.sequences.wave;
    const int rows_each = kPackGqa ? f.params.group : 1;
    return (query_tile * most_splits<kSplitKeys>(f.params) + split) * partial_rows<kTileM>(f.params, rows_each) +
           (row - f.block_row);
  }

  FA_DEVICE void store_split(int split, const Fragment<kMTiles, kOTiles>& o,
                             const OnlineSoftmax<kMTiles>& softmax) const {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int row = f.fragment_row(m, r);
        if (row >= f.row_count) continue;
        const float inverse = epilogue().normaliser(softmax, m, r);
        const int64_t to = split_row(split, row);
        FA_UNROLL
        for (int n = 0; n < kOTiles; ++n) {
          float* const target = f.params.partial_o + to * kHeadDimV + 8 * n + 2 * (f.lane % 4);
          ptx::st_global(target, ptx::multiply(o[m][n][2 * r], inverse));
          ptx::st_global(target + 1, ptx::multiply(o[m][n][2 * r + 1], inverse));
        }
        if (f.lane % 4 == 0)
          softmax.template log_sum<SplitSum>(m, r, f.softmax_scale_log2()).store(f.params.partial_lse, to);
      }
    }
  }

  FA_DEVICE void fold_if_last(int splits, int sharing) const {
    if (sharing > 1) {
      if (f.thread == 0) {
        const int before = ptx::atomic_add_acq_rel_global(f.params.next_tile + f.item() / f.params.sequences.wave, 1);
        ptx::st_shared_b32(f.shared, static_cast<uint32_t>(before));
      }
      ptx::sync_threads();  // all know how many blocks came before, whose partial results can be read
      if (static_cast<int>(ptx::ld_shared_b32(f.shared)) != sharing - 1) return;
    }
    const int end = f.block_row + kTileM < f.row_count ? f.block_row + kTileM : f.row_count;
    for (int row = f.block_row + f.warp; row < end; row += Plain::kWarpCount) {
      fold_splits<typename Plain::T, Variant, kHeadDimV>(f.params, splits, typename Epilogue::MergedRow{f, row},
                                                         [&](int i) { return split_row(i, row); });
    }
  }
};

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_FORWARD_SPLITS_CUH_
