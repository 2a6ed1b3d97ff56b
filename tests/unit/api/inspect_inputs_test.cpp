// Debug calls on the host device name every input: gradients of statistics, biases of rows, and scales of all layouts.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <fa/attention.hpp>

#include "expect_location.hpp"
#include "support/attention_case.hpp"

namespace fa::test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::int64_t kB = 2, kHq = 4, kHkv = 2, kSq = 6, kSkv = 9, kD = 8;

std::vector<float> random(std::int64_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = static_cast<float>(engine() >> 8) * 0x1p-23F - 1;
  return values;
}

/// A backward that is given gradients of all statistics. Packed, its sequences are the batch entries.
class DebugStatisticsGradients : public testing::Test {
 protected:
  DebugStatisticsGradients() {
    config.head_dim = kD;
    config.dtype = DType::f32;
    config.debug = true;
    config.causal = true;  // row i sees the keys 0 to i + 3
    config.statistics = {.max_logit = MaxLogit::softmax,
                         .entropy = true,
                         .column_sums = ColumnSums::query_heads,
                         .entropy_gradient = true,
                         .max_logit_gradient = true,
                         .column_sums_gradient = true};
  }

  /// [b, h, s, d], or [total, h, d] with the same bytes: packed tests break numbers of rows and keys alone.
  TensorView tensor(std::vector<float>& values, std::int64_t h, std::int64_t s) const {
    return config.varlen ? TensorView(values.data(), DType::f32, {kB * s, h, kD})
                         : TensorView(values.data(), DType::f32, {kB, h, s, kD});
  }
  TensorView numbers(std::vector<float>& values, std::int64_t h, std::int64_t s) const {
    return config.varlen ? TensorView(values.data(), DType::f32, {h, kB * s})
                         : TensorView(values.data(), DType::f32, {kB, h, s});
  }
  TensorView rows(std::vector<float>& values) const { return numbers(values, kHq, kSq); }
  TensorView columns(std::vector<float>& values) const { return numbers(values, heads_of_sums(), kSkv); }
  TensorView greatest(std::vector<float>& values) const {
    return config.statistics.max_logit_by_head ? TensorView(values.data(), DType::f32, {kHq}) : rows(values);
  }
  std::int64_t heads_of_sums() const { return config.statistics.column_sums == ColumnSums::kv_heads ? kHkv : kHq; }

  static float& in(std::vector<float>& values, std::int64_t i) { return values[static_cast<std::size_t>(i)]; }
  float& of_row(std::vector<float>& values, std::int64_t b, std::int64_t h, std::int64_t i) const {
    return in(values, config.varlen ? (h * kB + b) * kSq + i : (b * kHq + h) * kSq + i);
  }
  float& of_key(std::vector<float>& values, std::int64_t b, std::int64_t h, std::int64_t j) const {
    return in(values, config.varlen ? (h * kB + b) * kSkv + j : (b * heads_of_sums() + h) * kSkv + j);
  }

  template <class Inputs>
  Inputs with_others(Inputs inputs) {
    if (config.sink) inputs.sink = TensorView(sink.data(), DType::f32, {kHq});
    if (config.varlen) {
      inputs.sequences.b = kB;
      inputs.sequences.cu_seqlens_q = cu_q.data();
      inputs.sequences.cu_seqlens_kv = cu_kv.data();
    }
    return inputs;
  }
  void forward() {
    ForwardOutputs outputs{tensor(o, kHq, kSq), rows(lse)};
    outputs.statistics.max_logit = greatest(max_logit);
    outputs.statistics.entropy = rows(entropy);
    outputs.statistics.column_sums = columns(sums);
    const ForwardInputs inputs{tensor(q, kHq, kSq), tensor(k, kHkv, kSkv), tensor(v, kHkv, kSkv)};
    Attention::create(config, Device::host()).forward(with_others(inputs), outputs);
  }
  std::optional<ErrorLocation> backward(const Gradients& wanted, bool with_dsink = false) {
    BackwardInputs inputs{tensor(q, kHq, kSq),
                          tensor(k, kHkv, kSkv),
                          tensor(v, kHkv, kSkv),
                          tensor(o, kHq, kSq),
                          rows(lse),
                          tensor(dout, kHq, kSq),
                          rows(dlse)};
    const Statistics& given = config.statistics;
    if (given.entropy_gradient) inputs.statistics = {rows(entropy), rows(dentropy)};
    if (given.max_logit_gradient) inputs.statistics.dmax_logit = greatest(dmax_logit);
    if (given.column_sums_gradient) inputs.statistics.dcolumn_sums = columns(dcolumn_sums);
    BackwardOutputs outputs;
    if (wanted.dq) outputs.dq = tensor(dq, kHq, kSq);
    if (wanted.dk) outputs.dk = tensor(dk, kHkv, kSkv);
    if (wanted.dv) outputs.dv = tensor(dv, kHkv, kSkv);
    if (with_dsink) outputs.dsink = TensorView(dsink.data(), DType::f32, {kHq});
    return location_of([&] { Attention::create(config, Device::host()).backward(with_others(inputs), outputs); });
  }

