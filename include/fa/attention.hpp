#ifndef FA_ATTENTION_HPP_
#define FA_ATTENTION_HPP_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <fa/version.h>
#include <fa/append.hpp>
#include <fa/debug.hpp>
#include <fa/device.hpp>
#include <fa/error.hpp>
#include <fa/export.hpp>
#include <fa/functions.hpp>
#include <fa/log.hpp>
#include <fa/merge.hpp>
#include <fa/paged.hpp>
#include <fa/quantize.hpp>
#include <fa/schedule.hpp>
#include <fa/shared_prefix.hpp>
#include <fa/statistics.hpp>
#include <fa/tensor.hpp>
#include <fa/types.hpp>

/// Exact attention, O = softmax(scale * Q K^T + mask) V, and its gradients. FlashAttention kernels are rendered,
/// compiled, cached and launched at run time.
///
/// Sources: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023. On Hopper
/// also Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision", 2024. What
/// exactly is computed, with bounds of errors, is in docs/numerics.md.
///
/// Axis vocabulary, here and everywhere in the project:
/// - b batch, h_q query heads, h_kv key/value heads,
/// - s_q query rows, s_kv keys,
/// - d_qk head dim of q and k, d_v head dim of v and o.
///
/// dX is the gradient of a loss with respect to X. The one that comes in, of o, is called dout.
namespace fa {

/// Where compiled kernels are kept (docs/cache-format.md). Read by Attention::create and find_kernels; every Attention
/// of a process with an equal policy shares one cache.
struct CachePolicy {
  enum class Mode : std::uint8_t {
    disk,    ///< files in `directory`, and memory
    memory,  ///< this process only
  };
  Mode mode = Mode::disk;
  /// Empty: FA_CACHE_DIR, else XDG_CACHE_HOME/fa, else HOME/.cache/fa, else memory only. A directory that others can
  /// write to, or that cannot be written, costs speed and one warning, never the run.
  std::string directory = {};
  /// Files made by `fa pack`, searched before the directory and never written. Those that FA_CACHE_PACKS names
  /// (separated by colons) come behind them. One that cannot be used costs a warning.
  ///
  /// A pack is code that runs on the GPU with all that the process may do there: take packs from where you take
  /// programs. Kernels for lower compute capabilities 8.x serve where they fit and there are none for the GPU's own.
  std::vector<std::string> packs = {};
  /// The SHA-256 of `packs`, 64 hex digits for each, in their order (`fa pack` prints it). "" or nothing accepts any
  /// pack. One with another SHA-256 is not used, as if it were damaged. Each pinned pack is read whole when the cache
  /// is opened.
  std::vector<std::string> pack_sha256 = {};
  /// Cap of the directory in bytes: what was used least recently goes. 0: FA_CACHE_MAX_BYTES (may end in K, M or G),
  /// else 256 MiB; negative: none.
  std::int64_t max_bytes = 0;
  std::int64_t max_entries = 0;  ///< kernels; 0: FA_CACHE_MAX_ENTRIES, else 4096; negative: none
  /// Which NVRTC versions may have compiled what is stored, and may compile. "13.0": exactly that one; ">=12.8": that
  /// one or later; "any". Empty: FA_CACHE_COMPILERS, else any.
  std::string compilers = {};
  bool keep_source = false;  ///< puts the source of every kernel compiled from now on beside it, as one file for nvcc
};

/// Whether a kernel may be compiled when the cache has none.
enum class CompilePolicy : std::uint8_t {
  allow,  ///< compile with NVRTC, in the calling thread
  /// Take the best kernel that is stored. Without any, fail with ErrorCode::cache_miss (fields: kernel, key, command);
  /// its message has the `fa` command that would build the kernel. Never opens NVRTC.
  never,
  /// Where a kernel is missing, run at once what serves the call meanwhile: another that is stored, or ready for other
  /// shapes. The planned one is compiled on a thread of the Attention's, and runs as soon as it is there: o may then
  /// differ in its last bits. Calls that nothing serves wait, as those do that bring a schedule, have a mask
  /// function or a bound of multiprocessors. Where the planned kernel cannot be had, a warning says so and the other
  /// stays: `prepare` tries again, and throws. A captured graph keeps its kernels. Refused with `deterministic` and
  /// `invariance`; nothing is tuned (docs/tuning.md).
  background,
};

/// Whether the fastest of several kernels is found out by trying them (docs/tuning.md). FA_TUNE (off, cached, on) in
/// the environment overrides it.
enum class TunePolicy : std::uint8_t {
  off,     ///< the planner's rules alone
  cached,  ///< what was found out before, in the cache directory or by the tables that come with the library
  /// Where nothing is known, tune. The first call (or `prepare`) of a kind of problem compiles and times candidates,
  /// for some 2 s at most, on memory and a stream of the tuner's own. Never during stream capture, for problems too
  /// small to gain, or on the host.
  on,
};

/// One compilation, as AttentionConfig::on_compile hears of it. Valid during the call only.
struct CompileEvent {
  enum class Phase : std::uint8_t { started, finished, failed };
  Phase phase = Phase::started;
  std::string spec;         ///< every choice of the planner, in one line
  std::string target;       ///< "sm_90a"
  double milliseconds = 0;  ///< of a finished one
  std::string problem;      ///< what went wrong, of a failed one
};

/// Everything that is fixed over the life of an Attention. Attention::create copies and checks it.
struct AttentionConfig {
  /// d_qk: a multiple of 8 from 8 to 576. Gradients: up to 256, and up to 512 where d_v is the same.
  int head_dim = 0;
  int head_dim_v = 0;         ///< d_v: a multiple of 8 from 8 to 512; 0 means value_in_key, else head_dim
  DType dtype = DType::bf16;  ///< of q, k, v, o and their gradients. The log-sum-exp is f32 (f64 for f64)
  std::optional<float> scale = std::nullopt;  ///< any finite float, 0 and negatives included; default 1/sqrt(head_dim)
  bool causal = false;
  CausalAlign causal_align = CausalAlign::bottom_right;  ///< of windows and chunks too
  ScoreFunction score = {};                              ///< what becomes of scaled scores, before every mask
  MaskFunction mask = {};                                ///< which scores are kept, of those that the other masks keep
  /// Row i stands at key i' = i + s_kv - s_q (top_left: at key i). It keeps the keys from i' - window_left to i' +
  /// window_right, both included. -1, like any number from 2^31 on, is unbounded. With `causal`, window_right is 0 or
  /// unbounded.
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  std::int64_t chunk = 0;  ///< keeps the keys of i' 's chunk: those from floor(i' / chunk) * chunk on, `chunk` of them
  bool sink = false;  ///< a logit of each query head, ForwardInputs::sink, takes part in the sum of each of its rows
  /// Never swap the kernel of a problem between runs, and make dq bitwise repeatable too. That costs time and scratch
  /// memory (`backward_workspace_size`). The other outputs of one kernel (o, lse, dk, dv, dsink) are bitwise repeatable
  /// without it. Gradients of captures are not, and are refused on a GPU with it.
  bool deterministic = false;
  CachePolicy cache = {};
  CompilePolicy compile = CompilePolicy::allow;         ///< else nothing is tuned either
  TunePolicy tune = TunePolicy::on;                     ///< with `deterministic`: the library's own tables alone
  std::optional<KernelOverride> kernel = std::nullopt;  ///< of forward
  std::optional<KernelOverride> kernel_backward = std::nullopt;  ///< of backward
  /// Packed batches (docs/packed_batches.md): sequences of different lengths lie one after the other in tensors without
  /// a batch axis. Each call says where, in PackedSequences. Shapes are [total_q, h_q, d_qk] for q, [total_kv, h_kv,
  /// d_qk] for k, [h_q, total_q] for lse, and so on. Masks are of each sequence.
  bool varlen = false;
  /// varlen: rows that belong to no sequence, or lie behind its used rows, become 0 in o, dq, dk and dv and -inf in
  /// lse. Else they are not touched.
  bool zero_padding = false;
  /// varlen, page_size: every call waits for its stream, reads the lengths (and the block table) back and refuses wrong
  /// ones with an fa::Error. Such a call cannot be captured. Without it wrong lengths and tables give wrong results,
  /// never an access outside of a tensor. The host device always checks.
  bool check_sequences = false;
  /// The probability p, in [0, 1), with which an element of P is dropped: O = (P o Z / (1 - p)) V. Z is the mask of the
  /// call's DropoutState, drawn by Philox4x32-7 (Salmon et al., 2011). The log-sum-exp is that of the whole P. p is
  /// rounded to a multiple of 2^-16, in the factor too.
  float dropout = 0;
  /// Positions of a page of the KV cache that k and v are in (paged.hpp), any number from 1. kContiguous: the cache has
  /// no pages. 0: k and v are plain tensors. A constant of the kernel. Forward only, without dropout, and with
  /// CausalAlign::bottom_right. Queries are dense, or packed with `varlen`; each call has its PagedCache in
  /// ForwardInputs::cache.
  std::int64_t page_size = 0;
  /// forward adds to the state that outputs.o and outputs.lse hold: what attention over other keys came to (merge.hpp).
  /// A row of the state with lse = -inf (or +inf) has none yet, whatever its o holds. The state may have a sink, which
  /// enters once: a configuration with `sink` is refused. backward is given the o and lse of all keys
  /// (docs/merging.md).
  bool accumulate = false;
  /// V is the first so many columns of K, as in multi-head latent attention (docs/mla.md): ForwardInputs::v is left
  /// empty, and d_v is this. A multiple of 8 from 8 to 512, at most head_dim; 0: v is a tensor of its own. Forward
  /// only.
  int value_in_key = 0;
  /// What K, and V, of a cache are stored as: e4m3, i8 or u4x2, independent of each other and of `dtype`, which is f16
  /// or bf16 then. An element stands for its value times the row's scale (ForwardInputs::k_scale). Without one the
  /// cache is of `dtype`. Forward and append only, without dropout and, but over pages, without varlen. Head dims are
  /// multiples of 16, of u4x2 of `group_size`. Rows of the cache start at multiples of 16 bytes
  /// (docs/quantized_caches.md). With a value_in_key of 512, a head_dim of 576 and a page_size K may be e4m3: in latent
  /// rows of 656 elements, which hold their scales (docs/mla.md).
  std::optional<DType> k_dtype = std::nullopt;
  std::optional<DType> v_dtype = std::nullopt;
  /// With a k_dtype or v_dtype of u4x2: columns of a row that share a scale and an offset, 32, 64 or 128. 0: 32.
  int group_size = 0;
  /// With a dtype of e4m3 or e5m2, 8-bit floats, which are of q, k and v: what o is of, bf16, f16 or e4m3; none: bf16.
  /// So with i8, which is of q and k beside a v of e4m3.
  /// An element stands for its value times a scale (ForwardInputs::q_scale). Forward only, with head dims in multiples
  /// of 16 up to 256; docs/fp8.md says what else is refused. It takes compute capability 8.9, for i8 Hopper, or the
  /// host. With i8 scores are sums of whole numbers, which are exact (docs/int8.md).
  std::optional<DType> o_dtype = std::nullopt;
  /// With 8-bit floats: each key has scales of its own, for its row of K (key_scales) and for that of V (value_scales),
  /// which ForwardInputs::k_scale and v_scale hold.
  bool key_scales = false;
  bool value_scales = false;
  /// With 8-bit floats, on Hopper and the host: P and V are multiplied as f16, which has all numbers of V. O is as
  /// exact as in 16 bits then, and takes some longer (docs/fp8.md).
  bool precise = false;
  /// Of forward. Nothing is tuned then, and the planner's first choice runs. Refused with `accumulate`, and with fields
  /// of `kernel`.
  Invariance invariance = Invariance::none;
  /// What forward tells of scores and of P, in ForwardOutputs::statistics (statistics.hpp). Nothing is tuned then. Its
  /// gradients go into `backward`. Refused with `accumulate`, `invariance`, shared prefixes and 8-bit floats;
  /// docs/statistics.md has the rest.
  Statistics statistics = {};
  /// Kernels that check themselves, for who writes kernels. A wait that does not end is said with its barrier's name,
  /// and ends the kernel with an error; so is an address outside of shared memory. They are slow, nothing is tuned, and
  /// they are stored apart. FA_DEBUG_KERNELS=1 in the environment asks for them too (docs/kernels/debugging.md).
  ///
  /// forward and backward then wait for their stream, unless it is being captured, and look at what they have written.
  /// Where that holds a NaN or an infinity that is none of a contract, they throw Error(not_finite): its location()
  /// names the first number that led to it. The host device does so too.
  bool debug = false;
  bool host_f64 = false;  ///< host device: accumulate in double also for 16- and 32-bit tensors
  /// Called for every compilation by the thread that compiles, before and after: a program that has finished starting
  /// up expects none. What it throws when one starts ends the call, with nothing compiled. At other phases nothing may
  /// be thrown. A call from inside of it that needs a kernel which any thread is compiling is refused.
  std::function<void(const CompileEvent&)> on_compile = nullptr;
};

/// Memory in which calls share what a kernel before attention finds out about a mask function: the lists of tiles that
/// it keeps something of.
///
/// Calls of the same shape whose captures hold the same values may share it. The first is given memory and fills it;
/// the others are given the same with `filled`, on the same stream or behind it. Without it every call finds out anew,
/// in its workspace.
///
/// The process remembers what was listed in which memory. A call with `filled` is refused (invalid_argument) where
/// - no call has filled the memory,
/// - the one that did had another shape, mask, captured number or operation (forward, backward),
/// - or strides and alignment choose another kernel now.
///
/// What captured tensors hold is the caller's matter. Nothing else that a call is given lies in the memory.
struct MaskTiles {
  void* data = nullptr;  ///< on the Attention's device, 256-byte aligned; lives until the last such call has run
  std::size_t size = 0;  ///< bytes: at least `mask_tiles_size(shape)`, of backward `backward_mask_tiles_size(shape)`
  bool filled = false;   ///< by an earlier call
};

/// What forward reads, all on the Attention's device, and unchanged until the queued work has run.
struct ForwardInputs {
  TensorView q;  ///< [b, h_q, s_q, d_qk]
  /// [b, h_kv, s_kv, d_qk], or pages [pages, h_kv, page_size, d_qk], or a contiguous cache [rows, h_kv, s_max, d_qk].
  TensorView k;
  TensorView v;            ///< likewise of d_v; nothing with value_in_key
  Captures captures = {};  ///< what the configuration's functions name
  TensorView sink = {};    ///< [h_q], f32 (f64 for f64), in units of the scaled score; with AttentionConfig::sink
  PackedSequences sequences = {};  ///< with AttentionConfig::varlen or page_size
  DropoutState dropout = {};       ///< with AttentionConfig::dropout
  MaskTiles tiles = {};            ///< with a mask function; the host needs none
  PagedCache cache = {};           ///< with AttentionConfig::page_size
  /// With AttentionConfig::page_size, of the call's limits and lengths. Without one such a call makes its own, in its
  /// workspace, by a kernel more.
  Schedule schedule = {};
  /// With AttentionConfig::page_size: levels of prefixes that requests share, from the first keys on, at most
  /// SharedPrefix::kMaxLevels. A schedule is of the requests' own keys then. Read during the call only.
  std::span<const SharedPrefix> prefixes = {};
  /// With AttentionConfig::k_dtype, or v_dtype: f32, [b, h_kv, s_kv], or of pages [pages, h_kv, page_size]. Any
  /// strides: with 0 on an axis, all of it shares a scale. They are finite; 0 and negative ones are legal. Of u4x2: of
  /// the config's dtype, [b, h_kv, s_kv, 2 * d / group_size], a scale and an offset of each group in turn. With a dtype
  /// of e4m3 or e5m2: f32, [b, h_kv], of b sequences of a packed batch; optional: 1. With AttentionConfig::key_scales
  /// k_scale may be [b, h_kv, s_kv], and of a packed batch is [h_kv, total_kv]; with value_scales v_scale likewise.
  TensorView k_scale = {};
  TensorView v_scale = {};
  /// With a dtype of e4m3 or e5m2: f32, [b, h_q, s_q] or [b, h_q], of a packed batch [h_q, total_q]; any
  /// strides; optional: 1.
  TensorView q_scale = {};
  /// With a dtype of i8: what is added to q k of a row's keys, f32, likewise; optional: 0. Where K is stored less its
  /// mean, it is q times that mean (`quantize`). o depends on it with a score function or a sink alone, lse always.
  TensorView row_bias = {};
  /// Where the call stands in a larger attention; nothing: it is the whole.
  std::optional<ShardPlace> place = std::nullopt;
  /// The multiprocessors that the attention kernel takes at a time, so that others have room beside it; 0: all. More
  /// than the GPU has: at most so many thread blocks (docs/shards.md). The host device ignores it.
  int max_multiprocessors = 0;
};

/// What forward writes, whole but for the padding of packed batches. With AttentionConfig::accumulate it is read first,
/// and lse is needed.
struct ForwardOutputs {
  /// [b, h_q, s_q, d_v], of the config's dtype (8-bit floats: o_dtype); must not overlap itself, lse or an input
  TensorView o;
  /// The log-sum-exp, [b, h_q, s_q], f32 (f64 for f64), natural log, the sink included. A row without keys has -inf, or
  /// the sink where there is one. Optional.
  TensorView lse = {};
  StatisticsOutputs statistics = {};  ///< with AttentionConfig::statistics
  ProbabilityDump dump = {};          ///< with AttentionConfig::debug, and lse
};

/// What forward was given and what it computed, and the gradient of a loss with respect to that. All on the Attention's
/// device, of the config's dtype but for lse, dlse and sink, and unchanged until the queued work has run. Any of them
/// may be broadcast (stride 0) over b, h or s.
struct BackwardInputs {
  TensorView q;                    ///< [b, h_q, s_q, d_qk]
  TensorView k;                    ///< [b, h_kv, s_kv, d_qk]
  TensorView v;                    ///< [b, h_kv, s_kv, d_v]
  TensorView o;                    ///< [b, h_q, s_q, d_v], of forward
  TensorView lse;                  ///< [b, h_q, s_q], of forward: natural log; -inf, or +inf, for a row without keys
  TensorView dout;                 ///< [b, h_q, s_q, d_v], gradient of o
  TensorView dlse = {};            ///< [b, h_q, s_q], gradient of lse, of its dtype; optional: 0
  Captures captures = {};          ///< as in forward
  TensorView sink = {};            ///< likewise
  PackedSequences sequences = {};  ///< those of forward
  DropoutState dropout = {};       ///< that of forward
  MaskTiles tiles = {};            ///< of backward: not those of forward
  std::optional<ShardPlace> place = std::nullopt;  ///< that of forward
  int max_multiprocessors = 0;                     ///< as in forward
  StatisticsGradients statistics = {};             ///< what AttentionConfig::statistics says
};

/// What backward writes. Every element is written, but for the padding of packed batches, and none is read: rows and
/// keys that nothing depends on get 0. An output must not overlap itself, another output or an input.
///
/// Outputs that are not given are not computed, and kernels leave out what only these need. One at least is given.
struct BackwardOutputs {
  TensorView dq = {};  ///< [b, h_q, s_q, d_qk]
  TensorView dk = {};  ///< [b, h_kv, s_kv, d_qk], summed over the query heads of a KV head before it is rounded
  TensorView dv = {};  ///< [b, h_kv, s_kv, d_v], likewise
  /// Gradients of captures that require them, by name: f32 (f64 for f64), of the capture's shape, without gaps between
  /// elements.
  Captures captures = {};
  TensorView dsink = {};  ///< [h_q], of the sink's dtype; optional
};

/// Scratch memory of one call. Calls that may overlap in time need one each; calls of one stream may share. An empty
/// workspace makes the call allocate from the stream's memory pool. Too small a one is refused (out_of_memory), and so
/// is one that shares a byte with anything else that the call is given (invalid_argument).
struct Workspace {
  void* data = nullptr;  ///< on the Attention's device, 256-byte aligned; lives until the queued work has run
  std::size_t size = 0;  ///< bytes: at least `workspace_size(shape)`, of backward `backward_workspace_size(shape)`
};

/// What serves a shape, and what it cost to get it.
struct KernelInfo {
  std::string name;    ///< entry point, "fa_sm80_forward"
  std::string spec;    ///< every choice of the planner, in one line
  std::string origin;  ///< "compiled", "pack", "disk", "memory" or "host"
  double compile_ms = 0;
  double load_ms = 0;
  int registers = 0;     ///< a thread
  int local_bytes = 0;   ///< spilled bytes a thread; 0 for nearly every kernel that is planned by default
  int shared_bytes = 0;  ///< a thread block
  int threads = 0;       ///< a thread block
  /// What preferred it to others: "planner", "table" (comes with the library), "record" (in the cache directory),
  /// "tuner" (just now) or "stand-in" (CompilePolicy::background, while the planned one is compiled).
  std::string chosen_by = {};
};

/// What became of look-ups in one cache of this process, since it was opened: every Attention with an equal CachePolicy
/// shares it.
struct CacheCounters {
  std::uint64_t memory_hits = 0;
  std::uint64_t pack_hits = 0;
  std::uint64_t disk_hits = 0;
  std::uint64_t compiles = 0;
  std::uint64_t damaged = 0;           ///< stored kernels that failed their check; they are compiled anew
  std::uint64_t unaccepted = 0;        ///< stored kernels of a compiler, or for a driver, that is not accepted
  std::uint64_t publish_failures = 0;  ///< kernels that stayed in memory because the directory refused them
  std::uint64_t evictions = 0;         ///< stored kernels removed to keep within the caps
};

namespace api {
struct KnownCallsAccess;
struct TuningAccess;
}  // namespace api

/// Computes attention for one AttentionConfig on one device. Threads may share it.
class FA_API Attention {
 public:
  /// Validates `config` and binds a device; compiles nothing. The Attention retains a primary context that it binds,
  /// and copies `config`. Throws fa::Error: invalid_argument, unsupported, no_driver, cuda.
  static Attention create(const AttentionConfig& config, Device device = Device::current());

