#include "plan/sm90_backward.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <fa/error.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "plan/early_start.hpp"
#include "plan/planner.hpp"
#include "plan/sm90_forward.hpp"
#include "unit/plan/launches.hpp"

namespace fa::plan {
namespace {

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

KernelSpec first_of(const Problem& problem, const Fixed& fixed = {}) {
  return plan_backward(problem, fixed, false).main.front();
}

/// The register file holds what setmaxnreg asks for, and a consumer's share its fragments and the loop's own state.
void expect_fits(const KernelSpec& spec) {
  SCOPED_TRACE(canonical(spec));
  EXPECT_EQ(sm90_backward_refusal(spec), "");
  EXPECT_EQ(spec.family(), Family::sm90);
  EXPECT_EQ(spec.op(), Op::backward);
  EXPECT_LE(shared_bytes(spec), limits(spec.arch).shared_per_block);
  const int warpgroups = spec.tile_n / 64;
  EXPECT_EQ(spec.threads(), (warpgroups + 1) * 128);
  EXPECT_LE(sm90_backward_registers(spec) + 24, warpgroups == 3 ? 160 : warpgroups == 2 ? 240 : 255);
}

TEST(Sm90BackwardPlan, EveryHeadDimHasAKernelThatFits) {
  for (int d_qk = 8; d_qk <= 128; d_qk += 8) {
    for (int d_v = 8; d_v <= 128; d_v += 8) {
      for (const bool causal : {false, true}) {
        for (const bool deterministic : {false, true}) {
          const BackwardPlan plan = plan_backward(problem_of(d_qk, d_v, causal), {}, deterministic);
          ASSERT_FALSE(plan.main.empty());
          for (const KernelSpec& spec : plan.main) {
            expect_fits(spec);
            EXPECT_TRUE(spec.write_dq);
            EXPECT_EQ(spec.ordered_dq(), deterministic);
            EXPECT_EQ(spec.causal, causal);
            EXPECT_EQ(spec.d_qk, d_qk);
            EXPECT_EQ(spec.d_v, d_v);
            EXPECT_FALSE(spec.split);
          }
          EXPECT_TRUE(plan.dq.empty());
          ASSERT_FALSE(HasFailure());
        }
      }
    }
  }
}

/// Of every kind, and all at once.
TEST(Sm90BackwardPlan, VariantsHaveKernelsAndAnotherFamilyBehindThem) {
  Variants window, functions;
  window.left_window = true;
  functions.score = "score*2.0";
  functions.sink = true;
  for (const int d : {8, 64, 72, 128}) {
    for (const Variants* variants :
         {static_cast<const Variants*>(nullptr), &std::as_const(window), &std::as_const(functions)}) {
      for (const bool varlen : {false, true}) {
        for (const bool dropout : {false, true}) {
          Problem problem = problem_of(d, d);
          problem.variants = variants;
          problem.varlen = varlen;
          problem.dropout = dropout;
          problem.total_q = problem.total_kv = 4 * 4096;
          const Alternatives specs = plan_backward(problem, {}, false).main;
          const bool plain = variants == nullptr && !varlen && !dropout;
          EXPECT_EQ(specs.front().family(), Family::sm90);
          EXPECT_EQ(specs.back().family(), plain ? Family::sm90 : Family::sm80);
          for (const KernelSpec& spec : specs) {
            if (spec.family() == Family::sm90) expect_fits(spec);
          }
          for (const KernelSpec& spec : specs) {
            EXPECT_EQ(spec.varlen, varlen);
            EXPECT_EQ(spec.dropout, dropout);
            EXPECT_EQ(spec.variants, variants == nullptr ? Variants{} : *variants);
          }
          EXPECT_EQ(plan_backward(problem, {Family::sm90}, false).main.back().family(), Family::sm90);
          ASSERT_FALSE(HasFailure());
        }
      }
    }
  }
}

TEST(Sm90BackwardPlan, GradientsOfCapturesAtWideHeadsAreForAnotherFamily) {
  Variants bias;
  bias.score = "score+bias[h,q,kv]";
  bias.captures = {{"bias", DType::bf16, 3, true}};
  for (const int d : {64, 128}) {
    for (const bool gradient : {false, true}) {
      bias.captures.front().requires_grad = gradient;
      Problem problem = problem_of(d, d);
      problem.variants = &bias;
      EXPECT_EQ(plan_backward(problem, {}, false).main.front().family(),
                d == 128 && gradient ? Family::sm80 : Family::sm90);
    }
  }
}

TEST(Sm90BackwardPlan, TakesTheMeasuredTiles) {
  struct Row {
    int d_qk, d_v, tile_m, tile_n, stages;
  };
  constexpr Row kRows[] = {
      {64, 64, 128, 128, 2}, {8, 64, 128, 128, 2}, {128, 128, 64, 128, 2}, {72, 72, 64, 128, 2}, {64, 128, 64, 128, 2}};
  for (const Row& row : kRows) {
    const KernelSpec spec = first_of(problem_of(row.d_qk, row.d_v));
    SCOPED_TRACE(canonical(spec));
    EXPECT_EQ(spec.tile_m, row.tile_m);
    EXPECT_EQ(spec.tile_n, row.tile_n);
    EXPECT_EQ(spec.stages, row.stages);
  }
}

// Tiles in shared memory are slabs of 64 columns, whatever the head dim; dS has two buffers, dQ one of floats.
TEST(Sm90BackwardPlan, CountsSharedMemory) {
  KernelSpec spec = first_of(problem_of(128, 128), {{"tile_m", 64}, {"tile_n", 128}, {"stages", 2}});
  const int keys = 128 * (256 + 256);
  const int queries = 64 * (256 + 256 + 2 * 4);
  const int ds = 2 * 64 * 128 * 2;
  int dq = 64 * 128 * 4;
  EXPECT_EQ(shared_bytes(spec), keys + 2 * queries + ds + dq + 128 + 64);
  spec.d_qk = spec.d_v = 72;
  dq = 64 * 72 * 4;
  EXPECT_EQ(shared_bytes(spec), keys + 2 * queries + ds + dq + 128 + 64);
  spec.stages = 3;
  EXPECT_EQ(shared_bytes(spec), keys + 3 * queries + ds + dq + 128 + 64);
  spec.write_dq = false;
  EXPECT_EQ(shared_bytes(spec), keys + 3 * queries + 128);
  spec.d_v = 64;
  EXPECT_EQ(shared_bytes(spec), keys - 128 * 128 + 3 * (queries - 64 * 128) + 128);
  spec.write_dq = true;
  spec.tile_n = 64;
  EXPECT_EQ(shared_bytes(spec), 64 * 384 + 3 * 64 * (384 + 8) + 2 * 64 * 64 * 2 + 64 * 72 * 4 + 128 + 64);
  // Of a packed batch two jobs, and their barriers.
  spec.varlen = true;
  EXPECT_EQ(shared_bytes(spec), 64 * 384 + 3 * 64 * (384 + 8) + 2 * 64 * 64 * 2 + 64 * 72 * 4 + 128 + 192 + 64);
}

struct Refusal {
  const char* limit;  ///< what the text must name
  void (*spoil)(KernelSpec& spec);
};

constexpr Refusal kRefusals[] = {
    {"tile_n = 0: accepted are 64, 128 and 192", [](KernelSpec& spec) { spec.tile_n = 0; }},
    {"tile_n = 96", [](KernelSpec& spec) { spec.tile_n = 96; }},
    {"tile_n = 256", [](KernelSpec& spec) { spec.tile_n = 256; }},
    {"tile_m = 192: accepted are 64 and tile_n", [](KernelSpec& spec) { spec.tile_m = 192; }},
    {"tile_m = 32", [](KernelSpec& spec) { spec.tile_m = 32; }},
    {"tile_m = 0", [](KernelSpec& spec) { spec.tile_m = 0; }},
    {"stages = 0: accepted are 2 to 4", [](KernelSpec& spec) { spec.stages = 0; }},
    {"stages = 1: accepted are 2 to 4", [](KernelSpec& spec) { spec.stages = 1; }},
    {"stages = 5", [](KernelSpec& spec) { spec.stages = 5; }},
    {"stages = 4: accepted are 2 to 3", [](KernelSpec& spec) { spec.write_dq = true, spec.stages = 4; }},
    {"ordered_dq = true: accepted with write_dq = true",
     [](KernelSpec& spec) { spec.as<Sm90Backward>().ordered_dq = true; }},
    {"with tile_m = 64 each 64 columns of dQ need 64 keys", [](KernelSpec& spec) { spec.d_qk = 136; }},
    {"bytes of shared memory; sm_90a offers 232448", [](KernelSpec& spec) { spec.write_dq = true, spec.tile_n = 192; }},
    {"registers of fragments a thread; at most 212 fit", [](KernelSpec& spec) { spec.tile_m = 128; }},
    {"registers of fragments a thread; at most 128 fit", [](KernelSpec& spec) { spec.tile_n = 192; }},
};

TEST(Sm90BackwardRefusal, NamesTheLimit) {
  KernelSpec good = first_of(problem_of(128, 128));
  good.tile_m = 64;
  good.tile_n = 128;
  good.stages = 2;
  good.write_dq = false;
  EXPECT_EQ(sm90_backward_refusal(good), "");
  for (const Refusal& refusal : kRefusals) {
    KernelSpec spec = good;
    refusal.spoil(spec);
    EXPECT_NE(sm90_backward_refusal(spec).find(refusal.limit), std::string::npos)
        << refusal.limit << " is not in: " << sm90_backward_refusal(spec);
  }
}

TEST(Sm90BackwardSpec, TakesWhatTheOverrideFixes) {
  const KernelSpec spec = first_of(problem_of(40, 40), {{"tile_m", 64}, {"tile_n", 192}, {"stages", 3}, {"splits", 2}});
  EXPECT_EQ(spec.family(), Family::sm90);
  EXPECT_EQ(spec.tile_m, 64);
  EXPECT_EQ(spec.tile_n, 192);
  EXPECT_EQ(spec.threads(), 512);
  EXPECT_EQ(spec.stages, 3);
  EXPECT_TRUE(spec.split);
}

TEST(Sm90BackwardSpec, RefusesAnOverrideAsABadArgument) {
  const Fixed cases[] = {{{"tile_m", 192}},
                         {{"tile_m", -64}},
                         {{"tile_n", 256}},
                         {{"tile_n", 1 << 30}},
                         {{"stages", 5}},
                         {Family::sm90, {{"tile_m", 32}}},
                         {Family::sm90, {{"tile_n", 96}}}};
  for (const Fixed& fixed : cases) {
    try {
      const BackwardPlan plan = plan_backward(problem_of(128, 128), fixed, false);
      ADD_FAILURE() << "accepted: " << canonical(plan.main.front());
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
      EXPECT_EQ(error.field("argument"), "kernel_backward");
    }
  }
}

// ---- which family

struct Change {
  const char* what;
  void (*apply)(Problem& problem);
};

constexpr Change kMisfits[] = {
    {"sm_90a", [](Problem& p) { p.arch = parse_arch("sm_90"); }},
    {"sm_90a", [](Problem& p) { p.arch = parse_arch("sm_100a"); }},
    {"dtype", [](Problem& p) { p.dtype = DType::f32; }},
    {"head dims", [](Problem& p) { p.d_qk = 136; }},
    {"head dims", [](Problem& p) { p.d_v = 136; }},
};
constexpr Change kObstacles[] = {
    {"16 bytes", [](Problem& p) { p.aligned = false; }},
    {"stride", [](Problem& p) { p.tensor_maps = false; }},
    {"no keys", [](Problem& p) { p.s_kv = 0; }},
    {"no rows", [](Problem& p) { p.s_q = 0; }},
    {"no rows", [](Problem& p) { p.b = 0; }},
};

TEST(Sm90BackwardFamily, IsTakenWhereItFits) {
  const Problem good = problem_of(64, 128);
  EXPECT_EQ(sm90_backward_misfit(good), nullptr);
  EXPECT_EQ(sm90_backward_obstacle(good), nullptr);
  EXPECT_EQ(choose_backward(good, {}).family, Family::sm90);
  EXPECT_EQ(choose_backward(good, {Family::sm80}).family, Family::sm80);
  // Fields and tiles of the other family's kernels.
  EXPECT_EQ(choose_backward(good, {{"warps", 8}}).family, Family::sm80);
  EXPECT_EQ(choose_backward(good, {{"tile_m", 32}}).family, Family::sm80);
  EXPECT_EQ(choose_backward(good, {{"tile_n", 96}}).family, Family::sm80);
  EXPECT_EQ(choose_backward(good, {Family::sm90, {{"tile_n", 96}}}).family, Family::sm90);
}

TEST(Sm90BackwardFamily, AMisfitIsRefusedWhereItIsAskedFor) {
  for (const Change& change : kMisfits) {
    Problem problem = problem_of(64, 64);
    change.apply(problem);
    ASSERT_NE(sm90_backward_misfit(problem), nullptr);
    EXPECT_NE(std::string(sm90_backward_misfit(problem)).find(change.what), std::string::npos);
    EXPECT_EQ(choose_backward(problem, {}).family, Family::sm80);
    EXPECT_EQ(first_of(problem).family(), Family::sm80);
    try {
      plan_backward(problem, {Family::sm90}, false);
      ADD_FAILURE() << "accepted: " << change.what;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::unsupported);
      EXPECT_EQ(error.field("argument"), "kernel_backward.kernel");
    }
  }
}

TEST(Sm90BackwardFamily, AnObstacleIsThatOfACall) {
  for (const Change& change : kObstacles) {
    Problem problem = problem_of(64, 64);
    change.apply(problem);
    EXPECT_EQ(sm90_backward_misfit(problem), nullptr);
    ASSERT_NE(sm90_backward_obstacle(problem), nullptr);
    EXPECT_NE(std::string(sm90_backward_obstacle(problem)).find(change.what), std::string::npos);
    EXPECT_EQ(choose_backward(problem, {}).family, Family::sm80);
    EXPECT_EQ(first_of(problem, {Family::sm90}).family(), Family::sm80);
  }
}

TEST(Sm90BackwardFamily, EveryChoiceHasASlot) {
  std::set<int> slots;
  for (const Family family : {Family::sm80, Family::sm90}) {
    for (const bool aligned : {false, true}) {
      for (const int splits : {1, 3}) slots.insert(BackwardChoice{family, aligned, splits}.slot());
    }
  }
  EXPECT_EQ(slots.size(), 8U);
  EXPECT_EQ(*slots.begin(), 0);
  EXPECT_LT(*slots.rbegin(), BackwardChoice::kSlots);
}

// ---- splits, workspace and grids

TEST(Sm90BackwardChoice, SplitsFillAPersistentGrid) {
  Problem p = problem_of(64, 64);
  EXPECT_EQ(choose_backward(p, {}).splits, 1);
  p.b = 1;
  p.h_q = 16;
  p.h_kv = 1;
  p.s_q = p.s_kv = 1024;
  EXPECT_EQ(choose_backward(p, {}).splits, 16);  // 8 tiles of keys, 132 blocks
  EXPECT_TRUE(first_of(p).split);
  p.s_q = 128;
  EXPECT_EQ(choose_backward(p, {}).split_blocks, 4);  // 2,048 rows in all: too few for a kernel that adds up
  EXPECT_EQ(choose_backward(p, {{"split_blocks", 1}}).splits, 4);
  p.s_kv = 67 * 128;
  EXPECT_EQ(choose_backward(p, {}).splits, 1);  // more than half of the grid
}

TEST(Sm90BackwardChoice, OnlyRowsInFrontOfTheDiagonalAreLookedFor) {
  Problem p = problem_of(128, 128);
  const auto looks = [&p] { return first_of(p).as<Sm90Backward>().rows_without_keys; };
  p.causal = true;
  p.s_q = p.s_kv = 1024;
  EXPECT_FALSE(looks());
  p.s_kv = 1023;
  EXPECT_TRUE(looks()) << "row 0 keeps no key";
  const int slot = choose_backward(p, {}).slot();
  p.causal_align = CausalAlign::top_left;
  EXPECT_FALSE(looks());
  EXPECT_NE(choose_backward(p, {}).slot(), slot);
  p.placed = true;
  EXPECT_TRUE(looks()) << "the place is another one in each call";
  p.causal = false;
  EXPECT_FALSE(looks());
}

// ---- clusters that share the query tiles of a key tile

TEST(Sm90BackwardClusters, HeadsThatFillTheGpuHaveNone) {
  Problem p = problem_of(128, 128);
  EXPECT_EQ(choose_backward(p, {}).split_blocks, 1);
  p.causal = false;
  EXPECT_EQ(choose_backward(p, {}).split_blocks, 1);
}

TEST(Sm90BackwardClusters, FewKvHeadsOfManyQueryHeadsAreShared) {
  Problem p = problem_of(128, 128);
  p.b = 1;
  p.h_q = 32;
  p.h_kv = 8;  // 256 key tiles, of which the longest is twice the mean
  const BackwardChoice choice = choose_backward(p, {});
  EXPECT_GT(choice.split_blocks, 1);
  EXPECT_EQ(choice.splits, 1);
  EXPECT_FALSE(first_of(p).split);
  EXPECT_EQ(first_of(p).cluster(), choice.split_blocks);
}

// ---- blocks that add to dK and dV in turns

TEST(Sm90BackwardTurns, LongKeyTilesOfManyQueryHeadsHaveThem) {
  Problem p = problem_of(128, 128);
  p.b = 1;
  p.h_q = 32;
  p.h_kv = 4;
  const BackwardChoice choice = choose_backward(p, {});
  EXPECT_TRUE(choice.in_turns);
  EXPECT_GT(choice.splits, 1);
  EXPECT_EQ(8 % choice.splits, 0) << "whole query heads";
  EXPECT_FALSE(choice.leaves_splits());
  const KernelSpec spec = first_of(p);
  EXPECT_TRUE(spec.in_turns());
  EXPECT_FALSE(spec.split);
  EXPECT_EQ(spec.cluster(), 1);
  EXPECT_NE(choice.slot(), (BackwardChoice{.family = Family::sm90, .splits = choice.splits}.slot()));
  EXPECT_LT(choice.slot(), BackwardChoice::kSlots);
  p.h_kv = p.h_q;
  EXPECT_FALSE(choose_backward(p, {}).in_turns) << "a query head each";
}

TEST(Sm90BackwardTurns, AreTakenWhereTheyCanBe) {
  const Fixed turns{{"in_turns", 1}};
  const auto parts = [](const Problem& problem, const Fixed& fixed) {
    const BackwardChoice choice = choose_backward(problem, fixed);
    return choice.in_turns ? choice.splits : 0;
  };
  Problem p = problem_of(128, 128);
  p.h_kv = 4;
  EXPECT_EQ(parts(p, turns), 4) << "as many as query heads";
  EXPECT_EQ(parts(p, {{"in_turns", 1}, {"splits", 2}}), 2);
  EXPECT_EQ(parts(p, {{"in_turns", 1}, {"splits", 3}}), 0) << "no whole query heads";
  EXPECT_EQ(parts(p, {{"in_turns", 1}, {"split_blocks", 2}}), 0);
  EXPECT_EQ(parts(p, {{"in_turns", 0}}), 0);
  EXPECT_EQ(choose_backward(p, {{"splits", 2}}).splits, 2);
  EXPECT_FALSE(choose_backward(p, {{"splits", 2}}).in_turns) << "partial sums, as before";
  const auto refused = [&](auto change) {
    Problem other = p;
    change(other);
    return parts(other, turns) == 0;
  };
  EXPECT_TRUE(refused([](Problem& other) { other.varlen = true; }));
  EXPECT_TRUE(refused([](Problem& other) { other.bounded = true; }));
  EXPECT_TRUE(refused([](Problem& other) { other.d_qk = other.d_v = 256; }));
  EXPECT_TRUE(refused([](Problem& other) { other.gradients = {true, false, false}; }));
  EXPECT_TRUE(refused([](Problem& other) { other.s_q = other.s_kv / 8; })) << "more keys than rows";
  EXPECT_TRUE(refused([](Problem& other) { other.h_kv = other.h_q; }));
  EXPECT_FALSE(refused([](Problem& other) { other.causal = false; }));
}

TEST(Sm90BackwardTurns, PartsAreAsHeadsInTheGrid) {
  Problem p = problem_of(128, 128);
  p.h_kv = 4;
  const BackwardChoice choice = choose_backward(p, {{"in_turns", 1}, {"splits", 4}});
  KernelSet kernels;
  kernels[Role::attention] = first_of(p, {{"in_turns", 1}, {"splits", 4}});
  const auto turns = backward_launch(p, {}, 1, choice, kernels, 132);
  Problem alone = p;
  alone.h_kv = alone.h_q;
  KernelSet plain;
  plain[Role::attention] = first_of(alone);
  const auto heads = backward_launch(alone, {}, 1, {.family = Family::sm90}, plain, 132);
  EXPECT_EQ(turns.params.splits, 4);
  EXPECT_EQ(turns.params.heads_in_flight, heads.params.heads_in_flight);
  EXPECT_EQ(turns.params.last_section, heads.params.last_section);
  EXPECT_EQ(turns.params.n_blocks, heads.params.n_blocks);
}

TEST(Sm90BackwardTurns, SumsAreThereOnce) {
  Problem p = problem_of(64, 64);
  p.h_kv = 4;
  p.s_q = p.s_kv = 1000;
  const auto bytes = [&p](int parts) {
    const BackwardChoice choice{.family = Family::sm90, .splits = parts, .in_turns = true};
    const WorkspaceLayout layout = backward_workspace(p, choice, BackwardNeeds{.turns = true});
    // Turns of keys are the second ones of groups of rows.
    EXPECT_GE(layout.bytes(Section::turns), std::size_t{4} * 4 * keys_in_tiles(p) / 16 * 2 * sizeof(std::int32_t));
    return layout.bytes(Section::partial_dkv);
  };
  EXPECT_EQ(bytes(4), bytes(2));
  EXPECT_EQ(bytes(2), std::size_t{4} * 4 * 1152 * 128 * sizeof(float)) << "whole tiles of 64, 128 or 192 keys";
  EXPECT_GE(backward_workspace_size(p, {{"in_turns", 1}}, false).bytes, bytes(4));
}

TEST(Sm90BackwardTurns, OtherKernelsHaveNone) {
  KernelSpec spec = first_of(problem_of(128, 128));
  spec.as<Sm90Backward>().in_turns = true;
  EXPECT_EQ(sm90_backward_refusal(spec), "");
  spec.varlen = true;
  EXPECT_NE(sm90_backward_refusal(spec).find("in_turns"), std::string::npos);
  spec.varlen = false;
  spec.as<Sm90Backward>().split_blocks = 2;
  EXPECT_NE(sm90_backward_refusal(spec).find("in_turns"), std::string::npos);
}

TEST(Sm90BackwardClusters, ShortKeyTilesAreNotShared) {
  Problem p = problem_of(128, 128);
  p.b = 1;
  p.h_q = p.h_kv = 32;
  p.s_q = p.s_kv = 256;  // four steps at most
  EXPECT_EQ(choose_backward(p, {}).split_blocks, 1);
}

TEST(Sm90BackwardClusters, WindowsLeaveShortKeyTiles) {
  Problem p = problem_of(128, 128);
  p.b = 1;
  p.h_q = 32;
  p.h_kv = 1;  // 32 key tiles
  Variants variants;
  variants.left_window = true;
  p.variants = &variants;
  p.window_left = 1024;
  const BackwardChoice wide = choose_backward(p, {});
  EXPECT_GT(wide.split_blocks * wide.splits, 1);
  p.h_kv = p.h_q;
  p.window_left = 64;
  EXPECT_EQ(choose_backward(p, {}).split_blocks, 1) << "three steps at most";
}

TEST(Sm90BackwardClusters, EverySizeHasAKernelForEveryHeadDim) {
  for (const int d_qk : {8, 40, 64, 72, 96, 128}) {
    for (const int d_v : {8, 64, 80, 128}) {
      for (int blocks = 1; blocks <= BackwardChoice::kMaxSplitBlocks; ++blocks) {
        for (const bool varlen : {false, true}) {
          Problem p = problem_of(d_qk, d_v);
          p.varlen = varlen;
          const Fixed fixed{{"split_blocks", blocks}};
          EXPECT_EQ(first_of(p, fixed).cluster(), blocks) << d_qk << '/' << d_v;
          EXPECT_EQ(choose_backward(p, fixed).split_blocks, blocks);
        }
      }
    }
  }
}

TEST(Sm90BackwardClusters, GivenSplitsAreKept) {
  Problem p = problem_of(128, 128);
  p.b = 1;
  p.h_q = 32;
  p.h_kv = 4;
  EXPECT_EQ(choose_backward(p, {{"splits", 3}}).splits, 3);
  EXPECT_EQ(choose_backward(p, {{"splits", 3}}).split_blocks, 1);
}

TEST(Sm90BackwardWorkspace, StatisticsAreReadInWholeTiles) {
  Problem p = problem_of(72, 40);
  p.b = 2;
  p.h_q = 6;
  p.h_kv = 3;
  p.s_q = 130;
  p.s_kv = 100;
  const WorkspaceLayout plain = backward_workspace(p, {.family = Family::sm90}, BackwardNeeds{});
  EXPECT_EQ(padded_rows(p, {.family = Family::sm90}), 256);
  const std::size_t rows = 2 * 6 * 256;
  EXPECT_EQ(plain.offset(Section::delta) - plain.offset(Section::lse_log2), rows * 4);
  EXPECT_EQ(plain.offset(Section::dq_accum) - plain.offset(Section::delta), rows * 4);
  EXPECT_EQ(plain.bytes() - plain.offset(Section::dq_accum), rows * 72 * 4);
  EXPECT_FALSE(plain.has(Section::turns));
  const WorkspaceLayout ordered = backward_workspace(p, {.family = Family::sm90}, BackwardNeeds{.turns = true});
  EXPECT_EQ(ordered.offset(Section::turns), plain.bytes());
  EXPECT_EQ(ordered.bytes() - ordered.offset(Section::turns), rows / 16 * 2 * 4);
  EXPECT_EQ(backward_workspace_size(p, {Family::sm90, {{"splits", 1}}}, true).bytes, ordered.bytes());
  const WorkspaceLayout split = backward_workspace(p, {.family = Family::sm90, .splits = 3}, BackwardNeeds{});
  EXPECT_EQ(split.offset(Section::partial_dkv), plain.bytes());
  EXPECT_GE(split.bytes(Section::partial_dkv), std::size_t{3} * 2 * 3 * 100 * (72 + 40) * 4);
  // No tile of a kernel is longer than the padding.
  for (int d = 8; d <= 128; d += 8) {
    for (const KernelSpec& spec : plan_backward(problem_of(d, d), {}, true).main) EXPECT_EQ(256 % spec.tile_m, 0);
  }
}

/// The groups of 16 rows of sequences lie side by side, and the kernel reads no others.
TEST(Sm90BackwardWorkspace, PackedBatchesAreNotPadded) {
  Problem p = problem_of(64, 64);
  p.varlen = true;
  p.b = 5;
  p.total_q = p.total_kv = 1000;
  EXPECT_EQ(padded_rows(p, {.family = Family::sm90}), (1000 / 16 + 5) * 16);
}

/// Tiles of unequal length are dealt out by the hardware.
TEST(Sm90BackwardLaunch, PackedBatchesAndTileListsHaveABlockATile) {
  Problem p = problem_of(64, 64);
  p.s_q = p.s_kv = 1 << 14;
  KernelSet kernels;
  kernels[Role::attention].own = Sm90Backward{};
  kernels[Role::attention].tile_m = kernels[Role::attention].tile_n = 128;
  const auto grid = [&] {
    const BackwardChoice choice{.family = Family::sm90};
    return backward_launch(p, {}, 1, choice, kernels, 132).grids.main;
  };
  EXPECT_EQ(grid(), 128 * 16 * 4) << "long ones";
  p.causal = false;
  EXPECT_EQ(grid(), 132);
  p.causal = true;
  Variants mask;
  mask.mask = "q>kv";
  p.variants = &mask;
  EXPECT_EQ(grid(), 128 * 16 * 4);
  p.variants = nullptr;
  p.varlen = true;
  p.total_q = p.total_kv = 1 << 14;
  EXPECT_EQ(grid(), (128 + 4) * 16);
}

TEST(Sm90BackwardLaunch, LongCausalTilesEndWithThoseOfManyHeads) {
  Problem p = problem_of(128, 128);
  KernelSet kernels;
  kernels[Role::attention].own = Sm90Backward{};
  kernels[Role::attention].tile_m = 64;
  kernels[Role::attention].tile_n = 128;
  const auto params = [&](int multiprocessors) {
    return backward_launch(p, {}, 1, {.family = Family::sm90}, kernels, multiprocessors).params;
  };
  EXPECT_EQ(params(132).heads_in_flight, 5) << "whose rows fit the L2 cache";
  EXPECT_EQ(params(132).last_section, (64 - 5) / 5) << "5 heads are a round";
  p.h_kv = 2;  // 33 MB a head
  EXPECT_EQ(params(132).heads_in_flight, 4) << "that fill the GPU";
  EXPECT_EQ(params(132).last_section, 0);
  p.h_kv = 8;  // 13 of its heads are three rounds
  EXPECT_EQ(params(132).last_section, (32 - 13) / 4);
  p.causal = false;
  EXPECT_GT(params(132).last_section, 64) << "no section takes all";
}

TEST(Sm90BackwardLaunch, ThePersistentGridIsThatOfTheGpu) {
  Problem p = problem_of(64, 64);
  p.b = 2;
  p.h_q = 12;
  p.h_kv = 6;
  p.s_q = 300;
  p.s_kv = 500;
  KernelSet kernels;
  kernels[Role::attention].own = Sm90Backward{};
  kernels[Role::attention].tile_m = 64;
  kernels[Role::attention].tile_n = 128;
  kernels[Role::dq].tile_m = 128;
  kernels[Role::reduce].warps = 4;
  const auto launch = [&](int splits, int multiprocessors) {
    return backward_launch(p, {}, 0.5, {.family = Family::sm90, .splits = splits}, kernels, multiprocessors);
  };
  const BackwardLaunch small = launch(1, 20);
  EXPECT_EQ(small.grids.main, 20);
  EXPECT_EQ(small.params.heads_in_flight, balanced_heads(4, 12, 20));
  EXPECT_EQ(small.params.n_blocks, 4);
  EXPECT_EQ(small.params.m_blocks, 5);
  EXPECT_EQ(small.params.padded_rows, 384);
  EXPECT_EQ(small.params.splits, 1);
  EXPECT_EQ(small.grids.preprocess, 2 * 12 * 24);
  EXPECT_EQ(small.grids.convert, small.grids.preprocess);
  EXPECT_EQ(small.grids.dq, 0);
  EXPECT_EQ(launch(1, 132).grids.main, 4 * 6 * 2) << "no more blocks than tiles";

  kernels[Role::attention].write_dq = false;
  const BackwardLaunch split = launch(3, 132);
  EXPECT_EQ(split.grids.main, 132);
  EXPECT_EQ(split.params.heads_in_flight, balanced_heads(12, 12, 132));
  EXPECT_EQ(split.grids.reduce, 2 * 6 * 500 / 4);
  EXPECT_EQ(split.grids.dq, 2 * 12 * 3);
  EXPECT_EQ(split.grids.convert, 0);
  EXPECT_EQ(split.params.dq_accum, nullptr);
  EXPECT_EQ(split.params.turns, nullptr);
}

// Where additions to dQ have an order, no block goes from tile to tile and waits for others on the way: it has whole
// heads, or one tile.
TEST(Sm90BackwardLaunch, OrderedTiles) {
  KernelSet kernels;
  kernels[Role::attention].own = Sm90Backward{.ordered_dq = true};
  kernels[Role::attention].tile_m = 64;
  kernels[Role::attention].tile_n = 128;
  const auto launch = [&](std::int64_t b, std::int64_t s, bool causal, int splits = 1, int multiprocessors = 132) {
    Problem p = problem_of(64, 64, causal);
    p.b = b;
    p.h_q = p.h_kv = 16;
    p.s_q = p.s_kv = s;
    return backward_launch(p, {}, 0.5, {.family = Family::sm90, .splits = splits}, kernels, multiprocessors);
  };
  for (const bool causal : {false, true}) {
    const BackwardLaunch heads = launch(16, 512, causal);
    EXPECT_EQ(heads.grids.main, 128) << "two heads each, of 256";
    EXPECT_EQ(heads.params.heads_in_flight, 128);
    EXPECT_NE(heads.params.dq_accum, nullptr);
    EXPECT_NE(heads.params.turns, nullptr);
    EXPECT_EQ(heads.grids.dq, 0);
    EXPECT_EQ(heads.grids.convert, heads.grids.preprocess);
    EXPECT_EQ(launch(16, 512, causal, 2).grids.main, 2 * 4 * 256) << "a part of a head each";
    EXPECT_EQ(launch(16, 512, causal, 1, 150).grids.main, 4 * 256) << "22 multiprocessors would have none";
    EXPECT_EQ(launch(17, 512, causal).grids.main, 4 * 272) << "272 heads in 3 rounds are not equally many";
    EXPECT_EQ(launch(16, 2048, causal).grids.main, 16 * 256) << "128 heads do not fit the L2 cache";
  }
  EXPECT_EQ(launch(8, 2048, false).params.heads_in_flight, 20);
  EXPECT_EQ(launch(8, 2048, true).params.heads_in_flight, 33) << "of 40 that fit the cache four rounds of 132 tiles";
  EXPECT_EQ(launch(8, 2048, true, 1, 100).params.heads_in_flight, 33);
  kernels[Role::attention].own = Sm90BackwardPair{.ordered_dq = true};
  kernels[Role::attention].d_qk = kernels[Role::attention].d_v = 256;
  const BackwardLaunch pairs = launch(8, 8192, true);
  EXPECT_EQ(pairs.grids.main, 2 * 64 * 16 * 8);
  EXPECT_EQ(pairs.params.heads_in_flight, 10) << "nearly whole rounds of 66 pairs";
  EXPECT_EQ(launch(8, 8192, false).params.heads_in_flight, 5);
  EXPECT_EQ(launch(8, 65536, false).params.heads_in_flight, 2) << "one is more than fits the cache";
}

// ---- tensor maps

/// q and dout of one shape, k and v of another, rows of all heads next to each other.
BackwardTensors some_tensors() {
  const auto view = [](std::int64_t s, std::int64_t h, std::int64_t d) {
    TensorView result;
    result.dtype = DType::bf16;
    result.rank = 4;
    result.shape = {2, h, s, d};
    result.strides = {s * h * d, d, h * d, 1};
    return result;
  };
  BackwardTensors tensors;
  tensors.q = view(300, 8, 128);
  tensors.k = view(500, 2, 128);
  tensors.v = view(500, 2, 72);
  tensors.dout = view(300, 8, 72);
  return tensors;
}

/// What waits for the kernel before it; a first kernel of a call has nobody of its own to wait for.
TEST(BackwardStarts, AreEarlyWhereTheKernelWaitsItself) {
  for (const int d : {64, 128, 256}) {
    const BackwardPlan plan = plan_backward(problem_of(d, d), {}, false);
    EXPECT_FALSE(may_start_early(plan.preprocess));
    for (const KernelSpec& main : plan.main) EXPECT_TRUE(may_start_early(main)) << canonical(main);
    EXPECT_TRUE(may_start_early(plan.convert));
    EXPECT_TRUE(may_start_early(plan.reduce));
    EXPECT_FALSE(may_start_early(plan.sink));
  }
  const BackwardPlan repeatable = plan_backward(problem_of(128, 128), {}, true);
  EXPECT_TRUE(may_start_early(repeatable.main.front()));
  for (const KernelSpec& dq : repeatable.dq) EXPECT_FALSE(may_start_early(dq));
}

TEST(BackwardStarts, AreInOrderForOtherFamiliesAndGpus) {
  const Fixed other{Family::sm80};
  const BackwardPlan plan = plan_backward(problem_of(128, 128), other, false);
  EXPECT_FALSE(may_start_early(plan.main.front()));
  EXPECT_TRUE(may_start_early(plan.convert)) << "which waits for whatever is before it";
  Problem older = problem_of(128, 128);
  older.arch = parse_arch("sm_80");
  for (const Alternatives& kernels : kernels_of(plan_backward(older, {}, false))) {
    for (const KernelSpec& spec : kernels) EXPECT_FALSE(may_start_early(spec)) << canonical(spec);
  }
}

/// A kernel with a mask function reads the lists of its tiles before it waits.
TEST(BackwardStarts, AreInOrderBehindTileLists) {
  Variants variants;
  variants.mask = "q>kv";
  Problem p = problem_of(64, 64);
  p.variants = &variants;
  EXPECT_FALSE(may_start_early(first_of(p)));
  variants.mask.clear();
  variants.score = "score*2.0";
  EXPECT_TRUE(may_start_early(first_of(p)));
}

TEST(Sm90BackwardMaps, DescribeTheTensors) {
  const BackwardTensors tensors = some_tensors();
  KernelSpec spec;
  spec.tile_m = 64;
  spec.tile_n = 128;
  const Sm90BackwardMaps maps = sm90_backward_maps(tensors, spec);
  using Sizes = std::array<std::uint64_t, 5>;
  using Strides = std::array<std::uint64_t, 4>;
  using Box = std::array<std::uint32_t, 5>;
  for (const TensorMapSpec* map : {&maps.q, &maps.k, &maps.v, &maps.dout}) {
    EXPECT_EQ(map->rank, 4);
    EXPECT_EQ(map->dtype, DType::bf16);
  }
  EXPECT_EQ(maps.q.sizes, (Sizes{128, 300, 8, 2, 0}));
  EXPECT_EQ(maps.q.strides, (Strides{2048, 256, 614400, 0}));
  EXPECT_EQ(maps.q.box, (Box{64, 64, 1, 1, 0}));
  EXPECT_EQ(maps.k.sizes, (Sizes{128, 500, 2, 2, 0}));
  EXPECT_EQ(maps.k.strides, (Strides{512, 256, 256000, 0}));
  EXPECT_EQ(maps.k.box, (Box{64, 128, 1, 1, 0}));
  EXPECT_EQ(maps.v.sizes, (Sizes{72, 500, 2, 2, 0}));
  EXPECT_EQ(maps.v.strides, (Strides{288, 144, 144000, 0}));
  EXPECT_EQ(maps.v.box, (Box{64, 128, 1, 1, 0}));
  EXPECT_EQ(maps.dout.sizes, (Sizes{72, 300, 8, 2, 0}));
  EXPECT_EQ(maps.dout.strides, (Strides{1152, 144, 345600, 0}));
  EXPECT_EQ(maps.dout.box, (Box{64, 64, 1, 1, 0}));
}

TEST(Sm90BackwardMaps, AreRefusedStridesThatTheyCannotHold) {
  EXPECT_TRUE(sm90_backward_describable(some_tensors()));
  const std::int64_t limit = std::int64_t{1} << 39;  // elements of two bytes
  for (TensorView BackwardTensors::*tensor :
       {&BackwardTensors::q, &BackwardTensors::k, &BackwardTensors::v, &BackwardTensors::dout}) {
    for (std::size_t axis = 0; axis < 3; ++axis) {
      BackwardTensors tensors = some_tensors();
      TensorView& view = tensors.*tensor;
      for (const std::int64_t stride : {std::int64_t{0}, std::int64_t{-1024}, limit}) {
        view.strides[axis] = stride;
        EXPECT_FALSE(sm90_backward_describable(tensors)) << stride << " of axis " << axis;
      }
      view.strides[axis] = limit - 8;
      EXPECT_TRUE(sm90_backward_describable(tensors));
      view.strides[axis] = 0;
      view.shape[axis] = 1;  // not walked along
      EXPECT_TRUE(sm90_backward_describable(tensors));
    }
  }
  // Those that the copy engine does not touch may lie as they like.
  BackwardTensors tensors = some_tensors();
  tensors.o = tensors.dq = tensors.q;
  tensors.o.strides[0] = tensors.dq.strides[1] = -8;
  EXPECT_TRUE(sm90_backward_describable(tensors));
}

}  // namespace
}  // namespace fa::plan
