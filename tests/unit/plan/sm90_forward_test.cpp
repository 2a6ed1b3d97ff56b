#include "plan/sm90_forward.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <fa/error.hpp>
#include <fa/paged.hpp>
#include <span>
#include <string>
#include <vector>

#include "plan/candidates.hpp"
#include "plan/early_start.hpp"
#include "plan/planner.hpp"
#include "plan/schedule.hpp"
#include "plan/tensor_map.hpp"
#include "plan/workspace.hpp"

namespace fa::plan {
namespace {

Problem problem_of(int d_qk, int d_v, bool causal, std::int64_t s_q) {
  Problem problem;
  problem.arch = parse_arch("sm_90a");
  problem.d_qk = d_qk;
  problem.d_v = d_v;
  problem.causal = causal;
  problem.b = 4;
  problem.h_q = problem.h_kv = 16;
  problem.s_q = s_q;
  problem.s_kv = 4096;
  return problem;
}

/// The register file holds what setmaxnreg asks for, and a consumer's share its fragments and the loop's own state.
void expect_fits(const KernelSpec& spec) {
  SCOPED_TRACE(canonical(spec));
  EXPECT_EQ(sm90_forward_refusal(spec), "");
  EXPECT_EQ(spec.family(), Family::sm90);
  EXPECT_LE(shared_bytes(spec), limits(spec.arch).shared_per_block);
  const int warpgroups = spec.tile_m / 64;
  EXPECT_EQ(spec.threads(), (warpgroups + 1) * 128);
  constexpr int kRegisters[] = {255, 232, 160, 112}, kRegistersOfTwo = 216;
  EXPECT_LE(sm90_forward_registers(spec) + 24, spec.min_blocks == 2 ? kRegistersOfTwo : kRegisters[warpgroups - 1]);
  EXPECT_LE(spec.min_blocks * (shared_bytes(spec) + 1024), limits(spec.arch).shared_per_sm);
  // Before setmaxnreg each of 512 threads has 128 registers, in which ptxas fits 96 of S or O and what a wgmma reads.
  EXPECT_TRUE(spec.min_blocks * spec.threads() < 512 || std::max(spec.tile_n, spec.d_v) <= 192);
  const int d = std::max(spec.d_qk, spec.d_v);
  const bool drifts = warpgroups == 4 && spec.as<Sm90Forward>().skips_hidden && spec.as<Sm90Forward>().q_buffers == 2;
  EXPECT_EQ(spec.as<Sm90Forward>().take_turns,
            warpgroups > 1 && !drifts && (spec.causal || d <= 64 || d > 128 || warpgroups > 2));
}

/// Whether planning throws invalid_argument and names `override`.
bool refuses(const Problem& problem, const Fixed& fixed, const char* override) {
  try {
    (void)plan_forward(problem, fixed);
  } catch (const Error& error) {
    return error.code() == ErrorCode::invalid_argument && std::string(error.what()).find(override) != std::string::npos;
  }
  return false;
}

TEST(Sm90ForwardPlan, EveryHeadDimHasAKernelThatFits) {
  for (int d_qk = 8; d_qk <= 256; d_qk += 8) {
    for (int d_v = 8; d_v <= 256; d_v += 8) {
      for (const bool causal : {false, true}) {
        for (const std::int64_t s_q : {1, 4096}) {
          const ForwardPlan plan = plan_forward(problem_of(d_qk, d_v, causal, s_q), {});
          expect_fits(plan.kernel);
          for (const KernelSpec& spec : plan.alternatives) {
            expect_fits(spec);
            EXPECT_TRUE(!spec.pack_gqa || spec.tile_m == plan.kernel.tile_m) << "a group divides one tile only";
          }
          EXPECT_FALSE(plan.alternatives.empty());
          ASSERT_FALSE(HasFailure());
        }
      }
    }
  }
}

TEST(Sm90ForwardPlan, SkipsWhatIsHiddenWhereDiagonalTilesAreMany) {
  const auto plan_of = [](std::int64_t s, bool causal) {
    Problem problem = problem_of(64, 64, causal, s);
    problem.b = 8;
    problem.s_kv = s;
    return plan_forward(problem, {});
  };
  EXPECT_TRUE(plan_of(512, true).kernel.as<Sm90Forward>().skips_hidden);
  EXPECT_TRUE(plan_of(2048, true).kernel.as<Sm90Forward>().skips_hidden);
  EXPECT_FALSE(plan_of(4096, true).kernel.as<Sm90Forward>().skips_hidden);
  EXPECT_FALSE(plan_of(512, false).kernel.as<Sm90Forward>().skips_hidden);
  // A store that holds kernels for long sequences alone serves short ones too.
  const auto differ_in_it = [](KernelSpec spec) {
    spec.as<Sm90Forward>().skips_hidden = !spec.as<Sm90Forward>().skips_hidden;
    spec.as<Sm90Forward>().take_turns = !spec.as<Sm90Forward>().skips_hidden;
    spec.as<Sm90Forward>().softmax_chunks = spec.as<Sm90Forward>().skips_hidden ? 2 : 1;
    return spec;
  };
  for (const std::int64_t s : {512, 8192}) {
    const ForwardPlan plan = plan_of(s, true);
    EXPECT_EQ(std::ranges::count(plan.alternatives, differ_in_it(plan.kernel)), 1) << s;
  }
}

// Where K and V of many heads exceed the L2 cache, and tiles differ in length.
TEST(Sm90ForwardPlan, TakesLongCausalTilesFromACounter) {
  const auto plan_of = [](int d, std::int64_t s, bool causal, std::int64_t b = 4) {
    Problem problem = problem_of(d, d, causal, s);
    problem.s_kv = s;
    problem.b = b;
    return plan_forward(problem, {});
  };
  EXPECT_FALSE(plan_of(160, 1280, true).kernel.dynamic()) << "448 tiles, 4 rounds of 132";
  EXPECT_TRUE(plan_of(160, 1280, true, 12).kernel.dynamic()) << "1344 tiles, 11 rounds";
  EXPECT_FALSE(plan_of(160, 1280, false, 12).kernel.dynamic());
  EXPECT_FALSE(plan_of(160, 1024, true, 16).kernel.dynamic()) << "1536 tiles, 12 rounds";
  EXPECT_TRUE(plan_of(128, 4096, true).kernel.dynamic());
  EXPECT_FALSE(plan_of(128, 4096, false).kernel.dynamic());
  EXPECT_FALSE(plan_of(64, 4096, true).kernel.dynamic());
  EXPECT_TRUE(plan_of(64, 8192, true).kernel.dynamic());
  EXPECT_TRUE(plan_of(256, 2048, true).kernel.dynamic());
  const ForwardPlan plan = plan_of(64, 8192, true);
  KernelSpec fixed = plan.kernel;
  fixed.as<Sm90Forward>().dynamic = false;
  EXPECT_EQ(std::ranges::count(plan.alternatives, fixed), 1) << "a store may hold that of short sequences";
  Problem problem = problem_of(128, 128, true, 4096);
  problem.h_kv = 4;  // whose K and V four query heads share
  EXPECT_FALSE(plan_forward(problem, {}).kernel.dynamic());
  problem.h_kv = 16;
  problem.dropout = true;
  EXPECT_FALSE(plan_forward(problem, {}).kernel.dynamic());
}

TEST(Sm90ForwardPlan, WarpgroupsEndAtTheirOwnRowsWhereTilesAreShorter) {
  KernelSpec spec = plan_forward(problem_of(64, 64, true, 4096), {}).kernel;
  EXPECT_TRUE(spec.as<Sm90Forward>().own_ends);
  EXPECT_TRUE(plan_forward(problem_of(64, 64, false, 4096), {}).kernel.as<Sm90Forward>().own_ends)
      << "where a tile's rows end";
  EXPECT_FALSE(plan_forward(problem_of(256, 256, false, 4096), {}).kernel.as<Sm90Forward>().own_ends)
      << "two warpgroups";
  EXPECT_FALSE(plan_forward(problem_of(128, 128, true, 400), {}).kernel.as<Sm90Forward>().own_ends)
      << "128 x 128: all end together";
  spec.as<Sm90Forward>().take_turns = false;
  EXPECT_EQ(sm90_forward_refusal(spec), "");
  spec.as<Sm90Forward>().q_buffers = 1;
  EXPECT_NE(sm90_forward_refusal(spec), "") << "rows are exchanged from Q buffer to Q buffer";
  spec.as<Sm90Forward>().q_buffers = 2;
  spec.tile_m = 192;
  EXPECT_NE(sm90_forward_refusal(spec), "") << "three take turns";
  spec.as<Sm90Forward>().take_turns = true;
  EXPECT_EQ(sm90_forward_refusal(spec), "");
  spec.causal = false;
  EXPECT_EQ(sm90_forward_refusal(spec), "");
  spec.tile_m = 128;
  EXPECT_NE(sm90_forward_refusal(spec), "");
}

TEST(Sm90ForwardPlan, KeysOutOfReachAreLeftOutOfLongRows) {
  Variants alibi;
  alibi.score = "score-a[h]*abs(float(q-kv))";
  alibi.affine = true;
  Problem problem = problem_of(128, 128, false, 4096);
  problem.variants = &alibi;
  const ForwardPlan plan = plan_forward(problem, {});
  EXPECT_TRUE(plan.kernel.affine_reach());
  EXPECT_TRUE(plan.kernel.dynamic()) << "heads differ in what they reach";
  EXPECT_EQ(kernels_of(plan).back(), Alternatives{row_norms_spec(plan.kernel)});
  const auto reaches = [](const Problem& p, const Fixed& fixed = {}) {
    const KernelSpec kernel = plan_forward(p, fixed).kernel;
    EXPECT_EQ(kernel.affine_reach(), choose(p, fixed).affine_reach);
    EXPECT_TRUE(!kernel.affine_reach() || kernel.dynamic());
    return kernel.affine_reach();
  };
  EXPECT_FALSE(reaches(problem, {{"affine_reach", false}}));
  Problem other = problem;
  other.s_q = other.s_kv = 1024;
  EXPECT_FALSE(reaches(other)) << "a pass over q and k takes longer than what it saves";
  EXPECT_TRUE(reaches(other, {{"affine_reach", true}}));
  other = problem;
  other.s_q = 16;
  other.b = other.h_q = other.h_kv = 1;
  EXPECT_FALSE(reaches(other, {{"affine_reach", true}})) << "of splits of the keys";
  const auto refused = [](const Problem& p) {
    EXPECT_FALSE(plan_forward(p, {}).kernel.affine_reach());
    return refuses(p, {{"affine_reach", true}}, "affine_reach = true");
  };
  Variants changed = alibi;
  other = problem;
  other.variants = &changed;
  for (bool Variants::*const field : {&Variants::left_window, &Variants::chunked}) {
    changed.*field = true;
    EXPECT_TRUE(refused(other));
    changed.*field = false;
  }
  changed.mask = "kv>3";
  EXPECT_TRUE(refused(other));
  changed = alibi;
  changed.affine = false;
  EXPECT_TRUE(refused(other));
  for (bool Problem::*const field : std::initializer_list<bool Problem::*>{&Problem::dropout, &Problem::varlen}) {
    other = problem;
    other.*field = true;
    if (other.varlen) other.total_q = other.total_kv = 4096;
    EXPECT_TRUE(refused(other));
  }
  other = problem;
  other.positive_scale = false;
  EXPECT_TRUE(refused(other));
}

TEST(Sm90ForwardPlan, NormsHaveAPlaceForEveryHead) {
  Variants alibi;
  alibi.score = "score-a[h]*abs(float(q-kv))";
  alibi.affine = true;
  Problem problem = problem_of(128, 128, true, 4096);
  problem.b = 3;
  problem.h_q = 6;
  problem.h_kv = 2;
  const auto expect_counters = [&problem](std::size_t bytes) {
    const WorkspaceLayout layout = forward_workspace(problem, choose(problem, {}), {.counters = bytes != 0});
    EXPECT_EQ(layout.bytes(Section::counters), bytes);
    EXPECT_EQ(forward_workspace_size(problem, {}, 132).bytes, bytes);
  };
  expect_counters(kCounterBytes);
  problem.variants = &alibi;
  expect_counters(kCounterBytes + 3 * (6 + 2) * 4);
  problem.causal = false;
  expect_counters(kCounterBytes + 3 * (6 + 2) * 4);
  problem.variants = nullptr;
  expect_counters(0);
  // 128 rows of 256 bytes are what a block of 256 threads loads, 8 times 16 bytes each.
  problem.s_q = 129;
  const KernelSpec norms = row_norms_spec(plan_forward(problem, {}).kernel);
  EXPECT_EQ(row_norms_blocks(problem, norms), 3 * (2 * 6 + 32 * 2));
}

TEST(Sm90ForwardPlan, TheProductAddsAffineScoreFunctionsWhereItPays) {
  Variants alibi;
  alibi.score = "score+a[h]*float(kv)";
  alibi.affine = true;
  const auto plan_of = [](int d, const Variants& variants, const Fixed& fixed) {
    Problem problem = problem_of(d, d, false, 4096);
    problem.variants = &variants;
    return plan_forward(problem, fixed).kernel;
  };
  EXPECT_TRUE(plan_of(128, alibi, {}).as<Sm90Forward>().affine_product);
  EXPECT_FALSE(plan_of(64, alibi, {}).as<Sm90Forward>().affine_product);
  EXPECT_TRUE(plan_of(64, alibi, {{"affine_product", true}}).as<Sm90Forward>().affine_product);
  const KernelSpec without = plan_of(128, alibi, {{"affine_product", false}});
  EXPECT_FALSE(without.as<Sm90Forward>().affine_product);
  KernelSpec with = without;
  with.as<Sm90Forward>().affine_product = true;
  EXPECT_EQ(sm90_forward_shared_bytes(with), sm90_forward_shared_bytes(without) + 32 * with.tile_n);
  Variants other = alibi;
  other.affine = false;
  EXPECT_FALSE(plan_of(128, other, {}).as<Sm90Forward>().affine_product);
  Problem dropped = problem_of(128, 128, false, 4096);
  dropped.variants = &alibi;
  dropped.dropout = true;
  EXPECT_FALSE(plan_forward(dropped, {}).kernel.as<Sm90Forward>().affine_product) << "its operands spill";
  EXPECT_THROW((void)plan_of(128, other, {{"affine_product", true}}), Error);
  with.positive_scale = false;
  EXPECT_NE(sm90_forward_refusal(with), "");
}

TEST(Sm90ForwardPlan, RefusesToSkipWhatIsNotHiddenByCausalityAlone) {
  KernelSpec spec = plan_forward(problem_of(64, 64, true, 4096), {}).kernel;
  spec.as<Sm90Forward>().skips_hidden = true;
  EXPECT_EQ(sm90_forward_refusal(spec), "");
  spec.causal = false;
  EXPECT_NE(sm90_forward_refusal(spec), "");
  spec.causal = true;
  spec.dropout = true;
  EXPECT_NE(sm90_forward_refusal(spec), "");
}

TEST(Sm90ForwardPlan, TakesTheMeasuredTiles) {
  struct Row {
    int d_qk, d_v;
    bool causal;
    int tile_m, tile_n, stages, q_buffers;
  };
  constexpr Row kRows[] = {
      {64, 64, true, 256, 64, 6, 2},    {64, 64, false, 256, 64, 6, 2},   {128, 128, false, 192, 80, 3, 2},
      {128, 128, true, 192, 80, 3, 2},  {192, 128, true, 128, 128, 2, 1}, {192, 192, true, 128, 96, 2, 1},
      {256, 256, false, 128, 64, 2, 1}, {256, 256, true, 128, 64, 2, 1},  {72, 72, false, 256, 64, 3, 2},
      {72, 72, true, 256, 64, 3, 2},    {80, 80, false, 192, 112, 2, 2},  {96, 96, false, 192, 96, 2, 2},
      {112, 112, true, 192, 96, 2, 2},  {120, 120, true, 192, 80, 3, 2},  {160, 160, false, 192, 64, 3, 1},
      {160, 160, true, 192, 64, 3, 1},  {168, 168, true, 128, 96, 2, 1}};
  for (const Row& row : kRows) {
    const KernelSpec spec = plan_forward(problem_of(row.d_qk, row.d_v, row.causal, 4096), {}).kernel;
    SCOPED_TRACE(canonical(spec));
    EXPECT_EQ(spec.tile_m, row.tile_m);
    EXPECT_EQ(spec.tile_n, row.tile_n);
    EXPECT_EQ(spec.stages, row.stages);
    EXPECT_EQ(spec.as<Sm90Forward>().q_buffers, row.q_buffers);
    EXPECT_FALSE(spec.split);
  }
  EXPECT_EQ(plan_forward(problem_of(128, 128, false, 64), {}).kernel.tile_m, 64);
  EXPECT_EQ(plan_forward(problem_of(128, 128, false, 65), {}).kernel.tile_m, 128);
}

// Where they waste few rows and there is one for each multiprocessor.
TEST(Sm90ForwardPlan, TakesTallTilesWhereThereAreManyRows) {
  const auto tile_of = [](int d, bool causal, std::int64_t b, std::int64_t s) {
    Problem problem = problem_of(d, d, causal, s);
    problem.b = b;
    problem.s_kv = s;
    return plan_forward(problem, {}).kernel.tile_m;
  };
  EXPECT_EQ(tile_of(64, true, 4, 512), 192) << "128 tiles of 256 rows";
  EXPECT_EQ(tile_of(64, true, 5, 512), 256);
  EXPECT_EQ(tile_of(64, false, 9, 129), 256);
  EXPECT_EQ(tile_of(64, false, 9, 128), 192);
  EXPECT_EQ(tile_of(160, false, 4, 767), 128);
  EXPECT_EQ(tile_of(160, false, 4, 768), 192);
  EXPECT_EQ(tile_of(160, false, 1, 1536), 128) << "128 tiles of 192 rows";
  EXPECT_EQ(tile_of(160, true, 8, 447), 128);
  EXPECT_EQ(tile_of(160, true, 8, 448), 192);
  EXPECT_EQ(tile_of(128, true, 8, 1535), 128) << "exact maxima";
  EXPECT_EQ(tile_of(128, true, 8, 1536), 192);
  EXPECT_EQ(tile_of(192, false, 4, 4096), 128);
  Fixed fixed;
  fixed.set("tile_m", 192);
  EXPECT_EQ(plan_forward(problem_of(64, 64, true, 4096), fixed).kernel.tile_n, 128) << "of the tiles of 192 rows";
}

TEST(Sm90ForwardPlan, ShortCausalRowsHaveShorterKvTiles) {
  const Fixed trailing{{"exact_max", false}};
  const auto tile_of = [](int d, std::int64_t s, const Fixed& fixed = {}) {
    return plan_forward(problem_of(d, d, true, s), fixed).kernel.tile_n;
  };
  EXPECT_EQ(tile_of(96, 1535), 64);
  EXPECT_EQ(tile_of(96, 1536), 96);
  EXPECT_EQ(tile_of(128, 1024, trailing), 64);
  EXPECT_EQ(tile_of(128, 1535, trailing), 64);
  EXPECT_EQ(tile_of(128, 1536, trailing), 80);
  const ForwardPlan plan = plan_forward(problem_of(128, 128, true, 1024), trailing);
  const auto is_long = [](const KernelSpec& spec) { return spec.tile_m == 192 && spec.tile_n == 80; };
  EXPECT_TRUE(std::ranges::any_of(plan.alternatives, is_long)) << "a store may hold that of long rows";
}

TEST(Sm90ForwardPlan, ScoreFunctionsWithoutCapturesTakeTallTilesOfLongRows) {
  Variants softcap;
  softcap.score = "30 * tanh(score / 30)";
  Variants bias;
  bias.score = "score + bias[q]";
  bias.captures.emplace_back();
  const auto tile_of = [](const Variants& variants, int d, std::int64_t s) {
    Problem problem = problem_of(d, d, true, s);
    problem.variants = &variants;
    return plan_forward(problem, {}).kernel.tile_m;
  };
  EXPECT_EQ(tile_of(softcap, 128, 4096), 192);
  EXPECT_EQ(tile_of(softcap, 128, 1024), 128);
  EXPECT_EQ(tile_of(softcap, 64, 4096), 256);
  EXPECT_EQ(tile_of(softcap, 160, 4096), 128);
  EXPECT_EQ(tile_of(bias, 128, 4096), 128);
  Variants distance;
  distance.score = "score - 0.1 * abs(float(q - kv))";
  distance.affine = true;
  EXPECT_EQ(tile_of(distance, 128, 4096), 128) << "a step of the product, for which there are no registers";
}

TEST(Sm90ForwardPlan, TheSoftmaxOfShortKvTilesIsInOnePiece) {
  const auto pieces_of = [](int d, bool causal, std::int64_t s) {
    return plan_forward(problem_of(d, d, causal, s), {}).kernel.as<Sm90Forward>().softmax_chunks;
  };
  EXPECT_EQ(pieces_of(64, false, 4096), 1);
  EXPECT_EQ(pieces_of(128, false, 4096), 1) << "192 x 80";
  EXPECT_EQ(pieces_of(128, true, 4096), 2);
  EXPECT_EQ(pieces_of(128, false, 512), 1) << "exact maxima";
  EXPECT_EQ(pieces_of(160, true, 200), 2) << "128 x 96";
  EXPECT_EQ(pieces_of(96, false, 4096), 2) << "192 x 96";
  EXPECT_EQ(pieces_of(160, true, 4096), 1) << "192 x 64";
  EXPECT_EQ(pieces_of(256, false, 4096), 1);
  EXPECT_EQ(pieces_of(256, true, 4096), 2);
  EXPECT_EQ(pieces_of(256, false, 64), 2) << "one warpgroup";
}

TEST(Sm90ForwardPlan, RowsThatAreNotLongHaveExactMaxima) {
  const auto is_exact = [](int d_qk, int d_v, std::int64_t s, const Fixed& fixed = {}) {
    const KernelSpec spec = plan_forward(problem_of(d_qk, d_v, true, s), fixed).kernel;
    EXPECT_EQ(sm90_forward_refusal(spec), "");
    return spec.as<Sm90Forward>().exact_max;
  };
  EXPECT_TRUE(is_exact(128, 128, 1));
  EXPECT_TRUE(is_exact(128, 128, 1535));
  EXPECT_FALSE(is_exact(128, 128, 1536));
  EXPECT_TRUE(is_exact(64, 112, 512));
  EXPECT_FALSE(is_exact(104, 104, 512));
  EXPECT_FALSE(is_exact(64, 64, 512));
  EXPECT_FALSE(is_exact(192, 128, 512));
  EXPECT_TRUE(is_exact(128, 128, 4096, {{"exact_max", true}}));
  EXPECT_TRUE(is_exact(64, 64, 4096, {{"exact_max", true}}));
  EXPECT_TRUE(is_exact(256, 256, 4096, {{"exact_max", true}}));
  EXPECT_FALSE(is_exact(128, 128, 512, {{"exact_max", false}}));
  // A store that holds kernels for long rows alone serves others too, and the other way round.
  for (const std::int64_t s : {512, 4096}) {
    const ForwardPlan plan = plan_forward(problem_of(128, 128, true, s), {});
    const KernelSpec other = plan_forward(problem_of(128, 128, true, s == 512 ? 4096 : 512), {}).kernel;
    EXPECT_NE(std::ranges::find(plan.alternatives, other), plan.alternatives.end()) << s;
  }
}

/// What a box of a page cannot say, and what pages alone limit, is left to the other family.
TEST(Sm90ForwardPlan, TheCopyEngineBringsWholeBoxesOfPages) {
  Problem pages = problem_of(128, 128, true, 4096);
  pages.page_size = 16;
  EXPECT_EQ(choose(pages, {}).family, Family::sm90);
  EXPECT_FALSE(choose(pages, {}).scheduled);
  EXPECT_EQ(plan_forward(pages, {}).kernel.page_size, 16);
  const auto falls_back = [&](auto change) {
    Problem other = pages;
    change(other);
    const Choice choice = choose(other, {});
    return choice.family == Family::sm80 && !choice.splits_request;
  };
  Variants window, chunks;
  window.left_window = chunks.chunked = true;
  EXPECT_TRUE(falls_back([](Problem& p) { p.page_size = 12; }));
  EXPECT_TRUE(falls_back([](Problem& p) { p.tensor_maps = false; }));
  EXPECT_TRUE(falls_back([&](Problem& p) {
    p.variants = &chunks;
    p.chunk = 1024;
  }));
  pages.page_size = 1024;
  EXPECT_TRUE(falls_back([&](Problem& p) {
    p.variants = &window;
    p.window_left = 1023;
  }));
  pages.variants = &window;
  pages.window_left = 1024;
  EXPECT_EQ(choose(pages, {}).family, Family::sm90);
}

/// Of few rows over pages blocks share the keys.
TEST(Sm90ForwardPlan, PrefillsOverPagesCopyAllColumns) {
  const auto is_wide = [](const Problem& problem) {
    return plan_forward(problem, {}).kernel.as<Sm90Forward>().wide_boxes;
  };
  for (const int d : {64, 96, 128, 192, 256}) {
    for (const int page_size : {8, 16, 40, 64}) {
      Problem problem = problem_of(d, d, true, 4096);
      problem.page_size = page_size;
      EXPECT_EQ(is_wide(problem), d == 128) << d << ", " << page_size;
      EXPECT_EQ(refuses(problem, {{"wide_boxes", 1}}, "wide_boxes = true"), d == 96);
    }
  }
  Problem problem = problem_of(128, 128, true, 4096);
  EXPECT_FALSE(is_wide(problem));
  problem.page_size = static_cast<int>(kContiguous);
  EXPECT_FALSE(is_wide(problem));
  problem.page_size = 16;
  problem.s_q = 1;
  EXPECT_FALSE(is_wide(problem));
  EXPECT_TRUE(plan_forward(problem, {{"wide_boxes", 1}}).kernel.as<Sm90Forward>().wide_boxes);
  problem.s_q = 4096;
  EXPECT_FALSE(plan_forward(problem, {{"wide_boxes", 0}}).kernel.as<Sm90Forward>().wide_boxes);
  Variants variants;
  problem.variants = &variants;
  variants.left_window = true;
  problem.window_left = 100;
  EXPECT_FALSE(is_wide(problem)) << "whose first key may be amid a box";
  EXPECT_TRUE(refuses(problem, {{"wide_boxes", 1}}, "wide_boxes = true"));
  problem.variants = nullptr;
  problem.d_qk = 72;
  EXPECT_TRUE(refuses(problem, {{"wide_boxes", 1}}, "wide_boxes = true"));
}

TEST(Sm90ForwardPlan, FewRowsOverPagesTakeParts) {
  const Fixed sm90{Family::sm90};
  Problem pages = problem_of(128, 128, true, 8192);
  pages.s_q = 1;
  pages.b = 4;
  pages.page_size = 16;
  EXPECT_EQ(choose(pages, {}).family, Family::sm90);
  const auto spec_of = [&](const Fixed& fixed) { return plan_forward(pages, fixed).kernel; };
  EXPECT_TRUE(spec_of(sm90).own_parts());
  EXPECT_FALSE(choose(pages, sm90).scheduled);
  EXPECT_TRUE(spec_of({Family::sm90, {{"scheduled", 1}}}).scheduled());
  EXPECT_FALSE(spec_of({Family::sm90, {{"scheduled", 0}}}).own_parts());
  pages.given_schedule = true;
  EXPECT_TRUE(spec_of(sm90).scheduled());
  pages.given_schedule = false;
  pages.b = 33;  // more tiles than a warp has lanes
  const KernelSpec spec = spec_of(sm90);
  EXPECT_TRUE(spec.scheduled() && spec.as<Sm90Forward>().exact_max);
  EXPECT_EQ(spec.tile_m, 64);
  EXPECT_EQ(spec.min_blocks, 2);
  EXPECT_TRUE(may_start_early(spec));
  EXPECT_EQ(schedule_shape(pages, spec, 132).parts, 264);
  pages.s_kv = 256;
  EXPECT_TRUE(spec_of(sm90).scheduled()) << "blocks go on from request to request";
  pages.s_kv = 255;  // a block has few tiles to share
  EXPECT_FALSE(spec_of(sm90).scheduled());
  pages.s_kv = 8192;
  pages.d_qk = pages.d_v = 256;
  EXPECT_EQ(spec_of(sm90).tile_n, 32);
  pages.b = 4;
  EXPECT_TRUE(choose(pages, sm90).own_parts);
  EXPECT_THROW(spec_of({Family::sm90, {{"q_buffers", 2}}}), Error);
}

/// Whether a call is of a length that is shared, and whether its few keys would be many diagonals, are two facts.
TEST(Sm90ForwardPlan, CallsOfFewKeysOverPagesHaveASlotOfTheirOwn) {
  Variants softcap;
  softcap.score = "3.0*tanh(score/3.0)";  // without exact maxima
  Problem pages = problem_of(128, 128, true, 1);
  pages.page_size = 16;
  pages.variants = &softcap;
  pages.s_kv = 256;
  const Choice few = choose(pages, {Family::sm90});
  pages.s_kv = 8192;
  const Choice many = choose(pages, {Family::sm90});
  EXPECT_FALSE(few.own_parts);
  EXPECT_TRUE(many.own_parts);
  EXPECT_NE(few.slot(), many.slot());
}

/// One request has splits, parts of whatever its length is, with or without a schedule.
TEST(Sm90ForwardPlan, OneRequestOverPagesHasSplits) {
  Problem pages = problem_of(128, 128, true, 8192);
  pages.s_q = pages.b = 1;
  pages.h_q = 32;
  pages.h_kv = 8;
  for (const int page_size : {8, 16, 64, static_cast<int>(kContiguous)}) {
    for (const bool given : {false, true}) {
      pages.page_size = page_size;
      pages.given_schedule = given;
      const Choice choice = choose(pages, {});
      EXPECT_TRUE(choice.splits_request && !choice.own_parts && !choice.scheduled);
      EXPECT_EQ(choice.splits, 16);
      const KernelSpec spec = plan_forward(pages, {}).kernel;
      EXPECT_TRUE(spec.split && spec.as<Sm90Forward>().exact_max);
      EXPECT_EQ(spec.min_blocks, 2);
    }
  }
  pages.given_schedule = false;
  EXPECT_EQ(choose(pages, {{"splits", 5}}).splits, 5);
  EXPECT_EQ(choose(pages, {{"splits", 1}}).splits, 1);
  EXPECT_NO_THROW(check_forward_override(pages, {}));
  EXPECT_TRUE(choose(pages, {{"own_parts", 1}}).own_parts);
  EXPECT_TRUE(choose(pages, {{"scheduled", 1}}).scheduled);
  const auto splits = [&](auto change) {
    Problem other = pages;
    change(other);
    return choose(other, {}).splits_request;
  };
  EXPECT_FALSE(splits([](Problem& p) { p.b = 2; })) << "whose lengths the host does not know";
  EXPECT_FALSE(splits([](Problem& p) { p.s_kv = 256; }));
  EXPECT_FALSE(splits([](Problem& p) { p.s_q = 100; }));
  EXPECT_FALSE(splits([](Problem& p) { p.h_q = 17, p.h_kv = 17; })) << "8 splits are more than one round";
  EXPECT_FALSE(splits([](Problem& p) { p.varlen = true, p.total_q = 1; }));
}

/// Blocks wait for those that start before them alone.
TEST(ForwardStarts, AreEarlyWhereBlocksWaitForEarlierOnes) {
  Problem pages = problem_of(128, 128, true, 8192);
  pages.s_q = 1;
  pages.b = 2;
  pages.page_size = 16;
  const KernelSpec spec = plan_forward(pages, {}).kernel;
  ASSERT_TRUE(spec.own_parts());
  EXPECT_TRUE(may_start_early(spec));
}

/// The map's axis of heads goes on over the pages.
TEST(Sm90ForwardMaps, PagesAreWholeHeadsApart) {
  std::vector<std::byte> memory(64);
  TensorView pool;
  pool.data = memory.data();
  pool.dtype = DType::bf16;
  pool.rank = 4;
  pool.shape = {100, 8, 16, 128};
  pool.strides = {16 * 8 * 128, 128, 8 * 128, 1};  // [pages, page, h_kv, d]
  EXPECT_EQ(heads_a_page(pool), 16 * 8);
  EXPECT_EQ(page_map(pool, 16).sizes[2], 99U * 16 * 8 + 8);
  EXPECT_EQ(page_map(pool, 16).base, memory.data());
  pool.strides = {2 * 8 * 16 * 128, 16 * 128, 128, 1};  // [pages, 2, h_kv, page, d]
  EXPECT_EQ(heads_a_page(pool), 2 * 8);
  pool.strides[0] += 8;
  EXPECT_EQ(heads_a_page(pool), 0);
  pool.strides[0] = 16 * 128;
  pool.shape[0] = std::int64_t{1} << 31;
  EXPECT_EQ(heads_a_page(pool), 0);
}

/// Rows by eights, whose slabs of columns lie behind each other in a box.
TEST(Sm90ForwardMaps, BoxesOfAllColumnsHaveSlabsOfEightRows) {
  std::vector<std::byte> memory(64);
  TensorView pool;
  pool.data = memory.data();
  pool.dtype = DType::bf16;
  pool.rank = 4;
  pool.shape = {100, 8, 64, 128};
  pool.strides = {64 * 8 * 128, 128, 8 * 128, 1};  // [pages, page, h_kv, d]
  const TensorMapSpec map = wide_page_map(pool, 16);
  ASSERT_EQ(map.rank, 5);
  const std::uint64_t sizes[] = {64, 8, 2, 8, 99 * 64 * 8 + 8}, strides[] = {2048, 128, 8 * 2048, 256};
  const std::uint32_t box[] = {64, 8, 2, 2, 1};
  EXPECT_TRUE(std::ranges::equal(sizes, std::span(map.sizes).first(5)));
  EXPECT_TRUE(std::ranges::equal(strides, std::span(map.strides).first(4)));
  EXPECT_TRUE(std::ranges::equal(box, std::span(map.box).first(5)));
}

TEST(ForwardStarts, AreEarlyWhereAllThreadsWait) {
  KernelSpec spec = plan_forward(problem_of(128, 128, true, 4096), {}).kernel;
  spec.as<Sm90Forward>().dynamic = false;
  EXPECT_TRUE(may_start_early(spec));
  spec.as<Sm90Forward>().dynamic = true;
  EXPECT_FALSE(may_start_early(spec)) << "the counter is cleared in front of it";
  EXPECT_FALSE(may_start_early(plan_forward(problem_of(128, 128, true, 4096), {Family::sm80}).kernel));
}

TEST(Sm90ForwardPlan, ExactMaximaAreOfPlainScores) {
  Problem problem = problem_of(128, 128, false, 512);
  const auto is_exact = [&] { return plan_forward(problem, {}).kernel.as<Sm90Forward>().exact_max; };
  const auto is_refused = [&] { return refuses(problem, {{"exact_max", true}}, "exact_max = true"); };
  problem.dropout = true;
  EXPECT_FALSE(is_exact());
  EXPECT_TRUE(is_refused());
  problem.dropout = false;
  Variants variants;
  problem.variants = &variants;
  variants.sink = true;
  EXPECT_TRUE(is_exact()) << "which are no part of the maximum";
  variants.left_window = true;
  EXPECT_FALSE(is_exact());
  EXPECT_TRUE(is_refused());
  variants = {};
  variants.score = "score * 2";
  EXPECT_FALSE(is_exact());
  EXPECT_TRUE(is_refused());
}

// Tiles in shared memory are slabs of 64 columns, whatever the head dim.
TEST(Sm90ForwardPlan, CountsWholeSlabs) {
  KernelSpec spec = plan_forward(problem_of(128, 128, false, 512), {}).kernel;
  const int bytes = shared_bytes(spec);
  EXPECT_EQ(bytes, 2 * 128 * 256 + 2 * 128 * (256 + 256) + 1024);
  spec.d_qk = spec.d_v = 72;
  EXPECT_EQ(shared_bytes(spec), bytes);
  spec.d_v = 64;
  EXPECT_EQ(shared_bytes(spec), bytes - 2 * 128 * 128);
  // O passes through the place of Q, if there are two and its rows are those of one head.
  spec.d_qk = 64;
  spec.d_v = 128;
  EXPECT_EQ(shared_bytes(spec), 2 * 128 * 256 + 2 * 128 * (128 + 256) + 1024);
  spec.pack_gqa = true;
  EXPECT_EQ(shared_bytes(spec), 2 * 128 * 128 + 2 * 128 * (128 + 256) + 1024);
}

// What is dropped is drawn by a warpgroup more, and by idle producers beside a wide O.
TEST(Sm90ForwardPlan, DrawsWhereRegistersAreLeft) {
  struct Expected {
    int d, warps, drawing_warps, mask_bytes;
  };
  for (const Expected& expected : {Expected{64, 16, 4, 3 * 128 * 128 / 8}, Expected{128, 16, 4, 3 * 128 * 128 / 8},
                                   Expected{256, 12, 2, 3 * 128 * 128 / 8}}) {
    SCOPED_TRACE(expected.d);
    Problem problem = problem_of(expected.d, expected.d, true, 4096);
    problem.dropout = true;
    const KernelSpec spec = plan_forward(problem, {}).kernel;
    EXPECT_EQ(spec.tile_m, 128);
    EXPECT_EQ(spec.warps, expected.warps);
    EXPECT_LE(shared_bytes(spec), limits(spec.arch).shared_per_block);
    KernelSpec plain = spec;
    plain.dropout = false;
    const int barriers = 512;
    const int draws = spec.tile_m * 16 + expected.drawing_warps * (spec.tile_n / 4) * 16;
    EXPECT_EQ(shared_bytes(spec), shared_bytes(plain) - 1024 + barriers + expected.mask_bytes + draws);
    KernelSpec packed = spec;
    packed.pack_gqa = true;
    plain.pack_gqa = true;
    EXPECT_EQ(shared_bytes(packed), shared_bytes(plain) - 1024 + barriers + expected.mask_bytes)
        << "rows of other heads";
  }
}

// What a thread starts with is 128 registers where there are 512: of two blocks, or with a warpgroup that draws.
TEST(Sm90ForwardPlan, InstructionsFitWhatThreadsStartWith) {
  const Fixed wide{{"tile_m", 64}, {"tile_n", 208}, {"stages", 2}, {"q_buffers", 1}};
  Problem few = problem_of(32, 32, false, 1);
  few.h_kv = 2;
  const KernelSpec one = plan_forward(few, wide).kernel;
  EXPECT_EQ(one.min_blocks, 1) << canonical(one);
  const Fixed narrow{{"tile_m", 64}, {"tile_n", 192}, {"stages", 2}, {"q_buffers", 1}};
  EXPECT_EQ(plan_forward(few, narrow).kernel.min_blocks, 2);
  for (const bool dropout : {false, true}) {
    for (const int d : {32, 64, 128, 200}) {
      Problem problem = problem_of(d, d, false, 4096);
      problem.dropout = dropout;
      for (const KernelSpec& spec : forward_candidates(problem, {}, plan_forward(problem, {}).kernel, 1000)) {
        if (spec.family() != Family::sm90) continue;
        EXPECT_TRUE(spec.min_blocks * spec.threads() < 512 || std::max(spec.tile_n, spec.d_v) <= 192)
            << canonical(spec);
      }
    }
  }
}

struct Refusal {
  const char* limit;  ///< what the text must name
  void (*spoil)(KernelSpec& spec);
};

constexpr Refusal kRefusals[] = {
    {"tile_m = 96: accepted are 64, 128, 192 and 256", [](KernelSpec& spec) { spec.tile_m = 96; }},
    {"tile_m = 0", [](KernelSpec& spec) { spec.tile_m = 0; }},
    {"tile_m = 320", [](KernelSpec& spec) { spec.tile_m = 320; }},
    {"tile_n = 24: accepted are multiples of 16", [](KernelSpec& spec) { spec.tile_n = 24; }},
    {"tile_n = 272", [](KernelSpec& spec) { spec.tile_n = 272; }},
    {"stages = 1: accepted are 2 to 7", [](KernelSpec& spec) { spec.stages = 1; }},
    {"q_buffers = 3: accepted are 1 and 2", [](KernelSpec& spec) { spec.as<Sm90Forward>().q_buffers = 3; }},
    {"q_buffers = 0", [](KernelSpec& spec) { spec.as<Sm90Forward>().q_buffers = 0; }},
    {"take_turns = true", [](KernelSpec& spec) { spec.tile_m = 64; }},
    {"bytes of shared memory; sm_90a offers 232448", [](KernelSpec& spec) { spec.stages = 7; }},
    {"registers of fragments a thread; at most 208 fit", [](KernelSpec& spec) { spec.tile_n = 208; }},
    {"registers of fragments a thread; at most 128 fit", [](KernelSpec& spec) { spec.tile_m = 192; }},
    {"tile_m = 192: with dropout accepted are 64 and 128",
     [](KernelSpec& spec) {
       spec.tile_m = 192;
       spec.tile_n = 64;
       spec.as<Sm90Forward>().exact_max = false;
       spec.dropout = true;
     }},
    {"tile_m = 128, tile_n = 208: of 512 threads the registers fit 192 columns of S or O, not 208",
     [](KernelSpec& spec) {
       spec.tile_n = 208;
       spec.d_v = 64;
       spec.as<Sm90Forward>().exact_max = false;
       spec.dropout = true;
     }},
    {"tile_m = 192, tile_n = 32: of 512 threads the registers fit 192 columns of S or O, not 200",
     [](KernelSpec& spec) {
       spec.tile_m = 192;
       spec.tile_n = 32;
       spec.d_v = 200;
       spec.as<Sm90Forward>().q_buffers = 1;
     }},
    {"registers of fragments a thread; at most 84 fit",
     [](KernelSpec& spec) {
       spec.tile_m = 256;
       spec.tile_n = spec.d_qk = spec.d_v = 80;
     }},
};

TEST(Sm90ForwardRefusal, NamesTheLimit) {
  KernelSpec good = plan_forward(problem_of(128, 128, true, 400), {}).kernel;
  good.d_qk = 64;
  EXPECT_EQ(sm90_forward_refusal(good), "");
  for (const Refusal& refusal : kRefusals) {
    KernelSpec spec = good;
    refusal.spoil(spec);
    EXPECT_NE(sm90_forward_refusal(spec).find(refusal.limit), std::string::npos)
        << refusal.limit << " is not in: " << sm90_forward_refusal(spec);
  }
}

TEST(Sm90ForwardSpec, TakesWhatTheOverrideFixes) {
  const Fixed fixed = {{"tile_m", 128}, {"tile_n", 64}, {"stages", 3}, {"q_buffers", 1}, {"take_turns", false}};
  const KernelSpec spec = plan_forward(problem_of(64, 64, true, 4096), fixed).kernel;
  EXPECT_EQ(spec.family(), Family::sm90);
  EXPECT_EQ(spec.tile_m, 128);
  EXPECT_EQ(spec.tile_n, 64);
  EXPECT_EQ(spec.stages, 3);
  EXPECT_EQ(spec.as<Sm90Forward>().q_buffers, 1);
  EXPECT_FALSE(spec.as<Sm90Forward>().take_turns);
}

TEST(Sm90ForwardSpec, RefusesAnOverrideAsABadArgument) {
  const Fixed cases[] = {{{"tile_m", 100}}, {{"tile_m", -64}},     {{"tile_n", 8}},   {{"tile_n", 1 << 30}},
                         {{"stages", 1}},   {{"stages", 1 << 30}}, {{"q_buffers", 3}}};
  for (const Fixed& fixed : cases) {
    try {
      const ForwardPlan plan = plan_forward(problem_of(128, 128, true, 4096), fixed);
      ADD_FAILURE() << "accepted: " << canonical(plan.kernel);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
      EXPECT_EQ(error.field("argument"), "kernel");
    }
  }
}

// ---- sections of a persistent causal grid

/// Largest over mean sum of KV tiles of a block, for sections of `section` heads: templates/common/forward_schedule.cuh
/// and the rounds of templates/sm90/sm90_forward.cuh.
double imbalance(int m_blocks, int heads, int section, int multiprocessors, int tile_m, int tile_n, int s) {
  const int tiles = m_blocks * heads;
  const int blocks = std::min(multiprocessors, tiles);
  std::vector<double> sums(static_cast<std::size_t>(blocks), 0.0);
  double total = 0;
  for (int tile = 0; tile < tiles; ++tile) {
    const int first_head = tile / (section * m_blocks) * section;
    const int in_section = std::min(section, heads - first_head);
    const int m_block = m_blocks - 1 - (tile - first_head * m_blocks) / in_section;
    const int keys = std::min((m_block + 1) * tile_m, s);
    const int round = tile / blocks;
    const int place = round % 2 == 0 ? tile % blocks : blocks - 1 - tile % blocks;
    const double length = (keys + tile_n - 1) / tile_n;
    sums[static_cast<std::size_t>(place)] += length;
    total += length;
  }
  return *std::ranges::max_element(sums) / (total / blocks);
}

// 16,384 tokens in sequences of s, 2,048 / d heads each.
TEST(BalancedHeads, BlocksGetEqualShares) {
  struct Tiles {
    int d, tile_m, tile_n;
  };
  constexpr Tiles kTiles[] = {{64, 256, 64}, {64, 192, 128}, {128, 128, 128}, {256, 128, 80}};
  for (const auto& [multiprocessors, bound] : {std::pair{132, 1.06}, {114, 1.11}, {78, 1.11}}) {
    for (const Tiles& tiles : kTiles) {
      for (int s = 512; s <= 16384; s *= 2) {
        const int heads = 16384 / s * (2048 / tiles.d);
        const int m_blocks = (s + tiles.tile_m - 1) / tiles.tile_m;
        const int section = balanced_heads(m_blocks, heads, multiprocessors);
        EXPECT_LE(imbalance(m_blocks, heads, section, multiprocessors, tiles.tile_m, tiles.tile_n, s), bound)
            << multiprocessors << " blocks, d " << tiles.d << ", s " << s << ", " << heads << " heads, sections of "
            << section;
      }
    }
  }
}

TEST(BalancedHeads, TakesTheMeasuredSections) {
  for (const int m_blocks : {8, 16, 32}) EXPECT_EQ(balanced_heads(m_blocks, 256, 132), 33);
  EXPECT_EQ(balanced_heads(4, 512, 132), 66);
  EXPECT_EQ(balanced_heads(64, 32, 132), 32);
  EXPECT_EQ(balanced_heads(128, 16, 132), 16);
}

TEST(BalancedHeads, StaysInRange) {
  for (const std::int64_t m_blocks : {0, 1, 3, 43, 1 << 24}) {
    for (const std::int64_t heads : {0, 1, 7, 131, 100000}) {
      for (const int multiprocessors : {0, 1, 2, 78, 132, 160}) {
        const int section = balanced_heads(m_blocks, heads, multiprocessors);
        EXPECT_GE(section, 1);
        EXPECT_LE(section, std::max<std::int64_t>(heads, 1));
      }
    }
  }
}

}  // namespace
}  // namespace fa::plan
