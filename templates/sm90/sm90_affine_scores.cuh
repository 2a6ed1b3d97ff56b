#ifndef FA_TEMPLATES_SM90_SM90_AFFINE_SCORES_CUH_
#define FA_TEMPLATES_SM90_SM90_AFFINE_SCORES_CUH_

#include <common/variant.cuh>
#include <ptx/math.cuh>
#include <ptx/thread.cuh>
#include <ptx/tma.cuh>
#include <sm90/sm90_affine.cuh>
#include <sm90/sm90_schedule.cuh>

namespace fa::sm90 {

/// Score functions that are affine in the key: x = base + step * key, times a factor. The product S adds what grows
/// from key to key where it can, the softmax what is a row's.
template <class Traits>
struct AffineScores : Schedule<Traits> {
  using Base = Schedule<Traits>;
  using Variant = typename Base::Variant;
  using KeyNumbers = typename Base::KeyNumbers;
  using S = typename Base::S;
  using Rows = typename Base::Rows;
  using Config = typename Base::Config;
  using Cursor = typename Base::Cursor;
  using Base::kTileN, Base::kAffine, Base::kAffineProduct, Base::kThreads, Base::kLayout, Base::params, Base::shared,
      Base::softmax_scale_log2, Base::lengths_of, Base::first_row_of, Base::kv_tile, Base::place;

  using Base::Base;

  FA_DEVICE void number_keys() const {
    static_assert(kTileN <= kThreads, "one key a thread");
    if (ptx::thread_index() < kTileN) KeyNumbers::store_key(shared + kLayout.key_numbers, ptx::thread_index());
    ptx::fence_proxy_async();  // products read them
  }

  /// What the product S adds of an affine score function to a thread's rows: added * n to the score of key n of a KV
  /// tile. Of a magnitude that has one sign on each side of the KV tiles from `low` to `high`.
  struct Slopes {
    float start[2];  // x of key 0
    float added[2];
    uint32_t operand[4];
    int low, high;
    int side;  // the tile is: -1: before these, 1: behind; 0: nothing is added
  };
  static constexpr bool kTurnsSlopes = kAffineProduct && kernel::kAffineAbs<Variant>;
  static constexpr int kNoTile = 1 << 30;

  /// For the rows of a new query tile.
  FA_DEVICE void start_slopes(Slopes& slopes, const Cursor& cursor, int warp_row, int lane) const {
    bool fit = true;
    slopes.low = kNoTile;
    slopes.high = -kNoTile;
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      kernel::Place at = place(cursor, warp_row, r, lane);
      at.kv = 0;
      const kernel::AffineRow row = Variant::affine(params.variant, at);
      slopes.start[r] = row.base;
      fit = fit && KeyNumbers::fits(row.factor * Variant::kAffineStep, softmax_scale_log2());
      if constexpr (kTurnsSlopes) join_turn(slopes, row, cursor, warp_row + lane / 4 + 8 * r);
    }
    if constexpr (kTurnsSlopes) share_turn(slopes);
    if (ptx::vote_any(!fit)) {
      slopes.low = -kNoTile;
      slopes.high = kNoTile;
    }
    take_side(slopes, slopes.low <= slopes.high ? 0 : 1, cursor, warp_row, lane);
  }

  /// The KV tiles with a row's keys on both sides of x = 0, unless none of these is visible.
  FA_DEVICE void join_turn(Slopes& slopes, const kernel::AffineRow& row, const Cursor& cursor, int tile_row) const {
    constexpr float kFarthest = static_cast<float>(kNoTile);
    const Rows rows{params.group, 0};
    const auto& lengths = lengths_of(cursor.query);
    const int position = rows.position(first_row_of(cursor.query) + tile_row);
    const int limit = kernel::key_limit<Config::kCausal>(lengths, position);
    const float turn = ptx::max(ptx::min(row.base * (-1.f / Variant::kAffineStep), kFarthest), -kFarthest);
    const bool hidden = turn >= static_cast<float>(limit - 1);
    const int low = hidden ? kNoTile : static_cast<int>(ptx::floor((turn - 1.f) * (1.f / kTileN)));
    const int high = hidden ? kNoTile : static_cast<int>(ptx::floor((turn + 1.f) * (1.f / kTileN)));
    slopes.low = kernel::minimum(slopes.low, low);
    slopes.high = kernel::maximum(slopes.high, high);
  }

