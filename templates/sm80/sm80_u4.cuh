#ifndef FA_TEMPLATES_SM80_SM80_U4_CUH_
#define FA_TEMPLATES_SM80_SM80_U4_CUH_

#include <common/online_softmax.cuh>
#include <common/u4.cuh>
#include <ptx/ldmatrix.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <sm80/sm80_half_products.cuh>
#include <sm80/sm80_mma16.cuh>
#include <sm80/sm80_products.cuh>

namespace fa::sm80 {

/// What products are of.
template <class T, bool kInPlace>
using CodeProduct = typename Either<f16, T, kInPlace>::type;

/// The matrix products of WarpGemm where K or V has 4 bits an element (common/u4.cuh). ldmatrix moves four of its
/// elements where it would move one of 16 bits: a matrix has 32 columns, and is two depth steps of S, or four n tiles
/// of O.
///
/// Of each 32 columns of S = Q K^T lane t of a quad has those from 8t on: the first four in the first depth step.
///
/// With kInPlace no code becomes a number: products are of f16, and codes are its subnormal numbers where they stand
/// (codes_of). Rows of Q make up for that (HalfRows). What a group adds to S is multiplied by the scales of the keys.
/// Their offsets are multiplied by sums of Q over the group (GroupSums).
template <class T, class Stored, bool kInPlace = false>
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
  template <class KTile, int kHeadDim, int kPitch, int kHalves, int kMTiles, int kNTiles, class LoadA>
  static FA_DEVICE void scores(Fragment<kMTiles, kNTiles>& s, uint32_t k_tile, uint32_t scales, int lane,
                               LoadA load_a) {
    static_assert(kNTiles % 2 == 0 && kHeadDim % 32 == 0, "16 keys and 32 columns at a time");
    const uint32_t k_lane = k_tile + KTile::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 16);
    const uint32_t own = scales + (kInPlace ? 2 * (lane % 4) : lane / 4) * kWord;
    [[maybe_unused]] Fragment<kMTiles, kNTiles> part;  // of S: a group's
    constexpr int kChunks = kHeadDim / 32;
    FA_UNROLL
    for (int c = 0; c < kChunks; c += 2) {
      uint32_t a[2][2][kMTiles][4];  // of 32 columns each
      const auto load = [&](int half) {
        FA_UNROLL
        for (int m = 0; m < kMTiles && c + half < kChunks; ++m) {
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
        if (c + 1 < kChunks) {
          ptx::ldmatrix_x4(b, k_lane + KTile::offset(8 * n, 16 * c));
        } else {
          uint32_t last[2];
          ptx::ldmatrix_x2(last, k_tile + KTile::offset(lane % 16, 0) + KTile::offset(8 * n, 16 * c));
          b[0] = last[0], b[2] = last[1];
        }
        FA_UNROLL
        for (int half = 0; half < 2 && c + half < kChunks; ++half) {
          if constexpr (kOnce) load(half);
          FA_UNROLL
          for (int i = 0; i < 2; ++i) {
            multiply<kHalves>(s, part, n + i, c + half, a[half][0], a[half][1], b[half + 2 * i],
                              own + (group_of(c + half) * kPitch + 8 * (n + i)) * kWord);
          }
        }
      }
    }
  }

 private:
  static constexpr int kWord = 4;

  static FA_DEVICE constexpr int group_of(int chunk) { return 32 * chunk / Stored::kGroup; }

  template <int kHalves, int kMTiles, int kNTiles>
  static FA_DEVICE void multiply(Fragment<kMTiles, kNTiles>& s, Fragment<kMTiles, kNTiles>& part, int n, int chunk,
                                 const uint32_t (&first)[kMTiles][4], const uint32_t (&second)[kMTiles][4],
                                 uint32_t word, uint32_t scale) {
    uint32_t pairs[4];
    Fragment<kMTiles, kNTiles>& sum = kInPlace ? part : s;
    if constexpr (kInPlace) {
      codes_of(pairs, word);
      if (32 * chunk % Stored::kGroup == 0) {
        FA_UNROLL
        for (int e = 0; e < 4; ++e) part[0][n][e] = 0.f;
      }
    } else {
      const uint32_t of_key = ptx::ld_shared_b32(scale);
      numbers_of<T>(pairs, word, ptx::prmt(of_key, 0, 0x1010), ptx::prmt(of_key, 0, 0x3232));
    }
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      ptx::mma_m16n8k16<CodeProduct<T, kInPlace>>(sum[m][n], first[m], pairs[0], pairs[1]);
      ptx::mma_m16n8k16<CodeProduct<T, kInPlace>>(sum[m][n], second[m], pairs[2], pairs[3]);
    }
    if (!kInPlace || (32 * chunk + 32) % Stored::kGroup != 0) return;
    uint32_t of_keys[2];
    ptx::ld_shared_b64(of_keys[0], of_keys[1], scale);
    FA_UNROLL
    for (int e = 0; e < 2 * kHalves; ++e) s[0][n][e] = ptx::fma(part[0][n][e], scale_of<T>(of_keys[e % 2]), s[0][n][e]);
  }
};

