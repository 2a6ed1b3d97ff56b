#ifndef FA_TEMPLATES_SM90_SM90_PRODUCER_CUH_
#define FA_TEMPLATES_SM90_SM90_PRODUCER_CUH_

#include <common/forward_schedule.cuh>
#include <common/paged.cuh>
#include <common/sequences.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <ptx/tma.cuh>
#include <sm90/sm90_page_box.cuh>
#include <sm90/sm90_ring.cuh>
#include <sm90/sm90_schedule.cuh>

namespace fa::sm90 {

/// How long the L2 cache keeps K and V: blocks share them, but of decodes, where one block alone reads a KV head's.
/// What invariant ones leave of each split is read again, and is not to make room for them.
template <class Traits>
FA_DEVICE constexpr ptx::L2Policy key_policy() {
  if constexpr (requires { Traits::Config::kEvictFirst; }) return ptx::L2Policy::evict_first;
  return Traits::kKeepsPartials ? ptx::L2Policy::evict_first : ptx::L2Policy::evict_last;
}

/// The warps that load: a thread for Q and K, and one for V, each a ring of buffers ahead of the consumers. Their warps
/// join in where sequences have to be found, and over pages each lane copies a box of every KV tile.
template <class Traits>
struct Producer : Schedule<Traits> {
  using Base = Schedule<Traits>;
  using QTile = typename Base::QTile;
  using KTile = typename Base::KTile;
  using VTile = typename Base::VTile;
  using Config = typename Base::Config;
  using Query = typename Base::Query;
  using Base::kTileN, Base::kStages, Base::kQBuffers, Base::kVarlen, Base::kPaged, Base::kPageSize, Base::kBoxRows,
      Base::kBoxes, Base::kRagged, Base::kLists, Base::kWaves, Base::kDynamic, Base::kPostsPieces, Base::p,
      Base::params, Base::q_shared, Base::k_shared, Base::v_shared, Base::k_full, Base::k_empty, Base::v_full,
      Base::v_empty, Base::v_landed, Base::q_full, Base::q_empty, Base::work_full, Base::listed_shared, Base::tiles,
      Base::rounds, Base::has_tile, Base::first_row_of, Base::row_of_q, Base::query_of_round, Base::query_of,
      Base::pages_of, Base::for_each_piece, Base::for_each_split, Base::listed, Base::work_of, Base::post,
      Base::read_work, Base::read_first_key, Base::release;

  FA_DEVICE explicit Producer(const Schedule<Traits>& base) : Schedule<Traits>(base) {}

  // Where sequences have to be found or tiles are listed, copies of the loops that load spill.
  static constexpr int kLoadCopies = kWaves || kPostsPieces || (kDynamic && kRagged) ? 1 : 0;
  static constexpr ptx::L2Policy kKeyPolicy = key_policy<Traits>();

  FA_DEVICE void produce_q_and_k(bool leads) const {
    if constexpr (Base::kRolesWait) {
      if constexpr (!Base::kRowsAhead) ptx::griddepcontrol_wait();  // lengths and lists may be new
    } else {
      ptx::prefetch_tensor_map(p.map_q);
      ptx::prefetch_tensor_map(p.map_k);
      if constexpr (Base::kLeavesSplits && !Base::kMergesInCluster) allow_next();
    }
    RingSlot<kStages> k_slot;
    RingSlot<kQBuffers> q_slot;
    if constexpr (kDynamic) {
      int index = ptx::block_index();
      while (index < tiles) {
        // Asked for a query tile ahead: the answer is there when it is needed.
        int next = 0;
        if (leads) next = ptx::block_count() + ptx::atomic_add_global(params.next_tile, 1);
        const Query work = query_of(index);
        if (kPaged || leads) load_q_and_k(k_slot, q_slot, work);
        index = kRagged ? ptx::shfl(next, 0) : next;
      }
      if (!leads) return;
    } else if constexpr (kPostsPieces) {
      for_each_piece([&](const Query& work) { load_q_and_k(k_slot, q_slot, work); });
      if (!leads) return;
    } else if constexpr (Base::kWholeTiles) {
      bool known = false;  // to the consumers: which split is the last
      for_each_split([&](Query& work) {
        work.ahead.q_row = row_of_q(work);
        load_q_and_k(k_slot, q_slot, work);
        known = work.ahead.last && work.range.begin < work.range.end;
      });
      if (known || !leads) return;
    } else {
      const Rounds own = rounds();
      for (int round = own.begin; has_tile(own, round); ++round) {
        Query work = query_of_round(round);
        if constexpr (Base::kNamesLast) work.ahead = {!has_tile(own, round + 1), row_of_q(work)};
        if (Base::kRowsAhead && round == own.begin) {
          load_ahead(k_slot, q_slot, work);
        } else if (kPaged || leads) {
          load_q_and_k(k_slot, q_slot, work);
        }
        if constexpr (Base::kNamesLast) {
          if (work.ahead.last && work.range.begin < work.range.end) return;  // the consumers know
        }
      }
      if (!leads) return;
    }
    post_end(q_slot);
  }

