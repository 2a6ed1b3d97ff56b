#ifndef FA_TEMPLATES_COMMON_SCHEDULE_CUH_
#define FA_TEMPLATES_COMMON_SCHEDULE_CUH_

#include <common/constants.cuh>
#include <common/even_cut.cuh>
#include <common/schedule_slots.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <common/work_lists.cuh>
#include <ptx/atomic.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// Shares the query tiles of a batch of requests out among the thread blocks of a scheduled forward
/// (schedule_params.cuh). The design is that of FlashMLA's tile scheduler, whose walk over requests is a prefix sum
/// here, and a search for each part.
///
/// The slots of query tiles (sequences.cuh) are cut into a segment for each block, which lists the tiles that have
/// rows, with the sum of their costs. The last block to finish sums over segments and finds where parts start.
///
/// Config: kTileM, kTileN, kCausal, kPackGqa, kWarps, optionally kVarlen, kOverlaps, kWholeItems and a Variant.
template <class Config>
struct Schedule {
  using Params = ForwardParamsOf<Config>;
  using Slots = ScheduleSlots<Config, Params>;
  using Slot = typename Slots::Slot;
  static constexpr int kCost = Slots::kCost;
  static constexpr int kWarps = Config::kWarps;
  static constexpr int kThreads = kWarps * kWarpSize;
  static_assert(kWarps == kWarpSize && kWarps == kMostSegments, "a lane for each warp, a warp for each segment");

  // In shared memory.
  static constexpr int kCoarseBytes = kThreads * 8;        // [segments, lanes], where some of the items start
  static constexpr int kSumBytes = 8 * kWarps;             // [warps]
  static constexpr int kSegmentBytes = 8 * kMostSegments;  // [segments]
  static constexpr int kSharedBytes = kCoarseBytes + 2 * kSumBytes + 2 * kSegmentBytes + 16;

  const Params& params;
  const WorkLists lists = WorkLists(params.paged);
  const int thread = ptx::thread_index();
  const int lane = thread % kWarpSize;
  const int warp = thread / kWarpSize;
  const int segment = ptx::block_index();
  const int segments = ptx::block_count();
  const uint32_t coarse = ptx::dynamic_shared();
  const uint32_t sums = coarse + kCoarseBytes;
  const uint32_t counts = sums + kSumBytes;
  const uint32_t segment_starts = counts + kSumBytes;  // on the line
  const uint32_t segment_items = segment_starts + kSegmentBytes;
  const uint32_t word = segment_items + kSegmentBytes;

  static FA_DEVICE void store(uint32_t address, int64_t value) {
    ptx::st_shared_b64(address, static_cast<uint32_t>(value),
                       static_cast<uint32_t>(static_cast<uint64_t>(value) >> 32));
  }
  static FA_DEVICE int64_t load(uint32_t address) {
    uint32_t low, high;
    ptx::ld_shared_b64(low, high, address);
    return static_cast<int64_t>(static_cast<uint64_t>(high) << 32 | low);
  }

  FA_DEVICE void run() const {
    if constexpr (kOverlaps<Config>) {
      ptx::griddepcontrol_wait();
      ptx::griddepcontrol_launch_dependents();
    }
    write_segment();
    if (!is_last()) return;
    write_parts();
  }

 private:
  /// Lists the items of this block's slots.
  FA_DEVICE void write_segment() const {
    WorkItem* const own = lists.items + static_cast<int64_t>(segment) * lists.segment_slots;
    const int first = segment * lists.segment_slots;
    int64_t cost = 0;  // of the items so far
    int items = 0;
    for (int chunk = 0; chunk < lists.segment_slots; chunk += kThreads) {
      const Slot slot = Slots{params}.slot_of(first + chunk + warp * kWarpSize);
      const uint32_t present = ptx::vote_ballot(slot.exists);
      const int64_t to_here = inclusive_sum(int64_t{slot.cost});
      if (lane == kWarpSize - 1) {
        store(sums + 8 * warp, to_here);
        ptx::st_shared_b32(counts + 4 * warp, static_cast<uint32_t>(ptx::popc(present)));
      }
      ptx::sync_threads();  // all warps' sums are there
      const int64_t warp_costs = inclusive_sum(load(sums + 8 * lane));
      const int warp_items = inclusive_sum(static_cast<int>(ptx::ld_shared_b32(counts + 4 * lane)));
      const int64_t cost_before = warp == 0 ? 0 : shuffled(warp_costs, warp - 1);
      const int items_before = warp == 0 ? 0 : ptx::shfl(warp_items, warp - 1);
      if (slot.exists) {
        const int rank = items + items_before + ptx::popc(present & ((1u << lane) - 1));
        ptx::st_global(own + rank, WorkItem{slot.batch, slot.m_block, cost + cost_before + to_here - slot.cost});
      }
      cost += shuffled(warp_costs, kWarpSize - 1);
      items += ptx::shfl(warp_items, kWarpSize - 1);
      ptx::sync_threads();  // all have read the sums
    }
    if (thread == 0) {
      ptx::st_global(lists.head->segment_costs + segment, cost);
      ptx::st_global(lists.head->segment_items + segment, items);
    }
  }

