#ifndef FA_TEMPLATES_PTX_MEMORY_CUH_
#define FA_TEMPLATES_PTX_MEMORY_CUH_

#include <common/types.cuh>
#include <ptx/debug.cuh>
#include <ptx/language.cuh>

namespace fa::ptx {

using kernel::Chunk;

/// Shared memory is addressed by its 32-bit window offset. This is where the block's dynamic shared memory starts,
/// aligned to 1024 bytes.
FA_DEVICE uint32_t dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char fa_dynamic_shared[];
  return static_cast<uint32_t>(__cvta_generic_to_shared(fa_dynamic_shared));
}

/// ld.global, st.global of one element.
template <class T>
FA_DEVICE T ld_global(const T* address) {
  return *address;
}
template <class T>
FA_DEVICE void st_global(T* address, T value) {
  *address = value;
}

/// ld.relaxed.gpu.global: of memory that the kernel before this one may be writing. Ahead of the wait for that it is a
/// guess, which is to be looked at again in the same way: no other load finds in the L1 cache what this one has read.
FA_DEVICE int ld_ahead_global(const int32_t* address) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(address)) : "memory");
  return value;
}

/// ld.global at an address that follows from a guess: where that is wrong the value, which nobody may have written, is
/// not used.
FA_DEVICE int ld_guessed_global(const int32_t* address) {
  return *address;
}

// An asm that touches memory is volatile, or picks an address itself that can be read wherever it stands. One without
// is arithmetic to the compiler, which may execute it in front of the test for a valid address. The assembler merges
// equal loads all the same.

/// ld.global.nc: of memory that nothing writes while the kernel runs.
FA_DEVICE float ld_global_nc(const float* address) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(__cvta_generic_to_global(address)));
  return value;
}
FA_DEVICE int32_t ld_global_nc(const int32_t* address) {
  int32_t value;
  asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(address)));
  return value;
}
template <class T>
FA_DEVICE T ld_global_nc(const T* address) {
  static_assert(sizeof(T) == 2, "a 16-bit storage type");
  T value;
  asm volatile("ld.global.nc.b16 %0, [%1];" : "=h"(value.bits) : "l"(__cvta_generic_to_global(address)));
  return value;
}

FA_DEVICE uint32_t ld_global_nc(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(address)));
  return value;
}
/// 16 bytes, 16-byte aligned.
FA_DEVICE Chunk ld_global_nc_chunk(const void* address) {
  FA_CHECK_GLOBAL(address, 16);
  Chunk value;
  asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
               : "l"(__cvta_generic_to_global(address)));
  return value;
}

/// slct.b64.s32 and ld.global.nc of one element: at `address` where `which` is no less than 0, else at `other`, which
/// can be read anywhere: so that the compiler may execute it anywhere, and once for many.
FA_DEVICE float ld_global_nc_of(int which, const float* address, const float* other) {
  float value;
  asm("{\n.reg .b64 picked;\nslct.b64.s32 picked, %1, %2, %3;\nld.global.nc.f32 %0, [picked];\n}"
      : "=f"(value)
      : "l"(__cvta_generic_to_global(address)), "l"(__cvta_generic_to_global(other)), "r"(which));
  return value;
}
FA_DEVICE int32_t ld_global_nc_of(int which, const int32_t* address, const int32_t* other) {
  int32_t value;
  asm("{\n.reg .b64 picked;\nslct.b64.s32 picked, %1, %2, %3;\nld.global.nc.s32 %0, [picked];\n}"
      : "=r"(value)
      : "l"(__cvta_generic_to_global(address)), "l"(__cvta_generic_to_global(other)), "r"(which));
  return value;
}
template <class T>
FA_DEVICE T ld_global_nc_of(int which, const T* address, const T* other) {
  static_assert(sizeof(T) == 2, "a 16-bit storage type");
  T value;
  asm("{\n.reg .b64 picked;\nslct.b64.s32 picked, %1, %2, %3;\nld.global.nc.b16 %0, [picked];\n}"
      : "=h"(value.bits)
      : "l"(__cvta_generic_to_global(address)), "l"(__cvta_generic_to_global(other)), "r"(which));
  return value;
}

/// ld of one element: at `address`, or of the launch parameter where that is null. Either can be read, so that the load
/// needs no test in front of it.
template <class T>
FA_DEVICE T ld_global_or_param(const T* address, const uint32_t& parameter) {
  static_assert(sizeof(T) <= sizeof parameter, "read from the parameter alone");
  return *(address == nullptr ? reinterpret_cast<const T*>(&parameter) : address);
}

/// st.global.v4.b32: 16 bytes, 16-byte aligned.
FA_DEVICE void st_global_chunk(void* address, Chunk value) {
  FA_CHECK_GLOBAL(address, 16);
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(address)), "r"(value.word[0]),
               "r"(value.word[1]), "r"(value.word[2]), "r"(value.word[3])
               : "memory");
}

