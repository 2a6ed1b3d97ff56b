#ifndef FA_TEMPLATES_COMMON_INT8_CUH_
#define FA_TEMPLATES_COMMON_INT8_CUH_

#include <common/stored.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>

namespace fa::kernel {

/// 1.5 * 2^23. Its bits plus a whole number x of up to 2^22 are the bits of the float kInt8Bias + x: an addition of
/// whole numbers converts a sum of up to 256 products of i8, which conversions do at a quarter of the rate.
inline constexpr float kInt8Bias = 12582912.f;
inline constexpr uint32_t kInt8BiasBits = 0x4b400000u;

/// The float kInt8Bias + x of the bits of a whole number x.
FA_DEVICE float biased_float(float bits_of_x) {
  return ptx::from_bits(ptx::bits(bits_of_x) + kInt8BiasBits);
}

/// A scale whose product with kInt8Bias is exact: its first 22 bits.
FA_DEVICE float scale_of_22_bits(float scale) {
  return ptx::from_bits(ptx::bits(scale) & ~3u);
}

template <class T>
inline constexpr bool kIsInt8 = false;
template <>
inline constexpr bool kIsInt8<i8> = true;

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_INT8_CUH_
