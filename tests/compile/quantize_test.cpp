#include <gtest/gtest.h>

#include <string>

#include "compile/architectures.hpp"
#include "compile/compiler.hpp"
#include "plan/quantize.hpp"
#include "render/source.hpp"

// The kernels that make codes compile with NVRTC for every architecture, with checks and without, and do not spill.
namespace fa {
namespace {

class QuantizeCompile : public ::testing::TestWithParam<const char*> {};

TEST_P(QuantizeCompile, RowsAndMeans) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (const std::int64_t d : {16, 48, 128, 256}) {
      plan::QuantizePass pass;
      pass.x.dtype = dtype;
      pass.x.shape = {1, 1, 2, d};
      pass.x.strides = {0, 0, d == 48 ? d + 1 : d, 1};
      pass.codes.dtype = d == 128 ? DType::e4m3 : DType::i8;
      pass.means = d == 256;
      for (const bool debug : {false, true}) {
        plan::KernelSpec spec = quantize_spec(pass, plan::parse_arch(GetParam()));
        spec.debug = debug;
        SCOPED_TRACE(canonical(spec));
        const compile::Cubin cubin = compile::compile(render::render(spec), spec.arch);
        EXPECT_EQ(cubin.log, "");
        EXPECT_TRUE(debug || cubin.facts.local_bytes == 0);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, QuantizeCompile, ::testing::ValuesIn(test::kArchitectures),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace fa
