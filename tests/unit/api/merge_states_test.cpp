// Merges of partial results, and forwards that add to one, on the host device, through the public API.

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "expect_error.hpp"
#include "support/merge_case.hpp"

namespace fa {
namespace {

using test::expect_invalid;
using test::MergeCase;
using test::MergeData;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Attention host(const AttentionConfig& config) {
  return Attention::create(config, Device::host());
}

std::vector<std::vector<std::byte>> bytes_of(const MergeData& data) {
  std::vector<std::vector<std::byte>> bytes;
  for (const MergeData::Buffer& buffer : data.buffers()) bytes.push_back(buffer.bytes);
  return bytes;
}

void run(const MergeCase& c) {
  MergeData data(c);
  const MergeData before = data;
  const MergeData::Call call = data.call();
  host(c.config()).merge(call.inputs, call.outputs);
  EXPECT_EQ(before.judge(bytes_of(data)), "") << to_string(c);
}

TEST(Merge, RandomCallsAreWhatAFormulaSays) {
  for (std::uint32_t seed = 0; seed < 120; ++seed) run(test::random_merge_case(seed));
}

TEST(Merge, SumsHaveNoWeights) {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    MergeCase c = test::random_merge_case(seed);
    c.sum = true;
    draw_rows(c, seed);
    run(c);
  }
}

// What has no meaning in a sum is refused.
TEST(Merge, SumsHaveNoLogarithms) {
  std::array<float, 8> o{}, other{};
  float lse = 0;
  const TensorView row(o.data(), DType::f32, {1, 1, 1, 8}), result(other.data(), DType::f32, {1, 1, 1, 8});
  const TensorView number(&lse, DType::f32, {1, 1, 1});
  AttentionConfig config;
  config.head_dim = 8;
  config.dtype = DType::f32;
  const Attention attention = host(config);
  const std::array with{AttentionState{row, number}}, without{AttentionState{row, {}}};
  expect_invalid("states[0].lse", [&] { attention.merge({.states = with, .sum = true}, {result}); });
  expect_invalid("lse", [&] { attention.merge({.states = without, .sum = true}, {result, number}); });
  expect_invalid("sink", [&] {
    attention.merge({.states = without, .sink = {&lse, DType::f32, {1}}, .sum = true}, {result});
  });
  expect_invalid("stride_lse", [&] {
    attention.merge({.states = without, .stacked = 1, .stride_o = 8, .stride_lse = 1, .sum = true}, {result});
  });
  expect_invalid("states[0].lse", [&] { attention.merge({.states = without}, {result}); });
}

TEST(Merge, F64) {
  MergeCase c;
  c.dtype = DType::f64;
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    draw_rows(c, seed);
    c.spread = std::min(c.spread, 30.0);
    c.level = 0;
    run(c);
  }
}

// The judge sees a wrong element, and one that must not have changed.
TEST(Merge, TheFormulaSeesMistakes) {
  MergeCase c;
  c.states = 3;
  c.in_place = 1;
  MergeData data(c);
  const MergeData before = data;
  const MergeData::Call call = data.call();
  host(c.config()).merge(call.inputs, call.outputs);
  std::vector<std::vector<std::byte>> right = bytes_of(data);
  ASSERT_EQ(before.judge(right), "");
  int wrong = 0, changed = 0;
  for (std::vector<std::byte>& buffer : right) {
    for (std::size_t at = 1; at < buffer.size(); at += 102, ++changed) {
      buffer[at] ^= std::byte{0x41};  // sign and exponent
      wrong += before.judge(right).empty() ? 0 : 1;
      buffer[at] ^= std::byte{0x41};
    }
  }
  EXPECT_EQ(wrong, changed);
}

