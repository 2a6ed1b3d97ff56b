#ifndef FA_TEMPLATES_SM90_SM90_BACKWARD_CUH_
#define FA_TEMPLATES_SM90_SM90_BACKWARD_CUH_

#include <common/constants.cuh>
#include <common/dropout.cuh>
#include <common/sequences.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <common/variant_backward.cuh>
#include <ptx/cluster.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <ptx/wgmma.cuh>
#include <sm90/sm90_backward_cluster.cuh>
#include <sm90/sm90_backward_dq_alone.cuh>
#include <sm90/sm90_backward_store.cuh>
#include <sm90/sm90_ring.cuh>
#include <sm90/sm90_roles.cuh>
#include <sm90/sm90_shared_tile.cuh>

namespace fa::sm90 {

/// dK, dV and additions to dQ's accumulator, on wgmma and the copy engine. A thread block owns `kTileN` keys, a
/// warpgroup 64 of them, and walks over the query tiles that see them. Scores are computed transposed, keys down the
/// rows, so that P and dS come out in the registers that the products for dV and dK take as operands:
///   S^T = K Q^T,  dP^T = V dO^T,  dV += P^T dO,  dK += dS^T Q,  dQ += dS K.
/// dS meets in shared memory for dQ, which consumers leave there and a thread beside the producer adds to the
/// accumulator in global memory, a whole tile by one bulk copy.
///
/// The tensor cores shall not wait for arithmetic: the scores of a step are computed a step ahead, so that their
/// exponentials are taken while the products for dK and dQ run, and dQ is handed over while that for dV runs.
///
/// A function needs S and dP at once: its loop takes them together, and only the scores are computed ahead. In a packed
/// batch a warp finds the sequences ahead of the others and tells them in shared memory.
///
/// The kernel may be launched before that of the row statistics is complete, which also clears dQ's accumulator. What
/// the call was given is read ahead of it: of a dense batch the tiles of a block's first step, of a packed one its
/// keys.
///
/// With kOrderedDq the additions to dQ have one order: a key tile adds behind the one in front of it, which has left
/// its number at the query tile. The thread that adds waits for that, so that consumers see nothing of it while there
/// is a step between neighbours. Blocks with lower numbers hold lower keys and wait for none above; all start at the
/// last query tile, where causal lengths end together.
///
/// Config is a struct of constants: Element (f16 or bf16), kHeadDimQk, kHeadDimV, kTileM, kTileN, kStages, kCausal,
/// kWriteDq, kSplit; optionally kVarlen, kDropout, kOrderedDq, kWithoutDk, kWithoutDv (common/switches.cuh) and a
/// Variant (common/variant.cuh).
template <class Config>
struct Backward : BackwardDqAlone<Config> {
  using Base = BackwardDqAlone<Config>;
  using T = typename Base::T;
  using S = typename Base::S;
  using Operand = typename Base::Operand;
  using Drops = typename Base::Drops;
  using Dv = typename Base::Dv;
  using Dk = typename Base::Dk;
  using Dq = typename Base::Dq;
  using Functions = typename Base::Functions;
  using DkSums = typename Base::DkSums;
  using DvSums = typename Base::DvSums;
  using Turns = typename Base::Turns;
  using Job = typename Base::Job;
  using Place = typename Base::Place;
  using Base::Base;
  using Base::kTileM, Base::kTileN, Base::kHeadDimQk, Base::kHeadDimV, Base::kConsumers, Base::kProducerRegisters,
      Base::kConsumerRegisters, Base::kVarlen, Base::kDropout, Base::kWantsDk, Base::kWantsDv, Base::kSums,
      Base::kSplitBlocks, Base::kInTurns, Base::kFunctions, Base::kHalves, Base::kLooks, Base::kLoadAhead,
      Base::kTilesShared, Base::kTilesOffset, Base::params, Base::shared, Base::tiles, Base::q_shared, Base::do_shared,
      Base::ds_shared, Base::delta_shared, Base::k_empty, Base::v_empty, Base::step_empty, Base::dq_empty,
      Base::infinite_keys, Base::init_barriers, Base::lane_index, Base::consumer_index, Base::warp_index,
      Base::stage_of, Base::release, Base::job, Base::has_job, Base::release_job, Base::again, Base::find_jobs,
      Base::place_of, Base::advance, Base::rows_of, Base::produce, Base::add_dq, Base::look_at_dq, Base::await_keys,
      Base::await_values, Base::await_q, Base::await_dout, Base::has_rows_without_keys, Base::functions,
      Base::apply_functions, Base::tell_infinite_keys, Base::issue_scores, Base::issue_dp, Base::issue_dv,
      Base::issue_dk, Base::tie_dv, Base::tie_dk, Base::issue_dq, Base::exponentiate, Base::draw, Base::differentiate,
      Base::pack, Base::pack_weights, Base::share, Base::hand_over_dq, Base::accumulate_dq, Base::ds_full;

