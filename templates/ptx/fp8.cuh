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

/// Makes the compiler finish P, bytes that are never negative, before what follows: a store that never happens. Without
/// it exponentials and conversions are moved to where the next product reads P. `shared` is any address.
template <int kSteps>
FA_DEVICE void settle(const uint32_t (&pairs)[kSteps][4], uint32_t shared) {
  uint32_t signs = 0;
  FA_UNROLL
  for (int i = 0; i < 4 * kSteps; ++i) signs |= pairs[i / 4][i % 4];
  asm volatile(
      "{\n.reg .pred p;\n.reg .b32 t;\nand.b32 t, %0, 0x80808080;\nsetp.ne.u32 p, t, 0;\n"
      "@p st.shared.u32 [%1], %0;\n}\n" ::"r"(signs),
      "r"(shared)
      : "memory");
}

}  // namespace fa::ptx

#endif  // FA_TEMPLATES_PTX_FP8_CUH_
