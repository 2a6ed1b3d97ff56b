#ifndef FA_TEMPLATES_COMMON_PROBABILITIES_PARAMS_CUH_
#define FA_TEMPLATES_COMMON_PROBABILITIES_PARAMS_CUH_

#include <common/types.cuh>
#include <common/variant_params.cuh>

namespace fa::kernel {

/// Launch parameters of the kernel that writes P of one query head.
struct ProbabilitiesParams : ForwardVariantParams {
  float* p;  // [rows, columns]
  int64_t stride_row, stride_column;
  int32_t columns;
  int32_t batch, head;
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_PROBABILITIES_PARAMS_CUH_
