#ifndef FA_TEMPLATES_PTX_DEBUG_CUH_
#define FA_TEMPLATES_PTX_DEBUG_CUH_

#include <common/debug_report.cuh>
#include <common/types.cuh>
#include <ptx/language.cuh>

// What debug kernels check: those whose unit defines FA_DEBUG_KERNELS. Others have no trace of it.
#ifdef FA_DEBUG_KERNELS

extern "C" {
/// Where the host reads what is wrong: set when the kernel is loaded, in that context alone.
__device__ fa::kernel::DebugReport* fa_debug_report = nullptr;
/// Whether a thread says it already.
__device__ fa::uint32_t fa_debug_stopped = 0;
}

namespace fa::ptx {

/// Nanoseconds that nothing waits for in a kernel that works.
constexpr uint32_t kDebugPatience = 2'000'000'000;

/// Modulo 2^32, which is 4.3 seconds.
FA_DEVICE uint32_t global_nanoseconds() {
  uint32_t value;
  asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(value));
  return value;
}

FA_DEVICE void debug_report(const char* text) {
  volatile kernel::DebugReport* const report = *const_cast<kernel::DebugReport* volatile*>(&fa_debug_report);
  if (report == nullptr) return;
  uint32_t block, thread;
  asm volatile("mov.u32 %0, %%ctaid.x;\nmov.u32 %1, %%tid.x;" : "=r"(block), "=r"(thread));
  report->block = block;
  report->thread = thread;
  constexpr int kLast = static_cast<int>(sizeof report->text) - 1;
  int length = 0;
  _Pragma("unroll 1") for (; length < kLast && text[length] != 0; ++length) report->text[length] = text[length];
  report->text[length] = 0;
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  report->written = 1;
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

/// Says what is wrong, and where, and ends the kernel with an error. Always inlined, and nothing follows: with a call
/// ptxas waits for each product of wgmma and leaves setmaxnreg out, and keeps all registers for what would follow.
FA_DEVICE void debug_stop(const char* text) {
  uint32_t stopped;
  asm volatile("atom.global.exch.b32 %0, [%1], 1;"
               : "=r"(stopped)
               : "l"(__cvta_generic_to_global(&fa_debug_stopped))
               : "memory");
  if (stopped == 0) {
    debug_report(text);
    asm volatile("trap;" ::: "memory");
  }
  // Until the first thread's trap ends the kernel; asleep, so that it can go on where it is of this warp.
  asm volatile("{\nstopped:\nnanosleep.u32 1000;\nbra.uni stopped;\n}" ::: "memory");
  __builtin_unreachable();
}

/// Where dynamic shared memory ends.
FA_DEVICE uint32_t end_of_shared(uint32_t base) {
  uint32_t size;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(size));
  return base + size;
}

}  // namespace fa::ptx

// Of dynamic shared memory: what lies before it is not the caller's.
#define FA_CHECK_SHARED(address, bytes)                                                                      \
  if ((address) % (bytes) != 0 || (address) > end_of_shared(dynamic_shared()) - (bytes)) {                   \
    debug_stop("a wrong address in shared memory, of " #bytes " bytes, at " __FILE__ ":" FA_TEXT(__LINE__)); \
  }
#define FA_CHECK_GLOBAL(address, bytes)                                                                      \
  if ((address) == nullptr || reinterpret_cast<size_t>(address) % (bytes) != 0) {                            \
    debug_stop("a wrong address in global memory, of " #bytes " bytes, at " __FILE__ ":" FA_TEXT(__LINE__)); \
  }
#define FA_UNFINISHED(problem, wait) problem ": " wait ", at " __FILE__ ":" FA_TEXT(__LINE__)
#define FA_TEXT(...) FA_STRINGIZE(__VA_ARGS__)

#else

#define FA_CHECK_SHARED(address, bytes)
#define FA_CHECK_GLOBAL(address, bytes)

#endif  // FA_DEBUG_KERNELS

#endif  // FA_TEMPLATES_PTX_DEBUG_CUH_
