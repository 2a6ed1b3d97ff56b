#ifndef FA_TEMPLATES_PTX_PREFETCH_CUH_
#define FA_TEMPLATES_PTX_PREFETCH_CUH_

#include <ptx/language.cuh>

namespace fa::ptx {

/// prefetch.global.L2: a line on its way to the L2 cache. Nothing is read, so that an earlier kernel may still write
/// it.
FA_DEVICE void prefetch_global(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(address)) : "memory");
}

}  // namespace fa::ptx

#endif  // FA_TEMPLATES_PTX_PREFETCH_CUH_
