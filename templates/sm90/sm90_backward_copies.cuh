#ifndef FA_TEMPLATES_SM90_SM90_BACKWARD_COPIES_CUH_
#define FA_TEMPLATES_SM90_SM90_BACKWARD_COPIES_CUH_

#include <common/backward_schedule.cuh>
#include <common/dropout.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <common/variant_backward.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/language.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/memory.cuh>
#include <ptx/tma.cuh>
#include <ptx/wgmma.cuh>
#include <sm90/sm90_backward_cluster.cuh>
#include <sm90/sm90_backward_jobs.cuh>
#include <sm90/sm90_ring.cuh>
#include <sm90/sm90_shared_tile.cuh>

namespace fa::sm90 {

/// Copies to shared memory, by a thread beside the consumers.
template <class Config>
struct BackwardCopies : BackwardJobs<Config> {
  using Base = BackwardJobs<Config>;
  using QTile = typename Base::QTile;
  using DoTile = typename Base::DoTile;
  using KTile = typename Base::KTile;
  using VTile = typename Base::VTile;
  using Job = typename Base::Job;
  using Query = typename Base::Query;
  using Base::Base;
  using Base::kTileM, Base::kTileN, Base::kVarlen, Base::kOrdered, Base::kLayout, Base::p, Base::params, Base::k_shared,
      Base::v_shared, Base::q_shared, Base::do_shared, Base::lse_shared, Base::delta_shared, Base::k_full,
      Base::k_empty, Base::v_full, Base::v_empty, Base::q_full, Base::do_full, Base::step_empty, Base::job_empty,
      Base::stage_of, Base::parity_of, Base::stop, Base::located, Base::row_index, Base::has_job, Base::job_for_copies,
      Base::advance;

  // ---- producer: one thread

  FA_DEVICE void produce() const {
    ptx::prefetch_tensor_map(p.map_q);
    ptx::prefetch_tensor_map(p.map_k);
    ptx::prefetch_tensor_map(p.map_v);
    ptx::prefetch_tensor_map(p.map_dout);
    int count = 0;        // steps loaded
    uint32_t parity = 0;  // of the K and V barriers
    for (int round = 0; has_job(round); ++round) {
      const Job work = job_for_copies(round);
      if constexpr (kVarlen) {
        if (work.has_steps()) load_again(work, round, count, parity);
        ptx::mbarrier_arrive(job_empty(round % 2));
      } else if constexpr (kOrdered) {
        if (work.has_steps()) load_backwards(work, count, parity);
      } else {
        if (work.has_steps()) load(work, count, parity);
      }
    }
    ptx::griddepcontrol_launch_dependents();  // few steps are left: those in flight
  }

  /// The query tiles of all steps of a job, and its keys beside the first.
  FA_DEVICE void load(const Job& work, int& count, uint32_t& parity) const {
    Query query(work, stop(work), params.group);
    int step = work.steps.begin;
    if (count == 0) {
      load_first(work, located(work, query), parity);
      ++count;
      ++step;
      query.advance(work, stop(work));
    }
    for (; step < work.steps.end; ++step) {
      const Query at = located(work, query);
      const int stage = stage_of(count);
      ptx::mbarrier_wait(step_empty(stage), parity_of(count) ^ 1);  // all have read what was there
      load_q(stage, work, at);
      load_lse(stage, work, at);
      if (step == work.steps.begin) load_k(work, parity);
      load_dout(stage, work, at);
      load_delta(stage, work, at);
      if (step == work.steps.begin) load_v(work, parity);
      ++count;
      query.advance(work, stop(work));
    }
    parity ^= 1;
  }

  /// The same from the last query tile on, by a loop that keeps less.
  FA_DEVICE void load_backwards(const Job& work, int& count, uint32_t& parity) const {
    Query query(work, stop(work), params.group);
    bool first = true;
    FA_UNROLL_BY(1)
    for (int left = work.steps.end - work.steps.begin; left != 0; --left) {
      const int stage = stage_of(count);
      ptx::mbarrier_wait(step_empty(stage), parity_of(count) ^ 1);  // all have read what was there
      load_q(stage, work, query);
      if (first) load_k(work, parity);
      load_dout(stage, work, query);
      if (first) load_v(work, parity);
      if (count == 0) ptx::griddepcontrol_wait();  // for the row statistics
      load_lse(stage, work, query);
      load_delta(stage, work, query);
      first = false;
      ++count;
      query.advance(work, stop(work));
    }
    parity ^= 1;
  }

  /// A block's first step and keys: all but the row statistics without a wait for these.
  FA_DEVICE void load_first(const Job& work, const Query& at, uint32_t parity) const {
    load_q(0, work, at);
    load_k(work, parity);
    load_dout(0, work, at);
    load_v(work, parity);
    ptx::griddepcontrol_wait();
    load_lse(0, work, at);
    load_delta(0, work, at);
  }

