#include "reference/backward.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "naive_attention.hpp"
#include "reference/forward.hpp"
#include "support/attention_case.hpp"
#include "support/thorough.hpp"

namespace fa::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr CausalAlign kTopLeft = CausalAlign::top_left;

/// Everything that a backward call reads. O and LSE are float64, so that only backward's own errors show.
struct Problem {
  explicit Problem(const AttentionCase& of, bool with_dlse = true)
      : c(of), in(make_inputs(of)), dout(make_dout(of)), forward(reference_f64(of, in)) {
    if (with_dlse) dlse = make_dlse(of);
  }

  TensorView dlse_view() const { return dlse.bytes().empty() ? TensorView() : dlse.view(); }

  AttentionCase c;
  AttentionInputs in;
  HostTensor dout;
  AttentionOutputs forward;
  HostTensor dlse;
};

reference::BackwardArgs arguments(const Problem& problem, AttentionGradients& gradients) {
  reference::BackwardArgs args;
  args.q = problem.in.q.view();
  args.k = problem.in.k.view();
  args.v = problem.in.v.view();
  args.o = problem.forward.o.view();
  args.lse = problem.forward.lse.view();
  args.dout = problem.dout.view();
  args.dlse = problem.dlse_view();
  args.dq = gradients.dq.view();
  args.dk = gradients.dk.view();
  args.dv = gradients.dv.view();
  args.scale = problem.c.softmax_scale();
  args.causal = problem.c.causal;
  args.causal_align = problem.c.causal_align;
  return args;
}

AttentionGradients run(const Problem& problem) {
  AttentionGradients gradients = make_gradients(problem.c);
  reference::backward(arguments(problem, gradients));
  return gradients;
}

using Member = HostTensor AttentionGradients::*;
constexpr std::array<std::pair<const char*, Member>, 3> kGradients = {
    {{"dq", &AttentionGradients::dq}, {"dk", &AttentionGradients::dk}, {"dv", &AttentionGradients::dv}}};

// ---- finite differences ----

/// sum(dout * o) + sum(dlse * lse) over the rows that have keys, of the reference's own forward.
double loss(const Problem& problem) {
  const AttentionOutputs out = reference_f64(problem.c, problem.in);
  const AttentionCase& c = problem.c;
  double sum = 0;
  for (std::int64_t row = 0; row < c.b * c.h_q * c.s_q; ++row) {
    const std::int64_t b = row / (c.h_q * c.s_q), h = row / c.s_q % c.h_q, i = row % c.s_q;
    for (std::int64_t d = 0; d < c.d_v; ++d) sum += problem.dout.at(b, h, i, d) * out.o.at(b, h, i, d);
    const double lse = out.lse.at(b, h, i);
    if (!problem.dlse.bytes().empty() && !std::isinf(lse)) sum += problem.dlse.at(b, h, i) * lse;
  }
  return sum;
}

/// The derivative of the loss by one element, by central differences of fourth order: the step's error is about
/// kStep^4 = 1e-12 times the fifth derivative, rounding costs about 1e-16 * |loss| / kStep.
double difference_quotient(Problem& problem, HostTensor& tensor, std::int64_t b, std::int64_t h, std::int64_t s,
                           std::int64_t d) {
  constexpr double kStep = 1e-3;
  const double kept = tensor.at(b, h, s, d);
  const auto at = [&](double steps) {
    tensor.set(b, h, s, d, kept + steps * kStep);
    return loss(problem);
  };
  const double quotient = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * kStep);
  tensor.set(b, h, s, d, kept);
  return quotient;
}

/// Compares every `stride`-th element of one gradient, in row-major order.
void expect_derivative(Problem& problem, HostTensor& tensor, const HostTensor& gradient, std::int64_t stride,
                       const char* name) {
  constexpr double kAllowed = 2e-9;
  const auto& shape = tensor.view().shape;
  for (std::int64_t n = 0; n < shape[0] * shape[1] * shape[2] * shape[3]; n += stride) {
    const std::int64_t d = n % shape[3], s = n / shape[3] % shape[2], h = n / shape[3] / shape[2] % shape[1];
    const std::int64_t b = n / shape[3] / shape[2] / shape[1];
    const double expected = difference_quotient(problem, tensor, b, h, s, d);
    EXPECT_NEAR(gradient.at(b, h, s, d), expected, kAllowed) << name << " [" << b << ' ' << h << ' ' << s << ' ' << d;
  }
}