// A state that is alone keeps its bits; so does one whose others have no keys.
TEST(Merge, NothingIsAddedByStatesWithoutKeys) {
  std::array<float, 8> o{}, other{}, merged{};
  for (std::size_t i = 0; i < 8; ++i) {
    o[i] = 0.1F * static_cast<float>(i + 1);
    other[i] = std::nanf("");
  }
  AttentionConfig config;
  config.head_dim = 8;
  config.dtype = DType::f32;
  for (const float none : {-HUGE_VALF, HUGE_VALF}) {
    float lse = 3.3F, merged_lse = 0;
    const std::array states{
        AttentionState{{o.data(), DType::f32, {1, 1, 1, 8}}, {&lse, DType::f32, {1, 1, 1}}},
        AttentionState{{other.data(), DType::f32, {1, 1, 1, 8}}, {const_cast<float*>(&none), DType::f32, {1, 1, 1}}}};
    const ForwardOutputs outputs{{merged.data(), DType::f32, {1, 1, 1, 8}}, {&merged_lse, DType::f32, {1, 1, 1}}};
    host(config).merge({.states = states}, outputs);
    EXPECT_EQ(merged, o);
    EXPECT_EQ(merged_lse, lse);
    // Of such states alone: nothing, and the sink if there is one.
    host(config).merge({.states = std::span(states).last(1)}, outputs);
    EXPECT_EQ(merged, (std::array<float, 8>{}));
    EXPECT_EQ(merged_lse, -HUGE_VALF);
    float sink = 1.5F;
    host(config).merge({.states = std::span(states).last(1), .sink = {&sink, DType::f32, {1}}}, outputs);
    EXPECT_EQ(merged, (std::array<float, 8>{}));
    EXPECT_EQ(merged_lse, sink);
  }
}

TEST(Merge, ANanOrInfiniteSinkReachesItsRows) {
  std::array<float, 8> o{1, 1, 1, 1, 1, 1, 1, 1}, merged{};
  AttentionConfig config;
  config.head_dim = 8;
  config.dtype = DType::f32;
  for (float sink : {std::nanf(""), HUGE_VALF}) {
    float lse = 0;
    const std::array states{AttentionState{{o.data(), DType::f32, {1, 1, 1, 8}}, {&lse, DType::f32, {1, 1, 1}}}};
    const ForwardOutputs outputs{{merged.data(), DType::f32, {1, 1, 1, 8}}};
    host(config).merge({.states = states, .sink = {&sink, DType::f32, {1}}}, outputs);
    EXPECT_TRUE(std::isnan(merged[3]));
  }
}

/// Attention in double whose keys are computed in shards.
class Shards : public testing::Test {
 protected:
  static constexpr std::int64_t kB = 2, kH = 4, kHKv = 2, kS = 13, kD = 16;

  struct Tensor {
    explicit Tensor(std::vector<std::int64_t> shape_of) : shape(std::move(shape_of)) {
      std::size_t count = 1;
      for (const std::int64_t size : shape) count *= static_cast<std::size_t>(size);
      values.assign(count, 0.0);
    }
    TensorView view() {
      std::vector<std::int64_t> strides(shape.size(), 1);
      for (std::size_t i = shape.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * shape[i];
      return {values.data(), DType::f64, shape, strides};
    }
    /// Keys [begin, end) of k or v.
    TensorView keys(std::int64_t begin, std::int64_t end) {
      TensorView part = view();
      part.data = values.data() + begin * part.strides[2];
      part.shape[2] = end - begin;
      return part;
    }

    std::vector<std::int64_t> shape;
    std::vector<double> values;
  };

  Shards() {
    std::mt19937 random(1);
    std::normal_distribution<double> normal;
    for (Tensor* const tensor : {&q, &k, &v, &dout, &dlse, &sink}) {
      for (double& value : tensor->values) value = normal(random);
    }
  }

  AttentionConfig config() const {
    AttentionConfig config;
    config.head_dim = kD;
    config.dtype = DType::f64;
    config.causal = true;
    return config;
  }

  /// Of keys [begin, end): every row i keeps keys up to i of all.
  AttentionConfig of_shard(std::int64_t begin, std::int64_t end) const {
    AttentionConfig shard = config();
    if (begin == 0 && end < kS) shard.causal_align = CausalAlign::top_left;
    if (begin > 0 && end < kS) {
      shard.causal = false;
      shard.mask.expression = "q >= kv + " + std::to_string(begin);
    }
    return shard;
  }

  void forward(const AttentionConfig& how, std::int64_t begin, std::int64_t end, Tensor& o, Tensor& lse) {
    ForwardInputs inputs{q.view(), k.keys(begin, end), v.keys(begin, end)};
    if (how.sink) inputs.sink = sink.view();
    host(how).forward(inputs, {o.view(), lse.view()});
  }

