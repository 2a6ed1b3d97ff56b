#ifndef FA_TEMPLATES_SM90_SM90_BACKWARD_TRAITS_CUH_
#define FA_TEMPLATES_SM90_SM90_BACKWARD_TRAITS_CUH_

#include <common/backward_schedule.cuh>
#include <common/constants.cuh>
#include <common/dropout.cuh>
#include <common/sequences.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <common/variant_backward.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/wgmma.cuh>
#include <sm90/sm90_backward_cluster.cuh>
#include <sm90/sm90_backward_layout.cuh>
#include <sm90/sm90_backward_params.cuh>
#include <sm90/sm90_backward_store.cuh>
#include <sm90/sm90_backward_turns.cuh>
#include <sm90/sm90_finite_keys.cuh>
#include <sm90/sm90_placed_params.cuh>
#include <sm90/sm90_shared_tile.cuh>

namespace fa::sm90 {

using kernel::BackwardTile;
using kernel::kWarpSize;
using kernel::QuerySteps;

template <class Config>
using LaunchedParamsOf = typename kernel::Either<kernel::Sm90BackwardVariantParams, kernel::Sm90BackwardParams,
                                                 kernel::kHasVariant<Config>>::type;
template <class Config>
using AllParamsOf = typename kernel::Either<kernel::Sm90PlacedBackward<kernel::BackwardParamsOf<Config>>,
                                            LaunchedParamsOf<Config>, kernel::kPlaceInMemory<Config>>::type;

/// The constants of a backward, its tiles and products, and where things lie in shared memory.
template <class Config>
struct BackwardTraits {
  using T = typename Config::Element;
  using Variant = kernel::VariantOf<Config>;
  using AllParams = AllParamsOf<Config>;
  using Params = kernel::BackwardParamsOf<Config>;
  using Lengths = kernel::BatchEntry<kernel::kVarlen<Config>, kernel::BackwardParams>;

  static constexpr int kTileM = Config::kTileM;
  static constexpr int kTileN = Config::kTileN;
  static constexpr int kHeadDimQk = Config::kHeadDimQk;
  static constexpr int kHeadDimV = Config::kHeadDimV;
  static constexpr int kStages = Config::kStages;
  static constexpr int kConsumers = kTileN / 64;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  // What the launch gives every thread, redistributed: 65,536 registers in all.
  static constexpr int kProducerRegisters = kConsumers == 1 ? 56 : kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 1 ? 256 : kConsumers == 2 ? 240 : 160;
  static constexpr int kQkSteps = kernel::ceil_div(kHeadDimQk, 16);
  static constexpr int kVSteps = kernel::ceil_div(kHeadDimV, 16);
  static constexpr int kMSteps = kTileM / 16;
  // How the warpgroups share dQ: 64 rows each, or 64 columns each.
  static constexpr bool kDqByRows = kTileM == 64 * kConsumers;
  static constexpr int kDqColumns = kDqByRows ? kHeadDimQk : 64;  // of a warpgroup
  static constexpr int kDsBuffers = Config::kWriteDq ? 2 : 0;
  static constexpr bool kVarlen = kernel::kVarlen<Config>;
  static constexpr bool kDropout = kernel::kDropout<Config>;
  static constexpr bool kOrdered = kernel::kOrderedDq<Config>;
  static constexpr bool kWantsDk = kernel::kWantsDk<Config>;
  static constexpr bool kWantsDv = kernel::kWantsDv<Config>;
  static constexpr bool kSums = kWantsDk || kWantsDv;
  // Of a cluster: they share the query tiles of a key tile, add up dK and dV, and have no other tile.
  static constexpr int kSplitBlocks = kernel::kSplitBlocks<Config>;
  static constexpr bool kInTurns = kernel::kInTurns<Config>;
  static constexpr bool kTwoSided = Variant::kLeftWindow || Variant::kChunked;  // keys are hidden from last rows too
  static constexpr bool kLists = Variant::kMask && !kVarlen;                    // of tiles that are not empty
  // S and dP are at hand together; also of a mask of packed batches, which looks at all elements of all tiles.
  static constexpr bool kFunctions = Variant::kScore || (Variant::kMask && kVarlen);

  // A query tile is taken in two halves of 64 rows, scores of the next under dS of the last; not where whole tiles were
  // as fast (docs/experiments.md).
  static constexpr bool kHalves = kTileM == 128 && kHeadDimQk <= 64 && kHeadDimV <= 64 && Config::kWriteDq &&
                                  kWantsDk && kWantsDv && !kernel::kHasVariant<Config> && !kVarlen && !kDropout &&
                                  (!Config::kCausal || kOrdered);
  static constexpr bool kKeysInRegisters = kHalves || (kTileM == 64 && kConsumers <= 2);  // the latter for dQ alone

