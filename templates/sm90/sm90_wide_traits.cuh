#ifndef FA_TEMPLATES_SM90_SM90_WIDE_TRAITS_CUH_
#define FA_TEMPLATES_SM90_SM90_WIDE_TRAITS_CUH_

#include <common/accumulate.cuh>
#include <common/constants.cuh>
#include <common/dropout.cuh>
#include <common/forward_schedule.cuh>
#include <common/paged.cuh>
#include <common/sequences.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <common/work_lists.cuh>
#include <ptx/cluster.cuh>
#include <ptx/math.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/prefetch.cuh>
#include <ptx/thread.cuh>
#include <ptx/wgmma.cuh>
#include <sm90/sm90_affine.cuh>
#include <sm90/sm90_forward_params.cuh>
#include <sm90/sm90_forward_traits.cuh>
#include <sm90/sm90_scores.cuh>
#include <sm90/sm90_shared_tile.cuh>
#include <sm90/sm90_softmax.cuh>
#include <sm90/sm90_wide_layout.cuh>

namespace fa::sm90 {

/// Constants and types of the Hopper forward for wide heads: those that the rooms of the Hopper forward ask for.
///
/// Config is a struct of constants: Element (f16 or bf16), kHeadDimQk, kHeadDimV, kTileM (64), kTileN (64), kStages,
/// kCausal, kPositiveScale, kPackGqa, kSplit; optionally kVarlen, kPageSize, kScheduled, kValueInKey
/// (common/switches.cuh) and a Variant without a mask function (common/variant.cuh).
template <class C>
struct WideTraits {
  using Config = C;
  using T = typename Config::Element;
  using Variant = kernel::VariantOf<Config>;
  using Params = ForwardParamsOf<Config>;

  static constexpr int kTileM = Config::kTileM;
  static constexpr int kTileN = Config::kTileN;
  static constexpr int kHeadDimQk = Config::kHeadDimQk;
  static constexpr int kHeadDimV = Config::kHeadDimV;
  static constexpr int kStages = Config::kStages;
  static constexpr int kQBuffers = 1;
  static constexpr int kConsumers = 2;
  static constexpr int kPSteps = kTileN / 16;
  static constexpr int kPieces = 1;
  static constexpr bool kVarlen = kernel::kVarlen<Config>;
  static constexpr int kPageSize = kernel::kPageSize<Config>;
  static constexpr bool kPaged = kPageSize != 0;
  static constexpr bool kRagged = kVarlen || kPaged;
  static constexpr bool kScheduled = kernel::kScheduled<Config>;
  static constexpr bool kWholeTiles = false;
  static constexpr bool kPostsPieces = false;  // beside work descriptors
  static constexpr bool kTwoPlaces = false, kFixedSplits = false, kShares = false;
  static constexpr bool kLeavesSplits = Config::kSplit;
  static constexpr int kSplitTiles = 1;
  // The two blocks of a cluster have neighbouring heads of the grid, which see the same keys: each copies half of them
  // for both.
  static constexpr bool kMulticast = kernel::kMulticast<Config>;
  static constexpr int kClusterBlocks = kMulticast ? 2 : 1;
  static constexpr bool kMergesInCluster = false, kInCluster = kMulticast;
  // Where products limit: the first consumer's next scores begin without a gap. With these variants ptxas would spill.
  static constexpr bool kQueuesScores = kMulticast && !Variant::kScore && !Variant::kLeftWindow;
  static constexpr bool kValueInKey = kernel::kValueInKey<Config>;
  static constexpr bool kWindowed = Variant::kLeftWindow || Variant::kChunked;
  static constexpr bool kWaves = kRagged && !kernel::kBounded<Config>;

  // What the Hopper forward may have, and this one has not.
  static constexpr bool kPingpong = false, kDropout = false, kLists = false, kKeepsFirst = false, kAffine = false,
                        kAffineProduct = false, kDistancePruning = false, kPartial = false, kOwnRanges = false,
                        kEndsAligned = false, kPostsFirstRow = false, kRotates = false, kExchange = false,
                        kDynamic = false, kLoadAhead = false, kNamesLast = false, kLengthSplits = false,
                        kKeepsPartials = false;
  static constexpr int kDropoutWarps = 0;

