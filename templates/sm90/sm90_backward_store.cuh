#ifndef FA_TEMPLATES_SM90_SM90_BACKWARD_STORE_CUH_
#define FA_TEMPLATES_SM90_SM90_BACKWARD_STORE_CUH_

#include <common/transpose.cuh>
#include <common/types.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>

namespace fa::sm90 {

/// A warp's 16 keys of dK or dV, from `first_key` on, those below `keys`: the four lanes of a quad exchange what they
/// hold of four neighbouring n8 tiles, so that each stores 16 bytes. `rows`: [keys, kCount * 2] of one head, of which
/// the first `columns` are there.
template <class T, int kCount>
FA_DEVICE void store_rows(const float (&sum)[kCount], T* rows, int64_t stride_s, int first_key, int keys, int lane,
                          int columns = 2 * kCount) {
  constexpr int kColumnTiles = kCount / 4;
  FA_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int key = first_key + lane / 4 + 8 * r;
    const bool inside = key < keys;
    T* const target = rows + (inside ? key : 0) * stride_s;
    FA_UNROLL
    for (int j = 0; j + 4 <= kColumnTiles; j += 4) {
      uint32_t words[4];
      FA_UNROLL
      for (int i = 0; i < 4; ++i) {
        words[i] = ptx::convert_pair<T>(sum[4 * (j + i) + 2 * r], sum[4 * (j + i) + 2 * r + 1]);
      }
      kernel::transpose_quad(words, lane);
      if (inside && 8 * (j + lane % 4) < columns) {
        ptx::st_global_chunk(target + 8 * (j + lane % 4), {{words[0], words[1], words[2], words[3]}});
      }
    }
    FA_UNROLL
    for (int j = kColumnTiles / 4 * 4; j < kColumnTiles; ++j) {
      if (inside && 8 * j < columns) {
        ptx::st_global(reinterpret_cast<uint32_t*>(target + 8 * j + 2 * (lane % 4)),
                       ptx::convert_pair<T>(sum[4 * j + 2 * r], sum[4 * j + 2 * r + 1]));
      }
    }
  }
}

/// fp32 sums over one split's query tiles, for backward_reduce. `rows`: [s_kv, kRow] of one head, from the sum's first
/// column on.
template <int kRow, int kCount>
FA_DEVICE void store_partial(const float (&sum)[kCount], float* rows, int first_key, int s_kv, int lane,
                             int columns = 2 * kCount) {
  FA_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int key = first_key + lane / 4 + 8 * r;
    if (key >= s_kv) continue;
    float* const target = rows + static_cast<int64_t>(key) * kRow + 2 * (lane % 4);
    FA_UNROLL
    for (int j = 0; j < kCount / 4; ++j) {
      if (8 * j >= columns) break;
      ptx::st_global(target + 8 * j, sum[4 * j + 2 * r]);
      ptx::st_global(target + 8 * j + 1, sum[4 * j + 2 * r + 1]);
    }
  }
}

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_BACKWARD_STORE_CUH_
