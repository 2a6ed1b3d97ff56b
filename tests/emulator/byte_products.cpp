#include "emulator/byte_products.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "reference/convert.hpp"

namespace emulator {
namespace {

constexpr int kFraction = 13;

/// mantissa * 2^(exponent - 3), the mantissa with 3 bits of fraction.
struct ByteFloat {
  int mantissa = 0;
  int exponent = 0;
  bool special = false;  // infinite or NaN
};

ByteFloat byte_float(Half half, std::uint8_t bits) {
  const bool is_e4m3 = half == Half::e4m3;
  const int fraction = is_e4m3 ? 3 : 2;
  const int bias = is_e4m3 ? 7 : 15;
  const int field = (bits & 0x7f) >> fraction;
  const int low = bits & ((1 << fraction) - 1);
  const int mantissa = (field == 0 ? low : low | 1 << fraction) << (3 - fraction);
  const bool special = is_e4m3 ? (bits & 0x7f) == 0x7f : field == 31;
  return {(bits & 0x80) != 0 ? -mantissa : mantissa, (field == 0 ? 1 : field) - bias, special};
}

double value_of(Half half, std::uint8_t bits) {
  if (half == Half::e4m3 && (bits & 0x7f) == 0x7f) return std::nan("");
  return half == Half::e4m3 ? fa::reference::decode_e4m3(bits) : fa::reference::decode_e5m2(bits);
}

/// Cuts what is below 2^unit off.
std::int64_t cut(double value, int unit) {
  return static_cast<std::int64_t>(std::ldexp(value, -unit));
}

float cut_to_fraction(double value) {
  if (value == 0) return 0.f;
  const int unit = std::ilogb(value) - kFraction;
  return static_cast<float>(std::ldexp(static_cast<double>(cut(value, unit)), unit));
}

/// Of one element of D: `a` and `b` have the depth's elements, `pitch` apart.
float add_up(const ByteFloat* a, const ByteFloat* b, std::size_t pitch, float d) {
  constexpr int kNone = -1000;
  int greatest = d != 0 ? std::ilogb(d) : kNone;
  for (std::size_t k = 0; k < kByteDepth; ++k) {
    const ByteFloat& y = b[k * pitch];
    if (a[k].mantissa != 0 && y.mantissa != 0) greatest = std::max(greatest, a[k].exponent + y.exponent);
  }
  if (greatest == kNone) return 0.f;
  const int unit = greatest - kFraction;
  std::int64_t sum = cut(static_cast<double>(d), unit);
  for (std::size_t k = 0; k < kByteDepth; ++k) {
    const ByteFloat& y = b[k * pitch];
    const std::int64_t product = std::int64_t{a[k].mantissa} * y.mantissa;  // with 6 bits of fraction
    const int shift = a[k].exponent + y.exponent - 6 - unit;                // at most 7
    const std::int64_t magnitude = product < 0 ? -product : product;
    const std::int64_t aligned = shift >= 0 ? magnitude << shift : shift > -63 ? magnitude >> -shift : 0;
    sum += product < 0 ? -aligned : aligned;
  }
  return cut_to_fraction(std::ldexp(static_cast<double>(sum), unit));
}

std::vector<ByteFloat> byte_floats(Half half, const std::vector<std::uint8_t>& bytes) {
  std::vector<ByteFloat> result(bytes.size());
  std::transform(bytes.begin(), bytes.end(), result.begin(), [half](std::uint8_t x) { return byte_float(half, x); });
  return result;
}

}  // namespace

void multiply_bytes(Half half_a, Half half_b, const std::vector<std::uint8_t>& a_bytes,
                    const std::vector<std::uint8_t>& b_bytes, std::vector<float>& d) {
  const std::size_t rows = a_bytes.size() / kByteDepth, columns = b_bytes.size() / kByteDepth;
  const std::vector<ByteFloat> a = byte_floats(half_a, a_bytes);
  const std::vector<ByteFloat> b = byte_floats(half_b, b_bytes);
  const bool special = std::any_of(a.begin(), a.end(), [](const ByteFloat& x) { return x.special; }) ||
                       std::any_of(b.begin(), b.end(), [](const ByteFloat& x) { return x.special; }) ||
                       std::any_of(d.begin(), d.end(), [](float x) { return !std::isfinite(x); });
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t n = 0; n < columns; ++n) {
      float& sum = d[row * columns + n];
      if (!special) {
        sum = add_up(&a[row * kByteDepth], &b[n], columns, sum);
        continue;
      }
      double exact = sum;
      for (std::size_t k = 0; k < kByteDepth; ++k) {
        exact += value_of(half_a, a_bytes[row * kByteDepth + k]) * value_of(half_b, b_bytes[k * columns + n]);
      }
      sum = static_cast<float>(exact);
    }
  }
}

void multiply_whole(const std::vector<std::uint8_t>& a, const std::vector<std::uint8_t>& b, std::vector<float>& d) {
  const std::size_t rows = a.size() / kByteDepth, columns = b.size() / kByteDepth;
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t n = 0; n < columns; ++n) {
      std::uint32_t sum = 0;
      std::memcpy(&sum, &d[row * columns + n], sizeof sum);
      for (std::size_t k = 0; k < kByteDepth; ++k) {
        const int product =
            static_cast<std::int8_t>(a[row * kByteDepth + k]) * static_cast<std::int8_t>(b[k * columns + n]);
        sum += static_cast<std::uint32_t>(product);
      }
      std::memcpy(&d[row * columns + n], &sum, sizeof sum);
    }
  }
}

float widen_e4m3(std::uint8_t bits) {
  return static_cast<float>(value_of(Half::e4m3, bits));
}

std::uint8_t convert_e4m3(float value) {
  return std::isnan(value) ? std::uint8_t{0x7f} : fa::reference::encode_e4m3(static_cast<double>(value));
}

}  // namespace emulator
