#ifndef FA_TYPES_HPP_
#define FA_TYPES_HPP_

#include <cstdint>
#include <string>

/// What configurations and calls are made of (attention.hpp), without what they are given to.
namespace fa {

/// Which diagonal a causal mask follows when s_q != s_kv. Row i keeps key j when
/// - bottom_right: j <= i + s_kv - s_q (the last row sees every key),
/// - top_left:     j <= i.
enum class CausalAlign : std::uint8_t { bottom_right = 0, top_left = 1 };

/// What the bits of forward's o and lse are a function of (docs/invariance.md).
/// - none:  of the whole call, and of which kernel is the fastest.
/// - batch: of the configuration and of the request alone, its own rows, keys, lengths and sizes: not of other
/// requests,
///          their number, the longest of them, pages and their size, or the GPU's number of multiprocessors.
/// - rows:  of the configuration, the row's q and position, and the keys and values that it sees. So how a prompt is
/// cut
///          into calls, and whether tensors are dense, packed or in pages, changes no bit.
enum class Invariance : std::uint8_t { none = 0, batch = 1, rows = 2 };

/// "none", "batch" or "rows".
constexpr const char* to_string(Invariance invariance) noexcept {
  return invariance == Invariance::rows ? "rows" : invariance == Invariance::batch ? "batch" : "none";
}

/// Fixes part of the kernel instead of leaving it to the planner. What names no field, does not fit the kernel, or does
/// not fit the GPU is refused when the Attention is created, with what is accepted.
///
/// Calls that the named family cannot serve run on sm80, and follow the override as far as that has such a kernel.
/// Where it has none, they run with a tile of the planner's.
///
/// The copy engine of sm90 serves no unaligned rows, zero or negative strides, or calls without keys. Above head dim
/// 128 sm90 computes no gradients of more than plain attention, or of head dims up to 64.
struct KernelOverride {
  /// A family, which is one way of using the tensor cores, or one of its kernels; empty: any.
  ///   sm80  mma.sync + cp.async: Ampere and everything after it (sm80_forward, sm80_backward); sm80_fp8: its forward
  ///         of 8-bit floats, from compute capability 8.9 on
  ///   sm90  wgmma + the copy engine (TMA): Hopper, 16-bit elements; sm90_wide: its forward above head dim 256;
  ///         sm90_fp8: its forward of 8-bit floats and i8
  std::string kernel = {};
  /// "tile_m=192 stages=2": what is fixed of its fields, with spaces between them. Numbers of 0 leave a field open;
  /// switches are 0 or 1.
  ///   all            tile_m, tile_n, stages, splits (thread blocks that share the keys of a query tile; of backward:
  ///                  the query rows of a key tile)
  ///   forward        pack_gqa (query heads of a KV head share a tile)
  ///   sm80           warps
  ///   sm80_forward   q_in_registers, loop_bodies (2: masked tiles have their own), warps_n (2: pairs share query rows;
  ///                  4, 8: groups do), scheduled, own_parts (how blocks share keys of a cache), split_warps
  ///   sm90_forward   q_buffers (query tiles in flight), take_turns (warpgroups at the tensor cores),
  ///                  affine_product (the tensor cores add an affine score function),
  ///                  affine_reach (distance pruning under it),
  ///                  dynamic (query tiles come from a counter: of a causal mask, packed batches, calls over pages),
  ///                  exact_max (P is relative to the exact maximum of a row's scores),
  ///                  scheduled, own_parts, split_blocks (of a cluster, which merge their splits), evict_first
  ///   sm90_wide_forward  scheduled, multicast (docs/kernels/sm90_wide_forward.md); no tile_m, tile_n
  ///   sm90_fp8_forward  q_buffers, value_columns, take_turns, ahead, single_level, and fields that are off
  ///                     (docs/kernels/sm90_fp8_forward.md)
  ///   sm80_fp8_forward  warps, q_in_registers, single_level
  ///   sm90_backward  split_blocks, in_turns (blocks that share a key tile add dK and dV in turns)
  ///   column_sums    row_buffers (docs/kernels/small_kernels.md#column_sums)
  std::string text = {};
};

/// The gradients of q, k and v that a backward computes: those that its call has outputs for.
struct Gradients {
  bool dq = true;
  bool dk = true;
  bool dv = true;
  friend bool operator==(const Gradients&, const Gradients&) = default;
};

/// Sizes of one call. 0 is a legal size for b, s_q and s_kv.
struct AttentionShape {
  std::int64_t b = 1;
  std::int64_t h_q = 1;
  std::int64_t h_kv = 0;  ///< divides h_q (GQA; 1 is MQA): query head h reads KV head h / (h_q / h_kv). 0 means h_q
  std::int64_t s_q = 1;
  std::int64_t s_kv = 1;
  bool aligned = true;  ///< rows of q, k, v, o and their gradients start at multiples of 16 bytes
  /// AttentionConfig::varlen: rows of the packed tensors, 0 for b * s_q and b * s_kv. b counts sequences, s_q and s_kv
  /// are the longest ones, 0 where they are not known. Over pages s_kv is the longest request, and there is no
  /// total_kv.
  std::int64_t total_q = 0;
  std::int64_t total_kv = 0;
  Gradients gradients = {};      ///< of backward: which of dq, dk and dv its calls have outputs for
  bool placed = false;           ///< its calls have a ShardPlace
  bool strided = false;          ///< one with steps
  bool bounded = false;          ///< its calls have max_multiprocessors
  bool place_in_memory = false;  ///< its calls have ShardPlace::begin
};

/// Where the tensors of a call stand in a larger attention, the whole (docs/shards.md). Row i is the whole's row
/// q + i * q_step, and key j the whole's key kv + j * kv_step. Masks, windows, chunks, functions and dropout refer to
/// the whole. bottom_right aligns its last row with its last key. Functions see its indices and lengths. Captured
/// tensors, their gradients and the mask of dropout are the whole's. All other tensors are the call's.
///
/// So the parts of a whole come to the whole. Parts of b, h_q and q lie side by side; parts of kv are merged
/// (Attention::merge). In backward dq is summed over parts of kv, dk and dv over parts of q, gradients of captures over
/// all. Each call is given o and lse of all keys then, and a sink counts in one part of kv alone.
///
/// Causal masks, windows and chunks take equal steps, and chunks steps that divide them. Dropout takes steps of 1, and
/// begins q and kv that are multiples of 32. Packed batches, pages and invariance take none but the default.
struct ShardPlace {
  std::int64_t b = 0;    ///< in the whole, the call's first batch entry
  std::int64_t h_q = 0;  ///< its first query head, a multiple of h_q / h_kv
  std::int64_t q = 0;    ///< position of its first query row
  std::int64_t kv = 0;   ///< position of its first key
  std::int64_t q_step = 1;
  std::int64_t kv_step = 1;
  // Sizes of the whole; 0: it ends with the call's last entry, head, row or key.
  std::int64_t whole_b = 0;
  std::int64_t whole_h_q = 0;
  std::int64_t whole_s_q = 0;
  std::int64_t whole_s_kv = 0;
  /// b, h_q, q and kv, [4], in memory of the Attention's device: read when the kernels run, in the place of those
  /// above, which are 0 then. So a captured call may be replayed at other places. Sizes of the whole are given. A place
  /// that leaves the whole is moved into it. What has to be a multiple of h_q / h_kv, or of 32, is rounded down.
  const std::int64_t* begin = nullptr;

