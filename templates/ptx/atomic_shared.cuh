#ifndef FA_TEMPLATES_PTX_ATOMIC_SHARED_CUH_
#define FA_TEMPLATES_PTX_ATOMIC_SHARED_CUH_

#include <common/types.cuh>
#include <ptx/debug.cuh>
#include <ptx/language.cuh>

namespace fa::ptx {

/// red.shared.add: nothing is told, and nothing is ordered.
FA_DEVICE void red_add_shared(uint32_t address, uint32_t value) {
  FA_CHECK_SHARED(address, 4);
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

/// atom.shared.add: what was there before.
FA_DEVICE uint32_t atomic_add_shared(uint32_t address, uint32_t value) {
  FA_CHECK_SHARED(address, 4);
  uint32_t before;
  asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(address), "r"(value) : "memory");
  return before;
}

}  // namespace fa::ptx

#endif  // FA_TEMPLATES_PTX_ATOMIC_SHARED_CUH_
