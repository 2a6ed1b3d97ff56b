#ifndef FA_TEMPLATES_PTX_MMA_FP8_CUH_
#define FA_TEMPLATES_PTX_MMA_FP8_CUH_

#include <common/fp8.cuh>
#include <common/types.cuh>
#include <ptx/language.cuh>

// PTX ISA, "mma" of 8-bit floats, from compute capability 8.9 on: D as of 16-bit ones. With g = lane / 4 and t = lane %
// 4, a[0] is row g, columns 4t to 4t + 3, the first in the lowest byte; a[1] row g + 8; a[2] and a[3] the same rows,
// columns 16 further. b0 is column g, rows 4t to 4t + 3; b1 16 rows further.
namespace fa::ptx {

using kernel::e4m3;
using kernel::e5m2;

template <class A, class B>
FA_DEVICE void mma_m16n8k32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

#define FA_MMA_FP8(type_a, type_b)                                                                             \
  template <>                                                                                                  \
  FA_DEVICE void mma_m16n8k32<type_a, type_b>(float(&d)[4], const uint32_t(&a)[4], uint32_t b0, uint32_t b1) { \
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32." #type_a "." #type_b                                  \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                        \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                              \
  }
FA_MMA_FP8(e4m3, e4m3)
FA_MMA_FP8(e4m3, e5m2)
FA_MMA_FP8(e5m2, e5m2)
#undef FA_MMA_FP8

}  // namespace fa::ptx

#endif  // FA_TEMPLATES_PTX_MMA_FP8_CUH_
