#ifndef FA_TEMPLATES_SM90_SM90_BACKWARD_ROWS_CUH_
#define FA_TEMPLATES_SM90_SM90_BACKWARD_ROWS_CUH_

#include <common/backward_schedule.cuh>
#include <common/constants.cuh>
#include <common/dropout.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <common/variant_backward.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <sm90/sm90_backward_add_dq.cuh>
#include <sm90/sm90_backward_cluster.cuh>
#include <sm90/sm90_roles.cuh>
#include <sm90/sm90_shared_tile.cuh>

namespace fa::sm90 {

/// Tiles that have landed, and zeros in what must not count of them.
template <class Config>
struct BackwardRows : BackwardAddDq<Config> {
  using Base = BackwardAddDq<Config>;
  using Variant = typename Base::Variant;
  using QTile = typename Base::QTile;
  using DoTile = typename Base::DoTile;
  using KTile = typename Base::KTile;
  using VTile = typename Base::VTile;
  using Job = typename Base::Job;
  using Place = typename Base::Place;
  using Base::Base;
  using Base::kTileM, Base::kTileN, Base::kConsumers, Base::kVarlen, Base::kTwoSided, Base::kUnevenRows, Base::kClears,
      Base::params, Base::k_shared, Base::v_shared, Base::q_shared, Base::do_shared, Base::lse_shared,
      Base::delta_shared, Base::k_full, Base::v_full, Base::q_full, Base::do_full, Base::lane_index, Base::stage_of,
      Base::parity_of, Base::place_of;

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
    if constexpr (kUnevenRows) {
      const Rows rows = rows_with_keys(work, place);
      return rows.begin > 0 || rows.end < kTileM;
    }
    return kClears && place.m_block * kTileM < -work.lengths.causal_shift;
  }

  /// Zeros in the other rows of Q and dO, and statistics of no weight. No product may be reading the tiles: with
  /// kLanded, Q has landed and dO may be on its way; else both have been read once by all.
  template <bool kLanded>
  FA_DEVICE void clear_rows_without_keys(bool has_some, const Job& work, const Place& place, int count) const {
    if constexpr (kClears) {
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
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_BACKWARD_ROWS_CUH_
