// Functions, windows, chunks and sinks in packed batches and with dropout, by hand and at random, against the float64
// reference.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "emulator/packed_run.hpp"
#include "emulator/variant_specs.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::test::AttentionCase;
using fa::test::AttentionGradients;
using fa::test::AttentionOutputs;
using fa::test::HostTensor;
using fa::test::VariantCase;

constexpr std::size_t kBatches = 3;

/// Sequences of one row, of none, of more than a tile, without keys, in part unused, and behind some rows of none.
Sequences sequences_of(std::size_t batch) {
  const std::vector<std::int32_t> rows[kBatches] = {{5, 0, 45, 1}, {33, 12, 20}, {70}};
  const std::vector<std::int32_t> keys[kBatches] = {{9, 20, 40, 3}, {70, 0, 35}, {50}};
  Sequences result;
  const auto sum = [](const std::vector<std::int32_t>& lengths, std::int32_t first) {
    std::vector<std::int32_t> sums{first};
    for (const std::int32_t length : lengths) sums.push_back(sums.back() + length);
    return sums;
  };
  result.cu_q = sum(rows[batch], batch == 1 ? 3 : 0);
  result.cu_kv = sum(keys[batch], batch == 1 ? 5 : 0);
  if (batch == 1) {
    result.used_q = {33, 0, 17};
    result.used_kv = {50, 0, 35};
  }
  return result;
}

PackedCase make_case(const VariantKernels& kernels, std::size_t batch) {
  PackedCase c;
  c.attention = kernels.attention;
  c.attention.h_q = 4;
  c.attention.h_kv = 2;
  c.attention.seed = 3 + batch;
  c.attention.causal_align = batch == 2 ? fa::CausalAlign::top_left : fa::CausalAlign::bottom_right;
  c.dropout = kernels.dropout ? 0.3f : 0;
  c.dlse = batch == 1;
  c.splits = kernels.splits;
  if (!kernels.varlen) {
    c.attention.b = 2;
    c.attention.s_q = 40;
    c.attention.s_kv = 33 + 20 * static_cast<std::int64_t>(batch);
    return c;
  }
  c.sequences = sequences_of(batch);
  c.attention.s_q = c.sequences->cu_q.back() + 2;
  c.attention.s_kv = c.sequences->cu_kv.back() + 4;
  c.clear = batch == 1;
  return c;
}

/// Captures have an entry for every sequence.
VariantCase make_variant(const VariantKernels& kernels, const PackedCase& c) {
  AttentionCase whole = c.attention;
  if (c.sequences) whole.b = c.sequences->count();
  return variant_case(kernels, whole);
}

double tolerance(DType dtype) {
  return dtype == DType::bf16 ? 2e-2 : dtype == DType::f16 ? 3e-3 : 1e-5;
}

/// Rows that kernels leave alone are NaN, and 0 or -inf in what is expected.
void expect_near(const char* name, const HostTensor& actual, const HostTensor& expected, double terms, bool cleared,
                 double bound) {
  const fa::TensorView view = expected.view();
  double worst = 0;
  double largest = terms;
  for_each_row(view.shape[0], view.shape[1], view.shape[2], [&](std::int64_t b, std::int64_t h, std::int64_t s) {
    for (std::int64_t d = 0; d < (view.rank == 4 ? view.shape[3] : 1); ++d) {
      const double wanted = expected.at(b, h, s, d);
      const double got = actual.at(b, h, s, d);
      if (std::isfinite(wanted)) largest = std::max(largest, std::abs(wanted));
      if (got == wanted || (!cleared && std::isnan(got) && (wanted == 0 || std::isinf(wanted)))) continue;
      const double error = std::abs(got - wanted);
      worst = std::isnan(error) ? HUGE_VAL : std::max(worst, error);
    }
  });
  EXPECT_LE(worst, bound * largest) << name;
}

