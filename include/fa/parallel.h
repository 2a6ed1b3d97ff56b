#ifndef FA_PARALLEL_H_
#define FA_PARALLEL_H_

/* The C ABI of fa_parallel: context parallelism, one attention over a sequence that many ranks share. It mirrors
 * <fa/parallel.hpp>; docs/context_parallel.md has the whole. Structs, errors and lifetimes are as fa.h says, and what
 * went wrong is in fa_last_error_*. fa_transfer, which is passed in arrays, and fa_scheme_time in arrays never grow.
 *
 *   fa_communicator* communicator = NULL;
 *   if (fa_communicator_of_nccl(comm, NULL, &communicator) != FA_OK) ...
 *   fa_parallel_config config = {.struct_size = sizeof config, .attention = &attention, .layout = FA_LAYOUT_ZIGZAG};
 *   fa_parallel* parallel = NULL;
 *   if (fa_parallel_create(&config, communicator, &parallel) != FA_OK) ...
 *   if (fa_parallel_forward(parallel, &inputs, &outputs, stream, NULL, 0) != FA_OK) ...      this rank's rows */

#include <fa/fa.h>

#if defined(FA_STATIC)
#define FA_PARALLEL_C_API
#elif defined(_WIN32)
#if defined(FA_PARALLEL_BUILDING)
#define FA_PARALLEL_C_API __declspec(dllexport)
#else
#define FA_PARALLEL_C_API __declspec(dllimport)
#endif
#else
#define FA_PARALLEL_C_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Which rows of each sequence a rank has, of n ranks. Lengths are multiples of n, of zigzag of 2 n. */
enum fa_layout {
  FA_LAYOUT_CONTIGUOUS = 0, /* the rank-th of n equal parts */
  FA_LAYOUT_ZIGZAG = 1,     /* parts `rank` and 2 n - 1 - `rank` of 2 n equal ones */
  FA_LAYOUT_STRIPED = 2     /* rows rank, rank + n, rank + 2 n, ... */
};

/* How ranks come to the keys of others. */
enum fa_scheme { FA_SCHEME_AUTOMATIC = 0, FA_SCHEME_RING = 1, FA_SCHEME_ALL_GATHER = 2, FA_SCHEME_ULYSSES = 3 };

/* What dK and dV are sent in, from ranks that have computed parts of them. */
enum fa_gradient_transfer { FA_GRADIENTS_F32 = 0, FA_GRADIENTS_NATIVE = 1 };

/* A rank of a group. */
typedef struct fa_communicator fa_communicator;
typedef struct fa_parallel fa_parallel;

/* How tensors travel over NCCL. Puts are ncclPutSignal into windows, of NCCL 2.30.7 and later, between 2 to 8 ranks
 * that reach each other's memory. Messages are ncclSend and ncclRecv. Automatic: puts where they can be used. */
enum fa_nccl_transfers { FA_NCCL_AUTOMATIC = 0, FA_NCCL_MESSAGES = 1, FA_NCCL_PUTS = 2 };

typedef struct fa_nccl_options {
  uint32_t struct_size;
  int32_t without_watch; /* nonzero: no thread watches what was queued */
  int64_t timeout_ms;    /* 0: 60000 */
  int32_t transfers;     /* enum fa_nccl_transfers; the same on all ranks */
  int32_t reserved;      /* 0 */
} fa_nccl_options;

/* A communicator over an ncclComm_t of the application, which outlives it. NCCL is opened at run time. `options` may be
 * NULL. Errors: FA_INVALID_ARGUMENT, FA_UNSUPPORTED (no NCCL, or one before 2.18), FA_NO_DRIVER, FA_CUDA. */
FA_PARALLEL_C_API int fa_communicator_of_nccl(void* comm, const fa_nccl_options* options, fa_communicator** out);

/* `size` ranks that are threads of this process, on the host device, into out[0 .. size - 1]. timeout_ms 0: 30000. */
FA_PARALLEL_C_API int fa_communicator_local_group(int32_t size, int64_t timeout_ms, fa_communicator** out);

