#ifndef FA_TEMPLATES_SM90_SM90_FIXED_SPLITS_CUH_
#define FA_TEMPLATES_SM90_SM90_FIXED_SPLITS_CUH_

#include <common/fixed_splits.cuh>
#include <common/flags.cuh>
#include <common/work_lists.cuh>
#include <ptx/atomic.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <sm90/sm90_epilogue.cuh>
#include <sm90/sm90_pieces.cuh>
#include <sm90/sm90_roles.cuh>

namespace fa::sm90 {

/// O of the splits of a query tile that are folded.
template <int kCount>
struct FoldedSplits {
  float o[kCount];
};
/// Where blocks share them: the sums of the split whose O is in the making.
struct SharedSplit {
  kernel::SplitSum sums[2];
};

/// What ends a split of a fixed size (common/fixed_splits.cuh). Its O is folded as the products left it.
template <class Traits>
struct FixedSplits {
  using Epilogue = sm90::Epilogue<Traits>;
  using Config = typename Traits::Config;
  using Variant = typename Traits::Variant;
  using Softmax = typename Traits::Softmax;
  using O = typename Traits::O;
  using Query = typename Traits::Query;
  using Rows = typename Traits::Rows;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kHeadDimV = Traits::kHeadDimV;
  static constexpr bool kShares = Traits::kShares;
  static constexpr int kCount = kHeadDimV / 2;
  static constexpr int kThreads = Traits::kConsumers * kWarpgroup;
  static constexpr int kAhead = 16;  // partial results of a row on their way
  using Folded = typename kernel::Either<SharedSplit, FoldedSplits<kCount>, kShares>::type;

  const Epilogue& to;

  FA_DEVICE int first_row(const Query& query, int warp_row, int lane) const {
    return to.first_row_of(query) + warp_row + lane / 4;
  }

  // Beside O that is folded, of each row wait in shared memory: the sums of all splits so far, and what O is to be
  // multiplied with where that of the last of them is added.
  FA_DEVICE uint32_t sums_shared(int warp_row, int lane, int r) const {
    return to.shared + Traits::kLayout.split_sums + 16 * (kTileM + warp_row + lane / 4 + 8 * r);
  }
  FA_DEVICE uint32_t weights_shared(int warp_row, int lane, int r) const {
    return to.shared + Traits::kLayout.split_sums + 16 * (warp_row + lane / 4 + 8 * r);
  }
  FA_DEVICE static kernel::SplitSum load_sums(uint32_t address) {
    const kernel::Chunk words = ptx::ld_shared_chunk(address);
    return {ptx::from_bits(words.word[0]), ptx::from_bits(words.word[1]), ptx::from_bits(words.word[2])};
  }
  FA_DEVICE static void store_sums(uint32_t address, const kernel::SplitSum& sum) {
    ptx::st_shared_chunk(address, {{ptx::bits(sum.high), ptx::bits(sum.low), ptx::bits(sum.sum), 0}});
  }
  // left: there is a split whose O waits to be added. A register for that would spill another.
  FA_DEVICE static void store_weights(uint32_t address, const kernel::FoldedRow::Weights& weights, bool left) {
    ptx::st_shared_chunk(address, {{ptx::bits(weights.so_far), ptx::bits(weights.split), left ? 1U : 0U, 0}});
  }

