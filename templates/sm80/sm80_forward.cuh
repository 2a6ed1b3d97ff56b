#ifndef FA_TEMPLATES_SM80_SM80_FORWARD_CUH_
#define FA_TEMPLATES_SM80_SM80_FORWARD_CUH_

#include <common/bounded_items.cuh>
#include <common/copies.cuh>
#include <common/forward_schedule.cuh>
#include <common/kept_keys.cuh>
#include <common/online_softmax.cuh>
#include <common/own_parts.cuh>
#include <common/paged.cuh>
#include <common/stored.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <common/work_lists.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/thread.cuh>
#include <sm80/sm80_forward_epilogue.cuh>
#include <sm80/sm80_forward_scores.cuh>
#include <sm80/sm80_forward_splits.cuh>
#include <sm80/sm80_half_products.cuh>
#include <sm80/sm80_own_keys.cuh>
#include <sm80/sm80_stored.cuh>
#include <sm80/sm80_u4.cuh>
#include <sm80/sm80_warp_group.cuh>

namespace fa::sm80 {

/// FlashAttention-2 forward on mma.sync (Dao, 2023, algorithm 1). One thread block computes one tile of O: every warp
/// owns whole rows, Q stays in shared memory or registers, K and V tiles stream through `kStages` buffers by cp.async.
///
/// With kWarpsN = 2 a pair of warps shares its rows, twice as many, so that a wide O leaves room for two m tiles a warp
/// and every fragment of K and V is used twice: each warp takes half of the keys of S = Q K^T and half of the columns
/// of O += P V, and gives its row maxima and its P to the other (sm80_warp_pair.cuh). Above head dim 256 whole rows of
/// O fit no two warps: groups of 2 to 8 share rows in the same way (kWarpsN with fewer keys or rows a warp), and P goes
/// through a tile in shared memory (sm80_warp_group.cuh).
///
/// Config is a struct of constants: Element (f16, bf16 or f32), kHeadDimQk, kHeadDimV, kTileM, kTileN, kWarps, kStages,
/// kCausal, kPositiveScale, kAligned, kQInRegisters, kLoopBodies, kConditionalRescale, kPackGqa, kSplit; optionally
/// kWarpsN, kVarlen, kDropout, kPageSize, kSplitKeys, kScheduled, kOwnParts, kBounded, kValueInKey
/// (common/switches.cuh), statistics of rows (common/row_statistics.cuh) and a Variant (common/variant.cuh).
///
/// With kPageSize K and V are in pages (common/paged.cuh): each thread looks up the pages of the rows that it copies.
///
/// With kSplitKeys the softmax of as many keys is formed alone (common/fixed_splits.cuh), by a block that walks over
/// all of them, or with kSplit by some that share the splits of a query tile.
///
/// With kScheduled a thread block works on its part of a schedule (common/schedule_params.cuh): on pieces of one query
/// tile after the other. Of tiles that blocks share they leave partial results, which the last of them to finish
/// merges.
///
/// With kOwnParts blocks do the same without a schedule, each of which finds its part by itself (common/own_parts.cuh),
/// over pages or not. The last part of a tile waits for the others, which start before it, and merges.
///
/// With kBounded blocks go on from one query tile to another (common/bounded_items.cuh).
///
/// With kSplitWarps, for few rows, all warps have the same rows, and each its own keys of every tile. They join what
/// they have made of them at the end (sm80_split_warps.cuh).
///
/// With latent rows (kKeyStorage = 3, sm80_latent.cuh) a tile of K, which is V too, is widened where it has landed.
///
/// With another kKeyStorage, or kValueStorage, the tiles of K or V have 8 bits an element, and each key a scale, which
/// multiplies its column of S or of P. Or they have 4 bits, and groups of columns have a scale and an offset
/// (sm80_u4.cuh). With kHalfProducts products of 8-bit elements are of f16, whatever the queries are of
/// (sm80_half_products.cuh). Warps with kSplitWarps copy their own keys (sm80_own_keys.cuh).
template <class Config>
struct Forward : ForwardScores<Config> {
  using Base = ForwardScores<Config>;
  using T = typename Base::T;
  using Variant = typename Base::Variant;
  using Gemm = typename Base::Gemm;
  using KElement = typename Base::KElement;
  using VElement = typename Base::VElement;
  using KTile = typename Base::KTile;
  using VTile = typename Base::VTile;
  using Split = typename Base::Split;
  using QWarpTile = typename Base::QWarpTile;
  using Softmax = typename Base::Softmax;
  using KeyProduct = typename Base::KeyProduct;
  using ValueProduct = typename Base::ValueProduct;
  using Base::Base;
  using Base::kTileM, Base::kTileN, Base::kHeadDimQk, Base::kHeadDimV, Base::kStages, Base::kEarlyV, Base::kSplitWarps,
      Base::kWarpKeys, Base::kBytes, Base::kMTiles, Base::kHalves, Base::kGroups, Base::kPairs, Base::kNTiles,
      Base::kOTiles, Base::kOutTiles, Base::kVarlen, Base::kDropout, Base::kPaged, Base::kOwnParts, Base::kPieces,
      Base::kStoredKeys, Base::kStoredValues, Base::kHalfKeys, Base::kHalfValues, Base::kHalfQueries, Base::kOwnKeys,
      Base::kLatentRows, Base::kU4Keys, Base::kU4Values, Base::kKeysInPlace, Base::kValuesInPlace, Base::kSumTiles,
      Base::kSplitKeys, Base::kFixedSplits, Base::kShares, Base::kTwoSided, Base::kLists, Base::kKeepsFirst,
      Base::kQBytes, Base::params, Base::index, Base::piece, Base::tile, Base::lengths, Base::rows, Base::lane,
      Base::warp, Base::half, Base::block_row, Base::row_count, Base::shared, Base::q_shared, Base::table_row,
      Base::first_read, Base::k_shared, Base::v_shared, Base::load_q, Base::load_k, Base::load_v, Base::pair,
      Base::group, Base::first_o_column, Base::tile_range, Base::kv_tile, Base::mask, Base::read_fixed,
      Base::apply_score, Base::apply_mask, Base::drop, Base::scale_scores, Base::softmax_scale_log2;

