#ifndef FA_TEMPLATES_PTX_E4M3_CUH_
#define FA_TEMPLATES_PTX_E4M3_CUH_

#include <common/types.cuh>
#include <ptx/language.cuh>

namespace fa::ptx {

/// cvt.rn.f16x2.e4m3x2, exactly: bits 0-7 become the lower half. From compute capability 8.9 on.
FA_DEVICE uint32_t widen_e4m3(uint16_t pair) {
  uint32_t y;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(pair));
  return y;
}

/// The same of four bytes: `low` of bits 0-15, `high` of bits 16-31.
FA_DEVICE void widen_e4m3_pairs(uint32_t& low, uint32_t& high, uint32_t bytes) {
  asm("{\n.reg .b16 first, last;\nmov.b32 {first, last}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, first;\ncvt.rn.f16x2.e4m3x2 %1, last;\n}\n"
      : "=r"(low), "=r"(high)
      : "r"(bytes));
}

}  // namespace fa::ptx

#endif  // FA_TEMPLATES_PTX_E4M3_CUH_
