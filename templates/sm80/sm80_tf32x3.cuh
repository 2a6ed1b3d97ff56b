#ifndef FA_TEMPLATES_SM80_SM80_TF32X3_CUH_
#define FA_TEMPLATES_SM80_SM80_TF32X3_CUH_

#include <common/online_softmax.cuh>
#include <common/shared_tile.cuh>
#include <ptx/ldmatrix.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/mma.cuh>
#include <ptx/thread.cuh>
#include <sm80/sm80_mma16.cuh>

namespace fa::sm80 {

/// x = big + small, each of which a TF32 operand holds: big is x rounded to 10 bits of mantissa, small what is left.
struct Tf32Pair {
  uint32_t big;
  uint32_t small;
};

FA_DEVICE Tf32Pair split_tf32(float x) {
#ifdef FA_TURING  // which has no TF32: `big` is all of it
  return {ptx::bits(x), 0};
#else
  // Adding half a unit of the last kept bit and cutting rounds to nearest without the slower cvt.rna.
  const uint32_t big = (ptx::bits(x) + 0x1000u) & 0xffffe000u;
  return {big, ptx::bits(x - ptx::from_bits(big))};
#endif
}

/// fp32 products as three TF32 products each, small terms first: close to float arithmetic at a third of the tensor
/// cores' TF32 rate (Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", 2022).
template <>
struct WarpGemm<float> {
  static constexpr int kStep = 8;

  template <int kMTiles, int kHeadDim>
  using QFragment = uint32_t[kMTiles][kHeadDim / kStep][4];

  struct SplitA {
    uint32_t big[4];
    uint32_t small[4];
  };

  static FA_DEVICE void split_a(SplitA& split, const float (&a)[4]) {
    FA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const Tf32Pair pair = split_tf32(a[i]);
      split.big[i] = pair.big;
      split.small[i] = pair.small;
    }
  }

#ifdef FA_TURING
  /// d += a * b by float arithmetic. The operands lie as those of the tensor cores do: lane (g, t) of A has rows g and
  /// g + 8 of depths t and t + 4, that of B these depths of column g. Each lane asks the others for what its four sums
  /// take.
  static FA_DEVICE void mma(float (&d)[4], const SplitA& a, Tf32Pair b0, Tf32Pair b1) {
    const int lane = ptx::thread_index() % kWarpSize;
    FA_UNROLL
    for (int k = 0; k < kStep; ++k) {
      const int t = k % 4;
      const float upper = ptx::from_bits(ptx::shfl(a.big[k / 4 * 2], lane / 4 * 4 + t));
      const float lower = ptx::from_bits(ptx::shfl(a.big[k / 4 * 2 + 1], lane / 4 * 4 + t));
      FA_UNROLL
      for (int e = 0; e < 2; ++e) {
        const float b = ptx::from_bits(ptx::shfl(k < 4 ? b0.big : b1.big, (lane % 4 * 2 + e) * 4 + t));
        d[e] = ptx::fma(upper, b, d[e]);
        d[2 + e] = ptx::fma(lower, b, d[2 + e]);
      }
    }
  }
#else
  /// d += a * b, small terms first.
  static FA_DEVICE void mma(float (&d)[4], const SplitA& a, Tf32Pair b0, Tf32Pair b1) {
    ptx::mma_m16n8k8_tf32(d, a.small, b0.big, b1.big);
    ptx::mma_m16n8k8_tf32(d, a.big, b0.small, b1.small);
    ptx::mma_m16n8k8_tf32(d, a.big, b0.big, b1.big);
  }
#endif

  /// Tensor cores truncate when they accumulate, a bias that grows with the length of the sum: sums are kept to a few
  /// steps and added up here, with rounding.
  static FA_DEVICE void add(float (&d)[4], const float (&step)[4]) {
    FA_UNROLL
    for (int i = 0; i < 4; ++i) d[i] += step[i];
  }

