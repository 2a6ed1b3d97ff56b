#ifndef FA_SRC_API_PACKED_HPP_
#define FA_SRC_API_PACKED_HPP_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "cache/store.hpp"
#include "driver/driver.hpp"
#include "plan/forward_launch.hpp"
#include "plan/kernel_spec.hpp"

namespace fa::api {

/// The kernels that clear the padding of the tensors of `config`, if it asks for that: of its dtype, and of the row
/// statistics.
std::vector<plan::KernelSpec> padding_specs(const AttentionConfig& config, plan::Arch arch);

/// What the kernels of a call are launched with besides its tensors.
plan::PackedArgs packed_args(const AttentionConfig& config, const PackedSequences& sequences,
                             const DropoutState& dropout, const PagedCache& cache = {}) noexcept;

/// What packed batches need around the attention kernels, on a GPU. Threads may share it.
class DevicePacked {
 public:
  /// `config`, `context` and `store` outlive it.
  DevicePacked(const AttentionConfig& config, const driver::ContextRef& context, std::shared_ptr<cache::Store> store);

  /// Makes the kernels ready, if the config needs any.
  void prepare();

  /// Throws fa::Error(invalid_argument) for lengths that do not fit `shape`, if the config asks for the check: waits
  /// for `stream`, which must not be capturing.
  void check(const PackedSequences& sequences, const AttentionShape& shape, Stream stream) const;

  /// The same of a call over `pages` pages, with its table.
  void check(const PackedSequences& sequences, const PagedCache& cache, const AttentionShape& shape, std::int64_t pages,
             Stream stream) const;

  /// Queues `value` for the rows of `view` that belong to no sequence, if the config asks for that: `view` has the rows
  /// of q, or with `keys` those of k.
  void clear(const TensorView& view, const PackedSequences& sequences, const AttentionShape& shape, bool keys,
             float value, Stream stream);

 private:
  struct Kernel {
    std::shared_ptr<const driver::LoadedKernel> loaded;
    int warps = 0;
    std::string spec;
  };
  const Kernel& get(DType dtype);
  /// Whether lengths are to be read back. Throws fa::Error(unsupported) while `stream` is captured.
  bool checks(const PackedSequences& sequences, Stream stream) const;

  const AttentionConfig& config_;
  const driver::ContextRef& context_;
  std::shared_ptr<cache::Store> store_;

  std::array<std::atomic<const Kernel*>, 3> slots_{};  ///< by dtype
  std::mutex mutex_;                                   ///< guards kept_
  std::deque<Kernel> kept_;                            ///< never moves its elements
};

}  // namespace fa::api

#endif  // FA_SRC_API_PACKED_HPP_
