#ifndef FA_TEMPLATES_PTX_THREAD_CUH_
#define FA_TEMPLATES_PTX_THREAD_CUH_

#include <common/types.cuh>
#include <ptx/language.cuh>

namespace fa::ptx {

/// %tid.x and %ctaid.x. Each call reads the register anew: what a kernel derives from one call need not stay in
/// registers until the next.
FA_DEVICE int thread_index() {
  int value;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(value));
  return value;
}
FA_DEVICE int block_index() {
  int value;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(value));
  return value;
}

/// bar.sync 0: every thread of the block, and their shared memory accesses, before and after.
FA_DEVICE void sync_threads() {
  __syncthreads();
}

/// bar.warp.sync: the same for the 32 threads of a warp.
FA_DEVICE void sync_warp() {
  __syncwarp();
}

/// shfl.sync.bfly.b32 over a full warp.
FA_DEVICE float shfl_xor(float value, int lane_mask) {
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}

/// vote.sync.any.pred over a full warp.
FA_DEVICE bool vote_any(bool predicate) {
  return __any_sync(0xffffffffu, predicate);
}

}  // namespace fa::ptx

#endif  // FA_TEMPLATES_PTX_THREAD_CUH_
