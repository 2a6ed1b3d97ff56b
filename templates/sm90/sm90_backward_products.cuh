#ifndef FA_TEMPLATES_SM90_SM90_BACKWARD_PRODUCTS_CUH_
#define FA_TEMPLATES_SM90_SM90_BACKWARD_PRODUCTS_CUH_

#include <common/backward_schedule.cuh>
#include <common/constants.cuh>
#include <common/dropout.cuh>
#include <common/dropout_place.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <common/variant_backward.cuh>
#include <ptx/language.cuh>
#include <ptx/ldmatrix.cuh>
#include <ptx/math.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <ptx/wgmma.cuh>
#include <sm90/sm90_backward_cluster.cuh>
#include <sm90/sm90_backward_rows.cuh>
#include <sm90/sm90_backward_store.cuh>
#include <sm90/sm90_finite_keys.cuh>
#include <sm90/sm90_shared_tile.cuh>

namespace fa::sm90 {

/// What the loops of the consumers are made of: products, P and dS in registers, and dQ on its way out.
template <class Config>
struct BackwardProducts : BackwardRows<Config> {
  using Base = BackwardRows<Config>;
  using T = typename Base::T;
  using Variant = typename Base::Variant;
  using QTile = typename Base::QTile;
  using DoTile = typename Base::DoTile;
  using KTile = typename Base::KTile;
  using VTile = typename Base::VTile;
  using DsTile = typename Base::DsTile;
  using SGemm = typename Base::SGemm;
  using DvGemm = typename Base::DvGemm;
  using DkGemm = typename Base::DkGemm;
  using DqGemm = typename Base::DqGemm;
  using S = typename Base::S;
  using Operand = typename Base::Operand;
  using Drops = typename Base::Drops;
  using Dv = typename Base::Dv;
  using Dk = typename Base::Dk;
  using Dq = typename Base::Dq;
  using Functions = typename Base::Functions;
  using Job = typename Base::Job;
  using Place = typename Base::Place;
  using Base::Base;
  using Base::kTileM, Base::kTileN, Base::kHeadDimQk, Base::kQkSteps, Base::kVSteps, Base::kDqByRows, Base::kDqColumns,
      Base::kVarlen, Base::kDropout, Base::kWantsDk, Base::kWantsDv, Base::kTwoSided, Base::kLists, Base::kLooks,
      Base::kLoadAhead, Base::kDqRowBytes, Base::kLayout, Base::params, Base::shared, Base::k_shared, Base::v_shared,
      Base::q_shared, Base::do_shared, Base::ds_shared, Base::lse_shared, Base::delta_shared, Base::described,
      Base::dq_full, Base::dq_empty, Base::infinite_keys, Base::consumer_index, Base::lane_index, Base::warp_index;

  FA_DEVICE Functions functions(const Job& work, const Place& place, int stage) const {
    const uint32_t statistics = static_cast<uint32_t>(8 * (lane_index() % 4));
    return {params,
            work.lengths,
            work.tile.batch,
            place.head,
            place.m_block * kTileM,
            work.first_key(),
            lse_shared(stage) + statistics,
            delta_shared(stage) + statistics,
            true};
  }

  /// S^T becomes P^T, and dP^T becomes dS^T.
  FA_DEVICE void apply_functions(S& s, S& dp, typename Functions::CaptureGradients& by_capture, const Job& work,
                                 const Place& place, int stage, const typename Functions::Loaded& loaded) const {
    const Functions scores = functions(work, place, stage);
    const bool whole = Variant::kMask ? this->template is_kept<true>(work, place) : scores.plain();
    scores.template differentiate<kLoadAhead>(s, dp, by_capture, whole, loaded);
  }

  /// Tells where a key of the warp has infinities or NaNs: then each of its scores is one, before masks. `s` is S^T of
  /// the job's first step.
  template <int kCount>
  FA_DEVICE void tell_infinite_keys(const float (&s)[kCount], int round) const {
    if constexpr (kLooks) {
      const float zero = ptx::fma(s[0], 0.f, s[2] * 0.f);  // a score of each of the thread's two keys
      if (ptx::vote_any(zero != 0.f)) {
        const int warp = 4 * consumer_index() + warp_index();
        if (lane_index() == 0) ptx::st_shared_b32(infinite_keys(warp), static_cast<uint32_t>(round + 1));
        ptx::sync_warp();  // one lane told
      }
    }
  }

