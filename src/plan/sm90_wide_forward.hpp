#ifndef FA_SRC_PLAN_SM90_WIDE_FORWARD_HPP_
#define FA_SRC_PLAN_SM90_WIDE_FORWARD_HPP_

#include <cstdint>
#include <string>
#include <vector>

#include "plan/kernel_spec.hpp"
#include "plan/planner.hpp"
#include "plan/problem.hpp"

namespace fa::plan {

struct ForwardFamily;

inline constexpr int kSm90WideTile = 64;  ///< query rows of a tile, and keys

/// What the family needs of the architecture, the dtype and the configuration that the problem has not; nullptr when it
/// has all.
const char* sm90_wide_forward_misfit(const Problem& problem) noexcept;

int sm90_wide_forward_warps(const KernelSpec& spec) noexcept;

/// Dynamic shared memory of a thread block: templates/sm90/sm90_wide_layout.cuh.
int sm90_wide_forward_shared_bytes(const KernelSpec& spec);

/// Why the kernel cannot be built, with the limit that it breaks; empty when it can.
std::string sm90_wide_forward_refusal(const KernelSpec& spec);

/// Adds to `choice` which of the family's kernels the shapes want; the rows of a query tile.
int sm90_wide_forward_decide(const Problem& problem, const Fixed& fixed, Choice& choice) noexcept;

/// Lets two blocks whose heads see the same keys copy them for each other, where copies limit.
void sm90_wide_forward_form_clusters(const Problem& problem, const Fixed& fixed, Choice& choice) noexcept;

/// The kernel for `problem`, with as many stages as fit, or those that `fixed` fixes. Throws
/// fa::Error(invalid_argument) when these do not fit.
std::vector<KernelSpec> sm90_wide_forward_specs(const Problem& problem, const Fixed& fixed, const Choice& choice);

/// Heads of a section of a causal grid of `multiprocessors` blocks in static rounds, whose tiles start longest first:
/// as few as let a block come by places all over a section, so that blocks get equal work; 0 if none up to `most` does.
int heads_of_spread_places(std::int64_t m_blocks, std::int64_t heads, std::int64_t most, int multiprocessors) noexcept;

extern const ForwardFamily kSm90WideForwardFamily;  ///< in the catalogue

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_SM90_WIDE_FORWARD_HPP_
