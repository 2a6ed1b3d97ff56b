// Every rendered forward kernel against the float64 reference, and against itself under other schedules.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "emulator/forward_run.hpp"
#include "emulator/pairwise.hpp"
#include "emulator/specs.hpp"
#include "plan/planner.hpp"
#include "support/thorough.hpp"

namespace emulator {
namespace {

using fa::CausalAlign;
using fa::DType;
using fa::plan::KernelSpec;
using fa::test::AttentionInputs;
using fa::test::AttentionOutputs;
using fa::test::HostTensor;

constexpr std::size_t kRowsPerSpec = 6;
constexpr std::array<std::uint64_t, 3> kSeeds{1, 2, 3};
constexpr std::array<std::uint64_t, 2> kOtherSeeds{2, 3};

// Levels of what a launch may vary.
constexpr std::array<std::int64_t, 5> kQueries{1, 7, 63, 65, 130};
constexpr std::array<std::int64_t, 7> kKeys{0, 1, 16, 63, 65, 130, 201};
constexpr std::array<std::array<std::int64_t, 2>, 4> kHeads{{{1, 1}, {2, 2}, {3, 1}, {4, 2}}};  // query, key/value
constexpr std::array<float, 3> kPositiveScales{0.f, 0.31f, 1e-3f};                              // 0: the default
constexpr std::array<float, 3> kOtherScales{-0.25f, 0.f, -1e-2f};
constexpr std::array<int, 3> kSplits{2, 3, 7};
constexpr std::array<int, 3> kHeadsInFlight{1, 2, 64};

const std::vector<Row>& launch_rows() {
  static const std::vector<Row> rows = pairwise_cover(
      {kQueries.size(), kKeys.size(), kHeads.size(), 3, 4, 2, 2, 3, 3, 2}, [](const Row&) { return true; });
  return rows;
}

ForwardCase make_case(const KernelSpec& spec, const Row& row) {
  ForwardCase c;
  c.spec = spec;
  c.attention.dtype = spec.dtype;
  c.attention.d_qk = spec.d_qk;
  c.attention.d_v = spec.d_v;
  c.attention.causal = spec.causal;
  c.attention.s_q = kQueries[row[0]];
  c.attention.s_kv = kKeys[row[1]];
  c.attention.h_q = kHeads[row[2]][0];
  c.attention.h_kv = kHeads[row[2]][1];
  if (!spec.positive_scale) {
    c.attention.scale = kOtherScales[row[3]];
  } else if (row[3] != 0) {
    c.attention.scale = kPositiveScales[row[3]];
  }
  c.placement = static_cast<Placement>(row[4]);
  c.attention.causal_align = row[5] == 0 ? CausalAlign::bottom_right : CausalAlign::top_left;
  c.lse = row[6] == 0;
  c.splits = splits_of(spec, kSplits[row[7]]);
  c.attention.b = static_cast<std::int64_t>(row[9]) + 1;
  const std::int64_t heads = (spec.pack_gqa ? c.attention.h_kv : c.attention.h_q) * c.attention.b;
  c.heads_in_flight = static_cast<int>(std::min<std::int64_t>(kHeadsInFlight[row[8]], heads));
  return c;
}

/// The largest relative error of rounding to nearest.
double unit_roundoff(DType dtype) {
  return dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0x1p-24;
}

/// What rounding P and O can cost at most, and a little for float arithmetic.
double tolerance(DType dtype, double o, double sum_of_absolute_terms) {
  const double arithmetic = 1e-5;
  const double p = dtype == DType::f32 ? 0 : unit_roundoff(dtype);
  return unit_roundoff(dtype) * std::abs(o) + (p + arithmetic) * sum_of_absolute_terms + 1e-6;
}

HostTensor absolute(HostTensor tensor) {
  const fa::TensorView view = tensor.view();
  for (std::int64_t b = 0; b < view.shape[0]; ++b) {
    for (std::int64_t h = 0; h < view.shape[1]; ++h) {
      for (std::int64_t s = 0; s < view.shape[2]; ++s) {
        for (std::int64_t d = 0; d < view.shape[3]; ++d) tensor.set(b, h, s, d, std::abs(tensor.at(b, h, s, d)));
      }
    }
  }
  return tensor;
}

/// The worst element, as a multiple of what rounding allows.
double worst_error(const ForwardCase& c, const AttentionOutputs& actual, const AttentionOutputs& expected,
                   const AttentionOutputs& terms) {
  double worst = 0;
  const fa::test::AttentionCase& a = c.attention;
  for (std::int64_t b = 0; b < a.b; ++b) {
    for (std::int64_t h = 0; h < a.h_q; ++h) {
      for (std::int64_t s = 0; s < a.s_q; ++s) {
        for (std::int64_t d = 0; d < a.d_v; ++d) {
          const double o = expected.o.at(b, h, s, d);
          const double error = std::abs(actual.o.at(b, h, s, d) - o);
          const double ratio = error / tolerance(c.spec.dtype, o, terms.o.at(b, h, s, d));
          worst = std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(worst, ratio);
        }
      }
    }
  }
  return worst;
}

double worst_error(const ForwardCase& c, const AttentionInputs& inputs, const AttentionOutputs& actual,
                   const AttentionOutputs& expected) {
  AttentionInputs absolute_inputs = inputs;
  absolute_inputs.v = absolute(absolute_inputs.v);
  return worst_error(c, actual, expected, fa::test::reference_f64(c.attention, absolute_inputs));
}

/// Under one schedule, and every other case under another; in a thorough run each under all of them. `index`: which.
void check(const ForwardCase& c, std::size_t index) {
  SCOPED_TRACE(testing::PrintToString(c));
  const AttentionInputs inputs = make_inputs(c);
  const AttentionOutputs expected = fa::test::reference_f64(c.attention, inputs);
  const AttentionOutputs first = run_forward(c, inputs, kernels_of(c), kSeeds[0]);
  EXPECT_LE(worst_error(c, inputs, first, expected), 1);
  if (c.lse) {
    const double terms = std::max(1.0, static_cast<double>(c.attention.d_qk) / 256);  // whose sum a score is
    EXPECT_LE(fa::test::lse_max_abs_error(first.lse.view(), expected.lse.view()), 1e-4 * terms);
  }
  if (!fa::test::tries(index, 2)) return;
  for (const std::uint64_t seed : fa::test::tried(kOtherSeeds, index / 2)) {
    const AttentionOutputs again = run_forward(c, inputs, kernels_of(c), seed);
    EXPECT_EQ(again.o.bytes(), first.o.bytes()) << "O depends on the schedule, seed " << seed;
    EXPECT_EQ(again.lse.bytes(), first.lse.bytes()) << "LSE depends on the schedule, seed " << seed;
  }
}

class CoveringForward : public testing::TestWithParam<std::size_t> {};

TEST_P(CoveringForward, MatchesTheReferenceUnderEverySchedule) {
  const KernelSpec spec = covering_specs()[GetParam()];
  const std::vector<Row>& rows = launch_rows();
  for (std::size_t i = 0; i < kRowsPerSpec; ++i) {
    const ForwardCase c = make_case(spec, rows[(GetParam() * kRowsPerSpec + i) % rows.size()]);
    ASSERT_NO_THROW(check(c, GetParam() + i)) << testing::PrintToString(c);
  }
}

INSTANTIATE_TEST_SUITE_P(Pairwise, CoveringForward, testing::Range<std::size_t>(0, covering_specs().size()));

// Hopper.

constexpr std::size_t kRowsPerSm90Spec = 2;
constexpr std::array<std::int64_t, 4> kSm90Queries{150, 1, 65, 200};
constexpr std::array<std::int64_t, 4> kSm90Keys{97, 200, 1, 33};
constexpr std::array<std::array<std::int64_t, 2>, 4> kSm90Heads{{{2, 1}, {1, 1}, {4, 1}, {4, 2}}};
constexpr std::array<float, 3> kSm90Scales{2.f, 0.f, 1e-3f};  // the first makes row maxima grow by more than the slack
constexpr std::array<float, 3> kSm90OtherScales{-1.5f, 0.f, 1.f};
constexpr std::array<Placement, 3> kSm90Placements{Placement::gaps, Placement::bshd, Placement::bhsd};
constexpr std::array<int, 3> kBlocks{2, 1, 5};

const std::vector<Row>& sm90_rows() {
  static const std::vector<Row> rows = pairwise_cover(
      {kSm90Queries.size(), kSm90Keys.size(), kSm90Heads.size(), 3, 3, 2, 2, 3, 2}, [](const Row&) { return true; });
  return rows;
}

ForwardCase make_sm90_case(const KernelSpec& spec, const Row& row) {
  ForwardCase c;
  c.spec = spec;
  c.attention.dtype = spec.dtype;
  c.attention.d_qk = spec.d_qk;
  c.attention.d_v = spec.d_v;
  c.attention.causal = spec.causal;
  c.attention.s_q = kSm90Queries[row[0]];
  c.attention.s_kv = kSm90Keys[row[1]];
  c.attention.h_q = kSm90Heads[row[2]][0];
  c.attention.h_kv = kSm90Heads[row[2]][1];
  const float scale = spec.positive_scale ? kSm90Scales[row[3]] : kSm90OtherScales[row[3]];
  if (scale != 0 || !spec.positive_scale) c.attention.scale = scale;
  c.placement = kSm90Placements[row[4]];
  c.attention.causal_align = row[5] == 0 ? CausalAlign::bottom_right : CausalAlign::top_left;
  c.lse = row[6] == 0;
  c.blocks = kBlocks[row[7]];
  c.splits = splits_of(spec, kSplits[row[7]]);
  c.attention.b = static_cast<std::int64_t>(row[8]) + 1;
  return c;
}

class Sm90Forward : public testing::TestWithParam<std::size_t> {};

TEST_P(Sm90Forward, MatchesTheReferenceUnderEverySchedule) {
  const KernelSpec& spec = sm90_specs()[GetParam()];
  const std::vector<Row>& rows = sm90_rows();
  for (std::size_t i = 0; i < kRowsPerSm90Spec; ++i) {
    const ForwardCase c = make_sm90_case(spec, rows[(GetParam() * kRowsPerSm90Spec + i) % rows.size()]);
    ASSERT_NO_THROW(check(c, GetParam() + i)) << testing::PrintToString(c);
  }
}

INSTANTIATE_TEST_SUITE_P(Hopper, Sm90Forward, testing::Range<std::size_t>(0, sm90_specs().size()));

class AccumulatingForward : public testing::TestWithParam<std::size_t> {};

// What o and lse hold counts as other keys do, whatever rows without keys hold; and under every schedule alike.
TEST_P(AccumulatingForward, AddsToWhatOAndLseHold) {
  const KernelSpec spec = accumulating_specs()[GetParam()];
  const bool hopper = spec.family() == fa::plan::Family::sm90;
  const std::vector<Row>& rows = hopper ? sm90_rows() : launch_rows();
  for (std::size_t i = 0; i < kRowsPerSpec; ++i) {
    const Row& row = rows[(GetParam() * kRowsPerSpec + i) % rows.size()];
    ForwardCase c = hopper ? make_sm90_case(spec, row) : make_case(spec, row);
    c.lse = true;
    c.attention.scale.reset();
    if (!spec.positive_scale) c.attention.scale = -0.25f;
    SCOPED_TRACE(testing::PrintToString(c));
    const AttentionInputs inputs = make_inputs(c);
    const AttentionOutputs state = make_state(c);
    c.state = &state;
    const AttentionOutputs keys = fa::test::reference_f64(c.attention, inputs);
    const AttentionOutputs expected = joined(keys, state);
    AttentionInputs magnitudes = inputs;
    magnitudes.v = absolute(magnitudes.v);
    AttentionOutputs absolute_state = state;
    absolute_state.o = absolute(absolute_state.o);
    const AttentionOutputs terms = joined(fa::test::reference_f64(c.attention, magnitudes), absolute_state);
    AttentionOutputs first;
    for (const std::uint64_t seed : kSeeds) {
      AttentionOutputs actual;
      ASSERT_NO_THROW(actual = run_forward(c, inputs, kernels_of(c), seed));
      if (seed == kSeeds[0]) {
        EXPECT_LE(worst_error(c, actual, expected, terms), 1);
        EXPECT_LE(fa::test::lse_max_abs_error(actual.lse.view(), expected.lse.view()), 1e-4);
        first = actual;
      }
      EXPECT_EQ(actual.o.bytes(), first.o.bytes()) << "O depends on the schedule, seed " << seed;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernel, AccumulatingForward, testing::Range<std::size_t>(0, accumulating_specs().size()));

TEST_P(Sm90Forward, MakesScoresAgainWhereExponentialsOverflow) {
  constexpr float kDeviation = 50.f;  // of scores of the first keys: their exponentials of the last ones' are infinite
  const KernelSpec& spec = sm90_specs()[GetParam()];
  const std::vector<Row>& rows = sm90_rows();
  ForwardCase c = make_sm90_case(spec, rows[GetParam() % rows.size()]);
  c.attention.s_kv = 200;
  c.attention.scale =
      std::copysign(kDeviation / std::sqrt(static_cast<float>(spec.d_qk)), spec.positive_scale ? 1.f : -1.f);
  c.attention.early_keys = true;
  ASSERT_NO_THROW(check(c, GetParam())) << testing::PrintToString(c);
}

// Whole numbers, so that every sum of products is exact, whatever its order: what is left is what the softmax makes of
// scores that are ever further apart, or from zero.
constexpr std::array<int, 6> kScaleExponents{9, 14, 22, 25, 40, 108};

AttentionInputs whole_inputs(const ForwardCase& c) {
  AttentionInputs inputs = make_inputs(c);
  for (HostTensor* tensor : {&inputs.q, &inputs.k}) {
    const fa::TensorView view = tensor->view();
    for (std::int64_t b = 0; b < view.shape[0]; ++b) {
      for (std::int64_t h = 0; h < view.shape[1]; ++h) {
        for (std::int64_t s = 0; s < view.shape[2]; ++s) {
          for (std::int64_t d = 0; d < view.shape[3]; ++d) {
            tensor->set(b, h, s, d, std::clamp(std::round(tensor->at(b, h, s, d)), -2.0, 2.0));
          }
        }
      }
    }
  }
  return inputs;
}

void check_far(ForwardCase c, int exponent) {
  c.attention.scale = std::ldexp(c.spec.positive_scale ? 1.f : -1.f, exponent);
  SCOPED_TRACE(testing::PrintToString(c));
  const AttentionInputs inputs = whole_inputs(c);
  const AttentionOutputs expected = fa::test::reference_f64(c.attention, inputs);
  const AttentionOutputs actual = run_forward(c, inputs, kernels_of(c), kSeeds[0]);
  EXPECT_LE(worst_error(c, inputs, actual, expected), 1);
  if (!c.lse) return;
  for (std::int64_t b = 0; b < c.attention.b; ++b) {
    for (std::int64_t h = 0; h < c.attention.h_q; ++h) {
      for (std::int64_t s = 0; s < c.attention.s_q; ++s) {
        const double lse = expected.lse.at(b, h, s, 0);
        if (actual.lse.at(b, h, s, 0) == lse) continue;  // infinite
        // Scale, its product with the maximum and the last sum are rounded once each.
        EXPECT_NEAR(actual.lse.at(b, h, s, 0), lse, 3 * 0x1p-24 * std::abs(lse) + 1e-5);
      }
    }
  }
}

TEST_P(Sm90Forward, KeepsScoresOfAnyMagnitude) {
  const ForwardCase c = make_sm90_case(sm90_specs()[GetParam()], sm90_rows()[GetParam() % sm90_rows().size()]);
  for (const int exponent : {kScaleExponents[GetParam() % 6], kScaleExponents[(GetParam() + 3) % 6]}) {
    ASSERT_NO_THROW(check_far(c, exponent)) << testing::PrintToString(c);
  }
}

TEST_P(CoveringForward, KeepsScoresOfAnyMagnitude) {
  const ForwardCase c = make_case(covering_specs()[GetParam()], launch_rows()[GetParam() % launch_rows().size()]);
  ASSERT_NO_THROW(check_far(c, kScaleExponents[GetParam() % 6])) << testing::PrintToString(c);
}

TEST(Sm90Forward, EveryLaunchRowIsRun) {
  EXPECT_GE(sm90_specs().size() * kRowsPerSm90Spec, sm90_rows().size());
}

class PlannedForward : public testing::TestWithParam<std::size_t> {};

TEST_P(PlannedForward, MatchesTheReferenceUnderEverySchedule) {
  const fa::plan::Problem p = planned_problems()[GetParam()];
  ForwardCase c;
  c.spec = fa::plan::plan_forward(p, {}).kernel;
  c.splits = fa::plan::choose(p, {}).splits;
  c.attention.b = p.b;
  c.attention.h_q = p.h_q;
  c.attention.h_kv = p.h_kv;
  c.attention.s_q = p.s_q;
  c.attention.s_kv = p.s_kv;
  c.attention.d_qk = p.d_qk;
  c.attention.d_v = p.d_v;
  c.attention.dtype = p.dtype;
  c.attention.causal = p.causal;
  ASSERT_NO_THROW(check(c, GetParam())) << testing::PrintToString(c);
}

INSTANTIATE_TEST_SUITE_P(Planner, PlannedForward, testing::Range<std::size_t>(0, planned_problems().size()));

TEST(CoveringForward, EveryLaunchRowIsRun) {
  EXPECT_GE(covering_specs().size() * kRowsPerSpec, launch_rows().size());
}

}  // namespace
}  // namespace emulator
