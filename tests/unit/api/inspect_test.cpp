// Debug calls on the host device: which NaN or infinity they name, what they leave alone, and P of one head.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

#include <fa/attention.hpp>

#include "expect_error.hpp"
#include "expect_location.hpp"
#include "support/attention_case.hpp"

namespace fa {
namespace {

using test::AttentionCase;
using test::AttentionInputs;
using test::expect_at;
using test::expect_error;
using test::expect_invalid;
using test::HostTensor;
using test::location_of;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

AttentionCase small_case() {
  AttentionCase c;
  c.b = 2;
  c.h_q = 4;
  c.h_kv = 2;
  c.s_q = 20;
  c.s_kv = 24;
  c.d_qk = 8;
  c.d_v = 16;
  c.dtype = DType::f32;
  c.causal = true;
  return c;
}

/// A forward and its backward, whose tensors tests break.
class DebugCall : public testing::Test {
 protected:
  DebugCall() : DebugCall(small_case()) {}
  explicit DebugCall(const AttentionCase& of)
      : c(of),
        in(test::make_inputs(of)),
        out(test::make_outputs(of)),
        grad(test::make_gradients(of)),
        dout(test::make_dout(of)) {
    config.head_dim = static_cast<int>(of.d_qk);
    config.head_dim_v = static_cast<int>(of.d_v);
    config.dtype = of.dtype;
    config.causal = of.causal;
    config.debug = true;
  }

  ForwardInputs inputs() {
    ForwardInputs given{in.q.view(), in.k.view(), in.v.view()};
    given.captures = captures;
    if (config.sink) given.sink = TensorView(sink.data(), DType::f32, {c.h_q});
    return given;
  }
  void forward() {
    ForwardOutputs outputs{out.o.view(), out.lse.view()};
    outputs.dump = dump;
    Attention::create(config, Device::host()).forward(inputs(), outputs);
  }
  void backward() {
    BackwardInputs given{in.q.view(), in.k.view(), in.v.view(), out.o.view(), out.lse.view(), dout.view()};
    given.captures = captures;
    if (config.sink) given.sink = TensorView(sink.data(), DType::f32, {c.h_q});
    BackwardOutputs outputs{grad.dq.view(), grad.dk.view(), grad.dv.view()};
    if (config.sink) outputs.dsink = TensorView(dsink.data(), DType::f32, {c.h_q});
    if (!wanted.dq) outputs.dq = {};
    if (!wanted.dk) outputs.dk = {};
    if (!wanted.dv) outputs.dv = {};
    Attention::create(config, Device::host()).backward(given, outputs);
  }
  std::optional<ErrorLocation> of_forward() {
    return location_of([this] { forward(); });
  }
  std::optional<ErrorLocation> of_backward() {
    return location_of([this] { backward(); });
  }