  static constexpr Gradients kAll{}, kOfQ{true, false, false}, kOfK{false, true, false}, kOfV{false, false, true};

  AttentionConfig config;
  std::vector<float> q = random(kB * kHq * kSq * kD, 1), k = random(kB * kHkv * kSkv * kD, 2),
                     v = random(kB * kHkv * kSkv * kD, 3), dout = random(kB * kHq * kSq * kD, 4),
                     dlse = random(kB * kHq * kSq, 5), dentropy = random(kB * kHq * kSq, 6),
                     dmax_logit = random(kB * kHq * kSq, 7), dcolumn_sums = random(kB * kHq * kSkv, 8),
                     sink = random(kHq, 9);
  std::vector<float> o = q, lse = dlse, entropy = dlse, max_logit = dlse, sums = dcolumn_sums, dq = q, dk = k, dv = v,
                     dsink = sink;
  std::vector<std::int32_t> cu_q{0, kSq, kB*kSq}, cu_kv{0, kSkv, kB*kSkv};
};

TEST_F(DebugStatisticsGradients, FiniteCallsPass) {
  forward();
  EXPECT_FALSE(backward(kAll));
  EXPECT_FALSE(backward(kOfK));
}

TEST_F(DebugStatisticsGradients, NamesGradientsOfTheEntropy) {
  forward();
  const Axes at{.b = 1, .h = 2, .q = 3};
  of_row(dentropy, 1, 2, 3) = kNaN;
  expect_at(backward(kAll), "dentropy", at, "dq");
  expect_at(backward(kOfK), "dentropy", at, "dk");
  EXPECT_FALSE(backward(kOfV));  // dv does not read it
  of_row(entropy, 1, 2, 3) = kInfinity;
  const auto found = backward(kAll);
  expect_at(found, "entropy", at, "dq");
  EXPECT_EQ(found->value, kInfinity);
  of_row(dlse, 1, 2, 3) = kNaN;
  expect_at(backward(kAll), "dlse", at, "dq");
}

TEST_F(DebugStatisticsGradients, NamesGradientsOfTheGreatestLogit) {
  forward();
  of_row(dmax_logit, 1, 2, 3) = kNaN;
  expect_at(backward(kAll), "dmax_logit", {.b = 1, .h = 2, .q = 3}, "dq");
  expect_at(backward(kOfK), "dmax_logit", {.b = 1, .h = 2, .q = 3}, "dk");
  EXPECT_FALSE(backward(kOfV));
  config.score = {"score * 0.5 + 1.0"};
  config.statistics.max_logit = MaxLogit::scaled;
  forward();
  expect_at(backward(kOfK), "dmax_logit", {.b = 1, .h = 2, .q = 3}, "dk");
}

/// One row of all batch entries, or sequences, has it.
TEST_F(DebugStatisticsGradients, NamesGradientsOfTheGreatestLogitOfAHead) {
  config.statistics.max_logit_by_head = true;
  for (std::int64_t d = 0; d < kD; ++d) in(q, ((kHq + 2) * kSq + 4) * kD + d) *= 20;
  forward();
  in(dmax_logit, 2) = kNaN;
  const auto found = backward(kAll);
  expect_at(found, "dmax_logit", {.h = 2}, "dq");
  expect_at(backward(kOfK), "dmax_logit", {.h = 2}, "dk");
  of_row(lse, 0, 2, 3) = -200;  // a row without it: P overflows
  const auto other = backward(kAll);
  ASSERT_TRUE(other);
  EXPECT_EQ(other->tensor, "p");
  EXPECT_EQ(std::tuple(other->b, other->h, other->q), std::tuple(0, 2, 3));
}

TEST_F(DebugStatisticsGradients, NamesGradientsOfTheGreatestLogitOfAHeadOfSequences) {
  config.statistics.max_logit_by_head = true;
  config.varlen = true;
  for (std::int64_t d = 0; d < kD; ++d) in(q, ((kSq + 4) * kHq + 2) * kD + d) *= 20;
  forward();
  in(dmax_logit, 2) = kNaN;
  expect_at(backward(kAll), "dmax_logit", {.h = 2}, "dq");
  of_row(lse, 0, 2, 3) = -200;
  EXPECT_EQ(backward(kAll).value_or(ErrorLocation{}).tensor, "p");
}

