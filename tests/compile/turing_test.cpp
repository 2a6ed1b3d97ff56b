#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <fa/error.hpp>
#include <string>

#include "compile/compiler.hpp"
#include "plan/append.hpp"
#include "plan/backward.hpp"
#include "plan/inspect.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/merge_states.hpp"
#include "plan/planner.hpp"
#include "render/source.hpp"
#include "support/thorough.hpp"

// Kernels for compute capability 7.5 compile, of which each call has one that does not spill. What it cannot do is
// refused by name.
namespace fa {
namespace {

plan::Problem problem_of(DType dtype, int d, bool causal) {
  plan::Problem problem;
  problem.arch = plan::parse_arch("sm_75");
  problem.dtype = dtype;
  problem.d_qk = problem.d_v = d;
  problem.causal = causal;
  problem.b = 2;
  problem.h_q = 8;
  problem.h_kv = 2;
  problem.s_q = problem.s_kv = 1024;
  return problem;
}

void expect_clean(const plan::Alternatives& kernels) {
  for (const plan::KernelSpec& spec : kernels) {
    SCOPED_TRACE(canonical(spec));
    EXPECT_LE(plan::shared_bytes(spec), 64 * 1024);
    const compile::Cubin cubin = compile::compile(render::render(spec), spec.arch);
    EXPECT_EQ(cubin.log, "");
    if (cubin.facts.local_bytes == 0) return;
  }
  ADD_FAILURE() << "every kernel spills: " << canonical(kernels.front());
}

void expect_forward(const plan::Problem& problem) {
  for (const plan::Alternatives& kernels : kernels_of(plan_forward(problem, {}))) expect_clean(kernels);
}

void expect_backward(const plan::Problem& problem, bool deterministic) {
  for (const plan::Alternatives& kernels : kernels_of(plan_backward(problem, {}, deterministic))) expect_clean(kernels);
}

void expect_unsupported(const char* argument, const plan::Problem& problem, bool backward = false) {
  try {
    backward ? static_cast<void>(plan_backward(problem, {}, false)) : static_cast<void>(plan_forward(problem, {}));
    ADD_FAILURE() << "planned";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported) << error.what();
    EXPECT_EQ(error.field("argument"), argument) << error.what();
  }
}

/// Every third head dim, where FA_TESTS is not thorough.
TEST(TuringCompile, Forward) {
  std::size_t n = 0;
  for (const int d : {8, 64, 128, 192, 256, 512}) {
    if (test::tries(n++, 3)) expect_forward(problem_of(DType::f16, d, d % 128 == 0));
  }
  for (const int d : {8, 64, 128, 192, 256, 288}) {
    if (test::tries(n++, 3)) expect_forward(problem_of(DType::f32, d, d % 128 == 0));
  }
}

/// Pages and none in turn.
TEST(TuringCompile, FewRows) {
  constexpr std::array kPages{true, false};
  std::size_t n = 0;
  for (const DType dtype : {DType::f16, DType::f32}) {
    for (const bool pages : test::tried(kPages, n++)) {
      plan::Problem problem = problem_of(dtype, 128, true);
      problem.s_q = 1;
      if (pages) problem.page_size = 16;
      expect_forward(problem);
    }
  }
}

TEST(TuringCompile, Variants) {
  plan::Variants variants;
  variants.left_window = variants.sink = true;
  variants.score = "score + bias[h, q, kv]";
  variants.captures = {{"bias", DType::f16, 3}};
  plan::Problem problem = problem_of(DType::f16, 64, true);
  problem.variants = &variants;
  problem.dropout = problem.varlen = true;
  problem.total_q = problem.total_kv = 1500;
  expect_forward(problem);
  expect_backward(problem, false);
}

/// Likewise.
TEST(TuringCompile, Backward) {
  std::size_t n = 0;
  for (const int d : {8, 64, 128, 192, 256, 384}) {
    if (test::tries(n++, 3)) expect_backward(problem_of(DType::f16, d, true), d == 128);
  }
  for (const int d : {8, 64, 128, 224}) {
    if (test::tries(++n, 3)) expect_backward(problem_of(DType::f32, d, false), d == 128);
  }
}

/// Each of one dtype in turn, where FA_TESTS is not thorough.
TEST(TuringCompile, OthersAround) {
  for (const DType dtype : {DType::f16, DType::f32}) {
    std::size_t n = 0;
    const auto has_turn = [&] { return test::alternates(n++, dtype == DType::f32); };
    plan::MergeProblem merge;
    merge.arch = plan::parse_arch("sm_75");
    merge.dtype = dtype;
    merge.d_v = 128;
    if (has_turn()) expect_clean(plan::merge_specs(merge));
    plan::AppendProblem append;
    append.arch = merge.arch;
    append.dtype = dtype;
    append.d_qk = append.d_v = 128;
    append.rotary_dims = 64;
    if (has_turn()) expect_clean(plan::append_specs(append));
    plan::Problem sums = problem_of(dtype, 128, true);
    sums.statistics = {MaxLogit::softmax, false, true, ColumnSums::query_heads, 16};
    if (has_turn()) expect_forward(sums);
    if (has_turn()) expect_clean({plan::probabilities_spec(problem_of(dtype, 128, true))});
  }
  expect_clean({plan::scan_results_spec(plan::parse_arch("sm_75"))});
}

TEST(TuringCompile, Refusals) {
  expect_unsupported("dtype", problem_of(DType::bf16, 64, false));
  expect_unsupported("dtype", problem_of(DType::bf16, 64, false), true);
  plan::Problem stored = problem_of(DType::f16, 64, false);
  stored.k_dtype = DType::i8;
  expect_unsupported("k_dtype", stored);
  expect_unsupported("kernel", problem_of(DType::f32, 512, false));
  expect_unsupported("kernel_backward", problem_of(DType::f32, 256, false), true);
  plan::MergeProblem merge;
  merge.arch = plan::parse_arch("sm_75");
  merge.d_v = 64;
  EXPECT_THROW(plan::merge_specs(merge), Error);
  EXPECT_THROW(plan::parse_arch("sm_70"), Error);
}

}  // namespace
}  // namespace fa
