#ifndef FA_TEMPLATES_PTX_ATOMIC_CUH_
#define FA_TEMPLATES_PTX_ATOMIC_CUH_

#include <common/types.cuh>
#include <ptx/debug.cuh>
#include <ptx/language.cuh>

namespace fa::ptx {

/// atom.acq_rel.gpu.add: what was there before. Of blocks that count up one after the other, each sees what those
/// before it had written: all that was before a barrier of the block in front of this, and may be read behind one.
FA_DEVICE int32_t atomic_add_acq_rel_global(int32_t* address, int32_t value) {
  int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(address)), "r"(value)
               : "memory");
  return before;
}

/// red.max and red.min: nothing is told, and nothing is ordered.
FA_DEVICE void red_max_s32(int32_t* address, int32_t value) {
  asm volatile("red.relaxed.gpu.global.max.s32 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "r"(value)
               : "memory");
}
FA_DEVICE void red_min_u32(uint32_t* address, uint32_t value) {
  asm volatile("red.relaxed.gpu.global.min.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "r"(value)
               : "memory");
}
FA_DEVICE void red_max_u64(uint64_t* address, uint64_t value) {
  asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "l"(value)
               : "memory");
}

/// st.release.gpu: what all threads of the block have written in front of a barrier can be read by who sees the flag.
FA_DEVICE void raise_flag_global(uint64_t* address, uint64_t value) {
  asm volatile("st.release.gpu.global.b64 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "l"(value) : "memory");
}
/// ld.acquire.gpu: whether the flag is up.
FA_DEVICE bool test_flag_global(const uint64_t* address, uint64_t value) {
  uint64_t seen;
  asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(seen) : "l"(__cvta_generic_to_global(address)) : "memory");
  return seen == value;
}
/// The same of 32 bits.
FA_DEVICE void raise_flag_global(int32_t* address, int32_t value) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "r"(value) : "memory");
}
FA_DEVICE bool test_flag_global(const int32_t* address, int32_t value) {
  int32_t seen;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(seen) : "l"(__cvta_generic_to_global(address)) : "memory");
  return seen == value;
}
/// The same until it is. The blocks before this one must not wait for it.
template <class Word>
FA_DEVICE void await_flag_global(const Word* address, Word value) {
  while (!test_flag_global(address, value)) continue;
}
#ifdef FA_DEBUG_KERNELS
template <class Word>
FA_DEVICE void await_flag_global_or_stop(const char* text, const Word* address, Word value) {
  const uint32_t start = global_nanoseconds();
  while (!test_flag_global(address, value)) {
    if (global_nanoseconds() - start > kDebugPatience) debug_stop(text);
  }
}
#define await_flag_global(...) \
  await_flag_global_or_stop(FA_UNFINISHED("a flag is never raised", #__VA_ARGS__), __VA_ARGS__)
#endif

}  // namespace fa::ptx

#endif  // FA_TEMPLATES_PTX_ATOMIC_CUH_
