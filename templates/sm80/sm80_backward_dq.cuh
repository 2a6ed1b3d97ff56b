#ifndef FA_TEMPLATES_SM80_SM80_BACKWARD_DQ_CUH_
#define FA_TEMPLATES_SM80_SM80_BACKWARD_DQ_CUH_

#include <common/backward_params.cuh>
#include <common/backward_schedule.cuh>
#include <common/bounded_items.cuh>
#include <common/constants.cuh>
#include <common/copies.cuh>
#include <common/dropout.cuh>
#include <common/dropout_place.cuh>
#include <common/elements.cuh>
#include <common/online_softmax.cuh>
#include <common/sequences.cuh>
#include <common/shared_tile.cuh>
#include <common/statistics_gradients.cuh>
#include <common/switches.cuh>
#include <common/tile_store.cuh>
#include <common/variant.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <sm80/sm80_mma16.cuh>
#include <sm80/sm80_tf32x3.cuh>

namespace fa::sm80 {

/// dQ alone, in a fixed order of additions: a thread block owns a tile of query rows, every warp whole rows of it, and
/// walks the key tiles. S = Q K^T and dP = dO V^T are computed once more, and dS goes from registers into dQ += dS K.
///
/// Config is a struct of constants: Element (f16, bf16 or f32), kHeadDimQk, kHeadDimV, kTileM, kTileN, kWarps,
/// kStages, kCausal, kAligned; optionally kVarlen, kDropout, kBounded (common/switches.cuh) and a Variant
/// (common/variant.cuh). With kBounded blocks go on from one tile to another (common/bounded_items.cuh).
template <class Config>
struct BackwardDq {
  using T = typename Config::Element;
  using Variant = VariantOf<Config>;
  using Params = BackwardParamsOf<Config>;
  using Gemm = WarpGemm<T>;

  static constexpr int kTileM = Config::kTileM;
  static constexpr int kTileN = Config::kTileN;
  static constexpr int kHeadDimQk = Config::kHeadDimQk;
  static constexpr int kHeadDimV = Config::kHeadDimV;
  static constexpr int kStages = Config::kStages;
  static constexpr int kThreads = Config::kWarps * kWarpSize;
  static constexpr int kWarpRows = kTileM / Config::kWarps;
  static constexpr int kMTiles = kWarpRows / 16;
  static constexpr int kNTiles = kTileN / 8;
  static constexpr int kDqTiles = kHeadDimQk / 8;
  static constexpr bool kVarlen = kernel::kVarlen<Config>;
  static constexpr bool kDropout = kernel::kDropout<Config>;
  static constexpr bool kTwoSided = Variant::kLeftWindow || Variant::kChunked;  // keys are hidden before others too
  static constexpr bool kLists = Variant::kMask && !kVarlen;                    // of tiles that are not empty
  static constexpr bool kStatistics = kernel::kStatisticsGradients<Config>;
  static constexpr bool kHides = Config::kCausal || kTwoSided || Variant::kMask;  // keys of the sequence from rows

  static_assert(kHeadDimQk % 8 == 0 && kHeadDimV % 8 == 0, "head dims are multiples of 8");
  static_assert(kTileM == kMTiles * 16 * Config::kWarps && kMTiles >= 1, "a warp owns a multiple of 16 rows");
  static_assert(kTileN % 16 == 0, "keys are consumed 16 at a time");
  static_assert(kStages == 1 || kStages == 2, "1 or 2 K and V buffers");

  using QTile = SharedTile<T, kTileM, kHeadDimQk>;
  using DoTile = SharedTile<T, kTileM, kHeadDimV>;
  using KTile = SharedTile<T, kTileN, kHeadDimQk>;
  using VTile = SharedTile<T, kTileN, kHeadDimV>;
  static constexpr int kStageBytes = KTile::kBytes + VTile::kBytes;
  static constexpr int kSharedBytes = QTile::kBytes + DoTile::kBytes + kStages * kStageBytes;

