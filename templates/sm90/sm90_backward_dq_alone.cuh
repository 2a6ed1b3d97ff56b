#ifndef FA_TEMPLATES_SM90_SM90_BACKWARD_DQ_ALONE_CUH_
#define FA_TEMPLATES_SM90_SM90_BACKWARD_DQ_ALONE_CUH_

#include <common/constants.cuh>
#include <common/dropout.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <common/variant_backward.cuh>
#include <ptx/language.cuh>
#include <ptx/ldmatrix.cuh>
#include <ptx/thread.cuh>
#include <ptx/wgmma.cuh>
#include <sm90/sm90_backward_cluster.cuh>
#include <sm90/sm90_backward_products.cuh>
#include <sm90/sm90_ring.cuh>
#include <sm90/sm90_roles.cuh>
#include <sm90/sm90_shared_tile.cuh>

namespace fa::sm90 {

/// The loop of a backward of which dQ alone is wanted.
template <class Config>
struct BackwardDqAlone : BackwardProducts<Config> {
  using Base = BackwardProducts<Config>;
  using T = typename Base::T;
  using QTile = typename Base::QTile;
  using DoTile = typename Base::DoTile;
  using KTile = typename Base::KTile;
  using VTile = typename Base::VTile;
  using S = typename Base::S;
  using Operand = typename Base::Operand;
  using Drops = typename Base::Drops;
  using Dq = typename Base::Dq;
  using Job = typename Base::Job;
  using Place = typename Base::Place;
  using Base::Base;
  using Base::kTileN, Base::kConsumers, Base::kQkSteps, Base::kVSteps, Base::kDropout, Base::kKeysInRegisters,
      Base::k_shared, Base::v_shared, Base::q_shared, Base::do_shared, Base::ds_shared, Base::delta_shared,
      Base::described, Base::k_empty, Base::v_empty, Base::step_empty, Base::lane_index, Base::consumer_index,
      Base::warp_index, Base::stage_of, Base::release, Base::job, Base::again, Base::place_of, Base::advance,
      Base::rows_of, Base::await_keys, Base::await_values, Base::await_q, Base::await_dout, Base::has_rows_without_keys,
      Base::tell_infinite_keys, Base::issue_scores, Base::issue_dp, Base::issue_dq, Base::draw, Base::differentiate,
      Base::pack, Base::share, Base::hand_over_dq;

  /// The same where dQ alone is wanted. No sums take registers: the scores of a step are computed beside P and dP of
  /// the one before, and dQ is handed over, and exponentials are taken, while the next dP is computed. K and V of the
  /// warpgroup stay in registers where there is room, since the products S and dP wait for shared memory else.
  FA_DEVICE bool accumulate_dq(int round, int& count, uint32_t parity) const {
    S s;
    S weights;  // P^T
    S dp;       // dP^T, then dS^T
    Dq dq;
    [[maybe_unused]] Drops drops;
    const Job work = job(round);
    int left = work.steps.end - work.steps.begin;
    if (left <= 0) return false;
    const int first_key = work.tile.block * kTileN + consumer_index() * 64 + warp_index() * 16;  // of the warp
    Place next = place_of(work);

    await_keys(work, parity);
    await_q(count);
    this->template clear_rows_without_keys<true>(has_rows_without_keys(work, next), work, next, count);
    Keys<kQkSteps> keys;
    Keys<kVSteps> values;
    take_keys<KTile>(keys, k_shared());
    issue_scores_of(s, keys, stage_of(count));
    await_values(work, parity);
    take_keys<VTile>(values, v_shared());
    await_dout(count);
    issue_dp_of(dp, values, stage_of(count));

    ptx::wgmma_wait<1>();  // S
    ptx::wgmma_tie(s);
    tell_infinite_keys(s, round);
    take_weights(weights, s, drops, stage_of(count), again(work, round), next, first_key);
    for (; left > 1; --left) {
      const int stage = stage_of(count);
      const int buffer = count % 2;
      const int rows = rows_of(work, next);
      ++count;
      advance(next, work);
      const bool clears = has_rows_without_keys(again(work, round), next);
      await_q(count);
      this->template clear_rows_without_keys<true>(clears, again(work, round), next, count);
      ptx::wgmma_wait<0>();  // dP, before S is begun: ptxas wants to see all complete once a step
      ptx::wgmma_tie(dp);
      issue_scores_of(s, keys, stage_of(count));
      share_ds(dp, weights, delta_shared(stage), drops, buffer);
      issue_dq(dq, buffer, consumer_index());
      release(step_empty(stage));
      await_dout(count);
      issue_dp_of(dp, values, stage_of(count));
      ptx::wgmma_wait<1>();  // dQ, and the next S
      ptx::wgmma_tie(dq);
      ptx::wgmma_tie(s);
      hand_over_dq(dq, rows, consumer_index(), count);
      take_weights(weights, s, drops, stage_of(count), again(work, round), next, first_key);
    }
    const int stage = stage_of(count);
    const int buffer = count % 2;
    ++count;
    ptx::wgmma_wait<0>();  // the last dP
    ptx::wgmma_tie(dp);
    share_ds(dp, weights, delta_shared(stage), drops, buffer);
    issue_dq(dq, buffer, consumer_index());
    release(step_empty(stage));
    release(v_empty());
    ptx::wgmma_wait<0>();  // the last dQ
    ptx::wgmma_tie(dq);
    hand_over_dq(dq, rows_of(work, next), consumer_index(), count);
    release(k_empty());
    return true;
  }

