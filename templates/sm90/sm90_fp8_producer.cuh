#ifndef FA_TEMPLATES_SM90_SM90_FP8_PRODUCER_CUH_
#define FA_TEMPLATES_SM90_SM90_FP8_PRODUCER_CUH_

#include <ptx/fp8.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/ldmatrix.cuh>
#include <ptx/math.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <ptx/tma.cuh>
#include <sm90/sm90_fp8_traits.cuh>
#include <sm90/sm90_page_box.cuh>
#include <sm90/sm90_ring.cuh>

namespace fa::sm90 {

/// The warps that load, and those that transpose V. Warp 0 finds query tiles, posts work descriptors and copies Q, K
/// and V, over pages a box each lane; the others transpose what has landed of V, or with kPrecise widen it.
template <class Config>
struct Fp8Producer : Fp8Block<Config> {
  using Base = Fp8Block<Config>;
  using Traits = typename Base::Traits;
  using Query = typename Traits::Query;
  using QTile = typename Traits::QTile;
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::VTile;
  using LandedTile = typename Traits::LandedTile;
  using Traits::kTileN, Traits::kHeadDimV, Traits::kPaged, Traits::kRagged, Traits::kBoxRows, Traits::kStages,
      Traits::kQBuffers, Traits::kWorks, Traits::kVarlen, Traits::kTransposers, Base::p, Base::params, Base::q_shared,
      Base::k_shared, Base::v_shared, Base::landed_shared, Base::listed_shared, Base::k_full, Base::k_empty,
      Base::v_full, Base::v_empty, Base::q_full, Base::q_empty, Base::landed, Base::taken, Base::rounds, Base::has_tile,
      Base::has_rows, Base::query_of_round, Base::first_row_of, Base::tiles_of;

  static constexpr int kFirstTransposer = 1;
  static_assert(kFirstTransposer + kTransposers <= kWarpgroup / kWarpSize, "warps of the producer");
  static constexpr int kBoxColumns = 2 * kSlabColumns;  // of 8 bits
  static constexpr uint32_t kEven = 0x6420, kOdd = 0x7531;

  FA_DEVICE explicit Fp8Producer(const Base& base) : Base(base) {}

  FA_DEVICE void run() const {
    const int warp = ptx::shfl(ptx::thread_index() / kWarpSize, 0);
    const int lane = ptx::thread_index() % kWarpSize;
    if (warp == 0 && (kRagged || lane == 0)) load(lane == 0);
    if (warp >= kFirstTransposer) transpose(warp - kFirstTransposer, lane);
  }

  struct Slots {
    RingSlot<kStages> k, v;
    RingSlot<kQBuffers> q;
    RingSlot<kWorks> work;
  };

  FA_DEVICE void load(bool leads) const {
    ptx::prefetch_tensor_map(p.map_q);
    ptx::prefetch_tensor_map(p.map_k);
    ptx::prefetch_tensor_map(p.map_v);
    Slots slots;
    const Rounds own = rounds();
    FA_UNROLL_BY(1)
    for (int round = own.begin; has_tile(own, round); ++round) {
      const Query query = query_of_round(round);
      if ((kPaged || leads) && has_rows(query)) load_query(slots, query, leads);
    }
    if (!leads) return;
    Query end = {};
    end.range.end = -1;
    ptx::mbarrier_wait(q_empty(slots.q.index), slots.q.parity ^ 1);  // all have read the descriptor that was there
    this->post(slots.work.index, end);
    ptx::mbarrier_arrive(q_full(slots.q.index));
    await_taken(slots.v);
    ptx::st_shared_b32(listed_shared(slots.v.index), 0);
    ptx::mbarrier_arrive(landed(slots.v.index));
    ptx::griddepcontrol_launch_dependents();  // the last query tile is left
  }

