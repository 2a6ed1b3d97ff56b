#include <fa/attention.hpp>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "api/append.hpp"
#include "api/device_operation.hpp"
#include "api/host_attention.hpp"
#include "api/merge_states.hpp"
#include "api/packed.hpp"
#include "api/paged.hpp"
#include "api/problem.hpp"
#include "api/schedule.hpp"
#include "api/scratch.hpp"
#include "api/shared_prefixes.hpp"
#include "api/tuning.hpp"
#include "api/validate.hpp"
#include "api/variants.hpp"
#include "cache/store.hpp"
#include "driver/driver.hpp"
#include "plan/arch.hpp"
#include "reference/dropout.hpp"
#include "support/text.hpp"

namespace fa {
namespace {

void clear(const TensorView& view, std::int64_t first, std::int64_t elements, Stream stream) {
  driver::check(driver::api().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(static_cast<float*>(view.data) + first), 0,
                                              static_cast<std::size_t>(elements) * sizeof(float), stream),
                "cuMemsetD8Async");
}

/// Gradients of captures are added to from zero. That of the sinks has a kernel, unless the call has no work for any.
void clear_gradients(const api::VariantCall& variant, bool empty, Stream stream) {
  for (const expression::CapturedView& captured : variant.views()) {
    const TensorView& view = captured.gradient;
    const std::int64_t elements = view.defined() ? view.elements() : 0;
    if (elements != 0) clear(view, 0, elements, stream);
  }
  if (!empty || !variant.dsink.defined()) return;
  for (std::int64_t h = 0; h < variant.dsink.shape[0]; ++h) {
    clear(variant.dsink, h * variant.dsink.strides[0], 1, stream);
  }
}

}  // namespace

class Attention::Impl {
 public:
  Impl(const AttentionConfig& config, Device device) : config_(config), device_(device) {
    const bool host = device.kind() == Device::Kind::host;
    api::validate(config_, host);
    functions_ = api::read_functions(config_, host);
    api::cache_pack_pins(config_.cache);
    api::tune_sources(config_, api::Operation::forward);
    const double scale = config_.scale ? double{*config_.scale} : 1.0 / std::sqrt(double(config_.head_dim));
    if (host) {
      host_.emplace(config_, functions_, scale);
      return;
    }
    context_.emplace(driver::ContextRef::acquire(device));
    device_ = Device::cuda(context_->info().ordinal);
    plan::limits(context_->info().arch);
    store_ = api::open_store(config_.cache, driver::api().version);
    packed_.emplace(config_, *context_, store_);
    forward_.emplace(config_, functions_, scale, *context_, store_, *packed_);
    backward_.emplace(config_, functions_, scale, *context_, store_, *packed_);
    append_.emplace(config_, *context_, store_);
    merge_.emplace(config_, *context_, store_);
  }

  const AttentionConfig& config() const noexcept { return config_; }
  Device device() const noexcept { return device_; }

  CacheCounters cache_counters() const {
    if (store_ == nullptr) return {};
    const cache::Counters from = store_->counters();
    return {.memory_hits = from.memory_hits,
            .pack_hits = from.pack_hits,
            .disk_hits = from.disk_hits,
            .compiles = from.builds,
            .damaged = from.damaged,
            .unaccepted = from.unaccepted,
            .publish_failures = from.publish_failures,
            .evictions = from.evictions};
  }

  void forward(const ForwardInputs& inputs, const ForwardOutputs& outputs, Stream stream, Workspace workspace) {
    if (!inputs.prefixes.empty()) return forward_shared(inputs, outputs, stream, workspace);
    const api::ForwardCall call = api::check_forward(config_, inputs, outputs);
    api::check_takes_schedules(config_, inputs.schedule);
    api::check_unscheduled(call.max_multiprocessors, inputs.schedule);
    const api::VariantCall variant = api::check_variants(config_, functions_, call.shape, call.place, inputs);
    api::check_disjoint(inputs, outputs);
    if (call.empty && !config_.zero_padding) return;
    if (host_) return host_->forward(call, variant);
    const driver::ContextScope scope(context_->context());
    if (config_.page_size > 0) {
      packed_->check(call.sequences, call.cache, call.shape, call.k.shape[0], stream);
    } else {
      packed_->check(call.sequences, call.shape, stream);
    }
    packed_->clear(call.o, call.sequences, call.shape, false, 0, stream);
    packed_->clear(call.lse, call.sequences, call.shape, false, -std::numeric_limits<float>::infinity(), stream);
    if (call.empty) return;
    forward_->run(
        call.shape,
        {call.q, call.k, call.v, call.o, call.lse, variant.tensors(), call.k_scale, call.v_scale, call.q_scale},
        api::packed_args(config_, call.sequences, call.dropout, call.cache),
        api::given_tiles(inputs.tiles, config_, functions_, variant), inputs.schedule, api::shard_of(call), stream,
        workspace);
  }