  FA_DEVICE void post_end(const RingSlot<kQBuffers>& q_slot) const {
    ptx::mbarrier_wait(q_empty(q_slot.index), q_slot.parity ^ 1);  // all have read the descriptor that was there
    post(work_of(q_slot), {});                                     // the end: no KV tile
    if constexpr (kDynamic) ptx::mbarrier_arrive(work_full(q_slot.index));
    ptx::mbarrier_arrive(q_full(q_slot.index));
    ptx::griddepcontrol_launch_dependents();  // the last query tile is left
  }

  /// A kernel that merges few rows, or has few of its own, is to wait where it runs.
  FA_DEVICE void allow_next() const {
    if (kernel::merges_few_rows(params)) ptx::griddepcontrol_launch_dependents();
  }

  FA_DEVICE void load_q_and_k(RingSlot<kStages>& k_slot, RingSlot<kQBuffers>& q_slot, const Query& work) const {
    if (work.range.begin >= work.range.end) return;
    load_q_and_k(k_slot, q_slot, work, page_ahead(work.range.end - 1, work));
  }
  FA_DEVICE void load_q_and_k(RingSlot<kStages>& k_slot, RingSlot<kQBuffers>& q_slot, const Query& work,
                              int page) const {
    if (work.range.begin >= work.range.end) return;
    load_k(k_slot, work.range.end - 1, work, page);
    if (!kPaged || ptx::thread_index() == 0) {
      load_q(q_slot, work);
    } else {
      q_slot.advance();
    }
    FA_UNROLL_BY(kLoadCopies)
    for (int n = work.range.end - 2; n >= work.range.begin; --n) load_k(k_slot, n, work, page);
  }

  /// The same of a block's first tile of few rows. What needs nothing of the kernel before is done ahead of the wait
  /// for it, which copies alone come behind. Of later tiles no copy waits for the buffer of another.
  FA_DEVICE void load_ahead(RingSlot<kStages>& k_slot, RingSlot<kQBuffers>& q_slot, Query& work) const {
    if constexpr (Base::kRowsAhead) ptx::compute_ahead(work.ahead.q_row);
    const KvRange& range = work.range;
    if (range.begin < range.end) {
      announce_k(k_slot);
      announce_q(q_slot, work);
      RingSlot<kStages> second = k_slot;
      second.advance();
      if (range.begin < range.end - 1) announce_k(second);
    }
    ptx::griddepcontrol_wait();
    if (range.begin >= range.end) return;
    copy_k(k_slot, range.end - 1, work);
    copy_q(q_slot, work);
    if (range.begin < range.end - 1) copy_k(k_slot, range.end - 2, work);
    int page = 0;
    FA_UNROLL_BY(kLoadCopies)
    for (int n = range.end - 3; n >= range.begin; --n) load_k(k_slot, n, work, page);
  }

  FA_DEVICE void load_values_ahead(RingSlot<kStages>& v_slot, const Query& work) const {
    const KvRange& range = work.range;
    if (range.begin < range.end) {
      announce_v(v_slot);
      RingSlot<kStages> second = v_slot;
      second.advance();
      if (range.begin < range.end - 1) announce_v(second);
    }
    ptx::griddepcontrol_wait();
    if (range.begin >= range.end) return;
    copy_v(v_slot, range.end - 1, work);
    if (range.begin < range.end - 1) copy_v(v_slot, range.end - 2, work);
    int page = 0;
    FA_UNROLL_BY(kLoadCopies)
    for (int n = range.end - 3; n >= range.begin; --n) load_v(v_slot, n, work, page);
  }

