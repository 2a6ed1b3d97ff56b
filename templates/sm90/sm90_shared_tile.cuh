#ifndef FA_TEMPLATES_SM90_SM90_SHARED_TILE_CUH_
#define FA_TEMPLATES_SM90_SM90_SHARED_TILE_CUH_

#include <common/constants.cuh>
#include <ptx/language.cuh>
#include <sm90/sm90_sizes.cuh>

namespace fa::sm90 {

using kernel::ceil_div;

/// A [kRows, kColumns] tile of 16-bit elements in shared memory as the copy engine writes it and wgmma reads it: slabs
/// of 64 columns, each [kRows][64] with the 16-byte chunks of row r exchanged by xor r % 8 (128-byte swizzle). Tiles
/// start at multiples of 1024 bytes; columns past kColumns in the last slab are zeros. kSideBySide: the slabs of 8 rows
/// lie behind each other, as a copy of all columns leaves them.
template <int kRows, int kColumns, bool kSideBySide = false>
struct SwizzledTile {
  static constexpr int kSlabs = ceil_div(kColumns, kSlabColumns);
  static constexpr int kRowBytes = kSlabRowBytes;
  static constexpr int kSlabBytes = (kSideBySide ? 8 : kRows) * kRowBytes;
  static constexpr int kStepBytes = kSideBySide ? kSlabs * kRowBytes : kRowBytes;  // 8 rows on it is 8 of them
  static constexpr int kBytes = kSlabs * kRows * kRowBytes;
  static_assert(kRows % 8 == 0, "the swizzle repeats every 8 rows");

  /// Address of a lane's word of the 8x8 matrix that begins with column 8 * chunk of the first row: of row lane / 4.
  static FA_DEVICE uint32_t fragment(uint32_t tile, uint32_t lane, uint32_t chunk) {
    const uint32_t first = lane / 4 * (kRowBytes + kernel::kChunkBytes) + lane % 4 * 4;  // of chunk 0
    return tile + chunk / 8 * kSlabBytes + (first ^ chunk % 8 * kernel::kChunkBytes);
  }

  /// Operand whose K axis runs along the columns: descriptor of 16 columns from 16 * step on, rows from `row` on.
  static FA_DEVICE uint64_t k_major(uint32_t tile, int row, int step) {
    return descriptor((tile + row * kStepBytes) / 16, (step / 4 * kSlabBytes + step % 4 * 32) / 16, 1);
  }

  /// Operand whose K axis runs along the rows: rows 16 * step to 16 * step + 15. As B its N axis runs along all
  /// columns; as A its 64 rows are the columns of one slab, so that `tile` is the address of that slab.
  static FA_DEVICE uint64_t mn_major(uint32_t tile, int step) {
    return descriptor(tile / 16, step * 16 * kStepBytes / 16, kSlabBytes / 16);
  }

 private:
  /// PTX ISA, "Matrix descriptor", all in units of 16 bytes: address, leading byte offset (between slabs; unused along
  /// K), stride byte offset (between groups of 8 rows), 128-byte swizzle. The address of a step is an addition to that
  /// of the tile, so that the compiler derives all steps from one value.
  static FA_DEVICE uint64_t descriptor(uint32_t tile, uint32_t step, uint32_t leading) {
    constexpr uint32_t kSwizzle128 = 1u << 30;
    const uint32_t low = (tile | leading << 16) + step;
    return static_cast<uint64_t>(8 * kStepBytes / 16 | kSwizzle128) << 32 | low;
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_SHARED_TILE_CUH_
