#include "emulator/invariance_specs.hpp"

#include <algorithm>
#include <stdexcept>

#include "api/variants.hpp"

namespace emulator {
namespace {

using fa::AttentionConfig;
using fa::DType;
using fa::plan::KernelSpec;

constexpr int kSplitKeys = 32;

enum Flags : unsigned { kPacked = 1, kShares = 2, kPackGqa = 4, kUnaligned = 8, kQInRegisters = 16, kBounded = 32 };

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
    return result;
  }();
  return paths;
}

const std::vector<InvarianceMutation>& invariance_mutations() {
  static const std::vector<InvarianceMutation> mutations{
      {"folds_from_the_first_split", "common/fixed_splits.cuh", "for (int i = splits - 1; i >= 0; --i) {",
       "for (int i = 0; i < splits; ++i) {", "packed_shared"},
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
  };
  return mutations;
}

const InvariantPath& path_of(const InvarianceMutation& mutation) {
  const auto found = std::ranges::find(invariant_paths(), mutation.path, &InvariantPath::name);
  if (found == invariant_paths().end()) throw std::out_of_range(mutation.path);
  return *found;
}

}  // namespace emulator
