#ifndef FA_SRC_API_MERGE_STATES_HPP_
#define FA_SRC_API_MERGE_STATES_HPP_

#include <array>
#include <cstddef>
#include <memory>

#include <fa/attention.hpp>

#include "api/execute.hpp"
#include "api/ready_table.hpp"
#include "cache/store.hpp"
#include "driver/driver.hpp"
#include "plan/merge_states.hpp"

namespace fa::api {

/// A merge whose tensors are checked against each other. Those of packed batches are of one batch entry,
/// [1, h_q, total_q, d_v].
struct MergeCall {
  std::array<AttentionState, MergeInputs::kMaxListed> states;
  std::size_t listed = 0;  ///< stacked: 1
  std::int64_t stacked = 0;
  std::int64_t stride_o = 0;
  std::int64_t stride_lse = 0;
  AttentionState merged;
  TensorView sink;
  bool sum = false;
  plan::MergeProblem problem;  ///< without the architecture
  bool empty = false;          ///< no row

  std::span<const AttentionState> given() const noexcept { return {states.data(), listed}; }
};

/// Throws fa::Error(invalid_argument) for anything that merge must not be launched with.
MergeCall check_merge(const AttentionConfig& config, const MergeInputs& inputs, const ForwardOutputs& outputs);

/// The problem of `prepare_merge`. Throws fa::Error(invalid_argument).
plan::MergeProblem merge_problem(const AttentionConfig& config, const MergeShape& shape);

/// On the host device.
void merge_on_host(const MergeCall& call);
KernelInfo host_merge_info(const AttentionConfig& config);

/// Merge on a GPU. Threads may share it.
class DeviceMerge {
 public:
  /// `config` and `context` outlive it.
  DeviceMerge(const AttentionConfig& config, const driver::ContextRef& context, std::shared_ptr<cache::Store> store);

  void run(const MergeCall& call, Stream stream);
  KernelInfo prepare(const plan::MergeProblem& problem) { return get(problem).info; }

 private:
  const Ready& get(plan::MergeProblem problem);

  const AttentionConfig& config_;
  const driver::ContextRef& context_;
  std::shared_ptr<cache::Store> store_;
  ReadyTable<Ready> ready_;
};

}  // namespace fa::api

#endif  // FA_SRC_API_MERGE_STATES_HPP_
