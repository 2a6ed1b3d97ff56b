#ifndef FA_TEMPLATES_SM90_SM90_AFFINE_CUH_
#define FA_TEMPLATES_SM90_SM90_AFFINE_CUH_

#include <common/constants.cuh>
#include <common/types.cuh>
#include <common/variant.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>

namespace fa::sm90 {

/// What the columns of B are multiples of. f16 has too few exponents for one unit: with these, factors up to the limit
/// are exact to 2^-30 or to float's bits. Parts of those up to the limit are finite.
template <class T>
struct AffineUnits;
template <>
struct AffineUnits<kernel::bf16> {
  static constexpr float kUnit[2] = {1.f, 1.f};
  static constexpr float kLimit = 1e38f;
};
template <>
struct AffineUnits<kernel::f16> {
  static constexpr float kUnit[2] = {128.f, 0.03125f};
  static constexpr float kLimit = 4194304.f;
};

/// The operands of a wgmma that adds factor * n to the score of each row's key n of a tile, as precisely as float does:
/// A holds the factors in three parts, in registers, and B the keys' numbers.
///
/// B is twice [kKeys, 8], without a swizzle: depths 8 to 15 are the columns of 0 to 7 again. Columns 0 and 1 are n in
/// two units, the others zeros, so that all lanes of a quad hold the same A.
template <class T, int kKeys>
struct AffineProduct {
  using Units = AffineUnits<T>;
  static constexpr int kRowBytes = 16;
  static constexpr int kHalfBytes = kKeys * kRowBytes;
  static constexpr int kBytes = 2 * kHalfBytes;
  static constexpr float kHigh = Units::kUnit[0];
  static constexpr float kLow = Units::kUnit[1];
  static_assert(kKeys <= 256, "the keys' numbers are exact in bf16");

  /// Whether scores grow so little over a tile that nothing is lost of them, and the factor has its parts.
  static FA_DEVICE bool fits(float factor, float scale_log2) {
    return ptx::abs(factor) * (kKeys * scale_log2) <= kernel::kMostGrowth && ptx::abs(factor) <= Units::kLimit;
  }

  /// A row's words of A: at depths 0 and 1, and 8 and 9.
  static FA_DEVICE void split(uint32_t& first, uint32_t& second, float factor) {
    const float high = rounded(factor * (1.f / kHigh));
    const float rest = factor - high * kHigh;  // exact, as what follows
    const float middle = rounded(rest * (1.f / kLow));
    first = ptx::convert_pair<T>(high, middle);
    second = ptx::convert_pair<T>(0.f, (rest - middle * kLow) * (1.f / kLow));
  }

  static FA_DEVICE void store_key(uint32_t b, int key) {
    const float number = static_cast<float>(key);
    const kernel::Chunk row = {{ptx::convert_pair<T>(number * kHigh, number * kLow), 0, 0, 0}};
    ptx::st_shared_chunk(b + key * kRowBytes, row);
    ptx::st_shared_chunk(b + kHalfBytes + key * kRowBytes, row);
  }

  /// PTX ISA, "Matrix descriptor", all in units of 16 bytes: address, leading byte offset (between halves), stride byte
  /// offset (between groups of 8 keys), no swizzle.
  static FA_DEVICE uint64_t descriptor(uint32_t b) {
    constexpr uint64_t kStride = 8 * kRowBytes / 16;
    constexpr uint32_t kLeading = kHalfBytes / 16;
    return kStride << 32 | kLeading << 16 | b / 16;
  }

 private:
  static FA_DEVICE float rounded(float x) { return ptx::convert_to_float(ptx::convert<T>(x)); }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_AFFINE_CUH_
