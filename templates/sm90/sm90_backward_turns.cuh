#ifndef FA_TEMPLATES_SM90_SM90_BACKWARD_TURNS_CUH_
#define FA_TEMPLATES_SM90_SM90_BACKWARD_TURNS_CUH_

#include <common/constants.cuh>
#include <common/types.cuh>
#include <ptx/atomic.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::sm90 {

/// dK and dV [16 * kWarps keys, 8 * kDkTilesOf or 8 * kDvTiles] of a key tile, which blocks with parts of its query
/// tiles add up one after the other: the result does not depend on time. The sums lie as in registers, a chunk a thread
/// and n8 tile. A warp reads and writes its own keys alone, so that warps take their turns for themselves.
template <int kWarps, int kDkTilesOf, int kDvTiles>
struct TurnSums {
  static constexpr int kDkTiles = kDkTilesOf;
  static constexpr int kFragment = 4 * kernel::kWarpSize;  // floats of a warp's n8 tile
  static constexpr int kFloats = kWarps * (kDkTiles + kDvTiles) * kFragment;

  float* sums;    // [kWarps, kDkTiles + kDvTiles, kWarpSize, 4], of the key tile
  int32_t* turn;  // of the warp's keys: how many blocks have added
  int warp;       // of the key tile

  FA_DEVICE void await(int number) const {
    if (lane() == 0) ptx::await_flag_global(turn, number);
    ptx::sync_warp();
  }

  /// Adds what is there to `sum`, of which the first n8 tile is kFirst.
  template <int kFirst, int kCount>
  FA_DEVICE void load(float (&sum)[kCount]) const {
    const float* const own = place(kFirst);
    FA_UNROLL
    for (int j = 0; j < kCount / 4; ++j) {
      const kernel::Chunk chunk = ptx::ld_global_chunk(own + j * kFragment);
      FA_UNROLL
      for (int i = 0; i < 4; ++i) sum[4 * j + i] += ptx::from_bits(chunk.word[i]);
    }
  }

  template <int kFirst, int kCount>
  FA_DEVICE void leave(const float (&sum)[kCount]) const {
    float* const own = place(kFirst);
    FA_UNROLL
    for (int j = 0; j < kCount / 4; ++j) {
      ptx::st_global_chunk(own + j * kFragment, {{ptx::bits(sum[4 * j]), ptx::bits(sum[4 * j + 1]),
                                                  ptx::bits(sum[4 * j + 2]), ptx::bits(sum[4 * j + 3])}});
    }
  }

  /// Tells the next block, which sees what all lanes have left.
  FA_DEVICE void pass_on(int number) const {
    ptx::sync_warp();
    if (lane() == 0) ptx::raise_flag_global(turn, number);
  }

 private:
  FA_DEVICE static int lane() { return ptx::thread_index() % kernel::kWarpSize; }
  FA_DEVICE float* place(int tile) const {
    return sums + (warp * (kDkTiles + kDvTiles) + tile) * kFragment + 4 * lane();
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_BACKWARD_TURNS_CUH_
