#ifndef FA_TEMPLATES_COMMON_SHARED_TILE_CUH_
#define FA_TEMPLATES_COMMON_SHARED_TILE_CUH_

#include <common/constants.cuh>
#include <common/copies.cuh>
#include <common/types.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>

namespace fa::kernel {

/// A [rows, columns] tile in shared memory. Rows are an odd number of 16-byte chunks apart, so that the eight rows of
/// an ldmatrix fall on different banks whatever the head dim, and every address is one base plus a constant.
template <class T, int kRows, int kColumns>
struct SharedTile {
  static_assert(kColumns * sizeof(T) % kChunkBytes == 0, "a row is a whole number of 16-byte chunks");
  static constexpr int kChunks = kColumns * static_cast<int>(sizeof(T)) / kChunkBytes;
  static constexpr int kPitch = (kChunks | 1) * kChunkBytes;  // bytes
  static constexpr int kBytes = kRows * kPitch;

  /// Byte offset of element (row, column).
  static FA_DEVICE constexpr int offset(int row, int column) {
    return row * kPitch + column * static_cast<int>(sizeof(T));
  }
};

/// Copies rows of global memory into a SharedTile with all `kThreads` threads of a block; rows from `valid_rows` on
/// become zero and are not read.
template <class Tile, class T, int kRows, int kThreads, bool kAligned>
struct TileCopy {
  // Threads side by side on a row.
  static constexpr int kLanes =
      ceil_power_of_two(Tile::kChunks) < kWarpSize ? ceil_power_of_two(Tile::kChunks) : kWarpSize;
  static constexpr int kChunkSteps = ceil_div(Tile::kChunks, kLanes);
  static_assert(kThreads % kLanes == 0, "a row must not straddle the block's threads");
  static constexpr int kRowStep = kThreads / kLanes;
  static constexpr int kElementsPerChunk = kChunkBytes / static_cast<int>(sizeof(T));

  /// Where `thread` starts reading a tile whose rows are `stride` elements apart.
  static FA_DEVICE const T* thread_pointer(const T* base, int64_t stride, int thread) {
    return base + thread / kLanes * stride + thread % kLanes * kElementsPerChunk;
  }

  /// Rows `stride` elements apart; `pointer` is the tile's thread_pointer. Asynchronous when kAligned: the caller
  /// commits and waits.
  static FA_DEVICE void strided(uint32_t tile, const T* pointer, int64_t stride, int valid_rows, int thread) {
    const int row = thread / kLanes;
    FA_UNROLL
    for (int i = 0; i < ceil_div(kRows, kRowStep); ++i) {
      copy_row(tile + Tile::offset(row, 0), pointer, i, kRows - row, valid_rows - row, thread % kLanes);
      pointer += kRowStep * stride;
    }
  }

  /// The same of the tile's rows from `begin` to before `end`; others become zero and are not read.
  static FA_DEVICE void between(uint32_t tile, const T* pointer, int64_t stride, int begin, int end, int thread) {
    const int row = thread / kLanes;
    FA_UNROLL
    for (int i = 0; i < ceil_div(kRows, kRowStep); ++i) {
      const int valid_rows = row + i * kRowStep >= begin ? end - row : 0;
      copy_row(tile + Tile::offset(row, 0), pointer, i, kRows - row, valid_rows, thread % kLanes);
      pointer += kRowStep * stride;
    }
  }

  /// Rows wherever `row_pointer` says.
  template <class RowPointer>
  static FA_DEVICE void gathered(uint32_t tile, RowPointer row_pointer, int valid_rows, int thread) {
    const int row = thread / kLanes;
    FA_UNROLL_BY(2)
    for (int i = 0; i < ceil_div(kRows, kRowStep); ++i) {
      const T* pointer = row_pointer(row + i * kRowStep) + thread % kLanes * kElementsPerChunk;
      copy_row(tile + Tile::offset(row, 0), pointer, i, kRows - row, valid_rows - row, thread % kLanes);
    }
  }

  /// The keys from `first`, a multiple of kRows, on, wherever `keys` finds them (common/paged.cuh); others become zero.
  /// `base` is that of page 0 and this thread's first column.
  template <int kPageSize, class Keys>
  static FA_DEVICE void paged(uint32_t tile, const T* base, int64_t stride_page, int64_t stride_row, int first,
                              const Keys& keys, int thread) {
    constexpr int kSteps = ceil_div(kRows, kRowStep);
    // A thread's rows are in one page up to each multiple of kPageSize.
    constexpr bool kWholePages = kPageSize % kRowStep == 0 && (kRows % kPageSize == 0 || kPageSize % kRows == 0);
    constexpr int kTogether = 4;
    const int row = thread / kLanes;
    int page = 0;
    FA_UNROLL
    for (int first_step = 0; first_step < kSteps; first_step += kTogether) {
      int pages[kTogether];  // looked up before the first copy: none waits for another
      FA_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        const int step = first_step + i;
        if (step >= kSteps) continue;
        const bool same = kWholePages && step > 0 && step * kRowStep % kPageSize != 0;
        if (!same) page = keys.page_of(first + row + step * kRowStep);
        pages[i] = page;
      }
      FA_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        const int step = first_step + i;
        if (step >= kSteps) continue;
        const int key = first + row + step * kRowStep;
        const bool valid = keys.has(key, pages[i]);
        const T* pointer = valid ? base + (pages[i] * stride_page + keys.row_in_page(key) * stride_row) : base;
        copy_row(tile + Tile::offset(row, 0), pointer, step, kRows - row, valid ? kRows : 0, thread % kLanes);
      }
    }
  }

 private:
  /// Row `i * kRowStep` below the thread's first, of which `tile_rows` and `valid_rows` are left.
  static FA_DEVICE void copy_row(uint32_t first_row, const T* pointer, int i, int tile_rows, int valid_rows,
                                 int chunk) {
    if (kRows % kRowStep != 0 && i * kRowStep >= tile_rows) return;
    const bool valid = i * kRowStep < valid_rows;
    const uint32_t target = first_row + chunk * kChunkBytes + Tile::offset(i * kRowStep, 0);
    FA_UNROLL
    for (int step = 0; step < kChunkSteps; ++step) {
      if (Tile::kChunks % kLanes != 0 && chunk + step * kLanes >= Tile::kChunks) continue;
      copy_chunk(target + step * kLanes * kChunkBytes, pointer + step * kLanes * kElementsPerChunk, valid);
    }
  }

  static FA_DEVICE void copy_chunk(uint32_t target, const T* pointer, bool valid) {
    if constexpr (kAligned) {
      ptx::cp_async_16(target, pointer, valid);
    } else {
      FA_UNROLL
      for (int e = 0; e < kElementsPerChunk; ++e) {
        copy_element(target + e * static_cast<int>(sizeof(T)), pointer + e, valid);
      }
    }
  }

  static FA_DEVICE void copy_element(uint32_t target, const T* source, bool valid) {
    if constexpr (sizeof(T) == 2) {
      ptx::st_shared_b16(target, valid ? ptx::ld_global(source).bits : uint16_t{0});
    } else {
      ptx::st_shared_b32(target, valid ? ptx::bits(ptx::ld_global(source)) : 0u);
    }
  }
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_SHARED_TILE_CUH_