  FA_DEVICE void run() {
    if (ptx::thread_index() == 0) init_barriers();
    if constexpr (kLooks) {
      if (ptx::thread_index() < 4 * kConsumers) ptx::st_shared_b32(infinite_keys(ptx::thread_index()), 0);
    }
    if constexpr (kTilesShared) {
      if (ptx::thread_index() == 0) ptx::st_shared_b32(shared + kTilesOffset, static_cast<uint32_t>(tiles));
    }
    ptx::sync_threads();  // the barriers exist for all
    const int warpgroup = ptx::shfl(ptx::thread_index() / kWarpgroup, 0);
    if (warpgroup == 0) {
      ptx::decrease_registers<kProducerRegisters>();
      const int warp = ptx::shfl(ptx::thread_index() / kWarpSize, 0);
      if (warp == 0) {
        if (ptx::thread_index() == 0) produce();
      } else if (warp == 1) {
        if constexpr (kVarlen) find_jobs();
      } else if (warp == 2) {
        if constexpr (Config::kWriteDq) {
          if (kLooks || ptx::thread_index() == 2 * kWarpSize) add_dq();
        }
      } else {
        if constexpr (kLooks) look_at_dq();
      }
    } else {
      ptx::increase_registers<kConsumerRegisters>();
      consume(warpgroup - 1);
    }
  }

  // ---- consumers: one warpgroup each

  FA_DEVICE void consume(int consumer) const {
    ptx::griddepcontrol_wait();  // before anything is stored
    int count = 0;               // steps taken
    uint32_t parity = 0;         // of the K and V barriers
    for (int round = 0; has_job(round); ++round) {
      Dk dk = {};
      Dv dv = {};
      bool any;
      if constexpr (kFunctions) {
        any = accumulate_by_functions(dk, dv, round, count, parity);
      } else if constexpr (!kSums && Config::kWriteDq) {
        any = accumulate_dq(round, count, parity);
      } else if constexpr (kHalves) {
        any = accumulate_halves(dk, dv, round, count, parity);
      } else {
        any = accumulate(dk, dv, round, count, parity);
      }
      if (any) parity ^= 1;
      if constexpr (kSums) store_sums(dk, dv, round, consumer, count);
      release_job(round);
    }
  }

  FA_DEVICE void store_sums(Dk& dk, Dv& dv, int round, int consumer, [[maybe_unused]] int count) const {
    const Job work = job(round);
    const int lane = lane_index();
    const int first_key = work.tile.block * kTileN + consumer * 64 + warp_index() * 16;
    if constexpr (kDropout && kWantsDv) {
      FA_UNROLL
      for (int i = 0; i < kHeadDimV / 2; ++i) dv[i] *= params.dropout.inverse_keep;
    }
    if constexpr (kInTurns) {
      if (!add_in_turn(dk, dv, work, 4 * consumer + warp_index())) return;
    }
    if constexpr (kSplitBlocks > 1) {
      if constexpr (kLooks)
        ptx::mbarrier_wait(dq_empty(), static_cast<uint32_t>(count + 1) % 2);  // K and dS are not read
      add_up(dk, dv, work);
    } else if constexpr (Config::kSplit) {
      constexpr int kRow = kHeadDimQk + kHeadDimV;
      const int64_t batch = static_cast<int64_t>(work.tile.split) * params.b + work.tile.batch;
      float* const rows = params.partial + (batch * params.h_kv + work.tile.head) * params.s_kv * kRow;
      if constexpr (kWantsDk) store_partial<kRow>(dk, rows, first_key, params.s_kv, lane);
      if constexpr (kWantsDv) store_partial<kRow>(dv, rows + kHeadDimQk, first_key, params.s_kv, lane);
    } else {
      if constexpr (kWantsDk) {
        FA_UNROLL
        for (int i = 0; i < kHeadDimQk / 2; ++i) dk[i] *= params.scale;
        store(dk, params.dk, params.stride_dk_b, params.stride_dk_h, params.stride_dk_s, work, first_key, lane);
      }
      if constexpr (kWantsDv) {
        store(dv, params.dv, params.stride_dv_b, params.stride_dv_h, params.stride_dv_s, work, first_key, lane);
      }
    }
  }

