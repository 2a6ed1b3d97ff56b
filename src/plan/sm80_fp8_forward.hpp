#ifndef FA_SRC_PLAN_SM80_FP8_FORWARD_HPP_
#define FA_SRC_PLAN_SM80_FP8_FORWARD_HPP_

#include <string>
#include <vector>

#include "plan/kernel_spec.hpp"
#include "plan/planner.hpp"
#include "plan/problem.hpp"

namespace fa::plan {

struct ForwardFamily;

/// What the family needs of the architecture, the dtype and the configuration that the problem has not; nullptr when it
/// has all.
const char* sm80_fp8_forward_misfit(const Problem& problem) noexcept;

/// What it needs of a call's tensors that these have not; nullptr when they have all.
const char* sm80_fp8_forward_obstacle(const Problem& problem) noexcept;

/// The rows of a query tile.
int sm80_fp8_forward_decide(const Problem& problem, const Fixed& fixed, Choice& choice) noexcept;

/// Dynamic shared memory of a thread block.
int sm80_fp8_forward_shared_bytes(const KernelSpec& spec);

/// Resident thread blocks a multiprocessor.
int sm80_fp8_forward_resident_blocks(const KernelSpec& spec);

/// Bytes that ptxas may spill of a thread, where products of 8 bits are made of those of 16.
int sm80_fp8_forward_harmless_spill(const KernelSpec& spec);

/// Why the kernel cannot be built, with the limit that it breaks; empty when it can.
std::string sm80_fp8_forward_refusal(const KernelSpec& spec);

/// Kernels for `problem`, in order of preference, of what `fixed` leaves open. Throws fa::Error(invalid_argument) when
/// none fits.
std::vector<KernelSpec> sm80_fp8_forward_specs(const Problem& problem, const Fixed& fixed, const Choice& choice);

extern const ForwardFamily kSm80Fp8ForwardFamily;  ///< in the catalogue

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_SM80_FP8_FORWARD_HPP_
