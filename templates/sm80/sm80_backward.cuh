#ifndef FA_TEMPLATES_SM80_SM80_BACKWARD_CUH_
#define FA_TEMPLATES_SM80_SM80_BACKWARD_CUH_

#include <common/backward_schedule.cuh>
#include <common/bounded_items.cuh>
#include <common/constants.cuh>
#include <common/copies.cuh>
#include <common/dropout.cuh>
#include <common/dropout_place.cuh>
#include <common/online_softmax.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <sm80/sm80_backward_outputs.cuh>

namespace fa::sm80 {

/// FlashAttention-2 backward on mma.sync (Dao, 2023, algorithm 2). A thread block owns a tile of keys and walks the
/// query tiles that see it, of all query heads of the group. With S^T = K Q^T:
///   P^T = exp2(scale_log2 * S^T - lse_log2),  dS^T = P^T o (V dO^T - delta),
///   dV += P^T dO,  dK += dS^T Q in registers,  dQ += dS K by additions to an accumulator in global memory.
///
/// The warps form a grid of kWarpsN groups of keys by kWarpsM. For S and dP the second axis parts the queries, for dK
/// and dV the columns: a warp's own P^T and dS^T are A operands as they lie in its registers, those of the other
/// queries come through shared memory. For dQ the grid is kDqWarpsM groups of queries by groups of columns.
///
/// Config is a struct of constants: Element (f16, bf16 or f32), kHeadDimQk, kHeadDimV, kTileM, kTileN, kWarps,
/// kWarpsN, kDqWarpsM, kSubsteps, kStages, kOperandsInRegisters, kCausal, kAligned, kWriteDq, kDelayedDq, kSplit,
/// kVectorReduce; optionally kVarlen, kDropout, kWithoutDk, kWithoutDv, kBounded (common/switches.cuh) and a Variant
/// (common/variant.cuh). With kBounded blocks go on from one key tile to another (common/bounded_items.cuh).
template <class Config>
struct Backward : BackwardOutputs<Config> {
  using Base = BackwardOutputs<Config>;
  using Variant = typename Base::Variant;
  using Gemm = typename Base::Gemm;
  using Scores = typename Base::Scores;
  using KTile = typename Base::KTile;
  using VTile = typename Base::VTile;
  using QTile = typename Base::QTile;
  using DoTile = typename Base::DoTile;
  using PTile = typename Base::PTile;
  using DkFragment = typename Base::DkFragment;
  using DvFragment = typename Base::DvFragment;
  using Operand = typename Base::Operand;
  using Place = typename Base::Place;
  using Base::Base;
  using Base::kTileM, Base::kTileN, Base::kHeadDimQk, Base::kHeadDimV, Base::kStages, Base::kThreads, Base::kWarpsN,
      Base::kWarpsM, Base::kQueryGroups, Base::kWarpKeys, Base::kWarpQueries, Base::kMTiles, Base::kSubsteps,
      Base::kNTiles, Base::kExchange, Base::kDelayedDq, Base::kKInRegisters, Base::kVInRegisters, Base::kVarlen,
      Base::kDropout, Base::kWantsDk, Base::kWantsDv, Base::kTwoSided, Base::kLists, Base::kTogether, Base::kHides,
      Base::params, Base::round, Base::tile, Base::lengths, Base::lane, Base::warp, Base::warp_m, Base::first_key,
      Base::warp_key, Base::warp_query, Base::qk_slice, Base::v_slice, Base::k_shared, Base::v_shared, Base::p_shared,
      Base::q_shared, Base::do_shared, Base::lse_shared, Base::delta_shared, Base::ds_shared, Base::query_head,
      Base::load_kv, Base::load_queries, Base::tile_list, Base::query_tile, Base::hides_keys, Base::add_dq, Base::store;

  FA_DEVICE void run() {
    if constexpr (kVarlen) {
      if (first_key < 0 || first_key >= lengths.s_kv) return;  // a slot without a tile
    }
    const QuerySteps steps = query_steps_of_tile();
    DkFragment dk = {};
    DvFragment dv = {};
    if (steps.begin < steps.end) walk(steps, dk, dv);
    // A second view of the same tile: deriving it again is cheaper than keeping it in registers over the main loop.
    const Backward epilogue(params, round);
    if constexpr (!kWantsDk && !kWantsDv) return;
    if constexpr (Config::kSplit) {
      epilogue.store_partial(dk, dv);
    } else {
      epilogue.store(dk, dv);
    }
  }

