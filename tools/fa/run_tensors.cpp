#include "run_tensors.hpp"

#include <chrono>
#include <utility>
#include <vector>

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

RunOutputs make_outputs(const AttentionConfig& config, const RunInputs& inputs) {
  const DType dtype = inputs.q.dtype;
  std::vector<std::int64_t> rows = inputs.q.shape;
  rows.pop_back();
  RunOutputs outputs;
  outputs.lse = make_tensor(dtype == DType::f64 ? DType::f64 : DType::f32, rows);
  rows.push_back(inputs.v.shape.back());
  outputs.o = make_tensor(dtype, rows);
  if (inputs.dout) {
    outputs.gradients = RunGradients{make_tensor(dtype, inputs.q.shape),
                                     make_tensor(dtype, inputs.k.shape),
                                     make_tensor(dtype, inputs.v.shape),
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

AttentionShape shape_of(const RunInputs& inputs) {
  const auto heads = [](const Tensor& tensor) { return tensor.shape.size() == 4 ? tensor.shape[1] : 1; };
  const auto rows = [](const Tensor& tensor) { return tensor.shape.size() < 2 ? 0 : tensor.shape.rbegin()[1]; };
  AttentionShape shape;
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
  attention.forward(forward_inputs(*inputs, [](Tensor& tensor) { return tensor.view(); }),
                    {outputs->o.view(), outputs->lse.view()});
  const Clock::time_point middle = Clock::now();
  if (inputs->dout) {
    call_backward(attention, *inputs, *outputs, [](Tensor& tensor) { return tensor.view(); }, nullptr, {});
  }
  return {milliseconds(start, middle), milliseconds(middle, Clock::now())};
}

}  // namespace fa::cli
