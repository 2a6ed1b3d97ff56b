#ifndef FA_TEMPLATES_SM90_SM90_BACKWARD_BY_COLUMNS_CUH_
#define FA_TEMPLATES_SM90_SM90_BACKWARD_BY_COLUMNS_CUH_

#include <common/backward_schedule.cuh>
#include <common/switches.cuh>
#include <ptx/cluster.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/tma.cuh>
#include <ptx/wgmma.cuh>
#include <sm90/sm90_backward_params.cuh>
#include <sm90/sm90_backward_store.cuh>
#include <sm90/sm90_finite_keys.cuh>
#include <sm90/sm90_placed_params.cuh>
#include <sm90/sm90_roles.cuh>

namespace fa::sm90 {

/// Where in a ring of buffers the next step is.
template <int kBuffers>
struct BufferRing {
  int stage = 0;
  uint32_t parity = 0;  // of "full"; of "empty" when what this step reads has been read

  FA_DEVICE void advance() {
    if (++stage != kBuffers) return;
    stage = 0;
    parity ^= 1;
  }
};

/// What the thread blocks of a cluster have in common that share a key tile, each with columns of dK, dV and dQ: which
/// tile, P and dS, and the sums. How many blocks there are, and which scores a block computes, say the kernels:
/// BackwardPair and BackwardWide.
///
/// What all leave of dQ in shared memory a thread of warpgroup 3 adds to its accumulator. With kOrderedDq it adds
/// behind the key tile in front of its own (sm90_backward.cuh), each block its columns. While the turn has not come, dS
/// is released and the next step's dQ computed: a block gets more than a step ahead of its additions before anything
/// waits for them.
///
/// `Columns` tells a function which columns are the block's: first_qk(), qk(), first_v(), v().
template <class Config, int kBlocks>
struct BackwardByColumns {
  using T = typename Config::Element;
  using Params = kernel::BackwardParams;
  using AllParams = typename kernel::Either<kernel::Sm90PlacedBackward<Params>, kernel::Sm90BackwardParams,
                                            kernel::kPlaceInMemory<Config>>::type;

  static constexpr int kTileM = Config::kTileM;
  static constexpr int kTileN = Config::kTileN;
  static constexpr int kHeadDimQk = Config::kHeadDimQk;
  static constexpr int kHeadDimV = Config::kHeadDimV;
  static constexpr int kStages = Config::kStages;
  static constexpr int kThreads = 4 * kWarpgroup;
  static constexpr int kQkSlabs = ceil_div(kHeadDimQk, kSlabColumns);
  static constexpr int kVSlabs = ceil_div(kHeadDimV, kSlabColumns);
  static constexpr int kKeySlabs = kTileN / kSlabColumns;
  static constexpr bool kOrdered = kernel::kOrderedDq<Config>;
  static constexpr bool kWantsDk = kernel::kWantsDk<Config>;
  static constexpr bool kWantsDv = kernel::kWantsDv<Config>;
  static constexpr bool kSums = kWantsDk || kWantsDv;  // both then, of which one may not be stored
  // What the launch gives every thread, 128 registers, redistributed.
  static constexpr int kScoreRegisters = 96;
  static constexpr int kSumRegisters = 160;
  static constexpr int kDqRegisters = 96;

  static_assert(kTileM == 64 && kTileN == 128, "64 rows and 64 keys a warpgroup");
  static_assert(kHeadDimQk % 8 == 0 && kHeadDimV % 8 == 0, "head dims are multiples of 8");
  static_assert(kScoreRegisters + 2 * kSumRegisters + kDqRegisters <= 4 * 128, "65,536 registers");

  using RowSlab = SwizzledTile<kTileM, kSlabColumns>;  // of Q, dO, and of P and dS: 64 keys
  using ScoreTile = SwizzledTile<kTileM, kTileN>;      // P or dS

  static constexpr int kWarpBytes = 16 * 128;  // of a warp's rows in a slab of P or dS
  static constexpr int kDqWarpBytes = 16 * ceil_div(kQkSlabs, kBlocks) * kSlabColumns * 4;  // of a warp's rows of dQ

