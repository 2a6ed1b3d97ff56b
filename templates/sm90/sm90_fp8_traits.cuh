#ifndef FA_TEMPLATES_SM90_SM90_FP8_TRAITS_CUH_
#define FA_TEMPLATES_SM90_SM90_FP8_TRAITS_CUH_

#include <common/constants.cuh>
#include <common/dropout.cuh>
#include <common/forward_schedule.cuh>
#include <common/fp8.cuh>
#include <common/int8.cuh>
#include <common/mask.cuh>
#include <common/paged.cuh>
#include <common/sequences.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <ptx/math.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/thread.cuh>
#include <ptx/wgmma_fp8.cuh>
#include <ptx/wgmma_int8.cuh>
#include <sm90/sm90_affine.cuh>
#include <sm90/sm90_forward_traits.cuh>
#include <sm90/sm90_fp8_layout.cuh>
#include <sm90/sm90_fp8_params.cuh>
#include <sm90/sm90_fp8_softmax.cuh>
#include <sm90/sm90_scores.cuh>
#include <sm90/sm90_shared_tile.cuh>

namespace fa::sm90 {

template <class Config>
FA_DEVICE constexpr bool is_precise() {
  if constexpr (requires { Config::kPrecise; }) return Config::kPrecise;
  return false;
}

template <class Config>
FA_DEVICE constexpr bool shares_scales() {
  if constexpr (requires { Config::kSharedScales; }) return Config::kSharedScales;
  return false;
}

template <class Config>
FA_DEVICE constexpr bool follows_all_scales() {
  if constexpr (requires { Config::kScalesOfAll; }) return Config::kScalesOfAll;
  return false;
}

template <class Config>
FA_DEVICE constexpr bool halves_bytes() {
  if constexpr (requires { Config::kHalfBytes; }) return Config::kHalfBytes;
  return false;
}

template <class Config>
FA_DEVICE constexpr int polynomials() {
  if constexpr (requires { Config::kPolynomials; }) return Config::kPolynomials;
  return 0;
}

/// Constants and types of the Hopper forward of 8-bit floats: those that the rooms of the Hopper forward ask for.
///
/// Config is a struct of constants: Element (e4m3, e5m2, or i8: q and k are i8, v is e4m3), kHeadDimQk, kHeadDimV,
/// kTileM, kTileN, kStages, kQBuffers, kValueColumns, kCausal, kPositiveScale, kPackGqa, kTakeTurns, kAhead,
/// kSingleLevel, kHalfOutput; optionally kVarlen (common/switches.cuh), kByteOutput, kKeyScales, kValueScales,
/// kPrecise, kHalfBytes, kPolynomials, kSharedScales, kScalesOfAll, and a Variant without a mask function
/// (common/variant.cuh).
template <class Config>
using Fp8ParamsOf = typename kernel::Either<typename kernel::Either<kernel::Sm90PlacedInt8, kernel::Sm90PlacedFp8,
                                                                    kernel::kIsInt8<typename Config::Element>>::type,
                                            typename kernel::Either<kernel::Sm90Int8Params, kernel::Sm90Fp8Params,
                                                                    kernel::kIsInt8<typename Config::Element>>::type,
                                            kernel::kPlaceInMemory<Config>>::type;

template <class C>
struct Fp8Traits {
  using Config = C;
  using T = typename Config::Element;
  static constexpr bool kInt8 = kernel::kIsInt8<T>;
  using Value = typename kernel::Either<kernel::e4m3, T, kInt8>::type;  // an element of V
  static constexpr bool kByteOutput = kernel::writes_bytes<Config>();
  static constexpr bool kKeyScales = kernel::scales_keys<Config>();      // each key has a scale for its row of K
  static constexpr bool kValueScales = kernel::scales_values<Config>();  // and for that of V
  static constexpr bool kPrecise = is_precise<Config>();                 // P and V are f16 in their product
  static constexpr bool kSharedScales = shares_scales<Config>();         // of keys reach the threads by shared memory
  // P is relative to the greatest scale of V so far, and O with it; else to that of the KV tile.
  static constexpr bool kScalesOfAll = kValueScales && (kPrecise || follows_all_scales<Config>());
  static constexpr bool kHalfBytes = halves_bytes<Config>();  // P becomes f16 on its way to e4m3
  static constexpr int kPolynomials = polynomials<Config>();  // of 8 exponentials, on the units of products
  using Wider = typename kernel::Either<kernel::f16, kernel::bf16, Config::kHalfOutput>::type;
  using Output = typename kernel::Either<kernel::e4m3, Wider, kByteOutput>::type;
  using Variant = kernel::VariantOf<Config>;
  using Params = Fp8ParamsOf<Config>;

