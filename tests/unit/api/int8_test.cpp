// Calls whose q and k are i8, and what makes these, on the host device: what is refused, what numbers mean, and how
// much of the float64 answer is left.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <fa/attention.hpp>

#include "expect_error.hpp"
#include "support/attention_case.hpp"

namespace fa::test {
namespace {

AttentionConfig config_of(std::int64_t d, DType dtype = DType::i8) {
  AttentionConfig config;
  config.head_dim = static_cast<int>(d);
  config.dtype = dtype;
  config.host_f64 = true;
  return config;
}

/// A call of b 2, h_q 4, h_kv 2 with scales and biases of rows.
struct Call {
  Call() {
    inputs = make_inputs(c);
    add_scales(c, inputs);
    outputs = make_outputs(c);
    in.q = std::as_const(inputs.q).view();
    in.k = std::as_const(inputs.k).view();
    in.v = std::as_const(inputs.v).view();
    in.q_scale = std::as_const(inputs.q_scale).view();
    in.k_scale = std::as_const(inputs.k_scale).view();
    in.v_scale = std::as_const(inputs.v_scale).view();
    in.row_bias = std::as_const(inputs.row_bias).view();
    in.k_scale.rank = in.v_scale.rank = 2;
    config = config_of(32);
    config.o_dtype = DType::f16;
  }
  void run() { Attention::create(config, Device::host()).forward(in, {outputs.o.view(), outputs.lse.view()}); }

  /// A score in front of every function, by the formula.
  double score(std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t j) const {
    double sum = 0;
    for (std::int64_t d = 0; d < 32; ++d) sum += inputs.q.at(b, h, s, d) * inputs.k.at(b, h / 2, j, d);
    sum *= inputs.q_scale.at(b, h, s) * inputs.k_scale.at(b, h / 2, config.key_scales ? j : 0);
    return (sum + (in.row_bias.defined() ? inputs.row_bias.at(b, h, s) : 0)) / std::sqrt(32.0);
  }
  void check(const std::function<double(double)>& function, double sink) {
    run();
    for (std::int64_t i = 0; i < 2 * 4 * 5; ++i) {
      const std::int64_t b = i / 20, h = i / 5 % 4, s = i % 5;
      double sum = std::exp(sink), weighted = 0;
      for (std::int64_t j = 0; j < c.s_kv; ++j) {
        const double p = std::exp(function(score(b, h, s, j)));
        sum += p;
        weighted += p * inputs.v.at(b, h / 2, j, 7) * inputs.v_scale.at(b, h / 2, 0);
      }
      EXPECT_NEAR(outputs.o.at(b, h, s, 7), weighted / sum, std::abs(weighted / sum) / 1024 + 1e-5) << i;
      EXPECT_NEAR(outputs.lse.at(b, h, s), std::log(sum), 2e-6 * (1 + std::abs(std::log(sum)))) << i;
    }
  }

