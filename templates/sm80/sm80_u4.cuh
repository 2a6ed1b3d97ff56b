#ifndef FA_TEMPLATES_SM80_SM80_U4_CUH_
#define FA_TEMPLATES_SM80_SM80_U4_CUH_

#include <common/online_softmax.cuh>
#include <common/u4.cuh>
#include <ptx/ldmatrix.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <sm80/sm80_mma16.cuh>
#include <sm80/sm80_products.cuh>

namespace fa::sm80 {

/// The matrix products of WarpGemm where K or V has 4 bits an element (common/u4.cuh). ldmatrix moves four of its
/// elements where it would move one of 16 bits: a matrix has 32 columns, and is two depth steps of S, or four n tiles
/// of O.
///
/// Of each 32 columns of S = Q K^T lane t of a quad has those from 8t on: the first four in the first depth step.
template <class T, class Stored>
struct U4Keys {
  /// The A operand of depth step `k`, as WarpGemm::load_a, with the depth permuted.
  template <class Tile>
  static FA_DEVICE void load_a(uint32_t (&a)[4], uint32_t tile, int row, int k, int lane) {
    const uint32_t at = tile + Tile::offset(lane / 4, 8 * (lane % 4)) + Tile::offset(row, k / 2 * 32 + k % 2 * 4);
    ptx::ld_shared_b64(a[0], a[2], at);
    ptx::ld_shared_b64(a[1], a[3], at + Tile::offset(8, 0));
  }

  /// As WarpGemm::scores; K is [tile_n, kHeadDim / 2] of Stored in shared memory, `scales` [groups, kPitch] words, of
  /// whose rows the first is that of the tile's first key.
  template <class KTile, int kHeadDim, int kPitch, int kMTiles, int kNTiles, class LoadA>
  static FA_DEVICE void scores(Fragment<kMTiles, kNTiles>& s, uint32_t k_tile, uint32_t scales, int lane,
                               LoadA load_a) {
    static_assert(kNTiles % 2 == 0 && kHeadDim % 32 == 0, "16 keys and 32 columns at a time");
    const uint32_t k_lane = k_tile + KTile::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 16);
    const uint32_t own = scales + lane / 4 * kWord;
    FA_UNROLL
    for (int c = 0; c + 1 < kHeadDim / 32; c += 2) {
      uint32_t a[2][2][kMTiles][4];  // of 32 columns each
      const auto load = [&](int half) {
        FA_UNROLL
        for (int m = 0; m < kMTiles; ++m) {
          FA_UNROLL
          for (int i = 0; i < 2; ++i) load_a(a[half][i][m], m, 2 * (c + half) + i);
        }
      };
      constexpr bool kOnce = kNTiles == 2;  // loaded when they are wanted: beside a wide O registers are few
      if constexpr (!kOnce) {
        load(0);
        load(1);
      }
      FA_UNROLL
      for (int n = 0; n < kNTiles; n += 2) {
        uint32_t b[4];  // keys 8n..8n+7 at columns 32c.. and 32c+32.., then keys 8n+8..8n+15
        ptx::ldmatrix_x4(b, k_lane + KTile::offset(8 * n, 16 * c));
        FA_UNROLL
        for (int half = 0; half < 2; ++half) {
          if constexpr (kOnce) load(half);
          FA_UNROLL
          for (int i = 0; i < 2; ++i) {
            multiply(s, n + i, a[half][0], a[half][1], b[half + 2 * i],
                     own + (group_of(c + half) * kPitch + 8 * (n + i)) * kWord);
          }
        }
      }
    }
    if constexpr (kHeadDim / 32 % 2 != 0) {
      constexpr int c = kHeadDim / 32 - 1;
      uint32_t a[2][kMTiles][4];
      FA_UNROLL
      for (int m = 0; m < kMTiles; ++m) {
        FA_UNROLL
        for (int i = 0; i < 2; ++i) load_a(a[i][m], m, 2 * c + i);
      }
      FA_UNROLL
      for (int n = 0; n < kNTiles; n += 2) {
        uint32_t b[2];
        ptx::ldmatrix_x2(b, k_tile + KTile::offset(lane % 16, 0) + KTile::offset(8 * n, 16 * c));
        FA_UNROLL
        for (int i = 0; i < 2; ++i) {
          multiply(s, n + i, a[0], a[1], b[i], own + (group_of(c) * kPitch + 8 * (n + i)) * kWord);
        }
      }
    }
  }

 private:
  static constexpr int kWord = 4;

  static FA_DEVICE constexpr int group_of(int chunk) { return 32 * chunk / Stored::kGroup; }

