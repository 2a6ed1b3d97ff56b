#ifndef FA_SRC_PLAN_CALL_PLAN_HPP_
#define FA_SRC_PLAN_CALL_PLAN_HPP_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include <common/append_params.cuh>
#include <common/fp8_params.cuh>
#include <common/merge_states_params.cuh>
#include <common/place_params.cuh>
#include <common/top_keys_params.cuh>
#include <fa/append.hpp>
#include <sm90/sm90_backward_params.cuh>
#include <sm90/sm90_forward_params.cuh>
#include <sm90/sm90_fp8_params.cuh>

#include "plan/backward.hpp"
#include "plan/forward_launch.hpp"
#include "plan/kernel_spec.hpp"
#include "plan/planner.hpp"
#include "plan/problem.hpp"
#include "plan/tensor_map.hpp"
#include "plan/workspace.hpp"

namespace fa::plan {

struct AppendProblem;
struct MergeProblem;
struct MergeTensors;

/// By which a rotary embedding turns pairs of columns (append.hpp).
using RotaryTurns = std::array<std::uint64_t, kernel::kMaxRotaryPairs>;

/// What a kernel does in a call, in the order of launches.
enum class Role : std::uint8_t {
  statistic_rows,  ///< backward: what gradients of statistics need of rows
  statistics,      ///< backward: of rows, and a zeroed accumulator of dQ
  tile_lists,      ///< with a mask function: what the attention kernel reads
  schedule,        ///< forward: parts of thread blocks, unless a call has them
  norms,           ///< forward: by which KV tiles are left out
  attention,       ///< O and LSE; of backward: dK, dV and what dQ is made of
  combine,         ///< forward: of split keys
  column_sums,     ///< forward: of P, by the log-sum-exp
  top_keys,        ///< forward: by these sums
  reduce,          ///< backward: of split queries
  dq_tile_lists,   ///< what the pass for dQ reads
  dq,              ///< backward: dQ in a pass of its own
  convert,         ///< backward: dQ from its accumulator
  sink,            ///< backward: the gradient of the sinks
  append,          ///< new keys and values into a cache: a call of its own
  merge,           ///< partial results into one: likewise
};
inline constexpr std::array kAllRoles{Role::statistic_rows, Role::statistics, Role::tile_lists,    Role::schedule,
                                      Role::norms,          Role::attention,  Role::combine,       Role::column_sums,
                                      Role::top_keys,       Role::reduce,     Role::dq_tile_lists, Role::dq,
                                      Role::convert,        Role::sink,       Role::append,        Role::merge};
inline constexpr std::size_t kRoles = kAllRoles.size();

/// One thing for each role.
template <class T>
class ByRole {
 public:
  T& operator[](Role role) noexcept { return all_[static_cast<std::size_t>(role)]; }
  const T& operator[](Role role) const noexcept { return all_[static_cast<std::size_t>(role)]; }

 private:
  std::array<T, kRoles> all_{};
};

/// The kernels that were taken for a kind of call. One without warps is not needed.
using KernelSet = ByRole<KernelSpec>;

/// What may be taken; empty where nothing is needed. Attention kernels, and those of a pass for dQ, bring others with
/// them (companions).
using KernelChoices = ByRole<Alternatives>;
KernelChoices kernel_choices(const Problem& problem, const Fixed& fixed);
KernelChoices backward_kernel_choices(const Problem& problem, const Fixed& fixed, bool deterministic);

/// The kernels that follow from those of Role::attention and Role::dq: of schedules, norms and tile lists.
KernelSet companions(const Problem& problem, const KernelSet& kernels);

/// One launch.
struct Step {
  Role role;
  bool early;  ///< may start before the launch in front of it is complete (may_start_early)
  std::int64_t grid;
  void* params;  ///< in the plan
  void* place;   ///< likewise, of a kernel that reads where the call stands; else null
  int shared;    ///< dynamic bytes, at least: more than it needs where two blocks shall not share a multiprocessor
};

/// What a call asks for besides its tensors.
struct CallFacts {
  double scale;
  int multiprocessors;
  bool listed;  ///< the tile lists are there already
  const PackedArgs& packed;
  void* schedule = nullptr;  ///< that the call is given
  int most_blocks = 0;       ///< thread blocks of a persistent grid, above `multiprocessors`; 0: as many as those
};

/// All that a call runs, in order: first `cleared` bytes of its workspace's first section are zeroed. Its memory is
/// named last, by bind. Refers to itself, and allocates nothing. What is not planned is not initialised either.
class CallPlan {
 public:
  /// Launch parameters. A kernel without variants reads the first of them only, one of the sm80 family what is behind
  /// the maps. The pass for dQ has its own.
  struct ForwardParams {
    kernel::Sm90Int8Params attention;  ///< scales are of 8-bit floats alone, row biases of i8
    kernel::MaskTilesParams lists;
    kernel::ForwardStoredParams sums;  ///< of the pass for column sums
    kernel::TopKeysParams top_keys;
    kernel::ForwardStoredParams stored;  ///< in the place of the first, where K or V is stored in 8 bits
    kernel::ForwardFp8Params fp8;        ///< likewise, of 8-bit floats without maps
    Sm90ForwardMaps maps;
  };
  struct BackwardParams {
    kernel::Sm90BackwardVariantParams attention;
    kernel::BackwardStatisticsParams dq;
    kernel::MaskTilesParams lists, dq_lists;
    kernel::BackwardStatisticsParams statistics;  ///< in the place of the first, with gradients of statistics
    kernel::StatisticRowsParams statistic_rows;
    Sm90BackwardMaps maps;
  };

