// Gradients of statistics on the host device against differences of the statistics, and what is refused.

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "api/validate.hpp"
#include "expect_error.hpp"

namespace fa {
namespace {

using test::expect_invalid;

constexpr std::int64_t kB = 2, kHq = 4, kHkv = 2, kSq = 7, kSkv = 9, kD = 8;
constexpr double kStep = 1e-5;

std::vector<double> random(std::int64_t count, std::uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::vector<double> values(static_cast<std::size_t>(count));
  for (double& value : values) value = static_cast<double>(engine() >> 11) * 0x1p-52 - 1;
  return values;
}

/// A loss of o, lse, the entropy and the greatest logits, linear in each.
struct Loss {
  AttentionConfig config;
  std::vector<double> q = random(kB * kHq * kSq * kD, 1), k = random(kB * kHkv * kSkv * kD, 2),
                      v = random(kB * kHkv * kSkv * kD, 3), sink = random(kHq, 4), slope = random(kHq, 5);
  std::vector<double> dout = random(kB * kHq * kSq * kD, 6), dlse = random(kB * kHq * kSq, 7),
                      dentropy = random(kB * kHq * kSq, 8), dmax_logit = random(kB * kHq * kSq, 9);
  std::vector<double> o = std::vector<double>(dout.size()), lse = std::vector<double>(dlse.size()), entropy = lse,
                      max_logit = lse;
  std::vector<double> dsums = random(kB * kHq * kSkv, 10), sums = std::vector<double>(dsums.size());
  std::vector<std::int32_t> cu_q, cu_kv;

  Loss() {
    config.head_dim = kD;
    config.dtype = DType::f64;
    config.statistics = {.max_logit = MaxLogit::softmax,
                         .entropy = true,
                         .column_sums = ColumnSums::query_heads,
                         .entropy_gradient = true,
                         .max_logit_gradient = true,
                         .column_sums_gradient = true};
  }

  bool packed() const { return !cu_q.empty(); }
  TensorView tensor(std::vector<double>& values, std::int64_t h, std::int64_t s) const {
    return packed() ? TensorView(values.data(), DType::f64, {kB * s, h, kD})
                    : TensorView(values.data(), DType::f64, {kB, h, s, kD});
  }
  TensorView rows(std::vector<double>& values) const {
    return packed() ? TensorView(values.data(), DType::f64, {kHq, kB * kSq})
                    : TensorView(values.data(), DType::f64, {kB, kHq, kSq});
  }
  TensorView columns(std::vector<double>& values) const {
    const std::int64_t heads = config.statistics.column_sums == ColumnSums::kv_heads ? kHkv : kHq;
    return packed() ? TensorView(values.data(), DType::f64, {heads, kB * kSkv})
                    : TensorView(values.data(), DType::f64, {kB, heads, kSkv});
  }
  /// Greatest logits, or their gradients: of rows, or the first of them of heads.
  TensorView greatest(std::vector<double>& values) const {
    return config.statistics.max_logit_by_head ? TensorView(values.data(), DType::f64, {kHq}) : rows(values);
  }
  PackedSequences sequences() const {
    PackedSequences result;
    if (!packed()) return result;
    result.b = static_cast<std::int64_t>(cu_q.size()) - 1;
    result.cu_seqlens_q = cu_q.data();
    result.cu_seqlens_kv = cu_kv.data();
    return result;
  }
  template <class Inputs>
  void add_others(Inputs& inputs) {
    inputs.sequences = sequences();
    if (config.sink) inputs.sink = TensorView(sink.data(), DType::f64, {kHq});
    if (!config.score.captures.empty()) {
      inputs.captures.add(Captured("slope", TensorView(slope.data(), DType::f64, {kHq})));
    }
  }