  void forward_shared(const ForwardInputs& inputs, const ForwardOutputs& outputs, Stream stream, Workspace workspace) {
    const api::SharedPrefixes& prefixes = shared();
    const api::SharedPrefixes::Call call = prefixes.check(inputs, outputs);
    if (call.empty) return forward(call.own, call.out, stream, workspace);
    const std::size_t partial = prefixes.partial_bytes(call);
    if (host_) {
      std::vector<std::byte> memory(partial);
      return prefixes.run(call, memory.data(), {}, stream);
    }
    const driver::ContextScope scope(context_->context());
    if (workspace.data != nullptr) prefixes.check_workspace(call, workspace.size);
    api::Scratch scratch(workspace, partial, stream);
    auto* const data = static_cast<std::byte*>(scratch.data());
    const Workspace rest =
        workspace.data == nullptr ? Workspace{} : Workspace{data + partial, workspace.size - partial};
    prefixes.run(call, data, rest, stream);
    scratch.release();
  }

  /// Made when it is first asked for. Not by std::call_once: what cannot be made throws, and an exception does not pass
  /// through pthread_once in a program that has its own libgcc.
  const api::SharedPrefixes& shared() {
    if (const api::SharedPrefixes* const made = shared_made_.load(std::memory_order_acquire)) return *made;
    const std::lock_guard lock(shared_mutex_);
    if (!shared_) {
      if (host_) {
        shared_.emplace(config_, functions_, device_);
      } else {
        const driver::ContextScope scope(context_->context());
        shared_.emplace(config_, functions_, Device::current());
      }
    }
    shared_made_.store(&*shared_, std::memory_order_release);
    return *shared_;
  }

  void backward(const BackwardInputs& inputs, const BackwardOutputs& outputs, Stream stream, Workspace workspace) {
    api::check_has_backward(config_);
    const api::BackwardCall call = api::check_backward(config_, inputs, outputs);
    const api::VariantCall variant = api::check_variants(config_, functions_, call.shape, call.place, inputs, outputs);
    api::check_disjoint(inputs, outputs);
    if (host_) return host_->backward(call, variant);
    const driver::ContextScope scope(context_->context());
    packed_->check(call.sequences, call.shape, stream);
    packed_->clear(call.dq, call.sequences, call.shape, false, 0, stream);
    packed_->clear(call.dk, call.sequences, call.shape, true, 0, stream);
    packed_->clear(call.dv, call.sequences, call.shape, true, 0, stream);
    clear_gradients(variant, call.empty, stream);
    if (call.empty) return;
    backward_->run(
        call.shape,
        {call.q, call.k, call.v, call.o, call.dout, call.lse, call.dlse, call.dq, call.dk, call.dv, variant.tensors()},
        api::packed_args(config_, call.sequences, call.dropout),
        api::given_tiles(inputs.tiles, config_, functions_, variant), {}, api::shard_of(call), stream, workspace);
  }

  void append(const AppendInputs& inputs, Stream stream) {
    const api::AppendCall call = api::check_append(config_, inputs);
    if (host_) return api::append_on_host(call);
    append_->run(call, stream);
  }

  void schedule(const ScheduleInputs& inputs, const Schedule& memory, Stream stream) {
    const api::ScheduleCall call = api::check_schedule(config_, inputs);
    if (call.empty || host_) return;
    const driver::ContextScope scope(context_->context());
    forward_->schedule(call.shape, api::packed_args(config_, call.sequences, {}, call.cache), memory, stream);
  }

  std::size_t schedule_size(const AttentionShape& limits) const {
    const AttentionShape shape = api::checked(config_, limits);
    return host_ || config_.page_size == 0 ? 0 : forward_->schedule_size(shape);
  }

