#ifndef FA_TEMPLATES_PTX_CP_ASYNC_4_CUH_
#define FA_TEMPLATES_PTX_CP_ASYNC_4_CUH_

#include <common/types.cuh>
#include <ptx/language.cuh>

namespace fa::ptx {

/// cp.async.ca.shared.global: 4 bytes, both addresses 4-byte aligned. With `valid` false nothing is read and the 4
/// bytes become zero.
FA_DEVICE void cp_async_4(uint32_t shared, const void* global, bool valid) {
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(__cvta_generic_to_global(global)),
               "r"(bytes)
               : "memory");
}

}  // namespace fa::ptx

#endif  // FA_TEMPLATES_PTX_CP_ASYNC_4_CUH_
