#ifndef FA_SRC_API_DEVICE_OPERATION_HPP_
#define FA_SRC_API_DEVICE_OPERATION_HPP_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include <fa/attention.hpp>

#include "api/build.hpp"
#include "api/build_queue.hpp"
#include "api/execute.hpp"
#include "api/held_tiles.hpp"
#include "api/operations.hpp"
#include "api/packed.hpp"
#include "api/place.hpp"
#include "api/ready_table.hpp"
#include "api/tuning.hpp"
#include "api/variants.hpp"
#include "cache/store.hpp"
#include "driver/driver.hpp"

namespace fa::api {

/// An operation of one Attention on a GPU: finds the kernels of a call, makes them ready the first time, lets others
/// compete with them, and runs plans. `Op` is ForwardOperation or BackwardOperation. Threads may share it.
template <class Op>
class DeviceOperation {
 public:
  /// All but `store` outlive it; `builds` ends before. Throws fa::Error for a kernel override that can never fit.
  DeviceOperation(const AttentionConfig& config, const Functions& functions, double scale,
                  const driver::ContextRef& context, std::shared_ptr<cache::Store> store, DevicePacked& packed,
                  BuildQueue& builds);

  using Choice = typename Op::Choice;
  /// Of a persistent grid: the multiprocessors that it takes, and the blocks that it has where those are more.
  struct Blocks {
    int multiprocessors = 0;
    int most = 0;
  };
  /// What runs a call, wherever its tensors lie.
  struct Planned {
    plan::Problem wanted;
    Choice choice;
    const Ready* ready = nullptr;  ///< lives as long as the operation
    Blocks blocks = {};
    std::uint64_t code = 0;  ///< by which its kernels are looked up
    // Of the schedule that it takes.
    bool takes_schedule = false;
    std::size_t schedule_bytes = 0;
    std::uint64_t schedule_tag = 0;
  };
  /// Finds the kernels of a call, or makes them ready.
  Planned plan_for(const AttentionShape& shape, const typename Op::Tensors& tensors, bool begins,
                   const Schedule& schedule, const Shard& shard, Stream stream);
  /// Whether a call that was planned so, if it came now, would be again.
  bool is_current(const Planned& planned) const noexcept {
    const Ready* const ready = planned.ready;
    return ready == ready_.find(planned.code) && !ready->open && !ready->interim;
  }
  void launch(const Planned& planned, const typename Op::Tensors& tensors, const plan::PackedArgs& packed,
              const GivenTiles& tiles, const Schedule& schedule, Stream stream, const Workspace& workspace) const;
  /// Queues the kernel that makes a schedule of a forward's calls, if they take any.
  void schedule(const AttentionShape& shape, const plan::PackedArgs& packed, const Schedule& memory, Stream stream);
  std::size_t schedule_size(const AttentionShape& shape) const;
  KernelInfo prepare(const AttentionShape& shape);
  /// Whether a call of the shape runs its planned kernels, and waits for none.
  bool is_ready(const AttentionShape& shape) const noexcept;
  /// The greatest of what calls of the shape take, and of the part that tile lists are.
  std::size_t workspace_size(const AttentionShape& shape) const;
  std::size_t mask_tiles_size(const AttentionShape& shape) const;

  /// A decision for `shape`, whatever is known already.
  TuneReport tune(const AttentionShape& shape, const TuneOptions& options) const;

 private:
  const plan::Fixed& fixed() const noexcept { return fixed_; }
  plan::Problem problem(const AttentionShape& shape) const noexcept;
  plan::Problem scheduled_problem(const AttentionShape& shape, bool begins) const noexcept;
  bool takes_schedule(const plan::Problem& wanted, const Schedule& schedule, bool begins) const noexcept;
  /// Whether a call may run others than the planned kernels while these are compiled.
  enum class Missing : std::uint8_t { waits, stands_in };
  /// The kernels in the order of preference, and who says so.
  struct Preferred {
    plan::KernelChoices choices;
    const char* by = kByPlanner;
    bool open = false;
  };
  const Ready& get(const plan::Problem& wanted, const Choice& choice, Stream stream, Missing missing);
  Preferred preferred(const plan::Problem& wanted) const;
  Ready first_ready(const plan::Problem& wanted, Stream stream) const;
  const Ready* stand_in(const plan::Problem& wanted, std::uint64_t code);
  std::optional<Ready> stored(const plan::Problem& wanted, const plan::KernelChoices& choices) const;
  std::optional<Ready> other_stored(const plan::Problem& wanted);
  bool is_missing(const plan::KernelSpec& spec) const;
  bool takes_said_scratch(const plan::Problem& wanted, const Ready& ready) const;
  void build_later(const plan::Problem& wanted, std::uint64_t code);
  Ready make(const plan::Problem& wanted, const plan::KernelChoices& choices, const Supply& from) const;
  Supply supply(const plan::Problem& wanted) const;
  std::unique_ptr<Prefetch> prefetch(const plan::Problem& wanted, const plan::KernelSpec& first, const Supply& from,
                                     const TuneOptions& options) const;
  TuneReport decide(const plan::Problem& wanted, const Choice& choice, const Ready& known, Stream stream,
                    const TuneOptions& options) const;

  const AttentionConfig& config_;
  const plan::Fixed fixed_;  ///< by its override
  const Functions& functions_;
  double scale_;
  const driver::ContextRef& context_;
  std::shared_ptr<cache::Store> store_;
  DevicePacked& packed_;
  BuildQueue& builds_;

  Tuning tuning_;
  ReadyTable<Ready> ready_;
  std::mutex building_mutex_;         ///< guards building_
  std::set<std::uint64_t> building_;  ///< codes of what is compiled, or was, on the thread of builds_
};

extern template class DeviceOperation<ForwardOperation>;
extern template class DeviceOperation<BackwardOperation>;

}  // namespace fa::api

#endif  // FA_SRC_API_DEVICE_OPERATION_HPP_