  /// Whether all other blocks have written their segments.
  FA_DEVICE bool is_last() const {
    ptx::sync_threads();  // the block's segment is written
    if (segments == 1) return true;
    if (thread == 0) {
      const int before = ptx::atomic_add_acq_rel_global(&lists.head->arrived, 1);
      ptx::st_shared_b32(word, static_cast<uint32_t>(before));
    }
    ptx::sync_threads();  // the number of blocks is there, and what they have written can be read
    return static_cast<int>(ptx::ld_shared_b32(word)) == segments - 1;
  }

  FA_DEVICE void write_parts() const {
    const int64_t own_cost = lane < segments ? ptx::ld_global(lists.head->segment_costs + lane) : 0;
    const int own_items = lane < segments ? ptx::ld_global(lists.head->segment_items + lane) : 0;
    const int64_t cost_to_here = inclusive_sum(own_cost);
    const int items_to_here = inclusive_sum(own_items);
    const int64_t cost = shuffled(cost_to_here, kWarpSize - 1);
    const int items = ptx::shfl(items_to_here, kWarpSize - 1);
    if (warp == 0) {
      store(segment_starts + 8 * lane, cost_to_here - own_cost);
      ptx::st_shared_b32(segment_items + 4 * lane, static_cast<uint32_t>(own_items));
      ptx::st_global(lists.head->first_items + lane, items_to_here - own_items);
      if (lane == 0) ptx::st_global(&lists.head->items, items);
    }
    // Segment `warp`, some of whose items' starts the search begins with: one for each lane.
    const int rank = lane * stride();
    const int count = ptx::shfl(own_items, warp);
    const int64_t segment_cost = shuffled(own_cost, warp);
    int64_t start = shuffled(cost_to_here, warp);  // beyond the items: the segment's end
    if (rank < count) start += ptx::ld_global(item_at(warp, rank)).start - segment_cost;
    store(coarse + 8 * thread, start);
    ptx::sync_threads();  // what the search reads is there
    const int parts = params.paged.parts;
    const int64_t all = cost * params.heads;
    int64_t length = (all + parts - 1) / parts;
    if constexpr (kWholeItems<Config> != 0) length = whole_length(length, cost, items, params.heads, parts);
    if (length < kCost + kFewestTiles) length = kCost + kFewestTiles;
    for (int part = thread; part <= parts; part += kThreads) {
      ptx::st_global(lists.starts + part, start_of(part, length, cost, items));
      if (part == parts) continue;
      ptx::st_global(lists.counters + part, 0);
      ptx::st_global(lists.counters + parts + part, 0);
    }
  }

  FA_DEVICE int stride() const { return lists.segment_slots / kWarpSize; }
  FA_DEVICE const WorkItem* item_at(int of, int rank) const {
    return lists.items + (static_cast<int64_t>(of) * lists.segment_slots + rank);
  }

  FA_DEVICE PartStart start_of(int part, int64_t length, int64_t cost, int items) const {
    PartStart start{params.heads, 0, 0, 0, 0, 0, 0, 0};
    const int64_t pitch = head_pitch(cost, length, params.heads, params.paged.parts);
    const int64_t place = part * length;
    if (cost == 0 || place >= pitch * params.heads) return start;
    start.head = static_cast<int>(place / pitch);
    int64_t within = place - start.head * pitch;
    if (within >= cost) {  // behind the head's last item
      start.head += 1;
      if (start.head == params.heads) return start;
      within = 0;
    }
    // The last of the coarse starts that is not behind.
    int low = 0;
    FA_UNROLL
    for (int step = kThreads / 2; step > 0; step /= 2) {
      if (load(coarse + 8 * (low + step)) <= within) low += step;
    }
    int of = low / kWarpSize;
    const int count = static_cast<int>(ptx::ld_shared_b32(segment_items + 4 * of));
    const int64_t segment_start = load(segment_starts + 8 * of);
    int first = low % kWarpSize * stride();
    int end = first + stride() < count ? first + stride() : count;
    while (end - first > 1) {
      const int middle = (first + end) / 2;
      if (segment_start + ptx::ld_global(item_at(of, middle)).start <= within) {
        first = middle;
      } else {
        end = middle;
      }
    }
    const int64_t item_start = segment_start + ptx::ld_global(item_at(of, first)).start;
    const int64_t item_end = first + 1 < count ? segment_start + ptx::ld_global(item_at(of, first + 1)).start
                                               : segment_start + ptx::ld_global(lists.head->segment_costs + of);
    const int item = ptx::ld_global(lists.head->first_items + of) + first;
    start.item = item;
    const int64_t tiles = item_end - item_start - kCost, line_start = start.head * pitch + item_start;
    int64_t wanted = within - item_start - kCost;
    if constexpr (kWholeItems<Config> != 0) wanted = even_cut(tiles, wanted, kCost, line_start, length);
    cut_item<kCost>(start, tiles, wanted, line_start, length);
    int rank = first;
    if (start.item != item) {  // the next one
      rank += 1;
      if (start.item == items) {
        start.item = 0;
        start.head += 1;
      }
      if (rank == count) {
        rank = 0;
        for (int i = 0; i < segments; ++i) {
          of = of + 1 == segments ? 0 : of + 1;
          if (ptx::ld_shared_b32(segment_items + 4 * of) != 0) break;
        }
      }
    }
    const WorkItem found = ptx::ld_global(item_at(of, rank));
    start.batch = found.batch;
    start.m_block = found.m_block;
    return start;
  }
};

template <class Config>
FA_DEVICE void schedule(const ForwardParamsOf<Config>& params) {
  Schedule<Config>{params}.run();
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_SCHEDULE_CUH_
