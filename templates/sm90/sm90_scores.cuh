#ifndef FA_TEMPLATES_SM90_SM90_SCORES_CUH_
#define FA_TEMPLATES_SM90_SM90_SCORES_CUH_

#include <common/mask.cuh>
#include <common/transpose.cuh>
#include <common/variant.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <sm90/sm90_affine_scores.cuh>

namespace fa::sm90 {

/// What becomes of the scores of a KV tile before the softmax: score functions, the scale's sign, masks.
template <class Traits>
struct Scores : AffineScores<Traits> {
  using Base = AffineScores<Traits>;
  using Variant = typename Base::Variant;
  using S = typename Base::S;
  using Rows = typename Base::Rows;
  using Loaded = typename Base::Loaded;
  using Config = typename Base::Config;
  using Cursor = typename Base::Cursor;
  using AffineRows = typename Base::AffineRows;
  using Base::kTileN, Base::kPieces, Base::kWindowed, Base::kLists, Base::kKeepsFirst, Base::kAffine, Base::kPartial,
      Base::kLoadAhead, Base::params, Base::softmax_scale_log2, Base::scale_sign, Base::lengths_of, Base::first_row_of,
      Base::row_count, Base::kv_tile, Base::place, Base::add_affine;

  using Base::Base;

  /// A function of the score alone.
  FA_DEVICE void apply_score_to_tile(S& s, int n) const {
    kernel::Place anywhere = {};
    anywhere.scale = params.variant.scale;
    FA_UNROLL
    for (int i = 4 * n; i < 4 * n + 4; ++i) s[i] = Variant::score(params.variant, anywhere, s[i]);
  }

  /// The n8 tile with which a piece of the softmax begins.
  FA_DEVICE static constexpr int first_tile(int piece) { return kTileN / 8 * piece / kPieces; }

  /// Score function, or scale where it changes the order; then the masks. Returns how many of the softmax's pieces hold
  /// keys that the warp sees. shift: what remains to be added to the scores of a row half, in log2 units.
  FA_DEVICE int finish_scores(S& s, float (&shift)[2], [[maybe_unused]] const AffineRows& rows, const Cursor& cursor,
                              [[maybe_unused]] int limit, int warp_row, int lane, [[maybe_unused]] Loaded& loaded,
                              [[maybe_unused]] bool in_chunks) const {
    shift[0] = shift[1] = 0.f;
    if constexpr (kAffine) {
      add_affine(s, shift, rows, cursor, warp_row, lane);
      FA_UNROLL
      for (int r = 0; r < 2; ++r) shift[r] *= softmax_scale_log2();
    } else if constexpr (kLoadAhead) {
      apply_score_to_loaded(s, cursor, warp_row, lane, loaded, in_chunks);
    } else if constexpr (Variant::kScore) {
      apply_score(s, cursor, warp_row, lane);
    } else if constexpr (!Config::kPositiveScale) {
      FA_UNROLL
      for (int i = 0; i < kTileN / 2; ++i) s[i] *= scale_sign();
    }
    if constexpr (Variant::kMask && !kLists) {
      if (!kKeepsFirst || cursor.n >= cursor.query.range.kept_end) apply_mask(s, cursor, warp_row, lane);
    }
    if constexpr (kLists || kWindowed) {
      if (cursor.n >= cursor.query.range.plain_begin && cursor.n < cursor.query.range.plain_end) return kPieces;
    }
    if constexpr (kLists) {
      if (cursor.n >= cursor.query.range.kept_end) apply_mask(s, cursor, warp_row, lane);
    }
    if constexpr (kWindowed) {
      hide_outside(s, cursor, warp_row, lane);
      return kPieces;
    } else {
      return hide_behind(s, cursor, limit, warp_row);
    }
  }

