#ifndef FA_TEMPLATES_SM80_SM80_FORWARD_CUH_
#define FA_TEMPLATES_SM80_SM80_FORWARD_CUH_

#include <common/constants.cuh>
#include <common/dropout.cuh>
#include <common/forward_params.cuh>
#include <common/forward_schedule.cuh>
#include <common/kept_keys.cuh>
#include <common/mask.cuh>
#include <common/online_softmax.cuh>
#include <common/own_parts.cuh>
#include <common/paged.cuh>
#include <common/sequences.cuh>
#include <common/shared_tile.cuh>
#include <common/stored.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <common/work_lists.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <sm80/sm80_forward_epilogue.cuh>
#include <sm80/sm80_forward_splits.cuh>
#include <sm80/sm80_mma16.cuh>
#include <sm80/sm80_split_warps.cuh>
#include <sm80/sm80_stored.cuh>
#include <sm80/sm80_tf32x3.cuh>
#include <sm80/sm80_warp_group.cuh>
#include <sm80/sm80_warp_pair.cuh>

namespace fa::sm80 {

template <class Config>
FA_DEVICE constexpr bool splits_warps() {
  if constexpr (requires { Config::kSplitWarps; }) return Config::kSplitWarps;
  return false;
}

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
/// kWarpsN, kVarlen, kDropout, kPageSize, kSplitKeys, kScheduled, kOwnParts, kValueInKey (common/switches.cuh) and a
/// Variant (common/variant.cuh).
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
/// With kSplitWarps, for few rows, all warps have the same rows, and each its own keys of every tile. They join what
/// they have made of them at the end (sm80_split_warps.cuh).
///
/// With kKeyStorage or kValueStorage the tiles of K or V have 8 bits an element, and each key a scale, which multiplies
/// its column of S or of P.
template <class Config>
struct Forward {
  using Settings = Config;
  using T = typename Config::Element;
  using Variant = VariantOf<Config>;
  using Params = StoredForwardParamsOf<Config>;
  using Gemm = WarpGemm<T>;
  using KElement = KeyElement<Config>;
  using VElement = ValueElement<Config>;

  static constexpr int kTileM = Config::kTileM;
  static constexpr int kTileN = Config::kTileN;
  static constexpr int kHeadDimQk = Config::kHeadDimQk;
  static constexpr int kHeadDimV = Config::kHeadDimV;
  static constexpr int kStages = Config::kStages;
  static constexpr bool kEarlyV = sizeof(T) == 2;  // the first V with the first K; fp32 has no register left for it
  static constexpr int kThreads = Config::kWarps * kWarpSize;
  static constexpr bool kSplitWarps = splits_warps<Config>();
  static constexpr int kWarpsN = kSplitWarps ? Config::kWarps : kernel::kWarpsN<Config>;
  static constexpr int kWarpsM = Config::kWarps / kWarpsN;
  static constexpr int kWarpRows = kTileM / kWarpsM;
  static constexpr int kWarpKeys = kTileN / kWarpsN;
  static constexpr int kMTiles = kWarpRows / 16;
  // Of warps that share rows, each with its own columns of O.
  static constexpr bool kGroups = !kSplitWarps && (kWarpsN > 2 || (kWarpsN == 2 && kMTiles == 1));
  static constexpr bool kPairs = !kSplitWarps && kWarpsN == 2 && !kGroups;
  // Of O, that a warp stores.
  static constexpr int kOutColumns = kGroups ? ceil_div(kHeadDimV, 8 * kWarpsN) * 8 : kHeadDimV / kWarpsN;
  static constexpr int kWarpColumns = kSplitWarps ? kHeadDimV : kOutColumns;  // and has in the main loop
  static constexpr int kNTiles = kWarpKeys / 8;
  static constexpr bool kUnevenColumns = kGroups && kWarpColumns * kWarpsN != kHeadDimV;
  static constexpr int kOTiles = kWarpColumns / 8;
  static constexpr int kOutTiles = kOutColumns / 8;
  static constexpr bool kVarlen = kernel::kVarlen<Config>;
  static constexpr bool kDropout = kernel::kDropout<Config>;
  static constexpr bool kAccumulate = kernel::kAccumulate<Config> && !Config::kSplit;  // splits join later
  static constexpr int kPageSize = kernel::kPageSize<Config>;
  static constexpr bool kPaged = kPageSize > 0;
  static constexpr bool kOwnParts = kernel::kOwnParts<Config>;
  static constexpr bool kScheduled = kernel::kScheduled<Config>;
  static constexpr bool kPieces = kScheduled || kOwnParts;  // of query tiles, one after the other
  static constexpr bool kStoredKeys = kernel::kStoredKeys<Config>;
  static constexpr bool kStoredValues = kernel::kStoredValues<Config>;
  static constexpr bool kStored = kStoredKeys || kStoredValues;
  static constexpr int kSplitKeys = kernel::kSplitKeys<Config>;
  static constexpr bool kFixedSplits = kSplitKeys > 0;
  static constexpr bool kShares = kFixedSplits && Config::kSplit;  // splits, with other blocks
  static constexpr bool kPacks = Config::kPackGqa;
  static constexpr int kWarpCount = Config::kWarps;
  static constexpr bool kTwoSided =
      Variant::kLeftWindow || Variant::kChunked || kPaged;               // keys are hidden before others too
  static constexpr bool kLists = Variant::kMask && !kVarlen && !kPaged;  // of tiles that are not empty
  static constexpr bool kKeepsFirst = !kLists && kernel::kKeepsFirst<Variant>;

