#ifndef FA_TEMPLATES_PTX_CP_ASYNC_CUH_
#define FA_TEMPLATES_PTX_CP_ASYNC_CUH_

#include <common/types.cuh>
#include <ptx/language.cuh>

namespace fa::ptx {

#ifndef FA_TURING  // whose copies go through registers: common/copies.cuh
/// cp.async.cg.shared.global: 16 bytes, both addresses 16-byte aligned. With `valid` false nothing is read and the 16
/// bytes become zero.
FA_DEVICE void cp_async_16(uint32_t shared, const void* global, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared),
               "l"(__cvta_generic_to_global(global)), "r"(bytes)
               : "memory");
}

/// cp.async.commit_group: the copies issued by this thread since the last commit form a group.
FA_DEVICE void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// cp.async.wait_group: at most `kPending` of this thread's latest groups may still be in flight.
template <int kPending>
FA_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
#endif

}  // namespace fa::ptx

#endif  // FA_TEMPLATES_PTX_CP_ASYNC_CUH_
