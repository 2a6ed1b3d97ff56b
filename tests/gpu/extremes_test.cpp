// Scores and biases of any magnitude that float has, sums over very long rows, and inputs that make no sense: forward
// on a GPU against float64, and against a softmax in float.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gpu/extreme_setting.hpp"
#include "reference/geometry.hpp"

namespace fa::test {
namespace {

// ---- scores of any magnitude ----

constexpr AttentionCase small(DType dtype, std::int64_t d, bool causal) {
  return {.b = 1, .h_q = 4, .h_kv = 2, .s_q = 150, .s_kv = 350, .d_qk = d, .d_v = d, .dtype = dtype, .causal = causal};
}

constexpr AttentionCase decode(DType dtype, std::int64_t d) {
  return {.b = 2, .h_q = 8, .h_kv = 2, .s_q = 1, .s_kv = 2500, .d_qk = d, .d_v = d, .dtype = dtype};
}

std::vector<Setting> plain_settings() {
  constexpr DType f16 = DType::f16, bf16 = DType::bf16, f32 = DType::f32;
  const KernelOverride sm80{"sm80"};
  const KernelOverride exact{"", "exact_max=1"}, lazy{"", "exact_max=0"};
  AttentionCase short_rows = small(f16, 64, false), long_rows = small(bf16, 128, false);
  short_rows.s_q = 300;
  short_rows.s_kv = 5;
  AttentionCase latent = small(bf16, 576, true);
  latent.h_kv = 1;
  latent.d_v = 512;
  long_rows.h_q = long_rows.h_kv = 1;
  long_rows.s_q = 1600;
  long_rows.s_kv = 1300;
  return {
      {.name = "plain_d64", .attention = small(bf16, 64, false)},
      {.name = "causal_d64", .attention = small(f16, 64, true)},
      {.name = "lazy_d128", .attention = small(f16, 128, true), .kernel = lazy},
      {.name = "lazy_plain_d128", .attention = small(bf16, 128, false), .kernel = lazy},
      {.name = "exact_d128", .attention = small(f16, 128, false), .kernel = exact},
      {.name = "exact_causal_d64", .attention = small(bf16, 64, true), .kernel = exact},
      {.name = "plain_d256", .attention = small(f16, 256, false)},
      {.name = "short_rows", .attention = short_rows},
      {.name = "long_rows", .attention = long_rows},
      {.name = "sm80_causal_d64", .attention = small(f16, 64, true), .kernel = sm80},
      {.name = "sm80_d128", .attention = small(bf16, 128, false), .kernel = sm80},
      {.name = "wide_d512", .attention = small(bf16, 512, false)},
      {.name = "wide_causal_d264", .attention = small(f16, 264, true)},
      {.name = "wide_latent", .attention = latent},
      {.name = "sm80_wide_causal_d512", .attention = small(f16, 512, true), .kernel = sm80},
      {.name = "wide_split_d512", .attention = decode(f16, 512), .kernel = {"", "splits=3"}},
      {.name = "f32_causal_d64", .attention = small(f32, 64, true)},
      {.name = "f32_d128", .attention = small(f32, 128, false)},
      {.name = "decode_d128", .attention = decode(bf16, 128)},
      {.name = "split_exact_d128", .attention = decode(f16, 128), .kernel = {"", "splits=5 exact_max=1"}},
      {.name = "split_lazy_d64", .attention = decode(f16, 64), .kernel = {"", "splits=3 exact_max=0"}},
      {.name = "sm80_split_d64", .attention = decode(bf16, 64), .kernel = {"sm80", "pack_gqa=1 splits=3"}},
      {.name = "f32_split_d64", .attention = decode(f32, 64), .kernel = {"", "splits=4"}},
  };
}

std::vector<Setting> variant_settings() {
  constexpr DType f16 = DType::f16, bf16 = DType::bf16;
  const KernelOverride sm80{"sm80"};
  AttentionCase packed = small(bf16, 128, true), packed_sm80 = small(f16, 64, false);
  const std::vector<std::int32_t> cu_q{0, 70, 71, 71, 150}, cu_kv{0, 90, 100, 180, 350};
  return {
      {.name = "window_sink_d64",
       .attention = small(f16, 64, false),
       .window_left = 40,
       .window_right = 7,
       .sink = true},
      {.name = "sm80_window_sink_d64",
       .attention = small(bf16, 64, true),
       .kernel = sm80,
       .window_left = 3,
       .sink = true},
      {.name = "wide_window_sink_d512", .attention = small(bf16, 512, true), .window_left = 40, .sink = true},
      {.name = "wide_packed_d320", .attention = small(f16, 320, true), .cu_q = cu_q, .cu_kv = cu_kv},
      {.name = "wide_alibi_causal_d512", .attention = small(f16, 512, true), .function = alibi()},
      {.name = "wide_negative_d264", .attention = small(f16, 264, false), .sign = -1},
      {.name = "packed_d128", .attention = packed, .cu_q = cu_q, .cu_kv = cu_kv},
      {.name = "sm80_packed_d64", .attention = packed_sm80, .kernel = sm80, .cu_q = cu_q, .cu_kv = cu_kv},
      {.name = "dropout_d64", .attention = small(f16, 64, false), .dropout = 0.25f},
      {.name = "dropout_causal_d128", .attention = small(bf16, 128, true), .dropout = 0.25f},
      {.name = "sm80_dropout_d64", .attention = small(f16, 64, true), .kernel = sm80, .dropout = 0.25f},
      {.name = "magnitude_d64", .attention = small(f16, 64, false), .function = magnitude()},
      {.name = "halved_causal_d128", .attention = small(bf16, 128, true), .function = halved_thirds()},
      {.name = "alibi_causal_d64", .attention = small(f16, 64, true), .function = alibi()},
      {.name = "blocks_d64", .attention = small(bf16, 64, false), .blocks = true},
      {.name = "negative_d64", .attention = small(f16, 64, false), .sign = -1},
      {.name = "sm80_negative_d64", .attention = small(bf16, 64, true), .kernel = sm80, .sign = -1},
  };
}

/// Whole numbers; products of q and k are about `base` squared, or that negated, in every other row.
AttentionInputs whole_inputs(const AttentionCase& a, double base = 0) {
  AttentionInputs inputs = make_inputs(a);
  make_whole(inputs.q, 2);
  make_whole(inputs.k, 2);
  if (base == 0) return inputs;
  for (std::int64_t b = 0; b < a.b; ++b) {
    for (std::int64_t h = 0; h < a.h_q; ++h) {
      for (std::int64_t i = 0; i < a.s_q; ++i) inputs.q.set(b, h, i, 0, (i + h) % 2 == 0 ? base : -base);
      for (std::int64_t j = 0; h < a.h_kv && j < a.s_kv; ++j) inputs.k.set(b, h, j, 0, base);
    }
  }
  return inputs;
}

void skip_without(const Setting& setting) {
  const bool hopper = setting.kernel.kernel == "sm90" || setting.kernel.text.find("exact_max") != std::string::npos;
  if (hopper && !on_hopper()) GTEST_SKIP() << "GPU 0 is no Hopper";
}

/// Scales of whole numbers. Up to 2^17 the greatest score of a row times log2 e is known to a bit of P; from 2^26 on a
/// float holds nothing of it. With a base scores are as large, yet many of a row have a P that counts.
class ScoresOfAnyMagnitude : public GpuTest, public testing::WithParamInterface<Setting> {
 protected:
  void expect_as_in_float(double base, std::initializer_list<int> exponents) const {
    const Setting& setting = GetParam();
    const AttentionInputs inputs = whole_inputs(setting.attention, base);
    DeviceSetting device(setting, inputs);
    double scale = 1;
    JudgedCase c = judged(setting);
    if (setting.function.in_f64) {
      c.score = [&](const ScorePlace& at, double score) { return setting.function.in_f64(at, score, scale); };
    }
    const SoftmaxJudge judge(c, inputs);
    for (const int exponent : exponents) {
      SCOPED_TRACE("base " + std::to_string(base) + ", scale 2^" + std::to_string(exponent));
      scale = std::ldexp(setting.sign, exponent);
      expect_right(judge.judge(scale, device.run(config_of(setting, scale))));
    }
  }
};

TEST_P(ScoresOfAnyMagnitude, AreAsInASoftmaxInFloat) {
  skip_without(GetParam());
  if (IsSkipped()) return;
  expect_as_in_float(0, {0, 3, 9, 13, 17, 20, 24, 31, 64, 110, 117});
  expect_as_in_float(128, {-3});
  expect_as_in_float(1024, {-3, 0});
  expect_as_in_float(2048, {0, 2});
}

INSTANTIATE_TEST_SUITE_P(Plain, ScoresOfAnyMagnitude, testing::ValuesIn(plain_settings()), name_of);
INSTANTIATE_TEST_SUITE_P(Variants, ScoresOfAnyMagnitude, testing::ValuesIn(variant_settings()), name_of);

// ---- additive masks ----

/// Which keys a bias hides.
enum class Hidden : std::uint8_t { first, middle, last, all, odd_rows };

struct BiasSetting {
  Setting setting;
  DType dtype;
};

void PrintTo(const BiasSetting& setting, std::ostream* out) {
  *out << setting.setting.name;
}

std::vector<BiasSetting> bias_settings() {
  constexpr DType f16 = DType::f16, bf16 = DType::bf16, f32 = DType::f32;
  const KernelOverride sm80{"sm80"};
  return {
      {{.name = "bf16_bias_bf16_d64", .attention = small(bf16, 64, false)}, bf16},
      {{.name = "f16_bias_f16_causal_d64", .attention = small(f16, 64, true), .sink = true}, f16},
      {{.name = "f16_bias_f32_d128", .attention = small(f16, 128, false)}, f32},
      {{.name = "bf16_bias_bf16_causal_d128", .attention = small(bf16, 128, true), .sink = true}, bf16},
      {{.name = "bf16_bias_f16_holes_d64", .attention = small(bf16, 64, false), .blocks = true}, f16},
      {{.name = "f16_bias_bf16_dropout_d64", .attention = small(f16, 64, false), .dropout = 0.25f}, bf16},
      {{.name = "f16_bias_f16_split_d64", .attention = decode(f16, 64), .kernel = {"", "splits=3"}}, f16},
      {{.name = "sm80_bf16_bias_f16_causal_d64", .attention = small(bf16, 64, true), .kernel = sm80}, f16},
      {{.name = "sm80_f16_bias_bf16_d128", .attention = small(f16, 128, false), .kernel = sm80, .sink = true}, bf16},
      {{.name = "wide_bf16_bias_f32_causal_d512", .attention = small(bf16, 512, true), .sink = true}, f32},
      {{.name = "wide_f16_bias_bf16_d264", .attention = small(f16, 264, false)}, bf16},
      {{.name = "f32_bias_f32_causal_d64", .attention = small(f32, 64, true)}, f32},
      {{.name = "f32_bias_bf16_d128", .attention = small(f32, 128, false)}, bf16},
  };
}

/// bias [b, h_q, s_q, s_kv]: eighths, and minus `magnitude` where keys are hidden.
struct Bias {
  Bias(const AttentionCase& c, DType dtype, Hidden hidden, double magnitude)
      : tensor(dtype, c.b, c.h_q, c.s_q, c.s_kv, Layout::bhsd) {
    std::mt19937_64 engine(static_cast<std::uint64_t>(hidden) + 40);
    for (std::int64_t b = 0; b < c.b; ++b) {
      for (std::int64_t h = 0; h < c.h_q; ++h) {
        for (std::int64_t q = 0; q < c.s_q; ++q) {
          for (std::int64_t kv = 0; kv < c.s_kv; ++kv) {
            const double small = static_cast<double>(static_cast<int>(engine() % 17) - 8) / 8;
            tensor.set(b, h, q, kv, hides(hidden, c, q, kv) ? -magnitude : small);
          }
        }
      }
    }
    for (std::int64_t i = 0; i < c.b * c.h_q * c.s_q * c.s_kv; ++i) {
      double value = 0;
      reference::load(std::as_const(tensor).view(), i, 1, 1, &value);
      values.push_back(value);
    }
  }

