#include "api/packed.hpp"

#include <algorithm>
#include <utility>

#include <fa/error.hpp>

#include "api/build.hpp"
#include "api/host_sequences.hpp"
#include "api/paged.hpp"
#include "api/problem.hpp"
#include "api/validate.hpp"
#include "driver/nvtx.hpp"
#include "plan/planner.hpp"

namespace fa::api {

std::vector<plan::KernelSpec> padding_specs(const AttentionConfig& config, plan::Arch arch) {
  if (!config.varlen || !config.zero_padding) return {};
  std::vector<plan::KernelSpec> specs{plan::clear_padding_spec(arch, o_dtype_of(config))};
  if (config.dtype != DType::f32) specs.push_back(plan::clear_padding_spec(arch, DType::f32));
  return specs;
}

plan::PackedArgs packed_args(const AttentionConfig& config, const PackedSequences& sequences,
                             const DropoutState& dropout, const PagedCache& cache) noexcept {
  plan::PackedArgs args;
  if (config.page_size != 0) {
    args.paged.table = static_cast<const std::int32_t*>(cache.block_table.data);
    args.paged.batch_index = cache.batch_index;
    args.paged.begin = cache.seq_begin;
    args.paged.stride_row = cache.block_table.strides[0];
    args.paged.stride_page = cache.block_table.strides[1];
    args.paged.rows = static_cast<std::int32_t>(cache.block_table.shape[0]);
  }
  if (config.varlen || config.page_size != 0) {
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
  supply.command = [&] { return remedy(spec, config_); };
  const ChosenKernel chosen = choose_kernel({&spec, 1}, *store_, supply);
  Kernel made{load_kernel(chosen, context_, nullptr), spec.warps, canonical(spec)};
  const std::lock_guard lock(mutex_);
  if (const Kernel* kernel = slot.load(std::memory_order_acquire)) return *kernel;
  kept_.push_back(std::move(made));
  slot.store(&kept_.back(), std::memory_order_release);
  return kept_.back();
}

void DevicePacked::prepare() {
  for (const plan::KernelSpec& spec : padding_specs(config_, context_.info().arch)) get(spec.dtype);
}

bool DevicePacked::checks(const PackedSequences& sequences, Stream stream) const {
  if (!config_.check_sequences || sequences.b == 0) return false;
  if (driver::is_capturing(stream)) {
    throw Error(ErrorCode::unsupported,
                "check_sequences = true: the stream is being captured, and lengths cannot be read back then; prepare "
                "the call with them unchecked",
                {{"argument", "check_sequences"}, {"value", "true"}, {"accepted", "false while a stream is captured"}});
  }
  return true;
}

void DevicePacked::check(const PackedSequences& sequences, const AttentionShape& shape, Stream stream) const {
  if (!checks(sequences, stream)) return;
  const HostSequences host(sequences, stream);
  driver::check(driver::api().cuStreamSynchronize(stream), "cuStreamSynchronize");
  check_lengths(host.sequences, shape);
}

void DevicePacked::check(const PackedSequences& sequences, const PagedCache& cache, const AttentionShape& shape,
                         std::int64_t pages, Stream stream) const {
  if (!checks(sequences, stream)) return;
  const HostSequences host(sequences, stream);
  const HostCache table(cache, sequences.b, stream);
  driver::check(driver::api().cuStreamSynchronize(stream), "cuStreamSynchronize");
  check_requests(config_, host.sequences, table.cache, shape, pages);
}

void DevicePacked::clear(const TensorView& view, const PackedSequences& sequences, const AttentionShape& shape,
                         bool keys, float value, Stream stream) {
  if (!config_.zero_padding || !view.defined() || view.elements() == 0) return;
  const Kernel& kernel = get(view.dtype);
  plan::PaddingLaunch launch = plan::padding_launch(
      view, sequences.b, keys ? sequences.cu_seqlens_kv : sequences.cu_seqlens_q,
      keys ? sequences.seqused_kv : sequences.seqused_q, keys ? shape.s_kv : shape.s_q, value, kernel.warps);
  const driver::NvtxRange range(kernel.spec.c_str());
  driver::launch(kernel.loaded->function(), static_cast<unsigned>(launch.grid),
                 static_cast<unsigned>(kernel.warps * 32), 0, stream, &launch.params);
}

}  // namespace fa::api
