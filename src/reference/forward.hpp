#ifndef FA_SRC_REFERENCE_FORWARD_HPP_
#define FA_SRC_REFERENCE_FORWARD_HPP_

#include <cstdint>

#include <fa/tensor.hpp>
#include <fa/types.hpp>

#include "reference/dropout.hpp"
#include "reference/variant.hpp"

namespace fa::reference {

/// The keys of a batch entry that are in pages: key j is row j % page of page entries[j / page * stride]. Or those of a
/// contiguous cache: key j is row j of entry `row`.
struct PagedKeys {
  const std::int32_t* entries = nullptr;
  std::int64_t row = -1;  ///< negative, and no entries: k and v are plain tensors
  std::int64_t stride = 0;
  std::int64_t s_kv = 0;
  std::int64_t begin = 0;  ///< keys before it are hidden from all rows, and not read

  bool given() const noexcept { return entries != nullptr || row >= 0; }
};

/// What is computed besides, as fa/statistics.hpp says; undefined where it is not.
struct RowStatistics {
  TensorView max_logit;      ///< [b, h_q, s_q]
  bool scaled = false;       ///< of the scores in front of the score function
  TensorView entropy;        ///< [b, h_q, s_q]
  TensorView column_sums;    ///< [b, h, s_kv]
  bool of_kv_heads = false;  ///< h is h_kv, else h_q
  TensorView top_keys;       ///< i32 [b, h, k], by column_sums, which are given then
};

/// One forward call on host memory. Every tensor has rank 4 (lse: 3), any dtype, alignment and int64 strides; shapes
/// agree and h_kv divides h_q, which the caller has checked.
struct ForwardArgs {
  TensorView q;    ///< [b, h_q, s_q, d_qk]
  TensorView k;    ///< [b, h_kv, s_kv, d_qk], or pages [pages, h_kv, page, d_qk], or [rows, h_kv, s_max, d_qk]
  TensorView v;    ///< [b, h_kv, s_kv, d_v], or pages
  TensorView o;    ///< [b, h_q, s_q, d_v]
  TensorView lse;  ///< [b, h_q, s_q], f32 or f64; optional
  double scale = 1;
  bool causal = false;
  CausalAlign causal_align = CausalAlign::bottom_right;
  DropoutMask dropout = {};
  VariantArgs variant = {};
  /// [b, h_kv, s_kv], or of pages [pages, h_kv, page], f32: what elements of k are times of. Of u4x2 rank 4, of q's
  /// dtype: a scale and an offset of each group of columns.
  TensorView k_scale = {};
  TensorView v_scale = {};  ///< likewise
  /// [b, h_q, s_q], likewise. Of a packed batch those of k and v have its sequences as b, or are of its keys.
  TensorView q_scale = {};
  TensorView row_bias = {};  ///< [b, h_q, s_q], likewise: what is added to q k of a row
  /// Over pages: these are of a batch entry each, [b, h_kv, ..].
  bool k_scale_of_requests = false;
  bool v_scale_of_requests = false;
  PagedKeys paged = {};     ///< of one batch entry
  bool accumulate = false;  ///< adds to the state that o and lse, which is given, hold
  RowStatistics statistics = {};
  bool f64 = false;  ///< compute in double; implied by an f64 q, k or v
};

/// FlashAttention-2 forward on the CPU, exact by the semantics of the library: the golden reference of every kernel,
/// and what the host device runs. Bitwise repeatable, whatever the number of threads.
void forward(const ForwardArgs& args);

}  // namespace fa::reference

#endif  // FA_SRC_REFERENCE_FORWARD_HPP_
