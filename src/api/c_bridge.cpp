#include <fa/c_bridge.hpp>

#include "api/c_structs.hpp"
#include "api/views.hpp"
#include "support/text.hpp"

namespace fa::c_bridge {

AttentionConfig to_config(const fa_config* source) {
  return api::c::to_config(source);
}

ForwardInputs to_inputs(const fa_forward_inputs* source) {
  return api::c::to_inputs(source);
}

ForwardOutputs to_outputs(const fa_forward_outputs* source) {
  return api::c::to_outputs(source);
}

BackwardInputs to_inputs(const fa_backward_inputs* source) {
  return api::c::to_inputs(source);
}

BackwardOutputs to_outputs(const fa_backward_outputs* source) {
  return api::c::to_outputs(source);
}

TensorView to_view(const fa_tensor* source, const char* argument) {
  return api::c::to_view(source, argument);
}

void check_tensors(std::span<const NamedTensor> read, std::span<const NamedTensor> written) {
  const auto label = [](const NamedTensor& tensor) { return api::Label(tensor.name, api::Label::Of::argument); };
  for (const NamedTensor& tensor : read) {
    if (tensor.view.defined()) api::check_memory(label(tensor), tensor.view);
  }
  for (std::size_t i = 0; i < written.size(); ++i) {
    const NamedTensor& output = written[i];
    if (!output.view.defined()) continue;
    api::check_memory(label(output), output.view);
    api::check_writable(label(output), output.view);
    const auto check = [&](const NamedTensor& other) {
      if (!api::overlap(output.view, other.view)) return;
      support::throw_invalid(output.name, fmt::format("memory shared with {}", other.name),
                             "an output that overlaps no other tensor");
    };
    for (const NamedTensor& other : read) check(other);
    for (const NamedTensor& other : written.first(i)) check(other);
  }
}

}  // namespace fa::c_bridge
