#ifndef FA_TEMPLATES_SM90_SM90_PROBABILITIES_CUH_
#define FA_TEMPLATES_SM90_SM90_PROBABILITIES_CUH_

#include <common/dropout.cuh>
#include <common/paged.cuh>
#include <ptx/math.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/memory.cuh>
#include <ptx/mma.cuh>
#include <ptx/thread.cuh>
#include <sm90/sm90_ring.cuh>
#include <sm90/sm90_scores.cuh>
#include <sm90/sm90_softmax.cuh>

namespace fa::sm90 {

/// From the scores of a KV tile to P, the operand of the next product: exponentials, what dropout keeps, and the rescue
/// path for P that overflows.
template <class Traits>
struct Probabilities : Scores<Traits> {
  using Base = Scores<Traits>;
  using Config = typename Base::Config;
  using T = typename Base::T;
  using Variant = typename Base::Variant;
  using QTile = typename Base::QTile;
  using S = typename Base::S;
  using P = typename Base::P;
  using Mask = typename Base::Mask;
  using Dropped = typename Base::Dropped;
  using Loaded = typename Base::Loaded;
  using Softmax = typename Base::Softmax;
  using Query = typename Base::Query;
  using Cursor = typename Base::Cursor;
  using Slopes = typename Base::Slopes;
  using AffineRows = typename Base::AffineRows;
  using Base::kTileN, Base::kHeadDimQk, Base::kPieces, Base::kVarlen, Base::kPaged, Base::kPageSize, Base::kDropout,
      Base::kLists, Base::kAffine, Base::kAffineProduct, Base::kNonContiguous, Base::kPartial, Base::kLoadAhead,
      Base::kSummed, Base::kScoreOverlapped, Base::params, Base::q_shared, Base::mask_full, Base::mask_empty,
      Base::mask_shared, Base::work_shared, Base::release, Base::softmax_scale_log2, Base::scale_sign, Base::lengths_of,
      Base::kv_tile, Base::read_listed, Base::place, Base::kTurnsSlopes, Base::start_slopes, Base::turn_slopes,
      Base::affine_rows, Base::add_affine_to_tile, Base::apply_score_to_tile, Base::first_tile, Base::finish_scores,
      Base::load_ahead, Base::first_limit, Base::first_row_of;

  using Base::Base;

  /// What a consumer knows of the KV tile whose scores are in the making, besides its place.
  struct Tile {
    RingSlot<kMaskBuffers> mask_slot;
    [[maybe_unused]] Dropped dropped;
    [[maybe_unused]] Loaded loaded;
    [[maybe_unused]] bool in_chunks = false;  // `loaded`
    [[maybe_unused]] Slopes slopes;
    [[maybe_unused]] AffineRows rows;
    int limit;    // first_limit
    int visible;  // pieces of the softmax that hold keys that the warp sees
  };

  // What variants do, in the order of a step. None of it is there in a kernel without them.

  /// For the first KV tile of a query tile.
  FA_DEVICE void begin_rows([[maybe_unused]] Tile& tile, [[maybe_unused]] const Cursor& cursor,
                            [[maybe_unused]] int warp_row, [[maybe_unused]] int lane) const {
    if constexpr (kAffineProduct) start_slopes(tile.slopes, cursor, warp_row, lane);
  }

  /// Before K has landed. With tile lists the tile is not known yet.
  FA_DEVICE void before_keys([[maybe_unused]] Tile& tile, [[maybe_unused]] const Cursor& cursor,
                             [[maybe_unused]] int warp_row, [[maybe_unused]] int lane) const {
    if constexpr (kLoadAhead && !kLists) tile.in_chunks = load_ahead(tile.loaded, cursor, warp_row, lane);
    if constexpr (kTurnsSlopes && !kLists) turn_slopes(tile.slopes, cursor, warp_row, lane);
  }

  /// When K has landed in `stage`. kBegins: nothing was done before.
  template <bool kBegins>
  FA_DEVICE void with_keys([[maybe_unused]] Tile& tile, Cursor& cursor, int stage, [[maybe_unused]] int warp_row,
                           [[maybe_unused]] int lane) const {
    read_listed(cursor, stage);
    if constexpr (kTurnsSlopes && (kLists || kBegins)) turn_slopes(tile.slopes, cursor, warp_row, lane);
  }

