#ifndef FA_TEMPLATES_PTX_CLUSTER_CUH_
#define FA_TEMPLATES_PTX_CLUSTER_CUH_

#include <common/types.cuh>
#include <ptx/language.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/memory.cuh>
#include <ptx/tma.cuh>

// PTX ISA, "Cluster of cooperative thread arrays": consecutive blocks along x that run at the same time and reach each
// other's shared memory. A shared::cluster address names a place in the shared memory of one of them; only the
// functions here take one. No block may exit while another may still arrive at its barriers or copy into its memory.
namespace fa::ptx {

/// %cluster_ctarank: the number of this block in its cluster.
FA_DEVICE int cluster_rank() {
  int value;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
  return value;
}

/// mapa: the shared::cluster address of the place in block `rank` that `shared` is in this one.
FA_DEVICE uint32_t map_shared(uint32_t shared, int rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(shared), "r"(rank));
  return mapped;
}

/// The address within this block's window: from bit 24 on shared addresses carry the rank, and matrix descriptors have
/// no room for it.
FA_DEVICE uint32_t without_rank(uint32_t shared) {
  return shared & 0x00ffffff;
}

/// barrier.cluster.arrive, barrier.cluster.wait: every thread of the cluster, and their accesses, before and after.
FA_DEVICE void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

/// The same without their accesses: what a thread has read is there before, what it writes need not be. It lets no
/// block exit before others are done with its memory.
FA_DEVICE void cluster_sync_relaxed() {
  asm volatile(
      "barrier.cluster.arrive.relaxed.aligned;\n"
      "barrier.cluster.wait.aligned;" ::
          : "memory");
}

// Arrivals and waits across blocks are those of one block: with .release.cluster and .acquire.cluster the compiler puts
// a fence for all of global memory before each arrival, and an invalidation of the L1 cache behind each wait. What is
// handed on is what the barrier itself orders: that buffers in shared memory have been read, and that copies have
// landed.

/// mbarrier.arrive at a barrier of any block of the cluster.
FA_DEVICE void mbarrier_arrive_remote(uint32_t cluster_barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_barrier) : "memory");
}

/// mbarrier.arrive.expect_tx: announces `bytes` of copies there, then one arrival.
FA_DEVICE void mbarrier_arrive_expect_tx_remote(uint32_t cluster_barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(cluster_barrier), "r"(bytes)
               : "memory");
}

/// mbarrier.try_wait.parity at a barrier of this block at which others of the cluster arrive, until the phase of that
/// parity is complete.
#ifndef FA_DEBUG_KERNELS  // else it is that of mbarrier.cuh
FA_DEVICE void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  mbarrier_wait(barrier, parity);
}
#endif

/// cp.async.bulk, shared memory of this block to that of any block of the cluster: `bytes` bytes (a multiple of 16,
/// like both addresses), completed on a barrier of the target's block. By one thread, after `fence_proxy_async` by
/// those that wrote the source; the source stays as it is until that barrier's phase is complete.
FA_DEVICE void bulk_copy_to_cluster(uint32_t cluster_target, uint32_t source, int bytes, uint32_t cluster_barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   cluster_target),
               "r"(source), "r"(bytes), "r"(cluster_barrier)
               : "memory");
}

/// cp.async.bulk.tensor.5d.multicast::cluster: a box for the blocks of the cluster whose bits `ranks` has, at the same
/// place in the shared memory of each, completed on the barrier at the same place there.
FA_DEVICE void tma_load_5d_multicast(uint32_t shared, const TensorMap& map, uint32_t barrier, uint16_t ranks,
                                     L2Policy policy, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8, %9;" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(ranks),
      "l"(static_cast<uint64_t>(policy))
      : "memory");
}

/// ld.shared::cluster: 16 bytes of any block of the cluster, at a multiple of 16. Between the stores there and this
/// load stands a `cluster_sync`, and between this load and the exit of that block another.
FA_DEVICE Chunk ld_shared_cluster_chunk(uint32_t cluster_address) {
  Chunk value;
  asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
               : "r"(cluster_address)
               : "memory");
  return value;
}

}  // namespace fa::ptx

#endif  // FA_TEMPLATES_PTX_CLUSTER_CUH_
