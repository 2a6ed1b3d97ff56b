// Every rendered backward kernel against the float64 gradients, and against itself under other schedules.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <limits>
#include <vector>

#include "emulator/backward_run.hpp"
#include "emulator/backward_specs.hpp"
#include "emulator/pairwise.hpp"
#include "support/thorough.hpp"

namespace emulator {
namespace {

using fa::CausalAlign;
using fa::DType;
using fa::test::AttentionGradients;
using fa::test::HostTensor;

constexpr std::size_t kRowsPerSpec = 3;
constexpr std::array<std::uint64_t, 2> kSeeds{1, 2};

// Levels of what a launch may vary.
constexpr std::array<std::int64_t, 5> kQueries{1, 16, 33, 65, 90};
constexpr std::array<std::int64_t, 6> kKeys{0, 1, 16, 33, 65, 100};
constexpr std::array<std::array<std::int64_t, 2>, 3> kHeads{{{1, 1}, {4, 2}, {3, 1}}};  // query, key/value
constexpr std::array<float, 4> kScales{0.f, 0.31f, -0.25f, 1e-3f};                      // the first: the default
constexpr std::array<int, 3> kSplits{2, 3, 7};

const std::vector<Row>& launch_rows() {
  static const std::vector<Row> rows =
      pairwise_cover({kQueries.size(), kKeys.size(), kHeads.size(), kScales.size(), 4, 2, 2, kSplits.size(), 2},
                     [](const Row&) { return true; });
  return rows;
}

BackwardCase make_case(const BackwardSpecs& specs, const Row& row) {
  BackwardCase c;
  c.specs = specs;
  c.attention.dtype = specs.main.dtype;
  c.attention.d_qk = specs.main.d_qk;
  c.attention.d_v = specs.main.d_v;
  c.attention.causal = specs.main.causal;
  c.attention.s_q = kQueries[row[0]];
  c.attention.s_kv = kKeys[row[1]];
  c.attention.h_q = kHeads[row[2]][0];
  c.attention.h_kv = kHeads[row[2]][1];
  if (row[3] != 0) c.attention.scale = kScales[row[3]];
  c.placement = static_cast<Placement>(row[4]);
  c.attention.causal_align = row[5] == 0 ? CausalAlign::bottom_right : CausalAlign::top_left;
  c.dlse = row[6] != 0;
  c.splits = specs.main.split ? kSplits[row[7]] : 1;
  if (specs.main.in_turns()) c.splits = static_cast<int>(c.attention.h_q / c.attention.h_kv);
  c.attention.b = static_cast<std::int64_t>(row[8]) + 1;
  return c;
}

/// What an error may be of the largest gradient, or of the terms that cancel in it.
double tolerance(DType dtype) {
  return dtype == DType::bf16 ? 2e-2 : dtype == DType::f16 ? 2.5e-3 : 1e-5;
}

void expect_near(const char* name, const HostTensor& actual, const HostTensor& expected, double terms, DType dtype) {
  const double error = fa::test::compare(actual.view(), expected.view()).max_abs;
  EXPECT_LE(error, tolerance(dtype) * std::max(fa::test::largest(expected), terms)) << name;
}

/// Returns what the first of the schedules makes.
AttentionGradients check(const BackwardCase& c, const BackwardData& data, std::size_t schedules = kSeeds.size()) {
  SCOPED_TRACE(testing::PrintToString(c));
  const AttentionGradients expected = fa::test::reference_gradients_f64(c.attention, data.inputs, data.dout.view(),
                                                                        c.dlse ? data.dlse.view() : fa::TensorView{});
  const AttentionGradients first = run_backward(c, data, kernels_of(c), kSeeds[0]);
  const double dp = std::sqrt(static_cast<double>(c.attention.d_v));  // dout V^T and rowsum(dout o O)
  const double scale = std::abs(static_cast<double>(c.attention.softmax_scale()));
  const auto [wants_dq, wants_dk, wants_dv] = c.specs.gradients();
  if (wants_dq) expect_near("dq", first.dq, expected.dq, dp * scale, c.attention.dtype);
  if (wants_dk) expect_near("dk", first.dk, expected.dk, dp * scale, c.attention.dtype);
  if (wants_dv) expect_near("dv", first.dv, expected.dv, 1, c.attention.dtype);
  for (std::size_t i = 1; i < schedules; ++i) {
    const AttentionGradients again = run_backward(c, data, kernels_of(c), kSeeds[i]);
    EXPECT_EQ(again.dk.bytes(), first.dk.bytes()) << "dK depends on the schedule, seed " << kSeeds[i];
    EXPECT_EQ(again.dv.bytes(), first.dv.bytes()) << "dV depends on the schedule, seed " << kSeeds[i];
    if (c.deterministic()) {
      EXPECT_EQ(again.dq.bytes(), first.dq.bytes()) << "dQ depends on the schedule, seed " << kSeeds[i];
    } else if (wants_dq) {
      expect_near("dq again", again.dq, expected.dq, dp * scale, c.attention.dtype);
    }
  }
  return first;
}

void check(const BackwardCase& c) {
  check(c, make_backward_data(c));
}

/// How many schedules case `index` is run under: every other one, and in a thorough run each, under another one, too.
std::size_t schedules_of(std::size_t index) {
  return fa::test::tries(index, 2) ? kSeeds.size() : 1;
}

class CoveringBackward : public testing::TestWithParam<std::size_t> {};

TEST_P(CoveringBackward, MatchesTheReferenceUnderEverySchedule) {
  const BackwardSpecs& specs = covering_backward_specs()[GetParam()];
  const std::vector<Row>& rows = launch_rows();
  for (std::size_t i = 0; i < kRowsPerSpec; ++i) {
    const BackwardCase c = make_case(specs, rows[(GetParam() * kRowsPerSpec + i) % rows.size()]);
    ASSERT_NO_THROW(check(c, make_backward_data(c), schedules_of(GetParam() + i))) << testing::PrintToString(c);
  }
}

INSTANTIATE_TEST_SUITE_P(Pairwise, CoveringBackward, testing::Range<std::size_t>(0, covering_backward_specs().size()));

// Hopper.

constexpr std::size_t kRowsPerSm90Spec = 2;
constexpr std::array<std::int64_t, 4> kSm90Queries{150, 1, 65, 200};
constexpr std::array<std::int64_t, 4> kSm90Keys{97, 260, 1, 140};
constexpr std::array<std::array<std::int64_t, 2>, 3> kSm90Heads{{{1, 1}, {4, 2}, {4, 1}}};
constexpr std::array<Placement, 3> kSm90Placements{Placement::gaps, Placement::bshd, Placement::bhsd};
constexpr std::array<int, 3> kBlocks{2, 1, 5};

const std::vector<Row>& sm90_rows() {
  static const std::vector<Row> rows = pairwise_cover(
      {kSm90Queries.size(), kSm90Keys.size(), kSm90Heads.size(), 3, 3, 2, 2, 3, 2}, [](const Row&) { return true; });
  return rows;
}

BackwardCase make_sm90_case(const BackwardSpecs& specs, const Row& row) {
  BackwardCase c = make_case(specs, {0, 0, 0, row[3], 0, row[5], row[6], row[7], row[8]});
  c.attention.s_q = kSm90Queries[row[0]];
  c.attention.s_kv = kSm90Keys[row[1]];
  c.attention.h_q = kSm90Heads[row[2]][0];
  c.attention.h_kv = kSm90Heads[row[2]][1];
  if (specs.main.in_turns()) c.splits = static_cast<int>(c.attention.h_q / c.attention.h_kv);
  c.placement = kSm90Placements[row[4]];
  c.blocks = kBlocks[row[7]];
  return c;
}

class Sm90Backward : public testing::TestWithParam<std::size_t> {};

TEST_P(Sm90Backward, MatchesTheReferenceUnderEverySchedule) {
  const BackwardSpecs& specs = sm90_backward_specs()[GetParam()];
  const std::vector<Row>& rows = sm90_rows();
  for (std::size_t i = 0; i < kRowsPerSm90Spec; ++i) {
    const BackwardCase c = make_sm90_case(specs, rows[(GetParam() * kRowsPerSm90Spec + i) % rows.size()]);
    ASSERT_NO_THROW(check(c, make_backward_data(c), schedules_of(GetParam() + i))) << testing::PrintToString(c);
  }
}

INSTANTIATE_TEST_SUITE_P(Hopper, Sm90Backward, testing::Range<std::size_t>(0, sm90_backward_specs().size()));

TEST(Sm90Backward, EveryLaunchRowIsRun) {
  EXPECT_GE(sm90_backward_specs().size() * kRowsPerSm90Spec, sm90_rows().size());
}

// Keys past the end are zeros, whose scores are far above the others here: their weights would overflow.
TEST(Sm90Backward, ScoresFarBelowZero) {
  BackwardCase c = make_case(sm90_backward_specs().front(), {0, 0, 0, 0, 0, 0, 0, 0, 0});
  c.attention.s_q = 40;
  c.attention.s_kv = 90;
  fa::test::AttentionInputs inputs = fa::test::make_inputs(c.attention);
  for_each_row(1, 1, 90, [&](std::int64_t b, std::int64_t h, std::int64_t s) {
    for (std::int64_t d = 0; d < c.attention.d_qk; ++d) {
      if (s < 40) inputs.q.set(b, h, s, d, 5);
      inputs.k.set(b, h, s, d, s % 2 == 0 ? -5 : -4.96875);
    }
  });
  check(c, make_backward_data(c, std::move(inputs)));
}

class PlannedBackward : public testing::TestWithParam<std::tuple<std::size_t, bool>> {};

TEST_P(PlannedBackward, MatchesTheReferenceUnderEverySchedule) {
  const auto [index, deterministic] = GetParam();
  const fa::plan::Problem p = planned_backward_problems()[index];
  BackwardCase c;
  c.specs = planned_backward_specs(p, deterministic);
  c.splits = fa::plan::choose_backward(p, {}).splits;
  c.blocks = 3;
  c.attention.b = p.b;
  c.attention.h_q = p.h_q;
  c.attention.h_kv = p.h_kv;
  c.attention.s_q = p.s_q;
  c.attention.s_kv = p.s_kv;
  c.attention.d_qk = p.d_qk;
  c.attention.d_v = p.d_v;
  c.attention.dtype = p.dtype;
  c.attention.causal = p.causal;
  ASSERT_NO_THROW(check(c)) << testing::PrintToString(c);
}

INSTANTIATE_TEST_SUITE_P(Planner, PlannedBackward,
                         testing::Combine(testing::Range<std::size_t>(0, planned_backward_problems().size()),
                                          testing::Bool()));

// What masks hide may be NaN or infinite.

std::vector<BackwardSpecs> causal_specs() {
  std::vector<BackwardSpecs> specs;
  for (const auto* all : {&covering_backward_specs(), &sm90_backward_specs()}) {
    std::ranges::copy_if(*all, std::back_inserter(specs), [](const BackwardSpecs& s) { return s.main.causal; });
  }
  return specs;
}

class HiddenFromBackward : public testing::TestWithParam<std::size_t> {
 protected:
  static BackwardCase case_of(std::int64_t s_q, std::int64_t s_kv, CausalAlign align) {
    BackwardCase c = make_case(causal_specs()[GetParam()], {0, 0, 1, 0, 0, 0, 1, 0, 0});
    c.attention.s_q = s_q;
    c.attention.s_kv = s_kv;
    c.attention.causal_align = align;
    c.blocks = 2;
    return c;
  }