  /// Gradients of keys [begin, end), whose dq is added.
  void backward(const AttentionConfig& how, std::int64_t begin, std::int64_t end, Tensor& o, Tensor& lse, Tensor& dq,
                Tensor& dk, Tensor& dv, Tensor* dsink) {
    Tensor part({kB, kH, kS, kD});
    BackwardInputs inputs{q.view(),   k.keys(begin, end), v.keys(begin, end), o.view(),
                          lse.view(), dout.view(),        dlse.view()};
    if (how.sink) inputs.sink = sink.view();
    BackwardOutputs outputs{part.view(), dk.keys(begin, end), dv.keys(begin, end)};
    if (dsink != nullptr) outputs.dsink = dsink->view();
    host(how).backward(inputs, outputs);
    for (std::size_t i = 0; i < part.values.size(); ++i) dq.values[i] += part.values[i];
  }

  static void expect_near(const Tensor& is, const Tensor& expected, const char* name) {
    for (std::size_t i = 0; i < is.values.size(); ++i) {
      ASSERT_NEAR(is.values[i], expected.values[i], 1e-12) << name << " " << i;
    }
  }

  /// `merged`, whose keys were computed in parts, and each part's gradients of it, are those of all keys.
  void expect_like_all(Tensor& o, Tensor& lse, bool has_sink) {
    AttentionConfig all = config();
    all.sink = has_sink;
    Tensor whole_o({kB, kH, kS, kD}), whole_lse({kB, kH, kS});
    forward(all, 0, kS, whole_o, whole_lse);
    expect_near(o, whole_o, "o");
    expect_near(lse, whole_lse, "lse");
    Tensor whole_dq({kB, kH, kS, kD}), whole_dk({kB, kHKv, kS, kD}), whole_dv({kB, kHKv, kS, kD}), whole_dsink({kH});
    backward(all, 0, kS, whole_o, whole_lse, whole_dq, whole_dk, whole_dv, has_sink ? &whole_dsink : nullptr);
    Tensor dq({kB, kH, kS, kD}), dk({kB, kHKv, kS, kD}), dv({kB, kHKv, kS, kD}), dsink({kH});
    for (std::size_t i = 0; i + 1 < kCuts.size(); ++i) {
      AttentionConfig shard = of_shard(kCuts[i], kCuts[i + 1]);
      shard.sink = has_sink && i == 0;  // its gradient once, from any part
      shard.accumulate = i > 0;         // of which backward does not depend
      backward(shard, kCuts[i], kCuts[i + 1], o, lse, dq, dk, dv, shard.sink ? &dsink : nullptr);
    }
    expect_near(dq, whole_dq, "dq");
    expect_near(dk, whole_dk, "dk");
    expect_near(dv, whole_dv, "dv");
    expect_near(dsink, whole_dsink, "dsink");
  }

