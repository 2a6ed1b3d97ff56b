// Forwards of 8-bit floats on inputs and scales at the ends of what there is, against float64.

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "emulator/forward_run.hpp"
#include "emulator/fp8_specs.hpp"
#include "support/extreme_case.hpp"
#include "support/thorough.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::plan::KernelSpec;
using fa::test::Extreme;

// docs/numerics.md, "8-bit floats": of P and of O. Scores are off by a share of the greatest product.
constexpr fa::test::ExtremeBounds kBounds{0x1p-4 + 0x1p-6 + 0x1p-7, 0x1p-126, 0.005};

/// Of every other extreme a kernel, where FA_TESTS is not thorough.
class Fp8Extremes : public testing::TestWithParam<std::size_t> {};

TEST_P(Fp8Extremes, MatchFloat64) {
  const KernelSpec& spec = fp8_specs()[GetParam()];
  const Fp8Facts own = fp8_facts(spec);
  if (own.byte_output || own.half_output) return;  // which end sooner
  std::size_t n = 0;
  for (const Extreme& extreme : fa::test::fp8_extremes()) {
    if (extreme.causal && !spec.causal) continue;
    if (!fa::test::alternates(n++, GetParam() % 2)) continue;
    ForwardCase c;
    c.spec = spec;
    c.splits = spec.split ? 2 : 1;
    c.blocks = 2;
    c.attention = {.b = 1,
                   .h_q = 2,
                   .h_kv = 1,
                   .s_q = 70,
                   .s_kv = 130,
                   .d_qk = spec.d_qk,
                   .d_v = spec.d_v,
                   .dtype = spec.dtype,
                   .causal = spec.causal};
    SCOPED_TRACE(extreme.name + ", " + testing::PrintToString(c));
    fa::test::AttentionInputs inputs = make_inputs(c);
    extreme.change(c.attention, inputs);
    fa::test::AttentionOutputs actual;
    ASSERT_NO_THROW(actual = run_forward(c, inputs, kernels_of(c), 1));
    EXPECT_LE(extreme_error(c.attention, inputs, reference_f64(c.attention, inputs), actual, kBounds), 1);
  }
}

INSTANTIATE_TEST_SUITE_P(Hopper, Fp8Extremes, testing::Range<std::size_t>(0, fp8_specs().size()));

/// Slopes of 1e20, biases of -3e38 and sinks of NaN.
TEST(Fp8Extremes, OfWhatFunctionsCapture) {
  for (const Fp8Variant& variant : fp8_variants()) {
    if (variant.choice != "alibi" && variant.choice != "bias" && variant.choice != "sink") continue;
    const std::vector<fa::test::VariantChoice> choices = fa::test::variant_choices(false);
    const auto choice = std::ranges::find(choices, variant.choice, &fa::test::VariantChoice::name);
    ForwardCase c;
    c.spec = variant.spec;
    c.splits = variant.spec.split ? 2 : 1;
    c.blocks = 2;
    c.attention = {.b = 1,
                   .h_q = 2,
                   .h_kv = 1,
                   .s_q = 70,
                   .s_kv = 130,
                   .d_qk = variant.spec.d_qk,
                   .d_v = variant.spec.d_v,
                   .dtype = variant.spec.dtype};
    c.attention.o_dtype = fp8_facts(variant.spec).half_output ? DType::f16 : DType::bf16;
    fa::test::VariantCase made(c.attention, *choice);
    make_extreme(made);
    c.variant = &made;
    const fa::test::AttentionInputs inputs = make_inputs(c);
    SCOPED_TRACE(variant.choice);
    fa::test::AttentionOutputs actual;
    ASSERT_NO_THROW(actual = run_forward(c, inputs, kernels_of(c), 1));
    EXPECT_LE(extreme_error(c.attention, inputs, reference_f64(made, inputs), actual, kBounds), 1);
  }
}

}  // namespace
}  // namespace emulator
