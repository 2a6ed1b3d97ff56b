#ifndef FA_SRC_PLAN_CATALOGUE_HPP_
#define FA_SRC_PLAN_CATALOGUE_HPP_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "expression/emit.hpp"
#include "plan/candidates.hpp"
#include "plan/field.hpp"
#include "plan/kernel_spec.hpp"
#include "plan/problem.hpp"

namespace fa::plan {

/// Everything that the library knows about a kernel but how it computes: an entry of the catalogue. Each stands in
/// kernels/, beside the kernel's own fields and their list.
struct Kernel {
  /// What a rendered unit is made of.
  struct Unit {
    const char* header;
    const char* params;                       ///< what it is launched with, of namespace fa::kernel
    const char* variant_params;               ///< likewise, where a spec has variants
    const char* stored_params = nullptr;      ///< likewise, where K or V is stored in 8 bits, or q and k are i8
    const char* statistics_params = nullptr;  ///< likewise, with gradients of statistics
    const char* function;                     ///< template over Config that the kernel calls
    const char* room = nullptr;    ///< template over Config with kSharedBytes, if the kernel has shared memory
    bool asserts_threads = false;  ///< that room's kThreads
    bool has_element = true;       ///< Config names the tensors' element
    /// Which part of a spec's functions stands in the source.
    expression::Part part = expression::Part::values;
  };