  Attention(Attention&&) noexcept;
  Attention& operator=(Attention&&) noexcept;
  Attention(const Attention&) = delete;
  Attention& operator=(const Attention&) = delete;
  /// Queued work may still be running; its kernels stay loaded.
  ~Attention();

  /// Computes outputs.o and, if given, outputs.lse (docs/numerics.md; Dao, 2023, algorithm 1).
  ///
  /// Stream: the work is queued on `stream`, and the call returns before it is done. On the host device the stream is
  /// ignored, and the call returns after it. Tensors and workspace must live until the work has run.
  ///
  /// Cost: a shape served for the first time is planned, compiled if need be, and loaded. After that a call with a
  /// workspace allocates nothing, takes no lock and may be captured into a CUDA graph. Threads may share an Attention.
  ///
  /// Errors: throws fa::Error before anything is launched: invalid_argument, unsupported, no_compiler, compile_failed,
  /// cache_miss, cuda, out_of_memory; with `debug` not_finite, behind the kernels. b, h_q or s_q = 0 succeeds without a
  /// launch.
  void forward(const ForwardInputs& inputs, const ForwardOutputs& outputs, Stream stream = nullptr,
               Workspace workspace = {}) const;

  /// Computes the gradients of q, k and v, and those of captures and the sink where they are given (docs/numerics.md;
  /// Dao, 2023, algorithm 2). P is recomputed tile by tile:
  ///   P  = softmax(scale * Q K^T + mask) = exp(scale * Q K^T + mask - lse)
  ///   dV = P^T dout
  ///   dS = P o (dout V^T - rowsum(dout o O) + dlse)
  ///   dQ = scale * dS K
  ///   dK = scale * dS^T Q
  ///
  /// They are the exact gradients of what `forward` of an Attention with the same configuration computed, from which
  /// inputs.o and inputs.lse must come. Where the keys were computed in shards and merged, every shard's call is given
  /// the merged o and lse, and yields the shard's part of the gradients. Rows without keys, or of infinite lse, give
  /// and get exact zeros.
  ///
  /// Stream, cost and errors are those of `forward`.
  void backward(const BackwardInputs& inputs, const BackwardOutputs& outputs, Stream stream = nullptr,
                Workspace workspace = {}) const;

