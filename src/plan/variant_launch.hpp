#ifndef FA_SRC_PLAN_VARIANT_LAUNCH_HPP_
#define FA_SRC_PLAN_VARIANT_LAUNCH_HPP_

#include <span>

#include <common/place_params.cuh>
#include <common/variant_params.cuh>

#include "expression/ranges.hpp"
#include "plan/problem.hpp"

namespace fa::plan {

/// The tensors of a call besides the usual ones.
struct VariantTensors {
  std::span<const expression::CapturedView> captures = {};  ///< in the order of Variants::captures
  TensorView sink = {};                                     ///< [h_q]
  TensorView dsink = {};                                    ///< [h_q]; optional
};

/// Row i keeps key j <= i + causal_shift, where the kernel is causal; in a packed batch j <= i + causal_shift + the
/// diagonal of its sequence.
int causal_shift(const Problem& problem) noexcept;

/// What kernels that read the place of a call, and the host, derive masks from. `place` has the sizes of the whole.
kernel::PlaceParams place_params(const Problem& problem, const ShardPlace& place) noexcept;

/// `params` for a call of `problem` and its place.
kernel::DropoutParams placed_dropout(const Problem& problem, kernel::DropoutParams params) noexcept;

/// What the kernels of `problem` read besides the usual parameters. `scale` is that of scores.
kernel::VariantParams variant_params(const Problem& problem, const VariantTensors& tensors, double scale) noexcept;

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_VARIANT_LAUNCH_HPP_