  static constexpr std::array<std::int64_t, 4> kCuts{0, 4, 9, kS};
  Tensor q{{kB, kH, kS, kD}}, k{{kB, kHKv, kS, kD}}, v{{kB, kHKv, kS, kD}};
  Tensor dout{{kB, kH, kS, kD}}, dlse{{kB, kH, kS}}, sink{{kH}};
};

TEST_F(Shards, MergedAreThoseOfAllKeysAndSoAreTheirGradients) {
  for (const bool sink_in_merge : {false, true}) {
    for (const bool has_sink : {false, true}) {
      std::vector<Tensor> o(3, Tensor({kB, kH, kS, kD})), lse(3, Tensor({kB, kH, kS}));
      std::vector<AttentionState> states;
      for (std::size_t i = 0; i < 3; ++i) {
        AttentionConfig shard = of_shard(kCuts[i], kCuts[i + 1]);
        shard.sink = has_sink && !sink_in_merge && i == 1;
        forward(shard, kCuts[i], kCuts[i + 1], o[i], lse[i]);
        states.push_back({o[i].view(), lse[i].view()});
      }
      MergeInputs inputs{.states = states};
      if (has_sink && sink_in_merge) inputs.sink = sink.view();
      host(config()).merge(inputs, {o[0].view(), lse[0].view()});
      expect_like_all(o[0], lse[0], has_sink);
    }
  }
}

TEST_F(Shards, AccumulatedAreThoseOfAllKeysAndSoAreTheirGradients) {
  for (const bool has_sink : {false, true}) {
    Tensor o({kB, kH, kS, kD}), lse({kB, kH, kS});
    for (std::size_t i = 0; i < 3; ++i) {
      AttentionConfig shard = of_shard(kCuts[i], kCuts[i + 1]);
      shard.sink = has_sink && i == 0;
      shard.accumulate = i > 0;
      forward(shard, kCuts[i], kCuts[i + 1], o, lse);
    }
    expect_like_all(o, lse, has_sink);
  }
}

// From nothing, whatever o holds.
TEST_F(Shards, AccumulateBeginsWithoutKeys) {
  for (const double none : {-kInfinity, kInfinity}) {
    Tensor o({kB, kH, kS, kD}), lse({kB, kH, kS});
    o.values.assign(o.values.size(), std::nan(""));
    lse.values.assign(lse.values.size(), none);
    AttentionConfig accumulates = config();
    accumulates.accumulate = true;
    forward(accumulates, 0, kS, o, lse);
    expect_like_all(o, lse, false);
  }
}

TEST_F(Shards, ANanOfTheStateReachesItsRow) {
  Tensor o({kB, kH, kS, kD}), lse({kB, kH, kS});
  lse.values[7] = std::nan("");
  o.values[9 * kD + 3] = std::nan("");
  AttentionConfig accumulates = config();
  accumulates.accumulate = true;
  forward(accumulates, 0, kS, o, lse);
  EXPECT_TRUE(std::isnan(o.values[7 * kD]) && std::isnan(lse.values[7]));
  EXPECT_TRUE(std::isnan(o.values[9 * kD + 3]) && !std::isnan(lse.values[9]));
  EXPECT_FALSE(std::isnan(o.values[8 * kD]) || std::isnan(lse.values[8]));
}

TEST_F(Shards, FreeFunction) {
  Tensor o({kB, kH, kS, kD}), lse({kB, kH, kS}), other_o({kB, kH, kS, kD}), other_lse({kB, kH, kS});
  forward(of_shard(0, 6), 0, 6, o, lse);
  forward(of_shard(6, kS), 6, kS, other_o, other_lse);
  merge_states(host(config()), {{o.view(), lse.view()}, {other_o.view(), other_lse.view()}}, {o.view(), lse.view()});
  Tensor whole_o({kB, kH, kS, kD}), whole_lse({kB, kH, kS});
  forward(config(), 0, kS, whole_o, whole_lse);
  expect_near(o, whole_o, "o");
  expect_near(lse, whole_lse, "lse");
}

TEST(Accumulate, NeedsALogSumExpAndNoSink) {
  AttentionConfig config;
  config.head_dim = 8;
  config.dtype = DType::f32;
  config.accumulate = true;
  std::array<float, 8> memory{};
  std::array<float, 8> o{};
  const TensorView row(memory.data(), DType::f32, {1, 1, 1, 8});
  const ForwardInputs inputs{row, row, row};
  expect_invalid("lse", [&] { host(config).forward(inputs, {{o.data(), DType::f32, {1, 1, 1, 8}}}); });
  config.sink = true;
  expect_invalid("sink", [&] { host(config); });
}

class MergeRefuses : public testing::Test {
 protected:
  /// The call with a change is refused, naming the argument, and leaves its memory alone.
  void expect(const std::string& argument, const std::function<void(MergeData::Call&)>& change) {
    SCOPED_TRACE(argument);
    MergeData data(case_);
    const MergeData before = data;
    MergeData::Call call = data.call();
    change(call);
    call.inputs.states = call.states;
    expect_invalid(argument, [&] { host(case_.config()).merge(call.inputs, call.outputs); });
    EXPECT_EQ(bytes_of(data), bytes_of(before));
  }

