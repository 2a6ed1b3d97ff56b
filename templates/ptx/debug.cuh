#ifndef FA_TEMPLATES_PTX_DEBUG_CUH_
#define FA_TEMPLATES_PTX_DEBUG_CUH_

#include <common/types.cuh>
#include <ptx/language.cuh>

// What debug kernels check: those whose unit defines FA_DEBUG_KERNELS. Others have no trace of it.
#ifdef FA_DEBUG_KERNELS

namespace fa::ptx {

/// Nanoseconds that nothing waits for in a kernel that works.
constexpr uint64_t kDebugPatience = 2'000'000'000;

FA_DEVICE uint64_t global_nanoseconds() {
  uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

/// Says what is wrong, and where, and ends the kernel with an error.
static __device__ __noinline__ void debug_stop(const char* problem, const char* what, const char* file, int line) {
#if defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ < 8 && __CUDA_ARCH__ >= 900
  // Whose ptxas refuses a few Hopper kernels that call printf: no words.
#else
  uint32_t block, thread;
  asm volatile("mov.u32 %0, %%ctaid.x;\nmov.u32 %1, %%tid.x;" : "=r"(block), "=r"(thread));
  printf("fa: %s: %s, at %s:%d, block %u, thread %u\n", problem, what, file, line, block, thread);
#endif
  asm volatile("trap;");
}

/// Of dynamic shared memory, which starts at `base`: what lies before it is not the caller's.
FA_DEVICE void check_shared(uint32_t address, uint32_t base, int bytes, const char* what) {
  uint32_t size;
  asm volatile("mov.u32 %0, %%dynamic_smem_size;" : "=r"(size));
  const bool outside = address >= base && address - base + static_cast<uint32_t>(bytes) > size;
  if (outside || address % static_cast<uint32_t>(bytes) != 0) debug_stop("a wrong address", what, "shared memory", 0);
}

FA_DEVICE void check_global(const void* address, int bytes, const char* what) {
  const auto bits = reinterpret_cast<size_t>(address);
  if (bits == 0 || bits % static_cast<size_t>(bytes) != 0) debug_stop("a wrong address", what, "global memory", 0);
}

}  // namespace fa::ptx

#define FA_CHECK_SHARED(address, bytes) check_shared(address, dynamic_shared(), bytes, __func__)
#define FA_CHECK_GLOBAL(address, bytes) check_global(address, bytes, __func__)

#else

#define FA_CHECK_SHARED(address, bytes)
#define FA_CHECK_GLOBAL(address, bytes)

#endif  // FA_DEBUG_KERNELS

#endif  // FA_TEMPLATES_PTX_DEBUG_CUH_
