#ifndef FA_TEMPLATES_COMMON_WORK_LISTS_CUH_
#define FA_TEMPLATES_COMMON_WORK_LISTS_CUH_

#include <common/constants.cuh>
#include <common/forward_params.cuh>
#include <common/forward_schedule.cuh>
#include <common/schedule_params.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// Where the parts of a schedule's memory are (schedule_params.cuh).
struct WorkLists {
  ScheduleHead* head;
  PartStart* starts;  // [parts + 1]
  int32_t* counters;  // [2, parts], of each block of a pair: by an item's first part, parts that have left a partial
                      // result. 0 between launches
  WorkItem* items;    // [segments, segment_slots], of which segment_items[i] are there
  int segment_slots;

  FA_DEVICE explicit WorkLists(const PagedParams& params) {
    const int parts = params.parts;
    head = static_cast<ScheduleHead*>(params.schedule);
    starts = reinterpret_cast<PartStart*>(head + 1);
    counters = reinterpret_cast<int32_t*>(starts + parts + 1);
    items = reinterpret_cast<WorkItem*>(counters + (2 * parts + 3) / 4 * 4);
    segment_slots = params.segment_slots;
  }

  /// Called by whole warps.
  FA_DEVICE const WorkItem* find(int item) const {
    const int first = ptx::ld_global(head->first_items + ptx::thread_index() % kWarpSize);
    const int segment = ptx::popc(ptx::vote_ballot(first <= item)) - 1;
    return items + (static_cast<int64_t>(segment) * segment_slots + (item - ptx::shfl(first, segment)));
  }
};

/// What a thread block does of one item: the KV tiles from `begin` to before `end`, counted from the first that the
/// item's rows see.
struct Piece {
  static constexpr int kAll = 0x7fffffff;

  int begin;
  int end;
  int first_part;  // of those that share the item; this block's is one of them
  int last_part;

  FA_DEVICE bool is_whole() const { return first_part == last_part; }
  /// The partial result of the piece that part `of` has. Of a part's two, the first is of the item that it starts in.
  FA_DEVICE int place_of(int of) const { return 2 * of + (of == first_part ? 1 : 0); }
};

/// How many pieces a part has that begins and ends so, of `items` in all.
FA_DEVICE int pieces_between(const PartStart& start, const PartStart& end, int items) {
  return (end.head - start.head) * items + end.item - start.item + (end.tile > 0 ? 1 : 0);
}

/// Piece `index` of such a part, and the query tile that it is of. `find(item)` is a WorkItem.
template <class Find>
FA_DEVICE Piece piece_between(const PartStart& start, const PartStart& end, int items, int part, int index,
                              ForwardTile& tile, const Find& find) {
  int item = start.item + index;
  tile.head = start.head;
  if (item >= items) {  // divisions are long
    tile.head += item / items;
    item %= items;
  }
  tile.batch = start.batch;
  tile.m_block = start.m_block;
  if (index > 0) {
    const WorkItem found = find(item);
    tile.batch = found.batch;
    tile.m_block = found.m_block;
  }
  Piece piece{0, Piece::kAll, part, part};
  if (index == 0 && start.tile > 0) {
    piece.begin = start.tile;
    piece.first_part = start.first_part;
    piece.last_part = start.last_part;
  }
  if (end.tile > 0 && end.item == item && end.head == tile.head) {
    piece.end = end.tile;
    piece.first_part = end.first_part;
    piece.last_part = end.last_part;
  }
  tile.split = piece.place_of(part);
  return piece;
}

/// The part of this thread block where the grid has the parts of neighbouring heads side by side, if each head has as
/// many (head_pitch): they start together, and read the same lines of memory at a time.
template <class Params>
FA_DEVICE int part_beside_heads(const Params& params) {
  const int block = ptx::block_index();
  const int parts = params.paged.parts;
  if (parts % params.heads != 0) return block;
  return block % params.heads * (parts / params.heads) + block / params.heads;
}

/// How many pieces a part has.
FA_DEVICE int pieces_of(const WorkLists& lists, int part) {
  const PartStart start = ptx::ld_global(lists.starts + part);
  const PartStart end = ptx::ld_global(lists.starts + part + 1);
  return pieces_between(start, end, ptx::ld_global(&lists.head->items));
}

/// Piece `index` of a part, and the query tile that it is of.
FA_DEVICE Piece piece_of(const WorkLists& lists, int part, int index, ForwardTile& tile) {
  const PartStart start = ptx::ld_global(lists.starts + part);
  const PartStart end = ptx::ld_global(lists.starts + part + 1);
  const int items = ptx::ld_global(&lists.head->items);
  return piece_between(start, end, items, part, index, tile,
                       [&](int item) { return ptx::ld_global(lists.find(item)); });
}

/// Of the KV tiles that the item's rows see, those of a piece.
FA_DEVICE KvRange cut(KvRange range, const Piece& piece) {
  const int tiles = range.end - range.begin;
  range.end = range.begin + (piece.end < tiles ? piece.end : tiles);
  range.begin += piece.begin < tiles ? piece.begin : tiles;
  return range;
}

/// Rows of a query tile that a partial result has room for.
template <int kTileM>
FA_DEVICE int partial_rows(const ForwardParams& params, int rows_each) {
  const int rows = params.s_q * rows_each;
  return rows < kTileM ? rows : kTileM;
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_WORK_LISTS_CUH_