/* Ranks for tests: `seed` and `max_delay_us` delay each transfer by random times. `on_exchange` is called by each
 * rank's own thread for transfers before it starts a group; what it returns but FA_OK fails the rank. `options` may be
 * NULL. */
typedef struct fa_local_group_options {
  uint32_t struct_size;
  uint32_t shares_memory; /* nonzero: transfers go to memory that ranks share */
  int64_t timeout_ms;     /* 0: 30000 */
  uint64_t seed;
  int64_t max_delay_us;
  int (*on_exchange)(void* user, int32_t rank, uint64_t group);
  void* user;
} fa_local_group_options;
FA_PARALLEL_C_API int fa_communicator_local_group_of(int32_t size, const fa_local_group_options* options,
                                                     fa_communicator** out);

/* One tensor without gaps, to or from another rank. Of two ranks, transfers meet in the order of their calls. */
typedef struct fa_transfer {
  int32_t sends; /* nonzero: to the peer */
  int32_t peer;
  int32_t dtype;    /* enum fa_dtype */
  int32_t reserved; /* 0 */
  void* data;
  int64_t count; /* elements */
} fa_transfer;

/* A transport of the program's own. Its functions return FA_OK or another status, with which the call that needed them
 * fails (FA_CUDA); they are called by the threads that make calls, and `abort` by any.
 *
 *   exchange     queues transfers as one group, behind what `stream` holds and behind earlier groups. It returns before
 *                they are done, with the group's number, from 0 on.
 *   wait         what is queued on `stream` from now on comes behind that group and all before it. On the host it
 *                returns when they are done.
 *   synchronize  returns when `stream` and all groups have run.
 *   check        says whether something has failed since. It does not wait.
 *   abort        ends the communication of all ranks.
 *   destroy      nothing uses the transport any more. May be NULL. */
typedef struct fa_communicator_functions {
  uint32_t struct_size;
  int32_t rank;
  int32_t size;
  fa_device device;
  uint32_t reserved; /* 0 */
  void* user;
  int (*exchange)(void* user, const fa_transfer* transfers, uint64_t count, void* stream, uint64_t* group);
  int (*wait)(void* user, uint64_t group, void* stream);
  int (*synchronize)(void* user, void* stream);
  int (*check)(void* user);
  void (*abort)(void* user, const char* problem);
  void (*destroy)(void* user);
} fa_communicator_functions;
FA_PARALLEL_C_API int fa_communicator_create(const fa_communicator_functions* functions, fa_communicator** out);

/* Attentions that use it keep it alive. NULL does nothing. */
FA_PARALLEL_C_API void fa_communicator_destroy(fa_communicator* communicator);
FA_PARALLEL_C_API int fa_communicator_rank(const fa_communicator* communicator, int32_t* rank, int32_t* size);

FA_PARALLEL_C_API int fa_communicator_device(const fa_communicator* communicator, fa_device* device);

/* Queues transfers as one group of the communicator, behind what `stream` holds. `group` gets its number, and may be
 * NULL. Every rank makes the same calls, in the same order. */
FA_PARALLEL_C_API int fa_communicator_exchange(fa_communicator* communicator, const fa_transfer* transfers,
                                               uint64_t count, void* stream, uint64_t* group);

/* What is queued on `stream` from now on comes behind that group and all before it. On the host it waits for them. */
FA_PARALLEL_C_API int fa_communicator_wait(fa_communicator* communicator, uint64_t group, void* stream);

/* Returns when `stream` and all transfers have run; FA_CUDA where a rank has failed or is late. */
FA_PARALLEL_C_API int fa_communicator_synchronize(fa_communicator* communicator, void* stream);

/* FA_CUDA where something has failed since; does not wait. */
FA_PARALLEL_C_API int fa_communicator_check(fa_communicator* communicator);

/* Ends the communication of all ranks, from any thread: their calls return FA_CUDA, with `problem` as the reason. NULL
 * is "unknown". FA_OK where it had ended before. */
