#ifndef FA_SRC_PLAN_SM90_FORWARD_HPP_
#define FA_SRC_PLAN_SM90_FORWARD_HPP_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plan/kernel_spec.hpp"
#include "plan/planner.hpp"
#include "plan/problem.hpp"

namespace fa::plan {

struct ForwardFamily;

/// What the family needs of the architecture and the dtype that the problem has not; nullptr when it has all.
const char* sm90_forward_misfit(const Problem& problem) noexcept;

/// Why the copy engine cannot serve this call, although a family of it serves others of the configuration: unaligned
/// rows, strides that no tensor map describes, an empty axis. nullptr when it can.
const char* sm90_copy_obstacle(const Problem& problem) noexcept;

/// Whether two blocks of one consumer fit a multiprocessor.
bool sm90_forward_has_two_blocks(const Problem& problem, const KernelSpec& spec);

/// Whether a problem has enough rows for large-M query tiles, which more consumer warpgroups share than others: as many
/// tiles as the GPU has multiprocessors, and few rows of padding.
bool sm90_forward_many_rows(const Problem& problem, const Fixed& fixed, bool pack_gqa) noexcept;

/// Whether these should be those of long rows.
bool sm90_forward_long_rows(const Problem& problem) noexcept;

/// Whether thread blocks share the keys of a call's only request over pages in splits: the fastest for one request,
/// whose splits are of equal length whatever it is.
bool sm90_forward_splits_request(const Problem& problem, const Fixed& fixed, const Choice& choice) noexcept;

/// Lets the blocks of a cluster merge the splits of tiles of few rows, where that is faster than another kernel.
void sm90_forward_form_clusters(const Problem& problem, const Fixed& fixed, Choice& choice) noexcept;

/// Whether blocks take all splits of a query tile where those follow from a length: in few rows, if that takes less
/// rounds of blocks than a split each.
bool sm90_forward_takes_whole(const Problem& problem, const Choice& choice) noexcept;

/// Whether thread blocks share keys over pages, and find their parts by themselves: of a call without a schedule, of so
/// few tiles that a warp knows them (templates/common/own_parts.cuh).
bool sm90_forward_finds_parts(const Problem& problem, const Fixed& fixed, const Choice& choice) noexcept;

/// Whether the softmax of rows, or of long rows, takes their exact maxima, rather than ones that trail: as accurate as
/// can be, and measured to cost little with head dims of 112 to 128 where rows are not long. Of calls over pages it is
/// those of `parts` that may, and always do.
bool sm90_forward_exact_max(const Problem& problem, const Fixed& fixed, bool long_rows, bool parts) noexcept;

/// Whether the score function takes from scores by distance, and each row's best key is visible, so that keys out of
/// its reach may be left out.
bool sm90_forward_may_have_reach(const Problem& problem) noexcept;

/// ForwardFamily::scheduled_keys.
std::optional<std::int64_t> sm90_forward_scheduled_keys(const Problem& problem, const Choice& choice) noexcept;

/// Adds to `choice` which of the family's kernels the shapes want; the rows of a query tile.
int sm90_forward_decide(const Problem& problem, const Fixed& fixed, Choice& choice) noexcept;

/// Query rows of a thread block, the same for all of a problem's kernels without `Choice::many_rows`.
int sm90_forward_tile_m(const Problem& problem, const Fixed& fixed, const Choice& choice) noexcept;

/// Warps of a thread block: a warpgroup for each 64 query rows, one of producers, and one that draws what dropout drops
/// where registers are left for it.
int sm90_forward_warps(const KernelSpec& spec) noexcept;

/// Whether a warpgroup's last row may see fewer KV tiles than the last row of the tile, by causality alone. The others
/// learn from its turns that it skips one.
bool sm90_forward_own_ends(const KernelSpec& spec) noexcept;

/// Whether a third or a quarter of a tile's rows may see none of a KV tile's keys, by causality alone.
bool sm90_forward_may_skip_hidden(const KernelSpec& spec) noexcept;

/// Pieces of a KV tile that the softmax works on one after the other.
int sm90_forward_softmax_chunks(const KernelSpec& spec) noexcept;

/// Dynamic shared memory of a thread block: the layout of templates/sm90/sm90_forward.cuh.
int sm90_forward_shared_bytes(const KernelSpec& spec);

/// Registers that a consumer thread spends on what lives across the main loop: S, P and O.
int sm90_forward_registers(const KernelSpec& spec);

/// Why the kernel cannot be built, with the limit that it breaks; empty when it can.
std::string sm90_forward_refusal(const KernelSpec& spec);

/// Kernels for `problem` with what `fixed` fixes, in order of preference, at least one. The first that compiles without
/// spilling registers should run. Throws fa::Error when nothing fits: invalid_argument with an override, else
/// unsupported.
std::vector<KernelSpec> sm90_forward_specs(const Problem& problem, const Fixed& fixed, const Choice& choice);

/// Heads of a section of a causal grid (ForwardParams::heads_in_flight) for a persistent launch of `multiprocessors`
/// blocks, 1 to heads. Blocks take tiles round by round, every other round backwards, which evens out their sums as
/// long as lengths fall evenly: a section should end where a pair of rounds ends, and there should be few heads in it,
/// so that their K and V stay in the L2 cache, but no fewer than about a quarter of the blocks.
int balanced_heads(std::int64_t m_blocks, std::int64_t heads, int multiprocessors) noexcept;

/// The same where blocks take tiles from a counter: as many heads as `most`, in sections of one size.
int equal_sections(std::int64_t heads, std::int64_t most) noexcept;

extern const ForwardFamily kSm90ForwardFamily;  ///< in the catalogue

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_SM90_FORWARD_HPP_
