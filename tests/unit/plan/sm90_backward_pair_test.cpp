#include "plan/sm90_backward_pair.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <fa/error.hpp>
#include <string>
#include <vector>

#include "plan/candidates.hpp"
#include "plan/catalogue.hpp"
#include "plan/planner.hpp"
#include "plan/sm90_backward.hpp"
#include "unit/plan/launches.hpp"

namespace fa::plan {
namespace {

const Fixed kHopper{Family::sm90};

Problem problem_of(int d_qk, int d_v, bool causal = true) {
  Problem problem;
  problem.arch = parse_arch("sm_90a");
  problem.d_qk = d_qk;
  problem.d_v = d_v;
  problem.causal = causal;
  problem.b = 4;
  problem.h_q = problem.h_kv = 16;
  problem.s_q = problem.s_kv = 4096;
  return problem;
}

TEST(Sm90BackwardPair, EveryHeadDimThatItServesHasAKernelThatFits) {
  for (int d_qk = 72; d_qk <= 256; d_qk += 8) {
    for (int d_v = 72; d_v <= 256; d_v += 8) {
      const Problem problem = problem_of(d_qk, d_v);
      ASSERT_EQ(sm90_backward_misfit(problem), nullptr);
      for (const bool deterministic : {false, true}) {
        const BackwardPlan plan = plan_backward(problem, kHopper, deterministic);
        const KernelSpec& spec = plan.main.front();
        SCOPED_TRACE(canonical(spec));
        const bool pair = d_qk > 128 || d_v > 128;
        ASSERT_EQ(spec.family(), Family::sm90);
        ASSERT_EQ(spec.cluster(), pair ? 2 : 1);
        ASSERT_LE(shared_bytes(spec), limits(spec.arch).shared_per_block);
        if (!pair) continue;
        ASSERT_EQ(refusal(spec), "");
        ASSERT_EQ(spec.threads(), 512);
        ASSERT_LE(sm90_backward_pair_registers(spec) + 24, 160);
        ASSERT_TRUE(spec.write_dq);
        ASSERT_EQ(spec.ordered_dq(), deterministic);
        ASSERT_EQ(spec.causal, true);
      }
    }
  }
}

TEST(Sm90BackwardPair, IsTakenWhereNothingElseIsAskedFor) {
  const Problem problem = problem_of(256, 256);
  EXPECT_EQ(choose_backward(problem, {}).family, Family::sm90);
  EXPECT_EQ(choose_backward(problem_of(192, 64), {}).family, Family::sm80);
  EXPECT_EQ(choose_backward(problem, {Family::sm80}).family, Family::sm80);
  EXPECT_EQ(choose_backward(problem, kHopper).family, Family::sm90);
}

TEST(Sm90BackwardPair, LeavesVariantsToAnotherFamily) {
  Variants window;
  window.left_window = true;
  for (const int kind : {0, 1, 2}) {
    Problem problem = problem_of(256, 256);
    problem.varlen = kind == 0;
    problem.dropout = kind == 1;
    if (kind == 2) problem.variants = &window;
    EXPECT_NE(sm90_backward_obstacle(problem), nullptr);
    EXPECT_EQ(choose_backward(problem, kHopper).family, Family::sm80);
  }
}

TEST(Sm90BackwardPair, CandidatesAreWhatFits) {
  const auto stages_of = [](const Problem& problem) {
    const KernelSpec first = plan_backward(problem, {}, false).main.front();
    std::vector<int> stages;
    for (const KernelSpec& spec : backward_candidates(problem, {}, first, 8)) {
      EXPECT_EQ(spec.cluster(), 2) << canonical(spec);
      stages.push_back(spec.stages);
    }
    std::ranges::sort(stages);
    return stages;
  };
  EXPECT_EQ(stages_of(problem_of(256, 256)), (std::vector{2}));
  EXPECT_EQ(stages_of(problem_of(192, 128)), (std::vector{2, 3, 4}));
}

TEST(Sm90BackwardPair, NeedsColumnsForBothBlocks) {
  for (const auto& [d_qk, d_v] : {std::pair{136, 64}, {64, 256}}) {
    EXPECT_NE(sm90_backward_misfit(problem_of(d_qk, d_v)), nullptr) << d_qk << " x " << d_v;
    EXPECT_THROW(plan_backward(problem_of(d_qk, d_v), kHopper, false), Error);
  }
}

// Slabs of 64 columns: the first block has K and what of Q, dO falls to it, and a buffer more of Q; the second V, its
// slabs of K, and the same.
TEST(Sm90BackwardPair, CountsSharedMemory) {
  constexpr int kExchanged = 2 * 64 * 128 * 2;
  constexpr int kDq = 64 * 128 * 4;
  constexpr int kRows = 64 * 128;   // bytes of a slab
  constexpr int kKeys = 128 * 128;  // likewise
  KernelSpec spec = plan_backward(problem_of(256, 256), kHopper, false).main.front();
  EXPECT_EQ(shared_bytes(spec), kExchanged + kDq + 1024 + 4 * kKeys + (3 * 2 + 2 + 2 * 2) * kRows);
  EXPECT_EQ(shared_bytes(spec), kExchanged + kDq + 1024 + (4 + 2) * kKeys + (2 * 2 + 2 + 2) * kRows);
  spec.write_dq = false;
  EXPECT_EQ(shared_bytes(spec), kExchanged + 1024 + (4 + 2) * kKeys + (2 * 2 + 2 + 2) * kRows);
  spec.d_qk = 192;
  spec.d_v = 128;
  EXPECT_EQ(shared_bytes(spec), kExchanged + 1024 + 3 * kKeys + (3 * 2 + 1 + 2 * 1) * kRows);
  spec.stages = 3;
  EXPECT_EQ(shared_bytes(spec), kExchanged + 1024 + 3 * kKeys + (4 * 2 + 1 + 2 * 1) * kRows);
}

TEST(Sm90BackwardPair, NamesTheLimitOfAnOverride) {
  const struct {
    Fixed fixed;
    const char* limit;
  } cases[] = {{{Family::sm90, {{"tile_m", 128}}}, "tile_m = 128: above head dim 128 accepted is 64"},
               {{Family::sm90, {{"tile_n", 64}}}, "tile_n = 64: above head dim 128 accepted is 128"},
               {{Family::sm90, {{"stages", 1}}}, "stages = 1: accepted are 2 to 4"},
               {{Family::sm90, {{"stages", 3}}}, "bytes of shared memory; sm_90a offers 232448"}};
  for (const auto& [fixed, limit] : cases) {
    try {
      plan_backward(problem_of(256, 256), fixed, false);
      ADD_FAILURE() << "accepted, but for: " << limit;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_NE(std::string(error.what()).find(limit), std::string::npos) << error.what();
    }
  }
}

TEST(Sm90BackwardPair, LaunchesTwoBlocksATile) {
  Problem p = problem_of(256, 256);
  p.s_kv = 500;
  KernelSet kernels;
  kernels[Role::attention] = plan_backward(p, kHopper, false).main.front();
  kernels[Role::reduce].warps = 4;
  const auto launch = [&](int splits) {
    return backward_launch(p, {}, 1, {.family = Family::sm90, .splits = splits}, kernels, 132);
  };
  EXPECT_EQ(launch(1).grids.main, 2 * 4 * 16 * 4);
  EXPECT_EQ(launch(3).grids.main, 2 * 4 * 16 * 4 * 3);
  EXPECT_EQ(launch(1).params.n_blocks, 4);
  EXPECT_EQ(launch(1).params.m_blocks, 64);
}

/// A pair fills two multiprocessors.
TEST(Sm90BackwardPair, SplitsFillHalfAsManyPairs) {
  Problem p = problem_of(256, 256);
  p.b = 1;
  p.h_q = p.h_kv = 1;
  EXPECT_EQ(choose_backward(p, kHopper).splits, 66 / 32);
  p.s_kv = 2048;
  EXPECT_EQ(choose_backward(p, kHopper).splits, 66 / 16);
}

}  // namespace
}  // namespace fa::plan
