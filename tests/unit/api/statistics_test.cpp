// Statistics of the host device against sums over whole rows of scores, and what is refused.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include <fa/attention.hpp>

#include "api/validate.hpp"
#include "expect_error.hpp"
#include "support/attention_case.hpp"

namespace fa {
namespace {

using test::AttentionCase;
using test::AttentionInputs;
using test::expect_invalid;
using test::HostTensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

AttentionCase small_case() {
  AttentionCase c;
  c.b = 2;
  c.h_q = 4;
  c.h_kv = 2;
  c.s_q = 37;
  c.s_kv = 150;
  c.d_qk = 8;
  c.d_v = 8;
  c.dtype = DType::f64;
  c.scale = -1.5F;
  return c;
}

/// One call: its outputs, and what they must be by the definitions.
class Call {
 public:
  explicit Call(const AttentionCase& c) : c_(c), inputs_(test::make_inputs(c)) {
    config.head_dim = static_cast<int>(c.d_qk);
    config.head_dim_v = static_cast<int>(c.d_v);
    config.dtype = c.dtype;
    config.scale = c.scale;
    config.causal = c.causal;
    config.statistics = {MaxLogit::softmax, false, true, ColumnSums::query_heads};
  }

  ForwardInputs inputs() const {
    ForwardInputs given{inputs_.q.view(), inputs_.k.view(), inputs_.v.view()};
    if (config.sink) given.sink = TensorView(sink_, DType::f64, {c_.h_q});
    return given;
  }
  ForwardOutputs outputs() {
    ForwardOutputs to{o_.view(), of_rows(lse_), {}};
    const Statistics& wanted = config.statistics;
    if (wanted.max_logit != MaxLogit::none) {
      to.statistics.max_logit =
          wanted.max_logit_by_head ? TensorView(max_logit.data(), DType::f64, {c_.h_q}) : of_rows(max_logit);
    }
    if (wanted.entropy) to.statistics.entropy = of_rows(entropy);
    if (wanted.column_sums != ColumnSums::none) {
      const bool of_kv = wanted.column_sums == ColumnSums::kv_heads;
      to.statistics.column_sums = TensorView(sums.data(), DType::f64, {c_.b, of_kv ? c_.h_kv : c_.h_q, c_.s_kv});
    }
    if (wanted.top_keys > 0) {
      const bool of_kv = wanted.column_sums == ColumnSums::kv_heads;
      to.statistics.top_keys =
          TensorView(top_keys.data(), DType::i32, {c_.b, of_kv ? c_.h_kv : c_.h_q, std::int64_t{wanted.top_keys}});
    }
    return to;
  }
  void run() { Attention::create(config, Device::host()).forward(inputs(), outputs()); }

  /// Of the row: scores as the softmax takes them, -inf where they are hidden.
  std::vector<double> scores(std::int64_t b, std::int64_t h, std::int64_t i, bool scaled) const {
    std::vector<double> result(static_cast<std::size_t>(c_.s_kv), -kInfinity);
    for (std::int64_t j = 0; j < c_.s_kv; ++j) {
      if (!keeps(i, j)) continue;
      double sum = 0;
      for (std::int64_t d = 0; d < c_.d_qk; ++d) {
        sum += inputs_.q.at(b, h, i, d) * inputs_.k.at(b, h / (c_.h_q / c_.h_kv), j, d);
      }
      sum *= double{c_.softmax_scale()};
      result[static_cast<std::size_t>(j)] = scaled ? sum : score(sum);
    }
    return result;
  }