/// `c.variant` is set. Returns what the kernels made of the inputs.
AttentionOutputs expect_forward(const VariantKernels& kernels, const fa::plan::KernelSpec& spec, const PackedCase& c) {
  EXPECT_EQ(spec.varlen, kernels.varlen);
  EXPECT_EQ(spec.dropout, kernels.dropout);
  SCOPED_TRACE(canonical(spec) + ", " + testing::PrintToString(c) + ", " + testing::PrintToString(*c.variant));
  const fa::test::AttentionInputs inputs = fa::test::make_inputs(c.attention);
  AttentionOutputs actual;
  EXPECT_NO_THROW(actual = run_packed(spec, c, inputs));
  if (testing::Test::HasFailure()) return actual;
  const AttentionOutputs expected = expected_of(c, inputs);
  const bool cleared = !c.sequences || c.clear;
  expect_near("o", actual.o, expected.o, 1, cleared, tolerance(spec.dtype));
  expect_near("lse", actual.lse, expected.lse, 1, cleared, spec.dtype == DType::f32 ? 1e-4 : 4e-3);
  return actual;
}

void expect_backward(const VariantKernels& kernels, const PackedCase& c, const BackwardData& data) {
  const VariantSpecs specs = variant_specs(kernels);
  const BackwardSpecs taken{specs.backward, specs.dq};
  SCOPED_TRACE(canonical(taken.main) + ", " + testing::PrintToString(c) + ", " + testing::PrintToString(*c.variant));
  VariantResults extra;
  AttentionGradients actual;
  ASSERT_NO_THROW(actual = run_packed(taken, c, data, &extra));
  fa::test::VariantGradients wanted;
  const AttentionGradients expected = expected_of(c, data, &wanted);
  const bool cleared = !c.sequences || c.clear;
  const double dp = std::sqrt(static_cast<double>(c.attention.d_v)) / (1 - static_cast<double>(c.dropout));
  const double scale = std::abs(static_cast<double>(c.attention.softmax_scale()));
  const double bound = tolerance(c.attention.dtype);
  expect_near("dq", actual.dq, expected.dq, dp * scale, cleared, bound);
  expect_near("dk", actual.dk, expected.dk, dp * scale, cleared, bound);
  expect_near("dv", actual.dv, expected.dv, 1, cleared, bound);
  for (std::size_t i = 0; i < wanted.captures.size(); ++i) {
    EXPECT_LE(fa::test::worst_ratio(extra.captures[i], wanted.captures[i], wanted.bounds.captures[i]), 1)
        << "gradient of " << c.variant->captures[i].name;
  }
  EXPECT_LE(fa::test::worst_ratio(extra.dsink, wanted.dsink, wanted.bounds.dsink), 1) << "dsink";
}

class PackedVariants : public testing::TestWithParam<std::size_t> {};

TEST_P(PackedVariants, ForwardAndBackwardMatchTheReference) {
  const VariantKernels& kernels = packed_variant_kernels()[GetParam()];
  for (std::size_t batch = 0; batch < kBatches; ++batch) {
    PackedCase c = make_case(kernels, batch);
    const VariantCase variant = make_variant(kernels, c);
    c.variant = &variant;
    expect_forward(kernels, variant_specs(kernels).forward, c);
    expect_backward(kernels, c, make_data(c));
  }
}

class HopperPackedVariants : public testing::TestWithParam<std::size_t> {};

TEST_P(HopperPackedVariants, ForwardMatchesTheReference) {
  const VariantKernels& kernels = hopper_packed_variant_kernels()[GetParam()];
  for (std::size_t batch = 0; batch < kBatches; ++batch) {
    PackedCase c = make_case(kernels, batch);
    const VariantCase variant = make_variant(kernels, c);
    c.variant = &variant;
    expect_forward(kernels, hopper_variant_specs(kernels).forward, c);
  }
}

INSTANTIATE_TEST_SUITE_P(All, HopperPackedVariants,
                         testing::Range<std::size_t>(0, hopper_packed_variant_kernels().size()));