  static_assert(kHeadDimQk % 8 == 0 && kHeadDimV % 8 == 0, "head dims are multiples of 8");
  static_assert(kTileM == kMTiles * 16 * kWarpsM && kMTiles >= 1, "a warp owns a multiple of 16 rows");
  static_assert(kWarpKeys % 16 == 0 || (kGroups && kWarpKeys == 8), "keys are consumed 16 at a time");
  static_assert(!kPairs || (kMTiles == 2 && sizeof(T) == 2 && !Config::kQInRegisters), "pairs share 32 rows");
  static_assert(!kGroups || !Config::kQInRegisters, "groups keep Q in shared memory");
  static_assert(!kDropout || kWarpKeys % 16 == 0, "bits are drawn for 16 keys");
  static_assert(!kernel::kValueInKey<Config> || (kGroups && kStages > 1), "K stays until it has been V");
  static_assert(kOutColumns % 8 == 0 && Config::kWarps % kWarpsN == 0, "warps share evenly");
  static_assert(!kSplitWarps || sizeof(T) == 2, "fp32 warps do not share rows");
  static_assert(!kPairs || Config::kWarps <= 8, "a named barrier a warp, and one a pair");
  static_assert(kStages >= 1 && kStages <= 4, "1 to 4 K and V buffers");
  static_assert(!(kVarlen || kPaged) || !Config::kSplit || kFixedSplits, "batches of unknown lengths are not split");
  static_assert(!kFixedSplits || (!kPairs && !kPieces && !kernel::kAccumulate<Config> && Config::kLoopBodies == 1),
                "fixed splits have one order");
  static_assert(kSplitKeys % kTileN == 0, "whole KV tiles");
  static_assert(!kShares || !kLists, "blocks share no splits of tile lists");
  static_assert(!kPaged || !kDropout, "no dropout over pages");
  static_assert(!kScheduled || kPaged, "schedules are of calls over pages");
  static_assert(!kOwnParts || (!kScheduled && !Config::kSplit && !kDropout && !kLists && !kernel::kAccumulate<Config>),
                "own parts are of plain calls");
  static_assert(!kOwnParts || kPaged || !kVarlen, "of a packed batch that is not in pages nothing is shared");
  static_assert(!kernel::kAccumulate<Config> || !Variant::kSink, "the state has the sink");

  using QTile = SharedTile<T, kTileM, kHeadDimQk>;
  using OTile = SharedTile<T, kTileM, kHeadDimV>;
  using KTile = SharedTile<KElement, kTileN, kHeadDimQk>;
  static constexpr bool kValueInKey = kernel::kValueInKey<Config>;  // V is the first columns of K
  using VTile = typename Either<KTile, SharedTile<VElement, kTileN, kHeadDimV>, kValueInKey>::type;

