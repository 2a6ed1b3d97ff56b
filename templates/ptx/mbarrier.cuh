#ifndef FA_TEMPLATES_PTX_MBARRIER_CUH_
#define FA_TEMPLATES_PTX_MBARRIER_CUH_

#include <common/types.cuh>
#include <ptx/debug.cuh>
#include <ptx/language.cuh>

// PTX ISA, "mbarrier": an 8-byte object in shared memory that completes a phase when `count` arrivals and all announced
// bytes have come. Phases alternate between parity 0 and 1; a fresh barrier is in phase 0, so that waiting for parity 1
// passes at once.
namespace fa::ptx {

/// mbarrier.init: by one thread, before any other use.
FA_DEVICE void mbarrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

/// fence.mbarrier_init: makes the initialisation visible to the copy engine.
FA_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// mbarrier.arrive: one arrival; this thread's earlier accesses come before the end of the phase.
FA_DEVICE void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// mbarrier.arrive.expect_tx: announces `bytes` of copies, then one arrival.
FA_DEVICE void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/// mbarrier.try_wait.parity, until the phase of that parity is complete.
FA_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "waiting:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni finished;\n"
      "bra.uni waiting;\n"
      "finished:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// mbarrier.test_wait.parity: whether the phase of that parity is complete. Only a wait orders what comes behind it.
FA_DEVICE bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t complete;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(complete)
      : "r"(barrier), "r"(parity)
      : "memory");
  return complete != 0;
}

#ifdef FA_DEBUG_KERNELS

/// mbarrier_wait of what is written as `what`, whose first part is the barrier's name: not for ever.
FA_DEVICE void mbarrier_wait_named(const char* what, const char* file, int line, uint32_t barrier, uint32_t parity) {
  const uint64_t start = global_nanoseconds();
  while (!mbarrier_test(barrier, parity)) {
    if (global_nanoseconds() - start > kDebugPatience) debug_stop("a barrier is never complete", what, file, line);
  }
  mbarrier_wait(barrier, parity);  // at once: it orders what comes behind it
}

#define mbarrier_wait(...) mbarrier_wait_named(#__VA_ARGS__, __FILE__, __LINE__, __VA_ARGS__)
#define mbarrier_wait_cluster(...) mbarrier_wait_named(#__VA_ARGS__, __FILE__, __LINE__, __VA_ARGS__)

#endif  // FA_DEBUG_KERNELS

}  // namespace fa::ptx

#endif  // FA_TEMPLATES_PTX_MBARRIER_CUH_