/// Multiplies the first kFirst n tiles of one m tile.
template <int kFirst, int kNTiles>
FA_DEVICE void multiply_tiles(Fragment<1, kNTiles>& s, float factor) {
  FA_UNROLL
  for (int i = 0; i < 4 * kFirst; ++i) s[0][i / 4][i % 4] *= factor;
}

/// Sums of rows of Q over groups of columns, which multiply the offsets of K in place. One is two numbers of T, and an
/// A operand has those of four groups where words of K's scales, as they are, have offsets.
template <class T, class Stored, int kHeadDim>
struct GroupSums {
  static constexpr int kGroup = Stored::kGroup;
  static constexpr int kGroups = kHeadDim / kGroup;
  static constexpr int kSteps = ceil_div(kGroups, 4);
  // Of S with codes in place. In f16 the sums are greater, lest they lose digits.
  static constexpr float kFactor = is_half(T{}) ? 0x1p-12f : 0x1p-24f;

  uint32_t a[kSteps][4];

  /// `load_a(a, m, k)` gives Q's fragment, whose second half is divided by 16.
  template <class LoadA>
  FA_DEVICE void find(int lane, LoadA load_a) {
    float own[kSteps][2] = {};
    FA_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      float sum[4] = {};
      FA_UNROLL
      for (int k = 0; k < kGroup / 16; ++k) {
        uint32_t q[4];
        load_a(q, 0, group * (kGroup / 16) + k);
        ptx::mma_m16n8k16<f16>(sum, q, 0x3c003c00u, 0x4c004c00u);  // 1 and 16
      }
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (lane % 4 == group % 4) own[group / 4][r] = kFactor * sum[2 * r];
      }
    }
    FA_UNROLL
    for (int i = 0; i < 2 * kSteps; ++i) {
      const float x = own[i / 2][i % 2];
      const T first = ptx::convert<T>(x);
      a[i / 2][i % 2] = static_cast<uint32_t>(first.bits) << 16;
      a[i / 2][i % 2 + 2] = static_cast<uint32_t>(ptx::convert<T>(x - ptx::convert_to_float(first)).bits) << 16;
    }
  }

  /// What offsets make of S. `scales` are those of the first key.
  template <int kPitch, int kNTiles>
  FA_DEVICE void multiply(Fragment<1, kNTiles>& s, uint32_t scales, int lane) const {
    FA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      const int group = 4 * step + lane % 4 < kGroups ? 4 * step + lane % 4 : kGroups - 1;
      FA_UNROLL
      for (int n = 0; n < kNTiles; ++n) {
        const uint32_t word = ptx::ld_shared_b32(scales + (group * kPitch + 8 * n + lane / 4) * 4);
        ptx::mma_m16n8k16<T>(s[0][n], a[step], word, word);
      }
    }
    if constexpr (is_half(T{})) multiply_tiles<kNTiles>(s, 0x1p-12f);
  }
};