  static constexpr int kTileM = Config::kTileM;
  static constexpr int kTileN = Config::kTileN;
  static constexpr int kHeadDimQk = Config::kHeadDimQk;
  static constexpr int kHeadDimV = Config::kHeadDimV;
  static constexpr int kStages = Config::kStages;
  static constexpr int kQBuffers = Config::kQBuffers;
  static constexpr int kConsumers = kTileM / kWarpgroupRows;
  static constexpr int kSSteps = kernel::ceil_div(kHeadDimQk, 32);
  static constexpr int kPSteps = kTileN / (kPrecise ? 16 : 32);
  static constexpr int kPieces = 1;
  static constexpr bool kVarlen = kernel::kVarlen<Config>;
  static constexpr int kPageSize = kernel::kPageSize<Config>;
  static constexpr bool kPaged = kPageSize != 0;
  static constexpr bool kRagged = kVarlen || kPaged;
  static constexpr bool kWindowed = Variant::kLeftWindow || Variant::kChunked;
  static constexpr bool kWaves = kRagged && !kernel::kBounded<Config>;
  static constexpr bool kPostsPieces = false;
  static constexpr bool kTwoPlaces = false, kFixedSplits = false, kShares = false;
  static constexpr bool kWholeTiles = false;
  static constexpr bool kLeavesSplits = Config::kSplit;
  static constexpr int kSplitTiles = 1;
  static constexpr bool kMergesInCluster = false, kInCluster = false;
  static constexpr bool kPingpong = Config::kTakeTurns;
  static constexpr bool kSingleLevel = Config::kSingleLevel;
  // The next product S is on its way while O takes the last columns of the one before, or P of the next KV tile is made
  // beside this one's product with kPrecise: S and P need registers of their own then.
  static constexpr bool kAhead = Config::kAhead;
  // A warpgroup skips the KV tiles that causality hides from all of its rows.
  static constexpr bool kOwnRanges = Config::kCausal && !kWindowed;

  // What the Hopper forward may have, and this one has not.
  static constexpr bool kDropout = false, kLists = false, kKeepsFirst = false, kAffine = false, kAffineProduct = false,
                        kDistancePruning = false, kPartial = false, kEndsAligned = false, kPostsFirstRow = false,
                        kRotates = false, kExchange = false, kDynamic = false, kLoadAhead = false, kNamesLast = false,
                        kLengthSplits = false;
  static constexpr int kDropoutWarps = 0;

  static constexpr Fp8Shape kShape = {.tile_m = kTileM,
                                      .tile_n = kTileN,
                                      .d_qk = kHeadDimQk,
                                      .d_v = kHeadDimV,
                                      .stages = kStages,
                                      .q_buffers = kQBuffers,
                                      .precise = kPrecise,
                                      .shared_scales = kSharedScales};
  static constexpr Fp8Layout kLayout = fp8_layout(kShape);
  static constexpr int kSharedBytes = kLayout.bytes;
  static constexpr int kThreads = kShape.threads();
  static constexpr int kWorks = kShape.works();
  static constexpr int kTransposers = 3;  // warps that transpose V, or widen it
  static constexpr int kProducerRegisters = kConsumers < 3 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 1 ? 256 : kConsumers == 2 ? 232 : kConsumers == 3 ? 160 : 112;

