#ifndef FA_SRC_PLAN_SM80_FORWARD_HPP_
#define FA_SRC_PLAN_SM80_FORWARD_HPP_

#include <string>
#include <vector>

#include "plan/kernel_spec.hpp"
#include "plan/planner.hpp"
#include "plan/problem.hpp"

namespace fa::plan {

struct ForwardFamily;

/// Dynamic shared memory of a thread block: the layout of templates/sm80/sm80_forward_traits.cuh.
int sm80_forward_shared_bytes(const KernelSpec& spec);

/// Registers a thread spends on the fragments that live across the main loop: O, scores, and Q if it stays there.
int sm80_forward_registers(const KernelSpec& spec);

/// Resident thread blocks a multiprocessor, of the kernel's architecture, that its registers and shared memory allow.
int sm80_forward_resident_blocks(const KernelSpec& spec);

/// Kernel::harmless_spill: of warps that split a cache of 8 bits, whose wide O leaves no room for what parts are found
/// by.
int sm80_forward_harmless_spill(const KernelSpec& spec);

/// Why the kernel cannot be built for its architecture, with the limit that it breaks; empty when it can.
std::string sm80_forward_refusal(const KernelSpec& spec);

/// Whether thread blocks share the keys of few rows, and find their parts of these by themselves
/// (templates/common/own_parts.cuh).
bool sm80_forward_finds_parts(const Problem& problem, const Fixed& fixed) noexcept;

/// Sets what the choice has of this family alone; rows of a query tile.
int sm80_forward_decide(const Problem& problem, const Fixed& fixed, Choice& choice) noexcept;

/// Kernels for `problem` with what `fixed` fixes, in order of preference, at least one. The first that compiles without
/// spilling registers should run. Throws fa::Error when nothing fits: invalid_argument with an override, else
/// unsupported.
std::vector<KernelSpec> sm80_forward_specs(const Problem& problem, const Fixed& fixed, const Choice& choice);

/// Whether there are any.
bool sm80_forward_fits(const Problem& problem, const Fixed& fixed, const Choice& choice);

extern const ForwardFamily kSm80ForwardFamily;  ///< in the catalogue

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_SM80_FORWARD_HPP_