  /// Overlapped with the products.
  template <bool kBegins>
  FA_DEVICE void with_products(Tile& tile, const Cursor& cursor, int warp_row, int lane) const {
    if constexpr (kLoadAhead && (kLists || kBegins)) tile.in_chunks = load_ahead(tile.loaded, cursor, warp_row, lane);
    if constexpr (!kBegins) tile.rows = affine_rows(tile.slopes, cursor, warp_row, lane);
    tile.limit = first_limit(cursor, warp_row);
  }

  /// The last before the scores are there; kBegins: when they are.
  template <bool kBegins>
  FA_DEVICE void before_softmax(Tile& tile, [[maybe_unused]] const Cursor& cursor, [[maybe_unused]] int warp_row,
                                [[maybe_unused]] int lane) const {
    if constexpr (kBegins) tile.rows = affine_rows(tile.slopes, cursor, warp_row, lane);
    if constexpr (kDropout) tile.dropped.mask = take_mask(tile.mask_slot, warp_row, lane);
  }

  /// P as the operand of the next product.
  FA_DEVICE static void pack(P& probabilities, [[maybe_unused]] const S& s, const Tile& tile) {
    if constexpr (kDropout) {
      keep(probabilities, tile.dropped.pairs, tile.dropped.kept);
    } else {
      convert(probabilities, s);
      clear_hidden(probabilities, tile.visible);
    }
  }

  /// Turns the scores of a KV tile into P, in the pieces that hold keys that the warp sees: not behind the diagonal,
  /// and none for rows behind the last. True when O must be rescaled, with kSummed after `rescue`. kBegins: there is
  /// no O yet.
  template <bool kBegins>
  FA_DEVICE bool exponentiate(S& s, int& visible, Softmax& softmax, const AffineRows& rows, const Cursor& cursor,
                              int limit, int warp_row, int lane, Loaded& loaded, bool in_chunks,
                              [[maybe_unused]] Dropped& dropped, [[maybe_unused]] bool spans) const {
    float shift[2];
    if constexpr (kScoreOverlapped && !kBegins) {
      if (!spans && limit >= kTileN && !ptx::vote_any(softmax.may_lack_offset())) {
        visible = kPieces;
        shift[0] = shift[1] = 0.f;
        return exponentiate_summed(s, visible, softmax, shift, dropped, [&](int n) { apply_score_to_tile(s, n); });
      }
    }
    visible = finish_scores(s, shift, rows, cursor, limit, warp_row, lane, loaded, in_chunks);
    if (kPartial && visible == 0) {
      if constexpr (kSummed) softmax.see_nothing();
      return false;
    }
    const float scale = softmax_scale_log2();
    if constexpr (kSummed) {
      // Without holes a tile that a row sees any of shows it its first key, and of the tile behind it sees none.
      const bool may_begin = spans || limit <= kTileN;
      if (kBegins || (kNonContiguous ? ptx::vote_any(softmax.may_lack_offset()) : may_begin)) {
        softmax.take_greatest(s, scale, shift);
      }
      return exponentiate_summed(s, visible, softmax, shift, dropped, [](int) {});
    } else {
      return softmax.update(s, scale);
    }
  }

  template <class Before>
  FA_DEVICE bool exponentiate_summed(S& s, int visible, Softmax& softmax, const float (&shift)[2],
                                     [[maybe_unused]] Dropped& dropped, const Before& before) const {
    return softmax.template exponentiate<kPieces, kPartial>(s, softmax_scale_log2(), shift, visible, before,
                                                            [&](int n) { convert_dropped(dropped, s, n); });
  }

  /// P of n8 tile n and what is kept of it, overlapped with the exponentials. Without dropout P is converted in place
  /// of what the product before still reads.
  FA_DEVICE static void convert_dropped([[maybe_unused]] Dropped& dropped, [[maybe_unused]] const S& s,
                                        [[maybe_unused]] int n) {
    if constexpr (kDropout) {
      convert_tile(dropped.pairs, s, n);
      dropped.mask.expand_tile(dropped.kept, n);
    }
  }

