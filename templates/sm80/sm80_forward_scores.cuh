#ifndef FA_TEMPLATES_SM80_SM80_FORWARD_SCORES_CUH_
#define FA_TEMPLATES_SM80_SM80_FORWARD_SCORES_CUH_

#include <common/constants.cuh>
#include <common/dropout.cuh>
#include <common/dropout_place.cuh>
#include <common/forward_schedule.cuh>
#include <common/kept_keys.cuh>
#include <common/mask.cuh>
#include <common/online_softmax.cuh>
#include <common/variant.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <sm80/sm80_forward_block.cuh>
#include <sm80/sm80_fp8.cuh>
#include <sm80/sm80_stored.cuh>

namespace fa::sm80 {

/// What scores go through before and behind the softmax: scale, functions, masks, dropout.
template <class Config>
struct ForwardScores : ForwardBlock<Config> {
  using Base = ForwardBlock<Config>;
  using Variant = typename Base::Variant;
  using Base::Base;
  using Base::kTileN, Base::kWarpKeys, Base::kMTiles, Base::kHalves, Base::kNTiles, Base::kTwoSided, Base::kKeepsFirst,
      Base::params, Base::tile, Base::lengths, Base::rows, Base::lane, Base::half, Base::warp_row, Base::kFixedTiles,
      Base::kFixedHalves, Base::fixed, Base::first_column, Base::fragment_row;

  FA_DEVICE void mask(Fragment<kMTiles, kNTiles>& s, int n_block) const {
    int limits[kMTiles][2];  // first hidden key of each row, from this thread's first column of the tile
    [[maybe_unused]] int begins[kMTiles][2];
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < kHalves; ++r) {
        const int position = rows.position(fragment_row(m, r));
        [[maybe_unused]] const int first = first_column(n_block);
        if constexpr (kTwoSided) {
          begins[m][r] = keys_begin<Variant>(params, lengths, position) - first;
          limits[m][r] = keys_end<Config::kCausal, Variant>(params, lengths, position) - first;
        } else {
          limits[m][r] =
              key_limit<Config::kCausal>(lengths, position) - n_block * kTileN - half * kWarpKeys - 2 * (lane % 4);
        }
      }
    }
    if constexpr (kTwoSided) {
      mask_scores<kHalves>(s, begins, limits);
    } else {
      mask_scores<kHalves>(s, limits);
    }
  }

  /// Where this thread's element 0 of a fragment row and KV tile stands.
  FA_DEVICE Place place(int m, int r, int n_block) const {
    const int row = fragment_row(m, r);
    const int position = inside(rows.position(row), lengths.s_q);
    const int key = first_column(n_block);
    return {tile.batch, rows.query_head(row), position, key, 0, 0, lengths.s_q, lengths.s_kv, params.variant.scale};
  }

  FA_DEVICE void read_fixed() {
    if constexpr (kFixed < Variant >> 0) {
      FA_UNROLL
      for (int m = 0; m < kFixedTiles; ++m) {
        FA_UNROLL
        for (int r = 0; r < kFixedHalves; ++r) fixed[m][r].read(params.variant, place(m, r, 0));
      }
    }
  }

  /// Of 8-bit floats, S of their codes: times their scales.
  FA_DEVICE void scale_bytes(Fragment<kMTiles, kNTiles>& s, int stage) const {
    this->row_scales.multiply(s);
    if constexpr (Base::kScalesOfKeys) {
      StoredScales<ForwardScores>{*this}.multiply_k(s, stage);
    }
  }

  /// Likewise O += P V, which takes scales of keys along.
  template <int kOTiles>
  FA_DEVICE void add_bytes(Fragment<kMTiles, kOTiles>& o, Fragment<kMTiles, kNTiles>& p, uint32_t values,
                           [[maybe_unused]] int stage) const {
    float factor = 1.f;
    if constexpr (Base::kScalesOfValues) {
      factor = StoredScales<ForwardScores>{*this}.multiply_relative_v(p, stage);
    }
    ByteValues<typename Base::VElement, Base::kSingleLevel>::template accumulate<typename Base::VTile, 8 * kOTiles>(
        o, p, values, lane, factor);
  }

  FA_DEVICE void apply_score(Fragment<kMTiles, kNTiles>& s, int n_block) const {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < kHalves; ++r) {
        kernel::apply_score<Variant, kNTiles>(params.variant, place(m, r, n_block),
                                              fixed[m % kFixedTiles][r % kFixedHalves],
                                              [&](int n, int e) -> float& { return s[m][n][2 * r + e]; });
      }
    }
  }

  FA_DEVICE void apply_mask(Fragment<kMTiles, kNTiles>& s, int n_block) const {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < kHalves; ++r) {
        const auto score = [&](int n, int e) -> float& { return s[m][n][2 * r + e]; };
        if constexpr (kKeepsFirst) {
          kernel::apply_mask_by_bits<Variant, kNTiles>(params.variant, place(m, r, n_block), score);
        } else {
          kernel::apply_mask<Variant, kNTiles>(params.variant, place(m, r, n_block), score);
        }
      }
    }
  }

  /// Dropout of P, after the row sums have taken it whole.
  FA_DEVICE void drop(Fragment<kMTiles, kNTiles>& p, int key) const {
    const int64_t before = heads_before<Variant>(params, tile.batch);
    const int key_drawn = key_of_whole<Variant>(params, key);
    if constexpr (Config::kPackGqa) {
      const Dropout dropout(params.dropout, before);
      FA_UNROLL
      for (int m = 0; m < kMTiles; ++m) {
        FA_UNROLL
        for (int r = 0; r < kHalves; ++r) {
          const int row = fragment_row(m, r);
          dropout.drop_row<kNTiles>([&](int n, int e) -> float& { return p[m][n][2 * r + e]; },
                                    row_of_whole<Variant>(params, rows.position(row)), rows.query_head(row), key_drawn,
                                    lane);
        }
      }
    } else {
      Dropout(params.dropout, before + tile.head).drop(p, row_of_whole<Variant>(params, warp_row), key_drawn, lane);
    }
  }

  /// Scores keep their order only under a positive scale; otherwise its sign comes before the row maximum.
  FA_DEVICE void scale_scores(Fragment<kMTiles, kNTiles>& s) const {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int n = 0; n < kNTiles; ++n) {
        FA_UNROLL
        for (int e = 0; e < 4; ++e) s[m][n][e] *= scale_sign();
      }
    }
  }

  FA_DEVICE float softmax_scale_log2() const {
    if constexpr (Variant::kScore) return Variant::kFactor * kLog2e;
    if constexpr (Config::kPositiveScale) return params.scale_log2;
    return params.scale_log2 == 0.f ? 1.f : ptx::abs(params.scale_log2);
  }

  /// Of a scale that need not be positive. Scores take it in front of the softmax: exactly, whatever their magnitude.
  FA_DEVICE float scale_sign() const { return params.scale_log2 < 0.f ? -1.f : params.scale_log2 > 0.f ? 1.f : 0.f; }
};

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_FORWARD_SCORES_CUH_
