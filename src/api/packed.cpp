#include "api/packed.hpp"

#include <utility>

#include <fa/error.hpp>

#include "api/build.hpp"
#include "api/validate.hpp"
#include "plan/planner.hpp"

namespace fa::api {
namespace {

/// A copy of `count` ints of the device; queued.
void fetch(const std::int32_t* from, std::vector<std::int32_t>* to, std::int64_t count, Stream stream) {
  if (from == nullptr || count == 0) return;
  to->resize(static_cast<std::size_t>(count));
  driver::check(driver::api().cuMemcpyDtoHAsync(to->data(), reinterpret_cast<CUdeviceptr>(from),
                                                to->size() * sizeof(std::int32_t), stream),
                "cuMemcpyDtoHAsync");
}

}  // namespace

std::vector<plan::KernelSpec> padding_specs(const AttentionConfig& config, plan::Arch arch) {
  if (!config.varlen || !config.zero_padding) return {};
  std::vector<plan::KernelSpec> specs{plan::clear_padding_spec(arch, config.dtype)};
  if (config.dtype != DType::f32) specs.push_back(plan::clear_padding_spec(arch, DType::f32));
  return specs;
}

plan::PackedArgs packed_args(const AttentionConfig& config, const PackedSequences& sequences,
                             const DropoutState& dropout) noexcept {
  plan::PackedArgs args;
  if (config.varlen) {
    args.sequences.cu_q = sequences.cu_seqlens_q;
    args.sequences.cu_kv = sequences.cu_seqlens_kv;
    args.sequences.used_q = sequences.seqused_q;
    args.sequences.used_kv = sequences.seqused_kv;
  }
  if (config.dropout > 0) {
    args.dropout = plan::dropout_params(double{config.dropout});
    args.dropout.state = dropout.device;
    args.dropout.seed = dropout.seed;
    args.dropout.offset = dropout.offset;
  }
  return args;
}

DevicePacked::DevicePacked(const AttentionConfig& config, const driver::ContextRef& context,
                           std::shared_ptr<cache::Store> store)
    : config_(config), context_(context), store_(std::move(store)) {}

const DevicePacked::Kernel& DevicePacked::get(DType dtype) {
  std::atomic<const Kernel*>& slot = slots_[static_cast<std::size_t>(dtype)];
  if (const Kernel* kernel = slot.load(std::memory_order_acquire)) return *kernel;
  const plan::KernelSpec spec = plan::clear_padding_spec(context_.info().arch, dtype);
  Supply supply(config_);
  supply.accept.driver = driver::api().version;
  const ChosenKernel chosen{spec, get_kernel(spec, *store_, supply)};
  Kernel made{load_kernel(chosen, context_, nullptr), spec.warps};
  const std::lock_guard lock(mutex_);
  if (const Kernel* kernel = slot.load(std::memory_order_acquire)) return *kernel;
  kept_.push_back(std::move(made));
  slot.store(&kept_.back(), std::memory_order_release);
  return kept_.back();
}

void DevicePacked::prepare() {
  for (const plan::KernelSpec& spec : padding_specs(config_, context_.info().arch)) get(spec.dtype);
}

void DevicePacked::check(const PackedSequences& sequences, const AttentionShape& shape, Stream stream) const {
  if (!config_.check_sequences || sequences.b == 0) return;
  if (driver::is_capturing(stream)) {
    throw Error(ErrorCode::unsupported,
                "check_sequences = true: the stream is being captured, and lengths cannot be read back then; prepare "
                "the call with them unchecked",
                {{"argument", "check_sequences"}, {"value", "true"}, {"accepted", "false while a stream is captured"}});
  }
  std::vector<std::int32_t> cu_q, cu_kv, used_q, used_kv;
  fetch(sequences.cu_seqlens_q, &cu_q, sequences.b + 1, stream);
  fetch(sequences.cu_seqlens_kv, &cu_kv, sequences.b + 1, stream);
  fetch(sequences.seqused_q, &used_q, sequences.b, stream);
  fetch(sequences.seqused_kv, &used_kv, sequences.b, stream);
  driver::check(driver::api().cuStreamSynchronize(stream), "cuStreamSynchronize");
  PackedSequences host = sequences;
  host.cu_seqlens_q = cu_q.data();
  host.cu_seqlens_kv = cu_kv.data();
  host.seqused_q = used_q.empty() ? nullptr : used_q.data();
  host.seqused_kv = used_kv.empty() ? nullptr : used_kv.data();
  check_lengths(host, shape);
}

void DevicePacked::clear(const TensorView& view, const PackedSequences& sequences, const AttentionShape& shape,
                         bool keys, float value, Stream stream) {
  if (!config_.zero_padding || !view.defined() || view.elements() == 0) return;
  const Kernel& kernel = get(view.dtype);
  plan::PaddingLaunch launch = plan::padding_launch(
      view, sequences.b, keys ? sequences.cu_seqlens_kv : sequences.cu_seqlens_q,
      keys ? sequences.seqused_kv : sequences.seqused_q, keys ? shape.s_kv : shape.s_q, value, kernel.warps);
  driver::launch(kernel.loaded->function(), static_cast<unsigned>(launch.grid),
                 static_cast<unsigned>(kernel.warps * 32), 0, stream, &launch.params);
}

}  // namespace fa::api
