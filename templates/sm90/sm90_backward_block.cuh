#ifndef FA_TEMPLATES_SM90_SM90_BACKWARD_BLOCK_CUH_
#define FA_TEMPLATES_SM90_SM90_BACKWARD_BLOCK_CUH_

#include <common/backward_schedule.cuh>
#include <common/constants.cuh>
#include <common/dropout.cuh>
#include <common/sequences.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <common/variant_backward.cuh>
#include <ptx/cluster.cuh>
#include <ptx/language.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <ptx/wgmma.cuh>
#include <sm90/sm90_backward_cluster.cuh>
#include <sm90/sm90_backward_layout.cuh>
#include <sm90/sm90_backward_traits.cuh>
#include <sm90/sm90_finite_keys.cuh>
#include <sm90/sm90_shared_tile.cuh>

namespace fa::sm90 {

/// What all warps of a backward know: the parameters, places in shared memory, and the barriers of the buffers.
template <class Config>
struct BackwardBlock : BackwardTraits<Config> {
  using Base = BackwardTraits<Config>;
  using AllParams = typename Base::AllParams;
  using Params = typename Base::Params;
  using QTile = typename Base::QTile;
  using DoTile = typename Base::DoTile;
  using DsTile = typename Base::DsTile;
  using Base::kStages, Base::kConsumers, Base::kHalves, Base::kLooks, Base::kVarlen, Base::kSplitBlocks, Base::kLayout;

  const AllParams& p;
  const Params& params;
  const uint32_t shared = ptx::dynamic_shared();
  const int tiles;

  FA_DEVICE explicit BackwardBlock(const AllParams& all)
      : p(all),
        params(all.base),
        tiles(all.base.n_blocks * all.base.h_kv * (kVarlen ? 1 : all.base.b) * all.base.splits) {}

  FA_DEVICE uint32_t k_shared() const { return shared; }
  FA_DEVICE uint32_t v_shared() const { return shared + kLayout.v; }
  FA_DEVICE uint32_t q_shared(int stage) const { return shared + kLayout.q + stage * QTile::kBytes; }
  FA_DEVICE uint32_t do_shared(int stage) const { return shared + kLayout.dout + stage * DoTile::kBytes; }
  FA_DEVICE uint32_t ds_shared(int buffer) const { return shared + kLayout.ds + buffer * DsTile::kBytes; }
  FA_DEVICE uint32_t lse_shared(int stage) const { return shared + kLayout.lse + stage * kLayout.stats_bytes; }
  FA_DEVICE uint32_t delta_shared(int stage) const { return shared + kLayout.delta + stage * kLayout.stats_bytes; }
  /// As matrix descriptors have it.
  FA_DEVICE static uint32_t described(uint32_t tile) {
    if constexpr (kSplitBlocks > 1) return ptx::without_rank(tile);
    return tile;
  }
  // "Full": the copy has landed. "Empty": every warp has read the buffer.
  FA_DEVICE uint32_t k_full() const { return shared + kLayout.mbarriers; }
  FA_DEVICE uint32_t k_empty() const { return k_full() + 8; }
  FA_DEVICE uint32_t v_full() const { return k_full() + 16; }
  FA_DEVICE uint32_t v_empty() const { return k_full() + 24; }
  FA_DEVICE uint32_t q_full(int stage) const { return k_full() + 32 + 8 * stage; }
  FA_DEVICE uint32_t do_full(int stage) const { return q_full(kStages + stage); }
  FA_DEVICE uint32_t step_empty(int stage) const { return q_full(2 * kStages + stage); }  // Q and dO
  FA_DEVICE uint32_t dq_full() const { return q_full(3 * kStages); }                      // of the whole tile
  FA_DEVICE uint32_t dq_empty() const { return q_full(3 * kStages + 1); }
  FA_DEVICE uint32_t ds_full() const { return q_full(3 * kStages + 2); }  // of all warpgroups
  /// Of a consumer warp: 1 + the round of the last job whose keys were not finite. And what is to be looked at.
  FA_DEVICE uint32_t infinite_keys(int warp) const { return shared + kLayout.words + 4 * warp; }
  FA_DEVICE uint32_t to_look_at() const { return shared + kLayout.words + 60; }

  // Of a packed batch: two jobs on their way from the warp that finds them to the others.
  FA_DEVICE uint32_t job_shared(int slot) const { return shared + kLayout.work + slot * kLayout.work_bytes; }
  FA_DEVICE uint32_t job_full(int slot) const { return job_shared(2) + 8 * slot; }
  FA_DEVICE uint32_t job_empty(int slot) const { return job_full(2 + slot); }

  FA_DEVICE void init_barriers() const {
    constexpr int kReaders = 4 * kConsumers;  // warps
    ptx::mbarrier_init(k_full(), 1);
    ptx::mbarrier_init(k_empty(), kReaders + (kLooks ? 1 : 0));  // and who adds dQ
    ptx::mbarrier_init(v_full(), 1);
    ptx::mbarrier_init(v_empty(), kReaders);
    FA_UNROLL
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(q_full(i), 1);
      ptx::mbarrier_init(do_full(i), 1);
      ptx::mbarrier_init(step_empty(i), kReaders);
    }
    if constexpr (kVarlen) {
      FA_UNROLL
      for (int i = 0; i < 2; ++i) {
        ptx::mbarrier_init(job_full(i), 1);
        ptx::mbarrier_init(job_empty(i),
                           kReaders + 1 + (Config::kWriteDq ? 1 : 0));  // and who copies, to here and from here
      }
    }
    if constexpr (Config::kWriteDq) {
      ptx::mbarrier_init(dq_full(), kReaders);
      ptx::mbarrier_init(dq_empty(), 1);
      if constexpr (kHalves) ptx::mbarrier_init(ds_full(), kReaders);
    }
    ptx::fence_mbarrier_init();
  }

  // What can be had again from a special register or by a few instructions is not kept over the main loop, whose
  // accumulators take nearly all registers.
  FA_DEVICE static int lane_index() { return ptx::thread_index() % kWarpSize; }
  FA_DEVICE static int consumer_index() { return ptx::shfl(ptx::thread_index() / kWarpgroup, 0) - 1; }
  FA_DEVICE static int warp_index() { return ptx::shfl(ptx::thread_index() % kWarpgroup / kWarpSize, 0); }

  FA_DEVICE static int stage_of(int count) { return static_cast<int>(static_cast<uint32_t>(count) % kStages); }
  FA_DEVICE static uint32_t parity_of(int count) { return static_cast<uint32_t>(count) / kStages % 2; }

  /// One arrival a warp: its share of every wgmma that read the buffer is complete.
  FA_DEVICE void release(uint32_t barrier) const {
    if constexpr (!Config::kWriteDq) ptx::sync_warp();  // all lanes have read the statistics; else dS's barrier tells
    if (lane_index() == 0) ptx::mbarrier_arrive(barrier);
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_BACKWARD_BLOCK_CUH_
