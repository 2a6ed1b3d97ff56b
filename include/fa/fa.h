#ifndef FA_FA_H_
#define FA_FA_H_

/* The C ABI of fa: exact attention, O = softmax(scale * Q K^T + mask) V, and its gradients, by FlashAttention kernels
 * that are rendered, compiled, cached and launched at run time. It mirrors <fa/attention.hpp> for every other language.
 * Unlike the C++ API it is binary-stable: what is here keeps its meaning, new fields are appended to structs, new
 * functions are added. What exactly is computed is in docs/numerics.md (Dao, "FlashAttention-2", 2023; on Hopper Shah
 * et al., "FlashAttention-3", 2024). It is one file, however long, so that a program can carry it alone.
 *
 * A complete call:
 *
 *   fa_config config = {.struct_size = sizeof config, .head_dim = 64, .dtype = FA_BF16, .causal = 1};
 *   fa_attention* attention = NULL;
 *   if (fa_create(&config, (fa_device){FA_DEVICE_CURRENT, 0}, &attention) != FA_OK)
 *     return fail(fa_last_error_message());
 *   fa_tensor q = {.struct_size = sizeof q, .dtype = FA_BF16, .rank = 4, .flags = FA_TENSOR_ROW_MAJOR,
 *                  .data = q_pointer, .shape = {b, h_q, s_q, 64}};        and likewise k, v, o
 *   fa_forward_inputs inputs = {.struct_size = sizeof inputs, .q = &q, .k = &k, .v = &v};
 *   fa_forward_outputs outputs = {.struct_size = sizeof outputs, .o = &o};
 *   if (fa_forward(attention, &inputs, &outputs, stream, NULL) != FA_OK) ...
 *   fa_destroy(attention);
 *
 * Structs. Each begins with `struct_size`, which the caller sets to the sizeof it was compiled with. A field left at
 * zero has its default. A smaller size than the library's (an older program) leaves the missing fields at their
 * defaults. A larger one (a newer program) is accepted while everything the library does not know is zero, and refused
 * with FA_UNSUPPORTED otherwise. Only fa_device, passed by value, and fa_capture, fa_captured, fa_state,
 * fa_shared_prefix and fa_shared_prefix_shape, passed in arrays, never grow. A call reads its structs before it returns
 * and keeps none of them.
 *
 * Errors. Every function that can fail returns FA_OK or one of the codes below, and never throws. What went wrong is
 * then in fa_last_error_*, for the calling thread, until the next call that fails on that thread. Nothing was launched
 * by a call that fails with FA_INVALID_ARGUMENT.
 *
 * Lifetime. Memory of tensors, workspaces and arrays must stay valid until the work queued on the stream has run.
 *
 * Threads. Threads may share a fa_attention; creating, using and destroying different ones is independent.
 *
 * Axis vocabulary: b batch, h_q query heads, h_kv key/value heads, s_q query rows, s_kv keys, d_qk head dim of q and k,
 * d_v head dim of v and o. */

#include <stddef.h>
#include <stdint.h>

#include <fa/version.h>

#if defined(FA_STATIC)
#define FA_C_API
#elif defined(_WIN32)
#if defined(FA_BUILDING)
#define FA_C_API __declspec(dllexport)
#else
#define FA_C_API __declspec(dllimport)
#endif
#else
#define FA_C_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* What a function returns. The numbers are those of fa::ErrorCode. */
enum fa_status {
  FA_OK = 0,
  FA_INVALID_ARGUMENT = 1, /* an argument breaks its contract; nothing was launched */
  FA_UNSUPPORTED = 2,      /* valid, but no kernel family of this library or GPU can do it */
  FA_NO_DRIVER = 3,        /* the CUDA driver library is missing, too old, or sees no GPU */
  FA_NO_COMPILER = 4,      /* a kernel had to be compiled and NVRTC could not be opened */
  FA_COMPILE_FAILED = 5,   /* NVRTC refused a kernel; fields: log, options, source */
  FA_CUDA = 6,             /* a CUDA driver call failed; fields: call, result */
  FA_OUT_OF_MEMORY = 7,    /* host or device memory ran out, or the given workspace is too small */
  FA_IO = 8,               /* a file could not be read or written */
  FA_CACHE_MISS = 9,       /* FA_COMPILE_NEVER, and no stored kernel serves the problem */
  FA_INTERNAL = 10,        /* a broken invariant of the library: please report it */
  FA_NOT_FINITE = 11       /* a debug call met a NaN or an infinity: fa_last_error_location says where */
};

/* Element types. The host device alone accepts FA_F64. Captured tensors and tables alone may be FA_I32. K and V of a
 * cache may be FA_E4M3 (OCP 8-bit floating point), FA_I8 or FA_U4X2 (fa_config.k_dtype); q, k and v may be FA_E4M3 or
 * FA_E5M2. An element of FA_U4X2 is a byte with two columns of a row, from 0 to 15 each. The last axis of such a tensor
 * is half of the head dim. Of eight columns the even ones are in the lower two bytes, the odd ones in the upper two.
 */
enum fa_dtype {
  FA_F16 = 0,
  FA_BF16 = 1,
  FA_F32 = 2,
  FA_F64 = 3,
  FA_I32 = 4,
  FA_E4M3 = 5,
  FA_I8 = 6,
  FA_E5M2 = 7,
  FA_U4X2 = 8
};

/* Where an attention runs. */
enum fa_device_kind {
  FA_DEVICE_CURRENT = 0, /* the device of the CUDA context current on the calling thread, else CUDA device 0 */
  FA_DEVICE_CUDA = 1,    /* CUDA device `ordinal`: its context if current, else its primary context */
  FA_DEVICE_HOST = 2     /* the CPU: tensors are host memory, calls are synchronous, the stream is ignored */
};

typedef struct fa_device {
  int32_t kind;    /* enum fa_device_kind */
  int32_t ordinal; /* FA_DEVICE_CUDA only */
} fa_device;

/* Which diagonal a causal mask follows when s_q != s_kv. Row i keeps key j when
 *   FA_CAUSAL_BOTTOM_RIGHT: j <= i + s_kv - s_q (the last row sees every key),
 *   FA_CAUSAL_TOP_LEFT:     j <= i. */
enum fa_causal_align { FA_CAUSAL_BOTTOM_RIGHT = 0, FA_CAUSAL_TOP_LEFT = 1 };

/* What the bits of o and lse are a function of (docs/invariance.md): of the whole call. With BATCH of the configuration
 * and the request alone. With ROWS of the configuration, the row's q and position, and the keys and values it sees. */
enum fa_invariance { FA_INVARIANCE_NONE = 0, FA_INVARIANCE_BATCH = 1, FA_INVARIANCE_ROWS = 2 };

/* Where compiled kernels are kept. */
enum fa_cache_mode { FA_CACHE_DISK = 0, FA_CACHE_MEMORY = 1 };

/* Whether a kernel may be compiled when the cache has none. */
enum fa_compile_policy { FA_COMPILE_ALLOW = 0, FA_COMPILE_NEVER = 1, FA_COMPILE_BACKGROUND = 2 };

/* Whether the fastest of several kernels is found out by trying them. FA_TUNE (off, cached, on) in the environment
 * overrides it. */
enum fa_tune_policy {
  FA_TUNE_DEFAULT = 0, /* FA_TUNE_ON */
  FA_TUNE_OFF = 1,     /* the planner's rules alone */
  FA_TUNE_CACHED = 2,  /* what was found out before, in the cache directory or by the library's own tables */
  FA_TUNE_ON = 3       /* where nothing is known, the first call of a kind of problem tunes, for some 2 s at most, on
                        * memory of the tuner's own. Never during stream capture, for problems too small to gain, or on
                        * the host */
};

/* One compilation, as fa_config.on_compile hears of it, from the thread that compiles, before and after. The texts are
 * valid during the call only. A call from inside of it that needs a kernel which any thread is compiling is refused. */