struct DifferenceCase {
  AttentionCase attention;
  std::int64_t stride = 1;  ///< which elements are checked; coprime to the sizes
};

class FiniteDifferences : public testing::TestWithParam<DifferenceCase> {};

TEST_P(FiniteDifferences, AreTheGradients) {
  Problem problem(GetParam().attention);
  const AttentionGradients gradients = run(problem);
  expect_derivative(problem, problem.in.q, gradients.dq, GetParam().stride, "dq");
  expect_derivative(problem, problem.in.k, gradients.dk, GetParam().stride, "dk");
  expect_derivative(problem, problem.in.v, gradients.dv, GetParam().stride, "dv");
}

std::vector<DifferenceCase> difference_cases() {
  constexpr DType kF64 = DType::f64;
  const AttentionCase small{.b = 2, .h_q = 4, .h_kv = 2, .s_q = 5, .s_kv = 7, .d_qk = 6, .d_v = 4, .dtype = kF64};
  std::vector<DifferenceCase> all = {{small}};
  for (const CausalAlign align : {CausalAlign::bottom_right, kTopLeft}) {
    AttentionCase c = small;
    c.causal = true;
    c.causal_align = align;
    all.push_back({c});
    std::swap(c.s_q, c.s_kv);  // bottom-right: two rows without keys; top-left: keys that every later row sees
    all.push_back({c});
  }
  for (const float scale : {-0.8f, 0.0f, 1.5f}) {
    AttentionCase c = small;
    c.h_kv = 1;
    c.scale = scale;
    all.push_back({c});
  }
  // Several tiles of rows and keys, with a part of one at the end of each.
  all.push_back(
      {{.h_q = 2, .h_kv = 1, .s_q = 70, .s_kv = 135, .d_qk = 5, .d_v = 9, .dtype = kF64, .causal = true}, 83});
  all.push_back({{.h_q = 3, .h_kv = 3, .s_q = 140, .s_kv = 66, .d_qk = 9, .d_v = 5, .dtype = kF64}, 127});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, FiniteDifferences, testing::ValuesIn(difference_cases()),
                         [](const auto& parameter) { return to_string(parameter.param.attention); });

TEST(FiniteDifferencesOfNothing, DlseIsOptional) {
  const AttentionCase c{.h_q = 2, .h_kv = 1, .s_q = 3, .s_kv = 4, .d_qk = 4, .d_v = 4, .dtype = DType::f64};
  Problem problem(c, false);
  const AttentionGradients gradients = run(problem);
  expect_derivative(problem, problem.in.q, gradients.dq, 1, "dq");
  expect_derivative(problem, problem.in.k, gradients.dk, 1, "dk");
}

// ---- the definition ----

/// What arithmetic and one rounding to the dtype may cost, relative to the largest gradient.
double tolerance(DType dtype, bool f64) {
  const double arithmetic = f64 ? 1e-13 : 4e-6;
  switch (dtype) {
    case DType::f16:
      return arithmetic + 0x1p-11;
    case DType::bf16:
      return arithmetic + 0x1p-8;
    case DType::f32:
      return arithmetic + 0x1p-24;
    case DType::f64:
      return 1e-13;
    case DType::i32:
    case DType::e4m3:
    case DType::i8:
    case DType::e5m2:
    case DType::u4x2:
      break;
  }
  return 0;
}

void expect_near(const AttentionGradients& actual, NaiveGradients& naive, const AttentionCase& c, double allowed) {
  const TensorView dq(naive.dq.data(), DType::f64, {c.b, c.h_q, c.s_q, c.d_qk});
  const TensorView dk(naive.dk.data(), DType::f64, {c.b, c.h_kv, c.s_kv, c.d_qk});
  const TensorView dv(naive.dv.data(), DType::f64, {c.b, c.h_kv, c.s_kv, c.d_v});
  // Errors of a score grow with the score.
  const double growth = std::max(1.0, std::abs(c.softmax_scale()) * std::sqrt(static_cast<double>(c.d_qk)));
  EXPECT_LE(compare(actual.dq.view(), dq).max_abs_over_max_ref, growth * allowed);
  EXPECT_LE(compare(actual.dk.view(), dk).max_abs_over_max_ref, growth * allowed);
  EXPECT_LE(compare(actual.dv.view(), dv).max_abs_over_max_ref, growth * allowed);
}

