#ifndef FA_TEMPLATES_SM90_SM90_WIDE_PRODUCER_CUH_
#define FA_TEMPLATES_SM90_SM90_WIDE_PRODUCER_CUH_

#include <ptx/griddepcontrol.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/thread.cuh>
#include <ptx/tma.cuh>
#include <sm90/sm90_producer.cuh>
#include <sm90/sm90_wide_traits.cuh>

namespace fa::sm90 {

/// The warps that load. Warps 0 and 1 copy the units of KV tiles, each its own, in the order in which they become free;
/// warp 2 copies Q and posts work descriptors. Over pages each lane copies a box of every slab.
template <class Config>
struct WideProducer : WideBlock<Config> {
  using Base = WideBlock<Config>;
  using Traits = typename Base::Traits;
  using Query = typename Base::Query;
  using Piece = typename Base::Piece;
  using QTile = typename Traits::QTile;
  using KTile = typename Traits::KTile;
  using Traits::kTileM, Traits::kTileN, Traits::kStages, Traits::kVarlen, Traits::kPaged, Traits::kValueInKey,
      Traits::kKSlabs, Traits::kHalfSlabs, Traits::kUnits, Traits::kFirstSlab, Traits::kFirstSlabs, Traits::kBoxes,
      Traits::kBoxRows, Traits::kMulticast, Base::p, Base::params, Base::k_shared, Base::half_shared, Base::q_shared,
      Base::landed, Base::emptied, Base::query_landed, Base::query_read, Base::tiles_of, Base::for_each_work;

  FA_DEVICE explicit WideProducer(const Base& base) : Base(base) {}

  FA_DEVICE void run() const {
    const int warp = ptx::shfl(ptx::thread_index() / kWarpSize, 0);
    if (warp < 2) load_tiles(warp);
    if (warp == 2) load_queries();
  }

  /// Units 2 * warp and 2 * warp + 1 of all KV tiles.
  FA_DEVICE void load_tiles(int warp) const {
    ptx::prefetch_tensor_map(p.map_k);
    if constexpr (!kValueInKey) ptx::prefetch_tensor_map(p.map_v);
    int count = 0;  // of KV tiles so far
    for_each_work([&](const Query& query, const Piece&) {
      FA_UNROLL_BY(1)
      for (int n = query.range.end - 1; n >= query.range.begin; --n, ++count) load_tile(warp, count, n, query);
    });
  }

  FA_DEVICE void load_tile(int warp, int i, int n, const Query& query) const {
    PageBox box = {};
    if constexpr (kPaged) box = Producer<Traits>(*this).box_of(n, query);  // while the buffers are in use
    if (warp == 0) {
      if constexpr (kFirstSlabs > 0) load_keys<kFirstSlab, kFirstSlabs, 0>(i, n, query, box);
      if constexpr (kValueInKey) {
        load_half<0>(i, n, query, box);
      } else {
        load_keys<kFirstSlabs, kKSlabs - kFirstSlabs, 1>(i, n, query, box);
      }
    } else if constexpr (kValueInKey) {
      load_half<1>(i, n, query, box);
    } else {
      load_values<0>(i, n, query, box);
      load_values<1>(i, n, query, box);
    }
  }

  /// The slabs of K that are a half of V, from part kPart on.
  template <int kHalf, int kPart = 0>
  FA_DEVICE void load_half(int i, int n, const Query& query, const PageBox& box) const {
    constexpr int kParts = Traits::kOutputParts, kSlabs = Traits::kPartSlabs;
    load_keys<kHalf * kHalfSlabs + kPart * kSlabs, kSlabs, 1 + kHalf * kParts + kPart>(i, n, query, box);
    if constexpr (kPart + 1 < kParts) load_half<kHalf, kPart + 1>(i, n, query, box);
  }

  /// Until all have read the unit of the buffer that KV tile number i takes.
  FA_DEVICE void await_empty(int i, int unit) const {
    const uint32_t barrier = emptied(i % kStages, unit);
    const uint32_t parity = i / kStages % 2 ^ 1;
    if constexpr (kMulticast) {
      ptx::mbarrier_wait_cluster(barrier, parity);
      // No lane is a phase behind: the other block's copies alone may make this buffer full, and empty again.
      ptx::sync_warp();
    } else {
      ptx::mbarrier_wait(barrier, parity);
    }
  }

  /// Slabs of K, [tile_n, 64] each, of KV tile number i of the block's: tile n of the query's.
  template <int kFrom, int kSlabs, int kUnit>
  FA_DEVICE void load_keys(int i, int n, const Query& query, const PageBox& box) const {
    await_empty(i, kUnit);
    if (ptx::thread_index() % kWarpSize == 0) {
      FA_UNROLL
      for (int slab = kFrom; slab < kFrom + kSlabs; ++slab) {
        ptx::mbarrier_arrive_expect_tx(landed(i, slab), KTile::kSlabBytes);
      }
    }
    ptx::sync_warp();  // the barriers expect what the lanes copy
    FA_UNROLL
    for (int slab = kFrom; slab < kFrom + kSlabs; ++slab) {
      if (kMulticast && slab % Traits::kClusterBlocks != this->rank()) continue;  // the other block copies it
      load_slab(k_shared(i % kStages) + slab * KTile::kSlabBytes, p.map_k, landed(i, slab), slab, n, query, box);
    }
  }

