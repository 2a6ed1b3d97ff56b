#include <gtest/gtest.h>

#include <string>

#include "compile/architectures.hpp"
#include "compile/compiler.hpp"
#include "plan/backward.hpp"
#include "plan/planner.hpp"
#include "render/source.hpp"

// Backward kernels that the planner picks compile with NVRTC for every architecture, without a toolkit header and
// without spilling; no GPU is involved.
namespace fa {
namespace {

class Sm80BackwardCompile : public ::testing::TestWithParam<const char*> {
 protected:
  static plan::Problem problem(DType dtype, int d_qk, int d_v, bool causal) {
    plan::Problem result;
    result.arch = plan::parse_arch(GetParam());
    result.dtype = dtype;
    result.d_qk = d_qk;
    result.d_v = d_v;
    result.causal = causal;
    result.b = 4;
    result.h_q = result.h_kv = 16;
    result.s_q = result.s_kv = 2048;
    return result;
  }

  /// Bytes that a thread spills.
  static int expect_compiles(const plan::KernelSpec& spec) {
    SCOPED_TRACE(canonical(spec));
    const compile::Cubin cubin = compile::compile(render::render(spec), spec.arch);
    EXPECT_GT(cubin.facts.registers, 0);
    EXPECT_LE(cubin.facts.registers * spec.threads() * spec.min_blocks, plan::limits(spec.arch).registers_per_sm);
    EXPECT_EQ(cubin.log, "");
    return cubin.facts.local_bytes;
  }

  /// The first choice, or what is taken in its place, compiles without spilling.
  static void expect_clean(const plan::Alternatives& specs) {
    for (const plan::KernelSpec& spec : specs) {
      if (expect_compiles(spec) == 0) return;
    }
    ADD_FAILURE() << "every kernel spills: " << canonical(specs.front());
  }
};

// Hopper's own kernels have no pass for dQ.
const plan::Fixed kThisFamily{plan::Family::sm80};

TEST_P(Sm80BackwardCompile, HeadDimsAndDtypes) {
  expect_clean(plan_backward(problem(DType::bf16, 64, 64, true), {}, false).main);
  expect_clean(plan_backward(problem(DType::f16, 128, 128, false), {}, false).main);
  expect_clean(plan_backward(problem(DType::f32, 64, 64, true), {}, false).main);
}

TEST_P(Sm80BackwardCompile, WhatGoesAround) {
  plan::Problem p = problem(DType::bf16, 72, 40, true);
  p.b = p.h_kv = 1;
  p.aligned = false;
  const plan::BackwardPlan plan = plan_backward(p, kThisFamily, true);
  EXPECT_TRUE(plan.main.front().split);
  expect_clean(plan.dq);
  for (const plan::KernelSpec& spec : {plan.preprocess, plan.convert, plan.reduce}) EXPECT_EQ(expect_compiles(spec), 0);
}

TEST_P(Sm80BackwardCompile, PackedBatchesAndDropout) {
  plan::Problem p = problem(DType::bf16, 64, 64, true);
  p.varlen = p.dropout = true;
  p.total_q = p.total_kv = 8192;
  const plan::BackwardPlan plan = plan_backward(p, kThisFamily, true);
  expect_clean(plan_backward(p, {}, false).main);
  expect_clean(plan.dq);
  for (const plan::KernelSpec& spec : {plan.preprocess, plan.convert}) EXPECT_EQ(expect_compiles(spec), 0);
}

TEST_P(Sm80BackwardCompile, GradientsOfStatistics) {
  std::size_t turn = 0;
  for (const int d : {64, 128}) {
    if (!test::has_turn(GetParam(), turn++)) continue;
    plan::Problem p = problem(DType::bf16, d, d, true);
    p.varlen = d == 64;
    p.total_q = p.total_kv = 8192;
    p.statistics = {.max_logit = MaxLogit::softmax,
                    .max_logit_by_head = d == 128,
                    .entropy = true,
                    .column_sums = ColumnSums::kv_heads,
                    .entropy_gradient = true,
                    .max_logit_gradient = true,
                    .column_sums_gradient = true};
    const plan::BackwardPlan plan = plan_backward(p, {}, true);
    EXPECT_EQ(plan.main.front().family(), plan::Family::sm80);
    expect_clean(plan_backward(p, {}, false).main);
    expect_clean(plan.dq);
    for (const plan::KernelSpec& spec : {plan.preprocess, plan.statistic_rows}) EXPECT_EQ(expect_compiles(spec), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, Sm80BackwardCompile,
                         ::testing::Values("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"),
                         [](const auto& test) { return std::string(test.param); });

/// Large head dims, on the architectures with the least and the most shared memory.
class Sm80BackwardLarge : public Sm80BackwardCompile {};

TEST_P(Sm80BackwardLarge, HeadDims) {
  expect_clean(plan_backward(problem(DType::bf16, 256, 256, true), {}, false).main);
  expect_clean(plan_backward(problem(DType::f32, 256, 256, false), {}, false).main);
  expect_clean(plan_backward(problem(DType::bf16, 192, 128, false), {}, true).main);
  expect_clean(plan_backward(problem(DType::bf16, 256, 256, false), kThisFamily, true).dq);
}

INSTANTIATE_TEST_SUITE_P(Architectures, Sm80BackwardLarge, ::testing::Values("sm_86", "sm_90a"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace fa
