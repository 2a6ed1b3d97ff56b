#ifndef FA_TEMPLATES_COMMON_STORED_PARAMS_CUH_
#define FA_TEMPLATES_COMMON_STORED_PARAMS_CUH_

#include <common/types.cuh>
#include <common/variant_params.cuh>

namespace fa::kernel {

/// What the elements of K and V stand for where they are stored in 8 bits: their values times the row's scale; in 4
/// bits: common/u4.cuh. Strides are in words of 4 bytes: a scale, or a scale and an offset of 16 bits each.
struct ScaleParams {
  const float*
      k;  // [b, h_kv, s_kv], or pages [pages, h_kv, page]; 4 bits: [.., groups]; null: K is of the queries' type
  const float* v;
  int64_t stride_k_b, stride_k_h, stride_k_s;
  int64_t stride_v_b, stride_v_h, stride_v_s;
};

/// Launch parameters of a forward over such K or V.
struct ForwardStoredParams : ForwardVariantParams {
  ScaleParams scales;
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_STORED_PARAMS_CUH_
