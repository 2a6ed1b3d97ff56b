#ifndef FA_TEMPLATES_COMMON_COPIES_CUH_
#define FA_TEMPLATES_COMMON_COPIES_CUH_

#include <common/types.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/language.cuh>
#include <ptx/memory.cuh>

#ifdef FA_TURING
// Compute capability 7.5 has no cp.async: the same through registers. Whoever waits for a copy meets those who have
// made it at a barrier, or in a warp, as behind cp.async.
namespace fa::ptx {

FA_DEVICE void cp_async_16(uint32_t shared, const void* global, bool valid) {
  kernel::Chunk chunk{};
  if (valid) chunk = ld_global_chunk(global);
  st_shared_chunk(shared, chunk);
}
FA_DEVICE void cp_async_commit() {}
template <int kPending>
FA_DEVICE void cp_async_wait() {}

}  // namespace fa::ptx
#endif

#endif  // FA_TEMPLATES_COMMON_COPIES_CUH_