  FA_DEVICE QuerySteps query_steps_of_tile() const {
    if constexpr (kLists) {
      return list_steps(tile_list(), params.group, params.splits, tile.split);
    } else if constexpr (kTwoSided) {
      const int last_key = minimum(first_key + kTileN, lengths.s_kv) - 1;
      return variant_steps<Config::kCausal, Variant, kTileM>(params, lengths, first_key, last_key, tile.split);
    } else {
      return query_steps<Config::kCausal, kTileM>(lengths, first_key, tile.split);
    }
  }

  FA_DEVICE void walk(const QuerySteps& steps, DkFragment& dk, DvFragment& dv) const {
    load_kv();
    const int tiles = stop(steps) - steps.first;  // of each query head
    Place place{steps.begin / tiles, steps.first + steps.begin % tiles};
    load_queries(place, 0);
    ptx::cp_async_commit();
    typename Gemm::template QFragment<kMTiles, kKInRegisters ? kHeadDimQk : 16> k_fragment;
    typename Gemm::template QFragment<kMTiles, kVInRegisters ? kHeadDimV : 16> v_fragment;
    if constexpr (kVInRegisters) {
      ptx::cp_async_wait<0>();
      ptx::sync_threads();  // K and V have landed for all
      if constexpr (kKInRegisters) {
        Gemm::template load_q<KTile, kMTiles, kHeadDimQk>(k_fragment, k_shared, warp_key, lane);
      }
      Gemm::template load_q<VTile, kMTiles, kHeadDimV>(v_fragment, v_shared, warp_key, lane);
    }
    int stage = 0;
    bool has_previous = false;
    for (int left = steps.end - steps.begin; left > 0; --left) {
      Place next = place;
      if (++next.m_block == stop(steps)) {
        next.m_block = steps.first;
        ++next.head;
      }
      begin_step(place, next, left > 1, stage);
      if constexpr (kDelayedDq) {
        if (has_previous && warp < Config::kWarps / 2) add_dq(before(place, steps), stage ^ 1);
      }
      one_step(place, next, left > 1, stage, k_fragment, v_fragment, dk, dv, [&] {
        if constexpr (kDelayedDq) {
          if (has_previous && warp >= Config::kWarps / 2) add_dq(before(place, steps), stage ^ 1);
        }
      });
      place = next;
      has_previous = true;
      if constexpr (kStages == 2) stage ^= 1;
    }
    if constexpr (kDelayedDq) {
      if constexpr (!kExchange) ptx::sync_threads();  // all of the last dS is in shared memory
      add_dq(before(place, steps), stage ^ 1);
    }
  }

  FA_DEVICE int stop(const QuerySteps& steps) const {
    if constexpr (kTwoSided || kLists) return steps.stop;
    return lengths.m_blocks;
  }

  FA_DEVICE Place before(const Place& place, const QuerySteps& steps) const {
    if (place.m_block == steps.first) return {place.head - 1, stop(steps) - 1};
    return {place.head, place.m_block - 1};
  }

  /// Waits for a query tile, and starts the copies of the next.
  FA_DEVICE void begin_step(const Place& place, const Place& next, bool has_next, int stage) const {
    ptx::cp_async_wait<0>();
    ptx::sync_threads();  // this tile has landed for all, and all have left the buffers that are filled next
    if constexpr (kStages == 2) {
      if (has_next) load_queries(next, stage ^ 1);
      ptx::cp_async_commit();
    }
    if constexpr (kHides) {
      if (has_empty_rows(place, stage)) clear_empty_rows(place, stage);
    }
  }

  // Rows that keep no key. Their P and dS are 0, but what is multiplied by 0 must be finite: they become zeros.

