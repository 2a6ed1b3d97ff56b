#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdlib>
#include <string>
#include <vector>

#include <fa/paged.hpp>

#include "compile/compiler.hpp"
#include "plan/planner.hpp"
#include "render/source.hpp"
#include "support/thorough.hpp"

// The Hopper kernels of 8-bit floats compile with NVRTC without spilling and without a wgmma that ptxas waits for; no
// GPU is involved. FA_COMPILE_GRID=1 compiles every head dim instead of a few.
namespace fa {
namespace {

plan::Problem fp8(int d_qk, int d_v, DType dtype, bool causal) {
  plan::Problem problem;
  problem.arch = plan::parse_arch("sm_90a");
  problem.dtype = problem.k_dtype = dtype;
  problem.v_dtype = dtype == DType::i8 ? DType::e4m3 : dtype;
  problem.d_qk = d_qk;
  problem.d_v = d_v;
  problem.causal = causal;
  problem.b = 2;
  problem.h_q = problem.h_kv = 16;
  problem.s_q = problem.s_kv = 8192;
  return problem;
}

/// Where FA_TESTS is not thorough, each case is of one of the three types, in turn: kernels differ in an operand's
/// name.
class Sm90Fp8ForwardCompile : public ::testing::TestWithParam<DType> {
 protected:
  void expect_clean(const plan::Problem& problem, const plan::Fixed& fixed = {}) {
    const std::size_t type = GetParam() == DType::e4m3 ? 0 : GetParam() == DType::e5m2 ? 1 : 2;
    if (!test::alternates(cases_++, type, 3)) return;
    const plan::KernelSpec spec = plan::plan_forward(problem, fixed).kernel;
    SCOPED_TRACE(canonical(spec));
    ASSERT_TRUE(spec.is<plan::Sm90Fp8Forward>());
    const compile::Cubin cubin = compile::compile(render::render(spec), spec.arch);
    EXPECT_EQ(cubin.log, "");  // what ptxas says of wgmma
    EXPECT_EQ(cubin.facts.local_bytes, 0);
    EXPECT_LE(cubin.facts.registers * spec.threads(), plan::limits(spec.arch).registers_per_sm);
  }

 private:
  std::size_t cases_ = 0;
};

TEST_P(Sm90Fp8ForwardCompile, HeadDims) {
  const bool all = std::getenv("FA_COMPILE_GRID") != nullptr;
  std::vector<int> head_dims{16, 64, 80, 128, 192, 256};
  if (all) {
    head_dims.clear();
    for (int d = 16; d <= 256; d += 16) head_dims.push_back(d);
  }
  for (const int d : head_dims) {
    for (const bool causal : {false, true}) expect_clean(fp8(d, d, GetParam(), causal));
  }
  expect_clean(fp8(192, 128, GetParam(), true));
  expect_clean(fp8(64, 256, GetParam(), true));
  expect_clean(fp8(256, 64, GetParam(), false));
}

TEST_P(Sm90Fp8ForwardCompile, SingleLevel) {
  for (const int d : {64, 128}) {
    expect_clean(fp8(d, d, GetParam(), true), {plan::Family::sm90_fp8, {{"single_level", 1}, {"tile_m", 128}}});
  }
}

TEST_P(Sm90Fp8ForwardCompile, Variants) {
  plan::Variants variants;
  variants.score = "50.0000000*tanh(score/50.0000000)";
  variants.sink = true;
  plan::Problem problem = fp8(128, 128, GetParam(), true);
  problem.o_dtype = DType::f16;
  problem.variants = &variants;
  expect_clean(problem);
  variants.left_window = true;
  problem.window_left = 1000;
  expect_clean(problem);
  variants.score.clear();
  expect_clean(problem);
  problem.h_kv = 2;
  problem.s_q = 8;
  expect_clean(problem);
}

TEST_P(Sm90Fp8ForwardCompile, PackedBatchesAndOutputsOfBytes) {
  for (const int d : {64, 128, 256}) {
    plan::Problem problem = fp8(d, d, GetParam(), true);
    problem.o_dtype = DType::e4m3;
    expect_clean(problem);
    problem.varlen = true;
    problem.total_q = problem.total_kv = 20000;
    expect_clean(problem);
    problem.o_dtype = DType::bf16;
    problem.causal = false;
    expect_clean(problem);
  }
}

TEST_P(Sm90Fp8ForwardCompile, ScalesOfKeys) {
  for (const int d : {64, 112, 128, 192, 256}) {
    plan::Problem problem = fp8(d, d, GetParam(), d == 64);
    problem.key_scales = true;
    expect_clean(problem);
    problem.value_scales = true;
    expect_clean(problem);
    problem.varlen = true;
    problem.total_q = problem.total_kv = 20000;
    expect_clean(problem);
  }
}

/// Packed batches and others in turn.
TEST_P(Sm90Fp8ForwardCompile, Pages) {
  constexpr std::array kVarlen{false, true};
  std::size_t n = 0;
  for (const int d : {64, 128, 192, 256}) {
    for (const int page_size : {16, 64, static_cast<int>(kContiguous)}) {
      plan::Problem problem = fp8(d, d, GetParam(), d != 128);
      problem.page_size = page_size;
      problem.key_scales = problem.value_scales = page_size == 16;
      problem.precise = page_size == 64;
      problem.total_q = 20000;
      for (const bool varlen : test::tried(kVarlen, n++)) {
        problem.varlen = varlen;
        expect_clean(problem);
      }
    }
  }
}

TEST_P(Sm90Fp8ForwardCompile, Precise) {
  const bool all = std::getenv("FA_COMPILE_GRID") != nullptr;
  for (int d = all ? 16 : 64; d <= 256; d += all ? 16 : 64) {
    plan::Problem problem = fp8(d, d, GetParam(), d % 128 == 0);
    problem.precise = true;
    expect_clean(problem);
    problem.varlen = true;
    problem.total_q = problem.total_kv = 20000;
    expect_clean(problem);
    problem.key_scales = problem.value_scales = true;
    expect_clean(problem);
    problem.varlen = false;
    expect_clean(problem);
  }
  plan::Variants variants;
  variants.score = "50.0000000*tanh(score/50.0000000)";
  variants.sink = variants.left_window = true;
  plan::Problem problem = fp8(128, 128, GetParam(), true);
  problem.precise = true;
  problem.variants = &variants;
  problem.window_left = 1000;
  expect_clean(problem);
  problem = fp8(192, 128, GetParam(), true);
  problem.precise = true;
  expect_clean(problem);
}

INSTANTIATE_TEST_SUITE_P(DTypes, Sm90Fp8ForwardCompile, ::testing::Values(DType::e4m3, DType::e5m2, DType::i8),
                         [](const auto& test) { return std::string(to_string(test.param)); });

}  // namespace
}  // namespace fa