/// A row's gradient depends on all of its keys' sums, whichever key the broken element is of.
TEST_F(DebugStatisticsGradients, NamesGradientsOfColumnSums) {
  forward();
  of_key(dcolumn_sums, 1, 2, 7) = kNaN;
  expect_at(backward(kAll), "dcolumn_sums", {.b = 1, .h = 2, .kv = 7}, "dq");
  const auto found = backward(kOfK);
  expect_at(found, "dcolumn_sums", {.b = 1, .h = 2, .kv = 7}, "dk");
  EXPECT_FALSE(backward(kOfV));
  of_row(dmax_logit, 1, 2, 4) = kNaN;  // the first row that sees key 7
  expect_at(backward(kAll), "dmax_logit", {.b = 1, .h = 2, .q = 4}, "dq");
}

TEST_F(DebugStatisticsGradients, NamesGradientsOfColumnSumsOfKvHeads) {
  config.statistics.column_sums = ColumnSums::kv_heads;
  forward();
  of_key(dcolumn_sums, 1, 1, 2) = kNaN;
  expect_at(backward(kAll), "dcolumn_sums", {.b = 1, .h = 1, .kv = 2}, "dq");
}

TEST_F(DebugStatisticsGradients, NamesRowsAndKeysOfSequences) {
  config.varlen = true;
  forward();
  EXPECT_FALSE(backward(kAll));
  of_key(dcolumn_sums, 1, 3, 5) = kNaN;
  expect_at(backward(kAll), "dcolumn_sums", {.b = 1, .h = 3, .kv = 5}, "dq");
  of_row(dmax_logit, 1, 3, 2) = kNaN;  // the first row that sees key 5
  expect_at(backward(kAll), "dmax_logit", {.b = 1, .h = 3, .q = 2}, "dq");
  of_row(dentropy, 1, 3, 2) = kNaN;
  expect_at(backward(kAll), "dentropy", {.b = 1, .h = 3, .q = 2}, "dq");
}

TEST_F(DebugStatisticsGradients, WhatMasksHideIsNoFinding) {
  config.mask = {"kv != 4"};
  forward();
  of_key(dcolumn_sums, 1, 2, 4) = kNaN;
  EXPECT_FALSE(backward(kAll));
  of_key(dcolumn_sums, 1, 2, 3) = kInfinity;
  expect_at(backward(kAll), "dcolumn_sums", {.b = 1, .h = 2, .kv = 3}, "dq");
}

TEST_F(DebugStatisticsGradients, RowsOfInfiniteLseAreNoFindings) {
  forward();
  of_row(lse, 1, 2, 3) = -kInfinity;
  of_row(dentropy, 1, 2, 3) = of_row(entropy, 1, 2, 3) = of_row(dmax_logit, 1, 2, 3) = kNaN;
  EXPECT_FALSE(backward(kAll));
}

TEST_F(DebugStatisticsGradients, NamesASinkThatTheEntropyReads) {
  config.sink = true;
  forward();
  EXPECT_FALSE(backward(kAll, true));
  sink[2] = kNaN;
  expect_at(backward(kOfQ), "sink", {.h = 2}, "dq");
  config.statistics.entropy_gradient = false;
  EXPECT_FALSE(backward(kOfQ));
}

TEST_F(DebugStatisticsGradients, NamesWhatReachesTheGradientOfASink) {
  config.sink = true;
  forward();
  of_key(dcolumn_sums, 1, 2, 7) = kNaN;
  expect_at(backward(kOfV, true), "dcolumn_sums", {.b = 1, .h = 2, .kv = 7}, "dsink");
  of_row(dentropy, 0, 2, 5) = kNaN;
  expect_at(backward(kOfV, true), "dentropy", {.b = 0, .h = 2, .q = 5}, "dsink");
  of_row(dmax_logit, 0, 1, 1) = kNaN;  // has no part in it
  expect_at(backward(kOfV, true), "dentropy", {.b = 0, .h = 2, .q = 5}, "dsink");
}