  /// Writes new keys and values into a cache, k and, if given, q with their rotary embedding (append.hpp,
  /// docs/inference.md). One kernel, which reads lengths, tables and slots when it runs: they may change between
  /// replays of a captured call.
  ///
  /// Stream and cost are those of `forward`; scratch memory is not needed. Errors: throws fa::Error before anything is
  /// launched: invalid_argument, no_compiler, compile_failed, cache_miss, cuda. The host device and check_sequences
  /// refuse lengths, tables, slots and positions that do not fit. Without that, a row whose place is not in the cache
  /// or in the table is not written, and no access is outside of a tensor. Without new rows it succeeds without a
  /// launch.
  void append(const AppendInputs& inputs, Stream stream = nullptr) const;

  /// Compiles and loads what `append` will need, so that the call itself can be captured; the errors of `append`.
  void prepare_append(const AppendShape& shape) const;
  KernelInfo append_kernel_info(const AppendShape& shape) const;

  /// Shares the query tiles and keys of requests over pages out among thread blocks, in memory that calls of `forward`
  /// are given then (schedule.hpp, docs/inference.md#schedules). It is called once a step, for all layers. One kernel
  /// reads the lengths when it runs, behind a memory operation where there are thousands of requests.
  ///
  /// Stream and cost are those of `forward`. Errors: throws fa::Error before anything is launched: those of `forward`,
  /// invalid_argument without a page_size, out_of_memory for less than `schedule_size(limits)` bytes. Where that is 0,
  /// and on the host device, nothing is launched. A call of other limits, masks or alignment is refused the schedule.
  void schedule(const ScheduleInputs& inputs, const Schedule& memory, Stream stream = nullptr) const;