  /// Holds what the call has left to the definitions.
  void expect_exact() const {
    const Statistics& wanted = config.statistics;
    const bool of_kv = wanted.column_sums == ColumnSums::kv_heads;
    const std::int64_t heads = of_kv ? c_.h_kv : c_.h_q;
    std::vector<double> of_heads(static_cast<std::size_t>(c_.h_q), -kInfinity);
    std::vector<double> columns(static_cast<std::size_t>(c_.b * heads * c_.s_kv));
    for (std::int64_t row = 0; row < c_.b * c_.h_q * c_.s_q; ++row) {
      const std::int64_t b = row / c_.s_q / c_.h_q, h = row / c_.s_q % c_.h_q, i = row % c_.s_q;
      const auto at = static_cast<std::size_t>(row);
      const std::vector<double> all = scores(b, h, i, false);
      double sum = config.sink ? std::exp(sink_[h]) : 0, h_p = 0;
      for (const double s : all) sum += std::exp(s);
      for (std::size_t j = 0; j < all.size(); ++j) {
        const double p = sum == 0 ? 0 : std::exp(all[j]) / sum;
        if (p > 0) h_p -= p * std::log(p);
        const std::int64_t head = of_kv ? h / (c_.h_q / c_.h_kv) : h;
        columns[static_cast<std::size_t>((b * heads + head) * c_.s_kv) + j] += p;
      }
      if (wanted.entropy) expect_same(entropy[at], h_p);
      const std::vector<double> logits = scores(b, h, i, wanted.max_logit == MaxLogit::scaled);
      const double greatest = *std::max_element(logits.begin(), logits.end());
      double& of_head = of_heads[static_cast<std::size_t>(h)];
      of_head = std::max(of_head, greatest);
      if (wanted.max_logit != MaxLogit::none && !wanted.max_logit_by_head) expect_same(max_logit[at], greatest);
    }
    if (wanted.max_logit_by_head) {
      for (std::size_t h = 0; h < of_heads.size(); ++h) expect_same(max_logit[h], of_heads[h]);
    }
    for (std::size_t j = 0; wanted.column_sums != ColumnSums::none && j < columns.size(); ++j) {
      EXPECT_NEAR(sums[j], columns[j], 1e-11) << j;
    }
    for (std::int64_t row = 0; wanted.top_keys != 0 && row < c_.b * heads; ++row) expect_top(columns, row);
  }

  void expect_top(const std::vector<double>& columns, std::int64_t row) const {
    const auto count = static_cast<std::size_t>(config.statistics.top_keys);
    const double* const of_row = columns.data() + row * c_.s_kv;
    std::vector<std::int32_t> order(static_cast<std::size_t>(c_.s_kv));
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, [&](std::int32_t i, std::int32_t j) { return of_row[i] > of_row[j]; });
    order.resize(count, -1);
    for (std::size_t i = 0; i < count; ++i) {
      EXPECT_EQ(top_keys[static_cast<std::size_t>(row) * count + i], order[i]) << row << ", " << i;
    }
  }

  AttentionConfig config;
  std::function<double(double)> score = [](double s) { return s; };
  std::function<bool(std::int64_t, std::int64_t)> keeps = [](std::int64_t, std::int64_t) { return true; };
  std::vector<double> max_logit = std::vector<double>(2 * 4 * 150), entropy = max_logit, sums = max_logit;
  std::vector<std::int32_t> top_keys = std::vector<std::int32_t>(2 * 4 * 1024, 77);

 private:
  TensorView of_rows(std::vector<double>& values) const {
    return TensorView(values.data(), DType::f64, {c_.b, c_.h_q, c_.s_q});
  }

  static void expect_same(double got, double wanted) {
    if (got == wanted) return;
    EXPECT_NEAR(got, wanted, 1e-11);
  }

