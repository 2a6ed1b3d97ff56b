#ifndef FA_TEMPLATES_COMMON_FP8_CUH_
#define FA_TEMPLATES_COMMON_FP8_CUH_

#include <common/stored.cuh>

namespace fa::kernel {

/// OCP E5M2: the upper byte of an f16.
struct e5m2 {
  uint8_t bits;
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_FP8_CUH_