  // O, in slices of columns: what a KV tile adds to one comes from the tensor cores at a time.
  static constexpr int kValueColumns = kSingleLevel ? kHeadDimV : Config::kValueColumns;
  static constexpr int kSlices = kHeadDimV / kValueColumns;

  // Sums of P are made beside its product, which has registers apart from those of P.
  static constexpr bool kLateSums =
      kPingpong && !kInt8 && !kAhead && !kSingleLevel && !kValueScales && kSlices == 1 && kValueColumns != kTileN;

  static_assert(kTileM % kWarpgroupRows == 0 && kConsumers >= 1 && kConsumers <= 4, "64 query rows a warpgroup");
  static_assert(kTileN % (kPrecise ? 16 : 32) == 0 && kTileN <= 256, "keys are consumed so many at a time");
  static_assert(kHeadDimQk % 16 == 0 && kHeadDimV % 16 == 0 && kHeadDimQk <= 256 && kHeadDimV <= 256, "head dims");
  static_assert(kValueColumns % 16 == 0 && kHeadDimV % kValueColumns == 0, "slices are equal");
  static_assert(!kSingleLevel || kPrecise || !kValueScales, "a KV tile's part of O is multiplied by itself");
  static_assert(!kHalfBytes || (!kPrecise && !kValueScales), "such bytes have no sign");
  static_assert(!kPolynomials || !kPrecise, "f16 tells more apart");
  static_assert(!kPrecise || kSingleLevel, "sums of products of 16 bits are exact enough");
  static_assert(!kVarlen || !Config::kSplit, "packed batches are not split");
  static_assert(!Variant::kMask, "left to other kernels");
  static_assert(kPageSize < 0 || kPageSize % 8 == 0, "boxes of pages are whole rows of the swizzle");
  static_assert(!kPaged || !Variant::kChunked, "the first key of a chunk may be anywhere in a box");

  // Tiles of pairs of columns: 128 bytes of a slab are 128 columns, and a step of the product 32 of them.
  using QTile = SwizzledTile<kTileM, kHeadDimQk / 2>;
  using KTile = SwizzledTile<kTileN, kHeadDimQk / 2>;
  using TransposedTile = SwizzledTile<kHeadDimV, kTileN / 2>;  // [d_v, tile_n]
  using WideTile = SwizzledTile<kTileN, kHeadDimV>;            // [tile_n, d_v] of f16
  using VTile = typename kernel::Either<WideTile, TransposedTile, kPrecise>::type;
  using LandedTile = SwizzledTile<kTileN, kHeadDimV / 2>;  // as it lands: [tile_n, d_v]
  static_assert(kLayout.q_bytes == QTile::kBytes && kLayout.k_bytes == KTile::kBytes);
  static_assert(kLayout.v_bytes == VTile::kBytes && kLayout.landed_bytes == LandedTile::kBytes);
  using SGemm = typename kernel::Either<ptx::WgmmaInt8<kTileN>, ptx::WgmmaFp8<Value, Value, kTileN>, kInt8>::type;
  using OGemm = typename kernel::Either<ptx::Wgmma<kernel::f16, kValueColumns>,
                                        ptx::WgmmaFp8<kernel::e4m3, Value, kValueColumns>, kPrecise>::type;
  using S = float[kTileN / 2];
  using P = uint32_t[kPSteps][4];
  using Slice = float[kValueColumns / 2];
  using O = float[kSlices][kValueColumns / 2];
  using Rows = kernel::RowMap<Config::kPackGqa>;
  // Scores of i8 reach the softmax above kernel::kInt8Bias where nothing else has to be made of them.
  static constexpr bool kBiased = kInt8 && !kKeyScales && !Variant::kScore;
  using Softmax = Fp8Softmax<kBiased, kHalfBytes ? 0 : 8, kPolynomials, kLateSums>;
  using KeyNumbers = AffineProduct<kernel::bf16, kTileN>;
  using Mask = kernel::KeepMask<kernel::ceil_div(kTileN, 32)>;
  using Loaded = uint32_t[2][1];

