#ifndef FA_TEMPLATES_SM90_SM90_EPILOGUE_CUH_
#define FA_TEMPLATES_SM90_SM90_EPILOGUE_CUH_

#include <common/accumulate.cuh>
#include <common/log_sum.cuh>
#include <common/transpose.cuh>
#include <common/variant.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/ldmatrix.cuh>
#include <ptx/math.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <ptx/tma.cuh>
#include <sm90/sm90_cluster_parts.cuh>
#include <sm90/sm90_pieces.cuh>
#include <sm90/sm90_roles.cuh>
#include <sm90/sm90_row_statistics.cuh>
#include <sm90/sm90_schedule.cuh>
#include <sm90/sm90_whole_tiles.cuh>

namespace fa::sm90 {

/// O of two rows times a factor each.
template <int kCount>
FA_DEVICE void multiply(float (&o)[kCount], const float (&factor)[2]) {
  FA_UNROLL
  for (int i = 0; i < kCount; ++i) o[i] *= factor[i / 2 % 2];
}

/// What O of two rows is multiplied with, and with kAccumulate what the state counts (kernel::Joined).
template <bool kAccumulate>
struct RowFactors {
  float keys[2];
};
template <>
struct RowFactors<true> {
  float keys[2];
  float state[2];
};
/// With what a block of a cluster leaves for the others beside O, and where the first rows go that a warp merges:
/// nullptr for rows that there are not.
template <class T>
struct SharedRowFactors {
  struct Merged {
    T* o[2];
    float* lse[2];
  };
  float keys[2];
  kernel::SplitSum sums[2];
  Merged merged;
};
/// With where a split leaves its rows; -1 of one that there is not.
struct SplitRowFactors {
  float keys[2];
  int64_t row[2];
};
/// What ends a query tile: the log-sum-exp of its rows, and O on its way to memory; and query tiles that no key is
/// visible to.
template <class Traits>
struct Epilogue : Schedule<Traits> {
  using Base = Schedule<Traits>;
  using T = typename Base::T;
  using Variant = typename Base::Variant;
  using O = typename Base::O;
  using Rows = typename Base::Rows;
  using Softmax = typename Base::Softmax;
  using OTile = typename Base::OTile;
  using Config = typename Base::Config;
  using Query = typename Base::Query;
  using Base::kTileM, Base::kHeadDimV, Base::kQBuffers, Base::kConsumers, Base::kPingpong, Base::kVarlen,
      Base::kDropout, Base::kStageO, Base::kPostsPieces, Base::kShares, Base::kLeavesSplits, Base::kSplitBlocks,
      Base::kMergesInCluster, Base::kWholeTiles, Base::p, Base::params, Base::q_shared, Base::q_empty,
      Base::listed_shared, Base::softmax_scale_log2, Base::rounds, Base::has_tile, Base::splits_of_tile,
      Base::lengths_of, Base::first_row_of, Base::has_row, Base::row_count, Base::has_rows, Base::query_of_round,
      Base::for_each_piece;

  static constexpr bool kAccumulate = kernel::kAccumulate<Config> && !Config::kSplit;  // splits join later
  static_assert(!kernel::kAccumulate<Config> || !Variant::kSink, "the state has the sink");
  static_assert(!kAccumulate || !Base::kStatistics, "the state's P is not known");
  static_assert(!kMergesInCluster || !kernel::kAccumulate<Config>, "what is merged is the result");
  using FactorsOfSplits = typename kernel::Either<WholeRowFactors<SplitRowFactors>, SplitRowFactors, kWholeTiles>::type;
  using Factors =
      typename kernel::Either<typename kernel::Either<SharedRowFactors<T>, FactorsOfSplits, kMergesInCluster>::type,
                              RowFactors<kAccumulate>, kLeavesSplits>::type;
  using MergedRows = typename SharedRowFactors<T>::Merged;
  static constexpr int kTiles = kHeadDimV / 8;
  using Parts = ClusterParts<kSplitBlocks, kTiles>;
  static_assert(!kMergesInCluster || Parts::kBytes <= Base::kLayout.mbarriers - Base::kLayout.k,
                "K and V have as much room");