  // O is staged where Q was: the rows of a warp in both layouts start at the same multiple of the larger pitch.
  static constexpr int kWarpQBytes = kWarpRows * (QTile::kPitch > OTile::kPitch ? QTile::kPitch : OTile::kPitch);
  static constexpr int kQBytes = kWarpsM * kWarpQBytes;
  static constexpr int kTileBytes = kQBytes + kStages * (KTile::kBytes + (kValueInKey ? 0 : VTile::kBytes));
  using Pair = WarpPair<Config::kWarps, kNTiles>;
  using Group = WarpGroup<T, Config::kWarps, kWarpsN, kMTiles, kNTiles>;
  static FA_DEVICE constexpr int exchange_bytes() {
    if constexpr (kGroups) return Group::kBytes;
    return kPairs ? Pair::kBytes : 0;
  }
  static constexpr int kScaleBytes = kStored ? 2 * kStages * kTileN * static_cast<int>(sizeof(float)) : 0;
  static constexpr int kLoopBytes = kTileBytes + exchange_bytes() + kScaleBytes;
  using Split = SplitWarps<kSplitWarps ? Config::kWarps : 1, kTileM, kHeadDimV>;
  static constexpr int kJoinBytes = kSplitWarps ? kQBytes + Split::kBytes : 0;
  static constexpr int kSharedBytes = kLoopBytes > kJoinBytes ? kLoopBytes : kJoinBytes;

  using QWarpTile = SharedTile<T, kWarpRows, kHeadDimQk>;
  using OWarpTile = SharedTile<T, kWarpRows, kHeadDimV>;
  using QCopy = TileCopy<QWarpTile, T, kWarpRows, kWarpsN * kWarpSize, Config::kAligned>;
  using KCopy = TileCopy<KTile, KElement, kTileN, kThreads, Config::kAligned || kStoredKeys>;
  using VCopy = TileCopy<VTile, VElement, kTileN, kThreads, Config::kAligned || kStoredValues>;

  const Params& params;
  // Of a scheduled block's pieces.
  const int index;
  Piece piece{};
  const ForwardTile tile;
  using Entry = typename Either<Request, BatchEntry<kVarlen, ForwardParams>, kPaged>::type;

  const Entry lengths;
  const RowMap<Config::kPackGqa> rows;
  const int thread = ptx::thread_index();
  const int lane = thread % kWarpSize;
  const int warp = thread / kWarpSize;
  const int half = kWarpsN > 1 ? warp % kWarpsN : 0;            // or slice, of the tile's keys and of O's columns
  const int copier = thread % (kWarpsN * kWarpSize);            // of those that copy this warp's rows of Q
  const int block_row = tile.m_block * kTileM;                  // first packed row of the block
  const int warp_row = block_row + warp / kWarpsN * kWarpRows;  // and of this warp
  const int row_count = Config::kPackGqa ? lengths.s_q * params.group : lengths.s_q;
  const KElement* const k_thread =
      KCopy::thread_pointer(static_cast<const KElement*>(params.k) + first_key(params.stride_k_b, params.stride_k_s) +
                                rows.kv_head() * params.stride_k_h,
                            params.stride_k_s, thread);  // into [s_kv, d_qk]; not of pages
  const VElement* const v_thread =
      VCopy::thread_pointer(static_cast<const VElement*>(params.v) + first_key(params.stride_v_b, params.stride_v_s) +
                                rows.kv_head() * params.stride_v_h,
                            params.stride_v_s, thread);  // into [s_kv, d_v]; likewise
  const uint32_t shared = ptx::dynamic_shared();
  const uint32_t q_shared = shared + warp / kWarpsN * kWarpQBytes;  // this warp's rows of Q, later of O

  // Of the rows' heads, which are one unless they are packed.
  static constexpr int kFixedTiles = Config::kPackGqa ? kMTiles : 1;
  static constexpr int kFixedHalves = Config::kPackGqa ? 2 : 1;
  Fixed<Variant> fixed[kFixedTiles][kFixedHalves];

  // Over pages.
  int table_row = 0;   // the request's row of the block table
  int first_read = 0;  // keys before it are hidden from all rows

