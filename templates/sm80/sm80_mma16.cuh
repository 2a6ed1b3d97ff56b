#ifndef FA_TEMPLATES_SM80_SM80_MMA16_CUH_
#define FA_TEMPLATES_SM80_SM80_MMA16_CUH_

#include <common/elements.cuh>
#include <common/online_softmax.cuh>
#include <common/shared_tile.cuh>
#include <ptx/ldmatrix.cuh>
#include <ptx/math.cuh>
#include <sm80/sm80_products.cuh>

namespace fa::sm80 {

using namespace kernel;

/// The two matrix products of attention for one warp in fp16 or bf16: mma.m16n8k16, and one mma.m16n8k8 where the head
/// dim is an odd multiple of 8, so that no head dim is padded. Of 8-bit floats S = Q K^T alone, twice as many columns
/// at a time.
template <class T>
struct WarpGemm {
  static constexpr int kStep = 32 / static_cast<int>(sizeof(T));  // depth of one mma
  static constexpr int kChunk = kStep / 2;                        // and of a row of a matrix of ldmatrix

  /// Q fragments of one warp, all of its rows and the whole head dim.
  template <int kMTiles, int kHeadDim>
  using QFragment = uint32_t[kMTiles][ceil_div(kHeadDim, kStep)][4];

  // Addresses are a part that depends on the lane plus a constant, kept apart so that the constant folds into the
  // instruction.
  template <class Tile>
  static FA_DEVICE uint32_t a_lane(uint32_t tile, int lane) {
    return tile + Tile::offset(lane % 16, lane / 16 * kChunk);
  }

  /// The A operand of depth step `k` from rows `row`.. of a tile: 16 rows, 32 (or the last 16) bytes of each.
  template <class Tile, int kHeadDim>
  static FA_DEVICE void load_a(uint32_t (&a)[4], uint32_t tile, int row, int k, int lane) {
    if (kHeadDim % kStep == 0 || k < kHeadDim / kStep) {
      ptx::ldmatrix_x4(a, a_lane<Tile>(tile, lane) + Tile::offset(row, k * kStep));
    } else {
      uint32_t half[2];
      ptx::ldmatrix_x2(half, tile + Tile::offset(lane % 16, 0) + Tile::offset(row, k * kStep));
      a[0] = half[0];
      a[1] = half[1];
    }
  }

