#ifndef FA_TEMPLATES_SM90_SM90_DROPOUT_WARPS_CUH_
#define FA_TEMPLATES_SM90_SM90_DROPOUT_WARPS_CUH_

#include <common/dropout.cuh>
#include <common/dropout_place.cuh>
#include <ptx/math.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <sm90/sm90_ring.cuh>
#include <sm90/sm90_schedule.cuh>

namespace fa::sm90 {

/// The dropout RNG warps: they decide what is kept of each KV tile's P, ahead of the consumers, and leave a bit an
/// element in a ring of masks.
template <class Traits>
struct DropoutWarps : Schedule<Traits> {
  using Base = Schedule<Traits>;
  using Rows = typename Base::Rows;
  using Mask = typename Base::Mask;
  using Config = typename Base::Config;
  using Variant = typename Base::Variant;
  using Cursor = typename Base::Cursor;
  using Base::kTileM, Base::kTileN, Base::kQBuffers, Base::kPSteps, Base::kLists, Base::kDropoutWarps,
      Base::kKeepsRowBits, Base::kRowBlocks, Base::kBlocksTogether, Base::params, Base::q_empty, Base::mask_full,
      Base::mask_empty, Base::dropout_shared, Base::mask_shared, Base::release, Base::row_bits_shared, Base::kStepBytes,
      Base::column_bits_shared, Base::listed, Base::consume_work;

  FA_DEVICE explicit DropoutWarps(const Schedule<Traits>& base) : Schedule<Traits>(base) {}

  FA_DEVICE void write_masks() const {
    const int lane = ptx::thread_index() % kWarpSize;
    const int warp = ptx::shfl(ptx::thread_index() % kWarpgroup / kWarpSize, 0) - (4 - kDropoutWarps);
    RingSlot<kMaskBuffers> slot;
    RingSlot<kQBuffers> q_slot;
    Cursor cursor;
    while (consume_work(cursor, q_slot)) {
      release(q_empty(q_slot.index), lane);  // of Q they need the descriptor alone
      q_slot.advance();
      const ForwardTile& tile = cursor.query.tile;
      const int64_t before = kernel::heads_before<Variant>(params, tile.batch) + (Config::kPackGqa ? 0 : tile.head);
      const kernel::Dropout dropout(params.dropout, dropout_shared(), before);
      const kernel::PhiloxStream stream = dropout.stream();
      if constexpr (kKeepsRowBits) {
        FA_UNROLL
        for (int i = 0; i < kRowBlocks; ++i) {
          const int row = first_row_of_block(warp, i);
          if (is_in_tile(row)) store_row_bits(stream, tile, row, lane);
        }
      }
      for (; cursor.n >= cursor.query.range.begin; --cursor.n) {
        int n = cursor.n;
        if constexpr (kLists) n = listed(cursor.query, n);
        if constexpr (kKeepsRowBits) {
          store_column_bits(stream, warp, n, lane);
          ptx::sync_warp();  // the warp's columns are complete
        }
        ptx::mbarrier_wait(mask_empty(slot.index), slot.parity ^ 1);  // all have read what was there
        FA_UNROLL_BY(1)
        for (int first = 0; first < kRowBlocks; first += kBlocksTogether) {
          if (!is_in_tile(first_row_of_block(warp, first))) break;
          if constexpr (Config::kPackGqa) {
            FA_UNROLL
            for (int i = 0; i < 2 * kBlocksTogether; ++i) {
              write_rows(dropout, slot.index, tile, first_row_of_block(warp, first + i / 2) + 16 * (i % 2), n, lane);
            }
          } else {
            write_blocks(dropout, slot.index, first, n, warp, lane);
          }
        }
        ptx::sync_warp();  // the warp's rows are complete
        release(mask_full(slot.index), lane);
        slot.advance();
      }
    }
  }

  /// The first of a warp's 32 rows, and whether the query tile has them.
  FA_DEVICE static int first_row_of_block(int warp, int block) { return 32 * (warp + kDropoutWarps * block); }
  FA_DEVICE static bool is_in_tile(int row) { return kTileM / 32 % kDropoutWarps == 0 || row < kTileM; }