  FA_DEVICE void load_query(Slots& slots, const Query& query, bool leads) const {
    int n = query.range.end - 1;
    if (tiles_of(query) > 0) load_k(slots.k, n, query);
    if (leads) load_q(slots, query);
    slots.q.advance();
    slots.work.advance();
    if (tiles_of(query) <= 0) return;
    load_v(slots.v, n, query);
    FA_UNROLL_BY(1)
    for (--n; n >= query.range.begin; --n) {
      load_k(slots.k, n, query);
      load_v(slots.v, n, query);
    }
  }

  FA_DEVICE void load_q(Slots& slots, const Query& query) const {
    const uint32_t full = q_full(slots.q.index);
    ptx::mbarrier_wait(q_empty(slots.q.index), slots.q.parity ^ 1);  // all have read what was there
    this->post(slots.work.index, query);
    if (tiles_of(query) > 0) {
      ptx::mbarrier_arrive_expect_tx(full, QTile::kBytes);
      const int first = first_row_of(query);
      int row = Config::kPackGqa ? first / params.group : first;
      if constexpr (kVarlen) row += query.sequence.first_row;  // rows behind the sequence come along, unstored
      FA_UNROLL
      for (int slab = 0; slab < QTile::kSlabs; ++slab) {
        ptx::tma_load_5d(q_shared(slots.q.index) + slab * QTile::kSlabBytes, p.map_q, full, ptx::L2Policy::evict_first,
                         slab * kBoxColumns, query.head_in_group, row, query.kv_head, kVarlen ? 0 : query.tile.batch);
      }
    } else {
      ptx::mbarrier_arrive(full);
    }
  }

  FA_DEVICE void load_k(RingSlot<kStages>& slot, int n, const Query& query) const {
    ptx::mbarrier_wait(k_empty(slot.index), slot.parity ^ 1);  // all have read what was there
    if (leads()) ptx::mbarrier_arrive_expect_tx(k_full(slot.index), KTile::kBytes);
    load_keys<KTile>(k_shared(slot.index), p.map_k, k_full(slot.index), n, query);
    slot.advance();
  }

  FA_DEVICE void load_v(RingSlot<kStages>& slot, int n, const Query& query) const {
    await_taken(slot);
    if (leads()) {
      ptx::st_shared_b32(listed_shared(slot.index), 1);
      ptx::mbarrier_arrive_expect_tx(landed(slot.index), LandedTile::kBytes);
    }
    load_keys<LandedTile>(landed_shared(slot.index), p.map_v, landed(slot.index), n, query);
    slot.advance();
  }

  /// What was in the buffer is transposed.
  FA_DEVICE void await_taken(const RingSlot<kStages>& slot) const {
    ptx::mbarrier_wait(taken(slot.index), slot.parity ^ 1);
  }

  /// Over pages all lanes load, and one speaks for them.
  static FA_DEVICE bool leads() { return !kPaged || ptx::thread_index() == 0; }

  /// KV tile n of K or V, [tile_n, d], out of pages; a whole warp.
  template <class Tile>
  FA_DEVICE void load_boxes(uint32_t tile, const kernel::TensorMap& map, uint32_t barrier, int n,
                            const Query& query) const {
    const int lane = ptx::thread_index() % kWarpSize;
    const auto keys = this->keys_of(query, query.pages);
    const PageBox box = page_box<kTileN, kBoxRows>(keys, params.paged.heads_a_page, query.kv_head, n,
                                                   page_of_box<kTileN, kBoxRows>(keys, n));
    ptx::sync_warp();  // the barrier expects what the lanes copy
    if (lane >= Traits::kBoxes) return;
    const uint32_t rows = tile + lane * (kBoxRows * Tile::kRowBytes);
    FA_UNROLL
    for (int slab = 0; slab < Tile::kSlabs; ++slab) {
      ptx::tma_load_5d(rows + slab * Tile::kSlabBytes, map, barrier, ptx::L2Policy::evict_last, slab * kBoxColumns,
                       box.row, box.head, box.end, box.wrap);
    }
  }