  /// Bytes of a schedule for calls of these limits (ScheduleInputs::limits); 0 where they take none, because requests
  /// are too short to be shared out, and on the host device. Throws fa::Error: invalid_argument, unsupported.
  std::size_t schedule_size(const AttentionShape& limits) const;

  /// Merges partial results of attention over different keys (merge.hpp, docs/merging.md):
  ///   lse = ln(sum_i exp(lse_i) + exp(sink)),   o = sum_i exp(lse_i - lse) o_i
  /// One kernel, bound by memory. A result may be the view of one of the states, of its dtype, and shares no other
  /// memory with them. O is of the config's dtype or f32, and the result's lse is optional.
  ///
  /// A state with lse = -inf (or +inf: no keys) takes no part, whatever its o holds. A row of such states alone has
  /// o = 0 and lse = -inf, or the sink. NaN in lse, or in o of a state that takes part, reaches the row.
  ///
  /// Stream and cost are those of `forward`; scratch memory is not needed. Errors: throws fa::Error before anything is
  /// launched: invalid_argument, no_compiler, compile_failed, cache_miss, cuda. Without rows it succeeds without a
  /// launch.
  void merge(const MergeInputs& inputs, const ForwardOutputs& outputs, Stream stream = nullptr) const;

  /// Compiles and loads what `merge` will need, so that the call itself can be captured; the errors of `merge`.
  void prepare_merge(const MergeShape& shape = {}) const;
  KernelInfo merge_kernel_info(const MergeShape& shape = {}) const;

