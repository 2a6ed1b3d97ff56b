#ifndef FA_TEMPLATES_COMMON_QUANTIZE_PARAMS_CUH_
#define FA_TEMPLATES_COMMON_QUANTIZE_PARAMS_CUH_

#include <common/types.cuh>

namespace fa::kernel {

inline constexpr int kMeanColumns = 16;  // of a thread block that takes means

/// Launch parameters of quantize. Strides are in elements; null is what there is not.
struct QuantizeParams {
  const void* x;  // [b, h, s, d]
  void* codes;    // likewise, of bytes
  float* scale;   // [b, h, s]
  float* mean;    // [b, h / group, d]
  float* bias;    // [b, h, s]: x times the mean goes here; null: the mean is subtracted
  int64_t stride_x_b, stride_x_h, stride_x_s;
  int64_t stride_codes_b, stride_codes_h, stride_codes_s;
  int64_t stride_scale_b, stride_scale_h, stride_scale_s;
  int64_t stride_mean_b, stride_mean_h;
  int64_t stride_bias_b, stride_bias_h, stride_bias_s;
  uint32_t b, h, s;
  uint32_t group;        // heads that share a mean
  uint32_t scale_given;  // read, not written
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_QUANTIZE_PARAMS_CUH_
