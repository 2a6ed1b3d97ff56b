// Kernels for compute capability 7.5 against the float64 reference: copies without cp.async, products of half the
// depth, and f32 by float arithmetic.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "emulator/forward_run.hpp"
#include "emulator/turing_specs.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::test::AttentionCase;
using fa::test::AttentionGradients;
using fa::test::AttentionOutputs;
using fa::test::HostTensor;

struct Sizes {
  std::int64_t b, h_q, h_kv, s_q, s_kv;
};
constexpr std::array<Sizes, 4> kSizes{{{1, 1, 1, 65, 130}, {2, 2, 1, 33, 16}, {1, 3, 3, 130, 65}, {1, 2, 1, 7, 0}}};

AttentionCase attention_of(const fa::plan::KernelSpec& spec, const Sizes& sizes) {
  AttentionCase c;
  c.dtype = spec.dtype;
  c.d_qk = spec.d_qk;
  c.d_v = spec.d_v;
  c.causal = spec.causal;
  c.b = sizes.b;
  c.h_q = sizes.h_q;
  c.h_kv = sizes.h_kv;
  c.s_q = sizes.s_q;
  c.s_kv = sizes.s_kv;
  if (spec.op() == fa::plan::Op::forward && !spec.positive_scale) c.scale = -0.25f;
  return c;
}

/// Of the greatest value: what P, O and gradients are rounded to, and what float arithmetic leaves.
double tolerance(DType dtype, bool gradient) {
  return dtype == DType::f16 ? (gradient ? 2.5e-3 : 1.5e-3) : 1e-5;
}

class TuringForwards : public testing::TestWithParam<std::size_t> {};

TEST_P(TuringForwards, MatchTheReference) {
  const fa::plan::KernelSpec& spec = turing_forwards()[GetParam()].spec;
  for (std::size_t i = 0; i < kSizes.size(); ++i) {
    ForwardCase c;
    c.spec = spec;
    c.attention = attention_of(spec, kSizes[i]);
    c.placement = static_cast<Placement>(i);
    c.splits = spec.split ? 3 : 1;
    SCOPED_TRACE(testing::PrintToString(c));
    const fa::test::AttentionInputs inputs = make_inputs(c);
    const AttentionOutputs expected = fa::test::reference_f64(c.attention, inputs);
    const AttentionOutputs first = run_forward(c, inputs, kernels_of(c), 1);
    const double largest = std::max(fa::test::largest(expected.o), 1e-6);
    EXPECT_LE(fa::test::compare(first.o.view(), expected.o.view()).max_abs, tolerance(spec.dtype, false) * largest);
    for (std::int64_t row = 0; row < c.attention.b * c.attention.h_q * c.attention.s_q; ++row) {
      const std::int64_t s = row % c.attention.s_q, h = row / c.attention.s_q % c.attention.h_q;
      const std::int64_t b = row / c.attention.s_q / c.attention.h_q;
      const double actual = first.lse.at(b, h, s), wanted = expected.lse.at(b, h, s);
      ASSERT_TRUE(actual == wanted || std::abs(actual - wanted) <= 1e-4 * (1 + std::abs(wanted))) << row;
    }
    const AttentionOutputs again = run_forward(c, inputs, kernels_of(c), 2);
    EXPECT_EQ(again.o.bytes(), first.o.bytes()) << "O depends on the schedule";
  }
}
INSTANTIATE_TEST_SUITE_P(All, TuringForwards, testing::Range<std::size_t>(0, turing_forwards().size()),
                         [](const auto& c) { return turing_forwards()[c.param].name; });

class TuringBackwards : public testing::TestWithParam<std::size_t> {};

TEST_P(TuringBackwards, MatchTheReference) {
  const BackwardSpecs& specs = turing_backwards()[GetParam()].specs;
  for (std::size_t i = 0; i < 3; ++i) {
    BackwardCase c;
    c.specs = specs;
    c.attention = attention_of(specs.main, kSizes[i]);
    c.dlse = i == 1;
    SCOPED_TRACE(testing::PrintToString(c));
    const BackwardData data = make_backward_data(c);
    const AttentionGradients expected = fa::test::reference_gradients_f64(c.attention, data.inputs, data.dout.view(),
                                                                          c.dlse ? data.dlse.view() : fa::TensorView{});
    const AttentionGradients first = run_backward(c, data, kernels_of(c), 1);
    const double terms = std::sqrt(static_cast<double>(c.attention.d_v)) * double{c.attention.softmax_scale()};
    const auto expect_near = [&](const char* name, const HostTensor& actual, const HostTensor& wanted, double least) {
      EXPECT_LE(fa::test::compare(actual.view(), wanted.view()).max_abs,
                tolerance(c.attention.dtype, true) * std::max(fa::test::largest(wanted), least))
          << name;
    };
    expect_near("dq", first.dq, expected.dq, terms);
    expect_near("dk", first.dk, expected.dk, terms);
    expect_near("dv", first.dv, expected.dv, 1);
    const AttentionGradients again = run_backward(c, data, kernels_of(c), 2);
    EXPECT_EQ(again.dk.bytes(), first.dk.bytes()) << "dK depends on the schedule";
    EXPECT_EQ(again.dv.bytes(), first.dv.bytes()) << "dV depends on the schedule";
  }
}
INSTANTIATE_TEST_SUITE_P(All, TuringBackwards, testing::Range<std::size_t>(0, turing_backwards().size()),
                         [](const auto& c) { return turing_backwards()[c.param].name; });

}  // namespace
}  // namespace emulator