  KernelInfo prepare_append(const AppendShape& shape) {
    const plan::AppendProblem problem = api::append_problem(config_, shape);
    return host_ ? api::host_append_info(config_) : append_->prepare(problem);
  }

  void merge(const MergeInputs& inputs, const ForwardOutputs& outputs, Stream stream) {
    const api::MergeCall call = api::check_merge(config_, inputs, outputs);
    if (host_) return api::merge_on_host(call);
    merge_->run(call, stream);
  }

  KernelInfo prepare_merge(const MergeShape& shape) {
    const plan::MergeProblem problem = api::merge_problem(config_, shape);
    return host_ ? api::host_merge_info(config_) : merge_->prepare(problem);
  }

  KernelInfo prepare(api::Operation op, const AttentionShape& wanted) {
    check_has(op);
    const AttentionShape shape = api::checked(config_, wanted);
    if (host_) return host_->info(op);
    return op == api::Operation::backward ? backward_->prepare(shape) : forward_->prepare(shape);
  }

  /// A decision about `op` for `shape`, whatever is known already.
  api::TuneReport tune(api::Operation op, const AttentionShape& wanted, const api::TuneOptions& options) {
    const AttentionShape shape = api::checked(config_, wanted);
    if (host_) support::throw_unsupported("device", "host", "a GPU: the host device has one kernel");
    if (config_.page_size > 0) {
      support::throw_unsupported("page_size", config_.page_size, "0: kernels over pages are not tuned");
    }
    if (config_.varlen) support::throw_unsupported("varlen", "true", "false: packed batches are not tuned");
    if (config_.dropout > 0) support::throw_unsupported("dropout", config_.dropout, "0: dropout is not tuned");
    if (config_.accumulate && op == api::Operation::forward) {
      support::throw_unsupported("accumulate", "true", "false: kernels that add to a state are not tuned");
    }
    if (config_.k_dtype || config_.v_dtype) {
      support::throw_unsupported("k_dtype", "given", "none: kernels over K and V of 8 bits are not tuned");
    }
    if (!api::is_plain(config_)) {
      support::throw_unsupported("config", "functions, windows, chunks or sinks", "none: these are not tuned");
    }
    const driver::ContextScope scope(context_->context());
    return op == api::Operation::backward ? backward_->tune(shape, options) : forward_->tune(shape, options);
  }

  std::size_t workspace_size(api::Operation op, const AttentionShape& wanted) const {
    check_has(op);
    const AttentionShape shape = api::checked(config_, wanted);
    if (host_) return 0;
    return op == api::Operation::backward ? backward_->workspace_size(shape) : forward_->workspace_size(shape);
  }

  std::size_t mask_tiles_size(api::Operation op, const AttentionShape& wanted) const {
    check_has(op);
    const AttentionShape shape = api::checked(config_, wanted);
    if (host_) return 0;
    return op == api::Operation::backward ? backward_->mask_tiles_size(shape) : forward_->mask_tiles_size(shape);
  }

 private:
  void check_has(api::Operation op) const {
    if (op == api::Operation::backward) api::check_has_backward(config_);
  }

  AttentionConfig config_;
  plan::Fixed fixed_;  ///< by its override
  api::Functions functions_;
  Device device_;
  std::optional<api::HostAttention> host_;  ///< on the host device; what follows on others
  std::optional<driver::ContextRef> context_;
  std::shared_ptr<cache::Store> store_;
  std::optional<api::DevicePacked> packed_;
  std::optional<api::DeviceOperation<api::ForwardOperation>> forward_;
  std::optional<api::DeviceOperation<api::BackwardOperation>> backward_;
  std::optional<api::DeviceAppend> append_;
  std::optional<api::DeviceMerge> merge_;
  std::mutex shared_mutex_;
  std::optional<api::SharedPrefixes> shared_;  ///< of calls with shared prefixes
  std::atomic<const api::SharedPrefixes*> shared_made_ = nullptr;
};

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
  impl_->shared().prepare(shape, prefixes);
}

std::size_t Attention::workspace_size(const AttentionShape& shape, std::span<const SharedPrefixShape> prefixes) const {
  return prefixes.empty() ? workspace_size(shape) : impl_->shared().workspace_size(shape, prefixes);
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
