#ifndef FA_TEMPLATES_SM80_SM80_FP8_CUH_
#define FA_TEMPLATES_SM80_SM80_FP8_CUH_

#include <common/constants.cuh>
#include <common/fp8.cuh>
#include <common/fp8_params.cuh>
#include <common/online_softmax.cuh>
#include <common/stored.cuh>
#include <common/types.cuh>
#include <ptx/fp8.cuh>
#include <ptx/language.cuh>
#include <ptx/ldmatrix.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/mma_fp8.cuh>
#include <ptx/thread.cuh>

namespace fa::sm80 {

using namespace kernel;

template <class Config>
FA_DEVICE constexpr bool sums_at_one_level() {
  if constexpr (requires { Config::kSingleLevel; }) return Config::kSingleLevel;
  return false;
}

/// What O is of: the queries' type, unless these are 8-bit floats.
template <class Config, bool kBytes>
struct OutputElement {
  using type = typename Config::Element;
};
template <class Config>
struct OutputElement<Config, true> {
  using Wider = typename Either<f16, bf16, Config::kHalfOutput>::type;
  using type = typename Either<e4m3, Wider, writes_bytes<Config>()>::type;
};

/// O += P V of 8-bit floats, P in e4m3. ldmatrix transposes pairs of columns of V: of 16 keys a lane gets four for an
/// even column, and four for the odd one behind it, which `prmt` parts. Keys have the order that accumulators of S are
/// an operand in. The n tiles 2j and 2j + 1 of O have the even and the odd columns of the 16 from 16j on, so that lane
/// t of a quad has those from 4t on.
///
/// The tensor cores keep few bits of a sum (docs/numerics.md): what a KV tile adds to O is summed by them from zero,
/// and added to O in float, times `factor`, unless kSingleLevel has them add to O itself.
template <class Value, bool kSingleLevel>
struct ByteValues {
  template <class VTile, int kHeadDimV, int kMTiles, int kNTiles>
  static FA_DEVICE void accumulate(Fragment<kMTiles, kHeadDimV / 8>& o, const Fragment<kMTiles, kNTiles>& p,
                                   uint32_t v_tile, int lane, float factor) {
    static_assert(kNTiles % 4 == 0 && kHeadDimV % 16 == 0, "32 keys and 16 columns at a time");
    constexpr int kSteps = kNTiles / 4;
    uint32_t a[kSteps][kMTiles][4];
    FA_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      FA_UNROLL
      for (int m = 0; m < kMTiles; ++m) {
        FA_UNROLL
        for (int i = 0; i < 4; ++i) {
          const float(&low)[4] = p[m][4 * k + i / 2 * 2];
          const float(&high)[4] = p[m][4 * k + i / 2 * 2 + 1];
          const int r = i % 2 * 2;
          a[k][m][i] = ptx::convert_e4m3(low[r], low[r + 1], high[r], high[r + 1]);
        }
      }
    }
    const uint32_t v_lane = v_tile + VTile::offset(lane, 0);
    FA_UNROLL
    for (int n = 0; n < kHeadDimV / 8; n += 2) {
      // Nothing of later columns is loaded ahead of it: else ptxas spills, beside so wide an O.
      if (kHeadDimV > 192 && n % 4 == 0) ptx::sync_warp();
      Fragment<kMTiles, 2> added = {};
      FA_UNROLL
      for (int k = 0; k < kSteps; ++k) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, v_lane + VTile::offset(32 * k, 8 * n));
        FA_UNROLL
        for (int odd = 0; odd < 2; ++odd) {
          const uint32_t selector = odd == 0 ? 0x6420 : 0x7531;
          const uint32_t b0 = ptx::prmt(b[0], b[1], selector), b1 = ptx::prmt(b[2], b[3], selector);
          FA_UNROLL
          for (int m = 0; m < kMTiles; ++m) {
            ptx::mma_m16n8k32<e4m3, Value>(kSingleLevel ? o[m][n + odd] : added[m][odd], a[k][m], b0, b1);
          }
        }
      }
      if constexpr (!kSingleLevel) add(o, added, n, factor);
    }
  }

 private:
  template <int kMTiles, int kOTiles>
  static FA_DEVICE void add(Fragment<kMTiles, kOTiles>& o, const Fragment<kMTiles, 2>& added, int n, float factor) {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int i = 0; i < 8; ++i) {
        float& sum = o[m][n + i / 4][i % 4];
        sum = ptx::fma(added[m][i / 4][i % 4], factor, sum);
      }
    }
  }
};

/// Four neighbouring columns of O, of 8-bit floats as far as they go.
template <class Output>
FA_DEVICE void store_columns(Output* target, const float (&o)[4]) {
  if constexpr (sizeof(Output) == 1) {
    ptx::st_global(reinterpret_cast<uint32_t*>(target), ptx::convert_e4m3(o[0], o[1], o[2], o[3]));
  } else if constexpr (sizeof(Output) == 2) {
    const uint64_t high = ptx::convert_pair<Output>(o[2], o[3]);
    ptx::st_global(reinterpret_cast<uint64_t*>(target), high << 32 | ptx::convert_pair<Output>(o[0], o[1]));
  } else {
    ptx::st_global_chunk(target, {{ptx::bits(o[0]), ptx::bits(o[1]), ptx::bits(o[2]), ptx::bits(o[3])}});
  }
}

/// The scales of q and k that the rows of a thread have, whose product with S is what the codes stand for, with the
/// sign of the softmax's scale; and those of v. Scales of keys are elsewhere (StoredScales).
template <int kMTiles>
struct RowScales {
  float of[kMTiles][2];

  template <class Forward>
  FA_DEVICE void read(const Forward& f) {
    const Fp8ScaleParams& scales = f.params.scales;
    const bool of_keys = Forward::kScalesOfKeys || scales.k == nullptr;
    const float sign = Forward::Variant::kScore ? 1.f : f.scale_sign();
    const float key =
        of_keys ? sign : sign * ptx::ld_global_nc(scales.k + head(f, scales.stride_k_b, scales.stride_k_h));
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int row = f.fragment_row(m, r);
        of[m][r] = key;
        if (scales.q == nullptr || row >= f.row_count) continue;
        of[m][r] *=
            ptx::ld_global_nc(scales.q + f.first_row(scales.stride_q_b, scales.stride_q_s) +
                              f.rows.query_head(row) * scales.stride_q_h + f.rows.position(row) * scales.stride_q_s);
      }
    }
  }

  template <int kNTiles>
  FA_DEVICE void multiply(Fragment<kMTiles, kNTiles>& s) const {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int n = 0; n < kNTiles; ++n) {
        FA_UNROLL
        for (int e = 0; e < 4; ++e) s[m][n][e] *= of[m][e / 2];
      }
    }
  }

  template <class Forward>
  static FA_DEVICE float value(const Forward& f) {
    const Fp8ScaleParams& scales = f.params.scales;
    if (Forward::kScalesOfValues || scales.v == nullptr) return 1.f;
    return ptx::ld_global_nc(scales.v + head(f, scales.stride_v_b, scales.stride_v_h));
  }

 private:
  template <class Forward>
  static FA_DEVICE int64_t head(const Forward& f, int64_t stride_b, int64_t stride_h) {
    return f.tile.batch * stride_b + f.rows.kv_head() * stride_h;
  }
};

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_FP8_CUH_
