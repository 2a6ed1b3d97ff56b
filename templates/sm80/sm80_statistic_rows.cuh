#ifndef FA_TEMPLATES_SM80_SM80_STATISTIC_ROWS_CUH_
#define FA_TEMPLATES_SM80_SM80_STATISTIC_ROWS_CUH_

#include <common/constants.cuh>
#include <common/copies.cuh>
#include <common/forward_schedule.cuh>
#include <common/mask.cuh>
#include <common/online_softmax.cuh>
#include <common/row_statistics.cuh>
#include <common/sequences.cuh>
#include <common/statistics_gradients.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <sm80/sm80_forward_scores.cuh>

namespace fa::sm80 {

/// The forward whose scores these are, without V.
template <class Config>
struct ForwardOfRows : Config {
  static constexpr int kHeadDimV = 8;
  static constexpr int kStages = 1;
  static constexpr int kLoopBodies = 1;
  static constexpr bool kQInRegisters = false;
  static constexpr bool kConditionalRescale = true;
  static constexpr bool kPackGqa = false;
  static constexpr bool kSplit = false;
};

/// What gradients of statistics need of whole rows, in front of a backward: the key of a row's greatest logit, of equal
/// ones the first; of the greatest logit of a head its row, too; and the sum of its P times the gradient of the keys'
/// column sums.
///
/// A backward that looked for the maximum of a forward among its own scores might find none: the two add in other
/// orders.
///
/// A thread block has a tile of rows, and walks over the keys that they see.
///
/// In shared memory: Q [tile_m, d_qk], and K [tile_n, d_qk] twice.
template <class Config>
struct StatisticRows {
  using Scores = ForwardScores<ForwardOfRows<Config>>;
  using Params = StatisticRowsParams;
  using T = typename Scores::T;
  using Variant = typename Scores::Variant;
  using Gemm = typename Scores::Gemm;
  using KTile = typename Scores::KTile;
  using QWarpTile = typename Scores::QWarpTile;
  static constexpr int kTileN = Scores::kTileN;
  static constexpr int kHeadDimQk = Scores::kHeadDimQk;
  static constexpr int kMTiles = Scores::kMTiles;
  static constexpr int kNTiles = Scores::kNTiles;
  static constexpr bool kVarlen = Scores::kVarlen;
  static constexpr int kSharedBytes = Scores::kQBytes + 2 * KTile::kBytes;
  static constexpr int kThreads = Scores::kThreads;
  static constexpr int kNoKey = 0x7fffffff;
  static_assert(Scores::kWarpsN == 1, "warps have their own rows");

  static constexpr bool kFindsMax = kMaxLogitGradient<Config> != 0;
  static constexpr bool kOfScaled = kMaxLogitGradient<Config> == 2;
  static constexpr bool kSums = kColumnSumsGradient<Config>;

  /// Of the rows that a thread's fragment registers belong to, split over the quad.
  struct Found {
    float score[kMTiles][2];
    int key[kMTiles][2];
    float sum[kMTiles][2];
    float offset[kMTiles][2];  // the log-sum-exp, in log2 units; infinity where no key has a weight
  };

  const Params& params;
  const Scores rows;

  FA_DEVICE explicit StatisticRows(const Params& p) : params(p), rows(p, Piece{}, this_tile(p)) {}

  static FA_DEVICE ForwardTile this_tile(const Params& p) {
    if constexpr (kVarlen) {
      return forward_tile_of_batch<Scores::kTileM, false>(p, ptx::block_index());
    } else {
      return forward_tile<Variant, Config::kCausal>(p, ptx::block_index());
    }
  }

