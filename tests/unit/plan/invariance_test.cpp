// Which kernels serve calls whose bits are promised.

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include <fa/error.hpp>

#include "plan/early_start.hpp"
#include "plan/fixed_splits.hpp"
#include "plan/forward_launch.hpp"
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
  if (spec.is<Sm90Forward>()) {
    const auto& own = spec.as<Sm90Forward>();
    return "wgmma " + std::to_string(spec.tile_n) + " " + std::to_string(own.split_keys) + " " +
           std::to_string(static_cast<int>(own.exact_max));
  }
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

/// What calls have where rows are computed by wgmma: others are refused.
void make_describable(Problem& problem) {
  problem.aligned = problem.tensor_maps = true;
  problem.page_size = problem.page_size / 8 * 8;
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
          const bool wgmma = has_wgmma_rows(problem, problem);
          if (wgmma) make_describable(problem);
          const ForwardPlan plan = plan_forward(problem, {});
          ASSERT_EQ(plan.kernel.is<Sm90Forward>(), wgmma);
          EXPECT_EQ(wgmma, arch == std::string("sm_90a") && dtype != DType::f32 && std::max(d_qk, d_v) <= 128);
          EXPECT_TRUE(plan.alternatives.empty());
          EXPECT_FALSE(plan.kernel.scheduled());
          const std::string found = arithmetic_of(plan.kernel);
          if (first.empty()) first = found;
          EXPECT_EQ(found, first) << canonical(plan.kernel);
          EXPECT_EQ(plan.kernel.tile_n, row_arithmetic({dtype, d_qk, d_v, wgmma}).tile_n);
          EXPECT_EQ(plan.kernel.split_keys(), row_arithmetic({dtype, d_qk, d_v, wgmma}).split_keys);
        }
      }
    }
  }
}

/// A kernel but for who takes which splits, which changes no bit.
KernelSpec whoever_takes_splits(KernelSpec spec) {
  if (spec.is<Sm90Forward>()) spec.as<Sm90Forward>().whole_tiles = false;
  return spec;
}

TEST(InvariantPlans, OfABatchAreThoseOfARequestAlone) {
  std::mt19937 random(2);
  for (const char* arch : {"sm_80", "sm_90a"}) {
    for (int i = 0; i < 400; ++i) {
      Problem problem = problem_of(arch, DType::bf16, 128, 128, Invariance::batch);
      set_call(random, problem);
      make_describable(problem);
      Problem alone = problem;
      alone.b = 1;
      if (problem.ragged()) {
        EXPECT_EQ(arithmetic_of(plan_forward(problem, {}).kernel), arithmetic_of(plan_forward(alone, {}).kernel));
        continue;
      }
      const Choice choice = choose(problem, {});
      EXPECT_EQ(choice.splits, choose(alone, {}).splits);
      EXPECT_EQ(canonical(whoever_takes_splits(plan_forward(problem, {}).kernel)),
                canonical(whoever_takes_splits(plan_forward(alone, {}).kernel)));
    }
  }
}

/// Query tiles are taken whole where that takes less rounds of blocks, in few rows. Dense calls have no merge then.
TEST(InvariantPlans, OfManyRequestsBlocksTakeQueryTilesWhole) {
  struct Call {
    std::int64_t b, s_q, s_kv;
    int d;
    bool whole;
  };
  for (const auto& [b, s_q, s_kv, d, whole] : {Call{1, 1, 8192, 128, false},
                                               {8, 1, 8192, 128, false},
                                               {16, 1, 8192, 128, false},
                                               {20, 1, 8192, 128, false},
                                               {32, 1, 8192, 128, true},
                                               {64, 1, 8192, 128, true},
                                               {64, 4, 8192, 128, true},
                                               {64, 5, 8192, 128, false},
                                               {256, 1, 1024, 128, true},
                                               {64, 1, 8192, 256, false},
                                               {8, 1, 8192, 64, false},
                                               {16, 1, 8192, 64, true}}) {
    for (const int page_size : {0, 16, -1}) {
      Problem problem = problem_of("sm_90a", DType::bf16, d, d, Invariance::batch);
      problem.h_q = 32;
      problem.h_kv = 8;
      problem.b = b;
      problem.s_q = s_q;
      problem.s_kv = s_kv;
      problem.page_size = page_size;
      const Choice choice = choose(problem, {});
      const ForwardPlan plan = plan_forward(problem, {});
      EXPECT_EQ(choice.whole_tiles, whole) << b << ", s_q " << s_q << ", d " << d << ", page_size " << page_size;
      EXPECT_EQ(plan.kernel.whole_tiles(), whole);
      EXPECT_EQ(plan.combine.as<ForwardCombine>().folds, plan.kernel.length_keys() > 0);
      if (!whole) continue;
      EXPECT_EQ(choice.leaves_splits(), page_size != 0);
      for (const bool dropout : {false, true}) {
        Problem other = problem;
        (dropout ? other.dropout : other.bounded) = true;
        if (dropout && page_size != 0) continue;
        EXPECT_FALSE(choose(other, {}).whole_tiles);
      }
    }
  }
}

