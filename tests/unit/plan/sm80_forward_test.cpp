#include "plan/sm80_forward.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <fa/error.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plan/planner.hpp"
#include "support/thorough.hpp"

namespace fa::plan {
namespace {

constexpr int kRegistersPerThread = 255;
// Addresses and row statistics of the main loop, beside the fragments: without them nothing runs.
constexpr int kLoopRegisters = 48;

int max_threads_per_multiprocessor(Arch arch) {
  return arch.sm() == 86 || arch.sm() == 89 || arch.major == 12 ? 1536 : 2048;
}

/// The launch bounds leave each thread the registers of its fragments and of the loop, and as many blocks as they
/// promise fit a multiprocessor.
void expect_fits(const KernelSpec& spec) {
  SCOPED_TRACE(canonical(spec));
  EXPECT_EQ(sm80_forward_refusal(spec), "");
  const ArchLimits arch = limits(spec.arch);
  const int shared = shared_bytes(spec);
  EXPECT_LE(shared, arch.shared_per_block);
  EXPECT_LE(spec.min_blocks * (shared + 1024), arch.shared_per_sm);
  ASSERT_GE(spec.min_blocks, 1);
  EXPECT_LE(spec.threads(), 1024);
  EXPECT_LE(spec.min_blocks * spec.threads(), max_threads_per_multiprocessor(spec.arch));
  const int offered = std::min(kRegistersPerThread, arch.registers_per_sm / (spec.threads() * spec.min_blocks) / 8 * 8);
  EXPECT_LE(sm80_forward_registers(spec) + kLoopRegisters, offered);
  EXPECT_EQ(spec.tile_m % (spec.as<Sm80Forward>().split_warps ? std::min(spec.tile_m, 16) : 16 * spec.warps), 0);
  EXPECT_EQ(spec.tile_n % 16, 0);
}

std::vector<std::pair<int, int>> head_dims() {
  std::vector<std::pair<int, int>> dims;
  for (int d = 8; d <= 256; d += 8) {
    dims.emplace_back(d, d);
    for (const int other : {8, 40, 64, 72, 128, 136, 192, 256}) {
      if (other == d) continue;
      dims.emplace_back(d, other);
      dims.emplace_back(other, d);
    }
  }
  return dims;
}

class Sm80ForwardPlan : public ::testing::TestWithParam<const char*> {};

TEST_P(Sm80ForwardPlan, EveryHeadDimHasAKernelThatFits) {
  Problem problem;
  problem.arch = parse_arch(GetParam());
  problem.b = 4;
  problem.h_q = problem.h_kv = 16;
  problem.s_kv = 2048;
  std::size_t n = 0;
  for (const auto& [d_qk, d_v] : head_dims()) {
    if (!test::tries_watched(n++)) continue;
    problem.d_qk = d_qk;
    problem.d_v = d_v;
    for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
      problem.dtype = dtype;
      for (int flags = 0; flags < 16; ++flags) {
        problem.causal = (flags & 1) != 0;
        problem.aligned = (flags & 2) != 0;
        problem.positive_scale = (flags & 4) != 0;
        problem.s_q = (flags & 8) != 0 ? 1 : 2048;
        const ForwardPlan plan = plan_forward(problem, {Family::sm80});
        const KernelSpec& spec = plan.kernel;
        expect_fits(spec);
        for (const KernelSpec& alternative : plan.alternatives) expect_fits(alternative);
        EXPECT_EQ(spec.arch, problem.arch);
        EXPECT_EQ(spec.dtype, dtype);
        EXPECT_EQ(spec.d_qk, d_qk);
        EXPECT_EQ(spec.d_v, d_v);
        EXPECT_EQ(spec.causal, problem.causal);
        EXPECT_EQ(spec.aligned, problem.aligned);
        EXPECT_EQ(spec.positive_scale, problem.positive_scale);
        if (HasFailure()) return;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, Sm80ForwardPlan,
                         ::testing::Values("sm_80", "sm_86", "sm_87", "sm_89", "sm_90a", "sm_100a", "sm_103a",
                                           "sm_120a"),
                         [](const auto& test) { return std::string(test.param); });

KernelSpec good_spec() {
  KernelSpec spec;
  spec.arch = parse_arch("sm_80");
  spec.d_qk = spec.d_v = 64;
  spec.tile_m = 128;
  spec.tile_n = 64;
  spec.warps = 4;
  spec.stages = 1;
  return spec;
}

struct Refusal {
  const char* limit;  ///< what the text must name
  void (*spoil)(KernelSpec& spec);
};

constexpr Refusal kRefusals[] = {
    {"tile_m = 96: accepted are multiples of 16 * warps = 64", [](KernelSpec& spec) { spec.tile_m = 96; }},
    {"tile_m = 0", [](KernelSpec& spec) { spec.tile_m = 0; }},
    {"tile_m = -64", [](KernelSpec& spec) { spec.tile_m = -64; }},
    {"tile_n = 24: accepted are multiples of 16", [](KernelSpec& spec) { spec.tile_n = 24; }},
    {"tile_n = 272", [](KernelSpec& spec) { spec.tile_n = 272; }},
    {"tile_n = -16", [](KernelSpec& spec) { spec.tile_n = -16; }},
    {"warps = 0: accepted are 1 to 16", [](KernelSpec& spec) { spec.warps = 0; }},
    {"warps = 17", [](KernelSpec& spec) { spec.warps = 17; }},
    {"stages = 0: accepted are 1 to 4", [](KernelSpec& spec) { spec.stages = 0; }},
    {"stages = 5", [](KernelSpec& spec) { spec.stages = 5; }},
    {"loop_bodies = 3: accepted are 1 and 2", [](KernelSpec& spec) { spec.as<Sm80Forward>().loop_bodies = 3; }},
    {"warps_n = 3: accepted are 1, 2, 4 and 8", [](KernelSpec& spec) { spec.warps_n = 3; }},
    {"warps_n = 2: warps = 4, tile_m = 128", [](KernelSpec& spec) { spec.warps_n = 2; }},
    {"warps_n = 2: warps = 10",
     [](KernelSpec& spec) {
       spec.warps_n = 2;
       spec.tile_m = 160;
       spec.warps = 10;
     }},
    {"q_in_registers = true",
     [](KernelSpec& spec) {
       spec.warps_n = 2;
       spec.tile_m = 64;
       spec.as<Sm80Forward>().q_in_registers = true;
     }},
    {"bytes of shared memory; sm_80 offers 166912",
     [](KernelSpec& spec) {
       spec.tile_n = 256;
       spec.stages = 4;
     }},
    {"registers of fragments a thread",
     [](KernelSpec& spec) {
       spec.d_qk = spec.d_v = 256;
       spec.warps = 2;
     }},
};

constexpr Refusal kRefusalsOfPairs[] = {
    {"warps_n = 2: fp32", [](KernelSpec& spec) { spec.dtype = DType::f32; }},
    {"warps_n = 2: d_v = 72", [](KernelSpec& spec) { spec.d_v = 72; }},
    {"warps_n = 2: tile_n = 48", [](KernelSpec& spec) { spec.tile_n = 48; }},
};

constexpr Refusal kRefusalsOfGroups[] = {
    {"warps_n = 4: warps = 6: accepted are multiples of it up to 8", [](KernelSpec& spec) { spec.warps = 6; }},
    {"warps_n = 4: warps = 12", [](KernelSpec& spec) { spec.warps = 12; }},
    {"warps_n = 4: tile_m = 48: accepted are multiples of 32", [](KernelSpec& spec) { spec.tile_m = 48; }},
    {"warps_n = 4: tile_n = 48: accepted are 32 and multiples of 64", [](KernelSpec& spec) { spec.tile_n = 48; }},
    {"warps_n = 4: tile_n = 32: accepted are 64 and multiples of 64", [](KernelSpec& spec) { spec.dropout = true; }},
    {"q_in_registers = true", [](KernelSpec& spec) { spec.as<Sm80Forward>().q_in_registers = true; }},
    {"stages = 1: accepted where V is in K are 2 to 4",
     [](KernelSpec& spec) {
       spec.as<Sm80Forward>().value_in_key = true;
       spec.stages = 1;
     }},
    {"value_in_key = true: accepted for groups",
     [](KernelSpec& spec) {
       spec.as<Sm80Forward>().value_in_key = true;
       spec.warps_n = 0;
       spec.tile_m = 128;
     }},
    {"bytes of shared memory; sm_80 offers 166912", [](KernelSpec& spec) { spec.stages = 3; }},
};

void expect_refusals(const KernelSpec& good, std::span<const Refusal> refusals) {
  EXPECT_EQ(sm80_forward_refusal(good), "");
  for (const Refusal& refusal : refusals) {
    KernelSpec spec = good;
    refusal.spoil(spec);
    EXPECT_NE(sm80_forward_refusal(spec).find(refusal.limit), std::string::npos)
        << refusal.limit << " is not in: " << sm80_forward_refusal(spec);
  }
}

TEST(Sm80ForwardRefusal, NamesTheLimit) {
  expect_refusals(good_spec(), kRefusals);
  KernelSpec pairs = good_spec();
  pairs.warps_n = 2;
  pairs.tile_m = 64;
  expect_refusals(pairs, kRefusalsOfPairs);
  KernelSpec groups = good_spec();
  groups.d_qk = 576;
  groups.d_v = 512;
  groups.tile_m = 64;
  groups.tile_n = 32;
  groups.warps = 8;
  groups.warps_n = 4;
  expect_refusals(groups, kRefusalsOfGroups);
}

TEST(Sm80ForwardRefusal, AcceptsTheLimitsThemselves) {
  KernelSpec spec = good_spec();
  spec.d_qk = spec.d_v = 8;
  for (const int stages : {1, 4}) {
    for (const int warps : {1, 16}) {
      for (const int tile_n : {16, 256}) {
        spec.stages = stages;
        spec.warps = warps;
        spec.tile_m = 16 * warps;
        spec.tile_n = tile_n;
        if (warps == 16 && tile_n == 256) continue;  // 512 threads get at most 128 registers
        EXPECT_EQ(sm80_forward_refusal(spec), "") << canonical(spec);
      }
    }
  }
}

// 512 threads share 65536 registers: 128 each, whatever a single thread could have.
TEST(Sm80ForwardRefusal, CountsTheRegistersOfTheWholeBlock) {
  KernelSpec spec = good_spec();
  spec.warps = 16;
  spec.tile_m = 256;
  spec.d_qk = spec.d_v = 256;
  spec.tile_n = 16;
  spec.arch = parse_arch("sm_90a");
  ASSERT_LE(shared_bytes(spec), limits(spec.arch).shared_per_block);
  EXPECT_NE(sm80_forward_refusal(spec).find("registers"), std::string::npos) << canonical(spec);
}

Problem long_problem() {
  Problem problem;
  problem.arch = parse_arch("sm_100a");
  problem.d_qk = problem.d_v = 64;
  problem.s_q = problem.s_kv = 4096;
  return problem;
}

struct BadOverride {
  const char* limit;
  Fixed fixed;
};

TEST(Sm80ForwardRefusal, TilesOfEightRowsAreForFewerBits) {
  KernelSpec spec;
  Sm80Forward& own = spec.own.emplace<Sm80Forward>();
  spec.arch = parse_arch("sm_90a");
  spec.dtype = DType::bf16;
  spec.d_qk = spec.d_v = 128;
  spec.aligned = own.split_warps = true;
  spec.tile_m = 8;
  spec.tile_n = 64;
  spec.warps = 4;
  spec.stages = 2;
  own.loop_bodies = 1;
  EXPECT_NE(sm80_forward_refusal(spec), "");
  own.k_storage = own.v_storage = 1;
  EXPECT_EQ(sm80_forward_refusal(spec), "");
  spec.stages = 1;
  EXPECT_NE(sm80_forward_refusal(spec), "");
}

TEST(Sm80ForwardSpec, RefusesAnOverrideAsABadArgument) {
  const BadOverride cases[] = {
      {"tile_m", {{"tile_m", 100}}},
      {"tile_m", {{"tile_m", -16}}},
      {"tile_m", {{"tile_m", 1 << 28}, {"warps", 1}}},
      {"tile_n", {{"tile_n", 8}}},
      {"warps", {{"warps", 33}}},
      {"warps", {{"warps", -1}}},
      {"stages", {{"stages", 5}}},
      {"stages", {{"stages", -1}}},
      {"shared memory", {{"tile_n", 256}, {"stages", 4}}},
      {"loop_bodies", {{"loop_bodies", 3}}},
      {"warps_n", {{"warps_n", 3}}},
      {"warps_n", {{"warps_n", 16}}},
      {"warps_n", {{"warps_n", -1}}},
  };
  Problem problem = long_problem();
  problem.d_qk = problem.d_v = 256;
  for (const auto& [limit, fixed] : cases) {
    try {
      plan_forward(problem, fixed);
      ADD_FAILURE() << limit << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
      EXPECT_EQ(error.field("argument"), "kernel");
      EXPECT_NE(std::string(error.what()).find(limit), std::string::npos) << error.what();
    }
  }
}

/// Tiles by the rows of a head, and by what the GPU's shared memory holds of K.
TEST(Sm80ForwardSpec, WideHeadDimsTakeGroupsOfWarps) {
  const auto tile = [](const char* arch, std::int64_t heads, bool in_key, DType dtype = DType::bf16) {
    Problem problem;
    problem.arch = parse_arch(arch);
    problem.dtype = dtype;
    problem.d_qk = 576;
    problem.d_v = 512;
    problem.value_in_key = in_key;
    problem.page_size = 64;
    problem.b = 64;
    problem.h_q = heads;
    problem.s_kv = 8192;
    const KernelSpec spec = plan_forward(problem, {Family::sm80}).kernel;
    EXPECT_EQ(spec.as<Sm80Forward>().value_in_key, in_key) << canonical(spec);
    EXPECT_TRUE(spec.pack_gqa && spec.scheduled()) << canonical(spec);
    return std::array{spec.tile_m, spec.warps, spec.warps_n, spec.tile_n, spec.stages};
  };
  EXPECT_EQ(tile("sm_90a", 128, true), (std::array{64, 8, 4, 32, 2}));
  EXPECT_EQ(tile("sm_80", 32, true), (std::array{32, 4, 4, 32, 2}));
  EXPECT_EQ(tile("sm_80", 16, true), (std::array{16, 4, 4, 32, 2}));
  EXPECT_EQ(tile("sm_89", 128, true), (std::array{16, 4, 4, 32, 2}));
  EXPECT_EQ(tile("sm_90a", 128, false), (std::array{64, 8, 4, 64, 1}));
  EXPECT_EQ(tile("sm_80", 128, true, DType::f32), (std::array{32, 4, 2, 16, 2}));
  EXPECT_THROW(tile("sm_89", 128, true, DType::f32), Error);
}

TEST(Sm80ForwardSpec, RefusesSizesThatOverflow) {
  Problem problem = long_problem();
  problem.d_qk = problem.d_v = 256;
  const Fixed cases[] = {{{"warps", 1 << 28}},
                         {{"tile_m", 1 << 28}, {"tile_n", 128}, {"warps", 1}},
                         {{"tile_m", 1 << 30}},
                         {{"stages", 1 << 30}}};
  for (const Fixed& fixed : cases) EXPECT_THROW(plan_forward(problem, fixed), Error);
}

TEST(Sm80ForwardSpec, TakesWhatTheOverrideFixes) {
  const Fixed fixed = {{"tile_m", 64}, {"tile_n", 32},           {"warps", 2},
                       {"stages", 3},  {"q_in_registers", true}, {"loop_bodies", 2}};
  const KernelSpec spec = plan_forward(long_problem(), fixed).kernel;
  EXPECT_EQ(spec.tile_m, 64);
  EXPECT_EQ(spec.tile_n, 32);
  EXPECT_EQ(spec.warps, 2);
  EXPECT_EQ(spec.stages, 3);
  EXPECT_TRUE(spec.as<Sm80Forward>().q_in_registers);
  EXPECT_EQ(spec.as<Sm80Forward>().loop_bodies, 2);
  expect_fits(spec);
}

// Pairs of warps are the planner's where one warp has no room for two m tiles, unless their exchange costs a block.
TEST(Sm80ForwardSpec, WideHeadsRunOnPairsOfWarps) {
  struct Case {
    const char* arch;
    int d_qk, d_v, warps_n, min_blocks;
    DType dtype = DType::bf16;
  };
  constexpr Case kCases[] = {
      {"sm_90a", 256, 256, 2, 2},
      {"sm_90a", 192, 128, 2, 2},
      {"sm_90a", 144, 144, 2, 2},
      {"sm_80", 256, 256, 2, 1},
      {"sm_80", 192, 192, 0, 2},
      {"sm_80", 160, 160, 2, 2},
      {"sm_86", 256, 256, 0, 1},
      {"sm_86", 192, 192, 2, 1},
      {"sm_90a", 136, 136, 0, 3},
      {"sm_90a", 128, 128, 0, 2},
      {"sm_90a", 256, 256, 0, 2, DType::f32},
  };
  for (const Case& c : kCases) {
    Problem problem = long_problem();
    problem.arch = parse_arch(c.arch);
    problem.dtype = c.dtype;
    problem.d_qk = c.d_qk;
    problem.d_v = c.d_v;
    const auto plan = [&](Fixed fixed) {
      fixed.family = Family::sm80;
      return plan_forward(problem, fixed);
    };
    const KernelSpec spec = plan({}).kernel;
    EXPECT_EQ(spec.warps_n, c.warps_n) << canonical(spec);
    EXPECT_EQ(spec.min_blocks, c.min_blocks) << canonical(spec);
    expect_fits(spec);
    EXPECT_EQ(plan({{"warps_n", 1}}).kernel.warps_n, 0);
    if (c.warps_n == 0) continue;
    EXPECT_TRUE(std::ranges::any_of(plan({}).alternatives, [](const KernelSpec& s) { return s.warps_n == 0; }));
    EXPECT_EQ(plan({{"warps_n", 2}}).kernel, spec);
  }
}

// An override is checked when an Attention is created, against long queries; a later call must not refuse it.
TEST(Sm80ForwardSpec, AnOverrideThatServesLongQueriesServesShortOnes) {
  const Fixed cases[] = {{{"warps", 8}}, {{"tile_m", 128}}, {{"tile_n", 80}}, {{"stages", 2}}, {{"warps", 2}}};
  for (const Fixed& fixed : cases) {
    Problem problem = long_problem();
    const KernelSpec spec = plan_forward(problem, fixed).kernel;
    problem.s_q = 1;
    EXPECT_NO_THROW(plan_forward(problem, fixed)) << canonical(spec);
  }
}

}  // namespace
}  // namespace fa::plan
