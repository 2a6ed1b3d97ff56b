#ifndef FA_TEMPLATES_SM90_SM90_BACKWARD_CUH_
#define FA_TEMPLATES_SM90_SM90_BACKWARD_CUH_

#include <common/backward_schedule.cuh>
#include <common/constants.cuh>
#include <ptx/language.cuh>
#include <ptx/ldmatrix.cuh>
#include <ptx/math.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <ptx/tma.cuh>
#include <ptx/wgmma.cuh>
#include <sm90/sm90_backward_params.cuh>
#include <sm90/sm90_ring.cuh>
#include <sm90/sm90_shared_tile.cuh>
#include <sm90/sm90_transpose.cuh>

namespace fa::sm90 {

using kernel::BackwardTile;
using kernel::kWarpSize;
using kernel::QuerySteps;
using kernel::Sm90BackwardParams;

/// dK, dV and additions to dQ's accumulator, on wgmma and the copy engine. A thread block owns `kTileN` keys, a
/// warpgroup 64 of them, and walks over the query tiles that see them. Scores are computed transposed, keys down the
/// rows, so that P and dS come out in the registers that the products for dV and dK take as operands:
///   S^T = K Q^T,  dP^T = V dO^T,  dV += P^T dO,  dK += dS^T Q,  dQ += dS K.
/// dS meets in shared memory for dQ, which each warp adds to the accumulator in global memory with one bulk copy.
///
/// The tensor cores shall not wait for arithmetic: the scores of a step are computed a step ahead, so that their
/// exponentials are taken while the products for dK and dQ run, and dQ is handed over while that for dV runs.
///
/// Config is a struct of constants: Element (f16 or bf16), kHeadDimQk, kHeadDimV, kTileM, kTileN, kStages, kCausal,
/// kWriteDq, kSplit.
template <class Config>
struct Backward {
  using T = typename Config::Element;

  static constexpr int kTileM = Config::kTileM;
  static constexpr int kTileN = Config::kTileN;
  static constexpr int kHeadDimQk = Config::kHeadDimQk;
  static constexpr int kHeadDimV = Config::kHeadDimV;
  static constexpr int kStages = Config::kStages;
  static constexpr int kConsumers = kTileN / 64;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  // What the launch gives every thread, redistributed: 65,536 registers in all.
  static constexpr int kProducerRegisters = kConsumers == 1 ? 56 : kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 1 ? 256 : kConsumers == 2 ? 240 : 160;
  static constexpr int kQkSteps = kernel::ceil_div(kHeadDimQk, 16);
  static constexpr int kVSteps = kernel::ceil_div(kHeadDimV, 16);
  static constexpr int kMSteps = kTileM / 16;
  // How the warpgroups share dQ: 64 rows each, or 64 columns each.
  static constexpr bool kDqByRows = kTileM == 64 * kConsumers;
  static constexpr int kDqColumns = kDqByRows ? kHeadDimQk : 64;  // of a warpgroup
  static constexpr int kDsBuffers = Config::kWriteDq ? 2 : 0;

  static_assert(kTileN % 64 == 0 && kConsumers >= 1 && kConsumers <= 3, "64 keys a warpgroup");
  static_assert(kTileM == 64 || kDqByRows, "dQ is shared by rows or by columns");
  static_assert(kHeadDimQk % 8 == 0 && kHeadDimV % 8 == 0, "head dims are multiples of 8");

  using QTile = SwizzledTile<kTileM, kHeadDimQk>;
  using DoTile = SwizzledTile<kTileM, kHeadDimV>;
  using KTile = SwizzledTile<kTileN, kHeadDimQk>;
  using VTile = SwizzledTile<kTileN, kHeadDimV>;
  using DsTile = SwizzledTile<kTileM, kTileN>;
  static_assert(kDqByRows || KTile::kSlabs <= kConsumers, "every column of dQ has a warpgroup");

  using SGemm = ptx::Wgmma<T, kTileM>;
  using DvGemm = ptx::Wgmma<T, kHeadDimV>;
  using DkGemm = ptx::Wgmma<T, kHeadDimQk>;
  using DqGemm = ptx::Wgmma<T, kDqColumns>;
  using S = float[kTileM / 2];           // [64 keys, tile_m]
  using Operand = uint32_t[kMSteps][4];  // the same, rounded
  using Dv = float[kHeadDimV / 2];       // [64 keys, d_v]
  using Dk = float[kHeadDimQk / 2];      // [64 keys, d_qk]
  using Dq = float[kDqColumns / 2];      // [64 rows, dq_columns]