  FA_DEVICE void load_values(RingSlot<kStages>& v_slot, const Query& work) const {
    if (work.range.begin >= work.range.end) return;
    load_values(v_slot, work, page_ahead(work.range.end - 1, work));
  }
  FA_DEVICE void load_values(RingSlot<kStages>& v_slot, const Query& work, int page) const {
    FA_UNROLL_BY(kLoadCopies)
    for (int n = work.range.end - 1; n >= work.range.begin; --n) load_v(v_slot, n, work, page);
  }

  FA_DEVICE void produce_v(bool leads) const {
    if constexpr (Base::kRolesWait) {
      if constexpr (!Base::kRowsAhead) ptx::griddepcontrol_wait();
    } else {
      ptx::prefetch_tensor_map(p.map_v);
    }
    RingSlot<kStages> v_slot;
    if constexpr (kDynamic) {
      if (!kPaged && !leads) return;
      RingSlot<kQBuffers> work_slot;
      while (true) {
        const Query work = take_work(work_slot);
        work_slot.advance();
        if (work.range.begin >= work.range.end) return;  // the end
        load_values(v_slot, work);
      }
    } else if constexpr (kPostsPieces) {
      for_each_piece([&](const Query& work) { load_values(v_slot, work); });
    } else if constexpr (Base::kWholeTiles) {
      for_each_split([&](const Query& work) { load_values(v_slot, work); });
    } else {
      const Rounds own = rounds();
      for (int round = own.begin; has_tile(own, round); ++round) {
        const Query work = query_of_round(round);
        if (Base::kRowsAhead && round == own.begin) {
          load_values_ahead(v_slot, work);
        } else if (kPaged || leads) {
          load_values(v_slot, work);
        }
      }
    }
  }

  /// A query tile as the work descriptor has it, which is released; and where its keys are. Over pages a whole warp.
  FA_DEVICE Query take_work(const RingSlot<kQBuffers>& slot) const {
    ptx::mbarrier_wait(work_full(slot.index), slot.parity);
    Query work = read_work(slot.index);
    if constexpr (kVarlen && !kPaged) work.sequence.first_key = read_first_key(slot.index);
    if constexpr (kPaged) {
      ptx::sync_warp();  // all lanes have read it
      release(q_empty(slot.index), ptx::thread_index() % kWarpSize);
      work.pages = pages_of(work);
    } else {
      ptx::mbarrier_arrive(q_empty(slot.index));
    }
    return work;
  }

  FA_DEVICE void load_k(RingSlot<kStages>& slot, int n, const Query& work, [[maybe_unused]] int& page) const {
    if constexpr (kPaged) {
      if constexpr (Base::kWideBoxes) {
        load_wide_boxes<KTile, false>(k_shared(slot.index), p.map_k, k_empty(slot.index), k_full(slot.index),
                                      slot.parity, n, work, page);
      } else {
        load_boxes<KTile>(k_shared(slot.index), p.map_k, k_empty(slot.index), k_full(slot.index), slot.parity, n, work,
                          page);
      }
      slot.advance();
      return;
    }
    if constexpr (kLists) n = listed(work, n);
    announce_k(slot, n);
    copy_k(slot, n, work);
  }
  FA_DEVICE void announce_k(const RingSlot<kStages>& slot, [[maybe_unused]] int n = 0) const {
    ptx::mbarrier_wait(k_empty(slot.index), slot.parity ^ 1);  // all have read what was there
    if constexpr (kLists) ptx::st_shared_b32(listed_shared(slot.index), static_cast<uint32_t>(n));
    ptx::mbarrier_arrive_expect_tx(k_full(slot.index), KTile::kBytes);
  }
  FA_DEVICE void copy_k(RingSlot<kStages>& slot, int n, const Query& work) const {
    load_keys<KTile>(k_shared(slot.index), p.map_k, k_full(slot.index), n, work);
    slot.advance();
  }

