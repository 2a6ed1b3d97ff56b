#include "support/statistics_case.hpp"

#include <algorithm>
#include <cmath>

namespace fa::test {
namespace {

Layout layout_of(const StatisticsCase& c) {
  return c.packed() ? Layout::bshd : Layout::bhsd;
}

/// [total, h, d] of one entry [1, h, total, d], whose heads lie side by side.
TensorView call_view(const StatisticsCase& c, const HostTensor& tensor) {
  TensorView view = tensor.view();
  if (!c.packed()) return view;
  view.rank = 3;
  view.shape = {view.shape[2], view.shape[1], view.shape[3], 0};
  view.strides = {view.strides[2], view.strides[1], view.strides[3], 0};
  return view;
}

TensorView in(const StatisticsMemory& memory, TensorView view, std::size_t bytes) {
  view.data = memory.read(view.data, bytes);
  return view;
}

TensorView of_heads(void* data, const StatisticsCase& c, std::int64_t heads, std::int64_t length) {
  return c.packed() ? TensorView(data, DType::f32, {heads, length})
                    : TensorView(data, DType::f32, {c.attention.b, heads, length});
}

std::int64_t summed_heads(const StatisticsCase& c) {
  return c.config.statistics.summed_heads() == ColumnSums::kv_heads ? c.attention.h_kv : c.attention.h_q;
}

template <class T>
double distance(T actual, T expected, double absolute, double relative) {
  const double got = static_cast<double>(actual), wanted = static_cast<double>(expected);
  if (got == wanted) return 0;
  const double error = std::abs(got - wanted) / (absolute + relative * std::abs(wanted));
  return std::isnan(error) ? HUGE_VAL : error;
}

double worst_of(const std::vector<float>& actual, const std::vector<float>& expected, double absolute,
                double relative) {
  if (actual.size() != expected.size()) return HUGE_VAL;
  double worst = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    worst = std::max(worst, distance(actual[i], expected[i], absolute, relative));
  }
  return worst;
}

double worst_of(const HostTensor& actual, const HostTensor& expected, double absolute) {
  double worst = 0;
  const auto [b, h, s, d] = expected.view().shape;
  for (std::int64_t row = 0; row < b * h * s; ++row) {
    for (std::int64_t i = 0; i < d; ++i) {
      const std::int64_t at_b = row / s / h, at_h = row / s % h, at_s = row % s;
      worst = std::max(worst,
                       distance(actual.at(at_b, at_h, at_s, i), expected.at(at_b, at_h, at_s, i), absolute, absolute));
    }
  }
  return worst;
}

/// Keys in the places of others, by what their sums, as expected, differ.
double worst_of_keys(const StatisticsCase& c, const StatisticsResults& actual, const StatisticsResults& expected,
                     double absolute, double relative) {
  const auto count = static_cast<std::size_t>(c.config.statistics.top_keys);
  const auto heads = static_cast<std::size_t>(summed_heads(c)), s_kv = static_cast<std::size_t>(c.attention.s_kv);
  if (actual.top_keys.size() != expected.top_keys.size()) return HUGE_VAL;
  double worst = 0;
  for (std::size_t i = 0; i < actual.top_keys.size(); ++i) {
    const std::int32_t key = actual.top_keys[i], wanted = expected.top_keys[i];
    if (key == wanted) continue;
    if (key < 0 || wanted < 0 || expected.column_sums.empty()) return HUGE_VAL;
    const auto row = actual.top_keys.begin() + static_cast<std::ptrdiff_t>(i / count * count);
    if (std::count(row, row + static_cast<std::ptrdiff_t>(count), key) != 1) return HUGE_VAL;
    const std::size_t b = i / count / heads, h = i / count % heads;
    const std::size_t first = c.packed() ? h * s_kv + static_cast<std::size_t>(c.cu_kv[b]) : (b * heads + h) * s_kv;
    const std::size_t end = c.packed() ? h * s_kv + static_cast<std::size_t>(c.cu_kv[b + 1]) : first + s_kv;
    if (first + static_cast<std::size_t>(key) >= end) return HUGE_VAL;
    worst =
        std::max(worst, distance(expected.column_sums[first + static_cast<std::size_t>(key)],
                                 expected.column_sums[first + static_cast<std::size_t>(wanted)], absolute, relative));
  }
  return worst;
}

template <class Change>
void change_rows(HostTensor& tensor, const Change& change) {
  const auto [b, h, s, d] = tensor.view().shape;
  for (std::int64_t row = 0; row < b * h * s; ++row) {
    for (std::int64_t i = 0; i < d; ++i) {
      const std::int64_t at_b = row / s / h, at_h = row / s % h, at_s = row % s;
      tensor.set(at_b, at_h, at_s, i, change(at_s, i, tensor.at(at_b, at_h, at_s, i)));
    }
  }
}

void change_scores(const StatisticsCase& c, AttentionInputs& inputs) {
  if (c.common != 0) {
    const auto whole = [&c](std::int64_t, std::int64_t i, double value) {
      return i == 0 ? double{c.common} : std::round(value);
    };
    change_rows(inputs.q, whole);
    change_rows(inputs.k, whole);
  }
  if (c.steep == 1) return;
  change_rows(inputs.q, [&c](std::int64_t s, std::int64_t, double value) {
    return s % 8 == 0 ? value * double{c.steep} : value;
  });
}

/// What products and sums of floats, and a fast tanh, cost: of scores, and of what P is made of.
double score_error(const StatisticsCase& c) {
  if (c.common != 0) return 1e-6;
  const double fast = c.config.score.expression.find("tanh") == std::string::npos ? 0 : 5e-4;
  return fast +
         3e-6 * std::max(1.0, std::abs(double{c.attention.softmax_scale()})) * static_cast<double>(c.attention.d_qk);
}

}  // namespace

