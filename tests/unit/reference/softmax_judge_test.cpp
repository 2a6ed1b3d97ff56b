// The judge of far scores against the reference, a host that computes in float, and outputs that are wrong.

#include "support/softmax_judge.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include <fa/attention.hpp>

namespace fa::test {
namespace {

AttentionCase small(DType dtype, bool causal) {
  return {.b = 2, .h_q = 4, .h_kv = 2, .s_q = 30, .s_kv = 70, .d_qk = 64, .d_v = 32, .dtype = dtype, .causal = causal};
}

AttentionInputs whole_inputs(const AttentionCase& c) {
  AttentionInputs inputs = make_inputs(c);
  make_whole(inputs.q, 2);
  make_whole(inputs.k, 2);
  return inputs;
}

class Judge : public testing::TestWithParam<std::tuple<DType, bool>> {
 protected:
  AttentionCase problem() const { return small(std::get<0>(GetParam()), std::get<1>(GetParam())); }

  /// What a host that computes in float makes of it.
  AttentionOutputs run(const AttentionCase& a, AttentionInputs& inputs, double scale, bool window) const {
    AttentionConfig config;
    config.head_dim = static_cast<int>(a.d_qk);
    config.head_dim_v = static_cast<int>(a.d_v);
    config.dtype = a.dtype;
    config.causal = a.causal;
    config.scale = static_cast<float>(scale);
    if (window) config.window_left = 9;
    if (window) config.dropout = 0.25f;
    config.sink = window;
    AttentionOutputs outputs = make_outputs(a);
    ForwardInputs in{inputs.q.view(), inputs.k.view(), inputs.v.view()};
    std::vector<float> sinks(static_cast<std::size_t>(a.h_q), 0.5f);
    if (window) in.sink = TensorView(sinks.data(), DType::f32, {a.h_q});
    if (window) in.dropout = JudgedCase{}.state;
    Attention::create(config, Device::host()).forward(in, {outputs.o.view(), outputs.lse.view()});
    return outputs;
  }

  JudgedCase judged(const AttentionCase& a, bool window) const {
    JudgedCase c{.attention = a};
    if (!window) return c;
    c.window_left = 9;
    c.dropout = 0.25f;
    c.sink.assign(static_cast<std::size_t>(a.h_q), 0.5);
    return c;
  }
};

TEST_P(Judge, PassesTheReferenceAndFloat) {
  AttentionCase a = problem();
  AttentionInputs inputs = whole_inputs(a);
  for (const bool window : {false, true}) {
    const SoftmaxJudge judge(judged(a, window), inputs);
    for (const int exponent : {0, 3, 9, 13, 17, 20, 24, 31, 64, 110, 117}) {
      const double scale = std::ldexp(exponent % 2 == 0 ? 1 : -1, exponent);
      SCOPED_TRACE(scale);
      const Verdict in_float = judge.judge(scale, run(a, inputs, scale, window));
      EXPECT_LE(in_float.o, 1) << in_float.where_o;
      EXPECT_LE(in_float.lse, 1) << in_float.where_lse;
      if (window) continue;
      a.scale = static_cast<float>(scale);
      const Verdict in_double = judge.judge(scale, reference_f64(a, inputs));
      EXPECT_LE(in_double.o, 1e-6) << in_double.where_o;  // of bounds that are above 1e-6 themselves
      EXPECT_LE(in_double.lse, 1e-6) << in_double.where_lse;
    }
  }
}

TEST_P(Judge, FindsWhatIsWrong) {
  AttentionCase a = problem();
  AttentionInputs inputs = whole_inputs(a);
  const SoftmaxJudge judge(judged(a, false), inputs);
  const double scale = 0x1p40;
  a.scale = static_cast<float>(scale);
  const AttentionOutputs right = reference_f64(a, inputs);
  AttentionOutputs wrong = right;
  wrong.o.set(1, 2, 3, 4, right.o.at(1, 2, 3, 4) + 0.1);
  EXPECT_GT(judge.judge(scale, wrong).o, 1);
  wrong.o.set(1, 2, 3, 4, std::nan(""));
  EXPECT_GT(judge.judge(scale, wrong).o, 1);
  EXPECT_LE(judge.judge(scale, wrong).lse, 1);
  wrong.lse.set(1, 2, 3, 0, right.lse.at(1, 2, 3) * (1 + 0x1p-20));
  EXPECT_GT(judge.judge(scale, wrong).lse, 1);
  wrong.lse.set(1, 2, 3, 0, -INFINITY);
  EXPECT_GT(judge.judge(scale, wrong).lse, 1);
}

/// A bias that hides all keys of a row, or all but the first ones.
TEST_P(Judge, KnowsWhatRoundedScoresMayGive) {
  const AttentionCase a = problem();
  AttentionInputs inputs = whole_inputs(a);
  for (const double bias : {-1e4, -1e9, -1e30, -3e38, -static_cast<double>(INFINITY)}) {
    SCOPED_TRACE(bias);
    JudgedCase c = judged(a, false);
    c.rounded_scores = true;
    c.score = [&](const ScorePlace& at, double score) { return at.q % 2 == 1 || at.kv > 9 ? score + bias : score; };
    const SoftmaxJudge judge(c, inputs);
    AttentionConfig config;
    config.head_dim = static_cast<int>(a.d_qk);
    config.head_dim_v = static_cast<int>(a.d_v);
    config.dtype = a.dtype;
    config.causal = a.causal;
    config.scale = 0.125f;
    config.score = ScoreFunction{"q % 2 == 1 || kv > 9 ? score + bias : score", {{"bias"}}};
    AttentionOutputs outputs = make_outputs(a);
    Attention::create(config, Device::host())
        .forward({inputs.q.view(), inputs.k.view(), inputs.v.view(), {{"bias", bias}}},
                 {outputs.o.view(), outputs.lse.view()});
    const Verdict verdict = judge.judge(0.125, outputs);
    EXPECT_LE(verdict.o, 1) << verdict.where_o;
    EXPECT_LE(verdict.lse, 1) << verdict.where_lse;
    outputs.o.set(0, 0, 1, 0, 20);  // outside of any hull
    EXPECT_GT(judge.judge(0.125, outputs).o, 1);
    outputs.lse.set(0, 0, 0, 0, outputs.lse.at(0, 0, 0) + 0.01);  // a row that keeps keys
    EXPECT_GT(judge.judge(0.125, outputs).lse, 1);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Judge,
                         testing::Combine(testing::Values(DType::f16, DType::bf16, DType::f32), testing::Bool()));

}  // namespace
}  // namespace fa::test
