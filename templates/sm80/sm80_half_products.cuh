#ifndef FA_TEMPLATES_SM80_SM80_HALF_PRODUCTS_CUH_
#define FA_TEMPLATES_SM80_SM80_HALF_PRODUCTS_CUH_

#include <common/constants.cuh>
#include <common/online_softmax.cuh>
#include <common/types.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::sm80 {

using namespace kernel;

FA_DEVICE int exponent_of(float x) {
  return static_cast<int>(ptx::bits(x) >> 23 & 0xff) - 127;
}
/// Of an exponent from -126 to 127.
FA_DEVICE float power_of_two(int exponent) {
  return ptx::from_bits(static_cast<uint32_t>(exponent + 127) << 23);
}

/// Rows of T in shared memory that become f16, each times a power of two that brings its greatest magnitude to
/// between 2^14 and 2^15: what f16 then loses is below 2^-39 of that. The inverse of the power stands behind the row,
/// where Tile has a chunk that no element takes.
///
/// Of 16 columns the pairs go where ldmatrix gives them to the lanes that have their columns of K (StoredKeys): pair 2t
/// to place t, pair 2t + 1 to place 4 + t. With kCodes, for K as codes_of has it, pairs 4t to 4t + 3 of 32 columns go
/// to places t, 4 + t, 8 + t and 12 + t. Odd pairs are divided by 16, and the inverse is 2^24 times itself.
template <class T, class Tile, int kColumns, bool kCodes, int kHalves>
struct HalfRows {
  static constexpr int kWords = kColumns / 2;
  static constexpr int kSteps = ceil_div(kWords, kWarpSize);
  static constexpr uint32_t kInfinityBits = 0x7f800000;
  static constexpr uint32_t kLog = kCodes ? 24 : 0;  // of what the inverse is times of
  static_assert(kColumns % 16 == 0, "an even number of chunks leaves one");

  /// By a whole warp.
  static FA_DEVICE void convert(uint32_t tile, int row, int lane) {
    const uint32_t first = tile + Tile::offset(row, 2 * lane);
    const int place =
        kCodes ? lane / 16 * 16 + lane % 4 * 4 + lane % 16 / 4 : lane / 8 * 8 + lane % 2 * 4 + lane % 8 / 2;
    const uint32_t target = tile + Tile::offset(row, 2 * place);
    float low[kSteps], high[kSteps];
    uint32_t greatest = 0;
    FA_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      const uint32_t pair = has(lane, i) ? ptx::ld_shared_b32(first + Tile::offset(0, 2 * kWarpSize * i)) : 0;
      low[i] = ptx::convert_to_float(T{static_cast<unsigned short>(pair)});
      high[i] = ptx::convert_to_float(T{static_cast<unsigned short>(pair >> 16)});
      greatest = larger(larger(greatest, finite(low[i])), finite(high[i]));
    }
    FA_UNROLL
    for (int mask = kWarpSize / 2; mask > 0; mask /= 2) greatest = larger(greatest, ptx::shfl_xor(greatest, mask));
    // 2^(14 - exponent), and not so great that it has no inverse.
    const uint32_t exponent = greatest >> 23;
    const uint32_t power = exponent < 15 ? 253 : 268 - exponent;
    const float factor = ptx::from_bits((kCodes && lane % 2 != 0 ? power - 4 : power) << 23);
    ptx::sync_warp();  // all have read the row
    FA_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      if (!has(lane, i)) continue;
      ptx::st_shared_b32(target + Tile::offset(0, 2 * kWarpSize * i),
                         ptx::convert_pair<f16>(low[i] * factor, high[i] * factor));
    }
    const uint32_t inverse = 254 - power + kLog;
    if (lane == 0) ptx::st_shared_b32(tile + Tile::offset(row, kColumns), (inverse < 255 ? inverse : 255) << 23);
  }

  /// Divides the rows of S by their powers.
  template <int kMTiles, int kNTiles>
  static FA_DEVICE void undo(Fragment<kMTiles, kNTiles>& s, uint32_t tile, int lane) {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < kHalves; ++r) {
        const uint32_t row = tile + Tile::offset(16 * m + 8 * r + lane / 4, kColumns);
        const float inverse = ptx::from_bits(ptx::ld_shared_b32(row));
        FA_UNROLL
        for (int n = 0; n < kNTiles; ++n) {
          s[m][n][2 * r] *= inverse;
          s[m][n][2 * r + 1] *= inverse;
        }
      }
    }
  }

 private:
  static FA_DEVICE bool has(int lane, int step) { return kWords % kWarpSize == 0 || lane + kWarpSize * step < kWords; }
  static FA_DEVICE uint32_t finite(float x) {
    const uint32_t magnitude = ptx::bits(x) & 0x7fffffffu;
    return magnitude < kInfinityBits ? magnitude : 0;
  }
  static FA_DEVICE uint32_t larger(uint32_t a, uint32_t b) { return a < b ? b : a; }
};

