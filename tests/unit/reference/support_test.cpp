// The helpers that decide whether other tests pass are tested themselves: a wrong result must not look right.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "support/attention_case.hpp"

namespace fa::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

HostTensor row(std::initializer_list<double> values) {
  HostTensor tensor(DType::f64, 1, 1, static_cast<std::int64_t>(values.size()));
  std::int64_t s = 0;
  for (const double value : values) tensor.set(0, 0, s++, 0, value);
  return tensor;
}

ErrorMetrics compare_rows(std::initializer_list<double> actual, std::initializer_list<double> expected) {
  return compare(row(actual).view(), row(expected).view());
}

TEST(Compare, MeasuresMeanMaximumAndRelativeMaximum) {
  const ErrorMetrics metrics = compare_rows({1.0, 2.5, -4.0}, {1.0, 2.0, -3.0});
  EXPECT_DOUBLE_EQ(metrics.mean_abs, 0.5);
  EXPECT_DOUBLE_EQ(metrics.max_abs, 1.0);
  EXPECT_DOUBLE_EQ(metrics.max_abs_over_max_ref, 1.0 / 3);
}

TEST(Compare, NanNeverPasses) {
  EXPECT_EQ(compare_rows({1.0, kNan}, {1.0, 2.0}).max_abs, kInfinity);
  EXPECT_EQ(compare_rows({kNan, 1.0}, {1.0, 2.0}).mean_abs, kInfinity);
  EXPECT_EQ(compare_rows({1.0, 2.0}, {kNan, 2.0}).max_abs, kInfinity);
  EXPECT_EQ(compare_rows({kNan, 2.0}, {kNan, 2.0}).max_abs_over_max_ref, kInfinity);
}

TEST(Compare, OnlyEqualInfinitiesAgree) {
  EXPECT_EQ(lse_max_abs_error(row({-kInfinity, 1.0}).view(), row({-kInfinity, 1.5}).view()), 0.5);
  EXPECT_EQ(compare_rows({kInfinity}, {-kInfinity}).max_abs, kInfinity);
  EXPECT_EQ(compare_rows({-kInfinity}, {0.0}).max_abs, kInfinity);
  EXPECT_EQ(compare_rows({0.0}, {-kInfinity}).max_abs, kInfinity);
}

TEST(Compare, DifferentShapesNeverPass) {
  EXPECT_EQ(compare_rows({1.0, 2.0}, {1.0}).max_abs, kInfinity);
}

TEST(Compare, ReadsThroughStridesAndDtypes) {
  const AttentionCase bhsd{.b = 2, .h_q = 3, .s_q = 4, .d_qk = 5, .dtype = DType::f16};
  AttentionCase bshd = bhsd;
  bshd.layout = Layout::bshd;
  const HostTensor a = make_inputs(bhsd).q;
  const HostTensor b = make_inputs(bshd).q;
  EXPECT_NE(a.bytes(), b.bytes());
  EXPECT_EQ(compare(a.view(), b.view()).max_abs, 0.0);
}

TEST(AttentionCase, InputsAreRepeatableAndDifferBySeed) {
  AttentionCase c{.h_q = 2, .h_kv = 2, .s_q = 16, .s_kv = 16, .d_qk = 16, .d_v = 16, .dtype = DType::f32};
  const AttentionInputs first = make_inputs(c);
  EXPECT_EQ(first.q.bytes(), make_inputs(c).q.bytes());
  EXPECT_NE(first.q.bytes(), first.k.bytes());
  EXPECT_NE(first.k.bytes(), first.v.bytes());
  c.seed = 2;
  EXPECT_NE(first.q.bytes(), make_inputs(c).q.bytes());
}

TEST(AttentionCase, InputsAreKnownNormalValues) {
  const AttentionCase c{.s_q = 1000, .d_qk = 100, .dtype = DType::f64};
  const HostTensor q = make_inputs(c).q;
  // Integer arithmetic on mt19937_64(3) fixes it on every platform.
  EXPECT_EQ(q.at(0, 0, 0, 0), -0.7270965576171875);
  double sum = 0, squares = 0;
  for (std::int64_t s = 0; s < c.s_q; ++s) {
    for (std::int64_t d = 0; d < c.d_qk; ++d) {
      sum += q.at(0, 0, s, d);
      squares += q.at(0, 0, s, d) * q.at(0, 0, s, d);
    }
  }
  EXPECT_NEAR(sum / 1e5, 0.0, 0.01);
  EXPECT_NEAR(squares / 1e5, 1.0, 0.02);
}

TEST(AttentionCase, OutputsStartAsNan) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) {
    const AttentionCase c{.s_q = 3, .d_v = 4, .dtype = dtype};
    const AttentionOutputs outputs = make_outputs(c);
    EXPECT_TRUE(std::isnan(outputs.o.at(0, 0, 2, 3)));
    EXPECT_TRUE(std::isnan(outputs.lse.at(0, 0, 2)));
    EXPECT_EQ(compare(outputs.o.view(), reference_f64(c).o.view()).max_abs, kInfinity);
  }
}

TEST(AttentionCase, HasANameForTests) {
  const AttentionCase c{.b = 2,
                        .h_q = 6,
                        .h_kv = 2,
                        .s_q = 63,
                        .s_kv = 500,
                        .d_v = 128,
                        .causal = true,
                        .causal_align = CausalAlign::top_left,
                        .scale = -0.5f,
                        .layout = Layout::bshd};
  EXPECT_EQ(to_string(c), "bf16_b2_h6kv2_s63x500_d64x128_causal_top_left_scalem0p500000_bshd");
}

}  // namespace
}  // namespace fa::test