  /// KV tile n of K or V, [tile_n, d]; zeros behind the last key.
  template <class Tile>
  FA_DEVICE void load_keys(uint32_t tile, const kernel::TensorMap& map, uint32_t barrier, int n,
                           const Query& query) const {
    if constexpr (kPaged) {
      load_boxes<Tile>(tile, map, barrier, n, query);
    } else {
      FA_UNROLL
      for (int slab = 0; slab < Tile::kSlabs; ++slab) {
        const uint32_t to = tile + slab * Tile::kSlabBytes;
        const int column = slab * kBoxColumns;
        if constexpr (kVarlen) {
          const kernel::Sequence& keys = query.sequence;
          ptx::tma_load_5d(to, map, barrier, ptx::L2Policy::evict_last, column,
                           kernel::kBoundedRows - keys.s_kv + n * kTileN, query.kv_head, keys.first_key + keys.s_kv,
                           kernel::kBoundedRows);
        } else {
          ptx::tma_load_4d(to, map, barrier, ptx::L2Policy::evict_last, column, n * kTileN, query.kv_head,
                           query.tile.batch);
        }
      }
    }
  }

  /// V of every KV tile, [tile_n, d_v], becomes [d_v, tile_n]: wgmma takes 8-bit operands K-major alone.
  FA_DEVICE void transpose(int which, int lane) const {
    RingSlot<kStages> slot;
    while (true) {
      ptx::mbarrier_wait(landed(slot.index), slot.parity);
      if (ptx::ld_shared_b32(listed_shared(slot.index)) == 0) return;
      ptx::mbarrier_wait(v_empty(slot.index), slot.parity ^ 1);  // consumers have read what was there
      if constexpr (Traits::kPrecise) {
        widen_tile(landed_shared(slot.index), v_shared(slot.index), which, lane);
      } else {
        transpose_tile(landed_shared(slot.index), v_shared(slot.index), which, lane);
      }
      ptx::fence_proxy_async();  // products read it
      ptx::sync_warp();          // all lanes have read and written
      if (lane == 0) {
        ptx::mbarrier_arrive(v_full(slot.index));
        ptx::mbarrier_arrive(taken(slot.index));
      }
      slot.advance();
    }
  }

  /// V as f16, of every kTransposers-th 16 columns. Eight lanes have eight keys, whose chunks lie in all banks. Of 16
  /// columns the even ones come first, so that a consumer's thread has four neighbours of O (Fp8Epilogue).
  FA_DEVICE static void widen_tile(uint32_t source, uint32_t target, int which, int lane) {
    constexpr int kKeyBlocks = kernel::ceil_div(kTileN, 32);
    constexpr int kTogether = kKeyBlocks % 2 == 0 ? 2 : 1;
    const uint32_t key = static_cast<uint32_t>(lane), row = key % 8;
    const auto has_key = [&](uint32_t block) { return kTileN % 32 == 0 || block * 32 + key < kTileN; };
    FA_UNROLL_BY(1)
    for (uint32_t columns = static_cast<uint32_t>(which); columns < kHeadDimV / 16; columns += kTransposers) {
      const uint32_t from = source + key * LandedTile::kRowBytes + columns / 8 * LandedTile::kSlabBytes +
                            (columns % 8 ^ row) * kernel::kChunkBytes;
      const uint32_t to = target + key * VTile::kRowBytes + columns / 4 * VTile::kSlabBytes +
                          (columns % 4 * 2 ^ row) * kernel::kChunkBytes;
      FA_UNROLL_BY(1)
      for (uint32_t first = 0; first < kKeyBlocks; first += kTogether) {
        kernel::Chunk bytes[kTogether];  // loads are in flight together
        FA_UNROLL
        for (uint32_t i = 0; i < kTogether; ++i) {
          if (has_key(first + i)) bytes[i] = ptx::ld_shared_chunk(from + (first + i) * 32 * LandedTile::kRowBytes);
        }
        FA_UNROLL
        for (uint32_t i = 0; i < kTogether; ++i) {
          if (!has_key(first + i)) continue;
          const uint32_t to_keys = to + (first + i) * 32 * VTile::kRowBytes;
          store_wide(to_keys, bytes[i], kEven);
          store_wide(to_keys ^ kernel::kChunkBytes, bytes[i], kOdd);
        }
      }
    }
  }
  /// Every other byte of 16.
  FA_DEVICE static void store_wide(uint32_t to, const kernel::Chunk& bytes, uint32_t every_other) {
    kernel::Chunk wide;
    FA_UNROLL
    for (int i = 0; i < 2; ++i) {
      ptx::widen_bytes<typename Traits::Value>(wide.word[2 * i], wide.word[2 * i + 1],
                                               ptx::prmt(bytes.word[2 * i], bytes.word[2 * i + 1], every_other));
    }
    ptx::st_shared_chunk(to, wide);
  }

