#include <fa/c_bridge.hpp>

#include "api/c_structs.hpp"

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

}  // namespace fa::c_bridge