  /// K or V of the warpgroup as operands, 16 columns each.
  template <int kSteps>
  using Keys = uint32_t[kSteps][4];

  template <class Tile, int kSteps>
  FA_DEVICE void take_keys(Keys<kSteps>& keys, uint32_t tile) const {
    if constexpr (kKeysInRegisters) {
      const int lane = lane_index();
      // Matrices of 8 keys by 8 columns: the first columns of keys 0, then of keys 8; then the other columns.
      const int row = 64 * consumer_index() + 16 * warp_index() + lane % 16;
      FA_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        const int chunk = 2 * (step % 4) + lane / 16;
        ptx::ldmatrix_x4(keys[step], tile + step / 4 * Tile::kSlabBytes + row * Tile::kRowBytes +
                                         kernel::kChunkBytes * (chunk ^ lane % 8));
      }
    }
  }
  template <int kFirst = 0, int kCount>
  FA_DEVICE void issue_scores_of(float (&s)[kCount], const Keys<kQkSteps>& keys, int stage) const {
    if constexpr (kKeysInRegisters) {
      issue_from_registers<QTile, kFirst>(s, keys, q_shared(stage));
    } else {
      issue_scores(s, stage, consumer_index());
    }
  }
  template <int kFirst = 0, int kCount>
  FA_DEVICE void issue_dp_of(float (&dp)[kCount], const Keys<kVSteps>& values, int stage) const {
    if constexpr (kKeysInRegisters) {
      issue_from_registers<DoTile, kFirst>(dp, values, do_shared(stage));
    } else {
      issue_dp(dp, stage, consumer_index());
    }
  }
  template <class Tile, int kFirst, int kCount, int kSteps>
  FA_DEVICE static void issue_from_registers(float (&s)[kCount], const Keys<kSteps>& keys, uint32_t rows) {
    ptx::wgmma_forget(s);
    ptx::wgmma_fence();
    FA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      ptx::Wgmma<T, 2 * kCount>::template registers<false>(s, keys[step], Tile::k_major(described(rows), kFirst, step),
                                                           step != 0);
    }
    ptx::wgmma_commit();
  }

  /// P^T and what is dropped of it, from S^T, whose registers the next product takes.
  template <int kFirst = 0, int kCount>
  FA_DEVICE void take_weights(float (&weights)[kCount], const float (&s)[kCount], Drops& drops, int stage,
                              const Job& work, const Place& place, int first_key) const {
    FA_UNROLL
    for (int i = 0; i < kCount; ++i) weights[i] = s[i];
    this->template exponentiate<kFirst>(weights, stage, work, place, first_key);
    if constexpr (kDropout) draw(drops, work, place, first_key);
  }

  /// dS, from dP^T, to all warpgroups.
  FA_DEVICE void share_ds(S& dp, const S& weights, uint32_t delta, const Drops& drops, int buffer) const {
    Operand operand;
    differentiate(dp, weights, delta, drops);
    pack(operand, dp);
    share(operand, ds_shared(buffer), consumer_index());
    ptx::fence_proxy_async();
    ptx::barrier_sync(first_of(NamedBarrier::ds), kConsumers * kWarpgroup);  // dS of all warpgroups
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_BACKWARD_DQ_ALONE_CUH_