/// Over pages the kernel follows from the request's rows and the configuration, not from company, limits or pages.
TEST(InvariantPlans, OfABatchOverPagesSplitRequestsByTheirLengths) {
  for (const std::int64_t s_q : {1, 4, 300, 4096}) {
    std::string first;
    for (const int page_size : {8, 16, 256, -1}) {
      for (const std::int64_t b : {1, 2, 8, 64, 300}) {
        for (const std::int64_t s_kv : {100, 1000, 8192, 131072}) {
          Problem problem = problem_of("sm_90a", DType::bf16, 128, 128, Invariance::batch);
          problem.h_q = 32;
          problem.h_kv = 8;
          problem.s_q = s_q;
          problem.page_size = page_size;
          problem.b = b;
          problem.s_kv = s_kv;
          problem.bounded = b == 8;
          EXPECT_EQ(problem.bits_of(), Facts::request);
          KernelSpec spec = plan_forward(problem, {}).kernel;
          EXPECT_EQ(spec.length_keys(), kLengthKeys);
          EXPECT_EQ(spec.split, s_q <= 4);
          EXPECT_FALSE(spec.scheduled() || spec.own_parts());
          const Choice choice = choose(problem, {});
          const std::int64_t most = spec.split ? std::clamp<std::int64_t>(s_kv / kLengthKeys, 2, 16) : 1;
          EXPECT_EQ(choice.splits, most);
          EXPECT_EQ(choice.split_blocks, 1);
          // What changes no bit: where tiles are taken from, how they are copied, and what is skipped of those on the
          // diagonal.
          auto& own = std::get<Sm90Forward>(spec.own);
          own.dynamic = own.skips_hidden = own.own_ends = own.take_turns = false;
          own.wide_boxes = own.whole_tiles = false;
          own.softmax_chunks = 1;
          spec.page_size = 0;
          spec.bounded = false;
          spec.min_blocks = 1;
          if (first.empty()) first = canonical(spec);
          EXPECT_EQ(canonical(spec), first) << page_size << ", b " << b << ", s_kv " << s_kv;
        }
      }
    }
  }
  Problem packed = problem_of("sm_90a", DType::bf16, 128, 128, Invariance::batch);
  packed.page_size = 16;
  packed.varlen = true;
  EXPECT_EQ(packed.bits_of(), Facts::row);
  packed.varlen = false;
  EXPECT_EQ(packed.bits_of(), Facts::request);
  packed.portable = true;  // an override names the other family
  EXPECT_EQ(packed.bits_of(), Facts::row);
  packed.portable = false;
  packed.d_qk = packed.d_v = 256;
  EXPECT_EQ(packed.bits_of(), Facts::row);
}

TEST(InvariantPlans, RefuseTensorsThatWouldTakeAnotherKernel) {
  Problem problem = problem_of("sm_90a", DType::bf16, 128, 128, Invariance::batch);
  EXPECT_NO_THROW(check_invariant(problem, {}));
  problem.tensor_maps = false;
  EXPECT_THROW(check_invariant(problem, {}), Error);
  problem.invariance = Invariance::rows;
  EXPECT_THROW(check_invariant(problem, {}), Error);
  problem.d_qk = 256;  // by mma.sync
  EXPECT_NO_THROW(check_invariant(problem, {}));
  problem.d_qk = 128;
  problem.tensor_maps = true;
  EXPECT_NO_THROW(check_invariant(problem, {}));
  problem.aligned = false;
  EXPECT_THROW(check_invariant(problem, {}), Error);
  problem.s_kv = 0;
  EXPECT_NO_THROW(check_invariant(problem, {}));
  problem.page_size = 7;
  EXPECT_THROW(check_invariant(problem, {}), Error);
  problem.dropout = true;
  EXPECT_NO_THROW(check_invariant(problem, {}));
  problem = problem_of("sm_90a", DType::bf16, 128, 128, Invariance::rows);
  problem.varlen = true;
  problem.total_q = problem.total_kv = (std::int64_t{1} << 30) + 1;
  EXPECT_THROW(check_invariant(problem, {}), Error);
  problem = problem_of("sm_90a", DType::bf16, 128, 128, Invariance::rows);
  problem.page_size = -1;
  problem.s_kv = std::int64_t{1} << 30;
  EXPECT_NO_THROW(check_invariant(problem, {}));
  problem.s_kv += 1;
  EXPECT_THROW(check_invariant(problem, {}), Error);
  problem = problem_of("sm_90a", DType::bf16, 128, 128, Invariance::batch);
  problem.tensor_maps = false;
  problem.arch = parse_arch("sm_80");
  EXPECT_NO_THROW(check_invariant(problem, {}));
  problem.aligned = false;
  EXPECT_THROW(check_invariant(problem, {}), Error);
}

