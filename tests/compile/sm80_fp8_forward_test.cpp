#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdlib>
#include <string>

#include <fa/paged.hpp>

#include "compile/compiler.hpp"
#include "plan/catalogue.hpp"
#include "plan/planner.hpp"
#include "render/source.hpp"
#include "support/thorough.hpp"

// The mma.sync kernels of 8-bit floats compile with NVRTC for every architecture that has the instruction, and one of
// each plan does not spill, but for a few bytes on 9.0 and 10.0; no GPU is involved. FA_COMPILE_GRID=1 compiles every
// head dim instead of a few.
namespace fa {
namespace {

constexpr std::array kArchitectures{"sm_89", "sm_120a", "sm_100a", "sm_90a"};

/// Where FA_TESTS is not thorough, each case is for one of the architectures, in turn.
class Sm80Fp8ForwardCompile : public ::testing::TestWithParam<std::size_t> {
 protected:
  plan::Problem fp8(int d_qk, int d_v, bool causal, DType dtype = DType::e4m3) const {
    plan::Problem problem;
    problem.arch = plan::parse_arch(kArchitectures[GetParam()]);
    problem.dtype = problem.k_dtype = problem.v_dtype = dtype;
    problem.d_qk = d_qk;
    problem.d_v = d_v;
    problem.causal = causal;
    problem.b = 2;
    problem.h_q = problem.h_kv = 16;
    problem.s_q = problem.s_kv = 8192;
    return problem;
  }

  void expect_clean(const plan::Problem& problem, const plan::Fixed& fixed = {plan::Family::sm80_fp8}) {
    if (!test::alternates(cases_++, GetParam(), kArchitectures.size())) return;
    const plan::Alternatives specs = kernels_of(plan::plan_forward(problem, fixed)).front();
    std::string tried;
    for (const plan::KernelSpec& spec : specs) {
      ASSERT_TRUE(spec.is<plan::Sm80Fp8Forward>());
      const compile::Cubin cubin = compile::compile(render::render(spec), spec.arch);
      EXPECT_LE(cubin.facts.registers * spec.threads() * spec.min_blocks, plan::limits(spec.arch).registers_per_sm);
      tried += canonical(spec) + ": " + std::to_string(cubin.facts.local_bytes) + " bytes\n";
      if (cubin.facts.local_bytes <= spec.kernel().harmless_spill(spec)) return;
    }
    ADD_FAILURE() << "all of these spill:\n" << tried;
  }

 private:
  std::size_t cases_ = 0;
};

TEST_P(Sm80Fp8ForwardCompile, HeadDims) {
  const bool all = std::getenv("FA_COMPILE_GRID") != nullptr;
  for (int d = 16; d <= 256; d += all ? 16 : 48) {
    for (const DType dtype : {DType::e4m3, DType::e5m2}) expect_clean(fp8(d, d, d % 32 == 0, dtype));
  }
  expect_clean(fp8(128, 128, true));
  expect_clean(fp8(192, 128, true));
  expect_clean(fp8(64, 256, false));
  expect_clean(fp8(256, 64, true));
}

TEST_P(Sm80Fp8ForwardCompile, PackedBatchesScalesAndOutputs) {
  for (const int d : {64, 128, 192, 256}) {
    plan::Problem problem = fp8(d, d, d != 128);
    problem.o_dtype = DType::e4m3;
    problem.key_scales = true;
    expect_clean(problem);
    problem.value_scales = true;
    problem.varlen = true;
    problem.total_q = problem.total_kv = 20000;
    expect_clean(problem);
    problem.o_dtype = DType::f16;
    problem.key_scales = problem.value_scales = false;
    expect_clean(problem);
  }
}

TEST_P(Sm80Fp8ForwardCompile, Pages) {
  constexpr std::array kPageSizes{20, 64, static_cast<int>(kContiguous)};
  std::size_t turn = 0;
  for (const int d : {64, 128, 256}) {
    for (const int page_size : test::tried(kPageSizes, turn++)) {
      plan::Problem problem = fp8(d, d, true);
      problem.page_size = page_size;
      problem.key_scales = problem.value_scales = page_size != 64;
      expect_clean(problem);
      problem.h_kv = 4;
      problem.s_q = 4;
      expect_clean(problem);
      problem.varlen = true;
      problem.total_q = 8;
      expect_clean(problem);
    }
  }
}

TEST_P(Sm80Fp8ForwardCompile, VariantsAndSplits) {
  for (const int d : {64, 128, 256}) {
    plan::Variants variants;
    variants.score = "50.0000000*tanh(score/50.0000000)";
    variants.sink = true;
    plan::Problem problem = fp8(d, d, true);
    problem.variants = &variants;
    expect_clean(problem);
    variants.left_window = true;
    problem.window_left = 1000;
    variants.score.clear();
    expect_clean(problem);
    variants.mask = "q%3>=kv%2";
    problem.causal = false;
    expect_clean(problem);
    problem = fp8(d, d, false);
    problem.b = 1;
    problem.h_kv = 2;
    problem.s_q = 8;
    ASSERT_TRUE(plan::plan_forward(problem, {}).kernel.split);
    expect_clean(problem);
  }
}

TEST_P(Sm80Fp8ForwardCompile, SingleLevelAndBoundedGrids) {
  expect_clean(fp8(64, 64, false), {plan::Family::sm80_fp8, {{"single_level", 1}}});
  plan::Problem problem = fp8(128, 128, true);
  problem.bounded = true;
  expect_clean(problem);
}

INSTANTIATE_TEST_SUITE_P(Architectures, Sm80Fp8ForwardCompile, ::testing::Range<std::size_t>(0, kArchitectures.size()),
                         [](const auto& test) { return std::string(kArchitectures[test.param]); });

}  // namespace
}  // namespace fa
