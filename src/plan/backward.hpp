#ifndef FA_SRC_PLAN_BACKWARD_HPP_
#define FA_SRC_PLAN_BACKWARD_HPP_

#include <cstddef>
#include <cstdint>
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

  /// Dense, below kSlots.
  int slot() const noexcept { return (aligned ? 1 : 0) | (splits > 1 ? 2 : 0) | index_of(family) * 4; }
  static constexpr int kSlots = kFamilies * 4;
};

/// Never a function of the GPU: the same shapes give the same result on every GPU of an architecture.
BackwardChoice choose_backward(const Problem& problem, const Fixed& fixed) noexcept;

/// Whether the key tiles of a deterministic backward add to dQ in one order. Where the main kernel cannot, dQ has a
/// pass of its own: in the mma.sync family, and behind tile lists, in which nobody knows who is in front.
bool orders_dq(const Problem& problem, Family family) noexcept;

/// What runs for a problem, in this order. The main kernel adds to an accumulator, which convert turns into dQ, unless
/// that has a pass of its own.
struct BackwardPlan {
  KernelSpec preprocess;
  Alternatives main;   ///< all of them write dQ, or none does
  Alternatives dq;     ///< empty unless dQ has a pass of its own
  KernelSpec convert;  ///< meaningful when that is empty
  KernelSpec reduce;   ///< meaningful when the main kernel is split
  KernelSpec sink;     ///< meaningful with sinks
};

/// What a call follows of `fixed`, as followed_forward has it.
Fixed followed_backward(const Problem& problem, const Fixed& fixed, bool deterministic);

/// Throws fa::Error: invalid_argument when `fixed` does not fit, unsupported when no kernel does.
BackwardPlan plan_backward(const Problem& problem, const Fixed& fixed, bool deterministic);

/// Every kernel that a call of the plan runs, in the order of their launches.
std::vector<Alternatives> kernels_of(const BackwardPlan& plan);

/// Where things lie in the workspace, in bytes from its start.
struct BackwardWorkspace {
  /// s_q rounded up to a group of 16 rows, or to the greatest tile of an sm90 kernel; of a packed batch the rows of all
  /// its groups, and what follows is without b.
  std::int64_t padded_rows = 0;
  std::size_t lse_log2 = 0;  ///< f32 [b, h_q, padded_rows]
  std::size_t delta = 0;     ///< f32 [b, h_q, padded_rows]
  std::size_t dq_accum = 0;  ///< f32 [b, h_q, padded_rows, d_qk], unless dQ has a pass of its own
  std::size_t dq_turns = 0;  ///< i32 [b, h_q, padded_rows / 16, 2], when dQ is ordered
  std::size_t partial = 0;   ///< f32 [splits, b, h_kv, s_kv, d_qk + d_v], when split
  std::size_t bytes = 0;
};
BackwardWorkspace backward_workspace(const Problem& problem, const BackwardChoice& choice, bool deterministic) noexcept;

/// What any call of the problem needs: that layout, and behind it the tile lists of the main kernel and of the pass for
/// dQ, whichever alternatives are taken. Throws like plan_backward.
std::size_t backward_workspace_size(const Problem& problem, const Fixed& fixed, bool deterministic);

/// The part of it that tile lists are.
std::size_t backward_lists_size(const Problem& problem, const Fixed& fixed, bool deterministic);

/// The tensors of a call, as views of rank 4 (lse, dlse: 3); dlse may be undefined.
struct BackwardTensors {
  TensorView q, k, v, o, dout, lse, dlse, dq, dk, dv;
  VariantTensors variant = {};
};

/// The kernels of a plan that were taken.
struct BackwardKernels {
  KernelSpec main;
  KernelSpec dq;  ///< meaningful unless the main kernel writes dQ
  int reduce_warps = 1;
};

/// Thread blocks of each kernel; 0: it has nothing to do.
struct BackwardGrids {
  std::int64_t preprocess = 0;
  std::int64_t main = 0;
  std::int64_t reduce = 0;
  std::int64_t dq = 0;
  std::int64_t convert = 0;
  std::int64_t sink = 0;
};

/// Everything that a launch needs besides the kernels. The pass for dQ takes params with its own tile counts. Throws
/// fa::Error(internal) where neither kernel writes dQ.
struct BackwardLaunch {
  kernel::BackwardVariantParams params;     ///< of all kernels but the pass for dQ
  kernel::BackwardVariantParams dq_params;  ///< of that
  BackwardGrids grids;
};
BackwardLaunch backward_launch(const Problem& problem, const BackwardTensors& tensors, double scale,
                               const BackwardChoice& choice, bool deterministic, const BackwardKernels& kernels,
                               int multiprocessors, void* workspace, const PackedArgs& packed = {});

/// Whether tensor maps can describe q, k, v and dout (sm90_forward_describable).
bool sm90_backward_describable(const BackwardTensors& tensors) noexcept;

/// The maps of an sm90 kernel, as templates/sm90/sm90_backward_params.cuh describes them.
struct Sm90BackwardMaps {
  TensorMapSpec q, k, v, dout;
};
Sm90BackwardMaps sm90_backward_maps(const BackwardTensors& tensors, const KernelSpec& spec) noexcept;

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_BACKWARD_HPP_