  /// Makes codes and scales of q, k and v of 16 or 32 bits (quantize.hpp, docs/int8.md), for forward of a dtype of i8
  /// or e4m3. K may be smoothed: its mean over the keys is taken from it, before it becomes codes. That changes no
  /// softmax, but outliers of K's columns no longer cost the others their precision. Up to four kernels, whose sums
  /// have an order that follows from shapes alone.
  ///
  /// Stream and cost are those of `forward`; scratch memory is not needed. Errors: throws fa::Error before anything is
  /// launched: invalid_argument, unsupported, no_compiler, compile_failed, cache_miss, cuda. Without rows it succeeds
  /// without a launch.
  void quantize(const QuantizeInputs& inputs, Stream stream = nullptr) const;

  /// Compiles and loads what `quantize` will need for such tensors, which are not read or written.
  void prepare_quantize(const QuantizeInputs& inputs) const;

  /// Plans, compiles and loads what `forward` will need for `shape`, so that the call itself can be captured. Blocks
  /// until that is done; throws the errors of `forward`. On Hopper this is for strides that the copy engine can
  /// describe, and no seq_begin: a call without these may have another kernel, which its first run prepares.
  void prepare(const AttentionShape& shape) const;

  /// `prepare` on a thread of the Attention's, whose destructor waits for what has begun and drops the rest: its
  /// futures are broken promises. The future has what `prepare` throws. Throws fa::Error(invalid_argument) for a wrong
  /// shape. AttentionConfig::on_compile tells the progress, on that thread.
  std::shared_future<void> prepare_async(const AttentionShape& shape) const;
  std::shared_future<void> prepare_backward_async(const AttentionShape& shape) const;
  /// Whether `forward`, `backward` run their planned kernels for `shape` and wait for none; always on the host device.
  /// It stays false where a kernel cannot be had: the future of prepare_async says why.
  bool is_ready(const AttentionShape& shape) const;
  bool backward_is_ready(const AttentionShape& shape) const;

