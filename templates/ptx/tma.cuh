#ifndef FA_TEMPLATES_PTX_TMA_CUH_
#define FA_TEMPLATES_PTX_TMA_CUH_

#include <common/types.cuh>
#include <ptx/language.cuh>

// PTX ISA, "cp.async.bulk.tensor": the copy engine moves one box of a tensor whose shape, strides and swizzle a tensor
// map describes. Coordinates are in elements, innermost axis first; what lies outside of the tensor reads as zeros.
namespace fa::ptx {

using kernel::TensorMap;

/// How long the L2 cache should keep the lines of a copy: constants of createpolicy.fractional.
enum class L2Policy : uint64_t {
  evict_first = 0x12F0000000000000,
  evict_last = 0x14F0000000000000,
};

/// prefetch.tensormap
FA_DEVICE void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// cp.async.bulk.tensor.4d, global to shared: by one thread; completes its bytes on `barrier`.
FA_DEVICE void tma_load_4d(uint32_t shared, const TensorMap& map, uint32_t barrier, L2Policy policy, int c0, int c1,
                           int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(static_cast<uint64_t>(policy))
      : "memory");
}

/// cp.async.bulk.tensor.5d
FA_DEVICE void tma_load_5d(uint32_t shared, const TensorMap& map, uint32_t barrier, L2Policy policy, int c0, int c1,
                           int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(static_cast<uint64_t>(policy))
      : "memory");
}

/// cp.async.bulk.tensor.5d, shared to global: by one thread, after `fence_proxy_async` by those that wrote the source.
/// Elements outside of the tensor are dropped. Joins this thread's current bulk group.
FA_DEVICE void tma_store_5d(const TensorMap& map, uint32_t shared, int c0, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map),
               "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}

/// cp.async.bulk, global to shared: `bytes` bytes (a multiple of 16, like both addresses), completed on `barrier`.
FA_DEVICE void bulk_load(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(barrier)
               : "memory");
}

/// cp.reduce.async.bulk.add.f32, shared to global: adds `bytes` bytes of floats (a multiple of 16, like both
/// addresses), in an order among other additions that is open. By one thread, after `fence_proxy_async` by those that
/// wrote the source. Joins this thread's current bulk group.
FA_DEVICE void bulk_add_f32(float* global, uint32_t shared, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(global)),
               "r"(shared), "r"(bytes)
               : "memory");
}

/// cp.async.bulk.commit_group
FA_DEVICE void tma_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// cp.async.bulk.wait_group.read 0: the sources of all this thread's stores have been read.
FA_DEVICE void tma_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/// cp.async.bulk.wait_group 0: this thread's stores are complete.
FA_DEVICE void tma_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace fa::ptx

#endif  // FA_TEMPLATES_PTX_TMA_CUH_