  /// Of blocks of 32 keys and 16 columns those of every kTransposers-th 16 columns. With t = lane % 4, c = lane / 4 a
  /// lane gets columns 2c and 2c + 1 of keys 2t, 2t + 1, 8 + 2t and 9 + 2t of 16. These keys become neighbours: place
  /// 4t + 2h + e of 16 is key 8h + 2t + e, as the accumulators of S have them where the operand P wants neighbours. Of
  /// 16 columns even ones become rows 0 to 7 and odd ones rows 8 to 15, which no two lanes find in one bank; a
  /// consumer's thread has four neighbouring columns of O then (Fp8Epilogue).
  FA_DEVICE static void transpose_tile(uint32_t source, uint32_t target, int which, int lane) {
    constexpr int kKeyBlocks = kTileN / 32;
    constexpr int kTogether = kKeyBlocks % 4 == 0 ? 4 : kKeyBlocks % 2 == 0 ? 2 : 1;
    const uint32_t row = static_cast<uint32_t>(lane) % 8;
    const uint32_t matrix = static_cast<uint32_t>(lane) / 8;
    const uint32_t from = source + static_cast<uint32_t>(lane) * LandedTile::kRowBytes;
    // Of the first 32 keys. The chunks of others differ in bits that rows, multiples of 128 bytes, leave alone.
    const uint32_t to = target + (matrix % 2 * 8 + row) * VTile::kRowBytes + (matrix / 2 ^ row) * kernel::kChunkBytes;
    FA_UNROLL_BY(1)
    for (uint32_t columns = static_cast<uint32_t>(which); columns < kHeadDimV / 16; columns += kTransposers) {
      const uint32_t from_columns =
          from + columns / 8 * LandedTile::kSlabBytes + (columns % 8 ^ row) * kernel::kChunkBytes;
      const uint32_t to_columns = to + columns * 16 * VTile::kRowBytes;
      FA_UNROLL
      for (uint32_t first = 0; first < kKeyBlocks; first += kTogether) {
        uint32_t r[kTogether][4];  // loads are in flight together
        FA_UNROLL
        for (uint32_t i = 0; i < kTogether; ++i) {
          ptx::ldmatrix_x4_trans(r[i], from_columns + (first + i) * 32 * LandedTile::kRowBytes);
        }
        FA_UNROLL
        for (uint32_t i = 0; i < kTogether; ++i) {
          const uint32_t keys = first + i;
          ptx::stmatrix_x4((to_columns ^ keys % 4 * 2 * kernel::kChunkBytes) + keys / 4 * VTile::kSlabBytes,
                           ptx::prmt(r[i][0], r[i][1], kEven), ptx::prmt(r[i][0], r[i][1], kOdd),
                           ptx::prmt(r[i][2], r[i][3], kEven), ptx::prmt(r[i][2], r[i][3], kOdd));
        }
      }
    }
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_FP8_PRODUCER_CUH_