  /// Starts S^T = K Q^T, [64, tile_m].
  FA_DEVICE void issue_scores(S& s, int stage, int consumer) const {
    ptx::wgmma_forget(s);
    ptx::wgmma_fence();
    FA_UNROLL
    for (int step = 0; step < kQkSteps; ++step) {
      SGemm::template shared<false>(s, KTile::k_major(described(k_shared()), consumer * 64, step),
                                    QTile::k_major(described(q_shared(stage)), 0, step), step != 0);
    }
    ptx::wgmma_commit();
  }

  /// Starts dP^T = V dO^T, [64, tile_m].
  FA_DEVICE void issue_dp(S& dp, int stage, int consumer) const {
    ptx::wgmma_forget(dp);
    ptx::wgmma_fence();
    FA_UNROLL
    for (int step = 0; step < kVSteps; ++step) {
      SGemm::template shared<false>(dp, VTile::k_major(described(v_shared()), consumer * 64, step),
                                    DoTile::k_major(described(do_shared(stage)), 0, step), step != 0);
    }
    ptx::wgmma_commit();
  }

  /// Starts an accumulation over the rows of a query tile, from kFirst on: dV += P^T dO or dK += dS^T Q.
  template <class Gemm, class Tile, int kFirst, class Sum, int kSteps>
  FA_DEVICE void issue_registers(Sum& sum, const uint32_t (&operand)[kSteps][4], uint32_t tile) const {
    ptx::wgmma_tie(sum);
    ptx::wgmma_fence();
    FA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      Gemm::template registers<true>(sum, operand[step], Tile::mn_major(described(tile), kFirst / 16 + step), true);
    }
    ptx::wgmma_commit();
  }

  template <int kFirst = 0, int kSteps>
  FA_DEVICE void issue_dv(Dv& dv, const uint32_t (&weights)[kSteps][4], uint32_t tile) const {
    if constexpr (kWantsDv) issue_registers<DvGemm, DoTile, kFirst>(dv, weights, tile);
  }
  template <int kFirst = 0, int kSteps>
  FA_DEVICE void issue_dk(Dk& dk, const uint32_t (&ds)[kSteps][4], uint32_t tile) const {
    if constexpr (kWantsDk) issue_registers<DkGemm, QTile, kFirst>(dk, ds, tile);
  }
  FA_DEVICE static void tie_dv(Dv& dv) {
    if constexpr (kWantsDv) ptx::wgmma_tie(dv);
  }
  FA_DEVICE static void tie_dk(Dk& dk) {
    if constexpr (kWantsDk) ptx::wgmma_tie(dk);
  }

  /// Starts dQ = dS K, [64, dq_columns].
  FA_DEVICE void issue_dq(Dq& dq, int buffer, int consumer) const {
    const int row = kDqByRows ? 64 * consumer : 0;
    // A warpgroup past the last column computes one that it does not add.
    const int slab = consumer < KTile::kSlabs ? consumer : KTile::kSlabs - 1;
    const uint32_t columns = kDqByRows ? 0 : slab * KTile::kSlabBytes;
    ptx::wgmma_forget(dq);
    ptx::wgmma_fence();
    FA_UNROLL
    for (int step = 0; step < kTileN / 16; ++step) {
      DqGemm::template shared<true>(dq, DsTile::k_major(described(ds_shared(buffer)), row, step),
                                    KTile::mn_major(described(k_shared() + columns), step), step != 0);
    }
    ptx::wgmma_commit();
  }