  static constexpr WideShape kShape = {
      .tile_n = kTileN, .d_qk = kHeadDimQk, .d_v = kHeadDimV, .stages = kStages, .value_in_key = kValueInKey};
  static constexpr WideLayout kLayout = wide_layout(kShape);
  static constexpr int kSharedBytes = kLayout.bytes;
  static constexpr int kThreads = kShape.threads();
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  static constexpr int kKSlabs = kShape.k_slabs();
  static constexpr int kHalfSlabs = kShape.half_slabs();  // of V, that a consumer multiplies with P
  static constexpr int kHalfColumns = kHalfSlabs * kSlabColumns;
  static constexpr int kUnits = kShape.units();
  // The slabs of K from which on the product S begins, and how many there are until those go on that are V too, or the
  // other half of K.
  static constexpr int kFirstSlab = kValueInKey ? 2 * kHalfSlabs : 0;
  static constexpr int kFirstSlabs = kValueInKey ? kKSlabs - kFirstSlab : kKSlabs / 2;
  // Of a consumer's columns of O, which are made, and whose V is released, one after the other.
  static constexpr int kOutputParts = kShape.output_parts();
  static constexpr int kPartSlabs = kHalfSlabs / kOutputParts;
  /// The slab of K whose products are number `number` of the scores: with V in K first those behind it.
  static FA_DEVICE constexpr int slab_of(int number) { return (kFirstSlab + number) % kKSlabs; }

  static_assert(kTileM == kWarpgroupRows && kTileN == 64, "both consumers have all rows of a query tile");
  static_assert(kHeadDimQk % 8 == 0 && kHeadDimV % 8 == 0, "head dims are multiples of 8");
  static_assert(kHalfColumns <= 256, "a half of O is the result of one wgmma");
  static_assert(kStages == 1 || kStages == 2);
  static_assert(!kValueInKey || (kStages == 2 && kKSlabs >= 2 * kHalfSlabs), "K stays until it has been V");
  static_assert(!kVarlen || !Config::kSplit, "packed queries are not split");
  static_assert(kPageSize < 0 || kPageSize % 8 == 0, "boxes of pages are whole rows of the swizzle");
  static_assert(!kPaged || !Variant::kChunked, "the first key of a chunk may be anywhere in a box");
  static_assert(!kScheduled || kPaged, "schedules are of calls over pages");
  static_assert(!kMulticast || kScheduled, "the blocks of a cluster have the same pieces");
  static_assert(!Variant::kMask && !kernel::kAccumulate<Config>, "left to other kernels");

  using QTile = SwizzledTile<kTileM, kHeadDimQk>;
  using KTile = SwizzledTile<kTileN, kHeadDimQk>;
  using VTile = SwizzledTile<kTileN, 2 * kHalfColumns>;
  using VHalf = SwizzledTile<kTileN, kHalfColumns>;
  static_assert(kLayout.q_bytes == QTile::kBytes && kLayout.k_bytes == KTile::kBytes);
  static_assert(kValueInKey || kLayout.v_bytes == VTile::kBytes);
  using SGemm = ptx::Wgmma<T, kTileN>;
  using OGemm = ptx::Wgmma<T, kHalfColumns / kOutputParts>;
  using S = float[kTileN / 2];
  using P = uint32_t[kPSteps][4];
  using O = float[kHalfColumns / 2];
  using OPart = float[kHalfColumns / 2 / kOutputParts];
  static FA_DEVICE OPart& part_of(O& o, int part) {
    return *reinterpret_cast<OPart*>(o + part * (kHalfColumns / 2 / kOutputParts));
  }
  using Rows = kernel::RowMap<Config::kPackGqa>;
  using Softmax = ExactSoftmax<false, 6>;  // O, of 512 columns, is multiplied by two warpgroups
  using KeyNumbers = AffineProduct<T, kTileN>;
  using Mask = kernel::KeepMask<kPSteps>;
  using Loaded = uint32_t[2][1];

  struct Nothing {};
  using Sequence = typename kernel::Either<kernel::Sequence, Nothing, kRagged>::type;
  static constexpr int kBoxRows = kPaged ? kernel::kRowsTogether<kPageSize, kTileN> : kTileN;
  static constexpr int kBoxes = kTileN / kBoxRows;
  struct InPages {
    int table_row;
    int first_read;
  };
  using Pages = typename kernel::Either<InPages, Nothing, kPaged>::type;

