#ifndef FA_TEMPLATES_COMMON_FORWARD_PARAMS_CUH_
#define FA_TEMPLATES_COMMON_FORWARD_PARAMS_CUH_

#include <common/packed_params.cuh>
#include <common/types.cuh>
#include <ptx/host_device.cuh>

namespace fa::kernel {

/// Of a SplitSum (log_sum.cuh).
inline constexpr int kSplitSumFloats = 3;

/// Warps that merge a query row's splits: one for as many columns as it has lanes, and one where there is a state.
FA_HOST_DEVICE constexpr int combine_warps(int head_dim_v, bool accumulate) {
  return accumulate ? 1 : (head_dim_v + 31) / 32;
}

/// Of kernels that leave splits for another, which merges them.
struct MergeParams {
  bool beside_lone;  // whether each block of the forward has a multiprocessor of its own
  bool some_whole;   // whether rows may be there that need no merge
};

/// Launch parameters of every forward kernel, written by the host and passed whole as a `const __grid_constant__`
/// argument. Strides are in elements.
struct ForwardParams {
  const void* q;  // [b, h_q, s_q, d_qk]
  const void* k;  // [b, h_kv, s_kv, d_qk], or pages [pages, h_kv, page, d_qk]
  const void* v;  // [b, h_kv, s_kv, d_v], or pages
  void* o;        // [b, h_q, s_q, d_v]
  float* lse;     // [b, h_q, s_q], may be null
  union {
    float* partial_o;    // [splits, b, h_q, s_q, d_v], split kernels only; fixed_splits.cuh has those of a fixed size
    float* max_logit;    // [b, h_q, s_q], or [h_q]; kernels with that statistic only, which are not split
    float* column_sums;  // [b, heads, s_kv]; their kernel only
  };
  union {
    float* partial_lse;  // [splits, b, h_q, s_q, kSplitSumFloats], a SplitSum each, split kernels only
    float* entropy;      // [b, h_q, s_q]; likewise
  };
  union {
    int32_t* next_tile;     // dynamic kernels, and those of sm80 that share fixed splits: 0 at the launch
    uint64_t* split_flags;  // [tiles, splits], those of sm90 that share fixed splits (flags.cuh)
    MergeParams merge;      // other split kernels
  };

  int64_t stride_q_b, stride_q_h, stride_q_s;
  int64_t stride_k_b, stride_k_h, stride_k_s;
  int64_t stride_v_b, stride_v_h, stride_v_s;
  int64_t stride_o_b, stride_o_h, stride_o_s;
  int64_t stride_lse_b, stride_lse_h, stride_lse_s;

  int32_t b, h_q, h_kv, s_q, s_kv;
  int32_t group;            // h_q / h_kv
  int32_t causal_shift;     // row i keeps key j <= i + causal_shift; varlen: behind the diagonal of its sequence
  int32_t m_blocks;         // query tiles of one (packed) head
  int32_t heads;            // heads of the grid: h_q, or h_kv when query heads are packed
  int32_t heads_in_flight;  // heads whose K and V share the L2 cache while their tiles run
  int32_t splits;           // blocks that share the keys of one query tile

  float scale;       // natural units, for the log-sum-exp
  float scale_log2;  // scale * log2(e)

  SequenceParams sequences;  // of varlen kernels: s_q and s_kv above bound the lengths, m_blocks is in slots
  union {
    DropoutParams dropout;  // dropout kernels only
    PagedParams paged;      // kernels over pages only, which have no dropout; `sequences` has their lengths
  };
};

/// Of a request with `keys` keys, where these alone decide: each of `least` keys or more, and `most` of them.
FA_HOST_DEVICE constexpr int splits_of_length(int64_t keys, int most, int least) {
  const int64_t splits = keys / least;
  return splits < 1 ? 1 : splits < most ? static_cast<int>(splits) : most;
}

/// Whether splits leave few rows to merge: then the blocks of the merge may wait beside those of its forward, and those
/// of the next forward beside the merge. More of them would take the places of blocks that read keys.
template <class Params>
FA_HOST_DEVICE constexpr bool merges_few_rows(const Params& params) {
  constexpr int64_t kFewRows = 128;
  return int64_t{params.b} * params.h_q * params.s_q <= kFewRows;
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_FORWARD_PARAMS_CUH_
