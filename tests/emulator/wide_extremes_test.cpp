// The Hopper forward for wide heads on inputs at the ends of what a dtype has, against float64.

#include <gtest/gtest.h>

#include <vector>

#include "emulator/forward_run.hpp"
#include "emulator/specs.hpp"
#include "support/extreme_case.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::plan::KernelSpec;
using fa::test::Extreme;

const std::vector<KernelSpec>& wide_specs() {
  static const std::vector<KernelSpec> specs = [] {
    std::vector<KernelSpec> found;
    for (const KernelSpec& spec : sm90_specs()) {
      if (spec.is<fa::plan::Sm90WideForward>()) found.push_back(spec);
    }
    return found;
  }();
  return specs;
}

class WideExtremes : public testing::TestWithParam<std::size_t> {};

TEST_P(WideExtremes, MatchFloat64) {
  const KernelSpec& spec = wide_specs()[GetParam()];
  const bool half = spec.dtype == DType::f16;
  // Of P and of O, a rounding each; f32 flushes what is below its normal numbers.
  const fa::test::ExtremeBounds bounds{2.2 * (half ? 0x1p-11 : 0x1p-8), half ? 0x1p-24 : 0x1p-126, 0x1p-20};
  for (const Extreme& extreme : fa::test::extremes()) {
    if (extreme.causal && !spec.causal) continue;
    ForwardCase c;
    c.spec = spec;
    c.blocks = 2;
    c.splits = spec.split ? 2 : 1;
    c.attention = {.b = 1,
                   .h_q = 2,
                   .h_kv = 1,
                   .s_q = 40,
                   .s_kv = 130,
                   .d_qk = spec.d_qk,
                   .d_v = spec.d_v,
                   .dtype = spec.dtype,
                   .causal = spec.causal};
    if (extreme.scale != nullptr) c.attention.scale = extreme.scale(c.attention);
    if (!spec.positive_scale) c.attention.scale = -c.attention.softmax_scale();
    SCOPED_TRACE(extreme.name + ", " + testing::PrintToString(c));
    fa::test::AttentionInputs inputs = make_inputs(c);
    extreme.change(c.attention, inputs);
    fa::test::AttentionOutputs actual;
    ASSERT_NO_THROW(actual = run_forward(c, inputs, kernels_of(c), 1));
    EXPECT_LE(extreme_error(c.attention, inputs, reference_f64(c.attention, inputs), actual, bounds), 1);
  }
}

INSTANTIATE_TEST_SUITE_P(Hopper, WideExtremes, testing::Range<std::size_t>(0, wide_specs().size()));

}  // namespace
}  // namespace emulator
