#include "plan/merge_states.hpp"

#include <gtest/gtest.h>

#include <array>
#include <fa/error.hpp>
#include <vector>

#include "plan/early_start.hpp"

namespace fa::plan {
namespace {

MergeProblem some_problem(int d_v = 128) {
  MergeProblem problem;
  problem.arch = parse_arch("sm_90a");
  problem.d_v = d_v;
  return problem;
}

/// States of [b, h, s, d] that lie as [b, s, h, d].
std::vector<AttentionState> some_states(std::size_t count, std::int64_t b, std::int64_t h, std::int64_t s,
                                        std::int64_t d) {
  std::vector<AttentionState> states;
  for (std::size_t i = 0; i < count; ++i) {
    void* const memory = reinterpret_cast<void*>((std::uintptr_t{1} << 40) + (i << 36));
    states.push_back(
        {TensorView(memory, DType::bf16, {b, s, h, d}).swap_axes(1, 2), TensorView(memory, DType::f32, {b, h, s})});
  }
  return states;
}

struct Planned {
  std::int64_t grid;
  kernel::MergeStatesParams params;
};

Planned planned(const MergeProblem& problem, const MergeTensors& tensors) {
  CallPlan call;
  plan_call(problem, merge_specs(problem).front(), tensors, call);
  EXPECT_EQ(call.steps().size(), 1U);
  EXPECT_EQ(call.steps().front().role, Role::merge);
  EXPECT_EQ(call.workspace.bytes(), 0U);
  EXPECT_EQ(call.cleared, 0U);
  return {call.steps().front().grid, *static_cast<const kernel::MergeStatesParams*>(call.steps().front().params)};
}

TEST(MergePlan, RowsAreCountedAsTheResultHasThemInMemory) {
  const auto states = some_states(3, 2, 5, 7, 128);
  const Planned plan = planned(some_problem(), {.states = states, .merged = states[0]});
  EXPECT_EQ(plan.params.rows, 70U);
  EXPECT_EQ(plan.params.length[0], 2U);
  EXPECT_EQ(plan.params.length[1], 7U);
  EXPECT_EQ(plan.params.length[2], 5U);
  EXPECT_EQ(plan.params.head_axis, 2);
  EXPECT_EQ(plan.params.stride_merged_o[2], 128);
  EXPECT_EQ(plan.params.stride_merged_lse[1], 1);
  EXPECT_EQ(plan.params.stride_lse[2][2], 7);
  EXPECT_EQ(plan.params.states, 3);
  EXPECT_EQ(plan.params.listed, 3);
  EXPECT_EQ(plan.params.stride_o_state, 0);
  EXPECT_EQ(plan.params.sink, nullptr);
  EXPECT_EQ(plan.grid, 3);  // 16 lanes a row: 2 of 8 warps, twice
}

TEST(MergePlan, BlocksHaveWholeRows) {
  for (const auto& [d_v, grid] : {std::pair{8, 2}, {64, 16}, {72, 21}, {136, 63}, {256, 63}}) {
    const auto states = some_states(2, 1, 10, 100, d_v);
    EXPECT_EQ(planned(some_problem(d_v), {.states = states, .merged = states[0]}).grid, grid) << d_v;
  }
}

TEST(MergePlan, StacksAreOneStateAndADistance) {
  const auto states = some_states(1, 2, 5, 7, 128);
  const MergeTensors tensors{
      .states = states, .stacked = 40, .stride_o = 9000, .stride_lse = 70, .merged = {states[0].o, {}}};
  const Planned plan = planned(some_problem(), tensors);
  EXPECT_EQ(plan.params.states, 40);
  EXPECT_EQ(plan.params.listed, 1);
  EXPECT_EQ(plan.params.stride_o_state, 9000);
  EXPECT_EQ(plan.params.stride_lse_state, 70);
  EXPECT_EQ(plan.params.merged_lse, nullptr);
}

TEST(MergePlan, MixedStatesAreToldApart) {
  auto states = some_states(4, 1, 1, 1, 128);
  states[1].o.dtype = states[3].o.dtype = DType::f32;
  EXPECT_EQ(planned(some_problem(), {.states = states, .merged = states[0]}).params.floats, 0b1010U);
}

TEST(MergePlan, MoreRowsThanAreCounted) {
  const auto states = some_states(2, 1 << 10, 1 << 10, 1 << 11, 8);
  CallPlan call;
  const MergeProblem problem = some_problem(8);
  EXPECT_THROW(plan_call(problem, merge_specs(problem).front(), {.states = states, .merged = states[0]}, call), Error);
}

TEST(MergePlan, StartsEarlyOnHopper) {
  MergeProblem problem = some_problem();
  EXPECT_TRUE(may_start_early(merge_specs(problem).front()));
  problem.arch = parse_arch("sm_80");
  EXPECT_FALSE(may_start_early(merge_specs(problem).front()));
}

}  // namespace
}  // namespace fa::plan
