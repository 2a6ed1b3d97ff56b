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

TEST(Sm90BackwardWide, EveryHeadDimThatItServesHasAKernelThatFits) {
  for (int d_qk = 264; d_qk <= 512; d_qk += 8) {
    for (int d_v = 264; d_v <= 512; d_v += 8) {
      const Problem problem = problem_of(d_qk, d_v);
      ASSERT_EQ(sm90_backward_misfit(problem), nullptr);
      for (const bool deterministic : {false, true}) {
        const KernelSpec spec = plan_backward(problem, {}, deterministic).main.front();
        SCOPED_TRACE(canonical(spec));
        ASSERT_TRUE(spec.is<Sm90BackwardPair>());
        ASSERT_EQ(spec.cluster(), 4);
        ASSERT_LE(shared_bytes(spec), limits(spec.arch).shared_per_block);
        ASSERT_EQ(refusal(spec), "");
        ASSERT_EQ(spec.threads(), 512);
        ASSERT_GE(spec.stages, 4);
        ASSERT_TRUE(spec.write_dq);
        ASSERT_EQ(spec.ordered_dq(), deterministic);
      }
    }
  }
}

TEST(Sm90BackwardWide, IsTakenWhereNothingElseIsAskedFor) {
  const Problem problem = problem_of(512, 512);
  EXPECT_EQ(choose_backward(problem, {}).family, Family::sm90);
  EXPECT_EQ(choose_backward(problem, {Family::sm80}).family, Family::sm80);
  Problem ampere = problem;
  ampere.arch = parse_arch("sm_80");
  EXPECT_EQ(choose_backward(ampere, {}).family, Family::sm80);
}

TEST(Sm90BackwardWide, LeavesVariantsAndBoundsToAnotherFamily) {
  Variants window;
  window.left_window = true;
  for (const int kind : {0, 1, 2, 3}) {
    Problem problem = problem_of(512, 512);
    problem.varlen = kind == 0;
    problem.dropout = kind == 1;
    if (kind == 2) problem.variants = &window;
    problem.bounded = kind == 3;
    EXPECT_NE(sm90_backward_obstacle(problem), nullptr);
    EXPECT_EQ(choose_backward(problem, kHopper).family, Family::sm80);
  }
}

TEST(Sm90BackwardWide, NeedsBothHeadDims) {
  for (const auto& [d_qk, d_v] : {std::pair{512, 256}, {64, 320}, {264, 520}}) {
    const Problem problem = problem_of(d_qk, d_v);
    EXPECT_NE(sm90_backward_misfit(problem), nullptr) << d_qk << " x " << d_v;
    EXPECT_THROW(plan_backward(problem, kHopper, false), Error);
  }
}

TEST(Sm90BackwardWide, CandidatesAreWhatFits) {
  const auto stages_of = [](const Problem& problem) {
    const KernelSpec first = plan_backward(problem, {}, false).main.front();
    std::vector<int> stages;
    for (const KernelSpec& spec : backward_candidates(problem, {}, first, 8)) {
      EXPECT_EQ(spec.cluster(), 4) << canonical(spec);
      stages.push_back(spec.stages);
    }
    std::ranges::sort(stages);
    return stages;
  };
  EXPECT_EQ(stages_of(problem_of(512, 512)), (std::vector{2, 3, 4}));
  EXPECT_EQ(stages_of(problem_of(320, 320)), (std::vector{2, 3, 4, 6}));
}

// P and dS; dQ and its keys; barriers; K or V of 64 keys; the block's columns of Q and dO; the ring.
TEST(Sm90BackwardWide, CountsSharedMemory) {
  constexpr int kExchanged = 2 * 64 * 128 * 2;
  constexpr int kDq = 64 * 128 * 4 + 128 * 128 * 2;
  constexpr int kSlab = 64 * 128;  // bytes, of 64 rows or keys
  KernelSpec spec = plan_backward(problem_of(512, 512), kHopper, false).main.front();
  EXPECT_EQ(spec.stages, 4);
  EXPECT_EQ(shared_bytes(spec), kExchanged + kDq + 1024 + (8 + 4 + 4) * kSlab);
  spec.write_dq = false;
  EXPECT_EQ(shared_bytes(spec), kExchanged + 1024 + (8 + 4 + 4) * kSlab);
  spec.d_v = 264;
  EXPECT_EQ(shared_bytes(spec), kExchanged + 1024 + (8 + 4 + 4) * kSlab);
  spec.d_qk = 264;
  spec.stages = 8;
  EXPECT_EQ(shared_bytes(spec), kExchanged + 1024 + (5 + 4 + 8) * kSlab);
}

TEST(Sm90BackwardWide, NamesTheLimitOfAnOverride) {
  const struct {
    Fixed fixed;
    const char* limit;
  } cases[] = {{{Family::sm90, {{"tile_m", 128}}}, "tile_m = 128: above head dim 128 accepted is 64"},
               {{Family::sm90, {{"tile_n", 64}}}, "tile_n = 64: above head dim 128 accepted is 128"},
               {{Family::sm90, {{"stages", 1}}}, "stages = 1: accepted are 2 to 8"},
               {{Family::sm90, {{"stages", 5}}}, "bytes of shared memory; sm_90a offers 232448"}};
  for (const auto& [fixed, limit] : cases) {
    try {
      plan_backward(problem_of(512, 512), fixed, false);
      ADD_FAILURE() << "accepted, but for: " << limit;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_NE(std::string(error.what()).find(limit), std::string::npos) << error.what();
    }
  }
}

TEST(Sm90BackwardWide, LaunchesFourBlocksATile) {
  Problem p = problem_of(512, 512);
  p.s_kv = 500;
  KernelSet kernels;
  kernels[Role::attention] = plan_backward(p, kHopper, false).main.front();
  kernels[Role::reduce].warps = 4;
  const auto launch = [&](int splits) {
    return backward_launch(p, {}, 1, {.family = Family::sm90, .splits = splits}, kernels, 132);
  };
  EXPECT_EQ(launch(1).grids.main, 4 * 4 * 16 * 4);
  EXPECT_EQ(launch(3).grids.main, 4 * 4 * 16 * 4 * 3);
  EXPECT_EQ(launch(1).params.n_blocks, 4);
  EXPECT_EQ(launch(1).params.m_blocks, 64);
}

/// Four blocks fill four multiprocessors.
TEST(Sm90BackwardWide, SplitsFillAQuarterAsManyClusters) {
  Problem p = problem_of(512, 512);
  p.b = 1;
  p.h_q = p.h_kv = 1;
  p.s_kv = 1024;
  EXPECT_EQ(choose_backward(p, kHopper).splits, 33 / 8);
  p.s_kv = 2048;
  EXPECT_EQ(choose_backward(p, kHopper).splits, 33 / 16);
}

}  // namespace
}  // namespace fa::plan
