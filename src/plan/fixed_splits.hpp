#ifndef FA_SRC_PLAN_FIXED_SPLITS_HPP_
#define FA_SRC_PLAN_FIXED_SPLITS_HPP_

#include <cstddef>
#include <cstdint>

#include "plan/kernel_spec.hpp"
#include "plan/problem.hpp"

namespace fa::plan {

/// How blocks of a kernel with a fixed split size work on a problem, and what they leave in the workspace
/// (templates/common/fixed_splits.cuh). No bit of a result depends on it.
struct FixedSplits {
  std::int64_t tiles = 0;   ///< query tiles of all heads
  std::int64_t splits = 0;  ///< of a query tile, at most
  int sharing = 1;          ///< blocks that share them

  std::int64_t counters = 0;     ///< i32, cleared in front; sm80
  std::int64_t flags = 0;        ///< u64, of whatever value; sm90
  std::int64_t partial_o = 0;    ///< floats
  std::int64_t partial_lse = 0;  ///< floats
};
FixedSplits fixed_splits(const Problem& problem, const KernelSpec& attention) noexcept;

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_FIXED_SPLITS_HPP_