  struct Nothing {};
  struct ScoreScale {
    float scale[2];  // that score functions are given scores times of
  };
  struct Int8ScoreScale : ScoreScale {
    float bias[2];  // and plus
  };
  struct ScalesOfKeys {
    float of[kernel::ceil_div(kTileN, 32)];  // a lane's keys of a KV tile: every 32nd
  };
  using KeyScales = typename kernel::Either<ScalesOfKeys, Nothing, kKeyScales>::type;
  using ValueScales = typename kernel::Either<ScalesOfKeys, Nothing, kValueScales>::type;
  using RawScale = typename kernel::Either<typename kernel::Either<Int8ScoreScale, ScoreScale, kInt8>::type, Nothing,
                                           Variant::kScore>::type;
  using Sequence = typename kernel::Either<kernel::Sequence, Nothing, kRagged>::type;

  // A KV tile comes out of pages in boxes, each by a lane of the warp that loads.
  static constexpr int kBoxRows = kPaged ? kernel::kRowsTogether<kPageSize, kTileN> : kTileN;
  static constexpr int kBoxes = kTileN / kBoxRows;
  static_assert(kBoxes <= kernel::kWarpSize, "a lane a box");
  struct InPages {
    int table_row;   // the request's row of the block table
    int first_read;  // keys before it are hidden from all rows
  };
  using Pages = typename kernel::Either<InPages, Nothing, kPaged>::type;

  struct Query {
    ForwardTile tile;
    KvRange range;
    int kv_head;
    int head_in_group;
    Sequence sequence;
    Pages pages;  // not of those that were posted
  };
};

/// What all warps of such a forward know: where things lie, and who waits for whom.
template <class Config>
struct Fp8Block : Scores<Fp8Traits<Config>> {
  using Traits = Fp8Traits<Config>;
  using Base = Scores<Traits>;
  using Query = typename Traits::Query;
  using Variant = typename Traits::Variant;
  using Traits::kStages, Traits::kQBuffers, Traits::kConsumers, Traits::kTransposers, Traits::kLayout, Base::shared,
      Base::params, Base::k_full, Base::k_empty, Base::v_full, Base::v_empty, Base::q_full, Base::q_empty;

  using Base::Base;

  // v_full: V is transposed, or widened; v_empty: consumers have read that. landed: V is there as it is in memory;
  // taken: it is transposed, so that its buffer is free.
  FA_DEVICE uint32_t landed(int stage) const { return k_full(4 * kStages + 2 * kQBuffers + stage); }
  FA_DEVICE uint32_t taken(int stage) const { return landed(kStages + stage); }
  FA_DEVICE uint32_t landed_shared(int stage) const {
    return shared + kLayout.landed + stage * Traits::LandedTile::kBytes;
  }

  FA_DEVICE void init_barriers() const {
    constexpr int kReaders = 4 * kConsumers;  // warps
    FA_UNROLL
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(k_full(i), 1);
      ptx::mbarrier_init(k_empty(i), kReaders);
      ptx::mbarrier_init(v_full(i), kTransposers);
      ptx::mbarrier_init(v_empty(i), kReaders);
      ptx::mbarrier_init(landed(i), 1);
      ptx::mbarrier_init(taken(i), kTransposers);
    }
    FA_UNROLL
    for (int i = 0; i < kQBuffers; ++i) {
      ptx::mbarrier_init(q_full(i), 1);
      ptx::mbarrier_init(q_empty(i), kReaders);
    }
    ptx::fence_mbarrier_init();
  }

