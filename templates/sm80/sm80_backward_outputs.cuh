#ifndef FA_TEMPLATES_SM80_SM80_BACKWARD_OUTPUTS_CUH_
#define FA_TEMPLATES_SM80_SM80_BACKWARD_OUTPUTS_CUH_

#include <common/backward_params.cuh>
#include <common/backward_schedule.cuh>
#include <common/constants.cuh>
#include <common/elements.cuh>
#include <common/online_softmax.cuh>
#include <common/switches.cuh>
#include <common/tile_store.cuh>
#include <common/variant.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <sm80/sm80_backward_block.cuh>

namespace fa::sm80 {

/// Gradients on their way out: additions to dQ, and dK and dV.
template <class Config>
struct BackwardOutputs : BackwardBlock<Config> {
  using Base = BackwardBlock<Config>;
  using T = typename Base::T;
  using Variant = typename Base::Variant;
  using Gemm = typename Base::Gemm;
  using KTile = typename Base::KTile;
  using VTile = typename Base::VTile;
  using PTile = typename Base::PTile;
  using DqSlice = typename Base::DqSlice;
  using DkFragment = typename Base::DkFragment;
  using DvFragment = typename Base::DvFragment;
  using Place = typename Base::Place;
  using Base::Base;
  using Base::kTileM, Base::kTileN, Base::kHeadDimQk, Base::kHeadDimV, Base::kThreads, Base::kDqWarpsM, Base::kMTiles,
      Base::kDqMTiles, Base::kVarlen, Base::kDropout, Base::kWantsDk, Base::kWantsDv, Base::kLists, Base::kHides,
      Base::params, Base::tile, Base::lengths, Base::thread, Base::lane, Base::first_key, Base::warp_key,
      Base::qk_slice, Base::v_slice, Base::k_shared, Base::v_shared, Base::keys_at, Base::ds_shared, Base::query_head,
      Base::tile_list, Base::query_tile;

  /// Whether masks hide keys of this tile from queries of a tile; the mask function where it is not known to keep all.
  FA_DEVICE bool hides_keys(const Place& place) const {
    if constexpr (kLists) return place.m_block >= ptx::ld_global_nc(tile_list() - 1);
    if constexpr (Variant::kMask) return true;
    return hides_any<Config::kCausal, Variant, kTileM, kTileN>(params, lengths, place.m_block * kTileM, first_key);
  }

  /// Adds a query tile's dS K to the accumulator of dQ.
  FA_DEVICE void add_dq(const Place& place, int stage) const {
    const int adder = ptx::thread_index();  // anew: no register is left to keep it in
    const int adder_lane = adder % kWarpSize;
    const int row = adder / kWarpSize % kDqWarpsM * (16 * kDqMTiles);
    const DqSlice slice{adder / kWarpSize / kDqWarpsM};
    Fragment<kDqMTiles, DqSlice::kTiles> dq = {};
    Gemm::template multiply<KTile, kTileN>(
        dq, k_shared + KTile::offset(0, 8 * slice.first_tile()), adder_lane, [&](uint32_t(&a)[4], int m, int k) {
          Gemm::template load_a_transposed<PTile>(a, ds_shared(stage), row + 16 * m, k, adder_lane);
        });
    if constexpr (kHides) {
      if (hides_keys(place) && any_infinite(dq)) {
        add_finite_dq(place, stage);
        return;
      }
    }
    FA_UNROLL
    for (int m = 0; m < kDqMTiles; ++m) {
      const int row_group = (query_tile(place) * kTileM + row) / kRowGroup + m;
      if (row_group * kRowGroup >= lengths.padded_rows) break;
      float* target = params.dq_accum + fragment_offset<kVarlen>(params, lengths, tile.batch, query_head(place),
                                                                 row_group, slice.first_tile(), kHeadDimQk / 8);
      FA_UNROLL
      for (int n = 0; n < DqSlice::kTiles; ++n) {
        if (!slice.owns(n)) continue;
        float* fragment = target + n * (kRowGroup * 8);
        if constexpr (Config::kVectorReduce) {
          ptx::red_add_f32x4(fragment + fragment_index<true>(adder_lane, 0), dq[m][n]);
        } else {
          FA_UNROLL
          for (int e = 0; e < 4; ++e) ptx::red_add_f32(fragment + fragment_index<false>(adder_lane, e), dq[m][n][e]);
        }
      }
    }
  }