  /// Bytes of scratch that `forward` needs for `shape`, whatever the strides of its tensors, if their rows are aligned
  /// as `shape` says. It is often 0. Causal attention on Hopper takes 256, and 4 b (h_q + h_kv) more with a score
  /// function by distance, as ALiBi is. Throws the errors of planning: invalid_argument, unsupported.
  std::size_t workspace_size(const AttentionShape& shape) const;

  /// The same two for calls with shared prefixes. The workspace has partial results of each level, too.
  void prepare(const AttentionShape& shape, std::span<const SharedPrefixShape> prefixes) const;
  std::size_t workspace_size(const AttentionShape& shape, std::span<const SharedPrefixShape> prefixes) const;

  /// Which kernel serves `shape`; prepares it first, with the errors of `prepare`.
  KernelInfo kernel_info(const AttentionShape& shape) const;

  /// Bytes that MaskTiles of `forward` and of `backward` take for `shape`; 0 without a mask function.
  std::size_t mask_tiles_size(const AttentionShape& shape) const;
  std::size_t backward_mask_tiles_size(const AttentionShape& shape) const;

  /// The same three for `backward`. The information is that of its main kernel, with the times of every kernel of the
  /// call.
  void prepare_backward(const AttentionShape& shape) const;
  std::size_t backward_workspace_size(const AttentionShape& shape) const;
  KernelInfo backward_kernel_info(const AttentionShape& shape) const;