  double value() {
    ForwardInputs inputs{tensor(q, kHq, kSq), tensor(k, kHkv, kSkv), tensor(v, kHkv, kSkv)};
    add_others(inputs);
    ForwardOutputs outputs{tensor(o, kHq, kSq), rows(lse)};
    outputs.statistics.entropy = rows(entropy);
    outputs.statistics.max_logit = greatest(max_logit);
    outputs.statistics.column_sums = columns(sums);
    Attention::create(config, Device::host()).forward(inputs, outputs);
    double sum = 0;
    for (std::int64_t i = 0; i < columns(sums).elements(); ++i) {
      sum += sums[static_cast<std::size_t>(i)] * dsums[static_cast<std::size_t>(i)];
    }
    for (std::size_t i = 0; i < o.size(); ++i) sum += o[i] * dout[i];
    for (std::size_t i = 0; i < lse.size(); ++i) {
      if (std::isinf(lse[i])) continue;
      sum += lse[i] * dlse[i] + entropy[i] * dentropy[i];
    }
    for (std::size_t i = 0; i < static_cast<std::size_t>(greatest(max_logit).elements()); ++i) {
      if (std::isfinite(max_logit[i])) sum += max_logit[i] * dmax_logit[i];
    }
    return sum;
  }

  BackwardInputs backward_inputs() {
    BackwardInputs inputs{tensor(q, kHq, kSq),
                          tensor(k, kHkv, kSkv),
                          tensor(v, kHkv, kSkv),
                          tensor(o, kHq, kSq),
                          rows(lse),
                          tensor(dout, kHq, kSq),
                          rows(dlse)};
    add_others(inputs);
    inputs.statistics = {rows(entropy), rows(dentropy), greatest(dmax_logit), columns(dsums)};
    return inputs;
  }

  /// Holds the gradient to differences, element by element.
  void expect_gradients() {
    value();
    std::vector<double> dq(q.size()), dk(k.size()), dv(v.size()), dsink(sink.size()), dslope(slope.size());
    BackwardOutputs outputs{tensor(dq, kHq, kSq), tensor(dk, kHkv, kSkv), tensor(dv, kHkv, kSkv)};
    if (config.sink) outputs.dsink = TensorView(dsink.data(), DType::f64, {kHq});
    if (!config.score.captures.empty()) {
      outputs.captures.add(Captured("slope", TensorView(dslope.data(), DType::f64, {kHq})));
    }
    Attention::create(config, Device::host()).backward(backward_inputs(), outputs);
    expect_differences("q", q, dq, 5);
    expect_differences("k", k, dk, 3);
    expect_differences("v", v, dv, 7);
    if (config.sink) expect_differences("sink", sink, dsink, 1);
    if (!config.score.captures.empty()) expect_differences("slope", slope, dslope, 1);
  }

