#ifndef FA_TEMPLATES_PTX_MMA_CUH_
#define FA_TEMPLATES_PTX_MMA_CUH_

#include <common/types.cuh>
#include <ptx/language.cuh>

// PTX ISA, "mma": D = A * B + D with float accumulators. With g = lane / 4 and t = lane % 4, D holds (g, 2t), (g,
// 2t+1), (g+8, 2t), (g+8, 2t+1).
namespace fa::ptx {

using kernel::bf16;
using kernel::f16;

/// A 16x8 in 2 registers, B 8x8 in 1.
template <class T>
FA_DEVICE void mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0);

template <>
FA_DEVICE void mma_m16n8k8<bf16>(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(b0));
}

template <>
FA_DEVICE void mma_m16n8k8<f16>(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(b0));
}

#ifndef FA_TURING  // which has half of it: sm80/sm80_products.cuh
/// A 16x16 row-major in 4 registers, B 16x8 column-major in 2.
template <class T>
FA_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
FA_DEVICE void mma_m16n8k16<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
FA_DEVICE void mma_m16n8k16<f16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

/// TF32: A 16x8 row-major, (g, t), (g+8, t), (g, t+4), (g+8, t+4); B 8x8 column-major, (t, g), (t+4, g). The low 13
/// bits of each operand are ignored.
FA_DEVICE void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace fa::ptx

#endif  // FA_TEMPLATES_PTX_MMA_CUH_
