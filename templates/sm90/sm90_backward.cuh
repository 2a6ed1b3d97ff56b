#ifndef FA_TEMPLATES_SM90_SM90_BACKWARD_CUH_
#define FA_TEMPLATES_SM90_SM90_BACKWARD_CUH_

#include <common/backward_schedule.cuh>
#include <common/constants.cuh>
#include <common/dropout.cuh>
#include <common/sequences.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <common/variant_backward.cuh>
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
#include <sm90/sm90_backward_cluster.cuh>
#include <sm90/sm90_backward_layout.cuh>
#include <sm90/sm90_backward_params.cuh>
#include <sm90/sm90_backward_store.cuh>
#include <sm90/sm90_finite_keys.cuh>
#include <sm90/sm90_ring.cuh>
#include <sm90/sm90_roles.cuh>
#include <sm90/sm90_shared_tile.cuh>

namespace fa::sm90 {

using kernel::BackwardTile;
using kernel::kWarpSize;
using kernel::QuerySteps;

template <class Config>
using AllParamsOf = typename kernel::Either<kernel::Sm90BackwardVariantParams, kernel::Sm90BackwardParams,
                                            kernel::kHasVariant<Config>>::type;

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
struct Backward {
  using T = typename Config::Element;
  using Variant = kernel::VariantOf<Config>;
  using AllParams = AllParamsOf<Config>;
  using Params = kernel::BackwardParamsOf<Config>;
  using Lengths = kernel::BatchEntry<kernel::kVarlen<Config>, kernel::BackwardParams>;

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
  static constexpr bool kVarlen = kernel::kVarlen<Config>;
  static constexpr bool kDropout = kernel::kDropout<Config>;
  static constexpr bool kOrdered = kernel::kOrderedDq<Config>;
  static constexpr bool kWantsDk = kernel::kWantsDk<Config>;
  static constexpr bool kWantsDv = kernel::kWantsDv<Config>;
  static constexpr bool kSums = kWantsDk || kWantsDv;
  static constexpr bool kKeysInRegisters = kTileM == 64 && kConsumers <= 2;  // where dQ alone is wanted
  // Of a cluster: they share the query tiles of a key tile, add up dK and dV, and have no other tile.
  static constexpr int kSplitBlocks = kernel::kSplitBlocks<Config>;
  static constexpr bool kTwoSided = Variant::kLeftWindow || Variant::kChunked;  // keys are hidden from last rows too
  static constexpr bool kLists = Variant::kMask && !kVarlen;                    // of tiles that are not empty
  // S and dP are at hand together; also of a mask of packed batches, which looks at all elements of all tiles.
  static constexpr bool kFunctions = Variant::kScore || (Variant::kMask && kVarlen);

  static constexpr bool kHides = Config::kCausal || kTwoSided || Variant::kMask;  // keys of the sequence from rows
  // Whether a step hides keys is asked before the next begins: later, ptxas takes the loop's indices out of uniform
  // registers. In the others the answer would spill.
  static constexpr bool kAsksEarly = !kOrdered && !Variant::kChunked;

  static_assert(kTileN % 64 == 0 && kConsumers >= 1 && kConsumers <= 3, "64 keys a warpgroup");
  static_assert(kTileM == 64 || kDqByRows, "dQ is shared by rows or by columns");
  static_assert(kHeadDimQk % 8 == 0 && kHeadDimV % 8 == 0, "head dims are multiples of 8");
  static_assert(!kVarlen || !Config::kSplit, "packed batches are not split");
  static_assert(!kOrdered || (Config::kWriteDq && !kLists), "in tile lists, nobody is in front");

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
  using Drops = uint32_t[kTileM / 64];   // a bit for each element of S^T
  using Dv = float[kHeadDimV / 2];       // [64 keys, d_v]
  using Dk = float[kHeadDimQk / 2];      // [64 keys, d_qk]
  using Dq = float[kDqColumns / 2];      // [64 rows, dq_columns]

  // P^T and dS^T of a warp under functions. Where they are given elements of a captured tensor, these are read while
  // the products S and dP are under way.
  using Functions = kernel::VariantScores<Config, Params, 1, kTileM / 8, 4 * kConsumers, 16, kTileM, kTileN, 4>;
  static constexpr bool kLoadAhead = kernel::kLoadsAhead<Variant> && kTileM == 64;

  static constexpr int kDqRowBytes = 16 * kHeadDimQk * 4;  // of 16 rows

  static constexpr BackwardShape kShape = {.tile_m = kTileM,
                                           .tile_n = kTileN,
                                           .d_qk = kHeadDimQk,
                                           .d_v = kHeadDimV,
                                           .stages = kStages,
                                           .write_dq = Config::kWriteDq,
                                           .varlen = kVarlen};
  static constexpr BackwardSharedLayout kLayout = shared_layout(kShape);
  static constexpr int kSharedBytes = kLayout.bytes;
  static_assert(kThreads == kShape.threads() && kDqByRows == kShape.dq_by_rows() && kDqColumns == kShape.dq_columns());
  static_assert(kLayout.v == KTile::kBytes && kLayout.q == kLayout.v + VTile::kBytes);
  static_assert(kLayout.dout == kLayout.q + kStages * QTile::kBytes);
  static_assert(kLayout.ds == kLayout.dout + kStages * DoTile::kBytes);
  static_assert(kLayout.dq == kLayout.ds + kDsBuffers * DsTile::kBytes);
  static_assert(kLayout.work >= kLayout.mbarriers + kMbarrierBytes * kShape.mbarriers(), "the barriers fit");
  using DkSums = ClusterSums<kSplitBlocks, 4 * kConsumers, kHeadDimQk / 8>;
  using DvSums = ClusterSums<kSplitBlocks, 4 * kConsumers, kHeadDimV / 8>;
  static_assert(kSplitBlocks == 1 || DkSums::kBytes + DvSums::kBytes <= kLayout.dq, "sums take the place of tiles");
  static_assert(kSplitBlocks == 1 || !Config::kSplit, "sums of a cluster are whole");
  // Gradients of captures leave no register for the number of tiles: it lies behind the barriers.
  static constexpr bool kTilesShared = Variant::kGradients > 0 && kStages < 4;
  static constexpr int kTilesOffset = kLayout.work - 4;

