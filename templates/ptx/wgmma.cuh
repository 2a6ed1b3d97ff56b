#ifndef FA_TEMPLATES_PTX_WGMMA_CUH_
#define FA_TEMPLATES_PTX_WGMMA_CUH_

#include <common/types.cuh>
#include <ptx/language.cuh>

// PTX ISA, "wgmma.mma_async": the four warps of a warpgroup compute D = A * B + D with D 64 x N in float, K = 16. Warp
// w owns rows 16w to 16w + 15; with g = lane / 4 and t = lane % 4 its registers d[4j] to d[4j + 3] are (g, 8j + 2t),
// (g, 8j + 2t + 1), (g + 8, 8j + 2t), (g + 8, 8j + 2t + 1). A comes from shared memory, K-major or (transposed)
// M-major, or from registers in the layout of mma.m16n8k16; B from shared memory, K-major or (transposed) N-major.
namespace fa::ptx {

using kernel::bf16;
using kernel::f16;

/// wgmma.fence: orders this warpgroup's register writes before its next wgmma.
FA_DEVICE void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

/// wgmma.commit_group
FA_DEVICE void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/// wgmma.wait_group: at most `kPending` of the latest groups may still run.
template <int kPending>
FA_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Makes the compiler finish computing `x`, which is never negative, before what follows: a store that never happens.
/// Without it arithmetic that could run beside a product is moved behind the wait for it. `shared` is any address.
FA_DEVICE void settle(float x, uint32_t shared) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@p st.shared.f32 [%1], %0;\n}\n" ::"f"(x), "r"(shared)
               : "memory");
}

/// The same of `then` too, a vote that took `x`.
FA_DEVICE void settle(float x, bool then, uint32_t shared) {
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.s32 q, %1, 0;\nsetp.lt.and.f32 p, %0, 0f00000000, q;\n"
      "@p st.shared.f32 [%2], %0;\n}\n" ::"f"(x),
      "r"(static_cast<int>(then)), "r"(shared)
      : "memory");
}