enum fa_compile_phase { FA_COMPILE_STARTED = 0, FA_COMPILE_FINISHED = 1, FA_COMPILE_ABORTED = 2 };
typedef struct fa_compile_event {
  uint32_t struct_size;
  int32_t phase;       /* enum fa_compile_phase */
  const char* spec;    /* every choice of the planner, in one line */
  const char* target;  /* "sm_90a" */
  const char* problem; /* of a failed one, else "" */
  double milliseconds; /* of a finished one */
} fa_compile_event;
typedef void (*fa_compile_callback)(void* user, const fa_compile_event* event);

/* A kernel family: one way of using the tensor cores. */
enum fa_family {
  FA_FAMILY_AUTOMATIC = 0,
  FA_FAMILY_SM80 = 1, /* mma.sync + cp.async: Ampere and everything after it */
  FA_FAMILY_SM90 = 2  /* wgmma + the copy engine (TMA): Hopper, 16-bit elements. Calls that the copy engine cannot serve
                       * (unaligned rows, zero or negative strides, no keys) run on sm80 */
};

/* A switch that can be left to the planner. */
enum fa_choice { FA_CHOICE_AUTOMATIC = 0, FA_CHOICE_NO = 1, FA_CHOICE_YES = 2 };

/* Fixes part of the kernel instead of leaving it to the planner; 0 leaves a field open. A combination that does not fit
 * the GPU is refused with the limit that it breaks, by fa_create. Calls that fall to the sm80 family follow it as far
 * as that has such a kernel, and else run with a tile of the planner's. */
typedef struct fa_kernel_override {
  uint32_t struct_size;
  int32_t family;         /* enum fa_family */
  int32_t tile_m;         /* query rows of a thread block */
  int32_t tile_n;         /* keys of one step of the main loop */
  int32_t warps;          /* warps of a thread block */
  int32_t stages;         /* K and V tiles in flight */
  int32_t q_in_registers; /* enum fa_choice */
  int32_t loop_bodies;    /* 1: masked and plain tiles share a loop body, 2: one body each */
  int32_t pack_gqa;       /* enum fa_choice: query heads of a KV head share a tile */
  int32_t splits;         /* thread blocks that share the keys of a query tile */
  int32_t q_buffers;      /* sm90: query tiles in flight */
  int32_t take_turns;     /* enum fa_choice: sm90: ping-pong scheduling of the warpgroups */
  int32_t warps_n;        /* sm80, forward: 2: pairs of warps share query rows; 1: none do */
  int32_t affine_product; /* enum fa_choice: sm90, forward: the tensor cores add an affine score function */
  int32_t exact_max;      /* enum fa_choice: sm90, forward: P is relative to the exact maximum of a row's scores */
  int32_t affine_reach;   /* enum fa_choice: sm90, forward: distance pruning under an affine score function */
  /* All of the above in words, and fields of later versions. What is said twice must be the same; a field that the
   * kernel does not have is refused. */
  const char* kernel; /* a family, "sm90", or a kernel, "sm90_forward"; NULL or "": any */
  const char* text;   /* "tile_m=192 stages=2"; NULL or "": nothing */
} fa_kernel_override;

/* A tensor or number that a function names, as a configuration declares it. */
typedef struct fa_capture {
  const char* name;
  int32_t dtype;         /* enum fa_dtype */
  int32_t requires_grad; /* nonzero: fa_backward computes its gradient, in fp32 */
} fa_capture;

/* A score or mask function (docs/variants.md): "score + slope[h] * float(kv - q)", "doc[q] == doc[kv] && q >= kv". What
 * does not parse is refused with FA_INVALID_ARGUMENT; fields: column, accepted. */
typedef struct fa_function {
  uint32_t struct_size;
  uint32_t capture_count;
  const char* expression; /* UTF-8 */
  const fa_capture* captures;
} fa_function;

/* What a call gives for a declared capture, by name. */
typedef struct fa_captured {
  const char* name;
  const struct fa_tensor* tensor; /* axes of length 1 are broadcast; NULL: `number` */
  double number;                  /* of a scalar */
} fa_captured;

/* Of which logits fa_forward tells the greatest of a row. Hidden keys never count. */
enum fa_max_logit {
  FA_MAX_LOGIT_NONE = 0,
  FA_MAX_LOGIT_SOFTMAX = 1, /* of those that the softmax takes: scaled, behind the score function; not the sink */
  FA_MAX_LOGIT_SCALED = 2   /* of the scaled scores, in front of the score function */
};

/* Whether fa_forward sums P over the rows, and to what the sums belong. */
enum fa_column_sums {
  FA_COLUMN_SUMS_NONE = 0,
  FA_COLUMN_SUMS_QUERY_HEADS = 1,
  FA_COLUMN_SUMS_KV_HEADS = 2 /* summed over the query heads of a KV head, too */
};