  AttentionCase c;
  AttentionConfig config;
  AttentionInputs in;
  test::AttentionOutputs out;
  test::AttentionGradients grad;
  HostTensor dout;
  std::vector<float> sink = std::vector<float>(4, 0.5f), dsink = std::vector<float>(4);
  Captures captures;
  Gradients wanted;
  ProbabilityDump dump;
};

TEST_F(DebugCall, FiniteCallsPass) {
  EXPECT_FALSE(of_forward());
  EXPECT_FALSE(of_backward());
}

TEST_F(DebugCall, WithoutDebugNothingIsLookedAt) {
  config.debug = false;
  in.q.set(1, 2, 3, 4, kNaN);
  EXPECT_FALSE(of_forward());
}

TEST_F(DebugCall, NamesInputs) {
  in.v.set(1, 1, 9, 5, kInfinity);
  expect_at(of_forward(), "v", {.b = 1, .h = 1, .kv = 9, .d = 5}, "o");
  in.k.set(1, 1, 9, 7, -kInfinity);
  in.k.set(1, 1, 9, 6, kNaN);
  expect_at(of_forward(), "k", {.b = 1, .h = 1, .kv = 9, .d = 6}, "o");
  in.q.set(1, 3, 12, 2, kNaN);
  // The first broken row, of head 2, does not read that.
  expect_at(of_forward(), "k", {.b = 1, .h = 1, .kv = 9, .d = 6}, "o");
  in.q.set(0, 3, 12, 2, kNaN);
  const auto found = of_forward();
  expect_at(found, "q", {.b = 0, .h = 3, .q = 12, .d = 2}, "o");
  EXPECT_TRUE(std::isnan(found->value));
}

TEST_F(DebugCall, MessagesHaveAllFacts) {
  in.k.set(1, 1, 9, 6, kNaN);
  try {
    forward();
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "k[b=1, h=1, kv=9, d=6] is NaN, and reaches o");
    EXPECT_EQ(error.field("kv"), "9");
    EXPECT_EQ(error.field("q"), "");
    EXPECT_EQ(error.field("value"), "NaN");
  }
}

// Causality hides the last keys from all but the last rows.
TEST_F(DebugCall, HiddenKeysAreNoFindings) {
  config.window_left = 3;
  in.k.set(0, 0, 0, 0, kNaN);  // before the first row's window
  in.v.set(0, 0, 0, 0, kNaN);
  EXPECT_FALSE(of_forward());
  EXPECT_FALSE(of_backward());
  in.k.set(0, 0, 5, 3, kNaN);
  expect_at(of_forward(), "k", {.b = 0, .h = 0, .kv = 5, .d = 3}, "o");
}

TEST_F(DebugCall, ScoresOfMinusInfinityAreNoFindings) {
  std::vector<float> bias(static_cast<std::size_t>(c.s_kv), 0.f);
  bias[2] = bias[7] = -std::numeric_limits<float>::infinity();
  config.score = {"score + bias[kv]", {{"bias", DType::f32}}};
  captures = {{"bias", TensorView(bias.data(), DType::f32, {c.s_kv})}};
  EXPECT_FALSE(of_forward());
  EXPECT_FALSE(of_backward());
  bias[9] = std::numeric_limits<float>::infinity();
  const auto found = of_forward();
  expect_at(found, "bias", {.b = 0, .h = 0, .q = 5, .kv = 9}, "o");
  EXPECT_EQ(found->index, std::vector<std::int64_t>{9});
  EXPECT_EQ(found->value, kInfinity);
}

TEST_F(DebugCall, NamesTheScoreThatAFunctionMakes) {
  config.score = {"kv == 11 && b == 1 ? score / 0.0 : score"};
  const auto found = of_forward();
  ASSERT_TRUE(found);
  EXPECT_EQ(found->tensor, "score");
  EXPECT_EQ(found->b, 1);
  EXPECT_EQ(found->kv, 11);
  EXPECT_EQ(found->h, 0);
  // Masked by the function, it is none.
  config.mask = {"kv != 11"};
  EXPECT_FALSE(of_forward());
}

TEST_F(DebugCall, Sinks) {
  config.sink = true;
  EXPECT_FALSE(of_forward());
  EXPECT_FALSE(of_backward());
  sink[2] = -std::numeric_limits<float>::infinity();
  EXPECT_FALSE(of_forward());
  sink[2] = std::numeric_limits<float>::infinity();
  const auto found = of_forward();
  ASSERT_TRUE(found);
  EXPECT_EQ(found->tensor, "sink");
  EXPECT_EQ(found->h, 2);
}

TEST_F(DebugCall, RowsWithoutKeysAreNoFindings) {
  c.s_q = 30;  // six rows before the first key
  in = test::make_inputs(c);
  out = test::make_outputs(c);
  EXPECT_FALSE(of_forward());
  EXPECT_EQ(out.lse.at(0, 0, 0), -kInfinity);
}

TEST_F(DebugCall, NamesWhatABackwardReads) {
  forward();
  dout.set(1, 3, 4, 5, kNaN);
  expect_at(of_backward(), "dout", {.b = 1, .h = 3, .q = 4, .d = 5}, "dq");
  out.lse.set(1, 3, 4, 0, kNaN);
  expect_at(of_backward(), "lse", {.b = 1, .h = 3, .q = 4}, "dq");
  out.o.set(1, 3, 4, 5, kInfinity);
  expect_at(of_backward(), "o", {.b = 1, .h = 3, .q = 4, .d = 5}, "dq");
  in.v.set(1, 1, 2, 1, kNaN);
  expect_at(of_backward(), "v", {.b = 1, .h = 1, .kv = 2, .d = 1}, "dq");
}

TEST_F(DebugCall, NamesWhatReachesGradientsOfKeys) {
  forward();
  dout.set(0, 2, 17, 5, kNaN);
  wanted.dq = false;
  expect_at(of_backward(), "dout", {.b = 0, .h = 2, .q = 17, .d = 5}, "dk");
  wanted.dk = false;
  in.v.set(0, 1, 1, 3, kNaN);  // dv does not read it
  expect_at(of_backward(), "dout", {.b = 0, .h = 2, .q = 17, .d = 5}, "dv");
}

TEST_F(DebugCall, NamesPThatOverflows) {
  forward();
  out.lse.set(0, 1, 6, 0, -200);
  const auto found = of_backward();
  ASSERT_TRUE(found);
  EXPECT_EQ(found->tensor, "p");
  EXPECT_EQ(found->q, 6);
  EXPECT_EQ(found->h, 1);
}

TEST_F(DebugCall, ProductsThatDropoutDropsAreNoFindings) {
  config.dropout = 0.5f;
  forward();
  std::vector<std::uint8_t> keep(static_cast<std::size_t>(c.b * c.h_q * c.s_q * c.s_kv));
  dropout_mask({}, 0.5f, c.b, c.h_q, c.s_q, c.s_kv, keep.data());
  const auto kept = [&](std::int64_t i, std::int64_t j) { return keep[static_cast<std::size_t>(i * c.s_kv + j)] != 0; };
  std::int64_t i = 0;
  while (i < c.s_q && (kept(i, 0) || !kept(i, 1))) ++i;  // of the first head
  ASSERT_LT(i, c.s_q);
  dout.set(0, 0, i, 0, 1e30);
  in.v.set(0, 0, 0, 0, 1e30);
  wanted = {true, false, false};
  EXPECT_FALSE(of_backward());
  in.v.set(0, 0, 1, 0, 1e30);
  expect_at(of_backward(), "dp", {.b = 0, .h = 0, .q = i, .kv = 1}, "dq");
}

TEST_F(DebugCall, NamesTheGradientOfASink) {
  config.sink = true;
  forward();
  sink[3] = 1000;  // not that of forward: its weight overflows
  expect_at(of_backward(), "dsink", {.h = 3}, "dsink");
}

// Nothing is broken but the sum that is rounded to f16.
TEST_F(DebugCall, NamesAResultThatOverflowsByItself) {
  c.dtype = config.dtype = DType::f16;
  in = test::make_inputs(c);
  out = test::make_outputs(c);
  grad = test::make_gradients(c);
  HostTensor wide(c.dtype, c.b, c.h_q, c.s_q, c.d_v, c.layout);
  dout = wide;
  forward();
  for (std::int64_t s = 0; s < c.s_q; ++s) dout.set(1, 2, s, 3, 50000);
  wanted = {false, false, true};
  const auto found = of_backward();
  ASSERT_TRUE(found);
  EXPECT_EQ(found->tensor, "dv");
  EXPECT_EQ(found->result, "dv");
  EXPECT_EQ(found->h, 1);
  EXPECT_EQ(found->d, 3);
}

TEST_F(DebugCall, DumpsP) {
  HostTensor p(DType::f32, 1, 1, c.s_q, c.s_kv, test::Layout::bhsd);
  p.fill_with_nan();
  const auto view = [&] { return TensorView(p.view().data, DType::f32, {c.s_q, c.s_kv}); };
  dump = {view(), 1, 2};
  config.score = {"score * 0.5 + float(kv % 3)"};
  config.mask = {"(q + kv) % 5 != 1"};
  forward();
  for (std::int64_t i = 0; i < c.s_q; ++i) {
    double sum = 0;
    std::vector<double> o(static_cast<std::size_t>(c.d_v), 0.0);
    for (std::int64_t j = 0; j < c.s_kv; ++j) {
      const double value = p.at(0, 0, i, j);
      sum += value;
      const bool hidden = j > i + 4 || (i + j) % 5 == 1;
      EXPECT_TRUE(!hidden || value == 0) << i << ", " << j;
      for (std::int64_t d = 0; d < c.d_v; ++d) o[static_cast<std::size_t>(d)] += value * in.v.at(1, 1, j, d);
    }
    EXPECT_NEAR(sum, 1, 1e-5);
    for (std::int64_t d = 0; d < c.d_v; ++d) EXPECT_NEAR(o[static_cast<std::size_t>(d)], out.o.at(1, 2, i, d), 1e-5);
  }
}

TEST_F(DebugCall, DumpsPBehindDropout) {
  config.dropout = 0.25f;
  HostTensor p(DType::f32, 1, 1, c.s_q, c.s_kv, test::Layout::bhsd);
  dump = {TensorView(p.view().data, DType::f32, {c.s_q, c.s_kv}), 0, 3};
  forward();
  std::vector<std::uint8_t> keep(static_cast<std::size_t>(c.b * c.h_q * c.s_q * c.s_kv));
  dropout_mask({}, 0.25f, c.b, c.h_q, c.s_q, c.s_kv, keep.data());
  for (std::int64_t i = 0; i < c.s_q; ++i) {
    for (std::int64_t j = 0; j <= i + 4 && j < c.s_kv; ++j) {
      EXPECT_EQ(p.at(0, 0, i, j) != 0, keep[static_cast<std::size_t>((3 * c.s_q + i) * c.s_kv + j)] != 0);
    }
    for (std::int64_t d = 0; d < c.d_v; ++d) {
      double o = 0;
      for (std::int64_t j = 0; j < c.s_kv; ++j) o += p.at(0, 0, i, j) * in.v.at(0, 1, j, d);
      EXPECT_NEAR(o, out.o.at(0, 3, i, d), 1e-5);
    }
  }
}

TEST_F(DebugCall, RefusesWrongDumps) {
  std::vector<float> p(static_cast<std::size_t>(c.s_q * c.s_kv));
  const TensorView whole(p.data(), DType::f32, {c.s_q, c.s_kv});
  dump = {whole, 2, 0};
  expect_invalid("dump.b", [this] { forward(); });
  dump = {whole, 0, -1};
  expect_invalid("dump.h", [this] { forward(); });
  dump = {TensorView(p.data(), DType::f32, {c.s_q - 1, c.s_kv}), 0, 0};
  expect_invalid("dump.p", [this] { forward(); });
  dump = {TensorView(p.data(), DType::i32, {c.s_q, c.s_kv}), 0, 0};
  expect_invalid("dump.p", [this] { forward(); });
  dump = {TensorView(in.q.view().data, DType::f32, {c.s_q, c.s_kv}), 0, 0};
  expect_invalid("dump.p", [this] { forward(); });
  dump = {whole, 0, 0};
  config.debug = false;
  expect_invalid("dump.p", [this] { forward(); });
  config.debug = true;
  expect_invalid("lse", [this] {
    ForwardOutputs outputs{out.o.view()};
    outputs.dump = dump;
    Attention::create(config, Device::host()).forward(inputs(), outputs);
  });
}

TEST(DebugPacked, NamesTheSequenceAndItsOwnRows) {
  constexpr std::int64_t kTotal = 20, kHeads = 2, kDim = 8;
  std::vector<float> q(kTotal * kHeads * kDim, 0.1f), k = q, v = q, o(q.size()), lse(kTotal * kHeads);
  std::vector<float> p(std::size_t{12} * 10, -1.f);
  const std::vector<std::int32_t> cu{1, 6, 6, 15};
  AttentionConfig config;
  config.head_dim = kDim;
  config.dtype = DType::f32;
  config.varlen = config.debug = config.causal = true;
  const auto run = [&] {
    const auto view = [](std::vector<float>& of) { return TensorView(of.data(), DType::f32, {kTotal, kHeads, kDim}); };
    ForwardInputs inputs{view(q), view(k), view(v)};
    inputs.sequences = {3, cu.data(), cu.data()};
    ForwardOutputs outputs{view(o), TensorView(lse.data(), DType::f32, {kHeads, kTotal})};
    outputs.dump = {TensorView(p.data(), DType::f32, {12, 10}), 2, 1};
    Attention::create(config, Device::host()).forward(inputs, outputs);
  };
  q[0] = k[0] = v[17 * kHeads * kDim] = std::numeric_limits<float>::quiet_NaN();  // of no sequence
  o[0] = std::numeric_limits<float>::quiet_NaN();
  run();
  EXPECT_NEAR(p[10], 0.5, 1e-6);  // row 1 sees two equal keys
  EXPECT_EQ(p[12], 0);
  EXPECT_EQ(p[9], 0);
  EXPECT_EQ(p[11 * 10], 0);  // no such row
  v[(6 + 4) * kHeads * kDim + kDim + 3] = std::numeric_limits<float>::quiet_NaN();
  expect_at(location_of(run), "v", {.b = 2, .h = 1, .kv = 4, .d = 3}, "o");
}

TEST(DebugPages, NamesThePositionAndTheScale) {
  constexpr std::int64_t kPages = 6, kPage = 4, kDim = 16;
  std::vector<std::int8_t> k(kPages * kPage * kDim, 3), v = k;
  std::vector<float> scales(kPages * kPage, 0.1f);
  std::vector<std::uint16_t> q(2 * kDim, 0x3c00), o(q.size());
  const std::vector<std::int32_t> used{9, 6};
  std::vector<std::int32_t> table{5, 0, 3, 1, 4, 2};
  AttentionConfig config;
  config.head_dim = kDim;
  config.dtype = DType::f16;
  config.page_size = kPage;
  config.k_dtype = config.v_dtype = DType::i8;
  config.debug = true;
  const auto run = [&] {
    ForwardInputs inputs{TensorView(q.data(), DType::f16, {2, 1, 1, kDim}),
                         TensorView(k.data(), DType::i8, {kPages, 1, kPage, kDim}),
                         TensorView(v.data(), DType::i8, {kPages, 1, kPage, kDim})};
    inputs.k_scale = inputs.v_scale = TensorView(scales.data(), DType::f32, {kPages, 1, kPage});
    inputs.sequences.seqused_kv = used.data();
    inputs.cache.block_table = TensorView(table.data(), DType::i32, {2, 3});
    Attention::create(config, Device::host()).forward(inputs, {TensorView(o.data(), DType::f16, {2, 1, 1, kDim})});
  };
  run();
  scales[4 * kPage + 3] = std::numeric_limits<float>::quiet_NaN();  // position 7 of request 1, which has six
  run();
  scales[4 * kPage + 1] = std::numeric_limits<float>::quiet_NaN();
  expect_at(location_of(run), "k_scale", {.b = 1, .h = 0, .kv = 5}, "o");
}

TEST(DebugStatistics, AreResults) {
  const AttentionCase c = small_case();
  AttentionInputs in = test::make_inputs(c);
  test::AttentionOutputs out = test::make_outputs(c);
  std::vector<float> sums(static_cast<std::size_t>(c.b * c.h_q * c.s_kv));
  AttentionConfig config;
  config.head_dim = static_cast<int>(c.d_qk);
  config.head_dim_v = static_cast<int>(c.d_v);
  config.dtype = c.dtype;
  config.debug = true;
  config.statistics.column_sums = ColumnSums::query_heads;
  ForwardOutputs outputs{out.o.view(), out.lse.view()};
  outputs.statistics.column_sums = TensorView(sums.data(), DType::f32, {c.b, c.h_q, c.s_kv});
  const auto run = [&] {
    Attention::create(config, Device::host()).forward({in.q.view(), in.k.view(), in.v.view()}, outputs);
  };
  run();
  in.q.set(1, 0, 0, 0, kNaN);
  expect_at(location_of(run), "q", {.b = 1, .h = 0, .q = 0, .d = 0}, "o");
}

}  // namespace
}  // namespace fa