  // Scales of a row of q, and of a head, or of keys, of k and v; 1 without any.
  FA_DEVICE float q_scale(const Query& query, int head, int position) const {
    const kernel::Fp8ScaleParams& scales = this->p.scales;
    if (scales.q == nullptr) return 1.f;
    const int64_t first = kernel::offset_of_rows<Traits::kVarlen>(this->lengths_of(query), query.tile.batch,
                                                                  scales.stride_q_b, scales.stride_q_s);
    return ptx::ld_global_nc(scales.q + first + head * scales.stride_q_h + position * scales.stride_q_s);
  }
  FA_DEVICE float k_scale(const Query& query) const {
    const kernel::Fp8ScaleParams& scales = this->p.scales;
    if (Traits::kKeyScales || scales.k == nullptr) return 1.f;
    return ptx::ld_global_nc(scales.k + query.tile.batch * scales.stride_k_b + query.kv_head * scales.stride_k_h);
  }
  /// Of KV tile n. Behind the last key its scale stands again: what it multiplies is hidden.
  template <int kCount>
  FA_DEVICE void load_scales(float (&of)[kCount], const float* scales, int64_t stride_b, int64_t stride_h,
                             int64_t stride_s, const Query& query, int n, int lane) const {
    if constexpr (Traits::kPaged) {
      load_scales_in_pages(of, scales, stride_b, stride_h, stride_s, query, n, lane);
    } else {
      const auto& lengths = this->lengths_of(query);
      const float* const head = scales + query.kv_head * stride_h +
                                kernel::offset_of_keys<Traits::kVarlen>(lengths, query.tile.batch, stride_b, stride_s);
      FA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        const int key = n * Traits::kTileN + 32 * i + lane;
        const int existing = key < lengths.s_kv ? key : lengths.s_kv - 1;
        of[i] = scales == nullptr ? 1.f : ptx::ld_global_nc(head + existing * stride_s);
      }
    }
  }
  /// The keys that a request has of KV tile n, by its row of the block table; those in front of what any row sees are
  /// not looked for.
  FA_DEVICE auto keys_of(const Query& query, const typename Traits::Pages& pages) const {
    return kernel::keys_in_cache<Traits::kPageSize>(params.paged, pages.table_row, pages.first_read,
                                                    query.sequence.s_kv);
  }
  /// Of [pages, h_kv, page]; 0 of keys that are hidden, beside which others may be of any size.
  template <int kCount>
  FA_DEVICE void load_scales_in_pages(float (&of)[kCount], const float* scales, int64_t stride_page, int64_t stride_h,
                                      int64_t stride_s, const Query& query, int n, int lane) const {
    const auto keys = keys_of(query, query.pages);
    FA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const int key = n * Traits::kTileN + 32 * i + lane;
      const int page = scales != nullptr && key >= keys.begin && key < keys.end ? keys.page_of(key) : -1;
      of[i] = keys.has(key, page) ? ptx::ld_global_nc(scales + page * stride_page + query.kv_head * stride_h +
                                                      keys.row_in_page(key) * stride_s)
              : scales != nullptr ? 0.f
                                  : 1.f;
    }
  }
  /// What a row of i8 adds to its q k.
  FA_DEVICE float row_bias(const Query& query, int head, int position) const {
    const kernel::RowBiasParams& bias = this->p.row_bias;
    if (bias.data == nullptr) return 0.f;
    const int64_t first = kernel::offset_of_rows<Traits::kVarlen>(this->lengths_of(query), query.tile.batch,
                                                                  bias.stride_b, bias.stride_s);
    return ptx::ld_global_nc(bias.data + first + head * bias.stride_h + position * bias.stride_s);
  }
  FA_DEVICE float v_scale(const Query& query) const {
    const kernel::Fp8ScaleParams& scales = this->p.scales;
    if (Traits::kValueScales || scales.v == nullptr) return 1.f;
    return ptx::ld_global_nc(scales.v + query.tile.batch * scales.stride_v_b + query.kv_head * scales.stride_v_h);
  }

  /// KV tiles of a query tile; below 0: it stands for the end.
  static FA_DEVICE int tiles_of(const Query& query) { return query.range.end - query.range.begin; }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_FP8_TRAITS_CUH_