  // The same in all blocks, which write into each other's.
  static constexpr int kDsOffset = ScoreTile::kBytes;
  static constexpr int kDqOffset = 2 * ScoreTile::kBytes;
  static constexpr int kBarrierOffset = kDqOffset + (Config::kWriteDq ? 4 * kDqWarpBytes : 0);
  static constexpr int kKeysOffset = kBarrierOffset + 1024;  // swizzled tiles start at multiples of 1024

  const AllParams& p;
  const Params& params;
  const uint32_t shared = ptx::dynamic_shared();

  FA_DEVICE explicit BackwardByColumns(const AllParams& all) : p(all), params(all.base) {}

  FA_DEVICE uint32_t p_shared() const { return shared; }
  FA_DEVICE uint32_t ds_shared() const { return shared + kDsOffset; }

  // "Full": what was copied or stored is there. "Empty": every warp has read it. The kernels have more.
  FA_DEVICE uint32_t barrier(int index) const { return shared + kBarrierOffset + 8 * index; }
  FA_DEVICE uint32_t keys_full() const { return barrier(0); }     // K or V, for the scores
  FA_DEVICE uint32_t dq_keys_full() const { return barrier(1); }  // K of this block's columns
  FA_DEVICE uint32_t dq_full() const { return barrier(6); }       // of the block's rows and columns
  FA_DEVICE uint32_t dq_empty() const { return barrier(7); }

  /// Of a buffer of its own.
  FA_DEVICE static uint32_t parity_of_one(int count) { return static_cast<uint32_t>(count) % 2; }

  FA_DEVICE static int lane_index() { return ptx::thread_index() % kernel::kWarpSize; }
  FA_DEVICE static int warp_index() { return ptx::shfl(ptx::thread_index() % kWarpgroup / kernel::kWarpSize, 0); }

  /// What warpgroups do: of `kernel`, whose block this is.
  template <class Kernel>
  FA_DEVICE void run_roles(const Kernel& kernel) const {
    const int rank = ptx::shfl(ptx::cluster_rank(), 0);
    if (ptx::thread_index() == 0) kernel.init_barriers(rank);
    ptx::sync_warp();
    ptx::cluster_sync();  // the barriers exist for all blocks
    const int warpgroup = ptx::shfl(ptx::thread_index() / kWarpgroup, 0);
    if (warpgroup == 0) {
      ptx::decrease_registers<kScoreRegisters>();
      const Job work = job();
      if (work.count() > 0) kernel.compute_scores(work, rank);
    } else if (warpgroup == 3) {
      ptx::decrease_registers<kDqRegisters>();
      const Job work = job();
      if (work.count() > 0) kernel.copy_and_compute_dq(work, rank);
    } else if constexpr (kSums) {
      ptx::increase_registers<kSumRegisters>();
      kernel.sum(job(), rank, warpgroup - 1);
    } else {
      ptx::griddepcontrol_wait();  // every block does, be it without steps
    }
    ptx::sync_warp();
    ptx::cluster_sync();  // other blocks may still arrive at barriers here, or copy to here
  }

  /// A key tile and the query tiles that see it, of every query head of its group.
  struct Job {
    kernel::BackwardTile tile;
    kernel::QuerySteps steps;
    bool upwards;

    FA_DEVICE int first_key() const { return tile.block * kTileN; }
    FA_DEVICE int count() const { return steps.end - steps.begin; }
  };

