#ifndef FA_TESTS_EMULATOR_PTX_CLUSTER_CUH_
#define FA_TESTS_EMULATOR_PTX_CLUSTER_CUH_

#include <emulator/instructions.hpp>

#include <common/types.cuh>
#include <ptx/language.cuh>
#include <ptx/tma.cuh>

namespace fa::ptx {

FA_DEVICE int cluster_rank() {
  return emulator::cluster_rank();
}

FA_DEVICE uint32_t map_shared(uint32_t shared, int rank, const emulator::Site& site = emulator::Site::current()) {
  return emulator::map_shared(shared, rank, site);
}

FA_DEVICE uint32_t without_rank(uint32_t shared) {
  return shared & 0x00ffffff;
}

FA_DEVICE void cluster_sync(const emulator::Site& site = emulator::Site::current()) {
  emulator::cluster_sync(site);
}

FA_DEVICE void cluster_sync_relaxed(const emulator::Site& site = emulator::Site::current()) {
  emulator::cluster_sync_relaxed(site);
}

FA_DEVICE void mbarrier_arrive_remote(uint32_t cluster_barrier,
                                      const emulator::Site& site = emulator::Site::current()) {
  emulator::mbarrier_arrive_remote(cluster_barrier, site);
}

FA_DEVICE void mbarrier_arrive_expect_tx_remote(uint32_t cluster_barrier, int bytes,
                                                const emulator::Site& site = emulator::Site::current()) {
  emulator::mbarrier_arrive_expect_tx_remote(cluster_barrier, bytes, site);
}

FA_DEVICE void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity,
                                     const emulator::Site& site = emulator::Site::current()) {
  emulator::mbarrier_wait_cluster(barrier, parity, site);
}

FA_DEVICE void bulk_copy_to_cluster(uint32_t cluster_target, uint32_t source, int bytes, uint32_t cluster_barrier,
                                    const emulator::Site& site = emulator::Site::current()) {
  emulator::bulk_copy_to_cluster(cluster_target, source, bytes, cluster_barrier, site);
}

FA_DEVICE void tma_load_5d_multicast(uint32_t shared, const TensorMap& map, uint32_t barrier, uint16_t ranks, L2Policy,
                                     int c0, int c1, int c2, int c3, int c4,
                                     const emulator::Site& site = emulator::Site::current()) {
  const int at[5] = {c0, c1, c2, c3, c4};
  emulator::tma_load_multicast(shared, &map, barrier, ranks, 5, at, site);
}

FA_DEVICE kernel::Chunk ld_shared_cluster_chunk(uint32_t cluster_address,
                                                const emulator::Site& site = emulator::Site::current()) {
  kernel::Chunk value;
  emulator::load_shared_cluster(cluster_address, &value, sizeof value, "ld.shared::cluster.v4.b32", site);
  return value;
}

}  // namespace fa::ptx

#endif  // FA_TESTS_EMULATOR_PTX_CLUSTER_CUH_
