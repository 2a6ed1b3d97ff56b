#ifndef FA_TEMPLATES_COMMON_TILE_STORE_CUH_
#define FA_TEMPLATES_COMMON_TILE_STORE_CUH_

#include <common/constants.cuh>
#include <common/shared_tile.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>

namespace fa::kernel {

/// Puts two neighbouring accumulators into a shared tile of T, rounded.
template <class T>
FA_DEVICE void store_pair(uint32_t address, float low, float high) {
  if constexpr (sizeof(T) == 2) {
    ptx::st_shared_b32(address, ptx::convert_pair<T>(low, high));
  } else {
    ptx::st_shared_b64(address, ptx::bits(low), ptx::bits(high));
  }
}

/// Copies the first `valid_rows` rows of a SharedTile to rows of global memory `stride` elements apart, with
/// `kThreads` threads.
template <class Tile, class T, int kRows, int kThreads, bool kAligned>
FA_DEVICE void store_tile(uint32_t tile, T* base, int64_t stride, int valid_rows, int thread) {
  constexpr int kUnitBytes = kAligned ? kChunkBytes : static_cast<int>(sizeof(T));
  constexpr int kUnits = Tile::kChunks * kChunkBytes / kUnitBytes;  // of a row
  FA_UNROLL_BY(4)
  for (int i = thread; i < kRows * kUnits; i += kThreads) {
    const int row = i / kUnits;
    const int unit = i % kUnits;
    if (row >= valid_rows) break;
    const uint32_t source = tile + Tile::offset(row, 0) + unit * kUnitBytes;
    T* target = base + row * stride + unit * (kUnitBytes / static_cast<int>(sizeof(T)));
    if constexpr (kAligned) {
      ptx::st_global_chunk(target, ptx::ld_shared_chunk(source));
    } else if constexpr (sizeof(T) == 2) {
      ptx::st_global(target, T{ptx::ld_shared_b16(source)});
    } else {
      ptx::st_global(target, ptx::from_bits(ptx::ld_shared_b32(source)));
    }
  }
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_TILE_STORE_CUH_
