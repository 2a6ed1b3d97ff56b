#ifndef FA_TEMPLATES_PTX_WGMMA_FP8_CUH_
#define FA_TEMPLATES_PTX_WGMMA_FP8_CUH_

#include <common/fp8.cuh>
#include <common/types.cuh>
#include <ptx/language.cuh>
#include <ptx/wgmma.cuh>

// PTX ISA, "wgmma.mma_async" of 8-bit floats: K = 32, both operands K-major, D as of 16-bit ones. A in registers: with
// g = lane / 4 and t = lane % 4, a[0] is row g, columns 4t to 4t + 3, the first in the lowest byte; a[1] row g + 8;
// a[2] and a[3] the same rows, columns 16 further. The tensor cores keep some 14 bits of what they add up
// (docs/numerics.md).
namespace fa::ptx {

using kernel::e4m3;
using kernel::e5m2;

/// One instruction of shape m64nNk32 for elements of types A and B. `accumulate` false: D = A * B.
template <class A, class B, int kN>
struct WgmmaFp8;

// FA_WGMMA_FP8(type of A, type of B, N, registers of D, and the numbers of the operands after them)
#define FA_WGMMA_FP8(type_a, type_b, n, regs, i0, i1, i2, i3, i4, i5)                                                 \
  template <>                                                                                                         \
  struct WgmmaFp8<type_a, type_b, n> {                                                                                \
    static FA_DEVICE void shared(float (&d)[regs], uint64_t a, uint64_t b, bool accumulate) {                         \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n              \
                   "k32.f32." #type_a "." #type_b " {" FA_WGMMA_REGS_##regs "}, %" #i0 ", %" #i1 ", p, 1, 1;\n}\n"    \
                   : FA_WGMMA_OUT_##regs                                                                              \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                              \
    }                                                                                                                 \
    static FA_DEVICE void registers(float (&d)[regs], const uint32_t (&a)[4], uint64_t b, bool accumulate) {          \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n              \
                   "k32.f32." #type_a "." #type_b " {" FA_WGMMA_REGS_##regs "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 \
                                                                            "}, %" #i4 ", p, 1, 1;\n}\n"              \
                   : FA_WGMMA_OUT_##regs                                                                              \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));          \
    }                                                                                                                 \
  };
#define FA_WGMMA_FP8_ALL(...)           \
  FA_WGMMA_FP8(e4m3, e4m3, __VA_ARGS__) \
  FA_WGMMA_FP8(e4m3, e5m2, __VA_ARGS__) \
  FA_WGMMA_FP8(e5m2, e5m2, __VA_ARGS__)
FA_WGMMA_FP8_ALL(16, 8, 8, 9, 10, 11, 12, 13)
FA_WGMMA_FP8_ALL(32, 16, 16, 17, 18, 19, 20, 21)
FA_WGMMA_FP8_ALL(48, 24, 24, 25, 26, 27, 28, 29)
FA_WGMMA_FP8_ALL(64, 32, 32, 33, 34, 35, 36, 37)
FA_WGMMA_FP8_ALL(80, 40, 40, 41, 42, 43, 44, 45)
FA_WGMMA_FP8_ALL(96, 48, 48, 49, 50, 51, 52, 53)
FA_WGMMA_FP8_ALL(112, 56, 56, 57, 58, 59, 60, 61)
FA_WGMMA_FP8_ALL(128, 64, 64, 65, 66, 67, 68, 69)
FA_WGMMA_FP8_ALL(144, 72, 72, 73, 74, 75, 76, 77)
FA_WGMMA_FP8_ALL(160, 80, 80, 81, 82, 83, 84, 85)
FA_WGMMA_FP8_ALL(176, 88, 88, 89, 90, 91, 92, 93)
FA_WGMMA_FP8_ALL(192, 96, 96, 97, 98, 99, 100, 101)
FA_WGMMA_FP8_ALL(208, 104, 104, 105, 106, 107, 108, 109)
FA_WGMMA_FP8_ALL(224, 112, 112, 113, 114, 115, 116, 117)
FA_WGMMA_FP8_ALL(240, 120, 120, 121, 122, 123, 124, 125)
FA_WGMMA_FP8_ALL(256, 128, 128, 129, 130, 131, 132, 133)
#undef FA_WGMMA_FP8_ALL
#undef FA_WGMMA_FP8

}  // namespace fa::ptx

#endif  // FA_TEMPLATES_PTX_WGMMA_FP8_CUH_
