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

// Operand lists of the accumulators, grown by one n8 tile at a time.
#define FA_WGMMA_REGS_4 "%0, %1, %2, %3"
#define FA_WGMMA_OUT_4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define FA_WGMMA_REGS_8 FA_WGMMA_REGS_4 ", %4, %5, %6, %7"
#define FA_WGMMA_OUT_8 FA_WGMMA_OUT_4, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define FA_WGMMA_REGS_12 FA_WGMMA_REGS_8 ", %8, %9, %10, %11"
#define FA_WGMMA_OUT_12 FA_WGMMA_OUT_8, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define FA_WGMMA_REGS_16 FA_WGMMA_REGS_12 ", %12, %13, %14, %15"
#define FA_WGMMA_OUT_16 FA_WGMMA_OUT_12, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define FA_WGMMA_REGS_20 FA_WGMMA_REGS_16 ", %16, %17, %18, %19"
#define FA_WGMMA_OUT_20 FA_WGMMA_OUT_16, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define FA_WGMMA_REGS_24 FA_WGMMA_REGS_20 ", %20, %21, %22, %23"
#define FA_WGMMA_OUT_24 FA_WGMMA_OUT_20, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define FA_WGMMA_REGS_28 FA_WGMMA_REGS_24 ", %24, %25, %26, %27"
#define FA_WGMMA_OUT_28 FA_WGMMA_OUT_24, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define FA_WGMMA_REGS_32 FA_WGMMA_REGS_28 ", %28, %29, %30, %31"
#define FA_WGMMA_OUT_32 FA_WGMMA_OUT_28, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define FA_WGMMA_REGS_36 FA_WGMMA_REGS_32 ", %32, %33, %34, %35"
#define FA_WGMMA_OUT_36 FA_WGMMA_OUT_32, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define FA_WGMMA_REGS_40 FA_WGMMA_REGS_36 ", %36, %37, %38, %39"
#define FA_WGMMA_OUT_40 FA_WGMMA_OUT_36, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define FA_WGMMA_REGS_44 FA_WGMMA_REGS_40 ", %40, %41, %42, %43"
#define FA_WGMMA_OUT_44 FA_WGMMA_OUT_40, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define FA_WGMMA_REGS_48 FA_WGMMA_REGS_44 ", %44, %45, %46, %47"
#define FA_WGMMA_OUT_48 FA_WGMMA_OUT_44, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define FA_WGMMA_REGS_52 FA_WGMMA_REGS_48 ", %48, %49, %50, %51"
#define FA_WGMMA_OUT_52 FA_WGMMA_OUT_48, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define FA_WGMMA_REGS_56 FA_WGMMA_REGS_52 ", %52, %53, %54, %55"
#define FA_WGMMA_OUT_56 FA_WGMMA_OUT_52, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define FA_WGMMA_REGS_60 FA_WGMMA_REGS_56 ", %56, %57, %58, %59"
#define FA_WGMMA_OUT_60 FA_WGMMA_OUT_56, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define FA_WGMMA_REGS_64 FA_WGMMA_REGS_60 ", %60, %61, %62, %63"
#define FA_WGMMA_OUT_64 FA_WGMMA_OUT_60, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define FA_WGMMA_REGS_68 FA_WGMMA_REGS_64 ", %64, %65, %66, %67"
#define FA_WGMMA_OUT_68 FA_WGMMA_OUT_64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define FA_WGMMA_REGS_72 FA_WGMMA_REGS_68 ", %68, %69, %70, %71"
#define FA_WGMMA_OUT_72 FA_WGMMA_OUT_68, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define FA_WGMMA_REGS_76 FA_WGMMA_REGS_72 ", %72, %73, %74, %75"
#define FA_WGMMA_OUT_76 FA_WGMMA_OUT_72, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define FA_WGMMA_REGS_80 FA_WGMMA_REGS_76 ", %76, %77, %78, %79"
#define FA_WGMMA_OUT_80 FA_WGMMA_OUT_76, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define FA_WGMMA_REGS_84 FA_WGMMA_REGS_80 ", %80, %81, %82, %83"
#define FA_WGMMA_OUT_84 FA_WGMMA_OUT_80, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define FA_WGMMA_REGS_88 FA_WGMMA_REGS_84 ", %84, %85, %86, %87"
#define FA_WGMMA_OUT_88 FA_WGMMA_OUT_84, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define FA_WGMMA_REGS_92 FA_WGMMA_REGS_88 ", %88, %89, %90, %91"
#define FA_WGMMA_OUT_92 FA_WGMMA_OUT_88, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define FA_WGMMA_REGS_96 FA_WGMMA_REGS_92 ", %92, %93, %94, %95"
#define FA_WGMMA_OUT_96 FA_WGMMA_OUT_92, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define FA_WGMMA_REGS_100 FA_WGMMA_REGS_96 ", %96, %97, %98, %99"
#define FA_WGMMA_OUT_100 FA_WGMMA_OUT_96, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define FA_WGMMA_REGS_104 FA_WGMMA_REGS_100 ", %100, %101, %102, %103"
#define FA_WGMMA_OUT_104 FA_WGMMA_OUT_100, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define FA_WGMMA_REGS_108 FA_WGMMA_REGS_104 ", %104, %105, %106, %107"
#define FA_WGMMA_OUT_108 FA_WGMMA_OUT_104, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define FA_WGMMA_REGS_112 FA_WGMMA_REGS_108 ", %108, %109, %110, %111"
#define FA_WGMMA_OUT_112 FA_WGMMA_OUT_108, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define FA_WGMMA_REGS_116 FA_WGMMA_REGS_112 ", %112, %113, %114, %115"
#define FA_WGMMA_OUT_116 FA_WGMMA_OUT_112, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define FA_WGMMA_REGS_120 FA_WGMMA_REGS_116 ", %116, %117, %118, %119"
#define FA_WGMMA_OUT_120 FA_WGMMA_OUT_116, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define FA_WGMMA_REGS_124 FA_WGMMA_REGS_120 ", %120, %121, %122, %123"
#define FA_WGMMA_OUT_124 FA_WGMMA_OUT_120, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define FA_WGMMA_REGS_128 FA_WGMMA_REGS_124 ", %124, %125, %126, %127"
#define FA_WGMMA_OUT_128 FA_WGMMA_OUT_124, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

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