  AttentionCase c{.b = 2,
                  .h_q = 4,
                  .h_kv = 2,
                  .s_q = 5,
                  .s_kv = 9,
                  .d_qk = 32,
                  .d_v = 32,
                  .dtype = DType::i8,
                  .o_dtype = DType::f16};
  AttentionConfig config;
  AttentionInputs inputs;
  AttentionOutputs outputs;
  ForwardInputs in;
};

double same(double x) {
  return x;
}

TEST(Int8, ScalesAndBiasesOfRowsMakeScores) {
  Call call;
  call.check(same, -HUGE_VAL);
  call.in.row_bias = {};
  call.check(same, -HUGE_VAL);
  add_key_scales(call.c, call.inputs);
  call.in.k_scale = std::as_const(call.inputs.k_scale).view();
  call.config.key_scales = true;
  call.check(same, -HUGE_VAL);
}

// What depends on more than differences of scores is given the whole score.
TEST(Int8, FunctionsAndSinksSeeBiasesOfRows) {
  Call call;
  call.config.score = ScoreFunction{"3.0 * tanh(score / 3.0)"};
  call.check([](double x) { return 3 * std::tanh(x / 3); }, -HUGE_VAL);
  Call with_sink;
  const std::vector<float> sink(4, 0.5F);
  with_sink.config.sink = true;
  with_sink.in.sink = TensorView(sink.data(), DType::f32, {4});
  with_sink.check(same, 0.5);
}

TEST(Int8, WhatIsRefused) {
  for (const auto& [argument, change] : std::vector<std::pair<const char*, std::function<void(AttentionConfig&)>>>{
           {"head_dim", [](AttentionConfig& c) { c.head_dim = 24; }},
           {"v_dtype", [](AttentionConfig& c) { c.v_dtype = DType::e4m3; }},
           {"o_dtype", [](AttentionConfig& c) { c.o_dtype = DType::i8; }},
           {"dropout", [](AttentionConfig& c) { c.dropout = 0.5F; }},
           {"accumulate", [](AttentionConfig& c) { c.accumulate = true; }}}) {
    AttentionConfig config = config_of(32);
    change(config);
    expect_invalid(argument, [&] { Attention::create(config, Device::host()); });
  }
  Call call;
  const auto refused = [&](const char* argument, const auto& change) {
    const ForwardInputs in = call.in;
    change(call.in);
    expect_invalid(argument, [&] { call.run(); });
    call.in = in;
  };
  refused("v", [](ForwardInputs& in) { in.v = in.k; });
  refused("k", [](ForwardInputs& in) { in.k = in.v; });
  refused("row_bias", [](ForwardInputs& in) { in.row_bias.dtype = DType::bf16; });
  refused("row_bias", [](ForwardInputs& in) { in.row_bias.shape[2] = 4; });
  refused("o", [&](ForwardInputs& in) { in.row_bias = TensorView(call.outputs.o.view().data, DType::f32, {2, 4, 5}); });
  call.config.dtype = DType::e4m3;
  refused("row_bias", [](ForwardInputs& in) { in.q.dtype = in.k.dtype = DType::e4m3; });
}

/// Tensors of 16 bits, and room for their codes.
struct Source {
  Source(std::int64_t keys, std::int64_t d, DType codes)
      : c{.b = 1, .h_q = 2, .h_kv = 1, .s_q = 64, .s_kv = keys, .d_qk = d, .d_v = d, .dtype = DType::f32},
        inputs(make_inputs(c)),
        q(codes, 1, 2, 64, d, Layout::bhsd),
        k(codes, 1, 1, keys, d, Layout::bhsd),
        v(DType::e4m3, 1, 1, keys, d, Layout::bhsd),
        q_scale(DType::f32, 1, 2, 64),
        k_scale(DType::f32, 1, 1, keys),
        v_scale(DType::f32, 1, 1, keys),
        mean(DType::f32, 1, 1, d),
        bias(DType::f32, 1, 2, 64) {}

  QuantizeInputs quantize(bool smooths) {
    QuantizeInputs in;
    in.q = inputs.q.view(), in.k = inputs.k.view(), in.v = inputs.v.view();
    in.q_codes = q.view(), in.k_codes = k.view(), in.v_codes = v.view();
    in.q_scale = q_scale.view(), in.k_scale = k_scale.view(), in.v_scale = v_scale.view();
    if (smooths) in.k_mean = mean.view(), in.row_bias = bias.view();
    return in;
  }