  std::string_view name;          ///< "sm90_forward": how canonical texts begin
  std::string_view entry = name;  ///< behind "fa_", the entry point
  Op op = Op::forward;
  Family family = Family::automatic;  ///< automatic: it serves every family
  Facts keyed_on = Facts::call;       ///< of those that name problems: what its specs follow from
  Unit unit{};
  std::span<const Field> fields;
  int first_nvrtc = 0;       ///< 100 * major + minor of the first version that knows its instructions; 0: any
  int cluster = 1;           ///< thread blocks that share a tile
  bool persistent = false;   ///< blocks stay for all the tiles that they take
  bool tensor_maps = false;  ///< its parameters begin with tensor maps
  bool cuts_groups = false;  ///< a tile may have some of the query heads that a KV head has, with pack_gqa
  /// Under causality, heads that blocks work on at a time for their tiles to be at many places of heads
  /// (heads_of_spread_places); nullptr: any number does.
  int (*spread_heads)(std::int64_t m_blocks, std::int64_t heads, std::int64_t most, int multiprocessors) = nullptr;
  int (*shared_bytes)(const KernelSpec&) = nullptr;     ///< dynamic, of a thread block; nullptr: none
  std::string (*refusal)(const KernelSpec&) = nullptr;  ///< why it cannot be built; nullptr: it always can
  /// Resident thread blocks a multiprocessor, where the spec says how many; nullptr: one.
  int (*resident_blocks)(const KernelSpec&) = nullptr;
  /// Bytes that ptxas may spill of a thread, where these are wanted in front of the main loop and behind it alone, as
  /// far as was measured; nullptr: none. Beyond, the next choice is tried.
  int (*harmless_spill)(const KernelSpec&) = nullptr;
  /// Whether it may be launched before the kernel in front is complete (early_start.hpp); nullptr: never.
  bool (*starts_early)(const KernelSpec&) = nullptr;
  /// Warps of a thread block, where no field says them; nullptr: one does.
  int (*warps)(const KernelSpec&) = nullptr;
};

/// All kernels.
std::span<const Kernel* const> catalogue() noexcept;

/// The kernel whose canonical texts begin with `name`; nullptr when there is none.
const Kernel* find_kernel(std::string_view name) noexcept;

/// The own part of a spec of the kernel that does `op`, in `family` where families differ.
KernelSpec::Own own_of(Op op, Family family = Family::sm80);

/// Why a kernel cannot be built, with the limit that it breaks; empty when it can.
std::string refusal(const KernelSpec& spec);

/// How a family computes a forward: what the planner asks for each.
struct ForwardFamily {
  Family family;
  const Kernel* kernel;         ///< the main one
  Facts bits_of = Facts::call;  ///< the least that it lets bits of a row follow from, where a call wants that
  /// Thread blocks from which on the keys of a query tile are not split.
  std::int64_t enough_blocks;
  bool has_counter = false;  ///< blocks may take query tiles from a counter
  bool of_bytes = false;     ///< its products are of 8-bit elements
  /// What it needs of the architecture and the dtype, and what of a call, that the problem has not. nullptr: it serves
  /// every problem.
  const char* (*misfit)(const Problem&) noexcept = nullptr;
  const char* (*obstacle)(const Problem&) noexcept = nullptr;
  /// Lets blocks form clusters, where that is faster; nullptr: never.
  void (*form_clusters)(const Problem&, const Fixed&, Choice&) noexcept = nullptr;
  /// Whether blocks take query tiles whole, whose splits follow from a length. It changes no bit.
  bool (*takes_whole)(const Problem&, const Choice&) noexcept = nullptr;
  /// Whether the query heads that `choice` packs fill its tiles; nullptr: always.
  bool (*packs)(const Problem&, const Fixed&, const Choice&) noexcept = nullptr;
  /// Keys out of an affine score function's reach may be left out; nullptr: never.
  bool (*may_have_reach)(const Problem&) noexcept = nullptr;
  /// Keys that a row sees from which on blocks share those of requests over pages by a schedule; nullopt: they do not,
  /// whatever an override says. nullptr: never.
  std::optional<std::int64_t> (*scheduled_keys)(const Problem&, const Choice&) noexcept = nullptr;
  /// Adds to the choice which of its kernels the shapes want; the rows of a query tile.
  int (*decide)(const Problem&, const Fixed&, Choice&) noexcept;
  std::vector<KernelSpec> (*specs)(const Problem&, const Fixed&, const Choice&);
  bool (*fits)(const Problem&, const Fixed&, const Choice&) = nullptr;  ///< nullptr: not asked
  Candidates (*candidates)(const Problem&, const Choice&);
};

/// In order of preference; the last one serves what no other does.
std::span<const ForwardFamily* const> forward_families() noexcept;
const ForwardFamily& forward_family(Family family) noexcept;

/// How a family computes a backward.
struct BackwardFamily {
  Family family;
  const Kernel* kernel;
  std::int64_t (*enough_blocks)(const Problem&) noexcept;
  std::int64_t rows_together;  ///< of a dense batch's row statistics, which tiles read whole
  bool orders_dq = false;      ///< its key tiles can add to dQ in one order
  const char* (*misfit)(const Problem&) noexcept = nullptr;
  const char* (*obstacle)(const Problem&) noexcept = nullptr;
  /// Whether what an override fixes may be of its kernels, if they have the fields; nullptr: it may.
  bool (*follows)(const Fixed&) noexcept = nullptr;
  /// Whether all of its kernels may spill for a problem, so that the last family's stand behind them; nullptr: never.
  bool (*may_spill)(const Problem&) noexcept = nullptr;
  /// Who shares the query tiles of a key tile; nullptr: nobody. And whether so many may add to dK and dV in turns.
  KeyTileShares (*shares)(const Problem&, int splits) noexcept = nullptr;
  bool (*takes_turns)(const Problem&, int parts) noexcept = nullptr;
  std::vector<KernelSpec> (*specs)(const Problem&, const Fixed&, const BackwardChoice&, bool deterministic);
  bool (*fits)(const Problem&, const Fixed&, bool deterministic) = nullptr;
  Candidates (*candidates)(const Problem&, const BackwardChoice&, bool deterministic);
};

/// The last one that has kernels for a problem: of all its layouts and strides, where any family has.
const ForwardFamily& last_forward_family(const Problem& problem) noexcept;

std::span<const BackwardFamily* const> backward_families() noexcept;
const BackwardFamily& backward_family(Family family) noexcept;

/// Why the family that serves a problem's usual calls does not serve this one, and another does; nullptr when it does,
/// or an override wants the other.
const char* forward_detour(const Problem& problem, const Fixed& fixed) noexcept;
const char* backward_detour(const Problem& problem, const Fixed& fixed) noexcept;

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_CATALOGUE_HPP_
