#ifndef FA_TEMPLATES_COMMON_OWN_PARTS_CUH_
#define FA_TEMPLATES_COMMON_OWN_PARTS_CUH_

#include <common/constants.cuh>
#include <common/flags.cuh>
#include <common/forward_schedule.cuh>
#include <common/schedule_params.cuh>
#include <common/schedule_slots.cuh>
#include <common/switches.cuh>
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
/// Config is that of the attention kernel. kWhole: items of one length are cut into equal parts, of which none has keys
/// of two: no block ends a tile to begin another.
template <class Config, class Params, bool kWhole = false>
struct OwnParts {
  using Slots = ScheduleSlots<Config, Params>;
  // On the line of a head. Requests have fewer than 2^31 - 65536 positions.
  static constexpr bool kFew = (0x7fff0000 / Slots::kTileN + kItemCost) * int64_t{kOwnItems} < 0x7fffffff;
  using Place = typename Either<int, int64_t, kFew>::type;
  static constexpr int kHeadDim = Config::kHeadDimQk > Config::kHeadDimV ? Config::kHeadDimQk : Config::kHeadDimV;

  const Params& params;
  const int part = ptx::block_index();
  typename Slots::Slot slot;  // of this lane
  uint32_t present;           // lanes whose slots have a tile: items, in their order
  Place item_start;           // on the line, of a head
  Place cost;                 // of a head's items
  int item_cost = kItemCost;  // of what `slot.cost` counts
  int64_t length;             // of a part
  PartStart start, end;

  FA_DEVICE explicit OwnParts(const Params& p) : params(p) {
    slot = Slots{params}.slot_of(0);
    present = ptx::vote_ballot(slot.exists);
    const Place to_here = inclusive_sum(Place{slot.cost});
    item_start = to_here - slot.cost;
    cost = shuffled(to_here, kWarpSize - 1);
    const int parts = params.paged.parts;
    const int64_t even = (int64_t{cost} * params.heads + parts - 1) / parts;
    length = even < kItemCost + kFewestTiles ? kItemCost + kFewestTiles : even;
    if constexpr (kWhole) {
      if (present != 0) cut_evenly(parts);
    }
    // Lanes of odd numbers find the end: a search is a chain of divisions and votes, which copies wait for.
    const PartStart found = start_of(part + odd());
    start = of_lane(found, 0);
    end = of_lane(found, 1);
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
  /// Where all items are of as many KV tiles, and equal parts of them hardly longer than an even share of the line. A
  /// part then costs the same wherever it begins, and the line has no other costs.
  FA_DEVICE void cut_evenly(int parts) {
    const int first = ptx::shfl(slot.cost, lane_of(0));
    if (ptx::vote_ballot(slot.exists && slot.cost != first) != 0) return;
    const int64_t count = int64_t{items()} * params.heads;
    const int tiles = first - kItemCost;
    const int most = count < parts ? parts / static_cast<int>(count) : 1;  // parts of an item
    const int each = ceil_div(tiles, most);
    if (most > 1 && !kernel::has_few_parts(kTwoBlocks<Config>, kHeadDim, Config::kPackGqa ? params.group : 1)) return;
    const int64_t longest = each * ((count + parts - 1) / parts);
    if (each < kFewestTiles || longest > length + kWholeReach) return;
    const Place padded = each * ceil_div(tiles, each);
    item_cost = 0;
    slot.cost = padded;
    const int lane = ptx::thread_index() % kWarpSize;
    item_start = padded * ptx::popc(present & ((1u << lane) - 1));
    cost = padded * items();
    length = longest;
  }

  static FA_DEVICE int odd() { return ptx::thread_index() % 2; }

  /// The lane of item `item`, of the whole warp's.
  FA_DEVICE int lane_of(int item) const {
    if ((present & (present + 1)) == 0) return item;
    const int lane = ptx::thread_index() % kWarpSize;
    const int before = ptx::popc(present & ((1u << lane) - 1));
    return ptx::popc(ptx::vote_ballot(before < item || (before == item && !slot.exists)));
  }
  /// The same where lanes of odd numbers have another item.
  FA_DEVICE int lanes_of(int item) const {
    const int even_lane = lane_of(ptx::shfl(item, 0));
    const int odd_lane = lane_of(ptx::shfl(item, 1));
    return odd() ? odd_lane : even_lane;
  }

  FA_DEVICE WorkItem item_in(int lane) const {
    return {ptx::shfl(slot.batch, lane), ptx::shfl(slot.m_block, lane), shuffled(item_start, lane)};
  }

  /// The last item that starts at `within` or before, in the whole warp's order.
  FA_DEVICE int item_at(Place within) const {
    return ptx::popc(ptx::vote_ballot(slot.exists && item_start <= within)) - 1;
  }

  /// Where parts start of even lanes and of odd ones. Called by whole warps, as all of this.
  FA_DEVICE PartStart start_of(int of) const {
    PartStart found{params.heads, 0, 0, 0, 0, 0, 0, 0};
    const int64_t place = of * length;
    const bool inside = place < int64_t{cost} * params.heads;
    const int head = inside ? static_cast<int>(place / cost) : 0;
    const Place within = inside ? static_cast<Place>(place - int64_t{head} * cost) : 0;
    const int even_item = item_at(shuffled(within, 0)), odd_item = item_at(shuffled(within, 1));
    if (present == 0) return found;
    const int here = odd() ? odd_item : even_item;
    const int lane = lanes_of(here);
    const Place from = shuffled(item_start, lane);
    const int tiles = ptx::shfl(slot.cost, lane) - item_cost;
    int item = 0;
    if (inside) {
      found.head = head;
      found.item = here;
      cut_item<0>(found, tiles, within - from - item_cost, int64_t{head} * cost + from + item_cost, length);
      if (found.item == items()) {
        found.item = 0;
        found.head += 1;
      }
      item = found.item;
    }
    const WorkItem its = item_in(lanes_of(item));
    if (!inside) return found;
    found.batch = its.batch;
    found.m_block = its.m_block;
    return found;
  }

  static FA_DEVICE PartStart of_lane(const PartStart& found, int lane) {
    return {ptx::shfl(found.head, lane),      ptx::shfl(found.item, lane),
            ptx::shfl(found.tile, lane),      ptx::shfl(found.first_part, lane),
            ptx::shfl(found.last_part, lane), ptx::shfl(found.batch, lane),
            ptx::shfl(found.m_block, lane),   0};
  }
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_OWN_PARTS_CUH_
