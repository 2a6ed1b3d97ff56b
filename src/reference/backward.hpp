#ifndef FA_SRC_REFERENCE_BACKWARD_HPP_
#define FA_SRC_REFERENCE_BACKWARD_HPP_

#include <fa/tensor.hpp>
#include <fa/types.hpp>

#include "reference/dropout.hpp"
#include "reference/variant.hpp"

namespace fa::reference {

/// One backward call on host memory. Every tensor has rank 4 (lse and dlse: 3), any dtype, alignment and int64 strides;
/// shapes agree and h_kv divides h_q, which the caller has checked.
struct BackwardArgs {
  TensorView q;                  ///< [b, h_q, s_q, d_qk]
  TensorView k;                  ///< [b, h_kv, s_kv, d_qk]
  TensorView v;                  ///< [b, h_kv, s_kv, d_v]
  TensorView o;                  ///< [b, h_q, s_q, d_v], of forward
  TensorView lse;                ///< [b, h_q, s_q], of forward, f32 or f64
  TensorView dout;               ///< [b, h_q, s_q, d_v]
  TensorView dlse;               ///< [b, h_q, s_q], f32 or f64; optional
  TensorView entropy = {};       ///< [b, h_q, s_q], of forward; with dentropy
  TensorView dentropy = {};      ///< [b, h_q, s_q]; optional
  TensorView dmax_logit = {};    ///< likewise
  TensorView dcolumn_sums = {};  ///< [b, h_q, s_kv] or [b, h_kv, s_kv]; likewise
  bool of_scaled = false;        ///< the greatest logits are of scores in front of the score function
  TensorView dq;                 ///< [b, h_q, s_q, d_qk]; optional, as are the other two
  TensorView dk;                 ///< [b, h_kv, s_kv, d_qk]
  TensorView dv;                 ///< [b, h_kv, s_kv, d_v]
  double scale = 1;
  bool causal = false;
  CausalAlign causal_align = CausalAlign::bottom_right;
  DropoutMask dropout = {};
  VariantArgs variant = {};
  bool f64 = false;  ///< compute in double; implied by an f64 q, k, v or dout
};

/// FlashAttention-2 backward on the CPU, P recomputed from the log-sum-exp: the golden reference of every kernel, and
/// what the host device runs. Writes every element of the gradients that are given. Bitwise
/// repeatable, whatever the number of
/// threads.
void backward(const BackwardArgs& args);

}  // namespace fa::reference

#endif  // FA_SRC_REFERENCE_BACKWARD_HPP_
