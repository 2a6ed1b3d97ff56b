#ifndef FA_TEMPLATES_SM80_SM80_FORWARD_TRAITS_CUH_
#define FA_TEMPLATES_SM80_SM80_FORWARD_TRAITS_CUH_

#include <common/accumulate.cuh>
#include <common/constants.cuh>
#include <common/kept_keys.cuh>
#include <common/row_statistics.cuh>
#include <common/shared_tile.cuh>
#include <common/stored.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <sm80/sm80_fp8.cuh>
#include <sm80/sm80_latent.cuh>
#include <sm80/sm80_mma16.cuh>
#include <sm80/sm80_split_warps.cuh>
#include <sm80/sm80_tf32x3.cuh>
#include <sm80/sm80_u4.cuh>
#include <sm80/sm80_warp_group.cuh>
#include <sm80/sm80_warp_pair.cuh>

namespace fa::sm80 {

/// Whether 4-bit codes are multiplied where they stand (sm80_u4.cuh): compute capability 7.5 has no TF32 for offsets.
#ifdef FA_TURING
inline constexpr bool kCodesInPlace = false;
#else
inline constexpr bool kCodesInPlace = true;
#endif

template <class Config>
FA_DEVICE constexpr bool splits_warps() {
  if constexpr (requires { Config::kSplitWarps; }) return Config::kSplitWarps;
  return false;
}

/// What it is launched with.
template <class Config>
using ForwardLaunch =
    typename Either<ForwardFp8Params, StoredForwardParamsOf<Config>, sizeof(typename Config::Element) == 1>::type;

/// The constants of a forward, its tiles, and how warps share them.
template <class Config>
struct ForwardTraits {
  using Settings = Config;
  using T = typename Config::Element;
  using Variant = VariantOf<Config>;
  static constexpr bool kBytes = sizeof(T) == 1;  // products are of 8-bit floats (sm80_fp8.cuh)
  using Output = typename OutputElement<Config, kBytes>::type;
  using Params = ForwardLaunch<Config>;
  using Gemm = WarpGemm<T>;
  using KElement = KeyElement<Config>;
  using VElement = ValueElement<Config>;

