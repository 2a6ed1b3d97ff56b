#ifndef FA_TEMPLATES_COMMON_FLAGS_CUH_
#define FA_TEMPLATES_COMMON_FLAGS_CUH_

#include <common/constants.cuh>
#include <ptx/atomic.cuh>
#include <ptx/language.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

// Blocks that share a query tile tell the last of them when their partial results are written. Whatever the memory
// holds, no flag is up before; each is taken down by who has waited for it.
namespace fa::kernel {

inline constexpr uint64_t kFlagUp = 0x6d45161bc6c0dd49;

/// Called by a warp, whose block has a higher number than those that raise the flags, which wait for none of its: flags
/// [0, count) are up, and taken down.
FA_DEVICE void await_flags(uint64_t* flags, int count) {
  FA_UNROLL_BY(1)
  for (int i = ptx::thread_index() % kWarpSize; i < count; i += kWarpSize) {
    ptx::await_flag_global(flags + i, kFlagUp);
    ptx::st_global(flags + i, uint64_t{0});  // for the next launch
  }
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_FLAGS_CUH_
