#ifndef FA_TEMPLATES_PTX_WGMMA_INT8_CUH_
#define FA_TEMPLATES_PTX_WGMMA_INT8_CUH_

#include <ptx/language.cuh>
#include <ptx/wgmma.cuh>

// PTX ISA, "wgmma.mma_async" of whole numbers: K = 32, both operands K-major, D as of floats. Sums have 32 bits: they
// are exact. `sums` has their bits, so that it may be of floats before and afterwards.
namespace fa::ptx {

/// One instruction of shape m64nNk32 for signed bytes. `accumulate` false: D = A * B.
template <int kN>
struct WgmmaInt8;

#define FA_WGMMA_INTS_4(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define FA_WGMMA_INTS_8(i) FA_WGMMA_INTS_4(i), FA_WGMMA_INTS_4(i + 4)
#define FA_WGMMA_INTS_16(i) FA_WGMMA_INTS_8(i), FA_WGMMA_INTS_8(i + 8)
#define FA_WGMMA_INTS_32(i) FA_WGMMA_INTS_16(i), FA_WGMMA_INTS_16(i + 16)
#define FA_WGMMA_INTS_64(i) FA_WGMMA_INTS_32(i), FA_WGMMA_INTS_32(i + 32)
// FA_WGMMA_INT8(N, registers of D, the numbers of the operands after them, and the registers)
#define FA_WGMMA_INT8(n, regs, i0, i1, i2, ...)                                                          \
  template <>                                                                                            \
  struct WgmmaInt8<n> {                                                                                  \
    static FA_DEVICE void shared(float (&sums)[regs], uint64_t a, uint64_t b, bool accumulate) {         \
      uint32_t(&d)[regs] = reinterpret_cast<uint32_t(&)[regs]>(sums);                                    \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n \
                   "k32.s32.s8.s8 {" FA_WGMMA_REGS_##regs "}, %" #i0 ", %" #i1 ", p;\n}\n"               \
                   : __VA_ARGS__                                                                         \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                 \
    }                                                                                                    \
  };
FA_WGMMA_INT8(16, 8, 8, 9, 10, FA_WGMMA_INTS_8(0))
FA_WGMMA_INT8(32, 16, 16, 17, 18, FA_WGMMA_INTS_16(0))
FA_WGMMA_INT8(48, 24, 24, 25, 26, FA_WGMMA_INTS_16(0), FA_WGMMA_INTS_8(16))
FA_WGMMA_INT8(64, 32, 32, 33, 34, FA_WGMMA_INTS_32(0))
FA_WGMMA_INT8(80, 40, 40, 41, 42, FA_WGMMA_INTS_32(0), FA_WGMMA_INTS_8(32))
FA_WGMMA_INT8(96, 48, 48, 49, 50, FA_WGMMA_INTS_32(0), FA_WGMMA_INTS_16(32))
FA_WGMMA_INT8(112, 56, 56, 57, 58, FA_WGMMA_INTS_32(0), FA_WGMMA_INTS_16(32), FA_WGMMA_INTS_8(48))
FA_WGMMA_INT8(128, 64, 64, 65, 66, FA_WGMMA_INTS_64(0))
FA_WGMMA_INT8(144, 72, 72, 73, 74, FA_WGMMA_INTS_64(0), FA_WGMMA_INTS_8(64))
FA_WGMMA_INT8(160, 80, 80, 81, 82, FA_WGMMA_INTS_64(0), FA_WGMMA_INTS_16(64))
FA_WGMMA_INT8(176, 88, 88, 89, 90, FA_WGMMA_INTS_64(0), FA_WGMMA_INTS_16(64), FA_WGMMA_INTS_8(80))
FA_WGMMA_INT8(192, 96, 96, 97, 98, FA_WGMMA_INTS_64(0), FA_WGMMA_INTS_32(64))
FA_WGMMA_INT8(208, 104, 104, 105, 106, FA_WGMMA_INTS_64(0), FA_WGMMA_INTS_32(64), FA_WGMMA_INTS_8(96))
FA_WGMMA_INT8(224, 112, 112, 113, 114, FA_WGMMA_INTS_64(0), FA_WGMMA_INTS_32(64), FA_WGMMA_INTS_16(96))
FA_WGMMA_INT8(240, 120, 120, 121, 122, FA_WGMMA_INTS_64(0), FA_WGMMA_INTS_32(64), FA_WGMMA_INTS_16(96),
              FA_WGMMA_INTS_8(112))
FA_WGMMA_INT8(256, 128, 128, 129, 130, FA_WGMMA_INTS_64(0), FA_WGMMA_INTS_64(64))
#undef FA_WGMMA_INT8
#undef FA_WGMMA_INTS_64
#undef FA_WGMMA_INTS_32
#undef FA_WGMMA_INTS_16
#undef FA_WGMMA_INTS_8
#undef FA_WGMMA_INTS_4

}  // namespace fa::ptx

#endif  // FA_TEMPLATES_PTX_WGMMA_INT8_CUH_