  static constexpr int kDqWarpBytes = 16 * kDqColumns * 4;
  static constexpr int kStatsBytes = kTileM * 4;

  static constexpr int kVOffset = KTile::kBytes;
  static constexpr int kQOffset = kVOffset + VTile::kBytes;
  static constexpr int kDoOffset = kQOffset + kStages * QTile::kBytes;
  static constexpr int kDsOffset = kDoOffset + kStages * DoTile::kBytes;
  static constexpr int kDqOffset = kDsOffset + kDsBuffers * DsTile::kBytes;
  static constexpr int kLseOffset = kDqOffset + (Config::kWriteDq ? 4 * kConsumers * kDqWarpBytes : 0);
  static constexpr int kDeltaOffset = kLseOffset + kStages * kStatsBytes;
  static constexpr int kBarrierOffset = kDeltaOffset + kStages * kStatsBytes;
  static constexpr int kSharedBytes = kBarrierOffset + 128;
  static_assert(8 * (4 + 3 * kStages) <= 128, "the barriers have 128 bytes");

  const Sm90BackwardParams& p;
  const kernel::BackwardParams& params;
  const uint32_t shared = ptx::dynamic_shared();
  const int tiles;

  FA_DEVICE explicit Backward(const Sm90BackwardParams& all)
      : p(all), params(all.base), tiles(all.base.n_blocks * all.base.h_kv * all.base.b * all.base.splits) {}

  FA_DEVICE uint32_t k_shared() const { return shared; }
  FA_DEVICE uint32_t v_shared() const { return shared + kVOffset; }
  FA_DEVICE uint32_t q_shared(int stage) const { return shared + kQOffset + stage * QTile::kBytes; }
  FA_DEVICE uint32_t do_shared(int stage) const { return shared + kDoOffset + stage * DoTile::kBytes; }
  FA_DEVICE uint32_t ds_shared(int buffer) const { return shared + kDsOffset + buffer * DsTile::kBytes; }
  FA_DEVICE uint32_t lse_shared(int stage) const { return shared + kLseOffset + stage * kStatsBytes; }
  FA_DEVICE uint32_t delta_shared(int stage) const { return shared + kDeltaOffset + stage * kStatsBytes; }
  // "Full": the copy has landed. "Empty": every warp has read the buffer.
  FA_DEVICE uint32_t k_full() const { return shared + kBarrierOffset; }
  FA_DEVICE uint32_t k_empty() const { return k_full() + 8; }
  FA_DEVICE uint32_t v_full() const { return k_full() + 16; }
  FA_DEVICE uint32_t v_empty() const { return k_full() + 24; }
  FA_DEVICE uint32_t q_full(int stage) const { return k_full() + 32 + 8 * stage; }
  FA_DEVICE uint32_t do_full(int stage) const { return q_full(kStages + stage); }
  FA_DEVICE uint32_t step_empty(int stage) const { return q_full(2 * kStages + stage); }  // Q and dO

  FA_DEVICE void run() {
    if (ptx::thread_index() == 0) init_barriers();
    ptx::sync_threads();  // the barriers exist for all
    const int warpgroup = ptx::shfl(ptx::thread_index() / kWarpgroup, 0);
    if (warpgroup == 0) {
      ptx::decrease_registers<kProducerRegisters>();
      if (ptx::thread_index() == 0) produce();
    } else {
      ptx::increase_registers<kConsumerRegisters>();
      consume(warpgroup - 1);
    }
  }

  FA_DEVICE void init_barriers() const {
    constexpr int kReaders = 4 * kConsumers;  // warps
    ptx::mbarrier_init(k_full(), 1);
    ptx::mbarrier_init(k_empty(), kReaders);
    ptx::mbarrier_init(v_full(), 1);
    ptx::mbarrier_init(v_empty(), kReaders);
    FA_UNROLL
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(q_full(i), 1);
      ptx::mbarrier_init(do_full(i), 1);
      ptx::mbarrier_init(step_empty(i), kReaders);
    }
    ptx::fence_mbarrier_init();
  }

  FA_DEVICE int tile_index(int round) const { return tile_of_round(round, ptx::block_index(), ptx::block_count()); }

  /// A key tile and the query tiles that see it, of every query head of its group.
  struct Job {
    BackwardTile tile;
    QuerySteps steps;
  };

