#ifndef FA_TEMPLATES_SM90_SM90_FORWARD_TRAITS_CUH_
#define FA_TEMPLATES_SM90_SM90_FORWARD_TRAITS_CUH_

#include <common/constants.cuh>
#include <common/dropout.cuh>
#include <common/forward_schedule.cuh>
#include <common/kept_keys.cuh>
#include <common/mask.cuh>
#include <common/paged.cuh>
#include <common/row_statistics.cuh>
#include <common/sequences.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <ptx/wgmma.cuh>
#include <sm90/sm90_affine.cuh>
#include <sm90/sm90_forward_layout.cuh>
#include <sm90/sm90_forward_params.cuh>
#include <sm90/sm90_pieces.cuh>
#include <sm90/sm90_placed_params.cuh>
#include <sm90/sm90_shared_tile.cuh>
#include <sm90/sm90_softmax.cuh>

namespace fa::sm90 {

using kernel::ForwardTile;
using kernel::KvRange;
using kernel::kWarpSize;

template <class Config>
using ForwardParamsOf = typename kernel::Either<kernel::Sm90PlacedForward<kernel::ForwardParamsOf<Config>>,
                                                kernel::Sm90ForwardParamsWith<kernel::ForwardParamsOf<Config>>,
                                                kernel::kPlaceInMemory<Config>>::type;

/// Constants and types of a Hopper forward.
///
/// Config is a struct of constants: Element (f16 or bf16), kHeadDimQk, kHeadDimV, kTileM, kTileN, kStages, kQBuffers,
/// kCausal, kPositiveScale, kTakeTurns, kSoftmaxChunks, kPackGqa, kSplit; optionally kSplitBlocks, kVarlen, kDropout,
/// kSkipsHidden, kOwnEnds, kDynamic, kAffineProduct, kAffineReach, kExactMax, kPageSize, kScheduled,
/// kOwnParts, kWideBoxes (common/switches.cuh) and a Variant (common/variant.cuh).
template <class C>
struct ForwardTraits {
  using Config = C;
  using T = typename Config::Element;
  using Variant = kernel::VariantOf<Config>;
  using Params = ForwardParamsOf<Config>;

  static constexpr int kTileM = Config::kTileM;
  static constexpr int kTileN = Config::kTileN;
  static constexpr int kHeadDimQk = Config::kHeadDimQk;
  static constexpr int kHeadDimV = Config::kHeadDimV;
  static constexpr int kStages = Config::kStages;
  static constexpr int kQBuffers = Config::kQBuffers;
  static constexpr int kConsumers = kTileM / 64;
  static constexpr int kSSteps = kernel::ceil_div(kHeadDimQk, 16);
  static constexpr int kPSteps = kTileN / 16;
  static constexpr int kPieces = Config::kSoftmaxChunks;
  static constexpr bool kPingpong = Config::kTakeTurns;