  /// P^T = exp2(scale_log2 * S^T - LSE), 0 where masked, of rows from kFirst of the tile on. `first_key`: the warp's
  /// first key.
  template <int kFirst = 0, int kCount>
  FA_DEVICE void exponentiate(float (&s)[kCount], int stage, const Job& work, const Place& place, int first_key) const {
    const int lane = lane_index();
    FA_UNROLL
    for (int j = 0; j < kCount / 4; ++j) {
      float row[2];
      ptx::ld_shared_f32x2(row, lse_shared(stage) + 4 * kFirst + 8 * (lane % 4) + 32 * j);
      FA_UNROLL
      for (int i = 0; i < 4; ++i) s[4 * j + i] = ptx::ex2(ptx::fma(s[4 * j + i], params.scale_log2, -row[i % 2]));
    }
    if constexpr (kLists) {
      if (!this->template is_kept<false>(work, place)) functions(work, place, stage).hide(s);
    }
    if constexpr (kTwoSided) {
      mask_two_sided(s, work, place.m_block, first_key);
      return;
    }
    // Behind it only rows would see a key that are not there.
    const int key_end = kernel::keys_end<Config::kCausal, Variant>(params, work.lengths, work.lengths.s_q - 1);
    if (first_key + 16 > key_end) {
      FA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        if (first_key + lane / 4 + i / 2 % 2 * 8 >= key_end) s[i] = 0.f;
      }
    }
    // Of the first row.
    const int first_limit = place.m_block * kTileM + kFirst + work.lengths.causal_shift - first_key;
    if (Config::kCausal && first_limit < 15) {
      const int limit = first_limit + 2 * (lane % 4) - lane / 4;
      FA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        if (limit + i / 4 * 8 + i % 2 < i / 2 % 2 * 8) s[i] = 0.f;
      }
    }
  }

  /// P^T = 0 outside of windows and chunks, which keep each key for the rows between two.
  FA_DEVICE void mask_two_sided(S& s, const Job& work, int m_block, int first_key) const {
    const int first_row = m_block * kTileM;
    if (first_key + 16 <= work.lengths.s_kv &&
        kernel::rows_begin<Config::kCausal, Variant>(params, work.lengths, first_key + 15) <= first_row &&
        kernel::rows_end<Variant>(params, work.lengths, first_key) >= first_row + kTileM) {
      return;
    }
    const int lane = lane_index();
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int key = first_key + lane / 4 + 8 * r;
      const int first_query = first_row + 2 * (lane % 4);  // of this thread
      const int begin = kernel::rows_begin<Config::kCausal, Variant>(params, work.lengths, key) - first_query;
      const int rows_end = kernel::rows_end<Variant>(params, work.lengths, key) - first_query;
      const int end = key < work.lengths.s_kv ? rows_end : begin;
      FA_UNROLL
      for (int j = 0; j < kTileM / 8; ++j) {
        FA_UNROLL
        for (int e = 0; e < 2; ++e) {
          if (8 * j + e < begin || 8 * j + e >= end) s[4 * j + 2 * r + e] = 0.f;
        }
      }
    }
  }

  /// Which elements of P^T are dropped.
  FA_DEVICE void draw(Drops& drops, const Job& work, const Place& place, int first_key) const {
    if constexpr (kernel::kPlaced<Variant>) {
      const kernel::Dropout dropout(params.dropout,
                                    kernel::heads_before<Variant>(params, work.tile.batch) + place.head);
      const int key = kernel::key_of_whole<Variant>(params, first_key);
      const int query = kernel::row_of_whole<Variant>(params, place.m_block * kTileM);
      FA_UNROLL
      for (int i = 0; i < kTileM / 64; ++i) drops[i] = dropout.draw_transposed<8>(key, query + 64 * i, lane_index());
    } else {
      const kernel::Dropout dropout(params.dropout, static_cast<int64_t>(work.tile.batch) * params.h_q + place.head);
      const int lane = lane_index();
      FA_UNROLL
      for (int i = 0; i < kTileM / 64; ++i) {
        drops[i] = dropout.draw_transposed<8>(first_key, place.m_block * kTileM + 64 * i, lane);
      }
    }
  }
  FA_DEVICE static bool dropped(const Drops& drops, int i) {
    return kernel::Dropout::dropped(drops[i / 32], i % 32 / 4, i % 4);
  }

  /// dS^T = P^T o (dP^T - delta). With dropout keep * dS^T = P^T o (Z^T o dP^T - keep * delta), Z being 0 where P was
  /// dropped: what is missing of dK, dQ and dV is their factor 1 / keep.
  template <int kCount>
  FA_DEVICE void differentiate(float (&dp)[kCount], const float (&s)[kCount], uint32_t delta,
                               [[maybe_unused]] const Drops& drops) const {
    const int lane = lane_index();
    FA_UNROLL
    for (int j = 0; j < kCount / 4; ++j) {
      float row[2];
      ptx::ld_shared_f32x2(row, delta + 8 * (lane % 4) + 32 * j);
      FA_UNROLL
      for (int i = 4 * j; i < 4 * j + 4; ++i) {
        if constexpr (kDropout) {
          dp[i] = s[i] * ptx::fma(row[i % 2], -params.dropout.keep, dropped(drops, i) ? 0.f : dp[i]);
        } else {
          dp[i] = s[i] * (dp[i] - row[i % 2]);
        }
      }
    }
  }

  /// Accumulators become the A operand of the next product.
  template <int kSteps, int kCount>
  FA_DEVICE static void pack(uint32_t (&operand)[kSteps][4], const float (&s)[kCount]) {
    FA_UNROLL
    for (int i = 0; i < kCount / 2; ++i) operand[i / 4][i % 4] = ptx::convert_pair<T>(s[2 * i], s[2 * i + 1]);
  }

  /// Likewise P^T, or Z^T o P^T.
  FA_DEVICE static void pack_weights(Operand& operand, const S& s, [[maybe_unused]] const Drops& drops) {
    if constexpr (kDropout) {
      FA_UNROLL
      for (int i = 0; i < kTileM / 4; ++i) {
        const uint32_t pair = ptx::convert_pair<T>(s[2 * i], s[2 * i + 1]);
        operand[i / 4][i % 4] = pair & ~kernel::Dropout::dropped_pair(drops[i / 16], i % 16 / 2, i % 2);
      }
    } else {
      pack(operand, s);
    }
  }

  /// dS, rows down again, into the warpgroup's 64 columns of the shared tile, from row kFirst on.
  template <int kFirst = 0, int kSteps>
  FA_DEVICE void share(const uint32_t (&ds)[kSteps][4], uint32_t tile, int consumer) const {
    const int lane = lane_index();
    // Matrices of 8 keys and 8 rows: keys 0, keys 8 of rows 0, the same of rows 8.
    const int row = lane / 16 * 8 + lane % 8;
    const int chunk = 2 * warp_index() + lane / 8 % 2;
    const uint32_t own = tile + consumer * DsTile::kSlabBytes + row * 128 + (chunk ^ lane % 8) * kernel::kChunkBytes;
    FA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      ptx::stmatrix_x4_trans(own + (kFirst + step * 16) * 128, ds[step][0], ds[step][1], ds[step][2], ds[step][3]);
    }
  }

  /// Leaves a warp's 16 rows of dQ, in the order in which they lie in registers, for the warp that adds them. `rows`:
  /// how many of the tile count, `count`: steps taken with this one.
  FA_DEVICE void hand_over_dq(const Dq& dq, [[maybe_unused]] int rows, int consumer, int count) const {
    constexpr int kColumnGroups = kHeadDimQk / 8;
    const int column_group = kDqByRows ? 0 : 8 * consumer;
    const int lane = lane_index();
    const int row_group = warp_index() + (kDqByRows ? 4 * consumer : 0);  // of the tile
    const uint32_t own = shared + kLayout.dq + row_group * kDqRowBytes + column_group * 512 + lane * 16;
    ptx::mbarrier_wait(dq_empty(), static_cast<uint32_t>(count) % 2);  // the last step's has left
    if (!kVarlen || 16 * row_group < rows) {
      FA_UNROLL
      for (int j = 0; j < kDqColumns / 8; ++j) {
        if (column_group + j >= kColumnGroups) break;
        ptx::st_shared_chunk(own + j * 512, {{ptx::bits(dq[4 * j]), ptx::bits(dq[4 * j + 1]), ptx::bits(dq[4 * j + 2]),
                                              ptx::bits(dq[4 * j + 3])}});
      }
    }
    ptx::fence_proxy_async();
    ptx::sync_warp();  // these rows are complete, for the copy engine too
    if (lane == 0) ptx::mbarrier_arrive(dq_full());
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_BACKWARD_PRODUCTS_CUH_