  static constexpr int kTileM = Config::kTileM;
  static constexpr int kTileN = Config::kTileN;
  static constexpr int kHeadDimQk = Config::kHeadDimQk;
  static constexpr int kHeadDimV = Config::kHeadDimV;
  static constexpr int kStages = Config::kStages;
  static constexpr bool kEarlyV = sizeof(T) <= 2;  // the first V with the first K; fp32 has no register left for it
  static constexpr int kThreads = Config::kWarps * kWarpSize;
  static constexpr bool kSplitWarps = splits_warps<Config>();
  static constexpr int kWarpsN = kSplitWarps ? Config::kWarps : kernel::kWarpsN<Config>;
  static constexpr int kWarpsM = Config::kWarps / kWarpsN;
  static constexpr bool kHalfTile = kSplitWarps && kTileM == 8;  // of whose m tile the upper half is not there
  static constexpr int kHalves = kHalfTile ? 1 : 2;              // of rows of an m tile
  static constexpr int kWarpRows = kHalfTile ? 16 : kTileM / kWarpsM;
  static constexpr int kWarpKeys = kTileN / kWarpsN;
  static constexpr int kMTiles = kWarpRows / 16;
  // Of warps that share rows, each with its own columns of O.
  static constexpr bool kGroups = !kSplitWarps && (kWarpsN > 2 || (kWarpsN == 2 && kMTiles == 1));
  static constexpr bool kPairs = !kSplitWarps && kWarpsN == 2 && !kGroups;
  // Of O, that a warp stores.
  static constexpr int kOutColumns = kGroups ? ceil_div(kHeadDimV, 8 * kWarpsN) * 8 : kHeadDimV / kWarpsN;
  static constexpr int kWarpColumns = kSplitWarps ? kHeadDimV : kOutColumns;  // and has in the main loop
  static constexpr int kNTiles = kWarpKeys / 8;
  using Softmax = typename Either<OnlineSoftmax<kMTiles, false, 8>, SoftmaxOf<Config, kMTiles, kHalves>, kBytes>::type;
  static constexpr bool kStatistics = kernel::kMaxLogit<Config> || kernel::kEntropy<Config>;
  static constexpr bool kUnevenColumns = kGroups && kWarpColumns * kWarpsN != kHeadDimV;
  static constexpr int kOTiles = kWarpColumns / 8;
  static constexpr int kOutTiles = kOutColumns / 8;
  static constexpr bool kVarlen = kernel::kVarlen<Config>;
  static constexpr bool kDropout = kernel::kDropout<Config>;
  static constexpr bool kAccumulate = kernel::kAccumulate<Config> && !Config::kSplit;  // splits join later
  static constexpr int kPageSize = kernel::kPageSize<Config>;
  static constexpr bool kPaged = kPageSize != 0;
  static constexpr bool kContiguous = kPageSize < 0;  // its rows have all positions of a request
  static constexpr bool kOwnParts = kernel::kOwnParts<Config>;
  static constexpr bool kScheduled = kernel::kScheduled<Config>;
  static constexpr bool kBounded = kernel::kBounded<Config>;  // blocks go on from tile to tile
  static constexpr bool kPieces = kScheduled || kOwnParts;    // of query tiles, one after the other
  static constexpr bool kStoredKeys = kernel::kStoredKeys<Config>;
  static constexpr bool kStoredValues = kernel::kStoredValues<Config>;
  static constexpr bool kScalesOfKeys = kStoredKeys || scales_keys<Config>();  // each has one, for its row of K
  static constexpr bool kScalesOfValues = kStoredValues || scales_values<Config>();
  static constexpr bool kSingleLevel = sums_at_one_level<Config>();
  static constexpr bool kStored = kStoredKeys || kStoredValues;
  static constexpr bool kBesideHeads = kScheduled && kStored && !kernel::kValueInKey<Config>;  // parts in the grid
  static constexpr bool kHalfKeys = kernel::kHalfKeys<Config>;
  static constexpr bool kHalfValues = kernel::kHalfValues<Config>;
  using ValueProduct = typename Either<kernel::f16, kernel::bf16, kHalfValues>::type;  // of 8-bit V
  static constexpr bool kU4Keys = kernel::kIsU4<KElement>;
  static constexpr bool kU4Values = kernel::kIsU4<VElement>;
  static constexpr bool kHasCodesInPlace =
      kSplitWarps && kMTiles == 1 && kCodesInPlace && kHeadDimQk <= 128 && kHeadDimV <= 128;  // else registers spill
  static constexpr bool kKeysInPlace = kU4Keys && kHasCodesInPlace;
  static constexpr bool kValuesInPlace = kU4Values && kHasCodesInPlace;
  // Of O in the main loop, which half an m tile has transposed; and what offsets of V add to it.
  static constexpr int kSumTiles = kOTiles / (kHalfTile ? 2 : 1) + (kValuesInPlace ? 1 : 0);
  using KeyProduct = typename Either<kernel::f16, T, kHalfKeys || kKeysInPlace>::type;
  static constexpr bool kHalfQueries = kKeysInPlace || (kHalfKeys && !kernel::is_half(T{}));  // Q becomes f16
  static constexpr int kKeyScales = kernel::scale_words<KElement>(kHeadDimQk);  // words of a key, where there are any
  static constexpr int kValueScales = kernel::scale_words<VElement>(kHeadDimV);
  // Warps copy the keys that they have in a tile, 16 bytes at a time, as rows of stored K and V allow.
  static constexpr bool kOwnKeys = kSplitWarps && kStored && (Config::kAligned || (kStoredKeys && kStoredValues)) &&
                                   kStages > 1 && (kWarpKeys == 16 || kWarpKeys == 32);
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
  static_assert(kHalfTile || (kTileM == kMTiles * 16 * kWarpsM && kMTiles >= 1), "a warp owns a multiple of 16 rows");
  static_assert(!kHalfTile || kOwnKeys, "half of an m tile is for K and V of fewer bits");
  static_assert(kWarpKeys % 16 == 0 || (kGroups && kWarpKeys == 8), "keys are consumed 16 at a time");
  static_assert(!kPairs || (kMTiles == 2 && sizeof(T) == 2 && !Config::kQInRegisters), "pairs share 32 rows");
  static_assert(!kGroups || !Config::kQInRegisters, "groups keep Q in shared memory");
  static_assert(!kDropout || kWarpKeys % 16 == 0, "bits are drawn for 16 keys");
  static_assert(!kOwnKeys || kPaged || !kVarlen, "packed keys are of the queries' type");
  static_assert(!(kHalfValues || kValuesInPlace) || !kFixedSplits, "O of fixed splits has no factors");
  static_assert(!kernel::kValueInKey<Config> || (kGroups && kStages > 1), "K stays until it has been V");
  static_assert(!kernel::kLatentRows<Config> || kHeadDimQk == 576, "latent rows are of one size");
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
  static_assert(!kStatistics || (!Config::kSplit && !kPieces && !kFixedSplits && !kSplitWarps && !kAccumulate),
                "statistics are of rows that one block has alone");
  static_assert(!kernel::kAccumulate<Config> || !Variant::kSink, "the state has the sink");
  static_assert(!kBytes || (kWarpsN == 1 && !kDropout && !kPieces && !kFixedSplits && !kStatistics && !kAccumulate &&
                            kWarpKeys % 32 == 0 && kHeadDimQk % 16 == 0),
                "what 8-bit floats have");
  static_assert(!kSingleLevel || !kScalesOfValues, "a KV tile's part of O is multiplied by itself");