  FA_DEVICE Job job(int round) const {
    Job result;
    result.tile =
        kernel::backward_tile<Config::kCausal, false>(params, tile_index(round), params.n_blocks, params.h_kv);
    result.steps = kernel::query_steps<Config::kCausal, kTileM>(params, result.tile.block * kTileN, result.tile.split);
    return result;
  }

  /// The query tile of a step, counted on from that of the job's first step.
  struct Query {
    int head;
    int m_block;

    FA_DEVICE Query(const Job& job, const kernel::BackwardParams& params) {
      const int visible = params.m_blocks - job.steps.first;
      const int in_group = job.steps.begin / visible;
      head = job.tile.head * params.group + in_group;
      m_block = job.steps.first + job.steps.begin - in_group * visible;
    }
    FA_DEVICE void advance(const Job& job, const kernel::BackwardParams& params) {
      if (++m_block == params.m_blocks) {
        m_block = job.steps.first;
        ++head;
      }
    }
  };

  /// Of a row of the statistics.
  FA_DEVICE int64_t row_index(const Job& job, const Query& query) const {
    return (static_cast<int64_t>(job.tile.batch) * params.h_q + query.head) * params.padded_rows +
           query.m_block * kTileM;
  }

  // ---- producer: one thread

  FA_DEVICE void produce() const {
    ptx::prefetch_tensor_map(p.map_q);
    ptx::prefetch_tensor_map(p.map_k);
    ptx::prefetch_tensor_map(p.map_v);
    ptx::prefetch_tensor_map(p.map_dout);
    RingSlot<kStages> slot;
    uint32_t parity = 0;
    for (int round = 0; tile_index(round) < tiles; ++round) {
      const Job work = job(round);
      if (work.steps.begin >= work.steps.end) continue;
      Query query(work, params);
      for (int step = work.steps.begin; step < work.steps.end; ++step) {
        ptx::mbarrier_wait(step_empty(slot.index), slot.parity ^ 1);  // all have read what was there
        load_q(slot.index, work, query);
        if (step == work.steps.begin) {
          ptx::mbarrier_wait(k_empty(), parity ^ 1);  // the last tile is through with it
          load_keys<KTile>(k_shared(), p.map_k, k_full(), work);
        }
        load_dout(slot.index, work, query);
        if (step == work.steps.begin) {
          ptx::mbarrier_wait(v_empty(), parity ^ 1);  // the last tile is through with it
          load_keys<VTile>(v_shared(), p.map_v, v_full(), work);
          parity ^= 1;
        }
        slot.advance();
        query.advance(work, params);
      }
    }
  }

  FA_DEVICE void load_q(int stage, const Job& work, const Query& query) const {
    ptx::mbarrier_arrive_expect_tx(q_full(stage), QTile::kBytes + kStatsBytes);
    FA_UNROLL
    for (int slab = 0; slab < QTile::kSlabs; ++slab) {
      ptx::tma_load_4d(q_shared(stage) + slab * QTile::kSlabBytes, p.map_q, q_full(stage), ptx::L2Policy::evict_last,
                       slab * kSlabColumns, query.m_block * kTileM, query.head, work.tile.batch);
    }
    ptx::bulk_load(lse_shared(stage), params.lse_log2 + row_index(work, query), kStatsBytes, q_full(stage));
  }

  FA_DEVICE void load_dout(int stage, const Job& work, const Query& query) const {
    ptx::mbarrier_arrive_expect_tx(do_full(stage), DoTile::kBytes + kStatsBytes);
    FA_UNROLL
    for (int slab = 0; slab < DoTile::kSlabs; ++slab) {
      ptx::tma_load_4d(do_shared(stage) + slab * DoTile::kSlabBytes, p.map_dout, do_full(stage),
                       ptx::L2Policy::evict_last, slab * kSlabColumns, query.m_block * kTileM, query.head,
                       work.tile.batch);
    }
    ptx::bulk_load(delta_shared(stage), params.delta + row_index(work, query), kStatsBytes, do_full(stage));
  }

  template <class Tile>
  FA_DEVICE void load_keys(uint32_t target, const kernel::TensorMap& map, uint32_t barrier, const Job& work) const {
    ptx::mbarrier_arrive_expect_tx(barrier, Tile::kBytes);
    FA_UNROLL
    for (int slab = 0; slab < Tile::kSlabs; ++slab) {
      ptx::tma_load_4d(target + slab * Tile::kSlabBytes, map, barrier, ptx::L2Policy::evict_first, slab * kSlabColumns,
                       work.tile.block * kTileN, work.tile.head, work.tile.batch);
    }
  }