  /// Stores dK and dV of a key tile that the blocks of this cluster share; all of its consumers. They take the place of
  /// the tiles that the block's products have read.
  FA_DEVICE void add_up(const Dk& dk, const Dv& dv, const Job& work) const {
    const DkSums dk_sums{shared};
    const DvSums dv_sums{shared + DkSums::kBytes};
    const int lane = lane_index();
    const int warp = 4 * consumer_index() + warp_index();
    ptx::barrier_sync(1, kConsumers * kWarpgroup);  // no warpgroup's products read the tiles
    if constexpr (kWantsDk) dk_sums.leave(dk, warp, lane);
    if constexpr (kWantsDv) dv_sums.leave(dv, warp, lane);
    ptx::cluster_sync();  // all sums are there
    const int first = work.tile.split * 4 * kConsumers + warp;
    if constexpr (kWantsDk) {
      dk_sums.store(rows_of_keys(params.dk, params.stride_dk_b, params.stride_dk_h, params.stride_dk_s, work),
                    params.stride_dk_s, work.first_key(), work.lengths.s_kv, params.scale, first, lane);
    }
    if constexpr (kWantsDv) {
      dv_sums.store(rows_of_keys(params.dv, params.stride_dv_b, params.stride_dv_h, params.stride_dv_s, work),
                    params.stride_dv_s, work.first_key(), work.lengths.s_kv, 1.f, first, lane);
    }
    ptx::sync_warp();
    ptx::cluster_sync();  // another block may still read sums here
  }

  /// Adds this block's dK and dV of a warp's 16 keys to those of the blocks in front of it. Whether they are whole now,
  /// and in the registers.
  FA_DEVICE bool add_in_turn(Dk& dk, Dv& dv, const Job& work, int warp) const {
    const int64_t tile = (int64_t{work.tile.batch} * params.h_kv + work.tile.head) * params.n_blocks + work.tile.block;
    const Turns turns{params.partial + tile * Turns::kFloats,
                      params.turns + (tile * (4 * kConsumers) + warp) * kernel::kTurnsPerGroup + 1, warp};
    if (work.tile.split > 0) {
      turns.await(work.tile.split);
      if constexpr (kWantsDk) turns.template load<0>(dk);
      if constexpr (kWantsDv) turns.template load<Turns::kDkTiles>(dv);
    }
    if (work.tile.split + 1 == params.splits) return true;
    if constexpr (kWantsDk) turns.template leave<0>(dk);
    if constexpr (kWantsDv) turns.template leave<Turns::kDkTiles>(dv);
    turns.pass_on(work.tile.split + 1);
    return false;
  }

  FA_DEVICE T* rows_of_keys(void* base, int64_t stride_b, int64_t stride_h, int64_t stride_s, const Job& work) const {
    return static_cast<T*>(base) + kernel::offset_of_keys<kVarlen>(work.lengths, work.tile.batch, stride_b, stride_s) +
           work.tile.head * stride_h;
  }

  template <class Sum>
  FA_DEVICE void store(const Sum& sum, void* base, int64_t stride_b, int64_t stride_h, int64_t stride_s,
                       const Job& work, int first_key, int lane) const {
    store_rows(sum, rows_of_keys(base, stride_b, stride_h, stride_s, work), stride_s, first_key, work.lengths.s_kv,
               lane);
  }