  /// Ordered causal sections of heads alternate: in one the last keys come first, and each tile goes up from its
  /// diagonal, in the next the first keys come first, and each goes down from the last row. So those that add one
  /// behind the other are steps apart from the start, and blocks that had the short tiles get the long ones.
  FA_DEVICE Job job() const {
    const int index = ptx::block_index() / kBlocks;
    Job job;
    constexpr bool kSections = Config::kCausal || kOrdered;
    job.tile = kernel::backward_tile<kernel::NoVariant, kSections, false>(params, index, params.n_blocks, params.h_kv);
    job.upwards = !kOrdered;
    if constexpr (kOrdered && Config::kCausal) {
      job.upwards = kernel::section_of(params, index, params.n_blocks) % 2 == 0;
      if (job.upwards) job.tile.block = params.n_blocks - 1 - job.tile.block;
    }
    job.steps = kernel::query_steps<Config::kCausal, kTileM>(params, job.first_key(), job.tile.split);
    return job;
  }

  /// The query tile of a step.
  struct Query {
    int head;
    int m_block;

    FA_DEVICE Query(const Job& job, const Params& params) {
      const int step = job.upwards ? job.steps.begin : job.steps.end - 1;
      const int visible = params.m_blocks - job.steps.first;
      const int in_group = step / visible;
      head = job.tile.head * params.group + in_group;
      m_block = job.steps.first + step - in_group * visible;
    }
    FA_DEVICE void advance(const Job& job, const Params& params) {
      if (job.upwards) {
        if (++m_block != params.m_blocks) return;
        m_block = job.steps.first;
        ++head;
      } else {
        if (m_block-- != job.steps.first) return;
        m_block = params.m_blocks - 1;
        --head;
      }
    }
  };

  /// Of a row of the statistics.
  FA_DEVICE int64_t row_index(const Job& job, const Query& query) const {
    return (static_cast<int64_t>(job.tile.batch) * params.h_q + query.head) * params.padded_rows +
           query.m_block * kTileM;
  }

  /// Slabs [first, first + count) of a query tile.
  FA_DEVICE void load_rows(uint32_t target, const kernel::TensorMap& map, int first, int count, uint32_t full,
                           const Job& work, const Query& query) const {
    ptx::mbarrier_arrive_expect_tx(full, count * RowSlab::kBytes);
    FA_UNROLL
    for (int slab = 0; slab < count; ++slab) {
      ptx::tma_load_4d(target + slab * RowSlab::kBytes, map, full, ptx::L2Policy::evict_last,
                       (first + slab) * kSlabColumns, query.m_block * kTileM, query.head, work.tile.batch);
    }
  }
  /// One arrival a warp: its share of every wgmma that read the buffer is complete.
  FA_DEVICE static void release(uint32_t barrier) {
    if (lane_index() == 0) ptx::mbarrier_arrive(barrier);
  }

