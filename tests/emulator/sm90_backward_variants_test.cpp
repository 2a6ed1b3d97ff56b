// The Hopper backward with functions, windows, chunks, sinks, packed batches and dropout, against float64.

#include "emulator/sm90_backward_variants.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "emulator/sm90_backward_cases.hpp"
#include "support/thorough.hpp"

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
  ASSERT_EQ(specs.main.family(), fa::plan::Family::sm90);
  EXPECT_EQ(specs.main.varlen, kernel.varlen);
  EXPECT_EQ(specs.main.dropout, kernel.dropout);
  for (std::size_t index = 0; index < kSm90BackwardCases; ++index) {
    // Two of the three in turn are left to thorough runs.
    if (!fa::test::tries(GetParam() + index, kSm90BackwardCases)) continue;
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
    if (kernel.wanted.dq) expect_near("dq", actual.dq, expected.dq, dp * scale, cleared, bound);
    if (kernel.wanted.dk) expect_near("dk", actual.dk, expected.dk, dp * scale, cleared, bound);
    if (kernel.wanted.dv) expect_near("dv", actual.dv, expected.dv, 1, cleared, bound);
    for (std::size_t i = 0; i < wanted.captures.size(); ++i) {
      EXPECT_LE(fa::test::worst_ratio(extra.captures[i], wanted.captures[i], wanted.bounds.captures[i]), 1)
          << "gradient of " << variant.captures[i].name;
    }
    EXPECT_LE(fa::test::worst_ratio(extra.dsink, wanted.dsink, wanted.bounds.dsink), 1) << "dsink";
  }
}

/// NaN in the rows of q and dout that keep no key, as NaN in all keys shows. Of rows that a mask function leaves
/// nothing but a sink no kernel knows: of these, rows before the first key.
std::size_t spoil_rows_without_keys(const PackedCase& c, BackwardData& data) {
  fa::test::AttentionInputs all_nan = data.inputs;
  all_nan.k.fill_with_nan();
  const fa::test::AttentionOutputs reached = expected_of(c, all_nan);
  const bool by_function = c.variant != nullptr && !c.variant->config.mask.expression.empty();
  const std::int64_t first = c.attention.causal && !c.sequences ? c.attention.s_q - c.attention.s_kv : 0;
  std::size_t spoilt = 0;
  for_each_row(c.attention.b, c.attention.h_q, c.attention.s_q, [&](std::int64_t b, std::int64_t h, std::int64_t s) {
    const double lse = reached.lse.at(b, h, s);
    if (std::isnan(lse) || (by_function && std::isfinite(lse) && s >= first)) return;
    ++spoilt;
    for (std::int64_t d = 0; d < c.attention.d_qk; ++d) data.inputs.q.set(b, h, s, d, std::nan(""));
    for (std::int64_t d = 0; d < c.attention.d_v; ++d) data.dout.set(b, h, s, d, std::nan(""));
  });
  return spoilt;
}

TEST_P(Sm90BackwardVariants, RowsWithoutKeysReachNoGradient) {
  const Sm90BackwardVariant& kernel = sm90_backward_variants()[GetParam()];
  const BackwardSpecs specs = backward_specs_of(kernel);
  PackedCase c = sm90_backward_case(kernel, 1);  // fewer keys than rows
  VariantCase variant = variant_of(kernel, c);
  for (fa::test::NamedTensor& capture : variant.captures) {
    if (capture.name != "doc") continue;
    for (std::size_t i = 100; i < 120; ++i) {  // no key has it
      const std::int32_t document = 1000;
      std::memcpy(capture.bytes.data() + i * sizeof document, &document, sizeof document);
    }
  }
  if (specs.main.variants.any()) c.variant = &variant;
  SCOPED_TRACE(canonical(specs.main) + ", " + testing::PrintToString(c));
  BackwardData data = make_data(c);
  const std::size_t spoilt = spoil_rows_without_keys(c, data);
  if (kernel.causal || kernel.choice == "documents") {
    EXPECT_GT(spoilt, 0U);
  }
  VariantResults extra;
  AttentionGradients actual;
  ASSERT_NO_THROW(actual = run_packed(specs, c, data, &extra));
  fa::test::VariantGradients wanted;
  const AttentionGradients expected = expected_of(c, data, c.variant != nullptr ? &wanted : nullptr);
  const bool cleared = !c.sequences || c.clear;
  const double dp = std::sqrt(static_cast<double>(c.attention.d_v)) / (1 - static_cast<double>(c.dropout));
  const double scale = std::abs(static_cast<double>(c.attention.softmax_scale()));
  const double bound = tolerance(c.attention.dtype);
  if (kernel.wanted.dq) expect_near("dq", actual.dq, expected.dq, dp * scale, cleared, bound);
  if (kernel.wanted.dk) expect_near("dk", actual.dk, expected.dk, dp * scale, cleared, bound);
  if (kernel.wanted.dv) expect_near("dv", actual.dv, expected.dv, 1, cleared, bound);
}

/// NaN in a key leaves dq of the rows alone that do not keep it.
TEST_P(Sm90BackwardVariants, AHiddenKeyDoesNotReachDq) {
  const Sm90BackwardVariant& kernel = sm90_backward_variants()[GetParam()];
  if (!kernel.wanted.dq) return;
  const BackwardSpecs specs = backward_specs_of(kernel);
  constexpr std::array<std::size_t, 2> kCases{1, 2};
  constexpr std::array<std::int64_t, 2> kKeys{20, 90};
  for (const std::size_t index : fa::test::tried(kCases, GetParam())) {
    PackedCase c = sm90_backward_case(kernel, index);
    const VariantCase variant = variant_of(kernel, c);
    if (specs.main.variants.any()) c.variant = &variant;
    SCOPED_TRACE(canonical(specs.main) + ", " + testing::PrintToString(c));
    BackwardData data = make_data(c);
    const AttentionGradients expected = expected_of(c, data);
    for (const std::int64_t key : fa::test::tried(kKeys, GetParam() / 2)) {
      fa::test::AttentionInputs inputs = data.inputs;
      fill(inputs.k, {key, 1}, std::nan(""));
      const fa::test::AttentionOutputs reached = expected_of(c, inputs);
      BackwardData spoilt = data;
      spoilt.inputs = inputs;
      AttentionGradients actual;
      for_each_row(c.attention.b, c.attention.h_q, c.attention.s_q,
                   [&](std::int64_t b, std::int64_t h, std::int64_t s) {
                     if (std::isnan(reached.lse.at(b, h, s))) spoilt.outputs.lse.set(b, h, s, 0, std::nan(""));
                   });
      ASSERT_NO_THROW(actual = run_packed(specs, c, spoilt));
      for_each_row(c.attention.b, c.attention.h_q, c.attention.s_q,
                   [&](std::int64_t b, std::int64_t h, std::int64_t s) {
                     if (!std::isnan(reached.lse.at(b, h, s))) return;
                     for (std::int64_t d = 0; d < c.attention.d_qk; ++d)
                       actual.dq.set(b, h, s, d, expected.dq.at(b, h, s, d));
                   });
      const double dp = std::sqrt(static_cast<double>(c.attention.d_v)) / (1 - static_cast<double>(c.dropout));
      const double scale = std::abs(static_cast<double>(c.attention.softmax_scale()));
      expect_near("dq", actual.dq, expected.dq, dp * scale, !c.sequences || c.clear, tolerance(c.attention.dtype));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Sm90BackwardVariants, testing::Range<std::size_t>(0, sm90_backward_variants().size()));

}  // namespace
}  // namespace emulator