  template <class Tile, int kMTiles, int kHeadDim>
  static FA_DEVICE void load_q(QFragment<kMTiles, kHeadDim>& q, uint32_t tile, int row, int lane) {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int k = 0; k < ceil_div(kHeadDim, kStep); ++k) {
        load_a<Tile, kHeadDim>(q[m][k], tile, row + 16 * m, k, lane);
      }
    }
  }

  /// S += Q K^T over the head dim; `load_a(a, m, k)` gives Q's fragment. K is [tile_n, kHeadDim] in shared memory.
  template <class KTile, int kHeadDim, int kMTiles, int kNTiles, class LoadA>
  static FA_DEVICE void scores(Fragment<kMTiles, kNTiles>& s, uint32_t k_tile, int lane, LoadA load_a) {
    static_assert(kNTiles % 2 == 0, "keys are loaded 16 at a time");
    const uint32_t k_lane = k_tile + KTile::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2 * kChunk);
    FA_UNROLL
    for (int k = 0; k < kHeadDim / kStep; ++k) {
      uint32_t a[kMTiles][4];
      FA_UNROLL
      for (int m = 0; m < kMTiles; ++m) load_a(a[m], m, k);
      FA_UNROLL
      for (int n = 0; n < kNTiles; n += 2) {
        uint32_t b[4];  // keys 8n..8n+7 at both halves of the depth, then keys 8n+8..8n+15
        ptx::ldmatrix_x4(b, k_lane + KTile::offset(8 * n, k * kStep));
        FA_UNROLL
        for (int m = 0; m < kMTiles; ++m) {
          multiply_step<T>(s[m][n], a[m], b[0], b[1]);
          multiply_step<T>(s[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
    if constexpr (kHeadDim % kStep != 0) {
      constexpr int k = kHeadDim / kStep;
      uint32_t a[kMTiles][4];
      FA_UNROLL
      for (int m = 0; m < kMTiles; ++m) load_a(a[m], m, k);
      FA_UNROLL
      for (int n = 0; n < kNTiles; n += 2) {
        uint32_t b[2];
        ptx::ldmatrix_x2(b, k_tile + KTile::offset(lane % 16, 0) + KTile::offset(8 * n, k * kStep));
        FA_UNROLL
        for (int m = 0; m < kMTiles; ++m) {
          multiply_half_step<T>(s[m][n], a[m], b[0]);
          multiply_half_step<T>(s[m][n + 1], a[m], b[1]);
        }
      }
    }
  }

  /// The A operand of depth step `k` from accumulators, rounded: two neighbouring n tiles.
  template <int kHalves = 2, int kMTiles, int kNTiles>
  static FA_DEVICE void pack_step(uint32_t (&a)[kMTiles][4], const Fragment<kMTiles, kNTiles>& p, int k) {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const float(&c)[4] = p[m][2 * k + half];
        a[m][2 * half] = ptx::convert_pair<T>(c[0], c[1]);
        if constexpr (kHalves == 2) a[m][2 * half + 1] = ptx::convert_pair<T>(c[2], c[3]);
      }
    }
  }

  /// O += P V. P stays in registers: the accumulators of two neighbouring n tiles are the A operand of one depth step.
  /// V is [tile_n, kHeadDimV] in shared memory, read transposed, and a register at a time through `filter`.
  template <class VTile, int kHeadDimV, int kMTiles, int kNTiles, class Filter = AsIs>
  static FA_DEVICE void accumulate(Fragment<kMTiles, kHeadDimV / 8>& o, const Fragment<kMTiles, kNTiles>& p,
                                   uint32_t v_tile, int lane, Filter filter = {}) {
    const uint32_t v_lane = v_tile + VTile::offset(lane % 16, lane / 16 * 8);
    FA_UNROLL
    for (int k = 0; k < kNTiles / 2; ++k) {
      uint32_t a[kMTiles][4];
      pack_step(a, p, k);
      FA_UNROLL
      for (int n = 0; n + 1 < kHeadDimV / 8; n += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, v_lane + VTile::offset(k * kStep, 8 * n));
        apply(filter, b);
        FA_UNROLL
        for (int m = 0; m < kMTiles; ++m) {
          ptx::mma_m16n8k16<T>(o[m][n], a[m], b[0], b[1]);
          ptx::mma_m16n8k16<T>(o[m][n + 1], a[m], b[2], b[3]);
        }
      }
      if constexpr (kHeadDimV / 8 % 2 != 0) {
        constexpr int n = kHeadDimV / 8 - 1;
        uint32_t b[2];
        ptx::ldmatrix_x2_trans(b, v_tile + VTile::offset(lane % 16, 0) + VTile::offset(k * kStep, 8 * n));
        apply(filter, b);
        FA_UNROLL
        for (int m = 0; m < kMTiles; ++m) ptx::mma_m16n8k16<T>(o[m][n], a[m], b[0], b[1]);
      }
    }
  }

  /// The column that row `g` of the upper (0) or lower half of tile `n` of a transposed O is.
  static FA_DEVICE constexpr int column(int n, int half, int g) { return 16 * n + 8 * half + g; }

  /// The same of half an m tile: O is transposed (add_two_tiles).
  template <class VTile, int kHeadDimV, int kNTiles>
  static FA_DEVICE void accumulate_half(Fragment<1, kHeadDimV / 16>& o, const Fragment<1, kNTiles>& p, uint32_t v_tile,
                                        int lane) {
    static_assert(kHeadDimV % 16 == 0, "two n tiles at a time");
    const uint32_t v_lane = v_tile + VTile::offset(lane % 16, lane / 16 * 8);
    FA_UNROLL
    for (int k = 0; k < kNTiles / 2; ++k) {
      uint32_t a[1][4];
      pack_step<1>(a, p, k);
      FA_UNROLL
      for (int n = 0; n < kHeadDimV / 8; n += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, v_lane + VTile::offset(k * kStep, 8 * n));
        add_two_tiles<T, 1>(o, n, a, {b[0], b[1]}, {b[2], b[3]});
      }
    }
  }

  // What the backward adds: operands that come transposed, or from accumulators.

  /// The A operand of depth step `k` from columns `row`.. of a tile whose rows are the depth.
  template <class Tile>
  static FA_DEVICE void load_a_transposed(uint32_t (&a)[4], uint32_t tile, int row, int k, int lane) {
    ptx::ldmatrix_x4_trans(
        a, tile + Tile::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8) + Tile::offset(k * kStep, row));
  }

  /// Accumulators rounded to A operands: neighbouring n tiles are one depth step.
  template <int kMTiles, int kNTiles>
  struct Packed {
    uint32_t words[kMTiles][kNTiles / 2][4];
  };

  template <int kMTiles, int kNTiles>
  static FA_DEVICE void pack(Packed<kMTiles, kNTiles>& packed, const Fragment<kMTiles, kNTiles>& c) {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int n = 0; n < kNTiles; ++n) {
        FA_UNROLL
        for (int r = 0; r < 2; ++r) {
          packed.words[m][n / 2][n % 2 * 2 + r] = ptx::convert_pair<T>(c[m][n][2 * r], c[m][n][2 * r + 1]);
        }
      }
    }
  }

  template <class Tile, int kMTiles, int kNTiles>
  static FA_DEVICE void store(const Packed<kMTiles, kNTiles>& packed, uint32_t tile, int lane) {
    const uint32_t own = tile + Tile::offset(lane / 4, 2 * (lane % 4));
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int n = 0; n < kNTiles; ++n) {
        FA_UNROLL
        for (int r = 0; r < 2; ++r) {
          ptx::st_shared_b32(own + Tile::offset(16 * m + 8 * r, 8 * n), packed.words[m][n / 2][n % 2 * 2 + r]);
        }
      }
    }
  }

  /// C += A B with `load_a(a, m, k)` giving A. B is [kDepth, 8 * kNTiles] in shared memory, read transposed. Only n
  /// tiles from kBegin (even) to before kEnd, if given.
  template <class BTile, int kDepth, int kBegin = 0, int kEnd = -1, int kMTiles, int kNTiles, class LoadA>
  static FA_DEVICE void multiply(Fragment<kMTiles, kNTiles>& c, uint32_t b_tile, int lane, LoadA load_a) {
    constexpr int kLast = kEnd < 0 ? kNTiles : kEnd;
    const uint32_t b_lane = b_tile + BTile::offset(lane % 16, lane / 16 * 8);
    FA_UNROLL
    for (int k = 0; k < kDepth / kStep; ++k) {
      uint32_t a[kMTiles][4];
      FA_UNROLL
      for (int m = 0; m < kMTiles; ++m) load_a(a[m], m, k);
      FA_UNROLL
      for (int n = kBegin; n + 1 < kLast; n += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, b_lane + BTile::offset(k * kStep, 8 * n));
        FA_UNROLL
        for (int m = 0; m < kMTiles; ++m) {
          ptx::mma_m16n8k16<T>(c[m][n], a[m], b[0], b[1]);
          ptx::mma_m16n8k16<T>(c[m][n + 1], a[m], b[2], b[3]);
        }
      }
      if constexpr (kLast % 2 != 0) {
        constexpr int n = kLast - 1;
        uint32_t b[2];
        ptx::ldmatrix_x2_trans(b, b_tile + BTile::offset(lane % 16, 0) + BTile::offset(k * kStep, 8 * n));
        FA_UNROLL
        for (int m = 0; m < kMTiles; ++m) ptx::mma_m16n8k16<T>(c[m][n], a[m], b[0], b[1]);
      }
    }
  }

  template <class BTile, int kMTiles, int kDepthTiles, int kNTiles>
  static FA_DEVICE void multiply(Fragment<kMTiles, kNTiles>& c, const Packed<kMTiles, kDepthTiles>& packed,
                                 uint32_t b_tile, int lane) {
    multiply<BTile, 8 * kDepthTiles>(c, b_tile, lane, [&](uint32_t(&a)[4], int m, int k) {
      FA_UNROLL
      for (int i = 0; i < 4; ++i) a[i] = packed.words[m][k][i];
    });
  }

 private:
  template <class Filter, int kCount>
  static FA_DEVICE void apply(Filter filter, uint32_t (&b)[kCount]) {
    FA_UNROLL
    for (int i = 0; i < kCount; ++i) b[i] = filter(b[i]);
  }
};

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_MMA16_CUH_
