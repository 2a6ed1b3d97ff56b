#include "run_tensors.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "elements.hpp"

namespace fa::cli {

using tools::Tensor;

Tensor make_tensor(DType dtype, std::vector<std::int64_t> shape) {
  std::size_t elements = 1;
  for (const std::int64_t size : shape) {
    elements *= static_cast<std::size_t>(size);
  }
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  tensor.bytes.resize(elements * size_of(dtype));
  return tensor;
}

PackedSequences RunInputs::sequences(const std::int32_t* cu_q, const std::int32_t* cu_kv) const noexcept {
  if (!packed()) return {};
  PackedSequences result;
  result.b = static_cast<std::int64_t>(cumulative_q.size()) - 1;
  result.cu_seqlens_q = cu_q;
  if (!cache) result.cu_seqlens_kv = cu_kv;
  return result;
}

std::int64_t RunInputs::d_v() const {
  if (value_in_key > 0) return value_in_key;
  return v->shape.back() * (v->dtype == DType::u4x2 ? 2 : 1);
}

DType output_dtype(const AttentionConfig& config) {
  return has_codes(config.dtype) ? config.o_dtype.value_or(DType::bf16) : config.dtype;
}

namespace {

/// Those of rows are of the shape `rows`.
void add_statistics(const AttentionConfig& config, const RunInputs& inputs, const std::vector<std::int64_t>& rows,
                    RunOutputs* outputs) {
  const Statistics& wanted = config.statistics;
  const DType dtype = outputs->lse.dtype;
  const AttentionShape shape = shape_of(inputs);
  if (wanted.max_logit != MaxLogit::none) {
    outputs->statistics["max_logit"] =
        make_tensor(dtype, wanted.max_logit_by_head ? std::vector<std::int64_t>{shape.h_q} : rows);
  }
  if (wanted.entropy) outputs->statistics["entropy"] = make_tensor(dtype, rows);
  if (wanted.top_keys > 0) {
    const bool of_kv = wanted.summed_heads() == ColumnSums::kv_heads;
    outputs->statistics["top_keys"] =
        make_tensor(DType::i32, {shape.b, of_kv ? shape.h_kv : shape.h_q, wanted.top_keys});
  }
  if (wanted.column_sums == ColumnSums::none) return;
  if (inputs.cache) {
    const std::int64_t heads = wanted.column_sums == ColumnSums::kv_heads ? shape.h_kv : shape.h_q;
    outputs->statistics["column_sums"] = make_tensor(dtype, {shape.b, heads, shape.s_kv});
    return;
  }
  std::vector<std::int64_t> keys = inputs.k.shape;
  keys.pop_back();
  const bool of_query_heads = wanted.column_sums == ColumnSums::query_heads;
  if (inputs.packed()) std::swap(keys.front(), keys.back());
  const std::size_t heads = inputs.packed() ? 0 : 1;
  if (of_query_heads && (inputs.packed() || keys.size() == 3)) keys[heads] = shape.h_q;
  outputs->statistics["column_sums"] = make_tensor(dtype, keys);
}

/// Of a packed batch, and over a cache, of its sequence alone.
void add_dump(const RunInputs& inputs, RunOutputs* outputs) {
  if (!inputs.dump) return;
  const AttentionShape shape = shape_of(inputs);
  const std::int64_t b = inputs.dump->b;
  const bool there = b >= 0 && b < shape.b;  // else the call is refused
  const auto length = [&](const std::vector<std::int32_t>& sums) -> std::int64_t {
    const auto at = static_cast<std::size_t>(b);
    return there ? sums[at + 1] - sums[at] : 0;
  };
  std::int64_t rows = inputs.packed() ? length(inputs.cumulative_q) : shape.s_q;
  std::int64_t keys = inputs.packed() && !inputs.cache ? length(inputs.cumulative_kv) : shape.s_kv;
  if (inputs.cache && there) {
    std::int32_t used = 0;
    std::memcpy(&used, inputs.cache->seqused_kv.bytes.data() + static_cast<std::size_t>(b) * sizeof used, sizeof used);
    keys = std::clamp<std::int64_t>(used, 0, shape.s_kv);
  }
  outputs->statistics["p"] = make_tensor(outputs->lse.dtype, {rows, keys});
  outputs->dump = inputs.dump;
}

/// What rows of no sequence have, where no call writes it.
void fill_without_keys(Tensor* lse) {
  const std::size_t count = lse->bytes.size() / size_of(lse->dtype);
  for (std::size_t i = 0; i < count; ++i) {
    store_element(lse->bytes.data(), lse->dtype, i, -std::numeric_limits<double>::infinity());
  }
}

}  // namespace

RunOutputs make_outputs(const AttentionConfig& config, const RunInputs& inputs) {
  const DType dtype = output_dtype(config);
  std::vector<std::int64_t> rows = inputs.q.shape;
  rows.pop_back();
  RunOutputs outputs;
  std::vector<std::int64_t> statistic = rows;
  if (inputs.packed()) std::swap(statistic.front(), statistic.back());
  outputs.lse = make_tensor(dtype == DType::f64 ? DType::f64 : DType::f32, statistic);
  if (config.varlen && !config.zero_padding) fill_without_keys(&outputs.lse);
  rows.push_back(inputs.d_v());
  outputs.o = make_tensor(dtype, rows);
  add_statistics(config, inputs, statistic, &outputs);
  add_dump(inputs, &outputs);
  if (inputs.dout) {
    outputs.gradients = RunGradients{make_tensor(dtype, inputs.q.shape),
                                     make_tensor(dtype, inputs.k.shape),
                                     make_tensor(dtype, inputs.v->shape),
                                     {},
                                     std::nullopt};
    const DType statistics = outputs.lse.dtype;
    for (const Capture& capture : config.score.captures) {
      if (!capture.requires_grad) continue;
      outputs.gradients->captures[capture.name] = make_tensor(statistics, inputs.captures.at(capture.name).shape);
    }
    if (inputs.sink) outputs.gradients->dsink = make_tensor(statistics, inputs.sink->shape);
  }
  return outputs;
}

namespace {

AttentionShape shape_of_cache(const RunInputs& inputs) {
  const std::vector<std::int64_t>&q = inputs.q.shape, &pool = inputs.k.shape;
  const RunCache& cache = *inputs.cache;
  AttentionShape shape;
  shape.b = cache.seqused_kv.shape[0];
  shape.h_q = q[1];
  shape.h_kv = pool[cache.nhd ? 2 : 1];
  shape.s_q = inputs.packed() ? 0 : q[2];
  shape.s_kv = pool[cache.nhd ? 1 : 2] * (cache.block_table ? cache.block_table->shape[1] : 1);
  shape.total_q = inputs.packed() ? q[0] : 0;
  return shape;
}

}  // namespace

AttentionShape shape_of(const RunInputs& inputs) {
  const auto heads = [](const Tensor& tensor) { return tensor.shape.size() == 4 ? tensor.shape[1] : 1; };
  const auto rows = [](const Tensor& tensor) { return tensor.shape.size() < 2 ? 0 : tensor.shape.rbegin()[1]; };
  AttentionShape shape;
  if (inputs.cache) return shape_of_cache(inputs);
  if (inputs.packed()) {
    shape.b = inputs.sequences().b;
    shape.h_q = rows(inputs.q);
    shape.h_kv = rows(inputs.k);
    shape.s_q = shape.s_kv = 0;
    shape.total_q = inputs.q.shape.front();
    shape.total_kv = inputs.k.shape.empty() ? 0 : inputs.k.shape.front();
    return shape;
  }
  shape.b = inputs.q.shape[0];
  shape.h_q = heads(inputs.q);
  shape.h_kv = heads(inputs.k);
  shape.s_q = rows(inputs.q);
  shape.s_kv = rows(inputs.k);
  return shape;
}

RunTimes run_on_host(const Attention& attention, RunInputs* inputs, RunOutputs* outputs) {
  using Clock = std::chrono::steady_clock;
  const auto milliseconds = [](Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double, std::milli>(to - from).count();
  };
  const Clock::time_point start = Clock::now();
  attention.forward(forward_inputs(
                        *inputs, [](Tensor& tensor) { return tensor.view(); }, inputs->sequences(), inputs->dropout),
                    forward_outputs(*outputs, [](Tensor& tensor) { return tensor.view(); }));
  const Clock::time_point middle = Clock::now();
  if (inputs->dout) {
    call_backward(attention, *inputs, *outputs, [](Tensor& tensor) { return tensor.view(); }, inputs->sequences(),
                  inputs->dropout, nullptr, {});
  }
  return {milliseconds(start, middle), milliseconds(middle, Clock::now())};
}

}  // namespace fa::cli
