#include "plan/sm90_wide_forward.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>

#include <fa/error.hpp>

#include "plan/catalogue.hpp"
#include "plan/forward_launch.hpp"
#include "plan/planner.hpp"
#include "plan/schedule.hpp"

namespace fa::plan {
namespace {

/// A decode of multi-head latent attention.
Problem latent(std::int64_t heads, std::int64_t s_q = 1) {
  Problem problem;
  problem.arch = parse_arch("sm_90a");
  problem.d_qk = 576;
  problem.d_v = 512;
  problem.value_in_key = true;
  problem.causal = true;
  problem.page_size = 64;
  problem.b = 64;
  problem.h_q = heads;
  problem.s_q = s_q;
  problem.s_kv = 8192;
  return problem;
}

TEST(Sm90WideForward, ServesWideHeadsOfHopper) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (int d_qk = 8; d_qk <= 576; d_qk += 8) {
      for (const int d_v : {8, 64, 256, 264, 384, 392, 512}) {
        if (std::max(d_qk, d_v) <= 256) continue;
        Problem problem = latent(16);
        problem.dtype = dtype;
        problem.d_qk = d_qk;
        problem.d_v = d_v;
        problem.value_in_key = d_v <= d_qk;
        const KernelSpec spec = plan_forward(problem, {}).kernel;
        ASSERT_TRUE(spec.is<Sm90WideForward>()) << canonical(spec);
        EXPECT_LE(shared_bytes(spec), limits(spec.arch).shared_per_block) << canonical(spec);
        EXPECT_TRUE(spec.scheduled() && spec.pack_gqa) << canonical(spec);
      }
    }
  }
  const KernelSpec spec = plan_forward(latent(128), {}).kernel;
  EXPECT_TRUE(spec.as<Sm90WideForward>().value_in_key);
  EXPECT_EQ(spec.stages, 2);
  EXPECT_EQ(spec.threads(), 384);
}

TEST(Sm90WideForward, LeavesTheRestToSm80) {
  Variants captures, mask;
  captures.score = "score+bias[kv]";
  captures.captures.resize(1);
  mask.mask = "q>=kv";
  using Change = void (*)(Problem&);
  constexpr Change kChanges[] = {
      [](Problem& p) { p.arch = parse_arch("sm_80"); },
      [](Problem& p) { p.dtype = DType::f32; },
      [](Problem& p) { p.page_size = 12; },
      [](Problem& p) { p.aligned = false; },
      [](Problem& p) { p.tensor_maps = false; },
      [](Problem& p) { p.accumulate = true; },
      [](Problem& p) { p.k_dtype = DType::e4m3; },
      [](Problem& p) { p.h_q = 24; },
      [](Problem& p) { p.invariance = Invariance::rows, p.d_qk = p.d_v = 264, p.value_in_key = false; },
  };
  for (const Change change : kChanges) {
    Problem problem = latent(32);
    change(problem);
    EXPECT_EQ(choose(problem, {}).family, Family::sm80);
  }
  for (const Variants* const variants : {&captures, &mask}) {
    Problem problem = latent(32);
    problem.variants = variants;
    EXPECT_EQ(choose(problem, {}).family, Family::sm80);
  }
  EXPECT_EQ(choose(latent(32), {Family::sm80}).family, Family::sm80);
  Problem narrow = latent(32);
  narrow.d_qk = narrow.d_v = 256;
  narrow.s_q = 100;
  EXPECT_EQ(choose(narrow, {}).family, Family::sm90);
  EXPECT_THROW(plan_forward(narrow, {Family::sm90_wide}), Error);
  EXPECT_THROW(plan_forward(latent(32), {Family::sm90_wide, {{"stages", 1}}}), Error);
}

// Tiles of the same positions are heads of the grid, so that blocks read the same keys at the same time.
TEST(Sm90WideForward, PacksHeadsBesidePositions) {
  struct Expected {
    std::int64_t heads, s_q;
    std::int64_t together;
  };
  for (const auto& [heads, s_q, together] :
       {Expected{16, 1, 16}, {128, 1, 64}, {128, 2, 32}, {128, 3, 64}, {64, 4, 16}, {16, 6, 16}, {32, 64, 1}}) {
    const Problem problem = latent(heads, s_q);
    const KernelSpec spec = plan_forward(problem, {}).kernel;
    EXPECT_EQ(heads_of_a_tile(spec, heads, s_q), together) << heads << ", " << s_q;
    kernel::ForwardVariantParams params;
    forward_params(problem, {}, 1, 1, spec, 132, {}, params);
    EXPECT_EQ(params.group, together);
    EXPECT_EQ(params.heads, heads / (together * spec.cluster()));
    EXPECT_EQ(params.m_blocks, (s_q * together + 63) / 64);
    EXPECT_EQ(schedule_shape(problem, spec, 132).slots, params.m_blocks * problem.b);
  }
}

