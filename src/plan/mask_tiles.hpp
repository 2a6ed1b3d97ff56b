#ifndef FA_SRC_PLAN_MASK_TILES_HPP_
#define FA_SRC_PLAN_MASK_TILES_HPP_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <common/variant_params.cuh>

#include "plan/kernel_spec.hpp"
#include "plan/problem.hpp"
#include "plan/variant_launch.hpp"

namespace fa::plan {

/// Whether the attention kernels of `problem` read tile lists, which a kernel before them writes. Those of a packed
/// batch or over pages, whose tiles only the device knows, look at every tile that masks in closed form leave.
bool needs_tile_lists(const Problem& problem) noexcept;

/// Whether tiles of a persistent forward differ so that its grid comes in waves, unless it is bounded.
bool comes_in_waves(const Problem& problem) noexcept;

/// The kernel that lists the tiles of a mask function for `attention`: a forward, backward or backward_dq kernel.
KernelSpec mask_tiles_spec(const KernelSpec& attention);

/// Whether kernels of `op` read tile lists, where their problem needs them.
bool reads_tile_lists(Op op) noexcept;

/// The kernels of a plan for `problem`, and before each that reads tile lists those that may write them: one for every
/// tiling among its alternatives, of which only the compiler can say which one is taken.
std::vector<Alternatives> with_mask_tiles(const Problem& problem, const std::vector<Alternatives>& kernels);

/// Bytes of the lists and of the scratch of the kernel that writes them, a multiple of 256; 0 where none are needed.
/// The second form is for whichever of the kernels is taken.
std::size_t mask_tiles_bytes(const Problem& problem, const KernelSpec& attention) noexcept;
std::size_t mask_tiles_bytes(const Problem& problem, std::span<const KernelSpec> attention) noexcept;

/// Names what lists are of: tiles, shape and masks, all that says what a list holds but what captures hold. Never 0;
/// equal for kernels that may share lists.
std::uint64_t mask_tiles_tag(const Problem& problem, const KernelSpec& attention) noexcept;

/// A tag that depends on both, never 0.
std::uint64_t mix_tag(std::uint64_t tag, std::uint64_t value) noexcept;

/// On how many thread blocks the kernel runs, and what of the memory its lists take: behind that is its scratch.
struct MaskTilesGrid {
  std::int64_t grid = 0;
  std::size_t list_bytes = 0;
};

/// Fills in what the kernel is launched with, and in `variant`, of the attention kernel's parameters, what lists are
/// about. Where they are stays null.
MaskTilesGrid mask_tiles_params(const Problem& problem, const KernelSpec& attention, kernel::VariantParams& variant,
                                kernel::MaskTilesParams& params) noexcept;

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_MASK_TILES_HPP_
