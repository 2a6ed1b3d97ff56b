#ifndef FA_TEMPLATES_SM90_SM90_FP8_PARAMS_CUH_
#define FA_TEMPLATES_SM90_SM90_FP8_PARAMS_CUH_

#include <common/fp8_params.cuh>
#include <common/types.cuh>
#include <sm90/sm90_forward_params.cuh>

namespace fa::kernel {

/// Launch parameters of the Hopper forward of 8-bit floats. Boxes have 128 columns, the same bytes as 64 of 16 bits.
struct Sm90Fp8Params : Sm90ForwardVariantParams {
  Fp8ScaleParams scales;
};

/// What is added to q k of the keys of a row, f32 [b, h_q, s_q]; of a packed batch [h_q, total_q]. Null: nothing.
struct RowBiasParams {
  const float* data;
  int64_t stride_b, stride_h, stride_s;
};

/// Of q and k in i8.
struct Sm90Int8Params : Sm90Fp8Params {
  RowBiasParams row_bias;
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_SM90_SM90_FP8_PARAMS_CUH_