  /// Of O += P V.
  using Products = typename Either<U4Values<T, VElement, kValuesInPlace>,
                                   typename Either<StoredValues<ValueProduct, VElement>, Gemm, kStoredValues>::type,
                                   kU4Values>::type;

  /// What goes along from KV tile to KV tile.
  struct Walk {
    int stage = 0;
    typename Either<KeyPointers<KElement, VElement>, typename Base::Nothing, kOwnKeys>::type keys;
    typename Either<RowLift<kMTiles, kHalves>, typename Base::ValueLift, kHalfValues>::type lift;
    typename Base::QuerySums sums;
  };

  /// A second view of the same tile: deriving it again is cheaper than keeping it in registers over the main loop.
  FA_DEVICE Forward again() const {
    if constexpr (kOwnParts) {
      return Forward(params, piece, tile);
    } else {
      return Forward(params, index);
    }
  }

  FA_DEVICE void run() {
    if constexpr (kVarlen && !kPieces) {
      if (tile.m_block < 0 || block_row >= row_count) return;  // a slot without a tile
    }
    const int last_row = (block_row + kTileM < row_count ? block_row + kTileM : row_count) - 1;
    KvRange range = tile_range(rows.position(block_row), rows.position(last_row));
    if constexpr (kShares) {
      ForwardSplits<Forward>{*this}.run(range);
    } else {
      run_range(range);
    }
  }