  friend bool operator==(const ShardPlace&, const ShardPlace&) = default;
};

/// Where the sequences of a packed batch lie (AttentionConfig::varlen). Of q, o and their gradients sequence i has the
/// rows [cu_seqlens_q[i], cu_seqlens_q[i + 1]), of k and v the rows [cu_seqlens_kv[i], cu_seqlens_kv[i + 1]).
///
/// Over pages (AttentionConfig::page_size) there are no cu_seqlens_kv, and seqused_kv is needed: sequence i is a
/// request whose row of the block table has the positions [0, seqused_kv[i]). Without varlen cu_seqlens_q and seqused_q
/// are not given either: request i has the rows of q's batch entry i. A contiguous cache (kContiguous) is likewise.
///
/// The arrays are in memory of the Attention's device, are read when the kernels run, and may change between replays of
/// a captured call.
struct PackedSequences {
  std::int64_t b = 0;                           ///< how many; without varlen q's b, or 0
  const std::int32_t* cu_seqlens_q = nullptr;   ///< [b + 1], from at least 0, never decreasing, to at most total_q
  const std::int32_t* cu_seqlens_kv = nullptr;  ///< [b + 1], likewise
  const std::int32_t* seqused_q = nullptr;      ///< [b], how many of a sequence's rows count, from its first; optional
  const std::int32_t* seqused_kv = nullptr;     ///< [b], likewise
  std::int64_t max_s_q = 0;                     ///< no sequence has more rows; 0: not known, which costs a little
  std::int64_t max_s_kv = 0;                    ///< likewise; of a KV cache 0 stands for all that a row has
};

/// What the mask of AttentionConfig::dropout is a function of, besides batch, query head, row and key
/// (docs/packed_batches.md). The same values give the same mask in forward and backward, on every device and with every
/// kernel of a version. Calls of one seed whose offsets are at least b * h_q apart have independent masks.
struct DropoutState {
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  /// {seed, offset} in memory of the Attention's device, instead of the two values above. Read when the kernels run, so
  /// that a captured call can advance.
  const std::uint64_t* device = nullptr;
};

}  // namespace fa

#endif  // FA_TYPES_HPP_
