#ifndef FA_TEMPLATES_COMMON_FP8_PARAMS_CUH_
#define FA_TEMPLATES_COMMON_FP8_PARAMS_CUH_

#include <common/types.cuh>
#include <common/variant_params.cuh>

namespace fa::kernel {

/// What elements of 8 bits stand for: their values times a scale. Strides are in elements; null: 1.
struct Fp8ScaleParams {
  const float* q;  // [b, h_q, s_q]; of a packed batch [h_q, total_q]
  const float* k;  // [b, h_kv], b sequences of a packed batch; of keys [b, h_kv, s_kv], or [h_kv, total_kv]
  const float* v;  // likewise
  int64_t stride_q_b, stride_q_h, stride_q_s;
  int64_t stride_k_b, stride_k_h;
  int64_t stride_v_b, stride_v_h;
  int64_t stride_k_s, stride_v_s;  // of keys
};

/// Launch parameters of the mma.sync forward of 8-bit floats.
struct ForwardFp8Params : ForwardVariantParams {
  Fp8ScaleParams scales;
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_FP8_PARAMS_CUH_