  MergeCase case_ = [] {
    MergeCase c;
    c.states = 3;
    c.sink = true;
    return c;
  }();
};

TEST_F(MergeRefuses, TensorsThatDoNotFit) {
  using Of = std::function<TensorView&(MergeData::Call&)>;
  const std::vector<std::pair<std::string, Of>> tensors{
      {"states[1].o", [](MergeData::Call& c) -> TensorView& { return c.states[1].o; }},
      {"states[2].lse", [](MergeData::Call& c) -> TensorView& { return c.states[2].lse; }},
      {"o", [](MergeData::Call& c) -> TensorView& { return c.outputs.o; }},
      {"lse", [](MergeData::Call& c) -> TensorView& { return c.outputs.lse; }},
      {"sink", [](MergeData::Call& c) -> TensorView& { return c.inputs.sink; }}};
  for (const auto& [name, of] : tensors) {
    expect(name, [&](MergeData::Call& c) { of(c).dtype = DType::f16; });
    expect(name, [&](MergeData::Call& c) { of(c).dtype = DType::f64; });
    expect(name, [&](MergeData::Call& c) { of(c).data = nullptr; });
    expect(name, [&](MergeData::Call& c) { of(c).rank = 2; });
    if (name.ends_with('o')) {
      expect(name, [&](MergeData::Call& c) { of(c) = {}; });
      expect(name, [&](MergeData::Call& c) { of(c).strides[3] = 2; });
    }
    if (name == "o" || name == "lse") {
      expect(name, [&](MergeData::Call& c) { of(c).read_only = true; });
      expect(name, [&](MergeData::Call& c) { of(c).strides[2] = 0; });
    }
  }
  expect("states[0].lse", [](MergeData::Call& c) { c.states[0].lse = {}; });
  expect("states[0].o", [](MergeData::Call& c) { --c.states[0].o.shape[2]; });
  expect("states[0].lse", [](MergeData::Call& c) { --c.states[0].lse.shape[1]; });
  expect("sink", [](MergeData::Call& c) { --c.inputs.sink.shape[0]; });
}

TEST_F(MergeRefuses, NumbersOfStates) {
  expect("states", [](MergeData::Call& c) { c.states.clear(); });
  expect("states", [](MergeData::Call& c) { c.states.resize(17, c.states[0]); });
  expect("states", [](MergeData::Call& c) { c.inputs.stacked = 2; });
  expect("stacked", [](MergeData::Call& c) { c.inputs.stacked = -1; });
  expect("stacked", [](MergeData::Call& c) { c.inputs.stacked = std::int64_t{1} << 31; });
  expect("stride_o", [](MergeData::Call& c) { c.inputs.stride_o = 8; });
  expect("stride_lse", [](MergeData::Call& c) { c.inputs.stride_lse = 8; });
  case_.stacked = true;
  for (const std::int64_t far : {std::int64_t{1} << 60, std::numeric_limits<std::int64_t>::min()}) {
    expect("stride_o", [=](MergeData::Call& c) { c.inputs.stride_o = far; });
    expect("stride_lse", [=](MergeData::Call& c) { c.inputs.stride_lse = far; });
  }
}

TEST_F(MergeRefuses, MemoryThatIsShared) {
  expect("o", [](MergeData::Call& c) { c.outputs.o.data = c.inputs.sink.data; });
  expect("o", [](MergeData::Call& c) {  // in place, but for a stride
    c.outputs.o = c.states[1].o;
    c.outputs.o.shape[2] = c.states[0].o.shape[2] = c.states[1].o.shape[2] = c.states[2].o.shape[2] = 2;
    for (AttentionState& state : c.states) state.lse.shape[2] = 2;
    c.outputs.lse.shape[2] = 2;
    c.states[1].o.strides[2] *= 2;
  });
  expect("o", [](MergeData::Call& c) {  // in place of one, and across another
    c.outputs.o = c.states[1].o;
    c.states[2].o = c.states[1].o;
    c.states[2].o.data = static_cast<std::uint16_t*>(c.states[2].o.data) + 8;
  });
  expect("lse", [](MergeData::Call& c) { c.outputs.lse.data = c.states[2].o.data; });
  expect("lse", [](MergeData::Call& c) { c.outputs.lse.data = c.outputs.o.data; });
  expect("lse", [](MergeData::Call& c) { c.outputs.lse.data = c.inputs.sink.data; });
  case_.stacked = true;
  case_.states = 20;
  expect("o", [](MergeData::Call& c) {
    c.outputs.o = c.states[0].o;
    c.outputs.o.data = static_cast<std::uint16_t*>(c.states[0].o.data) + 17 * c.inputs.stride_o + 8;
  });
}

TEST(Merge, ShapesArePrepared) {
  MergeCase c;
  const Attention attention = host(c.config());
  EXPECT_EQ(attention.merge_kernel_info().name, "fa_reference_merge_states");
  attention.prepare_merge({.states = DType::f32, .result = DType::bf16});
  attention.prepare_merge({.mixed = true, .result = DType::f32, .aligned = false});
  expect_invalid("states", [&] { attention.prepare_merge({.states = DType::f16}); });
  expect_invalid("result", [&] { attention.prepare_merge({.result = DType::i32}); });
  c.dtype = DType::f64;
  expect_invalid("result", [&] { host(c.config()).prepare_merge({.result = DType::f32}); });
  expect_invalid("mixed", [&] { host(c.config()).prepare_merge({.mixed = true}); });
}

TEST(Merge, NothingToDo) {
  MergeCase c;
  for (std::int64_t MergeCase::*size : {&MergeCase::b, &MergeCase::h_q, &MergeCase::s_q}) {
    MergeCase empty = c;
    empty.*size = 0;
    run(empty);
  }
}

}  // namespace
}  // namespace fa
