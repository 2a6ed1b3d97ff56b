#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "compile/compiler.hpp"
#include "plan/backward.hpp"
#include "plan/candidates.hpp"
#include "plan/planner.hpp"
#include "render/source.hpp"
#include "support/thorough.hpp"

// The Hopper backward kernels that the planner picks compile with NVRTC without spilling and without a wgmma that ptxas
// waits for; no GPU is involved. FA_COMPILE_GRID=1 compiles every head dim instead of a few.
namespace fa {
namespace {

struct Case {
  int d_qk, d_v;
  DType dtype;
  bool causal;
  bool deterministic = false;
};

std::vector<Case> cases() {
  if (std::getenv("FA_COMPILE_GRID") == nullptr) {
    return {{64, 64, DType::bf16, true},        {64, 64, DType::f16, false, true},    {128, 128, DType::f16, true},
            {128, 128, DType::bf16, false},     {128, 128, DType::bf16, true, true},  {8, 8, DType::f16, false},
            {72, 72, DType::bf16, true},        {96, 40, DType::f16, false},          {256, 256, DType::bf16, true},
            {192, 128, DType::f16, false},      {160, 160, DType::bf16, false, true}, {512, 512, DType::bf16, true},
            {320, 320, DType::f16, false, true}};
  }
  std::vector<Case> all;
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const bool causal : {false, true}) {
      for (const bool deterministic : {false, true}) {
        for (int d = 8; d <= 128; d += 8) all.push_back({d, d, dtype, causal, deterministic});
        for (int d = 136; d <= 512; d += 8) all.push_back({d, d, dtype, causal, deterministic});
        for (const auto& [d_qk, d_v] :
             {std::pair{128, 64}, {64, 128}, {8, 128}, {128, 8}, {72, 40}, {192, 128}, {72, 256}}) {
          all.push_back({d_qk, d_v, dtype, causal, deterministic});
        }
      }
    }
  }
  return all;
}

plan::Problem problem_of(const Case& c) {
  plan::Problem problem;
  problem.arch = plan::parse_arch("sm_90a");
  problem.dtype = c.dtype;
  problem.d_qk = c.d_qk;
  problem.d_v = c.d_v;
  problem.causal = c.causal;
  problem.b = 4;
  problem.h_q = problem.h_kv = 16;
  problem.s_q = problem.s_kv = 2048;
  return problem;
}

/// Bytes that a thread spills. The log is empty when ptxas keeps every wgmma running in the background.
int expect_compiles(const plan::KernelSpec& spec) {
  SCOPED_TRACE(canonical(spec));
  const compile::Cubin cubin = compile::compile(render::render(spec), spec.arch);
  EXPECT_EQ(cubin.log, "");
  EXPECT_GT(cubin.facts.registers, 0);
  EXPECT_LE(cubin.facts.registers * spec.threads(), plan::limits(spec.arch).registers_per_sm);
  std::printf("%5.0f ms, %d bytes of local memory: %s\n", cubin.milliseconds, cubin.facts.local_bytes,
              canonical(spec).c_str());
  return cubin.facts.local_bytes;
}

/// The first choice, or what is taken in its place, compiles without spilling.
void expect_clean(const plan::Alternatives& specs) {
  for (const plan::KernelSpec& spec : specs) {
    EXPECT_EQ(spec.family(), plan::Family::sm90);
    if (expect_compiles(spec) == 0) return;
  }
  ADD_FAILURE() << "every kernel spills: " << canonical(specs.front());
}

class Sm90BackwardCompile : public ::testing::TestWithParam<Case> {};

TEST_P(Sm90BackwardCompile, IsClean) {
  const Case& c = GetParam();
  expect_clean(plan_backward(problem_of(c), {plan::Family::sm90}, c.deterministic).main);
}

INSTANTIATE_TEST_SUITE_P(HeadDims, Sm90BackwardCompile, ::testing::ValuesIn(cases()), [](const auto& test) {
  const Case& c = test.param;
  return std::string(to_string(c.dtype)) + "_" + std::to_string(c.d_qk) + "x" + std::to_string(c.d_v) +
         (c.causal ? "_causal" : "") + (c.deterministic ? "_deterministic" : "");
});

