#include "reference/forward.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "naive_attention.hpp"
#include "support/attention_case.hpp"
#include "support/thorough.hpp"

namespace fa::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

using Strides = std::array<std::int64_t, 4>;

reference::ForwardArgs arguments(const AttentionCase& c, const TensorView& q, const TensorView& k, const TensorView& v,
                                 AttentionOutputs& outputs) {
  reference::ForwardArgs args;
  args.q = q;
  args.k = k;
  args.v = v;
  args.o = outputs.o.view();
  args.lse = outputs.lse.view();
  args.scale = c.softmax_scale();
  args.causal = c.causal;
  args.causal_align = c.causal_align;
  return args;
}

AttentionOutputs run(const AttentionCase& c, const TensorView& q, const TensorView& k, const TensorView& v) {
  AttentionOutputs outputs = make_outputs(c);
  reference::forward(arguments(c, q, k, v, outputs));
  return outputs;
}

AttentionOutputs run(const AttentionCase& c, const AttentionInputs& in) {
  return run(c, in.q.view(), in.k.view(), in.v.view());
}

/// What float arithmetic and one rounding to the dtype may cost on values of order 1, at the default scale.
struct Tolerance {
  double o;
  double lse;
};
Tolerance tolerance(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return {0x1p-10, 4e-6};
    case DType::bf16:
      return {0x1p-7, 4e-6};
    case DType::f32:
      return {4e-6, 4e-6};
    case DType::f64:
      return {1e-13, 1e-13};
    case DType::i32:
    case DType::e4m3:
    case DType::i8:
    case DType::e5m2:
    case DType::u4x2:
      break;
  }
  return {0, 0};
}

void expect_near_naive(const AttentionCase& c, AttentionOutputs& actual, NaiveResult& naive, Tolerance allowed) {
  const TensorView o(naive.o.data(), DType::f64, {c.b, c.h_q, c.s_q, c.d_v});
  const TensorView lse(naive.lse.data(), DType::f64, {c.b, c.h_q, c.s_q});
  // Errors of a score grow with the score.
  const double growth = std::max(1.0, std::abs(c.softmax_scale()) * std::sqrt(static_cast<double>(c.d_qk)));
  EXPECT_LE(compare(actual.o.view(), o).max_abs, growth * allowed.o);
  EXPECT_LE(lse_max_abs_error(actual.lse.view(), lse), growth * allowed.lse);
}

void expect_naive(const AttentionCase& c, const TensorView& q, const TensorView& k, const TensorView& v) {
  AttentionOutputs actual = run(c, q, k, v);
  NaiveResult naive = naive_attention(c, q, k, v);
  expect_near_naive(c, actual, naive, tolerance(c.dtype));
}

class ForwardCase : public testing::TestWithParam<AttentionCase> {};

TEST_P(ForwardCase, MatchesTheDefinition) {
  const AttentionInputs in = make_inputs(GetParam());
  expect_naive(GetParam(), in.q.view(), in.k.view(), in.v.view());
}

TEST_P(ForwardCase, InDoubleMatchesTheDefinitionClosely) {
  const AttentionCase& c = GetParam();
  const AttentionInputs in = make_inputs(c);
  AttentionOutputs actual = reference_f64(c, in);
  NaiveResult naive = naive_attention(c, in.q.view(), in.k.view(), in.v.view());
  expect_near_naive(c, actual, naive, tolerance(DType::f64));
}

