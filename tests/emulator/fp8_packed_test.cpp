// Forwards of 8-bit floats of packed batches against the float64 reference of the very inputs.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "emulator/fp8_packed.hpp"
#include "emulator/fp8_specs.hpp"

namespace emulator {
namespace {

class Fp8Packed : public testing::TestWithParam<std::size_t> {};

TEST_P(Fp8Packed, MatchesTheReference) {
  const fa::plan::KernelSpec& spec = fp8_packed_specs()[GetParam()];
  for (std::size_t batch = 0; batch < kFp8Batches; ++batch) {
    for (const std::uint64_t schedule : {1, 2}) {
      PackedCase c = fp8_packed_case(spec, batch);
      c.schedule = schedule;
      SCOPED_TRACE(canonical(spec) + ", " + testing::PrintToString(c));
      const fa::test::AttentionInputs inputs = fp8_packed_inputs(spec, c, batch != 1);
      fa::test::AttentionOutputs actual;
      ASSERT_NO_THROW(actual = run_packed(spec, c, inputs));
      const Fp8PackedErrors errors = fp8_packed_errors(c, inputs, actual, fp8_facts(spec).precise);
      EXPECT_LE(errors.o, 1);
      EXPECT_LE(errors.lse, 0.02);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Hopper, Fp8Packed, testing::Range<std::size_t>(0, fp8_packed_specs().size()));

class Fp8PackedVariants : public testing::TestWithParam<std::size_t> {};

TEST_P(Fp8PackedVariants, MatchTheReference) {
  const Fp8Variant& variant = fp8_packed_variants()[GetParam()];
  const std::vector<fa::test::VariantChoice> choices = fa::test::variant_choices(false);
  const auto choice = std::ranges::find(choices, variant.choice, &fa::test::VariantChoice::name);
  for (std::size_t batch = 0; batch < kFp8Batches; ++batch) {
    PackedCase c = fp8_packed_case(variant.spec, batch);
    c.attention.causal = choice->config.causal;
    fa::test::AttentionCase whole = c.attention;
    whole.b = c.sequences->count();  // captures have an entry for every sequence
    fa::test::VariantCase made(whole, *choice);
    made.config.varlen = true;
    c.variant = &made;
    SCOPED_TRACE(canonical(variant.spec) + ", " + testing::PrintToString(c));
    const fa::test::AttentionInputs inputs = fp8_packed_inputs(variant.spec, c, true);
    fa::test::AttentionOutputs actual;
    ASSERT_NO_THROW(actual = run_packed(variant.spec, c, inputs));
    const Fp8PackedErrors errors = fp8_packed_errors(c, inputs, actual);
    EXPECT_LE(errors.o, 1);
    EXPECT_LE(errors.lse, 0.02);
  }
}

INSTANTIATE_TEST_SUITE_P(Hopper, Fp8PackedVariants, testing::Range<std::size_t>(0, fp8_packed_variants().size()),
                         [](const testing::TestParamInfo<std::size_t>& parameter) {
                           const Fp8Variant& variant = fp8_packed_variants()[parameter.param];
                           return variant.choice + (variant.spec.is<fa::plan::Sm80Fp8Forward>() ? "_mma" : "");
                         });

}  // namespace
}  // namespace emulator