  /// P = exp2(scale_log2 * S - LSE), 0 where masked, of the keys from `first_key` on. `lse`: of this thread's two rows.
  template <int kCount>
  FA_DEVICE void exponentiate(float (&s)[kCount], const float (&lse)[2], int first_key, int m_block) const {
    FA_UNROLL
    for (int i = 0; i < kCount; ++i) s[i] = ptx::ex2(ptx::fma(s[i], params.scale_log2, -lse[i / 2 % 2]));
    const int lane = lane_index();
    // Behind it only rows would see a key that are not there.
    const int key_end = kernel::keys_end<Config::kCausal, kernel::NoVariant>(params, params, params.s_q - 1);
    if (first_key + 2 * kCount > key_end) {
      const int keys = key_end - first_key - 2 * (lane % 4);  // from this thread's first on
      FA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        if (i / 4 * 8 + i % 2 >= keys) s[i] = 0.f;
      }
    }
    const int first_limit = m_block * kTileM + params.causal_shift - first_key;  // of the tile's first row
    if (Config::kCausal && first_limit < 2 * kCount - 1) {
      const int limit = first_limit + 16 * warp_index() + lane / 4 - 2 * (lane % 4);
      FA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        if (i / 4 * 8 + i % 2 > limit + i / 2 % 2 * 8) s[i] = 0.f;
      }
    }
  }

  /// Of a query tile those at its start that keep no key: what they hold may be infinite or NaN, and is not multiplied,
  /// be it by 0.
  FA_DEVICE int rows_without_keys(int m_block) const {
    return kernel::keeping_begin<Config::kCausal, kernel::NoVariant>(params, params) - m_block * kTileM;
  }
  template <int kCount>
  FA_DEVICE static void clear_first_rows(float (&scores)[kCount], int rows) {
    const int row = 16 * warp_index() + lane_index() / 4;
    FA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if (row + i / 2 % 2 * 8 < rows) scores[i] = 0.f;
    }
  }

  /// dS = P o (dP - delta), from the difference.
  template <int kCount>
  FA_DEVICE static void multiply_by_p(float (&ds)[kCount], uint32_t p_tile) {
    const int lane = lane_index();
    const uint32_t tile = p_tile + warp_index() * kWarpBytes;
    FA_UNROLL
    for (int step = 0; step < kCount / 8; ++step) {
      uint32_t weights[4];
      ptx::ldmatrix_x4(weights, matrix_row(tile, lane, step));
      FA_UNROLL
      for (int i = 0; i < 4; ++i) {
        float weight[2];
        kernel::unpack<T>(weight, weights[i]);
        ds[8 * step + 2 * i] *= weight[0];
        ds[8 * step + 2 * i + 1] *= weight[1];
      }
    }
  }

  /// The row whose address this lane gives for the four matrices of 16 rows by 16 keys from 16 * step on: rows 0 and 8
  /// of the first eight keys, then of the others.
  FA_DEVICE static uint32_t matrix_row(uint32_t tile, int lane, int step) {
    const int row = lane / 8 % 2 * 8 + lane % 8;
    const int chunk = 2 * (step % 4) + lane / 16;
    return tile + step / 4 * RowSlab::kBytes + row * 128 + (chunk ^ lane % 8) * kernel::kChunkBytes;
  }

  /// Stores a warp's 16 rows of P or dS, rounded, from `tile` on.
  template <int kCount>
  FA_DEVICE static void store_scores(const float (&scores)[kCount], uint32_t tile) {
    const int lane = lane_index();
    FA_UNROLL
    for (int step = 0; step < kCount / 8; ++step) {
      const float* const s = scores + 8 * step;
      ptx::stmatrix_x4(matrix_row(tile, lane, step), ptx::convert_pair<T>(s[0], s[1]), ptx::convert_pair<T>(s[2], s[3]),
                       ptx::convert_pair<T>(s[4], s[5]), ptx::convert_pair<T>(s[6], s[7]));
    }
    ptx::fence_proxy_async();
    ptx::sync_warp();  // the rows are complete, for the tensor cores and the copy engine too
  }

  /// Of so many slabs, by warpgroups 1 and 2.
  FA_DEVICE static void clear_first_rows(uint32_t slabs, int count, int rows) {
    FA_UNROLL
    for (int slab = 0; slab < count; ++slab) {
      FA_UNROLL_BY(1)
      for (int i = ptx::thread_index() - kWarpgroup; i < rows * (RowSlab::kRowBytes / kernel::kChunkBytes);
           i += 2 * kWarpgroup) {
        ptx::st_shared_chunk(slabs + slab * RowSlab::kBytes + i * kernel::kChunkBytes, {});
      }
    }
  }

  /// P or dS: stored here, or copied to here by another block.
  FA_DEVICE static void await_shared(uint32_t full, int count) {
    ptx::mbarrier_wait_cluster(full, parity_of_one(count));
  }

  /// Starts dV += P^T dO or dK += dS^T Q, [64 keys, columns].
  template <int kCount>
  FA_DEVICE static void issue_sum(float (&sum)[kCount], uint32_t scores, uint32_t rows) {
    using Gemm = ptx::Wgmma<T, 2 * kCount>;
    using Tile = SwizzledTile<kTileM, 2 * kCount>;
    scores = ptx::without_rank(scores);
    rows = ptx::without_rank(rows);
    ptx::wgmma_tie(sum);
    ptx::wgmma_fence();
    FA_UNROLL
    for (int step = 0; step < kTileM / 16; ++step) {
      Gemm::template shared<true, true>(sum, RowSlab::mn_major(scores, step), Tile::mn_major(rows, step), true);
    }
    ptx::wgmma_commit();
  }

  /// dK and dV of 64 keys.
  template <class Dk, class Dv, class Columns>
  FA_DEVICE void store(Dk& dk, const Dv& dv, const Job& work, int part, const Columns& columns) const {
    const int lane = lane_index();
    const int first_key = work.first_key() + 64 * part + 16 * warp_index();
    if constexpr (Config::kSplit) {
      constexpr int kRow = kHeadDimQk + kHeadDimV;
      const int64_t batch = static_cast<int64_t>(work.tile.split) * params.b + work.tile.batch;
      float* const rows = params.partial + (batch * params.h_kv + work.tile.head) * params.s_kv * kRow;
      if constexpr (kWantsDk)
        store_partial<kRow>(dk, rows + columns.first_qk(), first_key, params.s_kv, lane, columns.qk());
      if constexpr (kWantsDv) {
        store_partial<kRow>(dv, rows + kHeadDimQk + columns.first_v(), first_key, params.s_kv, lane, columns.v());
      }
    } else {
      if constexpr (kWantsDk) {
        FA_UNROLL
        for (float& sum : dk) sum *= params.scale;
        store_rows(dk,
                   static_cast<T*>(params.dk) + work.tile.batch * params.stride_dk_b +
                       work.tile.head * params.stride_dk_h + columns.first_qk(),
                   params.stride_dk_s, first_key, params.s_kv, lane, columns.qk());
      }
      if constexpr (kWantsDv) {
        store_rows(dv,
                   static_cast<T*>(params.dv) + work.tile.batch * params.stride_dv_b +
                       work.tile.head * params.stride_dv_h + columns.first_v(),
                   params.stride_dv_s, first_key, params.s_kv, lane, columns.v());
      }
    }
  }

  /// Whether the mask hides keys of the tile from rows of a query tile.
  FA_DEVICE bool hides_keys(const Job& work, int m_block) const {
    return kernel::hides_any<Config::kCausal, kernel::NoVariant, kTileM, kTileN>(params, params, m_block * kTileM,
                                                                                 work.first_key());
  }

  /// Starts dQ = dS K, [64, columns of this block], of which K is at `keys`.
  template <int kCount>
  FA_DEVICE void issue_dq(float (&dq)[kCount], uint32_t keys) const {
    using DqGemm = ptx::Wgmma<T, 2 * kCount>;
    using DqKeys = SwizzledTile<kTileN, 2 * kCount>;
    ptx::wgmma_forget(dq);
    ptx::wgmma_fence();
    FA_UNROLL
    for (int step = 0; step < kTileN / 16; ++step) {
      DqGemm::template shared<true>(dq, ScoreTile::k_major(ptx::without_rank(ds_shared()), 0, step),
                                    DqKeys::mn_major(ptx::without_rank(keys), step), step != 0);
    }
    ptx::wgmma_commit();
  }

  // ---- dQ: by warpgroup 3

  /// Leaves a warp's 16 rows of dQ, in the order in which they lie in registers, for the thread that adds them:
  /// where this lane's first four elements are.
  template <int kCount>
  FA_DEVICE uint32_t stage_dq(const float (&dq)[kCount], int count) const {
    const uint32_t own = shared + kDqOffset + warp_index() * kDqWarpBytes + lane_index() * 16;
    ptx::mbarrier_wait(dq_empty(), parity_of_one(count));  // the last step's has left
    FA_UNROLL
    for (int j = 0; j < kCount / 4; ++j) {
      ptx::st_shared_chunk(own + j * 512, {{ptx::bits(dq[4 * j]), ptx::bits(dq[4 * j + 1]), ptx::bits(dq[4 * j + 2]),
                                            ptx::bits(dq[4 * j + 3])}});
    }
    return own;
  }
  /// The warp's are there.
  FA_DEVICE void hand_over_dq() const {
    ptx::fence_proxy_async();
    ptx::sync_warp();  // the warp's rows are complete, for the copy engine too
    if (lane_index() == 0) ptx::mbarrier_arrive(dq_full());
  }

  /// That of the step whose dQ is staged in shared memory.
  struct Addition {
    enum class State { told, staged, added };

    int rank;  // of the block, and its columns
    int first_column;
    int columns;
    State state = State::told;  // with kOrdered: the next key tile knows of it, or there is none
    int group = 0;              // the first group of rows, counted over b and h_q
    int in_front = 0;           // the place in the order of the key tile that adds before
  };

  /// dQ = dS K of a step, once dS is there, by so many barriers from `full` on; `give_back` does that. True where
  /// NaN of hidden keys has reached dQ: `leave_dq` computes it again then, and gives dS back.
  template <int kCount, class GiveBack>
  FA_DEVICE bool compute_dq(float (&dq)[kCount], uint32_t keys, uint32_t full, int halves, Addition& addition,
                            const Job& work, const Query& query, int count, GiveBack give_back) const {
    const bool adds = is_adder();
    if constexpr (kOrdered) {
      if (adds) add_until(full + 8 * (halves - 1), addition, work, count);
      ptx::sync_warp();  // one lane added
    }
    FA_UNROLL
    for (int half = 0; half < halves; ++half) await_shared(full + 8 * half, count);
    issue_dq(dq, keys);
    if constexpr (kOrdered) {
      if (adds) go_on(addition, work);
      ptx::sync_warp();  // one lane added
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(dq);
    bool again = false;
    if constexpr (Config::kCausal) again = hides_keys(work, query.m_block) && kernel::any_infinite(dq);
    if (!again) give_back();
    return again;
  }

  /// For the thread that adds it.
  template <int kCount, class GiveBack>
  FA_DEVICE void leave_dq(const float (&dq)[kCount], bool again, uint32_t keys, Addition& addition, const Job& work,
                          const Query& query, int count, GiveBack give_back) const {
    const bool adds = is_adder();
    if (adds) make_room(addition);
    ptx::sync_warp();  // one lane added
    [[maybe_unused]] const uint32_t own = stage_dq(dq, count);
    if constexpr (Config::kCausal) {
      if (again) {
        multiply_by_finite_keys<T, ScoreTile, kTileN>(own, kCount / 4, ds_shared(), 16 * warp_index(), keys,
                                                      lane_index());
        give_back();
      }
    }
    hand_over_dq();
    if (adds) take_over(addition, work, query, count);
    ptx::sync_warp();  // one lane added
  }

  /// The thread that adds.
  FA_DEVICE static bool is_adder() { return ptx::thread_index() == 3 * kWarpgroup + kernel::kWarpSize; }

  /// Where dQ is ordered: what can be done of the addition until dS is there.
  FA_DEVICE void add_until(uint32_t ds_full, Addition& addition, const Job& work, int count) const {
    while (addition.state != Addition::State::told && !ptx::mbarrier_test(ds_full, parity_of_one(count))) {
      go_on(addition, work);
    }
  }

  /// One thing of it, if its turn has come.
  FA_DEVICE void go_on(Addition& addition, const Job& work) const {
    if (addition.state == Addition::State::added) {
      signal_next(addition, work);
    } else if (addition.state == Addition::State::staged && ptx::test_global(turn_of(addition), addition.in_front)) {
      add(addition);
    }
  }

  /// The next step's dQ may be staged.
  FA_DEVICE void make_room(Addition& addition) const {
    if constexpr (kOrdered) await_previous(addition);
    ptx::tma_wait_read();
    ptx::mbarrier_arrive(dq_empty());
  }

  /// It has been staged.
  FA_DEVICE void take_over(Addition& addition, const Job& work, const Query& query, int count) const {
    if constexpr (kOrdered) {
      if (addition.state == Addition::State::added) signal_next(addition, work);
      addition.in_front = follows(work, query) ? place_in_order(work) - 1 : 0;
    }
    addition.group = first_row_group(work, query);
    ptx::mbarrier_wait(dq_full(), parity_of_one(count));
    if constexpr (kOrdered) {
      addition.state = Addition::State::staged;
    } else {
      add(addition);
    }
  }

  FA_DEVICE void finish(Addition& addition, const Job& work) const {
    if constexpr (kOrdered) {
      await_previous(addition);
      if (addition.state == Addition::State::added) signal_next(addition, work);
    }
    ptx::tma_wait();  // shared memory must outlive the additions
  }

  FA_DEVICE void await_previous(Addition& addition) const {
    if (addition.state != Addition::State::staged) return;
    ptx::await_global(turn_of(addition), addition.in_front);
    add(addition);
  }

  /// The next key tile may follow.
  FA_DEVICE void signal_next(Addition& addition, const Job& work) const {
    ptx::tma_wait();  // the sum is there for it
    ptx::signal_global(turn_of(addition), place_in_order(work));
    addition.state = Addition::State::told;
  }

  FA_DEVICE void add(Addition& addition) const {
    addition.state = Addition::State::added;
    const int bytes = addition.columns / 8 * 512;
    if (bytes == 0) return;
    FA_UNROLL
    for (int i = 0; i < kTileM / kernel::kRowGroup; ++i) {
      const int64_t fragment = int64_t{addition.group + i} * (kHeadDimQk / 8) + addition.first_column / 8;
      ptx::bulk_add_f32(params.dq_accum + fragment * (kernel::kRowGroup * 8), shared + kDqOffset + i * kDqWarpBytes,
                        bytes);
    }
    ptx::tma_commit();
  }

  /// Of the query tile and this block's columns.
  FA_DEVICE int32_t* turn_of(const Addition& addition) const {
    return params.turns + int64_t{addition.group} * kernel::kTurnsPerGroup + addition.rank;
  }

  FA_DEVICE int first_row_group(const Job& work, const Query& query) const {
    return (work.tile.batch * params.h_q + query.head) * (params.padded_rows / kernel::kRowGroup) +
           query.m_block * (kTileM / kernel::kRowGroup);
  }

  /// Whether the key tile in front of this one adds to the same query tile.
  FA_DEVICE bool follows(const Job& work, const Query& query) const {
    if (!work.upwards) return work.tile.block > 0;
    const int key = work.first_key() + kTileN;  // of that tile
    return key < params.s_kv && (query.m_block + 1) * kTileM + params.causal_shift > key;
  }

  /// Of a key tile in the order of additions, from 1 on.
  FA_DEVICE int place_in_order(const Job& work) const {
    return work.upwards ? params.n_blocks - work.tile.block : work.tile.block + 1;
  }
};

