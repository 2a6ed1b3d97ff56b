#ifndef FA_TEMPLATES_SM80_SM80_STORED_CUH_
#define FA_TEMPLATES_SM80_SM80_STORED_CUH_

#include <common/online_softmax.cuh>
#include <common/paged.cuh>
#include <common/shared_tile.cuh>
#include <common/stored.cuh>
#include <ptx/cp_async_4.cuh>
#include <ptx/ldmatrix.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <sm80/sm80_mma16.cuh>
#include <sm80/sm80_products.cuh>

namespace fa::sm80 {

/// The matrix products of WarpGemm where K or V is stored in 8 bits. ldmatrix moves two of its elements where it would
/// move one of 16 bits, so a lane gets other columns than an mma takes; the other operand follows.
///
/// Of S = Q K^T the depth is permuted, of K and of Q alike: the lane that would have the columns 2t, 2t + 1, 2t + 8 and
/// 2t + 9 of 16 has those from 4t on.
template <class T, class Stored>
struct StoredKeys {
  /// The A operand of depth step `k`, as WarpGemm::load_a, with the depth permuted.
  template <class Tile>
  static FA_DEVICE void load_a(uint32_t (&a)[4], uint32_t tile, int row, int k, int lane) {
    const uint32_t at = tile + Tile::offset(lane / 4, 4 * (lane % 4)) + Tile::offset(row, 16 * k);
    ptx::ld_shared_b64(a[0], a[2], at);
    ptx::ld_shared_b64(a[1], a[3], at + Tile::offset(8, 0));
  }

  /// As WarpGemm::scores; K is [tile_n, kHeadDim] of Stored in shared memory.
  template <class KTile, int kHeadDim, int kMTiles, int kNTiles, class LoadA>
  static FA_DEVICE void scores(Fragment<kMTiles, kNTiles>& s, uint32_t k_tile, int lane, LoadA load_a) {
    static_assert(kNTiles % 2 == 0 && kHeadDim % 16 == 0, "16 keys and 16 columns at a time");
    const uint32_t k_lane = k_tile + KTile::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 16);
    FA_UNROLL
    for (int k = 0; k + 1 < kHeadDim / 16; k += 2) {
      uint32_t a[2][kMTiles][4];
      FA_UNROLL
      for (int m = 0; m < kMTiles; ++m) {
        load_a(a[0][m], m, k);
        load_a(a[1][m], m, k + 1);
      }
      FA_UNROLL
      for (int n = 0; n < kNTiles; n += 2) {
        uint32_t b[4];  // keys 8n..8n+7 at steps k and k + 1, then keys 8n+8..8n+15
        ptx::ldmatrix_x4(b, k_lane + KTile::offset(8 * n, 16 * k));
        FA_UNROLL
        for (int i = 0; i < 4; ++i) multiply(s, n + i / 2, a[i % 2], b[i]);
      }
    }
    if constexpr (kHeadDim / 16 % 2 != 0) {
      constexpr int k = kHeadDim / 16 - 1;
      uint32_t a[kMTiles][4];
      FA_UNROLL
      for (int m = 0; m < kMTiles; ++m) load_a(a[m], m, k);
      FA_UNROLL
      for (int n = 0; n < kNTiles; n += 2) {
        uint32_t b[2];
        ptx::ldmatrix_x2(b, k_tile + KTile::offset(lane % 16, 0) + KTile::offset(8 * n, 16 * k));
        FA_UNROLL
        for (int i = 0; i < 2; ++i) multiply(s, n + i, a, b[i]);
      }
    }
  }

 private:
  template <int kMTiles, int kNTiles>
  static FA_DEVICE void multiply(Fragment<kMTiles, kNTiles>& s, int n, const uint32_t (&a)[kMTiles][4], uint32_t word) {
    uint32_t low, high;
    neighbours<Stored, T>(low, high, word);
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) ptx::mma_m16n8k16<T>(s[m][n], a[m], low, high);
  }
};