  /// After `exponentiate` returned true: offsets rise, and P with them.
  FA_DEVICE void rescue(S& s, Softmax& softmax, Dropped& dropped, int q_buffer, const Cursor& cursor,
                        int warp_row) const {
    softmax.factor[0] = softmax.factor[1] = 1.f;
    // Once is enough. With dropout ptxas spills in a branch that it does not know for a loop.
    constexpr int kRounds = kDropout ? 2 : 1;
    FA_UNROLL_BY(1)
    for (int round = 0; round < kRounds && softmax.template lost<kDropout>(kLeastLost); ++round) {
      const typename Softmax::LostRows rows = softmax.lost_rows(kLeastLost);
      recompute_scores(s, dropped, q_buffer, cursor, warp_row, rows);
      softmax.rebase(s, softmax_scale_log2(), rows, [&](int n) { convert_dropped(dropped, s, n); });
    }
    softmax.raise([&](int r, float step) { shrink(s, dropped, r, step); });
  }

  /// P of row half r times a power of two.
  FA_DEVICE static void shrink(S& s, [[maybe_unused]] Dropped& dropped, int r, float step) {
    if constexpr (kDropout) {
      const uint32_t steps = ptx::convert_pair<T>(step, step);
      FA_UNROLL
      for (int i = r; i < kTileN / 4; i += 2) {
        const uint32_t pair = dropped.pairs[i / 4][i % 4] & dropped.kept[i / 4][i % 4];
        dropped.pairs[i / 4][i % 4] = ptx::multiply_pair<T>(pair, steps);
      }
    } else {
      FA_UNROLL
      for (int i = 2 * r; i < kTileN / 2; i += (i % 2 == 0 ? 1 : 3)) s[i] *= step;
    }
  }

  // A sum of P from which on P is taken for lost.
  static constexpr float kLeastLost = kDropout ? LeastLost<T>::kOfPairs : LeastLost<T>::kOfFloats;

  /// The scores of the warp's 16 rows once more, by the warp alone, from Q and from K in memory: its buffer may hold
  /// other keys by now. What is hidden, of which P is 0, stays so.
  template <class LostRows>
  FA_DEVICE void recompute_scores(S& s, [[maybe_unused]] const Dropped& dropped, int q_buffer, const Cursor& cursor,
                                  int warp_row, [[maybe_unused]] const LostRows& rows) const {
    const uint32_t q = q_shared(q_buffer) + warp_row * QTile::kRowBytes;
    const int last_key = lengths_of(cursor.query).s_kv - 1 - kv_tile(cursor) * kTileN;
    const T* const keys = first_key(cursor, q_buffer);
    FA_UNROLL
    for (int n = 0; n < kTileN / 8; ++n) {
      const uint32_t lane = static_cast<uint32_t>(ptx::thread_index()) % kWarpSize;   // anew: nothing is kept for this
      const int key = kernel::minimum(8 * n + static_cast<int>(lane / 4), last_key);  // those behind it are hidden
      const T* const row = kPaged ? key_in_pages(keys, cursor, key) : keys + key * params.stride_k_s;
      const T* const columns = row + lane % 4 * 2;
      float d[4] = {};
      FA_UNROLL_BY(1)
      for (uint32_t step = 0; step < kHeadDimQk / 8; ++step) {
        const uint32_t a = QTile::fragment(q, lane, step);
        ptx::mma_m16n8k8<T>(d, ptx::ld_shared_b32(a), ptx::ld_shared_b32(a + 8 * QTile::kRowBytes),
                            ptx::ld_global_nc(reinterpret_cast<const uint32_t*>(columns + 8 * step)));
      }
      if constexpr (kAffine) {
        add_affine_to_tile(d, cursor, warp_row, static_cast<int>(lane), 8 * n);
      } else if constexpr (Variant::kScore) {
        FA_UNROLL
        for (int r = 0; r < 2; ++r) {
          kernel::Place at = place(cursor, warp_row, r, static_cast<int>(lane));
          at.kv += 8 * n;
          kernel::apply_score<Variant, 1>(params.variant, at, [&](int, int e) -> float& { return d[2 * r + e]; });
        }
      } else if constexpr (!Config::kPositiveScale) {
        FA_UNROLL
        for (int e = 0; e < 4; ++e) d[e] *= scale_sign();
      }
      FA_UNROLL
      for (int e = 0; e < 4; ++e) {
        const float before = p_of(s, dropped, 4 * n + e);
        if (LostRows::kAll || rows.is[e / 2]) s[4 * n + e] = Softmax::is_seen(before, d[e]) ? d[e] : -kInfinity;
      }
    }
    ptx::sync_warp();  // all lanes have read Q before one of them releases the buffer
  }