  using QTile = SharedTile<T, kHalfTile ? 16 : kTileM, kHeadDimQk>;
  using OTile = SharedTile<T, kHalfTile ? 16 : kTileM, kHeadDimV>;
  static constexpr bool kLatentRows = kernel::kLatentRows<Config>;
  using WideElement = typename Either<T, KElement, kLatentRows>::type;
  using KTile = SharedTile<WideElement, kTileN, kernel::row_elements<WideElement>(kHeadDimQk)>;
  static constexpr bool kValueInKey = kernel::kValueInKey<Config>;  // V is the first columns of K
  using VTile = typename Either<KTile, SharedTile<VElement, kTileN, kernel::row_elements<VElement>(kHeadDimV)>,
                                kValueInKey>::type;

  // O is staged where Q was: the rows of a warp in both layouts start at the same multiple of the larger pitch.
  // Of 8-bit floats it is not.
  static constexpr int kWarpQBytes =
      kWarpRows * (kBytes || QTile::kPitch > OTile::kPitch ? QTile::kPitch : OTile::kPitch);
  static constexpr int kQBytes = kWarpsM * kWarpQBytes;
  static constexpr int kTileBytes = kQBytes + kStages * (KTile::kBytes + (kValueInKey ? 0 : VTile::kBytes));
  using Pair = WarpPair<Config::kWarps, kNTiles>;
  using Group = WarpGroup<T, Config::kWarps, kWarpsN, kMTiles, kNTiles>;
  static FA_DEVICE constexpr int exchange_bytes() {
    if constexpr (kGroups) return Group::kBytes;
    return kPairs ? Pair::kBytes : 0;
  }
  static constexpr int kScaleBytes = kScalesOfKeys || kScalesOfValues ? kStages * kTileN * (kKeyScales + kValueScales) *
                                                                            static_cast<int>(sizeof(float))
                                                                      : 0;
  static constexpr int kLoopBytes = kTileBytes + exchange_bytes() + kScaleBytes;
  using Split = SplitWarps<kSplitWarps ? Config::kWarps : 1, kTileM, kHeadDimV>;
  static constexpr int kJoinBytes = kSplitWarps ? kQBytes + Split::kBytes : 0;
  static constexpr int kSharedBytes = kLoopBytes > kJoinBytes ? kLoopBytes : kJoinBytes;

  using QWarpTile = SharedTile<T, kWarpRows, kHeadDimQk>;
  using OWarpTile = SharedTile<T, kWarpRows, kHeadDimV>;
  using QueryRows = HalfRows<T, QWarpTile, kHeadDimQk, kKeysInPlace, kHalves>;
  struct Nothing {};
  using QuerySums = typename Either<GroupSums<T, KElement, kHeadDimQk>, Nothing, kKeysInPlace>::type;
  using ValueLift = typename Either<ScaleLift<T, VElement, kHeadDimV>, Nothing, kValuesInPlace>::type;
  using QCopy = TileCopy<QWarpTile, T, kWarpRows, kWarpsN * kWarpSize, Config::kAligned>;
  using Latent = LatentTile<T, KTile, kTileN, kThreads>;
  using LandingTile = typename Either<Latent, KTile, kLatentRows>::type;
  using KCopy = TileCopy<LandingTile, KElement, kTileN, kThreads, Config::kAligned || kStoredKeys || kLatentRows>;
  using VCopy = TileCopy<VTile, VElement, kTileN, kThreads, Config::kAligned || kStoredValues>;
};

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_FORWARD_TRAITS_CUH_
