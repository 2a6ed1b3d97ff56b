// Forward of every family on a GPU on inputs, scales and captured tensors at the ends of what there is, against
// float64.

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "gpu/device_case.hpp"
#include "gpu/packed_case.hpp"
#include "plan/arch.hpp"
#include "support/extreme_case.hpp"

namespace fa::test {
namespace {

struct Family {
  std::string name;
  AttentionCase attention;
  KernelOverride kernel = {};
  bool value_in_key = false;
};

void PrintTo(const Family& family, std::ostream* out) {
  *out << family.name;
}

constexpr AttentionCase causal(DType dtype, std::int64_t d_qk, std::int64_t d_v) {
  return {
      .b = 2, .h_q = 4, .h_kv = 1, .s_q = 150, .s_kv = 230, .d_qk = d_qk, .d_v = d_v, .dtype = dtype, .causal = true};
}

AttentionCase full(DType dtype, std::int64_t d_qk, std::int64_t d_v) {
  AttentionCase c = causal(dtype, d_qk, d_v);
  c.causal = false;
  return c;
}

std::vector<Family> families() {
  constexpr DType f16 = DType::f16, bf16 = DType::bf16;
  const KernelOverride sm80{"sm80"};
  return {
      {"bf16_d64", causal(bf16, 64, 64)},
      {"f16_d128", causal(f16, 128, 128)},
      {"bf16_d256", full(bf16, 256, 256)},
      {"sm80_bf16_d128", causal(bf16, 128, 128), sm80},
      {"sm80_f16_d64", full(f16, 64, 64), sm80},
      {"split_bf16_d128", full(bf16, 128, 128), {"", "splits=3"}},
      {"split_f16_d64", causal(f16, 64, 64), {"", "splits=3"}},
      {"sm80_split_bf16_d64", full(bf16, 64, 64), {"sm80", "splits=4"}},
      {"wide_split_f16_d512", causal(f16, 512, 512), {"", "splits=3"}},
      {"sm80_wide_f16_d512", causal(f16, 512, 512), sm80},
      {"wide_bf16_d512", causal(bf16, 512, 512)},
      {"wide_f16_d320_d264", causal(f16, 320, 264)},
      {"wide_bf16_full_d576_d512", full(bf16, 576, 512)},
      {"wide_latent_bf16", causal(bf16, 576, 512), {}, true},
      {"wide_latent_f16", full(f16, 576, 512), {}, true},
      {"sm80_latent_bf16", causal(bf16, 576, 512), sm80, true},
  };
}

std::vector<Family> fp8_families() {
  return {
      {"e4m3_d64", causal(DType::e4m3, 64, 64)},       {"e4m3_d128", causal(DType::e4m3, 128, 128)},
      {"e4m3_full_d128", full(DType::e4m3, 128, 128)}, {"e4m3_d256", causal(DType::e4m3, 256, 256)},
      {"e5m2_d128", causal(DType::e5m2, 128, 128)},    {"e5m2_full_d64", full(DType::e5m2, 64, 64)},
  };
}

/// V is the first columns of K.
void take_values_from_keys(const AttentionCase& c, AttentionInputs& inputs) {
  for (std::int64_t b = 0; b < c.b; ++b) {
    for (std::int64_t h = 0; h < c.h_kv; ++h) {
      for (std::int64_t s = 0; s < c.s_kv; ++s) {
        for (std::int64_t d = 0; d < c.d_v; ++d) inputs.v.set(b, h, s, d, inputs.k.at(b, h, s, d));
      }
    }
  }
}

AttentionConfig config_of(const Family& family) {
  AttentionConfig config = config_of(family.attention);
  config.kernel = family.kernel;
  if (family.value_in_key) {
    config.value_in_key = static_cast<int>(family.attention.d_v);
    config.head_dim_v = 0;
  }
  return config;
}

AttentionOutputs run(const Family& family, const AttentionConfig& config, const AttentionInputs& inputs,
                     const DeviceVariant* variant = nullptr) {
  const DeviceTensor q(inputs.q), k(inputs.k), v(inputs.v);
  AttentionOutputs outputs = make_outputs(family.attention);
  const DeviceTensor o(outputs.o), lse(outputs.lse);
  std::vector<DeviceTensor> scales;
  ForwardInputs in{q.const_view(), k.const_view(), v.const_view()};
  if (family.value_in_key) in.v = {};
  if (!inputs.q_scale.bytes().empty()) {
    for (const HostTensor* scale : {&inputs.q_scale, &inputs.k_scale, &inputs.v_scale}) scales.emplace_back(*scale);
    in.q_scale = scales[0].const_view();
    in.k_scale = scales[1].const_view();
    in.v_scale = scales[2].const_view();
    in.k_scale.rank = in.v_scale.rank = 2;
  }
  if (variant != nullptr) {
    in.captures = variant->given;
    in.sink = variant->sink_view;
  }
  Attention::create(config).forward(in, {o.view(), lse.view()});
  driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
  o.read(outputs.o);
  lse.read(outputs.lse);
  EXPECT_TRUE(o.buffer.guards_intact() && lse.buffer.guards_intact()) << "written outside of a tensor";
  return outputs;
}

/// docs/numerics.md: a rounding of P and one of O, and what is below a dtype's, or f32's, numbers.
ExtremeBounds bounds_of(DType dtype) {
  if (size_of(dtype) == 1) return {0x1p-4 + 0x1p-6 + 0x1p-7, 0x1p-126, 0.005};
  const bool half = dtype == DType::f16;
  return {2.2 * (half ? 0x1p-11 : 0x1p-8), half ? 0x1p-24 : 0x1p-126, 0x1p-20};
}

class ExtremeInputs : public GpuTest, public testing::WithParamInterface<Family> {};

TEST_P(ExtremeInputs, MatchFloat64) {
  Family family = GetParam();
  for (const Extreme& extreme : extremes()) {
    if (extreme.causal && !family.attention.causal) continue;
    // V is what hides in K, too: a dropped row of v inside a tile may reach O.
    if (family.value_in_key && extreme.causal) continue;
    SCOPED_TRACE(extreme.name);
    family.attention.scale.reset();
    if (extreme.scale != nullptr) family.attention.scale = extreme.scale(family.attention);
    AttentionInputs inputs = make_inputs(family.attention);
    extreme.change(family.attention, inputs);
    if (family.value_in_key) take_values_from_keys(family.attention, inputs);
    const AttentionOutputs expected = reference_f64(family.attention, inputs);
    const AttentionOutputs actual = run(family, config_of(family), inputs);
    EXPECT_LE(extreme_error(family.attention, inputs, expected, actual, bounds_of(family.attention.dtype)), 1);
  }
}

INSTANTIATE_TEST_SUITE_P(All, ExtremeInputs, testing::ValuesIn(families()),
                         [](const auto& test) { return test.param.name; });

bool on_hopper() {
  return driver::device_info(0).arch == plan::parse_arch("sm_90a");
}

class ExtremeScales : public GpuTest, public testing::WithParamInterface<Family> {};

TEST_P(ExtremeScales, MatchFloat64) {
  if (!on_hopper()) GTEST_SKIP() << "no kernels of 8-bit floats for this GPU";
  const Family& family = GetParam();
  for (const Extreme& extreme : fp8_extremes()) {
    if (extreme.causal && !family.attention.causal) continue;
    SCOPED_TRACE(extreme.name);
    AttentionInputs inputs = make_inputs(family.attention);
    extreme.change(family.attention, inputs);
    const AttentionOutputs expected = reference_f64(family.attention, inputs);
    const AttentionOutputs actual = run(family, config_of(family), inputs);
    EXPECT_LE(extreme_error(family.attention, inputs, expected, actual, bounds_of(family.attention.dtype)), 1);
  }
}

INSTANTIATE_TEST_SUITE_P(All, ExtremeScales, testing::ValuesIn(fp8_families()),
                         [](const auto& test) { return test.param.name; });

std::vector<Family> all_families() {
  std::vector<Family> all = families();
  for (Family& family : fp8_families()) all.push_back(std::move(family));
  return all;
}

/// Slopes of 1e20, biases of -3e38 and sinks of NaN.
class ExtremeCaptures : public GpuTest, public testing::WithParamInterface<Family> {};

TEST_P(ExtremeCaptures, MatchFloat64) {
  const Family& family = GetParam();
  const AttentionCase& c = family.attention;
  if (size_of(c.dtype) == 1 && !on_hopper()) GTEST_SKIP() << "no kernels of 8-bit floats for this GPU";
  for (const VariantChoice& choice : variant_choices(false)) {
    if (choice.name != "alibi" && choice.name != "bias" && choice.name != "sink") continue;
    SCOPED_TRACE(choice.name);
    VariantCase made(c, choice);
    make_extreme(made);
    AttentionInputs inputs = make_inputs(c);
    if (family.value_in_key) take_values_from_keys(c, inputs);
    const AttentionOutputs expected = reference_f64(made, inputs);
    AttentionConfig config = config_of(family);
    config.score = made.config.score;
    config.sink = made.config.sink;
    const DeviceVariant variant(made);
    const AttentionOutputs actual = run(family, config, inputs, &variant);
    EXPECT_LE(extreme_error(c, inputs, expected, actual, bounds_of(c.dtype)), 1);
  }
}

INSTANTIATE_TEST_SUITE_P(All, ExtremeCaptures, testing::ValuesIn(all_families()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace fa::test