  static constexpr bool kUnevenRows = kTwoSided || kVarlen;  // some may keep no key, whatever the call's lengths
  static constexpr bool kClears = kUnevenRows || (Config::kCausal && kernel::kRowsWithoutKeys<Config>);

  static constexpr bool kHides = Config::kCausal || kTwoSided || Variant::kMask;  // keys of the sequence from rows
  static constexpr bool kLooks = kHides && Config::kWriteDq;  // at dQ, for what hidden keys have brought

  static_assert(kTileN % 64 == 0 && kConsumers >= 1 && kConsumers <= 3, "64 keys a warpgroup");
  static_assert(kTileM == 64 || kDqByRows, "dQ is shared by rows or by columns");
  static_assert(kHeadDimQk % 8 == 0 && kHeadDimV % 8 == 0, "head dims are multiples of 8");
  static_assert(!kVarlen || !Config::kSplit, "packed batches are not split");
  static_assert(!kOrdered || (Config::kWriteDq && !kLists), "in tile lists, nobody is in front");

  using QTile = SwizzledTile<kTileM, kHeadDimQk>;
  using DoTile = SwizzledTile<kTileM, kHeadDimV>;
  using KTile = SwizzledTile<kTileN, kHeadDimQk>;
  using VTile = SwizzledTile<kTileN, kHeadDimV>;
  using DsTile = SwizzledTile<kTileM, kTileN>;
  static_assert(kDqByRows || KTile::kSlabs <= kConsumers, "every column of dQ has a warpgroup");

  using SGemm = ptx::Wgmma<T, kTileM>;
  using DvGemm = ptx::Wgmma<T, kHeadDimV>;
  using DkGemm = ptx::Wgmma<T, kHeadDimQk>;
  using DqGemm = ptx::Wgmma<T, kDqColumns>;
  using S = float[kTileM / 2];           // [64 keys, tile_m]
  using Operand = uint32_t[kMSteps][4];  // the same, rounded
  using Drops = uint32_t[kTileM / 64];   // a bit for each element of S^T
  using Dv = float[kHeadDimV / 2];       // [64 keys, d_v]
  using Dk = float[kHeadDimQk / 2];      // [64 keys, d_qk]
  using Dq = float[kDqColumns / 2];      // [64 rows, dq_columns]

  // P^T and dS^T of a warp under functions. Where they are given elements of a captured tensor, these are read while
  // the products S and dP are under way.
  using Functions = kernel::VariantScores<Config, Params, 1, kTileM / 8, 4 * kConsumers, 16, kTileM, kTileN, 4>;
  static constexpr bool kLoadAhead = kernel::kLoadsAhead<Variant> && kTileM == 64;

  static constexpr int kDqRowBytes = 16 * kHeadDimQk * 4;  // of 16 rows

  static constexpr BackwardShape kShape = {.tile_m = kTileM,
                                           .tile_n = kTileN,
                                           .d_qk = kHeadDimQk,
                                           .d_v = kHeadDimV,
                                           .stages = kStages,
                                           .write_dq = Config::kWriteDq,
                                           .varlen = kVarlen};
  static constexpr BackwardSharedLayout kLayout = shared_layout(kShape);
  static constexpr int kSharedBytes = kLayout.bytes;
  static_assert(kThreads == kShape.threads() && kDqByRows == kShape.dq_by_rows() && kDqColumns == kShape.dq_columns());
  static_assert(kLayout.v == KTile::kBytes && kLayout.q == kLayout.v + VTile::kBytes);
  static_assert(kLayout.dout == kLayout.q + kStages * QTile::kBytes);
  static_assert(kLayout.ds == kLayout.dout + kStages * DoTile::kBytes);
  static_assert(kLayout.dq == kLayout.ds + kDsBuffers * DsTile::kBytes);
  static_assert(kLayout.work >= kLayout.mbarriers + kMbarrierBytes * kShape.mbarriers(), "the barriers fit");
  using DkSums = ClusterSums<kSplitBlocks, 4 * kConsumers, kHeadDimQk / 8>;
  using Turns = TurnSums<4 * kConsumers, kHeadDimQk / 8, kHeadDimV / 8>;
  using DvSums = ClusterSums<kSplitBlocks, 4 * kConsumers, kHeadDimV / 8>;
  static_assert(kSplitBlocks == 1 || DkSums::kBytes + DvSums::kBytes <= kLayout.dq, "sums take the place of tiles");
  static_assert(kSplitBlocks == 1 || !Config::kSplit, "sums of a cluster are whole");
  static_assert(!kInTurns || (kSplitBlocks == 1 && !Config::kSplit && !kVarlen),
                "one place for the sums of a key tile");
  // Gradients of captures leave no register for the number of tiles: it lies behind the barriers.
  static constexpr bool kTilesShared = Variant::kGradients > 0 && kStages < 4;
  static constexpr int kTilesOffset = kLayout.work - 4;
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_BACKWARD_TRAITS_CUH_