  struct Query {
    ForwardTile tile;
    KvRange range;
    int kv_head;
    int head_in_group;
    Sequence sequence;
    Pages pages;
  };
};

/// What all warps of a wide forward know: where things lie, who waits for whom, and which work there is.
template <class Config>
struct WideBlock : Scores<WideTraits<Config>> {
  using Traits = WideTraits<Config>;
  using Base = Scores<Traits>;
  using Variant = typename Traits::Variant;
  using Query = typename Traits::Query;
  using Rows = typename Traits::Rows;
  using Traits::kTileM, Traits::kTileN, Traits::kStages, Traits::kVarlen, Traits::kPaged, Traits::kRagged,
      Traits::kScheduled, Traits::kValueInKey, Traits::kWindowed, Traits::kKSlabs, Traits::kHalfSlabs, Traits::kUnits,
      Traits::kLayout, Traits::kShape, Traits::kMulticast, Traits::kClusterBlocks, Base::params, Base::shared,
      Base::rounds, Base::has_tile, Base::tile_index, Base::row_count, Base::has_rows, Base::lengths_of, Base::k_shared,
      Base::v_shared, Base::work_shared;
  using Piece = kernel::Piece;

  using Base::Base;

  static constexpr int kBarriers = 2 * kShape.landed() + kStages * kUnits;  // of K and V

  FA_DEVICE uint32_t barrier(int i) const { return shared + kLayout.mbarriers + kMbarrierBytes * i; }
  /// A slab of K, or behind those a half of V, of KV tile number i of the block's has landed; and the parity of that.
  FA_DEVICE uint32_t landed(int i, int part) const { return barrier(i % 2 * kShape.landed() + part); }
  static FA_DEVICE uint32_t parity_of(int i) { return i / 2 % 2; }
  /// A unit of a stage has been read: by the consumer that alone reads it, or that reads it last.
  FA_DEVICE uint32_t emptied(int stage, int unit) const { return barrier(2 * kShape.landed() + stage * kUnits + unit); }
  /// Q has landed, and a work descriptor lies beside it; all warps have read Q.
  FA_DEVICE uint32_t query_landed() const { return barrier(kBarriers); }
  FA_DEVICE uint32_t query_read() const { return barrier(kBarriers + 1); }
  /// A warp of consumer `half` has sent P: to the warp of the other one that has the same rows.
  FA_DEVICE uint32_t sent(int half, int warp) const { return barrier(kBarriers + 2 + 4 * half + warp); }

  /// The half of V that consumer `half` multiplies with P: [tile_n, kHalfColumns].
  FA_DEVICE uint32_t half_shared(int stage, int half) const {
    const uint32_t tile = kValueInKey ? k_shared(stage) : v_shared(stage);
    return tile + half * Traits::VHalf::kBytes;
  }
  /// 16 bytes of a thread of a consumer: four words of P of each 16 keys, behind them its rows' statistics.
  FA_DEVICE uint32_t exchanged(int chunk) const {
    const int thread = ptx::thread_index() % kWarpgroup;
    return shared + kLayout.exchange + (chunk * kWarpgroup + thread) * kernel::kChunkBytes;
  }

  /// This block's number in its cluster, and the part of the schedule that the cluster has.
  static FA_DEVICE int rank() {
    if constexpr (kMulticast) return ptx::cluster_rank();
    return 0;
  }
  static FA_DEVICE int part() { return ptx::block_index() / kClusterBlocks; }

  /// A warp has read a unit of a stage, which all blocks of the cluster copy to.
  static FA_DEVICE void release_unit(uint32_t barrier, int lane) {
    if constexpr (kMulticast) {
      if (lane < kClusterBlocks) ptx::mbarrier_arrive_remote(ptx::map_shared(barrier, lane));
    } else {
      if (lane == 0) ptx::mbarrier_arrive(barrier);
    }
  }

  FA_DEVICE void init_barriers() const {
    constexpr int kWarps = 4;  // of a consumer
    FA_UNROLL
    for (int i = 0; i < 2 * kShape.landed(); ++i) ptx::mbarrier_init(barrier(i), 1);
    FA_UNROLL
    for (int i = 0; i < kStages * kUnits; ++i) ptx::mbarrier_init(emptied(0, i), kClusterBlocks * kWarps);
    ptx::mbarrier_init(query_landed(), 1);
    ptx::mbarrier_init(query_read(), 2 * kWarps);
    FA_UNROLL
    for (int i = 0; i < 2 * kWarps; ++i) ptx::mbarrier_init(sent(0, i), 1);
    ptx::fence_mbarrier_init();
  }

