#ifndef FA_TEMPLATES_SM90_SM90_BACKWARD_PAIR_CUH_
#define FA_TEMPLATES_SM90_SM90_BACKWARD_PAIR_CUH_

#include <common/backward_schedule.cuh>
#include <common/constants.cuh>
#include <common/elements.cuh>
#include <common/switches.cuh>
#include <ptx/cluster.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/language.cuh>
#include <ptx/ldmatrix.cuh>
#include <ptx/math.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <ptx/tma.cuh>
#include <ptx/wgmma.cuh>
#include <sm90/sm90_backward_params.cuh>
#include <sm90/sm90_backward_store.cuh>
#include <sm90/sm90_finite_keys.cuh>
#include <sm90/sm90_placed_params.cuh>
#include <sm90/sm90_ring.cuh>
#include <sm90/sm90_roles.cuh>
#include <sm90/sm90_shared_tile.cuh>

namespace fa::sm90 {

/// dK, dV and additions to dQ's accumulator for head dims above 128, by two thread blocks of a cluster. Sums of 128
/// keys fill the registers of two multiprocessors, so each block has half of the columns of dK, dV and dQ. What all
/// columns are needed for is done once: block 0 has K whole and computes P, block 1 has V whole and computes dS from
/// dP, and the copy engines exchange the two:
///   block 0:  S = Q K^T,   P = exp2(scale_log2 * S - LSE)  ->  block 1
///   block 1:  dP = dO V^T,  dS = P o (dP - delta)          ->  block 0
///   both:     dV += P^T dO,  dK += dS^T Q,  dQ = dS K, of their columns.
///
/// The warpgroups of a block have one task each and meet at barriers in shared memory only, so that the tensor cores go
/// on with the sums of one step while others take the exponentials of the next: warpgroup 0 computes P or dS, 1 and 2
/// the sums of 64 keys each, 3 dQ. The first thread of 3 starts the copies of what several tasks read; a thread of its
/// second warp adds what all leave in shared memory to dQ's accumulator.
///
/// The kernel may be launched before that of the row statistics is complete, which also clears dQ's accumulator: copies
/// and the first product go ahead.
///
/// With kOrderedDq that thread adds behind the key tile in front of its own (sm90_backward.cuh), each block its
/// columns. While the turn has not come, dS is released and the next step's dQ computed: a block gets more than a
/// step ahead of its additions before anything waits for them.
///
/// More than 600 lines: what a warpgroup waits for is what another of these tasks does.
///
/// Config is a struct of constants: Element (f16 or bf16), kHeadDimQk, kHeadDimV, kTileM, kTileN, kStages, kCausal,
/// kWriteDq, kSplit; optionally kOrderedDq, kWithoutDk, kWithoutDv (common/switches.cuh).
template <class Config>
struct BackwardPair {
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
  static_assert(kQkSlabs >= 2 && kVSlabs >= 2 && kQkSlabs <= 4 && kVSlabs <= 4, "each block has columns");
  static_assert(kHeadDimQk % 8 == 0 && kHeadDimV % 8 == 0, "head dims are multiples of 8");
  static_assert(kScoreRegisters + 2 * kSumRegisters + kDqRegisters <= 4 * 128, "65,536 registers");

  // Columns of a block: slabs [first, first + count).
  FA_DEVICE static constexpr int first_slab(int rank, int slabs) { return rank == 0 ? 0 : (slabs + 1) / 2; }
  FA_DEVICE static constexpr int slab_count(int rank, int slabs) { return rank == 0 ? (slabs + 1) / 2 : slabs / 2; }
  FA_DEVICE static constexpr int columns(int rank, int slabs, int d) {
    return rank == 0 ? slab_count(0, slabs) * kSlabColumns : d - first_slab(1, slabs) * kSlabColumns;
  }

  using RowSlab = SwizzledTile<kTileM, kSlabColumns>;  // of Q, dO, and of P and dS: 64 keys
  using KeySlab = SwizzledTile<kTileN, kSlabColumns>;  // of K and V
  using ScoreTile = SwizzledTile<kTileM, kTileN>;      // P or dS
  using ScoreGemm = ptx::Wgmma<T, kTileN>;
  using Scores = float[kTileN / 2];  // [64, tile_n]
  static constexpr int kScoreSteps = kTileN / 16;

  static constexpr int kWarpBytes = 16 * 128;  // of a warp's rows in a slab of P or dS
  static constexpr int kDqWarpBytes = 16 * ceil_div(kQkSlabs, 2) * kSlabColumns * 4;  // of a warp's rows of dQ
  // Buffers. Block 0 needs Q from before S to behind dK, and has room where block 1 has K beside V: one more. What only
  // a sum needs, dO in block 0 and Q in block 1, comes while the next scores are computed.
  static constexpr int kMaxQStages = kStages + 1;
  static constexpr int kMaxOtherStages = 2;
  static constexpr int kBarriers = 8 + 2 * (kMaxOtherStages + kMaxQStages + kStages);

  // The same in both blocks, which write into each other's.
  static constexpr int kDsOffset = ScoreTile::kBytes;
  static constexpr int kDqOffset = 2 * ScoreTile::kBytes;
  static constexpr int kBarrierOffset = kDqOffset + (Config::kWriteDq ? 4 * kDqWarpBytes : 0);
  static constexpr int kKeysOffset = kBarrierOffset + 1024;  // swizzled tiles start at multiples of 1024
  static_assert(8 * kBarriers <= 1024, "the barriers have 1024 bytes");