  FA_DEVICE void run_range(KvRange range) {
    if constexpr (kPieces) range = cut(range, piece);
    if constexpr (kOwnKeys) {  // kept, and known to be the same in a warp
      range.begin = ptx::shfl(range.begin, 0);
      range.end = ptx::shfl(range.end, 0);
      range.plain_end = ptx::shfl(range.plain_end, 0);
      range.plain_begin = ptx::shfl(range.plain_begin, 0);
    }
    if constexpr (kKeepsFirst) range.kept_end = kept_tiles<Variant, kTileN>(params, lengths, tile.batch);
    Fragment<kMTiles, kSumTiles> sums = {};
    Softmax softmax;
    if (range.begin < range.end) {
      read_what_stays();
      attend(range, sums, softmax);
    }
    softmax.finish();
    if constexpr (Base::kHalfTile) {
      Fragment<kMTiles, kOutTiles> whole;
      Split{shared + kQBytes, warp, lane}.template join_transposed<Products>(sums, softmax, softmax_scale_log2(),
                                                                             whole);
      ForwardEpilogue<Forward>{*this}.run(whole, softmax);
    } else {
      finish(range, sums, softmax);
    }
  }

  /// Gives the columns of O their places, and hands it to whoever stores it.
  FA_DEVICE void finish(const KvRange& range, Fragment<kMTiles, kSumTiles>& sums, Softmax& softmax) {
    Fragment<kMTiles, kOTiles>& o = reinterpret_cast<Fragment<kMTiles, kOTiles>&>(sums);
    if constexpr (kU4Values) {
      U4Values<T, VElement, kValuesInPlace>::restore(o, lane);
    } else if constexpr (kStoredValues) {
      StoredValues<ValueProduct, VElement>::restore(o, lane);
    }
    if constexpr (kSplitWarps) {
      Fragment<kMTiles, kOutTiles> whole;
      Split{shared + kQBytes, warp, lane}.join(o, softmax, softmax_scale_log2(), whole);
      ForwardEpilogue<Forward>{*this}.run(whole, softmax);
    } else if constexpr (kFixedSplits) {
      const Forward stored(params, index);  // likewise
      ForwardSplits<const Forward>{stored}.store_folded(range, o, softmax);
    } else {
      if constexpr (kPairs) pair().add_sums(softmax.sum);
      if constexpr (kGroups) group().add_sums(softmax.sum);
      if constexpr (Base::kStatistics) {
        ForwardStatistics<Forward>{*this}.exchange(softmax);
      }
      const Forward epilogue = again();
      ForwardEpilogue<Forward>{epilogue}.run(o, softmax);
    }
  }

  /// What all KV tiles ask for.
  FA_DEVICE void read_what_stays() {
    read_fixed();
    if constexpr (kBytes) this->row_scales.read(*this);
    if constexpr (kPaged) {
      table_row = table_row_of(params.paged, tile.batch);
      first_read = keys_begin<Variant>(params, lengths, rows.position(block_row));
    }
  }