FA_PARALLEL_C_API int fa_communicator_abort(fa_communicator* communicator, const char* problem);

typedef struct fa_parallel_config {
  uint32_t struct_size;
  int32_t layout;                       /* enum fa_layout */
  const fa_config* attention;           /* the whole attention */
  int32_t scheme;                       /* enum fa_scheme */
  int32_t ulysses;                      /* ranks that share heads; 0: as the scheme has it */
  int32_t head_groups;                  /* all_gather: pieces that K and V come in; 0: the library's choice */
  int32_t gradients;                    /* enum fa_gradient_transfer */
  int32_t has_reserved_multiprocessors; /* nonzero: `reserved_multiprocessors` counts; zero: 0 */
  int32_t reserved_multiprocessors;     /* that kernels leave to transfers */
} fa_parallel_config;

/* Sizes of the whole. */
typedef struct fa_parallel_shape {
  uint32_t struct_size;
  uint32_t reserved; /* 0 */
  int64_t b;
  int64_t h_q;
  int64_t h_kv;
  int64_t s_q;
  int64_t s_kv;
} fa_parallel_shape;

FA_PARALLEL_C_API int fa_parallel_create(const fa_parallel_config* config, const fa_communicator* communicator,
                                         fa_parallel** out);
FA_PARALLEL_C_API void fa_parallel_destroy(fa_parallel* parallel);

/* Attention of this rank's rows over the keys of all ranks, and its gradients. Every rank makes the same calls, in the
 * same order. `lengths` are the whole lengths of a packed batch's sequences, in host memory; else NULL and 0. */
FA_PARALLEL_C_API int fa_parallel_forward(fa_parallel* parallel, const fa_forward_inputs* inputs,
                                          const fa_forward_outputs* outputs, void* stream, const int64_t* lengths,
                                          uint64_t length_count);
FA_PARALLEL_C_API int fa_parallel_backward(fa_parallel* parallel, const fa_backward_inputs* inputs,
                                           const fa_backward_outputs* outputs, void* stream, const int64_t* lengths,
                                           uint64_t length_count);

/* Plans such calls, compiles their kernels and takes their memory, so that they can be captured. */
FA_PARALLEL_C_API int fa_parallel_prepare(fa_parallel* parallel, const fa_parallel_shape* shape, int32_t with_backward,
                                          const int64_t* lengths, uint64_t length_count);

/* FA_INVALID_ARGUMENT on every rank, unless configuration, layout and speeds are the same on all. Waits. */
FA_PARALLEL_C_API int fa_parallel_check_agreement(fa_parallel* parallel, void* stream);

/* Which scheme serves such calls: enum fa_scheme, and how many ranks share heads. */
FA_PARALLEL_C_API int fa_parallel_scheme(const fa_parallel* parallel, const fa_parallel_shape* shape,
                                         const int64_t* lengths, uint64_t length_count, int32_t* scheme,
                                         int32_t* ulysses);

/* Speeds that schemes are compared by (docs/scale.md): FLOP/s of one GPU, bytes/s of one GPU each way, seconds. 0: the
 * library's own value. */
typedef struct fa_cluster_speeds {
  uint32_t struct_size;
  int32_t ranks_of_node;
  double flops;          /* of the forward kernel */
  double backward_flops; /* of the backward kernel */
  double link;           /* to ranks of the same node */
  double network;        /* to ranks of other nodes */
  double latency;        /* of a group of transfers without bytes */
  double launch;         /* of a call without work */
  double memory;         /* of a local copy */
} fa_cluster_speeds;

/* What the model says of one choice, in seconds. */
typedef struct fa_scheme_time {
  uint32_t struct_size;
  int32_t scheme;  /* enum fa_scheme */
  int32_t ulysses; /* ranks that share heads */
  int32_t reserved;
  double forward;
  double backward;
  double single; /* forward and backward of one GPU with all rows */
} fa_scheme_time;

/* What schemes are chosen by: the same on all ranks, before the first call. NULL: the library's own. */
FA_PARALLEL_C_API int fa_parallel_set_speeds(fa_parallel* parallel, const fa_cluster_speeds* speeds);

