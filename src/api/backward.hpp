#ifndef FA_SRC_API_BACKWARD_HPP_
#define FA_SRC_API_BACKWARD_HPP_

#include <cstddef>
#include <memory>

#include <fa/attention.hpp>

#include "api/build.hpp"
#include "api/held_tiles.hpp"
#include "api/packed.hpp"
#include "api/ready_table.hpp"
#include "api/tuning.hpp"
#include "api/validate.hpp"
#include "api/variants.hpp"
#include "cache/store.hpp"
#include "driver/driver.hpp"
#include "plan/backward.hpp"

namespace fa::api {

/// The backward of one Attention on a GPU: its kernels, and their launches. Threads may share it.
class DeviceBackward {
 public:
  /// `config`, `functions`, `context`, `store` and `packed` outlive it. Throws fa::Error(invalid_argument) for a kernel
  /// override that can never fit.
  DeviceBackward(const AttentionConfig& config, const Functions& functions, double scale,
                 const driver::ContextRef& context, std::shared_ptr<cache::Store> store, DevicePacked& packed);

  void run(const BackwardCall& call, const VariantCall& variant, const MaskTiles& tiles, Stream stream,
           const Workspace& workspace);
  KernelInfo prepare(const AttentionShape& shape);
  std::size_t workspace_size(const AttentionShape& shape) const;
  std::size_t mask_tiles_size(const AttentionShape& shape) const;

  /// A decision for `shape`, whatever is known already.
  TuneReport tune(const AttentionShape& shape, const TuneOptions& options) const;

 private:
  struct Kernel {
    std::shared_ptr<const driver::LoadedKernel> loaded;
    unsigned threads = 0;
    unsigned shared_bytes = 0;
    bool may_start_early = false;
  };

  /// The kernels of one kind of problem, ready to launch.
  struct Ready {
    plan::BackwardKernels specs;
    Kernel preprocess;
    Kernel main;
    Kernel reduce;         ///< when split
    Kernel dq;             ///< unless the main kernel writes it
    Kernel convert;        ///< else
    Kernel sink;           ///< with sinks
    Kernel mask, dq_mask;  ///< with a mask function, before the main kernel and the pass for dQ
    KernelInfo info;
    bool open = false;  ///< tuning may find a better main kernel
  };

  const plan::Fixed& fixed() const noexcept { return fixed_; }
  plan::Problem problem(const AttentionShape& shape) const noexcept;
  const Ready& get(const plan::Problem& wanted, const plan::BackwardChoice& choice, Stream stream);
  Ready first_ready(const plan::Problem& wanted, const plan::BackwardChoice& choice, Stream stream) const;
  Ready make(const plan::Problem& wanted, const plan::BackwardChoice& choice, const plan::BackwardPlan& planned,
             const Supply& from) const;
  std::unique_ptr<Prefetch> prefetch(const plan::Problem& wanted, const plan::KernelSpec& first, const Supply& from,
                                     const TuneOptions& options) const;
  Supply supply(const plan::Problem& wanted) const;
  TuneReport decide(const plan::Problem& wanted, const plan::BackwardChoice& choice, const Ready& known, Stream stream,
                    const TuneOptions& options) const;
  static std::uint64_t tag_of(const plan::Problem& wanted, const Ready& ready, const GivenTiles& tiles) noexcept;
  void launch(const plan::Problem& wanted, const plan::BackwardChoice& choice, const Ready& ready,
              const plan::BackwardTensors& tensors, const plan::PackedArgs& packed, const GivenTiles& tiles,
              Stream stream, const Workspace& workspace) const;

  const AttentionConfig& config_;
  const plan::Fixed fixed_;  ///< by its override
  const Functions& functions_;
  double scale_;
  const driver::ContextRef& context_;
  std::shared_ptr<cache::Store> store_;
  DevicePacked& packed_;

  Tuning tuning_;
  ReadyTable<Ready> ready_;
};

}  // namespace fa::api

#endif  // FA_SRC_API_BACKWARD_HPP_
