// The Hopper backward with functions, windows, chunks, sinks, packed batches and dropout, against float64.

#include "emulator/sm90_backward_variants.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "emulator/packed_run.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::test::AttentionCase;
using fa::test::AttentionGradients;
using fa::test::HostTensor;
using fa::test::VariantCase;

constexpr std::size_t kCases = 3;

/// Sequences of one row, of none, of several tiles, without keys, in part unused, and behind some rows of none.
Sequences sequences_of(std::size_t index) {
  const std::vector<std::int32_t> rows[kCases] = {{5, 0, 140, 1, 64}, {90, 12, 70}, {150}};
  const std::vector<std::int32_t> keys[kCases] = {{9, 20, 135, 3, 0}, {70, 0, 150}, {130}};
  Sequences result;
  const auto sum = [](const std::vector<std::int32_t>& lengths, std::int32_t first) {
    std::vector<std::int32_t> sums{first};
    for (const std::int32_t length : lengths) sums.push_back(sums.back() + length);
    return sums;
  };
  result.cu_q = sum(rows[index], index == 1 ? 3 : 0);
  result.cu_kv = sum(keys[index], index == 1 ? 5 : 0);
  if (index == 1) {
    result.used_q = {33, 0, 67};
    result.used_kv = {50, 0, 135};
  }
  return result;
}

PackedCase make_case(const Sm90BackwardVariant& variant, std::size_t index) {
  constexpr std::array<std::array<std::int64_t, 2>, kCases> kLengths{{{70, 150}, {150, 97}, {129, 129}}};
  PackedCase c;
  c.attention.dtype = variant.dtype;
  c.attention.d_qk = variant.d_qk;
  c.attention.d_v = variant.d_v;
  c.attention.causal = variant.causal;
  if (variant.scale != 0) c.attention.scale = variant.scale;
  c.attention.h_q = 4;
  c.attention.h_kv = index == 0 ? 1 : 2;
  c.attention.seed = 11 + index;
  c.attention.causal_align = index == 2 ? fa::CausalAlign::top_left : fa::CausalAlign::bottom_right;
  c.dropout = variant.dropout ? 0.3f : 0;
  c.dlse = index == 1;
  c.splits = variant.splits;
  if (variant.varlen) {
    c.sequences = sequences_of(index);
    c.attention.s_q = c.sequences->cu_q.back() + 2;
    c.attention.s_kv = c.sequences->cu_kv.back() + 4;
    c.clear = index == 1;
  } else {
    c.attention.b = index == 1 ? 2 : 1;
    c.attention.s_q = kLengths[index][0];
    c.attention.s_kv = kLengths[index][1];
  }
  return c;
}

/// Captures have an entry for every sequence.
VariantCase make_variant(const Sm90BackwardVariant& variant, const PackedCase& c) {
  AttentionCase whole = c.attention;
  if (c.sequences) whole.b = c.sequences->count();
  return variant_case(variant, whole);
}

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

void expect_near(const std::string& name, const std::vector<float>& actual, const std::vector<double>& expected,
                 double terms, double bound) {
  ASSERT_EQ(actual.size(), expected.size()) << name;
  double worst = 0;
  double largest = terms;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double error = std::abs(static_cast<double>(actual[i]) - expected[i]);
    worst = std::isnan(error) ? HUGE_VAL : std::max(worst, error);
    largest = std::max(largest, std::abs(expected[i]));
  }
  EXPECT_LE(worst, bound * largest) << name;
}

class Sm90BackwardVariants : public testing::TestWithParam<std::size_t> {};

TEST_P(Sm90BackwardVariants, MatchTheReference) {
  const Sm90BackwardVariant& kernel = sm90_backward_variants()[GetParam()];
  const BackwardSpecs specs = backward_specs_of(kernel);
  ASSERT_EQ(specs.main.family, fa::Family::sm90);
  EXPECT_EQ(specs.main.varlen, kernel.varlen);
  EXPECT_EQ(specs.main.dropout, kernel.dropout);
  for (std::size_t index = 0; index < kCases; ++index) {
    PackedCase c = make_case(kernel, index);
    const VariantCase variant = make_variant(kernel, c);
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
      expect_near("gradient of " + variant.captures[i].name, extra.captures[i], wanted.captures[i], dp, bound);
    }
    if (variant.config.sink) expect_near("dsink", extra.dsink, wanted.dsink, dp, bound);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Sm90BackwardVariants, testing::Range<std::size_t>(0, sm90_backward_variants().size()));

}  // namespace
}  // namespace emulator