  /// What follows, in block `rank`.
  template <int kRank>
  struct Layout {
    // The query operand of the scores: Q in block 0, dO in block 1.
    static constexpr int kScoreSlabs = kRank == 0 ? kQkSlabs : kVSlabs;
    static constexpr int kQFirst = first_slab(kRank, kQkSlabs);
    static constexpr int kQSlabs = slab_count(kRank, kQkSlabs);
    static constexpr int kDoFirst = first_slab(kRank, kVSlabs);
    static constexpr int kDoSlabs = slab_count(kRank, kVSlabs);
    static constexpr int kOwnFirst = kRank == 0 ? kQFirst : kDoFirst;  // slabs of that operand in the ring
    static constexpr int kOwnSlabs = kRank == 0 ? kQSlabs : kDoSlabs;
    static constexpr int kOtherSlabs = kScoreSlabs - kOwnSlabs;  // for the scores only
    static constexpr int kOtherFirst = kRank == 0 ? kOwnSlabs : 0;
    static constexpr int kQStages = kRank == 0 ? kMaxQStages : 1;
    static constexpr int kDoStages = kRank == 0 ? 1 : kStages;
    static constexpr int kOtherStages = kRank == 0 ? kMaxOtherStages : 1;
    static constexpr int kScoreStages = kRank == 0 ? kQStages : kDoStages;
    static constexpr int kQkColumns = columns(kRank, kQkSlabs, kHeadDimQk);
    static constexpr int kVColumns = columns(kRank, kVSlabs, kHeadDimV);
    static constexpr int kFirstQkColumn = kQFirst * kSlabColumns;
    static constexpr int kFirstVColumn = kDoFirst * kSlabColumns;

    // Block 0: K, whose first slabs are those for dQ. Block 1: V, and its slabs of K.
    static constexpr int kDqKeysOffset = kKeysOffset + (kRank == 0 ? 0 : kVSlabs * KeySlab::kBytes);
    static constexpr int kQOffset = kDqKeysOffset + (kRank == 0 ? kQkSlabs : kQSlabs) * KeySlab::kBytes;
    static constexpr int kDoOffset = kQOffset + kQStages * kQSlabs * RowSlab::kBytes;
    static constexpr int kOtherOffset = kDoOffset + kDoStages * kDoSlabs * RowSlab::kBytes;
    static constexpr int kBytes = kOtherOffset + kOtherStages * kOtherSlabs * RowSlab::kBytes;
  };
  static constexpr int kSharedBytes = Layout<0>::kBytes > Layout<1>::kBytes ? Layout<0>::kBytes : Layout<1>::kBytes;

  const AllParams& p;
  const Params& params;
  const uint32_t shared = ptx::dynamic_shared();

  FA_DEVICE explicit BackwardPair(const AllParams& all) : p(all), params(all.base) {}

  FA_DEVICE uint32_t p_shared() const { return shared; }
  FA_DEVICE uint32_t ds_shared() const { return shared + kDsOffset; }
  template <int kRank>
  FA_DEVICE uint32_t q_shared(int stage) const {
    return shared + Layout<kRank>::kQOffset + stage * (Layout<kRank>::kQSlabs * RowSlab::kBytes);
  }
  template <int kRank>
  FA_DEVICE uint32_t do_shared(int stage) const {
    return shared + Layout<kRank>::kDoOffset + stage * (Layout<kRank>::kDoSlabs * RowSlab::kBytes);
  }

  template <int kRank>
  FA_DEVICE uint32_t other_shared(int stage) const {
    return shared + Layout<kRank>::kOtherOffset + stage * (Layout<kRank>::kOtherSlabs * RowSlab::kBytes);
  }

  // "Full": what was copied or stored is there. "Empty": every warp has read it.
  FA_DEVICE uint32_t barrier(int index) const { return shared + kBarrierOffset + 8 * index; }
  FA_DEVICE uint32_t keys_full() const { return barrier(0); }     // K or V, for the scores
  FA_DEVICE uint32_t dq_keys_full() const { return barrier(1); }  // K of this block's columns
  FA_DEVICE uint32_t p_full() const { return barrier(2); }
  FA_DEVICE uint32_t p_empty() const { return barrier(3); }  // block 0's: of both blocks
  FA_DEVICE uint32_t ds_full() const { return barrier(4); }
  FA_DEVICE uint32_t ds_empty() const { return barrier(5); }  // block 1's: of both blocks
  FA_DEVICE uint32_t dq_full() const { return barrier(6); }   // of the block's rows and columns
  FA_DEVICE uint32_t dq_empty() const { return barrier(7); }
  FA_DEVICE uint32_t other_full(int stage) const { return barrier(8 + stage); }
  FA_DEVICE uint32_t other_empty(int stage) const { return other_full(kMaxOtherStages + stage); }
  FA_DEVICE uint32_t do_full(int stage) const { return other_full(2 * kMaxOtherStages + stage); }
  FA_DEVICE uint32_t do_empty(int stage) const { return do_full(kStages + stage); }
  FA_DEVICE uint32_t q_full(int stage) const { return do_full(2 * kStages + stage); }
  FA_DEVICE uint32_t q_empty(int stage) const { return q_full(kMaxQStages + stage); }