  FA_DEVICE explicit Forward(const Params& p, int i = 0)
      : params(p),
        index(i),
        tile(this_tile(p, i, piece)),
        lengths(this_entry(p, tile.batch)),
        rows{p.group, tile.head} {}
  FA_DEVICE Forward(const Params& p, const Piece& of, const ForwardTile& at)
      : params(p), index(0), piece(of), tile(at), lengths(this_entry(p, at.batch)), rows{p.group, at.head} {}

  /// A second view of the same tile: deriving it again is cheaper than keeping it in registers over the main loop.
  FA_DEVICE Forward again() const {
    if constexpr (kOwnParts) {
      return Forward(params, piece, tile);
    } else {
      return Forward(params, index);
    }
  }

  static FA_DEVICE Entry this_entry(const Params& p, int batch) {
    if constexpr (kPaged) {
      return request_of<kVarlen>(p, batch);
    } else {
      return batch_entry<kVarlen>(p, batch);
    }
  }

  static FA_DEVICE ForwardTile this_tile(const Params& p, int index, Piece& piece) {
    if constexpr (kScheduled) {
      ForwardTile tile;
      piece = piece_of(WorkLists(p.paged), ptx::block_index(), index, tile);
      return tile;
    } else if constexpr (kShares) {
      const int sharing = p.sequences.wave;
      const int block = ptx::block_index() / sharing;
      ForwardTile tile;
      if constexpr (kVarlen) {
        tile = forward_tile_of_batch<kTileM, Config::kPackGqa>(p, block);
      } else {
        tile = forward_tile<Variant, Config::kCausal>(p, block);
      }
      tile.split = ptx::block_index() - block * sharing;
      return tile;
    } else if constexpr (kVarlen) {
      return forward_tile_of_batch<kTileM, Config::kPackGqa>(p, ptx::block_index());
    } else {
      return forward_tile<Variant, Config::kCausal>(p, ptx::block_index());
    }
  }

  /// Offset of the batch entry's first row (of q, o and lse), and of its first key.
  FA_DEVICE int64_t first_row(int64_t stride_b, int64_t stride_s) const {
    return offset_of_rows<kVarlen>(lengths, tile.batch, stride_b, stride_s);
  }
  FA_DEVICE int64_t first_key(int64_t stride_b, int64_t stride_s) const {
    if constexpr (kPaged) {
      return 0;
    } else {
      return offset_of_keys<kVarlen>(lengths, tile.batch, stride_b, stride_s);
    }
  }

  FA_DEVICE uint32_t k_shared(int stage) const { return shared + kQBytes + stage * KTile::kBytes; }
  FA_DEVICE uint32_t v_shared(int stage) const {
    if constexpr (kValueInKey) return k_shared(stage);
    return shared + kQBytes + kStages * KTile::kBytes + stage * VTile::kBytes;
  }

  FA_DEVICE void load_q() const {
    const T* base = static_cast<const T*>(params.q) + first_row(params.stride_q_b, params.stride_q_s);
    const int valid = row_count - warp_row;
    if constexpr (Config::kPackGqa) {
      QCopy::gathered(
          q_shared,
          [&](int row) {
            return base + rows.query_head(warp_row + row) * params.stride_q_h +
                   rows.position(warp_row + row) * params.stride_q_s;
          },
          valid, copier);
    } else {
      base += tile.head * params.stride_q_h + warp_row * params.stride_q_s;
      QCopy::strided(q_shared, QCopy::thread_pointer(base, params.stride_q_s, copier), params.stride_q_s, valid,
                     copier);
    }
  }

  FA_DEVICE void load_k(int n_block, int stage) const {
    const int first = kv_tile(n_block) * kTileN;
    if constexpr (kPaged) {
      KCopy::template paged<kPageSize>(k_shared(stage), pool<KCopy, KElement>(params.k, params.stride_k_h),
                                       params.stride_k_b, params.stride_k_s, first, paged_keys(), thread);
    } else {
      KCopy::strided(k_shared(stage), k_thread + first * params.stride_k_s, params.stride_k_s, lengths.s_kv - first,
                     thread);
    }
    if constexpr (kStoredKeys) StoredScales<Forward>{*this}.load_k(stage, first);
  }

