#ifndef FA_SRC_API_INSPECT_HPP_
#define FA_SRC_API_INSPECT_HPP_

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "api/host_attention.hpp"
#include "api/validate.hpp"
#include "api/variants.hpp"
#include "cache/store.hpp"
#include "driver/driver.hpp"
#include "plan/inspect.hpp"
#include "reference/inspect.hpp"

namespace fa::api {

/// Throws fa::Error for a dump that a call must not be made with: invalid_argument, unsupported.
void check_dump(const AttentionConfig& config, const ForwardCall& call, const ForwardOutputs& outputs, bool host);

/// Throws fa::Error(invalid_argument) for a dump that is given to what writes none.
void check_without_dump(const ProbabilityDump& dump, const char* accepted);

/// A result of a debug call: what it is called, and what it is made of.
struct InspectedResult {
  std::string name;
  plan::ScannedResult scanned;
  bool keys = false;       ///< its rows are keys
  bool heads = false;      ///< it has an axis of heads alone
  int capture_rank = 0;    ///< of a captured tensor's gradient: axes of that, which are the last ones
  std::int64_t group = 1;  ///< query heads of one of its heads
  reference::Made made = reference::Made::of_anything;
};

/// A debug call that has run: its results, and the tensors of which they were made. On a GPU `fetch` reads them, and
/// lengths and tables are copies in memory of the host.
class Inspection {
 public:
  /// All outlive it.
  Inspection(const AttentionConfig& config, const HostAttention& host, const ForwardCall& call,
             const VariantCall& variant, const reference::Fetch* fetch = nullptr);
  Inspection(const AttentionConfig& config, const HostAttention& host, const BackwardCall& call,
             const VariantCall& variant, const reference::Fetch* fetch = nullptr);

  /// Those that have elements, in the order in which they are named.
  const std::vector<InspectedResult>& results() const noexcept { return results_; }

  /// Lengths and tables that the host can read take the place of the call's.
  void use(const PackedSequences& sequences, const PagedCache& cache);

  /// Throws fa::Error(not_finite) where the host finds a NaN or an infinity in a result.
  void check() const;
  /// Throws fa::Error(not_finite) for an element of a result: names what it comes from.
  [[noreturn]] void report(const InspectedResult& result, const plan::FoundElement& element) const;
  /// P of a query head of the call; the host can read all tensors.
  void dump(const ProbabilityDump& dump) const;

 private:
  std::int64_t parts() const noexcept;
  reference::ForwardArgs part(std::int64_t i) const;
  reference::InspectedCall inspected(std::int64_t i) const;
  TensorView rows_of(const InspectedResult& result, std::int64_t b) const;
  std::optional<ErrorLocation> cause(const InspectedResult& result, const plan::FoundElement& element) const;
  std::optional<ErrorLocation> cause_in(std::int64_t b, reference::BrokenResult broken,
                                        const std::vector<double>& greatest) const;
  std::vector<double> greatest_logits(const reference::BrokenResult& broken) const;
  ErrorLocation location(const InspectedResult& result, const plan::FoundElement& element) const;

  void add(const char* name, const TensorView& view, reference::Made made, bool minus = false, bool keys = false);
  void add_captured_gradient(const std::string& name, const TensorView& gradient);
  void add_of_heads(const char* name, const TensorView& view, reference::Made made, bool minus);

  const AttentionConfig& config_;
  const reference::Fetch* fetch_;
  PackedSequences sequences_;
  PagedCache cache_;
  AttentionShape shape_;
  reference::InspectedCall call_;
  std::vector<InspectedResult> results_;
};

/// What debug calls on a GPU run besides. Threads may share it.
class DeviceInspection {
 public:
  /// `config`, `functions` and `context` outlive it.
  DeviceInspection(const AttentionConfig& config, const Functions& functions, double scale,
                   const driver::ContextRef& context, std::shared_ptr<cache::Store> store);

  /// Waits for `stream`, unless it is being captured: then nothing is looked at. Throws fa::Error: not_finite, cuda.
  void check(const ForwardCall& call, const VariantCall& variant, Stream stream) const;
  void check(const BackwardCall& call, const VariantCall& variant, Stream stream) const;

  /// Queues the kernel that writes P of a query head.
  void dump(const ForwardCall& call, const plan::ForwardTensors& tensors, const std::optional<ShardPlace>& place,
            const ProbabilityDump& dump, Stream stream) const;

 private:
  template <class Call>
  void inspect(const Call& call, const VariantCall& variant, const PagedCache& cache, std::int64_t pages,
               Stream stream) const;
  /// Where in which results something is broken: kernel::kMostResults places.
  std::vector<std::uint64_t> scan(const std::vector<InspectedResult>& results, Stream stream) const;
  std::shared_ptr<const driver::LoadedKernel> scanner() const;

  const AttentionConfig& config_;
  const Functions& functions_;
  const double scale_;
  const driver::ContextRef& context_;
  std::shared_ptr<cache::Store> store_;
  HostAttention host_;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const driver::LoadedKernel> scanner_;  ///< of the first call that wanted it
};

}  // namespace fa::api

#endif  // FA_SRC_API_INSPECT_HPP_
