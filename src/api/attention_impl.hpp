#ifndef FA_SRC_API_ATTENTION_IMPL_HPP_
#define FA_SRC_API_ATTENTION_IMPL_HPP_

#include <atomic>
#include <cstddef>
#include <future>
#include <memory>
#include <mutex>
#include <optional>

#include <fa/attention.hpp>

#include "api/append.hpp"
#include "api/build_queue.hpp"
#include "api/device_operation.hpp"
#include "api/host_attention.hpp"
#include "api/inspect.hpp"
#include "api/known_calls.hpp"
#include "api/merge_states.hpp"
#include "api/operations.hpp"
#include "api/packed.hpp"
#include "api/problem.hpp"
#include "api/quantize.hpp"
#include "api/shared_prefixes.hpp"
#include "api/tuning.hpp"
#include "api/validate.hpp"
#include "api/variants.hpp"
#include "cache/store.hpp"
#include "driver/driver.hpp"

namespace fa {

/// An Attention: each call is checked, and then goes to the host device or to the operations of a GPU.
class Attention::Impl {
 public:
  Impl(const AttentionConfig& config, Device device);
  const AttentionConfig& config() const noexcept { return config_; }
  Device device() const noexcept { return device_; }
  CacheCounters cache_counters() const;
  void forward(const ForwardInputs& inputs, const ForwardOutputs& outputs, Stream stream, Workspace workspace);
  void forward_shared(const ForwardInputs& inputs, const ForwardOutputs& outputs, Stream stream, Workspace workspace);
  /// Made when it is first asked for. Not by std::call_once: what cannot be made throws, and an exception does not pass
  /// through pthread_once in a program that has its own libgcc.
  const api::SharedPrefixes& shared();
  void prepare_shared(const AttentionShape& shape, std::span<const SharedPrefixShape> prefixes);
  void backward(const BackwardInputs& inputs, const BackwardOutputs& outputs, Stream stream, Workspace workspace);
  bool knows(const ForwardInputs& inputs, const ForwardOutputs& outputs) {
    return known_forward_ && known_forward_->knows(inputs, outputs);
  }
  bool knows(const BackwardInputs& inputs, const BackwardOutputs& outputs) {
    return known_backward_ && known_backward_->knows(inputs, outputs);
  }
  void append(const AppendInputs& inputs, Stream stream);
  void schedule(const ScheduleInputs& inputs, const Schedule& memory, Stream stream);
  std::size_t schedule_size(const AttentionShape& limits) const;
  KernelInfo prepare_append(const AppendShape& shape);
  void merge(const MergeInputs& inputs, const ForwardOutputs& outputs, Stream stream);
  KernelInfo prepare_merge(const MergeShape& shape);
  /// `prepares`: makes kernels ready, and runs none.
  void quantize(const QuantizeInputs& inputs, Stream stream, bool prepares);
  KernelInfo prepare(api::Operation op, const AttentionShape& wanted);
  std::shared_future<void> prepare_async(api::Operation op, const AttentionShape& wanted);
  bool is_ready(api::Operation op, const AttentionShape& wanted) const;
  /// A decision about `op` for `shape`, whatever is known already.
  api::TuneReport tune(api::Operation op, const AttentionShape& wanted, const api::TuneOptions& options);
  std::size_t workspace_size(api::Operation op, const AttentionShape& wanted) const;
  std::size_t mask_tiles_size(api::Operation op, const AttentionShape& wanted) const;

 private:
  void forward_on_host(const api::ForwardCall& call, const api::VariantCall& variant,
                       const ProbabilityDump& dump) const;
  void check_has(api::Operation op) const {
    if (op == api::Operation::backward) api::check_has_backward(config_);
  }

  AttentionConfig config_;
  api::Functions functions_;
  Device device_;
  bool debug_ = false;                      ///< results are looked at
  std::optional<api::HostAttention> host_;  ///< on the host device; what follows on others
  std::optional<driver::ContextRef> context_;
  std::shared_ptr<cache::Store> store_;
  std::optional<api::DevicePacked> packed_;
  std::optional<api::DeviceOperation<api::ForwardOperation>> forward_;
  std::optional<api::DeviceOperation<api::BackwardOperation>> backward_;
  // Of configurations whose calls are kept; runs like them.
  std::optional<api::KnownCalls<api::ForwardOperation>> known_forward_;
  std::optional<api::KnownCalls<api::BackwardOperation>> known_backward_;
  std::optional<api::DeviceAppend> append_;
  std::optional<api::DeviceMerge> merge_;
  std::optional<api::DeviceQuantize> quantize_;
  std::optional<api::DeviceInspection> inspection_;  ///< of debug calls
  std::mutex shared_mutex_;
  std::optional<api::SharedPrefixes> shared_;  ///< of calls with shared prefixes
  std::atomic<const api::SharedPrefixes*> shared_made_ = nullptr;
  api::BuildQueue builds_;  ///< last: what it has begun ends first
};

}  // namespace fa

#endif  // FA_SRC_API_ATTENTION_IMPL_HPP_
