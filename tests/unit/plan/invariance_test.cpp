// Which kernels serve calls whose bits are promised.

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include <fa/error.hpp>

#include "plan/planner.hpp"
#include "plan/row_arithmetic.hpp"
#include "plan/workspace.hpp"

namespace fa::plan {
namespace {

Problem problem_of(const char* arch, DType dtype, int d_qk, int d_v, Invariance invariance) {
  Problem problem;
  problem.arch = parse_arch(arch);
  problem.dtype = dtype;
  problem.d_qk = d_qk;
  problem.d_v = d_v;
  problem.causal = true;
  problem.invariance = invariance;
  return problem;
}

/// What of a kernel decides bits of a row.
std::string arithmetic_of(const KernelSpec& spec) {
  const auto& own = spec.as<Sm80Forward>();
  return std::to_string(spec.tile_n) + " " + std::to_string(spec.warps_n) + " " + std::to_string(own.split_keys) + " " +
         std::to_string(static_cast<int>(own.conditional_rescale)) + " " + std::to_string(own.loop_bodies);
}

/// Everything that differs from call to call.
void set_call(std::mt19937& random, Problem& problem) {
  const auto of = [&](std::vector<std::int64_t> values) { return values[random() % values.size()]; };
  problem.aligned = random() % 2 == 0;
  problem.tensor_maps = random() % 2 == 0;
  problem.varlen = random() % 2 == 0;
  problem.page_size = static_cast<int>(of({0, 0, 1, 7, 16, 256}));
  problem.b = of({1, 2, 7, 64, 1024});
  problem.h_kv = of({1, 2, 8});
  problem.h_q = problem.h_kv * of({1, 2, 3, 8, 16});
  problem.s_q = of({1, 2, 64, 65, 1000, 8192});
  problem.s_kv = of({1, 512, 513, 8192, 131072});
  problem.total_q = problem.varlen ? problem.b * problem.s_q : 0;
  problem.total_kv = problem.varlen && !problem.paged() ? problem.b * problem.s_kv : 0;
}

TEST(InvariantPlans, OfRowsHaveOneArithmeticWhateverTheCall) {
  std::mt19937 random(1);
  for (const char* arch : {"sm_80", "sm_86", "sm_90a", "sm_120a"}) {
    for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
      for (const auto& [d_qk, d_v] : {std::pair{64, 64}, {72, 128}, {128, 128}, {192, 128}, {256, 256}, {8, 16}}) {
        std::string first;
        for (int i = 0; i < 60; ++i) {
          Problem problem = problem_of(arch, dtype, d_qk, d_v, Invariance::rows);
          set_call(random, problem);
          const ForwardPlan plan = plan_forward(problem, {});
          ASSERT_TRUE(plan.kernel.is<Sm80Forward>());
          EXPECT_TRUE(plan.alternatives.empty());
          EXPECT_FALSE(plan.kernel.scheduled());
          const std::string found = arithmetic_of(plan.kernel);
          if (first.empty()) first = found;
          EXPECT_EQ(found, first) << canonical(plan.kernel);
          EXPECT_EQ(plan.kernel.tile_n, row_arithmetic({dtype, d_qk, d_v}).tile_n);
        }
      }
    }
  }
}

TEST(InvariantPlans, OfABatchAreThoseOfARequestAlone) {
  std::mt19937 random(2);
  for (const char* arch : {"sm_80", "sm_90a"}) {
    for (int i = 0; i < 400; ++i) {
      Problem problem = problem_of(arch, DType::bf16, 128, 128, Invariance::batch);
      set_call(random, problem);
      problem.aligned = problem.tensor_maps = true;
      Problem alone = problem;
      alone.b = 1;
      if (problem.ragged()) {
        EXPECT_EQ(arithmetic_of(plan_forward(problem, {}).kernel), arithmetic_of(plan_forward(alone, {}).kernel));
        continue;
      }
      const Choice choice = choose(problem, {});
      EXPECT_EQ(choice.splits, choose(alone, {}).splits);
      EXPECT_EQ(canonical(plan_forward(problem, {}).kernel), canonical(plan_forward(alone, {}).kernel));
    }
  }
}

TEST(InvariantPlans, RefuseTensorsThatWouldTakeAnotherKernel) {
  Problem problem = problem_of("sm_90a", DType::bf16, 128, 128, Invariance::batch);
  EXPECT_NO_THROW(check_invariant(problem));
  problem.tensor_maps = false;
  EXPECT_THROW(check_invariant(problem), Error);
  problem.invariance = Invariance::rows;
  EXPECT_NO_THROW(check_invariant(problem));
  problem.invariance = Invariance::batch;
  problem.arch = parse_arch("sm_80");
  EXPECT_NO_THROW(check_invariant(problem));
  problem.aligned = false;
  EXPECT_THROW(check_invariant(problem), Error);
}

TEST(InvariantPlans, RefuseTheFamilyThatCannotServeThem) {
  Fixed hopper;
  hopper.family = Family::sm90;
  EXPECT_THROW(check_forward_override(problem_of("sm_90a", DType::bf16, 64, 64, Invariance::rows), hopper), Error);
  EXPECT_NO_THROW(check_forward_override(problem_of("sm_90a", DType::bf16, 64, 64, Invariance::batch), hopper));
}

TEST(InvariantPlans, HaveRoomForEverySplit) {
  Problem problem = problem_of("sm_90a", DType::bf16, 128, 128, Invariance::rows);
  problem.page_size = 16;
  problem.h_q = 32;
  problem.h_kv = 8;
  problem.s_kv = 8192;
  const std::int64_t splits = (8192 + 479) / 480;
  const WorkspaceSize decode = forward_workspace_size(problem, {}, 132);
  EXPECT_GE(decode.bytes, static_cast<std::size_t>(splits * 32 * 130 * 4));
  problem.s_kv = 480;
  EXPECT_EQ(forward_workspace_size(problem, {}, 132).bytes, 0U);
  problem.s_kv = problem.s_q = 8192;
  EXPECT_GE(forward_workspace_size(problem, {}, 132).bytes, std::size_t{8192} * 32 * 140 * 4);
}

}  // namespace
}  // namespace fa::plan