  /// Whether masks in closed form leave a row of the batch entry without keys.
  FA_DEVICE bool is_empty(int row) const {
    if (row < keeping_begin<Config::kCausal, Variant>(params, lengths)) return true;
    if constexpr (kTwoSided) return row >= keeping_end<Variant>(params, lengths);
    return false;
  }
  /// Whether a mask function has left a row of the tile without keys: its log-sum-exp tells.
  FA_DEVICE bool has_no_weight(int row, int stage) const {
    if constexpr (!Variant::kMask) return false;
    return ptx::from_bits(ptx::ld_shared_b32(lse_shared(stage) + 4 * row)) == kInfinity;
  }

  FA_DEVICE bool has_empty_rows(const Place& place, int stage) const {
    const int first = query_tile(place) * kTileM;
    const int end = minimum(first + kTileM, lengths.s_q);
    if (is_empty(first) || (kTwoSided && is_empty(end - 1))) return true;
    if constexpr (!Variant::kMask) return false;
    bool any = false;
    for (int row = lane; row < end - first; row += kWarpSize) any = any || has_no_weight(row, stage);
    return ptx::vote_any(any);
  }

  /// Row by row, by loops that keep next to nothing.
  FA_DEVICE void clear_empty_rows(const Place& place, int stage) const {
    const int first = query_tile(place) * kTileM;
    FA_UNROLL_BY(1)
    for (int row = 0; row < kTileM; ++row) {
      const bool empty = is_empty(first + row);
      if (!empty && !has_no_weight(row, stage)) continue;
      const int clearer = ptx::thread_index();  // anew, as above
      clear_row<QTile>(q_shared(stage), row, clearer);
      clear_row<DoTile>(do_shared(stage), row, clearer);
      if (empty && clearer == 0) {  // a sink has given it a log-sum-exp
        ptx::st_shared_b32(lse_shared(stage) + 4 * row, ptx::bits(kInfinity));
        ptx::st_shared_b32(delta_shared(stage) + 4 * row, 0);
      }
    }
    ptx::sync_threads();  // the tile is clean for all
  }
  template <class Tile>
  static FA_DEVICE void clear_row(uint32_t tile, int row, int clearer) {
    FA_UNROLL_BY(1)
    for (int i = clearer; i < Tile::kChunks; i += kThreads) {
      ptx::st_shared_chunk(tile + Tile::offset(row, 0) + i * kChunkBytes, {});
    }
  }

  /// One query tile that has landed. `after_scores` is done once P and dS are out of the way.
  template <class KFragment, class VFragment, class AfterScores>
  FA_DEVICE void one_step(const Place& place, const Place& next, bool has_next, int stage, const KFragment& k_fragment,
                          const VFragment& v_fragment, DkFragment& dk, DvFragment& dv, AfterScores after_scores) const {
    FA_UNROLL_BY(1)
    for (int substep = 0; substep < kSubsteps; ++substep) {
      const int query = warp_query + substep * (8 * kNTiles);
      Operand p;
      Operand ds;
      differentiate(place, query, stage, k_fragment, v_fragment, p, ds);
      const uint32_t own = PTile::offset(warp_key, query);
      const bool stores = kQueryGroups == kWarpsM || warp_m < kQueryGroups;
      if constexpr (kExchange && kWantsDv) {
        if (stores) Gemm::template store<PTile>(p, p_shared + own, lane);
      }
      if constexpr (kExchange || Config::kWriteDq) {
        if (stores) Gemm::template store<PTile>(ds, ds_shared(stage) + own, lane);
      }
      if (substep + 1 == kSubsteps) after_scores();
      if constexpr (kExchange) ptx::sync_threads();  // all of P and dS is in shared memory

      if constexpr (kWantsDv) {
        product<DoTile>(dv, p, query, p_shared, do_shared(stage) + DoTile::offset(0, 8 * v_slice.first_tile()));
      }
      if constexpr (kWantsDk) {
        product<QTile>(dk, ds, query, ds_shared(stage), q_shared(stage) + QTile::offset(0, 8 * qk_slice.first_tile()));
      }
    }

    if constexpr (kStages == 1 || (Config::kWriteDq && !kDelayedDq && !kExchange)) {
      ptx::sync_threads();  // all of dS is in shared memory, and all have left Q and dO
    }
    if constexpr (kStages == 1) {
      if (has_next) load_queries(next, 0);
      ptx::cp_async_commit();
    }
    if constexpr (Config::kWriteDq && !kDelayedDq) add_dq(place, stage);
  }

