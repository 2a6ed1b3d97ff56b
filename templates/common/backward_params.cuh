#ifndef FA_TEMPLATES_COMMON_BACKWARD_PARAMS_CUH_
#define FA_TEMPLATES_COMMON_BACKWARD_PARAMS_CUH_

#include <common/packed_params.cuh>
#include <common/types.cuh>

namespace fa::kernel {

/// Rows of the workspace come in groups of this many: the rows of one accumulator fragment.
inline constexpr int kRowGroup = 16;

/// Of a group of rows, or of the query tile that starts there, where additions to dQ have an order: the place in it of
/// the key tile that was last. Two, since two blocks may have half of the columns each. Where dK and dV are added up in
/// turns, the second is of a group of keys instead, counted over b and h_kv: how many blocks have added.
inline constexpr int kTurnsPerGroup = 2;

/// Launch parameters of every backward kernel, written by the host and passed whole as a `const __grid_constant__`
/// argument. Strides are in elements.
struct BackwardParams {
  const void* q;      // [b, h_q, s_q, d_qk]
  const void* k;      // [b, h_kv, s_kv, d_qk]
  const void* v;      // [b, h_kv, s_kv, d_v]
  const void* o;      // [b, h_q, s_q, d_v]
  const void* dout;   // [b, h_q, s_q, d_v]
  const float* lse;   // [b, h_q, s_q], natural log
  const float* dlse;  // [b, h_q, s_q], may be null
  void* dq;           // [b, h_q, s_q, d_qk]
  void* dk;           // [b, h_kv, s_kv, d_qk]
  void* dv;           // [b, h_kv, s_kv, d_v]

  // The workspace.
  float* lse_log2;  // [b, h_q, padded_rows], LSE in base 2; +inf where a row has no weight
  float* delta;     // [b, h_q, padded_rows], rowsum(dout o O) - dlse
  float* dq_accum;  // [b, h_q, padded_rows, d_qk] in the order of dq_accum_index, null where dQ has a pass of its own
  int32_t* turns;   // [b, h_q, padded_rows / kRowGroup, kTurnsPerGroup], null without an order of additions
  float* partial;   // [splits, b, h_kv, s_kv, d_qk + d_v], split kernels only; in turns [b, h_kv, n_blocks, tile]

  int64_t stride_q_b, stride_q_h, stride_q_s;
  int64_t stride_k_b, stride_k_h, stride_k_s;
  int64_t stride_v_b, stride_v_h, stride_v_s;
  int64_t stride_o_b, stride_o_h, stride_o_s;
  int64_t stride_dout_b, stride_dout_h, stride_dout_s;
  int64_t stride_lse_b, stride_lse_h, stride_lse_s;
  int64_t stride_dlse_b, stride_dlse_h, stride_dlse_s;
  int64_t stride_dq_b, stride_dq_h, stride_dq_s;
  int64_t stride_dk_b, stride_dk_h, stride_dk_s;
  int64_t stride_dv_b, stride_dv_h, stride_dv_s;

  int32_t b, h_q, h_kv, s_q, s_kv;
  int32_t group;            // h_q / h_kv
  int32_t causal_shift;     // row i keeps key j <= i + causal_shift; varlen: behind the diagonal of its sequence
  int32_t padded_rows;      // s_q rounded up to kRowGroup
  int32_t m_blocks;         // query tiles of a head
  int32_t n_blocks;         // key tiles of a head
  int32_t heads_in_flight;  // KV heads whose Q, dO and dQ share the L2 cache while their key tiles run
  int32_t last_section;  // of a causal grid: it has all heads that are left, so that tiles of many heads end the grid
  int32_t splits;        // blocks that share the query tiles of one key tile

  float scale;       // natural units
  float scale_log2;  // scale * log2(e)

  // Varlen kernels only: s_q and s_kv above bound the lengths; m_blocks and n_blocks are in slots, and so are
  // padded_rows, in the workspace's order [h_q, padded_rows].
  SequenceParams sequences;
  DropoutParams dropout;  // dropout kernels only: `scale` is divided by its keep
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_BACKWARD_PARAMS_CUH_