  FA_DEVICE void attend(const KvRange& range, Fragment<kMTiles, kSumTiles>& o, Softmax& softmax) {
    typename Gemm::template QFragment<Config::kQInRegisters ? kMTiles : 1, Config::kQInRegisters ? kHeadDimQk : 16> q;
    Walk walk;
    load_q();
    if constexpr (kOwnKeys || kHalfQueries) {
      ptx::cp_async_commit();
      prefetch(range, walk);
      ptx::cp_async_wait<(kStages == 1 ? 2 : kStages - 1)>();
      meet_at_queries();  // Q has landed
      if constexpr (kHalfQueries) convert_queries();
      if constexpr (Config::kQInRegisters) {
        FA_UNROLL
        for (int m = 0; m < kMTiles; ++m) {
          FA_UNROLL
          for (int k = 0; k < kHeadDimQk / 16; ++k) load_q_fragment(q[m][k], m, k);
        }
      }
    } else if constexpr (Config::kQInRegisters) {
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      ptx::sync_warp();                                // the other lanes' copies of this warp's Q rows have landed
      if constexpr (kSplitWarps) ptx::sync_threads();  // and the other warps'
      if constexpr (kStoredKeys) {
        FA_UNROLL
        for (int m = 0; m < kMTiles; ++m) {
          FA_UNROLL
          for (int k = 0; k < kHeadDimQk / 16; ++k) load_q_fragment(q[m][k], m, k);
        }
      } else {
        Gemm::template load_q<QWarpTile, kMTiles, kHeadDimQk>(q, q_shared, 0, lane);
      }
    }
    if constexpr (!kOwnKeys && !kHalfQueries) prefetch(range, walk);
    if constexpr (kKeysInPlace) {
      walk.sums.find(lane, [&](uint32_t(&a)[4], int m, int k) { query_fragment(a, q, m, k); });
    }

    int n_block = range.end - 1;
    if constexpr (Config::kLoopBodies == 2) {
      for (; n_block >= range.plain_end && n_block >= range.begin; --n_block) {
        step<true>(range, n_block, walk, q, o, softmax);
      }
      if constexpr (kTwoSided) {
        for (; n_block >= range.plain_begin && n_block >= range.begin; --n_block) {
          step<false>(range, n_block, walk, q, o, softmax);
        }
        for (; n_block >= range.begin; --n_block) step<true>(range, n_block, walk, q, o, softmax);
      } else {
        for (; n_block >= range.begin; --n_block) step<false>(range, n_block, walk, q, o, softmax);
      }
    } else {
      for (; n_block >= range.begin; --n_block) {
        step<true>(range, n_block, walk, q, o, softmax);
        if constexpr (kFixedSplits && !kShares) {
          if (n_block > range.begin && split_at(n_block) != split_at(n_block - 1)) {
            ForwardSplits<const Forward>{*this}.fold_away(split_at(n_block) == split_at(range.end - 1), o, softmax);
          }
        }
      }
    }
    if constexpr (kHalfValues) walk.lift.undo(o);
    if constexpr (kValuesInPlace) walk.lift.template undo<kHalves>(o, lane);
  }

  /// Those who have copied the rows of Q that this warp has.
  FA_DEVICE void meet_at_queries() const {
    if constexpr (kSplitWarps) {
      ptx::sync_threads();
    } else {
      ptx::sync_warp();
    }
  }

  FA_DEVICE void convert_queries() const {
    constexpr int kSharing = kSplitWarps ? Base::kWarpCount : 1;
    FA_UNROLL_BY(1)
    for (int row = kSplitWarps ? warp : 0; row < (Base::kHalfTile ? kTileM : Base::kWarpRows); row += kSharing) {
      Base::QueryRows::convert(q_shared, row, lane);
    }
    meet_at_queries();  // Q is of f16
  }

  /// The A operand of m tile `m` and depth step `k` of Q, from shared memory.
  FA_DEVICE void load_q_fragment(uint32_t (&a)[4], int m, int k) const {
    if constexpr (kU4Keys && !kKeysInPlace) {
      U4Keys<T, KElement>::template load_a<QWarpTile>(a, q_shared, 16 * m, k, lane);
    } else if constexpr (kHalfQueries) {
      WarpGemm<KeyProduct>::template load_a<QWarpTile, kHeadDimQk>(a, q_shared, 16 * m, k, lane);
    } else if constexpr (kStoredKeys) {
      StoredKeys<KeyProduct, KElement>::template load_a<QWarpTile>(a, q_shared, 16 * m, k, lane);
    } else {
      Gemm::template load_a<QWarpTile, kHeadDimQk>(a, q_shared, 16 * m, k, lane);
    }
  }
  /// The same from where Q stays.
  template <class Q>
  FA_DEVICE void query_fragment(uint32_t (&a)[4], const Q& q, int m, int k) const {
    if constexpr (Config::kQInRegisters) {
      FA_UNROLL
      for (int i = 0; i < 4; ++i) a[i] = q[m][k][i];
    } else {
      load_q_fragment(a, m, k);
    }
  }
  /// With a fixed split size, the split that the KV tile at a place of the range is in.
  FA_DEVICE int split_at(int place) const { return kv_tile(place) / (kSplitKeys / kTileN); }

