#ifndef FA_SRC_PLAN_WORKSPACE_HPP_
#define FA_SRC_PLAN_WORKSPACE_HPP_

#include <array>
#include <cstddef>
#include <cstdint>

#include "plan/backward.hpp"
#include "plan/fixed_splits.hpp"
#include "plan/planner.hpp"
#include "plan/problem.hpp"

namespace fa::plan {

/// What lies in the scratch memory of a call.
enum class Section : std::uint8_t {
  counters,     ///< i32, of query tiles; kCounterBytes behind it norms, u32 [b, h_q] and [b, h_kv]
  partial_o,    ///< f32 [splits, b, h_q, s_q, d_v]; scheduled: [2 parts, rows, d_v]; else as FixedSplits says
  partial_lse,  ///< f32 [splits, b, h_q, s_q, kSplitSumFloats]; scheduled: [2 parts, rows, kSplitSumFloats]
  lse_log2,     ///< f32 [b, h_q, padded_rows]
  delta,        ///< f32 [b, h_q, padded_rows]
  dq_accum,     ///< f32 [b, h_q, padded_rows, d_qk]
  turns,        ///< i32 [b, h_q, padded_rows / 16, 2]
  partial_dkv,  ///< f32 [splits, b, h_kv, s_kv, d_qk + d_v]
  schedule,     ///< templates/common/schedule_params.cuh
  split_flags,  ///< u64 [tiles, blocks], where blocks share fixed splits (templates/common/flags.cuh)
  column_sums,  ///< f32 [b, heads, s_kv], or [heads, total_kv] of packed keys: where top keys are wanted alone
  max_rows,     ///< u64 [h_q]: in which rows the greatest logits of heads are
  max_keys,     ///< i32 [b, h_q, s_q], or [h_q, total_q]: where greatest logits are
  row_sums,     ///< f32, likewise: of P times the gradient of column sums
  // Last: the caller may have memory of their own for them.
  tile_lists,     ///< of the attention kernel, with scratch of the kernel that writes them
  dq_tile_lists,  ///< of the pass for dQ
};
inline constexpr std::size_t kSections = 16;
const char* name_of(Section section) noexcept;

/// Where each section begins; null of those that a call does not have.
using SectionAddresses = std::array<std::byte*, kSections>;

/// The sections of a call, one behind the other.
class WorkspaceLayout {
 public:
  /// Appends a section that begins at a multiple of `alignment`, a power of two.
  void add(Section section, std::size_t bytes, std::size_t alignment = 1) noexcept;

  bool has(Section section) const noexcept { return (present_ >> index(section) & 1) != 0; }
  std::size_t offset(Section section) const noexcept { return offsets_[index(section)]; }
  std::size_t bytes(Section section) const noexcept { return sizes_[index(section)]; }
  std::size_t bytes() const noexcept { return end_; }
  /// Those in front of tile lists, and those of tile lists.
  std::size_t other_bytes() const noexcept { return has(Section::tile_lists) ? offset(Section::tile_lists) : end_; }
  std::size_t list_bytes() const noexcept { return end_ - other_bytes(); }

  /// In memory of other_bytes() at `base`, and of list_bytes() at `lists`.
  SectionAddresses addresses(std::byte* base, std::byte* lists) const noexcept;

 private:
  static constexpr std::size_t index(Section section) noexcept { return static_cast<std::size_t>(section); }

  std::array<std::size_t, kSections> offsets_{};
  std::array<std::size_t, kSections> sizes_{};
  std::size_t end_ = 0;
  unsigned present_ = 0;
};

/// Memory of the counter of a dynamic kernel.
inline constexpr std::size_t kCounterBytes = 256;

/// What of its kernels the layout of a forward depends on.
struct ForwardNeeds {
  bool counters = false;  ///< it is dynamic, or leaves out KV tiles by norms: then it splits nothing and reads no lists
  std::size_t lists = 0;
  std::size_t schedule = 0;       ///< unless the call is given one; with own parts: flags
  std::int64_t partial_rows = 0;  ///< of a scheduled kernel
  FixedSplits fixed = {};         ///< of a kernel with a fixed split size
  std::int64_t sums = 0;          ///< of columns, unless the call has a tensor for them
};
/// `given`: the call has a schedule.
ForwardNeeds forward_needs(const Problem& problem, const KernelSpec& attention, int multiprocessors,
                           bool given) noexcept;
WorkspaceLayout forward_workspace(const Problem& problem, const Choice& choice, const ForwardNeeds& needs) noexcept;

/// What of its kernels the layout of a backward depends on.
struct BackwardNeeds {
  bool dq_accum = true;  ///< unless dQ has a pass of its own, or is not wanted
  bool turns = false;    ///< when dQ is ordered
  std::size_t lists = 0;
  std::size_t dq_lists = 0;
};
WorkspaceLayout backward_workspace(const Problem& problem, const BackwardChoice& choice,
                                   const BackwardNeeds& needs) noexcept;
/// The same where it is known how many rows there are with their padding.
WorkspaceLayout backward_workspace(const Problem& problem, const BackwardChoice& choice, const BackwardNeeds& needs,
                                   std::int64_t padded_rows) noexcept;
/// `dq`: meaningful unless the main kernel writes dQ.
/// Rows of a head that the key tiles of any kernel fill, where dK and dV are summed tile by tile.
std::int64_t keys_in_tiles(const Problem& problem) noexcept;

BackwardNeeds backward_needs(const Problem& problem, const KernelSpec& main, const KernelSpec& dq) noexcept;

/// s_q rounded up to a group of 16 rows, or to the greatest tile of an sm90 kernel; of a packed batch the rows of all
/// its groups, in a workspace whose sections are without b.
std::int64_t padded_rows(const Problem& problem, const BackwardChoice& choice) noexcept;

/// What any call of the problem needs, whichever kernels of a plan are taken, and the part of it that tile lists are.
/// Throw like plan_forward and plan_backward.
struct WorkspaceSize {
  std::size_t bytes = 0;
  std::size_t lists = 0;
};
WorkspaceSize forward_workspace_size(const Problem& problem, const Fixed& fixed, int multiprocessors);
WorkspaceSize backward_workspace_size(const Problem& problem, const Fixed& fixed, bool deterministic);

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_WORKSPACE_HPP_