  // ---- consumers: one warpgroup each

  // What can be had again from a special register or by a few instructions is not kept over the main loop, whose
  // accumulators take nearly all registers.
  FA_DEVICE static int lane_index() { return ptx::thread_index() % kWarpSize; }
  FA_DEVICE static int consumer_index() { return ptx::shfl(ptx::thread_index() / kWarpgroup, 0) - 1; }
  FA_DEVICE static int warp_index() { return ptx::shfl(ptx::thread_index() % kWarpgroup / kWarpSize, 0); }

  FA_DEVICE void consume(int consumer) const {
    int count = 0;        // steps taken
    uint32_t parity = 0;  // of the K and V barriers
    for (int round = 0; tile_index(round) < tiles; ++round) {
      Dk dk = {};
      Dv dv = {};
      if (accumulate(dk, dv, round, count, parity)) parity ^= 1;
      const Job work = job(round);
      const int lane = lane_index();
      const int first_key = work.tile.block * kTileN + consumer * 64 + warp_index() * 16;
      if constexpr (Config::kSplit) {
        store_partial(dk, work, first_key, 0, lane);
        store_partial(dv, work, first_key, kHeadDimQk, lane);
      } else {
        FA_UNROLL
        for (int i = 0; i < kHeadDimQk / 2; ++i) dk[i] *= params.scale;
        store_rows(dk, static_cast<T*>(params.dk), params.stride_dk_b, params.stride_dk_h, params.stride_dk_s, work,
                   first_key, lane);
        store_rows(dv, static_cast<T*>(params.dv), params.stride_dv_b, params.stride_dv_h, params.stride_dv_s, work,
                   first_key, lane);
      }
    }
    if constexpr (Config::kWriteDq) {
      if (lane_index() == 0) ptx::tma_wait();  // shared memory must outlive the additions
    }
  }

  /// A consumer's place in the stream of query tiles.
  struct Place {
    int m_block;
    int row_group;  // of the tile's first 16 rows, counted over b and h_q
  };

  FA_DEVICE Place place(const Job& work) const {
    const Query query(work, params);
    return {query.m_block, static_cast<int>(row_index(work, query) / kernel::kRowGroup)};
  }

  /// To the next query tile, of the same head or, from its first visible tile `first` on, of the next.
  FA_DEVICE void advance(Place& place, int first) const {
    constexpr int kGroups = kTileM / kernel::kRowGroup;
    place.row_group += kGroups;
    if (++place.m_block < params.m_blocks) return;
    place.row_group += params.padded_rows / kernel::kRowGroup - (params.m_blocks - first) * kGroups;
    place.m_block = first;
  }