/// Of O += P V lane t of a quad has of each 32 columns those from 8t on, two in each of four n tiles, until `restore`
/// puts them in their order.
///
/// With kInPlace O is 2^-24 of itself, or 2^-20 in odd n tiles, times the factor of ScaleLift, until that undoes it. It
/// has one more n tile, of a column for each group: P times the offsets. Of half an m tile O is transposed
/// (add_two_tiles).
template <class T, class Stored, bool kInPlace>
struct U4Values {
  /// As WarpGemm::accumulate; V is [tile_n, kHeadDimV / 2] of Stored in shared memory, `scales` as of U4Keys::scores.
  template <class VTile, int kHeadDimV, int kPitch, int kHalves, int kMTiles, int kNTiles, int kOTiles>
  static FA_DEVICE void accumulate(Fragment<kMTiles, kOTiles>& o, Fragment<kMTiles, kNTiles>& p, uint32_t v_tile,
                                   uint32_t scales, int lane, [[maybe_unused]] float factor) {
    static_assert(kHeadDimV % 32 == 0, "32 columns at a time");
    constexpr int kChunks = kHeadDimV / 32;
    const uint32_t v_lane = v_tile + VTile::offset(lane % 16, lane / 16 * 16);
    if constexpr (kInPlace) {
      const int group = lane / 4 % (kHeadDimV / Stored::kGroup);
      add_offsets<kHalves>(o, p, scales + (group * kPitch + 2 * (lane % 4)) * kWord);
      FA_UNROLL
      for (int n = 0; n < kNTiles; ++n) {
        FA_UNROLL
        for (int e = 0; e < 2 * kHalves; ++e) p[0][n][e] *= factor;
      }
    }
    FA_UNROLL
    for (int k = 0; k < kNTiles / 2; ++k) {
      const uint32_t own = scales + (16 * k + 2 * (lane % 4)) * kWord;
      uint32_t a[kMTiles][4];
      if constexpr (!kInPlace) WarpGemm<T>::template pack_step<kHalves>(a, p, k);
      FA_UNROLL
      for (int c = 0; c < kChunks; c += 2) {
        uint32_t b[4];  // of 32 columns rows 2t and 2t + 1 of V, 2t + 8 and 2t + 9; then of the next 32
        if (c + 1 < kChunks) {
          ptx::ldmatrix_x4_trans(b, v_lane + VTile::offset(16 * k, 16 * c));
        } else {
          uint32_t last[2];
          ptx::ldmatrix_x2_trans(last, v_tile + VTile::offset(lane % 16, 0) + VTile::offset(16 * k, 16 * c));
          b[0] = last[0], b[1] = last[1];
        }
        FA_UNROLL
        for (int half = 0; half < 2 && c + half < kChunks; ++half) {
          const uint32_t of_group = own + group_of(c + half) * kPitch * kWord;
          uint32_t pairs[2][4];
          if constexpr (kInPlace) {
            if (32 * (c + half) % Stored::kGroup == 0) scaled_step<kHalves>(a, p, k, of_group);
            codes_of(pairs[0], b[2 * half]);
            codes_of(pairs[1], b[2 * half + 1]);
          } else {
            numbers(pairs[0], b[2 * half], of_group);
            numbers(pairs[1], b[2 * half + 1], of_group + 8 * kWord);
          }
          FA_UNROLL
          for (int i = 0; i < 4; i += 2) {
            add_two_tiles<CodeProduct<T, kInPlace>, kHalves>(o, 4 * (c + half) + i, a, {pairs[0][i], pairs[1][i]},
                                                             {pairs[0][i + 1], pairs[1][i + 1]});
          }
        }
      }
    }
  }

  /// The column that row `g` of the upper (0) or lower half of tile `n` of a transposed O is.
  static FA_DEVICE constexpr int column(int n, int half, int g) {
    return n / 2 * 32 + g / 2 * 8 + n % 2 * 4 + 2 * half + g % 2;
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

  /// `scales` are those that a lane has of the first keys, of the group of its column.
  template <int kHalves, int kNTiles, int kOTiles>
  static FA_DEVICE void add_offsets(Fragment<1, kOTiles>& o, const Fragment<1, kNTiles>& p, uint32_t scales) {
    FA_UNROLL
    for (int n = 0; n < kNTiles; ++n) {
      uint32_t first, second;
      ptx::ld_shared_b64(first, second, scales + 8 * n * kWord);
      // Rounded to nearest, half a unit of what TF32 keeps being added. Its depths t and t + 4 are keys 2t, 2t + 1.
      uint32_t a[4];
      FA_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (kHalves == 2 || i % 2 == 0) a[i] = ptx::bits(p[0][n][i % 2 * 2 + i / 2]) + 0x1000u;
      }
      const uint32_t even = ptx::bits(offset_of<T>(first)), odd = ptx::bits(offset_of<T>(second));
      if constexpr (kHalves == 1) {
        ptx::mma_m16n8k8_tf32(o[0][kOTiles - 1], {even, even, odd, odd}, a[0], a[2]);
      } else {
        ptx::mma_m16n8k8_tf32(o[0][kOTiles - 1], a, even, odd);
      }
    }
  }