  /// Nothing is folded.
  FA_DEVICE void begin(O& folded, int warp_row, int lane) const {
    FA_UNROLL
    for (int i = 0; i < kCount; ++i) folded[i] = 0.f;
    if (lane % 4 == 0) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        store_sums(sums_shared(warp_row, lane, r), kernel::SplitSum::of_no_keys());
        store_weights(weights_shared(warp_row, lane, r), {1.f, 0.f}, false);
      }
    }
    ptx::sync_warp();  // the sums are there
  }

  /// The sums of a split are complete, before its O is.
  FA_DEVICE void finish(Softmax& softmax, [[maybe_unused]] Folded& folded, int warp_row, int lane) const {
    softmax.finish();
    kernel::SplitSum sums[2];
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      sums[r] = softmax.template log_sum<kernel::SplitSum>(r, to.softmax_scale_log2());
      if constexpr (kShares) folded.sums[r] = sums[r];
    }
    if constexpr (!kShares) add_sums(sums, warp_row, lane);
  }

  FA_DEVICE void add_sums(const kernel::SplitSum (&sums)[2], int warp_row, int lane) const {
    kernel::FoldedRow rows[2];
    FA_UNROLL
    for (int r = 0; r < 2; ++r) rows[r].total = load_sums(sums_shared(warp_row, lane, r));
    ptx::sync_warp();  // all lanes have read these sums, and the weights of the split before
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const kernel::FoldedRow::Weights weights = rows[r].template add<false>(sums[r]);
      if (lane % 4 != 0) continue;
      store_sums(sums_shared(warp_row, lane, r), rows[r].total);
      store_weights(weights_shared(warp_row, lane, r), weights, true);
    }
  }

  /// Stores the log-sum-exp of a row; the factor of its O.
  FA_DEVICE float finish_row(const kernel::FoldedRow& row_sum, const Query& query, int row, int lane) const {
    const Rows rows{to.params.group, query.tile.head};
    const kernel::FoldedRow::Whole whole = row_sum.template whole<Variant>(to.params, rows.query_head(row));
    if (to.params.lse != nullptr && lane % 4 == 0 && to.has_row(query, row))
      ptx::st_global(to.lse_row(query, rows, row), whole.lse);
    return whole.factor;
  }

  /// Adds O of a split to that of those before, where one is left to be added.
  FA_DEVICE void fold_if_left(const O& o, O& folded, int warp_row, int lane) const {
    ptx::sync_warp();  // the weights are there
    kernel::FoldedRow::Weights weights[2];
    bool left = false;
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const kernel::Chunk words = ptx::ld_shared_chunk(weights_shared(warp_row, lane, r));
      weights[r] = {ptx::from_bits(words.word[0]), ptx::from_bits(words.word[1])};
      left = words.word[2] != 0;
    }
    if (!left) return;
    FA_UNROLL
    for (int i = 0; i < kCount; ++i) folded[i] = kernel::FoldedRow::join(folded[i], o[i], weights[i / 2 % 2]);
  }

  /// The same of a query tile's last split: O leaves, and nothing is folded.
  FA_DEVICE void fold_last(O& o, O& folded, const Query& query, int warp_row, int lane, int q_buffer) const {
    fold_if_left(o, folded, warp_row, lane);
    kernel::FoldedRow rows[2];
    FA_UNROLL
    for (int r = 0; r < 2; ++r) rows[r].total = load_sums(sums_shared(warp_row, lane, r));
    ptx::sync_warp();  // all lanes have read the sums
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const float factor = finish_row(rows[r], query, first_row(query, warp_row, lane) + 8 * r, lane);
      FA_UNROLL
      for (int i = 2 * r; i < kCount; i += (i % 2 == 0 ? 1 : 3)) o[i] = kernel::folded_output(folded[i], factor);
    }
    begin(folded, warp_row, lane);
    if constexpr (Traits::kStageO) {
      to.store_staged(o, query, warp_row, lane, Traits::kQBuffers - 1 - q_buffer);
    } else {
      to.store_rows(o, query, to.first_row_of(query) + warp_row, lane);
    }
  }

  /// Of blocks that share a query tile's splits: leaves one of them. The block of the last ones folds all; a tile with
  /// one split is stored at once. Called by all consumers; `ends`: this block has no other split of the tile.
  FA_DEVICE void store_split(O& o, const Folded& folded, const Query& query, int split, bool ends, int warp_row,
                             int lane) const {
    const int splits = to.splits_of_tile(query);
    if (splits == 1) {
      float factor[2];
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        kernel::FoldedRow whole;
        whole.template add<false>(folded.sums[r]);
        factor[r] = finish_row(whole, query, first_row(query, warp_row, lane) + 8 * r, lane);
      }
      FA_UNROLL
      for (int i = 0; i < kCount; ++i) o[i] = kernel::folded_output(o[i], factor[i / 2 % 2]);
      to.store_rows(o, query, to.first_row_of(query) + warp_row, lane);
      return;
    }
    leave_split(o, folded, query, split, warp_row, lane);
    if (!ends) return;
    fold_if_last(query, splits);
    FA_UNROLL
    for (int i = 0; i < kCount; ++i) o[i] = 0.f;  // what is overwritten took registers of the fold else
  }

  FA_DEVICE int64_t tile_number(const Query& query) const {
    const kernel::ForwardTile& tile = query.tile;
    if constexpr (Traits::kVarlen) {
      const int rows_each = Config::kPackGqa ? to.params.group : 1;
      const int slot = query.sequence.first_row * rows_each / kTileM + tile.batch + tile.m_block;
      return static_cast<int64_t>(tile.head) * to.params.m_blocks + slot;
    } else {
      return (static_cast<int64_t>(tile.batch) * to.params.heads + tile.head) * to.params.m_blocks + tile.m_block;
    }
  }

  /// Of a partial result: [tiles, splits, rows] in partial_o and partial_lse.
  FA_DEVICE int64_t split_row(const Query& query, int split, int row) const {
    const int rows_each = Config::kPackGqa ? to.params.group : 1;
    return (tile_number(query) * kernel::most_splits<Traits::kSplitKeys>(to.params) + split) *
               kernel::partial_rows<kTileM>(to.params, rows_each) +
           (row - query.tile.m_block * kTileM);
  }

  FA_DEVICE void leave_split(const O& o, const Folded& folded, const Query& query, int split, int warp_row,
                             int lane) const {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = first_row(query, warp_row, lane) + 8 * r;
      if (!to.has_row(query, row)) continue;
      const int64_t at = split_row(query, split, row);
      float* const target = to.params.partial_o + at * kHeadDimV + 2 * (lane % 4);
      FA_UNROLL
      for (int j = 0; j < kHeadDimV / 8; ++j) {
        ptx::st_global(target + 8 * j, o[4 * j + 2 * r]);
        ptx::st_global(target + 8 * j + 1, o[4 * j + 2 * r + 1]);
      }
      if (lane % 4 == 0) folded.sums[r].store(to.params.partial_lse, at);
    }
  }

  FA_DEVICE void fold_if_last(const Query& query, int splits) const {
    constexpr int kBarrier = first_of(NamedBarrier::whole_splits);
    const int thread = ptx::thread_index() - kWarpgroup;
    const int last = (splits < to.params.splits ? splits : to.params.splits) - 1;  // of the tile's blocks
    const int block = query.tile.split;
    ptx::barrier_sync(kBarrier, kThreads);  // the block's partial rows are written
    if (last > 0) {
      uint64_t* const flags = to.params.split_flags + tile_number(query) * to.params.splits;
      if (block != last) {
        if (thread == 0) ptx::raise_flag_global(flags + block, kernel::kFlagUp);
        return;
      }
      if (thread < kernel::kWarpSize) kernel::await_flags(flags, last);
      ptx::barrier_sync(kBarrier, kThreads);  // the others' partial rows can be read
    }
    const int rows = to.row_count(query);
    const int first = query.tile.m_block * kTileM;
    const int end = first + kTileM < rows ? first + kTileM : rows;
    FA_UNROLL_BY(1)
    for (int row = first + thread / kernel::kWarpSize; row < end; row += kThreads / kernel::kWarpSize) {
      kernel::fold_splits<typename Traits::T, Variant, kHeadDimV, false, kAhead>(
          to.params, splits, MergedRow<Epilogue>{to, query, row}, [&](int i) { return split_row(query, i, row); });
    }
    ptx::sync_warp();  // the next barrier is of whole warps
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_FIXED_SPLITS_CUH_
