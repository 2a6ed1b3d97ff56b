#ifndef FA_APPEND_HPP_
#define FA_APPEND_HPP_

#include <cstdint>
#include <optional>

#include <fa/paged.hpp>
#include <fa/tensor.hpp>

/// What Attention::append is given (attention.hpp, docs/inference.md).
namespace fa {

/// Rotary position embedding (Su et al., "RoFormer", 2021). At position p the pair of columns (x, y) number i becomes
///   (x cos a - y sin a, y cos a + x sin a), a = p * base^(-2 i / dims).
/// It is computed in f32 and rounded once (docs/numerics.md).
struct RotaryEmbedding {
  /// Columns from the first on that take part: even, at most head_dim; 0: none do. With latent rows from column 512 on.
  int dims = 0;
  bool interleaved = false;  ///< pair i has the columns 2 i and 2 i + 1, else i and i + dims / 2
  double base = 10000;       ///< finite and above 0
  /// [positions, dims / 2], cosine and sine of every angle instead of a base. Both are f32 or both of the config's
  /// dtype, and the last axis is contiguous. A position that they do not have is refused where values are checked, and
  /// gets the nearest one elsewhere.
  TensorView cos = {};
  TensorView sin = {};
  /// [rows], the position of each new row, in the order of their rows (a dense batch: request by request). One of the
  /// two at most; without both a row stands where seqused_kv puts it.
  const std::int32_t* positions = nullptr;
  const std::int64_t* positions_64 = nullptr;
};

/// New keys and values, and the cache that they are written to. All is on the Attention's device, and unchanged until
/// the queued work has run. Of the cache, k_cache and v_cache are written, and so is q_out; an element that the call
/// does not write keeps its value.
///
/// A dense batch has s_new new rows of each of b requests. In a packed one, whose tensors have rank 3, request i has
/// the rows [cu_seqlens_k_new[i], cu_seqlens_k_new[i + 1]); rows of no request are not written anywhere. With slots,
/// and positions for a rotary embedding, nothing depends on requests: lengths are not read, and all rows count.
struct AppendInputs {
  TensorView k;  ///< [b, h_kv, s_new, d_qk]; packed: [total_new, h_kv, d_qk]
  TensorView v;  ///< [b, h_kv, s_new, d_v]; packed: [total_new, h_kv, d_v]
  /// With AttentionConfig::page_size [pages, h_kv, page_size, d_qk], else contiguous, [b, h_kv, s_max, d_qk]. Any
  /// strides, as of every tensor.
  TensorView k_cache;
  TensorView v_cache;     ///< likewise, of d_v
  PagedCache cache = {};  ///< with page_size. Of a contiguous cache `batch_index` alone counts: rows of the cache
  std::int64_t b = 0;     ///< packed: how many requests
  const std::int32_t* cu_seqlens_k_new = nullptr;  ///< packed: [b + 1], never decreasing, from at least 0 to total_new
  /// [b], how many keys a request has, the new ones counted: row j of n goes to position seqused_kv - n + j.
  const std::int32_t* seqused_kv = nullptr;
  /// [rows], where each new row goes instead: page * page_size + row of the page (contiguous: request * s_max +
  /// position). Rows with a negative slot are not written to the cache. Two rows of one slot leave either. One of the
  /// two at most.
  const std::int32_t* slots = nullptr;
  const std::int64_t* slots_64 = nullptr;
  /// Applied to k and, where it is given, to q.
  RotaryEmbedding rotary = {};
  TensorView q = {};      ///< [b, h_q, s_new, d_qk]; packed: [total_new, h_q, d_qk]. Optional, with `rotary`
  TensorView q_out = {};  ///< where q goes, of its shape. In place: the same view
  /// With AttentionConfig::k_dtype, or v_dtype: the scales of the cache's rows, f32, [pages, h_kv, page_size], or
  /// [b, h_kv, s_max] of a contiguous cache. Any strides. A new row of x is stored as x / scale, rounded to the
  /// nearest, ties to even, and at most 448 (e4m3) or 127 (i8). Of u4x2: scales and offsets, of the config's dtype,
  /// [.., 2 * d / group_size]. Of a group x is stored as (x - offset) / scale, from 0 to 15.
  TensorView k_scale = {};
  TensorView v_scale = {};
  /// Whether the scales are there, and are read. Else each new row gets one of its own, which is written: its greatest
  /// magnitude over 448 or 127, or 0 for a row below 2^-100. Of u4x2 a group's offset is its least number, and its
  /// scale a 15th of the way from there to its greatest. One with an infinity or a NaN reads as NaN.
  bool scales_given = false;
  // Into latent rows (docs/mla.md) go k [.., 576] alone: v, v_cache and k_scale are nothing, k_cache has rows of 656
  // bytes. A scale is of 128 columns, and in the row.
};

/// What picks the kernel of an append, besides the configuration.
struct AppendShape {
  int rotary_dims = 0;                        ///< RotaryEmbedding::dims
  bool interleaved = false;                   ///< likewise
  std::optional<DType> table = std::nullopt;  ///< dtype of RotaryEmbedding::cos and sin, where they are given
  bool aligned = true;                        ///< rows of all tensors start at multiples of 16 bytes
  bool scales_given = false;                  ///< AppendInputs::scales_given
};

}  // namespace fa

#endif  // FA_APPEND_HPP_
