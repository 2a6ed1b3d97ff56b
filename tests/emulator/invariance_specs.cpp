#include "emulator/invariance_specs.hpp"

#include <algorithm>
#include <stdexcept>

#include "api/variants.hpp"
#include "plan/sm90_forward.hpp"

namespace emulator {
namespace {

using fa::AttentionConfig;
using fa::DType;
using fa::plan::KernelSpec;

constexpr int kSplitKeys = 32;

enum Flags : unsigned {
  kPacked = 1,
  kShares = 2,
  kPackGqa = 4,
  kUnaligned = 8,
  kQInRegisters = 16,
  kBounded = 32,
  kTurns = 64,
  kDynamic = 128,
  kSkips = 256,
  kByLength = 512,
  kWholeTiles = 1024
};

struct Shape {
  const char* arithmetic;
  const char* name;
  int tile_m, warps, stages, page_size;
  unsigned flags;
};

constexpr Shape kShapes[] = {
    {"plain", "dense", 32, 2, 1, 0, 0},
    {"plain", "dense_two_m_tiles", 32, 1, 2, 0, kQInRegisters},
    {"plain", "dense_shared", 16, 1, 1, 0, kShares | kPackGqa},
    {"plain", "packed", 16, 1, 2, 0, kPacked | kPackGqa},
    {"plain", "packed_shared", 32, 2, 1, 0, kPacked | kShares | kUnaligned},
    {"plain", "pages_of_4", 32, 2, 1, 4, kPacked},
    {"plain", "pages_of_7_shared", 16, 1, 2, 7, kPacked | kShares | kPackGqa},
    {"plain", "pages_of_16_shared", 16, 1, 1, 16, kShares | kPackGqa},
    {"plain", "bounded", 32, 2, 1, 0, kBounded},
    {"plain", "bounded_shared", 16, 1, 1, 0, kPacked | kShares | kPackGqa | kBounded},
    {"variant", "variant_dense", 32, 2, 1, 0, 0},
    {"variant", "variant_packed_shared", 16, 1, 1, 0, kPacked | kShares | kPackGqa},
    {"variant", "variant_pages_of_3", 16, 1, 2, 3, kPacked | kPackGqa},
    {"variant", "variant_pages_of_16_shared", 32, 2, 1, 16, kPacked | kShares},
    {"masked", "masked_dense", 32, 2, 1, 0, 0},
    {"masked", "masked_dense_of_groups", 16, 1, 2, 0, kPackGqa},
    {"masked", "masked_packed_shared", 16, 1, 1, 0, kPacked | kShares | kPackGqa},
    {"masked", "masked_pages_of_16", 32, 2, 1, 16, kPacked},
    {"f32", "f32_dense", 32, 2, 1, 0, 0},
    {"f32", "f32_pages_of_4_shared", 16, 1, 1, 4, kPacked | kShares | kPackGqa},
    {"wide", "wide_dense", 32, 2, 1, 0, 0},
    {"wide", "wide_pages_of_8_shared", 16, 1, 1, 8, kPacked | kShares | kPackGqa},
};

struct HopperShape {
  const char* arithmetic;
  const char* name;
  int tile_m, q_buffers, page_size;
  unsigned flags;
};

constexpr HopperShape kHopperShapes[] = {
    {"wgmma", "wgmma_dense", 128, 2, 0, kTurns},
    {"wgmma", "wgmma_dense_small", 64, 1, 0, kPackGqa},
    {"wgmma", "wgmma_dense_large", 192, 2, 0, kTurns | kSkips | kDynamic},
    {"wgmma", "wgmma_dense_shared", 64, 1, 0, kShares | kPackGqa},
    {"wgmma", "wgmma_dense_shared_by_two", 128, 1, 0, kShares | kTurns},
    {"wgmma", "wgmma_packed", 128, 2, 0, kPacked | kTurns},
    {"wgmma", "wgmma_packed_dynamic", 128, 2, 0, kPacked | kTurns | kDynamic},
    {"wgmma", "wgmma_packed_shared", 64, 1, 0, kPacked | kShares | kPackGqa},
    {"wgmma", "wgmma_pages_of_8", 64, 2, 8, kPacked | kPackGqa},
    {"wgmma", "wgmma_pages_of_16_shared", 64, 1, 16, kShares | kPackGqa},
    {"wgmma", "wgmma_pages_of_24_shared", 64, 1, 24, kPacked | kShares},
    {"wgmma", "wgmma_bounded_shared", 64, 1, 0, kPacked | kShares | kPackGqa | kBounded},
    {"sink", "wgmma_sink", 128, 2, 0, kTurns},
    {"sink", "wgmma_sink_shared", 64, 1, 8, kPacked | kShares | kPackGqa},
    {"steep", "steep_dense", 128, 2, 0, kTurns},
    {"steep", "steep_dense_shared", 64, 1, 0, kShares | kPackGqa},
    {"steep", "steep_packed", 64, 2, 0, kPacked | kPackGqa},
};

// Splits follow from a request's length, and queries are dense: only a request's own call says what its bits are.
constexpr HopperShape kBatchShapes[] = {
    {"length", "length_pages_of_8", 64, 1, 8, kShares | kPackGqa | kByLength},
    {"length", "length_pages_of_16", 64, 1, 16, kShares | kPackGqa | kByLength},
    {"length", "length_pages_of_24", 64, 1, 24, kShares | kPackGqa | kByLength},
    {"length_sink", "length_sink_pages_of_8", 64, 1, 8, kShares | kByLength},
    {"length_sink", "length_sink_pages_of_40", 64, 1, 40, kShares | kByLength},
    {"length", "length_taken_whole_pages_of_8", 64, 1, 8, kShares | kPackGqa | kByLength | kWholeTiles},
    {"length", "length_taken_whole_pages_of_40", 64, 1, 40, kShares | kPackGqa | kByLength | kWholeTiles},
    {"length_sink", "length_sink_taken_whole_pages_of_16", 64, 1, 16, kShares | kByLength | kWholeTiles},
    {"length_whole", "length_whole_pages_of_8", 128, 2, 8, kTurns | kByLength},
    {"length_whole", "length_whole_pages_of_16", 128, 2, 16, kTurns | kDynamic | kByLength},
};

InvariantPath to_path(const HopperShape& shape) {
  InvariantPath path{shape.arithmetic, shape.name, {}, {}};
  AttentionConfig& config = path.config;
  config.causal = true;
  config.head_dim = 16;
  config.sink = path.arithmetic.ends_with("sink");
  const bool by_length = (shape.flags & kByLength) != 0;
  config.invariance = by_length ? fa::Invariance::batch : fa::Invariance::rows;
  config.page_size = shape.page_size;
  config.varlen = (shape.flags & kPacked) != 0;
  KernelSpec& spec = path.spec;
  auto& own = spec.own.emplace<fa::plan::Sm90Forward>();
  spec.arch = {9, 0, 'a'};
  spec.dtype = config.dtype;
  spec.d_qk = spec.d_v = config.head_dim;
  spec.causal = true;
  spec.tile_m = shape.tile_m;
  spec.tile_n = 16;
  spec.stages = 2;
  spec.page_size = shape.page_size;
  spec.varlen = config.varlen;
  spec.split = (shape.flags & kShares) != 0;
  spec.pack_gqa = (shape.flags & kPackGqa) != 0;
  spec.bounded = (shape.flags & kBounded) != 0;
  spec.variants = fa::api::read_functions(config, false).variants;
  own.q_buffers = shape.q_buffers;
  own.take_turns = (shape.flags & kTurns) != 0;
  own.dynamic = (shape.flags & kDynamic) != 0;
  own.skips_hidden = (shape.flags & kSkips) != 0;
  own.softmax_chunks = own.skips_hidden ? 2 : 1;
  (by_length ? own.length_keys : own.split_keys) = kSplitKeys;
  own.exact_max = by_length && spec.split;
  own.whole_tiles = (shape.flags & kWholeTiles) != 0;
  own.own_ends = fa::plan::sm90_forward_own_ends(spec);
  spec.warps = fa::plan::sm90_forward_warps(spec);
  return path;
}

InvariantPath to_path(const Shape& shape) {
  InvariantPath path{shape.arithmetic, shape.name, {}, {}};
  AttentionConfig& config = path.config;
  config.causal = true;
  config.head_dim = 16;
  config.dtype = path.arithmetic == "f32" ? DType::f32 : DType::bf16;
  if (path.arithmetic == "wide") config.head_dim_v = 144;  // every step rescales
  if (path.arithmetic == "variant") {
    config.window_left = 41;
    config.sink = true;
    config.score = {"score + 0.0625 * float(kv - q - (s_kv - s_q))"};
  }
  if (path.arithmetic == "masked") {  // whole tiles, those without a key and others, in no order
    config.mask = {"kv >= 112 || (kv / 16) % 3 != 1 && (q + s_kv - s_q - kv) % 19 != 3"};
  }
  config.invariance = fa::Invariance::rows;
  config.page_size = shape.page_size;
  config.varlen = (shape.flags & kPacked) != 0;
  KernelSpec& spec = path.spec;
  auto& own = spec.own.emplace<fa::plan::Sm80Forward>();
  spec.arch = {8, 0, '\0'};
  spec.dtype = config.dtype;
  spec.d_qk = config.head_dim;
  spec.d_v = config.head_dim_v != 0 ? config.head_dim_v : config.head_dim;
  spec.causal = true;
  spec.tile_m = shape.tile_m;
  spec.warps = shape.warps;
  spec.stages = shape.stages;
  spec.tile_n = 16;
  spec.page_size = shape.page_size;
  spec.varlen = config.varlen;
  spec.split = (shape.flags & kShares) != 0;
  spec.pack_gqa = (shape.flags & kPackGqa) != 0;
  spec.aligned = (shape.flags & kUnaligned) == 0;
  spec.bounded = (shape.flags & kBounded) != 0;
  spec.variants = fa::api::read_functions(config, false).variants;
  own.q_in_registers = (shape.flags & kQInRegisters) != 0;
  own.conditional_rescale = spec.d_v <= 128 || spec.dtype == DType::f32;
  own.split_keys = kSplitKeys;
  return path;
}

}  // namespace

const std::vector<InvariantPath>& invariant_paths() {
  static const std::vector<InvariantPath> paths = [] {
    std::vector<InvariantPath> result;
    for (const Shape& shape : kShapes) result.push_back(to_path(shape));
    for (const HopperShape& shape : kHopperShapes) result.push_back(to_path(shape));
    return result;
  }();
  return paths;
}

const std::vector<InvariantPath>& batch_paths() {
  static const std::vector<InvariantPath> paths = [] {
    std::vector<InvariantPath> result;
    for (const HopperShape& shape : kBatchShapes) result.push_back(to_path(shape));
    return result;
  }();
  return paths;
}

const std::vector<InvariantPath>& dense_batch_paths() {
  static const std::vector<InvariantPath> paths = [] {
    constexpr unsigned kFlags = kShares | kPackGqa | kByLength;
    return std::vector<InvariantPath>{
        to_path(HopperShape{"length", "length_cut_dense", 64, 1, 0, kFlags}),
        to_path(HopperShape{"length", "length_taken_whole_dense", 64, 1, 0, kFlags | kWholeTiles})};
  }();
  return paths;
}

const std::vector<InvarianceMutation>& batch_mutations() {
  static const std::vector<InvarianceMutation> mutations{
      {"batch_splits_by_the_limit", "sm90/sm90_schedule.cuh",
       "return kernel::splits_of_length(query.sequence.s_kv, params.splits, kernel::kLengthKeys<Config>);",
       "return params.splits;", "length_pages_of_8"},
      {"batch_splits_by_the_longest", "sm90/sm90_schedule.cuh", "splits_of_length(query.sequence.s_kv, params.splits,",
       "splits_of_length(params.s_kv, params.splits,", "length_pages_of_16"},
      {"batch_reads_splits_that_there_are_not", "sm90/sm90_schedule.cuh",
       "if (query.tile.split >= query.sequence.splits) query.range = {};", "", "length_pages_of_24"},
      {"batch_folds_without_what_was_before", "sm90/sm90_whole_tiles.cuh", "split, factors.weights[r]);",
       "split, kernel::FoldedRow::Weights{0.f, factors.weights[r].split});", "length_taken_whole_pages_of_8"},
      {"batch_keeps_folded_rows", "sm90/sm90_whole_tiles.cuh",
       "store_sums(kernel::SplitSum::of_no_keys(), whole.factor, r, lane);",
       "store_sums(folded.total, whole.factor, r, lane);", "length_taken_whole_pages_of_8"},
      {"batch_folds_eight_rows", "sm90/sm90_whole_tiles.cuh", "to.first_row_of(query) > 8;",
       "to.first_row_of(query) > 16;", "length_taken_whole_pages_of_8"},
      {"batch_does_not_mark_whole_rows", "sm90/sm90_whole_tiles.cuh", "mark_whole(query, rows, row);", "",
       "length_taken_whole_pages_of_40"},
      {"batch_merges_from_the_last_split", "common/partial_merge.cuh",
       "const FoldedRow::Weights weights{Base::shuffled(of_lane.so_far, from), Base::shuffled(of_lane.split, from)};",
       "const FoldedRow::Weights weights{1.f, Base::shuffled(of_lane.split, from)};", "length_taken_whole_pages_of_8"},
      {"batch_merges_one_row_a_block", "common/forward_combine.cuh",
       "const int64_t own = first + ptx::thread_index() % kWarpSize * step;",
       "const int64_t own = first + ptx::thread_index() % kWarpSize * rows;", "length_taken_whole_pages_of_8"},
      {"batch_takes_whole_tiles_alone", "sm90/sm90_schedule.cuh",
       "const int end = counts.longest <= whole_keys ? query_tiles : tiles;", "const int end = query_tiles;",
       "length_taken_whole_pages_of_8"},
      {"batch_cuts_whole_tiles_by_the_limit", "sm90/sm90_schedule.cuh", "take_whole(query, query.sequence.splits);",
       "take_whole(query, params.splits);", "length_taken_whole_pages_of_8"},
      {"batch_forgets_a_boundary", "sm90/sm90_forward.cuh", "if (leaves && !spans) this->enter_next_split(at.ahead);",
       "", "length_taken_whole_pages_of_40"},
  };
  return mutations;
}

const std::vector<InvarianceMutation>& invariance_mutations() {
  static const std::vector<InvarianceMutation> mutations{
      {"folds_from_the_first_split", "common/fixed_splits.cuh", "const int64_t at = index(last - i);",
       "const int64_t at = index(splits - 1 - (last - i));", "packed_shared"},
      {"folds_relative_to_the_last_split", "common/fixed_splits.cuh",
       "const SplitSum base = split.is_above(total) ? split : total;", "const SplitSum base = split;", "pages_of_4"},
      {"splits_start_at_the_first_visible_key", "sm80/sm80_forward.cuh",
       "return kv_tile(place) / (kSplitKeys / kTileN);",
       "return (kv_tile(place) + tile.m_block) / (kSplitKeys / kTileN);", "dense_two_m_tiles"},
      {"keeps_the_maximum_over_splits", "sm80/sm80_forward_splits.cuh", "softmax = OnlineSoftmax<kMTiles>();",
       "FA_UNROLL for (int m = 0; m < kMTiles; ++m) { softmax.sum[m][0] = softmax.sum[m][1] = 0.f; }", "pages_of_4"},
      {"votes_on_a_maximum", "common/online_softmax.cuh", "grew = grew || new_max[m][r] > max[m][r];",
       "grew = grew || new_max[m][r] > max[m][r] + 1.f;", "packed"},
      {"counts_blocks_of_all_tiles", "sm80/sm80_forward_splits.cuh",
       "ptx::atomic_add_acq_rel_global(f.params.next_tile + f.item() / f.params.sequences.wave, 1);",
       "ptx::atomic_add_acq_rel_global(f.params.next_tile, 1);", "packed_shared"},
      {"counts_blocks_of_a_bounded_grid", "sm80/sm80_forward_splits.cuh",
       "ptx::atomic_add_acq_rel_global(f.params.next_tile + f.item() / f.params.sequences.wave, 1);",
       "ptx::atomic_add_acq_rel_global(f.params.next_tile + ptx::block_index() / f.params.sequences.wave, 1);",
       "bounded_shared"},
      {"wgmma_counts_splits_from_the_last_key", "sm90/sm90_forward.cuh",
       "static_cast<uint32_t>(at.ahead.n) % kSplitTiles == 0",
       "(at.ahead.query.range.end - at.ahead.n) % kSplitTiles == 0", "wgmma_dense"},
      {"wgmma_leaves_out_a_split", "sm90/sm90_forward.cuh",
       "fold_overlapped(at);\n    multiply_risen(at);\n    ptx::mbarrier_wait",
       "multiply_risen(at);\n    ptx::mbarrier_wait", "wgmma_dense"},
      {"wgmma_folds_a_split_by_the_weight_of_others", "sm90/sm90_fixed_splits.cuh",
       "weights[r] = {ptx::from_bits(words.word[0]), ptx::from_bits(words.word[1])};",
       "weights[r] = {ptx::from_bits(words.word[0]), ptx::from_bits(words.word[0])};", "wgmma_dense"},
      {"wgmma_starts_splits_without_a_greatest_score", "sm90/sm90_forward.cuh", "take_softmax(at, q_buffer, leaves);",
       "take_softmax(at, q_buffer, spans);", "wgmma_packed"},
      {"wgmma_keeps_sums_of_the_tile_before", "sm90/sm90_fixed_splits.cuh",
       "      for (int i = 2 * r; i < kCount; i += (i % 2 == 0 ? 1 : 3)) o[i] = kernel::folded_output(folded[i], "
       "factor);\n"
       "    }\n    begin(folded, warp_row, lane);",
       "      for (int i = 2 * r; i < kCount; i += (i % 2 == 0 ? 1 : 3)) o[i] = kernel::folded_output(folded[i], "
       "factor);\n"
       "    }",
       "wgmma_packed"},
      {"wgmma_normalises_splits_twice", "sm90/sm90_fixed_splits.cuh", "Variant, kHeadDimV, false, kAhead>",
       "Variant, kHeadDimV, true, kAhead>", "wgmma_packed_shared"},
      {"wgmma_shares_keys_within_splits", "common/fixed_splits.cuh",
       "range.begin = start_of_share<kSplitTiles>(range.end, shares, share) * kSplitTiles;",
       "range.begin = start_of_share<kSplitTiles>(range.end, shares, share) * kSplitTiles + (share > 0 ? 1 : 0);",
       "wgmma_dense_shared"},
      {"wgmma_has_one_flag_for_all_tiles", "sm90/sm90_fixed_splits.cuh",
       "to.params.split_flags + tile_number(query) * to.params.splits;", "to.params.split_flags;",
       "wgmma_packed_shared"},
      {"wgmma_folds_what_others_have_not_left", "sm90/sm90_fixed_splits.cuh",
       "if (thread < kernel::kWarpSize) kernel::await_flags(flags, last);", "", "wgmma_packed_shared"},
      {"wgmma_leaves_flags_up", "common/flags.cuh", "ptx::st_global(flags + i, uint64_t{0});", "",
       "wgmma_dense_shared"},
      {"wgmma_makes_scores_of_all_rows_again", "sm90/sm90_softmax.cuh",
       "rows.is[r] = quad_max(own[r]) >= least_lost || is_far(r);", "rows.is[r] = true;", "steep_packed"},
  };
  return mutations;
}

const InvariantPath& path_of(const InvarianceMutation& mutation) {
  for (const std::vector<InvariantPath>* const paths : {&invariant_paths(), &batch_paths()}) {
    const auto found = std::ranges::find(*paths, mutation.path, &InvariantPath::name);
    if (found != paths->end()) return *found;
  }
  throw std::out_of_range(mutation.path);
}

}  // namespace emulator