/* Everything that is fixed over the life of an attention. */
typedef struct fa_config {
  uint32_t struct_size;
  /* d_qk: a multiple of 8 from 8 to 576. Gradients: up to 256, and up to 512 where d_v is the same. */
  int32_t head_dim;
  int32_t head_dim_v;    /* d_v: a multiple of 8 from 8 to 512; 0 means value_in_key, else head_dim */
  int32_t dtype;         /* enum fa_dtype, of q, k, v, o and their gradients. The log-sum-exp is f32 (f64 for f64) */
  int32_t has_scale;     /* nonzero: `scale` counts, whatever it is; zero: 1/sqrt(head_dim) */
  float scale;           /* any finite float, 0 and negatives included */
  int32_t causal;        /* nonzero: masked */
  int32_t causal_align;  /* enum fa_causal_align */
  int32_t deterministic; /* nonzero: never swap the kernel of a problem between runs, and make dq bitwise
                            repeatable too, which costs time and scratch memory */
  int32_t cache_mode;    /* enum fa_cache_mode */
  int32_t compile;       /* enum fa_compile_policy */
  int32_t host_f64;      /* nonzero: the host device accumulates in double also for 16- and 32-bit tensors */
  const char* cache_directory;      /* UTF-8. NULL or "": FA_CACHE_DIR, else XDG_CACHE_HOME/fa, else HOME/.cache/fa */
  const fa_kernel_override* kernel; /* of fa_forward; NULL: the planner decides */
  const fa_kernel_override* kernel_backward; /* of fa_backward; NULL: the planner decides */
  /* Files made by `fa pack`, searched before the directory; FA_CACHE_PACKS adds to them. Read during fa_create only. */
  const char* const* cache_packs;
  uint64_t cache_pack_count;
  /* Caps of the directory. 0: FA_CACHE_MAX_BYTES and FA_CACHE_MAX_ENTRIES, else 256 MiB and 4096; negative: none. */
  int64_t cache_max_bytes;
  int64_t cache_max_entries;
  const char* cache_compilers;    /* "13.0", ">=12.8" or "any" NVRTC. NULL or "": FA_CACHE_COMPILERS, else any */
  fa_compile_callback on_compile; /* NULL: none */
  void* on_compile_user;
  int32_t cache_keep_source; /* nonzero: puts the source of every kernel compiled from now on beside it */
  int32_t tune;              /* enum fa_tune_policy */
  int32_t varlen;          /* nonzero: packed batches. Sequences of different lengths lie one after the other in tensors
                              without a batch axis: q is [total_q, h_q, d_qk], k [total_kv, h_kv, d_qk], lse
                              [h_q, total_q], and so on; each call says where, in an fa_sequences */
  int32_t zero_padding;    /* varlen, nonzero: rows that belong to no sequence become 0 in o, dq, dk and dv and -inf in
                              lse; else they are not touched */
  int32_t check_sequences; /* varlen or page_size, nonzero: every call waits for its stream, reads lengths and block
                              table back and refuses wrong ones; it cannot be captured. The host device always checks */
  float dropout;           /* probability, in [0, 1), with which an element of P is dropped; rounded to a multiple of
                              2^-16. The others are divided by 1 - dropout; lse is that of the whole P */
  int32_t sink;            /* nonzero: a logit of each query head takes part in the sum of each of its rows */
  const fa_function* score; /* what becomes of scaled scores; NULL: nothing */
  const fa_function* mask;  /* which scores are kept; NULL: all */
  /* Row i stands at key i' = i + s_kv - s_q (top left: at key i). Where has_window_* is nonzero, it keeps the keys from
   * i' - window_left to i' + window_right, both included; from 2^31 on a side is unbounded. With `causal`, window_right
   * is 0 or unbounded. */
  int32_t has_window_left;
  int32_t has_window_right;
  int64_t window_left;
  int64_t window_right;
  int64_t chunk; /* nonzero: keeps the keys of i' 's chunk, floor(i' / chunk) */
  /* The SHA-256 of each of cache_packs, 64 hex digits; NULL or "" for one that may have any, NULL for all of them. A
   * pack of another SHA-256 is not used, as if it were damaged: packs are code. Read during fa_create only. */
  const char* const* cache_pack_sha256;
  /* Positions of a page of the KV cache that k and v are in (fa_paged_cache), any number from 1; FA_CONTIGUOUS: it has
   * no pages; 0: they are plain tensors. Forward only, without dropout, and with FA_CAUSAL_BOTTOM_RIGHT. Queries are
   * dense, or packed (varlen). */
  int64_t page_size;
  /* Nonzero: fa_forward adds to the state that outputs->o and outputs->lse hold: what attention over other keys came to
   * (fa_merge). A row of the state with lse = -inf (or +inf) has none yet, whatever its o holds. The state may have a
   * sink, which enters once: `sink` is refused. fa_backward is given the o and lse of all keys. */
  int32_t accumulate;
  /* V is the first so many columns of K, as in multi-head latent attention: fa_forward_inputs.v is NULL, and d_v is
   * this. A multiple of 8 from 8 to 512, at most head_dim; 0: v is a tensor of its own. Forward only. */
  int32_t value_in_key;
  /* What K, and V, of a cache are stored as, where has_*_dtype is nonzero: FA_E4M3, FA_I8 or FA_U4X2, with a dtype of
   * FA_F16 or FA_BF16. An element stands for its value times the row's scale (fa_forward_inputs.k_scale). Forward and
   * append only, without dropout and, but over pages, without varlen; head dims are multiples of 16. */
  int32_t has_k_dtype;
  int32_t k_dtype;
  int32_t has_v_dtype;
  int32_t v_dtype;
  int32_t invariance; /* enum fa_invariance, of fa_forward: nothing is tuned; refused with accumulate and with fields of
                         `kernel` */
  /* nonzero: kernels that check waits and addresses, and say what is wrong; slow, nothing is tuned. Calls wait for
   * their stream, and fail with FA_NOT_FINITE where a result holds a NaN or an infinity that is none of a contract. */
  int32_t debug;
  /* With a dtype of FA_E4M3 or FA_E5M2, of q, k and v: what o is of, FA_BF16, FA_F16 or FA_E4M3, where has_o_dtype is
   * nonzero; else FA_BF16. So with FA_I8, which is of q and k beside a v of FA_E4M3. An element stands for its value
   * times a scale (fa_forward_inputs.q_scale). Forward only, from compute capability 8.9 on, with FA_I8 or `precise` on
   * Hopper alone, and on the host. Head dims are multiples of 16 up to 256. */
  int32_t has_o_dtype;
  int32_t o_dtype;
  /* With a k_dtype or v_dtype of FA_U4X2: columns of a row that share a scale and an offset, 32, 64 or 128. 0: 32. The
   * scales are of `dtype` then, [b, h_kv, s_kv, 2 * d / group_size], a scale and an offset of each group in turn. A
   * code stands for scale * code + offset, which may be rounded to `dtype`. */
  int32_t group_size;
  /* With a dtype of FA_E4M3, FA_E5M2 or FA_I8: each key has a scale for its row of K (key_scales), and for that of V
   * (value_scales). fa_forward_inputs.k_scale and v_scale hold them. */
  int32_t key_scales;
  int32_t value_scales;
  int32_t precise; /* nonzero: with such a dtype, P and V are multiplied as f16: o is as exact as in 16 bits */
  /* What fa_forward tells of scores and of P (fa_forward_outputs). Nothing is tuned then. Refused with accumulate,
   * invariance, shared prefixes and 8-bit floats; docs/statistics.md has the rest. */
  int32_t max_logit;         /* enum fa_max_logit */
  int32_t max_logit_by_head; /* nonzero: one number for each query head, as QK-clip needs */
  int32_t entropy;           /* nonzero: of each row of P */
  int32_t column_sums;       /* enum fa_column_sums */
  int32_t top_keys; /* how many keys of the greatest column sums a head tells, up to 1024; 0: none. Of the heads
                       of column_sums, else of query heads */
  int32_t reserved; /* 0 */
  /* Nonzero: fa_backward is given gradients of the entropy, of column_sums, and of max_logit. The greatest logit of a
   * row, or of a head, has its gradient: of equal ones that of the first row, and of the first key in it. */
  int32_t entropy_gradient;
  int32_t max_logit_gradient;
  int32_t column_sums_gradient;
  int32_t reserved_2; /* 0 */
} fa_config;

/* Flags of a tensor. */
enum fa_tensor_flags {
  FA_TENSOR_READ_ONLY = 1, /* refused as an output */
  FA_TENSOR_ROW_MAJOR = 2  /* dense and row-major: `strides` is not read */
};

/* A tensor that somebody else owns. Axes are [b, h, s, d] by meaning, whatever their order in memory; [b, s, d] is a
 * tensor with one head. Row statistics (the log-sum-exp) are [b, h, s] or [b, s]. Strides count elements; the last axis
 * of q, k, v and o must be contiguous. The memory must stay valid until the work queued on the stream has finished; the
 * struct itself only during the call. */
typedef struct fa_tensor {
  uint32_t struct_size;
  int32_t dtype;  /* enum fa_dtype */
  int32_t rank;   /* 1 to 4: how many of `shape` and `strides` count */
  uint32_t flags; /* enum fa_tensor_flags, or'ed */
  void* data;
  int64_t shape[4];
  int64_t strides[4]; /* in elements */
} fa_tensor;

/* Where the sequences of a packed batch lie (fa_config.varlen). Of q, o and their gradients sequence i has the rows
 * [cu_seqlens_q[i], cu_seqlens_q[i + 1]), of k and v the rows [cu_seqlens_kv[i], cu_seqlens_kv[i + 1]).
 *
 * Over pages (fa_config.page_size) cu_seqlens_kv is NULL, and seqused_kv is needed: request i has the positions
 * [0, seqused_kv[i]), new tokens counted. Row i of its s_q rows stands at position seqused_kv - s_q + i. Without varlen
 * cu_seqlens_q and seqused_q are NULL too: request i has the rows of q's batch entry i. FA_CONTIGUOUS: likewise.
 *
 * The arrays are in memory of the attention's device, are read when the kernels run, and may change between replays of
 * a captured call. Lengths that leave the tensors give wrong results, never an access outside of them. */
typedef struct fa_sequences {
  uint32_t struct_size;
  uint32_t reserved;            /* 0 */
  int64_t b;                    /* how many; without varlen q's b, or 0 */
  const int32_t* cu_seqlens_q;  /* [b + 1], from at least 0, never decreasing, to at most total_q */
  const int32_t* cu_seqlens_kv; /* [b + 1], likewise */
  const int32_t* seqused_q;     /* [b], how many of a sequence's rows count, from its first; NULL: all */
  const int32_t* seqused_kv;    /* [b], likewise */
  int64_t max_s_q;              /* no sequence has more rows; 0: not known, which costs a little */
  int64_t max_s_kv;             /* likewise; of a KV cache 0 stands for all that a row has */
} fa_sequences;

/* fa_config.page_size of a KV cache that is not in pages: k is [rows, h_kv, s_max, d_qk] and v [rows, h_kv, s_max, d_v]
 * by meaning, with any strides. Position j of a request is row j of its row of the cache. */
#define FA_CONTIGUOUS (-1)