  /// P^T and dS^T of the warp's keys and of the tile's queries from `query` on.
  template <class KFragment, class VFragment>
  FA_DEVICE void differentiate(const Place& place, int query, int stage, const KFragment& k_fragment,
                               const VFragment& v_fragment, Operand& p_operand, Operand& ds_operand) const {
    Fragment<kMTiles, kNTiles> p = {};
    Gemm::template scores<QTile, kHeadDimQk>(
        p, q_shared(stage) + QTile::offset(query, 0), lane, [&](uint32_t(&a)[4], int m, int k) {
          if constexpr (kKInRegisters) {
            FA_UNROLL
            for (int i = 0; i < 4; ++i) a[i] = k_fragment[m][k][i];
          } else {
            Gemm::template load_a<KTile, kHeadDimQk>(a, k_shared, warp_key + 16 * m, k, lane);
          }
        });
    const uint32_t statistics = static_cast<uint32_t>(4 * (query + 2 * (lane % 4)));
    if constexpr (!kTogether) {
      FA_UNROLL
      for (int n = 0; n < kNTiles; ++n) {
        float lse[2];
        ptx::ld_shared_f32x2(lse, lse_shared(stage) + statistics + 32 * n);
        FA_UNROLL
        for (int m = 0; m < kMTiles; ++m) {
          FA_UNROLL
          for (int e = 0; e < 4; ++e) p[m][n][e] = ptx::ex2(ptx::fma(p[m][n][e], params.scale_log2, -lse[e % 2]));
        }
      }
    }
    Fragment<kMTiles, kNTiles> ds = {};
    Gemm::template scores<DoTile, kHeadDimV>(
        ds, do_shared(stage) + DoTile::offset(query, 0), lane, [&](uint32_t(&a)[4], int m, int k) {
          if constexpr (kVInRegisters) {
            FA_UNROLL
            for (int i = 0; i < 4; ++i) a[i] = v_fragment[m][k][i];
          } else {
            Gemm::template load_a<VTile, kHeadDimV>(a, v_shared, warp_key + 16 * m, k, lane);
          }
        });
    if constexpr (kTogether) {
      const int first_row = query_tile(place) * kTileM + query;
      const Scores scores{params,
                          lengths,
                          tile.batch,
                          query_head(place),
                          first_row,
                          first_key,
                          lse_shared(stage) + statistics,
                          delta_shared(stage) + statistics,
                          kQueryGroups == kWarpsM || warp_m < kQueryGroups};
      if constexpr (kLists) {
        scores.differentiate(p, ds, place.m_block < ptx::ld_global_nc(tile_list() - 1));
      } else if constexpr (Variant::kMask) {
        scores.differentiate(p, ds, false);
      } else {
        scores.differentiate(p, ds, scores.plain());
      }
      Gemm::pack(p_operand, p);
      Gemm::pack(ds_operand, ds);
      return;
    }
    if (first_key + kTileN > lengths.s_kv || hides_keys(place)) mask(p, place.m_block * kTileM + query);
    if constexpr (kDropout) {
      differentiate_dropped(place, query, delta_shared(stage) + statistics, p, ds);
    } else {
      FA_UNROLL
      for (int n = 0; n < kNTiles; ++n) {
        float delta[2];
        ptx::ld_shared_f32x2(delta, delta_shared(stage) + statistics + 32 * n);
        FA_UNROLL
        for (int m = 0; m < kMTiles; ++m) {
          FA_UNROLL
          for (int e = 0; e < 4; ++e) ds[m][n][e] = p[m][n][e] * (ds[m][n][e] - delta[e % 2]);
        }
      }
    }
    Gemm::pack(p_operand, p);
    Gemm::pack(ds_operand, ds);
  }

