#ifndef FA_TEMPLATES_COMMON_OWN_PARTS_CUH_
#define FA_TEMPLATES_COMMON_OWN_PARTS_CUH_

#include <common/constants.cuh>
#include <common/flags.cuh>
#include <common/forward_schedule.cuh>
#include <common/schedule_params.cuh>
#include <common/schedule_slots.cuh>
#include <common/work_lists.cuh>
#include <ptx/atomic.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// A part of a schedule (schedule_params.cuh) of at most 32 query tiles, which each warp of its block finds for itself:
/// a lane has a tile. Saves the kernel that writes schedules, and reading one. Made and asked by whole warps.
///
/// Config is that of the attention kernel.
template <class Config, class Params>
struct OwnParts {
  using Slots = ScheduleSlots<Config, Params>;

  const Params& params;
  const int part = ptx::block_index();
  typename Slots::Slot slot;  // of this lane
  uint32_t present;           // lanes whose slots have a tile: items, in their order
  int64_t item_start;         // on the line, of a head
  int64_t cost;               // of a head's items
  int64_t length;             // of a part
  PartStart start, end;

  FA_DEVICE explicit OwnParts(const Params& p) : params(p) {
    slot = Slots{params}.slot_of(0);
    present = ptx::vote_ballot(slot.exists);
    const int64_t to_here = inclusive_sum(int64_t{slot.cost});
    item_start = to_here - slot.cost;
    cost = shuffled(to_here, kWarpSize - 1);
    const int parts = params.paged.parts;
    const int64_t even = (cost * params.heads + parts - 1) / parts;
    length = even < kItemCost + kFewestTiles ? kItemCost + kFewestTiles : even;
    start = start_of(part);
    end = start_of(part + 1);
  }

  FA_DEVICE int items() const { return ptx::popc(present); }
  FA_DEVICE int pieces() const { return pieces_between(start, end, items()); }
  FA_DEVICE Piece piece(int index, ForwardTile& tile) const {
    return piece_between(start, end, items(), part, index, tile, [&](int item) { return item_in(lane_of(item)); });
  }

  /// Flags of parts that share a query tile: [2 parts], by the place of the partial result.
  static FA_DEVICE uint64_t* flag_of(const Params& params, const Piece& piece, int of) {
    return static_cast<uint64_t*>(params.paged.schedule) + piece.place_of(of);
  }

  /// Called by a warp of the last part: the others' partial results can be read.
  static FA_DEVICE void await_others(const Params& params, const Piece& piece) {
    for (int of = piece.first_part + ptx::thread_index() % kWarpSize; of < piece.last_part; of += kWarpSize) {
      uint64_t* const flag = flag_of(params, piece, of);
      ptx::await_flag_global(flag, kFlagUp);
      ptx::st_global(flag, uint64_t{0});  // for the next launch
    }
  }

 private:
  /// The lane of item `item`.
  FA_DEVICE int lane_of(int item) const {
    const int lane = ptx::thread_index() % kWarpSize;
    const int before = ptx::popc(present & ((1u << lane) - 1));
    return ptx::popc(ptx::vote_ballot(before < item || (before == item && !slot.exists)));
  }

  FA_DEVICE WorkItem item_in(int lane) const {
    return {ptx::shfl(slot.batch, lane), ptx::shfl(slot.m_block, lane), shuffled(item_start, lane)};
  }

  FA_DEVICE PartStart start_of(int of) const {
    PartStart found{params.heads, 0, 0, 0, 0, 0, 0, 0};
    const int64_t place = of * length;
    if (place >= cost * params.heads) return found;
    found.head = static_cast<int>(place / cost);
    const int64_t within = place - found.head * cost;
    const int here = ptx::popc(ptx::vote_ballot(slot.exists && item_start <= within)) - 1;
    const int lane = lane_of(here);
    const int64_t from = shuffled(item_start, lane);
    found.item = here;
    cut_item<kItemCost>(found, ptx::shfl(slot.cost, lane) - kItemCost, within - from - kItemCost,
                        found.head * cost + from, length);
    if (found.item == items()) {
      found.item = 0;
      found.head += 1;
    }
    const WorkItem item = item_in(lane_of(found.item));
    found.batch = item.batch;
    found.m_block = item.m_block;
    return found;
  }
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_OWN_PARTS_CUH_
