#ifndef FA_TEMPLATES_SM90_SM90_BACKWARD_JOBS_CUH_
#define FA_TEMPLATES_SM90_SM90_BACKWARD_JOBS_CUH_

#include <common/backward_schedule.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <common/variant_backward.cuh>
#include <ptx/language.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <ptx/wgmma.cuh>
#include <sm90/sm90_backward_block.cuh>
#include <sm90/sm90_backward_cluster.cuh>
#include <sm90/sm90_ring.cuh>

namespace fa::sm90 {

/// The key tiles that a block takes, and the query tiles of each: of the grid, or of a packed batch as a warp finds
/// and tells them.
template <class Config>
struct BackwardJobs : BackwardBlock<Config> {
  using Base = BackwardBlock<Config>;
  using Variant = typename Base::Variant;
  using Lengths = typename Base::Lengths;
  using Base::Base;
  using Base::kTileM, Base::kTileN, Base::kVarlen, Base::kOrdered, Base::kSplitBlocks, Base::kInTurns, Base::kTwoSided,
      Base::kLists, Base::kTilesShared, Base::kTilesOffset, Base::params, Base::shared, Base::tiles, Base::job_shared,
      Base::job_full, Base::job_empty, Base::lane_index;

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
      return job_in_slot(round % 2);
    } else {
      constexpr bool kSections = Config::kCausal || kOrdered;
      BackwardTile tile;
      if constexpr (kInTurns) {
        tile =
            kernel::backward_tile_in_turns<Variant, kSections>(params, tile_index(round), params.n_blocks, params.h_kv);
      } else {
        tile =
            kernel::backward_tile<Variant, kSections, false>(params, tile_index(round), params.n_blocks, params.h_kv);
      }
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
    if constexpr (kOrdered && !kVarlen) {
      return static_cast<int64_t>(first_row_group(job, query)) * kernel::kRowGroup;
    }
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
    } else if constexpr (kInTurns) {
      return round == 0;  // a block has one tile
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

  FA_DEVICE Job job_in_slot(int slot) const {
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
    if constexpr (kVarlen) return job_in_slot(round % 2);
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

  /// A consumer's place in the stream of query tiles.
  struct Place {
    int m_block;
    int row_group;  // of the tile's first 16 rows, counted over b and h_q
    int head;
    int index;  // of the tile in the tile list
  };

  FA_DEVICE Place place_of(const Job& work) const {
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

  /// Rows of the query tile that are the sequence's; dense batches have padding for all of them.
  FA_DEVICE int rows_of(const Job& work, const Place& place) const {
    if constexpr (kVarlen) return work.lengths.s_q - place.m_block * kTileM;
    return kTileM;
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_BACKWARD_JOBS_CUH_
