#ifndef FA_SRC_PLAN_SM90_BACKWARD_HPP_
#define FA_SRC_PLAN_SM90_BACKWARD_HPP_

#include <string>
#include <vector>

#include "plan/backward.hpp"
#include "plan/kernel_spec.hpp"
#include "plan/problem.hpp"

namespace fa::plan {

struct BackwardFamily;

/// What the family needs of the architecture, the dtype and the head dims that the problem has not; nullptr when it has
/// all.
const char* sm90_backward_misfit(const Problem& problem) noexcept;

/// Whether no kernel of the family spills for want of registers: it computes nothing besides plain attention.
bool sm90_backward_is_plain(const Problem& problem) noexcept;

/// Why the copy engine cannot serve this call, although the family serves others of the configuration; nullptr when it
/// can.
const char* sm90_backward_obstacle(const Problem& problem) noexcept;

/// Warps of a thread block: a warpgroup for each consumer, and one of producers.
int sm90_backward_warps(const KernelSpec& spec) noexcept;

/// Dynamic shared memory of a thread block: the layout of templates/sm90/sm90_backward.cuh.
int sm90_backward_shared_bytes(const KernelSpec& spec);

/// Registers that a consumer thread spends on accumulators and operands where they are most.
int sm90_backward_registers(const KernelSpec& spec);

/// Why the kernel cannot be built, with the limit that it breaks; empty when it can.
std::string sm90_backward_refusal(const KernelSpec& spec);

/// Main kernels for `problem` with what `fixed` fixes, in order of preference, at least one. The first that compiles
/// without spilling registers should run. Throws fa::Error when nothing fits: invalid_argument with an override, else
/// unsupported.
std::vector<KernelSpec> sm90_backward_specs(const Problem& problem, const Fixed& fixed, const BackwardChoice& choice,
                                            bool deterministic);

extern const BackwardFamily kSm90BackwardFamily;  ///< in the catalogue

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_SM90_BACKWARD_HPP_