  /// The same for a thread that has too few registers to keep the job.
  FA_DEVICE void load_again(const Job& work, int round, int& count, uint32_t& parity) const {
    load_k(work, parity);
    load_v(work, parity);
    if (count == 0) ptx::griddepcontrol_wait();  // for the row statistics
    parity ^= 1;
    Query query(work, stop(work), params.group);
    FA_UNROLL_BY(1)
    for (int left = work.steps.end - work.steps.begin; left != 0; --left) {
      const int stage = stage_of(count);
      ptx::mbarrier_wait(step_empty(stage), parity_of(count) ^ 1);  // all have read what was there
      const Job now = job_for_copies(round);
      load_rows<QTile>(q_shared(stage), p.map_q, lse_shared(stage), params.lse_log2, q_full(stage), now, query);
      load_rows<DoTile>(do_shared(stage), p.map_dout, delta_shared(stage), params.delta, do_full(stage), now, query);
      ++count;
      query.advance(now, stop(now));
    }
  }

  FA_DEVICE void load_k(const Job& work, uint32_t parity) const {
    ptx::mbarrier_wait(k_empty(), parity ^ 1);  // the last tile is through with it
    load_keys<KTile>(k_shared(), p.map_k, k_full(), work);
  }
  FA_DEVICE void load_v(const Job& work, uint32_t parity) const {
    ptx::mbarrier_wait(v_empty(), parity ^ 1);  // the last tile is through with it
    load_keys<VTile>(v_shared(), p.map_v, v_full(), work);
  }

  FA_DEVICE void load_q(int stage, const Job& work, const Query& query) const {
    ptx::mbarrier_arrive_expect_tx(q_full(stage), QTile::kBytes + kLayout.stats_bytes);
    FA_UNROLL
    for (int slab = 0; slab < QTile::kSlabs; ++slab) {
      ptx::tma_load_4d(q_shared(stage) + slab * QTile::kSlabBytes, p.map_q, q_full(stage), ptx::L2Policy::evict_last,
                       slab * kSlabColumns, query.m_block * kTileM, query.head, work.tile.batch);
    }
  }
  FA_DEVICE void load_lse(int stage, const Job& work, const Query& query) const {
    ptx::bulk_load(lse_shared(stage), params.lse_log2 + row_index(work, query), kLayout.stats_bytes, q_full(stage));
  }

  FA_DEVICE void load_dout(int stage, const Job& work, const Query& query) const {
    ptx::mbarrier_arrive_expect_tx(do_full(stage), DoTile::kBytes + kLayout.stats_bytes);
    FA_UNROLL
    for (int slab = 0; slab < DoTile::kSlabs; ++slab) {
      ptx::tma_load_4d(do_shared(stage) + slab * DoTile::kSlabBytes, p.map_dout, do_full(stage),
                       ptx::L2Policy::evict_last, slab * kSlabColumns, query.m_block * kTileM, query.head,
                       work.tile.batch);
    }
  }
  FA_DEVICE void load_delta(int stage, const Job& work, const Query& query) const {
    ptx::bulk_load(delta_shared(stage), params.delta + row_index(work, query), kLayout.stats_bytes, do_full(stage));
  }

  /// The same of a packed batch: a tile of Q or dO, and the row statistics that the sequence has.
  template <class Tile>
  FA_DEVICE void load_rows(uint32_t target, const kernel::TensorMap& map, uint32_t stats_target, const float* stats,
                           uint32_t barrier, const Job& work, const Query& query) const {
    const int bytes = 4 * kernel::minimum(kTileM, work.lengths.padded_rows - query.m_block * kTileM);
    ptx::mbarrier_arrive_expect_tx(barrier, Tile::kBytes + bytes);
    FA_UNROLL
    for (int slab = 0; slab < Tile::kSlabs; ++slab) {
      ptx::tma_load_4d(target + slab * Tile::kSlabBytes, map, barrier, ptx::L2Policy::evict_last, slab * kSlabColumns,
                       work.lengths.first_row + query.m_block * kTileM, query.head, 0);
    }
    ptx::bulk_load(stats_target, stats + row_index(work, query), bytes, barrier);
  }

  template <class Tile>
  FA_DEVICE void load_keys(uint32_t target, const kernel::TensorMap& map, uint32_t barrier, const Job& work) const {
    ptx::mbarrier_arrive_expect_tx(barrier, Tile::kBytes);
    FA_UNROLL
    for (int slab = 0; slab < Tile::kSlabs; ++slab) {
      if constexpr (kVarlen) {
        ptx::tma_load_4d(target + slab * Tile::kSlabBytes, map, barrier, ptx::L2Policy::evict_first,
                         slab * kSlabColumns, work.lengths.first_key + work.first_key(), work.tile.head, 0);
      } else {
        ptx::tma_load_4d(target + slab * Tile::kSlabBytes, map, barrier, ptx::L2Policy::evict_first,
                         slab * kSlabColumns, work.tile.block * kTileN, work.tile.head, work.tile.batch);
      }
    }
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_BACKWARD_COPIES_CUH_