  static bool hides(Hidden hidden, const AttentionCase& c, std::int64_t q, std::int64_t kv) {
    switch (hidden) {
      case Hidden::first:
        return kv < c.s_kv / 3;
      case Hidden::middle:
        return kv >= c.s_kv / 4 && kv < c.s_kv - c.s_kv / 4;
      case Hidden::last:
        return kv >= c.s_kv - c.s_kv / 3;
      case Hidden::all:
        return true;
      case Hidden::odd_rows:
        return q % 2 == 1 || kv % 64 < 9;
    }
    return false;
  }

  HostTensor tensor;
  std::vector<double> values;
};

double greatest_of(DType dtype) {
  return dtype == DType::f16 ? 65504 : dtype == DType::bf16 ? 0x1.fep127 : double{std::numeric_limits<float>::max()};
}

class AdditiveMasks : public GpuTest, public testing::WithParamInterface<BiasSetting> {};

/// Where another key of a row is kept, a hidden one has a P below 2^-149: minus infinity, which is among the
/// magnitudes, gives what every other one has to give.
TEST_P(AdditiveMasks, OfAnyMagnitudeHide) {
  const auto& [setting, dtype] = GetParam();
  const AttentionCase& a = setting.attention;
  constexpr double kScale = 0.125;
  const AttentionInputs inputs = whole_inputs(a);
  DeviceSetting device(setting, inputs);
  AttentionConfig config = config_of(setting, kScale);
  config.score = functions::bias("bhqk", dtype);
  const std::vector<double>* values = nullptr;
  JudgedCase c = judged(setting);
  c.rounded_scores = true;
  c.score = [&](const ScorePlace& at, double score) {
    return score + (*values)[static_cast<std::size_t>(((at.b * a.h_q + at.h) * a.s_q + at.q) * a.s_kv + at.kv)];
  };
  const SoftmaxJudge judge(c, inputs);
  // Every magnitude with some of the places, every place with most magnitudes.
  constexpr std::array kMagnitudes{1e4, 65504.0, 1e6, 1e9, 1e30, 3e38, kInfinity};
  constexpr std::array kPlaces{Hidden::last, Hidden::first, Hidden::all, Hidden::middle, Hidden::odd_rows};
  for (std::size_t i = 0; i < kMagnitudes.size(); ++i) {
    const double magnitude = std::isinf(kMagnitudes[i]) ? kInfinity : std::min(kMagnitudes[i], greatest_of(dtype));
    for (std::size_t j = 0; j < 3; ++j) {
      const Hidden hidden = kPlaces[(i + 2 * j) % kPlaces.size()];
      SCOPED_TRACE("bias -" + std::to_string(magnitude) + " at place " + std::to_string(static_cast<int>(hidden)));
      const Bias bias(a, dtype, hidden, magnitude);
      values = &bias.values;
      const DeviceTensor on_device(bias.tensor);
      expect_right(judge.judge(kScale, device.run(config, on_device.const_view())));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, AdditiveMasks, testing::ValuesIn(bias_settings()),
                         [](const auto& test) { return test.param.setting.name; });

// ---- sums over long rows ----

/// Keys that are all alike to a row, or differ by a few times e; scores are about 64 in both.
class LongSums : public GpuTest, public testing::WithParamInterface<std::tuple<std::int64_t, bool>> {};

AttentionInputs inputs_of_64(const AttentionCase& a, bool alike) {
  AttentionInputs inputs{HostTensor(a.dtype, a.b, a.h_q, a.s_q, a.d_qk, a.layout),
                         HostTensor(a.dtype, a.b, a.h_kv, a.s_kv, a.d_qk, a.layout),
                         HostTensor(a.dtype, a.b, a.h_kv, a.s_kv, a.d_v, a.layout)};
  std::mt19937_64 engine(9);
  const auto put = [&](HostTensor& tensor, const auto& next) {
    const TensorView view = tensor.view();
    for (std::int64_t i = 0; i < view.elements(); ++i) reference::store_element(view, i, next());
  };
  std::uint64_t bits = 0;
  int left = 0;
  const auto near_two = [&] {  // 1, 2, 2 or 3
    if (left == 0) bits = engine();
    left = (left + 31) % 32;
    const double number = std::array{1.0, 2.0, 2.0, 3.0}[bits & 3];
    bits >>= 2;
    return number;
  };
  put(inputs.q, [&] { return 2.0; });
  put(inputs.k, [&] { return alike ? 2.0 : near_two(); });
  put(inputs.v, near_two);
  if (alike) return inputs;
  for (std::int64_t h = 0; h < a.h_q; ++h) {  // each row is another
    for (std::int64_t i = 0; i < a.s_q; ++i) {
      for (std::int64_t d = 0; d < a.d_qk; ++d) inputs.q.set(0, h, i, d, near_two());
    }
  }
  return inputs;
}

std::int64_t tile_n_of(const AttentionConfig& config, const AttentionCase& a) {
  const std::string spec = Attention::create(config)
                               .kernel_info({.b = a.b, .h_q = a.h_q, .h_kv = a.h_kv, .s_q = a.s_q, .s_kv = a.s_kv})
                               .spec;
  const std::string field = " tile_n=";
  return std::stoll(spec.substr(spec.find(field) + field.size()));
}

/// A thread's sum is as deep as a quarter of a KV tile and the number of tiles, and each addition is off by 2^-24 of
/// the sum. O is a mean of numbers from 1 to 3, rounded as P is.
TEST_P(LongSums, KeepTheirPrecision) {
  const auto [keys, alike] = GetParam();
  constexpr double kScale = 0.125;
  const AttentionCase a{.b = 1,
                        .h_q = 4,
                        .h_kv = 1,
                        .s_q = 8,
                        .s_kv = keys,
                        .d_qk = 128,
                        .d_v = 128,
                        .dtype = DType::f16,
                        .scale = static_cast<float>(kScale)};
  const AttentionInputs inputs = inputs_of_64(a, alike);
  const AttentionOutputs expected = reference_f64(a, inputs);
  constexpr double kGreatest = 100;  // of scores, and of LSE: rounded times log2 e, back, and with the sum
  // Of O a matrix unit adds 16 keys at once, with two roundings of 2^-23.
  const double bound_o = 3 * (2 * 0x1p-11 + 0x1p-22 * (static_cast<double>(keys) / 16 + 32));
  std::vector<KernelOverride> kernels{{"sm80", "splits=1"}};
  if (on_hopper()) {
    kernels.push_back({"sm90", "splits=1 exact_max=0"});
    kernels.push_back({"sm90", "splits=1 exact_max=1"});
  }
  for (const KernelOverride& kernel : kernels) {
    const Setting setting{.name = "long_sums", .attention = a, .kernel = kernel};
    DeviceSetting device(setting, inputs);
    const AttentionConfig config = config_of(setting, kScale);
    const auto tile_n = static_cast<double>(tile_n_of(config, a));
    const double depth = tile_n / 4 + static_cast<double>(keys) / tile_n + 4;
    const double bound_lse = 0x1p-24 * (depth + 3 * kGreatest) + 0x1p-20;
    const AttentionOutputs actual = device.run(config);
    EXPECT_LE(lse_max_abs_error(actual.lse.view(), expected.lse.view()), bound_lse)
        << kernel.kernel << ' ' << kernel.text;
    EXPECT_LE(compare(actual.o.view(), expected.o.view()).max_abs, bound_o);
  }
}

INSTANTIATE_TEST_SUITE_P(All, LongSums,
                         testing::Combine(testing::Values<std::int64_t>(131072, 300000), testing::Bool()));

// ---- inputs that make no sense ----

std::vector<Setting> rescue_settings() {
  std::vector<Setting> settings;
  for (const std::vector<Setting>& all : {plain_settings(), variant_settings()}) {
    for (const Setting& setting : all) {
      if (setting.attention.dtype == DType::f16) settings.push_back(setting);
    }
  }
  return settings;
}

/// Kernels end, whatever is in memory: the wait is bounded, and its end the end of the process.
class Senseless : public GpuTest, public testing::WithParamInterface<Setting> {};

void fill_with_signs(HostTensor& tensor, double magnitude, std::uint64_t seed) {
  std::mt19937_64 engine(seed);
  const TensorView view = tensor.view();
  for (std::int64_t i = 0; i < view.elements(); ++i) {
    reference::store_element(view, i, engine() % 2 == 0 ? magnitude : -magnitude);
  }
}

void expect_within(const AttentionOutputs& outputs, double limit) {
  const TensorView o = outputs.o.view();
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < o.elements(); ++i) {
    double value = 0;
    reference::load(o, i, 1, 1, &value);
    if (!(std::abs(value) <= limit)) ++wrong;
  }
  EXPECT_EQ(wrong, 0) << "elements of o beyond " << limit << ", or NaN";
}

double largest_of(const HostTensor& tensor) {
  const TensorView view = tensor.view();
  double largest = 0;
  for (std::int64_t i = 0; i < view.elements(); ++i) {
    double value = 0;
    reference::load(view, i, 1, 1, &value);
    largest = std::max(largest, std::abs(value));
  }
  return largest;
}

/// |score log2 e| is 2^31 and more: 2^30 times a whole number, which a softmax in float has no trouble with.
TEST_P(Senseless, PowersOfTwoAreRight) {
  const Setting& setting = GetParam();
  skip_without(setting);
  if (IsSkipped()) return;
  AttentionInputs inputs = make_inputs(setting.attention);
  fill_with_signs(inputs.q, 32768, 1);
  fill_with_signs(inputs.k, 32768, 2);
  DeviceSetting device(setting, inputs);
  JudgedCase c = judged(setting);
  if (setting.function.in_f64) {
    c.score = [&](const ScorePlace& at, double score) { return setting.function.in_f64(at, score, setting.sign); };
  }
  const SoftmaxJudge judge(c, inputs);
  const AttentionOutputs outputs = device.run(config_of(setting, setting.sign));
  // Distances are lost in sums of such products, and with them the order of keys.
  if (setting.function.slopes) return expect_within(outputs, 1.01 * largest_of(inputs.v));
  expect_right(judge.judge(setting.sign, outputs));
}

TEST_P(Senseless, GreatestNumbersGiveFiniteOutputs) {
  const Setting& setting = GetParam();
  skip_without(setting);
  if (IsSkipped()) return;
  AttentionInputs inputs = make_inputs(setting.attention);
  fill_with_signs(inputs.q, 65504, 3);
  fill_with_signs(inputs.k, 65504, 4);
  DeviceSetting device(setting, inputs);
  for (const double scale : {0.125, 1.0, 1024.0, 0x1p60}) {
    SCOPED_TRACE(scale);
    const AttentionOutputs outputs = device.run(config_of(setting, scale * setting.sign));
    expect_within(outputs, 1.01 * largest_of(inputs.v) / (1 - double{setting.dropout}));
    const TensorView lse = outputs.lse.view();
    for (std::int64_t i = 0; i < lse.elements(); ++i) {
      double value = 0;
      reference::load(lse, i, 1, 1, &value);
      ASSERT_TRUE(std::isfinite(value)) << i;  // each row sees keys
    }
  }
}

/// Infinities and NaN in every third row of q, then any bits in all of q, k and v.
TEST_P(Senseless, WhateverIsReadEnds) {
  const Setting& setting = GetParam();
  skip_without(setting);
  if (IsSkipped()) return;
  const AttentionCase& a = setting.attention;
  AttentionInputs inputs = whole_inputs(a);
  DeviceSetting device(setting, inputs);
  JudgedCase c = judged(setting);
  c.judged_row = [](std::int64_t row) { return row % 3 != 1; };
  if (setting.function.in_f64) {
    c.score = [&](const ScorePlace& at, double score) { return setting.function.in_f64(at, score, setting.sign); };
  }
  const SoftmaxJudge judge(c, inputs);
  for (const double value : {kInfinity, -kInfinity, std::numeric_limits<double>::quiet_NaN()}) {
    SCOPED_TRACE(value);
    HostTensor q = inputs.q;
    for (std::int64_t b = 0; b < a.b; ++b) {
      for (std::int64_t h = 0; h < a.h_q; ++h) {
        for (std::int64_t row = 1; row < a.s_q; row += 3) q.set(b, h, row, (row + h) % a.d_qk, value);
      }
    }
    device.write_q(q);
    expect_right(judge.judge(setting.sign, device.run(config_of(setting, setting.sign))));
  }
  std::mt19937_64 engine(5);
  for (HostTensor* tensor : {&inputs.q, &inputs.k, &inputs.v}) {
    for (std::byte& byte : tensor->bytes()) byte = static_cast<std::byte>(engine());
  }
  DeviceSetting(setting, inputs).run(config_of(setting, setting.sign));
}

INSTANTIATE_TEST_SUITE_P(All, Senseless, testing::ValuesIn(rescue_settings()), name_of);

}  // namespace
}  // namespace fa::test
