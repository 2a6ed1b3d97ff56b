#ifndef FA_QUANTIZE_HPP_
#define FA_QUANTIZE_HPP_

#include <fa/tensor.hpp>

/// What Attention::quantize is given (attention.hpp, docs/int8.md).
namespace fa {

/// Tensors of 16 or 32 bits, the codes that stand for them, and scales of their rows. All is on the Attention's device,
/// and unchanged until the queued work has run. Which of q, k and v are given is free. Shapes are those of forward; of
/// packed batches [total, h, d], and [h, total] for what rows have.
///
/// A row x is stored as x / scale, rounded to the nearest, ties to even, and at most 127 (i8) or 448 (e4m3). Codes of q
/// and k are of the config's dtype, those of v e4m3.
struct QuantizeInputs {
  TensorView q = {};  ///< [b, h_q, s_q, d_qk], f16, bf16 or f32
  TensorView k = {};  ///< [b, h_kv, s_kv, d_qk], likewise
  TensorView v = {};  ///< [b, h_kv, s_kv, d_v], likewise
  TensorView q_codes = {};
  TensorView k_codes = {};
  TensorView v_codes = {};
  TensorView q_scale = {};  ///< f32, [b, h_q, s_q]: ForwardInputs::q_scale
  TensorView k_scale = {};  ///< f32, [b, h_kv, s_kv]: ForwardInputs::k_scale, with key_scales
  TensorView v_scale = {};  ///< likewise: v_scale, with value_scales
  /// Whether scales are there, and are read: with any strides. Else each row gets one of its own, which is written: its
  /// greatest magnitude over 127 or 448, or 0 for a row below 2^-100. One with an infinity or a NaN gets a NaN.
  bool scales_given = false;
  /// f32, [b, h_kv, d_qk], of a packed batch [h_kv, d_qk]: what is subtracted from the rows of k. It is their mean,
  /// which is written, unless `mean_given`: then it is read. Of a packed batch it is that of all rows. Optional:
  /// nothing is subtracted.
  TensorView k_mean = {};
  bool mean_given = false;
  /// f32, [b, h_q, s_q]: where q times the mean of its keys goes, ForwardInputs::row_bias. Optional, with q and k_mean.
  TensorView row_bias = {};
};

}  // namespace fa

#endif  // FA_QUANTIZE_HPP_
