#ifndef FA_TEMPLATES_SM80_SM80_BACKWARD_BLOCK_CUH_
#define FA_TEMPLATES_SM80_SM80_BACKWARD_BLOCK_CUH_

#include <common/backward_params.cuh>
#include <common/backward_schedule.cuh>
#include <common/bounded_items.cuh>
#include <common/constants.cuh>
#include <common/copies.cuh>
#include <common/sequences.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <ptx/language.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <sm80/sm80_backward_traits.cuh>

namespace fa::sm80 {

/// What all warps of a backward know: the parameters, places in shared memory, and copies to there.
template <class Config>
struct BackwardBlock : BackwardTraits<Config> {
  using Base = BackwardTraits<Config>;
  using T = typename Base::T;
  using Variant = typename Base::Variant;
  using Params = typename Base::Params;
  using KTile = typename Base::KTile;
  using VTile = typename Base::VTile;
  using QTile = typename Base::QTile;
  using DoTile = typename Base::DoTile;
  using PTile = typename Base::PTile;
  using KCopy = typename Base::KCopy;
  using VCopy = typename Base::VCopy;
  using QCopy = typename Base::QCopy;
  using DoCopy = typename Base::DoCopy;
  using QkSlice = typename Base::QkSlice;
  using VSlice = typename Base::VSlice;
  using Place = typename Base::Place;
  using Base::kTileM, Base::kTileN, Base::kStages, Base::kThreads, Base::kWarpsN, Base::kQueryGroups, Base::kWarpKeys,
      Base::kWarpQueries, Base::kDelayedDq, Base::kVarlen, Base::kLists, Base::kRowBytes, Base::kStageBytes,
      Base::kPBytes;

  const Params& params;
  const int round;  // of a bounded grid
  const BackwardTile tile;
  const BatchEntry<kVarlen, BackwardParams> lengths;
  const int thread = ptx::thread_index();
  const int lane = thread % kWarpSize;
  const int warp = thread / kWarpSize;
  const int warp_n = warp % kWarpsN;
  const int warp_m = warp / kWarpsN;
  const int first_key = tile.block * kTileN;
  const int warp_key = warp_n * kWarpKeys;                      // first of the warp's keys in the tile
  const int warp_query = warp_m % kQueryGroups * kWarpQueries;  // and of its queries
  const QkSlice qk_slice{warp_m};
  const VSlice v_slice{warp_m};
  const uint32_t shared = ptx::dynamic_shared();
  const uint32_t k_shared = shared;
  const uint32_t v_shared = shared + KTile::kBytes;
  const uint32_t p_shared = shared + KTile::kBytes + VTile::kBytes + kStages * kStageBytes;

  FA_DEVICE explicit BackwardBlock(const Params& p, int i = 0)
      : params(p), round(i), tile(this_tile(p, i)), lengths(backward_entry<kVarlen, kTileM>(p, tile.batch)) {}

  /// What a grid without a bound has a block for: a key tile, or a split of one.
  static FA_DEVICE int item_of([[maybe_unused]] int round) {
    if constexpr (kernel::kBounded<Config>) {
      return item_of_round(round);
    } else {
      return ptx::block_index();
    }
  }
  static FA_DEVICE int items(const Params& p) { return p.n_blocks * p.h_kv * (kVarlen ? 1 : p.b) * p.splits; }

  static FA_DEVICE BackwardTile this_tile(const Params& p, int round) {
    if constexpr (kVarlen) {
      return backward_tile_of_batch<kTileN, false>(p, item_of(round), p.n_blocks, p.h_kv);
    } else {
      return backward_tile<Variant, Config::kCausal, false>(p, item_of(round), p.n_blocks, p.h_kv);
    }
  }