/* Where the pages of a batch of requests are (fa_config.page_size). k is [pages, h_kv, page_size, d_qk] and v [pages,
 * h_kv, page_size, d_v] by meaning, with any strides. Position j of a request is row j % page_size of page
 * block_table[row][j / page_size]. Everything is in memory of the attention's device, is read when the kernels run, and
 * may change between replays of a captured call. Entries that lead out of the pool give wrong results, never an access
 * outside of it. */
typedef struct fa_paged_cache {
  uint32_t struct_size;
  uint32_t reserved; /* 0 */
  /* [rows, max_pages], i32, any strides; without batch_index rows = b. Entries that no row of the call needs are never
   * read. They are those of pages from seqused_kv on, in front of seq_begin, and in front of the window or chunk of the
   * first row. FA_CONTIGUOUS: NULL. */
  const fa_tensor* block_table;
  /* [b], the row of the table, or of a contiguous cache, that each request has; NULL: request i has row i */
  const int32_t* batch_index;
  /* [b], the first position of each request that counts; NULL: 0. What is in front is hidden from all rows, and moves
   * no position. */
  const int32_t* seq_begin;
} fa_paged_cache;

/* What the mask of fa_config.dropout is a function of, besides batch (in a packed batch: the sequence), query head, row
 * and key. Forward and backward of one call are given the same; calls whose offsets are at least b * h_q apart have
 * independent masks. */
typedef struct fa_dropout_state {
  uint32_t struct_size;
  uint32_t reserved; /* 0 */
  uint64_t seed;
  uint64_t offset;
  const uint64_t* device; /* {seed, offset} in memory of the attention's device, read when the kernels run, instead of
                             the two values above; may be NULL */
} fa_dropout_state;

/* Memory in which calls share what a kernel before attention finds out about a mask function: the lists of tiles that
 * it keeps something of. Calls of the same shape whose captures hold the same values may share it. The first is given
 * memory and fills it; the others are given the same with `filled`, on the same stream or behind it.
 *
 * `filled` is refused where no call has filled the memory, or where the one that did had another shape, mask, captured
 * number, operation or kernel. What captured tensors hold is the caller's matter. */
typedef struct fa_mask_tiles {
  uint32_t struct_size;
  int32_t filled; /* nonzero: by an earlier call */
  void* data;     /* on the attention's device, 256-byte aligned */
  size_t size;    /* bytes: at least fa_mask_tiles_size, of backward fa_backward_mask_tiles_size */
} fa_mask_tiles;

/* Memory of a schedule: how the keys of calls over pages are shared out among thread blocks. Calls that share one run
 * one after the other, in one stream or in the order of events. */
typedef struct fa_schedule_memory {
  uint32_t struct_size;
  uint32_t reserved; /* 0 */
  void* data;        /* on the attention's device, 256-byte aligned; lives until the last such call has run */
  size_t size;       /* bytes: at least fa_schedule_size */
} fa_schedule_memory;

/* One level of prefixes that requests over pages share: groups, which have all rows of q among them. Levels follow each
 * other: the keys of a level begin where those of the level in front end, and a request's own keys behind the last
 * (fa_paged_cache.seq_begin). The arrays are on the attention's device, are read when the kernels run, and may change
 * between replays of a captured call. Passed in arrays: this struct never grows. */
typedef struct fa_shared_prefix {
  const fa_tensor* block_table; /* [groups, max_pages], i32: pages of a group's prefix, from position 0 on */
  /* [groups + 1]: of q, group g has the rows [cu_rows[g], cu_rows[g + 1]), of whole requests. Dense queries count row i
   * of batch entry n as n * s_q + i. */
  const int32_t* cu_rows;
  const int32_t* lengths; /* [groups], the position behind a group's last key; no row stands before it */
  const int32_t* begin;   /* [groups], the position of its first key; NULL: 0 */
  /* [groups, max_rows], i32: the position of each row of a group. With a window or chunk of the configuration, or with
   * functions of q + s_kv - s_q, which is this position; else not read, and may be NULL. */
  const fa_tensor* positions;
  int64_t max_rows;   /* no group has more rows; 0: not known */
  int64_t max_length; /* no prefix is longer; 0: as long as a table row has room for */
} fa_shared_prefix;

/* What of a level picks kernels, and bounds its scratch memory. Passed in arrays: this struct never grows. */
typedef struct fa_shared_prefix_shape {
  int64_t groups;
  int64_t max_rows; /* fa_shared_prefix.max_rows */
  int64_t s_kv;     /* fa_shared_prefix.max_length, or the positions of a table row if that is 0 or more */
  int64_t begin;    /* nonzero: fa_shared_prefix.begin is given */
} fa_shared_prefix_shape;

/* Where the tensors of a call stand in a larger attention, the whole (docs/shards.md). Row i is the whole's row q + i *
 * q_step, and key j the whole's key kv + j * kv_step. Masks, windows, chunks, functions and dropout refer to the whole,
 * and captured tensors and their gradients are the whole's. All other tensors are the call's.
 *
 * Parts of b, h_q and q lie side by side; parts of kv are merged (fa_merge). In backward dq is summed over parts of kv,
 * dk and dv over parts of q, gradients of captures over all. Causal masks, windows and chunks take equal steps, and
 * chunks steps that divide them. Dropout takes steps of 1, and begins q and kv that are multiples of 32. Packed
 * batches, pages and invariance take none but the default. */
typedef struct fa_shard_place {
  uint32_t struct_size;
  uint32_t reserved; /* 0 */
  int64_t b;         /* in the whole, the call's first batch entry */
  int64_t h_q;       /* its first query head, a multiple of h_q / h_kv */
  int64_t q;         /* position of its first query row */
  int64_t kv;        /* position of its first key */
  int64_t q_step;    /* 0: 1 */
  int64_t kv_step;   /* likewise */
  int64_t whole_b;   /* sizes of the whole; 0: it ends with the call's last entry, head, row or key */
  int64_t whole_h_q;
  int64_t whole_s_q;
  int64_t whole_s_kv;
  /* b, h_q, q and kv, [4], in memory of the attention's device: read when the kernels run, in the place of those above,
   * which are 0 then. So a captured call may be replayed at other places. Sizes of the whole are given. A place that
   * leaves the whole is moved into it. What has to be a multiple of h_q / h_kv, or of 32, is rounded down. */
  const int64_t* begin;
} fa_shard_place;

/* What fa_forward reads, all on the attention's device. */
typedef struct fa_forward_inputs {
  uint32_t struct_size;
  uint32_t reserved;               /* 0 */
  const fa_tensor* q;              /* [b, h_q, s_q, d_qk] */
  const fa_tensor* k;              /* [b, h_kv, s_kv, d_qk], or pages */
  const fa_tensor* v;              /* [b, h_kv, s_kv, d_v], or pages; NULL with value_in_key */
  const fa_sequences* sequences;   /* with fa_config.varlen or page_size, else NULL */
  const fa_dropout_state* dropout; /* with fa_config.dropout; NULL: seed 0, offset 0 */
  const fa_captured* captures;     /* what the functions name */
  uint64_t capture_count;
  const fa_tensor* sink;       /* [h_q], f32 (f64 for f64), where fa_config.sink is set */
  const fa_mask_tiles* tiles;  /* may be NULL */
  const fa_paged_cache* cache; /* with fa_config.page_size, else NULL */
  /* With fa_config.page_size, of the call's limits and lengths. NULL: such a call makes its own, by a kernel more. */
  const fa_schedule_memory* schedule;
  /* With fa_config.page_size: levels of prefixes that requests share, from the first keys on, at most 8. */
  const fa_shared_prefix* prefixes;
  uint64_t prefix_count;
  /* With fa_config.has_k_dtype, or has_v_dtype: f32, [b, h_kv, s_kv], or of pages [pages, h_kv, page_size]. Any
   * strides: with 0 on an axis, all of it shares a scale. With a dtype of FA_E4M3 or FA_E5M2: f32, [b, h_kv], of b
   * sequences of a packed batch, or NULL. With fa_config.key_scales k_scale may be [b, h_kv, s_kv], or of a packed
   * batch is [h_kv, total_kv]; with fa_config.value_scales v_scale likewise. */
  const fa_tensor* k_scale;
  const fa_tensor* v_scale;
  const fa_tensor* q_scale;    /* with such a dtype: f32, [b, h_q, s_q], [b, h_q] or [h_q, total_q], or NULL */
  const fa_shard_place* place; /* where the call stands in a larger attention; NULL: it is the whole */
  /* The multiprocessors that the attention kernel takes at a time, so that others have room beside it; 0: all. The host
   * device ignores it. */
  int32_t max_multiprocessors;
  uint32_t reserved_2; /* 0 */
  /* With FA_I8: what is added to q k of a row's keys, f32, [b, h_q, s_q], [b, h_q] or [h_q, total_q], or NULL: 0. Where
   * K is stored less its mean, it is q times that mean (fa_quantize). */
  const fa_tensor* row_bias;
} fa_forward_inputs;

