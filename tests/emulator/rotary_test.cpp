// The arithmetic of rotary embeddings, as kernels do it.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "plan/append.hpp"

#include <common/rotary.cuh>

namespace emulator {
namespace {

TEST(Rotary, CosinesAndSinesAreWithinTheirBound) {
  double worst = 0;
  for (std::uint64_t turn = 0; turn < std::uint64_t{1} << 32; turn += 40009) {
    float cosine = 0, sine = 0;
    fa::kernel::cos_sin(static_cast<std::uint32_t>(turn), cosine, sine);
    const double angle = 2 * M_PI * std::ldexp(static_cast<double>(turn), -32);
    worst = std::max({worst, std::abs(cosine - std::cos(angle)), std::abs(sine - std::sin(angle))});
  }
  EXPECT_LT(worst, std::exp2(-22.9));
}

// Far positions lose nothing: each lies where long arithmetic says.
TEST(Rotary, FarPositionsAreExact) {
  for (const double base : {10000.0, 500000.0, 3.7}) {
    const fa::plan::RotaryTurns turns = fa::plan::rotary_turns(128, base);
    for (const std::int64_t position : {std::int64_t{1} << 20, (std::int64_t{1} << 31) - 1, std::int64_t{1} << 40}) {
      for (int i = 0; i < 64; ++i) {
        const long double turn = static_cast<long double>(position) *
                                 (std::pow(static_cast<long double>(base), -i / 64.0L) / (2 * std::acos(-1.0L)));
        const auto part = static_cast<double>(turn - std::floor(turn));
        double off = std::abs(
            std::ldexp(static_cast<double>(fa::kernel::turn_at(position, turns[static_cast<std::size_t>(i)])), -32) -
            part);
        off = std::min(off, 1 - off);
        // Of the angle, and of this long double.
        EXPECT_LT(off, std::exp2(-32.9) + std::ldexp(static_cast<double>(position), -62))
            << base << ' ' << position << ' ' << i;
      }
    }
  }
}

}  // namespace
}  // namespace emulator