  /// The A operand of depth step `k`: P times the scales of a group.
  template <int kHalves, int kNTiles>
  static FA_DEVICE void scaled_step(uint32_t (&a)[1][4], const Fragment<1, kNTiles>& p, int k, uint32_t scales) {
    FA_UNROLL
    for (int half = 0; half < 2; ++half) {
      uint32_t first, second;
      ptx::ld_shared_b64(first, second, scales + 8 * half * kWord);
      const float even = scale_of<T>(first), odd = scale_of<T>(second);
      FA_UNROLL
      for (int r = 0; r < kHalves; ++r) {
        const float* const c = p[0][2 * k + half] + 2 * r;
        a[0][2 * half + r] = ptx::convert_pair<f16>(c[0] * even, c[1] * odd);
      }
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

/// A power of two for the scales of V in place: times it the greatest so far is from 2^14 to 2^15, and P times any fits
/// f16. What f16 then loses is below 2^-39 of it.
template <class T, class Stored, int kHeadDimV>
struct ScaleLift {
  static constexpr int kGroup = Stored::kGroup, kGroups = kHeadDimV / kGroup;
  static constexpr int kTarget = 14, kMostExponent = 100;

  float factor = 1.f;
  uint32_t greatest = 0;  // that the factor is for, as bits of T

  /// The factor for the scales of a warp's `kKeys` keys, from `scales` on.
  template <int kKeys, int kPitch, int kOTiles>
  FA_DEVICE float apply(Fragment<1, kOTiles>& o, uint32_t scales, int lane) {
    uint32_t most = 0;
    FA_UNROLL
    for (int i = 0; i < ceil_div(kKeys * kGroups, kWarpSize); ++i) {
      const int item = (lane + i * kWarpSize) % (kKeys * kGroups);
      const uint32_t scale = ptx::ld_shared_b32(scales + (item / kKeys * kPitch + item % kKeys) * 4) & 0x7fffu;
      most = most < scale ? scale : most;
    }
    if (!ptx::vote_any(most > greatest)) return factor;
    constexpr uint32_t kMantissa = is_half(T{}) ? 0x3ff : 0x7f, kInfinityBits = 0x7fff - kMantissa;
    most = most < kInfinityBits ? most : 0;
    FA_UNROLL
    for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
      const uint32_t other = ptx::shfl_xor(most, mask);
      most = most < other ? other : most;
    }
    if (most <= greatest) return factor;  // infinities and NaNs have no say
    greatest = most | kMantissa;
    const int wanted = kTarget - exponent_of(ptx::convert_to_float(T{static_cast<unsigned short>(most)}));
    const int exponent = wanted < kMostExponent ? wanted : kMostExponent;
    const int grows = exponent - exponent_of(factor);
    const float change = power_of_two(grows < -126 ? -126 : grows);  // at first O is 0
    factor = power_of_two(exponent);
    multiply_tiles<kOTiles - 1>(o, change);
    return factor;
  }

  /// Makes O what it stands for, and adds what offsets have made of it.
  template <int kHalves, int kOTiles>
  FA_DEVICE void undo(Fragment<1, kOTiles>& o, int lane) const {
    multiply_tiles<kOTiles - 1>(o, power_of_two(-exponent_of(factor)));
    if constexpr (kHalves == 1) {
      FA_UNROLL
      for (int i = 0; i < 4 * (kOTiles - 1); ++i) {
        const int group = 16 * (i / 4) / kGroup;
        const float of_offsets = ptx::from_bits(ptx::shfl(ptx::bits(o[0][kOTiles - 1][i % 2]), 4 * group + lane % 4));
        o[0][i / 4][i % 4] = o[0][i / 4][i % 4] * (i % 4 < 2 ? 0x1p24f : 0x1p20f) + of_offsets;
      }
    } else {
      FA_UNROLL
      for (int i = 0; i < 4 * (kOTiles - 1); ++i) {
        const int n = i / 4, r = i % 4 / 2, group = 8 * n / kGroup;
        const float of_offsets = ptx::shfl_quad(o[0][kOTiles - 1][2 * r + group % 2], group / 2);
        o[0][n][i % 4] = o[0][n][i % 4] * (n % 2 == 0 ? 0x1p24f : 0x1p20f) + of_offsets;
      }
    }
  }
};

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_U4_CUH_