AttentionCase attention_of(DType dtype, const AttentionSizes& sizes, bool causal, std::optional<float> scale) {
  AttentionCase c;
  c.dtype = dtype;
  c.b = sizes.b;
  c.h_q = sizes.h_q;
  c.h_kv = sizes.h_kv;
  c.s_q = sizes.s_q;
  c.s_kv = sizes.s_kv;
  c.d_qk = sizes.d_qk;
  c.d_v = sizes.d_v;
  c.causal = causal;
  c.scale = scale;
  return c;
}

VariantCase variant_of(const StatisticsCase& c) {
  return VariantCase(c.attention, {c.name, c.config});
}

StatisticsData::StatisticsData(const StatisticsCase& c) : variant(variant_of(c)) {
  AttentionCase a = c.attention;
  a.layout = layout_of(c);
  inputs = make_inputs(a);
  change_scores(c, inputs);
  if (c.config.page_size == 0) return;
  const std::int64_t page = c.config.page_size;
  pages_each = (a.s_kv + page - 1) / page;
  AttentionCase pool = a;
  pool.b = a.b * pages_each;
  pool.s_kv = page;
  pool.s_q = 1;
  const AttentionInputs pages = make_inputs(pool);
  inputs.k = pages.k;
  inputs.v = pages.v;
  const auto count = static_cast<std::int32_t>(pool.b);
  for (std::int32_t i = 0; i < count; ++i) table.push_back((count - 1 - i));  // in another order
}

StatisticsResults::StatisticsResults(const StatisticsCase& c)
    : o(c.attention.dtype, c.attention.b, c.attention.h_q, c.attention.s_q, c.attention.d_v, layout_of(c)) {
  const AttentionCase& a = c.attention;
  const Statistics& wanted = c.config.statistics;
  const auto rows = static_cast<std::size_t>(a.b * a.h_q * a.s_q);
  lse.resize(rows);
  if (wanted.max_logit != MaxLogit::none) {
    max_logit.resize(wanted.max_logit_by_head ? static_cast<std::size_t>(a.h_q) : rows);
  }
  if (wanted.entropy) entropy.resize(rows);
  const std::int64_t heads = summed_heads(c);
  const std::int64_t b = c.packed() ? static_cast<std::int64_t>(c.cu_q.size()) - 1 : a.b;
  top_keys.resize(static_cast<std::size_t>(b * heads * wanted.top_keys));
  if (wanted.column_sums == ColumnSums::none) return;
  column_sums.resize(static_cast<std::size_t>(a.b * heads * a.s_kv));
}

