#ifndef FA_TEMPLATES_COMMON_PADDING_PARAMS_CUH_
#define FA_TEMPLATES_COMMON_PADDING_PARAMS_CUH_

#include <common/types.cuh>

namespace fa::kernel {

/// Launch parameters of clear_padding. Strides are in elements.
struct PaddingParams {
  void* data;           // [total, h, d]
  const int32_t* cu;    // [b + 1]
  const int32_t* used;  // [b], may be null
  int64_t stride_h, stride_s;
  int32_t b, h, total, d;
  int32_t longest;  // the most rows that a sequence can have
  float value;      // what the rows of no sequence get
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_PADDING_PARAMS_CUH_