/* P of one query head, made anew behind a forward with fa_config.debug from q, k and lse, which is given then: O = P V.
 */
typedef struct fa_probability_dump {
  uint32_t struct_size;
  uint32_t reserved; /* 0 */
  /* [s_q, s_kv], f32 (f64 for f64), any strides. Of packed batches and over pages any [rows, keys], with 0 where the
   * sequence has none. */
  const fa_tensor* p;
  int64_t b; /* batch entry, sequence or request */
  int64_t h; /* query head */
} fa_probability_dump;

/* What fa_forward writes, whole but for the padding of packed batches. With fa_config.accumulate it is read first, and
 * lse is needed. */
typedef struct fa_forward_outputs {
  uint32_t struct_size;
  uint32_t reserved;    /* 0 */
  const fa_tensor* o;   /* [b, h_q, s_q, d_v]; must not overlap itself, lse or an input */
  const fa_tensor* lse; /* [b, h_q, s_q], f32 (f64 for f64), natural log, the sink included; -inf, or the sink, for a
                           row without keys; may be NULL */
  /* What fa_config asks for: f32 (f64 for f64), row-major without gaps; NULL where it does not. */
  const fa_tensor* max_logit; /* [b, h_q, s_q] or [h_q, total_q]; [h_q] with max_logit_by_head; -inf without keys */
  const fa_tensor* entropy;   /* [b, h_q, s_q] or [h_q, total_q], in nats; 0 without keys */
  /* [b, h_q, s_kv], or [b, h_kv, s_kv] of KV heads; of packed batches [h, total_kv]. Over a KV cache [b, h, s_kv], of
   * packed queries too: s_kv is max_s_kv, or without it as many positions as a table row, or the cache, has room for.
   * Positions that do not count for a request have 0. */
  const fa_tensor* column_sums;
  const fa_probability_dump* dump; /* NULL: none */
  /* FA_I32 [b, h, top_keys], of packed batches too; over a KV cache positions of the request, from seq_begin on. The
   * greatest sum comes first, of equal ones the smaller index. NaNs are greater than any number, and equal. -1 stands
   * behind the last key, and everywhere without rows. column_sums may be NULL then. */
  const fa_tensor* top_keys;
} fa_forward_outputs;

/* What fa_forward was given and what it computed, and the gradient of a loss with respect to that. All are of the
 * config's dtype but for lse, dlse and sink, and any may be broadcast (stride 0) over b, h or s. */
typedef struct fa_backward_inputs {
  uint32_t struct_size;
  uint32_t reserved;             /* 0 */
  const fa_tensor* q;            /* [b, h_q, s_q, d_qk] */
  const fa_tensor* k;            /* [b, h_kv, s_kv, d_qk] */
  const fa_tensor* v;            /* [b, h_kv, s_kv, d_v] */
  const fa_tensor* o;            /* [b, h_q, s_q, d_v], of fa_forward */
  const fa_tensor* lse;          /* [b, h_q, s_q], of fa_forward: natural log; -inf, or +inf, for a row without keys */
  const fa_tensor* dout;         /* [b, h_q, s_q, d_v], gradient of o */
  const fa_tensor* dlse;         /* [b, h_q, s_q], gradient of lse, of its dtype; may be NULL: 0 */
  const fa_sequences* sequences; /* those of fa_forward */
  const fa_dropout_state* dropout; /* that of fa_forward */
  const fa_captured* captures;     /* as in forward */
  uint64_t capture_count;
  const fa_tensor* sink;       /* likewise */
  const fa_mask_tiles* tiles;  /* of backward: not those of forward; may be NULL */
  const fa_shard_place* place; /* that of forward */
  int32_t max_multiprocessors; /* as in forward */
  uint32_t reserved_2;         /* 0 */
  /* What fa_config says, of the shapes that fa_forward_outputs has; else NULL. */
  const fa_tensor* entropy;      /* of fa_forward; with entropy_gradient */
  const fa_tensor* dentropy;     /* gradient of the entropy; likewise */
  const fa_tensor* dmax_logit;   /* gradient of max_logit; with max_logit_gradient */
  const fa_tensor* dcolumn_sums; /* gradient of column_sums; with column_sums_gradient */
} fa_backward_inputs;

/* What fa_backward writes. Every element is written, but for the padding of packed batches, and none is read: rows and
 * keys that nothing depends on get 0. An output must not overlap itself, another output or an input. Outputs that are
 * NULL are not computed, and kernels leave out what only these need. One at least is given. */
typedef struct fa_backward_outputs {
  uint32_t struct_size;
  uint32_t reserved;   /* 0 */
  const fa_tensor* dq; /* [b, h_q, s_q, d_qk]; may be NULL */
  const fa_tensor* dk; /* [b, h_kv, s_kv, d_qk], likewise; summed over the query heads of a KV head, then rounded */
  const fa_tensor* dv; /* [b, h_kv, s_kv, d_v]; likewise */
  /* Gradients of captures that require them: f32 (f64 for f64), of the capture's shape, without gaps between elements.
   */
  const fa_captured* captures;
  uint64_t capture_count;
  const fa_tensor* dsink; /* [h_q], of the sink's dtype; may be NULL */
} fa_backward_outputs;

/* Rotary position embedding (Su et al., "RoFormer", 2021). At position p the pair of columns (x, y) number i becomes
 * (x cos a - y sin a, y cos a + x sin a) with a = p * base^(-2 i / dims). */
typedef struct fa_rotary_embedding {
  uint32_t struct_size;
  int32_t dims;        /* columns from the first on that take part: even, at most head_dim; 0: none do */
  int32_t interleaved; /* nonzero: pair i has the columns 2 i and 2 i + 1, else i and i + dims / 2 */
  uint32_t reserved;   /* 0 */
  double base;         /* finite and above 0; 0: 10000 */
  /* [positions, dims / 2], cosine and sine of every angle instead of a base, f32 or of the config's dtype; NULL: none
   */
  const fa_tensor* cos;
  const fa_tensor* sin;
  /* [rows], the position of each new row, in the order of their rows. One of the two at most; NULL for both: a row
   * stands where seqused_kv puts it. */
  const int32_t* positions;
  const int64_t* positions_64;
} fa_rotary_embedding;

/* New keys and values, and the cache that they are written to, all on the attention's device. Of the cache k_cache and
 * v_cache are written, and so is q_out; an element that the call does not write keeps its value.
 *
 * A dense batch has s_new new rows of each of b requests. In a packed one, whose tensors have rank 3, request i has the
 * rows [cu_seqlens_k_new[i], cu_seqlens_k_new[i + 1]); rows of no request are not written anywhere. With slots, and
 * positions for a rotary embedding, nothing depends on requests: lengths are not read, and all rows count. */