  /// An 8x8 matrix of 16-bit elements is 8 rows of 4 floats, and ldmatrix hands lane (g, t) float t of row g: just the
  /// TF32 operand.
  template <class Tile, int kHeadDim>
  static FA_DEVICE void load_a(uint32_t (&a)[4], uint32_t tile, int row, int k, int lane) {
    ptx::ldmatrix_x4(a, tile + Tile::offset(lane % 16, lane / 16 * 4) + Tile::offset(row, k * kStep));
  }

  template <class Tile, int kMTiles, int kHeadDim>
  static FA_DEVICE void load_q(QFragment<kMTiles, kHeadDim>& q, uint32_t tile, int row, int lane) {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int k = 0; k < kHeadDim / kStep; ++k) load_a<Tile, kHeadDim>(q[m][k], tile, row + 16 * m, k, lane);
    }
  }

  /// S += Q K^T.
  template <class KTile, int kHeadDim, int kMTiles, int kNTiles, class LoadA>
  static FA_DEVICE void scores(Fragment<kMTiles, kNTiles>& s, uint32_t k_tile, int lane, LoadA load_a) {
    const uint32_t k_lane = k_tile + KTile::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 4);
    // Partly rolled: fully unrolled, three products a step cost seconds of compile time at large head dims.
    [[maybe_unused]] constexpr int kDepthUnroll = kHeadDim <= 128 ? 2 : 1;
    FA_UNROLL_BY(kDepthUnroll)
    for (int k = 0; k < kHeadDim / kStep; ++k) {
      SplitA a[kMTiles];
      FA_UNROLL
      for (int m = 0; m < kMTiles; ++m) {
        uint32_t raw[4];
        load_a(raw, m, k);
        const float values[4] = {ptx::from_bits(raw[0]), ptx::from_bits(raw[1]), ptx::from_bits(raw[2]),
                                 ptx::from_bits(raw[3])};
        split_a(a[m], values);
      }
      FA_UNROLL
      for (int n = 0; n < kNTiles; n += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, k_lane + KTile::offset(8 * n, k * kStep));
        FA_UNROLL
        for (int half = 0; half < 2; ++half) {
          const Tf32Pair b0 = split_tf32(ptx::from_bits(b[2 * half]));
          const Tf32Pair b1 = split_tf32(ptx::from_bits(b[2 * half + 1]));
          FA_UNROLL
          for (int m = 0; m < kMTiles; ++m) {
            float step[4] = {};
            mma(step, a[m], b0, b1);
            add(s[m][n + half], step);
          }
        }
      }
    }
  }

  /// O += P V. The A operand wants columns t and t + 4 of a depth step where the accumulator holds 2t and 2t + 1: the
  /// sum over keys may run in any order, so the keys of V are permuted instead.
  template <class VTile, int kHeadDimV, int kMTiles, int kNTiles, class Filter = AsIs>
  static FA_DEVICE void accumulate(Fragment<kMTiles, kHeadDimV / 8>& o, const Fragment<kMTiles, kNTiles>& p,
                                   uint32_t v_tile, int lane, Filter filter = {}) {
    const uint32_t v_lane = v_tile + VTile::offset(2 * (lane % 4), lane / 4);
    constexpr int kChain = kNTiles % 4 == 0 ? 4 : 2;
    FA_UNROLL
    for (int k = 0; k < kNTiles; k += kChain) {
      SplitA a[kChain][kMTiles];
      FA_UNROLL
      for (int c = 0; c < kChain; ++c) {
        FA_UNROLL
        for (int m = 0; m < kMTiles; ++m) {
          const float values[4] = {p[m][k + c][0], p[m][k + c][2], p[m][k + c][1], p[m][k + c][3]};
          split_a(a[c][m], values);
        }
      }
      FA_UNROLL
      for (int n = 0; n < kHeadDimV / 8; ++n) {
        float step[kMTiles][4] = {};
        FA_UNROLL
        for (int c = 0; c < kChain; ++c) {
          const uint32_t address = v_lane + VTile::offset((k + c) * kStep, 8 * n);
          const Tf32Pair b0 = split_tf32(ptx::from_bits(filter(ptx::ld_shared_b32(address))));
          const Tf32Pair b1 = split_tf32(ptx::from_bits(filter(ptx::ld_shared_b32(address + VTile::kPitch))));
          FA_UNROLL
          for (int m = 0; m < kMTiles; ++m) mma(step[m], a[c][m], b0, b1);
        }
        FA_UNROLL
        for (int m = 0; m < kMTiles; ++m) add(o[m][n], step[m]);
      }
    }
  }

  // What the backward adds: operands that come transposed, or from accumulators.

  /// The A operand of depth step `k` from columns `row`.. of a tile whose rows are the depth.
  template <class Tile>
  static FA_DEVICE void load_a_transposed(uint32_t (&a)[4], uint32_t tile, int row, int k, int lane) {
    const uint32_t own = tile + Tile::offset(lane % 4, lane / 4) + Tile::offset(k * kStep, row);
    FA_UNROLL
    for (int i = 0; i < 4; ++i) a[i] = ptx::ld_shared_b32(own + Tile::offset(i / 2 * 4, i % 2 * 8));
  }

  template <int kMTiles, int kNTiles>
  struct Packed {
    Fragment<kMTiles, kNTiles> values;
  };

  template <int kMTiles, int kNTiles>
  static FA_DEVICE void pack(Packed<kMTiles, kNTiles>& packed, const Fragment<kMTiles, kNTiles>& c) {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int n = 0; n < kNTiles; ++n) {
        FA_UNROLL
        for (int e = 0; e < 4; ++e) packed.values[m][n][e] = c[m][n][e];
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
          ptx::st_shared_b64(own + Tile::offset(16 * m + 8 * r, 8 * n), ptx::bits(packed.values[m][n][2 * r]),
                             ptx::bits(packed.values[m][n][2 * r + 1]));
        }
      }
    }
  }

  /// C += A B with `load_a(a, m, k)` giving A. B is [kDepth, 8 * kNTiles] in shared memory, read transposed.
  template <class BTile, int kDepth, int kMTiles, int kNTiles, class LoadA>
  static FA_DEVICE void multiply(Fragment<kMTiles, kNTiles>& c, uint32_t b_tile, int lane, LoadA load_a) {
    const uint32_t b_lane = b_tile + BTile::offset(lane % 4, lane / 4);
    constexpr int kChain = 2;
    static_assert(kDepth % (kChain * kStep) == 0, "depth steps come in chains");
    FA_UNROLL_BY(1)
    for (int k = 0; k < kDepth / kStep; k += kChain) {
      SplitA a[kChain][kMTiles];
      FA_UNROLL
      for (int link = 0; link < kChain; ++link) {
        FA_UNROLL
        for (int m = 0; m < kMTiles; ++m) {
          uint32_t raw[4];
          load_a(raw, m, k + link);
          const float values[4] = {ptx::from_bits(raw[0]), ptx::from_bits(raw[1]), ptx::from_bits(raw[2]),
                                   ptx::from_bits(raw[3])};
          split_a(a[link][m], values);
        }
      }
      FA_UNROLL
      for (int n = 0; n < kNTiles; ++n) {
        float step[kMTiles][4] = {};
        FA_UNROLL
        for (int link = 0; link < kChain; ++link) {
          const uint32_t address = b_lane + BTile::offset((k + link) * kStep, 8 * n);
          const Tf32Pair b0 = split_tf32(ptx::from_bits(ptx::ld_shared_b32(address)));
          const Tf32Pair b1 = split_tf32(ptx::from_bits(ptx::ld_shared_b32(address + BTile::offset(4, 0))));
          FA_UNROLL
          for (int m = 0; m < kMTiles; ++m) mma(step[m], a[link][m], b0, b1);
        }
        FA_UNROLL
        for (int m = 0; m < kMTiles; ++m) add(c[m][n], step[m]);
      }
    }
  }

  template <class BTile, int kMTiles, int kDepthTiles, int kNTiles>
  static FA_DEVICE void multiply(Fragment<kMTiles, kNTiles>& c, const Packed<kMTiles, kDepthTiles>& packed,
                                 uint32_t b_tile, int lane) {
    accumulate<BTile, 8 * kNTiles, kMTiles, kDepthTiles>(c, packed.values, b_tile, lane);
  }
};

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_TF32X3_CUH_