  FA_DEVICE void load_v(RingSlot<kStages>& slot, int n, const Query& work, [[maybe_unused]] int& page) const {
    if constexpr (kPaged) {
      if constexpr (Base::kWideBoxes) {
        load_wide_boxes<VTile, true>(v_shared(slot.index), p.map_v, v_empty(slot.index), v_full(slot.index),
                                     slot.parity, n, work, page);
      } else {
        load_boxes<VTile>(v_shared(slot.index), p.map_v, v_empty(slot.index), v_full(slot.index), slot.parity, n, work,
                          page);
      }
      slot.advance();
      return;
    }
    if constexpr (kLists) n = listed(work, n);
    announce_v(slot);
    copy_v(slot, n, work);
  }
  FA_DEVICE void announce_v(const RingSlot<kStages>& slot) const {
    ptx::mbarrier_wait(v_empty(slot.index), slot.parity ^ 1);  // all have read what was there
    ptx::mbarrier_arrive_expect_tx(v_full(slot.index), VTile::kBytes);
  }
  FA_DEVICE void copy_v(RingSlot<kStages>& slot, int n, const Query& work) const {
    load_keys<VTile>(v_shared(slot.index), p.map_v, v_full(slot.index), n, work);
    slot.advance();
  }

  /// KV tile n of K or V, [tile_n, d]; zeros behind the last key.
  template <class Tile>
  FA_DEVICE void load_keys(uint32_t tile, const kernel::TensorMap& map, uint32_t barrier, int n,
                           const Query& work) const {
    FA_UNROLL
    for (int slab = 0; slab < Tile::kSlabs; ++slab) {
      if constexpr (kVarlen) {
        const kernel::Sequence& keys = work.sequence;
        ptx::tma_load_5d(tile + slab * Tile::kSlabBytes, map, barrier, kKeyPolicy, slab * kSlabColumns,
                         kernel::kBoundedRows - keys.s_kv + n * kTileN, work.kv_head, keys.first_key + keys.s_kv,
                         kernel::kBoundedRows);
      } else {
        ptx::tma_load_4d(tile + slab * Tile::kSlabBytes, map, barrier, kKeyPolicy, slab * kSlabColumns, n * kTileN,
                         work.kv_head, work.tile.batch);
      }
    }
  }

  FA_DEVICE auto keys_of(const Query& work) const {
    return kernel::keys_in_cache<kPageSize>(params.paged, work.pages.table_row, work.pages.first_read,
                                            work.sequence.s_kv);
  }

  /// This lane's box of KV tile n.
  FA_DEVICE PageBox box_of(int n, const Query& work) const {
    const auto keys = keys_of(work);
    return page_box<kTileN, kBoxRows>(keys, params.paged.heads_a_page, work.kv_head, n,
                                      page_of_box<kTileN, kBoxRows>(keys, n));
  }

  /// The page of a box that is copied later, if that is asked for ahead.
  template <bool kGuessed = false>
  FA_DEVICE int page_ahead(int n, const Query& work) const {
    if constexpr (Base::kPagesAhead) return page_of_box<kTileN, kBoxRows, kGuessed>(keys_of(work), n);
    return 0;
  }
  /// Of the first KV tile of a query, whose lengths may be guessed.
  FA_DEVICE int first_page(const Query& work) const {
    return work.range.begin < work.range.end ? page_ahead<true>(work.range.end - 1, work) : 0;
  }

  /// This lane's box of KV tile n. Where its page has been asked for, that is `page`, which becomes the next KV tile's.
  template <bool kWide>
  FA_DEVICE auto box_and_next(int n, const Query& work, int& page) const {
    const auto keys = keys_of(work);
    if constexpr (!Base::kPagesAhead) page = page_of_box<kTileN, kBoxRows>(keys, n);
    const auto box = any_box<kWide, kTileN, kBoxRows>(keys, params.paged.heads_a_page, work.kv_head, n, page);
    page = page_ahead(n - 1, work);
    return box;
  }

  template <class Tile>
  FA_DEVICE static void announce_boxes(uint32_t empty, uint32_t full, uint32_t parity, int lane) {
    ptx::mbarrier_wait(empty, parity ^ 1);  // all have read what was there
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, Tile::kBytes);
    ptx::sync_warp();  // the barrier expects what the lanes copy
  }

