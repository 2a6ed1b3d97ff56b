#ifndef FA_TEMPLATES_PTX_FP8_CUH_
#define FA_TEMPLATES_PTX_FP8_CUH_

#include <common/fp8.cuh>
#include <common/types.cuh>
#include <ptx/e4m3.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>

namespace fa::ptx {

/// cvt.rn.satfinite.e4m3x2.f32: `low` in bits 0-7, `high` in bits 8-15. Beyond 448 there is 448; NaN stays NaN.
FA_DEVICE uint16_t convert_e4m3(float low, float high) {
  uint16_t y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
  return y;
}

/// Four floats as the bytes of a register, the first one the lowest.
FA_DEVICE uint32_t convert_e4m3(float x0, float x1, float x2, float x3) {
  return convert_e4m3(x0, x1) | static_cast<uint32_t>(convert_e4m3(x2, x3)) << 16;
}

/// Four bytes, the first one the lowest, as pairs of f16, which have every number of both types.
template <class T>
FA_DEVICE void widen_bytes(uint32_t& low, uint32_t& high, uint32_t bytes);

template <>
FA_DEVICE void widen_bytes<kernel::e4m3>(uint32_t& low, uint32_t& high, uint32_t bytes) {
  low = widen_e4m3(static_cast<uint16_t>(bytes));
  high = widen_e4m3(static_cast<uint16_t>(bytes >> 16));
}
template <>
FA_DEVICE void widen_bytes<kernel::e5m2>(uint32_t& low, uint32_t& high, uint32_t bytes) {
  low = prmt(bytes, 0, 0x1404);
  high = prmt(bytes, 0, 0x3424);
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

/// The same of bytes that may be negative: what is converted is never 0xff, as a NaN is 0x7f.
template <int kSteps>
FA_DEVICE void settle_signed(const uint32_t (&pairs)[kSteps][4], uint32_t shared) {
  uint32_t common = ~0u;
  FA_UNROLL
  for (int i = 0; i < 4 * kSteps; ++i) common &= pairs[i / 4][i % 4];
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, %0, 0xffffffff;\n@p st.shared.u32 [%1], %0;\n}\n" ::"r"(common),
               "r"(shared)
               : "memory");
}

}  // namespace fa::ptx

#endif  // FA_TEMPLATES_PTX_FP8_CUH_