typedef struct fa_append_inputs {
  uint32_t struct_size;
  uint32_t reserved;  /* 0 */
  const fa_tensor* k; /* [b, h_kv, s_new, d_qk]; packed: [total_new, h_kv, d_qk] */
  const fa_tensor* v; /* [b, h_kv, s_new, d_v]; packed: [total_new, h_kv, d_v] */
  /* With fa_config.page_size [pages, h_kv, page_size, d_qk], else contiguous, [b, h_kv, s_max, d_qk]. */
  const fa_tensor* k_cache;
  const fa_tensor* v_cache;    /* likewise, of d_v */
  const fa_paged_cache* cache; /* with page_size. Of a contiguous cache batch_index alone counts: rows of the cache */
  int64_t b;                   /* packed: how many requests */
  const int32_t* cu_seqlens_k_new; /* packed: [b + 1], never decreasing, from at least 0 to total_new */
  const int32_t*
      seqused_kv; /* [b], keys of a request with the new ones: row j of n goes to position seqused_kv - n + j */
  /* [rows], where each new row goes instead: page * page_size + row of the page (contiguous: request * s_max +
   * position). Rows with a negative slot are not written to the cache. One of the two at most. */
  const int32_t* slots;
  const int64_t* slots_64;
  const fa_rotary_embedding* rotary; /* applied to k and, where it is given, to q; NULL: none */
  const fa_tensor* q;                /* [b, h_q, s_new, d_qk]; packed: [total_new, h_q, d_qk]. Optional, with rotary */
  const fa_tensor* q_out;            /* where q goes, of its shape. In place: the same memory and strides */
  /* With fa_config.has_k_dtype, or has_v_dtype: the scales of the cache's rows, f32, [pages, h_kv, page_size], or
   * [b, h_kv, s_max]. A new row of x is stored as x / scale, rounded. Each new row gets a scale of its own, which is
   * written, or with scales_given nonzero has the one that is there. */
  const fa_tensor* k_scale;
  const fa_tensor* v_scale;
  int32_t scales_given; /* into latent rows of 656 bytes v, v_cache, k_scale are NULL, and scales are in the rows */
  int32_t reserved_after_scales_given; /* 0 */
} fa_append_inputs;

/* What picks the kernel of an append, besides the configuration. */
typedef struct fa_append_shape {
  uint32_t struct_size;
  int32_t rotary_dims;  /* fa_rotary_embedding.dims */
  int32_t interleaved;  /* likewise */
  int32_t has_table;    /* nonzero: cos and sin are given */
  int32_t table_dtype;  /* enum fa_dtype, of these */
  int32_t unaligned;    /* nonzero: rows of tensors need not start at multiples of 16 bytes */
  int32_t scales_given; /* fa_append_inputs.scales_given */
  int32_t reserved;     /* 0 */
} fa_append_shape;

/* What attention over some of the keys came to: o [b, h_q, s_q, d_v] of the config's dtype or f32, and lse
 * [b, h_q, s_q]. The latter is f32 (f64 for f64), a natural log. With varlen o is [total_q, h_q, d_v] and lse [h_q,
 * total_q]. A row without keys has lse = -inf (or +inf), and takes no part, whatever its o holds. */
typedef struct fa_state {
  const fa_tensor* o;
  const fa_tensor* lse;
} fa_state;

/* States whose keys have nothing in common, all on the attention's device. */
typedef struct fa_merge_inputs {
  uint32_t struct_size;
  uint32_t sum;           /* nonzero: o is the sum of all o, without weights; no lse and no sink then */
  const fa_state* states; /* listed: 1 to 16 of them. Stacked: the first of all */
  uint64_t state_count;   /* stacked: 1 */
  int64_t stacked;        /* above 0: how many states lie at equal distances, as slices of one tensor do */
  int64_t stride_o;       /* stacked: elements from o of a state to that of the next */
  int64_t stride_lse;     /* likewise of lse */
  /* [h_q], f32 (f64 for f64): a logit that joins the sum of each row of a head, as fa_config.sink does. It enters once:
   * either here, or in one of the states. NULL: none. */
  const fa_tensor* sink;
} fa_merge_inputs;

/* Tensors of 16 or 32 bits, the codes that stand for them, and scales of their rows. Those that are NULL are not
 * wanted. Of packed batches tensors are [total, h, d], and what rows have is [h, total]. A row x is stored as x /
 * scale, rounded to the nearest, ties to even, and at most 127 (FA_I8) or 448 (FA_E4M3). Codes of q and k are of
 * fa_config.dtype, those of v FA_E4M3. */
typedef struct fa_quantize_inputs {
  uint32_t struct_size;
  uint32_t reserved;  /* 0 */
  const fa_tensor* q; /* [b, h_q, s_q, d_qk], FA_F16, FA_BF16 or FA_F32 */
  const fa_tensor* k; /* [b, h_kv, s_kv, d_qk], likewise */
  const fa_tensor* v; /* [b, h_kv, s_kv, d_v], likewise */
  const fa_tensor* q_codes;
  const fa_tensor* k_codes;
  const fa_tensor* v_codes;
  const fa_tensor* q_scale; /* FA_F32, [b, h_q, s_q]: fa_forward_inputs.q_scale */
  const fa_tensor* k_scale; /* FA_F32, [b, h_kv, s_kv]: fa_forward_inputs.k_scale, with fa_config.key_scales */
  const fa_tensor* v_scale; /* likewise: v_scale, with fa_config.value_scales */
  /* FA_F32, [b, h_kv, d_qk], of a packed batch [h_kv, d_qk]: what is subtracted from the rows of k. It is their mean,
   * which is written, unless mean_given: then it is read. NULL: nothing. */
  const fa_tensor* k_mean;
  const fa_tensor* row_bias; /* FA_F32, [b, h_q, s_q]: where q times the mean of its keys goes; may be NULL */
  int32_t scales_given;      /* nonzero: scales are read. Else each row gets one of its own, which is written */
  int32_t mean_given;
} fa_quantize_inputs;

/* What picks the kernel of a merge, besides the configuration. All 0: o of the states and of the result are of the
 * config's dtype, and aligned. */
typedef struct fa_merge_shape {
  uint32_t struct_size;
  int32_t has_states_dtype; /* nonzero: every o is of states_dtype, an enum fa_dtype: the config's or f32 */
  int32_t states_dtype;
  int32_t mixed;            /* nonzero: some of them are f32, the others of the config's dtype */
  int32_t has_result_dtype; /* nonzero: the merged o is of result_dtype, likewise */
  int32_t result_dtype;
  int32_t unaligned; /* nonzero: rows of o need not start at multiples of 16 bytes */
  int32_t sum;       /* nonzero: its calls have fa_merge_inputs.sum */
} fa_merge_shape;

/* Sizes of one call. b, h_q, s_q and s_kv may be 0. */
typedef struct fa_shape {
  uint32_t struct_size;
  int32_t unaligned; /* nonzero: rows of q, k, v, o and their gradients need not start at multiples of 16 bytes */
  int64_t b;
  int64_t h_q;
  int64_t h_kv; /* divides h_q: query head h reads KV head h / (h_q / h_kv). 0 means h_q */
  int64_t s_q;
  int64_t s_kv;
  /* fa_config.varlen: rows of the packed tensors, 0 for b * s_q and b * s_kv. b counts sequences, s_q and s_kv are the
   * longest ones, 0 where they are not known. */
  int64_t total_q;
  int64_t total_kv;
  int32_t without_dq;      /* nonzero: calls of fa_backward have no output dq */
  int32_t without_dk;      /* likewise dk */
  int32_t without_dv;      /* likewise dv */
  int32_t placed;          /* nonzero: its calls have a fa_shard_place */
  int32_t strided;         /* nonzero: one with steps */
  int32_t bounded;         /* nonzero: its calls have max_multiprocessors */
  int32_t place_in_memory; /* nonzero: its calls have fa_shard_place.begin */
  uint32_t reserved;       /* 0 */
} fa_shape;

/* What a schedule is made for. The arrays are in memory of the attention's device, and are read when the kernel runs.
 */
typedef struct fa_schedule_inputs {
  uint32_t struct_size;
  uint32_t reserved; /* 0 */
  /* Of the calls: b, h_q and h_kv, and whether rows are aligned. Dense queries have s_q, packed ones max_s_q (0: not
   * given) and total_q. Of s_kv the limit is max_s_kv, or what a row of the block table has room for if that is less.
   */
  const fa_shape* limits;
  const fa_sequences* sequences; /* those of the calls */
  const int32_t* seq_begin;      /* [b], that of fa_paged_cache; may be NULL */
} fa_schedule_inputs;