/// The names that a kernel takes from its base.
#define FA_BY_COLUMNS(blocks)                                                                                        \
  using Base = BackwardByColumns<Config, blocks>;                                                                    \
  using typename Base::Addition, typename Base::Job, typename Base::Query, typename Base::RowSlab, typename Base::T; \
  using Base::Base, Base::await_shared, Base::barrier, Base::clear_first_rows, Base::compute_dq, Base::dq_empty,     \
      Base::dq_full, Base::dq_keys_full, Base::ds_shared, Base::exponentiate, Base::finish, Base::is_adder,          \
      Base::issue_sum, Base::kBarrierOffset, Base::kHeadDimQk, Base::kHeadDimV, Base::kKeySlabs, Base::kKeysOffset,  \
      Base::kOrdered, Base::kQkSlabs, Base::kStages, Base::kSums, Base::kTileM, Base::kTileN, Base::kVSlabs,         \
      Base::kWarpBytes, Base::keys_full, Base::lane_index, Base::leave_dq, Base::load_rows, Base::multiply_by_p,     \
      Base::p, Base::p_shared, Base::params, Base::parity_of_one, Base::release, Base::row_index,                    \
      Base::rows_without_keys, Base::shared, Base::store, Base::store_scores, Base::warp_index

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_BACKWARD_BY_COLUMNS_CUH_