  AttentionCase c;
  AttentionInputs inputs;
  HostTensor q, k, v, q_scale, k_scale, v_scale, mean, bias;
};

TEST(Int8, QuantizeMakesCodesScalesMeansAndBiases) {
  Source source(40, 32, DType::i8);
  Attention::create(config_of(32), Device::host()).quantize(source.quantize(true));
  for (std::int64_t d = 0; d < 32; ++d) {
    double sum = 0;
    for (std::int64_t j = 0; j < 40; ++j) sum += source.inputs.k.at(0, 0, j, d);
    EXPECT_NEAR(source.mean.at(0, 0, d), sum / 40, 1e-6);
  }
  for (std::int64_t i = 0; i < 2 * 64; ++i) {
    double most = 0, product = 0;
    for (std::int64_t d = 0; d < 32; ++d) {
      const double x = source.inputs.q.at(0, i / 64, i % 64, d);
      most = std::max(most, std::abs(x));
      product += x * source.mean.at(0, 0, d);
    }
    const double scale = source.q_scale.at(0, i / 64, i % 64);
    EXPECT_NEAR(scale, most / 127, 1e-8);
    EXPECT_NEAR(source.bias.at(0, i / 64, i % 64), product, 1e-5);
    for (std::int64_t d = 0; d < 32; ++d) {
      EXPECT_NEAR(scale * source.q.at(0, i / 64, i % 64, d), source.inputs.q.at(0, i / 64, i % 64, d), 0.5001 * scale);
    }
  }
  for (std::int64_t j = 0; j < 40; ++j) {
    const double scale = source.k_scale.at(0, 0, j), of_v = source.v_scale.at(0, 0, j);
    for (std::int64_t d = 0; d < 32; ++d) {
      const double x = source.inputs.k.at(0, 0, j, d) - source.mean.at(0, 0, d), y = source.inputs.v.at(0, 0, j, d);
      EXPECT_NEAR(scale * source.k.at(0, 0, j, d), x, 0.5001 * scale);
      EXPECT_NEAR(of_v * source.v.at(0, 0, j, d), y, std::abs(y) / 15.9 + 0x1p-9 * of_v);
    }
  }
}

TEST(Int8, QuantizeTakesWhatIsGiven) {
  Source source(9, 32, DType::i8);
  QuantizeInputs in = source.quantize(true);
  fill(source.q_scale, {0, 64}, 0.5);
  fill(source.k_scale, {0, 9}, 0.25);
  fill(source.v_scale, {0, 9}, 0.125);
  fill(source.mean, {0, 32}, 1);
  in.scales_given = in.mean_given = true;
  Attention::create(config_of(32), Device::host()).quantize(in);
  EXPECT_EQ(source.q.at(0, 1, 2, 3), std::nearbyint(source.inputs.q.at(0, 1, 2, 3) / 0.5));
  EXPECT_EQ(source.k.at(0, 0, 2, 3), std::nearbyint((source.inputs.k.at(0, 0, 2, 3) - 1) / 0.25));
  EXPECT_NEAR(source.v.at(0, 0, 2, 3), source.inputs.v.at(0, 0, 2, 3) / 0.125,
              std::abs(source.inputs.v.at(0, 0, 2, 3)));
  EXPECT_EQ(source.mean.at(0, 0, 5), 1);
  EXPECT_EQ(source.k_scale.at(0, 0, 5), 0.25);
}

TEST(Int8, WhatQuantizeRefuses) {
  Source source(9, 32, DType::i8);
  const auto refused = [&](const char* argument, const auto& change, DType dtype = DType::i8) {
    QuantizeInputs in = source.quantize(true);
    change(in);
    expect_invalid(argument, [&] { Attention::create(config_of(32, dtype), Device::host()).quantize(in); });
  };
  const auto nothing = [](QuantizeInputs&) {};
  refused("dtype", nothing, DType::bf16);
  refused("dtype", nothing, DType::e5m2);
  refused("q_codes", nothing, DType::e4m3);
  refused("q_codes", [](QuantizeInputs& in) { in.q = {}; });
  refused("q", [](QuantizeInputs& in) { in.q.dtype = DType::f64; });
  refused("k", [](QuantizeInputs& in) { in.k.shape[3] = 16; });
  refused("k_codes", [](QuantizeInputs& in) { in.k_codes.shape[2] = 8; });
  refused("k_codes", [](QuantizeInputs& in) { in.k_codes.strides[2] = 0; });
  refused("k_codes", [](QuantizeInputs& in) { in.k_codes.data = static_cast<std::byte*>(in.k_codes.data) + 8; });
  refused("v_codes", [](QuantizeInputs& in) { in.v_codes.dtype = DType::i8; });
  refused("v_scale", [](QuantizeInputs& in) { in.v_scale = {}; });
  refused("v_scale", [](QuantizeInputs& in) { in.v_scale.strides[2] = 0; });
  refused("v_scale", [](QuantizeInputs& in) { in.k_scale = in.v_scale; });
  refused("k_mean", [](QuantizeInputs& in) { in.k_mean.shape[2] = 16; });
  refused("k_mean", [](QuantizeInputs& in) { in.k = in.k_codes = in.k_scale = {}; });
  refused("row_bias", [](QuantizeInputs& in) { in.k_mean = {}; });
  refused("row_bias", [](QuantizeInputs& in) { in.q = in.q_codes = in.q_scale = {}; });
  refused("row_bias", [](QuantizeInputs& in) { in.row_bias.dtype = DType::bf16; });
  refused("mean_given", [](QuantizeInputs& in) {
    in.k_mean = in.row_bias = {};
    in.mean_given = true;
  });
}

/// The root mean square of the error of O that codes of q and k make, over that of O. Values of v are those of e4m3.
double error_of_codes(DType codes, bool smooths, const std::function<void(Source&)>& change) {
  constexpr std::int64_t kKeys = 1024, kColumns = 128;
  Source source(kKeys, kColumns, codes);
  change(source);
  for (std::int64_t j = 0; j < kKeys; ++j) {
    for (std::int64_t d = 0; d < kColumns; ++d) {
      source.v.set(0, 0, j, d, source.inputs.v.at(0, 0, j, d));
      source.inputs.v.set(0, 0, j, d, source.v.at(0, 0, j, d));
    }
  }
  const AttentionOutputs expected = reference_f64(source.c, source.inputs);
  QuantizeInputs in = source.quantize(smooths);
  in.v = in.v_codes = in.v_scale = {};
  if (codes != DType::i8) in.row_bias = {};
  AttentionConfig config = config_of(kColumns, codes);
  config.key_scales = true;
  config.o_dtype = DType::f16;
  const Attention attention = Attention::create(config, Device::host());
  attention.quantize(in);
  ForwardInputs call{source.q.view(), source.k.view(), source.v.view()};
  call.q_scale = source.q_scale.view();
  call.k_scale = source.k_scale.view();
  if (smooths && codes == DType::i8) call.row_bias = source.bias.view();
  AttentionCase like = source.c;
  like.dtype = codes;
  like.o_dtype = DType::f16;
  AttentionOutputs actual = make_outputs(like);
  attention.forward(call, {actual.o.view(), actual.lse.view()});
  if (smooths && codes == DType::i8) {
    EXPECT_LE(lse_max_abs_error(actual.lse.view(), expected.lse.view()), 0.1);
  }
  double squares = 0, of_all = 0;
  for (std::int64_t i = 0; i < 2 * 64 * kColumns; ++i) {
    const std::int64_t h = i / 64 / kColumns, s = i / kColumns % 64, d = i % kColumns;
    const double o = expected.o.at(0, h, s, d);
    squares += (actual.o.at(0, h, s, d) - o) * (actual.o.at(0, h, s, d) - o);
    of_all += o * o;
  }
  return std::sqrt(squares / of_all);
}

/// One of 1,000 elements of q and k is ten times what it was.
void add_outliers(Source& source) {
  std::mt19937 random(5);
  for (HostTensor* const tensor : {&source.inputs.q, &source.inputs.k}) {
    const TensorView view = tensor->view();
    for (std::int64_t i = 0; i < view.elements(); ++i) {
      if (random() % 1000 != 0) continue;
      const std::int64_t d = i % view.shape[3], s = i / view.shape[3] % view.shape[2],
                         h = i / view.shape[3] / view.shape[2];
      tensor->set(0, h, s, d, 10 * tensor->at(0, h, s, d));
    }
  }
}

/// Four columns of K have a mean of 12 deviations.
void add_means(Source& source) {
  for (std::int64_t j = 0; j < source.c.s_kv; ++j) {
    for (std::int64_t d = 7; d < source.c.d_qk; d += 32)
      source.inputs.k.set(0, 0, j, d, source.inputs.k.at(0, 0, j, d) + 12);
  }
}

// The table of docs/numerics.md, "i8".
TEST(Int8, SmoothedCodesAreMoreExactThanEightBitFloats) {
  struct Row {
    const char* name;
    std::function<void(Source&)> change;
    double fp8, plain, smoothed;  // what is said of them, within a tenth
  };
  const Row rows[] = {{"normal", [](Source&) {}, 0.038, 0.0092, 0.0091},
                      {"outliers", add_outliers, 0.048, 0.030, 0.028},
                      {"means", add_means, 0.057, 0.030, 0.0091}};
  for (const Row& row : rows) {
    SCOPED_TRACE(row.name);
    const double fp8 = error_of_codes(DType::e4m3, false, row.change);
    const double plain = error_of_codes(DType::i8, false, row.change);
    const double smoothed = error_of_codes(DType::i8, true, row.change);
    EXPECT_NEAR(fp8, row.fp8, 0.1 * row.fp8);
    EXPECT_NEAR(plain, row.plain, 0.1 * row.plain);
    EXPECT_NEAR(smoothed, row.smoothed, 0.1 * row.smoothed);
    EXPECT_LT(smoothed, 0.6 * fp8);
    EXPECT_LT(plain, fp8);
  }
  EXPECT_LT(error_of_codes(DType::i8, true, add_means), 0.35 * error_of_codes(DType::i8, false, add_means));
  {
    SCOPED_TRACE("e4m3 gains by smoothing, too, where it matters");
    EXPECT_LT(error_of_codes(DType::e4m3, true, add_means), 0.8 * error_of_codes(DType::e4m3, false, add_means));
  }
}

}  // namespace
}  // namespace fa::test
