#ifndef FA_TEMPLATES_SM90_SM90_SIZES_CUH_
#define FA_TEMPLATES_SM90_SM90_SIZES_CUH_

#include <ptx/host_device.cuh>

// Sizes of Hopper's units of work, which the host reads too.

namespace fa::sm90 {

inline constexpr int kWarpgroup = 128;     // threads
inline constexpr int kWarpgroupRows = 64;  // of a wgmma
inline constexpr int kSlabColumns = 64;    // of 16-bit elements: the 128 bytes that the swizzle spans
inline constexpr int kSlabRowBytes = 128;  // of a slab
inline constexpr int kMbarrierBytes = 8;

FA_HOST_DEVICE constexpr int greater(int a, int b) {
  return a > b ? a : b;
}

/// Bytes of [rows, columns] in slabs of 64 columns (SwizzledTile).
FA_HOST_DEVICE constexpr int tile_bytes(int rows, int columns) {
  return (columns + kSlabColumns - 1) / kSlabColumns * kSlabRowBytes * rows;
}

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_SIZES_CUH_
