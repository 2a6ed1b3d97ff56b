#ifndef FA_TEMPLATES_SM80_SM80_BACKWARD_CUH_
#define FA_TEMPLATES_SM80_SM80_BACKWARD_CUH_

#include <common/backward_params.cuh>
#include <common/backward_schedule.cuh>
#include <common/constants.cuh>
#include <common/dropout.cuh>
#include <common/elements.cuh>
#include <common/online_softmax.cuh>
#include <common/sequences.cuh>
#include <common/shared_tile.cuh>
#include <common/switches.cuh>
#include <common/tile_store.cuh>
#include <common/variant.cuh>
#include <common/variant_backward.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <sm80/sm80_mma16.cuh>
#include <sm80/sm80_tf32x3.cuh>

namespace fa::sm80 {

/// Column tiles of a product, shared by `kParts` warps: all take equally many, and where that does not come out even
/// the last warps compute some that are their neighbours' and leave them to those.
template <int kColumns, int kParts>
struct ColumnSlice {
  static constexpr int kAllTiles = kColumns / 8;
  static constexpr int kTiles = ceil_div(kAllTiles, kParts);
  int part;

  FA_DEVICE int first_tile() const {
    const int first = part * kTiles;
    return kAllTiles % kParts == 0 || first + kTiles <= kAllTiles ? first : kAllTiles - kTiles;
  }
  FA_DEVICE bool owns(int tile) const { return kAllTiles % kParts == 0 || first_tile() + tile >= part * kTiles; }
};

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
/// kVectorReduce; optionally kVarlen, kDropout, kWithoutDk, kWithoutDv (common/switches.cuh) and a Variant
/// (common/variant.cuh).
template <class Config>
struct Backward {
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
  static constexpr int kWarpsN = Config::kWarpsN;
  static constexpr int kWarpsM = Config::kWarps / kWarpsN;
  static constexpr int kDqWarpsM = Config::kDqWarpsM;
  static constexpr int kDqWarpsD = Config::kWarps / kDqWarpsM;
  // Where the tile has fewer groups of 16 queries than the grid has columns of warps, several compute the same S.
  static constexpr int kQueryGroups = kTileM / 16 < kWarpsM ? kTileM / 16 : kWarpsM;
  static constexpr int kWarpKeys = kTileN / kWarpsN;
  static constexpr int kWarpQueries = kTileM / kQueryGroups;
  static constexpr int kMTiles = kWarpKeys / 16;
  static constexpr int kSubsteps = Config::kSubsteps;
  static constexpr int kNTiles = kWarpQueries / kSubsteps / 8;
  static constexpr int kDqMTiles = kTileM / kDqWarpsM / 16;
  static constexpr bool kExchange = kQueryGroups > 1;  // P and dS reach other warps for dV and dK
  static constexpr bool kDelayedDq = Config::kDelayedDq;
  static constexpr bool kKInRegisters = Config::kOperandsInRegisters == 2;
  static constexpr bool kVInRegisters = Config::kOperandsInRegisters >= 1;
  static constexpr bool kVarlen = kernel::kVarlen<Config>;
  static constexpr bool kDropout = kernel::kDropout<Config>;
  static constexpr bool kWantsDk = kernel::kWantsDk<Config>;
  static constexpr bool kWantsDv = kernel::kWantsDv<Config>;
  static constexpr bool kTwoSided = Variant::kLeftWindow || Variant::kChunked;  // keys are hidden from last rows too
  static constexpr bool kLists = Variant::kMask && !kVarlen;                    // of tiles that are not empty
  static constexpr bool kTogether = kTwoSided || Variant::kScore || Variant::kMask;  // P and dS in one go
  static constexpr bool kHides = Config::kCausal || kTwoSided || Variant::kMask;     // keys of the sequence from rows
  using Scores = VariantScores<Config, Params, kMTiles, kNTiles, kWarpsN, kWarpKeys, kTileM, kTileN>;

  static_assert(kHeadDimQk % 8 == 0 && kHeadDimV % 8 == 0, "head dims are multiples of 8");
  static_assert(Config::kWarps == kWarpsN * kWarpsM && Config::kWarps == kDqWarpsM * kDqWarpsD, "grids of warps");
  static_assert(kTileN == kMTiles * 16 * kWarpsN && kMTiles >= 1, "a warp owns a multiple of 16 keys");
  static_assert(kTileM == kWarpQueries * kQueryGroups && kWarpQueries % 16 == 0, "queries are consumed 16 at a time");
  static_assert(kWarpQueries % (16 * kSubsteps) == 0, "so many at every substep");
  static_assert(kSubsteps == 1 || kQueryGroups == 1, "what crosses shared memory does so at once");
  static_assert(kWarpsM % kQueryGroups == 0, "a group of queries has equally many warps");
  static_assert(kTileM == kDqMTiles * 16 * kDqWarpsM && kDqMTiles >= 1, "a warp adds to a multiple of 16 rows of dQ");
  static_assert(kStages == 1 || kStages == 2, "1 or 2 Q and dO buffers");
  static_assert(!kVarlen || !Config::kSplit, "packed batches are not split");
  static_assert(!kDelayedDq || (kStages == 2 && Config::kWriteDq), "dS has as many buffers as Q and dO");