  /// dP^T becomes keep * dS^T = P^T o (Z^T o dP^T - keep * delta), and P^T becomes Z^T o P^T, Z being 0 where P was
  /// dropped. What is missing of dK, dQ and dV is their factor 1 / keep.
  FA_DEVICE void differentiate_dropped(const Place& place, int query, uint32_t deltas, Fragment<kMTiles, kNTiles>& p,
                                       Fragment<kMTiles, kNTiles>& ds) const {
    const int dropper = ptx::thread_index();  // anew, as above
    const Dropout dropout(params.dropout, heads_before<Variant>(params, tile.batch) + query_head(place));
    const int first_query = row_of_whole<Variant>(params, place.m_block * kTileM + query);
    constexpr int kDrawnTiles = Dropout::drawn_tiles(kNTiles);
    uint32_t drops[kMTiles];  // of kDrawnTiles neighbouring n
    FA_UNROLL
    for (int n = 0; n < kNTiles; ++n) {
      float delta[2];
      ptx::ld_shared_f32x2(delta, deltas + 32 * n);
      FA_UNROLL
      for (int m = 0; m < kMTiles; ++m) {
        if (n % kDrawnTiles == 0) {
          const int key = key_of_whole<Variant>(params, first_key + warp_key + 16 * m);
          drops[m] = dropout.draw_transposed<kDrawnTiles>(key, first_query + 8 * n, dropper % kWarpSize);
        }
        FA_UNROLL
        for (int e = 0; e < 4; ++e) {
          const bool dropped = Dropout::dropped(drops[m], n % kDrawnTiles, e);
          float& weight = p[m][n][e];
          float& gradient = ds[m][n][e];
          gradient = weight * ptx::fma(delta[e % 2], -params.dropout.keep, dropped ? 0.f : gradient);
          if (dropped) weight = 0.f;
        }
      }
    }
  }

  /// P = 0 where the key is hidden from the query: one comparison with a constant an element.
  FA_DEVICE void mask(Fragment<kMTiles, kNTiles>& p, int first_row) const {
    const int masker = ptx::thread_index();                // anew, as above
    const int first_query = first_row + 2 * (masker % 4);  // of this thread
    const int thread_key = first_key + masker / kWarpSize % kWarpsN * kWarpKeys + masker % kWarpSize / 4;
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int key = thread_key + 16 * m + 8 * r;
        int visible_from = Config::kCausal ? key - lengths.causal_shift - first_query : 0;
        // A key that only rows behind the last would see is one that none does.
        if (key >= lengths.s_kv || (Config::kCausal && visible_from >= lengths.s_q - first_query)) {
          visible_from = kTileM;
        }
        FA_UNROLL
        for (int n = 0; n < kNTiles; ++n) {
          FA_UNROLL
          for (int e = 2 * r; e < 2 * r + 2; ++e) {
            if (8 * n + e % 2 < visible_from) p[m][n][e] = 0.f;
          }
        }
      }
    }
  }

  /// C += A B over all queries of the tile (of a substep): the warp's own A from registers, then the others' from
  /// `a_tile`.
  template <class BTile, int kCTiles>
  FA_DEVICE void product(Fragment<kMTiles, kCTiles>& c, const Operand& own, int own_query, uint32_t a_tile,
                         uint32_t b_tile) const {
    Gemm::template multiply<BTile>(c, own, b_tile + BTile::offset(own_query, 0), lane);
    FA_UNROLL
    for (int i = 1; i < kQueryGroups; ++i) {
      const int query = (warp_m + i) % kQueryGroups * kWarpQueries;  // first of another warp's
      const uint32_t a = a_tile + PTile::offset(warp_key, query);
      Gemm::template multiply<BTile, kWarpQueries>(
          c, b_tile + BTile::offset(query, 0), lane,
          [&](uint32_t(&words)[4], int m, int k) { Gemm::template load_a<PTile, kTileM>(words, a, 16 * m, k, lane); });
    }
  }
};

template <class Config>
FA_DEVICE void backward(const kernel::BackwardParamsOf<Config>& params) {
  if constexpr (kernel::kBounded<Config>) {
    kernel::take_items(Backward<Config>::items(params), [&](int round) { Backward<Config>(params, round).run(); });
  } else {
    Backward<Config>(params).run();
  }
}

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_BACKWARD_CUH_
