#include "plan/planner.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <fa/error.hpp>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "plan/backward.hpp"
#include "plan/kernels/sm90_fp8_forward.hpp"
#include "plan/workspace.hpp"
#include "support/thorough.hpp"

namespace fa::plan {
namespace {

Problem shaped(std::int64_t b, std::int64_t h_q, std::int64_t h_kv, std::int64_t s_q, std::int64_t s_kv) {
  Problem problem;
  problem.arch = parse_arch("sm_90a");
  problem.d_qk = problem.d_v = 128;
  problem.b = b;
  problem.h_q = h_q;
  problem.h_kv = h_kv;
  problem.s_q = s_q;
  problem.s_kv = s_kv;
  return problem;
}

template <class T, std::size_t kCount>
T pick(std::mt19937& random, const std::array<T, kCount>& values) {
  return values[random() % kCount];
}

/// Sets the facts that an Attention fixes when it is created.
void fix_config(std::mt19937& random, Problem& problem) {
  constexpr std::array kArchs = {"sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"};
  problem.arch = parse_arch(pick(random, kArchs));
  problem.dtype = pick(random, std::array{DType::f16, DType::bf16, DType::f32});
  problem.d_qk = 8 * (1 + static_cast<int>(random() % 32));
  problem.d_v = random() % 2 == 0 ? problem.d_qk : 8 * (1 + static_cast<int>(random() % 32));
  problem.causal = random() % 2 == 0;
  problem.causal_align = random() % 2 == 0 ? CausalAlign::bottom_right : CausalAlign::top_left;
  problem.positive_scale = random() % 2 == 0;
  problem.varlen = random() % 3 == 0;
  problem.dropout = random() % 3 == 0;
}

/// Sets what differs from call to call, degenerate sizes included.
void set_call(std::mt19937& random, Problem& problem) {
  constexpr std::array<std::int64_t, 16> kLengths = {0,   1,   2,   7,    16,   63,    64,     65,
                                                     127, 128, 129, 1000, 4096, 32768, 131072, 1 << 24};
  problem.aligned = random() % 2 == 0;
  problem.tensor_maps = random() % 4 != 0;
  problem.b = pick(random, std::array<std::int64_t, 6>{0, 1, 2, 3, 16, 512});
  problem.h_kv = pick(random, std::array<std::int64_t, 6>{0, 1, 2, 5, 8, 64});
  problem.h_q = problem.h_kv * pick(random, std::array<std::int64_t, 6>{0, 1, 2, 3, 8, 32});
  problem.s_q = pick(random, kLengths);
  problem.s_kv = pick(random, kLengths);
  problem.total_q = problem.b * problem.s_q;
  problem.total_kv = problem.b * problem.s_kv;
}

/// Sets what an Attention over a cache fixes besides.
void fix_cache(std::mt19937& random, Problem& problem) {
  problem.invariance =
      pick(random, std::array{Invariance::none, Invariance::none, Invariance::batch, Invariance::rows});
  if (problem.dropout) return;
  problem.page_size = pick(random, std::array{0, 0, 1, 8, 16, 64});
  problem.accumulate = random() % 4 == 0;
  problem.given_schedule = problem.page_size > 0 && random() % 3 == 0;
  if (problem.dtype == DType::f32 || problem.invariance != Invariance::none) return;
  problem.k_dtype = pick(random, std::array{problem.dtype, DType::e4m3, DType::i8, DType::u4x2});
  problem.v_dtype = pick(random, std::array{problem.dtype, DType::e4m3, DType::i8, DType::u4x2});
  if (problem.k_dtype != DType::u4x2 && problem.v_dtype != DType::u4x2) return;
  problem.group_size = pick(random, std::array{32, 64, 128});
  const auto in_groups = [&](int d) { return (d + problem.group_size - 1) / problem.group_size * problem.group_size; };
  problem.d_qk = in_groups(problem.d_qk);
  problem.d_v = in_groups(problem.d_v);
}

/// 8-bit floats in the place of what else the configuration has.
void fix_fp8(std::mt19937& random, Problem& problem) {
  problem.arch = parse_arch("sm_90a");
  problem.dtype = pick(random, std::array{DType::e4m3, DType::e5m2, DType::i8});
  problem.o_dtype = pick(random, std::array{DType::bf16, DType::f16, DType::e4m3});
  problem.key_scales = random() % 2 == 0;
  problem.value_scales = random() % 2 == 0;
  problem.precise = random() % 2 == 0;
  problem.d_qk = 16 * (1 + static_cast<int>(random() % 16));
  problem.d_v = 16 * (1 + static_cast<int>(random() % 16));
  problem.varlen = random() % 2 == 0;
  problem.dropout = false;
}

/// What a configuration has besides plain attention; nullptr: nothing.
const Variants* some_variants(std::mt19937& random) {
  static const std::array<Variants, 5> kVariants = [] {
    std::array<Variants, 5> all;
    all[0].mask = "q%3!=kv%3";
    all[1].score = "score-slope[h]*(q-kv)";
    all[1].captures = {{"slope", DType::f32, 1, false}};
    all[1].affine = true;
    all[2].left_window = all[2].chunked = true;
    all[3].score = "score+bias[q,kv]";
    all[3].captures = {{"bias", DType::bf16, 2, true}};
    all[3].loads_ahead = true;
    all[4].sink = true;
    return all;
  }();
  const std::size_t i = random() % (2 * kVariants.size());
  return i < kVariants.size() ? &kVariants[i] : nullptr;
}

Fixed some_override(std::mt19937& random) {
  Fixed fixed;
  if (random() % 2 == 0) return fixed;
  if (random() % 2 == 0) fixed.set("pack_gqa", random() % 2 == 0);
  fixed.set("splits", pick(random, std::array{0, 0, 1, 2, 7}));
  fixed.set("loop_bodies", pick(random, std::array{0, 1, 2}));
  return fixed;
}

// An Attention keeps one set of kernels a slot and never plans again for it: whatever the plan depends on must either
// be fixed when the Attention is created or be told apart by the slot.
TEST(Planner, EqualSlotsOfOneConfigurationHaveEqualPlans) {
  std::mt19937 random(20240501);
  for (int configuration = 0; configuration < (test::kSanitized ? 40 : 300); ++configuration) {
    Problem problem;
    fix_config(random, problem);
    fix_cache(random, problem);
    problem.variants = some_variants(random);
    const Fixed fixed = some_override(random);
    std::vector<std::optional<ForwardPlan>> plans(Choice::kSlots);
    for (int call = 0; call < 200; ++call) {
      set_call(random, problem);
      const Choice choice = choose(problem, fixed);
      const ForwardPlan plan = plan_forward(problem, fixed);
      ASSERT_EQ(plan.kernel.split, choice.splits > 1 || choice.shares_splits);
      ASSERT_EQ(plan.kernel.pack_gqa, choice.pack_gqa);
      ASSERT_EQ(plan.kernel.aligned, choice.aligned);
      ASSERT_EQ(plan.kernel.family(), choice.family);
      std::optional<ForwardPlan>& known = plans[static_cast<std::size_t>(choice.slot())];
      if (!known) known = plan;
      ASSERT_EQ(canonical(plan.kernel), canonical(known->kernel))
          << "slot " << choice.slot() << ", b " << problem.b << ", h_q " << problem.h_q << ", h_kv " << problem.h_kv
          << ", s_q " << problem.s_q << ", s_kv " << problem.s_kv;
      ASSERT_EQ(plan.kernel, known->kernel);
      ASSERT_EQ(plan.alternatives, known->alternatives);
      ASSERT_EQ(plan.combine, known->combine);
    }
  }
}

TEST(Planner, EqualSlotsOfEightBitFloatsHaveEqualPlans) {
  std::mt19937 random(20240502);
  std::set<std::string> outputs;
  for (int configuration = 0; configuration < 60; ++configuration) {
    Problem problem;
    fix_config(random, problem);
    fix_fp8(random, problem);
    std::vector<std::optional<ForwardPlan>> plans(Choice::kSlots);
    for (int call = 0; call < 100; ++call) {
      set_call(random, problem);
      if (problem.h_q == 0) problem.h_q = problem.h_kv = 1;  // without heads nothing is planned
      problem.aligned = problem.tensor_maps = true;
      for (std::int64_t* const total : {&problem.total_q, &problem.total_kv}) {
        *total = std::min(*total, std::int64_t{1} << 30);  // beyond, calls are refused
      }
      SCOPED_TRACE(fmt::format("b {}, h {}/{}, s {}x{}{}", problem.b, problem.h_q, problem.h_kv, problem.s_q,
                               problem.s_kv, problem.varlen ? ", packed" : ""));
      ForwardPlan plan;
      ASSERT_NO_THROW(plan = plan_forward(problem, {}));
      std::optional<ForwardPlan>& known = plans[static_cast<std::size_t>(choose(problem, {}).slot())];
      if (!known) known = plan;
      ASSERT_EQ(plan.kernel, known->kernel);
      ASSERT_EQ(plan.alternatives, known->alternatives);
    }
    const ForwardPlan planned = plan_forward(problem, {});
    const auto& own = planned.kernel.as<Sm90Fp8Forward>();
    EXPECT_EQ(own.byte_output, problem.o_dtype == DType::e4m3);
    EXPECT_EQ(own.half_output, problem.o_dtype == DType::f16);
    EXPECT_EQ(own.key_scales, problem.key_scales);
    EXPECT_EQ(own.value_scales, problem.value_scales);
    EXPECT_EQ(own.precise, problem.precise);
    outputs.insert(to_string(problem.o_dtype));
  }
  EXPECT_EQ(outputs.size(), 3U);
}

TEST(Planner, EqualSlotsOfOneConfigurationHaveEqualBackwardPlans) {
  std::mt19937 random(20240502);
  for (int configuration = 0; configuration < 300; ++configuration) {
    Problem problem;
    fix_config(random, problem);
    problem.variants = some_variants(random);
    const bool deterministic = random() % 2 == 0;
    const Fixed fixed{{"splits", pick(random, std::array{0, 0, 1, 2, 7})}};
    std::vector<std::optional<std::vector<Alternatives>>> plans(BackwardChoice::kSlots);
    for (int call = 0; call < 100; ++call) {
      set_call(random, problem);
      const int slot = choose_backward(problem, fixed).slot();
      const std::vector<Alternatives> kernels = kernels_of(plan_backward(problem, fixed, deterministic));
      ASSERT_GE(slot, 0);
      ASSERT_LT(slot, BackwardChoice::kSlots);
      std::optional<std::vector<Alternatives>>& known = plans[static_cast<std::size_t>(slot)];
      if (!known) known = kernels;
      ASSERT_EQ(kernels, *known) << "slot " << slot << ", b " << problem.b << ", h_q " << problem.h_q << ", h_kv "
                                 << problem.h_kv << ", s_q " << problem.s_q << ", s_kv " << problem.s_kv;
    }
  }
}

// Whichever main kernel is taken, with or without registers to spare, something writes dQ.
TEST(BackwardPlan, EveryAlternativeHasTheKernelForDqThatItNeeds) {
  std::mt19937 random(20240503);
  for (int i = 0; i < 3000; ++i) {
    Problem problem;
    fix_config(random, problem);
    if (i % 2 == 0) problem.arch = parse_arch("sm_90a");
    problem.variants = some_variants(random);
    set_call(random, problem);
    const BackwardPlan plan = plan_backward(problem, {}, random() % 2 == 0);
    for (const KernelSpec& main : plan.main) {
      ASSERT_EQ(main.write_dq, plan.dq.empty()) << canonical(main);
      ASSERT_EQ(main.split, plan.main.front().split);
    }
  }
}

/// Tiles of either family, as tuning would ask for them.
Fixed some_tile(std::mt19937& random) {
  Fixed fixed = some_override(random);
  fixed.family = pick(random, std::array{Family::automatic, Family::automatic, Family::sm80, Family::sm90});
  fixed.set("tile_m", pick(random, std::array{0, 0, 0, 64, 128, 192, 256}));
  fixed.set("tile_n", pick(random, std::array{0, 0, 0, 32, 64, 80, 128}));
  fixed.set("stages", pick(random, std::array{0, 1, 2, 3, 4, 5, 6, 7}));
  fixed.set("q_buffers", pick(random, std::array{0, 0, 1, 2}));
  fixed.set("warps", pick(random, std::array{0, 0, 0, 4}));
  if (random() % 4 == 0) fixed.set("dynamic", pick(random, std::array{0, 1}));
  return fixed;
}

// What an Attention accepts when it is created, it serves in every call.
TEST(Planner, AnOverrideThatServesUsualCallsServesAll) {
  std::mt19937 random(20251124);
  int accepted = 0, dropped = 0;
  constexpr int kConfigurations = test::kSanitized ? 200 : 1500;
  for (int configuration = 0; configuration < kConfigurations; ++configuration) {
    Problem problem;
    fix_config(random, problem);
    if (random() % 2 == 0) problem.arch = parse_arch("sm_90a");
    const Fixed fixed = some_tile(random);
    const bool deterministic = random() % 2 == 0;
    bool forward = true, backward = true;
    try {
      check_forward_override(problem, fixed);
    } catch (const Error&) {
      forward = false;
    }
    try {
      plan_backward(usual_call(problem), fixed, deterministic);
    } catch (const Error&) {
      backward = false;
    }
    accepted += forward || backward ? 1 : 0;
    std::vector<std::optional<ForwardPlan>> plans(Choice::kSlots);
    for (int call = 0; call < 40; ++call) {
      set_call(random, problem);
      if (backward) {
        EXPECT_NO_THROW(plan_backward(problem, fixed, deterministic));
      }
      if (!forward) continue;
      const Choice choice = choose(problem, fixed);
      const ForwardPlan plan = plan_forward(problem, fixed);
      std::optional<ForwardPlan>& known = plans[static_cast<std::size_t>(choice.slot())];
      if (!known) known = plan;
      ASSERT_EQ(plan.kernel, known->kernel);
      ASSERT_EQ(plan.alternatives, known->alternatives);
      // What the call would be compiled by ahead is what it takes.
      const Fixed followed = followed_forward(problem, fixed);
      if (followed.text() == fixed.text()) continue;
      ++dropped;
      ASSERT_EQ(plan.kernel.family(), Family::sm80);
      ASSERT_EQ(canonical(plan_forward(problem, followed).kernel), canonical(plan.kernel));
    }
  }
  EXPECT_GT(accepted, kConfigurations / 15);
  EXPECT_GT(dropped, kConfigurations / 15);
}

TEST(Planner, StagesThatOnlyHopperHasDoNotRefuseUnalignedCalls) {
  for (const int stages : {5, 7}) {
    const Fixed fixed{{"tile_n", 64}, {"stages", stages}};
    Problem problem = shaped(2, 8, 8, 4096, 4096);
    problem.d_qk = problem.d_v = 64;
    EXPECT_EQ(plan_forward(problem, fixed).kernel.stages, stages);
    problem.aligned = false;
    EXPECT_EQ(canonical(plan_forward(problem, fixed).kernel), canonical(plan_forward(problem, {}).kernel));
    problem.aligned = true;
    problem.tensor_maps = false;
    EXPECT_EQ(canonical(plan_forward(problem, fixed).kernel), canonical(plan_forward(problem, {}).kernel));
    // Where no call can have them, they are refused.
    problem.arch = parse_arch("sm_80");
    EXPECT_THROW(plan_forward(problem, fixed), Error);
  }
}

TEST(Choice, SlotsAreDenseAndUnique) {
  std::set<int> slots;
  for (int bits = 0; bits < Choice::kSlots; ++bits) {
    Choice choice;
    choice.aligned = (bits & 1) != 0;
    choice.short_query = (bits & 2) != 0;
    choice.pack_gqa = (bits & 4) != 0;
    choice.splits = (bits & 8) != 0 ? 5 : 1;
    choice.family = static_cast<Family>(static_cast<int>(Family::sm80) + bits / 4096);
    choice.many_diagonals = (bits & 16) != 0;
    choice.dynamic = (bits & 32) != 0;
    choice.many_rows = (bits & 64) != 0;
    choice.long_rows = (bits & 128) != 0;
    choice.exact_max = (bits & 256) != 0;
    choice.affine_reach = (bits & 512) != 0;
    choice.scheduled = (bits & 1024) != 0;
    choice.shares_splits = (bits & 2048) != 0;
    EXPECT_GE(choice.slot(), 0);
    EXPECT_LT(choice.slot(), Choice::kSlots);
    EXPECT_TRUE(slots.insert(choice.slot()).second) << choice.slot();
    if (choice.splits == 1) continue;
    const int slot = choice.slot();
    choice.splits = 64;  // the kernel does not know the count
    EXPECT_EQ(choice.slot(), slot);
  }
  // A new member of Choice breaks this binding: it needs a bit of the slot.
  const auto [aligned, short_query, pack_gqa, many_diagonals, dynamic, many_rows, long_rows, exact_max, affine_reach,
              scheduled, own_parts, splits_request, few_rows, shares_splits, whole_tiles, all_whole, multicast, family,
              splits, split_blocks] = Choice{};
  const bool any = short_query || pack_gqa || many_diagonals || dynamic || many_rows || long_rows || exact_max ||
                   affine_reach || scheduled || own_parts || splits_request || few_rows > 0 || shares_splits ||
                   splits > 1 || split_blocks > 1 || multicast || whole_tiles || all_whole;
  EXPECT_EQ(Choice{}.slot(), (aligned ? 1 : 0) + (any || family == Family::sm90 ? 2 : 0));
}

TEST(Choice, SplitsOnlyWhenThereAreTooFewBlocks) {
  std::mt19937 random(7);
  for (int i = 0; i < 20000; ++i) {
    Problem problem;
    fix_config(random, problem);
    set_call(random, problem);
    const Choice choice = choose(problem, {});
    ASSERT_GE(choice.splits, 1);
    ASSERT_LE(choice.splits, 64);
    if (choice.splits == 1) continue;
    ASSERT_GE(problem.s_kv / choice.splits, choice.short_query ? 128 : 512) << "a split must be worth its overhead";
    const std::int64_t rows = choice.pack_gqa ? problem.s_q * (problem.h_q / problem.h_kv) : problem.s_q;
    const std::int64_t heads = choice.pack_gqa ? problem.h_kv : problem.h_q;
    const bool persistent = choice.family == Family::sm90;
    const std::int64_t tile = choice.short_query ? 64 : persistent ? plan_forward(problem, {}).kernel.tile_m : 128;
    const std::int64_t blocks = (rows + tile - 1) / tile * heads * problem.b;
    ASSERT_LE(blocks * choice.splits, persistent ? 132 : 192) << "more blocks than were aimed at";
  }
}

TEST(Choice, LongSequencesAndLargeBatchesAreNotSplit) {
  EXPECT_EQ(choose(shaped(4, 16, 16, 4096, 4096), {}).splits, 1);
  EXPECT_EQ(choose(shaped(1, 16, 16, 16384, 16384), {}).splits, 1);
  EXPECT_EQ(choose(shaped(128, 32, 8, 1, 32768), {}).splits, 1);
  EXPECT_EQ(choose(shaped(1, 97, 97, 1, 32768), {}).splits, 1);
}

TEST(Choice, BlocksOfAClusterMergeTheirSplits) {
  const Fixed fixed{{"split_blocks", 8}};
  for (int d = 8; d <= 256; d += 8) {
    Problem problem = shaped(2, 8, 2, 1, 8192);
    problem.d_qk = problem.d_v = d;
    const Choice choice = choose(problem, fixed);
    EXPECT_EQ(choice.splits, 8);
    EXPECT_EQ(choice.split_blocks, 8);
    EXPECT_EQ(forward_workspace(problem, choice, ForwardNeeds{}).bytes(), 0U) << "nothing leaves the chip";
    const ForwardPlan plan = plan_forward(problem, fixed);
    EXPECT_EQ(plan.kernel.cluster(), 8) << d << ": the parts have room";
    const KernelSpec pair = plan_forward(problem, {{"split_blocks", 2}}).kernel;
    EXPECT_GT(2 * (shared_bytes(pair) + 1024), limits(problem.arch).shared_per_sm) << "a multiprocessor each";
    EXPECT_EQ(kernels_of(plan).size(), 1U) << "no other kernel merges";
    kernel::ForwardVariantParams params;
    EXPECT_EQ(forward_params(problem, {}, 1, choice.splits, plan.kernel, 132, {}, params).grid, 2 * 2 * 8);
    EXPECT_EQ(forward_params(problem, {}, 1, choice.splits, plan.kernel, 8, {}, params).grid, 2 * 2 * 8)
        << "whole clusters";
  }
  const auto blocks = [&](const Problem& problem, const Fixed& with) { return choose(problem, with).split_blocks; };
  Problem problem = shaped(1, 8, 2, 1, 8192);
  EXPECT_EQ(blocks(shaped(8, 32, 8, 1, 8192), {}), 2) << "usual of two splits";
  EXPECT_EQ(blocks(shaped(32, 16, 1, 1, 8192), {}), 4) << "of 16 rows";
  EXPECT_EQ(blocks(shaped(1, 32, 8, 1, 1024), {}), 8) << "of half of the multiprocessors";
  EXPECT_EQ(blocks(shaped(4, 32, 8, 1, 8192), {}), 1);
  EXPECT_EQ(blocks(shaped(1, 32, 8, 1, 8192), {}), 1);
  EXPECT_EQ(blocks(shaped(8, 32, 8, 1, 8192), {{"splits", 2}}), 1) << "as they were asked for";
  EXPECT_EQ(blocks(problem, {{"split_blocks", 7}}), 4);
  EXPECT_EQ(blocks(problem, {{"split_blocks", 8}, {"tile_n", 16}}), 1) << "no room";
  EXPECT_EQ(blocks(problem, {{"split_blocks", 8}, {"tile_n", 16}, {"stages", 7}}), 8);
  EXPECT_EQ(blocks(problem, {{"split_blocks", 8}, {"tile_m", 128}}), 1);
  EXPECT_EQ(blocks(shaped(1, 8, 2, 64, 8192), fixed), 1) << "more rows than a tile of few";
  problem.accumulate = true;
  EXPECT_EQ(blocks(problem, fixed), 1);
  problem = shaped(1, 8, 2, 1, 8192);
  problem.bounded = true;
  EXPECT_EQ(blocks(problem, fixed), 1) << "blocks wait for each other";
  problem = shaped(1, 8, 2, 1, 8192);
  problem.arch = parse_arch("sm_80");
  EXPECT_EQ(blocks(problem, fixed), 1);
}

TEST(Choice, DecodeShapesAreSplit) {
  const Fixed sm80{Family::sm80};
  EXPECT_EQ(choose(shaped(1, 32, 8, 1, 32768), sm80).splits, 24);
  EXPECT_EQ(choose(shaped(1, 32, 8, 1, 32768), {}).splits, 16) << "a block a multiprocessor";
  EXPECT_EQ(choose(shaped(1, 96, 96, 1, 32768), sm80).splits, 2);
  EXPECT_EQ(choose(shaped(1, 66, 66, 1, 32768), {}).splits, 2);
  EXPECT_EQ(choose(shaped(1, 8, 1, 1, 131072), {}).splits, 64);
  EXPECT_EQ(choose(shaped(1, 8, 1, 1, 4096), {}).splits, 32);
  EXPECT_EQ(choose(shaped(1, 8, 1, 1, 512), {}).splits, 4);
  EXPECT_EQ(choose(shaped(1, 8, 1, 1, 511), {}).splits, 1);
  EXPECT_EQ(choose(shaped(1, 8, 8, 128, 1024), {}).splits, 2) << "more rows leave larger partial results";
}

TEST(Choice, BlocksOfShortQueriesShareAMultiprocessor) {
  const auto blocks = [](const Problem& problem) { return plan_forward(problem, {}).kernel.min_blocks; };
  Problem decode = shaped(64, 32, 8, 1, 8192);
  EXPECT_EQ(blocks(decode), 2);
  EXPECT_EQ(blocks(shaped(64, 32, 8, 128, 8192)), 1) << "two consumers";
  const Choice choice = choose(decode, {});
  const KernelSpec kernel = plan_forward(decode, {}).kernel;
  kernel::ForwardVariantParams params;
  EXPECT_EQ(forward_params(decode, {}, 1, choice.splits, kernel, 132, {}, params).grid, 264);
  decode.bounded = true;
  EXPECT_EQ(blocks(decode), 1) << "the call counts its multiprocessors";
  decode.bounded = false;
  decode.dropout = true;
  EXPECT_EQ(blocks(decode), 1) << "warps that draw take registers";
}

// What does not spill, ptxas decides: behind each tile of few rows comes the same with a block less.
TEST(ForwardPlan, StoredCachesKeepTheTileOfFewRows) {
  for (const auto& [d, k, v, blocks] : {std::tuple{128, DType::e4m3, DType::e4m3, 2},
                                        {128, DType::bf16, DType::i8, 2},
                                        {128, DType::e4m3, DType::bf16, 2},
                                        {64, DType::i8, DType::i8, 2},
                                        {64, DType::u4x2, DType::bf16, 3}}) {
    for (const int page_size : {16, -1}) {
      Problem problem = shaped(8, 32, 8, 1, 8192);
      problem.d_qk = problem.d_v = d;
      problem.page_size = page_size;
      problem.k_dtype = k;
      problem.v_dtype = v;
      problem.group_size = k == DType::u4x2 ? 32 : 0;
      const ForwardPlan plan = plan_forward(problem, {});
      EXPECT_TRUE(plan.kernel.as<Sm80Forward>().split_warps);
      EXPECT_EQ(plan.kernel.min_blocks, blocks) << canonical(plan.kernel);
      KernelSpec next = plan.kernel;
      next.min_blocks -= 1;
      ASSERT_FALSE(plan.alternatives.empty());
      EXPECT_EQ(plan.alternatives.front(), next);
    }
  }
}

/// Half of an mma's rows on Hopper, where a KV head has no more.
TEST(ForwardPlan, StoredCachesHaveTilesOfEightRows) {
  for (const auto& [arch, s_q, h_q, k, tile_m] : {std::tuple{"sm_90a", 1, 32, DType::e4m3, 8},
                                                  {"sm_90a", 2, 32, DType::u4x2, 8},
                                                  {"sm_90a", 3, 32, DType::e4m3, 16},
                                                  {"sm_90a", 1, 128, DType::u4x2, 16},
                                                  {"sm_80", 1, 32, DType::e4m3, 16}}) {
    for (const int page_size : {0, 16, -1}) {
      Problem problem = shaped(8, h_q, 8, s_q, 8192);
      problem.arch = parse_arch(arch);
      problem.page_size = page_size;
      problem.k_dtype = problem.v_dtype = k;
      problem.group_size = k == DType::u4x2 ? 64 : 0;
      const ForwardPlan plan = plan_forward(problem, {});
      EXPECT_TRUE(plan.kernel.as<Sm80Forward>().split_warps) << canonical(plan.kernel);
      EXPECT_EQ(plan.kernel.tile_m, tile_m) << canonical(plan.kernel);
      const bool long_tile = plan.kernel.arch.major >= 9;
      EXPECT_EQ(plan.kernel.tile_n, long_tile || (k == DType::u4x2 && page_size == 0) ? 128 : 64);
    }
  }
  Problem few = shaped(1, 32, 4, 1, 4096);  // parts of 62 keys
  few.page_size = 16;
  few.k_dtype = few.v_dtype = DType::e4m3;
  EXPECT_EQ(plan_forward(few, {}).kernel.tile_n, 64);
}

/// Without pages too, where 4 bits have longer KV tiles up to a head dim of 128.
TEST(ForwardPlan, StoredTensorsKeepTheTileOfFewRows) {
  for (const auto& [d, tile_n] : {std::pair{64, 128}, {128, 128}, {160, 64}}) {
    Problem problem = shaped(64, 32, 8, 1, 8192);
    problem.d_qk = problem.d_v = d;
    problem.k_dtype = problem.v_dtype = DType::u4x2;
    problem.group_size = 32;
    const KernelSpec spec = plan_forward(problem, {}).kernel;
    EXPECT_TRUE(spec.as<Sm80Forward>().split_warps) << canonical(spec);
    EXPECT_EQ(spec.tile_n, tile_n) << canonical(spec);
  }
}

TEST(Choice, BlocksFindTheirPartsOfFewRowsByThemselves) {
  const Fixed wanted{Family::sm80, {{"own_parts", 1}}};
  const auto finds = [&](const Problem& problem, const std::optional<Fixed>& given = {}) {
    const Fixed& fixed = given ? *given : wanted;
    const Choice choice = choose(problem, fixed);
    EXPECT_FALSE(choice.own_parts && (choice.splits > 1 || choice.scheduled || choice.family != Family::sm80));
    return choice.own_parts;
  };
  EXPECT_TRUE(finds(shaped(1, 32, 8, 1, 8192)));
  EXPECT_TRUE(finds(shaped(1, 32, 8, 4, 8192))) << "16 rows";
  EXPECT_FALSE(finds(shaped(1, 32, 8, 5, 8192)));
  EXPECT_TRUE(finds(shaped(8, 32, 8, 1, 8192)));
  EXPECT_FALSE(finds(shaped(16, 32, 8, 1, 8192))) << "enough tiles for all multiprocessors";
  EXPECT_TRUE(finds(shaped(1, 8, 1, 1, 1024)));
  EXPECT_FALSE(finds(shaped(1, 8, 1, 1, 1023)));
  EXPECT_FALSE(finds(shaped(1, 32, 8, 1, 8192), Fixed(Family::sm80, {{"splits", 4}, {"own_parts", 1}})));
  EXPECT_FALSE(finds(shaped(1, 32, 8, 1, 8192), Fixed())) << "splits are faster";
  EXPECT_FALSE(finds(shaped(1, 32, 8, 1, 8192), Fixed(Family::sm80)));
  Problem paged = shaped(32, 32, 8, 1, 8192);
  paged.page_size = 16;
  EXPECT_TRUE(finds(paged, Fixed(Family::sm80))) << "a lane for each request";
  paged.given_schedule = true;
  EXPECT_FALSE(finds(paged, Fixed(Family::sm80)));
  EXPECT_TRUE(choose(paged, Fixed(Family::sm80)).scheduled);
  paged.given_schedule = false;
  paged.b = 33;
  EXPECT_FALSE(finds(paged, Fixed(Family::sm80)));
  Problem packed = shaped(16, 32, 8, 1, 8192);
  packed.page_size = 16;
  packed.varlen = true;
  packed.total_q = 16;
  EXPECT_TRUE(finds(packed, Fixed(Family::sm80)));
  for (const Invariance invariance : {Invariance::batch, Invariance::rows}) {
    Problem problem = shaped(1, 32, 8, 1, 8192);
    problem.invariance = invariance;
    EXPECT_FALSE(finds(problem)) << "bits would depend on the number of multiprocessors";
  }
}

TEST(Choice, PacksHeadsWhereMostRequestsOfABatchAreDecodes) {
  Problem mixed = shaped(130, 32, 8, 2048, 2048);
  mixed.varlen = true;
  mixed.total_q = 2 * 2048 + 128;
  EXPECT_TRUE(choose(mixed, {}).pack_gqa);
  mixed.page_size = 16;
  EXPECT_TRUE(choose(mixed, {}).pack_gqa);
  EXPECT_EQ(choose(mixed, {}).family, Family::sm90);
  mixed.total_q = 130 * 65;
  EXPECT_FALSE(choose(mixed, {}).pack_gqa);
}

TEST(Choice, WithoutKeysOrQueriesNothingIsSplit) {
  for (const Problem& problem : {shaped(1, 8, 1, 1, 0), shaped(1, 8, 1, 0, 32768), shaped(0, 8, 1, 1, 32768),
                                 shaped(1, 0, 1, 1, 32768), shaped(1, 0, 0, 1, 32768)}) {
    EXPECT_EQ(choose(problem, {}).splits, 1);
  }
}

TEST(Choice, DependsOnShapesOnly) {
  std::mt19937 random(11);
  for (int i = 0; i < 5000; ++i) {
    Problem problem;
    fix_config(random, problem);
    set_call(random, problem);
    const Fixed sm80{Family::sm80};  // which family depends on architecture and dtype too
    const Choice choice = choose(problem, sm80);
    const Problem same_shape = problem;
    fix_config(random, problem);
    problem.causal = same_shape.causal;  // these two say how many of the keys are visible
    problem.causal_align = same_shape.causal_align;
    problem.varlen = same_shape.varlen;  // and this, what a shape is
    const Choice other = choose(problem, sm80);
    ASSERT_EQ(choice.slot(), other.slot());
    ASSERT_EQ(choice.splits, other.splits);
  }
}

TEST(Choice, OverrideFixesTheSplits) {
  const Problem decode = shaped(1, 32, 8, 1, 32768);
  for (const int splits : {1, 2, 100}) EXPECT_EQ(choose(decode, {{"splits", splits}}).splits, splits);
  EXPECT_EQ(choose(shaped(4, 16, 16, 4096, 4096), {{"splits", 3}}).splits, 3);
}

TEST(Choice, PacksQueryHeadsOfShortQueries) {
  EXPECT_TRUE(choose(shaped(1, 32, 8, 1, 4096), {}).pack_gqa);
  EXPECT_TRUE(choose(shaped(1, 32, 8, 64, 4096), {}).pack_gqa);
  EXPECT_FALSE(choose(shaped(1, 32, 8, 65, 4096), {}).pack_gqa);
  EXPECT_FALSE(choose(shaped(1, 32, 32, 1, 4096), {}).pack_gqa) << "there is nothing to pack";
}

TEST(Choice, OverrideFixesThePacking) {
  EXPECT_TRUE(choose(shaped(1, 32, 8, 4096, 4096), {{"pack_gqa", true}}).pack_gqa);
  EXPECT_FALSE(choose(shaped(1, 32, 8, 1, 4096), {{"pack_gqa", false}}).pack_gqa);
  EXPECT_FALSE(choose(shaped(1, 32, 32, 1, 4096), {{"pack_gqa", true}}).pack_gqa) << "there is nothing to pack";
}

TEST(Choice, CountsPackedRowsOfAShortQuery) {
  EXPECT_TRUE(choose(shaped(1, 32, 8, 16, 4096), {}).short_query);   // 64 packed rows
  EXPECT_FALSE(choose(shaped(1, 32, 8, 17, 4096), {}).short_query);  // 68
  EXPECT_TRUE(choose(shaped(1, 32, 8, 64, 4096), {{"pack_gqa", false}}).short_query);
  EXPECT_FALSE(choose(shaped(1, 32, 32, 65, 4096), {}).short_query);
}

TEST(Choice, HopperServesWhatTheCopyEngineCan) {
  const auto family = [](auto change, const Fixed& fixed = {}) {
    Problem problem = shaped(2, 16, 8, 4096, 4096);
    change(problem);
    const ForwardPlan plan = plan_forward(problem, fixed);
    for (const KernelSpec& spec : plan.alternatives) EXPECT_EQ(spec.family(), plan.kernel.family());
    EXPECT_EQ(plan.kernel.family(), choose(problem, fixed).family);
    return plan.kernel.family();
  };
  EXPECT_EQ(family([](Problem&) {}), Family::sm90);
  EXPECT_EQ(family([](Problem& p) { p.dtype = DType::f16; }), Family::sm90);
  EXPECT_EQ(family([](Problem& p) { p.dtype = DType::f32; }), Family::sm80);
  EXPECT_EQ(family([](Problem& p) { p.aligned = false; }), Family::sm80);
  EXPECT_EQ(family([](Problem& p) { p.tensor_maps = false; }), Family::sm80);
  EXPECT_EQ(family([](Problem& p) { p.s_kv = 0; }), Family::sm80);
  EXPECT_EQ(family([](Problem& p) { p.s_q = 0; }), Family::sm80);
  for (const char* arch : {"sm_80", "sm_89", "sm_90", "sm_100a", "sm_120a"}) {
    EXPECT_EQ(family([&](Problem& p) { p.arch = parse_arch(arch); }), Family::sm80) << arch;
  }
  EXPECT_EQ(family([](Problem&) {}, {Family::sm80}), Family::sm80);
  EXPECT_EQ(family([](Problem&) {}, {Family::sm90}), Family::sm90);
  EXPECT_EQ(family([](Problem& p) { p.aligned = false; }, {Family::sm90}), Family::sm80);
  // Fields that only kernels of sm80 have pick it.
  EXPECT_EQ(family([](Problem&) {}, {{"warps", 8}}), Family::sm80);
  EXPECT_EQ(family([](Problem&) {}, {{"q_in_registers", false}}), Family::sm80);
  EXPECT_EQ(family([](Problem&) {}, {{"loop_bodies", 2}}), Family::sm80);
  EXPECT_EQ(family([](Problem&) {}, {{"warps_n", 1}}), Family::sm80);
  EXPECT_EQ(family([](Problem&) {}, {{"tile_n", 64}}), Family::sm90);
}

TEST(Choice, HopperServesVariantsToo) {
  Problem p = shaped(2, 16, 8, 4096, 4096);
  p.dropout = true;
  EXPECT_EQ(choose(p, {}).family, Family::sm90);
  EXPECT_EQ(choose(p, {Family::sm80}).family, Family::sm80);
  EXPECT_TRUE(plan_forward(p, {}).kernel.dropout);
  p.dropout = false;
  p.varlen = true;
  p.total_q = p.total_kv = 8192;
  EXPECT_EQ(choose(p, {}).family, Family::sm90);
  EXPECT_TRUE(plan_forward(p, {}).kernel.varlen);
  p.total_kv = (std::int64_t{1} << 30) + 1;  // rows that bounded maps cannot number
  EXPECT_EQ(choose(p, {}).family, Family::sm80);
  p.varlen = false;
  for (const int page_size : {-1, 1 << 30}) {
    p.page_size = page_size;
    p.s_kv = std::int64_t{1} << 30;
    EXPECT_EQ(choose(p, {}).family, Family::sm90);
    p.s_kv += 8;
    if (page_size > 0) p.page_size += 8;
    EXPECT_EQ(choose(p, {}).family, Family::sm80);
  }
  p.page_size = 0;
  p.s_kv = 4096;
  p.positive_scale = false;
  Variants variants;
  variants.mask = "q>kv";
  p.variants = &variants;
  EXPECT_EQ(plan_forward(p, {}).kernel.family(), Family::sm90);
  EXPECT_EQ(plan_forward(p, {}).kernel.variants, variants);
  EXPECT_FALSE(plan_forward(p, {}).kernel.positive_scale);
  variants.score = "score+1.0";
  EXPECT_FALSE(plan_forward(p, {}).kernel.positive_scale);  // what an affine one is left to the softmax for
  EXPECT_TRUE(plan_forward(p, {Family::sm80}).kernel.positive_scale) << "a function sees scaled scores";
}

/// The longest sequence decides on tiles, and where it is not known twice the mean; nothing is split.
TEST(Choice, PackedBatchesArePlannedByTheirLengths) {
  Problem p = shaped(64, 8, 2, 20, 64 * 4096);
  p.varlen = true;
  p.total_q = 64 * 16;
  p.total_kv = 64 * 4096;
  EXPECT_TRUE(choose(p, {}).pack_gqa);
  p.s_q = 500;  // longer than twice the mean: that it may be
  EXPECT_TRUE(choose(p, {}).pack_gqa);
  p.s_q = p.total_q = 64 * 512;
  EXPECT_FALSE(choose(p, {}).pack_gqa);
  p.b = 1;
  p.h_q = p.h_kv = 1;
  p.s_q = p.total_q = 1;
  EXPECT_EQ(choose(p, {}).splits, 1);
  EXPECT_EQ(choose(p, {{"splits", 4}}).splits, 1);
}

TEST(Choice, HopperPacksWholeGroups) {
  const Fixed sm90{Family::sm90};
  for (const std::int64_t group : {2, 8, 64}) {
    EXPECT_EQ(choose(shaped(1, 2 * group, 2, 1, 4096), {}).family, Family::sm90) << group;
    EXPECT_TRUE(choose(shaped(1, 2 * group, 2, 1, 4096), {}).pack_gqa) << group;
  }
  for (const std::int64_t group : {3, 7, 65}) {
    EXPECT_EQ(choose(shaped(1, 2 * group, 2, 1, 4096), {}).family, Family::sm80) << group;
    EXPECT_TRUE(choose(shaped(1, 2 * group, 2, 1, 4096), {}).pack_gqa) << group;
    EXPECT_EQ(choose(shaped(1, 2 * group, 2, 1, 4096), sm90).family, Family::sm90) << group;
    EXPECT_FALSE(choose(shaped(1, 2 * group, 2, 1, 4096), sm90).pack_gqa) << group;
    EXPECT_EQ(choose(shaped(1, 2 * group, 2, 4096, 4096), {}).family, Family::sm90) << "nothing is packed";
  }
}

TEST(ForwardPlan, RefusesAFamilyThatTheGpuOrDtypeCannotHave) {
  Problem problem = shaped(1, 8, 8, 4096, 4096);
  problem.dtype = DType::f32;
  EXPECT_THROW(plan_forward(problem, {Family::sm90}), Error);
  problem.dtype = DType::bf16;
  problem.arch = parse_arch("sm_100a");
  try {
    plan_forward(problem, {Family::sm90});
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_EQ(error.field("argument"), "kernel.kernel");
  }
}

TEST(ForwardPlan, CombinesWhatItSplits) {
  const Problem decode = shaped(1, 32, 8, 1, 32768);
  const ForwardPlan plan = plan_forward(decode, {});
  EXPECT_TRUE(plan.kernel.split);
  EXPECT_EQ(plan.combine.op(), Op::combine);
  EXPECT_EQ(plan.combine.arch, decode.arch);
  EXPECT_EQ(plan.combine.dtype, decode.dtype);
  EXPECT_EQ(plan.combine.d_v, decode.d_v);
  EXPECT_EQ(kernel_name(plan.combine), "fa_forward_combine");
  EXPECT_EQ(shared_bytes(plan.combine), 0);
}

TEST(ForwardPlan, AlternativesServeTheSameCalls) {
  std::mt19937 random(5);
  for (int i = 0; i < 500; ++i) {
    Problem problem;
    fix_config(random, problem);
    set_call(random, problem);
    const ForwardPlan plan = plan_forward(problem, {});
    std::set<std::string> texts{canonical(plan.kernel)};
    for (const KernelSpec& spec : plan.alternatives) {
      EXPECT_TRUE(texts.insert(canonical(spec)).second) << "twice: " << canonical(spec);
      EXPECT_EQ(spec.arch, plan.kernel.arch);
      EXPECT_EQ(spec.dtype, plan.kernel.dtype);
      EXPECT_EQ(spec.d_qk, plan.kernel.d_qk);
      EXPECT_EQ(spec.d_v, plan.kernel.d_v);
      EXPECT_EQ(spec.causal, plan.kernel.causal);
      EXPECT_EQ(spec.positive_scale, plan.kernel.positive_scale);
      EXPECT_EQ(spec.aligned, plan.kernel.aligned);
      EXPECT_EQ(spec.pack_gqa, plan.kernel.pack_gqa);
      EXPECT_EQ(spec.split, plan.kernel.split);
    }
    ASSERT_FALSE(HasFailure());
  }
}

TEST(ForwardPlan, DoesNotDependOnLengthsBeyondTheChoice) {
  EXPECT_EQ(plan_forward(shaped(4, 16, 16, 4096, 4096), {}).kernel,
            plan_forward(shaped(9, 32, 32, 1 << 20, 77), {}).kernel);
}

TEST(Workspace, HoldsOutputAndLogSumExpOfEverySplit) {
  Problem problem = shaped(2, 6, 3, 5, 4096);
  problem.d_v = 40;
  const auto layout = [&problem](int splits) { return forward_workspace(problem, {.splits = splits}, ForwardNeeds{}); };
  EXPECT_EQ(layout(1).bytes(), 0U);
  EXPECT_EQ(layout(0).bytes(), 0U);
  const std::size_t rows = 2 * 6 * 5;
  for (const std::size_t splits : {2U, 3U, 64U}) {
    const std::size_t partial_o = splits * rows * 40 * sizeof(float);
    const std::size_t partial_lse = splits * rows * 3 * sizeof(float);
    EXPECT_EQ(layout(static_cast<int>(splits)).bytes(Section::partial_o), partial_o);
    EXPECT_EQ(layout(static_cast<int>(splits)).bytes(Section::partial_lse), partial_lse);
    EXPECT_EQ(layout(static_cast<int>(splits)).bytes(), partial_o + partial_lse);
    const WorkspaceLayout listed = forward_workspace(problem, {.splits = static_cast<int>(splits)}, {.lists = 512});
    EXPECT_EQ(listed.offset(Section::tile_lists), (partial_o + partial_lse + 255) / 256 * 256);
    EXPECT_EQ(listed.other_bytes(), listed.offset(Section::tile_lists));
    EXPECT_EQ(listed.bytes(), listed.other_bytes() + 512);
  }
}

TEST(Workspace, CountsIn64Bits) {
  const Problem problem = shaped(64, 64, 64, 1 << 20, 4096);
  EXPECT_EQ(forward_workspace(problem, {.splits = 4}, ForwardNeeds{}).bytes(),
            (std::size_t{4} << 32) * 131 * sizeof(float));
}

TEST(Workspace, ShapesWithoutRowsNeedNone) {
  for (const Problem& problem : {shaped(0, 8, 8, 1, 4096), shaped(1, 8, 8, 0, 4096)}) {
    EXPECT_EQ(forward_workspace(problem, {.splits = 4}, ForwardNeeds{}).bytes(), 0U);
    EXPECT_EQ(forward_workspace_size(problem, {{"splits", 4}}, 132).bytes, 0U);
  }
}

// Measured with exact maxima: more warpgroups are faster up to a head dim of 64. The entropy takes registers of the
// fourth.
TEST(Planner, StatisticsOfManyRowsHaveTilesOfTheirOwn) {
  struct Case {
    int d;
    MaxLogit max_logit;
    bool entropy;
    int tile_m;
  };
  for (const auto& [d, max_logit, entropy, tile_m] :
       {Case{64, MaxLogit::softmax, false, 256}, Case{64, MaxLogit::softmax, true, 192},
        Case{64, MaxLogit::none, true, 256}, Case{128, MaxLogit::softmax, false, 128},
        Case{128, MaxLogit::softmax, true, 128}, Case{128, MaxLogit::none, true, 192}}) {
    Problem problem = shaped(1, 64, 64, 4096, 4096);
    problem.d_qk = problem.d_v = d;
    problem.statistics.max_logit = max_logit;
    problem.statistics.entropy = entropy;
    const KernelSpec spec = plan_forward(problem, {}).kernel;
    EXPECT_EQ(spec.family(), Family::sm90);
    EXPECT_EQ(spec.tile_m, tile_m) << d << (max_logit != MaxLogit::none ? ", max_logit" : "")
                                   << (entropy ? ", entropy" : "");
  }
}

TEST(Planner, EntropyAloneIsOfOffsetsThatTrailTheMaxima) {
  Problem problem = shaped(1, 64, 64, 4096, 4096);
  problem.d_qk = problem.d_v = 64;
  problem.statistics.entropy = true;
  const Fixed exact{Family::sm90, {{"exact_max", true}}};
  const Fixed trailing{Family::sm90, {{"exact_max", false}}};
  EXPECT_TRUE(plan_forward(problem, exact).kernel.as<Sm90Forward>().exact_max);
  const KernelSpec spec = plan_forward(problem, {}).kernel;
  EXPECT_FALSE(spec.as<Sm90Forward>().exact_max);
  EXPECT_TRUE(spec.entropy);
  problem.statistics.max_logit = MaxLogit::softmax;
  EXPECT_TRUE(plan_forward(problem, {}).kernel.as<Sm90Forward>().exact_max);
  EXPECT_THROW(plan_forward(problem, trailing), Error);
}

// A block has the rows of statistics alone, and on Hopper knows their maxima.
TEST(Planner, StatisticsOfRowsAreOfWholeRows) {
  Problem problem = shaped(1, 8, 8, 1, 65536);
  EXPECT_GT(choose(problem, {}).splits, 1);
  problem.statistics.entropy = true;
  EXPECT_EQ(choose(problem, {}).splits, 1);
  KernelSpec spec = plan_forward(problem, {}).kernel;
  EXPECT_EQ(spec.family(), Family::sm90);
  EXPECT_FALSE(spec.as<Sm90Forward>().exact_max);
  EXPECT_TRUE(spec.entropy);
  EXPECT_EQ(spec.max_logit, 0);

  Variants softcap;
  softcap.score = "tanh(score)";
  problem.variants = &softcap;
  problem.statistics = {MaxLogit::scaled, true, false, ColumnSums::none};
  spec = plan_forward(problem, {}).kernel;
  EXPECT_EQ(spec.family(), Family::sm80);
  EXPECT_EQ(spec.max_logit, 2);
  EXPECT_TRUE(spec.max_logit_by_head);
  problem.variants = nullptr;  // then the softmax takes the scaled scores
  EXPECT_EQ(plan_forward(problem, {}).kernel.max_logit, 1);

  problem.page_size = 16;
  EXPECT_FALSE(choose(problem, {}).scheduled || choose(problem, {}).own_parts);
  EXPECT_EQ(choose(problem, {}).family, Family::sm80);
  problem.statistics = {};
  EXPECT_TRUE(choose(problem, {}).splits_request);
  problem.page_size = 0;
  problem.statistics = {MaxLogit::none, false, false, ColumnSums::kv_heads};  // a pass of its own
  EXPECT_GT(choose(problem, {}).splits, 1);
  EXPECT_EQ(plan_forward(problem, {}).top_keys.warps, 0);
  problem.statistics = {};
  problem.statistics.top_keys = 3;
  const ForwardPlan plan = plan_forward(problem, {});
  EXPECT_EQ(kernel_name(plan.top_keys), "fa_top_keys");
  EXPECT_EQ(kernel_name(plan.sums), "fa_column_sums");
  const std::vector<Alternatives> kernels = kernels_of(plan);
  EXPECT_NE(std::ranges::find(kernels, Alternatives{plan.top_keys}), kernels.end());
}

}  // namespace
}  // namespace fa::plan
