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

/// mbarrier.try_wait.parity: like mbarrier_test, but it waits for a while, and orders what comes behind it.
FA_DEVICE bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t complete;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(complete)
      : "r"(barrier), "r"(parity)
      : "memory");
  return complete != 0;
}

/// mbarrier_wait, not for ever: `text` says that it is not complete. The clock is read when the wait is long.
FA_DEVICE void mbarrier_wait_or_stop(const char* text, uint32_t barrier, uint32_t parity) {
  if (mbarrier_try_wait(barrier, parity)) return;
  const uint32_t start = global_nanoseconds();
  while (!mbarrier_try_wait(barrier, parity)) {
    if (global_nanoseconds() - start > kDebugPatience) debug_stop(text);
  }
}

// The text begins with the barrier's name.
#define mbarrier_wait(...) \
  mbarrier_wait_or_stop(FA_UNFINISHED("a barrier is never complete", #__VA_ARGS__), __VA_ARGS__)
#define mbarrier_wait_cluster(...) mbarrier_wait(__VA_ARGS__)

#endif  // FA_DEBUG_KERNELS

}  // namespace fa::ptx

#endif  // FA_TEMPLATES_PTX_MBARRIER_CUH_
