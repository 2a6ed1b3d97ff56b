#include <gtest/gtest.h>

#include <cstddef>
#include <string>

#include "compile/architectures.hpp"
#include "compile/compiler.hpp"
#include "plan/append.hpp"
#include "render/source.hpp"

// Every kind of append compiles with NVRTC, without a toolkit header and without spilling: for every architecture where
// FA_TESTS is thorough, else for one of them.
namespace fa {
namespace {

class AppendCompile : public ::testing::TestWithParam<const char*> {
 protected:
  /// One of its kernels compiles without a spilled byte.
  void expect_clean(plan::AppendProblem problem) {
    if (!test::has_turn(GetParam(), cases_++)) return;
    problem.arch = plan::parse_arch(GetParam());
    for (const plan::KernelSpec& spec : plan::append_specs(problem)) {
      SCOPED_TRACE(canonical(spec));
      const compile::Cubin cubin = compile::compile(render::render(spec), spec.arch);
      EXPECT_GT(cubin.facts.registers, 0);
      EXPECT_LE(cubin.facts.registers * spec.threads() * spec.min_blocks, plan::limits(spec.arch).registers_per_sm);
      EXPECT_EQ(cubin.log, "");
      if (cubin.facts.local_bytes == 0) return;
    }
    ADD_FAILURE() << "every kernel spills: " << canonical(plan::append_specs(problem).front());
  }

 private:
  std::size_t cases_ = 0;
};

TEST_P(AppendCompile, CachesWithoutRotaryEmbedding) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (const int page_size : {0, 1, 12, 64}) {
      expect_clean({.dtype = dtype, .d_qk = 128, .d_v = 64, .page_size = page_size, .aligned = page_size != 12});
    }
  }
}

TEST_P(AppendCompile, RotaryEmbedding) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (const bool interleaved : {false, true}) {
      for (const int dims : {2, 20, 128}) {
        for (const int table : {0, 1, 2}) {
          if (table > 0 && (dims != 128 || (dtype == DType::f32 && table == 2))) continue;
          expect_clean({.dtype = dtype,
                        .d_qk = 128,
                        .d_v = 128,
                        .page_size = 16,
                        .rotary_dims = dims,
                        .interleaved = interleaved,
                        .table = table,
                        .aligned = dims != 2});
        }
      }
    }
    expect_clean({.dtype = dtype, .d_qk = 256, .d_v = 256, .page_size = 16, .rotary_dims = 256});
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, AppendCompile, ::testing::ValuesIn(test::kArchitectures),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace fa
