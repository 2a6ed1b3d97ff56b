#ifndef FA_TEMPLATES_SM80_SM80_BACKWARD_TRAITS_CUH_
#define FA_TEMPLATES_SM80_SM80_BACKWARD_TRAITS_CUH_

#include <common/constants.cuh>
#include <common/online_softmax.cuh>
#include <common/shared_tile.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <common/variant_backward.cuh>
#include <ptx/language.cuh>
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

/// The constants of a backward, its tiles, and how warps share them.
template <class Config>
struct BackwardTraits {
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
  // P and dS in one go.
  static constexpr bool kTogether =
      kTwoSided || Variant::kScore || Variant::kMask || kernel::kStatisticsGradients<Config>;
  static constexpr bool kHides = Config::kCausal || kTwoSided || Variant::kMask;  // keys of the sequence from rows
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
};

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_BACKWARD_TRAITS_CUH_
