#ifndef FA_SRC_PLAN_SM90_FP8_FORWARD_HPP_
#define FA_SRC_PLAN_SM90_FP8_FORWARD_HPP_

#include <string>
#include <vector>

#include "plan/kernel_spec.hpp"
#include "plan/planner.hpp"
#include "plan/problem.hpp"

namespace fa::plan {

struct ForwardFamily;

/// Query rows of a tile, of calls whose keys are not split.
int sm90_fp8_forward_tile_m(const Problem& problem, const Fixed& fixed) noexcept;

/// Takes what of the kernels the shapes want; returns the rows of a query tile.
int sm90_fp8_forward_decide(const Problem& problem, const Fixed& fixed, Choice& choice) noexcept;

/// What the family needs of the architecture, the dtype and the configuration that the problem has not; nullptr when it
/// has all.
const char* sm90_fp8_forward_misfit(const Problem& problem) noexcept;

/// What it needs of a call's tensors that these have not; nullptr when they have all.
const char* sm90_fp8_forward_obstacle(const Problem& problem) noexcept;

/// Throws fa::Error(unsupported) where no kernel serves a problem of 8-bit floats: `choice` is of another family.
void check_fp8(const Problem& problem, const Fixed& fixed, const Choice& choice);

int sm90_fp8_forward_warps(const KernelSpec& spec) noexcept;

/// Dynamic shared memory of a thread block: templates/sm90/sm90_fp8_layout.cuh.
int sm90_fp8_forward_shared_bytes(const KernelSpec& spec);

/// Why the kernel cannot be built, with the limit that it breaks; empty when it can.
std::string sm90_fp8_forward_refusal(const KernelSpec& spec);

/// Kernels for `problem`, in order of preference, of what `fixed` leaves open. Throws fa::Error(invalid_argument) when
/// none fits.
std::vector<KernelSpec> sm90_fp8_forward_specs(const Problem& problem, const Fixed& fixed, const Choice& choice);

extern const ForwardFamily kSm90Fp8ForwardFamily;  ///< in the catalogue

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_SM90_FP8_FORWARD_HPP_
