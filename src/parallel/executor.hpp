#ifndef FA_SRC_PARALLEL_EXECUTOR_HPP_
#define FA_SRC_PARALLEL_EXECUTOR_HPP_

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include <fa/parallel.hpp>

#include "parallel/memory.hpp"
#include "parallel/plan.hpp"
#include "parallel/shared_places.hpp"

namespace fa::parallel {

/// Attention objects that calls of a plan are made by, created when they are first asked for.
class Attentions {
 public:
  Attentions(const AttentionConfig& config, Device device) : config_(config), device_(device) {}

  const Attention& of_call(const Call& call, bool accumulate, bool backward);
  const Attention& of_sink();
  /// Adds tensors of so many columns, of the dtype or f32.
  const Attention& of_sum(std::int64_t columns);
  const Attention& of_statistic_sum();
  /// Adds sinks to states.
  const Attention& of_states();

 private:
  const Attention& find(int key, const AttentionConfig& config);

  AttentionConfig config_;
  Device device_;
  std::map<int, std::unique_ptr<Attention>> made_;
};

/// The tensors of one call, by Given; those that are not given are undefined. All of rank 4 (sinks of rank 1).
using GivenTensors = std::array<TensorView, kGivenCount>;

/// What all calls of an operation have.
struct CallContext {
  Captures captures;
  DropoutState dropout;
  TensorView sink;
  int max_multiprocessors = 0;
  bool may_be_unbounded = true;  ///< a kernel that cannot be bounded so may take all
  int most_blocks = 0;           ///< where no bound is asked for: of calls beside transfers
};

/// Memory that a run is given.
struct RunMemory {
  void* scratch = nullptr;
  void* shared = nullptr;
};

/// A plan with its memory, ready to run.
class Executor {
 public:
  /// With `places` what travels lies in memory that ranks share, else in scratch.
  Executor(const Problem& problem, Plan plan, const AttentionConfig& config, Memory& memory,
           std::optional<SharedPlaces> places = std::nullopt);

  const Plan& plan() const noexcept { return plan_; }
  std::size_t scratch_bytes() const noexcept { return scratch_size_; }
  std::size_t shared_bytes() const noexcept { return places_ ? static_cast<std::size_t>(places_->bytes) : 0; }

  /// Compiles what calls need, and takes memory of lengths. Scratch and shared memory are given to `run`.
  void prepare(Attentions& attentions, const CallContext& context);

  /// Throws what calls throw. Where transfers are queued already, the communicator is aborted first: another call would
  /// pair with what the others wait for.
  void run(Communicator& communicator, const GivenTensors& given, const CallContext& context, const RunMemory& memory,
           Stream stream) const;

 private:
  friend class Run;
  struct Flag {
    bool value = false;
  };

  DType dtype_of(Element element) const;
  AttentionShape shape_of(const Call& call, bool bounded) const;
  std::vector<AttentionShape> shapes_of(const Call& call, const CallContext& context) const;
  const Attention& prepare_sum(Attentions& attentions, const Sum& sum) const;

  const Problem problem_;
  const Plan plan_;
  const AttentionConfig& config_;
  Memory& memory_;
  const std::optional<SharedPlaces> places_;
  std::vector<std::size_t> offsets_;  ///< of scratch tensors
  std::size_t scratch_size_ = 0;      ///< with the workspaces, which are last
  std::size_t workspace_sizes_[kLanes] = {};
  std::vector<const Attention*> attention_of_;  ///< by operation, where it has one
  Buffer lengths_;                              ///< cu_seqlens of packed calls
  std::vector<Flag> beside_;                    ///< by operation: transfers are under way, or follow it at once
  std::vector<std::size_t> lengths_of_;         ///< by operation: where its cu_seqlens lie
  mutable std::vector<Flag> unbounded_;         ///< by operation: its kernel was found to take no bound
};

}  // namespace fa::parallel

#endif  // FA_SRC_PARALLEL_EXECUTOR_HPP_
