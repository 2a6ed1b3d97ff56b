#ifndef FA_SRC_PLAN_PLANNER_HPP_
#define FA_SRC_PLAN_PLANNER_HPP_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "plan/fixed.hpp"
#include "plan/kernel_spec.hpp"
#include "plan/problem.hpp"

namespace fa::plan {

/// The few facts of a call's shapes that choose its kernel. Cheap enough to derive on every call; calls with equal
/// choices share their kernels.
struct Choice {
  bool aligned = true;
  bool short_query = false;  ///< all rows of a head fit a tile of 64
  bool pack_gqa = false;
  bool many_diagonals = false;  ///< sm90: of the few KV tiles of a query tile, causality cuts a large part
  bool dynamic = false;         ///< sm90: blocks take query tiles from a counter (may_be_dynamic)
  bool many_rows = false;       ///< sm90: large-M query tiles waste few rows, and each multiprocessor gets one
  bool long_rows = false;       ///< sm90: of these the kind for long rows
  bool exact_max = false;       ///< sm90: the softmax takes exact maxima
  bool affine_reach = false;    ///< sm90: KV tiles out of an affine score function's reach are left out
  bool scheduled = false;       ///< over pages, thread blocks share keys by a schedule
  bool own_parts = false;       ///< likewise, and find their parts by themselves
  bool splits_request = false;  ///< likewise in splits, equal parts of each request's length; splits tell the slot
  int few_rows = 0;  ///< sm80: a head has at most 32 (1, above head dim 256) or 16 (2), where that counts; 3: few
                     ///< heads; over fewer bits 4 more: 8, and 8 more: many keys; sm90_fp8: 1: splits of at most 64
  bool shares_splits = false;  ///< with a fixed split size: thread blocks share the splits of a query tile
  bool whole_tiles = false;    ///< sm90: a block folds all splits of the query tiles that it takes whole
  bool all_whole = false;      ///< likewise, which are all, and no kernel merges them
  bool multicast = false;      ///< sm90_wide: the two blocks of a cluster copy keys for each other
  Family family = Family::sm80;
  int splits = 1;        ///< of the keys; a launch parameter, of which the kernel only knows whether it is 1
  int split_blocks = 1;  ///< sm90: the splits are blocks of a cluster of so many, which merge them; a power of 2
  static constexpr int kMaxSplitBlocks = 16;

  /// Whether another kernel merges the splits.
  bool leaves_splits() const noexcept { return splits > 1 && split_blocks == 1 && !all_whole; }