TEST(Sm90BackwardCompile, Variants) {
  plan::Problem problem = problem_of({128, 128, DType::bf16, true});
  problem.b = problem.h_kv = 1;
  const plan::BackwardPlan split = plan_backward(problem, {{"splits", 4}}, false);
  EXPECT_TRUE(split.main.front().split);
  expect_clean(split.main);
  expect_clean(plan_backward(problem_of({96, 96, DType::bf16, true}), {{"tile_n", 64}}, false).main);
  expect_clean(plan_backward(problem_of({40, 40, DType::f16, true}), {{"tile_m", 64}, {"tile_n", 192}}, false).main);
}

/// Sums in turns, which come from memory when the accumulators are full.
TEST(Sm90BackwardCompile, Turns) {
  std::size_t turn = 0;
  for (const int d : {40, 64, 96, 128}) {
    for (const bool causal : {false, true}) {
      for (const bool deterministic : {false, true}) {
        if (!test::tries(turn++, 2)) continue;
        plan::Problem problem = problem_of({d, d, DType::bf16, causal});
        problem.h_kv = 1;
        const plan::BackwardPlan planned =
            plan_backward(problem, {plan::Family::sm90, {{"in_turns", 1}}}, deterministic);
        EXPECT_TRUE(planned.main.front().in_turns());
        expect_clean(planned.main);
      }
    }
  }
}

/// With some gradients: P and the next scores side by side in registers, and sums alone. Causal and not in turn, and
/// every other of what is wanted, where FA_TESTS is not thorough.
TEST(Sm90BackwardCompile, UnwantedGradients) {
  std::size_t n = 0, row = 0;
  for (const int d : {64, 128, 192, 256, 512}) {
    ++row;
    for (const Gradients wanted :
         {Gradients{true, false, false}, {false, true, true}, {false, true, false}, {true, false, true}}) {
      const std::size_t turn = n++;
      if (d > 128 && wanted.dk != wanted.dv) continue;
      if (!test::tries(row + turn, 2)) continue;
      for (const bool causal : {false, true}) {
        if (!test::alternates(turn, causal)) continue;
        plan::Problem problem = problem_of({d, d, DType::bf16, causal});
        problem.gradients = wanted;
        expect_clean(plan_backward(problem, {plan::Family::sm90}, false).main);
      }
    }
  }
  plan::Problem ordered = problem_of({128, 128, DType::f16, true});
  ordered.gradients = {true, false, false};
  expect_clean(plan_backward(ordered, {plan::Family::sm90}, true).main);
}

/// Debug kernels of every family of waits: they compile, know what to say, and let every wgmma run in the background.
/// Forward and backward in turn.
TEST(DebugKernels, Compile) {
  std::vector<plan::KernelSpec> specs;
  std::size_t n = 0;
  for (const int d : {64, 128, 256}) {
    for (const bool hopper : {true, false}) {
      plan::Problem problem = problem_of({d, d, DType::bf16, true});
      if (!hopper) problem.arch = plan::parse_arch("sm_80");
      const std::size_t turn = n++;
      if (test::alternates(turn, false)) {
        const plan::Fixed family{hopper ? plan::Family::sm90 : plan::Family::sm80};
        specs.push_back(plan_backward(problem, family, hopper).main.front());
      }
      if (test::alternates(turn, true)) specs.push_back(plan::plan_forward(problem, {}).kernel);
    }
  }
  plan::Problem decode = problem_of({128, 128, DType::bf16, true});
  decode.page_size = 16;
  decode.b = 2;
  decode.s_q = 1;
  specs.push_back(plan::plan_forward(decode, {}).kernel);
  ASSERT_TRUE(specs.back().own_parts());
  specs.push_back(plan_backward(problem_of({512, 512, DType::bf16, true}), {}, false).main.front());
  for (plan::KernelSpec& spec : specs) {
    const std::size_t bytes = compile::compile(render::render(spec), spec.arch).bytes.size();
    spec.debug = true;
    SCOPED_TRACE(canonical(spec));
    const compile::Cubin cubin = compile::compile(render::render(spec), spec.arch);
    EXPECT_GT(cubin.bytes.size(), bytes);
    const std::string_view text(reinterpret_cast<const char*>(cubin.bytes.data()), cubin.bytes.size());
    if (spec.own_parts()) {
      EXPECT_NE(text.find("a flag is never raised"), std::string_view::npos);
    }
    EXPECT_NE(text.find("fa_debug_report"), std::string_view::npos);
    if (spec.family() != plan::Family::sm90) continue;
    EXPECT_NE(text.find("a barrier is never complete"), std::string_view::npos);
    EXPECT_EQ(cubin.log.find("wgmma"), std::string::npos) << cubin.log;
    EXPECT_EQ(cubin.log.find("setmaxnreg"), std::string::npos) << cubin.log;
    EXPECT_LE(cubin.facts.local_bytes, 256);
  }
}

