#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <string>
#include <vector>

#include "compile/compiler.hpp"
#include "plan/planner.hpp"
#include "render/source.hpp"
#include "support/thorough.hpp"

// The Hopper kernels for wide heads compile with NVRTC without spilling and without a wgmma that ptxas waits for; no
// GPU is involved. FA_COMPILE_GRID=1 compiles every head dim instead of a few.
namespace fa {
namespace {

plan::Problem latent(int d_qk, int d_v, DType dtype) {
  plan::Problem problem;
  problem.arch = plan::parse_arch("sm_90a");
  problem.dtype = dtype;
  problem.d_qk = d_qk;
  problem.d_v = d_v;
  problem.value_in_key = d_v <= d_qk;
  problem.page_size = 64;
  problem.b = 64;
  problem.h_q = 128;
  problem.s_kv = 8192;
  return problem;
}

/// Where FA_TESTS is not thorough, each case is of one of the two types, in turn: kernels differ in an operand's name.
class Sm90WideForwardCompile : public ::testing::TestWithParam<DType> {
 protected:
  void expect_clean(const plan::Problem& problem) {
    if (!test::alternates(cases_++, GetParam() == DType::bf16)) return;
    const plan::KernelSpec spec = plan::plan_forward(problem, {}).kernel;
    SCOPED_TRACE(canonical(spec));
    ASSERT_TRUE(spec.is<plan::Sm90WideForward>());
    const compile::Cubin cubin = compile::compile(render::render(spec), spec.arch);
    EXPECT_EQ(cubin.log, "");  // what ptxas says of wgmma
    EXPECT_EQ(cubin.facts.local_bytes, 0);
    EXPECT_LE(cubin.facts.registers * spec.threads(), plan::limits(spec.arch).registers_per_sm);
  }

 private:
  std::size_t cases_ = 0;
};

TEST_P(Sm90WideForwardCompile, LatentAttention) {
  plan::Problem problem = latent(576, 512, GetParam());
  expect_clean(problem);
  problem.causal = true;
  expect_clean(problem);
  problem.varlen = true;
  problem.total_q = 128;
  problem.page_size = 16;
  expect_clean(problem);
  problem.page_size = 0;
  problem.total_kv = 1 << 19;
  expect_clean(problem);
  problem.varlen = false;
  expect_clean(problem);
  problem.b = 1;
  expect_clean(problem);
  problem.positive_scale = false;
  expect_clean(problem);
}

TEST_P(Sm90WideForwardCompile, HeadDims) {
  const bool all = std::getenv("FA_COMPILE_GRID") != nullptr;
  for (int d = 264; d <= 512; d += all ? 8 : 248) {
    for (const bool causal : {false, true}) {
      plan::Problem problem = latent(d, d, GetParam());
      problem.value_in_key = false;
      problem.page_size = 0;
      problem.causal = causal;
      problem.h_kv = problem.h_q;
      problem.s_q = problem.s_kv;
      expect_clean(problem);
    }
  }
  expect_clean(latent(64, 512, GetParam()));
  expect_clean(latent(576, 72, GetParam()));
  expect_clean(latent(320, 256, GetParam()));
}

TEST_P(Sm90WideForwardCompile, Variants) {
  plan::Variants variants;
  variants.score = "50.0000000*tanh(score/50.0000000)";
  variants.sink = true;
  plan::Problem problem = latent(576, 512, GetParam());
  problem.variants = &variants;
  problem.causal = true;
  expect_clean(problem);
  variants.left_window = true;
  problem.window_left = 1000;
  expect_clean(problem);
  variants.score.clear();
  expect_clean(problem);
}

INSTANTIATE_TEST_SUITE_P(DTypes, Sm90WideForwardCompile, ::testing::Values(DType::f16, DType::bf16),
                         [](const auto& test) { return std::string(to_string(test.param)); });

}  // namespace
}  // namespace fa