  static constexpr bool kVarlen = kernel::kVarlen<Config>;
  static constexpr int kPageSize = kernel::kPageSize<Config>;
  static constexpr bool kPaged = kPageSize != 0;
  static constexpr bool kRagged = kVarlen || kPaged;  // work descriptors carry the lengths of a batch entry
  // A block takes its part of a schedule, or finds it by itself: pieces of query tiles, whose work descriptors say
  // which parts share them.
  static constexpr bool kPostsPieces = kernel::kScheduled<Config> || kernel::kOwnParts<Config>;
  static_assert(!kernel::kScheduled<Config> || !kernel::kOwnParts<Config>, "one part a block");
  // Splits of a request are parts of its length, which the GPU alone knows.
  static constexpr bool kFewRowsInPages =
      kPostsPieces || (kPaged && Config::kSplit) || (kRagged && kernel::kSplitKeys<Config> > 0);
  // Those of a query tile may be the blocks of a cluster, which merge what they have: each has one tile, and ends with
  // it.
  static constexpr int kSplitBlocks = kernel::kSplitBlocks<Config>;
  static constexpr bool kMergesInCluster = kSplitBlocks > 1;
  static constexpr bool kInCluster = kMergesInCluster;
  // The softmax of as many keys is formed alone (sm90_fixed_splits.cuh). What is folded stays in the registers of a
  // block that has a query tile's keys alone, or else each block leaves partial results of its splits.
  static constexpr int kSplitKeys = kernel::kSplitKeys<Config>;
  static constexpr bool kFixedSplits = kSplitKeys > 0;
  static constexpr int kSplitTiles = kFixedSplits ? kSplitKeys / Config::kTileN : 1;
  static constexpr bool kShares = kFixedSplits && Config::kSplit;
  // O of a split is folded while the next one's second product S is under way: its weights are known by then.
  static constexpr bool kFoldsOverlapped = kFixedSplits && !kShares;
  static constexpr bool kLeavesSplits = Config::kSplit && !kFixedSplits;  // for another kernel, which merges them
  // As many of them as follow from a request's length, and for its bits from nothing else of the call.
  static constexpr bool kLengthSplits = kLeavesSplits && kPaged && kernel::kLengthKeys<Config> > 0;
  // A block takes query tiles whole where it can, and folds their splits as the merge does (sm90_whole_tiles.cuh).
  static constexpr bool kWholeTiles = kernel::kWholeTiles<Config>;
  static_assert(!kWholeTiles || (kLeavesSplits && kernel::kLengthKeys<Config> > 0 && kConsumers == 1),
                "splits of few rows, which follow from a length");
  // Each of many splits leaves a partial result, which the L2 cache is to keep.
  static constexpr bool kKeepsPartials =
      kConsumers == 1 && (kShares || (kLeavesSplits && kernel::kLengthKeys<Config> > 0));
  // Work descriptors lie in two places in turn, so that one stays until its O is stored.
  static constexpr bool kTwoPlaces = kPostsPieces || kShares;
  static_assert(!kShares || Config::kQBuffers == 1, "a descriptor stays as long as the next query tile lasts");
  static_assert(!kMergesInCluster || (Config::kSplit && kConsumers == 1 && kQBuffers == 1),
                "the splits of a tile of few rows");
  static constexpr bool kDropout = kernel::kDropout<Config>;
  // Other warps make its random bits: consumers whose product reads P from registers would do so at half speed.
  static_assert(!kDropout || kConsumers < 3, "three warpgroups leave no registers to dropout RNG warps");
  static constexpr bool kWindowed = Variant::kLeftWindow || Variant::kChunked;  // keys are hidden before others too
  static constexpr bool kLists = Variant::kMask && !kRagged;                    // of tiles that are not empty
  static constexpr bool kKeepsFirst = !kLists && kernel::kKeepsFirst<Variant>;  // tiles before some need no function
  // A block's first query tile is that of its index, the next comes from a counter that all blocks share.
  static constexpr bool kDynamic = kernel::kDynamic<Config>;
  static constexpr bool kWaves = (kRagged || kLists) && !kernel::kBounded<Config> && !kDynamic && !kLengthSplits;
  // A row may see keys of a tile, but not the first ones.
  static constexpr bool kAffine = Variant::kAffine && Config::kPositiveScale;
  // The tensor cores add what an affine score function grows by from key to key, but for tiles of two signs of the
  // distance, and steep functions.
  static constexpr bool kAffineProduct = kernel::kAffineProduct<Config>;
  static_assert(!kAffineProduct || kAffine, "only affine functions are a step of the product");

  static constexpr ForwardShape kShape = {.tile_m = kTileM,
                                          .tile_n = kTileN,
                                          .d_qk = kHeadDimQk,
                                          .d_v = kHeadDimV,
                                          .stages = kStages,
                                          .q_buffers = kQBuffers,
                                          .pack_gqa = Config::kPackGqa,
                                          .split = Config::kSplit,
                                          .varlen = kRagged,
                                          .dropout = kDropout,
                                          .affine_product = kAffineProduct,
                                          .dynamic = kDynamic,
                                          .windowed = kWindowed,
                                          .masked = Variant::kMask,
                                          .scheduled = kPostsPieces,
                                          .paired = kSplitBlocks == 2,
                                          .folds = kFixedSplits && !Config::kSplit,
                                          .clears = kernel::kWideBoxes<Config>,
                                          .whole_tiles = kWholeTiles};
  static constexpr int kThreads = kShape.threads();
  static constexpr bool kDropoutWarpgroup = kShape.has_dropout_warpgroup();
  static constexpr bool kEmptyWarp = kShape.has_empty_warp();