  /// Dense, below kSlots. A field of one family has the place of another's: of sm80's in the last line but one, and in
  /// the last, of splits of few rows, of what belongs to many.
  int slot() const noexcept {
    return (aligned ? 1 : 0) | (short_query ? 2 : 0) | (pack_gqa ? 4 : 0) | (splits > 1 ? 8 : 0) |
           (many_diagonals ? 16 : 0) | (dynamic ? 32 : 0) | (many_rows ? 64 : 0) | (long_rows ? 128 : 0) |
           (exact_max ? 256 : 0) | (affine_reach || whole_tiles ? 512 : 0) | (scheduled ? 1024 : 0) |
           (shares_splits ? 2048 : 0) | index_of(family) * 4096 | few_rows * 64 | (own_parts || multicast ? 16 : 0) |
           (std::bit_width(static_cast<unsigned>(split_blocks)) - 1) * 32;
  }
  static constexpr int kSlots = kFamilies * 4096;
};

/// Whether thread blocks share keys by a schedule: `choice` as far as the family decides it.
bool shares_by_schedule(const Problem& problem, const Fixed& fixed, const Choice& choice) noexcept;

/// Keys that any row may see.
std::int64_t visible_keys(const Problem& problem) noexcept;
inline constexpr std::int64_t kKeysPerSplit = 512;     ///< at least, of thread blocks that share those of a query tile
inline constexpr std::int64_t kFewKeysPerSplit = 128;  ///< likewise, of a tile of few rows: partial results are small
inline constexpr int kLengthKeys = 512;                ///< likewise, with Invariance::batch
inline constexpr std::int64_t kFewestSplitKeys = 512;  ///< fewer are read faster than partial results are merged
inline constexpr std::int64_t kScheduledKeys = 512;    ///< from which on calls over pages share keys
inline constexpr std::int64_t kScheduledKeysOfMany = 256;  ///< likewise, of more requests than multiprocessors

/// Never a function of the GPU: the same shapes give the same result on every GPU of an architecture.
Choice choose(const Problem& problem, const Fixed& fixed) noexcept;

/// What runs for a problem: the attention kernel, before it the kernel that looks for norms when tiles are left out by
/// them, and after it the combine kernel when the keys are split.
struct ForwardPlan {
  KernelSpec kernel;  ///< the first choice
  /// What to take, in this order, if ptxas spills the first choice's registers: that depends on the compiler's version.
  std::vector<KernelSpec> alternatives;
  KernelSpec combine;   ///< meaningful when kernel.leaves_splits()
  KernelSpec norms;     ///< meaningful when the kernel that is taken has affine_reach
  KernelSpec sums;      ///< of columns of P; without warps where they are not wanted
  KernelSpec top_keys;  ///< by these sums; likewise
};

/// What a call follows of `fixed`: all of it, but for calls that the sm80 family serves although the configuration's
/// usual ones run on sm90. Where it has no such kernel, these are planned without the fields of a tile.
Fixed followed_forward(const Problem& problem, const Fixed& fixed);

/// A request without company, in tensors that every family can serve.
Problem alone(const RequestFacts& request, const DeviceFacts& device) noexcept;

/// What a plan may see of a call: all of it, but with Invariance::batch the request alone. Tensors that would need
/// another kernel than it has then, check_invariant refuses.
Problem visible_facts(const Problem& problem) noexcept;

/// `problem` with what the configuration alone decides, as a call has it that every family can serve.
Problem usual_call(const Problem& problem) noexcept;

/// Plans usual calls of a configuration, of few rows and of many: what does not throw here, no call throws. The whole
/// keys of a head take the most shared memory.
void check_forward_override(const Problem& problem, const Fixed& fixed);

/// Throws fa::Error(invalid_argument) for tensors that another kernel would have to serve than the one that the bits of
/// invariant calls are of.
void check_invariant(const Problem& problem, const Fixed& fixed);

/// The kernel that merges the splits of a forward.
KernelSpec combine_spec(const RequestFacts& request, const DeviceFacts& device) noexcept;

/// Throws fa::Error: invalid_argument when `fixed` does not fit, unsupported when no kernel does.
ForwardPlan plan_forward(const Problem& problem, const Fixed& fixed);

/// Every kernel that a call of the plan runs, the attention kernel first.
std::vector<Alternatives> kernels_of(const ForwardPlan& plan);

/// The kernel that writes to the rows of a packed tensor that belong to no sequence.
KernelSpec clear_padding_spec(Arch arch, DType dtype) noexcept;

/// Dynamic shared memory of a thread block.
int shared_bytes(const KernelSpec& spec);

/// The same at most: of splits of few rows, whose blocks may have a multiprocessor each (Step::shared).
int most_shared_bytes(const KernelSpec& spec);

/// The kernel of the same tiles for one of substitute_targets(spec.arch), as plans for that target have it.
KernelSpec retargeted(KernelSpec spec, Arch target);

/// Whether a kernel of this choice may take its query tiles from a counter: those of a causal mask differ in length,
/// those of a ragged batch, and those of an affine score function's reach.
bool may_be_dynamic(const Problem& problem, const Choice& choice) noexcept;

/// Whether the planner or a tuner may take such a kernel, without an override.
bool may_count(const Problem& problem, const Choice& choice) noexcept;

/// Whether workspaces of this choice have room for a counter, or for norms: the planned kernel, or one that a tuner
/// takes instead, may need it.
bool may_have_counter(const Problem& problem, const Choice& choice) noexcept;

/// Whether a kernel of this choice may leave out KV tiles by norms.
bool may_have_reach(const Problem& problem, const Choice& choice) noexcept;

/// The statistics of rows that a kernel of the problem stores.
void set_statistics(const Problem& problem, KernelSpec& spec) noexcept;

/// The kernel that looks for norms, and its thread blocks.
KernelSpec row_norms_spec(const KernelSpec& attention) noexcept;
std::int64_t row_norms_blocks(const Problem& problem, const KernelSpec& norms) noexcept;

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_PLANNER_HPP_
