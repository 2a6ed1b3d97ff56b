// The Hopper backward with functions, windows, chunks, sinks, packed batches and dropout, against float64.

#include "emulator/sm90_backward_variants.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "emulator/sm90_backward_cases.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::test::AttentionGradients;
using fa::test::HostTensor;
using fa::test::VariantCase;

double tolerance(DType dtype) {
  return dtype == DType::bf16 ? 2e-2 : 3e-3;
}

/// Rows that kernels leave alone are NaN, and 0 in what is expected.
void expect_near(const char* name, const HostTensor& actual, const HostTensor& expected, double terms, bool cleared,
                 double bound) {
  const fa::TensorView view = expected.view();
  double worst = 0;
  double largest = terms;
  for_each_row(view.shape[0], view.shape[1], view.shape[2], [&](std::int64_t b, std::int64_t h, std::int64_t s) {
    for (std::int64_t d = 0; d < view.shape[3]; ++d) {
      const double wanted = expected.at(b, h, s, d);
      const double got = actual.at(b, h, s, d);
      largest = std::max(largest, std::abs(wanted));
      if (!cleared && std::isnan(got) && wanted == 0) continue;
      const double error = std::abs(got - wanted);
      worst = std::isnan(error) ? HUGE_VAL : std::max(worst, error);
    }
  });
  EXPECT_LE(worst, bound * largest) << name;
}

class Sm90BackwardVariants : public testing::TestWithParam<std::size_t> {};

TEST_P(Sm90BackwardVariants, MatchTheReference) {
  const Sm90BackwardVariant& kernel = sm90_backward_variants()[GetParam()];
  const BackwardSpecs specs = backward_specs_of(kernel);
  ASSERT_EQ(specs.main.family, fa::Family::sm90);
  EXPECT_EQ(specs.main.varlen, kernel.varlen);
  EXPECT_EQ(specs.main.dropout, kernel.dropout);
  for (std::size_t index = 0; index < kSm90BackwardCases; ++index) {
    PackedCase c = sm90_backward_case(kernel, index);
    const VariantCase variant = variant_of(kernel, c);
    if (specs.main.variants.any()) c.variant = &variant;
    SCOPED_TRACE(canonical(specs.main) + ", " + testing::PrintToString(c));
    const BackwardData data = make_data(c);
    VariantResults extra;
    AttentionGradients actual;
    ASSERT_NO_THROW(actual = run_packed(specs, c, data, &extra));
    fa::test::VariantGradients wanted;
    const AttentionGradients expected = expected_of(c, data, c.variant != nullptr ? &wanted : nullptr);
    const bool cleared = !c.sequences || c.clear;
    const double dp = std::sqrt(static_cast<double>(c.attention.d_v)) / (1 - static_cast<double>(c.dropout));
    const double scale = std::abs(static_cast<double>(c.attention.softmax_scale()));
    const double bound = tolerance(c.attention.dtype);
    expect_near("dq", actual.dq, expected.dq, dp * scale, cleared, bound);
    expect_near("dk", actual.dk, expected.dk, dp * scale, cleared, bound);
    expect_near("dv", actual.dv, expected.dv, 1, cleared, bound);
    for (std::size_t i = 0; i < wanted.captures.size(); ++i) {
      EXPECT_LE(fa::test::worst_ratio(extra.captures[i], wanted.captures[i], wanted.bounds.captures[i]), 1)
          << "gradient of " << variant.captures[i].name;
    }
    EXPECT_LE(fa::test::worst_ratio(extra.dsink, wanted.dsink, wanted.bounds.dsink), 1) << "dsink";
  }
}

INSTANTIATE_TEST_SUITE_P(All, Sm90BackwardVariants, testing::Range<std::size_t>(0, sm90_backward_variants().size()));

}  // namespace
}  // namespace emulator