  using KeyNumbers = AffineProduct<T, kTileN>;
  // Distance pruning: KV tiles are left out whose keys such a function makes lose.
  static constexpr bool kDistancePruning = kernel::kAffineReach<Config>;
  static_assert(!kDistancePruning ||
                    (kAffine && !kRagged && !kWindowed && !Variant::kMask && !Config::kPackGqa && !Config::kSplit),
                "the best key of a row is visible, and the rows of a tile are of one head");
  static constexpr bool kNonContiguous = kWindowed || Variant::kMask || (Variant::kScore && !kAffine);
  // Warps skip the pieces of a tile that causality hides from all of their rows. The test costs more than it saves
  // where few tiles of many are on the diagonal.
  static constexpr bool kPartial = kernel::kSkipsHidden<Config>;
  static_assert(!kPartial || (Config::kCausal && !kWindowed && !Variant::kMask && !kDropout),
                "pieces are hidden by causality alone");
  // A warpgroup skips over the KV tiles that causality hides from all of its rows, and over all but one where it has
  // no rows: it lets the others have its turns.
  static constexpr bool kOwnRanges = kernel::kOwnEnds<Config>;
  static_assert(!kOwnRanges || (!Config::kSplit && !kWindowed && !Variant::kMask && !kDropout),
                "tiles are hidden by causality alone");
  // Query tiles that are not full are cheap then. Under causality it is the first one of a head, which sees the fewest
  // keys: whole warps of it have no rows.
  static constexpr bool kEndsAligned = kOwnRanges && Config::kCausal && !Config::kPackGqa;
  // Where that depends on the batch entry, the work descriptor has the tile's first row, not its number.
  static constexpr bool kPostsFirstRow = kEndsAligned && kRagged;
  // Else the last one. From pair of rounds to pair of rounds it is another block's.
  static constexpr bool kRotates = kOwnRanges && !Config::kCausal && !kRagged;
  // Without ping-pong scheduling a warpgroup that skips KV tiles runs ahead of the others, as far as buffers go. From
  // query tile to query tile first and last rows are exchanged, so that none stays ahead.
  static constexpr bool kExchange = kOwnRanges && !kPingpong;
  static_assert(!kExchange || kQBuffers == 2, "the Q buffer says which rows are whose");
  static_assert(!kDynamic || ((kRagged || !kEmptyWarp) && !kDropout && !kPostsPieces && !Config::kSplit),
                "rounds are known to all warps there");
  // Of few rows the start and the end are much of a block's time. Each role waits by itself for what earlier kernels
  // write, with all behind it that needs none of that.
  static constexpr bool kRolesWait =
      kConsumers == 1 && (kLeavesSplits || kPostsPieces || kShares) && !kDropout && !kAffineProduct;
  // Which query tiles there are, and what they see, follows from the launch parameters.
  static constexpr bool kKnownAhead = !kRagged && !kLists && !kKeepsFirst;
  // A work descriptor says whether the block has another one.
  static constexpr bool kNamesLast = kRolesWait && kLeavesSplits;
  static constexpr bool kRowsAhead = kNamesLast && kKnownAhead && !kWholeTiles;
  // The splits of a request are parts of its length. The warps that load find their tile together, ahead of the wait,
  // by the length that memory holds.
  static constexpr bool kWalksTogether = kNamesLast && kPaged && !kLengthSplits && !kMergesInCluster;
  static_assert(!kWholeTiles || kNamesLast, "descriptors of splits say what becomes of them");
  // P is relative to the exact maximum of a row's scores. Most KV tiles raise one then: O is multiplied overlapped with
  // the next product S.
  static constexpr bool kExactMax = kernel::kExactMax<Config>;
  static_assert(!kExactMax || (!kPartial && !kAffine), "scores are searched as they come from the product");
  // One consumer waits for its own products and exponentials. Two blocks a multiprocessor do so in turn.
  static constexpr bool kTwoBlocks = kernel::kTwoBlocks<Config>;
  static_assert(!kTwoBlocks || (kConsumers == 1 && (!kEmptyWarp || kFewRowsInPages) && !kDropout),
                "a producer of 40 registers, or of 56 to look for keys");
  // What the launch gives every thread, redistributed: for a thread of each warpgroup together,
  static constexpr int kLaunchRegisters = 65536 / (kTwoBlocks ? 2 : 1) / kThreads / 8 * 8 * (kThreads / kWarpgroup);
  static constexpr int kLoneProducerRegisters = kEmptyWarp ? 96 : 56;  // next to one consumer
  static constexpr int kDropoutRegisters = kConsumers == 1      ? 96
                                           : !kDropoutWarpgroup ? 72
                                           : kLists             ? 56
                                           : kHeadDimV <= 96    ? 80
                                                                : 48;
  static constexpr int kLoaderRegisters = kTwoBlocks                  ? kFewRowsInPages ? 56 : 40
                                          : kConsumers == 1           ? kLoneProducerRegisters
                                          : kThreads < 4 * kWarpgroup ? 40
                                          : kDropout && kLists        ? 40
                                                                      : 32;
  static constexpr int kProducerRegisters = kDropout && !kDropoutWarpgroup ? kDropoutRegisters : kLoaderRegisters;
  static constexpr int kOtherRegisters = kProducerRegisters + (kDropoutWarpgroup ? kDropoutRegisters : 0);
  static constexpr int kConsumerRegisters =
      kConsumers == 1 && !kTwoBlocks ? 256 : (kLaunchRegisters - kOtherRegisters) / kConsumers / 8 * 8;