/* Scratch memory of one call. Calls that may overlap in time need one each; calls of one stream may share. One that
 * shares a byte with anything else that the call is given is refused, and so are fa_mask_tiles and a schedule. */
typedef struct fa_workspace {
  uint32_t struct_size;
  uint32_t reserved; /* 0 */
  void* data;        /* on the attention's device, 256-byte aligned */
  size_t size;       /* bytes: at least fa_workspace_size, of backward fa_backward_workspace_size */
} fa_workspace;

/* What serves a shape, and what it cost to get it. Texts end with NUL and are cut where they do not fit. */
typedef struct fa_kernel_info {
  uint32_t struct_size;
  int32_t registers;    /* a thread */
  int32_t local_bytes;  /* spilled bytes a thread */
  int32_t shared_bytes; /* a thread block */
  int32_t threads;      /* a thread block */
  int32_t reserved;
  double compile_ms;
  double load_ms;
  char name[64];      /* entry point */
  char origin[16];    /* "compiled", "pack", "disk", "memory" or "host" */
  char spec[512];     /* every choice of the planner, in one line */
  char chosen_by[16]; /* "planner", "table", "record", "tuner" or "stand-in" */
} fa_kernel_info;

/* What became of look-ups in one cache of this process: every attention with an equal cache configuration shares it. */
typedef struct fa_cache_counters {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t memory_hits;
  uint64_t pack_hits;
  uint64_t disk_hits;
  uint64_t compiles;
  uint64_t damaged;          /* stored kernels that failed their check; they are compiled anew */
  uint64_t unaccepted;       /* stored kernels of a compiler, or for a driver, that is not accepted */
  uint64_t publish_failures; /* kernels that stayed in memory because the directory refused them */
  uint64_t evictions;        /* stored kernels removed to keep within the caps */
} fa_cache_counters;

/* Computes attention for one fa_config on one device. */
typedef struct fa_attention fa_attention;

/* Validates `config` and binds `device`; compiles nothing. What `config` points to is read before the call returns;
 * only on_compile_user must outlive the attention. On success *out is the caller's, to be given to fa_destroy; on
 * failure it is NULL. Errors: FA_INVALID_ARGUMENT, FA_UNSUPPORTED, FA_NO_DRIVER, FA_CUDA. */
FA_C_API int fa_create(const fa_config* config, fa_device device, fa_attention** out);

/* NULL is accepted. Queued work may still be running; its kernels stay loaded. */
FA_C_API void fa_destroy(fa_attention* attention);

/* Computes outputs->o and, if given, outputs->lse.
 *
 * The work is queued on `stream`, a CUstream or cudaStream_t; NULL is the legacy default stream. The call returns
 * before the work is done, on the host device after it. `workspace` NULL: scratch, where needed, comes from the
 * stream's memory pool.
 *
 * A shape served for the first time is planned, compiled if need be, and loaded. After that a call with a workspace
 * allocates nothing, takes no lock and may be captured into a CUDA graph.
 *
 * Errors, before anything is launched: FA_INVALID_ARGUMENT, FA_UNSUPPORTED, FA_NO_COMPILER, FA_COMPILE_FAILED,
 * FA_CACHE_MISS, FA_CUDA, FA_OUT_OF_MEMORY; with fa_config.debug FA_NOT_FINITE, behind the kernels. b, h_q or s_q = 0
 * succeeds without a launch. */
FA_C_API int fa_forward(const fa_attention* attention, const fa_forward_inputs* inputs,
                        const fa_forward_outputs* outputs, void* stream, const fa_workspace* workspace);

/* Computes the gradients of q, k and v, and those of captures and the sink where they are given. P is recomputed tile
 * by tile:
 *
 *   P  = softmax(scale * Q K^T + mask) = exp(scale * Q K^T + mask - lse),
 *   dV = P^T dout,
 *   dS = P o (dout V^T - rowsum(dout o O) + dlse),
 *   dQ = scale * dS K,
 *   dK = scale * dS^T Q.
 *
 * The arguments inputs->o and inputs->lse are those that fa_forward of an attention with the same configuration
 * computed. Rows without keys give and get exact zeros. Stream, cost and errors are those of fa_forward. */
FA_C_API int fa_backward(const fa_attention* attention, const fa_backward_inputs* inputs,
                         const fa_backward_outputs* outputs, void* stream, const fa_workspace* workspace);

/* Writes new keys and values into a cache, k and, if given, q with their rotary embedding. It is one kernel, which
 * reads lengths, tables and slots when it runs: they may change between replays of a captured call. It needs no scratch
 * memory.
 *
 * The host device and fa_config.check_sequences refuse lengths, tables, slots and positions that do not fit. Without
 * that a row whose place is not in the cache or in the table is not written, and no access is outside of a tensor.
 * Stream and cost are those of fa_forward. Errors, before anything is launched: FA_INVALID_ARGUMENT, FA_NO_COMPILER,
 * FA_COMPILE_FAILED, FA_CACHE_MISS, FA_CUDA. */
FA_C_API int fa_append(const fa_attention* attention, const fa_append_inputs* inputs, void* stream);

/* Compiles and loads what fa_append will need for `shape`, and tells about it. Errors are those of fa_append. */
FA_C_API int fa_prepare_append(const fa_attention* attention, const fa_append_shape* shape);
FA_C_API int fa_append_kernel_info_get(const fa_attention* attention, const fa_append_shape* shape,
                                       fa_kernel_info* info);

/* Shares the query tiles and keys of requests over pages out among thread blocks, in memory that calls of fa_forward
 * are given then. It is called once a step, for all layers. One kernel reads the lengths when it runs, behind a memory
 * operation where there are thousands of requests.
 *
 * Stream, cost and errors are those of fa_forward, and FA_OUT_OF_MEMORY for less than fa_schedule_size bytes. Where
 * that is 0 nothing is launched. A call of other limits, masks or alignment is refused the schedule. */
FA_C_API int fa_schedule(const fa_attention* attention, const fa_schedule_inputs* inputs,
                         const fa_schedule_memory* memory, void* stream);

/* Bytes of a schedule for calls of these limits; 0 where they take none, because requests are too short to be shared
 * out, and on the host device. */
FA_C_API int fa_schedule_size(const fa_attention* attention, const fa_shape* limits, size_t* size);

/* Merges partial results of attention over different keys:
 *
 *   lse = ln(sum_i exp(lse_i) + exp(sink)),   o = sum_i exp(lse_i - lse) o_i.
 *
 * It is one kernel, and needs no scratch memory. A result may be the view of one of the states, of its dtype, and
 * shares no other memory with them. O is of the config's dtype or f32, and outputs->lse may be NULL. A row without
 * keys has o = 0 and lse = -inf, or the sink. NaN in lse, or in o of a state that takes part, reaches the row. Stream
 * and cost are those of fa_forward. Errors, before anything is launched: FA_INVALID_ARGUMENT, FA_NO_COMPILER,
 * FA_COMPILE_FAILED, FA_CACHE_MISS, FA_CUDA. */
FA_C_API int fa_merge(const fa_attention* attention, const fa_merge_inputs* inputs, const fa_forward_outputs* outputs,
                      void* stream);

/* Compiles and loads what fa_merge will need for `shape`, and tells about it. Errors are those of fa_merge. */
FA_C_API int fa_prepare_merge(const fa_attention* attention, const fa_merge_shape* shape);
FA_C_API int fa_merge_kernel_info_get(const fa_attention* attention, const fa_merge_shape* shape, fa_kernel_info* info);

/* Makes codes and scales of q, k and v of 16 or 32 bits, for fa_forward of a dtype of FA_I8 or FA_E4M3. With k_mean the
 * mean of K over the keys is taken from it first, which changes no softmax. It needs no scratch memory. Stream and cost
 * are those of fa_forward. Errors, before anything is launched: FA_INVALID_ARGUMENT, FA_UNSUPPORTED, FA_NO_COMPILER,
 * FA_COMPILE_FAILED, FA_CACHE_MISS, FA_CUDA. */
