// Forwards of 8-bit floats against the float64 reference of the very inputs, against themselves under other schedules,
// and with deliberate mistakes.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>

#include "emulator/forward_run.hpp"
#include "emulator/fp8_packed.hpp"
#include "emulator/fp8_paged.hpp"
#include "emulator/fp8_specs.hpp"
#include "emulator/sm80_fp8_specs.hpp"
#include "support/thorough.hpp"

namespace emulator {
namespace {

using fa::CausalAlign;
using fa::DType;
using fa::plan::KernelSpec;
using fa::test::AttentionInputs;
using fa::test::AttentionOutputs;
using fa::test::HostTensor;

constexpr std::array<std::uint64_t, 3> kSeeds{1, 2, 3};
constexpr std::array<std::uint64_t, 2> kOtherSeeds{2, 3};

ForwardCase case_of(const KernelSpec& spec, std::size_t i) {
  constexpr std::array<std::int64_t, 4> kQueries{150, 1, 65, 200}, kKeys{97, 300, 1, 161};
  constexpr std::array<std::array<std::int64_t, 2>, 3> kHeads{{{2, 1}, {1, 1}, {4, 2}}};
  constexpr std::array kPlacements{Placement::gaps, Placement::bshd, Placement::bhsd};
  constexpr std::array kBlocks{2, 1, 5};
  ForwardCase c;
  c.spec = spec;
  c.attention.dtype = spec.dtype;
  const Fp8Facts own = fp8_facts(spec);
  c.attention.o_dtype = own.byte_output ? DType::e4m3 : own.half_output ? DType::f16 : DType::bf16;
  c.attention.d_qk = spec.d_qk;
  c.attention.d_v = spec.d_v;
  c.attention.causal = spec.causal;
  c.attention.b = i % 2 == 0 ? 1 : 2;
  c.attention.s_q = kQueries[i % 4];
  c.attention.s_kv = kKeys[(i + i / 4) % 4];
  c.attention.h_q = kHeads[i % 3][0];
  c.attention.h_kv = kHeads[i % 3][1];
  c.attention.causal_align = i % 3 == 2 ? CausalAlign::top_left : CausalAlign::bottom_right;
  c.placement = kPlacements[(i + 1) % 3];
  c.blocks = kBlocks[i % 3];
  c.attention.seed = i + 1;
  if (spec.split) c.splits = static_cast<int>(2 + i % 4);
  return c;
}

void add_all_scales(const ForwardCase& c, AttentionInputs& inputs) {
  add_scales(c.attention, inputs);
  if (fp8_facts(c.spec).key_scales) add_key_scales(c.attention, inputs);
  if (fp8_facts(c.spec).value_scales) add_value_scales(c.attention, inputs);
}

HostTensor absolute(HostTensor tensor) {
  const fa::TensorView view = tensor.view();
  for_each_row(view.shape[0], view.shape[1], view.shape[2], [&](std::int64_t b, std::int64_t h, std::int64_t s) {
    for (std::int64_t d = 0; d < (view.rank == 4 ? view.shape[3] : 1); ++d) {
      tensor.set(b, h, s, d, std::abs(tensor.at(b, h, s, d)));
    }
  });
  return tensor;
}

constexpr double kPreciseError = 0.3 * 0.026;  ///< 0.3 of what P in e4m3 costs standard normal inputs

double rounding_of(const KernelSpec& spec) {
  return fp8_facts(spec).precise ? 0x1p-11 + 0x1p-8 : 0x1p-4 + 0x1p-6;
}

struct Errors {
  double worst = 0;     ///< of an element, as a multiple of what rounding allows
  double relative = 0;  ///< root mean square, of that of O
};

/// P is rounded to e4m3, relative to 2^8 times the greatest: by 2^-4 of itself, or 2^-18 of the greatest; to f16 where
/// the kernel is precise. Scores and sums of a KV tile have 13 bits of fraction.
Errors errors_of(const ForwardCase& c, const AttentionInputs& inputs, const AttentionOutputs& actual,
                 const AttentionOutputs& expected) {
  AttentionInputs magnitudes = inputs;
  magnitudes.v = absolute(magnitudes.v);
  if (!magnitudes.v_scale.bytes().empty()) magnitudes.v_scale = absolute(magnitudes.v_scale);
  const AttentionOutputs terms = fa::test::reference_f64(c.attention, magnitudes);
  Errors errors;
  double squares = 0, of_all = 0;
  for_each_row(c.attention.b, c.attention.h_q, c.attention.s_q, [&](std::int64_t b, std::int64_t h, std::int64_t s) {
    for (std::int64_t d = 0; d < c.attention.d_v; ++d) {
      const double o = expected.o.at(b, h, s, d);
      const double error = std::abs(actual.o.at(b, h, s, d) - o);
      const double of_p = rounding_of(c.spec) * terms.o.at(b, h, s, d);
      const bool bytes = c.attention.o_dtype == DType::e4m3;
      const double of_o = bytes ? 0x1p-4 * (std::abs(o) + of_p) + 0x1p-10 : 0x1p-8 * std::abs(o);
      const double allowed = of_p + of_o + 1e-6;
      errors.worst =
          std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(errors.worst, error / allowed);
      squares += error * error;
      of_all += o * o;
    }
  });
  errors.relative = of_all == 0 ? 0 : std::sqrt(squares / of_all);
  return errors;
}

class Fp8Forward : public testing::TestWithParam<std::size_t> {
 protected:
  void check(const ForwardCase& c, const AttentionInputs& inputs, double lse_tolerance) {
    SCOPED_TRACE(testing::PrintToString(c));
    const AttentionOutputs expected = fa::test::reference_f64(c.attention, inputs);
    const AttentionOutputs first = run_forward(c, inputs, kernels_of(c), kSeeds[0]);
    const Errors errors = errors_of(c, inputs, first, expected);
    EXPECT_LE(errors.worst, 1);
    const bool bytes = c.attention.o_dtype == DType::e4m3;
    EXPECT_LE(errors.relative, fp8_facts(c.spec).precise && !bytes ? kPreciseError : 0.05);
    if (c.lse) {
      EXPECT_LE(fa::test::lse_max_abs_error(first.lse.view(), expected.lse.view()), lse_tolerance);
    }
    for (const std::uint64_t seed : fa::test::tried(kOtherSeeds, GetParam())) {
      const AttentionOutputs again = run_forward(c, inputs, kernels_of(c), seed);
      EXPECT_EQ(again.o.bytes(), first.o.bytes()) << "O depends on the schedule, seed " << seed;
      EXPECT_EQ(again.lse.bytes(), first.lse.bytes()) << "LSE depends on the schedule, seed " << seed;
    }
  }
};

TEST_P(Fp8Forward, MatchesTheReferenceUnderEverySchedule) {
  constexpr std::array<std::size_t, 2> kCases{0, 1};
  for (const std::size_t i : fa::test::tried(kCases, GetParam())) {
    ForwardCase c = case_of(fp8_specs()[GetParam()], 2 * GetParam() + i);
    c.lse = i == 0;
    AttentionInputs inputs = make_inputs(c);
    if (i == 0) add_all_scales(c, inputs);
    ASSERT_NO_THROW(check(c, inputs, 0.01));
  }
}

TEST_P(Fp8Forward, RowsWithoutKeysAreZero) {
  ForwardCase c = case_of(fp8_specs()[GetParam()], GetParam());
  c.attention.s_kv = c.spec.causal ? 20 : 0;
  c.attention.causal_align = CausalAlign::bottom_right;
  ASSERT_NO_THROW(check(c, make_inputs(c), 0.01));
}

// The first warpgroup of a query tile has no key, the last one has some.
/// A sequence without keys has no V either, and what stands as the scale of it is not a number of anything.
TEST_P(Fp8Forward, ScalesOfNoKeysAreNotMultiplied) {
  ForwardCase c = case_of(fp8_specs()[GetParam()], GetParam());
  if (fp8_facts(c.spec).value_scales) return;  // each key has its own
  c.attention.s_kv = 0;
  AttentionInputs inputs = make_inputs(c);
  add_all_scales(c, inputs);
  for_each_row(inputs.v_scale.view().shape[0], inputs.v_scale.view().shape[1], inputs.v_scale.view().shape[2],
               [&](std::int64_t b, std::int64_t h, std::int64_t s) {
                 inputs.v_scale.set(b, h, s, 0, std::numeric_limits<double>::quiet_NaN());
               });
  const AttentionOutputs outputs = run_forward(c, inputs, kernels_of(c), kSeeds[0]);
  for_each_row(c.attention.b, c.attention.h_q, c.attention.s_q, [&](std::int64_t b, std::int64_t h, std::int64_t s) {
    for (std::int64_t d = 0; d < c.attention.d_v; ++d) ASSERT_EQ(outputs.o.at(b, h, s, d), 0);
  });
}

TEST_P(Fp8Forward, WarpgroupsWithoutKeysTakeTheirTurns) {
  ForwardCase c = case_of(fp8_specs()[GetParam()], GetParam());
  if (!c.spec.causal || c.spec.pack_gqa) return;
  c.attention.s_q = c.spec.tile_m;
  c.attention.s_kv = 20;
  c.attention.causal_align = CausalAlign::bottom_right;
  c.blocks = 1;
  ASSERT_NO_THROW(check(c, make_inputs(c), 0.01));
}

// Whole numbers: scores are exact, and further apart than any float is near enough to.
TEST_P(Fp8Forward, KeepsScoresOfAnyMagnitude) {
  constexpr std::array kExponents{14, 22, 40, 108};
  ForwardCase c = case_of(fp8_specs()[GetParam()], GetParam());
  c.attention.scale = std::ldexp(GetParam() % 2 == 0 ? 1.f : -1.f, kExponents[GetParam() % 4]);
  AttentionInputs inputs = make_inputs(c);
  for (HostTensor* tensor : {&inputs.q, &inputs.k}) {
    const fa::TensorView view = tensor->view();
    for_each_row(view.shape[0], view.shape[1], view.shape[2], [&](std::int64_t b, std::int64_t h, std::int64_t s) {
      for (std::int64_t d = 0; d < view.shape[3]; ++d) {
        tensor->set(b, h, s, d, std::clamp(std::round(tensor->at(b, h, s, d)), -2.0, 2.0));
      }
    });
  }
  const AttentionOutputs expected = fa::test::reference_f64(c.attention, inputs);
  AttentionOutputs actual;
  ASSERT_NO_THROW(actual = run_forward(c, inputs, kernels_of(c), kSeeds[0]));
  EXPECT_LE(errors_of(c, inputs, actual, expected).worst, 1);
}

INSTANTIATE_TEST_SUITE_P(Hopper, Fp8Forward, testing::Range<std::size_t>(0, fp8_specs().size()));

class Fp8Variants : public testing::TestWithParam<std::size_t> {};

TEST_P(Fp8Variants, MatchTheReference) {
  const Fp8Variant& variant = fp8_variants()[GetParam()];
  ForwardCase c = case_of(variant.spec, 0);
  c.attention.s_q = 70;
  c.attention.s_kv = 150;
  c.attention.causal_align = CausalAlign::bottom_right;
  const std::vector<fa::test::VariantChoice> choices = fa::test::variant_choices(false);
  const auto choice = std::ranges::find(choices, variant.choice, &fa::test::VariantChoice::name);
  fa::test::AttentionCase plain = c.attention;
  plain.causal = choice->config.causal;
  const fa::test::VariantCase made(plain, *choice);
  c.variant = &made;
  AttentionInputs inputs = make_inputs(c);
  if (c.spec.dtype == DType::i8) add_all_scales(c, inputs);
  const AttentionOutputs expected = fa::test::reference_f64(made, inputs);
  for (const std::uint64_t seed : fa::test::tried(kSeeds, GetParam())) {
    AttentionOutputs actual;
    ASSERT_NO_THROW(actual = run_forward(c, inputs, kernels_of(c), seed));
    const fa::test::ErrorMetrics errors = fa::test::compare(actual.o.view(), expected.o.view());
    EXPECT_LE(errors.max_abs_over_max_ref, 0.06);
    EXPECT_LE(fa::test::lse_max_abs_error(actual.lse.view(), expected.lse.view()), 0.02);
  }
}

INSTANTIATE_TEST_SUITE_P(Hopper, Fp8Variants, testing::Range<std::size_t>(0, fp8_variants().size()),
                         [](const testing::TestParamInfo<std::size_t>& parameter) {
                           const Fp8Variant& variant = fp8_variants()[parameter.param];
                           const bool by_mma = variant.spec.is<fa::plan::Sm80Fp8Forward>();
                           return variant.choice + (by_mma                            ? "_mma"
                                                    : variant.spec.split              ? "_split"
                                                    : variant.spec.dtype == DType::i8 ? "_i8"
                                                                                      : "");
                         });

/// The relative error of a mean of many keys of equal weight.
double error_of_mean(std::size_t spec, std::int64_t keys) {
  ForwardCase c = case_of(fp8_specs()[spec], 0);
  c.attention.b = c.attention.h_q = c.attention.h_kv = 1;
  c.attention.s_q = 64;
  c.attention.s_kv = keys;
  c.blocks = 1;
  AttentionInputs inputs = make_inputs(c);
  fill(inputs.q, {0, c.attention.s_q}, 0);
  inputs.v = absolute(inputs.v);
  const AttentionOutputs expected = fa::test::reference_f64(c.attention, inputs);
  return errors_of(c, inputs, run_forward(c, inputs, kernels_of(c), 1), expected).relative;
}

void expect_two_levels(std::size_t two_levels, std::size_t single_level) {
  EXPECT_EQ(canonical(fp8_specs()[two_levels]).find("single_level=1"), std::string::npos);
  EXPECT_NE(canonical(fp8_specs()[single_level]).find("single_level=1"), std::string::npos);
  const double of_short = error_of_mean(two_levels, 128);
  const double of_long = error_of_mean(two_levels, 4096);
  EXPECT_LE(of_long, std::max(1.1 * of_short, 0.006));
  EXPECT_GE(error_of_mean(single_level, 4096), 10 * of_long);
}

// Long rows are as exact as short ones, since the tensor cores sum up a KV tile alone; those that add to O itself lose
// what is small beside it.
TEST(Fp8Forward, TwoLevelsKeepLongRowsExact) {
  expect_two_levels(1, 2);
  const std::size_t by_mma = fp8_specs().size() - sm80_fp8_specs().size();
  expect_two_levels(by_mma + 2, by_mma + 11);
}

/// The relative error of standard normal inputs.
double error_of_normal(std::size_t spec) {
  ForwardCase c = case_of(fp8_specs()[spec], 0);
  c.attention.s_q = 128;
  c.attention.s_kv = 512;
  const AttentionInputs inputs = make_inputs(c);
  const AttentionOutputs expected = fa::test::reference_f64(c.attention, inputs);
  return errors_of(c, inputs, run_forward(c, inputs, kernels_of(c), 1), expected).relative;
}

TEST(Fp8Forward, PreciseIsMoreExact) {
  constexpr std::size_t kDefault = 0, kPrecise = 16;
  const double plain = error_of_normal(kDefault);
  const double precise = error_of_normal(kPrecise);
  RecordProperty("plain", std::to_string(plain));
  RecordProperty("precise", std::to_string(precise));
  EXPECT_GE(plain, kPreciseError);
  EXPECT_LE(precise, 0.3 * plain);
  EXPECT_LE(error_of_mean(kPrecise, 4096), 0.003);
}

/// Of a packed batch.
void run_packed_mutant(const Fp8Mutation& mutation) {
  const KernelSpec& spec = fp8_packed_specs()[mutation.spec - fp8_specs().size()];
  PackedCase c = fp8_packed_case(spec, 0);
  c.main_kernel = "mutant " + mutation.name;
  const AttentionInputs inputs = fp8_packed_inputs(spec, c, true);
  try {
    const Fp8PackedErrors errors = fp8_packed_errors(c, inputs, run_packed(spec, c, inputs));
    EXPECT_TRUE(mutation.faults.empty()) << "not caught";
    EXPECT_TRUE(errors.o > 1 || errors.lse > 0.05) << "harmless";
  } catch (const Fault& fault) {
    EXPECT_TRUE(mutation.faults.contains(fault.kind)) << fault.what();
  }
}

/// Over pages.
void run_paged_mutant(const Fp8Mutation& mutation) {
  const KernelSpec& spec = fp8_paged_specs()[mutation.spec - fp8_specs().size() - fp8_packed_specs().size()];
  const fa::test::PagedCase c = fp8_paged_case(spec, 1, true);
  const fa::test::PagedData data = make_data(c);
  try {
    const Fp8PagedErrors errors =
        fp8_paged_errors(spec, c, data, run_paged(spec, c, data, {.kernel = "mutant " + mutation.name}));
    EXPECT_TRUE(mutation.faults.empty()) << "not caught";
    EXPECT_TRUE(errors.o > 1 || errors.lse > 0.05) << "harmless";
  } catch (const Fault& fault) {
    EXPECT_TRUE(mutation.faults.contains(fault.kind)) << fault.what();
  }
}

class Fp8Mutants : public testing::TestWithParam<std::size_t> {};

TEST_P(Fp8Mutants, AreCaughtAndNamed) {
  const Fp8Mutation& mutation = fp8_mutations()[GetParam()];
  if (mutation.spec >= fp8_specs().size() + fp8_packed_specs().size()) return run_paged_mutant(mutation);
  if (mutation.spec >= fp8_specs().size()) return run_packed_mutant(mutation);
  ForwardCase c = case_of(fp8_specs()[mutation.spec], 0);
  c.attention.h_q = 2;
  c.attention.h_kv = 2;
  c.attention.s_q = 150;
  c.attention.s_kv = 410;
  c.attention.scale = 1.f;
  c.blocks = 1;
  AttentionInputs inputs = make_inputs(c);
  if (mutation.scaled) add_all_scales(c, inputs);
  ForwardKernels kernels = kernels_of(c);
  kernels.attention = "mutant " + mutation.name;
  const AttentionOutputs expected = fa::test::reference_f64(c.attention, inputs);
  for (const std::uint64_t seed : fa::test::tried(kSeeds, GetParam())) {
    try {
      const AttentionOutputs actual = run_forward(c, inputs, kernels, seed);
      EXPECT_TRUE(mutation.faults.empty()) << "not caught";
      const double lse = fa::test::lse_max_abs_error(actual.lse.view(), expected.lse.view());
      EXPECT_TRUE(errors_of(c, inputs, actual, expected).worst > 1 || lse > 0.05) << "harmless";
    } catch (const Fault& fault) {
      EXPECT_TRUE(mutation.faults.contains(fault.kind)) << fault.what();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Hopper, Fp8Mutants, testing::Range<std::size_t>(0, fp8_mutations().size()),
                         [](const testing::TestParamInfo<std::size_t>& parameter) {
                           return fp8_mutations()[parameter.param].name;
                         });

}  // namespace
}  // namespace emulator