  AttentionCase c_;
  AttentionInputs inputs_;
  HostTensor o_ = test::make_outputs(c_).o;
  std::vector<double> lse_ = std::vector<double>(2 * 4 * 150);
  double sink_[4] = {0.5, -2, 3, -kInfinity};
};

TEST(HostStatistics, FollowTheirDefinitions) {
  Call call(small_case());
  call.run();
  call.expect_exact();
}

TEST(HostStatistics, OfCausalRowsSomeOfWhichHaveNoKeys) {
  AttentionCase c = small_case();
  c.causal = true;
  c.s_q = 150;
  c.s_kv = 90;
  Call call(c);
  call.keeps = [&](std::int64_t i, std::int64_t j) { return j <= i + c.s_kv - c.s_q; };
  call.run();
  call.expect_exact();
}

TEST(HostStatistics, OfHeadsAndKvHeads) {
  Call call(small_case());
  call.config.statistics = {MaxLogit::softmax, true, false, ColumnSums::kv_heads};
  call.run();
  call.expect_exact();
}

TEST(HostStatistics, OfFunctionsWindowsAndSinks) {
  for (const MaxLogit logits : {MaxLogit::softmax, MaxLogit::scaled}) {
    AttentionCase c = small_case();
    c.causal = true;
    Call call(c);
    call.config.statistics.max_logit = logits;
    call.config.score = ScoreFunction{"2.0 * tanh(score / 2.0) - 1.0"};
    call.config.mask = MaskFunction{"(q + kv) % 5 != 0"};
    call.config.window_left = 20;
    call.config.sink = true;
    call.score = [](double s) { return 2 * std::tanh(s / 2) - 1; };
    call.keeps = [&](std::int64_t i, std::int64_t j) {
      const std::int64_t at = i + c.s_kv - c.s_q;
      return j <= at && j >= at - 20 && (i + j) % 5 != 0;
    };
    call.run();
    call.expect_exact();
  }
}

TEST(HostStatistics, OfDropoutAreThoseOfTheWholeP) {
  Call call(small_case());
  call.config.dropout = 0.5F;
  call.run();
  call.expect_exact();
}

TEST(HostStatistics, OfNoRowsAreNothing) {
  AttentionCase c = small_case();
  c.s_q = 0;
  Call call(c);
  call.config.statistics = {MaxLogit::softmax, true, true, ColumnSums::query_heads};
  std::fill(call.sums.begin(), call.sums.end(), 7.0);
  call.run();
  EXPECT_EQ(call.max_logit[0], -kInfinity);
  EXPECT_EQ(call.sums[0], 0);
  EXPECT_EQ(call.sums[4 * 150 * 2 - 1], 0);
}

TEST(HostStatistics, TopKeysAreThoseOfTheGreatestSums) {
  for (const ColumnSums heads : {ColumnSums::none, ColumnSums::query_heads, ColumnSums::kv_heads}) {
    for (const int count : {1, 9, 150, 151, 1024}) {
      Call call(small_case());
      call.config.statistics = {MaxLogit::none, false, false, heads, count};
      call.run();
      call.expect_exact();
      const std::vector<std::int32_t> with = call.top_keys;
      ForwardOutputs outputs = call.outputs();
      outputs.statistics.column_sums = {};
      std::ranges::fill(call.top_keys, 77);
      Attention::create(call.config, Device::host()).forward(call.inputs(), outputs);
      EXPECT_EQ(call.top_keys, with) << "without a tensor for the sums";
    }
  }
}

/// Keys that no row sees are all alike, and come in order behind those that some row sees.
TEST(HostStatistics, TopKeysOfHiddenKeysComeInOrder) {
  AttentionCase c = small_case();
  c.causal = true;
  c.s_q = 4;
  Call call(c);
  call.config.causal_align = CausalAlign::top_left;
  call.config.statistics = {MaxLogit::none, false, false, ColumnSums::none, 8};
  call.run();
  EXPECT_EQ(std::vector<std::int32_t>(call.top_keys.begin() + 4, call.top_keys.begin() + 8),
            (std::vector<std::int32_t>{4, 5, 6, 7}));
}

TEST(HostStatistics, TopKeysOfNoRowsAreNone) {
  AttentionCase c = small_case();
  c.s_q = 0;
  Call call(c);
  call.config.statistics = {MaxLogit::none, false, false, ColumnSums::query_heads, 3};
  call.run();
  EXPECT_EQ(std::count(call.top_keys.begin(), call.top_keys.begin() + 2 * 4 * 3, -1), 2 * 4 * 3);
  EXPECT_EQ(call.top_keys[2 * 4 * 3], 77);
}

TEST(HostStatistics, TopKeysOfNoKeysAreNone) {
  AttentionCase c = small_case();
  c.s_kv = 0;
  Call call(c);
  call.config.statistics = {MaxLogit::none, false, false, ColumnSums::none, 3};
  call.run();
  EXPECT_EQ(std::count(call.top_keys.begin(), call.top_keys.begin() + 2 * 4 * 3, -1), 2 * 4 * 3);
}

TEST(HostStatistics, TopKeysPutNansFirst) {
  std::vector<float> q{1, 0, 0, 0, 0, 0, 0, 0}, k(5 * 8, 0.F), o(8), lse(1);
  k[2 * 8] = 3;
  k[3 * 8] = std::numeric_limits<float>::quiet_NaN();
  AttentionConfig config;
  config.head_dim = 8;
  config.dtype = DType::f32;
  config.mask = MaskFunction{"kv != 3"};  // whose score is NaN, and its P 0
  config.statistics.top_keys = 5;
  std::vector<std::int32_t> keys(5);
  ForwardOutputs outputs{
      TensorView(o.data(), DType::f32, {1, 1, 1, 8}), TensorView(lse.data(), DType::f32, {1, 1, 1}), {}};
  outputs.statistics.top_keys = TensorView(keys.data(), DType::i32, {1, 1, 5});
  const TensorView all(k.data(), DType::f32, {1, 1, 5, 8});
  const ForwardInputs inputs{TensorView(q.data(), DType::f32, {1, 1, 1, 8}), all, all};
  Attention::create(config, Device::host()).forward(inputs, outputs);
  EXPECT_EQ(keys, (std::vector<std::int32_t>{2, 0, 1, 4, 3}));
  config.mask = {};
  Attention::create(config, Device::host()).forward(inputs, outputs);
  EXPECT_EQ(keys, (std::vector<std::int32_t>{0, 1, 2, 3, 4})) << "one NaN makes all of them NaN";
}

TEST(Statistics, RefuseWhatTheyCannotBeOf) {
  const auto refuses = [](const char* name, const std::function<void(AttentionConfig&)>& change) {
    AttentionConfig config;
    config.head_dim = 64;
    config.statistics = {MaxLogit::softmax, false, true, ColumnSums::kv_heads};
    EXPECT_NO_THROW(api::validate(config, false));
    change(config);
    expect_invalid(name, [&] { api::validate(config, false); });
  };
  refuses("accumulate", [](AttentionConfig& c) { c.accumulate = true; });
  refuses("invariance", [](AttentionConfig& c) { c.invariance = Invariance::batch; });
  refuses("kernel.splits", [](AttentionConfig& c) { c.kernel = KernelOverride{"sm80", "splits=4"}; });
  refuses("statistics.max_logit", [](AttentionConfig& c) { c.statistics.max_logit = static_cast<MaxLogit>(3); });
  refuses("statistics.column_sums", [](AttentionConfig& c) { c.statistics.column_sums = static_cast<ColumnSums>(3); });
  refuses("dtype", [](AttentionConfig& c) { c.dtype = DType::e4m3; });
  refuses("statistics.top_keys", [](AttentionConfig& c) { c.statistics.top_keys = -1; });
  refuses("statistics.top_keys", [](AttentionConfig& c) { c.statistics.top_keys = kMaxTopKeys + 1; });
  AttentionConfig config;
  config.head_dim = 64;
  config.statistics.max_logit_by_head = true;
  expect_invalid("statistics.max_logit_by_head", [&] { api::validate(config, false); });
}

TEST(Statistics, RefuseTensorsThatDoNotFit) {
  const auto refuses = [](const char* name, const std::function<void(ForwardOutputs&)>& change) {
    Call call(small_case());
    call.config.statistics.top_keys = 5;
    const Attention attention = Attention::create(call.config, Device::host());
    ForwardOutputs outputs = call.outputs();
    change(outputs);
    expect_invalid(name, [&] { attention.forward(call.inputs(), outputs); });
  };
  refuses("max_logit", [](ForwardOutputs& out) { out.statistics.max_logit = {}; });
  refuses("max_logit", [](ForwardOutputs& out) { out.statistics.max_logit.shape[2] = 36; });
  refuses("entropy", [](ForwardOutputs& out) { out.statistics.entropy.dtype = DType::f32; });
  refuses("entropy", [](ForwardOutputs& out) { out.statistics.entropy.strides[2] = 2; });
  refuses("entropy", [](ForwardOutputs& out) { out.statistics.entropy.read_only = true; });
  refuses("column_sums", [](ForwardOutputs& out) { out.statistics.column_sums.shape[1] = 2; });
  refuses("top_keys", [](ForwardOutputs& out) { out.statistics.top_keys = {}; });
  refuses("top_keys", [](ForwardOutputs& out) { out.statistics.top_keys.shape[2] = 4; });
  refuses("top_keys", [](ForwardOutputs& out) { out.statistics.top_keys.shape[1] = 2; });
  refuses("top_keys", [](ForwardOutputs& out) { out.statistics.top_keys.dtype = DType::f32; });
  refuses("top_keys", [](ForwardOutputs& out) { out.statistics.top_keys.strides[2] = 2; });
  refuses("top_keys", [](ForwardOutputs& out) { out.statistics.top_keys.read_only = true; });
  refuses("top_keys", [](ForwardOutputs& out) { out.statistics.top_keys.data = nullptr; });
  refuses("top_keys", [](ForwardOutputs& out) { out.statistics.top_keys.data = out.statistics.column_sums.data; });
  refuses("lse", [](ForwardOutputs& out) {
    out.lse = {};
    out.statistics.column_sums = {};
  });
  refuses("lse", [](ForwardOutputs& out) { out.lse = {}; });
  refuses("max_logit", [](ForwardOutputs& out) { out.statistics.max_logit.data = out.lse.data; });
  Call call(small_case());
  call.config.statistics = {};
  Call all(small_case());
  ForwardOutputs outputs = all.outputs();
  const Attention attention = Attention::create(call.config, Device::host());
  expect_invalid("max_logit", [&] { attention.forward(call.inputs(), outputs); });
  outputs = call.outputs();
  outputs.statistics.top_keys = TensorView(call.top_keys.data(), DType::i32, {2, 4, 5});
  expect_invalid("top_keys", [&] { attention.forward(call.inputs(), outputs); });
}

}  // namespace
}  // namespace fa