/// A configuration that names the family has the bits of mma.sync in all calls, of any tensors and pages.
TEST(InvariantPlans, AreOfMmaSyncWhereAnOverrideSaysSo) {
  std::mt19937 random(3);
  Fixed ampere;
  ampere.family = Family::sm80;
  std::string first;
  for (int i = 0; i < 60; ++i) {
    Problem problem = problem_of("sm_90a", DType::bf16, 128, 128, Invariance::rows);
    set_call(random, problem);
    EXPECT_NO_THROW(check_invariant(problem, ampere));
    const KernelSpec spec = plan_forward(problem, ampere).kernel;
    ASSERT_TRUE(spec.is<Sm80Forward>());
    if (first.empty()) first = arithmetic_of(spec);
    EXPECT_EQ(arithmetic_of(spec), first);
    EXPECT_EQ(spec.tile_n, row_arithmetic({DType::bf16, 128, 128, false}).tile_n);
  }
}

TEST(InvariantPlans, RefuseTheFamilyThatCannotServeThem) {
  Fixed hopper;
  hopper.family = Family::sm90;
  EXPECT_THROW(check_forward_override(problem_of("sm_90a", DType::bf16, 192, 128, Invariance::rows), hopper), Error);
  EXPECT_NO_THROW(check_forward_override(problem_of("sm_90a", DType::bf16, 64, 64, Invariance::rows), hopper));
  EXPECT_NO_THROW(check_forward_override(problem_of("sm_90a", DType::bf16, 64, 64, Invariance::batch), hopper));
}

/// The keys of a tile are dealt out in splits, of few tiles to many blocks.
TEST(InvariantPlans, ShareSplitsOfFewTiles) {
  Problem problem = problem_of("sm_90a", DType::bf16, 64, 64, Invariance::rows);
  problem.h_q = 32;
  problem.h_kv = 8;
  problem.s_kv = 8192;  // 12 splits
  for (const auto& [b, sharing] : {std::pair{1, 12}, {8, 4}, {16, 2}, {64, 1}}) {
    problem.b = b;
    const KernelSpec spec = plan_forward(problem, {}).kernel;
    EXPECT_TRUE(spec.split);
    EXPECT_EQ(spec.tile_m, 64);
    EXPECT_EQ(spec.min_blocks, 2);
    EXPECT_EQ(fixed_splits(problem, spec).sharing, sharing) << b;
  }
  problem.b = 1;
  EXPECT_GT(most_shared_bytes(plan_forward(problem, {}).kernel), shared_bytes(plan_forward(problem, {}).kernel))
      << "fewer blocks than multiprocessors have one each";
  problem.b = 8;
  const KernelSpec decode = plan_forward(problem, {}).kernel;
  EXPECT_EQ(fixed_splits(problem, decode).flags, 64 * 4);
  EXPECT_EQ(fixed_splits(problem, decode).counters, 0);
  EXPECT_TRUE(may_start_early(decode)) << "nothing is cleared in front of it";
  problem.b = 1;
  problem.s_q = 256;
  EXPECT_TRUE(plan_forward(problem, {}).kernel.split);
  problem.s_q = 8192;
  const KernelSpec prefill = plan_forward(problem, {}).kernel;
  EXPECT_FALSE(prefill.split);
  EXPECT_EQ(fixed_splits(problem, prefill).partial_o, 0);
  problem.s_q = 16;
  problem.b = 4096;
  problem.s_kv = 131072;  // more partial results than any call may have
  EXPECT_FALSE(plan_forward(problem, {}).kernel.split);
}

/// The last block of a tile waits for the others: they have lower numbers, in the same round of the grid.
TEST(InvariantPlans, BlocksOfATileAreInOneRound) {
  Problem problem = problem_of("sm_90a", DType::bf16, 128, 128, Invariance::rows);
  problem.h_q = 32;
  problem.h_kv = 8;
  problem.s_kv = 8192;  // 15 splits
  for (const int b : {1, 8, 13, 40}) {
    for (const int multiprocessors : {1, 2, 7, 30, 132}) {
      problem.b = b;
      const KernelSpec spec = plan_forward(problem, {}).kernel;
      kernel::ForwardVariantParams params;
      const ForwardGrid launch = forward_params(problem, {}, 1, 1, spec, multiprocessors, {}, params, 0);
      EXPECT_GE(params.splits, 1);
      EXPECT_LE(params.splits, fixed_splits(problem, spec).sharing);
      EXPECT_LE(launch.grid, 2 * multiprocessors);
      EXPECT_EQ(launch.grid % params.splits, 0) << b << ' ' << multiprocessors;
      EXPECT_EQ(launch.tiles, std::int64_t{b} * 8 * params.splits);
    }
  }
}

TEST(InvariantPlans, HaveRoomForEverySplit) {
  Problem problem = problem_of("sm_80", DType::bf16, 128, 128, Invariance::rows);
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
