#include "plan/sm80_backward.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <fa/error.hpp>
#include <string>
#include <utility>
#include <vector>

#include "plan/backward.hpp"
#include "plan/planner.hpp"
#include "unit/plan/launches.hpp"

namespace fa::plan {
namespace {

constexpr int kRegistersPerThread = 255;
// Addresses and the loop's own state, beside the fragments: without them nothing runs.
constexpr int kLoopRegisters = 40;

void expect_fits(const KernelSpec& spec) {
  SCOPED_TRACE(canonical(spec));
  EXPECT_EQ(spec.op() == Op::backward ? sm80_backward_refusal(spec) : sm80_backward_dq_refusal(spec), "");
  const ArchLimits arch = limits(spec.arch);
  const int shared = shared_bytes(spec);
  EXPECT_LE(shared, arch.shared_per_block);
  EXPECT_LE(spec.min_blocks * (shared + 1024), arch.shared_per_sm);
  ASSERT_GE(spec.min_blocks, 1);
  EXPECT_LE(spec.threads(), 1024);
  const int offered = std::min(kRegistersPerThread, arch.registers_per_sm / (spec.threads() * spec.min_blocks) / 8 * 8);
  const int held = spec.op() == Op::backward ? sm80_backward_registers(spec) : sm80_backward_dq_registers(spec);
  EXPECT_LE(held + kLoopRegisters, offered);
}

Problem problem(const char* arch, DType dtype, int d_qk, int d_v) {
  Problem result;
  result.arch = parse_arch(arch);
  result.dtype = dtype;
  result.d_qk = d_qk;
  result.d_v = d_v;
  result.b = 4;
  result.h_q = result.h_kv = 16;
  result.s_q = result.s_kv = 2048;
  return result;
}

const Fixed kOfThisFamily{Family::sm80};

class Sm80BackwardPlan : public ::testing::TestWithParam<const char*> {};

TEST_P(Sm80BackwardPlan, EveryHeadDimHasKernelsThatFit) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (int d = 8; d <= 256; d += 8) {
      for (const int other : {d, 8, 72, 128, 256}) {
        Problem p = problem(GetParam(), dtype, d, other);
        p.causal = d % 16 == 0;
        for (const bool deterministic : {false, true}) {
          const BackwardPlan plan = plan_backward(p, kOfThisFamily, deterministic);
          ASSERT_FALSE(plan.main.empty());
          for (const KernelSpec& spec : plan.main) {
            expect_fits(spec);
            EXPECT_EQ(spec.write_dq, !deterministic);
            EXPECT_EQ(spec.causal, p.causal);
            EXPECT_EQ(spec.d_qk, d);
            EXPECT_EQ(spec.d_v, other);
          }
          EXPECT_EQ(plan.dq.empty(), !deterministic);
          for (const KernelSpec& spec : plan.dq) expect_fits(spec);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, Sm80BackwardPlan,
                         ::testing::Values("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"),
                         [](const auto& test) { return std::string(test.param); });

TEST(Sm80Backward, OverridesAreTakenOrRefusedWithTheLimit) {
  const Problem p = problem("sm_90a", DType::bf16, 64, 64);
  Fixed fixed;
  fixed.set("tile_m", 32);
  fixed.set("tile_n", 64);
  fixed.set("warps", 4);
  fixed.set("stages", 2);
  const KernelSpec spec = plan_backward(p, fixed, false).main.front();
  EXPECT_EQ(spec.family(), Family::sm80) << "its number of warps is of this family";
  EXPECT_EQ(spec.tile_m, 32);
  EXPECT_EQ(spec.tile_n, 64);
  EXPECT_EQ(spec.warps, 4);
  EXPECT_EQ(spec.stages, 2);

  const auto refusal = [&](Fixed wrong) -> std::string {
    wrong.family = Family::sm80;
    try {
      plan_backward(p, wrong, false);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      return error.what();
    }
    return "accepted";
  };
  EXPECT_NE(refusal({{"tile_m", 24}}).find("tile_m = 24"), std::string::npos) << refusal({{"tile_m", 24}});
  EXPECT_NE(refusal({{"tile_n", 512}}).find("tile_n = 512"), std::string::npos);
  EXPECT_NE(refusal({{"warps", 17}}).find("warps = 17"), std::string::npos);
  EXPECT_NE(refusal({{"stages", 3}}).find("stages = 3"), std::string::npos);
  EXPECT_NE(refusal({{"tile_m", 256}, {"tile_n", 256}, {"warps", 16}}).find("shared memory"), std::string::npos)
      << refusal({{"tile_m", 256}, {"tile_n", 256}, {"warps", 16}});
}

TEST(Sm80Backward, FieldsThatDoNotFitAreNamed) {
  const KernelSpec good = plan_backward(problem("sm_90a", DType::bf16, 64, 64), kOfThisFamily, false).main.front();
  const auto refusal = [&](void (*change)(KernelSpec&)) {
    KernelSpec spec = good;
    change(spec);
    return sm80_backward_refusal(spec);
  };
  EXPECT_EQ(sm80_backward_refusal(good), "");
  EXPECT_TRUE(refusal([](KernelSpec& spec) { spec.warps_n = 3; }).starts_with("warps_n = 3"));
  EXPECT_TRUE(
      refusal([](KernelSpec& spec) { spec.as<Sm80Backward>().dq_warps_m = 16; }).starts_with("dq_warps_m = 16"));
  EXPECT_TRUE(refusal([](KernelSpec& spec) {
                spec.as<Sm80Backward>().operands_in_registers = 3;
              }).starts_with("operands_in_registers"));
  EXPECT_TRUE(refusal([](KernelSpec& spec) {
                spec.dtype = DType::f32, spec.as<Sm80Backward>().operands_in_registers = 1;
              }).starts_with("operands_in_registers"));
}

TEST(BackwardChoice, FewKeyTilesWithManyRowsAreSplit) {
  Problem p = problem("sm_80", DType::bf16, 64, 64);
  EXPECT_EQ(choose_backward(p, {}).splits, 1);
  p.b = 1;
  p.h_q = 16;
  p.h_kv = 1;
  p.s_q = p.s_kv = 1024;
  EXPECT_EQ(choose_backward(p, {}).splits, 24);  // 8 tiles of keys, 192 blocks
  p.s_q = 32;
  EXPECT_EQ(choose_backward(p, {}).splits, 1);  // 512 rows in all
  EXPECT_EQ(choose_backward(p, {{"splits", 5}}).splits, 5);
  p.s_kv = 0;
  EXPECT_EQ(choose_backward(p, {}).splits, 1);
}

TEST(BackwardWorkspace, SectionsFollowEachOtherAligned) {
  Problem p = problem("sm_90a", DType::bf16, 72, 40);
  p.b = 2;
  p.h_q = 6;
  p.h_kv = 3;
  p.s_q = 33;
  p.s_kv = 100;
  const WorkspaceLayout plain = backward_workspace(p, {}, BackwardNeeds{});
  EXPECT_EQ(padded_rows(p, {}), 48);
  const std::size_t row = 2 * 6 * 48 * sizeof(float);
  EXPECT_GE(plain.offset(Section::delta) - plain.offset(Section::lse_log2), row);
  EXPECT_GE(plain.offset(Section::dq_accum) - plain.offset(Section::delta), row);
  EXPECT_GE(plain.bytes() - plain.offset(Section::dq_accum), row * 72);
  for (const Section section : {Section::lse_log2, Section::delta, Section::dq_accum}) {
    EXPECT_EQ(plain.offset(section) % 256, 0U) << name_of(section);
  }
  EXPECT_EQ(plain.bytes() % 256, 0U);
  EXPECT_FALSE(plain.has(Section::partial_dkv));
  const WorkspaceLayout split = backward_workspace(p, {.splits = 3}, BackwardNeeds{});
  EXPECT_EQ(split.offset(Section::partial_dkv), plain.bytes());
  EXPECT_GE(split.bytes(Section::partial_dkv), 3 * 2 * 3 * 100 * (72 + 40) * sizeof(float));
  // A pass of its own for dQ needs no accumulator.
  const WorkspaceLayout repeatable = backward_workspace(p, {}, BackwardNeeds{.dq_accum = false});
  EXPECT_EQ(plain.bytes() - repeatable.bytes(), row * 72);
  EXPECT_EQ(backward_workspace_size(p, {Family::sm80}, false).bytes, plain.bytes());
  EXPECT_EQ(backward_workspace_size(p, {Family::sm80}, true).bytes, repeatable.bytes());
}

TEST(Sm80BackwardPlan, DqAloneIsAPass) {
  Problem p = problem("sm_80", DType::bf16, 64, 64);
  p.gradients = {true, false, false};
  for (const bool deterministic : {false, true}) {
    const BackwardPlan plan = plan_backward(p, {}, deterministic);
    EXPECT_EQ(plan.main, sm80_backward_dq_specs(p));
    EXPECT_TRUE(plan.dq.empty());
    EXPECT_EQ(kernels_of(plan).size(), 2U);  // and the statistics
    EXPECT_FALSE(backward_needs(p, plan.main.front(), {}).dq_accum);
  }
  EXPECT_NE(choose_backward(p, {}).slot(), choose_backward(problem("sm_80", DType::bf16, 64, 64), {}).slot());
}

TEST(Sm80BackwardPlan, UnwantedGradientsAreInTheSpec) {
  Problem p = problem("sm_80", DType::bf16, 64, 64);
  p.gradients = {false, true, false};
  const BackwardPlan plan = plan_backward(p, {}, false);
  for (const KernelSpec& spec : plan.main) {
    EXPECT_FALSE(spec.write_dq || spec.without_dk || spec.as<Sm80Backward>().delayed_dq) << canonical(spec);
    EXPECT_TRUE(spec.without_dv);
  }
  EXPECT_EQ(kernels_of(plan).size(), 2U);
  p.gradients = {};
  EXPECT_EQ(canonical(plan_backward(p, {}, false).main.front()).find("without"), std::string::npos);
}

TEST(BackwardLaunch, SomeKernelHasToWriteDq) {
  KernelSet kernels;
  kernels[Role::attention].tile_m = kernels[Role::attention].tile_n = 64;
  kernels[Role::attention].write_dq = false;
  try {
    backward_launch(problem("sm_90a", DType::bf16, 64, 64), {}, 0.5, {}, kernels, 2);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::internal);
  }
}

TEST(BackwardLaunch, GridsCoverWhatThereIs) {
  Problem p = problem("sm_90a", DType::bf16, 64, 64);
  p.b = 2;
  p.h_q = 6;
  p.h_kv = 3;
  p.s_q = 300;
  p.s_kv = 500;
  KernelSet kernels;
  kernels[Role::attention].own = Sm80Backward{};
  kernels[Role::attention].tile_m = 64;
  kernels[Role::attention].tile_n = 128;
  kernels[Role::dq].tile_m = 128;
  kernels[Role::reduce].warps = 4;
  const BackwardLaunch plain = backward_launch(p, {}, 0.5, {}, kernels, 2);
  EXPECT_EQ(plain.grids.preprocess, 2 * 6 * 19);
  EXPECT_EQ(plain.grids.main, 2 * 3 * 4);
  EXPECT_EQ(plain.grids.reduce, 0);
  EXPECT_EQ(plain.grids.dq, 0);
  EXPECT_EQ(plain.grids.convert, plain.grids.preprocess);
  EXPECT_EQ(plain.params.group, 2);
  EXPECT_EQ(plain.params.causal_shift, 200);
  EXPECT_EQ(plain.params.m_blocks, 5);
  EXPECT_EQ(plain.params.padded_rows, 304);
  EXPECT_NE(plain.params.dq_accum, nullptr);
  EXPECT_EQ(plain.params.partial, nullptr);
  EXPECT_FLOAT_EQ(plain.params.scale_log2, 0.72134752f);

  kernels[Role::attention].write_dq = false;
  const BackwardLaunch split = backward_launch(p, {}, 0.5, {.splits = 3}, kernels, 2);
  EXPECT_EQ(split.grids.main, 3 * plain.grids.main);
  EXPECT_EQ(split.grids.reduce, 2 * 3 * 500 / 4);
  EXPECT_EQ(split.grids.dq, 2 * 6 * 3);
  EXPECT_EQ(split.grids.convert, 0);
  EXPECT_EQ(split.params.dq_accum, nullptr);
  EXPECT_EQ(split.dq_params.m_blocks, 3);

  p.s_q = 0;
  const BackwardLaunch no_rows = backward_launch(p, {}, 0.5, {}, kernels, 2);
  EXPECT_EQ(no_rows.grids.preprocess, 0);
  EXPECT_EQ(no_rows.grids.main, plain.grids.main);  // it writes zeros
}

}  // namespace
}  // namespace fa::plan