  /// Reads what score is given of the tile; false: each lane what belongs to its scores, true: the lanes of a quad 16
  /// bytes each in place of a word of each, to be exchanged when they have come.
  FA_DEVICE bool load_ahead(Loaded& loaded, const Cursor& cursor, int warp_row, int lane) const {
    using Steps = decltype(Variant::load(params.variant, kernel::Place{}, kernel::Constant<0>{}));
    constexpr int kChunks = kTileN / 32;
    constexpr int kChunkTiles = 4 * kChunks;
    const Steps steps[2] = {
        Variant::load(params.variant, place(cursor, warp_row, 0, lane), kernel::Constant<0>{}),
        Variant::load(params.variant, place(cursor, warp_row, 1, lane), kernel::Constant<0>{}),
    };
    const int s_kv = lengths_of(cursor.query).s_kv;
    const uint64_t chunk[2] = {reinterpret_cast<uint64_t>(steps[0].base) + 12 * (lane % 4),
                               reinterpret_cast<uint64_t>(steps[1].base) + 12 * (lane % 4)};
    const bool scattered = steps[0].kv != 1 || (kv_tile(cursor) + 1) * kTileN > s_kv;
    if (!ptx::vote_any(scattered || (chunk[0] | chunk[1]) % kernel::kChunkBytes != 0)) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        FA_UNROLL
        for (int j = 0; j < kChunks; ++j) {
          const kernel::Chunk read = ptx::ld_global_nc_chunk(reinterpret_cast<const void*>(chunk[r] + 64 * j));
          FA_UNROLL
          for (int i = 0; i < 4; ++i) loaded[r][4 * j + i] = read.word[i];
        }
        FA_UNROLL
        for (int n = kChunkTiles; n < kTileN / 8; ++n) {
          loaded[r][n] = ptx::ld_global_nc(reinterpret_cast<const uint32_t*>(steps[r].base + 8 * n));
        }
      }
      return true;
    }
    const int last = kernel::steps_inside(kv_tile(cursor) * kTileN + 2 * (lane % 4), s_kv);
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      FA_UNROLL
      for (int n = 0; n < kTileN / 8; ++n) {
        const auto low = ptx::ld_global_nc(steps[r].at(0, kernel::minimum(8 * n, last)));
        const auto high = ptx::ld_global_nc(steps[r].at(0, kernel::minimum(8 * n + 1, last)));
        loaded[r][n] = kernel::pair_of(low, high);
      }
    }
    return false;
  }

  FA_DEVICE void apply_score_to_loaded(S& s, const Cursor& cursor, int warp_row, int lane, Loaded& loaded,
                                       bool in_chunks) const {
    if (in_chunks) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        FA_UNROLL
        for (int j = 0; j < kTileN / 32; ++j) {
          uint32_t words[4] = {loaded[r][4 * j], loaded[r][4 * j + 1], loaded[r][4 * j + 2], loaded[r][4 * j + 3]};
          kernel::transpose_quad(words, lane);
          FA_UNROLL
          for (int i = 0; i < 4; ++i) loaded[r][4 * j + i] = words[i];
        }
      }
    }
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const kernel::Place at = place(cursor, warp_row, r, lane);
      kernel::apply_score_to<Variant, kTileN / 8>(
          params.variant, at, [&](int n, int e) -> float& { return s[4 * n + 2 * r + e]; },
          [&](int n, int e) { return kernel::half_of<typename Variant::Loaded>(loaded[r][n], e); });
    }
  }

  FA_DEVICE void apply_score(S& s, const Cursor& cursor, int warp_row, int lane) const {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      kernel::apply_score<Variant, kTileN / 8>(params.variant, place(cursor, warp_row, r, lane),
                                               [&](int n, int e) -> float& { return s[4 * n + 2 * r + e]; });
    }
  }

  FA_DEVICE void apply_mask(S& s, const Cursor& cursor, int warp_row, int lane) const {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const auto score = [&](int n, int e) -> float& { return s[4 * n + 2 * r + e]; };
      if constexpr (kKeepsFirst) {
        kernel::apply_mask_by_bits<Variant, kTileN / 8>(params.variant, place(cursor, warp_row, r, lane), score);
      } else {
        kernel::apply_mask<Variant, kTileN / 8>(params.variant, place(cursor, warp_row, r, lane), score);
      }
    }
  }

  /// Hides keys before and behind bounds that grow from row to row.
  FA_DEVICE void hide_outside(S& s, const Cursor& cursor, int warp_row, int lane) const {
    const auto& lengths = lengths_of(cursor.query);
    const Rows rows{params.group, 0};
    const int row = first_row_of(cursor.query) + warp_row;
    const int first_key = kv_tile(cursor) * kTileN;
    const auto begin_of = [&](int i) {
      return kernel::keys_begin<Variant>(params, lengths, rows.position(row + i)) - first_key;
    };
    const auto end_of = [&](int i) {
      return kernel::keys_end<Config::kCausal, Variant>(params, lengths, rows.position(row + i)) - first_key;
    };
    const int last_begin = begin_of(15);
    const int first_end = end_of(0);
    int begin[2], end[2];
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      begin[r] = begin_of(lane / 4 + 8 * r) - 2 * (lane % 4);
      end[r] = end_of(lane / 4 + 8 * r) - 2 * (lane % 4);
    }
    constexpr int kGroup = 4;  // n8 tiles that are tested, or found wholly visible, together
    FA_UNROLL
    for (int group = 0; group < kTileN / 8; group += kGroup) {
      if (last_begin <= 8 * group && first_end >= 8 * (group + kGroup)) continue;
      FA_UNROLL
      for (int i = 4 * group; i < kTileN / 2 && i < 4 * (group + kGroup); ++i) {
        const int key = i / 4 * 8 + i % 2;
        if (key < begin[i / 2 % 2] || key >= end[i / 2 % 2]) s[i] = -kInfinity;
      }
    }
  }

  /// The key of a KV tile from which on causality or the end of the keys hides all from the warp's first row, and so
  /// the first that it hides from any.
  FA_DEVICE int first_limit([[maybe_unused]] const Cursor& cursor, [[maybe_unused]] int warp_row) const {
    if constexpr (kWindowed) {
      return 0;
    } else {
      const Rows rows{params.group, 0};
      const int row = first_row_of(cursor.query) + warp_row;
      return kernel::key_limit<Config::kCausal>(lengths_of(cursor.query), rows.position(row)) -
             kv_tile(cursor) * kTileN;
    }
  }

  /// Hides keys from a limit on that grows from row to row: `limit_of_first` in the warp's first one. Returns how many
  /// of the softmax's pieces keep any.
  FA_DEVICE int hide_behind(S& s, const Cursor& cursor, int limit_of_first, int warp_row) const {
    const auto& lengths = lengths_of(cursor.query);
    const Rows rows{params.group, 0};
    const int row = first_row_of(cursor.query) + warp_row;
    if (kPartial && row >= row_count(cursor.query)) return 0;
    const int first_key = kv_tile(cursor) * kTileN;
    // The smallest limit of the warp's rows is that of its first, the greatest that of its last.
    if (limit_of_first >= kTileN) return kPieces;
    const int last_limit = kernel::key_limit<Config::kCausal>(lengths, rows.position(row + 15)) - first_key;
    if (kPartial && last_limit <= 0) return 0;
    const int lane = ptx::thread_index() % kWarpSize;  // anew: few tiles come here, and nothing is kept for them
    int limit[2];
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      limit[r] = kernel::key_limit<Config::kCausal>(lengths, rows.position(row + lane / 4 + 8 * r)) - first_key -
                 2 * (lane % 4);
    }
    constexpr int kGroup = 4;  // n8 tiles that are tested, or found wholly visible, together
    FA_UNROLL
    for (int group = 0; group < kTileN / 8; group += kGroup) {
      if (limit_of_first >= 8 * (group + kGroup)) continue;
      FA_UNROLL
      for (int i = 4 * group; i < kTileN / 2 && i < 4 * (group + kGroup); ++i) {
        if (i / 4 * 8 + i % 2 >= limit[i / 2 % 2]) s[i] = -kInfinity;
      }
    }
    if constexpr (!kPartial) return kPieces;
    int visible = 1;
    FA_UNROLL
    for (int piece = 1; piece < kPieces; ++piece) {
      visible += last_limit > 8 * first_tile(piece) ? 1 : 0;
    }
    return visible;
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_SCORES_CUH_