  const AttentionConfig& config() const noexcept;
  Device device() const noexcept;
  CacheCounters cache_counters() const;  ///< zero on the host device

 private:
  friend struct api::KnownCallsAccess;
  friend struct api::TuningAccess;
  class Impl;
  explicit Attention(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

/// The kernels that `forward` runs for `shape` on a GPU of `arch` ("sm_90a"), in order, and behind them those that
/// clear padding. They are found in the cache or compiled, as `config` says, and not loaded. Needs no GPU.
///
/// A program that ships a pack proves with CompilePolicy::never that the pack is complete. With CompilePolicy::allow it
/// fills a cache. Throws fa::Error: invalid_argument, unsupported, no_compiler, compile_failed, cache_miss.
FA_API std::vector<KernelInfo> find_kernels(const AttentionConfig& config, const AttentionShape& shape,
                                            const std::string& arch);

/// Likewise those of `backward`.
FA_API std::vector<KernelInfo> find_backward_kernels(const AttentionConfig& config, const AttentionShape& shape,
                                                     const std::string& arch);

/// Likewise that of `append`.
FA_API KernelInfo find_append_kernel(const AttentionConfig& config, const AppendShape& shape, const std::string& arch);

/// Likewise that of `merge`.
FA_API KernelInfo find_merge_kernel(const AttentionConfig& config, const MergeShape& shape, const std::string& arch);

/// attention.merge of these states: merge_states(attention, {{o, lse}, {o_new, lse_new}}, {o, lse}) adds to the first.
FA_API void merge_states(const Attention& attention, std::initializer_list<AttentionState> states,
                         const ForwardOutputs& outputs, Stream stream = nullptr);

/// The mask of AttentionConfig::dropout = `probability`, computed on the host; `state.device` is not read. `keep` is
/// [b, h_q, s_q, s_kv], row-major, and gets 1 for a kept element and 0 for a dropped one. In a packed batch b numbers
/// the sequences, and rows and keys count from the first of each. Throws fa::Error(invalid_argument).
FA_API void dropout_mask(const DropoutState& state, float probability, std::int64_t b, std::int64_t h_q,
                         std::int64_t s_q, std::int64_t s_kv, std::uint8_t* keep);

/// "0.1.0", of the library that runs; FA_VERSION_STRING is that of the headers (fa/version.h).
FA_API const char* version() noexcept;

}  // namespace fa

#endif  // FA_ATTENTION_HPP_
