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

/// %nctaid.x
FA_DEVICE int block_count() {
  int value;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(value));
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

/// bar.sync id: `threads` threads of the block (a multiple of 32) meet at named barrier 1 to 15.
FA_DEVICE void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// bar.arrive id: counts towards the same barrier without waiting.
FA_DEVICE void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// setmaxnreg: every warp of a warpgroup gives registers back, or waits until it has more.
template <int kRegisters>
FA_DEVICE void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
FA_DEVICE void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// fence.proxy.async: this thread's accesses of shared memory come before later ones of the copy engine and wgmma.
FA_DEVICE void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// shfl.sync.idx.b32 over a full warp: the value of lane `lane`. With a constant lane the result is known to be the
/// same in the whole warp.
FA_DEVICE int shfl(int value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
FA_DEVICE uint32_t shfl(uint32_t value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}

/// shfl.sync.idx.b32 over groups of four lanes: the value of a group's lane `place`.
FA_DEVICE float shfl_quad(float value, int place) {
  return __shfl_sync(0xffffffffu, value, place, 4);
}

/// mov.u32 %laneid, where it stands: unlike what is derived from thread_index it is kept in no register over a loop.
FA_DEVICE int lane_index() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

/// shfl.sync.bfly.b32 over a full warp.
FA_DEVICE float shfl_xor(float value, int lane_mask) {
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}
FA_DEVICE uint32_t shfl_xor(uint32_t value, int lane_mask) {
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}
FA_DEVICE int shfl_xor(int value, int lane_mask) {
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}

/// vote.sync.any.pred over a full warp.
FA_DEVICE bool vote_any(bool predicate) {
  return __any_sync(0xffffffffu, predicate);
}

/// vote.sync.ballot.b32 over a full warp: bit i is the predicate of lane i.
FA_DEVICE uint32_t vote_ballot(bool predicate) {
  return __ballot_sync(0xffffffffu, predicate);
}

}  // namespace fa::ptx

#endif  // FA_TEMPLATES_PTX_THREAD_CUH_
