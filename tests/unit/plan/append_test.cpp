#include "plan/append.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <fa/error.hpp>
#include <numbers>

#include "plan/early_start.hpp"

namespace fa::plan {
namespace {

AppendProblem some_problem() {
  AppendProblem problem;
  problem.arch = parse_arch("sm_90a");
  problem.d_qk = problem.d_v = 128;
  problem.page_size = 16;
  return problem;
}

AppendInputs some_inputs(std::int64_t b, std::int64_t h_kv, std::int64_t s_new) {
  void* const memory = reinterpret_cast<void*>(std::uintptr_t{1} << 40);
  const TensorView rows = TensorView(memory, DType::bf16, {b, s_new, h_kv, 128}).swap_axes(1, 2);
  const TensorView cache = TensorView(memory, DType::bf16, {100, 16, h_kv, 128}).swap_axes(1, 2);
  AppendInputs inputs{rows, rows, cache, cache};
  inputs.b = b;
  inputs.cache.block_table = TensorView(memory, DType::i32, {b, 7});
  return inputs;
}

struct Planned {
  std::int64_t grid;
  kernel::AppendParams params;
};

Planned planned(const AppendProblem& problem, const AppendInputs& inputs, const RotaryTurns* turns = nullptr) {
  CallPlan call;
  plan_call(problem, append_specs(problem).front(), inputs, turns, call);
  EXPECT_EQ(call.steps().size(), 1U);
  EXPECT_EQ(call.steps().front().role, Role::append);
  EXPECT_EQ(call.workspace.bytes(), 0U);
  EXPECT_EQ(call.cleared, 0U);
  return {call.steps().front().grid, *static_cast<const kernel::AppendParams*>(call.steps().front().params)};
}

TEST(AppendPlan, BlocksHaveAsManyTokensAsTheirThreadsHaveItems) {
  AppendProblem problem = some_problem();
  const Planned few = planned(problem, some_inputs(1, 8, 1));  // 2 groups of heads, 16 pieces of k and of v
  EXPECT_EQ(few.params.items, 64);
  EXPECT_EQ(few.params.block_tokens, 1);
  EXPECT_EQ(few.grid, 1);
  const Planned many = planned(problem, some_inputs(3, 8, 1000));
  EXPECT_EQ(many.params.block_tokens, 4);
  EXPECT_EQ(many.params.token_blocks, 1);
  EXPECT_EQ(many.grid, 750);
  const Planned wide = planned(problem, some_inputs(2, 70, 5));  // 18 groups
  EXPECT_EQ(wide.params.items, 576);
  EXPECT_EQ(wide.params.block_tokens, 1);
  EXPECT_EQ(wide.params.token_blocks, 3);
  EXPECT_EQ(wide.grid, 30);
}

TEST(AppendPlan, PiecesThatMakePairsCountOnce) {
  AppendProblem problem = some_problem();
  const auto items = [&](int dims, bool interleaved) {
    problem.rotary_dims = dims;
    problem.interleaved = interleaved;
    return planned(problem, some_inputs(1, 4, 1)).params.items - 16;  // without v
  };
  EXPECT_EQ(items(0, false), 16);
  EXPECT_EQ(items(128, true), 16);
  EXPECT_EQ(items(128, false), 8);
  EXPECT_EQ(items(64, false), 4 + 8);
  EXPECT_EQ(items(20, false), 2 + 14);  // ragged
}

TEST(AppendPlan, ParametersAreThoseOfTheTensors) {
  AppendInputs inputs = some_inputs(3, 2, 4);
  const kernel::AppendParams params = planned(some_problem(), inputs).params;
  EXPECT_EQ(params.tokens, 12);
  EXPECT_EQ(params.s_new, 4);
  EXPECT_EQ(params.even_rows, 4);
  EXPECT_EQ(params.pages, 100);
  EXPECT_EQ(params.page_rows, 16);
  EXPECT_EQ(params.table_rows, 3);
  EXPECT_EQ(params.max_pages, 7);
  EXPECT_EQ(params.stride_table_row, 7);
  EXPECT_EQ(params.stride_k_s, 256);
  EXPECT_EQ(params.stride_k_h, 128);
  EXPECT_EQ(params.stride_k_cache_page, 16 * 256);
  inputs.cache = {};
  const kernel::AppendParams contiguous = planned(some_problem(), inputs).params;
  EXPECT_EQ(contiguous.block_table, nullptr);
  EXPECT_EQ(contiguous.table_rows, 100);
  EXPECT_EQ(contiguous.max_pages, 1);
}

TEST(AppendPlan, StartsEarlyWhereKernelsCan) {
  AppendProblem problem = some_problem();
  EXPECT_TRUE(may_start_early(append_specs(problem).front()));
  problem.arch = parse_arch("sm_80");
  EXPECT_FALSE(may_start_early(append_specs(problem).front()));
}

TEST(AppendPlan, MoreThanAGridCountsIsRefused) {
  const AppendInputs inputs = some_inputs(1, std::int64_t{1} << 30, 1);
  CallPlan call;
  EXPECT_THROW(plan_call(some_problem(), append_specs(some_problem()).front(), inputs, nullptr, call), Error);
}

// Of the first pair a revolution takes 2 pi positions; those of a base of 1 turn alike.
TEST(RotaryTurns, AreRevolutionsAPosition) {
  const RotaryTurns turns = rotary_turns(128, 10000);
  EXPECT_NEAR(static_cast<double>(turns[0] - 0x28be60db93910549U), 1, 1);  // 2^64 / (2 pi)
  for (std::size_t i = 0; i < 64; ++i) {
    const double wanted = std::pow(10000, -static_cast<double>(i) / 64) / (2 * std::numbers::pi);
    EXPECT_NEAR(std::ldexp(static_cast<double>(turns[i]), -64), wanted, 1e-15) << i;
  }
  for (std::size_t i = 64; i < turns.size(); ++i) EXPECT_EQ(turns[i], 0U);
  const RotaryTurns alike = rotary_turns(256, 1);
  for (const std::uint64_t turn : alike) EXPECT_EQ(turn, turns[0]);
  // Whole revolutions fall out.
  const double wild = std::pow(1e-3, -2.0 / 4) / (2 * std::numbers::pi);
  EXPECT_NEAR(std::ldexp(static_cast<double>(rotary_turns(4, 1e-3)[1]), -64), wild - std::floor(wild), 1e-14);
}

}  // namespace
}  // namespace fa::plan