  /// All query tiles of one key tile; false when there are none. `count`: steps taken so far, of all tiles.
  FA_DEVICE bool accumulate(Dk& dk, Dv& dv, int round, int& count, uint32_t parity) const {
    S s;   // S^T, then P^T
    S dp;  // dP^T, then dS^T
    Operand p_operand;
    Operand ds_operand;
    Dq dq;
    const Job work = job(round);
    int left = work.steps.end - work.steps.begin;
    if (left <= 0) return false;
    const int first = work.steps.first;
    const int first_key = work.tile.block * kTileN + consumer_index() * 64 + warp_index() * 16;  // of the warp
    Place next = place(work);

    ptx::mbarrier_wait(k_full(), parity);
    ptx::mbarrier_wait(q_full(stage_of(count)), parity_of(count));
    issue_scores(s, stage_of(count), consumer_index());
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(s);
    exponentiate(s, lse_shared(stage_of(count)), next.m_block, first_key);
    pack(p_operand, s);
    ptx::mbarrier_wait(do_full(stage_of(count)), parity_of(count));
    issue_registers<DvGemm, DoTile>(dv, p_operand, do_shared(stage_of(count)));
    ptx::mbarrier_wait(v_full(), parity);
    issue_dp(dp, stage_of(count), consumer_index());

    while (true) {
      const int stage = stage_of(count);
      const int buffer = count % 2;
      const int row_group = next.row_group;
      ++count;
      --left;
      ptx::wgmma_wait<0>();  // dP, and dV
      ptx::wgmma_tie(dp);
      ptx::wgmma_tie(dv);
      differentiate(dp, s, delta_shared(stage));
      pack(ds_operand, dp);
      if constexpr (Config::kWriteDq) {
        share(ds_operand, ds_shared(buffer), consumer_index());
        ptx::fence_proxy_async();
      }
      if (left == 0) {
        issue_registers<DkGemm, QTile>(dk, ds_operand, q_shared(stage));
        if constexpr (Config::kWriteDq) {
          ptx::barrier_sync(1, kConsumers * kWarpgroup);  // dS of all warpgroups
          issue_dq(dq, buffer, consumer_index());
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_tie(dk);
        release(v_empty());
        release(k_empty());
        release(step_empty(stage));
        if constexpr (Config::kWriteDq) {
          ptx::wgmma_tie(dq);
          add_dq(dq, row_group, consumer_index());
        }
        return true;
      }
      advance(next, first);
      ptx::mbarrier_wait(q_full(stage_of(count)), parity_of(count));
      issue_scores(s, stage_of(count), consumer_index());
      issue_registers<DkGemm, QTile>(dk, ds_operand, q_shared(stage));
      if constexpr (Config::kWriteDq) {
        ptx::barrier_sync(1, kConsumers * kWarpgroup);  // dS of all warpgroups
      }
      ptx::wgmma_wait<0>();  // dK, whose operand leaves room for dQ, and the next S
      ptx::wgmma_tie(dk);
      ptx::wgmma_tie(s);
      if constexpr (Config::kWriteDq) issue_dq(dq, buffer, consumer_index());
      exponentiate(s, lse_shared(stage_of(count)), next.m_block, first_key);
      ptx::wgmma_wait<0>();  // dK and dQ
      ptx::wgmma_tie(dk);
      if constexpr (Config::kWriteDq) ptx::wgmma_tie(dq);
      release(step_empty(stage));
      pack(p_operand, s);
      ptx::mbarrier_wait(do_full(stage_of(count)), parity_of(count));
      issue_registers<DvGemm, DoTile>(dv, p_operand, do_shared(stage_of(count)));
      if constexpr (Config::kWriteDq) add_dq(dq, row_group, consumer_index());
      if constexpr (kTileM > 64) {  // there are no registers for the operand beside dP
        ptx::wgmma_wait<0>();       // dV
        ptx::wgmma_tie(dv);
      }
      issue_dp(dp, stage_of(count), consumer_index());
    }
  }

  FA_DEVICE static int stage_of(int count) { return static_cast<int>(static_cast<uint32_t>(count) % kStages); }
  FA_DEVICE static uint32_t parity_of(int count) { return static_cast<uint32_t>(count) / kStages % 2; }

  /// One arrival a warp: its share of every wgmma that read the buffer is complete.
  FA_DEVICE void release(uint32_t barrier) const {
    if constexpr (!Config::kWriteDq) ptx::sync_warp();  // all lanes have read the statistics; else dS's barrier tells
    if (lane_index() == 0) ptx::mbarrier_arrive(barrier);
  }

  /// Starts S^T = K Q^T, [64, tile_m].
  FA_DEVICE void issue_scores(S& s, int stage, int consumer) const {
    ptx::wgmma_forget(s);
    ptx::wgmma_fence();
    FA_UNROLL
    for (int step = 0; step < kQkSteps; ++step) {
      SGemm::template shared<false>(s, KTile::k_major(k_shared(), consumer * 64, step),
                                    QTile::k_major(q_shared(stage), 0, step), step != 0);
    }
    ptx::wgmma_commit();
  }

  /// Starts dP^T = V dO^T, [64, tile_m].
  FA_DEVICE void issue_dp(S& dp, int stage, int consumer) const {
    ptx::wgmma_forget(dp);
    ptx::wgmma_fence();
    FA_UNROLL
    for (int step = 0; step < kVSteps; ++step) {
      SGemm::template shared<false>(dp, VTile::k_major(v_shared(), consumer * 64, step),
                                    DoTile::k_major(do_shared(stage), 0, step), step != 0);
    }
    ptx::wgmma_commit();
  }

  /// Starts an accumulation over the rows of a query tile: dV += P^T dO or dK += dS^T Q.
  template <class Gemm, class Tile, class Sum>
  FA_DEVICE void issue_registers(Sum& sum, const Operand& operand, uint32_t tile) const {
    ptx::wgmma_tie(sum);
    ptx::wgmma_fence();
    FA_UNROLL
    for (int step = 0; step < kMSteps; ++step) {
      Gemm::template registers<true>(sum, operand[step], Tile::mn_major(tile, step), true);
    }
    ptx::wgmma_commit();
  }

  /// Starts dQ = dS K, [64, dq_columns].
  FA_DEVICE void issue_dq(Dq& dq, int buffer, int consumer) const {
    const int row = kDqByRows ? 64 * consumer : 0;
    // A warpgroup past the last column computes one that it does not add.
    const int slab = consumer < KTile::kSlabs ? consumer : KTile::kSlabs - 1;
    const uint32_t columns = kDqByRows ? 0 : slab * KTile::kSlabBytes;
    ptx::wgmma_forget(dq);
    ptx::wgmma_fence();
    FA_UNROLL
    for (int step = 0; step < kTileN / 16; ++step) {
      DqGemm::template shared<true>(dq, DsTile::k_major(ds_shared(buffer), row, step),
                                    KTile::mn_major(k_shared() + columns, step), step != 0);
    }
    ptx::wgmma_commit();
  }

  /// P^T = exp2(scale_log2 * S^T - LSE), 0 where masked. `first_key`: the warp's first key.
  FA_DEVICE void exponentiate(S& s, uint32_t lse, int m_block, int first_key) const {
    const int lane = lane_index();
    FA_UNROLL
    for (int j = 0; j < kTileM / 8; ++j) {
      float row[2];
      ptx::ld_shared_f32x2(row, lse + 8 * (lane % 4) + 32 * j);
      FA_UNROLL
      for (int i = 0; i < 4; ++i) s[4 * j + i] = ptx::ex2(ptx::fma(s[4 * j + i], params.scale_log2, -row[i % 2]));
    }
    if (first_key + 16 > params.s_kv) {
      FA_UNROLL
      for (int i = 0; i < kTileM / 2; ++i) {
        if (first_key + lane / 4 + i / 2 % 2 * 8 >= params.s_kv) s[i] = 0.f;
      }
    }
    const int first_limit = m_block * kTileM + params.causal_shift - first_key;  // of the tile's first row
    if (Config::kCausal && first_limit < 15) {
      const int limit = first_limit + 2 * (lane % 4) - lane / 4;
      FA_UNROLL
      for (int i = 0; i < kTileM / 2; ++i) {
        if (limit + i / 4 * 8 + i % 2 < i / 2 % 2 * 8) s[i] = 0.f;
      }
    }
  }

  /// dS^T = P^T o (dP^T - delta).
  FA_DEVICE void differentiate(S& dp, const S& s, uint32_t delta) const {
    const int lane = lane_index();
    FA_UNROLL
    for (int j = 0; j < kTileM / 8; ++j) {
      float row[2];
      ptx::ld_shared_f32x2(row, delta + 8 * (lane % 4) + 32 * j);
      FA_UNROLL
      for (int i = 0; i < 4; ++i) dp[4 * j + i] = s[4 * j + i] * (dp[4 * j + i] - row[i % 2]);
    }
  }

  /// Accumulators become the A operand of the next product.
  FA_DEVICE static void pack(Operand& operand, const S& s) {
    FA_UNROLL
    for (int i = 0; i < kTileM / 4; ++i) operand[i / 4][i % 4] = ptx::convert_pair<T>(s[2 * i], s[2 * i + 1]);
  }

  /// dS, rows down again, into the warpgroup's 64 columns of the shared tile.
  FA_DEVICE void share(const Operand& ds, uint32_t tile, int consumer) const {
    const int lane = lane_index();
    // Matrices of 8 keys and 8 rows: keys 0, keys 8 of rows 0, the same of rows 8.
    const int row = lane / 16 * 8 + lane % 8;
    const int chunk = 2 * warp_index() + lane / 8 % 2;
    const uint32_t own = tile + consumer * DsTile::kSlabBytes + row * 128 + (chunk ^ lane % 8) * kernel::kChunkBytes;
    FA_UNROLL
    for (int step = 0; step < kMSteps; ++step) {
      ptx::stmatrix_x4_trans(own + step * 16 * 128, ds[step][0], ds[step][1], ds[step][2], ds[step][3]);
    }
  }

  /// Adds a warp's 16 rows of dQ to the accumulator, in the order in which they lie in registers. `row_group`: where
  /// the query tile starts.
  FA_DEVICE void add_dq(const Dq& dq, int row_group, int consumer) const {
    constexpr int kColumnGroups = kHeadDimQk / 8;
    const int column_group = kDqByRows ? 0 : 8 * consumer;
    if (column_group >= kColumnGroups) return;  // past the last column
    const int lane = lane_index();
    const int warp = warp_index();
    const uint32_t own = shared + kDqOffset + (4 * consumer + warp) * kDqWarpBytes;
    if (lane == 0) ptx::tma_wait_read();
    ptx::sync_warp();  // the last addition has left shared memory
    FA_UNROLL
    for (int j = 0; j < kDqColumns / 8; ++j) {
      ptx::st_shared_chunk(own + j * 512 + lane * 16, {{ptx::bits(dq[4 * j]), ptx::bits(dq[4 * j + 1]),
                                                        ptx::bits(dq[4 * j + 2]), ptx::bits(dq[4 * j + 3])}});
    }
    ptx::fence_proxy_async();
    ptx::sync_warp();  // the warp's rows are complete, for the copy engine too
    if (lane != 0) return;
    const int64_t fragment =
        static_cast<int64_t>(row_group + (kDqByRows ? 4 * consumer : 0) + warp) * kColumnGroups + column_group;
    const int groups = column_group + kDqColumns / 8 < kColumnGroups ? kDqColumns / 8 : kColumnGroups - column_group;
    ptx::bulk_add_f32(params.dq_accum + fragment * (kernel::kRowGroup * 8), own, groups * 512);
    ptx::tma_commit();
  }

  /// A warp's 16 keys of dK or dV: the four lanes of a quad exchange what they hold of four neighbouring n8 tiles, so
  /// that each stores 16 bytes.
  template <int kCount>
  FA_DEVICE void store_rows(const float (&sum)[kCount], T* base, int64_t stride_b, int64_t stride_h, int64_t stride_s,
                            const Job& work, int first_key, int lane) const {
    constexpr int kColumnTiles = kCount / 4;
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int key = first_key + lane / 4 + 8 * r;
      const bool inside = key < params.s_kv;
      T* const target = base + work.tile.batch * stride_b + work.tile.head * stride_h + (inside ? key : 0) * stride_s;
      FA_UNROLL
      for (int j = 0; j + 4 <= kColumnTiles; j += 4) {
        uint32_t words[4];
        FA_UNROLL
        for (int i = 0; i < 4; ++i) {
          words[i] = ptx::convert_pair<T>(sum[4 * (j + i) + 2 * r], sum[4 * (j + i) + 2 * r + 1]);
        }
        transpose_quad(words, lane);
        if (inside) {
          ptx::st_global_chunk(target + 8 * (j + lane % 4), {{words[0], words[1], words[2], words[3]}});
        }
      }
      FA_UNROLL
      for (int j = kColumnTiles / 4 * 4; j < kColumnTiles; ++j) {
        if (inside) {
          ptx::st_global(reinterpret_cast<uint32_t*>(target + 8 * j + 2 * (lane % 4)),
                         ptx::convert_pair<T>(sum[4 * j + 2 * r], sum[4 * j + 2 * r + 1]));
        }
      }
    }
  }

  /// fp32 sums over one split's query tiles, for backward_reduce: into [splits, b, h_kv, s_kv, d_qk + d_v].
  template <int kCount>
  FA_DEVICE void store_partial(const float (&sum)[kCount], const Job& work, int first_key, int first_column,
                               int lane) const {
    const int64_t batch = static_cast<int64_t>(work.tile.split) * params.b + work.tile.batch;
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int key = first_key + lane / 4 + 8 * r;
      if (key >= params.s_kv) continue;
      const int64_t row = (batch * params.h_kv + work.tile.head) * params.s_kv + key;
      float* const target = params.partial + row * (kHeadDimQk + kHeadDimV) + first_column + 2 * (lane % 4);
      FA_UNROLL
      for (int j = 0; j < kCount / 4; ++j) {
        ptx::st_global(target + 8 * j, sum[4 * j + 2 * r]);
        ptx::st_global(target + 8 * j + 1, sum[4 * j + 2 * r + 1]);
      }
    }
  }
};

template <class Config>
FA_DEVICE void backward(const Sm90BackwardParams& params) {
  Backward<Config>(params).run();
}

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_BACKWARD_CUH_
