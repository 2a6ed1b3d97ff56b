#ifndef FA_TEMPLATES_COMMON_SCHEDULE_PARAMS_CUH_
#define FA_TEMPLATES_COMMON_SCHEDULE_PARAMS_CUH_

#include <common/types.cuh>
#include <ptx/host_device.cuh>

// What lies in the memory of a schedule: ScheduleHead, [parts + 1] PartStart, [2, parts] counters, then [slots]
// WorkItem. Of two blocks of a cluster, which have a part together, each has counters of its own.
//
// Work is a line: for each head of the grid, one after the other, all items, which are query tiles of requests. An item
// is as long as it has KV tiles, and kItemCost more. The line is cut into parts of equal length, one for each thread
// block, so that the keys of an item may be shared by blocks. A part that begins or ends within an item leaves a
// partial result there, so that there are at most two for each part.
namespace fa::kernel {

/// KV tiles that starting and ending an item costs as much as.
inline constexpr int kItemCost = 4;
/// The same in latent attention, whose KV tiles take long.
inline constexpr int kLatentItemCost = 2;
/// So much longer than an even share a part may be, for whole items.
inline constexpr int kWholeReach = 6;
/// Fewer KV tiles of an item are not cut off.
inline constexpr int kFewestTiles = 2;
/// Query tiles of a call whose blocks find their parts by themselves, at most: a lane of a warp each.
inline constexpr int kOwnItems = 32;
/// Whether blocks that find their parts by themselves have a multiprocessor each while there are no more query tiles,
/// and cut tiles of one length into equal parts: of those that else share one in pairs up to this head dim, or where a
/// merge has many rows, which measured faster.
FA_HOST_DEVICE constexpr bool has_few_parts(bool in_pairs, int head_dim, int heads_of_tile) {
  return !in_pairs || head_dim <= 64 || heads_of_tile >= 16;
}
/// Thread blocks of the kernel that writes schedules, at most.
inline constexpr int kMostSegments = 32;

/// A query tile of a request, which has rows. Lists are written in segments, by a block each.
struct alignas(16) WorkItem {
  int32_t batch;
  int32_t m_block;
  int64_t start;  // on the line, from its segment's start
};

/// Where a part starts: KV tile `tile`, counted from the first one that rows of the item see, of item `item`.
struct alignas(32) PartStart {
  int32_t head;  // of the grid
  int32_t item;
  int32_t tile;
  // Where tile > 0: the parts that share the item are these and those between.
  int32_t first_part;
  int32_t last_part;
  // The item, where a part has any: its block needs not look for the first one.
  int32_t batch;
  int32_t m_block;
  int32_t unused;
};

struct alignas(32) ScheduleHead {
  int32_t arrived;  // blocks that have written their segment; 0 at the launch
  int32_t items;
  int32_t unused[6];
  int64_t segment_costs[kMostSegments];
  int32_t segment_items[kMostSegments];
  int32_t first_items[kMostSegments];  // of segments
};

/// How far apart heads are on the line. Where each has as many parts, it begins with one, so that parts cut all heads
/// alike: blocks read the same keys of neighbouring heads, which share lines of memory, at a time.
FA_HOST_DEVICE constexpr int64_t head_pitch(int64_t cost, int64_t length, int64_t heads, int64_t parts) {
  return parts % heads == 0 ? parts / heads * length : cost;
}

/// How long parts are that have whole items, or of which as many have an item: if all items are equal, and the parts
/// hardly longer than an even share. No partial result is left then, or one by each part.
FA_HOST_DEVICE constexpr int64_t whole_length(int64_t even, int64_t cost, int64_t items, int64_t heads, int64_t parts) {
  if (items == 0 || cost % items != 0) return even;
  const int64_t item = cost / items, count = items * heads;
  const int64_t parts_each = count < parts ? parts / count : 1;
  if (item % parts_each != 0) return even;
  const int64_t length = item / parts_each * ((count + parts - 1) / parts);
  return length > even + kWholeReach ? even : length;
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_SCHEDULE_PARAMS_CUH_