  /// Over pages: the row of K of a tile's key; of one that all rows hide that of another. `head`: the KV head's first
  /// row of page 0, which wrong entries lead to.
  FA_DEVICE const T* key_in_pages(const T* head, const Cursor& cursor, int key) const {
    if constexpr (kPaged) {
      const Query& query = cursor.query;
      const typename Base::Rows rows{params.group, query.tile.head};
      const int first = kernel::keys_begin<Variant>(params, query.sequence, rows.position(first_row_of(query)));
      const int row = kernel::table_row_of(params.paged, query.tile.batch);
      const kernel::PagedKeys<kPageSize> keys =
          kernel::keys_in_cache<kPageSize>(params.paged, row, first, query.sequence.s_kv);
      const int position = kernel::clamp(kv_tile(cursor) * kTileN + key, first, query.sequence.s_kv - 1);
      const int page = keys.page_of(position);
      return head + (keys.has(position, page) ? page : 0) * params.stride_k_b +
             keys.row_in_page(position) * params.stride_k_s;
    } else {
      return head;
    }
  }

  /// The KV tile's first row of K in memory; over pages, the KV head's.
  FA_DEVICE const T* first_key(const Cursor& cursor, [[maybe_unused]] int q_buffer) const {
    const Query& query = cursor.query;
    if constexpr (kPaged) return static_cast<const T*>(params.k) + query.kv_head * params.stride_k_h;
    int64_t key = kv_tile(cursor) * kTileN;
    int64_t before = query.kv_head * params.stride_k_h;
    if constexpr (kVarlen) {
      key += this->read_first_key(q_buffer);
    } else {
      before += query.tile.batch * params.stride_k_b;
    }
    return static_cast<const T*>(params.k) + before + key * params.stride_k_s;
  }

  FA_DEVICE static float p_of(const S& s, [[maybe_unused]] const Dropped& dropped, int i) {
    if constexpr (kDropout) {  // P is found in the operand's registers alone
      return kernel::half_of<T>(dropped.pairs[i / 8][i / 2 % 4], i % 2);
    } else {
      return s[i];
    }
  }

  /// P of the pieces without a visible key. Rows behind the last keep what is there: nobody reads their O.
  FA_DEVICE static void clear_hidden(P& probabilities, [[maybe_unused]] int visible) {
    if constexpr (kPartial) {
      if (visible == kPieces) return;
      FA_UNROLL
      for (int piece = 0; piece < kPieces; ++piece) {
        if (piece < visible) continue;
        FA_UNROLL
        for (int i = 2 * first_tile(piece); i < 2 * first_tile(piece + 1); ++i) probabilities[i / 4][i % 4] = 0;
      }
    }
  }

  /// What the dropout RNG warps keep of the accumulators of S.
  FA_DEVICE Mask take_mask(RingSlot<kMaskBuffers>& slot, int warp_row, int lane) const {
    ptx::mbarrier_wait(mask_full(slot.index), slot.parity);
    const Mask mask = Mask::load(mask_shared(slot.index, warp_row, lane));
    ptx::sync_warp();  // all lanes have read it before one of them releases the buffer
    release(mask_empty(slot.index), lane);
    slot.advance();
    return mask;
  }

  /// Accumulators become the A operand of the next product,
  FA_DEVICE static void convert(P& pairs, const S& s) {
    FA_UNROLL
    for (int n = 0; n < kTileN / 8; ++n) convert_tile(pairs, s, n);
  }

  /// those of n8 tile n alone,
  FA_DEVICE static void convert_tile(P& pairs, const S& s, int n) {
    FA_UNROLL
    for (int i = 2 * n; i < 2 * n + 2; ++i) convert_pair(pairs, s, i);
  }

  /// those of elements 2i and 2i + 1 alone,
  FA_DEVICE static void convert_pair(P& pairs, const S& s, int i) {
    pairs[i / 4][i % 4] = ptx::convert_pair<T>(s[2 * i], s[2 * i + 1]);
  }

  /// without those that are dropped, which the row sums have taken all the same.
  FA_DEVICE static void keep(P& probabilities, const P& pairs, const P& kept) {
    FA_UNROLL
    for (int i = 0; i < kTileN / 4; ++i) probabilities[i / 4][i % 4] = pairs[i / 4][i % 4] & kept[i / 4][i % 4];
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_PROBABILITIES_CUH_
