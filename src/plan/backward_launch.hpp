#ifndef FA_SRC_PLAN_BACKWARD_LAUNCH_HPP_
#define FA_SRC_PLAN_BACKWARD_LAUNCH_HPP_

#include <cstdint>

#include <common/variant_params.cuh>

#include "plan/backward.hpp"
#include "plan/forward_launch.hpp"
#include "plan/kernel_spec.hpp"
#include "plan/problem.hpp"

namespace fa::plan {

/// What of a backward's kernels its parameters depend on.
struct BackwardKernels {
  const KernelSpec& main;
  const KernelSpec& dq;  ///< meaningful unless the main kernel writes dQ
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

/// Fills in what every kernel of a call is launched with but the pass for dQ, and `dq_params` for that, where there is
/// one. `rows`: padded_rows of the call. Places in the workspace stay null. Throws fa::Error(internal) where no kernel
/// writes dQ. `most_blocks`: CallFacts.
BackwardGrids backward_params(const Problem& problem, const BackwardTensors& tensors, double scale,
                              const BackwardChoice& choice, const BackwardKernels& kernels, std::int64_t rows,
                              int multiprocessors, const PackedArgs& packed, kernel::BackwardVariantParams& params,
                              kernel::BackwardVariantParams& dq_params, int most_blocks = 0);

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_BACKWARD_LAUNCH_HPP_
