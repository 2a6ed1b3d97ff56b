#ifndef FA_SRC_API_APPEND_HPP_
#define FA_SRC_API_APPEND_HPP_

#include <memory>

#include <fa/attention.hpp>

#include "api/execute.hpp"
#include "api/ready_table.hpp"
#include "cache/store.hpp"
#include "driver/driver.hpp"
#include "plan/append.hpp"

namespace fa::api {

/// An append whose tensors are checked against each other.
struct AppendCall {
  AppendInputs inputs;  ///< tensors of rank 4, those of a packed batch [1, h, total, d]; what is not read is null
  plan::AppendProblem problem;  ///< without the architecture
  bool empty = false;           ///< no row to write
};

/// Throws fa::Error(invalid_argument) for anything that append must not be launched with.
AppendCall check_append(const AttentionConfig& config, const AppendInputs& inputs);

/// Holds the values of a call whose arrays are in memory of the host to its tensors. Throws fa::Error(invalid_argument)
/// for lengths, tables, slots and positions that do not fit.
void check_append_values(const AppendCall& call);

/// The problem of `prepare_append`. Throws fa::Error(invalid_argument).
plan::AppendProblem append_problem(const AttentionConfig& config, const AppendShape& shape);

/// On the host device, after check_append_values.
void append_on_host(const AppendCall& call);
KernelInfo host_append_info(const AttentionConfig& config);

/// Append on a GPU. Threads may share it.
class DeviceAppend {
 public:
  /// `config` and `context` outlive it.
  DeviceAppend(const AttentionConfig& config, const driver::ContextRef& context, std::shared_ptr<cache::Store> store);

  void run(const AppendCall& call, Stream stream);
  KernelInfo prepare(const plan::AppendProblem& problem) { return get(problem).info; }

 private:
  const Ready& get(plan::AppendProblem problem);
  void check_values(const AppendCall& call, Stream stream) const;

  const AttentionConfig& config_;
  const driver::ContextRef& context_;
  std::shared_ptr<cache::Store> store_;
  ReadyTable<Ready> ready_;
};

}  // namespace fa::api

#endif  // FA_SRC_API_APPEND_HPP_