  /// Offset of the batch entry's first row (of q, o, their gradients), and of its first key.
  FA_DEVICE int64_t rows_at(int64_t stride_b, int64_t stride_s) const {
    return offset_of_rows<kVarlen>(lengths, tile.batch, stride_b, stride_s);
  }
  FA_DEVICE int64_t keys_at(int64_t stride_b, int64_t stride_s) const {
    return offset_of_keys<kVarlen>(lengths, tile.batch, stride_b, stride_s);
  }

  FA_DEVICE uint32_t q_shared(int stage) const { return v_shared + VTile::kBytes + stage * kStageBytes; }
  FA_DEVICE uint32_t do_shared(int stage) const { return q_shared(stage) + QTile::kBytes; }
  FA_DEVICE uint32_t lse_shared(int stage) const { return do_shared(stage) + DoTile::kBytes; }
  FA_DEVICE uint32_t delta_shared(int stage) const { return lse_shared(stage) + kRowBytes; }

  FA_DEVICE uint32_t ds_shared(int stage) const {
    return p_shared + kPBytes + (kDelayedDq ? stage * PTile::kBytes : 0);
  }

  FA_DEVICE int query_head(const Place& place) const { return tile.head * params.group + place.head; }

  FA_DEVICE void load_kv() const {
    const T* k = static_cast<const T*>(params.k) + keys_at(params.stride_k_b, params.stride_k_s) +
                 tile.head * params.stride_k_h + first_key * params.stride_k_s;
    const T* v = static_cast<const T*>(params.v) + keys_at(params.stride_v_b, params.stride_v_s) +
                 tile.head * params.stride_v_h + first_key * params.stride_v_s;
    const int valid = lengths.s_kv - first_key;
    KCopy::strided(k_shared, KCopy::thread_pointer(k, params.stride_k_s, thread), params.stride_k_s, valid, thread);
    VCopy::strided(v_shared, VCopy::thread_pointer(v, params.stride_v_s, thread), params.stride_v_s, valid, thread);
  }

  FA_DEVICE void load_queries(const Place& place, int stage) const {
    const int copier = ptx::thread_index();  // anew, so that what follows from it is not kept over the main loop
    const int head = query_head(place);
    const int row = query_tile(place) * kTileM;
    const T* q = static_cast<const T*>(params.q) + rows_at(params.stride_q_b, params.stride_q_s) +
                 head * params.stride_q_h + row * params.stride_q_s;
    const T* dout = static_cast<const T*>(params.dout) + rows_at(params.stride_dout_b, params.stride_dout_s) +
                    head * params.stride_dout_h + row * params.stride_dout_s;
    const int valid = lengths.s_q - row;
    QCopy::strided(q_shared(stage), QCopy::thread_pointer(q, params.stride_q_s, copier), params.stride_q_s, valid,
                   copier);
    DoCopy::strided(do_shared(stage), DoCopy::thread_pointer(dout, params.stride_dout_s, copier), params.stride_dout_s,
                    valid, copier);
    const int64_t index = padded_rows_before<kVarlen>(params, lengths, tile.batch, head) + row;
    FA_UNROLL
    for (int i = 0; i < ceil_div(kTileM / 4, kThreads); ++i) {
      const int first = 4 * (copier + i * kThreads);
      if (kTileM / 4 % kThreads != 0 && first >= kTileM) continue;
      const bool in_range = row + first < lengths.padded_rows;
      ptx::cp_async_16(lse_shared(stage) + 4 * first, params.lse_log2 + index + first, in_range);
      ptx::cp_async_16(delta_shared(stage) + 4 * first, params.delta + index + first, in_range);
    }
  }

  FA_DEVICE const int32_t* tile_list() const {
    return tile_list_of<Variant>(params.variant, tile.batch, tile.head, params.h_kv, tile.block, params.n_blocks);
  }

  /// The query tile of a place: of the tile list, where there is one.
  FA_DEVICE int query_tile(const Place& place) const {
    if constexpr (kLists) return ptx::ld_global_nc(tile_list() + place.m_block);
    return place.m_block;
  }
};

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_BACKWARD_BLOCK_CUH_