  static_assert(kTileM % 64 == 0 && kConsumers >= 1 && kConsumers <= 4, "64 query rows a warpgroup");
  static_assert(kTileN % 16 == 0 && kTileN <= 256, "keys are consumed 16 at a time");
  static_assert(kHeadDimQk % 8 == 0 && kHeadDimV % 8 == 0, "head dims are multiples of 8");
  static_assert(kStages >= 2, "K runs a tile ahead of V");
  static_assert(!kVarlen || !kLeavesSplits, "packed batches are not split");
  static_assert(!kPaged || !kDropout, "no dropout over pages");
  static_assert(kPageSize < 0 || kPageSize % 8 == 0, "boxes of pages are whole rows of the swizzle");
  static_assert(!kPaged || !Variant::kChunked, "the first key of a chunk may be anywhere in a box");
  static_assert(!kMergesInCluster || !kDropout, "what is merged is the result");
  static_assert(!kPostsPieces || (kPaged && kConsumers == 1 && kQBuffers == 1 && !Config::kSplit && !kOwnRanges),
                "schedules are of calls over pages, for tiles of few rows");

  using QTile = SwizzledTile<kTileM, kHeadDimQk>;
  // A copy out of pages brings all columns of its rows. Nothing in its map ends with the last key: what lies behind is
  // cleared in V, and masked in S.
  static constexpr bool kWideBoxes = kernel::kWideBoxes<Config>;
  static_assert(!kWideBoxes || (kPageSize > 0 && !kWindowed), "boxes of pages from their first row");
  static_assert(!kWideBoxes || (kHeadDimQk % kSlabColumns == 0 && kHeadDimV % kSlabColumns == 0),
                "no column of a slab lies outside of the map");
  using KTile = SwizzledTile<kTileN, kHeadDimQk, kWideBoxes>;
  using VTile = SwizzledTile<kTileN, kHeadDimV, kWideBoxes>;
  using SGemm = ptx::Wgmma<T, kTileN>;
  using OGemm = ptx::Wgmma<T, kHeadDimV>;
  using S = float[kTileN / 2];
  using P = uint32_t[kPSteps][4];
  using O = float[kHeadDimV / 2];
  using Rows = kernel::RowMap<Config::kPackGqa>;

  using Mask = kernel::KeepMask<kPSteps>;
  /// What is dropped of a KV tile's P.
  struct DroppedPairs {
    Mask mask;
    P pairs;  // P before
    P kept;   // what `mask` says, all ones in the halves
  };
  static constexpr int kDropoutWarps = kShape.dropout_warps();  // the last of their warpgroup

  struct Nothing {};
  using Dropped = typename kernel::Either<DroppedPairs, Nothing, kDropout>::type;

  // Where they also allow, a captured tensor's part of the tile is read before the product S is issued.
  static constexpr int kFragmentRegisters = kTileN / 2 + kTileN / 4 + kHeadDimV / 2;
  static constexpr bool kLoadAhead =
      kernel::kLoadsAhead<Variant> && kConsumers < 3 && kFragmentRegisters + kTileN / 4 * (kDropout ? 2 : 1) <= 192;
  using Loaded = uint32_t[2][kLoadAhead ? kTileN / 8 : 1];  // of each row two neighbouring keys of each n8 tile

  // Else sums show where a score has passed the offset of its row.
  static constexpr bool kSummed = !kExactMax;
  using Softmax = typename kernel::Either<SummedSoftmax<kAffine, kernel::kEntropy<Config>, kFixedSplits>,
                                          ExactSoftmax<kernel::kEntropy<Config>>, kSummed>::type;
  static constexpr bool kStatistics = kernel::kMaxLogit<Config> || kernel::kEntropy<Config>;
  static_assert(!kStatistics || !Config::kSplit, "statistics are of rows that one block has alone");
  static_assert(!kernel::kMaxLogit<Config> || kExactMax, "and whose maxima it knows");
  static_assert(!kFixedSplits || (kSplitKeys % kTileN == 0 && kSummed && !kNonContiguous && !kAffine && !kDropout &&
                                  !kStatistics && !kPostsPieces && !kMergesInCluster && !kExchange),
                "fixed splits are of plain rows, and the bits of each are its own");
  // Where no key is hidden a function of the score alone is overlapped with the exponentials: its approximations and
  // they fill each other's gaps.
  static constexpr bool kScoreOverlapped = Variant::kScoreAlone && kSummed && !Variant::kMask && !kWindowed;