std::vector<AttentionCase> cases() {
  constexpr CausalAlign kTopLeft = CausalAlign::top_left;
  std::vector<AttentionCase> all;
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) {
    all.push_back({.b = 2, .h_q = 3, .h_kv = 3, .s_q = 63, .s_kv = 63, .dtype = dtype});
    all.push_back({.b = 2,
                   .h_q = 4,
                   .h_kv = 2,
                   .s_q = 63,
                   .s_kv = 130,
                   .d_qk = 40,
                   .d_v = 72,
                   .dtype = dtype,
                   .causal = true,
                   .layout = Layout::bshd});
  }
  constexpr DType kF32 = DType::f32;
  const std::int64_t longest = test::kSanitized && !test::thorough() ? 130 : 500;
  for (const std::int64_t s_q : {std::int64_t{1}, std::int64_t{63}, longest}) {
    for (const std::int64_t s_kv : {std::int64_t{1}, std::int64_t{63}, longest}) {
      all.push_back({.h_q = 2, .h_kv = 2, .s_q = s_q, .s_kv = s_kv, .d_qk = 24, .d_v = 16, .dtype = kF32});
      for (const CausalAlign align : {CausalAlign::bottom_right, kTopLeft}) {
        all.push_back({.h_q = 2,
                       .h_kv = 2,
                       .s_q = s_q,
                       .s_kv = s_kv,
                       .d_qk = 24,
                       .d_v = 16,
                       .dtype = kF32,
                       .causal = true,
                       .causal_align = align});
      }
    }
  }
  all.push_back({.h_q = 6, .h_kv = 2, .s_q = 65, .s_kv = 64, .d_qk = 8, .d_v = 8, .dtype = kF32});
  all.push_back({.b = 3, .h_q = 6, .h_kv = 1, .s_q = 5, .s_kv = 129, .d_qk = 8, .d_v = 8, .dtype = kF32});
  all.push_back({.s_q = 70, .s_kv = 70, .d_qk = 256, .d_v = 8, .dtype = kF32});
  all.push_back({.s_q = 70, .s_kv = 70, .d_qk = 3, .d_v = 5, .dtype = kF32});
  all.push_back({.h_q = 2, .h_kv = 1, .s_q = 0, .s_kv = 7, .dtype = kF32});
  all.push_back({.b = 0, .s_q = 3, .s_kv = 7, .dtype = kF32});
  for (const float scale : {0.0f, -0.7f, 2.5f}) {
    all.push_back({.h_q = 2,
                   .h_kv = 2,
                   .s_q = 67,
                   .s_kv = 90,
                   .d_qk = 16,
                   .d_v = 16,
                   .dtype = kF32,
                   .causal = true,
                   .scale = scale});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, ForwardCase, testing::ValuesIn(cases()),
                         [](const auto& parameter) { return to_string(parameter.param); });

/// Small causal problem in f32 whose last rows see every key and whose first rows see none.
AttentionCase short_keys() {
  return {.h_q = 2, .h_kv = 1, .s_q = 80, .s_kv = 50, .d_qk = 16, .d_v = 24, .dtype = DType::f32, .causal = true};
}

TEST(Forward, RowsWithoutKeysAreExactlyZeroWithLseMinusInfinity) {
  const AttentionCase c = short_keys();
  const AttentionOutputs out = run(c, make_inputs(c));
  for (std::int64_t h = 0; h < c.h_q; ++h) {
    for (std::int64_t i = 0; i < c.s_q; ++i) {
      const bool empty = i < c.s_q - c.s_kv;
      EXPECT_EQ(out.lse.at(0, h, i) == -kInfinity, empty) << i;
      for (std::int64_t d = 0; d < c.d_v; ++d) EXPECT_EQ(out.o.at(0, h, i, d) == 0.0, empty) << i;
    }
  }
}

TEST(Forward, NoKeysAtAll) {
  for (const bool causal : {false, true}) {
    for (const DType dtype : {DType::bf16, DType::f64}) {
      const AttentionCase c{.b = 2, .h_q = 2, .h_kv = 1, .s_q = 70, .s_kv = 0, .dtype = dtype, .causal = causal};
      const AttentionOutputs out = run(c, make_inputs(c));
      for (std::int64_t i = 0; i < c.s_q; ++i) {
        EXPECT_EQ(out.lse.at(1, 1, i), -kInfinity);
        EXPECT_EQ(out.o.at(1, 1, i, c.d_v - 1), 0.0);
      }
    }
  }
}

TEST(Forward, LseIsOptional) {
  const AttentionCase c = short_keys();
  const AttentionInputs in = make_inputs(c);
  AttentionOutputs out = make_outputs(c);
  reference::ForwardArgs args = arguments(c, in.q.view(), in.k.view(), in.v.view(), out);
  args.lse = {};
  reference::forward(args);
  EXPECT_EQ(out.o.bytes(), run(c, in).o.bytes());
}

