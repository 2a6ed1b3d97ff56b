#ifndef FA_TEMPLATES_COMMON_VARIANT_PARAMS_CUH_
#define FA_TEMPLATES_COMMON_VARIANT_PARAMS_CUH_

#include <common/backward_params.cuh>
#include <common/forward_params.cuh>
#include <common/types.cuh>

namespace fa::kernel {

inline constexpr int kMaxCaptures = 8;
inline constexpr int kMaxCaptureRank = 4;

/// A captured tensor of a score or mask function. Strides are in elements, 0 on axes of length 1.
struct CaptureParams {
  const void* data;  // null: a number given by value
  float* gradient;   // fp32, added to; may be null
  int64_t strides[kMaxCaptureRank];
  int64_t gradient_strides[kMaxCaptureRank];
  uint32_t bits;  // of the number, an f32 or an i32
  int32_t place;  // not of the capture: the entry of its number of the call's place (shard_place.cuh); placed kernels
};

/// What kernels with a score or mask function, a bounded mask or sinks are launched with besides.
struct VariantParams {
  CaptureParams captures[kMaxCaptures];
  const float* sink;    // [h_q], natural units
  int64_t stride_sink;  // in elements
  int32_t diagonal;     // row i stands at key i + diagonal; varlen: not read, each sequence has its own
  int32_t window_left;  // keys kept before that one
  int32_t chunk;        // keys of a chunk
  int32_t tile_others;  // of a tile list
  float scale;          // of raw scores, natural units
  float inverse_scale;
  // With a mask function, but of packed batches: for each tile of rows (the backward's main kernel: of keys) the
  // numbers of tiles that are not empty, that the function keeps whole, and that are full, then those, in the opposite
  // order. [batches, heads, blocks, 3 + tile_others], batches and heads 1 where the mask does not depend on them.
  const int32_t* tile_lists;
  // Of kernels that leave out what is out of an affine score function's reach: bits of the greatest squared norms among
  // rows of q and of k. [b, h_q], then [b, h_kv]. row_norms writes them, over zeros.
  uint32_t* norms;
  int32_t b;           // batch entries, below which a Place's is
  int32_t chunk_keys;  // placed kernels: keys of the first key's chunk that are before it; `diagonal` counts them
};

/// Launch parameters of the kernel that writes tile lists.
struct MaskTilesParams {
  VariantParams variant;
  int32_t* lists;
  int32_t* classes;  // [batches, heads, blocks, others], scratch
  int32_t s_q, s_kv;
  int32_t group;         // query heads of a KV head
  int32_t causal_shift;  // as in the attention kernels
  int32_t heads;         // of lists
  int32_t blocks;        // lists of a head
  int32_t others;        // tiles that a list is about
  int32_t unused;
};

struct ForwardVariantParams : ForwardParams {
  VariantParams variant;
};

struct BackwardVariantParams : BackwardParams {
  VariantParams variant;
  float* dsink;  // [h_q], written by the kernel for it
  int64_t stride_dsink;
};

/// With gradients of statistics: f32 [b, h_q, s_q], of packed batches [h_q, total_q].
struct BackwardStatisticsParams : BackwardVariantParams {
  const float* entropy;       // of the forward, natural units
  const float* dentropy;      // its gradient
  const float* dmax_logit;    // gradient of the greatest logits; of those of heads [h_q]
  const float* dcolumn_sums;  // and of column sums: [b, h, s_kv], of packed batches [h, total_kv]
  // In the workspace, like the statistics of rows.
  const int32_t* max_keys;   // the keys of the greatest logits, -1: none
  const uint64_t* max_rows;  // [h_q], the rows of the greatest logits of heads (statistics_gradients.cuh)
  const float* row_sums;     // of P times dcolumn_sums
  int32_t sum_group;         // query heads of a column sum
  int32_t unused;
};

/// Launch parameters of the kernel that writes these in the workspace.
struct StatisticRowsParams : ForwardVariantParams {
  const float* dcolumn_sums;
  int32_t* max_keys;
  uint64_t* max_rows;  // 0 when the kernel starts
  float* row_sums;
  int32_t sum_group;
  int32_t unused;
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_VARIANT_PARAMS_CUH_
