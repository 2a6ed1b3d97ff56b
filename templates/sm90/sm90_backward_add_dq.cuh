#ifndef FA_TEMPLATES_SM90_SM90_BACKWARD_ADD_DQ_CUH_
#define FA_TEMPLATES_SM90_SM90_BACKWARD_ADD_DQ_CUH_

#include <common/backward_schedule.cuh>
#include <common/constants.cuh>
#include <common/variant.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <ptx/tma.cuh>
#include <sm90/sm90_backward_copies.cuh>
#include <sm90/sm90_finite_keys.cuh>
#include <sm90/sm90_roles.cuh>

namespace fa::sm90 {

/// Additions to dQ's accumulator, and a look at dQ before, by warps beside the producer.
template <class Config>
struct BackwardAddDq : BackwardCopies<Config> {
  using Base = BackwardCopies<Config>;
  using T = typename Base::T;
  using Variant = typename Base::Variant;
  using DsTile = typename Base::DsTile;
  using Job = typename Base::Job;
  using Place = typename Base::Place;
  using Base::Base;
  using Base::kTileM, Base::kTileN, Base::kHeadDimQk, Base::kVarlen, Base::kOrdered, Base::kTwoSided, Base::kLists,
      Base::kConsumers, Base::kLooks, Base::kDqRowBytes, Base::kLayout, Base::params, Base::shared, Base::k_shared,
      Base::ds_shared, Base::k_empty, Base::dq_full, Base::dq_empty, Base::infinite_keys, Base::to_look_at,
      Base::job_empty, Base::lane_index, Base::stop, Base::tile_list, Base::has_job, Base::again, Base::job_for_copies,
      Base::place_of, Base::advance, Base::rows_of;

  /// Adds dQ of every step to the accumulator; with one order when it is this key tile's turn. One thread, or with
  /// kLooks its warp.
  FA_DEVICE void add_dq() const {
    ptx::griddepcontrol_wait();  // for the cleared accumulator and counters
    int count = 0;               // steps added
    for (int round = 0; has_job(round); ++round) {
      const Job work = job_for_copies(round);
      if (work.has_steps()) {
        Place at = place_of(work);
        [[maybe_unused]] bool infinite = false;  // a key has an infinity or a NaN
        [[maybe_unused]] bool first = true;
        FA_UNROLL_BY(1)
        for (int left = work.steps.end - work.steps.begin; left != 0; --left) {
          if constexpr (kOrdered) {  // beside the products
            if (adds() && at.m_block * kTileM < end_of_tile_in_front(work, round))
              ptx::await_global(turn_of(at), work.tile.block);
          }
          ptx::mbarrier_wait(dq_full(), static_cast<uint32_t>(count) % 2);
          if constexpr (kLooks) {
            ptx::sync_warp();  // before one lane adds, all have seen the phase, which the next may follow at once
            if (first) infinite = has_infinite_keys(round);
            if (infinite) have_looked_at(again(work, round), at, count);
            if (infinite ? left == 1 : first) release_keys();
            first = false;
          }
          if (adds()) add_tile(work, at);
          ++count;
          advance(at, work);
        }
      }
      if constexpr (kVarlen) {
        if constexpr (kLooks) ptx::sync_warp();  // all lanes have read the job
        if (adds()) ptx::mbarrier_arrive(job_empty(round % 2));
      }
    }
    if constexpr (kLooks) give(kNothing);
  }

  /// Whether this is the thread that adds.
  FA_DEVICE static bool adds() { return !kLooks || lane_index() == 0; }

  /// Behind the last row to which the key tile in front of this one adds, which begins no later; 0 without one.
  FA_DEVICE int end_of_tile_in_front(const Job& work, [[maybe_unused]] int round) const {
    if (work.tile.block == 0) return 0;
    if constexpr (kTwoSided) {
      return kernel::rows_end<Variant>(params, again(work, round).lengths, work.first_key() - 1);
    }
    return stop(work) * kTileM;
  }

  /// Where the last key tile that has added to a query tile has left the number of the next.
  FA_DEVICE int32_t* turn_of(const Place& at) const {
    return params.turns + int64_t{at.row_group} * kernel::kTurnsPerGroup;
  }

  FA_DEVICE void add_tile(const Job& work, const Place& at) const {
    int rows = kTileM;
    if constexpr (kVarlen) rows = kernel::minimum(kTileM, work.lengths.padded_rows - at.m_block * kTileM);
    const int64_t group = at.row_group;
    ptx::bulk_add_f32(params.dq_accum + group * (kernel::kRowGroup * kHeadDimQk), shared + kLayout.dq,
                      rows / kernel::kRowGroup * kDqRowBytes);
    ptx::tma_commit();
    ptx::tma_wait_read();
    ptx::mbarrier_arrive(dq_empty());
    if constexpr (kOrdered) {
      ptx::tma_wait();  // the sum is there for the next
      ptx::signal_global(turn_of(at), work.tile.block + 1);
    }
  }