TEST(Forward, MaskedKeysAndValuesNeverLeak) {
  AttentionCase c = short_keys();
  c.causal_align = CausalAlign::top_left;
  c.s_kv = 150;  // more keys than any row sees; some lie in tiles that other rows do see
  const AttentionInputs clean = make_inputs(c);
  for (const double poison : {kNan, kInfinity, -kInfinity}) {
    AttentionInputs in = clean;
    constexpr std::int64_t kSeenBelow = 20;
    for (std::int64_t j = kSeenBelow; j < c.s_kv; ++j) {
      for (std::int64_t d = 0; d < c.d_qk; ++d) in.k.set(0, 0, j, d, poison);
      for (std::int64_t d = 0; d < c.d_v; ++d) in.v.set(0, 0, j, d, poison);
    }
    const AttentionOutputs expected = run(c, clean);
    const AttentionOutputs actual = run(c, in);
    for (std::int64_t i = 0; i < kSeenBelow; ++i) {
      EXPECT_EQ(actual.lse.at(0, 1, i), expected.lse.at(0, 1, i)) << i;
      for (std::int64_t d = 0; d < c.d_v; ++d) EXPECT_EQ(actual.o.at(0, 1, i, d), expected.o.at(0, 1, i, d)) << i;
    }
    EXPECT_NE(actual.lse.at(0, 1, kSeenBelow), expected.lse.at(0, 1, kSeenBelow));  // the poison does work
  }
}

TEST(Forward, NanInAnUnmaskedScoreReachesOAndLse) {
  for (const std::int64_t key : {0, 40, 100, 149}) {  // in the first, a middle and the last tile
    AttentionCase c{.s_q = 70, .s_kv = 150, .d_qk = 16, .d_v = 8, .dtype = DType::f32, .causal = true};
    AttentionInputs in = make_inputs(c);
    in.k.set(0, 0, key, 3, kNan);
    const AttentionOutputs out = run(c, in);
    for (std::int64_t i = 0; i < c.s_q; ++i) {
      const bool seen = key <= i + c.s_kv - c.s_q;
      EXPECT_EQ(std::isnan(out.lse.at(0, 0, i)), seen) << key << ' ' << i;
      for (std::int64_t d = 0; d < c.d_v; ++d) EXPECT_EQ(std::isnan(out.o.at(0, 0, i, d)), seen) << key << ' ' << i;
    }
  }
}

TEST(Forward, NanInAQueryRowStaysInThatRow) {
  const AttentionCase c{.s_q = 70, .s_kv = 90, .d_qk = 16, .d_v = 8, .dtype = DType::bf16};
  AttentionInputs in = make_inputs(c);
  in.q.set(0, 0, 33, 5, kNan);
  const AttentionOutputs out = run(c, in);
  for (std::int64_t i = 0; i < c.s_q; ++i) {
    EXPECT_EQ(std::isnan(out.lse.at(0, 0, i)), i == 33) << i;
    EXPECT_EQ(std::isnan(out.o.at(0, 0, i, 7)), i == 33) << i;
  }
}

TEST(Forward, ScoresOfMinusInfinityHaveNoWeight) {
  AttentionCase c{.s_q = 3, .s_kv = 130, .d_qk = 8, .d_v = 8, .dtype = DType::f32};
  AttentionInputs in = make_inputs(c);
  for (std::int64_t i = 0; i < c.s_q; ++i) in.q.set(0, 0, i, 0, 1);
  for (std::int64_t j = 0; j < 100; ++j) in.k.set(0, 0, j, 0, -kInfinity);  // the first tile and part of the second
  expect_naive(c, in.q.view(), in.k.view(), in.v.view());
  for (std::int64_t j = 100; j < c.s_kv; ++j) in.k.set(0, 0, j, 0, -kInfinity);
  const AttentionOutputs out = run(c, in);
  EXPECT_EQ(out.lse.at(0, 0, 1), -kInfinity);
  EXPECT_EQ(out.o.at(0, 0, 1, 2), 0.0);
}

TEST(Forward, LargeScoresDoNotOverflow) {
  const AttentionCase c{.s_q = 66, .s_kv = 140, .d_qk = 32, .d_v = 8, .dtype = DType::f64, .scale = 3000.0f};
  const AttentionInputs in = make_inputs(c);
  AttentionOutputs actual = run(c, in);
  NaiveResult naive = naive_attention(c, in.q.view(), in.k.view(), in.v.view());
  expect_near_naive(c, actual, naive, tolerance(c.dtype));
}

