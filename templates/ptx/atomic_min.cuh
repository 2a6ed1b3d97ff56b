#ifndef FA_TEMPLATES_PTX_ATOMIC_MIN_CUH_
#define FA_TEMPLATES_PTX_ATOMIC_MIN_CUH_

#include <common/types.cuh>
#include <ptx/language.cuh>

namespace fa::ptx {

/// red.min: nothing is told, and nothing is ordered.
FA_DEVICE void red_min_u64(uint64_t* address, uint64_t value) {
  asm volatile("red.relaxed.gpu.global.min.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "l"(value)
               : "memory");
}

}  // namespace fa::ptx

#endif  // FA_TEMPLATES_PTX_ATOMIC_MIN_CUH_
