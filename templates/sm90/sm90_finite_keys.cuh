#ifndef FA_TEMPLATES_SM90_SM90_FINITE_KEYS_CUH_
#define FA_TEMPLATES_SM90_SM90_FINITE_KEYS_CUH_

#include <common/constants.cuh>
#include <common/elements.cuh>
#include <common/types.cuh>
#include <ptx/language.cuh>
#include <ptx/ldmatrix.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/mma.cuh>
#include <ptx/thread.cuh>
#include <sm90/sm90_shared_tile.cuh>

namespace fa::sm90 {

/// A warp's dQ = dS K once more, by mma.sync, without the infinities and NaNs of K, which 0 may not be multiplied with:
/// those of a key reach the rows that keep it through dS.
///
/// `row`: the first of the warp's 16 in the tile of dS; `keys`: slabs of kTileN keys from the first column of dQ on;
/// `target`: this lane's place in the first of so many fragments in shared memory.
template <class T, class DsTile, int kTileN>
FA_DEVICE void multiply_by_finite_keys(uint32_t target, int fragments, uint32_t ds, int row, uint32_t keys, int lane) {
  using KeySlab = SwizzledTile<kTileN, kSlabColumns>;
  const uint32_t own_row = ds + (row + lane % 16) * DsTile::kRowBytes;
  const uint32_t own_key = keys + lane % 16 * KeySlab::kRowBytes;
  FA_UNROLL_BY(1)
  for (int j = 0; j < fragments; ++j) {
    float sum[4] = {};
    FA_UNROLL_BY(1)
    for (int step = 0; step < kTileN / 16; ++step) {
      uint32_t a[4];
      ptx::ldmatrix_x4(a, own_row + step / 4 * DsTile::kSlabBytes +
                              ((2 * (step % 4) + lane / 16) ^ (lane % 8)) * kernel::kChunkBytes);
      uint32_t b[2];
      ptx::ldmatrix_x2_trans(b, own_key + 16 * step * KeySlab::kRowBytes + j / 8 * KeySlab::kSlabBytes +
                                    ((j % 8) ^ (lane % 8)) * kernel::kChunkBytes);
      ptx::mma_m16n8k16<T>(sum, a, kernel::Finite<T>()(b[0]), kernel::Finite<T>()(b[1]));
    }
    ptx::st_shared_chunk(target + j * 512,
                         {{ptx::bits(sum[0]), ptx::bits(sum[1]), ptx::bits(sum[2]), ptx::bits(sum[3])}});
  }
  ptx::sync_warp();  // all lanes have read K and dS
}

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_FINITE_KEYS_CUH_
