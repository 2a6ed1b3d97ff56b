// Forwards on inputs at the ends of what a dtype has, against float64: those that split keys, whose parts have to weigh
// right beside any maximum, and those of Hopper for wide heads.

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "emulator/forward_run.hpp"
#include "emulator/specs.hpp"
#include "support/extreme_case.hpp"
#include "support/thorough.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::plan::KernelSpec;
using fa::test::Extreme;
using fa::test::ExtremeBounds;

const std::vector<KernelSpec>& extreme_specs() {
  static const std::vector<KernelSpec> specs = [] {
    std::vector<KernelSpec> found;
    for (const std::vector<KernelSpec>& all : {sm90_specs(), covering_specs()}) {
      std::ranges::copy_if(all, std::back_inserter(found),
                           [](const KernelSpec& spec) { return spec.split || spec.is<fa::plan::Sm90WideForward>(); });
    }
    return found;
  }();
  return specs;
}

/// Of P and of O, a rounding each; f32 flushes what is below its normal numbers.
ExtremeBounds bounds_of(DType dtype) {
  if (dtype == DType::f32) return {0x1p-18, 0x1p-126, 0x1p-20};
  const bool half = dtype == DType::f16;
  return {2.2 * (half ? 0x1p-11 : 0x1p-8), half ? 0x1p-24 : 0x1p-126, 0x1p-20};
}

ForwardCase case_of(const KernelSpec& spec, const Extreme& extreme) {
  ForwardCase c;
  c.spec = spec;
  c.blocks = 2;
  c.splits = splits_of(spec, 3);
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
  return c;
}

class ForwardExtremes : public testing::TestWithParam<std::size_t> {};

TEST_P(ForwardExtremes, MatchFloat64) {
  const KernelSpec& spec = extreme_specs()[GetParam()];
  std::size_t n = 0;
  for (const Extreme& extreme : fa::test::extremes()) {
    if (extreme.causal && !spec.causal) continue;
    if (!fa::test::alternates(n++, GetParam() % 2)) continue;  // every other one of a kernel
    const ForwardCase c = case_of(spec, extreme);
    SCOPED_TRACE(extreme.name + ", " + testing::PrintToString(c));
    fa::test::AttentionInputs inputs = make_inputs(c);
    extreme.change(c.attention, inputs);
    fa::test::AttentionOutputs actual;
    ASSERT_NO_THROW(actual = run_forward(c, inputs, kernels_of(c), 1));
    EXPECT_LE(extreme_error(c.attention, inputs, reference_f64(c.attention, inputs), actual, bounds_of(spec.dtype)), 1);
  }
}

INSTANTIATE_TEST_SUITE_P(Kernel, ForwardExtremes, testing::Range<std::size_t>(0, extreme_specs().size()));

void set_rows(fa::test::HostTensor& tensor, const auto& value) {
  const fa::TensorView view = tensor.view();
  for (std::int64_t h = 0; h < view.shape[1]; ++h) {
    for (std::int64_t s = 0; s < view.shape[2]; ++s) {
      for (std::int64_t d = 0; d < (view.rank == 4 ? view.shape[3] : 1); ++d) tensor.set(0, h, s, d, value(h, s, d));
    }
  }
}

/// A state has one float for its logarithm. Beside a large maximum both count by what such floats say, as in a kernel
/// without splits: alike where these are equal, and one alone where they are far apart.
TEST(SplitsAndAState, CountBesideALargeMaximum) {
  int tested = 0;
  for (const KernelSpec& spec : accumulating_specs()) {
    if (!spec.split) continue;
    ForwardCase c = case_of(spec, {"state", nullptr});
    c.attention.scale = spec.positive_scale ? 0.3f : -0.3f;
    fa::test::AttentionInputs inputs = make_inputs(c);
    put_equal_scores(inputs, spec.dtype == DType::f16 ? 16384 : 0x1p40, spec.positive_scale ? 1 : -1);
    SCOPED_TRACE(testing::PrintToString(c));
    ForwardCase plain = c;
    plain.spec.accumulate = false;
    const fa::test::AttentionOutputs keys = run_forward(plain, inputs, kernels_of(plain), 1);
    for (const double beside : {-1e30, 0.0, 1e30}) {
      fa::test::AttentionOutputs state = make_state(c);
      set_rows(state.o, [](auto, auto, auto) { return 1; });
      set_rows(state.lse, [&](auto h, auto s, auto) { return keys.lse.at(0, h, s) + beside; });
      c.state = &state;
      fa::test::AttentionOutputs actual;
      ASSERT_NO_THROW(actual = run_forward(c, inputs, kernels_of(c), 1));
      const double weight = beside < 0 ? 1 : beside == 0 ? 0.5 : 0;
      fa::test::AttentionOutputs expected = keys;
      set_rows(expected.o, [&](auto h, auto s, auto d) { return weight * keys.o.at(0, h, s, d) + (1 - weight); });
      if (beside > 0) expected.lse = state.lse;
      EXPECT_LE(extreme_error(c.attention, inputs, expected, actual, bounds_of(spec.dtype)), 1) << beside;
    }
    ++tested;
  }
  EXPECT_GE(tested, 2);
}

}  // namespace
}  // namespace emulator
