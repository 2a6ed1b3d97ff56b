#ifndef FA_TEMPLATES_PTX_FP8_CUH_
#define FA_TEMPLATES_PTX_FP8_CUH_

#include <common/types.cuh>
#include <ptx/language.cuh>

namespace fa::ptx {

/// cvt.rn.satfinite.e4m3x2.f32, twice: four floats become the bytes of a register, the first one the lowest. Beyond
/// 448 there is 448; NaN stays NaN.
FA_DEVICE uint32_t convert_e4m3(float x0, float x1, float x2, float x3) {
  uint32_t y;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(y)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return y;
}

}  // namespace fa::ptx

#endif  // FA_TEMPLATES_PTX_FP8_CUH_