  /// A half of V, [tile_n, kHalfColumns].
  template <int kHalf>
  FA_DEVICE void load_values(int i, int n, const Query& query, const PageBox& box) const {
    const uint32_t full = landed(i, kKSlabs + kHalf);
    await_empty(i, 2 + kHalf);
    if (ptx::thread_index() % kWarpSize == 0) ptx::mbarrier_arrive_expect_tx(full, Traits::VHalf::kBytes);
    ptx::sync_warp();  // the barrier expects what the lanes copy
    FA_UNROLL
    for (int slab = 0; slab < kHalfSlabs; ++slab) {
      if (kMulticast && slab % Traits::kClusterBlocks != this->rank()) continue;
      load_slab(half_shared(i % kStages, kHalf) + slab * KTile::kSlabBytes, p.map_v, full, kHalf * kHalfSlabs + slab, n,
                query, box);
    }
  }

  /// 64 columns of KV tile n; zeros behind the last key and behind the last column.
  FA_DEVICE void load_slab(uint32_t tile, const kernel::TensorMap& map, uint32_t full, int slab, int n,
                           const Query& query, [[maybe_unused]] const PageBox& box) const {
    const int lane = ptx::thread_index() % kWarpSize;
    const int column = slab * kSlabColumns;
    if constexpr (kPaged) {
      if (lane >= kBoxes) return;
      if constexpr (kMulticast) {
        constexpr uint16_t kAll = (1 << Traits::kClusterBlocks) - 1;
        ptx::tma_load_5d_multicast(tile + lane * (kBoxRows * KTile::kRowBytes), map, full, kAll,
                                   ptx::L2Policy::evict_last, column, box.row, box.head, box.end, box.wrap);
        return;
      }
      ptx::tma_load_5d(tile + lane * (kBoxRows * KTile::kRowBytes), map, full, ptx::L2Policy::evict_last, column,
                       box.row, box.head, box.end, box.wrap);
    } else if constexpr (kVarlen) {
      if (lane != 0) return;
      const kernel::Sequence& keys = query.sequence;
      ptx::tma_load_5d(tile, map, full, ptx::L2Policy::evict_last, column,
                       kernel::kBoundedRows - keys.s_kv + n * kTileN, query.kv_head, keys.first_key + keys.s_kv,
                       kernel::kBoundedRows);
    } else {
      if (lane != 0) return;
      ptx::tma_load_4d(tile, map, full, ptx::L2Policy::evict_last, column, n * kTileN, query.kv_head, query.tile.batch);
    }
  }

  FA_DEVICE void load_queries() const {
    const bool leads = ptx::thread_index() % kWarpSize == 0;
    ptx::prefetch_tensor_map(p.map_q);
    int count = 0;  // of pieces so far
    for_each_work([&](const Query& query, const Piece& piece) {
      if (leads) load_query(count, query, piece);
      ++count;
    });
    if (!leads) return;
    ptx::mbarrier_wait(query_read(), count % 2 ^ 1);  // two descriptors alternate: the last but one is read
    this->post_piece(count % 2, {}, {}, false);
    ptx::mbarrier_arrive(query_landed());
    ptx::griddepcontrol_launch_dependents();  // the last query tile is left
  }

  /// Q, [64, d_qk]: rows of heads in a box where these are packed.
  FA_DEVICE void load_query(int count, const Query& query, const Piece& piece) const {
    ptx::mbarrier_wait(query_read(), count % 2 ^ 1);  // all have read the Q that was there
    this->post_piece(count % 2, query, piece, true);
    if (tiles_of(query) == 0) {
      ptx::mbarrier_arrive(query_landed());
      return;
    }
    ptx::mbarrier_arrive_expect_tx(query_landed(), QTile::kBytes);
    const int first = query.tile.m_block * kTileM;
    int row = Config::kPackGqa ? first / params.group : first;
    if constexpr (kVarlen) row += query.sequence.first_row;  // rows behind the sequence come along, and are not stored
    FA_UNROLL
    for (int slab = 0; slab < QTile::kSlabs; ++slab) {
      ptx::tma_load_5d(q_shared(0) + slab * QTile::kSlabBytes, p.map_q, query_landed(), ptx::L2Policy::evict_first,
                       slab * kSlabColumns, query.head_in_group, row, query.kv_head, kVarlen ? 0 : query.tile.batch);
    }
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_WIDE_PRODUCER_CUH_