  /// Where in a ring of buffers the next step is.
  template <int kBuffers>
  struct Ring {
    int stage = 0;
    uint32_t parity = 0;  // of "full"; of "empty" when what this step reads has been read

    FA_DEVICE void advance() {
      if (++stage != kBuffers) return;
      stage = 0;
      parity ^= 1;
    }
  };
  /// Of a buffer of its own.
  FA_DEVICE static uint32_t parity_of_one(int count) { return static_cast<uint32_t>(count) % 2; }

  FA_DEVICE static int lane_index() { return ptx::thread_index() % kernel::kWarpSize; }
  FA_DEVICE static int warp_index() { return ptx::shfl(ptx::thread_index() % kWarpgroup / kernel::kWarpSize, 0); }

  FA_DEVICE void run() const {
    const int rank = ptx::shfl(ptx::cluster_rank(), 0);
    if (ptx::thread_index() == 0) init_barriers(rank);
    ptx::sync_warp();
    ptx::cluster_sync();  // the barriers exist for both blocks
    const int warpgroup = ptx::shfl(ptx::thread_index() / kWarpgroup, 0);
    if (warpgroup == 0) {
      ptx::decrease_registers<kScoreRegisters>();
      const Job work = job();
      if (work.count() > 0) {
        if (rank == 0) {
          compute_scores<0>(work);
        } else {
          compute_scores<1>(work);
        }
      }
    } else if (warpgroup == 3) {
      ptx::decrease_registers<kDqRegisters>();
      const Job work = job();
      if (work.count() > 0) {
        if (rank == 0) {
          copy_and_compute_dq<0>(work);
        } else {
          copy_and_compute_dq<1>(work);
        }
      }
    } else if constexpr (kSums) {
      ptx::increase_registers<kSumRegisters>();
      const Job work = job();
      if (rank == 0) {
        sum<0>(work, warpgroup - 1);
      } else {
        sum<1>(work, warpgroup - 1);
      }
    } else {
      ptx::griddepcontrol_wait();  // every block does, be it without steps
    }
    ptx::sync_warp();
    ptx::cluster_sync();  // the other block may still arrive at barriers here, or copy to here
  }

  FA_DEVICE void init_barriers(int rank) const {
    // Warps: 4 compute scores, 8 sums, 4 dQ.
    constexpr int kDqWarps = Config::kWriteDq ? 4 : 0;
    constexpr int kSumWarps = kSums ? 8 : 0;
    ptx::mbarrier_init(keys_full(), 1);
    ptx::mbarrier_init(dq_keys_full(), 1);
    ptx::mbarrier_init(p_full(), 4);
    ptx::mbarrier_init(p_empty(), 2 * kSumWarps + 4);
    ptx::mbarrier_init(ds_full(), 4);
    ptx::mbarrier_init(ds_empty(), 2 * (kSumWarps + kDqWarps));
    if constexpr (Config::kWriteDq) {
      ptx::mbarrier_init(dq_full(), kDqWarps);
      ptx::mbarrier_init(dq_empty(), 1);
    }
    FA_UNROLL
    for (int i = 0; i < kMaxOtherStages; ++i) {
      ptx::mbarrier_init(other_full(i), 1);
      ptx::mbarrier_init(other_empty(i), 4);
    }
    FA_UNROLL
    for (int i = 0; i < kMaxQStages; ++i) {
      ptx::mbarrier_init(q_full(i), 1);
      ptx::mbarrier_init(q_empty(i), rank == 0 ? kSumWarps + 4 : 8);
    }
    FA_UNROLL
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(do_full(i), 1);
      ptx::mbarrier_init(do_empty(i), rank == 0 ? 8 : kSumWarps + 4);
    }
    ptx::fence_mbarrier_init();
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
    const int index = ptx::block_index() / 2;
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

  // ---- copies from global memory, by one thread

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
  /// Likewise of the key tile.
  FA_DEVICE void load_keys(uint32_t target, const kernel::TensorMap& map, int first, int count, uint32_t full,
                           const Job& work) const {
    ptx::mbarrier_arrive_expect_tx(full, count * KeySlab::kBytes);
    FA_UNROLL
    for (int slab = 0; slab < count; ++slab) {
      ptx::tma_load_4d(target + slab * KeySlab::kBytes, map, full, ptx::L2Policy::evict_first,
                       (first + slab) * kSlabColumns, work.first_key(), work.tile.head, work.tile.batch);
    }
  }

  template <int kRank>
  FA_DEVICE void load_q(const Job& work, const Query& query, int stage) const {
    using L = Layout<kRank>;
    load_rows(q_shared<kRank>(stage), p.map_q, L::kQFirst, L::kQSlabs, q_full(stage), work, query);
  }
  template <int kRank>
  FA_DEVICE void load_dout(const Job& work, const Query& query, int stage) const {
    using L = Layout<kRank>;
    load_rows(do_shared<kRank>(stage), p.map_dout, L::kDoFirst, L::kDoSlabs, do_full(stage), work, query);
  }
  /// What of the scores' query tile is in no ring.
  template <int kRank>
  FA_DEVICE void load_other(const Job& work, const Query& query, int stage) const {
    using L = Layout<kRank>;
    load_rows(other_shared<kRank>(stage), kRank == 0 ? p.map_q : p.map_dout, L::kOtherFirst, L::kOtherSlabs,
              other_full(stage), work, query);
  }
  template <int kRank>
  FA_DEVICE void load_score_keys(const Job& work) const {
    load_keys(shared + kKeysOffset, kRank == 0 ? p.map_k : p.map_v, 0, Layout<kRank>::kScoreSlabs, keys_full(), work);
  }