/// A power of two for each row of P, whatever the scales of V are that P has been multiplied by: times it P fits f16,
/// and the greatest one comes near to its largest number. What f16 then loses of the others is below 2^-39 of the
/// greatest. O has the same factor until `undo`.
template <int kMTiles, int kHalves>
struct RowLift {
  static constexpr float kLargest = 65504.f;  // of f16
  static constexpr int kTarget = 14;          // exponent of a row's greatest P, times its factor
  static constexpr int kMostExponent = 100;   // of a factor

  /// A row's greatest P when its factor was chosen, relative to the maximum of now. None at first: any factor does.
  float greatest[kMTiles][2];

  FA_DEVICE RowLift() {
    FA_UNROLL
    for (int i = 0; i < kMTiles * kHalves; ++i) greatest[i / kHalves][i % kHalves] = power_of_two(kTarget);
  }

  /// `before` are the maxima that O and its factors are of, `softmax` has those that P is of, and O has been rescaled
  /// to.
  template <class Softmax, int kNTiles, int kOTiles>
  FA_DEVICE void apply(Fragment<kMTiles, kNTiles>& p, Fragment<kMTiles, kOTiles>& o, const float (&before)[kMTiles][2],
                       const Softmax& softmax, float scale_log2) {
    bool changes = false;
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < kHalves; ++r) {
        float most = 0.f;
        FA_UNROLL
        for (int n = 0; n < kNTiles; ++n) {
          most = ptx::max(most, ptx::max(ptx::abs(p[m][n][2 * r]), ptx::abs(p[m][n][2 * r + 1])));
        }
        changes = changes || most * factor(m, r) > kLargest || softmax.max[m][r] > before[m][r];
      }
    }
    if (ptx::vote_any(changes)) {
      FA_UNROLL
      for (int m = 0; m < kMTiles; ++m) {
        FA_UNROLL
        for (int r = 0; r < kHalves; ++r) {
          const float shrink = Softmax::shrink_between(before[m][r], softmax.max[m][r], scale_log2);
          change<kNTiles, kOTiles>(p[m], o[m], m, r, shrink);
        }
      }
    }
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < kHalves; ++r) {
        const float own = factor(m, r);
        FA_UNROLL
        for (int n = 0; n < kNTiles; ++n) {
          p[m][n][2 * r] *= own;
          p[m][n][2 * r + 1] *= own;
        }
      }
    }
  }

  template <int kOTiles>
  FA_DEVICE void undo(Fragment<kMTiles, kOTiles>& o) const {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < kHalves; ++r)
        multiply_row<kOTiles>(o[m], r, power_of_two(exponent_of(greatest[m][r]) - kTarget));
    }
  }

 private:
  /// 2^(kTarget - exponent), by a subtraction of exponents.
  FA_DEVICE float factor(int m, int r) const {
    constexpr uint32_t kExponents = 0x7f800000u, kSum = static_cast<uint32_t>(2 * 127 + kTarget) << 23;
    return ptx::from_bits(kSum - (ptx::bits(greatest[m][r]) & kExponents));
  }

  /// A factor for the greatest P of the row so far, each as it is relative to the maximum of now.
  template <int kNTiles, int kOTiles>
  FA_DEVICE void change(const float (&p)[kNTiles][4], float (&o)[kOTiles][4], int m, int r, float shrink) {
    float most = ptx::max(shrink * greatest[m][r], power_of_two(kTarget - kMostExponent));
    FA_UNROLL
    for (int n = 0; n < kNTiles; ++n) {
      FA_UNROLL
      for (int e = 2 * r; e < 2 * r + 2; ++e) {
        const float magnitude = ptx::abs(p[n][e]);
        most = ptx::max(most, magnitude < kInfinity ? magnitude : 0.f);
      }
    }
    most = ptx::max(most, ptx::shfl_xor(most, 1));
    most = ptx::max(most, ptx::shfl_xor(most, 2));
    const int grown = exponent_of(greatest[m][r]) - exponent_of(most);
    // Beyond 2^126 either what O has or what P has counts for nothing beside the other.
    multiply_row<kOTiles>(o, r, power_of_two(within(grown, 126)));
    greatest[m][r] = most;
  }

  static FA_DEVICE int within(int x, int most) { return x < -most ? -most : x > most ? most : x; }

  template <int kOTiles>
  static FA_DEVICE void multiply_row(float (&o)[kOTiles][4], int r, float factor) {
    if constexpr (kHalves == 1) {
      multiply_columns<kOTiles>(o, factor);
    } else {
      FA_UNROLL
      for (int n = 0; n < kOTiles; ++n) {
        o[n][2 * r] *= factor;
        o[n][2 * r + 1] *= factor;
      }
    }
  }
};

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_HALF_PRODUCTS_CUH_
