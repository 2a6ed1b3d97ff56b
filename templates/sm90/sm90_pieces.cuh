#ifndef FA_TEMPLATES_SM90_SM90_PIECES_CUH_
#define FA_TEMPLATES_SM90_SM90_PIECES_CUH_

#include <common/constants.cuh>
#include <common/own_parts.cuh>
#include <common/split_row.cuh>
#include <common/work_lists.cuh>
#include <ptx/atomic.cuh>
#include <ptx/language.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <sm90/sm90_roles.cuh>

namespace fa::sm90 {

/// Parts of a schedule that share a query tile, in one word: a consumer has it for as long as the tile lasts.
struct SharingParts {
  uint32_t word;

  static FA_DEVICE SharingParts of(const kernel::Piece& piece) {
    return {static_cast<uint32_t>(piece.first_part) | static_cast<uint32_t>(piece.last_part) << 16};
  }
  FA_DEVICE kernel::Piece piece() const {
    return {0, kernel::Piece::kAll, static_cast<int>(word & 0xffff), static_cast<int>(word >> 16)};
  }
};

/// Where a block by a schedule leaves a row of a part of a query tile: in [2 parts, rows].
template <int kTileM, bool kPackGqa, class Query>
FA_DEVICE int64_t partial_row_of_part(const kernel::ForwardParams& params, const Query& query, int place, int row) {
  const int rows_each = kPackGqa ? params.group : 1;
  return static_cast<int64_t>(place) * kernel::partial_rows<kTileM>(params, rows_each) +
         (row - query.tile.m_block * kTileM);
}

/// A row of a query tile, for merge_splits.
template <class Epilogue>
struct MergedRow {
  const Epilogue& epilogue;
  const typename Epilogue::Query& query;
  int row;

  FA_DEVICE int head() const { return typename Epilogue::Rows{epilogue.params.group, query.tile.head}.query_head(row); }
  FA_DEVICE int64_t offset(int64_t stride_b, int64_t stride_h, int64_t stride_s) const {
    return epilogue.offset_of(query, row, stride_b, stride_h, stride_s);
  }
};

/// Whether this block is the last that leaves a part of a query tile, whose counter has that number. `arrived` is a
/// word of shared memory that is the consumers', all of which call this.
template <int kThreads, class Params>
FA_DEVICE bool is_last_to_finish(const Params& params, const kernel::Piece& piece, int number, uint32_t arrived) {
  constexpr int kBarrier = first_of(NamedBarrier::partial_rows);
  const int thread = ptx::thread_index() - kWarpgroup;
  ptx::barrier_sync(kBarrier, kThreads);  // the block's partial rows are written
  int32_t* const counter = kernel::WorkLists(params.paged).counters + number;
  if (thread == 0) {
    ptx::st_shared_b32(arrived, static_cast<uint32_t>(ptx::atomic_add_acq_rel_global(counter, 1)));
  }
  ptx::barrier_sync(kBarrier, kThreads);  // the number of blocks before this one is there; their rows can be read
  if (static_cast<int>(ptx::ld_shared_b32(arrived)) != piece.last_part - piece.first_part) return false;
  if (thread == 0) ptx::st_global(counter, 0);  // for the next launch
  return true;
}

/// The same without counters: the last part waits for the others, which have started before it. It has begun within the
/// tile, which is its first one then, and so what its block does at the end.
template <class Own, int kThreads, bool kEnds, class Params>
FA_DEVICE bool is_last_part(const Params& params, const kernel::Piece& piece) {
  constexpr int kBarrier = first_of(NamedBarrier::partial_rows);
  const int thread = ptx::thread_index() - kWarpgroup;
  const int part = ptx::block_index();
  ptx::barrier_sync(kBarrier, kThreads);  // the block's partial rows are written
  if (!kEnds || part != piece.last_part) {
    if (thread == 0) ptx::raise_flag_global(Own::flag_of(params, piece, part), kernel::kFlagUp);
    return false;
  }
  if (thread < kernel::kWarpSize) Own::await_others(params, piece);
  ptx::barrier_sync(kBarrier, kThreads);  // the others' partial results can be read
  return true;
}

/// The block that has a query tile's last part makes its rows whole. Called by all consumers; `arrived` is a word of
/// shared memory that is theirs.
template <bool kEnds, class Epilogue, class Query>
FA_DEVICE void merge_piece(const Epilogue& epilogue, const Query& query, const kernel::Piece& piece, uint32_t arrived) {
  using T = typename Epilogue::T;
  using Variant = typename Epilogue::Variant;
  using Config = typename Epilogue::Config;
  constexpr int kThreads = Epilogue::kConsumers * kWarpgroup;
  constexpr int kTileM = Epilogue::kTileM;
  const int thread = ptx::thread_index() - kWarpgroup;
  if constexpr (kernel::kOwnParts<Config>) {
    using Own = kernel::OwnParts<Config, kernel::ForwardParamsOf<Config>, true>;
    if (!is_last_part<Own, kThreads, kEnds>(epilogue.params, piece)) return;
    if constexpr (!kEnds) return;
  } else {
    if (!is_last_to_finish<kThreads>(epilogue.params, piece, epilogue.counter_of(piece), arrived)) return;
  }
  const int last = piece.last_part - piece.first_part;
  const int rows = epilogue.row_count(query);
  const int first = query.tile.m_block * kTileM;
  const int end = first + kTileM < rows ? first + kTileM : rows;
  FA_UNROLL_BY(1)
  for (int row = first + thread / kernel::kWarpSize; row < end; row += kThreads / kernel::kWarpSize) {
    kernel::merge_splits<T, Variant, Epilogue::kHeadDimV>(
        epilogue.params, last + 1, MergedRow<Epilogue>{epilogue, query, row},
        [&](int i) { return epilogue.partial_row_at(query, piece.place_of(piece.first_part + i), row); });
  }
}

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_PIECES_CUH_