  const AllParams& p;
  const Params& params;
  const uint32_t shared = ptx::dynamic_shared();
  const int tiles;

  FA_DEVICE explicit Backward(const AllParams& all)
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

  // Of a packed batch: two jobs on their way from the warp that finds them to the others.
  FA_DEVICE uint32_t job_shared(int slot) const { return shared + kLayout.work + slot * kLayout.work_bytes; }
  FA_DEVICE uint32_t job_full(int slot) const { return job_shared(2) + 8 * slot; }
  FA_DEVICE uint32_t job_empty(int slot) const { return job_full(2 + slot); }

  FA_DEVICE void run() {
    if (ptx::thread_index() == 0) init_barriers();
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
          if (ptx::thread_index() == 2 * kWarpSize) add_dq();
        }
      }
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
    }
    ptx::fence_mbarrier_init();
  }

  FA_DEVICE int tile_index(int round) const {
    // A block keeps its place among those that add to the same heads.
    if constexpr (kOrdered) return round * ptx::block_count() + ptx::block_index();
    return tile_of_round(round, ptx::block_index(), ptx::block_count());
  }

  /// A key tile and the query tiles that see it, of every query head of its group.
  struct Job {
    BackwardTile tile;
    QuerySteps steps;
    Lengths lengths;

    FA_DEVICE int first_key() const { return tile.block * kTileN; }
    FA_DEVICE bool has_steps() const { return steps.begin < steps.end; }
  };

  /// The job of a round: of a packed batch what was told.
  FA_DEVICE Job job(int round) const {
    if constexpr (kVarlen) {
      return told_job(round % 2);
    } else {
      constexpr bool kSections = Config::kCausal || kOrdered;
      const BackwardTile tile =
          kernel::backward_tile<Variant, kSections, false>(params, tile_index(round), params.n_blocks, params.h_kv);
      return {tile, steps_of(tile, params), params};
    }
  }

  FA_DEVICE QuerySteps steps_of(const BackwardTile& tile, const Lengths& lengths) const {
    const int first_key = tile.block * kTileN;
    if constexpr (kLists) {
      return kernel::list_steps(tile_list(tile), params.group, params.splits, tile.split);
    } else if constexpr (kTwoSided) {
      const int last_key = kernel::minimum(first_key + kTileN, lengths.s_kv) - 1;
      return kernel::variant_steps<Config::kCausal, Variant, kTileM>(params, lengths, first_key, last_key, tile.split);
    } else {
      return kernel::query_steps<Config::kCausal, kTileM>(lengths, first_key, tile.split);
    }
  }

  FA_DEVICE const int32_t* tile_list(const BackwardTile& tile) const {
    return kernel::tile_list_of<Variant>(params.variant, tile.batch, tile.head, params.h_kv, tile.block,
                                         params.n_blocks);
  }

  /// Behind the last query tile of a head.
  FA_DEVICE int stop(const Job& job) const {
    if constexpr (kTwoSided || kLists || kVarlen) return job.steps.stop;
    return params.m_blocks;
  }

  /// The query tile of a step, counted up from that of the job's first step, or where dQ is ordered down from its last.
  struct Query {
    int head;
    int m_block;  // or its place in the tile list

    FA_DEVICE Query(const Job& job, int stop, int group) {
      const int step = kOrdered ? job.steps.end - 1 : job.steps.begin;
      const int visible = stop - job.steps.first;
      const int in_group = step / visible;
      head = job.tile.head * group + in_group;
      m_block = job.steps.first + step - in_group * visible;
    }
    FA_DEVICE void advance(const Job& job, int stop) {
      if constexpr (kOrdered) {
        if (m_block-- != job.steps.first) return;
        m_block = stop - 1;
        --head;
      } else {
        if (++m_block != stop) return;
        m_block = job.steps.first;
        ++head;
      }
    }
  };

  FA_DEVICE int query_tile(const Job& job, int index) const {
    if constexpr (kLists) return ptx::ld_global_nc(tile_list(job.tile) + index);
    return index;
  }
  /// With the tile in the place of its index.
  FA_DEVICE Query located(const Job& job, const Query& query) const {
    Query at = query;
    if constexpr (kLists) at.m_block = query_tile(job, query.m_block);
    return at;
  }

  /// Of a row of the statistics.
  FA_DEVICE int64_t row_index(const Job& job, const Query& query) const {
    if constexpr (kOrdered && !kVarlen) return int64_t{first_row_group(job, query)} * kernel::kRowGroup;
    return kernel::padded_rows_before<kVarlen>(params, job.lengths, job.tile.batch, query.head) +
           query.m_block * kTileM;
  }

  /// The group of that row, counted over b and h_q.
  FA_DEVICE int first_row_group(const Job& job, const Query& query) const {
    if constexpr (kOrdered && !kVarlen) {  // for threads of few registers
      return (job.tile.batch * params.h_q + query.head) * (params.padded_rows / kernel::kRowGroup) +
             query.m_block * (kTileM / kernel::kRowGroup);
    }
    return static_cast<int>(row_index(job, query) / kernel::kRowGroup);
  }

  // ---- packed batches: a warp finds the jobs and tells them

  /// Whether there is a job in a round: one that was told, or a tile of the grid.
  FA_DEVICE bool has_job(int round) const {
    if constexpr (kVarlen) {
      ptx::mbarrier_wait(job_full(round % 2), static_cast<uint32_t>(round) / 2 % 2);
      return static_cast<int>(ptx::ld_shared_b32(job_shared(round % 2))) >= 0;
    } else if constexpr (kTilesShared) {
      return tile_index(round) < static_cast<int>(ptx::ld_shared_b32(shared + kTilesOffset));
    } else {
      return tile_index(round) < tiles;
    }
  }

  /// This warp is through with the job.
  FA_DEVICE void release_job(int round) const {
    if constexpr (kVarlen) {
      ptx::sync_warp();  // all lanes have read it
      if (lane_index() == 0) ptx::mbarrier_arrive(job_empty(round % 2));
    }
  }

  FA_DEVICE Job told_job(int slot) const {
    int values[16];
    FA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const kernel::Chunk chunk = ptx::ld_shared_chunk(job_shared(slot) + 16 * i);
      FA_UNROLL
      for (int j = 0; j < 4; ++j) values[4 * i + j] = static_cast<int>(chunk.word[j]);
    }
    Job job;
    job.tile = {values[0], values[1], values[2], kSplitBlocks > 1 ? values[14] : 0};
    job.steps = {values[3], kSplitBlocks > 1 ? values[15] : 0, values[4], values[5]};
    job.lengths.s_q = values[6];
    job.lengths.s_kv = values[7];
    job.lengths.causal_shift = values[8];
    job.lengths.diagonal = values[9];
    job.lengths.first_row = values[10];
    job.lengths.first_key = values[11];
    job.lengths.padded_rows = values[12];
    job.lengths.first_padded_row = values[13];
    job.lengths.group = params.group;
    job.lengths.splits = kSplitBlocks;
    job.lengths.m_blocks = 0;
    return job;
  }

  /// The job of a round that is under way, anew where that is cheaper than to keep it in registers over a product.
  FA_DEVICE Job again(const Job& job, int round) const {
    if constexpr (kVarlen) return told_job(round % 2);
    return job;
  }

  /// What the copies need of it, for a thread of few registers.
  FA_DEVICE Job job_for_copies(int round) const {
    if constexpr (kVarlen) {
      const auto told = [&](int i) { return static_cast<int>(ptx::ld_shared_b32(job_shared(round % 2) + 4 * i)); };
      Job part;
      part.tile = {told(0), told(1), 0, 0};
      part.steps = {told(3), kSplitBlocks > 1 ? told(15) : 0, told(4), told(5)};
      part.lengths.first_row = told(10);
      part.lengths.first_key = told(11);
      part.lengths.padded_rows = told(12);
      part.lengths.first_padded_row = told(13);
      return part;
    } else {
      return job(round);
    }
  }

  /// Tells of the `count`th job; one thread.
  FA_DEVICE void tell(const Job& job, int count) const {
    const int values[16] = {job.tile.block,
                            job.tile.head,
                            job.tile.batch,
                            job.steps.first,
                            job.steps.end,
                            job.steps.stop,
                            job.lengths.s_q,
                            job.lengths.s_kv,
                            job.lengths.causal_shift,
                            job.lengths.diagonal,
                            job.lengths.first_row,
                            job.lengths.first_key,
                            job.lengths.padded_rows,
                            job.lengths.first_padded_row,
                            job.tile.split,
                            job.steps.begin};
    const int slot = count % 2;
    ptx::mbarrier_wait(job_empty(slot), static_cast<uint32_t>(count) / 2 % 2 ^ 1);  // all have left the last but one
    FA_UNROLL
    for (int i = 0; i < 4; ++i) {
      kernel::Chunk chunk;
      FA_UNROLL
      for (int j = 0; j < 4; ++j) chunk.word[j] = static_cast<uint32_t>(values[4 * i + j]);
      ptx::st_shared_chunk(job_shared(slot) + 16 * i, chunk);
    }
    ptx::mbarrier_arrive(job_full(slot));
  }

  /// Looks through the slots of the grid, some of which have no keys; a warp beside the producer's, so that neither
  /// needs many registers.
  FA_DEVICE void find_jobs() const {
    int count = 0;
    for (int round = 0; tile_index(round) < tiles; ++round) {
      Job job;
      job.tile = kernel::backward_tile_of_batch<kTileN, false>(params, tile_index(round) / kSplitBlocks,
                                                               params.n_blocks, params.h_kv);
      job.lengths = kernel::backward_entry<true, kTileM>(params, job.tile.batch);
      if constexpr (kSplitBlocks > 1) {
        job.tile.split = tile_index(round) % kSplitBlocks;
        job.lengths.splits = kSplitBlocks;
      }
      if (job.first_key() < 0 || job.first_key() >= job.lengths.s_kv) continue;  // a slot without a tile
      job.steps = steps_of(job.tile, job.lengths);
      if (lane_index() == 0) tell(job, count);
      ++count;
    }
    Job none = {};
    none.tile.block = -1;  // tells that there are no more
    if (lane_index() == 0) tell(none, count);
  }

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

  // ---- consumers: one warpgroup each

  // What can be had again from a special register or by a few instructions is not kept over the main loop, whose
  // accumulators take nearly all registers.
  FA_DEVICE static int lane_index() { return ptx::thread_index() % kWarpSize; }
  FA_DEVICE static int consumer_index() { return ptx::shfl(ptx::thread_index() / kWarpgroup, 0) - 1; }
  FA_DEVICE static int warp_index() { return ptx::shfl(ptx::thread_index() % kWarpgroup / kWarpSize, 0); }

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
      } else {
        any = accumulate(dk, dv, round, count, parity);
      }
      if (any) parity ^= 1;
      if constexpr (kSums) store_sums(dk, dv, round, consumer);
      release_job(round);
    }
  }

  FA_DEVICE void store_sums(Dk& dk, Dv& dv, int round, int consumer) const {
    const Job work = job(round);
    const int lane = lane_index();
    const int first_key = work.tile.block * kTileN + consumer * 64 + warp_index() * 16;
    if constexpr (kDropout && kWantsDv) {
      FA_UNROLL
      for (int i = 0; i < kHeadDimV / 2; ++i) dv[i] *= params.dropout.inverse_keep;
    }
    if constexpr (kSplitBlocks > 1) {
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

  /// A consumer's place in the stream of query tiles.
  struct Place {
    int m_block;
    int row_group;  // of the tile's first 16 rows, counted over b and h_q
    int head;
    int index;  // of the tile in the tile list
  };

  FA_DEVICE Place place(const Job& work) const {
    const Query query(work, stop(work), params.group);
    const Query at = located(work, query);
    return {at.m_block, first_row_group(work, at), at.head, query.m_block};
  }

  /// To the next query tile, of the same head or, from its first visible tile on, of the next; or all of that
  /// backwards.
  FA_DEVICE void advance(Place& place, const Job& work) const {
    constexpr int kGroups = kTileM / kernel::kRowGroup;
    if constexpr (kLists) {
      const int before = place.m_block;
      if (++place.index == work.steps.stop) {
        place.index = 0;
        ++place.head;
        place.row_group += params.padded_rows / kernel::kRowGroup;
      }
      place.m_block = query_tile(work, place.index);
      place.row_group += (place.m_block - before) * kGroups;
    } else if constexpr (kOrdered) {
      const int first = work.steps.first;
      place.row_group -= kGroups;
      if (place.m_block-- != first) return;
      place.row_group -= params.padded_rows / kernel::kRowGroup - (stop(work) - first) * kGroups;
      place.m_block = stop(work) - 1;
      --place.head;
    } else {
      const int first = work.steps.first;
      place.row_group += kGroups;
      if (++place.m_block < stop(work)) return;
      place.row_group += params.padded_rows / kernel::kRowGroup - (stop(work) - first) * kGroups;
      place.m_block = first;
      ++place.head;
    }
  }

  // ---- additions to dQ: another thread beside the producer

  /// Adds dQ of every step to the accumulator; with one order when it is this key tile's turn.
  FA_DEVICE void add_dq() const {
    ptx::griddepcontrol_wait();  // for the cleared accumulator and counters
    int count = 0;               // steps added
    for (int round = 0; has_job(round); ++round) {
      const Job work = job_for_copies(round);
      if (work.has_steps()) {
        const int end_in_front = kOrdered ? end_of_tile_in_front(work, round) : 0;
        Place at = place(work);
        FA_UNROLL_BY(1)
        for (int left = work.steps.end - work.steps.begin; left != 0; --left) {
          if constexpr (kOrdered) {  // beside the products
            if (at.m_block * kTileM < end_in_front) ptx::await_global(turn_of(at), work.tile.block);
          }
          ptx::mbarrier_wait(dq_full(), static_cast<uint32_t>(count) % 2);
          add_tile(work, at);
          ++count;
          advance(at, work);
        }
      }
      if constexpr (kVarlen) ptx::mbarrier_arrive(job_empty(round % 2));
    }
  }

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
    return params.dq_turns + int64_t{at.row_group} * kernel::kTurnsPerGroup;
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

  // Copies that have landed. Where a packed tensor goes on behind the sequence, rows of others do not count, nor do
  // rows that keep no key: they become zeros, since what is multiplied by 0 need not be finite.

  FA_DEVICE void await_keys(const Job& work, uint32_t parity) const {
    ptx::mbarrier_wait(k_full(), parity);
    if constexpr (kVarlen) clear_rows<KTile, kTileN>(k_shared(), work.lengths.s_kv - work.first_key());
  }
  FA_DEVICE void await_values(const Job& work, uint32_t parity) const {
    ptx::mbarrier_wait(v_full(), parity);
    if constexpr (kVarlen) clear_rows<VTile, kTileN>(v_shared(), work.lengths.s_kv - work.first_key());
  }
  FA_DEVICE void await_q(int count) const {
    const int stage = stage_of(count);
    ptx::mbarrier_wait(q_full(stage), parity_of(count));
  }
  FA_DEVICE void await_dout(int count) const {
    [[maybe_unused]] const int stage = stage_of(count);
    ptx::mbarrier_wait(do_full(stage), parity_of(count));
  }

  /// Rows of a query tile that may keep keys.
  struct Rows {
    int begin;
    int end;
  };

  /// Those that masks in closed form and, of a packed batch, the sequence's end leave. Behind the last row of a dense
  /// batch are zeros.
  FA_DEVICE Rows rows_with_keys(const Job& work, const Place& place) const {
    const int first = place.m_block * kTileM;
    Rows rows{0, kTileM};
    if constexpr (Config::kCausal || Variant::kChunked) {
      rows.begin =
          kernel::minimum(kernel::keeping_begin<Config::kCausal, Variant>(params, work.lengths) - first, kTileM);
    }
    if constexpr (kTwoSided) rows.end = kernel::maximum(kernel::keeping_end<Variant>(params, work.lengths) - first, 0);
    if constexpr (kVarlen) rows.end = kernel::minimum(rows.end, work.lengths.s_q - first);
    return rows;
  }

  /// Asked in front of the wait for Q, lest the first product waits for the answer.
  FA_DEVICE bool has_rows_without_keys(const Job& work, const Place& place) const {
    if constexpr (kTwoSided || Variant::kChunked || kVarlen) {
      const Rows rows = rows_with_keys(work, place);
      return rows.begin > 0 || rows.end < kTileM;
    }
    return Config::kCausal && place.m_block * kTileM < -work.lengths.causal_shift;
  }

  /// Zeros in the other rows of Q and dO, and statistics of no weight. No product may be reading the tiles: with
  /// kLanded, Q has landed and dO may be on its way; else both have been read once by all.
  template <bool kLanded>
  FA_DEVICE void clear_rows_without_keys(bool has_some, const Job& work, const Place& place, int count) const {
    if constexpr (Config::kCausal || kTwoSided || kVarlen) {
      if (has_some) {
        const Rows rows = rows_with_keys(work, place);
        const int stage = stage_of(count);
        begin_to_clear<kLanded>(count);
        fill_stats(lse_shared(stage), rows, kernel::kInfinity);
        fill_stats(delta_shared(stage), rows, 0.f);
        clear_rows<QTile>(q_shared(stage), rows);
        clear_rows<DoTile>(do_shared(stage), rows);
        end_to_clear();
      }
    }
    if constexpr (Variant::kMask) {
      const int stage = stage_of(count);
      if (has_weightless_rows(work, place, stage)) {
        begin_to_clear<kLanded>(count);
        clear_weightless_rows<QTile>(q_shared(stage), stage);
        clear_weightless_rows<DoTile>(do_shared(stage), stage);
        end_to_clear();
      }
    }
  }
  template <bool kLanded>
  FA_DEVICE void begin_to_clear(int count) const {
    if constexpr (kLanded) {
      await_dout(count);
    } else {
      ptx::barrier_sync(first_of(NamedBarrier::clean_tiles),
                        kConsumers * kWarpgroup);  // no warpgroup's products read the tiles
    }
  }
  FA_DEVICE void end_to_clear() const {
    ptx::fence_proxy_async();
    ptx::barrier_sync(first_of(NamedBarrier::clean_tiles), kConsumers * kWarpgroup);  // the tiles are clean for all
  }

  FA_DEVICE static int consumer_thread() { return ptx::thread_index() - kWarpgroup; }

  static constexpr int kRowChunks = 8;  // of a slab

  /// Zeros in the rows of a tile from `valid` on, by all consumers.
  template <class Tile, int kRows>
  FA_DEVICE void clear_rows(uint32_t tile, int valid) const {
    if (valid >= kRows) return;
    FA_UNROLL_BY(1)
    for (int i = valid * kRowChunks + consumer_thread(); i < kRows * kRowChunks; i += kConsumers * kWarpgroup) {
      clear_chunk<Tile>(tile, i);
    }
    end_to_clear();
  }
  /// Likewise in those before and behind `rows`; one small loop, because it lies in the way of the main one.
  template <class Tile>
  FA_DEVICE void clear_rows(uint32_t tile, const Rows& rows) const {
    FA_UNROLL_BY(1)
    for (int i = consumer_thread(); i < kTileM * kRowChunks; i += kConsumers * kWarpgroup) {
      const int row = i / kRowChunks;
      if (row < rows.begin || row >= rows.end) clear_chunk<Tile>(tile, i);
    }
  }
  /// Zeros in a row's chunk of each slab.
  template <class Tile>
  FA_DEVICE static void clear_chunk(uint32_t tile, int i) {
    FA_UNROLL
    for (int slab = 0; slab < Tile::kSlabs; ++slab) {
      ptx::st_shared_chunk(tile + slab * Tile::kSlabBytes + i * kernel::kChunkBytes, {});
    }
  }

  /// Statistics of the same rows.
  FA_DEVICE void fill_stats(uint32_t stats, const Rows& rows, float value) const {
    FA_UNROLL_BY(1)
    for (int i = consumer_thread(); i < kTileM; i += kConsumers * kWarpgroup) {
      if (i < rows.begin || i >= rows.end) ptx::st_shared_b32(stats + 4 * i, ptx::bits(value));
    }
  }

  // Rows of a query tile that a mask function leaves no key, as their log-sum-exp tells.

  FA_DEVICE bool is_weightless(int row, int stage) const {
    return ptx::from_bits(ptx::ld_shared_b32(lse_shared(stage) + 4 * row)) == kernel::kInfinity;
  }
  /// The answer is the same in all warps.
  FA_DEVICE bool has_weightless_rows(const Job& work, const Place& place, int stage) const {
    const int rows = work.lengths.s_q - place.m_block * kTileM;  // behind them are others, of no weight
    bool any = false;
    FA_UNROLL
    for (int row = lane_index(); row < kTileM; row += kWarpSize) {
      any = any || (row < rows && is_weightless(row, stage));
    }
    return ptx::vote_any(any);
  }
  template <class Tile>
  FA_DEVICE void clear_weightless_rows(uint32_t tile, int stage) const {
    FA_UNROLL_BY(1)
    for (int i = consumer_thread(); i < kTileM * kRowChunks; i += kConsumers * kWarpgroup) {
      if (is_weightless(i / kRowChunks, stage)) clear_chunk<Tile>(tile, i);
    }
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
    Place next = place(work);

    await_keys(work, parity);
    await_q(count);
    clear_rows_without_keys<true>(has_rows_without_keys(work, next), work, next, count);
    issue_scores(s, stage_of(count), consumer_index());
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(s);
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
        const bool hides = kHides && Config::kWriteDq && hides_keys(again(work, round), next);
        if (!hides) release(k_empty());
        release(step_empty(stage));
        if constexpr (Config::kWriteDq) {
          ptx::wgmma_tie(dq);
          hand_over_dq(dq, rows, consumer_index(), count, hides);
        }
        if (hides) release(k_empty());
        return true;
      }
      [[maybe_unused]] bool hides = false;
      if constexpr (kHides && kAsksEarly) hides = hides_keys(again(work, round), next);
      advance(next, work);
      const int consumer = consumer_index();
      const bool clears = has_rows_without_keys(again(work, round), next);
      await_q(count);
      clear_rows_without_keys<true>(clears, again(work, round), next, count);
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
      if constexpr (Config::kWriteDq) {
        if constexpr (kHides && !kAsksEarly) hides = hid_keys(again(work, round), next);
        hand_over_dq(dq, rows, consumer_index(), count, hides);
      }
      if constexpr (kTileM > 64) {  // there are no registers for the operand beside dP
        ptx::wgmma_wait<0>();       // dV
        tie_dv(dv);
      }
      issue_dp(dp, stage_of(count), consumer_index());
    }
  }

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
    Place next = place(work);

    await_keys(work, parity);
    await_q(count);
    clear_rows_without_keys<true>(has_rows_without_keys(work, next), work, next, count);
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
    take_weights(weights, s, drops, stage_of(count), again(work, round), next, first_key);
    for (; left > 1; --left) {
      const int stage = stage_of(count);
      const int buffer = count % 2;
      const int rows = rows_of(work, next);
      const bool hides = kHides && hides_keys(again(work, round), next);
      ++count;
      advance(next, work);
      const bool clears = has_rows_without_keys(again(work, round), next);
      await_q(count);
      clear_rows_without_keys<true>(clears, again(work, round), next, count);
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
      hand_over_dq(dq, rows, consumer_index(), count, hides);
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
    const bool hides = kHides && hides_keys(again(work, round), next);
    hand_over_dq(dq, rows_of(work, next), consumer_index(), count, hides);
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
  FA_DEVICE void issue_scores_of(S& s, const Keys<kQkSteps>& keys, int stage) const {
    if constexpr (kKeysInRegisters) {
      issue_from_registers<QTile>(s, keys, q_shared(stage));
    } else {
      issue_scores(s, stage, consumer_index());
    }
  }
  FA_DEVICE void issue_dp_of(S& dp, const Keys<kVSteps>& values, int stage) const {
    if constexpr (kKeysInRegisters) {
      issue_from_registers<DoTile>(dp, values, do_shared(stage));
    } else {
      issue_dp(dp, stage, consumer_index());
    }
  }
  template <class Tile, int kSteps>
  FA_DEVICE static void issue_from_registers(S& s, const Keys<kSteps>& keys, uint32_t rows) {
    ptx::wgmma_forget(s);
    ptx::wgmma_fence();
    FA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      SGemm::template registers<false>(s, keys[step], Tile::k_major(described(rows), 0, step), step != 0);
    }
    ptx::wgmma_commit();
  }

  /// P^T and what is dropped of it, from S^T, whose registers the next product takes.
  FA_DEVICE void take_weights(S& weights, const S& s, Drops& drops, int stage, const Job& work, const Place& place,
                              int first_key) const {
    FA_UNROLL
    for (int i = 0; i < kTileM / 2; ++i) weights[i] = s[i];
    exponentiate(weights, stage, work, place, first_key);
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
    Place next = place(work);

    await_keys(work, parity);
    await_q(count);
    issue_scores(s, stage_of(count), consumer_index());
    await_values(work, parity);
    await_dout(count);
    issue_dp(dp, stage_of(count), consumer_index());

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
      clear_rows_without_keys<false>(has_rows_without_keys(work, next), work, next, count - 1);
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
        const bool hides = kHides && Config::kWriteDq && hides_keys(again(work, round), next);
        if (!hides) release(k_empty());
        release(step_empty(stage));
        if constexpr (Config::kWriteDq) {
          ptx::wgmma_tie(dq);
          hand_over_dq(dq, rows, consumer_index(), count, hides);
        }
        if (hides) release(k_empty());
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
        hand_over_dq(dq, rows, consumer_index(), count, kHides && hid_keys(again(work, round), next));
      }
      await_q(count);
      issue_scores(s, stage_of(count), consumer_index());
    }
  }

  FA_DEVICE Functions functions(const Job& work, const Place& place, int stage) const {
    const uint32_t statistics = static_cast<uint32_t>(8 * (lane_index() % 4));
    return {params,
            work.lengths,
            work.tile.batch,
            place.head,
            place.m_block * kTileM,
            work.first_key(),
            lse_shared(stage) + statistics,
            delta_shared(stage) + statistics,
            true};
  }

  /// S^T becomes P^T, and dP^T becomes dS^T.
  FA_DEVICE void apply_functions(S& s, S& dp, typename Functions::CaptureGradients& by_capture, const Job& work,
                                 const Place& place, int stage, const typename Functions::Loaded& loaded) const {
    const Functions scores = functions(work, place, stage);
    const bool whole = Variant::kMask ? is_kept<true>(work, place) : scores.plain();
    scores.template differentiate<kLoadAhead>(s, dp, by_capture, whole, loaded);
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

  /// The same of the tile before `next`; true too where that is of another head.
  FA_DEVICE bool hid_keys(const Job& work, const Place& next) const {
    Place last = next;
    if constexpr (kLists) {
      if (last.index-- == 0) return true;
    } else if constexpr (kOrdered) {
      if (++last.m_block == stop(work)) return true;
    } else {
      if (last.m_block-- == work.steps.first) return true;
    }
    return hides_keys(work, last);
  }

  /// Rows of the query tile that are the sequence's; dense batches have padding for all of them.
  FA_DEVICE int rows_of(const Job& work, const Place& place) const {
    if constexpr (kVarlen) return work.lengths.s_q - place.m_block * kTileM;
    return kTileM;
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
      SGemm::template shared<false>(s, KTile::k_major(described(k_shared()), consumer * 64, step),
                                    QTile::k_major(described(q_shared(stage)), 0, step), step != 0);
    }
    ptx::wgmma_commit();
  }

  /// Starts dP^T = V dO^T, [64, tile_m].
  FA_DEVICE void issue_dp(S& dp, int stage, int consumer) const {
    ptx::wgmma_forget(dp);
    ptx::wgmma_fence();
    FA_UNROLL
    for (int step = 0; step < kVSteps; ++step) {
      SGemm::template shared<false>(dp, VTile::k_major(described(v_shared()), consumer * 64, step),
                                    DoTile::k_major(described(do_shared(stage)), 0, step), step != 0);
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
      Gemm::template registers<true>(sum, operand[step], Tile::mn_major(described(tile), step), true);
    }
    ptx::wgmma_commit();
  }

  FA_DEVICE void issue_dv(Dv& dv, const Operand& weights, uint32_t tile) const {
    if constexpr (kWantsDv) issue_registers<DvGemm, DoTile>(dv, weights, tile);
  }
  FA_DEVICE void issue_dk(Dk& dk, const Operand& ds, uint32_t tile) const {
    if constexpr (kWantsDk) issue_registers<DkGemm, QTile>(dk, ds, tile);
  }
  FA_DEVICE static void tie_dv(Dv& dv) {
    if constexpr (kWantsDv) ptx::wgmma_tie(dv);
  }
  FA_DEVICE static void tie_dk(Dk& dk) {
    if constexpr (kWantsDk) ptx::wgmma_tie(dk);
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
      DqGemm::template shared<true>(dq, DsTile::k_major(described(ds_shared(buffer)), row, step),
                                    KTile::mn_major(described(k_shared() + columns), step), step != 0);
    }
    ptx::wgmma_commit();
  }

  /// P^T = exp2(scale_log2 * S^T - LSE), 0 where masked. `first_key`: the warp's first key.
  FA_DEVICE void exponentiate(S& s, int stage, const Job& work, const Place& place, int first_key) const {
    const int lane = lane_index();
    FA_UNROLL
    for (int j = 0; j < kTileM / 8; ++j) {
      float row[2];
      ptx::ld_shared_f32x2(row, lse_shared(stage) + 8 * (lane % 4) + 32 * j);
      FA_UNROLL
      for (int i = 0; i < 4; ++i) s[4 * j + i] = ptx::ex2(ptx::fma(s[4 * j + i], params.scale_log2, -row[i % 2]));
    }
    if constexpr (kLists) {
      if (!is_kept<false>(work, place)) functions(work, place, stage).hide(s);
    }
    if constexpr (kTwoSided) {
      mask_two_sided(s, work, place.m_block, first_key);
      return;
    }
    // Behind it only rows would see a key that are not there.
    const int key_end = kernel::keys_end<Config::kCausal, Variant>(params, work.lengths, work.lengths.s_q - 1);
    if (first_key + 16 > key_end) {
      FA_UNROLL
      for (int i = 0; i < kTileM / 2; ++i) {
        if (first_key + lane / 4 + i / 2 % 2 * 8 >= key_end) s[i] = 0.f;
      }
    }
    const int first_limit = place.m_block * kTileM + work.lengths.causal_shift - first_key;  // of the tile's first row
    if (Config::kCausal && first_limit < 15) {
      const int limit = first_limit + 2 * (lane % 4) - lane / 4;
      FA_UNROLL
      for (int i = 0; i < kTileM / 2; ++i) {
        if (limit + i / 4 * 8 + i % 2 < i / 2 % 2 * 8) s[i] = 0.f;
      }
    }
  }

  /// P^T = 0 outside of windows and chunks, which keep each key for the rows between two.
  FA_DEVICE void mask_two_sided(S& s, const Job& work, int m_block, int first_key) const {
    const int first_row = m_block * kTileM;
    if (first_key + 16 <= work.lengths.s_kv &&
        kernel::rows_begin<Config::kCausal, Variant>(params, work.lengths, first_key + 15) <= first_row &&
        kernel::rows_end<Variant>(params, work.lengths, first_key) >= first_row + kTileM) {
      return;
    }
    const int lane = lane_index();
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int key = first_key + lane / 4 + 8 * r;
      const int first_query = first_row + 2 * (lane % 4);  // of this thread
      const int begin = kernel::rows_begin<Config::kCausal, Variant>(params, work.lengths, key) - first_query;
      const int rows_end = kernel::rows_end<Variant>(params, work.lengths, key) - first_query;
      const int end = key < work.lengths.s_kv ? rows_end : begin;
      FA_UNROLL
      for (int j = 0; j < kTileM / 8; ++j) {
        FA_UNROLL
        for (int e = 0; e < 2; ++e) {
          if (8 * j + e < begin || 8 * j + e >= end) s[4 * j + 2 * r + e] = 0.f;
        }
      }
    }
  }

  /// Which elements of P^T are dropped.
  FA_DEVICE void draw(Drops& drops, const Job& work, const Place& place, int first_key) const {
    const kernel::Dropout dropout(params.dropout, static_cast<int64_t>(work.tile.batch) * params.h_q + place.head);
    const int lane = lane_index();
    FA_UNROLL
    for (int i = 0; i < kTileM / 64; ++i) {
      drops[i] = dropout.draw_transposed<8>(first_key, place.m_block * kTileM + 64 * i, lane);
    }
  }
  FA_DEVICE static bool dropped(const Drops& drops, int i) {
    return kernel::Dropout::dropped(drops[i / 32], i % 32 / 4, i % 4);
  }

  /// dS^T = P^T o (dP^T - delta). With dropout keep * dS^T = P^T o (Z^T o dP^T - keep * delta), Z being 0 where P was
  /// dropped: what is missing of dK, dQ and dV is their factor 1 / keep.
  FA_DEVICE void differentiate(S& dp, const S& s, uint32_t delta, [[maybe_unused]] const Drops& drops) const {
    const int lane = lane_index();
    FA_UNROLL
    for (int j = 0; j < kTileM / 8; ++j) {
      float row[2];
      ptx::ld_shared_f32x2(row, delta + 8 * (lane % 4) + 32 * j);
      FA_UNROLL
      for (int i = 4 * j; i < 4 * j + 4; ++i) {
        if constexpr (kDropout) {
          dp[i] = s[i] * ptx::fma(row[i % 2], -params.dropout.keep, dropped(drops, i) ? 0.f : dp[i]);
        } else {
          dp[i] = s[i] * (dp[i] - row[i % 2]);
        }
      }
    }
  }

  /// Accumulators become the A operand of the next product.
  FA_DEVICE static void pack(Operand& operand, const S& s) {
    FA_UNROLL
    for (int i = 0; i < kTileM / 4; ++i) operand[i / 4][i % 4] = ptx::convert_pair<T>(s[2 * i], s[2 * i + 1]);
  }

  /// Likewise P^T, or Z^T o P^T.
  FA_DEVICE static void pack_weights(Operand& operand, const S& s, [[maybe_unused]] const Drops& drops) {
    if constexpr (kDropout) {
      FA_UNROLL
      for (int i = 0; i < kTileM / 4; ++i) {
        const uint32_t pair = ptx::convert_pair<T>(s[2 * i], s[2 * i + 1]);
        operand[i / 4][i % 4] = pair & ~kernel::Dropout::dropped_pair(drops[i / 16], i % 16 / 2, i % 2);
      }
    } else {
      pack(operand, s);
    }
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

  /// Leaves a warp's 16 rows of dQ, in the order in which they lie in registers, for the thread that adds them. `rows`:
  /// how many of the tile count, `count`: steps taken with this one, `hides`: whether dS is 0 for keys that may be NaN.
  FA_DEVICE void hand_over_dq(Dq& dq, [[maybe_unused]] int rows, int consumer, int count,
                              [[maybe_unused]] bool hides) const {
    constexpr int kColumnGroups = kHeadDimQk / 8;
    // Behind the wait, which ends a block of instructions anyway: a branch behind the stores costs d 64 2 %. With 64
    // rows there are no registers for that.
    constexpr bool kHidesEarly = kHides && kTileM > 64;
    const int column_group = kDqByRows ? 0 : 8 * consumer;
    const int lane = lane_index();
    const int row_group = warp_index() + (kDqByRows ? 4 * consumer : 0);  // of the tile
    const uint32_t own = shared + kLayout.dq + row_group * kDqRowBytes + column_group * 512 + lane * 16;
    ptx::mbarrier_wait(dq_empty(), static_cast<uint32_t>(count) % 2);  // the last step's has left
    if constexpr (kHidesEarly) {
      if (hides && kernel::any_infinite(dq)) {
        multiply_by_finite_keys_of(column_group, row_group, count, own);
        FA_UNROLL
        for (int j = 0; j < kDqColumns / 8; ++j) {
          const kernel::Chunk chunk = ptx::ld_shared_chunk(own + j * 512);
          FA_UNROLL
          for (int i = 0; i < 4; ++i) dq[4 * j + i] = ptx::from_bits(chunk.word[i]);
        }
      }
    }
    if (!kVarlen || 16 * row_group < rows) {
      FA_UNROLL
      for (int j = 0; j < kDqColumns / 8; ++j) {
        if (column_group + j >= kColumnGroups) break;
        ptx::st_shared_chunk(own + j * 512, {{ptx::bits(dq[4 * j]), ptx::bits(dq[4 * j + 1]), ptx::bits(dq[4 * j + 2]),
                                              ptx::bits(dq[4 * j + 3])}});
      }
    }
    if constexpr (kHides && !kHidesEarly) {
      if (hides && kernel::any_infinite(dq)) multiply_by_finite_keys_of(column_group, row_group, count, own);
    }
    ptx::fence_proxy_async();
    ptx::sync_warp();  // these rows are complete, for the copy engine too
    if (lane == 0) ptx::mbarrier_arrive(dq_full());
  }

  /// A warp's dQ of the step before `count` once more, into its place in shared memory.
  FA_DEVICE void multiply_by_finite_keys_of(int column_group, int row_group, int count, uint32_t own) const {
    const int fragments = kernel::minimum(kDqColumns / 8, kHeadDimQk / 8 - column_group);
    multiply_by_finite_keys<T, DsTile, kTileN>(own, fragments, ds_shared((count - 1) % 2), 16 * row_group,
                                               k_shared() + column_group / 8 * KTile::kSlabBytes, lane_index());
  }
};

template <class Config>
FA_DEVICE void backward(const AllParamsOf<Config>& params) {
  Backward<Config>(params).run();
}

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_BACKWARD_CUH_
