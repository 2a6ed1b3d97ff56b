#ifndef FA_TEMPLATES_COMMON_EVEN_CUT_CUH_
#define FA_TEMPLATES_COMMON_EVEN_CUT_CUH_

#include <common/types.cuh>
#include <ptx/host_device.cuh>

namespace fa::kernel {

/// The KV tile that a part starts with, of an item of `tiles` that starts at `item_start` of the line of a schedule.
/// Where whole parts share the item they have equally many tiles: each begins and ends as the others do, though on the
/// line the item's cost is the first one's.
FA_HOST_DEVICE constexpr int64_t even_cut(int64_t tiles, int64_t wanted, int64_t cost, int64_t item_start,
                                          int64_t length) {
  if (item_start % length != 0 || (tiles + cost) % length != 0) return wanted;
  return tiles * ((wanted + cost) / length) / ((tiles + cost) / length);
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_EVEN_CUT_CUH_
