#ifndef FA_TEMPLATES_PTX_PACKED_MATH_CUH_
#define FA_TEMPLATES_PTX_PACKED_MATH_CUH_

#include <common/types.cuh>
#include <ptx/language.cuh>

namespace fa::ptx {

/// fma.rn.{bf16x2,f16x2}: a * b + c of the halves, subnormal numbers included.
template <class T>
FA_DEVICE uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c);

template <>
FA_DEVICE uint32_t fma_pair<kernel::bf16>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}
template <>
FA_DEVICE uint32_t fma_pair<kernel::f16>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}

}  // namespace fa::ptx

#endif  // FA_TEMPLATES_PTX_PACKED_MATH_CUH_
