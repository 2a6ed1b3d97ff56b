#include "api/attention_impl.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "api/call_memory.hpp"
#include "api/paged.hpp"
#include "api/place.hpp"
#include "api/schedule.hpp"
#include "api/scratch.hpp"
#include "api/validate.hpp"
#include "plan/arch.hpp"
#include "reference/packed.hpp"
#include "support/text.hpp"

namespace fa {
namespace {

void clear(const TensorView& view, std::int64_t first, std::int64_t elements, Stream stream) {
  driver::check(driver::api().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(static_cast<float*>(view.data) + first), 0,
                                              static_cast<std::size_t>(elements) * sizeof(float), stream),
                "cuMemsetD8Async");
}

void fill(const TensorView& view, std::int64_t elements, float value, Stream stream) {
  driver::check(driver::api().cuMemsetD32Async(reinterpret_cast<CUdeviceptr>(view.data), std::bit_cast<unsigned>(value),
                                               static_cast<std::size_t>(elements), stream),
                "cuMemsetD32Async");
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

Attention::Impl::Impl(const AttentionConfig& config, Device device) : config_(config), device_(device) {
  const bool host = device.kind() == Device::Kind::host;
  api::validate(config_, host);
  functions_ = api::read_functions(config_, host);
  debug_ = api::wants_debug_kernels(config_);
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
  forward_.emplace(config_, functions_, scale, *context_, store_, *packed_, builds_);
  backward_.emplace(config_, functions_, scale, *context_, store_, *packed_, builds_);
  if (api::KnownCalls<api::ForwardOperation>::fit(config_)) {
    known_forward_.emplace(config_, functions_, *context_, *forward_);
  }
  if (api::KnownCalls<api::BackwardOperation>::fit(config_)) {
    known_backward_.emplace(config_, functions_, *context_, *backward_);
  }
  append_.emplace(config_, *context_, store_);
  merge_.emplace(config_, *context_, store_);
  quantize_.emplace(config_, *context_, store_);
  if (debug_) inspection_.emplace(config_, functions_, scale, *context_, store_);
}

CacheCounters Attention::Impl::cache_counters() const {
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

void Attention::Impl::forward(const ForwardInputs& inputs, const ForwardOutputs& outputs, Stream stream,
                              Workspace workspace) {
  if (!inputs.prefixes.empty()) return forward_shared(inputs, outputs, stream, workspace);
  const std::uint64_t code = known_forward_ ? api::code_of(inputs, outputs) : 0;
  if (known_forward_ && known_forward_->run(code, inputs, outputs, stream, workspace)) return;
  const api::ForwardCall call = api::check_forward(config_, inputs, outputs);
  api::check_takes_schedules(config_, inputs.schedule);
  api::check_unscheduled(call.max_multiprocessors, inputs.schedule);
  const api::VariantCall variant = api::check_variants(config_, functions_, call.shape, call.place, inputs);
  api::check_dump(config_, call, outputs, host_.has_value());
  api::check_disjoint(inputs, outputs, workspace);
  if (call.empty && !config_.zero_padding && !config_.statistics.any()) return;
  if (host_) return forward_on_host(call, variant, outputs.dump);
  const driver::ContextScope scope(context_->context());
  if (config_.page_size != 0) {
    packed_->check(call.sequences, call.cache, call.shape, call.k.shape[0], stream);
  } else {
    packed_->check(call.sequences, call.shape, stream);
  }
  packed_->clear(call.o, call.sequences, call.shape, false, 0, stream);
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  packed_->clear(call.lse, call.sequences, call.shape, false, kNothing, stream);
  const api::CheckedStatistics& statistics = call.statistics;
  packed_->clear(statistics.max_logit_rows, call.sequences, call.shape, false, kNothing, stream);
  packed_->clear(statistics.entropy_rows, call.sequences, call.shape, false, 0, stream);
  if (config_.page_size == 0) packed_->clear(statistics.column_sums, call.sequences, call.shape, true, 0, stream);
  if (statistics.heads > 0) fill(statistics.outputs.max_logit, statistics.heads, kNothing, stream);
  if (call.empty) {
    const TensorView& sums = statistics.outputs.column_sums;
    if (sums.defined() && sums.elements() != 0) fill(sums, sums.elements(), 0, stream);
    const TensorView& keys = statistics.outputs.top_keys;
    if (keys.defined() && keys.elements() != 0) fill(keys, keys.elements(), std::bit_cast<float>(-1), stream);
    return;
  }
  const plan::ForwardTensors tensors{call.q,       call.k,
                                     call.v,       call.o,
                                     call.lse,     variant.tensors(),
                                     call.k_scale, call.v_scale,
                                     call.q_scale, statistics.outputs,
                                     call.row_bias};
  const api::GivenTiles tiles = api::given_tiles(inputs.tiles, config_, functions_, variant);
  const auto planned = forward_->plan_for(call.shape, tensors, call.cache.seq_begin != nullptr, inputs.schedule,
                                          api::shard_of(call), stream);
  forward_->launch(planned, tensors, api::packed_args(config_, call.sequences, call.dropout, call.cache), tiles,
                   inputs.schedule, stream, workspace);
  if (known_forward_) known_forward_->keep(code, inputs, outputs, tensors, tiles, planned);
  if (!debug_) return;
  if (outputs.dump.p.defined()) inspection_->dump(call, tensors, call.place, outputs.dump, stream);
  inspection_->check(call, variant, stream);
}

void Attention::Impl::forward_on_host(const api::ForwardCall& call, const api::VariantCall& variant,
                                      const ProbabilityDump& dump) const {
  host_->forward(call, variant);
  if (!debug_ || call.empty) return;
  const api::Inspection inspection(config_, *host_, call, variant);
  if (dump.p.defined()) inspection.dump(dump);
  inspection.check();
}

void Attention::Impl::forward_shared(const ForwardInputs& inputs, const ForwardOutputs& outputs, Stream stream,
                                     Workspace workspace) {
  api::check_without_dump(outputs.dump, "nothing with shared prefixes");
  const api::SharedPrefixes& prefixes = shared();
  const api::SharedPrefixes::Call call = prefixes.check(inputs, outputs, workspace);
  if (call.empty) return forward(call.own, call.out, stream, workspace);
  const std::size_t partial = prefixes.partial_bytes(call);
  if (host_) {
    std::vector<std::byte> memory(partial);
    prefixes.run(call, memory.data(), {}, stream);
    if (!config_.zero_padding) return;
    reference::ForwardArgs written;
    written.o = call.rows.o;
    written.lse = call.rows.lse;
    return reference::clear_padding(written, call.own.sequences);
  }
  const driver::ContextScope scope(context_->context());
  if (workspace.data != nullptr) prefixes.check_workspace(call, workspace.size);
  api::Scratch scratch(workspace, partial, stream);
  auto* const data = static_cast<std::byte*>(scratch.data());
  const Workspace rest = workspace.data == nullptr ? Workspace{} : Workspace{data + partial, workspace.size - partial};
  prefixes.run(call, data, rest, stream);
  if (call.own.sequences.seqused_q != nullptr) {  // levels have whole groups: rows behind the used ones too
    packed_->clear(call.rows.o, call.own.sequences, call.shape, false, 0, stream);
    packed_->clear(call.rows.lse, call.own.sequences, call.shape, false, -std::numeric_limits<float>::infinity(),
                   stream);
  }
  scratch.release();
}

void Attention::Impl::prepare_shared(const AttentionShape& shape, std::span<const SharedPrefixShape> prefixes) {
  shared().prepare(shape, prefixes);
  if (host_) return;
  const driver::ContextScope scope(context_->context());
  packed_->prepare();
}

const api::SharedPrefixes& Attention::Impl::shared() {
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

void Attention::Impl::backward(const BackwardInputs& inputs, const BackwardOutputs& outputs, Stream stream,
                               Workspace workspace) {
  const std::uint64_t code = known_backward_ ? api::code_of(inputs, outputs) : 0;
  if (known_backward_ && known_backward_->run(code, inputs, outputs, stream, workspace)) return;
  api::check_has_backward(config_);
  const api::BackwardCall call = api::check_backward(config_, inputs, outputs);
  const api::VariantCall variant = api::check_variants(config_, functions_, call.shape, call.place, inputs, outputs);
  api::check_disjoint(inputs, outputs, workspace);
  if (host_) {
    host_->backward(call, variant);
    if (debug_ && !call.empty) api::Inspection(config_, *host_, call, variant).check();
    return;
  }
  const driver::ContextScope scope(context_->context());
  packed_->check(call.sequences, call.shape, stream);
  packed_->clear(call.dq, call.sequences, call.shape, false, 0, stream);
  packed_->clear(call.dk, call.sequences, call.shape, true, 0, stream);
  packed_->clear(call.dv, call.sequences, call.shape, true, 0, stream);
  clear_gradients(variant, call.empty, stream);
  if (call.empty) return;
  const plan::BackwardTensors tensors{call.q,    call.k,  call.v,  call.o,  call.dout,         call.lse,
                                      call.dlse, call.dq, call.dk, call.dv, variant.tensors(), call.statistics};
  const api::GivenTiles tiles = api::given_tiles(inputs.tiles, config_, functions_, variant);
  const auto planned = backward_->plan_for(call.shape, tensors, false, {}, api::shard_of(call), stream);
  backward_->launch(planned, tensors, api::packed_args(config_, call.sequences, call.dropout), tiles, {}, stream,
                    workspace);
  if (known_backward_) known_backward_->keep(code, inputs, outputs, tensors, tiles, planned);
  if (debug_) inspection_->check(call, variant, stream);
}

void Attention::Impl::append(const AppendInputs& inputs, Stream stream) {
  const api::AppendCall call = api::check_append(config_, inputs);
  if (host_) return api::append_on_host(call);
  append_->run(call, stream);
}

void Attention::Impl::schedule(const ScheduleInputs& inputs, const Schedule& memory, Stream stream) {
  const api::ScheduleCall call = api::check_schedule(config_, inputs, memory);
  if (call.empty || host_) return;
  const driver::ContextScope scope(context_->context());
  forward_->schedule(call.shape, api::packed_args(config_, call.sequences, {}, call.cache), memory, stream);
}

std::size_t Attention::Impl::schedule_size(const AttentionShape& limits) const {
  const AttentionShape shape = api::checked(config_, limits);
  return host_ || config_.page_size == 0 ? 0 : forward_->schedule_size(shape);
}

KernelInfo Attention::Impl::prepare_append(const AppendShape& shape) {
  const plan::AppendProblem problem = api::append_problem(config_, shape);
  return host_ ? api::host_append_info(config_) : append_->prepare(problem);
}

void Attention::Impl::merge(const MergeInputs& inputs, const ForwardOutputs& outputs, Stream stream) {
  const api::MergeCall call = api::check_merge(config_, inputs, outputs);
  if (host_) return api::merge_on_host(call);
  merge_->run(call, stream);
}

KernelInfo Attention::Impl::prepare_merge(const MergeShape& shape) {
  const plan::MergeProblem problem = api::merge_problem(config_, shape);
  return host_ ? api::host_merge_info(config_) : merge_->prepare(problem);
}

void Attention::Impl::quantize(const QuantizeInputs& inputs, Stream stream, bool prepares) {
  const api::QuantizeCall call = api::check_quantize(config_, inputs);
  if (host_) {
    if (!prepares) api::quantize_on_host(call);
  } else if (prepares) {
    quantize_->prepare(call);
  } else {
    quantize_->run(call, stream);
  }
}

KernelInfo Attention::Impl::prepare(api::Operation op, const AttentionShape& wanted) {
  check_has(op);
  const AttentionShape shape = api::checked(config_, wanted);
  if (host_) return host_->info(op);
  return op == api::Operation::backward ? backward_->prepare(shape) : forward_->prepare(shape);
}

std::shared_future<void> Attention::Impl::prepare_async(api::Operation op, const AttentionShape& wanted) {
  check_has(op);
  const AttentionShape shape = api::checked(config_, wanted);
  if (!host_) return builds_.start([this, op, shape] { prepare(op, shape); });
  std::promise<void> done;
  done.set_value();
  return done.get_future().share();
}

bool Attention::Impl::is_ready(api::Operation op, const AttentionShape& wanted) const {
  check_has(op);
  const AttentionShape shape = api::checked(config_, wanted);
  if (host_) return true;
  return op == api::Operation::backward ? backward_->is_ready(shape) : forward_->is_ready(shape);
}

api::TuneReport Attention::Impl::tune(api::Operation op, const AttentionShape& wanted,
                                      const api::TuneOptions& options) {
  const AttentionShape shape = api::checked(config_, wanted);
  if (host_) support::throw_unsupported("device", "host", "a GPU: the host device has one kernel");
  if (config_.page_size != 0) {
    support::throw_unsupported("page_size", config_.page_size, "0: kernels over pages are not tuned");
  }
  if (config_.varlen) support::throw_unsupported("varlen", "true", "false: packed batches are not tuned");
  if (config_.dropout > 0) support::throw_unsupported("dropout", config_.dropout, "0: dropout is not tuned");
  if (config_.accumulate && op == api::Operation::forward) {
    support::throw_unsupported("accumulate", "true", "false: kernels that add to a state are not tuned");
  }
  if (config_.statistics.any() && op == api::Operation::forward) {
    support::throw_unsupported("statistics", "given", "none: kernels of statistics are not tuned");
  }
  if (config_.statistics.any_gradient() && op == api::Operation::backward) {
    support::throw_unsupported("statistics", "with gradients",
                               "none: kernels with gradients of statistics are not tuned");
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

std::size_t Attention::Impl::workspace_size(api::Operation op, const AttentionShape& wanted) const {
  check_has(op);
  const AttentionShape shape = api::checked(config_, wanted);
  if (host_) return 0;
  return op == api::Operation::backward ? backward_->workspace_size(shape) : forward_->workspace_size(shape);
}

std::size_t Attention::Impl::mask_tiles_size(api::Operation op, const AttentionShape& wanted) const {
  check_has(op);
  const AttentionShape shape = api::checked(config_, wanted);
  if (host_) return 0;
  return op == api::Operation::backward ? backward_->mask_tiles_size(shape) : forward_->mask_tiles_size(shape);
}

}  // namespace fa
