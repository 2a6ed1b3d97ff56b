#ifndef FA_SRC_PLAN_ARCH_HPP_
#define FA_SRC_PLAN_ARCH_HPP_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <fa/tensor.hpp>

#include "support/arch.hpp"

namespace fa::plan {

using support::Arch;
using support::to_string;

/// Parses "sm_90a" (or "90a"). Throws fa::Error(invalid_argument) naming what is accepted.
Arch parse_arch(std::string_view text);

/// Like `parse_arch`, of what some GPU looks up: not sm_90, whose kernels a Hopper GPU, which asks for sm_90a, never
/// finds.
Arch parse_target(std::string_view text);

/// Other targets whose kernels GPUs that look up `target` can run, nearest first: the lower ones of compute capability
/// 8.x. None of a target with a suffix, and none for or of 8.7 and 8.8, which are no capabilities of desktop GPUs.
std::vector<Arch> substitute_targets(Arch target);

/// What one multiprocessor offers a thread block (CUDA C++ Programming Guide, "Compute Capabilities").
struct ArchLimits {
  int shared_per_block;  ///< bytes, with the opt-in attribute
  int shared_per_sm;     ///< bytes, 1024 of them reserved for each resident block
  int registers_per_sm;
};

/// Throws fa::Error(unsupported) for capabilities below 7.5.
ArchLimits limits(Arch arch);

/// Of an H100 SXM and of an H200, which rules about few tiles were measured on.
inline constexpr std::int64_t kHopperMultiprocessors = 132;

/// Whether tiles of long rows are smaller than elsewhere: 64 KiB are there.
constexpr bool has_little_shared(Arch arch) noexcept {
  return arch.major < 8;
}

/// Throws fa::Error(unsupported) for elements that kernels for `arch` do not multiply.
void check_dtype(Arch arch, DType dtype);

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_ARCH_HPP_