  /// Has what blocks read one after the other until they know their first keys in the L2 cache, from which the keys of
  /// the call before have pushed it: the part's start, lengths and, a line each thread of all blocks, the block table.
  FA_DEVICE void prefetch_lists() const {
    constexpr int kLine = 128;
    const kernel::PagedParams& paged = params.paged;
    const kernel::WorkLists lists(paged);
    const int thread = ptx::thread_index();
    if (thread < 2) ptx::prefetch_global(lists.starts + part() + thread);
    if (thread == 2) ptx::prefetch_global(lists.head);
    const int64_t place = int64_t{thread} * ptx::block_count() + ptx::block_index();
    const auto prefetch = [&](const int32_t* words, int64_t count) {
      if (place * kLine < 4 * count) ptx::prefetch_global(words + place * (kLine / 4));
    };
    prefetch(params.sequences.used_kv, params.b);
    if constexpr (Traits::kPageSize > 0) prefetch(paged.table, paged.rows * paged.stride_row);
  }

  /// A query tile and what it sees. Called by whole warps.
  FA_DEVICE Query query_of_tile(const ForwardTile& tile) const {
    Query query;
    query.tile = tile;
    if constexpr (kPaged) {
      query.sequence = kernel::request_of<kVarlen>(params, tile.batch);
      // Splits of a request are parts of its length, which the GPU alone knows.
      if constexpr (Config::kSplit) query.sequence.splits = params.splits;
    } else if constexpr (kVarlen) {
      query.sequence = kernel::sequence_of(params, tile.batch);
    }
    const Rows rows{params.group, tile.head};
    const int first = tile.m_block * kTileM;
    const int end = row_count(query);
    const int last = (first + kTileM < end ? first + kTileM : end) - 1;
    query.range = this->visible(query, rows.position(first), rows.position(last));
    if constexpr (kPaged) {
      query.pages = {kernel::table_row_of(params.paged, tile.batch),
                     kernel::keys_begin<Variant>(params, query.sequence, rows.position(first))};
    }
    // With packed heads a tile has as many of a group as fit it, so that a KV head has several heads of the grid.
    const int sharing = kClusterBlocks * params.heads / params.h_kv;
    query.kv_head = tile.head / sharing;
    query.head_in_group = tile.head % sharing * (Config::kPackGqa ? params.group : 1);
    return query;
  }

  /// Calls `body(query, piece)` for all work of this block, in order. Called by whole warps.
  template <class Body>
  FA_DEVICE void for_each_work(const Body& body) const {
    if constexpr (kScheduled) {
      const kernel::WorkLists lists(params.paged);
      const int pieces = kernel::pieces_of(lists, part());
      FA_UNROLL_BY(1)
      for (int i = 0; i < pieces; ++i) {
        ForwardTile tile;
        const Piece piece = kernel::piece_of(lists, part(), i, tile);
        tile.head = kClusterBlocks * tile.head + rank();
        Query query = query_of_tile(tile);
        query.range = kernel::cut(query.range, piece);
        body(query, piece);
      }
    } else {
      const Rounds own = rounds();
      FA_UNROLL_BY(1)
      for (int round = own.begin; has_tile(own, round); ++round) {
        const Query query = query_of_tile(tile_of(tile_index(round)));
        if (has_rows(query)) body(query, Piece{0, Piece::kAll, 0, 0});
      }
    }
  }

  FA_DEVICE ForwardTile tile_of(int index) const {
    if constexpr (kVarlen) {
      return kernel::forward_tile_of_batch<kTileM, Config::kPackGqa>(params, index);
    } else {
      return kernel::forward_tile<Variant, Config::kCausal>(params, index);
    }
  }

  /// KV tiles of a query tile, or of a piece of one.
  static FA_DEVICE int tiles_of(const Query& query) {
    return query.range.end > query.range.begin ? query.range.end - query.range.begin : 0;
  }

  // Behind what a work descriptor of the Hopper forward says: the piece, and whether there is any work.
  static constexpr int kPieceWord = 16;

  FA_DEVICE void post_piece(int slot, const Query& query, const Piece& piece, bool more) const {
    this->post(slot, query);
    const uint32_t words = work_shared(slot) + 4 * kPieceWord;
    ptx::st_shared_chunk(
        words, {{static_cast<uint32_t>(piece.first_part), static_cast<uint32_t>(piece.last_part), more ? 1u : 0u, 0u}});
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_WIDE_TRAITS_CUH_
