#include "plan/sm90_fp8_forward.hpp"
#include "plan/mask_tiles.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include <fa/error.hpp>
#include <sm90/sm90_forward_params.cuh>
#include <sm90/sm90_fp8_layout.cuh>

#include "plan/catalogue.hpp"
#include "plan/fixed.hpp"
#include "plan/sm80_fp8_forward.hpp"
#include "plan/tensor_map.hpp"
#include "support/text.hpp"

namespace fa::plan {
namespace {

using sm90::kWarpgroupRows;

constexpr int kMaxHeadDim = 256;
constexpr int kHeadDimStep = 16;  // the bytes that a tensor map's strides are multiples of
constexpr int kMaxConsumers = 4;
constexpr int kKeyStep = 32;  // of a product
constexpr int kWideKeyStep = 16;
constexpr int kMaxTileN = 256;
constexpr int kBoxRows = 8;     // of a box of a page, at least: whole rows of the swizzle
constexpr int kTurnTiles = 24;  // KV tiles of a causal grid's longest rows from which on turns are the faster

struct Tile {
  int tile_m, tile_n, stages, q_buffers;
  bool ahead, take_turns;
  int most_value_columns;  // that are on their way besides S and O, or in the place of S, by what ptxas has registers
                           // for
};

// In order of preference, of those that fit; they share tile_m.
constexpr Tile kThree[] = {{192, 128, 3, 2, false, false, 128}, {192, 128, 2, 1, false, false, 128}};
constexpr Tile kThreeOf96[] = {{192, 96, 3, 2, false, false, 96}, {192, 96, 2, 1, false, false, 96}};
constexpr Tile kMedium[] = {{128, 128, 3, 2, true, true, 128}, {128, 128, 2, 2, false, false, 64}};
constexpr Tile kMediumOfBoth[] = {{128, 128, 3, 2, true, true, 64}, {128, 128, 2, 2, false, false, 64}};
constexpr Tile kLarge[] = {{128, 128, 2, 1, false, false, 64}, {128, 96, 2, 1, false, false, 64}};  // d_v up to 192
constexpr Tile kLargest[] = {{128, 96, 2, 1, false, false, 32}, {128, 64, 2, 1, false, false, 32}};
constexpr Tile kOf256[] = {{128, 128, 2, 1, false, false, 128}, {128, 96, 2, 1, false, false, 32}};

// With P in 16 bits, of twice the registers, and V of twice the bytes.
constexpr Tile kPreciseThree[] = {{192, 128, 3, 2, true, true, 0}, {192, 128, 2, 1, true, true, 0}};
constexpr Tile kPreciseMedium[] = {{192, 80, 3, 2, true, true, 0}, {128, 128, 2, 2, true, true, 0}};
constexpr Tile kPreciseOfTwo[] = {{128, 128, 2, 2, true, true, 0}, {128, 64, 2, 2, true, true, 0}};
constexpr Tile kPreciseLarge[] = {{128, 96, 2, 1, true, true, 0}, {128, 64, 2, 1, true, true, 0}};
constexpr Tile kPreciseLargest[] = {{128, 64, 3, 1, true, true, 0}, {128, 64, 2, 1, true, true, 0}};

// Of splits of few rows, which wait for memory: one warpgroup, and as many bytes in flight as fit.
constexpr Tile kFew[] = {{64, 128, 4, 2, true, false, 128}, {64, 128, 3, 1, true, false, 128}};
constexpr Tile kFewLarge[] = {{64, 128, 3, 1, true, false, 64}, {64, 128, 2, 1, true, false, 64}};
constexpr Tile kFewLargest[] = {{64, 128, 2, 1, true, false, 32}, {64, 96, 2, 1, true, false, 32}};
constexpr Tile kPreciseFew[] = {{64, 128, 3, 1, true, false, 0}, {64, 64, 3, 1, true, false, 0}};

std::span<const Tile> few_tiles(const Problem& problem) noexcept {
  if (problem.precise) return kPreciseFew;
  const int d = std::max(problem.d_qk, problem.d_v);
  return d <= 128 ? std::span<const Tile>(kFew) : d <= 192 ? std::span<const Tile>(kFewLarge) : kFewLargest;
}

std::span<const Tile> precise_tiles(const Problem& problem) noexcept {
  const int d = std::max(problem.d_qk, problem.d_v);
  const bool more = problem.varlen || problem.paged() || problem.key_scales ||
                    problem.value_scales;  // registers than three consumers have
  if (d > 192) return kPreciseLargest;
  if (d > 128) return kPreciseLarge;
  if (more) return kPreciseOfTwo;
  return problem.d_v <= 64 ? std::span<const Tile>(kPreciseThree) : kPreciseMedium;
}

/// What a KV tile adds to O takes the registers of S where it has as many columns as there are keys.
std::span<const Tile> tiles_for(const Problem& problem, bool single_level) noexcept {
  if (problem.precise) return precise_tiles(problem);
  const int d_qk = problem.d_qk, d_v = problem.d_v;
  // O is of the tensor cores then, beside S; sequences and scales of keys do not fit three consumers' registers.
  const bool of_keys = problem.key_scales || problem.value_scales || problem.paged(),
             of_both = problem.key_scales && problem.value_scales;
  if (of_both && d_qk <= 128 && d_v == 128) return kMediumOfBoth;
  const bool varied = problem.dtype == DType::i8 && problem.variants != nullptr;  // and bits of whole numbers
  if ((single_level || problem.varlen || of_keys || varied) && std::max(d_qk, d_v) <= 128) return kMedium;
  if (d_qk <= 128 && (d_v <= 64 || d_v == 128)) return kThree;
  if (d_qk <= 128 && d_v == 96) return kThreeOf96;
  if (d_qk <= 128 && d_v <= 128) return kMedium;
  if (d_v <= 192) return kLarge;
  return d_v == 256 && !of_both ? std::span<const Tile>(kOf256) : kLargest;
}

/// Equal slices, in multiples of 16.
int value_columns(int d_v, int most) noexcept {
  int columns = kHeadDimStep;
  for (int slice = kHeadDimStep; slice <= most; slice += kHeadDimStep) {
    if (d_v % slice == 0) columns = slice;
  }
  return columns;
}

sm90::Fp8Shape shape_of(const KernelSpec& spec) {
  return {.tile_m = spec.tile_m,
          .tile_n = spec.tile_n,
          .d_qk = spec.d_qk,
          .d_v = spec.d_v,
          .stages = spec.stages,
          .q_buffers = spec.as<Sm90Fp8Forward>().q_buffers,
          .precise = spec.as<Sm90Fp8Forward>().precise,
          .shared_scales = spec.as<Sm90Fp8Forward>().shared_scales};
}

KernelSpec with_tile(const Problem& problem, const Fixed& fixed, const Choice& choice, const Tile& tile) {
  KernelSpec spec;
  Sm90Fp8Forward& own = spec.own.emplace<Sm90Fp8Forward>();
  spec.arch = problem.arch;
  spec.dtype = problem.dtype;
  spec.d_qk = problem.d_qk;
  spec.d_v = problem.d_v;
  spec.causal = problem.causal;
  spec.place_in_memory = problem.reads_place();
  if (problem.variants != nullptr) spec.variants = *problem.variants;
  spec.positive_scale = true;  // signs of scales are known to the device alone
  spec.varlen = problem.varlen;
  spec.page_size = problem.page_size;
  spec.bounded = problem.bounded && comes_in_waves(problem);
  spec.tile_m = fixed.number("tile_m", tile.tile_m);
  spec.tile_n = fixed.number("tile_n", tile.tile_n);
  spec.stages = fixed.number("stages", tile.stages);
  spec.pack_gqa = choice.pack_gqa;
  spec.split = choice.splits > 1;
  own.q_buffers = fixed.number("q_buffers", tile.q_buffers);
  // Measured: of three consumers turns help where most KV tiles of a query tile are whole. Without turns ptxas spills
  // a few bytes of i8.
  const bool whole = choice.long_rows || (problem.d_v == 128 && !problem.causal);
  const bool turns = whole || problem.dtype == DType::i8;
  own.take_turns = fixed.flag(
      "take_turns", (tile.take_turns || (tile.tile_m == kThree[0].tile_m && turns)) && spec.tile_m > kWarpgroupRows);
  own.single_level = fixed.flag("single_level", problem.precise);
  own.ahead = fixed.flag("ahead", tile.ahead && (!own.single_level || problem.precise));
  own.value_columns = own.single_level
                          ? problem.d_v
                          : fixed.number("value_columns", value_columns(problem.d_v, tile.most_value_columns));
  own.half_output = problem.o_dtype == DType::f16;
  own.byte_output = problem.o_dtype == DType::e4m3;
  own.key_scales = problem.key_scales;
  own.value_scales = problem.value_scales;
  own.precise = problem.precise;
  fixed.set_others(spec);
  spec.warps = spec.tile_m > 0 ? sm90_fp8_forward_warps(spec) : 0;
  return spec;
}

/// Of the keys that are copied at once.
std::int64_t box_keys(const Problem& problem) noexcept {
  return problem.contiguous() ? kMaxTileN : problem.page_size;
}

/// The first and the last key that a row needs may not be in one box.
bool window_within_a_page(const Problem& problem) noexcept {
  const bool windowed = problem.variants != nullptr && problem.variants->left_window;
  return problem.paged() && windowed && problem.window_left < box_keys(problem);
}

}  // namespace

const char* sm90_fp8_forward_misfit(const Problem& problem) noexcept {
  if (!problem.fp8()) return "sm90_fp8 with dtype e4m3, e5m2 or i8";
  if (problem.arch.sm() != 90 || problem.arch.suffix != 'a') return "sm90_fp8 on a GPU of architecture sm_90a";
  if (std::max(problem.d_qk, problem.d_v) > kMaxHeadDim || problem.d_qk % kHeadDimStep != 0 ||
      problem.d_v % kHeadDimStep != 0) {
    return "sm90_fp8 with head dims in multiples of 16 up to 256";
  }
  if (problem.invariance != Invariance::none) return "sm90_fp8 with invariance none";
  if (problem.paged() && !problem.contiguous() && problem.page_size % kBoxRows != 0) {
    return "sm90_fp8 with a page_size that is a multiple of 8";
  }
  if (problem.paged() && problem.variants != nullptr && problem.variants->chunked) {
    return "sm90_fp8 with page_size 0, or without chunks";
  }
  if (problem.dropout) return "sm90_fp8 without dropout";
  if (problem.accumulate) return "sm90_fp8 without accumulate";
  if (problem.value_in_key) return "sm90_fp8 with value_in_key 0";
  if (problem.variants != nullptr && !problem.variants->mask.empty()) return "sm90_fp8 without a mask function";
  return nullptr;
}

const char* sm90_fp8_forward_obstacle(const Problem& problem) noexcept {
  if (!problem.aligned) return "rows of q, k, v or o do not start at multiples of 16 bytes";
  if (!problem.tensor_maps) {
    return problem.paged() ? "a stride of q, k, v or o is zero, negative or 2^40 bytes or more, or pages are no "
                             "whole number of heads apart, of k and v the same"
                           : "a stride of q, k, v or o is zero, negative or 2^40 bytes or more";
  }
  if (problem.bounded_rows() > Problem::kMostBoundedRows) {
    return "the packed batch, a page or a row of the cache has more than 2^30 rows";
  }
  return window_within_a_page(problem) ? "a window is shorter than a page" : nullptr;
}

void check_fp8(const Problem& problem, const Fixed& fixed, const Choice& choice) {
  if (forward_family(choice.family).of_bytes) return;
  // A kernel by mma.sync serves whatever one by wgmma does, but for i8 and precise.
  const char* const without_mma = sm80_fp8_forward_misfit(problem);
  const bool by_mma = without_mma == nullptr && fixed.family != Family::sm90_fp8;
  const bool may_be_hoppers = problem.arch.sm() == 90 || problem.dtype == DType::i8 || problem.precise;
  const bool of_hopper = may_be_hoppers && fixed.family != Family::sm80_fp8;
  const char* const misfit = by_mma ? nullptr : of_hopper ? sm90_fp8_forward_misfit(problem) : without_mma;
  if (misfit != nullptr) support::throw_unsupported("dtype", to_string(problem.dtype), misfit);
  if (!by_mma && window_within_a_page(problem)) {
    support::throw_unsupported(
        "window_left", problem.window_left,
        fmt::format("{} or more with dtype {} over {}", box_keys(problem), to_string(problem.dtype),
                    problem.contiguous() ? "a contiguous cache" : "pages"));
  }
  const char* const obstacle = by_mma ? sm80_fp8_forward_obstacle(problem) : sm90_fp8_forward_obstacle(problem);
  if (obstacle != nullptr) {
    const char* const accepted = by_mma ? "rows that start at multiples of 16 bytes with dtype {}"
                                        : "rows and strides that the copy engine can describe with dtype {}: multiples "
                                          "of 16 bytes, above 0 and below 2^40";
    support::throw_invalid("q, k, v or o", obstacle, fmt::format(fmt::runtime(accepted), to_string(problem.dtype)));
  }
  const char* const families = !by_mma ? "sm90_fp8" : of_hopper ? "sm90_fp8 and sm80_fp8" : "sm80_fp8";
  support::throw_invalid("kernel", to_string(choice.family),
                         fmt::format("{} with dtype {}", families, to_string(problem.dtype)));
}

int sm90_fp8_forward_tile_m(const Problem& problem, const Fixed& fixed) noexcept {
  const bool single_level = fixed.flag("single_level", false);
  return fixed.number("tile_m", tiles_for(problem, single_level).front().tile_m);
}

int sm90_fp8_forward_decide(const Problem& problem, const Fixed& fixed, Choice& choice) noexcept {
  const std::int64_t tiles = problem.b * (choice.pack_gqa ? problem.h_kv : problem.h_q);
  const bool pays = 2 * tiles <= kHopperMultiprocessors && visible_keys(problem) >= kFewestSplitKeys;
  const bool wanted = fixed.has("splits") ? fixed.number("splits") > 1 : pays;
  choice.splits_request = wanted && problem.paged() && !problem.varlen && problem.b == 1;
  const bool splits = wanted && (choice.splits_request || !problem.ragged());
  const bool whole_groups = !choice.pack_gqa || kWarpgroupRows % (problem.h_q / problem.h_kv) == 0;
  choice.few_rows = splits && choice.short_query && whole_groups && !fixed.has("tile_m") ? 1 : 0;
  const std::int64_t tiles_of_row = visible_keys(problem) / kThree[0].tile_n;
  choice.long_rows = problem.d_v <= 64 && problem.variants == nullptr && !choice.short_query &&
                     (!problem.causal || tiles_of_row >= kTurnTiles);
  if (choice.few_rows != 0) return few_tiles(problem).front().tile_m;
  return sm90_fp8_forward_tile_m(problem, fixed);
}

int sm90_fp8_forward_warps(const KernelSpec& spec) noexcept {
  return shape_of(spec).threads() / 32;
}

int sm90_fp8_forward_shared_bytes(const KernelSpec& spec) {
  return sm90::fp8_layout(shape_of(spec)).bytes;
}

std::string sm90_fp8_forward_refusal(const KernelSpec& spec) {
  const auto& own = spec.as<Sm90Fp8Forward>();
  if (spec.tile_m < kWarpgroupRows || spec.tile_m % kWarpgroupRows != 0 ||
      spec.tile_m > kMaxConsumers * kWarpgroupRows) {
    return fmt::format("tile_m = {}: accepted are 64, 128, 192 and 256", spec.tile_m);
  }
  const int key_step = own.precise ? kWideKeyStep : kKeyStep;
  if (spec.tile_n < kKeyStep || spec.tile_n % key_step != 0 || spec.tile_n > kMaxTileN) {
    return fmt::format("tile_n = {}: accepted are multiples of {} from 32 to 256", spec.tile_n, key_step);
  }
  if (spec.stages < 1 || spec.stages > 8) return fmt::format("stages = {}: accepted are 1 to 8", spec.stages);
  if (own.q_buffers < 1 || own.q_buffers > 2) {
    return fmt::format("q_buffers = {}: accepted are 1 and 2", own.q_buffers);
  }
  if (own.value_columns < kHeadDimStep || own.value_columns % kHeadDimStep != 0 || spec.d_v % own.value_columns != 0) {
    return fmt::format("value_columns = {}: accepted are multiples of 16 that divide d_v = {}", own.value_columns,
                       spec.d_v);
  }
  if (own.take_turns && spec.tile_m == kWarpgroupRows) return "take_turns = 1: accepted is 0 with one warpgroup";
  if (own.ahead && own.single_level && !own.precise) return "ahead = 1: accepted is 0 with single_level";
  if (own.precise && !own.single_level) return "single_level = 0: accepted is 1 with precise";
  if (own.half_bytes && (own.precise || own.value_scales)) {
    return "half_bytes = 1: accepted is 0 with precise and with value_scales";
  }
  if (own.polynomials < 0 || own.polynomials > 8 || (own.polynomials != 0 && own.precise)) {
    return fmt::format("polynomials = {}: accepted are 0 to 8, and 0 with precise", own.polynomials);
  }
  if (own.shared_scales && !own.key_scales && !own.value_scales) {
    return "shared_scales = 1: accepted is 0 without key_scales and value_scales";
  }
  if (own.scales_of_all && (!own.value_scales || own.precise)) {
    return "scales_of_all = 1: accepted is 0 without value_scales, and with precise, which has it";
  }
  if (own.value_scales && own.single_level && !own.precise) return "single_level = 1: accepted is 0 with value_scales";
  if (spec.split && spec.varlen) return "splits > 1: accepted is 1 of packed batches";
  if (spec.page_size != 0) {
    const int box = rows_together(spec.page_size, spec.tile_n);
    if (box % kBoxRows != 0 || spec.variants.chunked) {
      return fmt::format("page_size = {}: accepted are multiples of 8, without chunks", spec.page_size);
    }
    if (spec.tile_n / box > 32) return fmt::format("tile_n = {}: accepted are at most 32 boxes", spec.tile_n);
  }
  const int shared = sm90_fp8_forward_shared_bytes(spec);
  const int shared_limit = limits(spec.arch).shared_per_block;
  if (shared > shared_limit) {
    return fmt::format(
        "tile_m = {}, tile_n = {}, stages = {}, q_buffers = {} need {} bytes of shared memory; {} offers "
        "{}",
        spec.tile_m, spec.tile_n, spec.stages, own.q_buffers, shared, to_string(spec.arch), shared_limit);
  }
  return {};
}

std::vector<KernelSpec> sm90_fp8_forward_specs(const Problem& problem, const Fixed& fixed, const Choice& choice) {
  std::string refusal;
  std::vector<KernelSpec> specs;
  const bool single_level = fixed.flag("single_level", false);
  for (const Tile& tile : choice.few_rows != 0 ? few_tiles(problem) : tiles_for(problem, single_level)) {
    KernelSpec spec = with_tile(problem, fixed, choice, tile);
    const std::string reason = sm90_fp8_forward_refusal(spec);
    if (!reason.empty()) {
      refusal = reason;
    } else if (std::ranges::find(specs, spec) == specs.end()) {
      specs.push_back(std::move(spec));
    }
  }
  if (!specs.empty()) return specs;
  throw Error(ErrorCode::invalid_argument, fmt::format("kernel: no sm90_fp8 forward kernel fits: {}", refusal),
              {{"argument", "kernel"}, {"value", refusal}, {"accepted", "fields that fit the GPU and d_v"}});
}

}  // namespace fa::plan