  using QCopy = TileCopy<QTile, T, kTileM, kThreads, Config::kAligned>;
  using DoCopy = TileCopy<DoTile, T, kTileM, kThreads, Config::kAligned>;
  using KCopy = TileCopy<KTile, T, kTileN, kThreads, Config::kAligned>;
  using VCopy = TileCopy<VTile, T, kTileN, kThreads, Config::kAligned>;

  const Params& params;
  const BackwardTile tile;
  const BatchEntry<kVarlen, BackwardParams> lengths;
  const int thread = ptx::thread_index();
  const int lane = thread % kWarpSize;
  const int warp_row = thread / kWarpSize * kWarpRows;  // first of the warp's rows in the tile
  const int first_row = tile.block * kTileM;
  const int kv_head = tile.head / params.group;
  const T* const k_thread = KCopy::thread_pointer(
      static_cast<const T*>(params.k) + keys_at(params.stride_k_b, params.stride_k_s) + kv_head * params.stride_k_h,
      params.stride_k_s,
      thread);  // into [s_kv, d_qk]
  const T* const v_thread = VCopy::thread_pointer(
      static_cast<const T*>(params.v) + keys_at(params.stride_v_b, params.stride_v_s) + kv_head * params.stride_v_h,
      params.stride_v_s,
      thread);  // into [s_kv, d_v]
  const uint32_t shared = ptx::dynamic_shared();
  const uint32_t q_shared = shared;
  const uint32_t do_shared = shared + QTile::kBytes;

  FA_DEVICE explicit BackwardDq(const Params& p, int item)
      : params(p), tile(this_tile(p, item)), lengths(backward_entry<kVarlen, kTileM>(p, tile.batch)) {}

  static FA_DEVICE int items(const Params& p) { return p.m_blocks * p.h_q * (kVarlen ? 1 : p.b); }

  static FA_DEVICE BackwardTile this_tile(const Params& p, int item) {
    if constexpr (kVarlen) {
      return backward_tile_of_batch<kTileM, true>(p, item, p.m_blocks, p.h_q);
    } else {
      return backward_tile<Variant, Config::kCausal, true>(p, item, p.m_blocks, p.h_q);
    }
  }

  /// Offset of the batch entry's first row (of q, o, their gradients), and of its first key.
  FA_DEVICE int64_t rows_at(int64_t stride_b, int64_t stride_s) const {
    return offset_of_rows<kVarlen>(lengths, tile.batch, stride_b, stride_s);
  }
  FA_DEVICE int64_t keys_at(int64_t stride_b, int64_t stride_s) const {
    return offset_of_keys<kVarlen>(lengths, tile.batch, stride_b, stride_s);
  }

  FA_DEVICE uint32_t k_shared(int stage) const { return do_shared + DoTile::kBytes + stage * kStageBytes; }
  FA_DEVICE uint32_t v_shared(int stage) const { return k_shared(stage) + KTile::kBytes; }

  FA_DEVICE void load_rows() const {
    const T* q = static_cast<const T*>(params.q) + rows_at(params.stride_q_b, params.stride_q_s) +
                 tile.head * params.stride_q_h + first_row * params.stride_q_s;
    const T* dout = static_cast<const T*>(params.dout) + rows_at(params.stride_dout_b, params.stride_dout_s) +
                    tile.head * params.stride_dout_h + first_row * params.stride_dout_s;
    const int valid = lengths.s_q - first_row;
    QCopy::strided(q_shared, QCopy::thread_pointer(q, params.stride_q_s, thread), params.stride_q_s, valid, thread);
    DoCopy::strided(do_shared, DoCopy::thread_pointer(dout, params.stride_dout_s, thread), params.stride_dout_s, valid,
                    thread);
  }

  FA_DEVICE const int32_t* tile_list() const {
    return tile_list_of<Variant>(params.variant, tile.batch, tile.head, params.h_q, tile.block, params.m_blocks);
  }

  /// The key tile at a place of the walk: of the tile list, where there is one.
  FA_DEVICE int key_tile(int place) const {
    if constexpr (kLists) return ptx::ld_global_nc(tile_list() + place);
    return place;
  }

