#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "compile/compiler.hpp"
#include "plan/planner.hpp"
#include "render/source.hpp"
#include "support/thorough.hpp"

// The Hopper kernels that the planner picks compile with NVRTC without spilling and without a wgmma that ptxas waits
// for; no GPU is involved. FA_COMPILE_GRID=1 compiles every head dim instead of a few.
namespace fa {
namespace {

struct Case {
  int d_qk, d_v;
  DType dtype;
  bool causal;
};

std::vector<Case> cases() {
  if (std::getenv("FA_COMPILE_GRID") == nullptr) {
    return {{64, 64, DType::bf16, true},   {128, 128, DType::f16, true},  {128, 128, DType::bf16, false},
            {192, 128, DType::bf16, true}, {192, 192, DType::f16, false}, {256, 256, DType::bf16, true},
            {8, 8, DType::f16, false},     {72, 72, DType::bf16, true},   {8, 256, DType::f16, true}};
  }
  std::vector<Case> all;
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const bool causal : {false, true}) {
      for (int d = 8; d <= 256; d += 8) all.push_back({d, d, dtype, causal});
      for (const auto& [d_qk, d_v] : {std::pair{192, 128}, {8, 256}, {256, 8}, {72, 40}, {64, 200}, {128, 192}}) {
        all.push_back({d_qk, d_v, dtype, causal});
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

/// ptxas says so when it cannot keep wgmma running in the background.
bool serialises(const std::string& log) {
  return log.find("wgmma") != std::string::npos || log.find("C75") != std::string::npos;
}

/// Bytes that a thread spills.
int expect_compiles(const plan::KernelSpec& spec) {
  SCOPED_TRACE(canonical(spec));
  const compile::Cubin cubin = compile::compile(render::render(spec), spec.arch);
  EXPECT_FALSE(serialises(cubin.log)) << cubin.log;
  EXPECT_EQ(cubin.log, "");
  EXPECT_GT(cubin.facts.registers, 0);
  EXPECT_LE(cubin.facts.registers * spec.threads(), plan::limits(spec.arch).registers_per_sm);
  ::testing::Test::RecordProperty("milliseconds", static_cast<int>(cubin.milliseconds));
  std::printf("%5.0f ms, %d bytes of local memory: %s\n", cubin.milliseconds, cubin.facts.local_bytes,
              canonical(spec).c_str());
  return cubin.facts.local_bytes;
}

/// The first choice of a plan, or what is taken in its place, compiles without spilling.
void expect_clean(const plan::ForwardPlan& plan) {
  if (expect_compiles(plan.kernel) == 0) return;
  for (const plan::KernelSpec& spec : plan.alternatives) {
    if (expect_compiles(spec) == 0) return;
  }
  ADD_FAILURE() << "every kernel spills: " << canonical(plan.kernel);
}

class Sm90ForwardCompile : public ::testing::TestWithParam<Case> {};

TEST_P(Sm90ForwardCompile, IsClean) {
  const plan::ForwardPlan plan = plan::plan_forward(problem_of(GetParam()), {});
  ASSERT_EQ(plan.kernel.family(), plan::Family::sm90);
  expect_clean(plan);
}

INSTANTIATE_TEST_SUITE_P(HeadDims, Sm90ForwardCompile, ::testing::ValuesIn(cases()), [](const auto& test) {
  const Case& c = test.param;
  return std::string(to_string(c.dtype)) + "_" + std::to_string(c.d_qk) + "x" + std::to_string(c.d_v) +
         (c.causal ? "_causal" : "");
});

TEST(Sm90ForwardCompile, Variants) {
  plan::Problem problem = problem_of({128, 128, DType::bf16, true});
  problem.positive_scale = false;
  expect_clean(plan::plan_forward(problem, {}));
  problem.positive_scale = true;
  problem.h_kv = 2;
  problem.s_q = 1;
  problem.b = 1;
  const plan::ForwardPlan decode = plan::plan_forward(problem, {});
  EXPECT_TRUE(decode.kernel.pack_gqa);
  EXPECT_TRUE(decode.kernel.split);
  EXPECT_EQ(decode.kernel.tile_m, 64);
  expect_clean(decode);
}

/// Of one request in splits, of a few by parts that blocks find, of more by a schedule.
TEST(Sm90ForwardCompile, FewRowsOverPages) {
  constexpr int kPageSizes[] = {16, -1, 8};
  std::size_t turn = 0;
  for (const int d : {64, 128, 192, 256}) {
    for (const std::int64_t b : {1, 2, 40}) {
      plan::Problem problem = problem_of({d, d, DType::bf16, true});
      problem.page_size = kPageSizes[turn++ % std::size(kPageSizes)];
      problem.h_q = 8;
      problem.h_kv = 2;
      problem.b = b;
      problem.s_q = 1;
      problem.s_kv = 8192;
      const plan::ForwardPlan planned = plan::plan_forward(problem, {});
      ASSERT_EQ(planned.kernel.family(), plan::Family::sm90);
      EXPECT_EQ(planned.kernel.split, b == 1);
      EXPECT_EQ(planned.kernel.own_parts(), b == 2);
      EXPECT_EQ(planned.kernel.scheduled(), b == 40);
      if (test::tries(turn, 2)) {
        EXPECT_EQ(expect_compiles(planned.kernel), 0);
      }
    }
  }
}

/// Of requests of a batch whose bits are their own: decodes in splits by their lengths, and prefills.
TEST(Sm90ForwardCompile, InvariantBatchesOverPages) {
  std::size_t turn = 0;
  for (const int d : {64, 128}) {
    for (const std::int64_t s_q : {1, 1024}) {
      for (const int page_size : {16, -1, 8}) {
        plan::Problem problem = problem_of({d, d, DType::bf16, true});
        problem.invariance = Invariance::batch;
        problem.page_size = page_size;
        problem.h_q = 32;
        problem.h_kv = 8;
        problem.b = 16;
        problem.s_q = s_q;
        problem.s_kv = 8192;
        const plan::ForwardPlan planned = plan::plan_forward(problem, {});
        ASSERT_EQ(planned.kernel.family(), plan::Family::sm90);
        EXPECT_EQ(planned.kernel.split, s_q == 1);
        EXPECT_EQ(planned.kernel.length_keys(), plan::kLengthKeys);
        if (test::tries(turn++, 4)) {
          EXPECT_EQ(expect_compiles(planned.kernel), 0);
        }
      }
    }
  }
}

/// Of many requests blocks take query tiles whole.
TEST(Sm90ForwardCompile, InvariantBatchesOfManyRequests) {
  std::size_t turn = 0;
  for (const int d : {64, 96, 128}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const int page_size : {0, 16, -1, 8}) {
        plan::Problem problem = problem_of({d, d, dtype, dtype == DType::bf16});
        problem.invariance = Invariance::batch;
        problem.page_size = page_size;
        problem.h_q = 32;
        problem.h_kv = 8;
        problem.b = 64;
        problem.s_q = 1;
        problem.s_kv = 8192;
        const plan::ForwardPlan planned = plan::plan_forward(problem, {});
        EXPECT_TRUE(planned.kernel.whole_tiles());
        if (test::tries(turn++, 6)) {
          EXPECT_EQ(expect_compiles(planned.kernel), 0);
        }
      }
    }
  }
}

/// Query tiles of ragged batches from a counter: each head dim with one kind of batch, over pages causal.
TEST(Sm90ForwardCompile, CountersOfRaggedBatches) {
  constexpr int kPageSizes[] = {16, 0, -1, 64};
  std::size_t turn = 0;
  for (const int d : {64, 128, 192, 256}) {
    const int page_size = kPageSizes[turn++ % std::size(kPageSizes)];
    plan::Problem problem = problem_of({d, d, DType::bf16, page_size != 0});
    problem.page_size = page_size;
    problem.varlen = turn % 2 == 0;
    problem.h_q = 8;
    problem.h_kv = 2;
    problem.b = 4;
    problem.s_q = problem.s_kv = 4096;
    problem.total_q = problem.total_kv = 4 * 4096;
    const plan::ForwardPlan planned = plan::plan_forward(problem, {{"dynamic", 1}});
    ASSERT_TRUE(planned.kernel.dynamic());
    if (test::tries(turn, 2)) {
      EXPECT_EQ(expect_compiles(planned.kernel), 0);
    }
  }
}

/// Two blocks share a multiprocessor where shared memory and registers allow; V may be wider than Q and K.
TEST(Sm90ForwardCompile, FewRowsOfUnequalHeadDims) {
  int page_size = 0;
  for (const auto& [d_qk, d_v] : {std::pair{64, 192}, {8, 200}, {128, 224}, {64, 256}, {256, 64}}) {
    plan::Problem problem = problem_of({d_qk, d_v, DType::bf16, true});
    problem.h_q = 8;
    problem.h_kv = 2;
    problem.s_q = 1;
    problem.s_kv = 8192;
    problem.b = 40;
    problem.page_size = page_size;
    page_size = 16 - page_size;
    const plan::ForwardPlan planned = plan::plan_forward(problem, {});
    ASSERT_EQ(planned.kernel.family(), plan::Family::sm90);
    expect_clean(planned);
  }
}

/// An instruction has as many columns as the registers that threads start with allow: else ptxas gives up.
TEST(Sm90ForwardCompile, TheWidestTiles) {
  plan::Problem problem = problem_of({64, 64, DType::f16, false});
  problem.dropout = true;
  const plan::Fixed drawn{{"tile_m", 128}, {"tile_n", 192}, {"stages", 2}};
  const plan::KernelSpec draws = plan::plan_forward(problem, drawn).kernel;
  EXPECT_NO_THROW((void)compile::compile(render::render(draws), draws.arch)) << canonical(draws);
  problem = problem_of({32, 32, DType::f16, false});
  problem.s_q = 1;
  for (const int tile_n : {192, 208, 224}) {
    const plan::Fixed wide{{"tile_m", 64}, {"tile_n", tile_n}, {"stages", 2}, {"q_buffers", 1}};
    const plan::KernelSpec spec = plan::plan_forward(problem, wide).kernel;
    EXPECT_EQ(spec.tile_n, tile_n);
    EXPECT_NO_THROW((void)compile::compile(render::render(spec), spec.arch)) << canonical(spec);
  }
}

}  // namespace
}  // namespace fa
