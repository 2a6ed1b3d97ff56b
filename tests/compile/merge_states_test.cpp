#include <gtest/gtest.h>

#include <cstddef>
#include <string>

#include "compile/architectures.hpp"
#include "compile/compiler.hpp"
#include "plan/merge_states.hpp"
#include "plan/planner.hpp"
#include "render/source.hpp"

// Every kind of merge compiles with NVRTC, without a toolkit header and without spilling: for every architecture where
// FA_TESTS is thorough, else for one of them.
namespace fa {
namespace {

class MergeStatesCompile : public ::testing::TestWithParam<const char*> {
 protected:
  /// One of its kernels compiles without a spilled byte.
  void expect_clean(plan::MergeProblem problem) {
    if (!test::has_turn(GetParam(), cases_++)) return;
    problem.arch = plan::parse_arch(GetParam());
    for (const plan::KernelSpec& spec : plan::merge_specs(problem)) {
      SCOPED_TRACE(canonical(spec));
      const compile::Cubin cubin = compile::compile(render::render(spec), spec.arch);
      EXPECT_GT(cubin.facts.registers, 0);
      EXPECT_LE(cubin.facts.registers * spec.threads() * spec.min_blocks, plan::limits(spec.arch).registers_per_sm);
      EXPECT_EQ(cubin.log, "");
      if (cubin.facts.local_bytes == 0) return;
    }
    ADD_FAILURE() << "every kernel spills: " << canonical(plan::merge_specs(problem).front());
  }

 private:
  std::size_t cases_ = 0;
};

TEST_P(MergeStatesCompile, HeadDims) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (const int d_v : {8, 64, 72, 128, 256}) expect_clean({.dtype = dtype, .d_v = d_v});
    expect_clean({.dtype = dtype, .d_v = 128, .aligned = false});
  }
}

TEST_P(MergeStatesCompile, Floats) {
  for (const int states : {0, 1, 2}) {
    for (const bool float_result : {false, true}) {
      for (const bool aligned : {false, true}) {
        for (const int d_v : {128, 256}) {
          expect_clean({.d_v = d_v, .states = states, .float_result = float_result, .aligned = aligned});
        }
      }
    }
  }
}

TEST_P(MergeStatesCompile, Sums) {
  for (const int d : {64, 512}) {
    expect_clean({.d_v = d, .states = 2, .float_result = true, .sum = true});
    expect_clean({.d_v = d, .states = 1, .sum = true});
  }
}

// Forwards that add to a state, and what merges their splits.
TEST_P(MergeStatesCompile, AccumulatingForwards) {
  std::size_t n = 0;
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const int d : {64, 128, 256}) {
      for (const bool causal : {false, true}) {
        for (const std::int64_t s_q : {1, 4096}) {
          if (!test::has_turn(GetParam(), n++)) continue;
          plan::Problem problem;
          problem.arch = plan::parse_arch(GetParam());
          problem.dtype = dtype;
          problem.d_qk = problem.d_v = d;
          problem.causal = causal;
          problem.s_q = s_q;
          problem.s_kv = 4096;
          problem.h_q = 8;
          problem.h_kv = 2;
          problem.accumulate = true;
          for (const plan::Alternatives& kernels : kernels_of(plan_forward(problem, {}))) {
            bool clean = false;
            for (const plan::KernelSpec& spec : kernels) {
              SCOPED_TRACE(canonical(spec));
              const compile::Cubin cubin = compile::compile(render::render(spec), spec.arch);
              EXPECT_EQ(cubin.log, "");
              clean = cubin.facts.local_bytes == 0;
              if (clean) break;
            }
            EXPECT_TRUE(clean) << "every kernel spills: " << canonical(kernels.front());
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, MergeStatesCompile, ::testing::ValuesIn(test::kArchitectures),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace fa