/// Keeps the compiler from moving accesses to accumulators across a wgmma fence or wait.
template <int kCount>
FA_DEVICE void wgmma_tie(float (&d)[kCount]) {
  FA_UNROLL
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// Forgets what is in accumulators that the next product overwrites: their registers are free until then.
template <int kCount>
FA_DEVICE void wgmma_forget(float (&d)[kCount]) {
  FA_UNROLL
  for (int i = 0; i < kCount; ++i) asm volatile("" : "=f"(d[i])::"memory");
}

/// One instruction of shape m64nNk16 for elements of type T. `accumulate` false: D = A * B.
template <class T, int kN>
struct Wgmma;

// Operand lists of the accumulators, grown by one n8 tile at a time; FA_WGMMA_AS has their type.
#define FA_WGMMA_AS "+f"
#define FA_WGMMA_REGS_4 "%0, %1, %2, %3"
#define FA_WGMMA_OUT_4 FA_WGMMA_AS(d[0]), FA_WGMMA_AS(d[1]), FA_WGMMA_AS(d[2]), FA_WGMMA_AS(d[3])
#define FA_WGMMA_REGS_8 FA_WGMMA_REGS_4 ", %4, %5, %6, %7"
#define FA_WGMMA_OUT_8 FA_WGMMA_OUT_4, FA_WGMMA_AS(d[4]), FA_WGMMA_AS(d[5]), FA_WGMMA_AS(d[6]), FA_WGMMA_AS(d[7])
#define FA_WGMMA_REGS_12 FA_WGMMA_REGS_8 ", %8, %9, %10, %11"
#define FA_WGMMA_OUT_12 FA_WGMMA_OUT_8, FA_WGMMA_AS(d[8]), FA_WGMMA_AS(d[9]), FA_WGMMA_AS(d[10]), FA_WGMMA_AS(d[11])
#define FA_WGMMA_REGS_16 FA_WGMMA_REGS_12 ", %12, %13, %14, %15"
#define FA_WGMMA_OUT_16 FA_WGMMA_OUT_12, FA_WGMMA_AS(d[12]), FA_WGMMA_AS(d[13]), FA_WGMMA_AS(d[14]), FA_WGMMA_AS(d[15])
#define FA_WGMMA_REGS_20 FA_WGMMA_REGS_16 ", %16, %17, %18, %19"
#define FA_WGMMA_OUT_20 FA_WGMMA_OUT_16, FA_WGMMA_AS(d[16]), FA_WGMMA_AS(d[17]), FA_WGMMA_AS(d[18]), FA_WGMMA_AS(d[19])
#define FA_WGMMA_REGS_24 FA_WGMMA_REGS_20 ", %20, %21, %22, %23"
#define FA_WGMMA_OUT_24 FA_WGMMA_OUT_20, FA_WGMMA_AS(d[20]), FA_WGMMA_AS(d[21]), FA_WGMMA_AS(d[22]), FA_WGMMA_AS(d[23])
#define FA_WGMMA_REGS_28 FA_WGMMA_REGS_24 ", %24, %25, %26, %27"
#define FA_WGMMA_OUT_28 FA_WGMMA_OUT_24, FA_WGMMA_AS(d[24]), FA_WGMMA_AS(d[25]), FA_WGMMA_AS(d[26]), FA_WGMMA_AS(d[27])
#define FA_WGMMA_REGS_32 FA_WGMMA_REGS_28 ", %28, %29, %30, %31"
#define FA_WGMMA_OUT_32 FA_WGMMA_OUT_28, FA_WGMMA_AS(d[28]), FA_WGMMA_AS(d[29]), FA_WGMMA_AS(d[30]), FA_WGMMA_AS(d[31])
#define FA_WGMMA_REGS_36 FA_WGMMA_REGS_32 ", %32, %33, %34, %35"
#define FA_WGMMA_OUT_36 FA_WGMMA_OUT_32, FA_WGMMA_AS(d[32]), FA_WGMMA_AS(d[33]), FA_WGMMA_AS(d[34]), FA_WGMMA_AS(d[35])
#define FA_WGMMA_REGS_40 FA_WGMMA_REGS_36 ", %36, %37, %38, %39"
#define FA_WGMMA_OUT_40 FA_WGMMA_OUT_36, FA_WGMMA_AS(d[36]), FA_WGMMA_AS(d[37]), FA_WGMMA_AS(d[38]), FA_WGMMA_AS(d[39])
#define FA_WGMMA_REGS_44 FA_WGMMA_REGS_40 ", %40, %41, %42, %43"
#define FA_WGMMA_OUT_44 FA_WGMMA_OUT_40, FA_WGMMA_AS(d[40]), FA_WGMMA_AS(d[41]), FA_WGMMA_AS(d[42]), FA_WGMMA_AS(d[43])
#define FA_WGMMA_REGS_48 FA_WGMMA_REGS_44 ", %44, %45, %46, %47"
#define FA_WGMMA_OUT_48 FA_WGMMA_OUT_44, FA_WGMMA_AS(d[44]), FA_WGMMA_AS(d[45]), FA_WGMMA_AS(d[46]), FA_WGMMA_AS(d[47])
#define FA_WGMMA_REGS_52 FA_WGMMA_REGS_48 ", %48, %49, %50, %51"
#define FA_WGMMA_OUT_52 FA_WGMMA_OUT_48, FA_WGMMA_AS(d[48]), FA_WGMMA_AS(d[49]), FA_WGMMA_AS(d[50]), FA_WGMMA_AS(d[51])
#define FA_WGMMA_REGS_56 FA_WGMMA_REGS_52 ", %52, %53, %54, %55"
#define FA_WGMMA_OUT_56 FA_WGMMA_OUT_52, FA_WGMMA_AS(d[52]), FA_WGMMA_AS(d[53]), FA_WGMMA_AS(d[54]), FA_WGMMA_AS(d[55])
#define FA_WGMMA_REGS_60 FA_WGMMA_REGS_56 ", %56, %57, %58, %59"
#define FA_WGMMA_OUT_60 FA_WGMMA_OUT_56, FA_WGMMA_AS(d[56]), FA_WGMMA_AS(d[57]), FA_WGMMA_AS(d[58]), FA_WGMMA_AS(d[59])
#define FA_WGMMA_REGS_64 FA_WGMMA_REGS_60 ", %60, %61, %62, %63"
#define FA_WGMMA_OUT_64 FA_WGMMA_OUT_60, FA_WGMMA_AS(d[60]), FA_WGMMA_AS(d[61]), FA_WGMMA_AS(d[62]), FA_WGMMA_AS(d[63])
#define FA_WGMMA_REGS_68 FA_WGMMA_REGS_64 ", %64, %65, %66, %67"
#define FA_WGMMA_OUT_68 FA_WGMMA_OUT_64, FA_WGMMA_AS(d[64]), FA_WGMMA_AS(d[65]), FA_WGMMA_AS(d[66]), FA_WGMMA_AS(d[67])
#define FA_WGMMA_REGS_72 FA_WGMMA_REGS_68 ", %68, %69, %70, %71"
#define FA_WGMMA_OUT_72 FA_WGMMA_OUT_68, FA_WGMMA_AS(d[68]), FA_WGMMA_AS(d[69]), FA_WGMMA_AS(d[70]), FA_WGMMA_AS(d[71])
#define FA_WGMMA_REGS_76 FA_WGMMA_REGS_72 ", %72, %73, %74, %75"
#define FA_WGMMA_OUT_76 FA_WGMMA_OUT_72, FA_WGMMA_AS(d[72]), FA_WGMMA_AS(d[73]), FA_WGMMA_AS(d[74]), FA_WGMMA_AS(d[75])
#define FA_WGMMA_REGS_80 FA_WGMMA_REGS_76 ", %76, %77, %78, %79"
#define FA_WGMMA_OUT_80 FA_WGMMA_OUT_76, FA_WGMMA_AS(d[76]), FA_WGMMA_AS(d[77]), FA_WGMMA_AS(d[78]), FA_WGMMA_AS(d[79])
#define FA_WGMMA_REGS_84 FA_WGMMA_REGS_80 ", %80, %81, %82, %83"
#define FA_WGMMA_OUT_84 FA_WGMMA_OUT_80, FA_WGMMA_AS(d[80]), FA_WGMMA_AS(d[81]), FA_WGMMA_AS(d[82]), FA_WGMMA_AS(d[83])
#define FA_WGMMA_REGS_88 FA_WGMMA_REGS_84 ", %84, %85, %86, %87"
#define FA_WGMMA_OUT_88 FA_WGMMA_OUT_84, FA_WGMMA_AS(d[84]), FA_WGMMA_AS(d[85]), FA_WGMMA_AS(d[86]), FA_WGMMA_AS(d[87])
#define FA_WGMMA_REGS_92 FA_WGMMA_REGS_88 ", %88, %89, %90, %91"
#define FA_WGMMA_OUT_92 FA_WGMMA_OUT_88, FA_WGMMA_AS(d[88]), FA_WGMMA_AS(d[89]), FA_WGMMA_AS(d[90]), FA_WGMMA_AS(d[91])
#define FA_WGMMA_REGS_96 FA_WGMMA_REGS_92 ", %92, %93, %94, %95"
#define FA_WGMMA_OUT_96 FA_WGMMA_OUT_92, FA_WGMMA_AS(d[92]), FA_WGMMA_AS(d[93]), FA_WGMMA_AS(d[94]), FA_WGMMA_AS(d[95])
#define FA_WGMMA_REGS_100 FA_WGMMA_REGS_96 ", %96, %97, %98, %99"
#define FA_WGMMA_OUT_100 FA_WGMMA_OUT_96, FA_WGMMA_AS(d[96]), FA_WGMMA_AS(d[97]), FA_WGMMA_AS(d[98]), FA_WGMMA_AS(d[99])
#define FA_WGMMA_REGS_104 FA_WGMMA_REGS_100 ", %100, %101, %102, %103"
#define FA_WGMMA_OUT_104 FA_WGMMA_OUT_100, FA_WGMMA_AS(d[100]), FA_WGMMA_AS(d[101]), FA_WGMMA_AS(d[102]), FA_WGMMA_AS(d[103])
#define FA_WGMMA_REGS_108 FA_WGMMA_REGS_104 ", %104, %105, %106, %107"
#define FA_WGMMA_OUT_108 FA_WGMMA_OUT_104, FA_WGMMA_AS(d[104]), FA_WGMMA_AS(d[105]), FA_WGMMA_AS(d[106]), FA_WGMMA_AS(d[107])
#define FA_WGMMA_REGS_112 FA_WGMMA_REGS_108 ", %108, %109, %110, %111"
#define FA_WGMMA_OUT_112 FA_WGMMA_OUT_108, FA_WGMMA_AS(d[108]), FA_WGMMA_AS(d[109]), FA_WGMMA_AS(d[110]), FA_WGMMA_AS(d[111])
#define FA_WGMMA_REGS_116 FA_WGMMA_REGS_112 ", %112, %113, %114, %115"
#define FA_WGMMA_OUT_116 FA_WGMMA_OUT_112, FA_WGMMA_AS(d[112]), FA_WGMMA_AS(d[113]), FA_WGMMA_AS(d[114]), FA_WGMMA_AS(d[115])
#define FA_WGMMA_REGS_120 FA_WGMMA_REGS_116 ", %116, %117, %118, %119"
#define FA_WGMMA_OUT_120 FA_WGMMA_OUT_116, FA_WGMMA_AS(d[116]), FA_WGMMA_AS(d[117]), FA_WGMMA_AS(d[118]), FA_WGMMA_AS(d[119])
#define FA_WGMMA_REGS_124 FA_WGMMA_REGS_120 ", %120, %121, %122, %123"
#define FA_WGMMA_OUT_124 FA_WGMMA_OUT_120, FA_WGMMA_AS(d[120]), FA_WGMMA_AS(d[121]), FA_WGMMA_AS(d[122]), FA_WGMMA_AS(d[123])
#define FA_WGMMA_REGS_128 FA_WGMMA_REGS_124 ", %124, %125, %126, %127"
#define FA_WGMMA_OUT_128 FA_WGMMA_OUT_124, FA_WGMMA_AS(d[124]), FA_WGMMA_AS(d[125]), FA_WGMMA_AS(d[126]), FA_WGMMA_AS(d[127])

// FA_WGMMA(type, N, registers of D, and the numbers of the operands after them)
#define FA_WGMMA(type, n, regs, i0, i1, i2, i3, i4, i5, i6)                                                         \
  template <>                                                                                                       \
  struct Wgmma<type, n> {                                                                                           \
    template <bool kTransposeB, bool kTransposeA = false>                                                           \
    static FA_DEVICE void shared(float (&d)[regs], uint64_t a, uint64_t b, bool accumulate) {                       \
      asm volatile(                                                                                                 \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #type    \
          "." #type " {" FA_WGMMA_REGS_##regs "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i4 ", %" #i3 ";\n}\n"            \
          : FA_WGMMA_OUT_##regs                                                                                     \
          : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransposeB ? 1 : 0), "n"(kTransposeA ? 1 : 0)); \
    }                                                                                                               \
    template <bool kTransposeB>                                                                                     \
    static FA_DEVICE void registers(float (&d)[regs], const uint32_t (&a)[4], uint64_t b, bool accumulate) {        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n            \
                   "k16.f32." #type "." #type " {" FA_WGMMA_REGS_##regs "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3   \
                                                                        "}, %" #i4 ", p, 1, 1, %" #i6 ";\n}\n"      \
                   : FA_WGMMA_OUT_##regs                                                                            \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),         \
                     "n"(kTransposeB ? 1 : 0));                                                                     \
    }                                                                                                               \
  };