/// ld.global.v4.b32: likewise.
FA_DEVICE Chunk ld_global_chunk(const void* address) {
  FA_CHECK_GLOBAL(address, 16);
  Chunk value;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
               : "l"(__cvta_generic_to_global(address))
               : "memory");
  return value;
}

/// red.global.add.f32: an addition whose order among others is open. The form of four (16-byte aligned) needs compute
/// capability 9.0.
FA_DEVICE void red_add_f32(float* address, float value) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "f"(value) : "memory");
}
FA_DEVICE void red_add_f32x4(float* address, const float (&value)[4]) {
#if defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ < 1  // before PTX 8.1
  for (int i = 0; i < 4; ++i) red_add_f32(address + i, value[i]);
#else
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(address)), "f"(value[0]),
               "f"(value[1]), "f"(value[2]), "f"(value[3])
               : "memory");
#endif
}

/// red.global.max.u32: likewise.
FA_DEVICE void red_max_u32(uint32_t* address, uint32_t value) {
  asm volatile("red.global.max.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "r"(value) : "memory");
}

// Signals between blocks that add to the same memory by bulk reductions. These are performed in the L2 cache, as the
// signals are: what a thread has seen complete has been added when its signal can be seen, and what another issues
// because it saw the signal is added later. So no fences for other accesses, which take as long as the reduction.

/// st.relaxed.gpu: the bulk reductions that this thread has seen complete come before.
FA_DEVICE void signal_global(int32_t* address, int32_t value) {
  asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "r"(value) : "memory");
}
/// ld.relaxed.gpu: whether `value` is there. If so, the reductions before the signal come before this thread's next.
FA_DEVICE bool test_global(const int32_t* address, int32_t value) {
  int32_t seen;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(__cvta_generic_to_global(address)) : "memory");
  return seen == value;
}
/// The same until it is. The blocks before this one must not wait for it.
FA_DEVICE void await_global(const int32_t* address, int32_t value) {
  while (!test_global(address, value)) continue;
}
#ifdef FA_DEBUG_KERNELS
FA_DEVICE void await_global_or_stop(const char* text, const int32_t* address, int32_t value) {
  const uint32_t start = global_nanoseconds();
  while (!test_global(address, value)) {
    if (global_nanoseconds() - start > kDebugPatience) debug_stop(text);
  }
}
#define await_global(...) await_global_or_stop(FA_UNFINISHED("a signal never comes", #__VA_ARGS__), __VA_ARGS__)
#endif

/// atom.relaxed.gpu.add: what was there before.
FA_DEVICE int32_t atomic_add_global(int32_t* address, int32_t value) {
  int32_t before;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(address)), "r"(value)
               : "memory");
  return before;
}

/// ld.shared.b32, st.shared.b32 and their 2-, 8- and 16-byte forms.
FA_DEVICE uint32_t ld_shared_b32(uint32_t address) {
  FA_CHECK_SHARED(address, 4);
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
FA_DEVICE uint16_t ld_shared_b16(uint32_t address) {
  FA_CHECK_SHARED(address, 2);
  uint16_t value;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
  return value;
}
FA_DEVICE void ld_shared_f32x2(float (&value)[2], uint32_t address) {
  FA_CHECK_SHARED(address, 8);
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value[0]), "=f"(value[1]) : "r"(address) : "memory");
}
FA_DEVICE void ld_shared_b64(uint32_t& low, uint32_t& high, uint32_t address) {
  FA_CHECK_SHARED(address, 8);
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "r"(address) : "memory");
}
FA_DEVICE Chunk ld_shared_chunk(uint32_t address) {
  FA_CHECK_SHARED(address, 16);
  Chunk value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
               : "r"(address)
               : "memory");
  return value;
}
FA_DEVICE void st_shared_b32(uint32_t address, uint32_t value) {
  FA_CHECK_SHARED(address, 4);
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
FA_DEVICE void st_shared_chunk(uint32_t address, Chunk value) {
  FA_CHECK_SHARED(address, 16);
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.word[0]), "r"(value.word[1]),
               "r"(value.word[2]), "r"(value.word[3])
               : "memory");
}
FA_DEVICE void st_shared_b16(uint32_t address, uint16_t value) {
  FA_CHECK_SHARED(address, 2);
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}
FA_DEVICE void st_shared_b64(uint32_t address, uint32_t low, uint32_t high) {
  FA_CHECK_SHARED(address, 8);
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(low), "r"(high) : "memory");
}

}  // namespace fa::ptx

#endif  // FA_TEMPLATES_PTX_MEMORY_CUH_