  FA_DEVICE explicit Epilogue(const Schedule<Traits>& base) : Schedule<Traits>(base) {}

  FA_DEVICE T* o_row(const Query& query, const Rows& rows, int row) const {
    return static_cast<T*>(params.o) + first_row(query, params.stride_o_b, params.stride_o_s) +
           rows.query_head(row) * params.stride_o_h + rows.position(row) * params.stride_o_s;
  }

  /// Offset of the batch entry's first row.
  FA_DEVICE int64_t first_row(const Query& query, int64_t stride_b, int64_t stride_s) const {
    return kernel::offset_of_rows<kVarlen>(lengths_of(query), query.tile.batch, stride_b, stride_s);
  }

  /// Offset of a row of the batch entry.
  FA_DEVICE int64_t offset_of(const Query& query, int row, int64_t stride_b, int64_t stride_h, int64_t stride_s) const {
    const Rows rows{params.group, query.tile.head};
    return first_row(query, stride_b, stride_s) + rows.query_head(row) * stride_h + rows.position(row) * stride_s;
  }

  /// Whether other parts have keys of the query tile too.
  FA_DEVICE static bool is_part(const Query& query) { return !query.sharing.piece().is_whole(); }

  /// The log-sum-exp of a finished query tile's rows, and the factors that turn the accumulators into O. Of a tile that
  /// a block has whole each split finishes, and the last one `ends`.
  FA_DEVICE void finish_rows(Softmax& softmax, Factors& factors, const Query& query, int warp_row, int lane,
                             [[maybe_unused]] bool ends = true) const {
    float(&inverse_sum)[2] = factors.keys;
    softmax.finish();
    const Rows rows{params.group, query.tile.head};
    const int first_row = first_row_of(query) + warp_row + lane / 4;
    if constexpr (kWholeTiles) {
      if (query.whole) {
        if (warp_row == 0) {  // of the others there are no rows
          WholeTiles<Epilogue>{*this}.finish(softmax, factors, query, first_row, lane, ends);
        }
        return;
      }
    }
    using Sum = typename kernel::Either<kernel::SplitSum, kernel::LogSum, kLeavesSplits || kPostsPieces>::type;
    bool part = kLeavesSplits;
    if constexpr (kPostsPieces) part = is_part(query);
    Sum sums[2];
    float lse[2];
    [[maybe_unused]] float weight[2] = {1.f, 1.f};  // of the keys beside a sink
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      inverse_sum[r] = softmax.inverse_sum(r);
      sums[r] = softmax.template log_sum<Sum>(r, softmax_scale_log2());
      lse[r] = sums[r].value();
      if constexpr (Variant::kSink && !kLeavesSplits) {  // which joins parts once
        if (!part) {
          const float keys = lse[r];
          lse[r] = kernel::log_add(keys, kernel::sink_of(params.variant, rows.query_head(first_row + 8 * r)));
          weight[r] = kernel::weight_of(keys, lse[r]);
          inverse_sum[r] *= weight[r];
        }
      }
      if constexpr (kDropout) inverse_sum[r] *= params.dropout.inverse_keep;
      if constexpr (kAccumulate) {
        const int row = first_row + 8 * r;
        const bool inside = has_row(query, row);
        const kernel::Joined joined =
            kernel::join(lse[r], inside ? kernel::state_lse(lse_row(query, rows, row)) : -kInfinity);
        lse[r] = joined.lse;
        inverse_sum[r] *= joined.keys;
        factors.state[r] = joined.state;
      }
    }
    if constexpr (kAccumulate) ptx::sync_warp();  // the state's log-sum-exp is read, in whose place the result goes
    if constexpr (Base::kStatistics) {
      StatisticsOfRows<Epilogue>{*this}.store(softmax, query, first_row, lane, weight);
    }
    if constexpr (kLeavesSplits && !Base::kRowsAhead) find_rows(factors, query, warp_row, lane);
    if constexpr (kMergesInCluster) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) factors.sums[r] = sums[r];
      return;
    } else if constexpr (kLeavesSplits) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (factors.row[r] >= 0 && lane % 4 == 0) sums[r].store(params.partial_lse, factors.row[r]);
      }
      return;
    }
    if ((!part && params.lse == nullptr) || lane % 4 != 0) return;
    if constexpr (kPostsPieces) {
      if (part) {
        FA_UNROLL
        for (int r = 0; r < 2; ++r) {
          const int row = first_row + 8 * r;
          if (has_row(query, row)) sums[r].store(params.partial_lse, partial_row(query, rows, row));
        }
        return;
      }
    }
    float* const target = lse_row(query, rows, first_row);
    if (has_row(query, first_row)) ptx::st_global(target, lse[0]);
    if (has_row(query, first_row + 8)) {
      float* const second = target + 8 * params.stride_lse_s;
      ptx::st_global(Config::kPackGqa ? lse_row(query, rows, first_row + 8) : second, lse[1]);
    }
  }

  /// Where a split's rows of a query tile go: found before its first keys may be read, where that needs no memory.
  FA_DEVICE void find_rows(Factors& factors, const Query& query, int warp_row, int lane) const {
    if constexpr (kMergesInCluster) {
      factors.merged = merged_rows(query, first_columns(warp_row / 16), lane);
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        ptx::compute_ahead(factors.merged.o[r]);
        ptx::compute_ahead(factors.merged.lse[r]);
      }
    } else {
      const Rows rows{params.group, query.tile.head};
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int row = first_row_of(query) + warp_row + lane / 4 + 8 * r;
        factors.row[r] = has_row(query, row) ? partial_row(query, rows, row) : -1;
        ptx::compute_ahead(factors.row[r]);
      }
    }
  }

  /// O / sum. `q_buffer` is the Q buffer in use: the query tile's own one is the other. kEnds: no query tile follows.
  template <bool kEnds>
  FA_DEVICE void store(O& o, const Factors& factors, const Query& query, int warp_row, int lane, int q_buffer,
                       [[maybe_unused]] bool ends = true) const {
    if constexpr (kWholeTiles) {
      if (query.whole) {
        if (warp_row == 0) {
          WholeTiles<Epilogue>{*this}.fold(o, factors, query, lane, ends);
        }
        return;
      }
    }
    multiply(o, factors.keys);
    if constexpr (kAccumulate) add_states(o, factors, query, first_row_of(query) + warp_row, lane);
    if constexpr (kMergesInCluster) {
      merge_in_cluster(o, factors, query, warp_row, lane);
    } else if constexpr (kStageO) {
      store_staged(o, query, warp_row, lane, kQBuffers - 1 - q_buffer);
    } else {
      store_direct<kEnds>(o, factors, query, first_row_of(query) + warp_row, lane);
    }
  }

  /// What o in memory counts of a warp's rows.
  FA_DEVICE void add_states(O& o, const Factors& factors, const Query& query, int first_row, int lane) const {
    const Rows rows{params.group, query.tile.head};
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (!kernel::counts(factors.state[r])) continue;  // nor does a row outside of the batch
      const T* const source = o_row(query, rows, first_row + lane / 4 + 8 * r) + 2 * (lane % 4);
      FA_UNROLL
      for (int j = 0; j < kHeadDimV / 8; ++j) {
        kernel::add_state<true>(o[4 * j + 2 * r], o[4 * j + 2 * r + 1], factors.state[r], source + 8 * j);
      }
    }
  }

  /// Into [splits, b, h_q, s_q], or of a scheduled kernel into [2 parts, rows].
  FA_DEVICE int64_t partial_row(const Query& query, const Rows& rows, int row) const {
    if constexpr (kPostsPieces) {
      return partial_row_at(query, query.sharing.piece().place_of(ptx::block_index()), row);
    } else {
      const int64_t batch = static_cast<int64_t>(query.tile.split) * params.b + query.tile.batch;
      return (batch * params.h_q + rows.query_head(row)) * params.s_q + rows.position(row);
    }
  }
  FA_DEVICE static int counter_of(const kernel::Piece& piece) { return piece.first_part; }
  FA_DEVICE int64_t partial_row_at(const Query& query, int place, int row) const {
    return partial_row_of_part<kTileM, Config::kPackGqa>(params, query, place, row);
  }

  FA_DEVICE float* lse_row(const Query& query, const Rows& rows, int row) const {
    return params.lse + first_row(query, params.stride_lse_b, params.stride_lse_s) +
           rows.query_head(row) * params.stride_lse_h + rows.position(row) * params.stride_lse_s;
  }

  /// A warp's rows of O through the place of its rows of Q, by the copy engine.
  FA_DEVICE void store_staged(const O& o, const Query& query, int warp_row, int lane, int buffer) const {
    // Every warp of the warpgroup has left Q: with ping-pong scheduling, the barrier of this step has said so.
    if constexpr (!kPingpong)
      ptx::barrier_sync(first_of(NamedBarrier::staged_o) - 1 + ptx::thread_index() / kWarpgroup, kWarpgroup);
    const int place = ptx::thread_index() % kWarpSize;  // the lane, anew: no address is kept over the loop
    const int row = warp_row + place % 16;
    FA_UNROLL
    for (int block = 0; block < ceil_div(kHeadDimV, 16); ++block) {  // 16 columns
      const int chunk = 2 * block % 8 + place / 16;
      const uint32_t address =
          q_shared(buffer) + block / 4 * OTile::kSlabBytes + row * 128 + (chunk ^ row % 8) * kernel::kChunkBytes;
      uint32_t words[4] = {};
      FA_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (8 * block + 2 * i < kHeadDimV / 2) {
          words[i] = ptx::convert_pair<T>(o[8 * block + 2 * i], o[8 * block + 2 * i + 1]);
        }
      }
      if (16 * block + 16 <= kHeadDimV) {
        ptx::stmatrix_x4(address, words[0], words[1], words[2], words[3]);
      } else {
        ptx::stmatrix_x2(address, words[0], words[1]);
      }
    }
    ptx::fence_proxy_async();
    ptx::sync_warp();  // the warp's rows are complete, for the copy engine too
    const int first_row = first_row_of(query) + warp_row;
    if (lane == 0 && first_row >= 0) {  // the engine stores nowhere before the first row
      FA_UNROLL
      for (int slab = 0; slab < OTile::kSlabs; ++slab) {
        const uint32_t source = q_shared(buffer) + slab * OTile::kSlabBytes + warp_row * 128;
        if constexpr (kVarlen) {
          const kernel::Sequence& own = query.sequence;
          ptx::tma_store_5d(p.map_o, source, slab * kSlabColumns, kernel::kBoundedRows - own.s_q + first_row,
                            query.tile.head, own.first_row + own.s_q, kernel::kBoundedRows);
        } else {
          ptx::tma_store_5d(p.map_o, source, slab * kSlabColumns, query.head_in_group, first_row, query.kv_head,
                            query.tile.batch);
        }
      }
      ptx::tma_commit();
    }
  }

  /// The Q buffer from which this warp's O left is free for the next Q but one.
  FA_DEVICE void release_staged(int q_buffer, int lane) const {
    if (lane != 0) return;
    ptx::tma_wait_read();
    ptx::mbarrier_arrive(q_empty(kQBuffers - 1 - q_buffer));
  }

  /// A warp's rows of O from registers: the result, or a split's part of it.
  template <bool kEnds>
  FA_DEVICE void store_direct(const O& o, [[maybe_unused]] const Factors& factors, const Query& query, int first_row,
                              int lane) const {
    if constexpr (kWholeTiles) {  // found twice rather than kept
      const Rows rows{params.group, query.tile.head};
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int row = first_row + lane / 4 + 8 * r;
        if (has_row(query, row)) store_partial_row(o, r, partial_row(query, rows, row), lane);
      }
      return;
    }
    if constexpr (kLeavesSplits) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (factors.row[r] >= 0) store_partial_row(o, r, factors.row[r], lane);
      }
      return;
    }
    if constexpr (kPostsPieces) {
      if (is_part(query)) {
        store_partial(o, query, first_row, lane);
        merge_piece<kEnds>(*this, query, query.sharing.piece(), listed_shared(0));
        return;
      }
    }
    store_rows(o, query, first_row, lane);
  }

  /// Leaves this block's part of the query tile where its keys were, and stores some columns of the whole. Called by
  /// all consumers of the cluster.
  FA_DEVICE void merge_in_cluster(const O& o, const Factors& factors, const Query& query, int warp_row,
                                  int lane) const {
    const Parts parts{Base::shared + Base::kLayout.k};
    const int warp = warp_row / 16;
    ptx::barrier_sync(first_of(NamedBarrier::partial_rows), kWarpgroup);  // no warp's products read K and V
    const int rows_here = row_count(query) - first_row_of(query);
    if (16 * warp < rows_here) parts.leave(o, factors.sums, warp, lane);
    ptx::sync_warp();     // the barrier is of whole warps
    ptx::cluster_sync();  // the parts of all blocks are there
    MergedRows rows = factors.merged;
    FA_UNROLL_BY(1)
    for (int i = first_columns(warp); has_columns(i, rows_here);) {
      merge_columns(parts, query, rows, rows_here, i / kTiles, i % kTiles, lane);
      i += kSplitBlocks * Parts::kWarps;
      if (has_columns(i, rows_here)) rows = merged_rows(query, i, lane);
    }
    ptx::sync_warp();             // the barrier is of whole warps
    ptx::cluster_sync_relaxed();  // another block may still read parts here; what was stored is on its way
  }

  /// Warps of a cluster have its n8 tiles in turn: those of one warp's rows, then those of the next one's.
  FA_DEVICE static int first_columns(int warp) { return ptx::cluster_rank() * Parts::kWarps + warp; }
  FA_DEVICE static bool has_columns(int i, int rows_here) {
    return i < Parts::kWarps * kTiles && i / kTiles * 16 < rows_here;
  }
  FA_DEVICE int merged_row(const Query& query, int i, int r, int lane) const {
    return first_row_of(query) + i / kTiles * 16 + lane / 4 + 8 * r;
  }

  /// Where the two rows of such a tile go.
  FA_DEVICE MergedRows merged_rows(const Query& query, int i, int lane) const {
    const Rows rows{params.group, query.tile.head};
    const bool has_sums = i % kTiles == 0 && lane % 4 == 0 && params.lse != nullptr;
    MergedRows at;
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = merged_row(query, i, r, lane);
      const bool exists = has_row(query, row);
      at.o[r] = exists ? o_row(query, rows, row) + i % kTiles * 8 + lane % 4 * 2 : nullptr;
      at.lse[r] = exists && has_sums ? lse_row(query, rows, row) : nullptr;
    }
    return at;
  }

  /// Stores an n8 tile of the rows that warp `from` had, and with the first one their log-sum-exps.
  FA_DEVICE void merge_columns(const Parts& parts, const Query& query, const MergedRows& rows, int rows_here, int from,
                               int tile, int lane) const {
    kernel::SplitSum sinks[2] = {kernel::SplitSum::of_no_keys(), kernel::SplitSum::of_no_keys()};
    if constexpr (Variant::kSink) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (rows.o[r] == nullptr) continue;
        const int head = Rows{params.group, query.tile.head}.query_head(merged_row(query, from * kTiles, r, lane));
        sinks[r] = kernel::SplitSum::of_term(kernel::sink_of(params.variant, head));
      }
    }
    const bool exists = rows.o[0] != nullptr;
    const typename Parts::Loaded loaded = parts.load(exists, from, tile, lane);
    const typename Parts::Weights weights = parts.weigh(exists, rows_here > 16 * from + 8, from, lane, sinks);
    float o[4];
    parts.merge(o, loaded, weights);
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (rows.o[r] == nullptr) continue;
      ptx::st_global(reinterpret_cast<uint32_t*>(rows.o[r]), ptx::convert_pair<T>(o[2 * r], o[2 * r + 1]));
      if (rows.lse[r] != nullptr) ptx::st_global(rows.lse[r], weights.total[r].value());
    }
  }

  /// The same of a block that has no key of the tile.
  FA_DEVICE void merge_nothing(Factors& factors, const Query& query, int warp_row, int lane) const {
    O zeros = {};
    if constexpr (!Base::kRowsAhead) find_rows(factors, query, warp_row, lane);
    FA_UNROLL
    for (int r = 0; r < 2; ++r) factors.sums[r] = kernel::SplitSum::of_no_keys();
    merge_in_cluster(zeros, factors, query, warp_row, lane);
  }

  /// In float, normalised.
  FA_DEVICE void store_partial(const O& o, const Query& query, int first_row, int lane) const {
    const Rows rows{params.group, query.tile.head};
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + lane / 4 + 8 * r;
      if (row < row_count(query)) store_partial_row(o, r, partial_row(query, rows, row), lane);
    }
  }
  FA_DEVICE void store_partial_row(const O& o, int r, int64_t row, int lane) const {
    float* const target = params.partial_o + row * kHeadDimV + 2 * (lane % 4);
    FA_UNROLL
    for (int j = 0; j < kHeadDimV / 8; ++j) {
      if constexpr (kLeavesSplits || (kernel::kOwnParts<Config> && kHeadDimV <= 192)) {
        const uint64_t pair = ptx::bits(o[4 * j + 2 * r]) | uint64_t{ptx::bits(o[4 * j + 2 * r + 1])} << 32;
        ptx::st_global(reinterpret_cast<uint64_t*>(target + 8 * j), pair);
      } else {  // pairs take registers that schedules do not leave, beside posted work
        ptx::st_global(target + 8 * j, o[4 * j + 2 * r]);
        ptx::st_global(target + 8 * j + 1, o[4 * j + 2 * r + 1]);
      }
    }
  }

  /// Straight from registers: the four lanes of a quad exchange what they hold of four neighbouring n8 tiles, so that
  /// each stores 16 bytes.
  FA_DEVICE void store_rows(const O& o, const Query& query, int first_row, int lane) const {
    const Rows rows{params.group, query.tile.head};
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + lane / 4 + 8 * r;
      const bool inside = has_row(query, row);
      T* const target = o_row(query, rows, inside ? row : 0);
      FA_UNROLL
      for (int j = 0; j + 4 <= kHeadDimV / 8; j += 4) {
        uint32_t words[4];
        FA_UNROLL
        for (int i = 0; i < 4; ++i) {
          words[i] = ptx::convert_pair<T>(o[4 * (j + i) + 2 * r], o[4 * (j + i) + 2 * r + 1]);
        }
        kernel::transpose_quad(words, lane);
        if (inside) {
          ptx::st_global_chunk(target + 8 * (j + lane % 4), {{words[0], words[1], words[2], words[3]}});
        }
      }
      FA_UNROLL
      for (int j = kHeadDimV / 32 * 4; j < kHeadDimV / 8; ++j) {
        if (inside) {
          ptx::st_global(reinterpret_cast<uint32_t*>(target + 8 * j + 2 * (lane % 4)),
                         ptx::convert_pair<T>(o[4 * j + 2 * r], o[4 * j + 2 * r + 1]));
        }
      }
    }
  }

  /// This warp's rows of all query tiles that no key is visible to.
  FA_DEVICE void store_empty(int warp_row, int lane) const {
    const Rounds own = rounds();
    for (int round = own.begin; has_tile(own, round); ++round) {
      const Query work = query_of_round(round);
      if (work.range.begin < work.range.end) continue;
      if constexpr (kShares) {
        if (!is_empty_tile(work)) continue;
      }
      store_empty_rows(work, warp_row, lane);
    }
  }

  /// All rows of these tiles, by one warp, 16 bytes of O a lane: with few registers, which the consumers need.
  FA_DEVICE void store_empty_tiles(int lane) const {
    if constexpr (kPostsPieces) {  // parts of a tile have KV tiles
      for_each_piece([&](const Query& work) {
        if (!is_part(work)) store_empty_tile(work, lane);
      });
    } else if constexpr (kWholeTiles) {
      this->template for_each_split<true>([&](const Query& work) { store_empty_split(work, lane); });
    } else {
      const Rounds own = rounds();
      for (int round = own.begin; has_tile(own, round); ++round) store_empty_tile(query_of_round(round), lane);
    }
  }
  /// Of an empty tile that would be whole all splits are left.
  FA_DEVICE void store_empty_split(const Query& work, int lane) const {
    if (!work.whole) store_empty_tile(work, lane);
    if (!work.whole || work.range.begin < work.range.end) return;
    Query split = work;
    FA_UNROLL_BY(1)
    for (int i = 0; i < params.splits; ++i) {
      split.tile.split = i;
      store_empty_tile(split, lane);
    }
  }
  /// Of a tile without KV tiles for this block: whether there are none for others, and the block is the first of them.
  FA_DEVICE bool is_empty_tile(const Query& work) const { return work.tile.split == 0 && splits_of_tile(work) == 0; }
  FA_DEVICE void store_empty_tile(const Query& work, int lane) const {
    using Value = typename kernel::Either<float, T, kLeavesSplits>::type;
    constexpr int kColumns = kernel::kChunkBytes / sizeof(Value);
    constexpr int kChunks = kHeadDimV / kColumns;  // of a row
    if (work.range.begin < work.range.end || !has_rows(work)) return;
    if constexpr (kShares) {
      if (!is_empty_tile(work)) return;
    }
    const Rows rows{params.group, work.tile.head};
    const int place = first_row_of(work);
    const int first = place < 0 ? 0 : place;
    const int end = place + kTileM < row_count(work) ? place + kTileM : row_count(work);
    FA_UNROLL_BY(1)
    for (int i = lane; i < (end - first) * kChunks; i += kWarpSize) {
      const int row = first + i / kChunks;
      const int column = i % kChunks * kColumns;
      if constexpr (kAccumulate) {  // a state stays what it is
        if (kernel::state_lse(lse_row(work, rows, row)) != -kInfinity) continue;
      }
      if constexpr (kLeavesSplits) {
        ptx::st_global_chunk(params.partial_o + partial_row(work, rows, row) * kHeadDimV + column, {});
      } else {
        ptx::st_global_chunk(o_row(work, rows, row) + column, o_without_keys(rows.query_head(row)));
      }
      if (column != 0) continue;
      if constexpr (kLeavesSplits) {
        kernel::SplitSum::of_no_keys().store(params.partial_lse, partial_row(work, rows, row));
      } else if (params.lse != nullptr) {
        ptx::st_global(lse_row(work, rows, row), lse_without_keys(rows.query_head(row)));
      }
    }
  }

  /// Log-sum-exp of a row that no key is visible to: that of the sink alone.
  FA_DEVICE float lse_without_keys(int query_head) const {
    if constexpr (Variant::kSink && !kLeavesSplits) {
      return kernel::log_add(-kInfinity, kernel::sink_of(params.variant, query_head));
    } else {
      return -kInfinity;
    }
  }

  /// Eight elements of O of such a row: 0, but of a sink without a sum.
  FA_DEVICE kernel::Chunk o_without_keys(int query_head) const {
    if constexpr (Variant::kSink) {
      const float weight = kernel::weight_of(-kInfinity, lse_without_keys(query_head));
      const uint32_t pair = ptx::convert_pair<T>(weight, weight);
      return {{pair, pair, pair, pair}};
    } else {
      return {};
    }
  }

  /// O = 0, log-sum-exp = -inf or the sink's logit.
  FA_DEVICE void store_empty_rows(const Query& work, int warp_row, int lane) const {
    Softmax no_keys;
    Factors factors;
    if constexpr (Base::kRowsAhead) find_rows(factors, work, warp_row, lane);
    finish_rows(no_keys, factors, work, warp_row, lane);
    O zeros = {};
    if constexpr (Variant::kSink) multiply(zeros, factors.keys);  // NaN of a sink
    if constexpr (kAccumulate) add_states(zeros, factors, work, first_row_of(work) + warp_row, lane);
    store_direct<false>(zeros, factors, work, first_row_of(work) + warp_row, lane);
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_EPILOGUE_CUH_