  void expect_differences(const char* name, std::vector<double>& input, const std::vector<double>& gradient,
                          std::size_t every) {
    for (std::size_t i = 0; i < input.size(); i += every) {
      const double at = input[i];
      input[i] = at + kStep;
      const double above = value();
      input[i] = at - kStep;
      const double below = value();
      input[i] = at;
      EXPECT_NEAR(gradient[i], (above - below) / (2 * kStep), 1e-7) << "d" << name << "[" << i << "]";
    }
    value();
  }
};

TEST(StatisticsGradients, AreThoseOfDifferences) {
  for (const bool causal : {false, true}) {
    for (const ColumnSums sums : {ColumnSums::query_heads, ColumnSums::kv_heads}) {
      Loss loss;
      loss.config.causal = causal;
      loss.config.statistics.column_sums = sums;
      loss.expect_gradients();
    }
  }
}

TEST(StatisticsGradients, AreThoseOfDifferencesWithAnyScale) {
  for (const float scale : {-0.7F, 2.0F}) {
    Loss loss;
    loss.config.scale = scale;
    loss.expect_gradients();
  }
}

TEST(StatisticsGradients, AreThoseOfDifferencesWithSinksAndWindows) {
  Loss loss;
  loss.config.causal = true;
  loss.config.sink = true;
  loss.config.window_left = 3;
  loss.expect_gradients();
}

TEST(StatisticsGradients, AreThoseOfDifferencesBehindFunctions) {
  for (const MaxLogit max_logit : {MaxLogit::softmax, MaxLogit::scaled}) {
    Loss loss;
    loss.config.score =
        ScoreFunction{"2.0 * tanh(score) - slope[h] * float(abs(q - kv))", {{"slope", DType::f64, true}}};
    loss.config.mask = MaskFunction{"(q + kv) % 4 != 1"};
    loss.config.statistics.max_logit = max_logit;
    loss.expect_gradients();
  }
}

TEST(StatisticsGradients, AreThoseOfDifferencesInPackedBatches) {
  Loss loss;
  loss.config.varlen = true;
  loss.config.causal = true;
  loss.cu_q = {0, 5, 5, 14};
  loss.cu_kv = {0, 3, 8, 18};
  loss.expect_gradients();
}

TEST(StatisticsGradients, OfHeadsAreThoseOfDifferences) {
  for (const MaxLogit max_logit : {MaxLogit::softmax, MaxLogit::scaled}) {
    for (const bool varlen : {false, true}) {
      Loss loss;
      loss.config.causal = true;
      loss.config.statistics.max_logit = max_logit;
      loss.config.statistics.max_logit_by_head = true;
      loss.config.score = ScoreFunction{"2.0 * tanh(score) - 3.0"};
      loss.config.varlen = varlen;
      if (varlen) {
        loss.cu_q = {0, 5, 5, 14};
        loss.cu_kv = {0, 3, 8, 18};
      }
      loss.expect_gradients();
    }
  }
}

TEST(StatisticsGradients, OfHeadsWithEqualLogitsTheFirstRowHasIt) {
  Loss loss;
  loss.config.statistics = {.max_logit = MaxLogit::softmax, .max_logit_by_head = true, .max_logit_gradient = true};
  for (std::vector<double>* const tensor : {&loss.q, &loss.k}) {
    for (std::size_t i = kD; i < tensor->size(); ++i) (*tensor)[i] = (*tensor)[i % kD];
  }
  ForwardInputs inputs{loss.tensor(loss.q, kHq, kSq), loss.tensor(loss.k, kHkv, kSkv), loss.tensor(loss.v, kHkv, kSkv)};
  ForwardOutputs outputs{loss.tensor(loss.o, kHq, kSq), loss.rows(loss.lse)};
  outputs.statistics.max_logit = loss.greatest(loss.max_logit);
  const Attention attention = Attention::create(loss.config, Device::host());
  attention.forward(inputs, outputs);
  std::fill(loss.dout.begin(), loss.dout.end(), 0.0);
  std::vector<double> dq(loss.q.size());
  BackwardInputs given{inputs.q, inputs.k, inputs.v, outputs.o, outputs.lse, loss.tensor(loss.dout, kHq, kSq)};
  given.statistics.dmax_logit = loss.greatest(loss.dmax_logit);
  BackwardOutputs gradients;
  gradients.dq = loss.tensor(dq, kHq, kSq);
  attention.backward(given, gradients);
  for (std::size_t i = 0; i < dq.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i) / kD;
    const bool is_first = row / kSq < kHq && row % kSq == 0;  // of the first entry
    EXPECT_EQ(dq[i] != 0, is_first) << i;
  }
}

TEST(StatisticsGradients, OfEqualLogitsTheFirstHasIt) {
  Loss loss;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(loss.k.size()); ++i) {
    loss.k[static_cast<std::size_t>(i)] = loss.k[static_cast<std::size_t>(i / (kSkv * kD) * (kSkv * kD) + i % kD)];
  }
  loss.config.statistics.entropy_gradient = loss.config.statistics.column_sums_gradient = false;
  std::fill(loss.dout.begin(), loss.dout.end(), 0.0);
  std::fill(loss.dlse.begin(), loss.dlse.end(), 0.0);
  loss.value();
  std::vector<double> dk(loss.k.size());
  BackwardInputs inputs = loss.backward_inputs();
  inputs.statistics.entropy = inputs.statistics.dentropy = inputs.statistics.dcolumn_sums = {};
  BackwardOutputs outputs;
  outputs.dk = loss.tensor(dk, kHkv, kSkv);
  Attention::create(loss.config, Device::host()).backward(inputs, outputs);
  for (std::size_t i = 0; i < dk.size(); ++i) {
    const bool of_first = static_cast<std::int64_t>(i) / kD % kSkv == 0;
    EXPECT_EQ(dk[i] != 0, of_first) << i;
  }
}