  FA_DEVICE void load_keys(int n_block, int stage) const {
    const int first = key_tile(n_block) * kTileN;
    KCopy::strided(k_shared(stage), k_thread + first * params.stride_k_s, params.stride_k_s, lengths.s_kv - first,
                   thread);
    VCopy::strided(v_shared(stage), v_thread + first * params.stride_v_s, params.stride_v_s, lengths.s_kv - first,
                   thread);
  }

  /// Keys that row `row` sees, as a limit.
  FA_DEVICE int key_limit(int row) const {
    if constexpr (kTwoSided) return keys_end<Config::kCausal, Variant>(params, lengths, row);
    const int limit = Config::kCausal ? row + lengths.causal_shift + 1 : lengths.s_kv;
    return limit < lengths.s_kv ? limit : lengths.s_kv;
  }

  FA_DEVICE void run() const {
    if constexpr (kVarlen) {
      if (first_row < 0 || first_row >= lengths.s_q) return;  // a slot without a tile
    }
    Fragment<kMTiles, kDqTiles> dq = {};
    const int last_row = (first_row + kTileM < lengths.s_q ? first_row + kTileM : lengths.s_q) - 1;
    const int limit = key_limit(last_row);
    int first_block = 0;
    if constexpr (kLists) {
      const int count = ptx::ld_global_nc(tile_list() - 3);
      if (count > 0) walk(0, count, dq);
    } else {
      if constexpr (kTwoSided) first_block = keys_begin<Variant>(params, lengths, first_row) / kTileN;
      if (limit > first_block * kTileN) walk(first_block, ceil_div(limit, kTileN), dq);
    }
    store(dq);
  }

  FA_DEVICE void walk(int first_block, int n_blocks, Fragment<kMTiles, kDqTiles>& dq) const {
    load_rows();
    load_keys(first_block, 0);
    ptx::cp_async_commit();
    float lse[kMTiles][2];
    float delta[kMTiles][2];
    load_statistics(lse, delta);
    int stage = 0;
    for (int n_block = first_block; n_block < n_blocks; ++n_block) {
      ptx::cp_async_wait<0>();
      ptx::sync_threads();  // this tile has landed for all, and all have left the buffers that are filled next
      if constexpr (kStages == 2) {
        if (n_block + 1 < n_blocks) load_keys(n_block + 1, stage ^ 1);
        ptx::cp_async_commit();
      }
      Fragment<kMTiles, kNTiles> ds;
      if (differentiate(n_block, stage, lse, delta, ds)) {
        Gemm::template accumulate<KTile, kHeadDimQk, kMTiles, kNTiles>(dq, ds, k_shared(stage), lane, Finite<T>{});
      } else {
        Gemm::template accumulate<KTile, kHeadDimQk, kMTiles, kNTiles>(dq, ds, k_shared(stage), lane);
      }
      if constexpr (kStages == 1) {
        ptx::sync_threads();  // all have left K and V
        if (n_block + 1 < n_blocks) load_keys(n_block + 1, 0);
        ptx::cp_async_commit();
      } else {
        stage ^= 1;
      }
    }
  }