  /// All query tiles of one key tile; false when there are none. `count`: steps taken so far, of all tiles.
  FA_DEVICE bool accumulate(Dk& dk, Dv& dv, int round, int& count, uint32_t parity) const {
    S s;   // S^T, then P^T
    S dp;  // dP^T, then dS^T
    Operand p_operand;
    Operand ds_operand;
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
    issue_scores(s, stage_of(count), consumer_index());
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(s);
    tell_infinite_keys(s, round);
    exponentiate(s, stage_of(count), work, next, first_key);
    if constexpr (kDropout) draw(drops, work, next, first_key);
    pack_weights(p_operand, s, drops);
    await_dout(count);
    issue_dv(dv, p_operand, do_shared(stage_of(count)));
    await_values(work, parity);
    issue_dp(dp, stage_of(count), consumer_index());

    while (true) {
      const int stage = stage_of(count);
      const int buffer = count % 2;
      const int rows = rows_of(work, next);
      ++count;
      --left;
      ptx::wgmma_wait<0>();  // dP, and dV
      ptx::wgmma_tie(dp);
      tie_dv(dv);
      differentiate(dp, s, delta_shared(stage), drops);
      pack(ds_operand, dp);
      if constexpr (Config::kWriteDq) {
        share(ds_operand, ds_shared(buffer), consumer_index());
        ptx::fence_proxy_async();
      }
      if (left == 0) {
        issue_dk(dk, ds_operand, q_shared(stage));
        if constexpr (Config::kWriteDq) {
          ptx::barrier_sync(first_of(NamedBarrier::ds), kConsumers * kWarpgroup);  // dS of all warpgroups
          issue_dq(dq, buffer, consumer_index());
        }
        ptx::wgmma_wait<0>();
        tie_dk(dk);
        release(v_empty());
        release(k_empty());
        release(step_empty(stage));
        if constexpr (Config::kWriteDq) {
          ptx::wgmma_tie(dq);
          hand_over_dq(dq, rows, consumer_index(), count);
        }
        return true;
      }
      advance(next, work);
      const int consumer = consumer_index();
      const bool clears = has_rows_without_keys(again(work, round), next);
      await_q(count);
      this->template clear_rows_without_keys<true>(clears, again(work, round), next, count);
      issue_scores(s, stage_of(count), consumer);
      issue_dk(dk, ds_operand, q_shared(stage));
      if constexpr (Config::kWriteDq) {
        ptx::barrier_sync(first_of(NamedBarrier::ds), kConsumers * kWarpgroup);  // dS of all warpgroups
      }
      if constexpr (Config::kWriteDq) {
        ptx::wgmma_wait<0>();  // dK, whose operand leaves room for dQ, and the next S
        tie_dk(dk);
        ptx::wgmma_tie(s);
        issue_dq(dq, buffer, consumer_index());
      } else {
        ptx::wgmma_wait<kWantsDk ? 1 : 0>();  // the next S
        ptx::wgmma_tie(s);
      }
      exponentiate(s, stage_of(count), again(work, round), next, first_key);
      if constexpr (kDropout) draw(drops, again(work, round), next, first_key);
      ptx::wgmma_wait<0>();  // dK and dQ
      tie_dk(dk);
      if constexpr (Config::kWriteDq) ptx::wgmma_tie(dq);
      release(step_empty(stage));
      pack_weights(p_operand, s, drops);
      await_dout(count);
      issue_dv(dv, p_operand, do_shared(stage_of(count)));
      if constexpr (Config::kWriteDq) hand_over_dq(dq, rows, consumer_index(), count);
      if constexpr (kTileM > 64) {  // there are no registers for the operand beside dP
        ptx::wgmma_wait<0>();       // dV
        tie_dv(dv);
      }
      issue_dp(dp, stage_of(count), consumer_index());
    }
  }