  // ---- warpgroup 0: P in block 0, dS in block 1

  template <int kRank>
  FA_DEVICE void compute_scores(const Job& work) const {
    using L = Layout<kRank>;
    Scores scores;
    const int steps = work.count();
    Query query(work, params);
    Query ahead = query;  // of the next copies
    Ring<L::kScoreStages> ring;
    Ring<L::kOtherStages> others;
    const bool loads = ptx::thread_index() == 0;
    if (loads) {
      if constexpr (kRank == 0) ptx::prefetch_tensor_map(p.map_q);
      load_score_keys<kRank>(work);
      if constexpr (L::kOtherSlabs != 0) {
        FA_UNROLL
        for (int stage = 0; stage < L::kOtherStages; ++stage) {
          if (stage == steps) break;
          load_other<kRank>(work, ahead, stage);
          ahead.advance(work, params);
        }
      }
    }
    ptx::sync_warp();  // one lane started the copies
    ptx::mbarrier_wait(keys_full(), 0);
    for (int count = 0; count < steps; ++count) {
      issue_scores<kRank>(scores, ring, others);
      if (count == 0) ptx::griddepcontrol_wait();  // for the row statistics
      const float* const statistics =
          (kRank == 0 ? params.lse_log2 : params.delta) + row_index(work, query) + 16 * warp_index() + lane_index() / 4;
      const float row[2] = {ptx::ld_global(statistics), ptx::ld_global(statistics + 8)};
      const int m_block = query.m_block;
      query.advance(work, params);
      ptx::wgmma_wait<0>();
      ptx::wgmma_tie(scores);
      release(kRank == 0 ? q_empty(ring.stage) : do_empty(ring.stage));
      if constexpr (L::kOtherSlabs != 0) {
        release(other_empty(others.stage));
        if (loads && count + L::kOtherStages < steps) {
          ptx::mbarrier_wait(other_empty(others.stage), others.parity);  // the four warps have read it
          load_other<kRank>(work, ahead, others.stage);
          ahead.advance(work, params);
        }
        ptx::sync_warp();  // one lane started the copies
      }
      ring.advance();
      others.advance();
      if constexpr (kRank == 0) {
        exponentiate(scores, row, work, m_block);
      } else {
        FA_UNROLL
        for (int i = 0; i < kTileN / 2; ++i) scores[i] -= row[i / 2 % 2];
        ptx::mbarrier_wait_cluster(p_full(), parity_of_one(count));
        multiply_by_p(scores);
        const int rows = rows_without_keys(m_block);
        if (Config::kCausal && rows > 0) clear_first_rows(scores, rows);
        ptx::sync_warp();  // all lanes have read P
        if (lane_index() == 0) ptx::mbarrier_arrive_remote(ptx::map_shared(p_empty(), 0));
      }
      ptx::mbarrier_wait_cluster(kRank == 0 ? p_empty() : ds_empty(), parity_of_one(count) ^ 1);  // of the last step
      hand_on<kRank>(scores);
    }
    ptx::griddepcontrol_launch_dependents();  // the sums of a step are left
  }

  /// One arrival a warp: its share of every wgmma that read the buffer is complete.
  FA_DEVICE static void release(uint32_t barrier) {
    if (lane_index() == 0) ptx::mbarrier_arrive(barrier);
  }

  /// Starts S = Q K^T or dP = dO V^T, [64, tile_n].
  template <int kRank>
  FA_DEVICE void issue_scores(Scores& scores, const Ring<Layout<kRank>::kScoreStages>& ring,
                              const Ring<Layout<kRank>::kOtherStages>& others) const {
    using L = Layout<kRank>;
    constexpr int kHeadDim = kRank == 0 ? kHeadDimQk : kHeadDimV;
    ptx::mbarrier_wait(kRank == 0 ? q_full(ring.stage) : do_full(ring.stage), ring.parity);
    if constexpr (L::kOtherSlabs != 0) ptx::mbarrier_wait(other_full(others.stage), others.parity);
    const uint32_t own = ptx::without_rank(kRank == 0 ? q_shared<0>(ring.stage) : do_shared<1>(ring.stage));
    const uint32_t other = ptx::without_rank(other_shared<kRank>(others.stage));
    const uint32_t keys = ptx::without_rank(shared + kKeysOffset);
    ptx::wgmma_forget(scores);
    ptx::wgmma_fence();
    FA_UNROLL
    for (int step = 0; step < ceil_div(kHeadDim, 16); ++step) {
      const int slab = step / 4;
      const bool in_ring = slab >= L::kOwnFirst && slab < L::kOwnFirst + L::kOwnSlabs;
      const uint32_t rows =
          in_ring ? own + (slab - L::kOwnFirst) * RowSlab::kBytes : other + (slab - L::kOtherFirst) * RowSlab::kBytes;
      ScoreGemm::template shared<false>(scores, RowSlab::k_major(rows, 0, step % 4),
                                        KeySlab::k_major(keys + slab * KeySlab::kBytes, 0, step % 4), step != 0);
    }
    ptx::wgmma_commit();
  }