FA_C_API int fa_quantize(const fa_attention* attention, const fa_quantize_inputs* inputs, void* stream);

/* Compiles and loads what fa_quantize will need for such tensors, which are not read or written. */
FA_C_API int fa_prepare_quantize(const fa_attention* attention, const fa_quantize_inputs* inputs);

/* Plans, compiles and loads what fa_forward will need for `shape`, so that the call itself can be captured. Blocks
 * until that is done; errors as fa_forward. On Hopper this is for strides that the copy engine can describe, and no
 * seq_begin: a call without these may have another kernel, which its first run prepares. */
FA_C_API int fa_prepare(const fa_attention* attention, const fa_shape* shape);

/* The same for fa_forward and fa_backward, on a thread of the attention's, of which fa_destroy waits for what has
 * begun. What goes wrong there, on_compile hears, and the call that needs the kernel returns. */
FA_C_API int fa_prepare_async(const fa_attention* attention, const fa_shape* shape);
FA_C_API int fa_prepare_backward_async(const fa_attention* attention, const fa_shape* shape);

/* *ready becomes 1 where fa_forward, fa_backward run their planned kernels for `shape` and wait for none, else 0. */
FA_C_API int fa_is_ready(const fa_attention* attention, const fa_shape* shape, int32_t* ready);
FA_C_API int fa_backward_is_ready(const fa_attention* attention, const fa_shape* shape, int32_t* ready);

/* Bytes of scratch that fa_forward needs for `shape`, whatever the strides of its tensors, if their rows are aligned as
 * `shape` says; often 0. */
FA_C_API int fa_workspace_size(const fa_attention* attention, const fa_shape* shape, size_t* size);

/* The same two for calls with shared prefixes. The workspace has partial results of each level, too. */
FA_C_API int fa_prepare_shared(const fa_attention* attention, const fa_shape* shape,
                               const fa_shared_prefix_shape* prefixes, uint64_t prefix_count);
FA_C_API int fa_shared_workspace_size(const fa_attention* attention, const fa_shape* shape,
                                      const fa_shared_prefix_shape* prefixes, uint64_t prefix_count, size_t* size);

/* Which kernel serves `shape`; prepares it first. The caller sets info->struct_size; no byte beyond it is written. */
FA_C_API int fa_kernel_info_get(const fa_attention* attention, const fa_shape* shape, fa_kernel_info* info);

/* The same three for fa_backward (fa_backward_kernel_info_get is below). The information is that of its main kernel,
 * with the times of every kernel of the call. */
FA_C_API int fa_prepare_backward(const fa_attention* attention, const fa_shape* shape);
FA_C_API int fa_backward_workspace_size(const fa_attention* attention, const fa_shape* shape, size_t* size);

/* Bytes that fa_mask_tiles of fa_forward and of fa_backward take for `shape`; 0 without a mask function. */
FA_C_API int fa_mask_tiles_size(const fa_attention* attention, const fa_shape* shape, size_t* size);
FA_C_API int fa_backward_mask_tiles_size(const fa_attention* attention, const fa_shape* shape, size_t* size);
FA_C_API int fa_backward_kernel_info_get(const fa_attention* attention, const fa_shape* shape, fa_kernel_info* info);

/* Zero on the host device. The caller sets counters->struct_size; no byte beyond it is written. */
FA_C_API int fa_cache_counters_get(const fa_attention* attention, fa_cache_counters* counters);

/* The attention kernel for `shape` on a GPU of `arch` ("sm_90a"), with every other kernel that the shape needs. They
 * are found in the cache or compiled, as `config` says. Nothing is loaded, and no GPU is needed. A program that ships a
 * pack proves with FA_COMPILE_NEVER that the pack is complete. After FA_CACHE_MISS, fa_last_error_field("command") is
 * the `fa` command that builds what is missing. `info` may be NULL; else the caller sets info->struct_size. */
FA_C_API int fa_find_kernel(const fa_config* config, const fa_shape* shape, const char* arch, fa_kernel_info* info);

/* The same for fa_backward; `info` is about its main kernel. */
FA_C_API int fa_find_backward_kernel(const fa_config* config, const fa_shape* shape, const char* arch,
                                     fa_kernel_info* info);

/* The same for fa_append. */
FA_C_API int fa_find_append_kernel(const fa_config* config, const fa_append_shape* shape, const char* arch,
                                   fa_kernel_info* info);

/* The same for fa_merge. */
FA_C_API int fa_find_merge_kernel(const fa_config* config, const fa_merge_shape* shape, const char* arch,
                                  fa_kernel_info* info);

/* The mask of fa_config.dropout = `probability`, computed on the host (state->device is not read): keep [b, h_q, s_q,
 * s_kv], row-major, 1 for a kept element and 0 for a dropped one. */
FA_C_API int fa_dropout_mask(const fa_dropout_state* state, float probability, int64_t b, int64_t h_q, int64_t s_q,
                             int64_t s_kv, uint8_t* keep);

/* The last failure on the calling thread: its code (FA_OK when there was none), its message, and its named facts, among
 * them "argument", "value" and "accepted" (see fa_status for more). Never NULL: empty when there is nothing. The texts
 * stay valid until the next call that fails on this thread. */
FA_C_API int fa_last_error_code(void);
FA_C_API const char* fa_last_error_message(void);
FA_C_API const char* fa_last_error_field(const char* name);

/* Where a debug call met its first NaN or infinity (docs/kernels/debugging.md). Axes that the tensor does not have are
 * -1. Of packed batches b is the sequence, and rows and keys count from its first. */
typedef struct fa_error_location {
  uint32_t struct_size;
  int32_t index_count; /* of a captured tensor, or its gradient: axes of `index`; else 0 */
  /* An input ("q", "k", the name of a capture), something on the way ("score", "p", "dp", "ds"), or a result. */
  const char* tensor;
  const char* result; /* the first result that it reached */
  double value;
  int64_t b;
  int64_t h; /* a KV head of k, v, their scales, dk, dv and sums of KV heads */
  int64_t q;
  int64_t kv;
  int64_t d;
  int64_t index[4]; /* the element; the axes above say for which score it was read */
} fa_error_location;

/* Of the last failure on the calling thread, if that was FA_NOT_FINITE: else returns FA_INVALID_ARGUMENT, and the last
 * failure stays what it is. The texts stay valid until the next call that fails on this thread. */
FA_C_API int fa_last_error_location(fa_error_location* location);

/* "invalid_argument" for FA_INVALID_ARGUMENT, and so on. */
FA_C_API const char* fa_status_name(int status);

/* "0.1.0", of the library that runs; FA_VERSION_STRING is that of the headers (fa/version.h). */
FA_C_API const char* fa_version(void);

enum fa_log_level { FA_LOG_DEBUG = 0, FA_LOG_INFO = 1, FA_LOG_WARNING = 2, FA_LOG_ERROR = 3, FA_LOG_OFF = 4 };

/* Called with one message, without a line end; from any thread, one call at a time. It must not call
 * fa_set_log_callback itself. */
typedef void (*fa_log_callback)(void* user, int level, const char* message);

/* Where messages go, for the whole process; NULL restores the default, standard error. */
FA_C_API int fa_set_log_callback(fa_log_callback callback, void* user);

/* Messages below `level` are dropped. The default is FA_LOG_WARNING, or the environment's FA_LOG. */
FA_C_API int fa_set_log_level(int level);

/* Where NVRTC is: its file, or the directory that holds it; NULL or "" restores the search that fa/compiler.hpp tells
 * of. The text is copied. It is opened when the first kernel has to be compiled; after that a path has no effect. With
 * one that cannot be used compiling fails with FA_NO_COMPILER, and no other place is tried. */
FA_C_API int fa_set_nvrtc_path(const char* path);

#ifdef __cplusplus
}
#endif

#endif /* FA_FA_H_ */