  using KTile = SharedTile<T, kTileN, kHeadDimQk>;
  using VTile = SharedTile<T, kTileN, kHeadDimV>;
  using QTile = SharedTile<T, kTileM, kHeadDimQk>;
  using DoTile = SharedTile<T, kTileM, kHeadDimV>;
  using PTile = SharedTile<T, kTileN, kTileM>;  // P^T, dS^T

  static constexpr int kRowBytes = kTileM * static_cast<int>(sizeof(float));  // of one of the two row statistics
  static constexpr int kStageBytes = QTile::kBytes + DoTile::kBytes + 2 * kRowBytes;
  static constexpr int kPBytes = kExchange ? PTile::kBytes : 0;
  static constexpr int kDsBytes = (kExchange || Config::kWriteDq ? PTile::kBytes : 0) * (kDelayedDq ? 2 : 1);
  static constexpr int kSharedBytes = KTile::kBytes + VTile::kBytes + kStages * kStageBytes + kPBytes + kDsBytes;

  using KCopy = TileCopy<KTile, T, kTileN, kThreads, Config::kAligned>;
  using VCopy = TileCopy<VTile, T, kTileN, kThreads, Config::kAligned>;
  using QCopy = TileCopy<QTile, T, kTileM, kThreads, Config::kAligned>;
  using DoCopy = TileCopy<DoTile, T, kTileM, kThreads, Config::kAligned>;
  using QkSlice = ColumnSlice<kHeadDimQk, kWarpsM>;
  using VSlice = ColumnSlice<kHeadDimV, kWarpsM>;
  using DqSlice = ColumnSlice<kHeadDimQk, kDqWarpsD>;
  using DkFragment = Fragment<kMTiles, QkSlice::kTiles>;
  using DvFragment = Fragment<kMTiles, VSlice::kTiles>;
  using Operand = typename Gemm::template Packed<kMTiles, kNTiles>;

  /// Which query tile, of which query head of the group.
  struct Place {
    int head;
    int m_block;
  };

  const Params& params;
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

  FA_DEVICE explicit Backward(const Params& p)
      : params(p), tile(this_tile(p)), lengths(backward_entry<kVarlen, kTileM>(p, tile.batch)) {}

  static FA_DEVICE BackwardTile this_tile(const Params& p) {
    if constexpr (kVarlen) {
      return backward_tile_of_batch<kTileN, false>(p, ptx::block_index(), p.n_blocks, p.h_kv);
    } else {
      return backward_tile<Variant, Config::kCausal, false>(p, ptx::block_index(), p.n_blocks, p.h_kv);
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

  FA_DEVICE void run() {
    if constexpr (kVarlen) {
      if (first_key < 0 || first_key >= lengths.s_kv) return;  // a slot without a tile
    }
    const QuerySteps steps = query_steps_of_tile();
    DkFragment dk = {};
    DvFragment dv = {};
    if (steps.begin < steps.end) walk(steps, dk, dv);
    // A second view of the same tile: deriving it again is cheaper than keeping it in registers over the main loop.
    const Backward epilogue(params);
    if constexpr (!kWantsDk && !kWantsDv) return;
    if constexpr (Config::kSplit) {
      epilogue.store_partial(dk, dv);
    } else {
      epilogue.store(dk, dv);
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
    const int64_t heads_before = static_cast<int64_t>(tile.batch) * params.h_q + query_head(place);
    const Dropout dropout(params.dropout, heads_before);
    const int first_query = place.m_block * kTileM + query;
    constexpr int kDrawnTiles = Dropout::drawn_tiles(kNTiles);
    uint32_t drops[kMTiles];  // of kDrawnTiles neighbouring n
    FA_UNROLL
    for (int n = 0; n < kNTiles; ++n) {
      float delta[2];
      ptx::ld_shared_f32x2(delta, deltas + 32 * n);
      FA_UNROLL
      for (int m = 0; m < kMTiles; ++m) {
        if (n % kDrawnTiles == 0) {
          const int key = first_key + warp_key + 16 * m;
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

  /// Whether masks hide keys of this tile from queries of a tile; the mask function where it is not known to keep all.
  FA_DEVICE bool hides_keys(const Place& place) const {
    if constexpr (kLists) return place.m_block >= ptx::ld_global_nc(tile_list() - 1);
    if constexpr (Variant::kMask) return true;
    return hides_any<Config::kCausal, Variant, kTileM, kTileN>(params, lengths, place.m_block * kTileM, first_key);
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

  /// Adds a query tile's dS K to the accumulator of dQ.
  FA_DEVICE void add_dq(const Place& place, int stage) const {
    const int adder = ptx::thread_index();  // anew, as above
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
    const int adder = ptx::thread_index();  // anew, as above
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

template <class Config>
FA_DEVICE void backward(const kernel::BackwardParamsOf<Config>& params) {
  Backward<Config>(params).run();
}

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_BACKWARD_CUH_
