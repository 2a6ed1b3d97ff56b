#ifndef FA_SRC_PLAN_SM80_FORWARD_HPP_
#define FA_SRC_PLAN_SM80_FORWARD_HPP_

#include <string>

#include "plan/kernel_spec.hpp"
#include "plan/problem.hpp"

namespace fa::plan {

/// Dynamic shared memory of a thread block: the layout of templates/sm80/sm80_forward.cuh.
int sm80_forward_shared_bytes(const KernelSpec& spec);

/// Registers a thread needs, by the accumulators and operands that live across the main loop.
int sm80_forward_registers(const KernelSpec& spec);

/// Why the kernel cannot be built for its architecture, with the limit that it breaks; empty when it can.
std::string sm80_forward_refusal(const KernelSpec& spec);

/// The planner's choice for `problem`, with what `fixed` fixes. Throws fa::Error(unsupported) when nothing fits.
KernelSpec sm80_forward_spec(const Problem& problem, const KernelOverride& fixed, bool pack_gqa, bool split);

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_SM80_FORWARD_HPP_
