#ifndef FA_SRC_REFERENCE_FORWARD_HPP_
#define FA_SRC_REFERENCE_FORWARD_HPP_

#include <fa/tensor.hpp>
#include <fa/types.hpp>

#include "reference/dropout.hpp"
#include "reference/variant.hpp"

namespace fa::reference {

/// One forward call on host memory. Every tensor has rank 4 (lse: 3), any dtype, alignment and int64 strides; shapes
/// agree and h_kv divides h_q, which the caller has checked.
struct ForwardArgs {
  TensorView q;    ///< [b, h_q, s_q, d_qk]
  TensorView k;    ///< [b, h_kv, s_kv, d_qk]
  TensorView v;    ///< [b, h_kv, s_kv, d_v]
  TensorView o;    ///< [b, h_q, s_q, d_v]
  TensorView lse;  ///< [b, h_q, s_q], f32 or f64; optional
  double scale = 1;
  bool causal = false;
  CausalAlign causal_align = CausalAlign::bottom_right;
  DropoutMask dropout = {};
  VariantArgs variant = {};
  bool f64 = false;  ///< compute in double; implied by an f64 q, k or v
};

/// FlashAttention-2 forward on the CPU, exact by the semantics of the library: the golden reference of every kernel,
/// and what the host device runs. Bitwise repeatable, whatever the number of threads.
void forward(const ForwardArgs& args);

}  // namespace fa::reference

#endif  // FA_SRC_REFERENCE_FORWARD_HPP_