/* As fa_parallel_scheme, with times. */
FA_PARALLEL_C_API int fa_parallel_scheme_time(const fa_parallel* parallel, const fa_parallel_shape* shape,
                                              const int64_t* lengths, uint64_t length_count, fa_scheme_time* time);

/* Every choice that the sizes allow, of one dense batch, the fastest first. `times` gets the first `capacity` of them,
 * and `count` how many there are. `times` may be NULL where `capacity` is 0, and `speeds` always. */
FA_PARALLEL_C_API int fa_compare_schemes(const fa_parallel_config* config, const fa_parallel_shape* shape,
                                         int32_t ranks, const fa_cluster_speeds* speeds, fa_scheme_time* times,
                                         uint64_t capacity, uint64_t* count);

/* Scratch memory of one rank, in bytes. */
typedef struct fa_context_memory {
  uint32_t struct_size;
  uint32_t reserved;     /* 0 */
  uint64_t shard_kv;     /* K and V of the rank, for comparison */
  uint64_t kv_in_flight; /* keys and values of other ranks */
  uint64_t scratch;      /* all tensors of a plan, with those; without the kernels' own workspaces */
} fa_context_memory;
FA_PARALLEL_C_API int fa_parallel_memory(const fa_parallel* parallel, const fa_parallel_shape* shape,
                                         int32_t with_backward, const int64_t* lengths, uint64_t length_count,
                                         fa_context_memory* memory);

/* What this rank does in a forward, or a backward: one line an operation. `text` gets the first `capacity` - 1 bytes
 * and a zero behind them, and `length` how many bytes there are. `text` may be NULL where `capacity` is 0. */
FA_PARALLEL_C_API int fa_parallel_describe(const fa_parallel* parallel, const fa_parallel_shape* shape,
                                           int32_t backward, const int64_t* lengths, uint64_t length_count, char* text,
                                           uint64_t capacity, uint64_t* length);

/* Of configuration, layout and speeds: what fa_parallel_check_agreement compares. */
FA_PARALLEL_C_API int fa_parallel_hash(const fa_parallel* parallel, uint64_t* hash);
FA_PARALLEL_C_API int fa_parallel_layout(const fa_parallel* parallel, int32_t* layout); /* enum fa_layout */

/* Which rows of sequences of these lengths a rank has, in the order of its shard; of packed batches from the first row
 * of the batch. `rows` gets the first `capacity` of them, and `count` how many there are. */
FA_PARALLEL_C_API int fa_shard_rows(int32_t layout, int32_t ranks, int32_t rank, const int64_t* lengths,
                                    uint64_t length_count, int64_t* rows, uint64_t capacity, uint64_t* count);

/* "contiguous", "zigzag" or "striped"; "automatic", "ring", "all_gather" or "ulysses"; "unknown" of other numbers. */
FA_PARALLEL_C_API const char* fa_layout_name(int32_t layout);
FA_PARALLEL_C_API const char* fa_scheme_name(int32_t scheme);

/* Copies a rank's rows of `whole` to `part` (fa_shard), or back (fa_unshard). Tensors are as in fa_parallel_forward;
 * row statistics [b, h, s], packed [h, total], where `statistics` is nonzero. */
typedef struct fa_shard_copy {
  uint32_t struct_size;
  int32_t layout; /* enum fa_layout */
  int32_t ranks;
  int32_t rank;
  const int64_t* lengths; /* of a packed batch; else NULL */
  uint64_t length_count;
  int32_t statistics;
  fa_device device;
  uint32_t reserved; /* 0 */
} fa_shard_copy;
FA_PARALLEL_C_API int fa_shard(const fa_shard_copy* how, const fa_tensor* whole, const fa_tensor* part, void* stream);
FA_PARALLEL_C_API int fa_unshard(const fa_shard_copy* how, const fa_tensor* part, const fa_tensor* whole, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* FA_PARALLEL_H_ */