  /// P = exp2(scale_log2 * S - LSE), 0 where masked. `lse`: of this thread's two rows.
  FA_DEVICE void exponentiate(Scores& s, const float (&lse)[2], const Job& work, int m_block) const {
    FA_UNROLL
    for (int i = 0; i < kTileN / 2; ++i) s[i] = ptx::ex2(ptx::fma(s[i], params.scale_log2, -lse[i / 2 % 2]));
    const int first_key = work.first_key();
    const int lane = lane_index();
    // Behind it only rows would see a key that are not there.
    const int key_end = kernel::keys_end<Config::kCausal, kernel::NoVariant>(params, params, params.s_q - 1);
    if (first_key + kTileN > key_end) {
      const int keys = key_end - first_key - 2 * (lane % 4);  // from this thread's first on
      FA_UNROLL
      for (int i = 0; i < kTileN / 2; ++i) {
        if (i / 4 * 8 + i % 2 >= keys) s[i] = 0.f;
      }
    }
    const int first_limit = m_block * kTileM + params.causal_shift - first_key;  // of the tile's first row
    if (Config::kCausal && first_limit < kTileN - 1) {
      const int limit = first_limit + 16 * warp_index() + lane / 4 - 2 * (lane % 4);
      FA_UNROLL
      for (int i = 0; i < kTileN / 2; ++i) {
        if (i / 4 * 8 + i % 2 > limit + i / 2 % 2 * 8) s[i] = 0.f;
      }
    }
  }

  /// Of a query tile those at its start that keep no key: what they hold may be infinite or NaN, and is not multiplied,
  /// be it by 0.
  FA_DEVICE int rows_without_keys(int m_block) const {
    return kernel::keeping_begin<Config::kCausal, kernel::NoVariant>(params, params) - m_block * kTileM;
  }
  FA_DEVICE static void clear_first_rows(Scores& scores, int rows) {
    const int row = 16 * warp_index() + lane_index() / 4;
    FA_UNROLL
    for (int i = 0; i < kTileN / 2; ++i) {
      if (row + i / 2 % 2 * 8 < rows) scores[i] = 0.f;
    }
  }