  /// Starts the first tiles' copies (Q rides with the first): K and V a group each with one buffer, else a tile a
  /// group.
  FA_DEVICE void prefetch(const KvRange& range, Walk& walk) const {
    if constexpr (kOwnKeys) {
      const OwnKeys<Forward> own{*this};
      walk.keys = own.pointers(range.end - 1);
      int pages[kStages];  // looked up before the first copy: none waits for another
      FA_UNROLL
      for (int i = 0; i < kStages; ++i) pages[i] = range.end - 1 - i >= range.begin ? own.page(range.end - 1 - i) : 0;
      FA_UNROLL
      for (int i = 0; i < kStages - 1; ++i) {
        walk.keys.page = pages[i];
        if (range.end - 1 - i >= range.begin) own.load(range.end - 1 - i, i, walk.keys);
        ptx::cp_async_commit();
      }
      walk.keys.page = pages[kStages - 1];
    } else if constexpr (kStages == 1) {
      load_k(range.end - 1, 0);
      ptx::cp_async_commit();
      if constexpr (kEarlyV) load_v(range.end - 1, 0);
      ptx::cp_async_commit();
    } else {
      FA_UNROLL
      for (int i = 0; i < kStages - 1; ++i) {
        if (range.end - 1 - i >= range.begin) {
          load_k(range.end - 1 - i, i);
          load_v(range.end - 1 - i, i);
        }
        ptx::cp_async_commit();
      }
    }
  }