/// Functions, windows, packed batches and dropout, each by itself: ptxas lets every wgmma run in the background. Causal
/// and not in turn, and head dims in turn.
TEST(Sm90BackwardCompile, MoreThanPlainAttention) {
  struct What {
    plan::Variants variants;
    bool varlen = false;
    bool dropout = false;
  };
  What window, functions, slopes, packed, dropped, sinks;
  window.variants.left_window = window.variants.chunked = true;
  functions.variants.score = "10.0*tanh(score*0.1)";
  functions.variants.mask = "doc[q]==doc[kv]";
  functions.variants.captures = {{"doc", DType::i32, 1, false}};
  slopes.variants.score = "score-slope[h]*float(abs(q-kv))";
  slopes.variants.captures = {{"slope", DType::f32, 1, true}};
  packed.varlen = true;
  dropped.dropout = true;
  sinks.variants.sink = true;
  std::size_t n = 0, turn = 0;
  constexpr std::array kHeadDims{64, 128};
  for (const What& what : {window, functions, slopes, packed, dropped, sinks}) {
    for (const int d : test::tried(kHeadDims, n++)) {
      ++turn;
      for (const bool causal : {false, true}) {
        if (!test::alternates(turn, causal)) continue;
        const bool with_gradients = !what.variants.captures.empty() && what.variants.mask.empty();
        if (d == 128 && with_gradients) continue;  // of sm80
        plan::Problem problem = problem_of({d, d, DType::bf16, causal});
        problem.variants = what.variants.any() ? &what.variants : nullptr;
        problem.varlen = what.varlen;
        problem.dropout = what.dropout;
        problem.total_q = problem.total_kv = 4 * 2048;
        bool clean = false;
        for (const plan::KernelSpec& spec : plan_backward(problem, {}, false).main) {
          if (clean || spec.family() != plan::Family::sm90) break;
          SCOPED_TRACE(canonical(spec));
          const compile::Cubin cubin = compile::compile(render::render(spec), spec.arch);
          EXPECT_EQ(cubin.log.find("wgmma"), std::string::npos) << cubin.log;
          // Loads of a mask function stay behind their guards, which costs eight registers more than there are.
          const bool guards = d == 128 && causal && !what.variants.mask.empty();
          clean = cubin.facts.local_bytes <= (guards ? 32 : 0);
        }
        EXPECT_TRUE(clean) << "every kernel spills: d " << d << canonical(what.variants);
      }
    }
  }
}

/// What a tuner may try.
TEST(Sm90BackwardCompile, Candidates) {
  const bool grid = std::getenv("FA_COMPILE_GRID") != nullptr;
  for (int d = grid ? 8 : 128; d <= 128; d += 8) {
    for (const bool deterministic : {false, true}) {
      const plan::Problem problem = problem_of({d, d, DType::bf16, true});
      for (const plan::Candidate& candidate :
           plan::sm90_backward_candidates(problem, plan::choose_backward(problem, {}), deterministic)) {
        EXPECT_EQ(expect_compiles(candidate.spec), 0) << canonical(candidate.spec);
      }
    }
  }
}

}  // namespace
}  // namespace fa