  /// The same for query tiles of 128 rows, in halves of 64. S of a half is computed while dS of the one before is made
  /// of P and dP, and its exponentials are taken while dK runs. Halves leave the registers for that, and for K and V of
  /// the warpgroup, without which S and dP wait for shared memory. dS of the other warpgroup is waited for behind dV,
  /// so that one takes exponentials while the other feeds the tensor cores.
  FA_DEVICE bool accumulate_halves(Dk& dk, Dv& dv, int round, int& count, uint32_t parity) const {
    float s[32];
    float weights[32];  // P^T
    float dp[32];       // dP^T, then dS^T
    uint32_t p_operand[4][4];
    uint32_t ds_operand[4][4];
    Dq dq;
    Drops drops;
    uint32_t keys[Base::kQkSteps][4];
    uint32_t values[Base::kVSteps][4];
    const Job work = job(round);
    int left = work.steps.end - work.steps.begin;
    if (left <= 0) return false;
    const int first_key = work.tile.block * kTileN + consumer_index() * 64 + warp_index() * 16;  // of the warp
    Place next = place_of(work);

    await_keys(work, parity);
    await_q(count);
    this->template clear_rows_without_keys<true>(has_rows_without_keys(work, next), work, next, count);
    this->template take_keys<typename Base::KTile>(keys, Base::k_shared());
    this->issue_scores_of(s, keys, stage_of(count));
    await_values(work, parity);
    this->template take_keys<typename Base::VTile>(values, Base::v_shared());
    await_dout(count);
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(s);
    tell_infinite_keys(s, round);
    this->take_weights(weights, s, drops, stage_of(count), work, next, first_key);
    pack(p_operand, weights);
    issue_dv(dv, p_operand, do_shared(stage_of(count)));
    this->issue_dp_of(dp, values, stage_of(count));

    while (true) {
      const int stage = stage_of(count);
      const int buffer = count % 2;
      const int rows = rows_of(work, next);
      ptx::wgmma_wait<0>();  // dP and dV of the first half
      ptx::wgmma_tie(dp);
      tie_dv(dv);
      this->template issue_scores_of<64>(s, keys, stage);
      share_half<0>(ds_operand, dp, weights, stage, buffer);
      issue_dk(dk, ds_operand, q_shared(stage));
      ptx::wgmma_wait<1>();  // S of the second half
      ptx::wgmma_tie(s);
      this->template take_weights<64>(weights, s, drops, stage, again(work, round), next, first_key);
      pack(p_operand, weights);
      ptx::wgmma_wait<0>();  // dK of the first half
      tie_dk(dk);
      this->template issue_dv<64>(dv, p_operand, do_shared(stage));
      this->template issue_dp_of<64>(dp, values, stage);
      ++count;
      --left;
      if (left == 0) {
        ptx::wgmma_wait<0>();  // the last dP and dV
        ptx::wgmma_tie(dp);
        tie_dv(dv);
        share_half<64>(ds_operand, dp, weights, stage, buffer);
        this->template issue_dk<64>(dk, ds_operand, q_shared(stage));
        ptx::mbarrier_wait(ds_full(), static_cast<uint32_t>(buffer));  // dS of all warpgroups
        issue_dq(dq, buffer, consumer_index());
        ptx::wgmma_wait<0>();  // the last dK and dQ
        tie_dk(dk);
        release(v_empty());
        release(k_empty());
        release(step_empty(stage));
        ptx::wgmma_tie(dq);
        hand_over_dq(dq, rows, consumer_index(), count);
        return true;
      }
      advance(next, work);
      const bool clears = has_rows_without_keys(again(work, round), next);
      await_q(count);
      this->template clear_rows_without_keys<true>(clears, again(work, round), next, count);
      ptx::wgmma_wait<0>();  // dP and dV of the second half
      ptx::wgmma_tie(dp);
      tie_dv(dv);
      this->issue_scores_of(s, keys, stage_of(count));
      share_half<64>(ds_operand, dp, weights, stage, buffer);
      this->template issue_dk<64>(dk, ds_operand, q_shared(stage));
      ptx::wgmma_wait<1>();  // the next S
      ptx::wgmma_tie(s);
      this->take_weights(weights, s, drops, stage_of(count), again(work, round), next, first_key);
      pack(p_operand, weights);
      await_dout(count);
      ptx::wgmma_wait<0>();  // dK of the second half
      tie_dk(dk);
      release(step_empty(stage));
      issue_dv(dv, p_operand, do_shared(stage_of(count)));
      ptx::mbarrier_wait(ds_full(), static_cast<uint32_t>(buffer));  // dS of all warpgroups
      issue_dq(dq, buffer, consumer_index());
      ptx::wgmma_wait<1>();  // dV, whose operand leaves room for dP
      tie_dv(dv);
      this->issue_dp_of(dp, values, stage_of(count));
      ptx::wgmma_wait<1>();  // dQ of the tile
      ptx::wgmma_tie(dq);
      hand_over_dq(dq, rows, consumer_index(), count);
    }
  }

