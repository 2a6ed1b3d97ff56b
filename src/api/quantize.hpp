#ifndef FA_SRC_API_QUANTIZE_HPP_
#define FA_SRC_API_QUANTIZE_HPP_

#include <array>
#include <cstddef>
#include <memory>
#include <span>

#include <fa/attention.hpp>

#include "api/execute.hpp"
#include "api/ready_table.hpp"
#include "cache/store.hpp"
#include "driver/driver.hpp"
#include "plan/quantize.hpp"

namespace fa::api {

/// The kernels of a call, in order: means of k before what reads them.
struct QuantizeCall {
  std::array<plan::QuantizePass, 4> passes;
  std::size_t count = 0;

  std::span<const plan::QuantizePass> given() const noexcept { return {passes.data(), count}; }
};

/// Throws fa::Error(invalid_argument) for anything that quantize must not be launched with.
QuantizeCall check_quantize(const AttentionConfig& config, const QuantizeInputs& inputs);

void quantize_on_host(const QuantizeCall& call);

/// On a GPU. Threads may share it.
class DeviceQuantize {
 public:
  /// `config` and `context` outlive it.
  DeviceQuantize(const AttentionConfig& config, const driver::ContextRef& context, std::shared_ptr<cache::Store> store);

  void prepare(const QuantizeCall& call);
  void run(const QuantizeCall& call, Stream stream);

 private:
  const Ready& get(const plan::KernelSpec& spec);

  const AttentionConfig& config_;
  const driver::ContextRef& context_;
  std::shared_ptr<cache::Store> store_;
  ReadyTable<Ready> ready_;
};

}  // namespace fa::api

#endif  // FA_SRC_API_QUANTIZE_HPP_
