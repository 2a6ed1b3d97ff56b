#ifndef FA_SRC_API_BACKWARD_HPP_
#define FA_SRC_API_BACKWARD_HPP_

#include <array>
#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>

#include <fa/attention.hpp>

#include "api/validate.hpp"
#include "api/variants.hpp"
#include "cache/store.hpp"
#include "driver/driver.hpp"
#include "plan/backward.hpp"

namespace fa::api {

/// The backward of one Attention on a GPU: its kernels, and their launches. Threads may share it.
class DeviceBackward {
 public:
  /// `config`, `functions`, `context` and `store` outlive it. Throws fa::Error(invalid_argument) for a kernel override
  /// that can never fit.
  DeviceBackward(const AttentionConfig& config, const Functions& functions, double scale,
                 const driver::ContextRef& context, std::shared_ptr<cache::Store> store);

  void run(const BackwardCall& call, const VariantCall& variant, const MaskTiles& tiles, Stream stream,
           const Workspace& workspace);
  KernelInfo prepare(const AttentionShape& shape);
  std::size_t workspace_size(const AttentionShape& shape) const;
  std::size_t mask_tiles_size(const AttentionShape& shape) const;

 private:
  struct Kernel {
    std::shared_ptr<const driver::LoadedKernel> loaded;
    unsigned threads = 0;
    unsigned shared_bytes = 0;
  };

  /// The kernels of one slot of the planner, ready to launch.
  struct Ready {
    plan::BackwardKernels specs;
    Kernel preprocess;
    Kernel main;
    Kernel reduce;         ///< when split
    Kernel dq;             ///< when deterministic
    Kernel convert;        ///< unless deterministic
    Kernel sink;           ///< with sinks
    Kernel mask, dq_mask;  ///< with a mask function, before the main kernel and the pass for dQ
    KernelInfo info;
  };

  const KernelOverride& fixed() const noexcept;
  plan::Problem problem(const AttentionShape& shape) const noexcept;
  const Ready& get(const plan::Problem& wanted, const plan::BackwardChoice& choice);
  Ready make(const plan::Problem& wanted, const plan::BackwardChoice& choice) const;

  const AttentionConfig& config_;
  const Functions& functions_;
  double scale_;
  const driver::ContextRef& context_;
  std::shared_ptr<cache::Store> store_;

  std::array<std::atomic<const Ready*>, plan::BackwardChoice::kSlots> slots_{};
  std::mutex mutex_;        ///< guards kept_
  std::deque<Ready> kept_;  ///< never moves its elements
};

}  // namespace fa::api

#endif  // FA_SRC_API_BACKWARD_HPP_