  /// For a warp's 32 rows of block `first`, and of the next where two are done together.
  FA_DEVICE void write_blocks(const kernel::Dropout& dropout, int index, int first, int n, int warp, int lane) const {
    uint32_t drawn[kBlocksTogether][4 * Mask::kPartWords] = {};
    kernel::PhiloxPart rows[kBlocksTogether];
    FA_UNROLL
    for (int i = 0; i < kBlocksTogether; ++i) rows[i] = row_bits(first_row_of_block(warp, first + i), lane);
    const bool odd = kernel::Dropout::is_odd(lane);
    const uint32_t columns = column_bits_shared(warp, lane % 4);
    const uint32_t own_columns = columns + (odd ? kStepBytes : 0);
    FA_UNROLL
    for (int step = 0; step < Mask::kDrawn; ++step) {
      const bool last = 2 * step + 1 == kPSteps;  // and of no use to the odd rows' lanes
      const auto column = kernel::PhiloxPart::load((last ? columns : own_columns) + 2 * kStepBytes * step);
      FA_UNROLL
      for (int i = 0; i < kBlocksTogether; ++i) drawn[i][step] = dropout.draw(rows[i], column);
    }
    FA_UNROLL
    for (int rows16 = 0; rows16 < 2 * kBlocksTogether; ++rows16) {
      const uint32_t(&calls)[4 * Mask::kPartWords] = drawn[rows16 / 2];
      uint32_t parts[2][Mask::kPartWords];  // of the lane's own mask and of its neighbour's
      FA_UNROLL
      for (int word = 0; word < Mask::kPartWords; ++word) {
        uint32_t pairs[2];
        FA_UNROLL
        for (int i = 0; i < 2; ++i) {
          const int step = 4 * word + 2 * i;
          uint32_t selector = rows16 % 2 == 0 ? 0x5140u : 0x7362u;  // own bytes of two calls, their neighbour's
          selector ^= turned(n) ? 0x1111u : 0;
          if (2 * step + 1 == kPSteps) selector ^= odd ? 0x0101u : 0;
          if (2 * step + 3 == kPSteps) selector ^= odd ? 0x1010u : 0;
          pairs[i] = ptx::prmt(calls[step], calls[step + 1], selector);
        }
        parts[0][word] = ptx::prmt(pairs[0], pairs[1], 0x5410);
        parts[1][word] = ptx::prmt(pairs[0], pairs[1], 0x7632);
      }
      FA_UNROLL
      for (int part = 0; part < 2; ++part) {
        const int row = first_row_of_block(warp, first + rows16 / 2) + 16 * (rows16 % 2);
        Mask::store_part(mask_shared(index, row, lane ^ 4 * part), odd, parts[part]);
      }
    }
  }

  /// For 16 rows of several query heads.
  FA_DEVICE void write_rows(const kernel::Dropout& dropout, int index, const ForwardTile& tile, int row, int n,
                            int lane) const {
    uint32_t parts[2][Mask::kPartWords] = {};
    const int first_row = tile.m_block * kTileM + row;
    const Rows rows{params.group, tile.head};
    FA_UNROLL
    for (int step = 0; step < kPSteps; ++step) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int place = first_row + lane / 4 + 8 * r;
        parts[step % 2][step / 8] |=
            dropout.draw_row(r, kernel::row_of_whole<Variant>(params, rows.position(place)), rows.query_head(place),
                             kernel::key_of_whole<Variant>(params, n * kTileN) + 16 * step, lane)
            << 8 * (step / 2 % 4);
      }
    }
    FA_UNROLL
    for (int part = 0; part < 2; ++part) Mask::store_part(mask_shared(index, row, lane), part != 0, parts[part]);
  }

  /// Of the 32 rows from `row` of the query tile on, for the same lane alone.
  FA_DEVICE void store_row_bits(const kernel::PhiloxStream& stream, const ForwardTile& tile, int row, int lane) const {
    const int first = kernel::row_of_whole<Variant>(params, tile.m_block * kTileM + row);
    stream.row(kernel::Dropout::row_of(first, lane)).store(row_bits_shared(row, lane));
  }
  FA_DEVICE kernel::PhiloxPart row_bits(int row, int lane) const {
    return kernel::PhiloxPart::load(row_bits_shared(row, lane));
  }

  /// Of KV tile n, for the same warp.
  FA_DEVICE void store_column_bits(const kernel::PhiloxStream& stream, int warp, int n, int lane) const {
    constexpr int kColumns = kTileN / 4;
    const int first_column = kernel::key_of_whole<Variant>(params, 0) / 4 + n * kColumns;
    FA_UNROLL
    for (int first = 0; first < kColumns; first += kWarpSize) {
      const int column = first + lane;
      if (kColumns - first >= kWarpSize || column < kColumns) {
        stream.column(static_cast<uint32_t>(first_column + column)).store(column_bits_shared(warp, column));
      }
    }
  }
  /// Whether the first keys of KV tile n are an odd block.
  FA_DEVICE static bool turned(int n) { return kPSteps % 2 != 0 && n % 2 != 0; }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_DROPOUT_WARPS_CUH_