  /// Adds dS K without what 0 may not be multiplied with: NaN of a key reaches the rows that keep it through dS. An
  /// element at a time, since the registers belong to others.
  FA_DEVICE void add_finite_dq(const Place& place, int stage) const {
    const int adder = ptx::thread_index();  // anew: no register is left to keep it in
    const DqSlice slice{adder / kWarpSize / kDqWarpsM};
    FA_UNROLL_BY(1)
    for (int i = 0; i < kDqMTiles * DqSlice::kTiles * 4; ++i) {
      const int e = i % 4;
      const int n = i / 4 % DqSlice::kTiles;
      const int row = (adder / kWarpSize % kDqWarpsM * kDqMTiles + i / 4 / DqSlice::kTiles) * 16;
      const int row_group = (query_tile(place) * kTileM + row) / kRowGroup;
      if (!slice.owns(n) || row_group * kRowGroup >= lengths.padded_rows) continue;
      uint32_t ds = ds_shared(stage) + PTile::offset(0, row + 8 * (e / 2) + adder % kWarpSize / 4);
      uint32_t k = k_shared + KTile::offset(0, 8 * (slice.first_tile() + n) + 2 * (adder % 4) + e % 2);
      float sum = 0.f;
      FA_UNROLL_BY(1)
      for (int key = 0; key < kTileN; ++key) {
        const float factor = load_element(k);
        if (factor * 0.f == 0.f) sum = ptx::fma(load_element(ds), factor, sum);
        ds += PTile::kPitch;
        k += KTile::kPitch;
      }
      float* fragment = params.dq_accum + fragment_offset<kVarlen>(params, lengths, tile.batch, query_head(place),
                                                                   row_group, slice.first_tile() + n, kHeadDimQk / 8);
      ptx::red_add_f32(fragment + fragment_index<Config::kVectorReduce>(adder % kWarpSize, e), sum);
    }
  }
  static FA_DEVICE float load_element(uint32_t address) {
    if constexpr (sizeof(T) == 2) return to_float(T{ptx::ld_shared_b16(address)});
    return ptx::from_bits(ptx::ld_shared_b32(address));
  }

  /// scale * dK and dV through shared memory, where K and V were, so that rows leave in 16-byte pieces.
  FA_DEVICE void store(const DkFragment& dk, const DvFragment& dv) const {
    ptx::sync_threads();  // all have left K and V
    if constexpr (kWantsDk) stage_fragment<KTile>(k_shared, dk, qk_slice, params.scale);
    if constexpr (kWantsDv) stage_fragment<VTile>(v_shared, dv, v_slice, dv_scale());
    ptx::sync_threads();  // dK and dV are complete in shared memory
    T* dk_rows = static_cast<T*>(params.dk) + keys_at(params.stride_dk_b, params.stride_dk_s) +
                 tile.head * params.stride_dk_h + first_key * params.stride_dk_s;
    T* dv_rows = static_cast<T*>(params.dv) + keys_at(params.stride_dv_b, params.stride_dv_s) +
                 tile.head * params.stride_dv_h + first_key * params.stride_dv_s;
    const int valid = lengths.s_kv - first_key;
    if constexpr (kWantsDk) {
      store_tile<KTile, T, kTileN, kThreads, Config::kAligned>(k_shared, dk_rows, params.stride_dk_s, valid, thread);
    }
    if constexpr (kWantsDv) {
      store_tile<VTile, T, kTileN, kThreads, Config::kAligned>(v_shared, dv_rows, params.stride_dv_s, valid, thread);
    }
  }

  FA_DEVICE float dv_scale() const {
    if constexpr (kDropout) return params.dropout.inverse_keep;
    return 1.f;
  }

  template <class Tile, int kCTiles, class Slice>
  FA_DEVICE void stage_fragment(uint32_t target, const Fragment<kMTiles, kCTiles>& c, const Slice& slice,
                                float scale) const {
    const uint32_t own =
        target + Tile::offset(warp_key + lane / 4, 2 * (lane % 4)) + Tile::offset(0, 8 * slice.first_tile());
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int n = 0; n < kCTiles; ++n) {
        if (!slice.owns(n)) continue;
        FA_UNROLL
        for (int r = 0; r < 2; ++r) {
          store_pair<T>(own + Tile::offset(16 * m + 8 * r, 8 * n), c[m][n][2 * r] * scale, c[m][n][2 * r + 1] * scale);
        }
      }
    }
  }

  /// fp32 sums over one split's query tiles, for backward_reduce.
  FA_DEVICE void store_partial(const DkFragment& dk, const DvFragment& dv) const {
    const int64_t rows = static_cast<int64_t>(params.b) * params.h_kv * params.s_kv;
    const int64_t row =
        tile.split * rows + (static_cast<int64_t>(tile.batch) * params.h_kv + tile.head) * params.s_kv + first_key;
    float* target = params.partial + row * (kHeadDimQk + kHeadDimV);  // into [splits, b, h_kv, s_kv, d_qk + d_v]
    if constexpr (kWantsDk) store_partial_fragment(target, dk, qk_slice, 1.f);
    if constexpr (kWantsDv) store_partial_fragment(target + kHeadDimQk, dv, v_slice, dv_scale());
  }

  template <int kCTiles, class Slice>
  FA_DEVICE void store_partial_fragment(float* target, const Fragment<kMTiles, kCTiles>& c, const Slice& slice,
                                        float scale) const {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int row = warp_key + 16 * m + 8 * r + lane / 4;
        if (first_key + row >= params.s_kv) continue;
        float* columns = target + row * (kHeadDimQk + kHeadDimV) + 8 * slice.first_tile() + 2 * (lane % 4);
        FA_UNROLL
        for (int n = 0; n < kCTiles; ++n) {
          if (!slice.owns(n)) continue;
          ptx::st_global(columns + 8 * n, c[m][n][2 * r] * scale);
          ptx::st_global(columns + 8 * n + 1, c[m][n][2 * r + 1] * scale);
        }
      }
    }
  }
};

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_BACKWARD_OUTPUTS_CUH_
