// The short form of a hyperbolic tangent: how precise it is, and which scores take it.

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

#include <common/variant.cuh>

namespace emulator {
namespace {

using fa::kernel::SmallTanh;

TEST(SmallTanh, IsWithinItsBoundOfTheResult) {
  for (const float slope : {1.f, -0.25f, 0.03f, 7.f}) {
    const SmallTanh tanh(slope);
    for (int i = -1000; i <= 1000; ++i) {
      const float x = SmallTanh::kLargest * static_cast<float>(i) / (1000 * slope);
      const double exact = std::tanh(double{x} * double{slope});
      EXPECT_LE(std::abs(double{tanh.of(x)} - exact), 1.6e-4 * std::abs(exact)) << x << " of slope " << slope;
    }
  }
}

/// [n8 tiles, element]: the first row half's scores, then the second's.
using Scores = std::array<std::array<float, 4>, 3>;

bool are_small(const Scores& scores, float slope) {
  const SmallTanh tanh[2] = {SmallTanh(slope), SmallTanh(slope)};
  return fa::kernel::are_small<3>(
      tanh, [&](int n, int i) { return scores[static_cast<std::size_t>(n)][static_cast<std::size_t>(i)]; });
}

TEST(SmallTanh, IsTakenWhereAllScoresAreSmall) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(are_small({}, 1));
  EXPECT_TRUE(are_small({}, 0));
  for (const float sign : {1.f, -1.f}) {
    for (const float others : {0.f, 0.2f, -0.2f}) {
      for (std::size_t n = 0; n < 3; ++n) {
        for (std::size_t i = 0; i < 4; ++i) {
          Scores scores;
          for (auto& tile : scores) tile.fill(others);
          for (const auto& [value, small] :
               {std::pair(0.3f, true), std::pair(0.32f, false), std::pair(3.f, false), std::pair(kInfinity, false),
                std::pair(std::numeric_limits<float>::quiet_NaN(), false)}) {
            scores[n][i] = std::copysign(value, sign);
            EXPECT_EQ(are_small(scores, 1), small) << scores[n][i] << " among " << others;
            EXPECT_EQ(are_small(scores, -1), small) << scores[n][i] << " among " << others;
          }
          scores[n][i] = sign * 3.f;
          EXPECT_TRUE(are_small(scores, 0.1f));
        }
      }
    }
  }
}

}  // namespace
}  // namespace emulator