  /// What is hidden is so under any schedule, which other tests change.
  static std::size_t schedules() { return fa::test::thorough() ? kSeeds.size() : 1; }

  static constexpr std::array kSpoilt{std::numeric_limits<double>::quiet_NaN(), HUGE_VAL, -HUGE_VAL};
};

TEST_P(HiddenFromBackward, RowsWithoutKeysReachNoGradient) {
  for (const double value : fa::test::tried(kSpoilt, GetParam())) {
    const BackwardCase c = case_of(70, 64, CausalAlign::bottom_right);  // six rows before the first key
    BackwardData data = make_backward_data(c);
    for (const std::int64_t row : {0, 5}) {
      for (HostTensor* tensor : {&data.inputs.q, &data.dout, &data.dlse, &data.outputs.o})
        fill(*tensor, {row, 1}, value);
    }
    ASSERT_NO_THROW(check(c, data, schedules())) << testing::PrintToString(c);
  }
}

// Of this test and the next a kernel takes one, in a thorough run both.
TEST_P(HiddenFromBackward, KeysThatNoRowKeepsReachNoGradient) {
  if (!fa::test::alternates(GetParam(), 0)) return;
  for (const double value : fa::test::tried(kSpoilt, GetParam())) {
    const BackwardCase c = case_of(70, 150, CausalAlign::top_left);
    BackwardData data = make_backward_data(c);
    for (const std::int64_t key : {70, 79, 149}) fill(data.inputs.k, {key, 1}, value);
    AttentionGradients gradients;
    ASSERT_NO_THROW(gradients = check(c, data, schedules())) << testing::PrintToString(c);
    const fa::Gradients wanted = c.specs.gradients();
    for (const std::int64_t key : {70, 79, 149}) {
      if (wanted.dk) {
        EXPECT_EQ(gradients.dk.at(0, 0, key, 3), 0);
      }
      if (wanted.dv) {
        EXPECT_EQ(gradients.dv.at(0, 0, key, 3), 0);
      }
    }
  }
}

TEST_P(HiddenFromBackward, AKeyReachesDqOfTheRowsThatKeepIt) {
  if (!fa::test::alternates(GetParam(), 1)) return;
  for (const double value : fa::test::tried(kSpoilt, GetParam())) {
    constexpr std::int64_t kLast = 69;  // which alone keeps the last key
    const BackwardCase c = case_of(kLast + 1, 90, CausalAlign::bottom_right);
    const fa::Gradients wanted = c.specs.gradients();
    if (!wanted.dq) GTEST_SKIP() << "no dq is wanted";
    BackwardData data = make_backward_data(c);
    const AttentionGradients clean = run_backward(c, data, kernels_of(c), kSeeds[0]);
    fa::test::AttentionInputs inputs = data.inputs;
    fill(inputs.k, {89, 1}, value);
    data = make_backward_data(c, inputs);
    const AttentionGradients spoilt = run_backward(c, data, kernels_of(c), kSeeds[0]);
    const double allowed = tolerance(c.attention.dtype) * fa::test::largest(clean.dq);  // sums have another order
    for_each_row(c.attention.b, c.attention.h_q, kLast, [&](std::int64_t b, std::int64_t h, std::int64_t row) {
      for (std::int64_t d = 0; d < c.attention.d_qk; ++d) {
        ASSERT_NEAR(spoilt.dq.at(b, h, row, d), clean.dq.at(b, h, row, d), allowed) << testing::PrintToString(c) << row;
      }
    });
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(spoilt.dq.at(0, 0, kLast, 0)));
      if (wanted.dk) {
        EXPECT_TRUE(std::isnan(spoilt.dk.at(0, 0, 89, 0)));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Causal, HiddenFromBackward, testing::Range<std::size_t>(0, causal_specs().size()));

TEST(CoveringBackward, EveryLaunchRowIsRun) {
  EXPECT_GE(covering_backward_specs().size() * kRowsPerSpec, launch_rows().size());
}

}  // namespace
}  // namespace emulator
