#ifndef FA_SRC_PLAN_EARLY_START_HPP_
#define FA_SRC_PLAN_EARLY_START_HPP_

#include "plan/arch.hpp"
#include "plan/kernel_spec.hpp"

namespace fa::plan {

/// Whether kernels of an architecture may be launched before the one in front of them is complete (griddepcontrol).
bool overlaps(const Arch& arch) noexcept;

/// Whether a kernel may be launched so. Of a backward, behind another of the same call: each of its blocks waits for
/// that one before it reads what any kernel of the call has written, and before it writes. Tile lists are read first. A
/// forward, behind whatever the caller has queued: all threads wait for that before they touch any tensor.
bool may_start_early(const KernelSpec& spec) noexcept;

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_EARLY_START_HPP_