  /// Whether a tile is known as one of which the mask function keeps all that masks in closed form leave, or with kAll
  /// all.
  template <bool kAll>
  FA_DEVICE bool is_kept(const Job& work, const Place& place) const {
    if constexpr (kLists) return place.index < ptx::ld_global_nc(tile_list(work.tile) - (kAll ? 1 : 2));
    return false;
  }

  /// Whether masks hide keys of the tile from its rows; the mask function where it is not known to keep all.
  FA_DEVICE bool hides_keys(const Job& work, const Place& place) const {
    if constexpr (Variant::kMask) {
      return !is_kept<true>(work, place);
    } else {
      return kernel::hides_any<Config::kCausal, Variant, kTileM, kTileN>(params, work.lengths, place.m_block * kTileM,
                                                                         work.first_key());
    }
  }

  // NaN and infinities of keys that masks hide from a row, of which dS is 0. Where consumers have seen that a key of
  // the job is not finite, another warp multiplies rows of dQ with an infinity or a NaN once more, without those of K.
  // To the consumers' main loop the registers of this cost 5 %, and to this warp's they are too many.

  static constexpr uint32_t kNothing = 0xffffffffu;

  FA_DEVICE bool has_infinite_keys(int round) const {
    const int lane = lane_index();
    const bool says =
        lane < 4 * kConsumers && ptx::ld_shared_b32(infinite_keys(lane)) == static_cast<uint32_t>(round + 1);
    return ptx::vote_any(says);
  }
  FA_DEVICE void release_keys() const {
    ptx::sync_warp();  // all lanes have read what consumers told
    if (lane_index() == 0) ptx::mbarrier_arrive(k_empty());
  }

  /// Where masks hide keys of the tile. `count`: steps before this one.
  FA_DEVICE void have_looked_at(const Job& work, const Place& at, int count) const {
    constexpr bool kAsks =
        !(kOrdered && Variant::kChunked);  // there are no registers for that: all tiles are looked at
    if (kAsks && !hides_keys(work, at)) return;
    give(static_cast<uint32_t>(rows_of(work, at)) * 2 + static_cast<uint32_t>(count) % 2);
    ptx::barrier_sync(first_of(NamedBarrier::dq_clean), 2 * kWarpSize);
  }
  FA_DEVICE void give(uint32_t what) const {
    if (lane_index() == 0) ptx::st_shared_b32(to_look_at(), what);
    ptx::sync_warp();
    ptx::barrier_sync(first_of(NamedBarrier::dq_given), 2 * kWarpSize);
  }

  /// The other warp.
  FA_DEVICE void look_at_dq() const {
    while (true) {
      ptx::barrier_sync(first_of(NamedBarrier::dq_given), 2 * kWarpSize);
      const uint32_t what = ptx::ld_shared_b32(to_look_at());
      if (what == kNothing) return;
      look(ds_shared(static_cast<int>(what % 2)), static_cast<int>(what / 2));
      ptx::barrier_sync(first_of(NamedBarrier::dq_clean), 2 * kWarpSize);
    }
  }

  FA_DEVICE void look(uint32_t ds, [[maybe_unused]] int rows) const {
    FA_UNROLL_BY(1)
    for (int group = 0; group < kTileM / kernel::kRowGroup; ++group) {
      if (kVarlen && kernel::kRowGroup * group >= rows) break;
      const uint32_t own = shared + kLayout.dq + group * kDqRowBytes + lane_index() * 16;
      if (ptx::vote_any(zero_of_rows(own) != 0.f)) {
        multiply_slowly_by_finite_keys<T, DsTile, kTileN, kHeadDimQk>(
            own, ds + kernel::kRowGroup * group * DsTile::kRowBytes, k_shared());
        ptx::fence_proxy_async();  // for the copy engine
      }
    }
  }

  /// 0, or NaN where this lane's part of 16 rows has an infinity or a NaN.
  FA_DEVICE static float zero_of_rows(uint32_t own) {
    float zero = 0.f;
    FA_UNROLL_BY(2)
    for (int j = 0; j < kHeadDimQk / 8; ++j) {
      const kernel::Chunk chunk = ptx::ld_shared_chunk(own + j * 512);
      FA_UNROLL
      for (int i = 0; i < 4; ++i) zero = ptx::fma(ptx::from_bits(chunk.word[i]), 0.f, zero);
    }
    return zero;
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_BACKWARD_ADD_DQ_CUH_