  static constexpr bool kPlain =
      !Config::kCausal && !kWindowed && !kRagged && !kDropout && !Variant::kScore && !Variant::kMask;
  static constexpr int kFreeRegisters = kConsumerRegisters - kFragmentRegisters;
  static constexpr bool kRegistersLeft = kConsumers != 3 && !kDropout && kFreeRegisters >= (kPlain ? 32 : 33);

  // What ends a query tile's rows is overlapped with the next one's first product. Of more warpgroups others have work
  // then.
  static constexpr bool kFinishOverlapped =
      kFixedSplits || kWholeTiles || (kRegistersLeft && kConsumers < 3 && kQBuffers == 2);

  static constexpr SharedLayout kLayout = shared_layout(kShape);
  static constexpr int kSharedBytes = kLayout.bytes;

  static constexpr bool kStageO = kShape.stages_o();
  using OTile = SwizzledTile<kTileM, kHeadDimV>;
  static constexpr bool kKeepsRowBits = kShape.keeps_row_bits();
  static constexpr int kRowBlocks = kernel::ceil_div(kTileM / 32, kDropoutWarps);  // of 32 rows, of a dropout RNG warp
  static constexpr int kBlocksTogether = kRowBlocks % 2 == 0 ? 2 : 1;
  static_assert(kLayout.k_bytes == KTile::kBytes && kLayout.v_bytes == VTile::kBytes);
  static_assert(kLayout.q_bytes >= QTile::kBytes && (!kStageO || kLayout.q_bytes >= OTile::kBytes));
  static_assert(kLayout.work >= kLayout.mbarriers + kMbarrierBytes * kShape.mbarriers(), "the barriers fit");
  static_assert(kLayout.listed >= kLayout.work + kQBuffers * kLayout.work_bytes);
  static_assert(kLayout.seed >= kLayout.listed + 4 * kStages, "a KV tile for each stage");
  static_assert(kLayout.mask_mbarriers == kLayout.seed + kernel::Dropout::kSharedBytes);
  static_assert(kLayout.mask_bytes == kTileM / 16 * kWarpSize * Mask::kBytes);
  static_assert(kLayout.row_bits == kLayout.key_numbers + (kAffineProduct ? KeyNumbers::kBytes : 0));
  static_assert(kLayout.column_bits == kLayout.row_bits + (kKeepsRowBits ? kTileM * kernel::PhiloxPart::kBytes : 0));
  static_assert(kLayout.column_bits_bytes == kTileN / 4 * kernel::PhiloxPart::kBytes);

  using Sequence = typename kernel::Either<kernel::Sequence, Nothing, kRagged>::type;

  // A KV tile comes out of pages in boxes, each by a lane of the warp that loads.
  static constexpr int kBoxRows = kPaged ? kernel::kRowsTogether<kPageSize, kTileN> : kTileN;
  static constexpr int kBoxes = kTileN / kBoxRows;
  // The table is read a KV tile ahead: of few rows its latency is as long as what a block has for a tile. Loaders of
  // more consumers have no register for it.
  static constexpr bool kPagesAhead = kPaged && kConsumers == 1;
  static_assert(kBoxes <= kWarpSize, "a lane a box");
  /// Where a query tile's keys are, for the warps that load them.
  struct InPages {
    int table_row;   // the request's row of the block table
    int first_read;  // keys before it are hidden from all rows
  };
  using Pages = typename kernel::Either<InPages, Nothing, kPaged>::type;
  using Sharing = typename kernel::Either<SharingParts, Nothing, kPostsPieces>::type;

  /// What is known of a query tile of few rows before its copies may start.
  struct KnownAhead {
    bool last = false;  // of its block
    int q_row = 0;      // where its rows of Q begin; not of those that were posted
  };
  using Ahead = typename kernel::Either<KnownAhead, Nothing, kNamesLast>::type;

  using Whole = typename kernel::Either<bool, Nothing, kWholeTiles>::type;

  /// A query tile and the KV tiles it sees.
  struct Query {
    ForwardTile tile;
    KvRange range;  // with tile lists: of places in the list
    int kv_head;
    int head_in_group;  // 0 when query heads are packed
    Sequence sequence;  // of a packed batch, or over pages
    Pages pages;        // not of those that were posted
    Sharing sharing = {};
    Ahead ahead = {};
    Whole whole = {};   // all splits are of this block; `split` is the last of them
    int first_row = 0;  // with kPostsFirstRow
  };
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_FORWARD_TRAITS_CUH_
