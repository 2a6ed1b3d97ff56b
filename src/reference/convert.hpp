#ifndef FA_SRC_REFERENCE_CONVERT_HPP_
#define FA_SRC_REFERENCE_CONVERT_HPP_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace fa::reference {

/// The value of a bfloat16 bit pattern, exact.
inline float decode_bf16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

/// The value of an IEEE half bit pattern, exact. Free of branches, so that loops over it vectorise.
inline float decode_f16(std::uint16_t bits) {
  const std::uint32_t magnitude = bits & 0x7fffu;
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  // Aligning the exponent fields leaves a factor 2^(127-15), which a product restores for normals and subnormals alike.
  const float finite = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  const std::uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(finite) | special | sign);
}

/// Rounds to the nearest 16-bit float with `kExponent` exponent bits, ties to even, in one rounding from double. Values
/// beyond the largest finite number by half a unit or more become infinite; NaN stays NaN and keeps its top bits.
template <int kExponent>
std::uint16_t encode_16(double value) {
  constexpr int kMantissa = 15 - kExponent;
  constexpr int kBias = (1 << (kExponent - 1)) - 1;
  constexpr std::uint64_t kInfinity = ((std::uint64_t{1} << kExponent) - 1) << kMantissa;

  const std::uint64_t bits = std::bit_cast<std::uint64_t>(value);
  const std::uint64_t sign = bits >> 63 << 15;
  const std::uint64_t mantissa = bits & ((std::uint64_t{1} << 52) - 1);
  const int exponent = static_cast<int>(bits >> 52 & 0x7ff) - 1023;
  if (exponent == 1024) {
    const std::uint64_t payload = mantissa >> (52 - kMantissa);
    const std::uint64_t quiet = mantissa != 0 ? std::uint64_t{1} << (kMantissa - 1) : 0;
    return static_cast<std::uint16_t>(sign | kInfinity | payload | quiet);
  }
  if (exponent > kBias) return static_cast<std::uint16_t>(sign | kInfinity);

  constexpr int kSmallestNormal = 1 - kBias;
  const int below = exponent < kSmallestNormal ? kSmallestNormal - exponent : 0;
  const int dropped = 52 - kMantissa + below;
  if (dropped > 53) return static_cast<std::uint16_t>(sign);  // less than half of the smallest subnormal

  const std::uint64_t significand = mantissa | std::uint64_t{1} << 52;  // a double below 2^-1022 was dropped above
  const std::uint64_t kept = significand >> dropped;
  const std::uint64_t rest = significand & ((std::uint64_t{1} << dropped) - 1);
  const std::uint64_t half = std::uint64_t{1} << (dropped - 1);
  const std::uint64_t up = rest > half || (rest == half && (kept & 1) != 0) ? 1 : 0;
  // A normal's leading one adds 1 to the exponent field; so does a carry out of the mantissa, which is the right result
  // up to and including infinity.
  const std::uint64_t field = below > 0 ? 0 : static_cast<std::uint64_t>(exponent - kSmallestNormal);
  return static_cast<std::uint16_t>(sign | ((field << kMantissa) + kept + up));
}

inline std::uint16_t encode_f16(double value) {
  return encode_16<5>(value);
}
inline std::uint16_t encode_bf16(double value) {
  return encode_16<8>(value);
}

/// The value of an E4M3 code. Those of NaNs, 0x7f and 0xff, are read as 480 and -480, as integer instructions do.
inline float decode_e4m3(std::uint8_t bits) {
  const int exponent = bits >> 3 & 15;
  const int mantissa = bits & 7;
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                        : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

/// Rounds to the nearest E4M3 number, ties to even; beyond the greatest, 448, to that, as NaN does.
inline std::uint8_t encode_e4m3(double value) {
  constexpr double kGreatest = 448;
  constexpr int kSmallestNormal = -6;
  const int sign = std::signbit(value) ? 0x80 : 0;
  const double magnitude = std::isnan(value) ? kGreatest : std::min(std::abs(value), kGreatest);
  if (magnitude == 0) return static_cast<std::uint8_t>(sign);
  const int exponent = std::max(std::ilogb(magnitude), kSmallestNormal);
  const int eighths = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));  // a carry adds 1 to it
  return static_cast<std::uint8_t>(sign | (((exponent - kSmallestNormal) << 3) + eighths));
}

/// The value of an E5M2 code, the upper byte of an f16, exact.
inline float decode_e5m2(std::uint8_t bits) {
  return decode_f16(static_cast<std::uint16_t>(bits << 8));
}

/// Rounds to the nearest E5M2 number, ties to even; beyond the greatest finite one, 57344, to that. NaN stays NaN.
inline std::uint8_t encode_e5m2(double value) {
  constexpr double kGreatest = 57344;
  constexpr int kSmallestNormal = -14;
  const int sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return static_cast<std::uint8_t>(sign | 0x7f);
  const double magnitude = std::min(std::abs(value), kGreatest);
  if (magnitude == 0) return static_cast<std::uint8_t>(sign);
  const int exponent = std::max(std::ilogb(magnitude), kSmallestNormal);
  const int quarters = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 2 - exponent)));  // a carry adds 1 to it
  return static_cast<std::uint8_t>(sign | (((exponent - kSmallestNormal) << 2) + quarters));
}

/// Rounds to the nearest integer, ties to even, from -127 to 127, which NaN becomes too.
inline std::int8_t encode_i8(double value) {
  return std::isnan(value) ? std::int8_t{127}
                           : static_cast<std::int8_t>(std::nearbyint(std::clamp(value, -127.0, 127.0)));
}

}  // namespace fa::reference

#endif  // FA_SRC_REFERENCE_CONVERT_HPP_