ForwardInputs inputs_of(const StatisticsCase& c, const StatisticsData& data, const StatisticsMemory& memory) {
  const auto numbers = [&](const std::vector<std::int32_t>& values) {
    return values.empty() ? nullptr : static_cast<const std::int32_t*>(memory.read(values.data(), 4 * values.size()));
  };
  ForwardInputs inputs{in(memory, call_view(c, data.inputs.q), data.inputs.q.bytes().size()),
                       in(memory, call_view(c, data.inputs.k), data.inputs.k.bytes().size()),
                       in(memory, call_view(c, data.inputs.v), data.inputs.v.bytes().size())};
  if (c.packed()) {
    inputs.sequences.b = static_cast<std::int64_t>(c.cu_q.size()) - 1;
    inputs.sequences.cu_seqlens_q = numbers(c.cu_q);
    inputs.sequences.cu_seqlens_kv = numbers(c.cu_kv);
  }
  if (!data.table.empty()) {
    inputs.sequences.seqused_kv = numbers(c.used_kv);
    inputs.cache.block_table =
        TensorView(memory.read(data.table.data(), 4 * data.table.size()), DType::i32, {c.attention.b, data.pages_each});
  }
  for (const NamedTensor& tensor : data.variant.captures) {
    inputs.captures.add(Captured(tensor.name, in(memory, tensor.view(), tensor.bytes.size())));
  }
  if (c.config.sink) inputs.sink = in(memory, data.variant.sink.view(), data.variant.sink.bytes.size());
  return inputs;
}

ForwardOutputs outputs_of(const StatisticsCase& c, StatisticsResults& results, const StatisticsMemory& memory) {
  const AttentionCase& a = c.attention;
  const Statistics& wanted = c.config.statistics;
  const auto place = [&](auto& values) { return memory.written(values.data(), 4 * values.size()); };
  ForwardOutputs outputs{call_view(c, results.o), of_heads(place(results.lse), c, a.h_q, a.s_q), {}};
  outputs.o.read_only = false;  // it is the caller's
  outputs.o.data = memory.written(results.o.bytes().data(), results.o.bytes().size());
  StatisticsOutputs& to = outputs.statistics;
  if (wanted.max_logit != MaxLogit::none) {
    to.max_logit = wanted.max_logit_by_head ? TensorView(place(results.max_logit), DType::f32, {a.h_q})
                                            : of_heads(place(results.max_logit), c, a.h_q, a.s_q);
  }
  if (wanted.entropy) to.entropy = of_heads(place(results.entropy), c, a.h_q, a.s_q);
  if (wanted.column_sums != ColumnSums::none && !c.without_sums) {
    to.column_sums = of_heads(place(results.column_sums), c, summed_heads(c), a.s_kv);
  }
  if (wanted.top_keys != 0) {
    const std::int64_t b = c.packed() ? static_cast<std::int64_t>(c.cu_q.size()) - 1 : a.b;
    to.top_keys = TensorView(place(results.top_keys), DType::i32, {b, summed_heads(c), std::int64_t{wanted.top_keys}});
  }
  return outputs;
}

StatisticsResults expected_of(const StatisticsCase& of, const StatisticsData& data) {
  StatisticsCase c = of;
  c.without_sums = false;
  AttentionConfig config = data.variant.config;
  config.host_f64 = true;
  StatisticsResults results(c);
  const StatisticsMemory memory{[](const void* bytes, std::size_t) { return const_cast<void*>(bytes); },
                                [](void* bytes, std::size_t) { return bytes; }};
  Attention::create(config, Device::host()).forward(inputs_of(c, data, memory), outputs_of(c, results, memory));
  return results;
}

double error_of(const StatisticsCase& c, const StatisticsResults& actual, const StatisticsResults& expected) {
  const double score = score_error(c);
  const double sum = 2e-5 + 8 * score, sum_relative = 1e-4 + 8 * score;
  const double rounding = c.attention.dtype == DType::bf16 ? 1.6e-2 : c.attention.dtype == DType::f16 ? 2e-3 : 1e-5;
  return std::max({worst_of(actual.max_logit, expected.max_logit, score, 1e-5),
                   worst_of(actual.entropy, expected.entropy, 2e-5 + 8 * score, 1e-5),
                   c.without_sums ? 0 : worst_of(actual.column_sums, expected.column_sums, sum, sum_relative),
                   worst_of_keys(c, actual, expected, 2 * sum, 2 * sum_relative),
                   worst_of(actual.lse, expected.lse, 1e-4 + score, 1e-5),
                   worst_of(actual.o, expected.o, rounding + 8 * score)});
}

}  // namespace fa::test