  /// dS = P o (dP - delta), from the difference.
  FA_DEVICE void multiply_by_p(Scores& ds) const {
    const int lane = lane_index();
    const uint32_t tile = p_shared() + warp_index() * kWarpBytes;
    FA_UNROLL
    for (int step = 0; step < kScoreSteps; ++step) {
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

  /// Stores a warp's 16 rows of P or dS, rounded, for this block, and copies them to the other.
  template <int kRank>
  FA_DEVICE void hand_on(const Scores& scores) const {
    const int lane = lane_index();
    const uint32_t tile = (kRank == 0 ? p_shared() : ds_shared()) + warp_index() * kWarpBytes;
    const uint32_t full = kRank == 0 ? p_full() : ds_full();
    FA_UNROLL
    for (int step = 0; step < kScoreSteps; ++step) {
      const float* const s = scores + 8 * step;
      ptx::stmatrix_x4(matrix_row(tile, lane, step), ptx::convert_pair<T>(s[0], s[1]), ptx::convert_pair<T>(s[2], s[3]),
                       ptx::convert_pair<T>(s[4], s[5]), ptx::convert_pair<T>(s[6], s[7]));
    }
    ptx::fence_proxy_async();
    ptx::sync_warp();  // the rows are complete, for the tensor cores and the copy engine too
    if (lane != 0) return;
    ptx::mbarrier_arrive(full);
    const uint32_t full_there = ptx::map_shared(full, 1 - kRank);
    ptx::mbarrier_arrive_expect_tx_remote(full_there, kKeySlabs * kWarpBytes);
    FA_UNROLL
    for (int slab = 0; slab < kKeySlabs; ++slab) {
      const uint32_t rows = tile + slab * RowSlab::kBytes;
      ptx::bulk_copy_to_cluster(ptx::map_shared(rows, 1 - kRank), rows, kWarpBytes, full_there);
    }
  }

  // ---- warpgroups 1 and 2: dK and dV of 64 keys each

  template <int kRank>
  FA_DEVICE void sum(const Job& work, int part) const {
    using L = Layout<kRank>;
    float dk[L::kQkColumns / 2] = {};  // [64 keys, columns of this block]
    float dv[L::kVColumns / 2] = {};   // likewise

    ptx::griddepcontrol_wait();  // before anything is stored
    if (work.count() > 0) sum_steps<kRank>(dk, dv, work, part);
    ptx::wgmma_tie(dk);
    ptx::wgmma_tie(dv);
    store<kRank>(dk, dv, work, part);
  }

  template <int kRank, class Dk, class Dv>
  FA_DEVICE void sum_steps(Dk& dk, Dv& dv, const Job& work, int part) const {
    using L = Layout<kRank>;
    using DkGemm = ptx::Wgmma<T, L::kQkColumns>;
    using DvGemm = ptx::Wgmma<T, L::kVColumns>;
    const int steps = work.count();
    const uint32_t slab = part * RowSlab::kBytes;  // of this warpgroup's keys
    Ring<L::kDoStages> ring_do;
    Ring<L::kQStages> ring_q;
    [[maybe_unused]] Query query(work, params);
    // Each product is waited for at once: P is free for the next step before this step's dS is there.
    for (int count = 0; count < steps; ++count) {
      ptx::mbarrier_wait(do_full(ring_do.stage), ring_do.parity);
      if constexpr (Config::kCausal) {
        const int rows = rows_without_keys(query.m_block);
        if (rows > 0) {
          await_shared(ds_full(), count);  // the scores have read both
          ptx::mbarrier_wait(q_full(ring_q.stage), ring_q.parity);
          clear_first_rows<L::kDoSlabs>(do_shared<kRank>(ring_do.stage), rows);
          clear_first_rows<L::kQSlabs>(q_shared<kRank>(ring_q.stage), rows);
          ptx::fence_proxy_async();
          ptx::barrier_sync(first_of(NamedBarrier::clean_tiles),
                            2 * kWarpgroup);  // the tiles are clean for both warpgroups
        }
        query.advance(work, params);
      }
      await_shared(p_full(), count);
      issue_sum<DvGemm, SwizzledTile<kTileM, L::kVColumns>>(dv, p_shared() + slab, do_shared<kRank>(ring_do.stage));
      ptx::wgmma_wait<0>();  // dV
      release_p<kRank>();
      release(do_empty(ring_do.stage));
      ring_do.advance();
      ptx::mbarrier_wait(q_full(ring_q.stage), ring_q.parity);
      await_shared(ds_full(), count);
      issue_sum<DkGemm, SwizzledTile<kTileM, L::kQkColumns>>(dk, ds_shared() + slab, q_shared<kRank>(ring_q.stage));
      ptx::wgmma_wait<0>();  // dK
      release_ds<kRank>();
      release(q_empty(ring_q.stage));
      ring_q.advance();
    }
  }

  /// By warpgroups 1 and 2.
  template <int kSlabs>
  FA_DEVICE static void clear_first_rows(uint32_t slabs, int rows) {
    FA_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      FA_UNROLL_BY(1)
      for (int i = ptx::thread_index() - kWarpgroup; i < rows * (RowSlab::kRowBytes / kernel::kChunkBytes);
           i += 2 * kWarpgroup) {
        ptx::st_shared_chunk(slabs + slab * RowSlab::kBytes + i * kernel::kChunkBytes, {});
      }
    }
  }

  /// P or dS: stored here, or copied to here by the other block.
  FA_DEVICE static void await_shared(uint32_t full, int count) {
    ptx::mbarrier_wait_cluster(full, parity_of_one(count));
  }

  template <int kRank>
  FA_DEVICE void release_p() const {
    release_to<kRank, 0>(p_empty());
  }
  template <int kRank>
  FA_DEVICE void release_ds() const {
    release_to<kRank, 1>(ds_empty());
  }
  /// Tells block kTo, from whose warpgroup 0 the buffer is filled.
  template <int kRank, int kTo>
  FA_DEVICE static void release_to(uint32_t barrier) {
    if (lane_index() != 0) return;
    if constexpr (kRank == kTo) {
      ptx::mbarrier_arrive(barrier);
    } else {
      ptx::mbarrier_arrive_remote(ptx::map_shared(barrier, kTo));
    }
  }

  /// Starts dV += P^T dO or dK += dS^T Q, [64 keys, columns].
  template <class Gemm, class Tile, class Sum>
  FA_DEVICE static void issue_sum(Sum& sum, uint32_t scores, uint32_t rows) {
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

  template <int kRank, class Dk, class Dv>
  FA_DEVICE void store(Dk& dk, const Dv& dv, const Job& work, int part) const {
    using L = Layout<kRank>;
    const int lane = lane_index();
    const int first_key = work.first_key() + 64 * part + 16 * warp_index();
    if constexpr (Config::kSplit) {
      constexpr int kRow = kHeadDimQk + kHeadDimV;
      const int64_t batch = static_cast<int64_t>(work.tile.split) * params.b + work.tile.batch;
      float* const rows = params.partial + (batch * params.h_kv + work.tile.head) * params.s_kv * kRow;
      if constexpr (kWantsDk) store_partial<kRow>(dk, rows + L::kFirstQkColumn, first_key, params.s_kv, lane);
      if constexpr (kWantsDv) {
        store_partial<kRow>(dv, rows + kHeadDimQk + L::kFirstVColumn, first_key, params.s_kv, lane);
      }
    } else {
      if constexpr (kWantsDk) {
        FA_UNROLL
        for (int i = 0; i < L::kQkColumns / 2; ++i) dk[i] *= params.scale;
        store_rows(dk,
                   static_cast<T*>(params.dk) + work.tile.batch * params.stride_dk_b +
                       work.tile.head * params.stride_dk_h + L::kFirstQkColumn,
                   params.stride_dk_s, first_key, params.s_kv, lane);
      }
      if constexpr (kWantsDv) {
        store_rows(dv,
                   static_cast<T*>(params.dv) + work.tile.batch * params.stride_dv_b +
                       work.tile.head * params.stride_dv_h + L::kFirstVColumn,
                   params.stride_dv_s, first_key, params.s_kv, lane);
      }
    }
  }

  // ---- warpgroup 3: copies of what several read, and dQ

  // Without sums block 0 has no use for dO, nor block 1 for Q.
  template <int kRank>
  FA_DEVICE static constexpr bool loads_q() {
    return kSums || kRank == 0;
  }
  template <int kRank>
  FA_DEVICE static constexpr bool loads_dout() {
    return kSums || kRank == 1;
  }

  template <int kRank>
  FA_DEVICE void copy_and_compute_dq(const Job& work) const {
    using L = Layout<kRank>;
    const int steps = work.count();
    const bool loads = ptx::thread_index() == 3 * kWarpgroup;
    Query query(work, params);
    Query ahead_q = query;  // of the next copies
    Query ahead_do = query;
    Ring<L::kDoStages> ring_do;
    Ring<L::kQStages> ring_q;
    if (loads) {
      FA_UNROLL
      for (int stage = 0; stage < kMaxQStages; ++stage) {
        if (stage == steps) break;
        if (stage < L::kQStages && loads_q<kRank>()) {
          load_q<kRank>(work, ahead_q, stage);
          ahead_q.advance(work, params);
        }
        if (stage < L::kDoStages && loads_dout<kRank>()) {
          load_dout<kRank>(work, ahead_do, stage);
          ahead_do.advance(work, params);
        }
        if (stage == 0 && kRank == 1) {
          load_keys(shared + L::kDqKeysOffset, p.map_k, L::kQFirst, L::kQSlabs, dq_keys_full(), work);
        }
      }
    }
    ptx::sync_warp();            // one lane started the copies
    ptx::griddepcontrol_wait();  // for the cleared accumulator
    if constexpr (Config::kWriteDq) ptx::mbarrier_wait(kRank == 0 ? keys_full() : dq_keys_full(), 0);
    [[maybe_unused]] const bool adds = ptx::thread_index() == 3 * kWarpgroup + kernel::kWarpSize;
    [[maybe_unused]] Addition addition;
    for (int count = 0; count < steps; ++count) {
      if (loads && loads_dout<kRank>() && count + L::kDoStages < steps) {
        ptx::mbarrier_wait(do_empty(ring_do.stage), ring_do.parity);  // dV and dP have read it
        load_dout<kRank>(work, ahead_do, ring_do.stage);
        ahead_do.advance(work, params);
      }
      ptx::sync_warp();  // one lane started the copies
      ring_do.advance();
      float dq[L::kQkColumns / 2];          // [64, columns of this block]
      [[maybe_unused]] bool again = false;  // NaN of hidden keys has reached it
      if constexpr (Config::kWriteDq) {
        if constexpr (kOrdered) {
          if (adds) add_until_ds<kRank>(addition, work, count);
          ptx::sync_warp();  // one lane added
        }
        await_shared(ds_full(), count);
        issue_dq<kRank>(dq);
        if constexpr (kOrdered) {
          if (adds) go_on<kRank>(addition, work);
          ptx::sync_warp();  // one lane added
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_tie(dq);
        if constexpr (Config::kCausal) again = hides_keys(work, query.m_block) && kernel::any_infinite(dq);
        if (!again) release_ds<kRank>();
      }
      if (loads && loads_q<kRank>() && count + L::kQStages < steps) {
        ptx::mbarrier_wait(q_empty(ring_q.stage), ring_q.parity);  // S and dK have read it
        load_q<kRank>(work, ahead_q, ring_q.stage);
        ahead_q.advance(work, params);
      }
      ptx::sync_warp();  // one lane started the copies
      ring_q.advance();
      if constexpr (Config::kWriteDq) {
        if (adds) make_room<kRank>(addition);
        ptx::sync_warp();  // one lane added
        hand_over_dq<kRank>(dq, count, again);
        if (adds) take_over<kRank>(addition, work, query, count);
        ptx::sync_warp();  // one lane added
      }
      query.advance(work, params);
    }
    if constexpr (Config::kWriteDq) {
      if (adds) finish<kRank>(addition, work);
    }
  }

  /// Whether the mask hides keys of the tile from rows of a query tile.
  FA_DEVICE bool hides_keys(const Job& work, int m_block) const {
    return kernel::hides_any<Config::kCausal, kernel::NoVariant, kTileM, kTileN>(params, params, m_block * kTileM,
                                                                                 work.first_key());
  }

  /// Starts dQ = dS K, [64, columns of this block].
  template <int kRank, class Dq>
  FA_DEVICE void issue_dq(Dq& dq) const {
    using L = Layout<kRank>;
    using DqGemm = ptx::Wgmma<T, L::kQkColumns>;
    using DqKeys = SwizzledTile<kTileN, L::kQkColumns>;
    ptx::wgmma_forget(dq);
    ptx::wgmma_fence();
    FA_UNROLL
    for (int step = 0; step < kTileN / 16; ++step) {
      DqGemm::template shared<true>(dq, ScoreTile::k_major(ptx::without_rank(ds_shared()), 0, step),
                                    DqKeys::mn_major(ptx::without_rank(shared + L::kDqKeysOffset), step), step != 0);
    }
    ptx::wgmma_commit();
  }

  /// Leaves a warp's 16 rows of dQ, in the order in which they lie in registers, for the thread that adds them.
  template <int kRank, class Dq>
  FA_DEVICE void hand_over_dq(const Dq& dq, int count, [[maybe_unused]] bool again) const {
    using L = Layout<kRank>;
    const int lane = lane_index();
    const uint32_t own = shared + kDqOffset + warp_index() * kDqWarpBytes + lane * 16;
    ptx::mbarrier_wait(dq_empty(), parity_of_one(count));  // the last step's has left
    FA_UNROLL
    for (int j = 0; j < L::kQkColumns / 8; ++j) {
      ptx::st_shared_chunk(own + j * 512, {{ptx::bits(dq[4 * j]), ptx::bits(dq[4 * j + 1]), ptx::bits(dq[4 * j + 2]),
                                            ptx::bits(dq[4 * j + 3])}});
    }
    if constexpr (Config::kCausal) {
      if (again) {
        multiply_by_finite_keys<T, ScoreTile, kTileN>(own, L::kQkColumns / 8, ds_shared(), 16 * warp_index(),
                                                      shared + L::kDqKeysOffset, lane);
        release_ds<kRank>();
      }
    }
    ptx::fence_proxy_async();
    ptx::sync_warp();  // the warp's rows are complete, for the copy engine too
    if (lane == 0) ptx::mbarrier_arrive(dq_full());
  }

  // ---- additions to dQ: one thread of warpgroup 3

  /// That of the step whose dQ is staged in shared memory.
  struct Addition {
    enum class State { told, staged, added };

    State state = State::told;  // with kOrdered: the next key tile knows of it, or there is none
    int group = 0;              // the first group of rows, counted over b and h_q
    int in_front = 0;           // the place in the order of the key tile that adds before
  };

  /// Where dQ is ordered: what can be done of the addition until dS is there.
  template <int kRank>
  FA_DEVICE void add_until_ds(Addition& addition, const Job& work, int count) const {
    while (addition.state != Addition::State::told && !ptx::mbarrier_test(ds_full(), parity_of_one(count))) {
      go_on<kRank>(addition, work);
    }
  }

  /// One thing of it, if its turn has come.
  template <int kRank>
  FA_DEVICE void go_on(Addition& addition, const Job& work) const {
    if (addition.state == Addition::State::added) {
      give_turn<kRank>(addition, work);
    } else if (addition.state == Addition::State::staged &&
               ptx::test_global(turn_of<kRank>(addition), addition.in_front)) {
      add<kRank>(addition);
    }
  }

  /// The next step's dQ may be staged.
  template <int kRank>
  FA_DEVICE void make_room(Addition& addition) const {
    if constexpr (kOrdered) await_turn<kRank>(addition);
    ptx::tma_wait_read();
    ptx::mbarrier_arrive(dq_empty());
  }

  /// It has been staged.
  template <int kRank>
  FA_DEVICE void take_over(Addition& addition, const Job& work, const Query& query, int count) const {
    if constexpr (kOrdered) {
      if (addition.state == Addition::State::added) give_turn<kRank>(addition, work);
      addition.in_front = follows(work, query) ? place_in_order(work) - 1 : 0;
    }
    addition.group = first_row_group(work, query);
    ptx::mbarrier_wait(dq_full(), parity_of_one(count));
    if constexpr (kOrdered) {
      addition.state = Addition::State::staged;
    } else {
      add<kRank>(addition);
    }
  }

  template <int kRank>
  FA_DEVICE void finish(Addition& addition, const Job& work) const {
    if constexpr (kOrdered) {
      await_turn<kRank>(addition);
      if (addition.state == Addition::State::added) give_turn<kRank>(addition, work);
    }
    ptx::tma_wait();  // shared memory must outlive the additions
  }

  template <int kRank>
  FA_DEVICE void await_turn(Addition& addition) const {
    if (addition.state != Addition::State::staged) return;
    ptx::await_global(turn_of<kRank>(addition), addition.in_front);
    add<kRank>(addition);
  }

  /// The next key tile may follow.
  template <int kRank>
  FA_DEVICE void give_turn(Addition& addition, const Job& work) const {
    ptx::tma_wait();  // the sum is there for it
    ptx::signal_global(turn_of<kRank>(addition), place_in_order(work));
    addition.state = Addition::State::told;
  }

  template <int kRank>
  FA_DEVICE void add(Addition& addition) const {
    using L = Layout<kRank>;
    FA_UNROLL
    for (int i = 0; i < kTileM / kernel::kRowGroup; ++i) {
      const int64_t fragment = int64_t{addition.group + i} * (kHeadDimQk / 8) + L::kFirstQkColumn / 8;
      ptx::bulk_add_f32(params.dq_accum + fragment * (kernel::kRowGroup * 8), shared + kDqOffset + i * kDqWarpBytes,
                        L::kQkColumns / 8 * 512);
    }
    ptx::tma_commit();
    addition.state = Addition::State::added;
  }

  /// Of the query tile and this block's columns.
  template <int kRank>
  FA_DEVICE int32_t* turn_of(const Addition& addition) const {
    return params.turns + int64_t{addition.group} * kernel::kTurnsPerGroup + kRank;
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

template <class Config>
FA_DEVICE void backward_pair(const typename BackwardPair<Config>::AllParams& params) {
  BackwardPair<Config>(params).run();
}

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_BACKWARD_PAIR_CUH_
