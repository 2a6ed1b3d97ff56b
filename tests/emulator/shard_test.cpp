// Kernels whose calls are parts of a larger attention, against the float64 reference, and mistakes in them.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "emulator/backward_run.hpp"
#include "emulator/forward_run.hpp"
#include "emulator/shard_specs.hpp"
#include "plan/variant_launch.hpp"

namespace emulator {
namespace {

using fa::CausalAlign;
using fa::DType;
using fa::ShardPlace;
using fa::test::AttentionCase;
using fa::test::AttentionGradients;
using fa::test::AttentionOutputs;
using fa::test::HostTensor;
using fa::test::VariantCase;

/// Of a whole of 3 requests, 6 query and 3 KV heads, 192 rows and 256 keys.
struct Part {
  std::int64_t b, h_kv, s_q, s_kv;
  CausalAlign align;
  ShardPlace place;
};
const std::vector<Part>& parts() {
  using enum CausalAlign;
  static const std::vector<Part> list{
      {2, 1, 70, 90, bottom_right, {.b = 1, .h_q = 2, .q = 64, .kv = 96}},
      {1, 2, 33, 65, top_left, {.b = 2, .h_q = 2, .q = 96, .kv = 32}},
      {1, 1, 40, 64, bottom_right, {.b = 1, .h_q = 4, .q = 0, .kv = 192}},  // keys behind all rows under causality
      {2, 1, 40, 33, bottom_right, {.b = 0, .h_q = 2, .q = 128, .kv = 0}},  // and in front of them
  };
  return list;
}
const std::vector<Part>& strided_parts() {
  using enum CausalAlign;
  static const std::vector<Part> list{
      {2, 1, 70, 90, bottom_right, {.b = 1, .h_q = 2, .q = 1, .kv = 3, .q_step = 2, .kv_step = 2}},
      {1, 1, 40, 50, top_left, {.b = 1, .h_q = 4, .q = 33, .kv = 0, .q_step = 4, .kv_step = 4}},
      {1, 2, 50, 80, bottom_right, {.b = 2, .h_q = 2, .q = 2, .kv = 1, .q_step = 3, .kv_step = 2}},  // no closed form
  };
  return list;
}

bool has_closed_form_mask(const VariantCase& c) {
  return c.attention.causal || c.config.window_left >= 0 || c.config.window_right >= 0 || c.config.chunk > 0;
}

/// The call of an entry at a place; nothing where its masks have no form there.
std::optional<VariantCase> case_of(const ShardKernels& shard, const Part& part) {
  AttentionCase whole = shard.kernels.attention;
  whole.b = 3;
  whole.h_q = 6;
  whole.h_kv = 3;
  whole.s_q = 192;
  whole.s_kv = 256;
  whole.causal_align = part.align;
  VariantCase c = whole_case(shard, whole);
  if (part.place.q_step != part.place.kv_step && has_closed_form_mask(c)) return std::nullopt;
  if (c.config.chunk % part.place.q_step != 0) return std::nullopt;
  AttentionCase own = whole;
  own.b = part.b;
  own.h_q = 2 * part.h_kv;
  own.h_kv = part.h_kv;
  own.s_q = part.s_q;
  own.s_kv = part.s_kv;
  c.move_to(own, part.place);
  return c;
}

/// Of the largest element: rounding of P, dS and results, and of a fast tanh.
double tolerance(DType dtype) {
  return dtype == DType::bf16 ? 2e-2 : 3e-3;
}

double error(const HostTensor& actual, const HostTensor& expected, double terms, DType dtype) {
  return fa::test::compare(actual.view(), expected.view()).max_abs /
         (tolerance(dtype) * std::max(fa::test::largest(expected), terms));
}

ForwardCase forward_case(const ShardKernels& shard, const VariantCase& variant) {
  ForwardCase c;
  c.spec = forward_spec(shard);
  c.attention = variant.attention;
  c.splits = shard.kernels.splits;
  c.blocks = shard.family == ShardKernels::Family::sm90 || shard.bounded ? 3 : 0;
  c.variant = &variant;
  return c;
}

BackwardCase backward_case(const ShardKernels& shard, const VariantCase& variant) {
  BackwardCase c;
  c.specs = backward_specs(shard);
  c.attention = variant.attention;
  c.dlse = true;
  c.splits = shard.kernels.splits;
  c.blocks = 3;
  c.variant = &variant;
  c.bounded = shard.bounded;
  return c;
}

/// How far results are from the reference, over what they may be; by a kernel in the place of the attention kernel.
double forward_error(const ShardKernels& shard, const VariantCase& variant, const std::string& name = {}) {
  ForwardCase c = forward_case(shard, variant);
  const fa::test::AttentionInputs inputs = make_inputs(c);
  const AttentionOutputs expected = fa::test::reference_f64(variant, inputs);
  ForwardKernels kernels = kernels_of(c);
  if (!name.empty()) kernels.attention = name;
  double worst = 0;
  for (const bool in_memory : {false, true}) {
    c.state_in_memory = in_memory;
    if (in_memory && !c.spec.dropout) break;
    const AttentionOutputs actual = run_forward(c, inputs, kernels, 1);
    worst = std::max(worst, error(actual.o, expected.o, 1, c.attention.dtype));
    worst = std::max(worst, fa::test::lse_max_abs_error(actual.lse.view(), expected.lse.view()) / 4e-3);
  }
  return worst;
}

double backward_error(const ShardKernels& shard, const VariantCase& variant, const std::string& name = {}) {
  const BackwardCase c = backward_case(shard, variant);
  const BackwardData data = make_backward_data(c);
  const fa::test::VariantGradients expected =
      fa::test::reference_gradients_f64(variant, data.inputs, data.dout.view(), data.dlse.view());
  BackwardKernelNames names = kernels_of(c);
  if (!name.empty()) names.main = name;
  VariantResults extra;
  const AttentionGradients actual = run_backward(c, data, names, 1, &extra);
  const DType dtype = c.attention.dtype;
  const double dp =
      std::sqrt(static_cast<double>(c.attention.d_v)) * std::abs(static_cast<double>(c.attention.softmax_scale()));
  double worst = error(actual.dq, expected.usual.dq, dp, dtype);
  worst = std::max(worst, error(actual.dk, expected.usual.dk, dp, dtype));
  worst = std::max(worst, error(actual.dv, expected.usual.dv, 1, dtype));
  for (std::size_t i = 0; i < expected.captures.size(); ++i) {
    worst =
        std::max(worst, fa::test::worst_ratio(extra.captures[i], expected.captures[i], expected.bounds.captures[i]));
  }
  return std::max(worst, fa::test::worst_ratio(extra.dsink, expected.dsink, expected.bounds.dsink));
}

double error_of(const ShardKernels& shard, const VariantCase& variant, const std::string& name = {}) {
  return shard.forward ? forward_error(shard, variant, name) : backward_error(shard, variant, name);
}

class Shards : public testing::TestWithParam<std::size_t> {};

TEST_P(Shards, MatchTheReference) {
  const ShardKernels& shard = shard_kernels()[GetParam()];
  for (const Part& part : shard.strided ? strided_parts() : parts()) {
    const std::optional<VariantCase> variant = case_of(shard, part);
    if (!variant) continue;
    SCOPED_TRACE(testing::PrintToString(*variant) + " at q " + std::to_string(part.place.q) + " kv " +
                 std::to_string(part.place.kv));
    double found = 0;
    ASSERT_NO_THROW(found = error_of(shard, *variant));
    EXPECT_LE(found, 1);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Shards, testing::Range<std::size_t>(0, shard_kernels().size()));

// Whatever memory holds, no access is outside of the whole's tensors, and the place is the nearest one within it.
TEST(PlacesInMemory, OutsideOfTheWholeAreMovedIntoIt) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  const std::vector<std::vector<std::int64_t>> words{
      {kMost, kMost, kMost, kMost}, {-1, -kMost, -5, -kMost - 1}, {2, 3, 191, 31}, {1, 5, 33, 1 << 30}};
  int found = 0;
  for (const ShardKernels& shard : shard_kernels()) {
    const bool takes = shard.in_memory && shard.forward && !shard.strided && !shard.own_tiles;
    if (!takes) continue;
    ++found;
    for (const std::vector<std::int64_t>& given : words) {
      std::optional<VariantCase> variant = case_of(shard, parts()[0]);
      ASSERT_TRUE(variant);
      fa::plan::Problem sizes;
      sizes.b = 2, sizes.h_q = 2, sizes.h_kv = 1, sizes.s_q = 70, sizes.s_kv = 90;
      sizes.dropout = shard.kernels.dropout;
      const fa::kernel::PlaceBegin inside = fa::kernel::place_inside(fa::plan::place_params(sizes, variant->place),
                                                                     {given[0], given[1], given[2], given[3]});
      variant->place.b = inside.b, variant->place.h_q = inside.h_q;
      variant->place.q = inside.q, variant->place.kv = inside.kv;
      ForwardCase c = forward_case(shard, *variant);
      c.place_words = given;
      const fa::test::AttentionInputs inputs = make_inputs(c);
      const AttentionOutputs expected = fa::test::reference_f64(*variant, inputs);
      const AttentionOutputs actual = run_forward(c, inputs, kernels_of(c), 1);
      EXPECT_LE(error(actual.o, expected.o, 1, c.attention.dtype), 1) << given[0] << ", " << given[2];
    }
  }
  EXPECT_GE(found, 3);
}

// A kernel that takes its call for the whole gives other results in every part.
class ShardMutants : public testing::TestWithParam<std::size_t> {};

TEST_P(ShardMutants, AreCaught) {
  const ShardMutation& mutation = shard_mutations()[GetParam()];
  const ShardKernels& shard = shard_kernels()[mutation.entry];
  SCOPED_TRACE(mutation.name);
  bool caught = false;
  for (const Part& part : shard.strided ? strided_parts() : parts()) {
    const std::optional<VariantCase> variant = case_of(shard, part);
    if (!variant || caught) continue;
    try {
      caught = !(error_of(shard, *variant, "mutant " + mutation.name) <= 1);
    } catch (const Fault& fault) {
      EXPECT_TRUE(mutation.faults.contains(fault.kind)) << fault.what();
      caught = true;
    }
  }
  EXPECT_TRUE(caught);
}

INSTANTIATE_TEST_SUITE_P(All, ShardMutants, testing::Range<std::size_t>(0, shard_mutations().size()),
                         [](const auto& mutant) { return shard_mutations()[mutant.param].name; });

}  // namespace
}  // namespace emulator
