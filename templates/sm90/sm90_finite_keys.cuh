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

/// The same for 16 rows and all columns, by a warp of few registers: an element after the other, and addresses anew.
template <class T, class DsTile, int kTileN, int kColumns>
FA_DEVICE void multiply_slowly_by_finite_keys(uint32_t target, uint32_t ds, uint32_t keys) {
  using KeySlab = SwizzledTile<kTileN, kSlabColumns>;
  FA_UNROLL_BY(1)
  for (int i = 0; i < kColumns / 2; ++i) {  // element i % 4 of fragment i / 4
    float sum = 0.f;
    FA_UNROLL_BY(1)
    for (int key = 0; key < kTileN; ++key) {
      const int lane = ptx::lane_index();
      const int row = lane / 4 + i / 2 % 2 * 8;
      const uint32_t weight = ds + row * DsTile::kRowBytes + key / kSlabColumns * DsTile::kSlabBytes +
                              ((key / 8 ^ row) % 8) * kernel::kChunkBytes + key % 8 * 2;
      const uint32_t factor = keys + i / 32 * KeySlab::kSlabBytes + key * KeySlab::kRowBytes +
                              ((i / 4 ^ key) % 8) * kernel::kChunkBytes + lane % 4 * 4 + i % 2 * 2;
      const auto finite = static_cast<uint16_t>(kernel::Finite<T>()(ptx::ld_shared_b16(factor)));
      sum = ptx::fma(kernel::to_float(T{ptx::ld_shared_b16(weight)}), kernel::to_float(T{finite}), sum);
    }
    ptx::st_shared_b32(target + i / 4 * 512 + i % 4 * 4, ptx::bits(sum));
  }
}

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_FINITE_KEYS_CUH_
