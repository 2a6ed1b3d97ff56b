#ifndef FA_SRC_PLAN_SM80_BACKWARD_HPP_
#define FA_SRC_PLAN_SM80_BACKWARD_HPP_

#include <string>
#include <vector>

#include "plan/backward.hpp"
#include "plan/kernel_spec.hpp"
#include "plan/problem.hpp"

namespace fa::plan {

struct BackwardFamily;

/// Dynamic shared memory of a thread block: the layouts of templates/sm80/sm80_backward_traits.cuh and
/// sm80_backward_dq.cuh.
int sm80_backward_shared_bytes(const KernelSpec& spec);
int sm80_backward_dq_shared_bytes(const KernelSpec& spec);

/// Registers a thread spends on the fragments that live together in the main loop.
int sm80_backward_registers(const KernelSpec& spec);
int sm80_backward_dq_registers(const KernelSpec& spec);

/// Resident thread blocks a multiprocessor, of the kernel's architecture, that its registers and shared memory allow;
/// of both.
int sm80_backward_resident_blocks(const KernelSpec& spec);

/// Why the kernel cannot be built for its architecture, with the limit that it breaks; empty when it can.
std::string sm80_backward_refusal(const KernelSpec& spec);
std::string sm80_backward_dq_refusal(const KernelSpec& spec);

/// Kernels for `problem` with what `fixed` fixes, in order of preference, at least one. The first that compiles without
/// spilling registers should run. Throws fa::Error when nothing fits: invalid_argument with an override, else
/// unsupported.
std::vector<KernelSpec> sm80_backward_specs(const Problem& problem, const Fixed& fixed, const BackwardChoice& choice,
                                            bool deterministic);

/// Whether there are any.
bool sm80_backward_fits(const Problem& problem, const Fixed& fixed, bool deterministic);

/// Likewise for the pass that computes dQ alone.
std::vector<KernelSpec> sm80_backward_dq_specs(const Problem& problem);

extern const BackwardFamily kSm80BackwardFamily;  ///< in the catalogue

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_SM80_BACKWARD_HPP_
