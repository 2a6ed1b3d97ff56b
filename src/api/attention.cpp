#include <fa/attention.hpp>

#include <cstdint>
#include <future>
#include <utility>

#include "api/attention_impl.hpp"
#include "api/problem.hpp"
#include "api/validate.hpp"
#include "reference/dropout.hpp"
#include "support/text.hpp"

namespace fa {

Attention::Attention(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
Attention::Attention(Attention&&) noexcept = default;
Attention& Attention::operator=(Attention&&) noexcept = default;
Attention::~Attention() = default;

Attention Attention::create(const AttentionConfig& config, Device device) {
  return Attention(std::make_unique<Impl>(config, device));
}

void Attention::forward(const ForwardInputs& inputs, const ForwardOutputs& outputs, Stream stream,
                        Workspace workspace) const {
  impl_->forward(inputs, outputs, stream, workspace);
}

void Attention::backward(const BackwardInputs& inputs, const BackwardOutputs& outputs, Stream stream,
                         Workspace workspace) const {
  impl_->backward(inputs, outputs, stream, workspace);
}

void Attention::append(const AppendInputs& inputs, Stream stream) const {
  impl_->append(inputs, stream);
}

void Attention::schedule(const ScheduleInputs& inputs, const Schedule& memory, Stream stream) const {
  impl_->schedule(inputs, memory, stream);
}

std::size_t Attention::schedule_size(const AttentionShape& limits) const {
  return impl_->schedule_size(limits);
}

void Attention::prepare_append(const AppendShape& shape) const {
  impl_->prepare_append(shape);
}

KernelInfo Attention::append_kernel_info(const AppendShape& shape) const {
  return impl_->prepare_append(shape);
}

void Attention::merge(const MergeInputs& inputs, const ForwardOutputs& outputs, Stream stream) const {
  impl_->merge(inputs, outputs, stream);
}

void Attention::quantize(const QuantizeInputs& inputs, Stream stream) const {
  impl_->quantize(inputs, stream, false);
}

void Attention::prepare_quantize(const QuantizeInputs& inputs) const {
  impl_->quantize(inputs, nullptr, true);
}

void Attention::prepare_merge(const MergeShape& shape) const {
  impl_->prepare_merge(shape);
}

KernelInfo Attention::merge_kernel_info(const MergeShape& shape) const {
  return impl_->prepare_merge(shape);
}

void Attention::prepare(const AttentionShape& shape) const {
  impl_->prepare(api::Operation::forward, shape);
}

std::size_t Attention::mask_tiles_size(const AttentionShape& shape) const {
  return impl_->mask_tiles_size(api::Operation::forward, shape);
}

std::size_t Attention::backward_mask_tiles_size(const AttentionShape& shape) const {
  return impl_->mask_tiles_size(api::Operation::backward, shape);
}

std::size_t Attention::workspace_size(const AttentionShape& shape) const {
  return impl_->workspace_size(api::Operation::forward, shape);
}

void Attention::prepare(const AttentionShape& shape, std::span<const SharedPrefixShape> prefixes) const {
  if (prefixes.empty()) return prepare(shape);
  impl_->prepare_shared(shape, prefixes);
}

std::size_t Attention::workspace_size(const AttentionShape& shape, std::span<const SharedPrefixShape> prefixes) const {
  return prefixes.empty() ? workspace_size(shape) : impl_->shared().workspace_size(shape, prefixes);
}

std::shared_future<void> Attention::prepare_async(const AttentionShape& shape) const {
  return impl_->prepare_async(api::Operation::forward, shape);
}

std::shared_future<void> Attention::prepare_backward_async(const AttentionShape& shape) const {
  return impl_->prepare_async(api::Operation::backward, shape);
}

bool Attention::is_ready(const AttentionShape& shape) const {
  return impl_->is_ready(api::Operation::forward, shape);
}

bool Attention::backward_is_ready(const AttentionShape& shape) const {
  return impl_->is_ready(api::Operation::backward, shape);
}

KernelInfo Attention::kernel_info(const AttentionShape& shape) const {
  return impl_->prepare(api::Operation::forward, shape);
}

void Attention::prepare_backward(const AttentionShape& shape) const {
  impl_->prepare(api::Operation::backward, shape);
}

std::size_t Attention::backward_workspace_size(const AttentionShape& shape) const {
  return impl_->workspace_size(api::Operation::backward, shape);
}

KernelInfo Attention::backward_kernel_info(const AttentionShape& shape) const {
  return impl_->prepare(api::Operation::backward, shape);
}

const AttentionConfig& Attention::config() const noexcept {
  return impl_->config();
}

Device Attention::device() const noexcept {
  return impl_->device();
}

CacheCounters Attention::cache_counters() const {
  return impl_->cache_counters();
}

api::TuneReport api::TuningAccess::tune(const Attention& attention, Operation op, const AttentionShape& shape,
                                        const TuneOptions& options) {
  return attention.impl_->tune(op, shape, options);
}

bool api::KnownCallsAccess::knows(const Attention& attention, const ForwardInputs& inputs,
                                  const ForwardOutputs& outputs) {
  return attention.impl_->knows(inputs, outputs);
}

bool api::KnownCallsAccess::knows(const Attention& attention, const BackwardInputs& inputs,
                                  const BackwardOutputs& outputs) {
  return attention.impl_->knows(inputs, outputs);
}

void dropout_mask(const DropoutState& state, float probability, std::int64_t b, std::int64_t h_q, std::int64_t s_q,
                  std::int64_t s_kv, std::uint8_t* keep) {
  AttentionConfig config;
  config.head_dim = 8;
  config.dropout = probability;
  api::validate(config, true);
  api::checked(config, {.b = b, .h_q = h_q, .s_q = s_q, .s_kv = s_kv});
  const bool empty = b == 0 || h_q == 0 || s_q == 0 || s_kv == 0;
  if (keep == nullptr && !empty) support::throw_invalid("keep", "a null pointer", "memory for the mask");
  reference::dropout_mask({double{probability}, state.seed, state.offset}, b, h_q, s_q, s_kv, keep);
}

void merge_states(const Attention& attention, std::initializer_list<AttentionState> states,
                  const ForwardOutputs& outputs, Stream stream) {
  attention.merge({.states = {states.begin(), states.size()}}, outputs, stream);
}

const char* version() noexcept {
  return FA_VERSION_STRING;
}

}  // namespace fa
