#include "support/statistics_gradients.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

namespace fa::test {
namespace {

constexpr const char* kSmall = "tile_m=32 tile_n=32 warps=2 stages=1";
constexpr std::int64_t kPeriod = 7;  // of rows that repeat

AttentionConfig asks(MaxLogit max_logit, bool entropy) {
  AttentionConfig config;
  config.statistics = {.max_logit = max_logit,
                       .entropy = entropy,
                       .entropy_gradient = entropy,
                       .max_logit_gradient = max_logit != MaxLogit::none};
  return config;
}

AttentionConfig with(AttentionConfig config, const char* score, std::vector<Capture> captures = {}) {
  config.score = ScoreFunction{score, std::move(captures)};
  return config;
}

AttentionConfig masked(AttentionConfig config, const char* mask) {
  config.mask = MaskFunction{mask};
  return config;
}

Layout layout_of(const StatisticsGradientCase& c) {
  return c.of.packed() ? Layout::bshd : Layout::bhsd;
}

/// [total, h, d] of one entry [1, h, total, d], as calls of packed batches take it.
TensorView call_view(const StatisticsGradientCase& c, TensorView view) {
  view.read_only = false;  // it is the caller's
  if (!c.of.packed()) return view;
  view.rank = 3;
  view.shape = {view.shape[2], view.shape[1], view.shape[3], 0};
  view.strides = {view.strides[2], view.strides[1], view.strides[3], 0};
  return view;
}

TensorView rows_view(const StatisticsGradientCase& c, const void* data) {
  const AttentionCase& a = c.of.attention;
  return c.of.packed() ? TensorView(data, DType::f32, {a.h_q, a.s_q})
                       : TensorView(data, DType::f32, {a.b, a.h_q, a.s_q});
}

std::vector<float> random_numbers(std::size_t count, std::uint64_t seed) {
  std::vector<float> values(count);
  std::mt19937_64 engine(seed);
  for (float& value : values) value = static_cast<float>(engine() >> 40) * 0x1p-22f - 2;
  return values;
}

/// Of statistics of rows, or of heads.
TensorView max_logit_view(const StatisticsGradientCase& c, const void* data) {
  return c.of.config.statistics.max_logit_by_head ? TensorView(data, DType::f32, {c.of.attention.h_q})
                                                  : rows_view(c, data);
}

std::vector<float> random_rows(const StatisticsGradientCase& c, bool given, std::uint64_t seed) {
  const AttentionCase& a = c.of.attention;
  return random_numbers(given ? static_cast<std::size_t>(a.b * a.h_q * a.s_q) : 0, seed);
}

/// Row j becomes row j % kPeriod.
void repeat_rows(HostTensor& tensor) {
  const TensorView view = tensor.view();
  for (std::int64_t b = 0; b < view.shape[0]; ++b) {
    for (std::int64_t h = 0; h < view.shape[1]; ++h) {
      for (std::int64_t s = kPeriod; s < view.shape[2]; ++s) {
        for (std::int64_t i = 0; i < view.shape[3]; ++i) tensor.set(b, h, s, i, tensor.at(b, h, s % kPeriod, i));
      }
    }
  }
}

StatisticsData data_of(const StatisticsGradientCase& c) {
  StatisticsData data(c.of);
  if (c.ties) repeat_rows(data.inputs.k);
  if (c.ties && c.of.config.statistics.max_logit_by_head) repeat_rows(data.inputs.q);
  return data;
}

double worst_of(const std::vector<double>& actual, const std::vector<double>& expected, double relative) {
  if (actual.size() != expected.size()) return HUGE_VAL;
  double greatest = 1e-3, worst = 0;
  for (const double value : expected) greatest = std::max(greatest, std::abs(value));
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double error = std::abs(actual[i] - expected[i]) / (relative * greatest);
    worst = std::max(worst, std::isnan(error) ? HUGE_VAL : error);
  }
  return worst;
}

std::vector<double> numbers_of(const HostTensor& tensor) {
  std::vector<double> numbers;
  const auto [b, h, s, d] = tensor.view().shape;
  for (std::int64_t row = 0; row < b * h * s; ++row) {
    for (std::int64_t i = 0; i < d; ++i) numbers.push_back(tensor.at(row / s / h, row / s % h, row % s, i));
  }
  return numbers;
}

std::vector<double> numbers_of(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

}  // namespace

std::vector<StatisticsGradientCase> statistics_gradient_cases() {
  const AttentionConfig both = asks(MaxLogit::softmax, true);
  std::vector<StatisticsGradientCase> cases;
  const auto add = [&](const char* name, const AttentionCase& attention, const AttentionConfig& config) {
    return &cases.emplace_back(
        StatisticsGradientCase{{std::string("gradients_") + name, attention, config}, {"sm80", kSmall}});
  };
  add("dense", attention_of(DType::bf16, {2, 2, 1, 45, 70, 16, 16}, false), both);
  add("causal", attention_of(DType::f16, {1, 4, 2, 70, 90, 24, 8}, true), both)->dlse = true;
  add("no_keys", attention_of(DType::f16, {1, 2, 1, 70, 40, 16, 16}, true), both)->infinite = true;
  add("f32", attention_of(DType::f32, {1, 2, 1, 33, 50, 8, 8}, true), both);
  add("entropy", attention_of(DType::f16, {1, 2, 1, 40, 50, 16, 16}, false), asks(MaxLogit::none, true));
  add("max_logit", attention_of(DType::f16, {1, 2, 1, 40, 50, 16, 16}, true), asks(MaxLogit::softmax, false));
  AttentionConfig heads = both;
  heads.statistics.max_logit_by_head = true;
  add("heads", attention_of(DType::f16, {2, 4, 2, 40, 50, 16, 16}, true), heads);
  add("heads_ties", attention_of(DType::f16, {2, 2, 1, 40, 50, 16, 16}, false), heads)->ties = true;
  add("heads_below_zero", attention_of(DType::f16, {2, 3, 1, 45, 70, 16, 16}, true), with(heads, "score * 0.1 - 50.0"));
  StatisticsGradientCase* const packed_heads =
      add("heads_packed", attention_of(DType::f16, {1, 2, 1, 90, 110, 16, 16}, true), heads);
  packed_heads->of.cu_q = {2, 40, 40, 85};
  packed_heads->of.cu_kv = {0, 30, 50, 110};
  packed_heads->of.config.varlen = true;
  heads.statistics.max_logit = MaxLogit::scaled;
  add("heads_scaled", attention_of(DType::f16, {1, 2, 1, 45, 70, 16, 16}, true, -1.5f),
      with(heads, "2.0 * tanh(score / 2.0)"))
      ->infinite = true;
  add("negative_scale", attention_of(DType::f16, {1, 2, 1, 40, 50, 16, 16}, true, -0.7f), both);
  add("ties", attention_of(DType::f16, {1, 2, 1, 40, 50, 16, 16}, true), both)->ties = true;
  add("softcap_scaled", attention_of(DType::f16, {1, 2, 1, 45, 70, 16, 16}, true, -1.5f),
      with(asks(MaxLogit::scaled, true), "2.0 * tanh(score / 2.0)"));
  add("slope_softmax", attention_of(DType::f16, {2, 2, 2, 45, 70, 16, 16}, true),
      with(both, "score * 0.5 - slope[h] * float(abs(q - kv))", {{"slope", DType::f32, true}}));
  add("mask", attention_of(DType::f16, {1, 2, 1, 45, 70, 16, 16}, false),
      masked(with(asks(MaxLogit::scaled, true), "score * 0.5"), "(q + kv) % 3 != 0 && kv < 60"));
  AttentionConfig config = both;
  config.sink = true;
  config.window_left = 9;
  add("window_sink", attention_of(DType::f16, {1, 2, 1, 45, 70, 16, 16}, true), config);
  config = both;
  config.dropout = 0.5f;
  add("dropout", attention_of(DType::f16, {1, 2, 1, 45, 70, 16, 16}, false), config);
  StatisticsGradientCase* const packed =
      add("packed", attention_of(DType::f16, {1, 2, 1, 90, 110, 16, 16}, true), both);
  packed->of.cu_q = {2, 40, 40, 85};
  packed->of.cu_kv = {0, 30, 50, 110};
  packed->of.config.varlen = true;
  AttentionConfig sums = asks(MaxLogit::none, false);
  sums.statistics.column_sums = ColumnSums::query_heads;
  sums.statistics.column_sums_gradient = true;
  add("sums", attention_of(DType::f16, {2, 2, 1, 45, 70, 16, 16}, false), sums);
  config = sums;
  config.dropout = 0.5f;
  add("sums_dropout", attention_of(DType::f16, {1, 2, 1, 45, 70, 16, 16}, false), config);
  config = with(asks(MaxLogit::scaled, true), "2.0 * tanh(score / 2.0)");
  config.statistics.column_sums = ColumnSums::kv_heads;
  config.statistics.column_sums_gradient = true;
  config.sink = true;
  add("sums_kv", attention_of(DType::f16, {2, 4, 2, 70, 50, 16, 16}, true, -1.2f), config)->infinite = true;
  StatisticsGradientCase* const ragged =
      add("sums_packed", attention_of(DType::f16, {1, 4, 2, 90, 110, 16, 16}, true), sums);
  ragged->of.cu_q = {2, 40, 40, 85};
  ragged->of.cu_kv = {0, 30, 50, 110};
  ragged->of.config.varlen = true;
  // dQ in a pass of its own.
  for (const char* const name : {"causal", "heads", "heads_packed", "softcap_scaled", "mask", "window_sink", "dropout",
                                 "packed", "f32", "sums_kv", "sums_packed", "sums_dropout"}) {
    const auto like = std::ranges::find(cases, std::string("gradients_") + name,
                                        [](const StatisticsGradientCase& c) { return c.of.name; });
    StatisticsGradientCase alone = *like;
    alone.of.name += "_deterministic";
    alone.of.config.deterministic = true;
    cases.push_back(std::move(alone));
  }
  return cases;
}

StatisticsGradientData::StatisticsGradientData(const StatisticsGradientCase& c)
    : forward(data_of(c)), results(test::expected_of(c.of, forward)) {
  AttentionCase a = c.of.attention;
  a.layout = layout_of(c);
  dout = make_dout(a);
  const Statistics& given = c.of.config.statistics;
  dlse = random_rows(c, c.dlse, 11);
  dentropy = random_rows(c, given.entropy_gradient, 12);
  dmax_logit = given.gradient_of_heads() ? random_numbers(static_cast<std::size_t>(a.h_q), 13)
                                         : random_rows(c, given.max_logit_gradient, 13);
  if (given.column_sums_gradient) dcolumn_sums = random_numbers(results.column_sums.size(), 14);
  if (c.infinite) results.lse.back() = std::numeric_limits<float>::infinity();
  for (std::size_t i = 0; i < results.lse.size(); ++i) {
    if (!std::isinf(results.lse[i])) continue;  // else nothing reads them
    for (std::vector<float>* const rows : {&dentropy, &dmax_logit}) {
      if (rows->size() == results.lse.size()) (*rows)[i] = std::numeric_limits<float>::quiet_NaN();
    }
  }
}

StatisticsGradientResults::StatisticsGradientResults(const StatisticsGradientCase& c,
                                                     const StatisticsGradientData& data) {
  const AttentionCase& a = c.of.attention;
  const Layout layout = layout_of(c);
  dq = HostTensor(a.dtype, a.b, a.h_q, a.s_q, a.d_qk, layout);
  dk = HostTensor(a.dtype, a.b, a.h_kv, a.s_kv, a.d_qk, layout);
  dv = HostTensor(a.dtype, a.b, a.h_kv, a.s_kv, a.d_v, layout);
  if (c.of.config.sink) dsink.resize(static_cast<std::size_t>(a.h_q));
  for (const NamedTensor& tensor : data.forward.variant.captures) {
    captures.emplace_back(static_cast<std::size_t>(tensor.requires_grad ? tensor.elements() : 0));
  }
}

BackwardInputs inputs_of(const StatisticsGradientCase& c, const StatisticsGradientData& data,
                         const StatisticsMemory& memory) {
  const ForwardInputs forward = inputs_of(c.of, data.forward, memory);
  const auto tensor = [&](const HostTensor& of) {
    TensorView view = call_view(c, of.view());
    view.data = memory.read(view.data, of.bytes().size());
    return view;
  };
  const auto rows = [&](const std::vector<float>& values) {
    return values.empty() ? TensorView() : rows_view(c, memory.read(values.data(), 4 * values.size()));
  };
  BackwardInputs inputs{forward.q,        forward.k, forward.v, tensor(data.results.o), rows(data.results.lse),
                        tensor(data.dout)};
  inputs.dlse = rows(data.dlse);
  inputs.captures = forward.captures;
  inputs.sink = forward.sink;
  inputs.sequences = forward.sequences;
  if (!data.dentropy.empty()) inputs.statistics.entropy = rows(data.results.entropy);
  inputs.statistics.dentropy = rows(data.dentropy);
  if (!data.dmax_logit.empty()) {
    inputs.statistics.dmax_logit = max_logit_view(c, memory.read(data.dmax_logit.data(), 4 * data.dmax_logit.size()));
  }
  if (!data.dcolumn_sums.empty()) {
    const AttentionCase& a = c.of.attention;
    const std::int64_t heads = c.of.config.statistics.column_sums == ColumnSums::kv_heads ? a.h_kv : a.h_q;
    const void* const sums = memory.read(data.dcolumn_sums.data(), 4 * data.dcolumn_sums.size());
    inputs.statistics.dcolumn_sums = c.of.packed() ? TensorView(sums, DType::f32, {heads, a.s_kv})
                                                   : TensorView(sums, DType::f32, {a.b, heads, a.s_kv});
  }
  return inputs;
}

BackwardOutputs outputs_of(const StatisticsGradientCase& c, const StatisticsGradientData& data,
                           StatisticsGradientResults& results, const StatisticsMemory& memory) {
  const auto tensor = [&](HostTensor& of) {
    TensorView view = call_view(c, of.view());
    view.data = memory.written(of.bytes().data(), of.bytes().size());
    return view;
  };
  BackwardOutputs outputs{tensor(results.dq), tensor(results.dk), tensor(results.dv)};
  for (std::size_t i = 0; i < results.captures.size(); ++i) {
    std::vector<float>& values = results.captures[i];
    const NamedTensor& of = data.forward.variant.captures[i];
    if (values.empty()) continue;
    TensorView view = of.view();
    view.dtype = DType::f32;
    view.read_only = false;
    view.data = memory.written(values.data(), 4 * values.size());
    outputs.captures.add(Captured(of.name, view));
  }
  if (!results.dsink.empty()) {
    outputs.dsink = TensorView(memory.written(results.dsink.data(), 4 * results.dsink.size()), DType::f32,
                               {static_cast<std::int64_t>(results.dsink.size())});
  }
  return outputs;
}

StatisticsGradientResults expected_of(const StatisticsGradientCase& c, const StatisticsGradientData& data) {
  AttentionConfig config = data.forward.variant.config;
  config.host_f64 = true;
  StatisticsGradientResults results(c, data);
  const StatisticsMemory memory{[](const void* bytes, std::size_t) { return const_cast<void*>(bytes); },
                                [](void* bytes, std::size_t) { return bytes; }};
  Attention::create(config, Device::host()).backward(inputs_of(c, data, memory), outputs_of(c, data, results, memory));
  return results;
}

double error_of(const StatisticsGradientCase& c, const StatisticsGradientResults& actual,
                const StatisticsGradientResults& expected) {
  const DType dtype = c.of.attention.dtype;
  const double relative = dtype == DType::bf16 ? 1.5e-2 : dtype == DType::f16 ? 3e-3 : 1e-4;
  double worst = std::max({worst_of(numbers_of(actual.dq), numbers_of(expected.dq), relative),
                           worst_of(numbers_of(actual.dk), numbers_of(expected.dk), relative),
                           worst_of(numbers_of(actual.dv), numbers_of(expected.dv), relative),
                           worst_of(numbers_of(actual.dsink), numbers_of(expected.dsink), relative)});
  if (actual.captures.size() != expected.captures.size()) return HUGE_VAL;
  for (std::size_t i = 0; i < actual.captures.size(); ++i) {
    worst = std::max(worst, worst_of(numbers_of(actual.captures[i]), numbers_of(expected.captures[i]), relative));
  }
  return worst;
}

}  // namespace fa::test