  /// dS of a half, from dP^T, to shared memory; behind the second it is told.
  template <int kFirst>
  FA_DEVICE void share_half(uint32_t (&operand)[4][4], float (&dp)[32], const float (&weights)[32], int stage,
                            int buffer) const {
    differentiate(dp, weights, delta_shared(stage) + 4 * kFirst, Drops{});
    pack(operand, dp);
    this->template share<kFirst>(operand, ds_shared(buffer), consumer_index());
    if constexpr (kFirst != 0) {
      ptx::fence_proxy_async();
      ptx::sync_warp();  // dS of the warp is there, and all lanes have read the statistics
      release(ds_full());
    }
  }

  /// The same for functions, for which S and dP are there at once: the next dP is computed while dQ is handed over.
  FA_DEVICE bool accumulate_by_functions(Dk& dk, Dv& dv, int round, int& count, uint32_t parity) const {
    S s;   // S^T, then P^T
    S dp;  // dP^T, then dS^T
    Operand p_operand;
    Operand ds_operand;
    Dq dq;
    [[maybe_unused]] typename Functions::Loaded loaded;
    const Job work = job(round);
    int left = work.steps.end - work.steps.begin;
    if (left <= 0) return false;
    Place next = place_of(work);

    await_keys(work, parity);
    await_q(count);
    issue_scores(s, stage_of(count), consumer_index());
    await_values(work, parity);
    await_dout(count);
    issue_dp(dp, stage_of(count), consumer_index());

    bool first = true;
    while (true) {
      const int stage = stage_of(count);
      if constexpr (kLoadAhead) functions(work, next, stage).load(loaded);
      const int buffer = count % 2;
      const int rows = rows_of(work, next);
      ++count;
      --left;
      ptx::wgmma_wait<0>();
      ptx::wgmma_tie(s);
      ptx::wgmma_tie(dp);
      if (first) tell_infinite_keys(s, round);
      first = false;
      this->template clear_rows_without_keys<false>(has_rows_without_keys(work, next), work, next, count - 1);
      typename Functions::CaptureGradients by_capture;
      apply_functions(s, dp, by_capture, work, next, stage, loaded);
      pack(p_operand, s);
      pack(ds_operand, dp);
      if constexpr (Config::kWriteDq) {
        share(ds_operand, ds_shared(buffer), consumer_index());
        ptx::fence_proxy_async();
      }
      issue_dv(dv, p_operand, do_shared(stage));
      issue_dk(dk, ds_operand, q_shared(stage));
      functions(work, next, stage).add(by_capture);
      if (left == 0) {
        if constexpr (Config::kWriteDq) {
          ptx::barrier_sync(first_of(NamedBarrier::ds), kConsumers * kWarpgroup);  // dS of all warpgroups
          issue_dq(dq, buffer, consumer_index());
        }
        ptx::wgmma_wait<0>();
        tie_dv(dv);
        tie_dk(dk);
        release(v_empty());
        release(k_empty());
        release(step_empty(stage));
        if constexpr (Config::kWriteDq) {
          ptx::wgmma_tie(dq);
          hand_over_dq(dq, rows, consumer_index(), count);
        }
        return true;
      }
      if constexpr (Config::kWriteDq) {
        ptx::barrier_sync(first_of(NamedBarrier::ds), kConsumers * kWarpgroup);  // dS of all warpgroups
      }
      ptx::wgmma_wait<0>();  // dV and dK, whose operands leave room for dQ and the next dP
      tie_dv(dv);
      tie_dk(dk);
      if constexpr (Config::kWriteDq) issue_dq(dq, buffer, consumer_index());
      release(step_empty(stage));
      advance(next, work);
      await_dout(count);
      issue_dp(dp, stage_of(count), consumer_index());
      if constexpr (Config::kWriteDq) {
        ptx::wgmma_wait<1>();  // dQ, whose registers S takes
        ptx::wgmma_tie(dq);
        hand_over_dq(dq, rows, consumer_index(), count);
      }
      await_q(count);
      issue_scores(s, stage_of(count), consumer_index());
    }
  }
};

template <class Config>
FA_DEVICE void backward(const AllParamsOf<Config>& params) {
  Backward<Config>(params).run();
}

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_BACKWARD_CUH_