  /// One KV tile: S = Q K^T, mask, online softmax, O += P V, with the next copies under way.
  template <bool kMaybeMasked, class Q>
  FA_DEVICE void step(const KvRange& range, int n_block, Walk& walk, const Q& q, Fragment<kMTiles, kSumTiles>& o,
                      Softmax& softmax) const {
    int& stage = walk.stage;
    ptx::cp_async_wait<(kStages == 1 ? 1 : kStages - 2)>();
    if constexpr (kOwnKeys) {
      ptx::sync_warp();  // this warp's keys have landed, and it has left the buffer that is filled next
      const OwnKeys<Forward> own{*this};
      const int next = n_block - (kStages - 1);
      if (next >= range.begin) {
        own.load(next, stage == 0 ? kStages - 1 : stage - 1, walk.keys);
        if (next > range.begin) walk.keys.page = own.page(next - 1);
      }
    } else {
      ptx::sync_threads();  // this tile's K has landed for all, and all have left the buffers that are filled next
      if constexpr (kStages == 1) {
        if (!kEarlyV || n_block != range.end - 1) load_v(n_block, 0);
      } else {
        const int next = n_block - (kStages - 1);
        const int next_stage = stage == 0 ? kStages - 1 : stage - 1;
        if (next >= range.begin) {
          load_k(next, next_stage);
          load_v(next, next_stage);
        }
      }
    }
    ptx::cp_async_commit();

    Fragment<kMTiles, kNTiles> s = {};  // [rows of the warp, keys of the warp]
    if constexpr (kLatentRows) {
      Base::Latent::widen(k_shared(stage), ptx::thread_index());
      ptx::sync_threads();  // K, and V, are of the queries' type
    }
    const uint32_t keys = k_shared(stage) + KTile::offset(half * kWarpKeys, 0);
    const auto load_a = [&](uint32_t(&a)[4], int m, int k) { query_fragment(a, q, m, k); };
    if constexpr (kU4Keys) {
      const StoredScales<Forward> scales{*this};
      const uint32_t own = scales.own_k(stage);
      if constexpr (kKeysInPlace) walk.sums.template multiply<scales.kPitch>(s, own, lane);
      U4Keys<T, KElement, kKeysInPlace>::template scores<KTile, kHeadDimQk, scales.kPitch, kHalves>(s, keys, own, lane,
                                                                                                    load_a);
      if constexpr (kKeysInPlace) Base::QueryRows::undo(s, q_shared, lane);
    } else if constexpr (kStoredKeys) {
      StoredKeys<KeyProduct, KElement>::template scores<KTile, kHeadDimQk>(s, keys, lane, load_a);
      if constexpr (kHalfQueries) Base::QueryRows::undo(s, q_shared, lane);
      StoredScales<Forward>{*this}.multiply_k(s, stage);
    } else if constexpr (kNTiles == 1) {
      scores_of_8_keys<T, KTile, kHeadDimQk>(s, keys, lane, load_a);
    } else {
      Gemm::template scores<KTile, kHeadDimQk>(s, keys, lane, load_a);
      if constexpr (kBytes) this->scale_bytes(s, stage);
    }

    if constexpr (kPairs) {
      finish_scores<kMaybeMasked>(range, n_block, s, softmax);
      pair().publish_maxima(s, softmax.max);
      if constexpr (kStages > 1) pair().meet();  // the maxima are in shared memory
    } else if constexpr (kGroups) {
      finish_scores<kMaybeMasked>(range, n_block, s, softmax);
      group().publish_maxima(s, softmax.max);
      if constexpr (kStages > 1) group().meet();  // all maxima are in shared memory
    }
    if constexpr (kStages == 1) {
      ptx::cp_async_wait<0>();
      ptx::sync_threads();  // V has landed for all, all have read K, and maxima of pairs are in shared memory
      if (n_block > range.begin) load_k(n_block - 1, 0);
      ptx::cp_async_commit();
      ptx::cp_async_commit();  // an empty group, so that every step's first wait leaves one group, as after prefetch
    }

    if constexpr (kPairs) {
      float maxima[kMTiles][2];
      pair().maxima(maxima);
      softmax.template update_to<Config::kConditionalRescale, kNTiles, kOTiles>(s, o, maxima, softmax_scale_log2());
      if constexpr (kDropout) drop(s, kv_tile(n_block) * kTileN + half * kWarpKeys);
      pair().template accumulate<Gemm, VTile, kOTiles>(o, s, v_shared(stage));
    } else if constexpr (kGroups) {
      float maxima[kMTiles][2];
      group().maxima(maxima);
      softmax.template update_to<Config::kConditionalRescale, kNTiles, kOTiles>(s, o, maxima, softmax_scale_log2());
      if constexpr (kDropout) drop(s, kv_tile(n_block) * kTileN + half * kWarpKeys);
      group().send(s);
      group().meet();  // P of all keys is in shared memory
      group().template accumulate<VTile, kOTiles>(o, v_shared(stage) + VTile::offset(0, first_o_column()));
    } else {
      finish_scores<kMaybeMasked>(range, n_block, s, softmax);
      [[maybe_unused]] float before[kMTiles][2];
      if constexpr (kHalfValues) {
        FA_UNROLL
        for (int i = 0; i < kMTiles * kHalves; ++i) {
          before[i / kHalves][i % kHalves] = softmax.max[i / kHalves][i % kHalves];
        }
      }
      softmax.template update<Config::kConditionalRescale, kNTiles, kSumTiles>(s, o, softmax_scale_log2());
      if constexpr (kDropout) drop(s, kv_tile(n_block) * kTileN + half * kWarpKeys);
      const uint32_t values = v_shared(stage) + VTile::offset(half * kWarpKeys, 0);
      if constexpr (kBytes) {
        this->template add_bytes<kOTiles>(o, s, values, stage);
      } else if constexpr (kU4Values) {
        const StoredScales<Forward> scales{*this};
        const uint32_t own = scales.own_v(stage);
        float factor = 1.f;
        if constexpr (kValuesInPlace) factor = walk.lift.template apply<kWarpKeys, scales.kPitch>(o, own, lane);
        U4Values<T, VElement, kValuesInPlace>::template accumulate<VTile, kHeadDimV, scales.kPitch, kHalves>(
            o, s, values, own, lane, factor);
      } else if constexpr (kStoredValues) {
        StoredScales<Forward>{*this}.multiply_v(s, stage);
        if constexpr (kHalfValues) walk.lift.apply(s, o, before, softmax, softmax_scale_log2());
        StoredValues<ValueProduct, VElement>::template accumulate<VTile, kHeadDimV, kHalves>(o, s, values, lane);
      } else if constexpr (Base::kHalfTile) {
        Gemm::template accumulate_half<VTile, kHeadDimV>(o, s, values, lane);
      } else {
        Gemm::template accumulate<VTile, kHeadDimV, kMTiles, kNTiles>(o, s, values, lane);
      }
    }
    if constexpr (kStages > 1) stage = stage + 1 == kStages ? 0 : stage + 1;
  }

