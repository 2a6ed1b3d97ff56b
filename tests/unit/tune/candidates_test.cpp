// What the families offer a tuner, on every architecture.

#include "plan/candidates.hpp"
#include "plan/catalogue.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "plan/schedule.hpp"
#include "plan/sm80_backward.hpp"
#include "plan/sm80_forward.hpp"
#include "plan/sm90_backward.hpp"
#include "plan/sm90_forward.hpp"
#include "support/thorough.hpp"

#include <common/schedule_params.cuh>

namespace fa::plan {
namespace {

constexpr std::size_t kAll = 100'000;

Problem problem(const char* arch, DType dtype, int d_qk, int d_v, std::int64_t s_q, std::int64_t h_kv) {
  Problem result;
  result.arch = parse_arch(arch);
  result.dtype = dtype;
  result.d_qk = d_qk;
  result.d_v = d_v;
  result.b = 2;
  result.h_q = 16;
  result.h_kv = h_kv;
  result.s_q = s_q;
  result.s_kv = 4096;
  return result;
}

/// Everything about a spec that the problem fixes, and no tuner may change.
KernelSpec without_tile(KernelSpec spec) {
  spec.own = {};
  spec.tile_m = spec.tile_n = spec.warps = spec.warps_n = spec.stages = 0;
  spec.min_blocks = 1;
  return spec;
}

bool is_exact(const KernelSpec& spec) {
  return spec.is<Sm90Forward>() && spec.as<Sm90Forward>().exact_max;
}

class Candidates : public ::testing::TestWithParam<const char*> {};

void expect_valid(const std::vector<KernelSpec>& specs, const KernelSpec& first) {
  ASSERT_FALSE(specs.empty());
  EXPECT_EQ(specs.front(), first);
  std::set<std::string> texts;
  for (const KernelSpec& spec : specs) {
    EXPECT_EQ(plan::refusal(spec), "") << canonical(spec);
    EXPECT_LE(shared_bytes(spec), limits(spec.arch).shared_per_block);
    EXPECT_TRUE(texts.insert(canonical(spec)).second) << "twice: " << canonical(spec);
    EXPECT_EQ(without_tile(spec), without_tile(first)) << canonical(spec);
    EXPECT_TRUE(!spec.is<Sm90Forward>() || is_exact(spec) == is_exact(first)) << canonical(spec);
    EXPECT_EQ(spec.ordered_dq(), first.ordered_dq()) << canonical(spec);
    EXPECT_EQ(spec.leaves_splits(), first.leaves_splits()) << canonical(spec);
  }
}

TEST_P(Candidates, AreValidDistinctAndServeTheSameCalls) {
  std::size_t n = 0;
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (const auto& [d_qk, d_v] : {std::pair{64, 64}, {128, 128}, {256, 256}, {192, 128}, {40, 72}}) {
      for (const std::int64_t s_q : {1, 40, 4096}) {
        for (const std::int64_t h_kv : {16, 4}) {
          if (n++; !test::tries_watched(n + n / 8)) continue;
          Problem p = problem(GetParam(), dtype, d_qk, d_v, s_q, h_kv);
          p.causal = s_q > 1;
          const KernelSpec forward = plan_forward(p, {}).kernel;
          const std::vector<KernelSpec> specs = forward_candidates(p, {}, forward, kAll);
          SCOPED_TRACE(canonical(forward));
          expect_valid(specs, forward);
          const auto cuts_groups = [&](const KernelSpec& spec) {
            return spec.family() == Family::sm90 && spec.pack_gqa && spec.tile_m % (p.h_q / p.h_kv) != 0;
          };
          EXPECT_TRUE(std::ranges::none_of(specs, cuts_groups));
          for (const bool deterministic : {false, true}) {
            const KernelSpec backward = plan_backward(p, {}, deterministic).main.front();
            expect_valid(backward_candidates(p, {}, backward, kAll), backward);
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, Candidates,
                         ::testing::Values("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"),
                         [](const auto& test) { return std::string(test.param); });

TEST(CandidateOrder, OffersAChoiceAndKeepsToTheNumber) {
  for (const char* arch : {"sm_80", "sm_90a"}) {
    for (const int d : {64, 128, 256}) {
      const Problem p = problem(arch, DType::bf16, d, d, 4096, 16);
      const KernelSpec forward = plan_forward(p, {}).kernel;
      const std::vector<KernelSpec> few = forward_candidates(p, {}, forward, 10);
      EXPECT_EQ(few.size(), 10U);
      const std::vector<KernelSpec> more = forward_candidates(p, {}, forward, 20);
      EXPECT_TRUE(std::equal(few.begin(), few.end(), more.begin())) << "a longer list goes on where a short one ends";
      std::set<std::pair<int, int>> tiles;
      for (const KernelSpec& spec : few) tiles.emplace(spec.tile_m, spec.tile_n);
      EXPECT_GE(tiles.size(), 4U);
      const KernelSpec backward = plan_backward(p, {}, false).main.front();
      const std::size_t all = backward_candidates(p, {}, backward, kAll).size();
      EXPECT_EQ(backward_candidates(p, {}, backward, 10).size(), backward.family() == Family::sm80 ? 10 : all);
      const bool pair = backward.cluster() > 1;  // one kernel fits
      EXPECT_EQ(backward_candidates(p, {}, backward, 2).size(), pair ? 1U : 2U);
    }
  }
}

TEST(CandidateOrder, TheModelRanksThePlannersKernelsHigh) {
  for (const int d : {64, 128, 256}) {
    for (const bool causal : {false, true}) {
      Problem p = problem("sm_90a", DType::bf16, d, d, 4096, 16);
      p.causal = causal;
      const KernelSpec planned = plan_forward(p, {}).kernel;
      fa::plan::Candidates candidates = sm90_forward_candidates(p, choose(p, {}));
      const auto own = std::ranges::find(candidates, planned, &Candidate::spec);
      ASSERT_NE(own, candidates.end()) << canonical(planned);
      const double best = std::ranges::min(candidates, {}, &Candidate::cost).cost;
      EXPECT_LT(own->cost, 1.15 * best) << canonical(planned);
    }
  }
}

TEST(CandidateOrder, HopperBackwardsDifferInTilesAndStages) {
  for (const int d : {64, 96, 128}) {
    for (const bool deterministic : {false, true}) {
      Problem p = problem("sm_90a", DType::bf16, d, d, 4096, 16);
      p.causal = true;
      const KernelSpec planned = plan_backward(p, {}, deterministic).main.front();
      SCOPED_TRACE(canonical(planned));
      ASSERT_EQ(planned.family(), Family::sm90);
      const fa::plan::Candidates candidates = sm90_backward_candidates(p, choose_backward(p, {}), deterministic);
      const auto own = std::ranges::find(candidates, planned, &Candidate::spec);
      ASSERT_NE(own, candidates.end());
      const double best = std::ranges::min(candidates, {}, &Candidate::cost).cost;
      EXPECT_LT(own->cost, 1.15 * best);
      std::set<std::pair<int, int>> tiles;
      std::set<int> stages;
      for (const Candidate& candidate : candidates) {
        EXPECT_EQ(candidate.spec.family(), Family::sm90);
        EXPECT_GT(candidate.cost, 0);
        tiles.emplace(candidate.spec.tile_m, candidate.spec.tile_n);
        stages.insert(candidate.spec.stages);
      }
      EXPECT_GE(tiles.size(), d == 64 ? 3U : d == 96 ? 2U : 1U);     // large heads leave registers for one tile
      EXPECT_EQ(stages, d == 128 ? std::set{2} : (std::set{2, 3}));  // three spill in causal kernels of d 128
    }
  }
}

TEST(CandidateOrder, AFixedFamilyStays) {
  const Problem p = problem("sm_90a", DType::bf16, 128, 128, 4096, 16);
  const Fixed fixed{Family::sm80};
  for (const KernelSpec& spec : forward_candidates(p, fixed, plan_forward(p, fixed).kernel, kAll)) {
    EXPECT_EQ(spec.family(), Family::sm80);
  }
  for (const KernelSpec& spec : backward_candidates(p, fixed, plan_backward(p, fixed, false).main.front(), kAll)) {
    EXPECT_EQ(spec.family(), Family::sm80);
  }
  EXPECT_FALSE(Fixed(fixed).fixes_tile());
  EXPECT_TRUE(Fixed({{"tile_n", 64}}).fixes_tile());
  EXPECT_TRUE(Fixed({{"take_turns", false}}).fixes_tile());
  EXPECT_TRUE(Fixed({{"affine_product", false}}).fixes_tile());
  EXPECT_TRUE(Fixed({{"affine_reach", false}}).fixes_tile());
  EXPECT_TRUE(Fixed({{"exact_max", false}}).fixes_tile());
  EXPECT_TRUE(Fixed({{"warps_n", 1}}).fixes_tile());
}

TEST(CandidateOrder, WideHeadsHaveKernelsWithAndWithoutPairsOfWarps) {
  const auto pairs = [](int d, DType dtype) {
    const Problem p = problem("sm_80", dtype, d, d, 4096, 16);
    const std::vector<KernelSpec> specs = forward_candidates(p, {}, plan_forward(p, {}).kernel, 10);
    return std::ranges::count(specs, 2, &KernelSpec::warps_n);
  };
  for (const int d : {136, 144, 192, 256}) {
    EXPECT_EQ(pairs(d, DType::bf16) > 0, d % 16 == 0) << d;
    EXPECT_LT(pairs(d, DType::bf16), 10) << d;
    EXPECT_EQ(pairs(d, DType::f32), 0) << d;
  }
  EXPECT_EQ(pairs(128, DType::bf16), 0);
}

TEST(CandidateOrder, FewQueryRowsMayRunOnEitherFamily) {
  const Problem p = problem("sm_90a", DType::bf16, 128, 128, 1, 16);
  std::set<Family> families;
  for (const KernelSpec& spec : forward_candidates(p, {}, plan_forward(p, {}).kernel, kAll))
    families.insert(spec.family());
  EXPECT_EQ(families.size(), 2U);
}

/// The other family has no clusters: what its splits leave no kernel behind would merge.
TEST(CandidateOrder, SplitsThatAClusterMergesAreMergedByAll) {
  int clusters = 0;
  for (const std::int64_t b : {1, 2, 4, 8, 16}) {
    Problem p = problem("sm_90a", DType::bf16, 128, 128, 1, 8);
    p.b = b;
    const KernelSpec planned = plan_forward(p, {}).kernel;
    clusters += planned.cluster() > 1 ? 1 : 0;
    for (const KernelSpec& spec : forward_candidates(p, {}, planned, kAll)) {
      EXPECT_EQ(spec.leaves_splits(), planned.leaves_splits()) << canonical(spec);
    }
  }
  EXPECT_GT(clusters, 0);
}

/// A lane finds each query tile, of which kernels with fewer rows a tile would have more.
TEST(CandidateOrder, PartsThatBlocksFindAreOfAsManyQueryTilesAsAWarpHasLanes) {
  int with_parts = 0;
  for (const bool varlen : {false, true}) {
    Problem p = problem("sm_90a", DType::bf16, 128, 128, 8, 2);
    p.b = 20;
    p.page_size = 16;
    p.varlen = varlen;
    p.total_q = varlen ? p.b * 4 : 0;
    const KernelSpec planned = plan_forward(p, {}).kernel;
    for (const KernelSpec& spec : forward_candidates(p, {}, planned, kAll)) {
      if (!spec.own_parts()) continue;
      ++with_parts;
      EXPECT_LE(schedule_shape(p, spec, kHopperMultiprocessors).slots, kernel::kOwnItems) << canonical(spec);
    }
  }
  EXPECT_GT(with_parts, 0);
}

}  // namespace
}  // namespace fa::plan