/// Of a causal grid in static rounds: the work of the busiest block as a fraction of the mean.
double imbalance(std::int64_t m_blocks, std::int64_t heads, int section, int blocks) {
  std::vector<std::int64_t> work(static_cast<std::size_t>(blocks));
  const std::int64_t places = section * m_blocks;
  for (std::int64_t i = 0; i < m_blocks * heads; ++i) {
    const std::int64_t in_section = std::min<std::int64_t>(section, heads - i / places * section);
    work[static_cast<std::size_t>(i % blocks)] += m_blocks - i % places / in_section;  // longest first
  }
  const double mean = static_cast<double>(heads * m_blocks * (m_blocks + 1) / 2) / blocks;
  return static_cast<double>(*std::ranges::max_element(work)) / mean;
}

TEST(Sm90WideForwardLaunch, FewHeadsOfACausalGridGiveEqualWork) {
  EXPECT_EQ(heads_of_spread_places(64, 32, 4, 132), 1);
  EXPECT_EQ(heads_of_spread_places(64, 8, 4, 132), 0) << "no block comes by all places of a head";
  EXPECT_EQ(heads_of_spread_places(64, 0, 4, 132), 0);
  int found = 0;
  for (const std::int64_t m_blocks : {16, 24, 32, 48, 64, 100, 128, 256}) {
    for (const std::int64_t heads : {16, 32, 48, 64, 128}) {
      for (const int blocks : {78, 114, 132}) {
        const int section = heads_of_spread_places(m_blocks, heads, 4, blocks);
        if (section == 0) continue;
        ++found;
        EXPECT_LT(imbalance(m_blocks, heads, section, blocks), 1.35) << m_blocks << ' ' << heads << ' ' << blocks;
      }
    }
  }
  EXPECT_GT(found, 60);
}

TEST(Sm90WideForward, FewRequestsAreInSplitsOfTheirLengths) {
  Problem problem = latent(128);
  problem.b = 1;
  problem.s_kv = 32768;
  const Choice choice = choose(problem, {});
  EXPECT_TRUE(choice.splits_request);
  EXPECT_FALSE(choice.scheduled);
  EXPECT_EQ(choice.splits, 64);
  const ForwardPlan plan = plan_forward(problem, {});
  EXPECT_TRUE(plan.kernel.split && !plan.kernel.scheduled());
  EXPECT_EQ(kernels_of(plan).size(), 2U) << "another kernel merges";
  kernel::ForwardVariantParams params;
  EXPECT_EQ(forward_params(problem, {}, 1, choice.splits, plan.kernel, 132, {}, params).grid, 128);
  EXPECT_EQ(choose(problem, {{"splits", 8}}).splits, 8);
  EXPECT_TRUE(choose(problem, {{"scheduled", 1}}).scheduled);
  problem.b = 4;
  EXPECT_EQ(choose(problem, {}).splits, 16);
  problem.b = 5;
  EXPECT_TRUE(choose(problem, {}).scheduled) << "lengths may differ";
  problem.b = 1;
  problem.varlen = true;
  problem.total_q = 1;
  EXPECT_TRUE(choose(problem, {}).scheduled);
}

TEST(Sm90WideForward, BlocksOfNeighbouringHeadsCopyKeysForEachOther) {
  const Fixed fixed{{"multicast", 1}};
  Problem problem = latent(128);
  EXPECT_TRUE(choose(problem, fixed).multicast) << "two tiles of 64 heads";
  EXPECT_TRUE(choose(problem, {}).multicast) << "as usual";
  EXPECT_FALSE(choose(problem, {{"multicast", 0}}).multicast);
  problem.b = 1;
  EXPECT_FALSE(choose(problem, {}).multicast);
  problem.b = 8;
  const KernelSpec kernel = plan_forward(problem, fixed).kernel;
  EXPECT_EQ(kernel.cluster(), 2);
  const ScheduleShape shape = schedule_shape(problem, kernel, 132);
  EXPECT_EQ(shape.parts, 66) << "of a cluster each";
  EXPECT_EQ(partial_rows(problem, kernel, shape), 2 * 132 * 64);
  kernel::ForwardVariantParams params;
  EXPECT_EQ(forward_params(problem, {}, 1, 1, kernel, 132, {}, params).grid, 132);
  EXPECT_EQ(params.heads, 1) << "that of a cluster";
  problem.h_q = 64;
  EXPECT_FALSE(choose(problem, fixed).multicast) << "one tile";
  problem.h_q = 128;
  problem.bounded = true;
  EXPECT_FALSE(choose(problem, fixed).multicast) << "blocks count";
  problem.bounded = false;
  problem.page_size = 0;
  EXPECT_FALSE(choose(problem, fixed).multicast) << "no schedule";
}

}  // namespace
}  // namespace fa::plan