  FA_DEVICE void run() const {
    if (rows.block_row < 0 || rows.block_row >= rows.row_count) return;  // a slot without a tile
    const int last_row = minimum(rows.block_row + Scores::kTileM, rows.row_count) - 1;
    const int begin = keys_begin<Variant>(params, rows.lengths, rows.block_row);
    const int end = keys_end<Config::kCausal, Variant>(params, rows.lengths, last_row);
    Found found;
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        found.score[m][r] = -kInfinity;
        found.key[m][r] = kNoKey;
        found.sum[m][r] = 0.f;
        if constexpr (kSums) found.offset[m][r] = offset_of(rows.fragment_row(m, r));
      }
    }
    if (end > begin) walk(begin / kTileN, ceil_div(end, kTileN), found);
    store(found);
  }

  FA_DEVICE float offset_of(int row) const {
    if (row >= rows.row_count) return kInfinity;
    const float lse = ptx::ld_global(params.lse + rows.first_row(params.stride_lse_b, params.stride_lse_s) +
                                     rows.tile.head * params.stride_lse_h + row * params.stride_lse_s);
    return lse == -kInfinity ? float{kInfinity} : lse * kLog2e;
  }

  FA_DEVICE uint32_t k_shared(int stage) const { return rows.k_shared(0) + stage * KTile::kBytes; }

  FA_DEVICE void walk(int first, int end, Found& found) const {
    Scores scores = rows;
    scores.read_fixed();
    load_rows();
    load_keys(first, 0);
    ptx::cp_async_commit();
    int stage = 0;
    for (int block = first; block < end; ++block) {
      ptx::cp_async_wait<0>();
      ptx::sync_threads();  // this tile has landed for all, and all have left the buffer that is filled next
      if (block + 1 < end) load_keys(block + 1, stage ^ 1);
      ptx::cp_async_commit();
      add(scores, block, stage, found);
      stage ^= 1;
    }
    ptx::cp_async_wait<0>();
  }

  FA_DEVICE void load_rows() const {
    using QCopy = typename Scores::QCopy;
    const T* const base = static_cast<const T*>(params.q) + rows.first_row(params.stride_q_b, params.stride_q_s) +
                          rows.tile.head * params.stride_q_h + rows.warp_row * params.stride_q_s;
    QCopy::strided(rows.q_shared, QCopy::thread_pointer(base, params.stride_q_s, rows.copier), params.stride_q_s,
                   rows.row_count - rows.warp_row, rows.copier);
  }

  FA_DEVICE void load_keys(int block, int stage) const {
    const int first = block * kTileN;
    Scores::KCopy::strided(k_shared(stage), rows.k_thread + first * params.stride_k_s, params.stride_k_s,
                           rows.lengths.s_kv - first, rows.thread);
  }

  using Scored = Fragment<kMTiles, kNTiles>;

  FA_DEVICE void add(const Scores& scores, int block, int stage, Found& found) const {
    Scored s = {};
    Gemm::template scores<KTile, kHeadDimQk>(s, k_shared(stage), rows.lane, [&](uint32_t(&a)[4], int m, int k) {
      Gemm::template load_a<QWarpTile, kHeadDimQk>(a, rows.q_shared, 16 * m, k, rows.lane);
    });
    if constexpr (kOfScaled) {
      Scored scaled;
      FA_UNROLL
      for (int i = 0; i < kMTiles * kNTiles * 4; ++i) {
        scaled[i / (4 * kNTiles)][i / 4 % kNTiles][i % 4] =
            s[i / (4 * kNTiles)][i / 4 % kNTiles][i % 4] * scores.scale_sign();
      }
      hide(scores, block, scaled);
      compare(block, scaled, found);
      if constexpr (!kSums) return;
    }
    if constexpr (Variant::kScore) {
      scores.apply_score(s, block);
    } else if constexpr (!Config::kPositiveScale) {
      scores.scale_scores(s);
    }
    hide(scores, block, s);
    if constexpr (kFindsMax && !kOfScaled) compare(block, s, found);
    if constexpr (kSums) sum(scores, block, s, found);
  }

  FA_DEVICE void hide(const Scores& scores, int block, Scored& s) const {
    if constexpr (Variant::kMask) scores.apply_mask(s, block);
    scores.mask(s, block);
  }

  FA_DEVICE void compare(int block, const Scored& s, Found& found) const {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        FA_UNROLL
        for (int n = 0; n < kNTiles; ++n) {
          FA_UNROLL
          for (int e = 0; e < 2; ++e) {
            if (!(s[m][n][2 * r + e] > found.score[m][r])) continue;  // nor is a NaN
            found.score[m][r] = s[m][n][2 * r + e];
            found.key[m][r] = rows.first_column(block) + 8 * n + e;
          }
        }
      }
    }
  }

  FA_DEVICE void sum(const Scores& scores, int block, const Scored& s, Found& found) const {
    FA_UNROLL
    for (int n = 0; n < kNTiles; ++n) {
      FA_UNROLL
      for (int e = 0; e < 2; ++e) {
        const int key = rows.first_column(block) + 8 * n + e;
        const float gradient = column_gradient<Config>(params, rows.lengths, rows.tile.batch, rows.tile.head, key);
        FA_UNROLL
        for (int m = 0; m < kMTiles; ++m) {
          FA_UNROLL
          for (int r = 0; r < 2; ++r) {
            const float score = s[m][n][2 * r + e];
            const float p = ptx::ex2(ptx::fma(score, scores.softmax_scale_log2(), -found.offset[m][r]));
            if (p != 0.f) found.sum[m][r] = ptx::fma(p, gradient, found.sum[m][r]);
          }
        }
      }
    }
  }

  FA_DEVICE void store(Found& found) const {
    const int64_t first = first_statistic();
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        FA_UNROLL
        for (int lanes = 1; lanes < 4; lanes *= 2) join(lanes, found.score[m][r], found.key[m][r], found.sum[m][r]);
        const int row = rows.fragment_row(m, r);
        if (row >= rows.row_count || rows.lane % 4 != 0) continue;
        const int64_t at = statistic_of_row<kVarlen>(params, first, rows.tile.head, row);
        const int key = found.key[m][r];
        if constexpr (kFindsMax) ptx::st_global(params.max_keys + at, key == kNoKey ? int32_t{-1} : int32_t{key});
        if constexpr (kFindsMax && kMaxLogitByHead<Config>) {
          if (key != kNoKey) {
            ptx::red_max_u64(
                params.max_rows + rows.tile.head,
                logit_and_row(found.score[m][r], row_of_all<kVarlen>(params, rows.lengths, rows.tile.batch, row)));
          }
        }
        if constexpr (kSums) ptx::st_global(params.row_sums + at, found.sum[m][r]);
      }
    }
  }

  /// With another lane of the quad.
  static FA_DEVICE void join(int lanes, float& score, int& key, float& sum) {
    if constexpr (kFindsMax) {
      const float other = ptx::shfl_xor(score, lanes);
      const int other_key = ptx::shfl_xor(key, lanes);
      if (other > score || (other == score && other_key < key)) {
        score = other;
        key = other_key;
      }
    }
    if constexpr (kSums) sum += ptx::shfl_xor(sum, lanes);
  }

  FA_DEVICE int64_t first_statistic() const {
    if constexpr (kVarlen) {
      return rows.lengths.first_row;
    } else {
      return static_cast<int64_t>(rows.tile.batch) * params.h_q * params.s_q;
    }
  }
};

template <class Config>
FA_DEVICE void statistic_rows(const StatisticRowsParams& params) {
  StatisticRows<Config>(params).run();
}

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_STATISTIC_ROWS_CUH_