/// dS is made with all gradients, and is of the score in front of the score function.
TEST_F(DebugStatisticsGradients, NamesDsThatGradientsOrSlopesMakeInfinite) {
  config.score = {"score * 4.0"};
  forward();
  of_row(dmax_logit, 1, 2, 3) = 2e38F;
  auto found = backward(kAll);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->tensor, "ds");
  EXPECT_EQ(std::tuple(found->b, found->h, found->q), std::tuple(1, 2, 3));
  EXPECT_EQ(found->value, kInfinity);
  of_row(dmax_logit, 1, 2, 3) = 0;
  for (std::int64_t j = 0; j < kSkv; ++j) of_key(dcolumn_sums, 1, 1, j) = j % 2 == 0 ? 3e38F : -3e38F;
  found = backward(kAll);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->tensor, "ds");
  EXPECT_EQ(std::pair(found->b, found->h), std::pair(std::int64_t{1}, std::int64_t{1}));
}

TEST_F(DebugStatisticsGradients, NamesASlopeThatIsInfinite) {
  config.statistics = {};
  config.score = {"q == 0 && h == 0 && b == 0 ? sqrt(score) : score"};
  std::fill_n(q.begin(), kD, 0.0F);  // its scores are 0, where the root is steep
  ForwardOutputs outputs{tensor(o, kHq, kSq), rows(lse)};
  const ForwardInputs inputs{tensor(q, kHq, kSq), tensor(k, kHkv, kSkv), tensor(v, kHkv, kSkv)};
  Attention::create(config, Device::host()).forward(inputs, outputs);
  expect_at(backward(kAll), "ds", {.b = 0, .h = 0, .q = 0, .kv = 0}, "dq");
}