  FA_DEVICE void load_v(int n_block, int stage) const {
    if constexpr (kValueInKey) return;
    const int first = kv_tile(n_block) * kTileN;
    if constexpr (kPaged) {
      VCopy::template paged<kPageSize>(v_shared(stage), pool<VCopy, VElement>(params.v, params.stride_v_h),
                                       params.stride_v_b, params.stride_v_s, first, paged_keys(), thread);
    } else {
      VCopy::strided(v_shared(stage), v_thread + first * params.stride_v_s, params.stride_v_s, lengths.s_kv - first,
                     thread);
    }
    if constexpr (kStoredValues) StoredScales<Forward>{*this}.load_v(stage, first);
  }

  FA_DEVICE PagedKeys<kPageSize> paged_keys() const {
    return {params.paged, params.paged.table + table_row * params.paged.stride_row, first_read, lengths.s_kv};
  }

  /// Page 0 of the KV head, at this thread's first column. Derived in every step: no register is left to keep it in.
  template <class Copy, class Element>
  FA_DEVICE const Element* pool(const void* base, int64_t stride_h) const {
    return Copy::thread_pointer(static_cast<const Element*>(base) + rows.kv_head() * stride_h, 0, ptx::thread_index());
  }

  FA_DEVICE Pair pair() const { return Pair(shared + kTileBytes); }
  FA_DEVICE Group group() const { return Group(shared + kTileBytes); }

  FA_DEVICE void meet() const {
    if constexpr (kSplitWarps) {
      ptx::sync_threads();
    } else if constexpr (kGroups) {
      group().meet();
    } else {
      pair().meet();
    }
  }

  /// This warp's first column of O. Where slices of groups are not even, the last ones begin in those before them.
  FA_DEVICE int first_o_column() const {
    if constexpr (kUnevenColumns) {
      return half * kWarpColumns < kHeadDimV - kWarpColumns ? half * kWarpColumns : kHeadDimV - kWarpColumns;
    }
    return half * kOutColumns;
  }
  /// Whether n tile `n` of this warp is in no slice before its own.
  FA_DEVICE bool owns(int n) const { return !kUnevenColumns || first_o_column() + 8 * n >= half * kWarpColumns; }

  /// This thread's first key of a KV tile.
  FA_DEVICE int first_column(int n_block) const { return n_block * kTileN + half * kWarpKeys + 2 * (lane % 4); }