/// Of O += P V the n tiles 2j and 2j + 1 have the even and the odd columns of the 16 from 16j on, until `restore` puts
/// them in their order. The product is in P: in bf16, whatever the tensors are of, as P times a row's scale keeps its
/// precision however small that is; or in f16 (sm80_half_products.cuh).
template <class P, class Stored>
struct StoredValues {
  /// As WarpGemm::accumulate; V is [tile_n, kHeadDimV] of Stored in shared memory, and P has its rows' scales.
  template <class VTile, int kHeadDimV, int kHalves, int kMTiles, int kNTiles, int kOTiles>
  static FA_DEVICE void accumulate(Fragment<kMTiles, kOTiles>& o, const Fragment<kMTiles, kNTiles>& p, uint32_t v_tile,
                                   int lane) {
    static_assert(kHeadDimV % 16 == 0, "16 columns at a time");
    const uint32_t v_lane = v_tile + VTile::offset(lane % 16, lane / 16 * 16);
    FA_UNROLL
    for (int k = 0; k < kNTiles / 2; ++k) {
      uint32_t a[kMTiles][4];
      WarpGemm<P>::template pack_step<kHalves>(a, p, k);
      FA_UNROLL
      for (int n = 0; n + 3 < kHeadDimV / 8; n += 4) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, v_lane + VTile::offset(16 * k, 8 * n));
        multiply<kHalves>(o, n, a, b[0], b[1]);
        multiply<kHalves>(o, n + 2, a, b[2], b[3]);
      }
      if constexpr (kHeadDimV / 8 % 4 != 0) {
        constexpr int n = kHeadDimV / 8 - 2;
        uint32_t b[2];
        ptx::ldmatrix_x2_trans(b, v_tile + VTile::offset(lane % 16, 0) + VTile::offset(16 * k, 8 * n));
        multiply<kHalves>(o, n, a, b[0], b[1]);
      }
    }
  }

  /// The column that row `g` of the upper (0) or lower half of tile `n` of a transposed O is.
  static FA_DEVICE constexpr int column(int n, int half, int g) { return 16 * n + 2 * g + half; }

  /// Gives the columns of O their places in fragments: of each 16 lane t of a quad has those from 4t on.
  template <int kMTiles, int kOTiles>
  static FA_DEVICE void restore(Fragment<kMTiles, kOTiles>& o, int lane) {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int n = 0; n < kOTiles; n += 2) {
        FA_UNROLL
        for (int r = 0; r < 4; r += 2) restore_row(o[m][n], o[m][n + 1], r, lane);
      }
    }
  }

 private:
  template <int kHalves, int kMTiles, int kOTiles>
  static FA_DEVICE void multiply(Fragment<kMTiles, kOTiles>& o, int n, const uint32_t (&a)[kMTiles][4], uint32_t low,
                                 uint32_t high) {
    uint32_t even[2], odd[2];
    alternates<Stored, P>(even[0], odd[0], low);
    alternates<Stored, P>(even[1], odd[1], high);
    add_two_tiles<P, kHalves>(o, n, a, even, odd);
  }

  static FA_DEVICE void restore_row(float (&even)[4], float (&odd)[4], int r, int lane) {
    const float columns[4] = {even[r], odd[r], even[r + 1], odd[r + 1]};
    const bool upper = lane % 2 != 0;
    FA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int source = 2 * half + lane % 4 / 2;
      FA_UNROLL
      for (int e = 0; e < 2; ++e) {
        const float first = ptx::shfl_quad(columns[e], source);
        const float second = ptx::shfl_quad(columns[2 + e], source);
        (half == 0 ? even : odd)[r + e] = upper ? second : first;
      }
    }
  }
};

/// The scales [words, tile_n] of a Forward's K and V tiles, behind the tiles in shared memory; one word of a key unless
/// that is in 4 bits.
template <class Forward>
struct StoredScales {
  static constexpr int kTileN = Forward::kTileN;
  static constexpr int kMTiles = Forward::kMTiles;
  static constexpr int kNTiles = Forward::kNTiles;
  static constexpr int kSize = static_cast<int>(sizeof(float));
  static constexpr int kKeyWords = Forward::kKeyScales;
  static constexpr int kValueWords = Forward::kValueScales;
  static constexpr int kPitch = kTileN;  // words

  const Forward& f;