/// A forward of codes: q and k of i8, v of e4m3.
class DebugInt8 : public testing::Test {
 protected:
  DebugInt8() : inputs(make_inputs(c)), outputs(make_outputs(c)) {
    add_scales(c, inputs);
    config.head_dim = 32;
    config.dtype = DType::i8;
    config.o_dtype = DType::f16;
    config.debug = true;
  }
  std::optional<ErrorLocation> forward() {
    ForwardInputs in{inputs.q.view(), inputs.k.view(), inputs.v.view()};
    in.q_scale = inputs.q_scale.view();
    in.k_scale = inputs.k_scale.view();
    in.v_scale = inputs.v_scale.view();
    in.row_bias = inputs.row_bias.view();
    if (!config.key_scales) in.k_scale.rank = 2;
    if (!config.value_scales) in.v_scale.rank = 2;
    if (of_heads) in.q_scale.rank = in.row_bias.rank = 2;
    return location_of([&] {
      Attention::create(config, Device::host()).forward(in, {outputs.o.view(), outputs.lse.view()});
    });
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
  bool of_heads = false;  // q_scale and row_bias are [b, h_q]
};

TEST_F(DebugInt8, NamesBiasesOfRows) {
  EXPECT_FALSE(forward());
  inputs.row_bias.set(1, 2, 3, 0, kNaN);
  expect_at(forward(), "row_bias", {.b = 1, .h = 2, .q = 3}, "o");
  inputs.row_bias.set(1, 2, 3, 0, kInfinity);
  expect_at(forward(), "row_bias", {.b = 1, .h = 2, .q = 3}, "o");
  inputs.row_bias.set(1, 2, 3, 0, -kInfinity);  // hides all keys
  EXPECT_FALSE(forward());
  inputs.row_bias.set(0, 3, 4, 0, kNaN);
  config.score = {"3.0 * tanh(score / 3.0)"};
  expect_at(forward(), "row_bias", {.b = 0, .h = 3, .q = 4}, "o");
}

TEST_F(DebugInt8, NamesBiasesOfSequences) {
  constexpr std::int64_t kTotal = 10, kHeads = 2, kDim = 32;
  std::vector<std::int8_t> codes(kTotal * kHeads * kDim, 3);
  std::vector<std::uint16_t> o(codes.size());
  std::vector<float> numbers(kTotal * kHeads, 0.1F), scales(2 * kHeads, 0.1F), lse = numbers, bias = numbers;
  const std::vector<std::int32_t> cu{0, 4, kTotal};
  config.varlen = true;
  const auto view = [&](DType dtype) { return TensorView(codes.data(), dtype, {kTotal, kHeads, kDim}); };
  const auto rows = [&](std::vector<float>& of) { return TensorView(of.data(), DType::f32, {kHeads, kTotal}); };
  ForwardInputs in{view(DType::i8), view(DType::i8), view(DType::e4m3)};
  in.sequences = {2, cu.data(), cu.data()};
  in.q_scale = rows(numbers);
  in.k_scale = in.v_scale = TensorView(scales.data(), DType::f32, {2, kHeads});
  in.row_bias = rows(bias);
  const ForwardOutputs out{TensorView(o.data(), DType::f16, {kTotal, kHeads, kDim}), rows(lse)};
  const auto run = [&] { return location_of([&] { Attention::create(config, Device::host()).forward(in, out); }); };
  EXPECT_FALSE(run());
  scales[3] = kNaN;
  expect_at(run(), "k_scale", {.b = 1, .h = 1}, "o");
  scales[3] = 0.1F;
  bias[kTotal + 4 + 3] = kNaN;
  expect_at(run(), "row_bias", {.b = 1, .h = 1, .q = 3}, "o");
  numbers[kTotal + 4 + 3] = kNaN;
  expect_at(run(), "q_scale", {.b = 1, .h = 1, .q = 3}, "o");
}

TEST_F(DebugInt8, NamesScalesOfRowsAndHeads) {
  inputs.v_scale.set(1, 1, 0, 0, kNaN);
  expect_at(forward(), "v_scale", {.b = 1, .h = 1}, "o");
  inputs.k_scale.set(1, 1, 0, 0, kInfinity);
  expect_at(forward(), "k_scale", {.b = 1, .h = 1}, "o");
  inputs.q_scale.set(1, 2, 0, 0, kNaN);
  expect_at(forward(), "q_scale", {.b = 1, .h = 2, .q = 0}, "o");
}

TEST_F(DebugInt8, NamesScalesAndBiasesOfHeads) {
  inputs.q_scale = HostTensor(DType::f32, 2, 4, 1);
  inputs.row_bias = HostTensor(DType::f32, 2, 4, 1);
  for (std::int64_t i = 0; i < 8; ++i) inputs.q_scale.set(i / 4, i % 4, 0, 0, 0.01);
  of_heads = true;
  EXPECT_FALSE(forward());
  inputs.row_bias.set(1, 2, 0, 0, kNaN);
  expect_at(forward(), "row_bias", {.b = 1, .h = 2}, "o");
  inputs.q_scale.set(1, 2, 0, 0, kNaN);
  expect_at(forward(), "q_scale", {.b = 1, .h = 2}, "o");
}

TEST_F(DebugInt8, NamesScalesOfKeysAndCodesOfValues) {
  add_key_scales(c, inputs);
  add_value_scales(c, inputs);
  config.key_scales = config.value_scales = true;
  inputs.v.bytes()[0] = std::byte{0x7f};  // NaN
  expect_at(forward(), "v", {.b = 0, .h = 0, .kv = 0, .d = 0}, "o");
  inputs.v_scale.set(0, 0, 7, 0, kNaN);
  expect_at(forward(), "v", {.b = 0, .h = 0, .kv = 0, .d = 0}, "o");
  inputs.v.bytes()[0] = std::byte{0x38};
  expect_at(forward(), "v_scale", {.b = 0, .h = 0, .kv = 7}, "o");
  inputs.k_scale.set(0, 0, 8, 0, kNaN);
  expect_at(forward(), "k_scale", {.b = 0, .h = 0, .kv = 8}, "o");
}

/// Codes of 4 bits are no NaN: d counts the scales and offsets of a row.
TEST(DebugU4, NamesScalesAndOffsets) {
  constexpr std::int64_t kKeys = 5, kDim = 64, kPairs = 2 * kDim / 32;
  HostTensor q(DType::bf16, 2, 2, 3, kDim, Layout::bhsd), o = q;
  HostTensor k(DType::u4x2, 2, 1, kKeys, kDim / 2, Layout::bhsd), v = k;
  HostTensor k_scale(DType::bf16, 2, 1, kKeys, kPairs, Layout::bhsd), v_scale = k_scale;
  AttentionConfig config;
  config.head_dim = kDim;
  config.dtype = DType::bf16;
  config.k_dtype = config.v_dtype = DType::u4x2;
  config.group_size = 32;
  config.debug = true;
  const auto forward = [&] {
    ForwardInputs inputs{q.view(), k.view(), v.view()};
    inputs.k_scale = k_scale.view();
    inputs.v_scale = v_scale.view();
    return location_of([&] { Attention::create(config, Device::host()).forward(inputs, {o.view()}); });
  };
  EXPECT_FALSE(forward());
  v_scale.set(1, 0, 3, 1, kNaN);
  expect_at(forward(), "v_scale", {.b = 1, .h = 0, .kv = 3, .d = 1}, "o");
  k_scale.set(1, 0, 4, 2, kInfinity);
  expect_at(forward(), "k_scale", {.b = 1, .h = 0, .kv = 4, .d = 2}, "o");
}

}  // namespace
}  // namespace fa::test
