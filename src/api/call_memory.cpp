#include "api/call_memory.hpp"

namespace fa::api {

CallSpans::Span CallSpans::span_of(const TensorView& view) noexcept {
  constexpr std::int64_t kNowhere = std::int64_t{1} << 62;  // the sum with a near distance stays within 64 bits
  const Reach reach = reach_of(view);
  return reach.empty ? Span{kNowhere, -kNowhere} : Span{reach.low, reach.high};
}

bool CallSpans::are_apart(const CallAddresses& at) const noexcept {
  bool meet = false;
  for (std::size_t i = 0; i < writes_; ++i) {
    const auto [low, high] = written_[i];
    for (std::size_t j = 0; j < reads_; ++j) {
      meet |= spans_meet(at.written_[i], low, high, at.read_[j], read_[j].low, read_[j].high);
    }
    for (std::size_t j = 0; j < i; ++j) {
      meet |= spans_meet(at.written_[i], low, high, at.written_[j], written_[j].low, written_[j].high);
    }
  }
  return !meet;
}

void check_disjoint(const ForwardInputs& inputs, const ForwardOutputs& outputs) {
  CallTensors tensors;
  name_memory(inputs, outputs, tensors);
  tensors.check_disjoint();
}

void check_disjoint(const BackwardInputs& inputs, const BackwardOutputs& outputs) {
  CallTensors tensors;
  name_memory(inputs, outputs, tensors);
  tensors.check_disjoint();
}

}  // namespace fa::api