  /// Of the rows that a thread's fragment registers belong to; a row behind the end weighs nothing.
  FA_DEVICE void load_statistics(float (&lse)[kMTiles][2], float (&delta)[kMTiles][2]) const {
    const int64_t index = padded_rows_before<kVarlen>(params, lengths, tile.batch, tile.head);
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int row = first_row + warp_row + 16 * m + 8 * r + lane / 4;
        const bool valid = row < lengths.padded_rows;
        lse[m][r] = valid ? ptx::ld_global(params.lse_log2 + index + row) : kInfinity;
        delta[m][r] = valid ? ptx::ld_global(params.delta + index + row) : 0.f;
      }
    }
  }

  /// dS of a key tile; whether keys that masks hide from some rows may be such that 0 must not be multiplied with them:
  /// NaN of a key reaches the rows that keep it through dS.
  FA_DEVICE bool differentiate(int n_block, int stage, const float (&lse)[kMTiles][2], const float (&delta)[kMTiles][2],
                               Fragment<kMTiles, kNTiles>& ds) const {
    Fragment<kMTiles, kNTiles> p = {};
    Gemm::template scores<KTile, kHeadDimQk>(p, k_shared(stage), lane, [&](uint32_t(&a)[4], int m, int k) {
      Gemm::template load_a<QTile, kHeadDimQk>(a, q_shared, warp_row + 16 * m, k, lane);
    });
    Fragment<kMTiles, kNTiles> dp = {};
    Gemm::template scores<VTile, kHeadDimV>(dp, v_shared(stage), lane, [&](uint32_t(&a)[4], int m, int k) {
      Gemm::template load_a<DoTile, kHeadDimV>(a, do_shared, warp_row + 16 * m, k, lane);
    });
    const int first_key = key_tile(n_block) * kTileN;
    if constexpr (kDropout) {
      if constexpr (kPlaced<Variant>) {
        Dropout(params.dropout, kernel::heads_before<Variant>(params, tile.batch) + tile.head)
            .drop(dp, row_of_whole<Variant>(params, first_row + warp_row), key_of_whole<Variant>(params, first_key),
                  lane);
      } else {
        const int64_t heads_before = static_cast<int64_t>(tile.batch) * params.h_q + tile.head;
        Dropout(params.dropout, heads_before).drop(dp, first_row + warp_row, first_key, lane);
      }
    }
    if constexpr (kTwoSided || Variant::kScore || Variant::kMask || kStatistics) {
      bool full = false;
      if constexpr (kLists) full = n_block < ptx::ld_global_nc(tile_list() - 1);
      differentiate_variant(first_key, full, lse, delta, p, dp, ds);
      const bool hides =
          Variant::kMask ? !full
                         : hides_any<Config::kCausal, Variant, kTileM, kTileN>(params, lengths, first_row, first_key);
      return kHides && hides && any_infinite(p);
    }
    const bool masked = first_key + kTileN > key_limit(first_row);
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        // First hidden key of the row, from this thread's first column of the tile.
        int hidden_from = kTileN;
        if (masked) {
          hidden_from = key_limit(first_row + warp_row + 16 * m + 8 * r + lane / 4) - first_key - 2 * (lane % 4);
        }
        FA_UNROLL
        for (int n = 0; n < kNTiles; ++n) {
          FA_UNROLL
          for (int e = 2 * r; e < 2 * r + 2; ++e) {
            const float weight = ptx::ex2(ptx::fma(p[m][n][e], params.scale_log2, -lse[m][r]));
            ds[m][n][e] = 8 * n + e % 2 < hidden_from ? weight * less_delta(dp[m][n][e], delta[m][r]) : 0.f;
          }
        }
      }
    }
    return kHides && masked && any_infinite(p);
  }

  /// With dropout, dP lacks its factor 1 / keep, which `scale` holds: dS comes out keep times too small, as it should.
  FA_DEVICE float less_delta(float dp, float delta) const {
    if constexpr (kDropout) return ptx::fma(delta, -params.dropout.keep, dp);
    return dp - delta;
  }

  /// Of what dropout leaves alone, likewise.
  FA_DEVICE float undropped(float gradient) const {
    if constexpr (kDropout) return gradient * params.dropout.keep;
    return gradient;
  }

  FA_DEVICE void differentiate_variant(int first_key, bool full, const float (&lse)[kMTiles][2],
                                       const float (&delta)[kMTiles][2], const Fragment<kMTiles, kNTiles>& s,
                                       const Fragment<kMTiles, kNTiles>& dp, Fragment<kMTiles, kNTiles>& ds) const {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int row = first_row + warp_row + 16 * m + 8 * r + lane / 4;
        const int thread_key = first_key + 2 * (lane % 4);
        const int begin = keys_begin<Variant>(params, lengths, row) - thread_key;
        const int end = keys_end<Config::kCausal, Variant>(params, lengths, row) - thread_key;
        [[maybe_unused]] RowGradients<Config> of_row;
        if constexpr (kStatistics) of_row.load(params, lengths, tile.batch, tile.head, row, lse[m][r]);
        Place at{tile.batch,  tile.head,    inside(row, lengths.s_q), thread_key, 0, 0,
                 lengths.s_q, lengths.s_kv, params.variant.scale};
        FA_UNROLL
        for (int n = 0; n < kNTiles; ++n) {
          FA_UNROLL
          for (int e = 2 * r; e < 2 * r + 2; ++e) {
            at.kv_step = 8 * n + e % 2;
            bool keep = full;
            if (!full) {
              keep = at.kv_step >= begin && at.kv_step < end;
              if constexpr (Variant::kMask) keep = keep && Variant::keep(params.variant, at);
            }
            float slope = 1.f;
            float log2_p;
            if constexpr (Variant::kScore) {
              float score;
              if constexpr (kLoads < Variant >> 0) {
                float loaded[kLoads<Variant>];
                Place base = at;
                base.kv_step = 0;
                load_values<Variant, true>(loaded, params.variant, base, 0, at.kv_step);
                score = Variant::slope(params.variant, at, s[m][n][e], slope, loaded);
              } else {
                score = Variant::slope(params.variant, at, s[m][n][e], slope);
              }
              log2_p = ptx::fma(score, Variant::kFactor * kLog2e, -lse[m][r]);
            } else {
              log2_p = ptx::fma(s[m][n][e], params.scale_log2, -lse[m][r]);
            }
            const float weight = ptx::ex2(log2_p);
            if constexpr (kStatistics) {
              const int key = thread_key + at.kv_step;
              float of_p = of_row.of_probability(log2_p);
              if constexpr (kernel::kColumnSumsGradient<Config>) {
                of_p += column_gradient<Config>(params, lengths, tile.batch, tile.head, key);
              }
              const float logit = weight * (less_delta(dp[m][n][e], delta[m][r]) + undropped(of_p)) +
                                  undropped(of_row.template of_logit<false>(key));
              ds[m][n][e] = keep ? logit * slope + undropped(of_row.template of_logit<true>(key)) : 0.f;
            } else {
              ds[m][n][e] = keep ? weight * less_delta(dp[m][n][e], delta[m][r]) * slope : 0.f;
            }
          }
        }
      }
    }
  }

  /// scale * dQ through shared memory, where Q was, so that rows leave in 16-byte pieces.
  FA_DEVICE void store(const Fragment<kMTiles, kDqTiles>& dq) const {
    ptx::sync_threads();  // all have left Q
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int n = 0; n < kDqTiles; ++n) {
        FA_UNROLL
        for (int r = 0; r < 2; ++r) {
          store_pair<T>(q_shared + QTile::offset(warp_row + 16 * m + 8 * r + lane / 4, 8 * n + 2 * (lane % 4)),
                        dq[m][n][2 * r] * params.scale, dq[m][n][2 * r + 1] * params.scale);
        }
      }
    }
    ptx::sync_threads();  // dQ is complete in shared memory
    T* rows = static_cast<T*>(params.dq) + rows_at(params.stride_dq_b, params.stride_dq_s) +
              tile.head * params.stride_dq_h + first_row * params.stride_dq_s;
    store_tile<QTile, T, kTileM, kThreads, Config::kAligned>(q_shared, rows, params.stride_dq_s,
                                                             lengths.s_q - first_row, thread);
  }
};

template <class Config>
FA_DEVICE void backward_dq(const kernel::BackwardParamsOf<Config>& params) {
  if constexpr (kernel::kBounded<Config>) {
    kernel::take_items(BackwardDq<Config>::items(params),
                       [&](int round) { BackwardDq<Config>(params, kernel::item_of_round(round)).run(); });
  } else {
    BackwardDq<Config>(params, ptx::block_index()).run();
  }
}

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_BACKWARD_DQ_CUH_