TEST(Forward, ScaleZeroAveragesTheVisibleValues) {
  AttentionCase c{.s_q = 5, .s_kv = 5, .d_qk = 8, .d_v = 1, .dtype = DType::f64, .causal = true, .scale = 0.0f};
  AttentionInputs in = make_inputs(c);
  for (std::int64_t j = 0; j < 5; ++j) in.v.set(0, 0, j, 0, static_cast<double>(j));
  const AttentionOutputs out = run(c, in);
  for (std::int64_t i = 0; i < 5; ++i) {
    EXPECT_DOUBLE_EQ(out.o.at(0, 0, i), static_cast<double>(i) / 2);
    EXPECT_DOUBLE_EQ(out.lse.at(0, 0, i), std::log(static_cast<double>(i + 1)));
  }
}

TEST(Forward, QueryHeadsShareKvHeadsInContiguousBlocks) {
  const AttentionCase c{.h_q = 6, .h_kv = 2, .d_qk = 8, .d_v = 8, .dtype = DType::f32};  // one key: O = V of its head
  const AttentionInputs in = make_inputs(c);
  const AttentionOutputs out = run(c, in);
  for (std::int64_t h = 0; h < 6; ++h) EXPECT_EQ(out.o.at(0, h, 0, 4), in.v.at(0, h < 3 ? 0 : 1, 0, 4)) << h;
}

TensorView with_strides(const TensorView& base, std::int64_t offset, const Strides& strides) {
  const double* data = static_cast<const double*>(base.data) + offset;
  return {data, DType::f64, std::span<const std::int64_t>(base.shape), std::span<const std::int64_t>(strides)};
}

TEST(Forward, AnyStridesOfTheInputs) {
  const AttentionCase c{
      .b = 2, .h_q = 4, .h_kv = 2, .s_q = 70, .s_kv = 75, .d_qk = 12, .d_v = 9, .dtype = DType::f64, .causal = true};
  const AttentionInputs in = make_inputs(c);
  const TensorView q = in.q.view();
  const TensorView k = in.k.view();
  const TensorView v = in.v.view();
  const Strides& s = k.strides;
  expect_naive(c, q, with_strides(k, 0, {0, s[1], s[2], 1}), v);            // every batch shares K
  expect_naive(c, q, with_strides(k, 0, {s[0], 0, s[2], 1}), v);            // every head shares K
  expect_naive(c, q, with_strides(k, 0, {s[0], s[1], 0, 1}), v);            // one key, repeated
  expect_naive(c, q, with_strides(k, 0, {s[0], s[1], s[2], 0}), v);         // one number a key
  expect_naive(c, q, with_strides(k, 74 * 12, {s[0], s[1], -s[2], 1}), v);  // keys backwards
  expect_naive(c, q, with_strides(k, s[0], {-s[0], s[1], s[2], 1}), v);     // batches backwards
  expect_naive(c, q, with_strides(k, 11, {s[0], s[1], s[2], -1}), v);       // head dim backwards
  expect_naive(c, with_strides(q, 69 * 12, {q.strides[0], q.strides[1], -12, 1}), k,
               with_strides(v, 0, {v.strides[0], 0, v.strides[2], 1}));
}

TEST(Forward, PackedQkvAndPaddedOutputs) {
  const AttentionCase c{.b = 2, .h_q = 3, .h_kv = 3, .s_q = 65, .s_kv = 65, .d_qk = 8, .d_v = 8, .dtype = DType::f32};
  constexpr std::int64_t kHeads = 3, kD = 8;
  const HostTensor packed =
      make_inputs({.b = 2, .h_q = 3 * kHeads, .s_q = 65, .d_qk = kD, .dtype = DType::f32, .layout = Layout::bshd})
          .q;  // [b, s, 3, h, d]
  const auto part = [&](int n) {
    TensorView view = packed.view();
    view.data = static_cast<float*>(view.data) + n * kHeads * kD;
    view.shape[1] = kHeads;
    return view;
  };
  HostTensor o(DType::f32, c.b, c.h_q, c.s_q + 1, c.d_v + 3, Layout::bshd);
  HostTensor lse(DType::f32, c.b, c.h_q, c.s_q + 2);
  o.fill_with_nan();
  lse.fill_with_nan();
  AttentionOutputs dense = make_outputs(c);
  reference::ForwardArgs args = arguments(c, part(0), part(1), part(2), dense);
  args.o = o.view();
  args.lse = lse.view();
  reference::forward(args);
  const AttentionOutputs expected = run(c, part(0), part(1), part(2));
  for (std::int64_t i = 0; i < c.s_q; ++i) {
    for (std::int64_t d = 0; d < c.d_v; ++d) EXPECT_EQ(o.at(1, 2, i, d), expected.o.at(1, 2, i, d));
    EXPECT_EQ(lse.at(1, 2, i), expected.lse.at(1, 2, i));
  }
  EXPECT_TRUE(std::isnan(o.at(1, 1, c.s_q, 0)));  // padding stays as it was
  EXPECT_TRUE(std::isnan(o.at(1, 1, 0, c.d_v)));
  EXPECT_TRUE(std::isnan(lse.at(1, 1, c.s_q)));
}