  /// The packed row that fragment registers 2r and 2r + 1 of m tile `m` belong to.
  FA_DEVICE int fragment_row(int m, int r) const { return warp_row + 16 * m + 8 * r + lane / 4; }

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
    if constexpr (kKeepsFirst) range.kept_end = kept_tiles<Variant, kTileN>(params, lengths, tile.batch);
    Fragment<kMTiles, kOTiles> o = {};
    OnlineSoftmax<kMTiles> softmax;
    if (range.begin < range.end) {
      read_what_stays();
      attend(range, o, softmax);
    }
    softmax.finish();
    if constexpr (kStoredValues) StoredValues<VElement>::restore(o, lane);
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
      const Forward epilogue = again();
      ForwardEpilogue<Forward>{epilogue}.run(o, softmax);
    }
  }

  /// What all KV tiles ask for.
  FA_DEVICE void read_what_stays() {
    read_fixed();
    if constexpr (kPaged) {
      table_row = table_row_of(params.paged, tile.batch);
      first_read = keys_begin<Variant>(params, lengths, rows.position(block_row));
    }
  }

  FA_DEVICE KvRange tile_range(int first_row, int last_row) const {
    if constexpr (kLists) {
      return list_range(tile_list(), params.splits, tile.split);
    } else if constexpr (kTwoSided) {
      return variant_range<Config::kCausal, Variant, kTileN>(params, lengths, first_row, last_row, tile.split);
    } else {
      return kv_range<Config::kCausal, kTileN>(lengths, first_row, last_row, tile.split);
    }
  }

  FA_DEVICE const int32_t* tile_list() const {
    return tile_list_of<Variant>(params.variant, tile.batch, tile.head, params.heads, tile.m_block, params.m_blocks);
  }

  /// The KV tile at a place of the range: of the tile list, where there is one.
  FA_DEVICE int kv_tile(int place) const {
    if constexpr (kLists) return ptx::ld_global_nc(tile_list() + place);
    return place;
  }

  FA_DEVICE void attend(const KvRange& range, Fragment<kMTiles, kOTiles>& o, OnlineSoftmax<kMTiles>& softmax) {
    typename Gemm::template QFragment<Config::kQInRegisters ? kMTiles : 1, Config::kQInRegisters ? kHeadDimQk : 16> q;
    load_q();
    if constexpr (Config::kQInRegisters) {
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
    prefetch(range);

    int n_block = range.end - 1;
    int stage = 0;
    if constexpr (Config::kLoopBodies == 2) {
      for (; n_block >= range.plain_end && n_block >= range.begin; --n_block) {
        step<true>(range, n_block, stage, q, o, softmax);
      }
      if constexpr (kTwoSided) {
        for (; n_block >= range.plain_begin && n_block >= range.begin; --n_block) {
          step<false>(range, n_block, stage, q, o, softmax);
        }
        for (; n_block >= range.begin; --n_block) step<true>(range, n_block, stage, q, o, softmax);
      } else {
        for (; n_block >= range.begin; --n_block) step<false>(range, n_block, stage, q, o, softmax);
      }
    } else {
      for (; n_block >= range.begin; --n_block) {
        step<true>(range, n_block, stage, q, o, softmax);
        if constexpr (kFixedSplits && !kShares) {
          if (n_block > range.begin && split_at(n_block) != split_at(n_block - 1)) {
            ForwardSplits<const Forward>{*this}.fold_away(split_at(n_block) == split_at(range.end - 1), o, softmax);
          }
        }
      }
    }
  }

  /// The A operand of m tile `m` and depth step `k` of Q, from shared memory.
  FA_DEVICE void load_q_fragment(uint32_t (&a)[4], int m, int k) const {
    if constexpr (kStoredKeys) {
      StoredKeys<T, KElement>::template load_a<QWarpTile>(a, q_shared, 16 * m, k, lane);
    } else {
      Gemm::template load_a<QWarpTile, kHeadDimQk>(a, q_shared, 16 * m, k, lane);
    }
  }
  /// With a fixed split size, the split that the KV tile at a place of the range is in.
  FA_DEVICE int split_at(int place) const { return kv_tile(place) / (kSplitKeys / kTileN); }

  /// Starts the first tiles' copies (Q rides with the first): K and V a group each with one buffer, else a tile a
  /// group.
  FA_DEVICE void prefetch(const KvRange& range) const {
    if constexpr (kStages == 1) {
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
  FA_DEVICE void step(const KvRange& range, int n_block, int& stage, const Q& q, Fragment<kMTiles, kOTiles>& o,
                      OnlineSoftmax<kMTiles>& softmax) const {
    ptx::cp_async_wait<(kStages == 1 ? 1 : kStages - 2)>();
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
    ptx::cp_async_commit();

    Fragment<kMTiles, kNTiles> s = {};  // [rows of the warp, keys of the warp]
    const uint32_t keys = k_shared(stage) + KTile::offset(half * kWarpKeys, 0);
    const auto load_a = [&](uint32_t(&a)[4], int m, int k) {
      if constexpr (Config::kQInRegisters) {
        FA_UNROLL
        for (int i = 0; i < 4; ++i) a[i] = q[m][k][i];
      } else {
        load_q_fragment(a, m, k);
      }
    };
    if constexpr (kStoredKeys) {
      StoredKeys<T, KElement>::template scores<KTile, kHeadDimQk>(s, keys, lane, load_a);
      StoredScales<Forward>{*this}.multiply_k(s, stage);
    } else if constexpr (kNTiles == 1) {
      scores_of_8_keys<T, KTile, kHeadDimQk>(s, keys, lane, load_a);
    } else {
      Gemm::template scores<KTile, kHeadDimQk>(s, keys, lane, load_a);
    }

    if constexpr (kPairs) {
      finish_scores<kMaybeMasked>(range, n_block, s);
      pair().publish_maxima(s, softmax.max);
      if constexpr (kStages > 1) pair().meet();  // the maxima are in shared memory
    } else if constexpr (kGroups) {
      finish_scores<kMaybeMasked>(range, n_block, s);
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
      finish_scores<kMaybeMasked>(range, n_block, s);
      softmax.template update<Config::kConditionalRescale, kNTiles, kOTiles>(s, o, softmax_scale_log2());
      if constexpr (kDropout) drop(s, kv_tile(n_block) * kTileN + half * kWarpKeys);
      const uint32_t values = v_shared(stage) + VTile::offset(half * kWarpKeys, 0);
      if constexpr (kStoredValues) {
        StoredScales<Forward>{*this}.multiply_v(s, stage);
        StoredValues<VElement>::template accumulate<VTile, kHeadDimV>(o, s, values, lane);
      } else {
        Gemm::template accumulate<VTile, kHeadDimV, kMTiles, kNTiles>(o, s, values, lane);
      }
    }
    if constexpr (kStages > 1) stage = stage + 1 == kStages ? 0 : stage + 1;
  }

  /// Whatever is done to S = Q K^T before its row maxima count.
  template <bool kMaybeMasked>
  FA_DEVICE void finish_scores(const KvRange& range, int n_block, Fragment<kMTiles, kNTiles>& s) const {
    if constexpr (Variant::kScore) {
      apply_score(s, kv_tile(n_block));
    } else if constexpr (!Config::kPositiveScale) {
      scale_scores(s);
    }
    if constexpr (Variant::kMask && !kLists) {
      if (!kKeepsFirst || n_block >= range.kept_end) apply_mask(s, n_block);
    }
    if (kMaybeMasked &&
        (Config::kLoopBodies == 2 || n_block >= range.plain_end || (kTwoSided && n_block < range.plain_begin))) {
      if constexpr (kLists) {
        if (n_block >= range.kept_end) apply_mask(s, kv_tile(n_block));
      }
      if constexpr (kPairs && !kVarlen && !kPaged) {
        Forward(params).mask(s, kv_tile(n_block));  // derived again for want of registers; varlen's tile costs more
      } else {
        mask(s, kv_tile(n_block));
      }
    }
  }

  FA_DEVICE void mask(Fragment<kMTiles, kNTiles>& s, int n_block) const {
    int limits[kMTiles][2];  // first hidden key of each row, from this thread's first column of the tile
    [[maybe_unused]] int begins[kMTiles][2];
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
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
      mask_scores(s, begins, limits);
    } else {
      mask_scores(s, limits);
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

  FA_DEVICE void apply_score(Fragment<kMTiles, kNTiles>& s, int n_block) const {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
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
      for (int r = 0; r < 2; ++r) {
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
    const int64_t heads_before = static_cast<int64_t>(tile.batch) * params.h_q;
    if constexpr (Config::kPackGqa) {
      const Dropout dropout(params.dropout, heads_before);
      FA_UNROLL
      for (int m = 0; m < kMTiles; ++m) {
        FA_UNROLL
        for (int r = 0; r < 2; ++r) {
          const int row = fragment_row(m, r);
          dropout.drop_row<kNTiles>([&](int n, int e) -> float& { return p[m][n][2 * r + e]; }, rows.position(row),
                                    rows.query_head(row), key, lane);
        }
      }
    } else {
      Dropout(params.dropout, heads_before + tile.head).drop(p, warp_row, key, lane);
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

template <class Config>
FA_DEVICE void forward(const kernel::StoredForwardParamsOf<Config>& params) {
  if constexpr (kernel::kOwnParts<Config>) {
    using Own = kernel::OwnParts<Config, kernel::StoredForwardParamsOf<Config>>;
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
    if constexpr (kernel::kOverlaps<Config>) ptx::griddepcontrol_wait();
    const int pieces = kernel::pieces_of(kernel::WorkLists(params.paged), ptx::block_index());
    for (int i = 0; i < pieces; ++i) {
      if (i > 0) ptx::sync_threads();  // all have left the tiles of the piece before
      Forward<Config>(params, i).run();
    }
  } else {
    Forward<Config>(params).run();
  }
}

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_FORWARD_CUH_
