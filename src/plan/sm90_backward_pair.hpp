#ifndef FA_SRC_PLAN_SM90_BACKWARD_PAIR_HPP_
#define FA_SRC_PLAN_SM90_BACKWARD_PAIR_HPP_

#include <string>

#include "plan/kernel_spec.hpp"
#include "plan/problem.hpp"

// The Hopper backward of head dims above 128, by two thread blocks of a cluster, and above 256 by four: part of what
// sm90_backward.hpp promises, and called from there.
namespace fa::plan {

/// Whether its head dims are those of several blocks.
bool is_pair(const Problem& problem) noexcept;

/// Thread blocks that share a key tile by columns.
int blocks_of_tile(int d_qk, int d_v) noexcept;
inline int blocks_of_tile(const Problem& problem) noexcept {
  return blocks_of_tile(problem.d_qk, problem.d_v);
}

/// Keys of a box that the copy engine takes of K or V: four blocks have the scores of half a tile each.
int sm90_backward_box_keys(const KernelSpec& spec) noexcept;

/// What the blocks need of the head dims that the problem has not; nullptr when they have all.
const char* sm90_backward_pair_misfit(const Problem& problem) noexcept;

/// Of a thread block.
inline constexpr int kSm90BackwardPairWarps = 16;

/// The spec with the threads of such a block.
KernelSpec as_pair(KernelSpec spec);

/// Dynamic shared memory of each block: the layout of templates/sm90/sm90_backward_pair.cuh,
/// or of sm90_backward_wide.cuh.
int sm90_backward_pair_shared_bytes(const KernelSpec& spec);

/// Registers that a thread of the warpgroups for dK and dV spends on accumulators.
int sm90_backward_pair_registers(const KernelSpec& spec);

/// Why the kernel cannot be built, with the limit that it breaks; empty when it can.
std::string sm90_backward_pair_refusal(const KernelSpec& spec);

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_SM90_BACKWARD_PAIR_HPP_