  /// Starts to copy those of the keys from `first` on; others become zero.
  FA_DEVICE void load_k(int stage, int first) const {
    const auto& from = f.params.scales;
    load<kKeyWords>(of_k(stage), from.k, from.stride_k_b, from.stride_k_h, from.stride_k_s, first);
  }
  FA_DEVICE void load_v(int stage, int first) const {
    const auto& from = f.params.scales;
    load<kValueWords>(of_v(stage), from.v, from.stride_v_b, from.stride_v_h, from.stride_v_s, first);
  }

  /// Multiplies the columns of S, or of P, by the scales of their keys.
  FA_DEVICE void multiply_k(Fragment<kMTiles, kNTiles>& s, int stage) const { multiply(s, of_k(stage)); }
  FA_DEVICE void multiply_v(Fragment<kMTiles, kNTiles>& p, int stage) const { multiply(p, of_v(stage)); }

  /// The same of P relative to the greatest scale of the tile, which is what a product has to be multiplied by.
  FA_DEVICE float multiply_relative_v(Fragment<kMTiles, kNTiles>& p, int stage) const {
    float most = 0.f;
    FA_UNROLL
    for (int i = 0; i < kTileN; i += kWarpSize) {
      const uint32_t scale = ptx::ld_shared_b32(of_v(stage) + (i + f.lane) * kSize);
      most = ptx::max(most, ptx::abs(ptx::from_bits(scale)));
    }
    FA_UNROLL
    for (int mask = kWarpSize / 2; mask > 0; mask /= 2) most = ptx::max(most, ptx::shfl_xor(most, mask));
    const float inverse = 1.f / most;
    const bool any = inverse - inverse == 0.f;
    multiply(p, of_v(stage), any ? inverse : 0.f);
    return any ? most : 0.f;
  }

  /// Those of the warp's first key.
  FA_DEVICE uint32_t own_k(int stage) const { return of_k(stage) + f.half * Forward::kWarpKeys * kSize; }
  FA_DEVICE uint32_t own_v(int stage) const { return of_v(stage) + f.half * Forward::kWarpKeys * kSize; }

 private:
  FA_DEVICE uint32_t of_k(int stage) const { return f.scales_shared(stage); }
  FA_DEVICE uint32_t of_v(int stage) const { return of_k(stage) + kKeyWords * kTileN * kSize; }

  template <int kWords>
  FA_DEVICE void load(uint32_t target, const float* scales, int64_t stride_b, int64_t stride_h, int64_t stride_s,
                      int first) const {
    const float* const head = scales + f.rows.kv_head() * stride_h;
    for (int i = f.thread; i < kTileN * kWords; i += Forward::kThreads) {
      const int row = i / kWords, word = i % kWords;
      const int key = first + row;
      bool valid = key < f.lengths.s_kv;
      int64_t at = f.first_key(stride_b, stride_s) + key * stride_s;
      if constexpr (Forward::kPaged) {
        const PagedKeys<Forward::kPageSize> keys = f.paged_keys();
        const int page = keys.page_of(key);
        valid = keys.has(key, page);
        at = page * stride_b + keys.row_in_page(key) * stride_s;
      }
      if constexpr (Forward::kBytes) {
        if (scales == nullptr) {
          ptx::st_shared_b32(target + row * kSize, ptx::bits(1.f));
          continue;
        }
      }
      ptx::cp_async_4(target + (word * kPitch + row) * kSize, valid ? head + at + word : head, valid);
    }
  }

  FA_DEVICE void multiply(Fragment<kMTiles, kNTiles>& s, uint32_t scales, [[maybe_unused]] float by = 1.f) const {
    const uint32_t own = scales + (f.half * Forward::kWarpKeys + 2 * (f.lane % 4)) * kSize;
    FA_UNROLL
    for (int n = 0; n < kNTiles; ++n) {
      float factors[2];
      ptx::ld_shared_f32x2(factors, own + 8 * n * kSize);
      if constexpr (Forward::kBytes) {
        factors[0] *= by;
        factors[1] *= by;
      }
      FA_UNROLL
      for (int m = 0; m < kMTiles; ++m) {
        FA_UNROLL
        for (int e = 0; e < 2 * Forward::kHalves; ++e) s[m][n][e] *= factors[e % 2];
      }
    }
  }
};

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_STORED_CUH_