#define FA_WGMMA_BOTH(...)    \
  FA_WGMMA(bf16, __VA_ARGS__) \
  FA_WGMMA(f16, __VA_ARGS__)
FA_WGMMA_BOTH(8, 4, 4, 5, 6, 7, 8, 9, 10)
FA_WGMMA_BOTH(16, 8, 8, 9, 10, 11, 12, 13, 14)
FA_WGMMA_BOTH(24, 12, 12, 13, 14, 15, 16, 17, 18)
FA_WGMMA_BOTH(32, 16, 16, 17, 18, 19, 20, 21, 22)
FA_WGMMA_BOTH(40, 20, 20, 21, 22, 23, 24, 25, 26)
FA_WGMMA_BOTH(48, 24, 24, 25, 26, 27, 28, 29, 30)
FA_WGMMA_BOTH(56, 28, 28, 29, 30, 31, 32, 33, 34)
FA_WGMMA_BOTH(64, 32, 32, 33, 34, 35, 36, 37, 38)
FA_WGMMA_BOTH(72, 36, 36, 37, 38, 39, 40, 41, 42)
FA_WGMMA_BOTH(80, 40, 40, 41, 42, 43, 44, 45, 46)
FA_WGMMA_BOTH(88, 44, 44, 45, 46, 47, 48, 49, 50)
FA_WGMMA_BOTH(96, 48, 48, 49, 50, 51, 52, 53, 54)
FA_WGMMA_BOTH(104, 52, 52, 53, 54, 55, 56, 57, 58)
FA_WGMMA_BOTH(112, 56, 56, 57, 58, 59, 60, 61, 62)
FA_WGMMA_BOTH(120, 60, 60, 61, 62, 63, 64, 65, 66)
FA_WGMMA_BOTH(128, 64, 64, 65, 66, 67, 68, 69, 70)
FA_WGMMA_BOTH(136, 68, 68, 69, 70, 71, 72, 73, 74)
FA_WGMMA_BOTH(144, 72, 72, 73, 74, 75, 76, 77, 78)
FA_WGMMA_BOTH(152, 76, 76, 77, 78, 79, 80, 81, 82)
FA_WGMMA_BOTH(160, 80, 80, 81, 82, 83, 84, 85, 86)
FA_WGMMA_BOTH(168, 84, 84, 85, 86, 87, 88, 89, 90)
FA_WGMMA_BOTH(176, 88, 88, 89, 90, 91, 92, 93, 94)
FA_WGMMA_BOTH(184, 92, 92, 93, 94, 95, 96, 97, 98)
FA_WGMMA_BOTH(192, 96, 96, 97, 98, 99, 100, 101, 102)
FA_WGMMA_BOTH(200, 100, 100, 101, 102, 103, 104, 105, 106)
FA_WGMMA_BOTH(208, 104, 104, 105, 106, 107, 108, 109, 110)
FA_WGMMA_BOTH(216, 108, 108, 109, 110, 111, 112, 113, 114)
FA_WGMMA_BOTH(224, 112, 112, 113, 114, 115, 116, 117, 118)
FA_WGMMA_BOTH(232, 116, 116, 117, 118, 119, 120, 121, 122)
FA_WGMMA_BOTH(240, 120, 120, 121, 122, 123, 124, 125, 126)
FA_WGMMA_BOTH(248, 124, 124, 125, 126, 127, 128, 129, 130)
FA_WGMMA_BOTH(256, 128, 128, 129, 130, 131, 132, 133, 134)
#undef FA_WGMMA_BOTH
#undef FA_WGMMA

}  // namespace fa::ptx

#endif  // FA_TEMPLATES_PTX_WGMMA_CUH_
