#ifndef FA_PARALLEL_H_
#define FA_PARALLEL_H_

/* The C ABI of fa_parallel: context parallelism, one attention over a sequence that many ranks share. It mirrors
 * <fa/parallel.hpp>, without the model of time and texts of plans; docs/context_parallel.md has the whole. Structs,
 * errors and lifetimes are as fa.h says, and what went wrong is in fa_last_error_*.
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

typedef struct fa_nccl_options {
  uint32_t struct_size;
  int32_t without_watch; /* nonzero: no thread watches what was queued */
  int64_t timeout_ms;    /* 0: 60000 */
} fa_nccl_options;

/* A communicator over an ncclComm_t of the application, which outlives it. NCCL is opened at run time. `options` may be
 * NULL. Errors: FA_INVALID_ARGUMENT, FA_UNSUPPORTED (no NCCL, or one before 2.18), FA_NO_DRIVER, FA_CUDA. */
FA_PARALLEL_C_API int fa_communicator_of_nccl(void* comm, const fa_nccl_options* options, fa_communicator** out);

/* `size` ranks that are threads of this process, on the host device, into out[0 .. size - 1]. timeout_ms 0: 30000. */
FA_PARALLEL_C_API int fa_communicator_local_group(int32_t size, int64_t timeout_ms, fa_communicator** out);

/* Attentions that use it keep it alive. NULL does nothing. */
FA_PARALLEL_C_API void fa_communicator_destroy(fa_communicator* communicator);
FA_PARALLEL_C_API int fa_communicator_rank(const fa_communicator* communicator, int32_t* rank, int32_t* size);

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

/* FA_INVALID_ARGUMENT on every rank, unless configuration and layout are the same on all. Waits. */
FA_PARALLEL_C_API int fa_parallel_check_agreement(fa_parallel* parallel, void* stream);

/* Which scheme serves such calls: enum fa_scheme, and how many ranks share heads. */
FA_PARALLEL_C_API int fa_parallel_scheme(const fa_parallel* parallel, const fa_parallel_shape* shape,
                                         const int64_t* lengths, uint64_t length_count, int32_t* scheme,
                                         int32_t* ulysses);

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