  /// Whatever is done to S = Q K^T before its row maxima count.
  template <bool kMaybeMasked>
  FA_DEVICE void finish_scores(const KvRange& range, int n_block, Fragment<kMTiles, kNTiles>& s,
                               [[maybe_unused]] Softmax& softmax) const {
    if constexpr (kTracksScaled<Config>) {
      // What a function makes of a hidden score is hidden again.
      hide<kMaybeMasked>(range, n_block, s);
      softmax.track(s, params.scale);
    }
    if constexpr (Variant::kScore) {
      apply_score(s, kv_tile(n_block));
    } else if constexpr (!Config::kPositiveScale && !kBytes) {
      scale_scores(s);
    }
    hide<kMaybeMasked>(range, n_block, s);
  }

  /// Makes the scores of hidden keys -inf.
  template <bool kMaybeMasked>
  FA_DEVICE void hide(const KvRange& range, int n_block, Fragment<kMTiles, kNTiles>& s) const {
    if constexpr (Variant::kMask && !kLists) {
      if (!kKeepsFirst || n_block >= range.kept_end) apply_mask(s, n_block);
    }
    if (kMaybeMasked &&
        (Config::kLoopBodies == 2 || n_block >= range.plain_end || (kTwoSided && n_block < range.plain_begin))) {
      if constexpr (kLists) {
        if (n_block >= range.kept_end) apply_mask(s, kv_tile(n_block));
      }
      if constexpr (kPairs && !kVarlen && !kPaged) {
        const Forward derived(params, index);  // again, for want of registers; varlen's tile costs more
        derived.mask(s, kv_tile(n_block));
      } else {
        mask(s, kv_tile(n_block));
      }
    }
  }
};

template <class Config>
FA_DEVICE void forward(const ForwardLaunch<Config>& params) {
  if constexpr (kernel::kOverlaps<Config>) {
    ptx::griddepcontrol_wait();  // for what earlier kernels write, and for those that still read what this one writes
    if (Config::kSplit && kernel::merges_few_rows(params)) ptx::griddepcontrol_launch_dependents();
  }
  if constexpr (kernel::kOwnParts<Config>) {
    using Own = kernel::OwnParts<Config, ForwardLaunch<Config>>;
    const Own own(params);
    // From the last piece, which another part may wait for, to the first, which may have to wait: else parts would
    // wait for each other in a chain.
    const int pieces = own.pieces();
    for (int i = pieces - 1; i >= 0; --i) {
      if (i < pieces - 1) ptx::sync_threads();  // all have left the tiles of the piece before
      kernel::ForwardTile tile;
      const kernel::Piece piece = own.piece(i, tile);
      Forward<Config>(params, piece, tile).run();
    }
  } else if constexpr (kernel::kScheduled<Config>) {
    const int pieces = kernel::pieces_of(kernel::WorkLists(params.paged), Forward<Config>::part_of(params));
    for (int i = 0; i < pieces; ++i) {
      if (i > 0) ptx::sync_threads();  // all have left the tiles of the piece before
      Forward<Config>(params, i).run();
    }
  } else if constexpr (kernel::kBounded<Config>) {
    kernel::take_items(Forward<Config>::items(params), [&](int round) { Forward<Config>(params, round).run(); });
  } else {
    Forward<Config>(params).run();
  }
}

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_FORWARD_CUH_
