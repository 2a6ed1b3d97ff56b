#ifndef FA_TEMPLATES_SM80_SM80_LATENT_CUH_
#define FA_TEMPLATES_SM80_SM80_LATENT_CUH_

#include <common/constants.cuh>
#include <common/stored.cuh>
#include <common/types.cuh>
#include <common/variant.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::sm80 {

using namespace kernel;

/// Rows of latent attention's cache as they land in the place of a KTile's: 512 codes of e4m3, a scale in f32 of each
/// 128 of them, and 64 columns of bf16, which the rotary embedding has turned.
template <class T, class KTile, int kRows, int kThreads>
struct LatentTile {
  static constexpr int kCodes = 512;
  static constexpr int kGroup = 128;  // codes that share a scale
  static constexpr int kRotaryColumns = 64;
  static constexpr int kRotary = kCodes + kCodes / kGroup * 4;                  // where they begin, in bytes
  static constexpr int kChunks = (kRotary + 2 * kRotaryColumns) / kChunkBytes;  // of a row
  static constexpr int kPitch = KTile::kPitch;
  static constexpr int kBytes = KTile::kBytes;

  /// Byte offset of a row's byte.
  static FA_DEVICE constexpr int offset(int row, int byte) { return row * kPitch + byte; }

  /// Turns rows that have landed for all into those of a KTile. A warp has whole rows: its lanes read one, then write
  /// it.
  static FA_DEVICE void widen(uint32_t tile, int thread) {
    static_assert(sizeof(T) == 2 && kCodes == 16 * kWarpSize && kRotaryColumns == 2 * kWarpSize);
    const int lane = thread % kWarpSize;
    FA_UNROLL_BY(1)
    for (int row = thread / kWarpSize; row < kRows; row += kThreads / kWarpSize) {
      const uint32_t from = tile + offset(row, 0);
      const Chunk codes = ptx::ld_shared_chunk(from + 16 * lane);
      const float scale = ptx::from_bits(ptx::ld_shared_b32(from + kCodes + 16 * lane / kGroup * 4));
      const uint32_t rotary = ptx::ld_shared_b32(from + kRotary + 4 * lane);
      ptx::sync_warp();  // all lanes have read the row, in whose place the wide one goes
      FA_UNROLL
      for (int half = 0; half < 2; ++half) {
        Chunk wide;
        FA_UNROLL
        for (int i = 0; i < 4; ++i) {
          const uint32_t word = codes.word[2 * half + i / 2];
          const uint32_t pair = i % 2 == 0 ? e4m3::pair<T, Bytes::first>(word) : e4m3::pair<T, Bytes::last>(word);
          wide.word[i] = ptx::convert_pair<T>(half_of<T>(pair, 0) * scale, half_of<T>(pair, 1) * scale);
        }
        ptx::st_shared_chunk(from + 32 * lane + 16 * half, wide);
      }
      ptx::st_shared_b32(from + 2 * kCodes + 4 * lane,
                         ptx::convert_pair<T>(half_of<bf16>(rotary, 0), half_of<bf16>(rotary, 1)));
    }
  }
};

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_LATENT_CUH_
