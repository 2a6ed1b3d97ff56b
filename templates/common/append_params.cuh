#ifndef FA_TEMPLATES_COMMON_APPEND_PARAMS_CUH_
#define FA_TEMPLATES_COMMON_APPEND_PARAMS_CUH_

#include <common/types.cuh>

namespace fa::kernel {

inline constexpr int kMaxRotaryPairs = 128;  // of the greatest head dim

/// Launch parameters of append. Strides are in elements. A dense batch has row j of request i at b * s_new + j of its
/// tokens; a packed one is a single entry of s_new = tokens rows.
struct AppendParams {
  const void* k;    // [b, h_kv, s_new, d_qk]
  const void* v;    // [b, h_kv, s_new, d_v]
  const void* q;    // [b, h_q, s_new, d_qk], may be null
  void* k_cache;    // [pages, h_kv, page_rows, d_qk]
  void* v_cache;    // [pages, h_kv, page_rows, d_v]
  void* q_out;      // as q, may be q
  const void* cos;  // [table_positions, pairs], with a table
  const void* sin;
  const int32_t* cu;           // [b + 1], of a packed batch; null: dense
  const int32_t* used_kv;      // [b], keys of a request with the new ones; null: no position is counted
  const int32_t* block_table;  // [table_rows, max_pages]; null: the cache is contiguous, a page for each request
  const int32_t* batch_index;  // [b], rows of the block table; null: 0, 1, 2, ...
  const int32_t* slots;        // [tokens], places in the cache, in rows; null: by positions
  const int64_t* slots_64;     // likewise
  const int32_t* positions;    // [tokens], for rotary embedding; null: where the rows are put
  const int64_t* positions_64;
  int64_t stride_k_b, stride_k_h, stride_k_s;
  int64_t stride_v_b, stride_v_h, stride_v_s;
  int64_t stride_q_b, stride_q_h, stride_q_s;
  int64_t stride_q_out_b, stride_q_out_h, stride_q_out_s;
  int64_t stride_k_cache_page, stride_k_cache_h, stride_k_cache_s;
  int64_t stride_v_cache_page, stride_v_cache_h, stride_v_cache_s;
  int64_t stride_cos, stride_sin;  // of rows
  int64_t stride_table_row, stride_table_page;
  int32_t b, h_kv, h_q;
  int32_t tokens, s_new;
  int32_t pages, page_rows;
  int32_t table_rows, max_pages;
  int32_t table_positions;
  int32_t even_rows;                // of each sequence of a packed batch if all are equal, a guess; 0: none
  int32_t items;                    // of a token: what a thread does
  int32_t block_tokens;             // of a block; its threads have an item each, or one token has several blocks
  int32_t token_blocks;             // which then are so many
  uint64_t turns[kMaxRotaryPairs];  // revolutions a position, in 2^-64
};

/// Of an append into a cache of 8 bits.
struct AppendStoredParams : AppendParams {
  float* k_scale;  // [pages, h_kv, page_rows], may be null where K is of the tensors' type
  float* v_scale;  // likewise
  int64_t stride_k_scale_page, stride_k_scale_h, stride_k_scale_s;
  int64_t stride_v_scale_page, stride_v_scale_h, stride_v_scale_s;
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_APPEND_PARAMS_CUH_
