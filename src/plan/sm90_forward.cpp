// More than 600 lines: what is planned, refused and tuned counts the same registers and shared memory.
#include "plan/sm90_forward.hpp"
#include "plan/forward_launch.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/row_arithmetic.hpp"
#include "plan/tensor_map.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <span>

#include <common/schedule_params.cuh>
#include <fa/error.hpp>
#include <sm90/sm90_forward_layout.cuh>
#include <sm90/sm90_forward_params.cuh>

namespace fa::plan {
namespace {

using sm90::kSlabColumns;
using sm90::kWarpgroupRows;

constexpr int kMaxHeadDim = 256;
constexpr int kMaxConsumers = 4;
// What ptxas gives S, P and O of a consumer thread without spilling, by consumer warpgroups: of 255, 232, 160 and 112.
constexpr int kFragmentRegisters[] = {224, 208, 128, 84};
constexpr int kRegistersOfDrawers = 16;  // which each of two consumers has less
constexpr std::int64_t kFewestLargeMTiles = kHopperMultiprocessors;
// For tiles of 192 rows, measured on an H200: a causal head's first one may be nearly empty.
constexpr std::int64_t kManyRows = 768;
constexpr std::int64_t kManyCausalRows = 448;
constexpr std::int64_t kLongRows = 1536;
constexpr std::int64_t kManyDiagonals = 2048;  // keys, measured on an H200
constexpr int kAffineProductHeadDim = 96;
constexpr int kExactMaxHeadDim = 112;
constexpr int kMostColumnsOfFew = 192;  // an instruction's part of S or O: of 128 registers, which a thread starts with
constexpr int kRegistersOfTwoBlocks = 160;  // of fragments, a thread
constexpr int kThreadsWithFew = 512;        // of a multiprocessor, from which on they do
constexpr std::int64_t kFewestSplitsOfARequest = 8;
constexpr std::size_t kMaxSpecs = 4;
constexpr std::int64_t kBeginsASplit = 4;     // tiles or splits that begin in the time of a split, about
constexpr int kMostClusterHeadDim = 128;      // up to which it was measured
constexpr std::int64_t kManyMergedRows = 16;  // of a tile
constexpr int kBoxRows = 8;                   // of a box of a page, at least: whole rows of the swizzle
constexpr int kMostBoxes = 32;                // of a KV tile: a lane copies each
constexpr std::int64_t kMostBoxRows = 256;
constexpr int kWideBoxHeadDim = 128;

struct Tile {
  int tile_m, tile_n, stages, q_buffers;
};

// In order of preference, of those that fit; the tiles of a list share tile_m (with packed query heads the group
// divides it), but for large-M ones. Measured on an H200 (docs/experiments.md).
constexpr Tile kSmallLargeM[] = {{256, 64, 6, 2}, {256, 48, 6, 2}, {192, 128, 2, 2}, {192, 96, 2, 2}};
constexpr Tile kSmall[] = {{192, 128, 2, 2}, {192, 112, 2, 2}, {192, 96, 2, 2}, {192, 64, 2, 1}};
constexpr Tile kMedium[] = {{128, 128, 2, 2}, {128, 112, 2, 2}, {128, 96, 2, 2}, {128, 64, 2, 1}};
constexpr Tile kMediumLargeM[] = {{192, 112, 2, 2}, {192, 96, 2, 2},  {192, 80, 3, 2},
                                  {192, 64, 3, 2},  {128, 128, 2, 2}, {128, 96, 2, 2}};
constexpr Tile kMediumShortLargeM[] = {{192, 64, 3, 2}, {192, 48, 3, 2}, {128, 128, 2, 2}, {128, 96, 2, 2}};
constexpr Tile kMediumLargestM[] = {{256, 64, 3, 2}, {192, 112, 2, 2}, {192, 96, 2, 2}, {128, 128, 2, 2}};  // d <= 72
constexpr Tile kLargeLargeM[] = {{192, 64, 3, 1}, {192, 48, 3, 1}, {128, 96, 2, 1}, {128, 80, 2, 1}};       // d <= 160
constexpr Tile kLargeQk[] = {{128, 128, 2, 1}, {128, 112, 2, 1}, {128, 96, 2, 1}, {128, 64, 2, 1}};  // d_v <= 128
constexpr Tile kLarge[] = {{128, 96, 2, 1}, {128, 80, 2, 1}, {128, 64, 2, 1}};
constexpr Tile kLargest[] = {{128, 64, 2, 1}, {128, 80, 2, 1}, {128, 48, 2, 1}};
// All rows of a head in one warpgroup. 64 KB of keys on their way are enough; more of them are read more slowly.
constexpr Tile kShortSmall[] = {{64, 128, 3, 1}, {64, 128, 2, 1}, {64, 64, 2, 1}};
constexpr Tile kShortMedium[] = {{64, 128, 2, 1}, {64, 64, 2, 1}};
constexpr Tile kShortMediumOfTwo[] = {{64, 64, 2, 1}, {64, 128, 2, 1}};  // where two blocks share a multiprocessor
constexpr Tile kShortLarge[] = {{64, 64, 2, 1}, {64, 48, 2, 1}};
// With a fixed split size, which sets tile_n: of a head dim up to 64, and above.
constexpr Tile kFixedRows[][1] = {{{192, 0, 5, 2}}, {{128, 0, 3, 2}}};
constexpr Tile kFixedRowsShared[][1] = {{{128, 0, 5, 1}}, {{128, 0, 3, 1}}};
constexpr Tile kFixedRowsShort[][1] = {{{64, 0, 5, 1}}, {{64, 0, 2, 1}}};
constexpr Tile kShortLargestScheduled[] = {{64, 32, 5, 1}, {64, 32, 4, 1}, {64, 48, 2, 1}};  // of longer ones S spills

/// Tile lists, loads ahead and windows over pages take registers that three consumer warpgroups do not have, and so do
/// warps that draw.
bool takes_registers(const Problem& problem) noexcept {
  if (problem.dropout || problem.row_statistics()) return true;
  if (problem.variants == nullptr) return false;
  if (problem.paged() && problem.variants->left_window) return true;
  return !problem.variants->mask.empty() || problem.variants->loads_ahead;
}

/// Whether blocks take parts of the keys of requests over pages.
bool by_parts(const Choice& choice) noexcept {
  return choice.scheduled || choice.own_parts || choice.splits_request;
}
bool by_parts(const KernelSpec& spec) noexcept {
  return spec.scheduled() || spec.own_parts() || (spec.split && spec.page_size != 0 && spec.split_keys() == 0);
}

/// Whether scores reach the softmax as the product leaves them, causality aside.
bool keeps_scores(const Variants& variants) noexcept {
  return variants.score.empty() && !variants.hides_keys();
}

/// Whether a kernel whose statistics of rows are known to fit serves the problem.
bool may_have_statistics(const Problem& problem) noexcept {
  const bool keeps = problem.variants == nullptr || keeps_scores(*problem.variants);
  return !problem.ragged() && !problem.dropout && keeps && std::max(problem.d_qk, problem.d_v) <= 128;
}

/// The tiles of a problem with enough rows, of which the first is large-M; none where such a one takes too many
/// registers or is not the faster.
std::span<const Tile> large_m_tiles(const Problem& problem, bool long_rows, bool exact_max) noexcept {
  using Tiles = std::span<const Tile>;
  if (problem.dropout) return {};
  const int d = std::max(problem.d_qk, problem.d_v);
  if (exact_max && d > 64) return {};  // with exact maxima fewer warpgroups and longer KV tiles are the faster
  if (exact_max && problem.row_statistics()) return problem.statistics.entropy ? Tiles(kMediumLargeM) : kSmallLargeM;
  const Variants* const variants = problem.variants;
  if (variants != nullptr) {
    if (variants->hides_keys()) return {};
    // What reads captured tensors was not the faster; what is affine is so as a step of the product, which spills
    // there.
    const bool slower = !variants->captures.empty() || variants->affine;
    if (!variants->score.empty() && (slower || d > 128 || !long_rows)) return {};
  }
  if (d <= 64) return kSmallLargeM;
  if (d <= 72 && long_rows) return kMediumLargestM;
  if (d <= 128) return problem.causal && !long_rows ? Tiles(kMediumShortLargeM) : kMediumLargeM;
  return d <= 160 ? Tiles(kLargeLargeM) : Tiles();
}

/// Whether blocks of one consumer, which wait for their own products and exponentials, may share a multiprocessor:
/// their producers have few registers, and nothing to look for but pieces of a schedule.
bool may_have_two_blocks(const Problem& problem, bool parts) noexcept {
  if ((problem.ragged() && !parts) || problem.bounded || takes_registers(problem)) return false;
  return problem.variants == nullptr || !(problem.variants->left_window || problem.variants->chunked);
}

std::span<const Tile> preferred_tiles(const Problem& problem, const Choice& choice) noexcept {
  using Tiles = std::span<const Tile>;
  const int d = std::max(problem.d_qk, problem.d_v);
  const bool short_query = choice.short_query;
  if (problem.fixed_rows())
    return (short_query ? kFixedRowsShort : choice.shares_splits ? kFixedRowsShared : kFixedRows)[d <= 64 ? 0 : 1];
  if (choice.many_rows) return large_m_tiles(problem, choice.long_rows, choice.exact_max);
  if (d <= 64 && !short_query && takes_registers(problem)) return kMedium;
  if (d <= 64) return short_query ? Tiles(kShortSmall) : kSmall;
  if (short_query && d > 128) return by_parts(choice) && d > 160 ? Tiles(kShortLargestScheduled) : kShortLarge;
  if (short_query) {
    // The bits of an invariant request do not follow from how many multiprocessors the call may take.
    Problem of_bits = problem;
    if (problem.invariance == Invariance::batch) of_bits.bounded = false;
    return may_have_two_blocks(of_bits, by_parts(choice)) ? Tiles(kShortMediumOfTwo) : kShortMedium;
  }
  if (d <= 128) return kMedium;
  if (d <= 192) return problem.d_v <= 128 ? Tiles(kLargeQk) : kLarge;
  return kLargest;
}

int consumers(const KernelSpec& spec) {
  return spec.tile_m / kWarpgroupRows;
}

/// Whether taking turns on the tensor cores is faster: measured, and slower only at d 128 without the causal mask,
/// unless captured tensors are read between the products or P is dropped.
bool turns_pay(const Problem& problem, const KernelSpec& spec) noexcept {
  const int d = std::max(problem.d_qk, problem.d_v);
  const bool captures = problem.variants != nullptr && !problem.variants->captures.empty();
  return problem.causal || captures || problem.dropout || d <= 64 || d > 128 || consumers(spec) > 2;
}

/// Blocks of a cluster that merge the splits of a tile of few rows; 1 where the kernel behind is the faster. It takes
/// the longer the more rows it merges. Clusters of more than two go to fewer multiprocessors than there are, which
/// costs least where the call has fewer blocks than these.
int usual_split_blocks(const Problem& problem, const Choice& choice) noexcept {
  if (std::max(problem.d_qk, problem.d_v) > kMostClusterHeadDim) return 1;
  if (problem.variants != nullptr && !keeps_scores(*problem.variants)) return 1;
  if (!std::has_single_bit(static_cast<unsigned>(choice.splits))) return 1;
  const std::int64_t group = choice.pack_gqa ? problem.h_q / problem.h_kv : 1;
  const std::int64_t blocks = problem.b * (problem.h_q / group) * choice.splits;
  const bool half_empty = 2 * blocks <= kHopperMultiprocessors && choice.splits <= 8;
  const bool many_rows = problem.s_q * group >= kManyMergedRows && choice.splits <= 4;
  return choice.splits == 2 || half_empty || many_rows ? choice.splits : 1;
}

/// Whether copies out of pages may bring all columns of their rows: whole slabs, whose first row is needed.
bool may_have_wide_boxes(const KernelSpec& spec) {
  return spec.page_size > 0 && spec.d_qk % kSlabColumns == 0 && spec.d_v % kSlabColumns == 0 &&
         !spec.variants.left_window;
}

/// Whether that is faster. Few rows wait for memory.
bool wide_boxes_pay(const KernelSpec& spec) {
  return may_have_wide_boxes(spec) && consumers(spec) > 1 && spec.d_qk == kWideBoxHeadDim &&
         spec.d_v == kWideBoxHeadDim;
}

/// What the kernel lays its shared memory and its warps out by.
sm90::ForwardShape shape_of(const KernelSpec& spec) {
  const auto& own = spec.as<Sm90Forward>();
  return {.tile_m = spec.tile_m,
          .tile_n = spec.tile_n,
          .d_qk = spec.d_qk,
          .d_v = spec.d_v,
          .stages = spec.stages,
          .q_buffers = own.q_buffers,
          .pack_gqa = spec.pack_gqa,
          .split = spec.split,
          .varlen = spec.varlen || spec.page_size != 0,
          .dropout = spec.dropout,
          .affine_product = own.affine_product,
          .dynamic = own.dynamic,
          .windowed = spec.variants.left_window || spec.variants.chunked,
          .masked = !spec.variants.mask.empty(),
          .scheduled = own.scheduled || own.own_parts,
          .paired = own.split_blocks == 2,
          .folds = own.split_keys > 0 && !spec.split,
          .clears = own.wide_boxes,
          .whole_tiles = own.whole_tiles};
}

/// Whether a step of the product S may add what a score function grows by from key to key.
bool may_add_affine(const KernelSpec& spec) {
  return spec.variants.affine && spec.positive_scale;
}

/// Whether it pays: the step is a smaller part of the product the longer its rows are. With dropout its operands spill.
bool affine_product_pays(const Problem& problem) noexcept {
  return problem.d_qk >= kAffineProductHeadDim && !problem.dropout;
}

KernelSpec with_tile(const Problem& problem, const Tile& tile, const Fixed& fixed, const Choice& choice) {
  KernelSpec spec;
  Sm90Forward& own = spec.own.emplace<Sm90Forward>();
  spec.arch = problem.arch;
  spec.dtype = problem.dtype;
  spec.d_qk = problem.d_qk;
  spec.d_v = problem.d_v;
  spec.causal = problem.causal;
  if (problem.variants != nullptr) spec.variants = *problem.variants;
  spec.positive_scale = problem.positive_scale;
  spec.aligned = true;
  spec.varlen = problem.varlen;
  spec.bounded = problem.bounded && comes_in_waves(problem) && !by_parts(choice) && !choice.dynamic;
  spec.page_size = problem.page_size;
  spec.dropout = problem.dropout;
  spec.place_in_memory = problem.reads_place();
  spec.accumulate = problem.accumulate;
  set_statistics(problem, spec);
  spec.tile_m = fixed.number("tile_m", tile.tile_m);
  spec.tile_n = fixed.number("tile_n", tile.tile_n);
  spec.stages = fixed.number("stages", tile.stages);
  fixed.set_others(spec);
  const bool leaves_splits = problem.invariance == Invariance::batch && choice.splits > 1;
  if (problem.splits_by_length() || (leaves_splits && !problem.fixed_rows())) own.length_keys = kLengthKeys;
  if (problem.fixed_rows()) {
    const RowArithmetic arithmetic = row_arithmetic(RowFacts::of(problem, true));
    spec.tile_n = arithmetic.tile_n;
    own.split_keys = arithmetic.split_keys;
  }
  own.q_buffers = fixed.number("q_buffers", tile.q_buffers);
  spec.warps = sm90_forward_warps(spec);
  own.exact_max = choice.exact_max;
  own.scheduled = choice.scheduled;
  own.own_parts = choice.own_parts;
  own.skips_hidden = sm90_forward_may_skip_hidden(spec) && choice.many_diagonals;
  // Four warpgroups with KV tiles to skip are faster when each runs ahead as it can.
  const bool drifts = consumers(spec) > 3 && own.skips_hidden && own.q_buffers == 2;
  own.take_turns = fixed.flag("take_turns", consumers(spec) > 1 && turns_pay(problem, spec) && !drifts);
  own.affine_product = fixed.flag("affine_product", may_add_affine(spec) && affine_product_pays(problem));
  own.softmax_chunks = sm90_forward_softmax_chunks(spec);
  spec.pack_gqa = choice.pack_gqa;
  spec.split = choice.splits > 1 || choice.shares_splits;
  own.split_blocks = choice.split_blocks;
  own.whole_tiles = choice.whole_tiles;
  own.own_ends = sm90_forward_own_ends(spec);
  own.dynamic = choice.dynamic;
  own.affine_reach = choice.affine_reach;
  own.wide_boxes = fixed.flag("wide_boxes", wide_boxes_pay(spec));
  if (sm90_forward_has_two_blocks(problem, spec)) spec.min_blocks = 2;
  return spec;
}

Tile tile_of(const KernelSpec& spec) {
  return {spec.tile_m, spec.tile_n, spec.stages, spec.as<Sm90Forward>().q_buffers};
}

/// nullptr where none does.
const Tile* first_that_fits(std::span<const Tile> tiles, const Problem& problem, const Fixed& fixed,
                            const Choice& choice) {
  const auto fits = [&](const Tile& tile) {
    return sm90_forward_refusal(with_tile(problem, tile, fixed, choice)).empty();
  };
  const auto found = std::ranges::find_if(tiles, fits);
  return found == tiles.end() ? nullptr : &*found;
}

/// The first large-M tile that fits a problem, if it had enough rows; nullptr where there is none.
const Tile* large_m_tile(const Problem& problem, const Fixed& fixed, const Choice& choice, bool long_rows) {
  if (choice.pack_gqa || choice.short_query) return nullptr;
  const std::span<const Tile> tiles = large_m_tiles(problem, long_rows, choice.exact_max);
  const bool other_rows = fixed.has("tile_m") && !tiles.empty() && fixed.number("tile_m") != tiles.front().tile_m;
  return other_rows ? nullptr : first_that_fits(tiles, problem, fixed, {});
}

/// A kernel for other lengths than a problem's.
struct OtherLength {
  Tile tile;
  bool exact_max;
};

/// What a store may hold of the same tile, or of a large-M one, for other lengths, with the maxima that those have.
void add_other_lengths(std::vector<KernelSpec>& specs, const Problem& problem, const Fixed& fixed,
                       const Choice& choice) {
  std::vector<OtherLength> lengths;
  for (const bool long_rows : {false, true}) {
    Choice other = choice;
    other.exact_max = sm90_forward_exact_max(problem, fixed, long_rows, by_parts(choice));
    if (other.exact_max == choice.exact_max) {
      lengths.push_back({tile_of(specs.front()), other.exact_max});
    } else {
      other.many_rows = false;
      const Tile* const tile = first_that_fits(preferred_tiles(problem, other), problem, fixed, other);
      if (tile != nullptr) lengths.push_back({*tile, other.exact_max});
    }
    const Tile* const large_m = large_m_tile(problem, fixed, other, long_rows);
    if (large_m != nullptr) lengths.push_back({*large_m, other.exact_max});
  }
  for (const bool reaches : {false, true}) {
    if (reaches && !may_have_reach(problem, choice)) continue;
    Choice other = choice;
    other.affine_reach = choice.affine_reach != reaches;
    for (const bool counted : {false, true}) {
      if (counted && (fixed.has("dynamic") || !may_count(problem, other))) continue;
      other.dynamic = may_be_dynamic(problem, other) && choice.dynamic != counted;
      for (const bool diagonals : {false, true}) {
        other.many_diagonals = choice.many_diagonals != diagonals;
        for (const OtherLength& length : lengths) {
          other.exact_max = length.exact_max;
          const KernelSpec spec = with_tile(problem, length.tile, fixed, other);
          const bool known = std::ranges::find(specs, spec) != specs.end();
          if (!known && sm90_forward_refusal(spec).empty()) specs.push_back(spec);
        }
      }
    }
  }
}

}  // namespace

const char* sm90_forward_misfit(const Problem& problem) noexcept {
  if (problem.arch.sm() != 90 || problem.arch.suffix != 'a') return "sm90 on a GPU of architecture sm_90a";
  if (problem.dtype != DType::f16 && problem.dtype != DType::bf16) return "sm90 with dtype f16 or bf16";
  if (std::max(problem.d_qk, problem.d_v) > kMaxHeadDim) return "sm90 with head dims up to 256";
  if (problem.stored()) return "sm90 with K and V of the queries' dtype";
  if (problem.fixed_rows() && !has_wgmma_rows(problem, problem))
    return "sm90 with invariance of plain rows: no function, mask, dropout, statistics, or head dim above 128";
  if (problem.row_statistics() && !may_have_statistics(problem)) {
    return "sm90 with statistics of rows: without packed batches, pages, dropout, functions, windows, chunks, and head "
           "dims above 128";
  }
  if (!problem.contiguous() && problem.page_size % kBoxRows != 0)
    return "sm90 with a page_size that is a multiple of 8";
  const bool chunked = problem.variants != nullptr && problem.variants->chunked;
  if (problem.paged() && chunked) return "sm90 with page_size 0, or without chunks";
  if (problem.paged() && problem.accumulate) return "sm90 with page_size 0, or without accumulate";
  return nullptr;
}

const char* sm90_copy_obstacle(const Problem& problem) noexcept {
  if (!problem.aligned) return "rows of q, k, v or o do not start at multiples of 16 bytes";
  if (!problem.tensor_maps) return "a stride of q, k, v or o is zero, negative or 2^40 bytes or more";
  static_assert(Problem::kMostBoundedRows == kernel::kBoundedRows);
  if (problem.bounded_rows() > kernel::kBoundedRows) {
    return "the packed batch, a page or a row of the cache has more than 2^30 rows";
  }
  // The first and the last key that are needed may not be in one box.
  const bool windowed = problem.variants != nullptr && problem.variants->left_window;
  const std::int64_t longest_box = problem.contiguous() ? kMostBoxRows : problem.page_size;
  if (problem.paged() && windowed && problem.window_left < longest_box) return "a window is shorter than a page";
  if (problem.s_kv == 0) return "there are no keys";
  if (problem.b == 0 || problem.h_q == 0 || problem.h_kv == 0 || problem.s_q == 0) return "there are no rows";
  return nullptr;
}

bool sm90_forward_finds_parts(const Problem& problem, const Fixed& fixed, const Choice& choice) noexcept {
  if (problem.given_schedule || !problem.paged() || problem.accumulate || !choice.short_query) return false;
  if (problem.b > kernel::kOwnItems) return false;
  if (problem.varlen) {
    const std::int64_t rows = problem.total_q * (choice.pack_gqa ? problem.h_q / problem.h_kv : 1);
    if (slots(rows, kWarpgroupRows, problem.b) > kernel::kOwnItems) return false;
  }
  return fixed.flag("own_parts", shares_by_schedule(problem, fixed, choice)) && !fixed.flag("scheduled", false);
}

bool sm90_forward_splits_request(const Problem& problem, const Fixed& fixed, const Choice& choice) noexcept {
  if (!problem.paged() || problem.varlen || problem.b != 1 || !choice.short_query) return false;
  if (fixed.flag("own_parts", false) || fixed.flag("scheduled", false)) return false;
  if (problem.splits_by_length() && fixed.number("splits", 2) > 1) {
    return 2 * (choice.pack_gqa ? problem.h_kv : problem.h_q) <= kHopperMultiprocessors;
  }
  if (fixed.has("splits")) return fixed.number("splits") > 1;
  // More tiles than that leave too many multiprocessors without a split.
  const std::int64_t tiles = choice.pack_gqa ? problem.h_kv : problem.h_q;
  return tiles * kFewestSplitsOfARequest <= kHopperMultiprocessors && shares_by_schedule(problem, fixed, choice);
}

void sm90_forward_form_clusters(const Problem& problem, const Fixed& fixed, Choice& choice) noexcept {
  if (!choice.short_query || choice.splits == 1 || problem.dropout || problem.accumulate || problem.bounded) return;
  if (problem.invariance == Invariance::batch) return;  // blocks of many requests go on from split to split
  const int blocks = fixed.number("split_blocks", fixed.has("splits") ? 1 : usual_split_blocks(problem, choice));
  if (blocks < 2) return;
  const Tile& tile = preferred_tiles(problem, choice).front();
  const bool few_rows = fixed.number("tile_m", tile.tile_m) == 64 && fixed.number("q_buffers", tile.q_buffers) == 1;
  const int tile_n = fixed.number("tile_n", tile.tile_n);
  const int stage_bytes = sm90::tile_bytes(tile_n, problem.d_qk) + sm90::tile_bytes(tile_n, problem.d_v);
  const bool has_room = sm90::cluster_part_bytes(problem.d_v) <= fixed.number("stages", tile.stages) * stage_bytes;
  if (!few_rows || !has_room) return;
  choice.split_blocks =
      static_cast<int>(std::bit_floor(static_cast<unsigned>(std::min(blocks, Choice::kMaxSplitBlocks))));
  choice.splits = choice.split_blocks;
}

bool sm90_forward_takes_whole(const Problem& problem, const Choice& choice) noexcept {
  if (problem.invariance != Invariance::batch || problem.fixed_rows() || !choice.leaves_splits()) return false;
  if (!choice.short_query || problem.dropout || problem.accumulate || problem.bounded) return false;
  if (problem.variants != nullptr && !keeps_scores(*problem.variants)) return false;
  const int d = std::max(problem.d_qk, problem.d_v);
  const std::int64_t rows = choice.pack_gqa ? problem.s_q * (problem.h_q / problem.h_kv) : problem.s_q;
  if (d > kMostClusterHeadDim || rows > sm90::kFoldedRows) return false;
  const std::int64_t tiles = problem.b * (choice.pack_gqa ? problem.h_kv : problem.h_q);
  const std::int64_t blocks = (d > 64 ? 2 : 1) * kHopperMultiprocessors;
  // By the splits of the block that has most of them, and what begins a tile or a split.
  const auto cost = [&](std::int64_t items, std::int64_t splits) {
    return (items + blocks - 1) / blocks * (kBeginsASplit * splits + 1);
  };
  return cost(tiles, choice.splits) <= cost(tiles * choice.splits, 1);
}

bool sm90_forward_long_rows(const Problem& problem) noexcept {
  return problem.typical_s_q() >= kLongRows;
}

bool sm90_forward_many_rows(const Problem& problem, const Fixed& fixed, bool pack_gqa) noexcept {
  const bool long_rows = sm90_forward_long_rows(problem);
  Choice choice;
  choice.exact_max = sm90_forward_exact_max(problem, fixed, long_rows, false);
  const auto possible = large_m_tiles(problem, long_rows, choice.exact_max);
  if (pack_gqa || possible.empty()) return false;
  const int tile_m = possible.front().tile_m;
  if (fixed.number("tile_m", tile_m) != tile_m) return false;
  if (fixed.fixes_tile_of(Sm90Forward::kernel()) && first_that_fits(possible, problem, fixed, choice) == nullptr)
    return false;
  const std::int64_t rows = problem.typical_s_q();
  const std::int64_t tiles = (rows + tile_m - 1) / tile_m;
  if (tiles * problem.b * problem.h_q < kFewestLargeMTiles) return false;
  if (std::max(problem.d_qk, problem.d_v) <= 64) return rows > 128;
  return rows >= (problem.causal ? kManyCausalRows : kManyRows);
}

bool sm90_forward_exact_max(const Problem& problem, const Fixed& fixed, bool long_rows, bool parts) noexcept {
  if (fixed.has("exact_max")) return fixed.flag("exact_max", false);
  if (problem.row_statistics()) return problem.statistics.max_logit != MaxLogit::none;
  const int d = std::max(problem.d_qk, problem.d_v);
  const bool possible = (!problem.ragged() || parts) && !problem.dropout &&
                        (problem.variants == nullptr || keeps_scores(*problem.variants));
  if (parts) return possible;  // whose products wait for memory, and whose registers are needed
  return possible && !long_rows && d >= kExactMaxHeadDim && d <= 128;
}

bool sm90_forward_may_have_reach(const Problem& problem) noexcept {
  const Variants* const variants = problem.variants;
  return variants != nullptr && variants->affine && problem.positive_scale && !problem.ragged() && !problem.dropout &&
         !variants->hides_keys();
}

std::optional<std::int64_t> sm90_forward_scheduled_keys(const Problem& problem, const Choice& choice) noexcept {
  if (!choice.short_query) return std::nullopt;
  // Blocks of a few KV tiles have nothing to share, but they go on from request to request without a pause.
  return problem.b * problem.h_kv > kHopperMultiprocessors ? kScheduledKeysOfMany : kScheduledKeys;
}

int sm90_forward_decide(const Problem& problem, const Fixed& fixed, Choice& choice) noexcept {
  if (problem.fixed_rows()) return sm90_forward_tile_m(problem, fixed, choice);
  choice.splits_request = sm90_forward_splits_request(problem, fixed, choice);
  const bool splits = choice.splits_request || problem.splits_by_length();
  choice.own_parts = !splits && sm90_forward_finds_parts(problem, fixed, choice);
  choice.scheduled = !splits && shares_by_schedule(problem, fixed, choice);
  choice.exact_max = sm90_forward_exact_max(problem, fixed, sm90_forward_long_rows(problem), by_parts(choice));
  // Of few rows over pages nothing is skipped, and the slot's bit says own_parts.
  const bool few_over_pages = problem.paged() && choice.short_query;
  choice.many_diagonals = !few_over_pages && problem.causal && problem.typical_s_kv() <= kManyDiagonals;
  choice.many_rows = sm90_forward_many_rows(problem, fixed, choice.pack_gqa);
  choice.long_rows = choice.many_rows && sm90_forward_long_rows(problem);
  return sm90_forward_tile_m(problem, fixed, choice);
}

int sm90_forward_tile_m(const Problem& problem, const Fixed& fixed, const Choice& choice) noexcept {
  return fixed.number("tile_m", preferred_tiles(problem, choice).front().tile_m);
}

bool sm90_forward_may_skip_hidden(const KernelSpec& spec) noexcept {
  return spec.causal && consumers(spec) >= 3 && !spec.as<Sm90Forward>().exact_max && !spec.dropout &&
         !spec.variants.hides_keys();
}

int sm90_forward_softmax_chunks(const KernelSpec& spec) noexcept {
  if (spec.as<Sm90Forward>().exact_max) return 1;
  // Pieces fill each other's gaps. Of four warpgroups others do, and of a short KV tile they are too short.
  if (consumers(spec) > 3) return spec.as<Sm90Forward>().skips_hidden ? 2 : 1;
  if (spec.dropout || !spec.variants.score.empty()) return 2;
  const bool large = spec.d_v > 128;
  if (consumers(spec) == 3) return (large && spec.tile_n <= 64) || (!spec.causal && spec.tile_n <= 80) ? 1 : 2;
  return consumers(spec) == 2 && large && !spec.causal ? 1 : 2;
}

bool sm90_forward_own_ends(const KernelSpec& spec) noexcept {
  // A score function that reads takes the registers of the second place that starts products.
  if (consumers(spec) >= 3 && !spec.variants.captures.empty()) return false;
  const bool drifts = spec.causal && consumers(spec) > 3 && spec.as<Sm90Forward>().q_buffers == 2;
  const bool pays = spec.causal ? spec.tile_n < spec.tile_m : consumers(spec) >= 3;
  return pays && (spec.as<Sm90Forward>().take_turns || drifts) && !spec.split && !by_parts(spec) && !spec.dropout &&
         !spec.variants.hides_keys();
}

int sm90_forward_warps(const KernelSpec& spec) noexcept {
  return shape_of(spec).threads() / 32;
}

int sm90_forward_shared_bytes(const KernelSpec& spec) {
  return sm90::shared_layout(shape_of(spec)).bytes;
}

bool sm90_forward_has_two_blocks(const Problem& problem, const KernelSpec& spec) {
  constexpr int kReserved = 1024;  // of each block, by the driver
  const bool parts = by_parts(spec) || spec.split_keys() > 0;
  return consumers(spec) == 1 && std::max(spec.tile_n, spec.d_v) <= kMostColumnsOfFew &&
         sm90_forward_registers(spec) <= kRegistersOfTwoBlocks && may_have_two_blocks(problem, parts) &&
         2 * (sm90::shared_layout(shape_of(spec)).bytes + kReserved) <= limits(problem.arch).shared_per_sm;
}

int sm90_forward_registers(const KernelSpec& spec) {
  const int folded = spec.split_keys() > 0 && !spec.split ? spec.d_v / 2 : 0;  // O of the splits before
  return spec.tile_n / 2 + spec.tile_n / 4 + spec.d_v / 2 + folded;
}

std::string sm90_forward_refusal(const KernelSpec& spec) {
  const auto& own = spec.as<Sm90Forward>();
  if (spec.tile_m < kWarpgroupRows || spec.tile_m > kMaxConsumers * kWarpgroupRows ||
      spec.tile_m % kWarpgroupRows != 0) {
    return fmt::format("tile_m = {}: accepted are 64, 128, 192 and 256", spec.tile_m);
  }
  if (spec.tile_n < 16 || spec.tile_n > 256 || spec.tile_n % 16 != 0) {
    return fmt::format("tile_n = {}: accepted are multiples of 16 up to 256", spec.tile_n);
  }
  if (spec.stages < 2 || spec.stages > 7) return fmt::format("stages = {}: accepted are 2 to 7", spec.stages);
  if (own.q_buffers < 1 || own.q_buffers > 2) {
    return fmt::format("q_buffers = {}: accepted are 1 and 2", own.q_buffers);
  }
  if (own.skips_hidden && !sm90_forward_may_skip_hidden(spec)) return "skips_hidden = true: not of this kernel";
  if (own.affine_product && !may_add_affine(spec)) return "affine_product = true: not of this kernel";
  if (own.affine_reach && !may_add_affine(spec)) return "affine_reach = true: not of this kernel";
  const bool ragged = spec.varlen || spec.page_size != 0;
  if (own.exact_max && (spec.dropout || (ragged && !by_parts(spec)) || !keeps_scores(spec.variants))) {
    return "exact_max = true: not with dropout, packed batches, functions, windows or chunks";
  }
  const bool alone = !spec.dropout && !spec.split && !by_parts(spec) && !spec.bounded;
  if (own.dynamic && (!alone || (!ragged && spec.variants.hides_keys())))
    return "dynamic = true: not with dropout, shared keys, or windows, chunks and masks of dense batches";
  if (spec.max_logit != 0 && !own.exact_max) return "exact_max = false: not with max_logit";
  if (spec.dropout && consumers(spec) > 2) {
    return fmt::format("tile_m = {}: with dropout accepted are 64 and 128", spec.tile_m);
  }
  if (own.take_turns && consumers(spec) == 1) return "take_turns = true: ping-pong scheduling is of several warpgroups";
  const int shared = sm90_forward_shared_bytes(spec);
  const int shared_limit = limits(spec.arch).shared_per_block;
  if (shared > shared_limit) {
    return fmt::format(
        "tile_m = {}, tile_n = {}, stages = {}, q_buffers = {} need {} bytes of shared memory; {} offers {}",
        spec.tile_m, spec.tile_n, spec.stages, own.q_buffers, shared, to_string(spec.arch), shared_limit);
  }
  const int registers = sm90_forward_registers(spec);
  const bool shares = spec.dropout && consumers(spec) == 2;
  const int offered = kFragmentRegisters[consumers(spec) - 1] - (shares ? kRegistersOfDrawers : 0);
  if (registers > offered) {
    return fmt::format("tile_m = {}, tile_n = {} hold {} registers of fragments a thread; at most {} fit", spec.tile_m,
                       spec.tile_n, registers, offered);
  }
  const int threads = shape_of(spec).threads() * spec.min_blocks;
  if (threads >= kThreadsWithFew && std::max(spec.tile_n, spec.d_v) > kMostColumnsOfFew) {
    return fmt::format("tile_m = {}, tile_n = {}: of {} threads the registers fit {} columns of S or O, not {}",
                       spec.tile_m, spec.tile_n, threads, kMostColumnsOfFew, std::max(spec.tile_n, spec.d_v));
  }
  if (spec.page_size != 0) {
    const int box = rows_together(spec.page_size, spec.tile_n);
    if (box % kBoxRows != 0 || spec.tile_n / box > kMostBoxes || spec.variants.chunked) {
      return fmt::format("page_size = {}: accepted are multiples of 8, without chunks", spec.page_size);
    }
  }
  if (by_parts(spec) && (consumers(spec) > 1 || own.q_buffers > 1 || spec.page_size == 0)) {
    return fmt::format(
        "scheduled or own_parts = true, or splits over pages: accepted are tile_m = 64, q_buffers = 1 and pages, not "
        "tile_m = {}, q_buffers = {}, page_size = {}",
        spec.tile_m, own.q_buffers, spec.page_size);
  }
  const int split_blocks = own.split_blocks;
  if (split_blocks < 1 || split_blocks > Choice::kMaxSplitBlocks || !std::has_single_bit(unsigned(split_blocks))) {
    return fmt::format("split_blocks = {}: accepted are 1, 2, 4, 8 and 16", split_blocks);
  }
  const bool few_rows = spec.split && consumers(spec) == 1 && own.q_buffers == 1;
  if (split_blocks > 1 && (!few_rows || spec.dropout || spec.accumulate)) {
    return fmt::format("split_blocks = {}: accepted with splits of few rows alone", split_blocks);
  }
  const sm90::SharedLayout layout = sm90::shared_layout(shape_of(spec));
  if (split_blocks > 1 && sm90::cluster_part_bytes(spec.d_v) > layout.mbarriers - layout.k) {
    return fmt::format("split_blocks = {}: K and V of tile_n = {}, stages = {} take less room than O in float",
                       split_blocks, spec.tile_n, spec.stages);
  }
  if (own.wide_boxes && !may_have_wide_boxes(spec)) {
    return fmt::format("wide_boxes = true: not with page_size = {}, d_qk = {}, d_v = {}, left window = {}",
                       spec.page_size, spec.d_qk, spec.d_v, spec.variants.left_window);
  }
  if (own.own_ends && !sm90_forward_own_ends(spec)) return "own_ends = true: not of this kernel";
  return {};
}

std::vector<KernelSpec> sm90_forward_specs(const Problem& problem, const Fixed& fixed, const Choice& choice) {
  std::vector<KernelSpec> specs;
  std::string refusal;
  if (fixed.flag("affine_reach", false) && !sm90_forward_may_have_reach(problem)) {
    refusal = "affine_reach = true: not of this kernel";
  }
  if (refusal.empty()) {
    for (const Tile& tile : preferred_tiles(problem, choice)) {
      const KernelSpec spec = with_tile(problem, tile, fixed, choice);
      const std::string reason = sm90_forward_refusal(spec);
      if (!reason.empty()) {
        refusal = reason;
      } else if (std::ranges::find(specs, spec) == specs.end() && specs.size() < kMaxSpecs) {
        specs.push_back(spec);
      }
    }
  }
  if (!specs.empty()) {
    if (!problem.fixed_rows() && !problem.splits_by_length()) add_other_lengths(specs, problem, fixed, choice);
    return specs;
  }
  const bool overridden = fixed.fixes_tile_of(Sm90Forward::kernel());
  throw Error(overridden ? ErrorCode::invalid_argument : ErrorCode::unsupported,
              fmt::format("kernel: no sm90 forward kernel fits: {}", refusal),
              {{"argument", "kernel"}, {"value", refusal}, {"accepted", "tiles that fit the GPU"}});
}

}  // namespace fa::plan