PackedCase case_of(const VariantKernels& kernels, const fa::test::RandomProblem& problem) {
  PackedCase c;
  c.attention = problem.attention;
  if (kernels.varlen) c.sequences = Sequences{problem.cu_q, problem.cu_kv, problem.used_q, problem.used_kv};
  c.max_s_q = problem.max_s_q;
  c.max_s_kv = problem.max_s_kv;
  c.dropout = kernels.own->config.dropout;
  c.clear = kernels.own->config.zero_padding;
  c.dlse = problem.dlse;
  c.splits = kernels.splits;
  return c;
}

/// The short ones of what the GPU runs; by index and launch.
class RandomVariants : public testing::TestWithParam<std::tuple<std::size_t, std::size_t>> {};

TEST_P(RandomVariants, MatchTheReference) {
  const auto [place, launch] = GetParam();
  const std::size_t index = emulated_random_kernels()[place];
  const VariantKernels& kernels = random_variant_kernels()[place];
  const fa::test::RandomKernel random = fa::test::random_kernel(index);
  const fa::test::RandomProblem problem = fa::test::random_problem(random, index, launch);
  const VariantCase variant = problem.variant(random);
  PackedCase c = case_of(kernels, problem);
  c.variant = &variant;
  BackwardData data = make_data(c);
  data.outputs =
      expect_forward(kernels, variant_specs(kernels).forward, c);  // as a program has them: with the same tanh
  expect_backward(kernels, c, data);
}

INSTANTIATE_TEST_SUITE_P(All, RandomVariants,
                         testing::Combine(testing::Range<std::size_t>(0, kRandomEmulated),
                                          testing::Range<std::size_t>(0, fa::test::kShortRandomLaunches)));
static_assert(kRandomEmulated * fa::test::kShortRandomLaunches >= 40);

/// The bounds of gradients of captures hold what kernels compute, and not O three times as far off.
TEST(ErrorBounds, CatchErrorsThreeTimesAsLarge) {
  constexpr std::size_t kLearned = 2, kLaunch = 1;
  const auto place = std::ranges::find(emulated_random_kernels(), kLearned) - emulated_random_kernels().begin();
  const VariantKernels& kernels = random_variant_kernels()[static_cast<std::size_t>(place)];
  const fa::test::RandomKernel random = fa::test::random_kernel(kLearned);
  const fa::test::RandomProblem problem = fa::test::random_problem(random, kLearned, kLaunch);
  const VariantCase variant = problem.variant(random);
  PackedCase c = case_of(kernels, problem);
  c.variant = &variant;
  BackwardData data = make_data(c);
  data.outputs = expect_forward(kernels, variant_specs(kernels).forward, c);
  const AttentionOutputs exact = expected_of(c, data.inputs);
  const AttentionCase& a = c.attention;
  for_each_row(a.b, a.h_q, a.s_q, [&](std::int64_t b, std::int64_t h, std::int64_t s) {
    for (std::int64_t d = 0; d < a.d_v; ++d) {
      const double wanted = exact.o.at(b, h, s, d);
      data.outputs.o.set(b, h, s, d, wanted + 3 * (data.outputs.o.at(b, h, s, d) - wanted));
    }
  });
  const VariantSpecs specs = variant_specs(kernels);
  VariantResults extra;
  run_packed({specs.backward, specs.dq}, c, data, &extra);
  fa::test::VariantGradients wanted;
  expected_of(c, data, &wanted);
  const auto offset = std::ranges::find(variant.captures, "offset", &fa::test::NamedTensor::name);
  const auto i = static_cast<std::size_t>(offset - variant.captures.begin());
  EXPECT_GT(fa::test::worst_ratio(extra.captures[i], wanted.captures[i], wanted.bounds.captures[i]), 1);
}

INSTANTIATE_TEST_SUITE_P(All, PackedVariants, testing::Range<std::size_t>(0, packed_variant_kernels().size()));

}  // namespace
}  // namespace emulator