  CallPlan() noexcept {}  // NOLINT(modernize-use-equals-default): a union has none
  CallPlan(const CallPlan&) = delete;
  CallPlan& operator=(const CallPlan&) = delete;

  std::span<Step> steps() noexcept { return {steps_.data(), count_}; }
  std::span<const Step> steps() const noexcept { return {steps_.data(), count_}; }
  /// nullptr where the call has none.
  Step* step(Role role) noexcept;

  /// Tells the parameters where the sections are.
  void bind(const SectionAddresses& at) noexcept;

  /// Calls `encode(spec, place)` for each tensor map, which has to be in its place before the launches.
  template <class Encode>
  void encode_maps(const Encode& encode) {
    if (!mapped_) return;
    if (backward_) {
      const Sm90BackwardMaps& maps = backward_params.maps;
      kernel::Sm90BackwardVariantParams& params = backward_params.attention;
      encode(maps.q, params.map_q);
      encode(maps.k, params.map_k);
      encode(maps.v, params.map_v);
      encode(maps.dout, params.map_dout);
    } else {
      const Sm90ForwardMaps& maps = forward_params.maps;
      kernel::Sm90ForwardVariantParams& params = forward_params.attention;
      encode(maps.q, params.map_q);
      encode(maps.k, params.map_k);
      encode(maps.v, params.map_v);
      encode(maps.o, params.map_o);
    }
  }

  WorkspaceLayout workspace;
  std::size_t cleared = 0;
  union {
    ForwardParams forward_params;
    BackwardParams backward_params;
    kernel::AppendStoredParams append_params;  ///< of other appends the first part
    kernel::MergeStatesParams merge_params;
  };

 private:
  friend void plan_call(const Problem&, const Choice&, const KernelSet&, const ForwardTensors&, const CallFacts&,
                        CallPlan&);
  friend void plan_call(const Problem&, const BackwardChoice&, const KernelSet&, const BackwardTensors&,
                        const CallFacts&, CallPlan&);
  friend void plan_schedule(const Problem&, const KernelSet&, int, CallPlan&);
  friend void plan_call(const AppendProblem&, const KernelSpec&, const AppendInputs&, const RotaryTurns*, CallPlan&);
  friend void plan_call(const MergeProblem&, const KernelSpec&, const MergeTensors&, CallPlan&);

  void add(Role role, std::int64_t grid, void* params, bool early = false);
  void add_sums(const Problem& problem, const KernelSet& kernels, const StatisticsOutputs& to, int multiprocessors);
  void add_statistics_gradients(const Problem& problem, const KernelSet& kernels, const BackwardTensors& tensors,
                                const CallFacts& facts);
  void bind_forward(const SectionAddresses& at) noexcept;
  void bind_backward(const SectionAddresses& at) noexcept;
  /// Gives the steps whose kernels read it where the call stands.
  void put_places(const Problem& problem, const KernelSet& kernels) noexcept;

  bool backward_ = false;
  bool mapped_ = false;
  kernel::ForwardVariantParams* copied_ = nullptr;  ///< what is launched in the place of the first
  bool statistics_ = false;                         ///< with gradients of statistics
  std::size_t count_ = 0;
  std::array<Step, kRoles> steps_;
  std::size_t classes_;  ///< bytes in front of the scratch of kernels that write lists
  std::size_t dq_classes_;
  kernel::PlaceParams place_;
};

/// Plans a call into an empty plan. Throws fa::Error: invalid_argument for more tiles than a grid counts, internal for
/// kernels none of which writes dQ.
void plan_call(const Problem& problem, const Choice& choice, const KernelSet& kernels, const ForwardTensors& tensors,
               const CallFacts& facts, CallPlan& call);
void plan_call(const Problem& problem, const BackwardChoice& choice, const KernelSet& kernels,
               const BackwardTensors& tensors, const CallFacts& facts, CallPlan& call);

/// Plans the schedule of calls of a problem's limits into an empty plan, in the memory of `facts.schedule`, whose first
/// `cleared` bytes are zeroed in front.
void plan_schedule(const Problem& problem, const KernelSet& kernels, const CallFacts& facts, CallPlan& call);

/// Names what the tile lists of a call are of (mask_tiles_tag): those of the attention kernel and of the pass for dQ.
std::uint64_t lists_tag(const Problem& problem, const KernelSet& kernels) noexcept;

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_CALL_PLAN_HPP_
