// More than 600 lines: fits, refusals and tiles count the same registers.
#include "plan/sm80_forward.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <span>

#include <common/schedule_params.cuh>
#include <fa/error.hpp>

#include "plan/candidates.hpp"
#include "plan/catalogue.hpp"
#include "plan/forward_launch.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/row_arithmetic.hpp"

namespace fa::plan {
namespace {

constexpr int kRegistersPerThread = 255;
// What a kernel needs besides the fragments that sm80_forward_registers counts before ptxas stops spilling: addresses,
// row statistics, operands loaded ahead, and for fp32 the two halves of every operand. Measured on compiled kernels.
constexpr int kOverhead16Bit = 44;
constexpr int kOverhead16BitPerMTile = 16;
constexpr int kOverheadUnaligned = 12;
constexpr int kOverheadDropout16Bit = 12;
constexpr int kOverheadStored = 16;  // pairs on their way from 8 bits
// Of warps that split the keys of a cache, which look up rows besides: for 16 columns of V of 8 bits; of 4 bits in K,
// or in V beside a K that is stored too; of both; and of either where there is no Hopper.
constexpr int kOverheadCachedValues = 3;
constexpr int kOverheadHalfValues = 1;  // likewise, where products are of f16, up to a head dim of 192
constexpr int kMostHalfDim = 192;
constexpr int kHarmlessSpill = 128;  // bytes, of wider ones, which are 2.5 times as fast as tiles of 64 rows
constexpr int kMostHalfBlocks = 2;   // that share parts: more of them cut more query tiles
constexpr int kOverheadCached4Bit = 14;
constexpr int kOverheadCachedBoth4Bit = 8;
constexpr int kOverheadCached4BitAmpere = 21;
constexpr int kOverheadCachedBytesAmpere = 20;  // of K of 8 bits, whose conversions are of integers there
constexpr int kOverheadKeysAloneOwnParts = 8;   // of K alone in fewer bits, where blocks find their parts
constexpr int kOverhead32Bit = 60;
constexpr int kOverhead32BitPerMTile = 49;
// Below this nothing of the main loop's own state fits: an override may go here, the planner does not.
constexpr int kFixedRegisters = 48;
constexpr int kReservedSharedPerBlock = 1024;
constexpr std::size_t kMaxSpecs = 6;
constexpr int kMaxWarps = 16;
constexpr int kMaxPairedWarps = 8;  // a named barrier a warp and one a pair, of 15
constexpr int kMaxGroupWarps = 8;   // that share rows
constexpr int kWideHeadDim = 256;   // above, no two warps hold whole rows of O
constexpr int kMaxTileM = 1024;
constexpr std::int64_t kFewRows = 16;  // of a tile of one mma's
constexpr int kHalfTile = 8;           // rows of a tile that takes half of it
// Of Choice::few_rows, over K or V of fewer bits.
constexpr int kHalfRows = 4;
constexpr int kLongTiles = 8;
constexpr std::int64_t kFewestTiles = 16;
constexpr std::int64_t kDeepestTiles = 16;   // KV tiles of a part, at most: beyond, two blocks hide more than a buffer
constexpr std::int64_t kKeysOfFewRows = 64;  // of a KV tile
constexpr int kDeepShared = 200 * 1024;      // of a multiprocessor, where two blocks of three buffers fit

/// Tiles that differ in tile_n only.
struct TileFamily {
  int tile_m, warps, stages;
  bool q_in_registers;
  int loop_bodies;
  std::array<int, 5> tile_n;  ///< in order of preference
  int warps_n = 1;
  bool split_warps = false;
};

// In order of preference; the first tile that fits the architecture's shared memory and the register file is taken. The
// traffic of shared memory limits mma.sync kernels: two m tiles a warp halve what is read of K and V, and where the
// accumulators leave no room for two, more keys a step save reads of Q. Measured on an H200 (docs/experiments.md).
constexpr TileFamily k16BitSmall[] = {{128, 4, 1, true, 1, {96, 80, 64, 48, 32}},
                                      {64, 4, 1, false, 1, {64, 48, 32, 16, 16}}};
constexpr TileFamily k16BitSmallCausal[] = {{128, 4, 1, true, 1, {80, 64, 48, 32, 16}},
                                            {64, 4, 1, false, 1, {64, 48, 32, 16, 16}}};
constexpr TileFamily k16BitMedium[] = {{128, 4, 1, false, 1, {64, 48, 32, 16, 16}},
                                       {64, 4, 1, false, 1, {64, 48, 32, 16, 16}}};
constexpr TileFamily k16BitMediumCausal[] = {{128, 4, 1, false, 2, {64, 48, 32, 16, 16}},
                                             {64, 4, 1, false, 1, {64, 48, 32, 16, 16}}};
// What finds pages, and masks keys in front, leaves no registers for a second loop body; nor do statistics of rows.
constexpr TileFamily k16BitMediumCausalOneBody[] = {{128, 4, 1, false, 1, {64, 48, 32, 16, 16}},
                                                    {64, 4, 1, false, 1, {64, 48, 32, 16, 16}}};
// One m tile a warp, and two blocks a multiprocessor: one computes while the other starts, waits or ends.
// Pairs of warps have two m tiles a warp all the same.
constexpr TileFamily k16BitLarge[] = {{64, 4, 1, false, 1, {64, 64, 64, 64, 64}, 2},
                                      {64, 4, 1, false, 1, {64, 48, 32, 16, 16}}};
constexpr TileFamily k16BitShortQuery[] = {{64, 4, 2, false, 1, {64, 48, 32, 32, 32}},
                                           {64, 4, 1, false, 1, {64, 48, 32, 16, 16}}};
// At most as many rows as an mma has: else all warps but one would multiply rows that are not there.
// Over pages, whose look-up takes registers too, Q is better off in shared memory: three blocks fit, not two.
constexpr TileFamily k16BitFewRowsPaged[] = {{16, 4, 2, false, 1, {64, 64, 64, 64, 64}, 1, true},
                                             {64, 4, 2, false, 1, {64, 48, 32, 32, 32}},
                                             {64, 4, 1, false, 1, {64, 48, 32, 16, 16}}};
// Of 16-bit pages a third buffer is worth a block of three, where two fit: 2 to 17 % of a decode (docs/experiments.md).
constexpr TileFamily k16BitFewRowsDeep[] = {{16, 4, 3, false, 1, {64, 64, 64, 64, 64}, 1, true},
                                            {16, 4, 2, false, 1, {64, 64, 64, 64, 64}, 1, true},
                                            {64, 4, 2, false, 1, {64, 48, 32, 32, 32}},
                                            {64, 4, 1, false, 1, {64, 48, 32, 16, 16}}};
// Where that leaves a block a multiprocessor few tiles, latency counts: a fourth.
constexpr TileFamily k16BitFewRowsDeepest[] = {{16, 4, 4, false, 1, {64, 64, 64, 64, 64}, 1, true},
                                               {16, 4, 3, false, 1, {64, 64, 64, 64, 64}, 1, true},
                                               {16, 4, 2, false, 1, {64, 64, 64, 64, 64}, 1, true},
                                               {64, 4, 2, false, 1, {64, 48, 32, 32, 32}},
                                               {64, 4, 1, false, 1, {64, 48, 32, 16, 16}}};
constexpr TileFamily k16BitFewRows[] = {{16, 4, 2, true, 1, {64, 64, 64, 64, 64}, 1, true},
                                        {64, 4, 2, false, 1, {64, 48, 32, 32, 32}},
                                        {64, 4, 1, false, 1, {64, 48, 32, 16, 16}}};
// Of 4-bit K and V without pages: what a step takes besides its products counts half as much. 5 to 20 % of a decode up
// to a head dim of 128 (docs/experiments.md).
constexpr TileFamily k16BitFewRows4Bits[] = {{16, 4, 2, true, 1, {128, 128, 128, 128, 128}, 1, true},
                                             {16, 4, 2, true, 1, {64, 64, 64, 64, 64}, 1, true},
                                             {64, 4, 2, false, 1, {64, 48, 32, 32, 32}},
                                             {64, 4, 1, false, 1, {64, 48, 32, 16, 16}}};
// Over pages with a third buffer, above a head dim of 64: 6 to 16 %.
constexpr TileFamily k16BitFewRows4BitsPaged[] = {{16, 4, 3, true, 1, {128, 128, 128, 128, 128}, 1, true},
                                                  {16, 4, 2, false, 1, {64, 64, 64, 64, 64}, 1, true},
                                                  {64, 4, 2, false, 1, {64, 48, 32, 32, 32}},
                                                  {64, 4, 1, false, 1, {64, 48, 32, 16, 16}}};
// Of 8-bit K or V whose products are of f16: a step is short, so that more tiles have to be on their way. As many as
// two blocks have room for, up to a head dim of 128, of 192, and of 256. Parts that blocks share hide more by
// themselves.
constexpr TileFamily k16BitFewRowsHalf[] = {
    {16, 4, 4, true, 1, {64, 64, 64, 64, 64}, 1, true}, {16, 4, 3, true, 1, {64, 64, 64, 64, 64}, 1, true},
    {16, 4, 2, true, 1, {64, 64, 64, 64, 64}, 1, true}, {16, 4, 2, false, 1, {64, 64, 64, 64, 64}, 1, true},
    {64, 4, 2, false, 1, {64, 48, 32, 32, 32}},         {64, 4, 1, false, 1, {64, 48, 32, 16, 16}}};
// Both in e4m3, up to a head dim of 128: twice the keys with half of the buffers, 1 to 12 % of a decode.
constexpr TileFamily k16BitFewRowsHalfLong[] = {{16, 4, 2, true, 1, {128, 128, 128, 128, 128}, 1, true},
                                                {16, 4, 3, true, 1, {64, 64, 64, 64, 64}, 1, true},
                                                {16, 4, 2, false, 1, {64, 64, 64, 64, 64}, 1, true},
                                                {64, 4, 2, false, 1, {64, 48, 32, 32, 32}},
                                                {64, 4, 1, false, 1, {64, 48, 32, 16, 16}}};
constexpr TileFamily k32BitSmall[] = {{128, 4, 1, false, 1, {32, 16, 16, 16, 16}},
                                      {64, 4, 1, false, 1, {32, 16, 16, 16, 16}}};
constexpr TileFamily k32BitMedium[] = {{64, 4, 1, false, 1, {32, 16, 16, 16, 16}},
                                       {32, 2, 1, false, 1, {16, 16, 16, 16, 16}}};
constexpr TileFamily k32BitLarge[] = {{64, 4, 1, false, 1, {16, 32, 16, 16, 16}},
                                      {64, 4, 2, false, 1, {32, 16, 16, 16, 16}},
                                      {64, 4, 1, false, 2, {16, 32, 16, 16, 16}},
                                      {32, 2, 1, false, 1, {16, 16, 16, 16, 16}}};

constexpr TileFamily k32BitLittle[] = {{64, 4, 1, false, 1, {16, 32, 16, 16, 16}},
                                       {32, 2, 1, false, 1, {16, 16, 16, 16, 16}},
                                       {16, 1, 1, false, 1, {16, 16, 16, 16, 16}}};

// With a fixed split size: tiles of one arithmetic (row_arithmetic.hpp), whose tile_n is set later. Those that fit.
constexpr TileFamily kFixedRows[] = {{128, 4, 1, false, 1, {}}, {64, 4, 1, false, 1, {}}, {32, 2, 1, false, 1, {}}};
constexpr TileFamily kFixedRowsShort[] = {{64, 4, 2, false, 1, {}}, {64, 4, 1, false, 1, {}}, {32, 2, 1, false, 1, {}}};

// Above head dim 256 groups of warps share rows. Queries of long tiles first; what follows has less shared memory, and
// rows of K that shared memory holds a few of.
constexpr TileFamily k16BitWide[] = {{64, 8, 1, false, 1, {64, 64, 32, 32, 32}, 4},
                                     {32, 4, 1, false, 1, {64, 64, 32, 32, 32}, 4},
                                     {16, 4, 1, false, 1, {64, 64, 32, 32, 32}, 4},
                                     {16, 2, 1, false, 1, {32, 32, 16, 16, 16}, 2}};
constexpr TileFamily k16BitWideShort[] = {{32, 4, 2, false, 1, {64, 64, 32, 32, 32}, 4},
                                          {16, 4, 2, false, 1, {64, 64, 32, 32, 32}, 4},
                                          {16, 4, 1, false, 1, {64, 64, 32, 32, 32}, 4},
                                          {16, 2, 1, false, 1, {32, 32, 16, 16, 16}, 2}};
constexpr TileFamily k32BitWide[] = {{32, 8, 1, false, 1, {32, 32, 32, 32, 32}, 4},
                                     {32, 4, 1, false, 1, {16, 16, 16, 16, 16}, 2},
                                     {16, 4, 1, false, 1, {64, 32, 32, 32, 32}, 4},
                                     {16, 2, 1, false, 1, {32, 16, 16, 16, 16}, 2}};
// Where V is in K, tiles of K are V, too: two at least.
constexpr TileFamily k16BitInKey[] = {{64, 8, 2, false, 1, {32, 32, 32, 32, 32}, 4},
                                      {32, 4, 2, false, 1, {32, 32, 32, 32, 32}, 4},
                                      {16, 4, 2, false, 1, {32, 32, 32, 32, 32}, 4},
                                      {16, 2, 2, false, 1, {16, 16, 16, 16, 16}, 2}};
constexpr TileFamily k32BitInKey[] = {{32, 4, 2, false, 1, {16, 16, 16, 16, 16}, 2},
                                      {16, 4, 2, false, 1, {32, 32, 32, 32, 32}, 4},
                                      {16, 2, 2, false, 1, {16, 16, 16, 16, 16}, 2}};

std::span<const TileFamily> wide_tiles(const Problem& problem, const Choice& choice) {
  using Tiles = std::span<const TileFamily>;
  if (problem.dtype == DType::f32) return problem.value_in_key ? Tiles(k32BitInKey) : k32BitWide;
  if (problem.value_in_key)
    return choice.few_rows == 0 ? Tiles(k16BitInKey) : Tiles(k16BitInKey).subspan(choice.few_rows);
  if (choice.few_rows > 0) return Tiles(k16BitWideShort).subspan(choice.few_rows - 1);
  return choice.short_query ? Tiles(k16BitWideShort) : k16BitWide;
}

bool has_half_products(const Problem& problem) {
  return !problem.latent() && plan::has_half_products(problem.arch, storage_of(problem.k_dtype, problem.group_size),
                                                      storage_of(problem.v_dtype, problem.group_size));
}

/// Whether half of an mma's rows are as many as a KV head has, over K or V of fewer bits. Measured on Hopper.
bool has_half_tiles(const Problem& problem, const Choice& choice) {
  const std::int64_t rows = problem.s_q * (choice.pack_gqa ? problem.h_q / problem.h_kv : 1);
  // Blocks that find their parts have slots of packed rows counted by whole tiles.
  return problem.arch.major >= 9 && rows <= kHalfTile && !(choice.own_parts && problem.varlen);
}

/// Whether parts of pages are as long as a KV tile of 128 keys.
bool fills_long_tiles(const Problem& problem) {
  return !problem.paged() || problem.b * problem.h_kv * visible_keys(problem) >= 2 * 128 * kHopperMultiprocessors;
}

std::span<const TileFamily> preferred_tiles(const Problem& problem, const Choice& choice) {
  using Tiles = std::span<const TileFamily>;
  const int d = std::max(problem.d_qk, problem.d_v);
  if (d > kWideHeadDim) return wide_tiles(problem, choice);
  if (problem.dtype == DType::f32) {
    if (d <= 64 && !choice.short_query) return k32BitSmall;
    if (d > 192 && has_little_shared(problem.arch)) return k32BitLittle;
    return d > 192 ? Tiles(k32BitLarge) : k32BitMedium;
  }
  if (choice.few_rows > 0) {
    if (has_half_products(problem) && limits(problem.arch).shared_per_sm >= kDeepShared) {
      const bool bytes = problem.k_dtype == DType::e4m3 && problem.v_dtype == DType::e4m3;
      if (bytes && d <= 128 && (choice.few_rows & kLongTiles) != 0) return k16BitFewRowsHalfLong;
      const std::size_t fewer = d > 192 ? 2 : d > 128 || problem.paged() ? 1 : 0;
      return Tiles(k16BitFewRowsHalf).subspan(fewer);
    }
    const bool has_room = limits(problem.arch).shared_per_sm >= kDeepShared;
    const bool of_4_bits = problem.k_dtype == DType::u4x2 && problem.v_dtype == DType::u4x2 && has_room && d <= 128;
    if (of_4_bits && problem.paged() && d > 64) return k16BitFewRows4BitsPaged;
    if (!problem.paged()) {
      if (of_4_bits) return k16BitFewRows4Bits;
      return problem.stored() ? Tiles(k16BitFewRows) : k16BitFewRowsPaged;
    }
    const bool deep = !problem.stored() && has_room;
    if (!deep) return k16BitFewRowsPaged;
    return choice.few_rows > 2 ? Tiles(k16BitFewRowsDeepest) : k16BitFewRowsDeep;
  }
  if (choice.short_query) return k16BitShortQuery;
  if (d <= 64) return problem.causal ? Tiles(k16BitSmallCausal) : k16BitSmall;
  const bool one_body = problem.paged() || problem.row_statistics();
  if (d <= 128 && problem.causal && one_body) return k16BitMediumCausalOneBody;
  if (d <= 128) return problem.causal ? Tiles(k16BitMediumCausal) : k16BitMedium;
  return k16BitLarge;
}

int pitch(int columns, int element) {
  return (columns * element / 16 | 1) * 16;
}

/// Warps that share their rows.
int warps_n(const KernelSpec& spec) {
  return std::max(spec.warps_n, 1);
}

/// Tiles of 16 rows of a warp.
int m_tiles_of(const KernelSpec& spec) {
  if (spec.as<Sm80Forward>().split_warps) return std::max(spec.tile_m / 16, 1);
  return spec.tile_m * warps_n(spec) / spec.warps / 16;
}

/// Whether warps that share rows exchange P through a tile; else they are pairs, which have two m tiles a warp.
bool has_groups(const KernelSpec& spec) {
  return warps_n(spec) > 2 || (warps_n(spec) == 2 && spec.tile_m / 16 < spec.warps);
}

/// Columns of O of a warp.
int columns_of(const KernelSpec& spec) {
  if (!has_groups(spec)) return spec.d_v / warps_n(spec);
  return (spec.d_v + 8 * warps_n(spec) - 1) / (8 * warps_n(spec)) * 8;
}

/// What warps that share rows tell each other: P, and a float a row and warp.
int exchange_bytes(const KernelSpec& spec) {
  if (warps_n(spec) == 1) return 0;
  const int rows = spec.tile_m * warps_n(spec);  // of all warps
  if (has_groups(spec)) {
    return spec.tile_m * pitch(spec.tile_n, static_cast<int>(size_of(spec.dtype))) +
           rows * static_cast<int>(sizeof(float));
  }
  return spec.tile_m * spec.tile_n * static_cast<int>(size_of(spec.dtype)) + rows * static_cast<int>(sizeof(float));
}

std::string group_refusal(const KernelSpec& spec) {
  const int sharing = warps_n(spec);
  if (spec.warps % sharing != 0 || spec.warps > kMaxGroupWarps) {
    return fmt::format("warps_n = {}: warps = {}: accepted are multiples of it up to {}", sharing, spec.warps,
                       kMaxGroupWarps);
  }
  const int granule = 16 * (spec.warps / sharing);
  if (spec.tile_m % granule != 0) {
    return fmt::format("warps_n = {}: tile_m = {}: accepted are multiples of {}", sharing, spec.tile_m, granule);
  }
  const int keys = spec.tile_n / sharing;
  const bool whole = spec.tile_n % sharing == 0 && (keys % 16 == 0 || (keys == 8 && !spec.dropout));
  if (!whole) {
    return fmt::format("warps_n = {}: tile_n = {}: accepted are {} and multiples of {}", sharing, spec.tile_n,
                       (spec.dropout ? 16 : 8) * sharing, 16 * sharing);
  }
  if (spec.as<Sm80Forward>().q_in_registers) {
    return fmt::format("q_in_registers = true: warps that share rows (warps_n = {}) keep Q in shared memory", sharing);
  }
  if (spec.as<Sm80Forward>().value_in_key && spec.stages < 2) {
    return fmt::format("stages = {}: accepted where V is in K are 2 to 4", spec.stages);
  }
  return {};
}

std::string sharing_refusal(const KernelSpec& spec) {
  if (warps_n(spec) != 1 && spec.as<Sm80Forward>().stored()) {
    return fmt::format("warps_n = {}: warps do not share rows over K or V of 8 bits", spec.warps_n);
  }
  if (spec.warps_n < 0 || (spec.warps_n > 2 && spec.warps_n != 4 && spec.warps_n != 8)) {
    return fmt::format("warps_n = {}: accepted are 1, 2, 4 and 8", spec.warps_n);
  }
  if (spec.as<Sm80Forward>().k_storage == kLatentRows && !(has_groups(spec) && spec.as<Sm80Forward>().value_in_key)) {
    return fmt::format("warps_n = {}: over latent rows groups of warps share query rows", spec.warps_n);
  }
  if (has_groups(spec)) return group_refusal(spec);
  if (spec.as<Sm80Forward>().value_in_key) return "value_in_key = true: accepted for groups of warps that share rows";
  if (warps_n(spec) == 1) return {};
  if (spec.max_logit == 2) return "warps_n = 2: accepted without the greatest scaled scores";
  if (spec.dtype == DType::f32) return "warps_n = 2: fp32 warps do not share rows";
  if (spec.as<Sm80Forward>().q_in_registers)
    return "q_in_registers = true: warps that share rows (warps_n = 2) keep Q in shared memory";
  if (spec.d_v % 16 != 0) return fmt::format("warps_n = 2: d_v = {} is no multiple of 16", spec.d_v);
  if (spec.tile_n % 32 != 0) return fmt::format("warps_n = 2: tile_n = {} is no multiple of 32", spec.tile_n);
  if (spec.warps % 2 != 0 || spec.warps > kMaxPairedWarps || spec.tile_m != 16 * spec.warps) {
    return fmt::format("warps_n = 2: warps = {}, tile_m = {}: accepted are 2 to {} warps, even, and 16 rows a warp",
                       spec.warps, spec.tile_m, kMaxPairedWarps);
  }
  return {};
}

/// Whether warps copy the keys that they have (OwnKeys).
bool splits_stored_keys(const KernelSpec& spec) {
  const Sm80Forward& own = spec.as<Sm80Forward>();
  const int keys = spec.warps > 0 ? spec.tile_n / spec.warps : 0;
  return own.stored() && (spec.aligned || (own.k_storage != 0 && own.v_storage != 0)) && spec.stages > 1 &&
         (keys == 16 || keys == 32);
}

std::string split_refusal(const KernelSpec& spec) {
  if (!spec.as<Sm80Forward>().split_warps) return {};
  if (spec.max_logit != 0 || spec.entropy) return "split_warps = true: accepted without statistics of rows";
  if (spec.dtype == DType::f32) return "split_warps = true: fp32 warps do not share rows";
  if (warps_n(spec) != 1) return fmt::format("split_warps = true: warps_n = {}: accepted is 1", spec.warps_n);
  const bool half = spec.tile_m == kHalfTile && splits_stored_keys(spec);
  if (!half && (spec.tile_m < 16 || spec.tile_m > 64 || spec.tile_m % 16 != 0)) {
    return fmt::format("split_warps = true: tile_m = {}: accepted are multiples of 16 up to 64{}", spec.tile_m,
                       splits_stored_keys(spec) ? ", and 8" : "");
  }
  if (spec.tile_n % (16 * spec.warps) != 0) {
    return fmt::format("split_warps = true: tile_n = {}: accepted are multiples of 16 * warps = {}", spec.tile_n,
                       16 * spec.warps);
  }
  if (spec.d_v % (8 * spec.warps) != 0) {
    return fmt::format("split_warps = true: d_v = {} is no multiple of 8 * warps = {}", spec.d_v, 8 * spec.warps);
  }
  return {};
}

bool has_half_products(const KernelSpec& spec) {
  const Sm80Forward& own = spec.as<Sm80Forward>();
  return plan::has_half_products(spec.arch, own.k_storage, own.v_storage);
}

/// Whether warps split the keys of a cache whose K or V is stored in fewer bits.
bool splits_stored_cache(const KernelSpec& spec) {
  const Sm80Forward& own = spec.as<Sm80Forward>();
  return own.split_warps && spec.page_size != 0 && own.stored();
}

/// Whether they do so with products of f16 and an O that half of the registers hold.
bool has_widest_half_values(const KernelSpec& spec) {
  return splits_stored_cache(spec) && has_half_products(spec) && spec.d_v > kMostHalfDim;
}

/// What such a cache takes besides.
int cached_overhead(const KernelSpec& spec) {
  const Sm80Forward& own = spec.as<Sm80Forward>();
  if (!splits_stored_cache(spec)) return 0;
  const bool k_of_4_bits = is_u4(own.k_storage), v_of_4_bits = is_u4(own.v_storage);
  int registers = 0;
  const bool halves = has_half_products(spec) && spec.d_v <= kMostHalfDim;
  if (own.v_storage != 0 && !v_of_4_bits)
    registers += spec.d_v / 16 * (halves ? kOverheadHalfValues : kOverheadCachedValues);
  if (k_of_4_bits || (v_of_4_bits && own.k_storage != 0)) registers += kOverheadCached4Bit;
  if (k_of_4_bits && v_of_4_bits) registers += kOverheadCachedBoth4Bit;
  if (spec.arch.major < 9 && own.k_storage != 0 && (k_of_4_bits || v_of_4_bits)) registers += kOverheadCached4BitAmpere;
  if (spec.own_parts() && own.k_storage != 0 && own.v_storage == 0) registers += kOverheadKeysAloneOwnParts;
  const bool of_bytes = own.k_storage != 0 && !k_of_4_bits && !v_of_4_bits;
  if (spec.arch.major < 9 && of_bytes && !has_half_products(spec)) registers += kOverheadCachedBytesAmpere;
  return registers;
}

/// Registers a thread with which the kernel does not spill.
int comfortable_registers(const KernelSpec& spec) {
  const int m_tiles = m_tiles_of(spec);
  const int overhead = spec.dtype == DType::f32 ? kOverhead32Bit + kOverhead32BitPerMTile * m_tiles
                                                : kOverhead16Bit + kOverhead16BitPerMTile * m_tiles;
  const int dropout = spec.dropout && spec.dtype != DType::f32 ? kOverheadDropout16Bit : 0;
  const int stored = spec.as<Sm80Forward>().stored() ? kOverheadStored : 0;
  if (has_widest_half_values(spec)) return kRegistersPerThread;
  return sm80_forward_registers(spec) + overhead + dropout + stored + cached_overhead(spec) +
         (spec.aligned ? 0 : kOverheadUnaligned);
}

int blocks_that_fit(const KernelSpec& spec) {
  const ArchLimits arch = limits(spec.arch);
  const int registers = (std::min(kRegistersPerThread, comfortable_registers(spec)) + 7) / 8 * 8;
  const int by_registers = arch.registers_per_sm / (spec.threads() * registers);
  const int by_shared = arch.shared_per_sm / (sm80_forward_shared_bytes(spec) + kReservedSharedPerBlock);
  const bool shares = splits_stored_cache(spec) && has_half_products(spec);
  return std::clamp(std::min(by_registers, by_shared), 1, shares ? kMostHalfBlocks : 8);
}

/// Of a bounded grid a block has a multiprocessor of its own.
int resident_blocks(const KernelSpec& spec) {
  return spec.bounded ? 1 : blocks_that_fit(spec);
}

/// Whether what pairs of warps exchange leaves no room for the second block, which would fit without.
bool costs_second_block(const KernelSpec& spec) {
  if (warps_n(spec) == 1) return false;
  KernelSpec alone = spec;
  alone.warps_n = 0;
  return sm80_forward_refusal(alone).empty() && blocks_that_fit(spec) == 1 && blocks_that_fit(alone) > 1;
}

// Of the cost model, a multiprocessor's cycles: multiply-adds of mma.sync, bytes of shared memory, exponentials.
constexpr double kMultiplyAdds = 1024;
constexpr double kMultiplyAdds32Bit = 170;  // three tf32 products for one
constexpr double kSharedBytes = 128;
constexpr double kExponentials = 16;
constexpr double kStepCycles = 250;  // waits and barriers of a step
constexpr double kPairCycles = 60;   // and of what pairs of warps exchange

/// Cycles for a query row and a key; see candidates.hpp.
double cost_of(const KernelSpec& spec, const Problem& problem) {
  const double element = double(size_of(spec.dtype));
  const double area = double(spec.tile_m) * spec.tile_n;
  const double tensor = area * (spec.d_qk + spec.d_v) / (spec.dtype == DType::f32 ? kMultiplyAdds32Bit : kMultiplyAdds);
  const double sharing = warps_n(spec);
  const double keys_read = double(spec.warps) / sharing * spec.tile_n * (spec.d_qk + spec.d_v) * element;
  const double query_read =
      spec.as<Sm80Forward>().q_in_registers ? 0 : double(spec.tile_m) * sharing * spec.d_qk * element;
  const double exchanged = sharing > 1 ? 2 * area * element : 0;  // P, written and read
  const double written = double(spec.tile_n) * (spec.d_qk + spec.d_v) * element;
  const double shared = (keys_read + query_read + exchanged + written) / kSharedBytes;
  const double softmax = area / kExponentials;
  // Another block, or tiles on their way, fill the gaps that a block's own waits leave.
  const double cover = spec.min_blocks * (spec.stages > 1 ? 1.5 : 1);
  const double step = std::max(tensor, shared) + 0.3 * std::min(tensor, shared) +
                      (softmax * (spec.as<Sm80Forward>().loop_bodies == 1 && spec.causal ? 1.15 : 1) + kStepCycles +
                       (sharing > 1 ? kPairCycles : 0)) /
                          cover;
  const double wasted =
      spec.causal ? 1 + double(spec.tile_m + spec.tile_n) / double(std::max<std::int64_t>(problem.s_kv, 1)) : 1;
  const std::int64_t rows = spec.pack_gqa ? problem.s_q * (problem.h_q / problem.h_kv) : problem.s_q;
  const std::int64_t tiles = (rows + spec.tile_m - 1) / spec.tile_m;
  const double padding = double(tiles) * spec.tile_m / double(std::max<std::int64_t>(rows, 1));
  return step / area * wasted * padding;
}

KernelSpec with_tile(const Problem& problem, const TileFamily& tile, int tile_n, const Fixed& fixed) {
  KernelSpec spec;
  Sm80Forward& own = spec.own.emplace<Sm80Forward>();
  spec.arch = problem.arch;
  spec.dtype = problem.dtype;
  spec.d_qk = problem.d_qk;
  spec.d_v = problem.d_v;
  spec.causal = problem.causal;
  if (problem.variants != nullptr) spec.variants = *problem.variants;
  spec.positive_scale = problem.positive_scale || !spec.variants.score.empty();  // a function sees scaled scores
  spec.aligned = problem.aligned;
  spec.varlen = problem.varlen;
  spec.dropout = problem.dropout;
  spec.place_in_memory = problem.reads_place();
  spec.page_size = problem.page_size;
  spec.accumulate = problem.accumulate;
  set_statistics(problem, spec);
  const int warps = fixed.number("warps", tile.warps);
  const int sharing = fixed.number("warps_n", tile.warps_n);
  // Of tile_m; a wrong `warps` is refused later.
  const bool groups = sharing > 2 || (sharing == 2 && tile.warps_n == 2 && tile.tile_m < 16 * tile.warps);
  const int rows = groups ? std::max(std::clamp(warps, 1, kMaxWarps) / sharing, 1) : std::clamp(warps, 1, kMaxWarps);
  own.split_warps = fixed.flag("split_warps", tile.split_warps);
  const int granule = own.split_warps ? std::min(tile.tile_m, 16) : 16 * rows;
  spec.tile_m = fixed.number("tile_m", std::max(tile.tile_m / granule, 1) * granule);
  spec.tile_n = fixed.number("tile_n", tile_n);
  spec.warps = warps;
  spec.warps_n = sharing == 1 ? 0 : sharing;
  spec.stages = fixed.number("stages", tile.stages);
  fixed.set_others(spec);
  own.q_in_registers = fixed.flag("q_in_registers", tile.q_in_registers);
  own.value_in_key = problem.value_in_key && has_groups(spec);  // else K is read again, as V
  // With wide O the multiplications fill the gaps of the exponentials, and a branch would part the two.
  own.conditional_rescale = problem.d_v <= 128 || problem.dtype == DType::f32 || has_groups(spec);
  own.loop_bodies = fixed.number("loop_bodies", tile.loop_bodies);
  own.k_storage = problem.latent() ? kLatentRows : storage_of(problem.k_dtype, problem.group_size);
  own.v_storage = storage_of(problem.v_dtype, problem.group_size);
  return spec;
}

}  // namespace

int sm80_forward_shared_bytes(const KernelSpec& spec) {
  const int element = static_cast<int>(size_of(spec.dtype));
  const Sm80Forward& own = spec.as<Sm80Forward>();
  const int query = std::max(spec.tile_m, 16) * std::max(pitch(spec.d_qk, element), pitch(spec.d_v, element));
  const int of_v = own.value_in_key ? 0 : pitch(stored_row_bytes(own.v_storage, spec.d_v, element), 1);
  const int key = pitch(stored_row_bytes(own.k_storage, spec.d_qk, element), 1) + of_v;
  const int scales =  // of a key
      own.stored() ? stored_scale_bytes(own.k_storage, spec.d_qk) + stored_scale_bytes(own.v_storage, spec.d_v) : 0;
  const int loop = query + spec.stages * spec.tile_n * (key + scales) + exchange_bytes(spec);
  // What split warps join: row statistics and O, of padded rows, of each.
  const int joined = own.split_warps ? query + spec.warps * spec.tile_m * (2 + spec.d_v + 8) * 4 : 0;
  return std::max(loop, joined);
}

int sm80_forward_registers(const KernelSpec& spec) {
  const int m_tiles = m_tiles_of(spec);
  const int output = m_tiles * columns_of(spec) / 2;
  const int keys = spec.tile_n / (spec.as<Sm80Forward>().split_warps ? std::max(spec.warps, 1) : warps_n(spec));
  const int scores = m_tiles * keys / 2;
  const int query =
      spec.as<Sm80Forward>().q_in_registers ? m_tiles * spec.d_qk * static_cast<int>(size_of(spec.dtype)) / 8 : 0;
  return output + scores + query;
}

int sm80_forward_resident_blocks(const KernelSpec& spec) {
  return resident_blocks(spec);
}

int sm80_forward_harmless_spill(const KernelSpec& spec) {
  return has_widest_half_values(spec) ? kHarmlessSpill : 0;
}

std::string sm80_forward_refusal(const KernelSpec& spec) {
  if (spec.warps < 1 || spec.warps > kMaxWarps) {
    return fmt::format("warps = {}: accepted are 1 to {}", spec.warps, kMaxWarps);
  }
  if (std::string reason = split_refusal(spec); !reason.empty()) return reason;
  const bool by_warps = spec.as<Sm80Forward>().split_warps || has_groups(spec) || spec.tile_m % (16 * spec.warps) == 0;
  const int fewest = spec.as<Sm80Forward>().split_warps ? kHalfTile : 16;
  if (spec.tile_m < fewest || spec.tile_m > kMaxTileM || !by_warps) {
    return fmt::format("tile_m = {}: accepted are multiples of 16 * warps = {} up to {}", spec.tile_m, 16 * spec.warps,
                       kMaxTileM);
  }
  if (spec.tile_n < 16 || spec.tile_n % 16 != 0 || spec.tile_n > 256) {
    return fmt::format("tile_n = {}: accepted are multiples of 16 up to 256", spec.tile_n);
  }
  if (std::string reason = sharing_refusal(spec); !reason.empty()) return reason;
  if (spec.stages < 1 || spec.stages > 4) return fmt::format("stages = {}: accepted are 1 to 4", spec.stages);
  if (spec.as<Sm80Forward>().loop_bodies < 1 || spec.as<Sm80Forward>().loop_bodies > 2) {
    return fmt::format("loop_bodies = {}: accepted are 1 and 2", spec.as<Sm80Forward>().loop_bodies);
  }
  const int shared = sm80_forward_shared_bytes(spec);
  const int shared_limit = limits(spec.arch).shared_per_block;
  if (shared > shared_limit) {
    return fmt::format("tile_m = {}, tile_n = {}, stages = {} need {} bytes of shared memory; {} offers {}",
                       spec.tile_m, spec.tile_n, spec.stages, shared, to_string(spec.arch), shared_limit);
  }
  if (spec.as<Sm80Forward>().q_in_registers && spec.dtype == DType::f32) {
    return "q_in_registers = true: fp32 kernels keep Q in shared memory";
  }
  const int registers = sm80_forward_registers(spec);
  const int offered = std::min(kRegistersPerThread, limits(spec.arch).registers_per_sm / spec.threads() / 8 * 8);
  if (registers + kFixedRegisters > offered) {
    return fmt::format("tile_m = {}, tile_n = {}, warps = {} hold {} registers of fragments a thread; at most {} fit",
                       spec.tile_m, spec.tile_n, spec.warps, registers, offered - kFixedRegisters);
  }
  return {};
}

bool sm80_forward_finds_parts(const Problem& problem, const Fixed& fixed) noexcept {
  if (std::max(problem.d_qk, problem.d_v) > kWideHeadDim || problem.dtype == DType::f32) return false;
  if (problem.given_schedule || problem.accumulate || problem.dropout || problem.row_statistics()) return false;
  if (problem.invariance != Invariance::none || needs_tile_lists(problem) || problem.h_kv == 0) return false;
  const std::int64_t group = problem.h_q / problem.h_kv;
  const bool packs = group > 1 && fixed.flag("pack_gqa", true);
  const std::int64_t sharing = packs ? group : 1;
  if (problem.b > kernel::kOwnItems || problem.typical_s_q() * sharing > kFewRows) return false;
  if (problem.varlen && slots(problem.total_q * sharing, kFewRows, problem.b) > kernel::kOwnItems) return false;
  // Of plain tensors, splits were as fast or faster wherever this was measured.
  if (!fixed.flag("own_parts", problem.paged()) || fixed.flag("scheduled", false)) return false;
  if (problem.paged()) return visible_keys(problem) >= kScheduledKeys;
  const std::int64_t tiles = problem.b * (packs ? problem.h_kv : problem.h_q);
  if (problem.varlen || fixed.has("splits")) return false;
  return tiles > 0 && 2 * tiles <= kHopperMultiprocessors && visible_keys(problem) >= 2 * kKeysPerSplit;
}

int sm80_forward_decide(const Problem& problem, const Fixed& fixed, Choice& choice) noexcept {
  const std::int64_t rows = problem.typical_s_q() * (choice.pack_gqa ? problem.h_q / problem.h_kv : 1);
  if (std::max(problem.d_qk, problem.d_v) <= kWideHeadDim) {
    choice.own_parts = sm80_forward_finds_parts(problem, fixed);
    const bool few = rows <= kFewRows && problem.dtype != DType::f32 && (problem.paged() || problem.stored()) &&
                     !problem.row_statistics();
    choice.few_rows = choice.short_query && (few || choice.own_parts) ? 2 : 0;
    const std::int64_t heads = problem.b * (choice.pack_gqa ? problem.h_kv : problem.h_q);
    const bool of_16_bits = problem.dtype != DType::f32 && !problem.stored();
    const bool few_heads = choice.few_rows > 0 && choice.own_parts && problem.paged() && heads <= kFewestTiles;
    // Parts of more KV tiles are better off with two blocks, one of which computes while the other waits.
    if (few_heads && of_16_bits &&
        heads * visible_keys(problem) <= kDeepestTiles * kKeysOfFewRows * kHopperMultiprocessors)
      choice.few_rows = 3;
    if (choice.few_rows > 0 && problem.stored()) {
      if (has_half_tiles(problem, choice)) choice.few_rows |= kHalfRows;
      if (fills_long_tiles(problem)) choice.few_rows |= kLongTiles;
    }
    return choice.few_rows > 0 ? 16 : choice.short_query ? 64 : 128;
  }
  choice.few_rows = problem.dtype == DType::f32 || rows > 32 ? 0 : rows > 16 ? 1 : 2;
  return choice.few_rows == 0 ? 64 : choice.few_rows == 1 ? 32 : 16;
}

Candidates sm80_forward_candidates(const Problem& problem, const Choice& choice) {
  Candidates candidates;
  const auto add = [&](const TileFamily& tile, int tile_n) {
    KernelSpec spec = with_tile(problem, tile, tile_n, {});
    spec.pack_gqa = choice.pack_gqa;
    spec.split = choice.splits > 1;
    spec.as<Sm80Forward>().scheduled = choice.scheduled;
    spec.as<Sm80Forward>().own_parts = choice.own_parts;
    spec.bounded = problem.bounded && !choice.scheduled && !choice.own_parts;
    const bool as_wanted = spec.tile_m == tile.tile_m;
    if (!as_wanted || !sm80_forward_refusal(spec).empty() || comfortable_registers(spec) > kRegistersPerThread) return;
    spec.min_blocks = resident_blocks(spec);
    candidates.push_back({spec, cost_of(spec, problem)});
  };
  if (std::max(problem.d_qk, problem.d_v) > kWideHeadDim) {
    for (const int tile_m : {16, 32, 64}) {
      for (const int warps : {2, 4, 8}) {
        for (const int sharing : {2, 4, 8}) {
          for (const int stages : {1, 2, 3}) {
            for (const int tile_n : {16, 32, 64, 96, 128}) add({tile_m, warps, stages, false, 1, {}, sharing}, tile_n);
          }
        }
      }
    }
    return candidates;
  }
  const bool wide = std::max(problem.d_qk, problem.d_v) > 128;  // else a warp has room for two m tiles by itself
  for (const int tile_m : {32, 64, 128}) {
    if (choice.short_query && tile_m > 64) continue;
    for (const int warps : {2, 4, 8}) {
      for (const int stages : {1, 2}) {
        for (const bool q_in_registers : {false, true}) {
          for (int loop_bodies = 1; loop_bodies <= (problem.causal ? 2 : 1); ++loop_bodies) {
            for (int tile_n = 16; tile_n <= 128; tile_n += 16) {
              add({tile_m, warps, stages, q_in_registers, loop_bodies, {}}, tile_n);
              const bool pairs = wide && tile_m == 16 * warps;
              if (pairs) add({tile_m, warps, stages, q_in_registers, loop_bodies, {}, 2}, tile_n);
            }
          }
        }
      }
    }
  }
  return candidates;
}

namespace {

/// Those that fit, and why the last one that does not does not.
std::vector<KernelSpec> fitting_specs(const Problem& problem, const Fixed& fixed, const Choice& choice,
                                      std::string* refusal) {
  std::vector<KernelSpec> specs;
  const auto add = [&](const TileFamily& tile, int tile_n, bool comfortable) {
    KernelSpec spec = with_tile(problem, tile, tile_n, fixed);
    spec.pack_gqa = choice.pack_gqa;
    spec.split = choice.splits > 1;
    spec.as<Sm80Forward>().scheduled = choice.scheduled;
    spec.as<Sm80Forward>().own_parts = choice.own_parts;
    spec.bounded = problem.bounded && !choice.scheduled && !choice.own_parts;
    const std::string reason = sm80_forward_refusal(spec);
    if (!reason.empty()) {
      *refusal = reason;
      return;
    }
    if ((comfortable_registers(spec) <= kRegistersPerThread) != comfortable) return;
    spec.min_blocks = resident_blocks(spec);
    if (!fixed.has("warps_n") && costs_second_block(spec)) return;
    // Where that spills, a block less is better than a tile whose rows are mostly not there.
    const int fewest = splits_stored_cache(spec) ? std::max(spec.min_blocks - 1, 1) : spec.min_blocks;
    for (; spec.min_blocks >= fewest; --spec.min_blocks) {
      if (std::ranges::find(specs, spec) == specs.end() && specs.size() < kMaxSpecs) specs.push_back(spec);
    }
  };
  if (problem.fixed_rows()) {
    // The first alone: which one spills, an invariant call may not depend on.
    const RowArithmetic arithmetic = row_arithmetic(RowFacts::of(problem, false));
    const std::span<const TileFamily> tiles =
        choice.short_query ? std::span<const TileFamily>(kFixedRowsShort) : kFixedRows;
    for (const bool comfortable : {true, false}) {
      for (const TileFamily& tile : tiles) add(tile, arithmetic.tile_n, comfortable);
    }
    if (specs.size() > 1) specs.erase(specs.begin() + 1, specs.end());
    for (KernelSpec& spec : specs) {
      spec.as<Sm80Forward>().split_keys = arithmetic.split_keys;
      spec.split = choice.shares_splits;
    }
    return specs;
  }
  for (const bool comfortable : {true, false}) {
    for (TileFamily tile : preferred_tiles(problem, choice)) {
      if (problem.stored() && (choice.few_rows & kHalfRows) != 0 && tile.split_warps) tile.tile_m = kHalfTile;
      for (const int tile_n : tile.tile_n) add(tile, tile_n, comfortable);
    }
  }
  return specs;
}

}  // namespace

bool sm80_forward_fits(const Problem& problem, const Fixed& fixed, const Choice& choice) {
  std::string ignored;
  return !fitting_specs(problem, fixed, choice, &ignored).empty();
}

std::vector<KernelSpec> sm80_forward_specs(const Problem& problem, const Fixed& fixed, const Choice& choice) {
  std::string refusal;
  std::vector<KernelSpec> specs = fitting_specs(problem, fixed, choice, &refusal);
  if (!specs.empty()) return specs;
  throw Error(fixed.fixes_tile_of(Sm80Forward::kernel()) ? ErrorCode::invalid_argument : ErrorCode::unsupported,
              fmt::format("kernel: no sm80 forward kernel fits: {}", refusal),
              {{"argument", "kernel"}, {"value", refusal}, {"accepted", "tiles that fit the GPU"}});
}

}  // namespace fa::plan
