#include "reference/convert.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace fa::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Format {
  const char* name;
  int mantissa_bits;
  int bias;
  float (*decode)(std::uint16_t);
  std::uint16_t (*encode)(double);
};

void PrintTo(const Format& format, std::ostream* out) {
  *out << format.name;
}

class Convert : public testing::TestWithParam<Format> {
 protected:
  const Format& f() const { return GetParam(); }
  std::uint16_t infinity() const { return static_cast<std::uint16_t>((2 * f().bias + 1) << f().mantissa_bits); }

  /// The value of a finite pattern, from the definition of the format.
  double value(int bits) const {
    const int exponent = (bits & 0x7fff) >> f().mantissa_bits;
    const int mantissa = bits & ((1 << f().mantissa_bits) - 1);
    const double magnitude =
        exponent == 0 ? std::ldexp(mantissa, 1 - f().bias - f().mantissa_bits)
                      : std::ldexp(mantissa + (1 << f().mantissa_bits), exponent - f().bias - f().mantissa_bits);
    return (bits & 0x8000) != 0 ? -magnitude : magnitude;
  }
};

TEST_P(Convert, DecodesEveryPattern) {
  for (int bits = 0; bits < 0x10000; ++bits) {
    const float decoded = f().decode(static_cast<std::uint16_t>(bits));
    const int magnitude = bits & 0x7fff;
    if (magnitude > infinity()) {
      ASSERT_TRUE(std::isnan(decoded)) << bits;
    } else if (magnitude == infinity()) {
      ASSERT_EQ(decoded, bits == magnitude ? kInfinity : -kInfinity);
    } else {
      ASSERT_EQ(decoded, value(bits)) << bits;
      ASSERT_EQ(std::signbit(decoded), (bits & 0x8000) != 0) << bits;
    }
  }
}

TEST_P(Convert, RoundTripsEveryPattern) {
  for (int bits = 0; bits < 0x10000; ++bits) {
    const std::uint16_t again = f().encode(f().decode(static_cast<std::uint16_t>(bits)));
    if ((bits & 0x7fff) > infinity()) {
      ASSERT_GT(again & 0x7fff, infinity()) << bits;
      ASSERT_EQ(again & 0x8000, bits & 0x8000) << bits;
    } else {
      ASSERT_EQ(again, bits);
    }
  }
}

TEST_P(Convert, RoundsBetweenEveryPairOfNeighbours) {
  for (int low = 0; low + 1 < infinity(); ++low) {
    const double middle = (value(low) + value(low + 1)) / 2;
    const int even = low + (low & 1);
    for (const int sign : {0, 0x8000}) {
      const double s = sign != 0 ? -1 : 1;
      ASSERT_EQ(f().encode(s * middle), sign | even) << low;
      ASSERT_EQ(f().encode(s * std::nextafter(middle, 0.0)), sign | low) << low;
      ASSERT_EQ(f().encode(s * std::nextafter(middle, kInfinity)), sign | (low + 1)) << low;
    }
  }
}

TEST_P(Convert, OverflowsFromHalfAUnitAboveTheLargest) {
  const std::uint16_t largest = static_cast<std::uint16_t>(infinity() - 1);
  const double border = value(largest) + (value(largest) - value(largest - 1)) / 2;
  EXPECT_EQ(f().encode(std::nextafter(border, 0.0)), largest);
  EXPECT_EQ(f().encode(border), infinity());
  EXPECT_EQ(f().encode(std::numeric_limits<double>::max()), infinity());
  EXPECT_EQ(f().encode(kInfinity), infinity());
  EXPECT_EQ(f().encode(-kInfinity), 0x8000 | infinity());
}

TEST_P(Convert, TinyValuesBecomeSignedZero) {
  const double smallest = value(1);
  EXPECT_EQ(f().encode(smallest / 2), 0);
  EXPECT_EQ(f().encode(std::nextafter(smallest / 2, 1.0)), 1);
  EXPECT_EQ(f().encode(std::numeric_limits<double>::denorm_min()), 0);
  EXPECT_EQ(f().encode(-std::numeric_limits<double>::min()), 0x8000);
  EXPECT_EQ(f().encode(-0.0), 0x8000);
}

TEST_P(Convert, EveryNanStaysNan) {
  const double quiet = std::numeric_limits<double>::quiet_NaN();
  const double low_payload = std::bit_cast<double>(std::uint64_t{0x7ff0000000000001});
  EXPECT_GT(f().encode(quiet) & 0x7fff, infinity());
  EXPECT_GT(f().encode(-quiet) & 0x7fff, infinity());
  EXPECT_GT(f().encode(low_payload) & 0x7fff, infinity());
}

INSTANTIATE_TEST_SUITE_P(Formats, Convert,
                         testing::Values(Format{"f16", 10, 15, decode_f16, encode_f16},
                                         Format{"bf16", 7, 127, decode_bf16, encode_bf16}),
                         [](const auto& parameter) { return std::string(parameter.param.name); });

}  // namespace
}  // namespace fa::reference