  /// Of all rows of the warp.
  FA_DEVICE static void share_turn(Slopes& slopes) {
    FA_UNROLL
    for (int quads = 4; quads < kWarpSize; quads *= 2) {
      slopes.low = kernel::minimum(slopes.low, ptx::shfl_xor(slopes.low, quads));
      slopes.high = kernel::maximum(slopes.high, ptx::shfl_xor(slopes.high, quads));
    }
  }

  /// For a new KV tile.
  FA_DEVICE void turn_slopes(Slopes& slopes, const Cursor& cursor, int warp_row, int lane) const {
    const int n = kv_tile(cursor);
    const int side = n < slopes.low ? -1 : n > slopes.high ? 1 : 0;
    if (ptx::vote_any(side != slopes.side)) take_side(slopes, side, cursor, warp_row, lane);
  }

  FA_DEVICE void take_side(Slopes& slopes, int side, const Cursor& cursor, int warp_row, int lane) const {
    constexpr float kSign = Variant::kAffineAbs && Variant::kAffineStep < 0 ? -1.f : 1.f;
    slopes.side = side;
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const float factor = Variant::affine(params.variant, place(cursor, warp_row, r, lane)).factor;
      slopes.added[r] = side == 0 ? 0.f : factor * (static_cast<float>(side) * kSign);
      KeyNumbers::split(slopes.operand[r], slopes.operand[2 + r], slopes.added[r] * Variant::kAffineStep);
    }
  }

  struct RowPair {
    kernel::AffineRow half[2];
  };
  using AffineRows = typename kernel::Either<Slopes, RowPair, kAffineProduct>::type;

  FA_DEVICE AffineRows affine_rows([[maybe_unused]] const Slopes& slopes, [[maybe_unused]] const Cursor& cursor,
                                   [[maybe_unused]] int warp_row, [[maybe_unused]] int lane) const {
    if constexpr (kAffineProduct) {
      return slopes;
    } else {
      RowPair rows = {};
      if constexpr (kAffine) {
        FA_UNROLL
        for (int r = 0; r < 2; ++r) {
          rows.half[r] = Variant::affine(params.variant, place(cursor, warp_row, r, lane));
        }
      }
      return rows;
    }
  }

  /// What an affine score function adds to the scores of n8 tile n, key by key: where it is small nothing large is
  /// rounded.
  FA_DEVICE void add_affine_to_tile(float (&d)[4], const Cursor& cursor, int warp_row, int lane, int first_key) const {
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const kernel::AffineRow row = Variant::affine(params.variant, place(cursor, warp_row, r, lane));
      FA_UNROLL
      for (int e = 0; e < 2; ++e) {
        const float x = row.base + static_cast<float>(Variant::kAffineStep * (first_key + e));
        d[2 * r + e] = ptx::fma(row.factor, Variant::kAffineAbs ? ptx::abs(x) : x, d[2 * r + e]);
      }
    }
  }

  /// What the product has not added of an affine score function; shift: before the scale.
  FA_DEVICE void add_affine(S& s, float (&shift)[2], const AffineRows& rows, [[maybe_unused]] const Cursor& cursor,
                            [[maybe_unused]] int warp_row, [[maybe_unused]] int lane) const {
    const auto add = [&](const kernel::AffineRow(&half)[2]) {
      kernel::apply_affine<Variant, kTileN / 8>(half, shift, softmax_scale_log2(),
                                                [&](int n, int i) -> float& { return s[4 * n + i]; });
    };
    if constexpr (!kAffineProduct) {
      add(rows.half);
    } else if (ptx::vote_any(rows.side != 0)) {
      constexpr float kStep = static_cast<float>(Variant::kAffineStep * kTileN);  // from tile to tile
      const float n = static_cast<float>(kv_tile(cursor));
      FA_UNROLL
      for (int r = 0; r < 2; ++r) shift[r] = rows.added[r] * ptx::fma(n, kStep, rows.start[r]);
    } else {
      kernel::AffineRow half[2];
      FA_UNROLL
      for (int r = 0; r < 2; ++r) half[r] = Variant::affine(params.variant, place(cursor, warp_row, r, lane));
      add(half);
    }
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_AFFINE_SCORES_CUH_