class BackwardCase : public testing::TestWithParam<AttentionCase> {};

TEST_P(BackwardCase, MatchesTheDefinition) {
  const Problem problem(GetParam());
  NaiveGradients naive = naive_gradients(problem.c, problem.in.q.view(), problem.in.k.view(), problem.in.v.view(),
                                         problem.dout.view(), problem.dlse_view());
  expect_near(run(problem), naive, problem.c, tolerance(problem.c.dtype, false));
  const AttentionGradients in_double =
      reference_gradients_f64(problem.c, problem.in, problem.dout.view(), problem.dlse_view());
  expect_near(in_double, naive, problem.c, tolerance(DType::f64, true));
}

std::vector<AttentionCase> cases() {
  std::vector<AttentionCase> all;
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) {
    all.push_back({.b = 2, .h_q = 3, .h_kv = 3, .s_q = 63, .s_kv = 63, .d_qk = 64, .d_v = 64, .dtype = dtype});
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
  const bool quick = test::kSanitized && !test::thorough();
  const std::int64_t most_rows = quick ? 70 : 200, most_keys = quick ? 130 : 300;
  for (const std::int64_t s_q : {std::int64_t{1}, std::int64_t{65}, most_rows}) {
    for (const std::int64_t s_kv : {std::int64_t{1}, std::int64_t{63}, most_keys}) {
      AttentionCase c{.h_q = 2, .h_kv = 2, .s_q = s_q, .s_kv = s_kv, .d_qk = 24, .d_v = 16, .dtype = kF32};
      all.push_back(c);
      c.causal = true;
      all.push_back(c);
      c.causal_align = kTopLeft;
      all.push_back(c);
    }
  }
  all.push_back({.h_q = 6, .h_kv = 2, .s_q = 65, .s_kv = 64, .d_qk = 8, .d_v = 8, .dtype = kF32});
  all.push_back({.b = 3, .h_q = 6, .h_kv = 1, .s_q = 5, .s_kv = 129, .d_qk = 8, .d_v = 8, .dtype = kF32});
  all.push_back({.s_q = 70, .s_kv = 70, .d_qk = 256, .d_v = 8, .dtype = kF32});
  all.push_back({.s_q = 70, .s_kv = 70, .d_qk = 3, .d_v = 5, .dtype = kF32});
  all.push_back({.b = 0, .s_q = 3, .s_kv = 7, .dtype = kF32});
  for (const float scale : {0.0f, -0.7f, 2.5f}) {
    AttentionCase c{.h_q = 2, .h_kv = 2, .s_q = 67, .s_kv = 90, .d_qk = 16, .d_v = 16, .dtype = kF32, .causal = true};
    c.scale = scale;
    all.push_back(c);
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, BackwardCase, testing::ValuesIn(cases()),
                         [](const auto& parameter) { return to_string(parameter.param); });

// ---- what must be exact ----

void expect_all_zero(const HostTensor& tensor, const char* name) {
  const auto& shape = tensor.view().shape;
  for (std::int64_t b = 0; b < shape[0]; ++b) {
    for (std::int64_t h = 0; h < shape[1]; ++h) {
      for (std::int64_t s = 0; s < shape[2]; ++s) {
        for (std::int64_t d = 0; d < shape[3]; ++d) ASSERT_EQ(tensor.at(b, h, s, d), 0.0) << name << ' ' << s;
      }
    }
  }
}

TEST(Backward, NoKeysGiveZeroDq) {
  for (const DType dtype : {DType::bf16, DType::f64}) {
    expect_all_zero(run(Problem({.b = 2, .h_q = 2, .h_kv = 1, .s_q = 70, .s_kv = 0, .dtype = dtype})).dq, "dq");
  }
}

TEST(Backward, NoRowsGiveZeroDkAndDv) {
  for (const bool causal : {false, true}) {
    const AttentionGradients gradients =
        run(Problem({.b = 2, .h_q = 2, .h_kv = 1, .s_q = 0, .s_kv = 70, .dtype = DType::bf16, .causal = causal}));
    expect_all_zero(gradients.dk, "dk");
    expect_all_zero(gradients.dv, "dv");
  }
}

TEST(Backward, NoQueryHeadsGiveZeroDkAndDv) {
  const AttentionGradients gradients = run(Problem({.h_q = 0, .h_kv = 2, .s_q = 5, .s_kv = 70, .dtype = DType::f32}));
  expect_all_zero(gradients.dk, "dk");
  expect_all_zero(gradients.dv, "dv");
}

/// s_q > s_kv, bottom-right: the first s_q - s_kv rows keep no key, whatever is in them, and with either infinity for
/// their log-sum-exp.
TEST(Backward, RowsWithoutKeysTakeNoPart) {
  const AttentionCase c{
      .h_q = 2, .h_kv = 1, .s_q = 80, .s_kv = 50, .d_qk = 16, .d_v = 24, .dtype = DType::f32, .causal = true};
  const Problem clean(c);
  const AttentionGradients expected = run(clean);
  for (const double lse : {-kInfinity, kInfinity}) {
    Problem poisoned = clean;
    for (std::int64_t i = 0; i < c.s_q - c.s_kv; ++i) {
      poisoned.forward.lse.set(0, 1, i, 0, lse);
      poisoned.dlse.set(0, 1, i, 0, kNan);
      poisoned.in.q.set(0, 1, i, 3, kNan);
      poisoned.dout.set(0, 1, i, 3, kInfinity);
    }
    const AttentionGradients actual = run(poisoned);
    for (const auto& [name, member] : kGradients) {
      EXPECT_EQ((actual.*member).bytes(), (expected.*member).bytes()) << name;
    }
    for (std::int64_t i = 0; i < c.s_q - c.s_kv; ++i) EXPECT_EQ(actual.dq.at(0, 1, i, 5), 0.0) << i;
  }
  EXPECT_NE(expected.dq.at(0, 1, c.s_q - c.s_kv, 5), 0.0);
}

TEST(Backward, KeysThatNoRowSeesGetZeroAndGiveNothing) {
  AttentionCase c{.s_q = 70, .s_kv = 150, .d_qk = 16, .d_v = 8, .dtype = DType::f32, .causal = true};
  c.causal_align = kTopLeft;
  const Problem clean(c);
  const AttentionGradients expected = run(clean);
  for (const double poison : {kNan, kInfinity}) {
    Problem poisoned = clean;
    for (std::int64_t j = c.s_q; j < c.s_kv; ++j) {  // the first ones share a tile with keys that are seen
      for (std::int64_t d = 0; d < c.d_qk; ++d) poisoned.in.k.set(0, 0, j, d, poison);
      for (std::int64_t d = 0; d < c.d_v; ++d) poisoned.in.v.set(0, 0, j, d, poison);
    }
    const AttentionGradients actual = run(poisoned);
    for (const auto& [name, member] : kGradients) {
      EXPECT_EQ((actual.*member).bytes(), (expected.*member).bytes()) << name;
    }
    for (std::int64_t j = c.s_q; j < c.s_kv; ++j) EXPECT_EQ(actual.dk.at(0, 0, j, 5), 0.0) << j;
  }
  EXPECT_NE(expected.dk.at(0, 0, c.s_q - 1, 5), 0.0);
}

TEST(Backward, ScoresOfMinusInfinityHaveNoGradient) {
  const AttentionCase c{.s_q = 3, .s_kv = 130, .d_qk = 8, .d_v = 8, .dtype = DType::f32};
  Problem problem(c);
  for (std::int64_t i = 0; i < c.s_q; ++i) problem.in.q.set(0, 0, i, 0, 1);
  for (std::int64_t j = 0; j < c.s_kv; ++j) problem.in.k.set(0, 0, j, 0, -kInfinity);
  problem.forward = reference_f64(c, problem.in);
  ASSERT_EQ(problem.forward.lse.at(0, 0, 1), -kInfinity);
  const AttentionGradients gradients = run(problem);
  expect_all_zero(gradients.dv, "dv");
  EXPECT_EQ(gradients.dk.at(0, 0, 7, 1), 0.0);
}

TEST(Backward, NanInDoutStaysInItsRow) {
  const AttentionCase c{.s_q = 70, .s_kv = 90, .d_qk = 16, .d_v = 8, .dtype = DType::f32};
  Problem problem(c);
  problem.dout.set(0, 0, 33, 5, kNan);
  const AttentionGradients gradients = run(problem);
  for (std::int64_t i = 0; i < c.s_q; ++i) EXPECT_EQ(std::isnan(gradients.dq.at(0, 0, i, 3)), i == 33) << i;
  EXPECT_TRUE(std::isnan(gradients.dk.at(0, 0, 80, 3)));
  EXPECT_TRUE(std::isnan(gradients.dv.at(0, 0, 80, 5)));
  EXPECT_FALSE(std::isnan(gradients.dv.at(0, 0, 80, 4)));
}

// ---- GQA, layouts, repetition ----

TEST(Backward, GradientsOfAGroupAreSummedBeforeTheyAreRounded) {
  // One row, one key: dv = sum over the heads of dout. 256 + 1 + 1 in bf16 is 258 only if the sum is rounded once.
  const AttentionCase c{.h_q = 3, .h_kv = 1, .d_qk = 8, .d_v = 8, .dtype = DType::bf16};
  Problem problem(c, false);
  for (std::int64_t d = 0; d < c.d_v; ++d) {
    problem.dout.set(0, 0, 0, d, 256);
    problem.dout.set(0, 1, 0, d, 1);
    problem.dout.set(0, 2, 0, d, 1);
  }
  EXPECT_EQ(run(problem).dv.at(0, 0, 0, 4), 258.0);
}

TEST(Backward, PaddedOutputsAndBroadcastInputs) {
  const AttentionCase c{.b = 2, .h_q = 3, .h_kv = 3, .s_q = 65, .s_kv = 65, .d_qk = 8, .d_v = 8, .dtype = DType::f32};
  Problem problem(c);
  for (std::int64_t row = 0; row < c.b * c.h_q * c.s_q; ++row) {
    for (std::int64_t d = 0; d < c.d_v; ++d) problem.dout.set(row / 195, row / 65 % 3, row % 65, d, 0.25 * double(d));
  }
  const AttentionGradients expected = run(problem);
  AttentionGradients padded{HostTensor(DType::f32, 2, 3, 66, 11, Layout::bshd),
                            HostTensor(DType::f32, 2, 3, 67, 9, Layout::bhsd),
                            HostTensor(DType::f32, 2, 3, 65, 10, Layout::bshd)};
  for (const auto& [name, member] : kGradients) (padded.*member).fill_with_nan();
  reference::BackwardArgs args = arguments(problem, padded);
  args.dout.strides = {0, 0, 0, 1};
  reference::backward(args);
  for (const auto& [name, member] : kGradients) {
    for (std::int64_t i = 0; i < c.s_q; ++i) {
      EXPECT_EQ((padded.*member).at(1, 2, i, 7), (expected.*member).at(1, 2, i, 7)) << name;
      EXPECT_TRUE(std::isnan((padded.*member).at(1, 2, i, 8))) << name;
    }
  }
  EXPECT_TRUE(std::isnan(padded.dq.at(1, 1, 65, 0)));
}

TEST(Backward, IsBitwiseRepeatableOverThreads) {
  AttentionCase c{.b = 2, .h_q = 4, .h_kv = 2, .s_q = 200, .s_kv = 300, .d_qk = 16, .d_v = 16, .dtype = DType::bf16};
  c.causal = true;
  const Problem problem(c);
  const AttentionGradients first = run(problem);
  for (int repeat = 0; repeat < 4; ++repeat) {
    const AttentionGradients again = run(problem);
    for (const auto& [name, member] : kGradients) {
      ASSERT_EQ((again.*member).bytes(), (first.*member).bytes()) << name;
    }
  }
}

}  // namespace
}  // namespace fa::test
