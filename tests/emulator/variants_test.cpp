// Kernels with score and mask functions, windows, chunks and sinks against the float64 reference, and against
// themselves under other schedules.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "emulator/backward_run.hpp"
#include "emulator/forward_run.hpp"
#include "emulator/variant_specs.hpp"

namespace emulator {
namespace {

using fa::CausalAlign;
using fa::DType;
using fa::test::AttentionCase;
using fa::test::AttentionOutputs;
using fa::test::HostTensor;
using fa::test::VariantCase;
using fa::test::VariantGradients;

constexpr std::size_t kLaunches = 7;

struct Launch {
  std::int64_t b, h_q, h_kv, s_q, s_kv;
  CausalAlign align;
  Placement placement;
  bool dlse;
};
constexpr Launch kAllLaunches[kLaunches] = {
    {1, 2, 1, 70, 70, CausalAlign::bottom_right, Placement::bhsd, false},
    {2, 4, 2, 33, 65, CausalAlign::bottom_right, Placement::bshd, true},
    {1, 3, 1, 65, 34, CausalAlign::bottom_right, Placement::padded, true},
    {1, 2, 2, 40, 100, CausalAlign::top_left, Placement::bhsd, false},
    {2, 2, 1, 1, 50, CausalAlign::bottom_right, Placement::bhsd, true},
    {2, 2, 1, 40, 136, CausalAlign::bottom_right, Placement::bhsd, false},  // rows of captures are 16-byte aligned
    {1, 2, 2, 96, 101, CausalAlign::bottom_right, Placement::bshd, true},   // and each otherwise
};

VariantCase make_case(const VariantKernels& kernels, const Launch& launch) {
  AttentionCase c = kernels.attention;
  c.b = launch.b;
  c.h_q = launch.h_q;
  c.h_kv = launch.h_kv;
  c.s_q = launch.s_q;
  c.s_kv = launch.s_kv;
  c.causal_align = launch.align;
  return variant_case(kernels, c);
}

/// What an error may be of the largest element: rounding of P, dS and results, and of a fast tanh.
double tolerance(DType dtype) {
  return dtype == DType::bf16 ? 2e-2 : dtype == DType::f16 ? 3e-3 : 1e-5;
}

void expect_near(const char* name, const HostTensor& actual, const HostTensor& expected, double terms, DType dtype) {
  const double error = fa::test::compare(actual.view(), expected.view()).max_abs;
  EXPECT_LE(error, tolerance(dtype) * std::max(fa::test::largest(expected), terms)) << name;
}

ForwardCase forward_case(const VariantKernels& kernels, const Launch& launch, const VariantCase& variant) {
  ForwardCase c;
  c.spec = variant_specs(kernels).forward;
  c.attention = variant.attention;
  c.placement = launch.placement;
  c.splits = kernels.splits;
  c.variant = &variant;
  return c;
}

ForwardCase hopper_case(const VariantKernels& kernels, const Launch& launch, const VariantCase& variant) {
  ForwardCase c = forward_case(kernels, launch, variant);
  c.spec = hopper_variant_specs(kernels).forward;
  c.blocks = 3;
  if (c.placement == Placement::padded) c.placement = Placement::gaps;
  return c;
}

BackwardCase backward_case(const VariantKernels& kernels, const Launch& launch, const VariantCase& variant) {
  const VariantSpecs specs = variant_specs(kernels);
  BackwardCase c;
  c.specs = {specs.backward, specs.dq};
  c.attention = variant.attention;
  c.placement = launch.placement;
  c.dlse = launch.dlse;
  c.splits = kernels.splits;
  c.variant = &variant;
  return c;
}

class Variants : public testing::TestWithParam<std::tuple<std::size_t, std::size_t>> {
 protected:
  const VariantKernels& kernels() const { return variant_kernels()[std::get<0>(GetParam())]; }
  const Launch& launch() const { return kAllLaunches[std::get<1>(GetParam())]; }
};

void expect_forward_matches(const ForwardCase& c) {
  SCOPED_TRACE(testing::PrintToString(c));
  const fa::test::AttentionInputs inputs = make_inputs(c);
  const AttentionOutputs expected = fa::test::reference_f64(*c.variant, inputs);
  AttentionOutputs first;
  ASSERT_NO_THROW(first = run_forward(c, inputs, kernels_of(c), 1));
  expect_near("o", first.o, expected.o, 1, c.attention.dtype);
  const double allowed = c.attention.dtype == DType::f32 ? 1e-4 : 4e-3;  // a fast tanh is in it
  EXPECT_LE(fa::test::lse_max_abs_error(first.lse.view(), expected.lse.view()), allowed);
  const AttentionOutputs again = run_forward(c, inputs, kernels_of(c), 2);
  EXPECT_EQ(again.o.bytes(), first.o.bytes()) << "O depends on the schedule";
  EXPECT_EQ(again.lse.bytes(), first.lse.bytes()) << "LSE depends on the schedule";
}

/// Whether rows of the launch see no key on the diagonal of the last key.
bool ends_before_the_diagonal(const VariantKernels& kernels, const Launch& launch) {
  return kernels.choice == "cliff" && launch.align == CausalAlign::top_left;
}
constexpr const char* kNoFloat = "no float holds the scores of such a row";

TEST_P(Variants, ForwardMatchesTheReference) {
  if (ends_before_the_diagonal(kernels(), launch())) GTEST_SKIP() << kNoFloat;
  const VariantCase variant = make_case(kernels(), launch());
  expect_forward_matches(forward_case(kernels(), launch(), variant));
}

class HopperVariants : public testing::TestWithParam<std::tuple<std::size_t, std::size_t>> {};

TEST_P(HopperVariants, ForwardMatchesTheReference) {
  const VariantKernels& kernels = hopper_variant_kernels()[std::get<0>(GetParam())];
  const Launch& launch = kAllLaunches[std::get<1>(GetParam())];
  if (ends_before_the_diagonal(kernels, launch)) GTEST_SKIP() << kNoFloat;
  const VariantCase variant = make_case(kernels, launch);
  expect_forward_matches(hopper_case(kernels, launch, variant));
}

INSTANTIATE_TEST_SUITE_P(All, HopperVariants,
                         testing::Combine(testing::Range<std::size_t>(0, hopper_variant_kernels().size()),
                                          testing::Range<std::size_t>(0, kLaunches)));

TEST_P(Variants, BackwardMatchesTheReference) {
  if (ends_before_the_diagonal(kernels(), launch())) GTEST_SKIP() << kNoFloat;
  const VariantCase variant = make_case(kernels(), launch());
  const BackwardCase c = backward_case(kernels(), launch(), variant);
  SCOPED_TRACE(testing::PrintToString(c));
  const BackwardData data = make_backward_data(c);
  const VariantGradients expected = fa::test::reference_gradients_f64(variant, data.inputs, data.dout.view(),
                                                                      c.dlse ? data.dlse.view() : fa::TensorView{});
  VariantResults extra;
  fa::test::AttentionGradients actual;
  ASSERT_NO_THROW(actual = run_backward(c, data, kernels_of(c), 1, &extra));
  const double dp = std::sqrt(static_cast<double>(c.attention.d_v));  // dout V^T and rowsum(dout o O)
  const double scale = std::abs(static_cast<double>(c.attention.softmax_scale()));
  const DType dtype = c.attention.dtype;
  expect_near("dq", actual.dq, expected.usual.dq, dp * scale, dtype);
  expect_near("dk", actual.dk, expected.usual.dk, dp * scale, dtype);
  expect_near("dv", actual.dv, expected.usual.dv, 1, dtype);
  for (std::size_t i = 0; i < expected.captures.size(); ++i) {
    EXPECT_LE(fa::test::worst_ratio(extra.captures[i], expected.captures[i], expected.bounds.captures[i]), 1)
        << "gradient of " << variant.captures[i].name;
  }
  EXPECT_LE(fa::test::worst_ratio(extra.dsink, expected.dsink, expected.bounds.dsink), 1) << "dsink";
}

/// NaN in q and dout of rows that keep no key, as NaN in all keys shows, reaches no gradient. Of rows that a mask
/// function leaves nothing but a sink no kernel knows.
TEST_P(Variants, RowsWithoutKeysReachNoGradient) {
  const VariantCase variant = make_case(kernels(), launch());
  const BackwardCase c = backward_case(kernels(), launch(), variant);
  SCOPED_TRACE(testing::PrintToString(c));
  BackwardData data = make_backward_data(c);
  fa::test::AttentionInputs all_nan = data.inputs;
  all_nan.k.fill_with_nan();
  const AttentionOutputs reached = fa::test::reference_f64(variant, all_nan);
  std::size_t spoilt = 0;
  for_each_row(c.attention.b, c.attention.h_q, c.attention.s_q, [&](std::int64_t b, std::int64_t h, std::int64_t s) {
    const double lse = reached.lse.at(b, h, s);
    if (std::isnan(lse) || (std::isfinite(lse) && !variant.config.mask.expression.empty())) return;
    ++spoilt;
    for (std::int64_t d = 0; d < c.attention.d_qk; ++d) data.inputs.q.set(b, h, s, d, NAN);
    for (std::int64_t d = 0; d < c.attention.d_v; ++d) data.dout.set(b, h, s, d, NAN);
  });
  if (spoilt == 0) return;
  const VariantGradients expected = fa::test::reference_gradients_f64(variant, data.inputs, data.dout.view(),
                                                                      c.dlse ? data.dlse.view() : fa::TensorView{});
  fa::test::AttentionGradients actual;
  ASSERT_NO_THROW(actual = run_backward(c, data, kernels_of(c), 1));
  const double dp = std::sqrt(static_cast<double>(c.attention.d_v));
  const double scale = std::abs(static_cast<double>(c.attention.softmax_scale()));
  expect_near("dq", actual.dq, expected.usual.dq, dp * scale, c.attention.dtype);
  expect_near("dk", actual.dk, expected.usual.dk, dp * scale, c.attention.dtype);
  expect_near("dv", actual.dv, expected.usual.dv, 1, c.attention.dtype);
}

/// NaN in a key leaves dq of the rows alone that do not keep it.
TEST_P(Variants, AHiddenKeyDoesNotReachDq) {
  if (ends_before_the_diagonal(kernels(), launch())) GTEST_SKIP() << kNoFloat;
  const VariantCase variant = make_case(kernels(), launch());
  const BackwardCase c = backward_case(kernels(), launch(), variant);
  SCOPED_TRACE(testing::PrintToString(c));
  const BackwardData data = make_backward_data(c);
  const VariantGradients expected = fa::test::reference_gradients_f64(variant, data.inputs, data.dout.view(),
                                                                      c.dlse ? data.dlse.view() : fa::TensorView{});
  BackwardData spoilt = data;
  fill(spoilt.inputs.k, {c.attention.s_kv - 1, 1}, NAN);
  if (c.attention.s_kv > 40) fill(spoilt.inputs.k, {20, 1}, NAN);
  const AttentionOutputs reached = fa::test::reference_f64(variant, spoilt.inputs);
  const auto for_each_reached = [&](const auto& visit) {
    for_each_row(c.attention.b, c.attention.h_q, c.attention.s_q, [&](std::int64_t b, std::int64_t h, std::int64_t s) {
      if (std::isnan(reached.lse.at(b, h, s))) visit(b, h, s);
    });
  };
  for_each_reached([&](std::int64_t b, std::int64_t h, std::int64_t s) { spoilt.outputs.lse.set(b, h, s, 0, NAN); });
  fa::test::AttentionGradients actual;
  ASSERT_NO_THROW(actual = run_backward(c, spoilt, kernels_of(c), 1));
  for_each_reached([&](std::int64_t b, std::int64_t h, std::int64_t s) {
    for (std::int64_t d = 0; d < c.attention.d_qk; ++d) actual.dq.set(b, h, s, d, expected.usual.dq.at(b, h, s, d));
  });
  const double dp = std::sqrt(static_cast<double>(c.attention.d_v));
  const double scale = std::abs(static_cast<double>(c.attention.softmax_scale()));
  expect_near("dq", actual.dq, expected.usual.dq, dp * scale, c.attention.dtype);
}

/// A sink that is NaN, or has no finite sum, makes NaN of every row, be it without keys.
void expect_nan_of_sinks(const ForwardCase& c, VariantCase variant) {
  ForwardCase spoilt = c;
  spoilt.variant = &variant;
  for (const float sink : {NAN, INFINITY}) {
    std::memcpy(variant.sink.bytes.data(), &sink, sizeof sink);  // of the first head
    const fa::test::AttentionInputs inputs = make_inputs(spoilt);
    const AttentionOutputs expected = fa::test::reference_f64(variant, inputs);
    const AttentionOutputs actual = run_forward(spoilt, inputs, kernels_of(spoilt), 1);
    for_each_row(1, c.attention.h_q, c.attention.s_q, [&](std::int64_t b, std::int64_t h, std::int64_t s) {
      EXPECT_EQ(std::isnan(expected.lse.at(b, h, s)), h == 0);
      EXPECT_EQ(std::isnan(actual.lse.at(b, h, s)), h == 0) << h << ' ' << s;
      for (std::int64_t d = 0; d < c.attention.d_v; ++d) {
        ASSERT_EQ(std::isnan(actual.o.at(b, h, s, d)), h == 0) << h << ' ' << s << ' ' << d;
      }
    });
  }
}

TEST(Sinks, ASinkWithoutASumReachesEveryRow) {
  for (const std::vector<VariantKernels>* kernels : {&variant_kernels(), &hopper_variant_kernels()}) {
    for (const VariantKernels& entry : *kernels) {
      Launch launch = kAllLaunches[2];  // rows before the first key, in tiles with keys and without
      launch.s_q = 165;
      const VariantCase variant = make_case(entry, launch);
      if (variant.sink.bytes.empty()) continue;
      SCOPED_TRACE(entry.choice);
      expect_nan_of_sinks(
          kernels == &variant_kernels() ? forward_case(entry, launch, variant) : hopper_case(entry, launch, variant),
          variant);
    }
  }
}

/// Documents that start at multiples of the tiles: what lies in another document is never read, be it NaN.
TEST(TileLists, EmptyTilesAreNeverLoaded) {
  const auto found = std::ranges::find(variant_kernels(), "documents", &VariantKernels::choice);
  ASSERT_NE(found, variant_kernels().end());
  Launch launch = kAllLaunches[0];
  launch.s_q = launch.s_kv = 96;
  VariantCase variant = make_case(*found, launch);
  for (std::int32_t i = 0; i < 96; ++i) {
    const std::int32_t document = i / 32;
    std::memcpy(variant.captures[0].bytes.data() + static_cast<std::size_t>(i) * sizeof document, &document,
                sizeof document);
  }
  const ForwardCase forward = forward_case(*found, launch, variant);
  fa::test::AttentionInputs inputs = make_inputs(forward);
  const AttentionOutputs clean = run_forward(forward, inputs, kernels_of(forward), 1);
  const BackwardCase backward = backward_case(*found, launch, variant);
  BackwardData data = make_backward_data(backward);
  const fa::test::AttentionGradients clean_gradients = run_backward(backward, data, kernels_of(backward), 1);
  for (std::int64_t s = 64; s < 96; ++s) {
    for (std::int64_t d = 0; d < 16; ++d) {
      for (HostTensor* tensor : {&inputs.v, &inputs.k, &data.inputs.v, &data.inputs.k}) {
        tensor->set(0, 0, s, d, NAN);
      }
    }
  }
  const AttentionOutputs poisoned = run_forward(forward, inputs, kernels_of(forward), 1);
  const fa::test::AttentionGradients gradients = run_backward(backward, data, kernels_of(backward), 1);
  for (std::int64_t s = 0; s < 96; ++s) {
    EXPECT_EQ(std::isnan(poisoned.o.at(0, 1, s, 3)), s >= 64) << s;
    EXPECT_EQ(std::isnan(gradients.dq.at(0, 1, s, 3)), s >= 64) << s;
    EXPECT_EQ(std::isnan(gradients.dk.at(0, 0, s, 3)), s >= 64) << s;
    if (s >= 64) continue;
    EXPECT_EQ(poisoned.o.at(0, 1, s, 3), clean.o.at(0, 1, s, 3)) << s;
    EXPECT_EQ(gradients.dk.at(0, 0, s, 3), clean_gradients.dk.at(0, 0, s, 3)) << s;
  }
}

const VariantKernels& with_reach(const char* choice) {
  const auto found = std::ranges::find(hopper_variant_kernels(), choice, &VariantKernels::choice);
  if (found == hopper_variant_kernels().end()) throw std::out_of_range(choice);
  return *found;
}

/// V of a key that no row reaches is never read, be it NaN; one that the norms cannot rule out is.
TEST(AffineReach, KeysOutOfReachAreNeverLoaded) {
  const VariantKernels& kernels = with_reach("reach");
  Launch launch = kAllLaunches[0];
  launch.s_q = 64;  // the last keys' rows
  launch.s_kv = 400;
  const VariantCase variant = make_case(kernels, launch);
  const ForwardCase c = hopper_case(kernels, launch, variant);
  fa::test::AttentionInputs inputs = make_inputs(c);
  const AttentionOutputs clean = run_forward(c, inputs, kernels_of(c), 1);
  for (std::int64_t s = 0; s < 40; ++s) inputs.v.set(0, 0, s, 3, NAN);
  const AttentionOutputs poisoned = run_forward(c, inputs, kernels_of(c), 1);
  EXPECT_EQ(poisoned.o.bytes(), clean.o.bytes());
  inputs.k.set(0, 0, 390, 0, INFINITY);  // no bound
  const AttentionOutputs unbounded = run_forward(c, inputs, kernels_of(c), 1);
  EXPECT_TRUE(std::isnan(unbounded.o.at(0, 0, 0, 3)));
}

/// A far key whose norm makes up for its distance has all of the weight.
TEST(AffineReach, ALongKeyIsInReachOfAll) {
  for (const char* choice : {"reach", "reach_aside", "reach_before", "reach_up", "reach_down"}) {
    const VariantKernels& kernels = with_reach(choice);
    Launch launch = kAllLaunches[2];
    launch.s_q = 70;
    launch.s_kv = 300;
    const VariantCase variant = make_case(kernels, launch);
    const ForwardCase c = hopper_case(kernels, launch, variant);
    for (const std::int64_t far : {3, 150, 222}) {
      fa::test::AttentionInputs inputs = make_inputs(c);
      for (std::int64_t d = 0; d < c.attention.d_qk; ++d) {
        inputs.k.set(0, 0, far, d, 250);
        for (std::int64_t s = 0; s < launch.s_q; ++s) {
          for (std::int64_t h = 0; h < launch.h_q; ++h) inputs.q.set(0, h, s, d, 4);
        }
      }
      const AttentionOutputs expected = fa::test::reference_f64(variant, inputs);
      const AttentionOutputs actual = run_forward(c, inputs, kernels_of(c), 1);
      expect_near(choice, actual.o, expected.o, 1, c.attention.dtype);
      EXPECT_NEAR(actual.o.at(0, 0, 40, 1), inputs.v.at(0, 0, far, 1), 1e-2) << choice << ", key " << far;
    }
  }
}

/// Rows whose squares are subnormal numbers, or none at all, beside a scale that makes up for that.
TEST(AffineReach, TinyRowsAreNotTakenForZeros) {
  for (const auto& [value, scale] : {std::pair(1e-20, 1e4f), std::pair(1e-25, 1e9f)}) {
    VariantKernels kernels = with_reach("reach");
    kernels.attention.scale = scale;
    Launch launch = kAllLaunches[2];
    launch.s_q = 70;
    launch.s_kv = 300;
    const VariantCase variant = make_case(kernels, launch);
    const ForwardCase c = hopper_case(kernels, launch, variant);
    fa::test::AttentionInputs inputs = make_inputs(c);
    for (std::int64_t d = 0; d < c.attention.d_qk; ++d) {
      inputs.k.set(0, 0, 3, d, 1e18);
      for (std::int64_t s = 0; s < launch.s_q; ++s) {
        for (std::int64_t h = 0; h < launch.h_q; ++h) inputs.q.set(0, h, s, d, value);
      }
    }
    const AttentionOutputs expected = fa::test::reference_f64(variant, inputs);
    const AttentionOutputs actual = run_forward(c, inputs, kernels_of(c), 1);
    expect_near("o", actual.o, expected.o, 1, c.attention.dtype);
    EXPECT_NEAR(actual.o.at(0, 0, 40, 1), inputs.v.at(0, 0, 3, 1), 1e-2) << value;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Variants,
                         testing::Combine(testing::Range<std::size_t>(0, variant_kernels().size()),
                                          testing::Range<std::size_t>(0, kLaunches)));

}  // namespace
}  // namespace emulator