TEST(StatisticsGradients, RefuseWhatTheyCannotBeOf) {
  const auto refuses = [](const char* name, const std::function<void(AttentionConfig&)>& change) {
    Loss loss;
    loss.config.dtype = DType::bf16;
    EXPECT_NO_THROW(api::validate(loss.config, false));
    change(loss.config);
    expect_invalid(name, [&] { api::validate(loss.config, false); });
  };
  refuses("statistics.entropy_gradient", [](AttentionConfig& c) { c.statistics.entropy = false; });
  refuses("statistics.max_logit_gradient", [](AttentionConfig& c) { c.statistics.max_logit = MaxLogit::none; });
  refuses("statistics.column_sums_gradient", [](AttentionConfig& c) { c.statistics.column_sums = ColumnSums::none; });
}

TEST(StatisticsGradients, RefuseTensorsThatDoNotFit) {
  const auto refuses = [](const char* name, const std::function<void(BackwardInputs&)>& change) {
    Loss loss;
    std::vector<double> dq(loss.q.size());
    const Attention attention = Attention::create(loss.config, Device::host());
    BackwardInputs inputs = loss.backward_inputs();
    BackwardOutputs outputs;
    outputs.dq = loss.tensor(dq, kHq, kSq);
    change(inputs);
    expect_invalid(name, [&] { attention.backward(inputs, outputs); });
  };
  refuses("entropy", [](BackwardInputs& in) { in.statistics.entropy = {}; });
  refuses("dentropy", [](BackwardInputs& in) { in.statistics.dentropy = {}; });
  refuses("dentropy", [](BackwardInputs& in) { in.statistics.dentropy.dtype = DType::f32; });
  refuses("dentropy", [](BackwardInputs& in) { in.statistics.dentropy.strides[2] = 2; });
  refuses("dmax_logit", [](BackwardInputs& in) { in.statistics.dmax_logit = {}; });
  refuses("dmax_logit", [](BackwardInputs& in) { in.statistics.dmax_logit.shape[1] = 2; });
  refuses("dmax_logit",
          [](BackwardInputs& in) { in.statistics.dmax_logit = TensorView(in.q.data, DType::f64, {kHq}); });
  refuses("dcolumn_sums", [](BackwardInputs& in) { in.statistics.dcolumn_sums = {}; });
  refuses("dcolumn_sums", [](BackwardInputs& in) { in.statistics.dcolumn_sums.shape[1] = kHkv; });
  refuses("dcolumn_sums", [](BackwardInputs& in) { in.statistics.dcolumn_sums.strides[1] = 2 * kSkv; });
  refuses("place", [](BackwardInputs& in) { in.place = ShardPlace{.whole_s_kv = 2 * kSkv}; });
  Loss loss;
  loss.config.statistics.max_logit_gradient = false;
  std::vector<double> dq(loss.q.size());
  BackwardOutputs outputs;
  outputs.dq = loss.tensor(dq, kHq, kSq);
  const Attention attention = Attention::create(loss.config, Device::host());
  expect_invalid("dmax_logit", [&] { attention.backward(loss.backward_inputs(), outputs); });
}

TEST(ColumnSumsOverride, NamesThePassAndItsBuffers) {
  AttentionConfig config;
  config.head_dim = 256;
  config.statistics.column_sums = ColumnSums::query_heads;
  for (const char* const text : {"row_buffers=1", "row_buffers=2", ""}) {
    config.kernel = KernelOverride{"column_sums", text};
    EXPECT_NO_THROW(api::validate(config, false)) << text;
  }
  config.kernel = KernelOverride{"column_sums", "row_buffers=3"};
  expect_invalid("kernel.row_buffers", [&] { api::validate(config, false); });
  config.kernel = KernelOverride{"column_sums", "tile_m=64"};
  expect_invalid("kernel.text", [&] { api::validate(config, false); });
  config.kernel = KernelOverride{"column_sums", "row_buffers=1"};
  config.statistics = {};
  expect_invalid("kernel.kernel", [&] { api::validate(config, false); });
}

}  // namespace
}  // namespace fa