  template <int kMTiles, int kNTiles>
  static FA_DEVICE void multiply(Fragment<kMTiles, kNTiles>& s, int n, const uint32_t (&first)[kMTiles][4],
                                 const uint32_t (&second)[kMTiles][4], uint32_t word, uint32_t scale) {
    const uint32_t of_key = ptx::ld_shared_b32(scale);
    uint32_t pairs[4];
    numbers_of<T>(pairs, word, ptx::prmt(of_key, 0, 0x1010), ptx::prmt(of_key, 0, 0x3232));
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      ptx::mma_m16n8k16<T>(s[m][n], first[m], pairs[0], pairs[1]);
      ptx::mma_m16n8k16<T>(s[m][n], second[m], pairs[2], pairs[3]);
    }
  }
};

/// Of O += P V lane t of a quad has of each 32 columns those from 8t on, two in each of four n tiles, until `restore`
/// puts them in their order.
template <class T, class Stored>
struct U4Values {
  /// As WarpGemm::accumulate; V is [tile_n, kHeadDimV / 2] of Stored in shared memory, `scales` as of U4Keys::scores.
  template <class VTile, int kHeadDimV, int kPitch, int kMTiles, int kNTiles>
  static FA_DEVICE void accumulate(Fragment<kMTiles, kHeadDimV / 8>& o, const Fragment<kMTiles, kNTiles>& p,
                                   uint32_t v_tile, uint32_t scales, int lane) {
    static_assert(kHeadDimV % 32 == 0, "32 columns at a time");
    const uint32_t v_lane = v_tile + VTile::offset(lane % 16, lane / 16 * 16);
    FA_UNROLL
    for (int k = 0; k < kNTiles / 2; ++k) {
      uint32_t a[kMTiles][4];
      WarpGemm<T>::pack_step(a, p, k);
      const uint32_t own = scales + (16 * k + 2 * (lane % 4)) * kWord;
      FA_UNROLL
      for (int c = 0; c + 1 < kHeadDimV / 32; c += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, v_lane + VTile::offset(16 * k, 16 * c));
        multiply(o, 4 * c, a, b[0], b[1], own + group_of(c) * kPitch * kWord);
        multiply(o, 4 * c + 4, a, b[2], b[3], own + group_of(c + 1) * kPitch * kWord);
      }
      if constexpr (kHeadDimV / 32 % 2 != 0) {
        constexpr int c = kHeadDimV / 32 - 1;
        uint32_t b[2];
        ptx::ldmatrix_x2_trans(b, v_tile + VTile::offset(lane % 16, 0) + VTile::offset(16 * k, 16 * c));
        multiply(o, 4 * c, a, b[0], b[1], own + group_of(c) * kPitch * kWord);
      }
    }
  }

  /// Gives the columns of O their places in fragments: of each 32, lane i of a quad gets what lane j has in tile i as
  /// its tile j.
  template <int kMTiles, int kOTiles>
  static FA_DEVICE void restore(Fragment<kMTiles, kOTiles>& o, int lane) {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int n = 0; n < kOTiles; n += 4) {
        FA_UNROLL
        for (int r = 0; r < 4; ++r) {
          exchange(o[m][n][r], o[m][n + 1][r], lane, 1);
          exchange(o[m][n + 2][r], o[m][n + 3][r], lane, 1);
          exchange(o[m][n][r], o[m][n + 2][r], lane, 2);
          exchange(o[m][n + 1][r], o[m][n + 3][r], lane, 2);
        }
      }
    }
  }

 private:
  static constexpr int kWord = 4;

  static FA_DEVICE constexpr int group_of(int chunk) { return 32 * chunk / Stored::kGroup; }

  /// Four n tiles from `n` on: `low` has rows 2t and 2t + 1 of V, `high` 2t + 8 and 2t + 9; of 4 columns each.
  template <int kMTiles, int kOTiles>
  static FA_DEVICE void multiply(Fragment<kMTiles, kOTiles>& o, int n, const uint32_t (&a)[kMTiles][4], uint32_t low,
                                 uint32_t high, uint32_t scales) {
    uint32_t first[4], second[4];
    numbers(first, low, scales);
    numbers(second, high, scales + 8 * kWord);
    FA_UNROLL
    for (int i = 0; i < 4; ++i) {
      FA_UNROLL
      for (int m = 0; m < kMTiles; ++m) ptx::mma_m16n8k16<T>(o[m][n + i], a[m], first[i], second[i]);
    }
  }

  static FA_DEVICE void numbers(uint32_t (&pairs)[4], uint32_t word, uint32_t scales) {
    uint32_t first, second;  // a scale and an offset of two keys
    ptx::ld_shared_b64(first, second, scales);
    numbers_of<T>(pairs, word, ptx::prmt(first, second, 0x5410), ptx::prmt(first, second, 0x7632));
  }

  static FA_DEVICE void exchange(float& low, float& high, int lane, int distance) {
    const bool upper = (lane & distance) != 0;
    const float received = ptx::shfl_xor(upper ? low : high, distance);
    (upper ? low : high) = received;
  }
};

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_U4_CUH_