  /// KV tile n of K or V, [tile_n, d], out of pages; a whole warp.
  template <class Tile>
  FA_DEVICE void load_boxes(uint32_t tile, const kernel::TensorMap& map, uint32_t empty, uint32_t full, uint32_t parity,
                            int n, const Query& work, int& page) const {
    const int lane = ptx::thread_index() % kWarpSize;
    const auto box = box_and_next<false>(n, work, page);  // while the buffer is in use
    announce_boxes<Tile>(empty, full, parity, lane);
    if (lane >= kBoxes) return;
    const uint32_t rows = tile + lane * (kBoxRows * Tile::kRowBytes);
    FA_UNROLL
    for (int slab = 0; slab < Tile::kSlabs; ++slab) {
      ptx::tma_load_5d(rows + slab * Tile::kSlabBytes, map, full, kKeyPolicy, slab * kSlabColumns, box.row, box.head,
                       box.end, box.wrap);
    }
  }

  /// The same in boxes of all columns, whole ones: rows behind the last key come along.
  template <class Tile, bool kClears>
  FA_DEVICE void load_wide_boxes(uint32_t tile, const kernel::TensorMap& map, uint32_t empty, uint32_t full,
                                 uint32_t parity, int n, const Query& work, int& page) const {
    const int lane = ptx::thread_index() % kWarpSize;
    const auto box = box_and_next<true>(n, work, page);
    const int end = work.sequence.s_kv - n * kTileN;  // behind the last key, in the tile
    const bool clears = kClears && end < kTileN && end % kBoxRows != 0;
    const uint32_t landed = clears ? v_landed() : full;
    announce_boxes<Tile>(empty, landed, parity, lane);
    if (lane < kBoxes) {
      ptx::tma_load_5d(tile + lane * (kBoxRows * Tile::kStepBytes), map, landed, kKeyPolicy, 0, 0, 0, box.rows,
                       box.head);
    }
    if (kClears && clears) clear_rows<Tile>(tile, end, full);
  }

  /// Zeros for the rows from `row` to the end of its box, whose P is 0: 0 may not be multiplied with what they hold.
  /// Then the buffer is full.
  template <class Tile>
  FA_DEVICE void clear_rows(uint32_t tile, int row, uint32_t full) const {
    const int lane = ptx::thread_index() % kWarpSize;
    ptx::mbarrier_wait(v_landed(), 0);
    const uint32_t chunk = tile + lane / 8 * Tile::kSlabBytes + lane % 8 * kernel::kChunkBytes;
    FA_UNROLL_BY(1)
    for (; row % kBoxRows != 0; ++row) {
      if (lane < 8 * Tile::kSlabs) {
        ptx::st_shared_chunk(chunk + row / 8 * (8 * Tile::kStepBytes) + row % 8 * Tile::kRowBytes, {{0, 0, 0, 0}});
      }
    }
    ptx::fence_proxy_async();  // in front of the products
    ptx::sync_warp();          // all lanes have waited, and written
    if (lane != 0) return;
    ptx::mbarrier_arrive(v_landed());  // whose next use is of an even phase again
    ptx::mbarrier_arrive(full);
  }

  FA_DEVICE void load_q(RingSlot<kQBuffers>& slot, const Query& work) const {
    announce_q(slot, work);
    copy_q(slot, work);
  }
  FA_DEVICE void announce_q(const RingSlot<kQBuffers>& slot, const Query& work) const {
    ptx::mbarrier_wait(q_empty(slot.index), slot.parity ^ 1);  // all have read what was there
    post(work_of(slot), work);
    if constexpr (kDynamic) ptx::mbarrier_arrive(work_full(slot.index));  // for the thread that copies V
    ptx::mbarrier_arrive_expect_tx(q_full(slot.index), QTile::kBytes);
  }
  FA_DEVICE void copy_q(RingSlot<kQBuffers>& slot, const Query& work) const {
    int row;
    if constexpr (Base::kNamesLast) {
      row = work.ahead.q_row;
    } else {
      row = row_of_q(work);
    }
    FA_UNROLL
    for (int slab = 0; slab < QTile::kSlabs; ++slab) {
      ptx::tma_load_5d(q_shared(slot.index) + slab * QTile::kSlabBytes, p.map_q, q_full(slot.index),
                       ptx::L2Policy::evict_first, slab * kSlabColumns, work.head_in_group, row, work.kv_head,
                       kVarlen ? 0 : work.tile.batch);
    }
    slot.advance();
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_PRODUCER_CUH_
