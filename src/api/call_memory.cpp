#include "api/call_memory.hpp"

namespace fa::api {

CallSpans::Span CallSpans::span_of(const Reach& reach) noexcept {
  constexpr std::int64_t kNowhere = std::int64_t{1} << 62;  // the sum with a near distance stays within 64 bits
  return reach.empty ? Span{kNowhere, -kNowhere} : Span{reach.low, reach.high};
}

CallSpans::CallSpans(const CallTensors& tensors) noexcept {
  for (const CallTensors::Item& item : tensors.read()) read_[reads_++] = span_of(item.reach);
  for (const CallTensors::Item& item : tensors.written()) written_[writes_++] = span_of(item.reach);
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
  for (std::size_t i = 0; i < at.memories_; ++i) {
    const auto [data, high] = at.memory_[i];
    for (std::size_t j = 0; j < reads_; ++j) {
      meet |= spans_meet(data, 0, high, at.read_[j], read_[j].low, read_[j].high);
    }
    for (std::size_t j = 0; j < writes_; ++j) {
      meet |= spans_meet(data, 0, high, at.written_[j], written_[j].low, written_[j].high);
    }
    for (std::size_t j = 0; j < i; ++j) meet |= spans_meet(data, 0, high, at.memory_[j].data, 0, at.memory_[j].high);
  }
  return !meet;
}

namespace {

/// The tensors of a call with their names.
template <class Inputs, class Outputs>
struct Named {
  Named(const Inputs& inputs, const Outputs& outputs) { name_memory(inputs, outputs, tensors); }
  CallTensors tensors;
};

}  // namespace

CallSpans spans_of(const ForwardInputs& inputs, const ForwardOutputs& outputs) {
  return CallSpans(Named(inputs, outputs).tensors);
}

CallSpans spans_of(const BackwardInputs& inputs, const BackwardOutputs& outputs) {
  return CallSpans(Named(inputs, outputs).tensors);
}

void check_disjoint(const ForwardInputs& inputs, const ForwardOutputs& outputs, const Workspace& workspace) {
  Named named(inputs, outputs);
  name_given_memory(inputs, workspace, named.tensors);
  named.tensors.check_disjoint();
}

void check_disjoint(const BackwardInputs& inputs, const BackwardOutputs& outputs, const Workspace& workspace) {
  Named named(inputs, outputs);
  name_given_memory(inputs, workspace, named.tensors);
  named.tensors.check_disjoint();
}

}  // namespace fa::api
