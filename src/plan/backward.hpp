#ifndef FA_SRC_PLAN_BACKWARD_HPP_
#define FA_SRC_PLAN_BACKWARD_HPP_

#include <vector>

#include <common/variant_params.cuh>

#include "plan/fixed.hpp"
#include "plan/forward_launch.hpp"
#include "plan/kernel_spec.hpp"
#include "plan/problem.hpp"
#include "plan/tensor_map.hpp"
#include "plan/variant_launch.hpp"

namespace fa::plan {

/// The few facts of a call's shapes that choose its kernels, as Choice does for the forward.
struct BackwardChoice {
  Family family = Family::sm80;
  bool aligned = true;
  int splits = 1;  ///< of the query tiles of a key tile; a launch parameter, of which the kernel knows whether it is 1
  int split_blocks = 1;            ///< the same by the blocks of a cluster, which leave nothing to another kernel
  bool in_turns = false;           ///< sm90: nor do those of `splits`, which add to dK and dV one behind the other
  bool rows_without_keys = false;  ///< sm90: of a dense batch, causality hides all keys from its first rows
  Gradients gradients = {};

  bool leaves_splits() const noexcept { return splits > 1 && !in_turns; }  ///< to a kernel that adds them up

  /// Dense, below kSlots.
  int slot() const noexcept {
    const int unwanted = (gradients.dq ? 0 : 1) | (gradients.dk ? 0 : 2) | (gradients.dv ? 0 : 4);
    const int kernel = (index_of(family) + kFamilies * (in_turns ? kMaxSplitBlocks : split_blocks - 1)) * 8;
    const int facts = (aligned ? 1 : 0) | (splits > 1 ? 2 : 0) | (rows_without_keys ? 4 : 0);
    return unwanted * kSlotsOfGradients + kernel + facts;
  }
  static constexpr int kMaxSplitBlocks = 8;  ///< of a portable cluster
  static constexpr int kSlotsOfGradients = kFamilies * 8 * (kMaxSplitBlocks + 1);
  static constexpr int kSlots = 8 * kSlotsOfGradients;
};

/// Blocks that share the query tiles of a key tile: those of a cluster, or others that add to dK and dV in turns.
struct KeyTileShares {
  int blocks = 1;
  int turns = 1;  ///< above 1 with one block
};

/// Never a function of the GPU: the same shapes give the same result on every GPU of an architecture.
BackwardChoice choose_backward(const Problem& problem, const Fixed& fixed) noexcept;

/// Whether the key tiles of a deterministic backward add to dQ in one order. Where the main kernel cannot, dQ has a
/// pass of its own: in the mma.sync family, and behind tile lists, in which nobody knows who is in front.
bool orders_dq(const Problem& problem, Family family) noexcept;

/// Tells a kernel of a backward which gradients of statistics it is given.
void set_statistics_gradients(const Problem& problem, KernelSpec& spec) noexcept;

/// Whether gradients of captures may be asked for: the main kernel sums them.
bool wants_captured_gradients(const Problem& problem) noexcept;

/// What runs for a problem, in this order. The main kernel adds to an accumulator, which convert turns into dQ, unless
/// that has a pass of its own. Where such a pass is all that is wanted it stands in the main kernel's place.
struct BackwardPlan {
  KernelSpec preprocess;
  Alternatives main;               ///< all of them write dQ, or none does
  Alternatives dq;                 ///< empty unless dQ has a pass of its own behind the main kernel
  KernelSpec convert;              ///< meaningful when the main kernel adds to dQ's accumulator
  KernelSpec reduce;               ///< meaningful when the main kernel is split, and sums dK or dV
  KernelSpec sink;                 ///< meaningful with sinks
  KernelSpec statistic_rows = {};  ///< without warps unless gradients of max_logit or column sums are given
};

/// What a call follows of `fixed`, as followed_forward has it.
Fixed followed_backward(const Problem& problem, const Fixed& fixed, bool deterministic);

/// Throws fa::Error: invalid_argument when `fixed` does not fit, unsupported when no kernel does.
BackwardPlan plan_backward(const Problem& problem, const Fixed& fixed, bool deterministic);

/// Every kernel that a call of the plan runs, in the order of their launches.
std::vector<Alternatives> kernels_of(const BackwardPlan& plan);

/// The tensors of a call, as views of rank 4 (lse, dlse: 3); dlse may be undefined.
struct BackwardTensors {
  TensorView q, k, v, o, dout, lse, dlse, dq, dk, dv;
  VariantTensors variant = {};
  StatisticsGradients statistics = {};
};

/// Whether tensor maps can describe q, k, v and dout (sm90_forward_describable).
bool sm90_backward_describable(const BackwardTensors& tensors) noexcept;

/// The maps of an sm90 kernel, as templates/sm90/sm90_backward_params.cuh describes them.
struct Sm90BackwardMaps {
  TensorMapSpec q, k, v, dout;
};
Sm90BackwardMaps sm90_backward_maps(const BackwardTensors& tensors, const KernelSpec& spec) noexcept;

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_BACKWARD_HPP_
