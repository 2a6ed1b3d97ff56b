#include "plan/sm80_fp8_forward.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include <fa/error.hpp>
#include <fa/paged.hpp>

#include "plan/catalogue.hpp"
#include "plan/fixed.hpp"
#include "plan/planner.hpp"

namespace fa::plan {
namespace {

Problem fp8(const char* arch, int d = 128, DType dtype = DType::e4m3) {
  Problem problem;
  problem.arch = parse_arch(arch);
  problem.dtype = dtype;
  problem.d_qk = problem.d_v = d;
  problem.h_q = problem.h_kv = 16;
  problem.s_q = problem.s_kv = 4096;
  return problem;
}

std::string refusal_of(const Problem& problem, const Fixed& fixed = {}) {
  try {
    plan_forward(problem, fixed);
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

TEST(Sm80Fp8Forward, ServesGpusFrom89On) {
  for (const char* const arch : {"sm_89", "sm_100a", "sm_103a", "sm_120a"}) {
    for (const DType dtype : {DType::e4m3, DType::e5m2}) {
      EXPECT_EQ(choose(fp8(arch, 128, dtype), {}).family, Family::sm80_fp8);
      EXPECT_TRUE(plan_forward(fp8(arch, 128, dtype), {}).kernel.is<Sm80Fp8Forward>());
    }
    EXPECT_TRUE(contains(refusal_of(fp8(arch, 128, DType::i8)), "sm_90a")) << "i8 is Hopper's";
  }
  EXPECT_EQ(canonical(plan_forward(fp8("sm_89"), {}).kernel),
            "sm80_fp8_forward arch=sm_89 dtype=e4m3 d_qk=128 d_v=128 causal=0 tile_m=64 tile_n=96 "
            "warps=4 stages=1 q_in_registers=1 half_output=0 pack_gqa=0 split=0 min_blocks=2");
  for (const char* const arch : {"sm_80", "sm_86"}) EXPECT_TRUE(contains(refusal_of(fp8(arch)), "8.9"));
  EXPECT_EQ(choose(fp8("sm_89", 128, DType::bf16), {}).family, Family::sm80);
}

/// What the copy engine, or the kernel that it feeds, cannot serve; by an override everything.
TEST(Sm80Fp8Forward, ServesHopperBehindItsOwnKernel) {
  Problem problem = fp8("sm_90a");
  EXPECT_EQ(choose(problem, {}).family, Family::sm90_fp8);
  problem.page_size = -1;
  EXPECT_EQ(choose(problem, {}).family, Family::sm90_fp8);
  problem.s_kv = (std::int64_t{1} << 30) + 1;
  EXPECT_EQ(choose(problem, {}).family, Family::sm80_fp8);
  problem = fp8("sm_90a");
  EXPECT_EQ(choose(problem, {Family::sm80_fp8}).family, Family::sm80_fp8);
  problem.tensor_maps = false;
  EXPECT_EQ(choose(problem, {}).family, Family::sm80_fp8);
  EXPECT_TRUE(contains(refusal_of(problem, {Family::sm90_fp8}), "copy engine"));
  problem.precise = true;
  EXPECT_TRUE(contains(refusal_of(problem), "copy engine"));
  problem = fp8("sm_90a");
  problem.page_size = 20;
  EXPECT_EQ(choose(problem, {}).family, Family::sm80_fp8);
  problem = fp8("sm_90a");
  Variants mask;
  mask.mask = "q>=kv";
  problem.variants = &mask;
  EXPECT_TRUE(plan_forward(problem, {}).kernel.is<Sm80Fp8Forward>());
  problem.aligned = false;
  EXPECT_TRUE(contains(refusal_of(problem), "multiples of 16 bytes")) << refusal_of(problem);
  EXPECT_FALSE(contains(refusal_of(problem), "copy engine")) << "no kernel of such rows needs it";
}

/// Whose kernels a command compiles for calls of any strides, and which stand in for others.
TEST(Sm80Fp8Forward, IsTheLastOfItsTypes) {
  for (const char* const arch : {"sm_89", "sm_90a", "sm_120a"}) {
    EXPECT_EQ(last_forward_family(fp8(arch)).family, Family::sm80_fp8);
    EXPECT_EQ(last_forward_family(fp8(arch, 128, DType::bf16)).family, Family::sm80);
  }
  EXPECT_EQ(last_forward_family(fp8("sm_90a", 128, DType::i8)).family, Family::sm90_fp8);
  Problem precise = fp8("sm_90a");
  precise.precise = true;
  EXPECT_EQ(last_forward_family(precise).family, Family::sm90_fp8);
}

TEST(Sm80Fp8Forward, RefusesByName) {
  using Change = void (*)(Problem&);
  struct Refusal {
    const char* says;
    Change change;
  };
  const Refusal kRefusals[] = {
      {"multiples of 16 up to 256", [](Problem& p) { p.d_qk = 264; }},
      {"multiples of 16 up to 256", [](Problem& p) { p.d_v = 40; }},
      {"dropout", [](Problem& p) { p.dropout = true; }},
      {"accumulate", [](Problem& p) { p.accumulate = true; }},
      {"value_in_key", [](Problem& p) { p.value_in_key = true; }},
      {"invariance", [](Problem& p) { p.invariance = Invariance::batch; }},
      {"sm_90a", [](Problem& p) { p.precise = true; }},
      {"multiples of 16 bytes", [](Problem& p) { p.aligned = false; }},
  };
  for (const Refusal& refusal : kRefusals) {
    Problem problem = fp8("sm_120a");
    refusal.change(problem);
    EXPECT_TRUE(contains(refusal_of(problem), refusal.says)) << refusal.says << ": " << refusal_of(problem);
  }
  EXPECT_FALSE(refusal_of(fp8("sm_120a"), {Family::sm80}).empty());
  EXPECT_FALSE(refusal_of(fp8("sm_120a", 128, DType::bf16), {Family::sm80_fp8}).empty());
}

TEST(Sm80Fp8Forward, RefusesFieldsThatDoNotFit) {
  const auto plan = [](const char* name, int value) {
    return refusal_of(fp8("sm_89"), {Family::sm80_fp8, {{name, value}}});
  };
  EXPECT_EQ(plan("tile_m", 128), "");
  EXPECT_EQ(plan("warps", 2), "");
  EXPECT_EQ(plan("single_level", 1), "");
  EXPECT_TRUE(contains(plan("tile_m", 96), "16 * warps"));
  EXPECT_TRUE(contains(plan("tile_n", 48), "multiples of 32"));
  EXPECT_TRUE(contains(plan("stages", 5), "1 to 4"));
  EXPECT_TRUE(contains(plan("warps", 9), "1 to 8"));
  EXPECT_TRUE(contains(plan("tile_m", 256), "registers"));
  EXPECT_TRUE(contains(refusal_of(fp8("sm_89"), {Family::sm80_fp8, {{"tile_m", 128}, {"tile_n", 128}}}), "registers"));
  Problem scaled = fp8("sm_89");
  scaled.value_scales = true;
  EXPECT_TRUE(contains(refusal_of(scaled, {Family::sm80_fp8, {{"single_level", 1}}}), "value_scales"));
}

TEST(Sm80Fp8Forward, FitsEveryHeadDimAndKindOfCall) {
  for (const char* const arch : {"sm_89", "sm_90a", "sm_100a", "sm_120a"}) {
    for (int d = 16; d <= 256; d += 16) {
      for (const bool scales : {false, true}) {
        for (const std::int64_t s_q : {1, 4096}) {
          Problem problem = fp8(arch, d);
          problem.s_q = s_q;
          problem.key_scales = problem.value_scales = scales;
          const ForwardPlan plan = plan_forward(problem, {Family::sm80_fp8});
          EXPECT_EQ(refusal(plan.kernel), "");
          EXPECT_LE(plan.kernel.min_blocks * (shared_bytes(plan.kernel) + 1024), limits(problem.arch).shared_per_sm);
        }
      }
    }
  }
}

TEST(Sm80Fp8Forward, FewRowsOverLongKeysHaveSplits) {
  Problem problem = fp8("sm_120a");
  problem.h_q = 32;
  problem.h_kv = 8;
  problem.s_q = 1;
  problem.s_kv = 32768;
  problem.o_dtype = DType::e4m3;
  const ForwardPlan plan = plan_forward(problem, {});
  EXPECT_TRUE(plan.kernel.split && plan.kernel.pack_gqa);
  EXPECT_TRUE(plan.kernel.as<Sm80Fp8Forward>().byte_output);
  EXPECT_EQ(plan.combine.dtype, DType::e4m3);
  problem.page_size = static_cast<int>(kContiguous);
  EXPECT_FALSE(plan_forward(problem, {}).kernel.split) << "lengths are the device's";
  EXPECT_FALSE(choose(problem, {}).scheduled);
}

/// sm80 and sm80_fp8 share a place in the table of a call's kernels: no dtype has both.
TEST(Sm80Fp8Forward, SharesItsSlotsWithNoFamilyOfItsDtypes) {
  const Choice mma = choose(fp8("sm_90a"), {Family::sm80_fp8});
  const Choice wgmma = choose(fp8("sm_90a"), {});
  EXPECT_NE(mma.slot() / 4096, wgmma.slot() / 4096);
  EXPECT_LT(mma.slot(), Choice::kSlots);
}

}  // namespace
}  // namespace fa::plan