TEST(Forward, UnalignedPointers) {
  const AttentionCase c{.s_q = 9, .s_kv = 9, .d_qk = 8, .d_v = 8, .dtype = DType::bf16};
  const AttentionInputs in = make_inputs(c);
  std::vector<std::byte> odd(in.q.bytes().size() + 1);
  std::copy(in.q.bytes().begin(), in.q.bytes().end(), odd.begin() + 1);
  TensorView q = in.q.view();
  q.data = odd.data() + 1;
  EXPECT_EQ(run(c, q, in.k.view(), in.v.view()).o.bytes(), run(c, in).o.bytes());
}

TEST(Forward, LseMayBeF64WhileTheRestIsNot) {
  const AttentionCase c{.s_q = 9, .s_kv = 200, .dtype = DType::f16};
  const AttentionInputs in = make_inputs(c);
  AttentionOutputs out = make_outputs(c);
  out.lse = HostTensor(DType::f64, c.b, c.h_q, c.s_q);
  reference::ForwardArgs args = arguments(c, in.q.view(), in.k.view(), in.v.view(), out);
  args.f64 = true;
  reference::forward(args);
  EXPECT_EQ(lse_max_abs_error(out.lse.view(), reference_f64(c, in).lse.view()), 0.0);
}

TEST(Forward, F64ArithmeticIsMoreAccurateThanFloat) {
  const AttentionCase c{.h_q = 2, .h_kv = 2, .s_q = 64, .s_kv = 1000, .dtype = DType::f32};
  const AttentionInputs in = make_inputs(c);
  const AttentionOutputs expected = reference_f64(c, in);
  AttentionOutputs in_double = make_outputs(c);
  reference::ForwardArgs args = arguments(c, in.q.view(), in.k.view(), in.v.view(), in_double);
  args.f64 = true;
  reference::forward(args);
  const double error_double = compare(in_double.o.view(), expected.o.view()).mean_abs;
  const double error_float = compare(run(c, in).o.view(), expected.o.view()).mean_abs;
  EXPECT_GT(error_float, 2 * error_double);
  EXPECT_GT(error_double, 0.0);
}

TEST(Forward, IsBitwiseRepeatableOverThreads) {
  const AttentionCase c{.b = 2, .h_q = 8, .h_kv = 2, .s_q = 300, .s_kv = 400, .dtype = DType::bf16, .causal = true};
  const AttentionInputs in = make_inputs(c);
  const AttentionOutputs first = run(c, in);
  for (int repeat = 0; repeat < 10; ++repeat) {
    const AttentionOutputs again = run(c, in);
    ASSERT_EQ(again.o.bytes(), first.o.bytes());
    ASSERT_EQ(again.lse.bytes(), first.lse.bytes());
  }
}

TEST(Forward, ARowDoesNotDependOnItsNeighbours) {
  const AttentionCase c{.h_q = 2, .h_kv = 2, .s_q = 200, .s_kv = 300, .d_qk = 32, .d_v = 32, .dtype = DType::f32};
  const AttentionInputs in = make_inputs(c);
  const AttentionOutputs whole = run(c, in);
  AttentionCase one = c;
  one.s_q = 1;
  TensorView q = in.q.view();
  q.shape[2] = 1;
  q.data = static_cast<float*>(q.data) + 150 * c.d_qk;
  const AttentionOutputs row = run(one, q, in.k.view(), in.v.view());
  for (std::int64_t d = 0; d < c.d_v; ++d) EXPECT_EQ(row.o.at(0, 1, 0, d), whole.o.at(0, 1, 150, d));
}

}  // namespace
}  // namespace fa::test
