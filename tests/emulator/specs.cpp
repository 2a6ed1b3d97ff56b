#include "emulator/specs.hpp"

#include <algorithm>
#include <array>
#include <set>
#include <stdexcept>
#include <string>

#include "emulator/backward_specs.hpp"
#include "emulator/fp8_specs.hpp"
#include "emulator/mutations.hpp"
#include "emulator/packed_specs.hpp"
#include "emulator/pairwise.hpp"
#include "emulator/sm90_backward_variants.hpp"
#include "emulator/variant_specs.hpp"
#include "plan/catalogue.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/planner.hpp"
#include "plan/sm80_forward.hpp"
#include "plan/sm90_wide_forward.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::plan::Arch;
using fa::plan::KernelSpec;
using fa::plan::Op;
using fa::plan::Problem;

constexpr std::array kDTypes{DType::f16, DType::bf16, DType::f32};
constexpr std::array kHeadDims{8, 40, 64, 96, 128, 192, 256};
constexpr std::array kHeadDimsV{0, 0, 8, 40, 48, 64, 192};  // 0: that of q and k
constexpr std::array<std::array<int, 2>, 5> kRowTiles{{{16, 1}, {32, 2}, {64, 4}, {32, 1}, {64, 2}}};  // rows, warps
constexpr std::array kKeyTiles{16, 32, 48, 64};
constexpr Arch kArch{8, 0, '\0'};

enum Factor : std::size_t {
  dtype,
  d_qk,
  d_v,
  row_tile,
  key_tile,
  stages,
  causal,
  positive_scale,
  aligned,
  q_in_registers,
  loop_bodies,
  pack_gqa,
  split,
  pairs,
  factor_count
};

KernelSpec to_spec(const Row& row) {
  KernelSpec spec;
  spec.arch = kArch;
  spec.dtype = kDTypes[row[dtype]];
  spec.d_qk = kHeadDims[row[d_qk]];
  spec.d_v = kHeadDimsV[row[d_v]] == 0 ? spec.d_qk : kHeadDimsV[row[d_v]];
  spec.tile_m = kRowTiles[row[row_tile]][0];
  spec.warps = kRowTiles[row[row_tile]][1];
  spec.tile_n = kKeyTiles[row[key_tile]];
  spec.stages = static_cast<int>(row[stages]) + 1;
  spec.causal = row[causal] != 0;
  spec.positive_scale = row[positive_scale] != 0;
  spec.aligned = row[aligned] != 0;
  spec.as<fa::plan::Sm80Forward>().q_in_registers = row[q_in_registers] != 0;
  spec.as<fa::plan::Sm80Forward>().loop_bodies = static_cast<int>(row[loop_bodies]) + 1;
  spec.pack_gqa = row[pack_gqa] != 0;
  spec.split = row[split] != 0;
  spec.warps_n = row[pairs] != 0 ? 2 : 0;
  return spec;
}

Problem problem(DType type, int d, bool is_causal, std::int64_t s, std::int64_t h_q = 1, std::int64_t h_kv = 1) {
  Problem p;
  p.arch = kArch;
  p.dtype = type;
  p.d_qk = d;
  p.d_v = d;
  p.causal = is_causal;
  p.h_q = h_q;
  p.h_kv = h_kv;
  p.s_q = s;
  p.s_kv = s;
  return p;
}

/// Groups of warps that share rows, with slices of O that are even or not.
void add_groups(std::vector<KernelSpec>& specs) {
  struct Shape {
    DType dtype;
    int d_qk, d_v, tile_m, warps, warps_n, tile_n, stages;
    bool causal, aligned, pack_gqa, split, positive_scale;
  };
  constexpr Shape kShapes[] = {
      {DType::bf16, 264, 264, 64, 8, 4, 64, 1, true, true, false, false, true},
      {DType::f16, 24, 40, 32, 4, 4, 32, 2, true, false, true, false, false},
      {DType::f32, 40, 72, 32, 8, 4, 32, 1, false, true, false, true, true},
      {DType::f32, 24, 16, 16, 2, 2, 16, 3, true, false, true, false, true},
      {DType::bf16, 56, 128, 16, 8, 8, 128, 1, false, true, true, true, false},
      {DType::f16, 8, 8, 32, 4, 2, 32, 2, true, true, false, false, true},
  };
  for (const Shape& shape : kShapes) {
    KernelSpec spec;
    spec.arch = kArch;
    spec.dtype = shape.dtype;
    spec.d_qk = shape.d_qk;
    spec.d_v = shape.d_v;
    spec.tile_m = shape.tile_m;
    spec.warps = shape.warps;
    spec.warps_n = shape.warps_n;
    spec.tile_n = shape.tile_n;
    spec.stages = shape.stages;
    spec.causal = shape.causal;
    spec.aligned = shape.aligned;
    spec.pack_gqa = shape.pack_gqa;
    spec.split = shape.split;
    spec.positive_scale = shape.positive_scale;
    if (const std::string refusal = fa::plan::sm80_forward_refusal(spec); !refusal.empty())
      throw std::logic_error(refusal);
    specs.push_back(spec);
  }
}

std::vector<KernelSpec> find_covering_specs() {
  const std::vector<std::size_t> levels{kDTypes.size(),
                                        kHeadDims.size(),
                                        kHeadDimsV.size(),
                                        kRowTiles.size(),
                                        kKeyTiles.size(),
                                        4,
                                        2,
                                        2,
                                        2,
                                        2,
                                        2,
                                        2,
                                        2,
                                        2};
  std::vector<KernelSpec> specs;
  for (const Row& row : pairwise_cover(
           levels, [](const Row& candidate) { return fa::plan::sm80_forward_refusal(to_spec(candidate)).empty(); })) {
    specs.push_back(to_spec(row));
  }
  add_groups(specs);
  return specs;
}

struct Sm90Shape {
  DType dtype;
  int d_qk, d_v, tile_m, tile_n, stages, q_buffers;
  bool causal, take_turns, pack_gqa, positive_scale;
  int softmax_chunks = 1;
  bool split = false;
  bool skips_hidden = false;
  bool own_ends = false;
  bool dynamic = false;
  bool exact_max = false;
  int split_blocks = 1;
};

constexpr Sm90Shape kSm90Shapes[] = {
    {DType::bf16, 64, 64, 64, 32, 2, 1, false, false, false, true},
    {DType::f16, 64, 64, 128, 32, 3, 2, true, true, false, true, 2},
    {DType::bf16, 64, 64, 192, 48, 2, 2, true, true, false, true, 3},
    {DType::bf16, 128, 128, 128, 64, 2, 1, true, true, false, true, 2},
    {DType::f16, 128, 128, 64, 32, 2, 2, false, false, true, true},
    {DType::bf16, 256, 256, 128, 16, 2, 1, true, false, false, true},
    {DType::bf16, 72, 72, 64, 32, 3, 2, true, false, true, true},
    {DType::f16, 80, 40, 128, 48, 2, 1, false, true, false, false},
    {DType::bf16, 192, 128, 128, 32, 2, 2, true, true, true, true},
    {DType::f16, 8, 96, 64, 16, 3, 1, true, false, false, false},
    {DType::bf16, 64, 64, 128, 32, 2, 2, true, true, false, true, 1, true},
    {DType::f16, 40, 72, 64, 32, 2, 1, false, false, true, false, 1, true},
    {DType::bf16, 64, 64, 192, 48, 2, 2, true, true, false, true, 3, false, true},
    {DType::f16, 32, 40, 192, 32, 2, 1, true, false, true, false, 2, false, true},
    {DType::bf16, 48, 64, 192, 80, 3, 1, true, true, true, true, 2, true, true},
    {DType::bf16, 64, 64, 192, 48, 2, 2, true, true, false, true, 2, false, false, true},
    {DType::f16, 64, 40, 192, 80, 3, 2, true, true, false, true, 2, false, true, true, true},
    {DType::bf16, 128, 128, 128, 64, 2, 1, true, true, false, true, 2, false, false, true, true},
    {DType::f16, 72, 72, 128, 32, 3, 2, true, true, true, false, 2, false, false, true},
    {DType::bf16, 80, 64, 128, 128, 2, 2, true, true, false, true, 2, false, false, false, true},
    {DType::f16, 32, 32, 64, 48, 2, 2, true, false, true, true, 2, false, false, false, true},
    {DType::bf16, 64, 64, 256, 32, 4, 2, false, true, false, true},
    {DType::f16, 64, 40, 256, 64, 3, 2, true, true, false, true, 1, false, false, true, true},
    {DType::bf16, 64, 64, 256, 48, 4, 2, true, false, false, true, 2, false, true, true},
    {DType::f16, 32, 64, 256, 32, 3, 2, true, false, false, false, 1, false, false, true, true},
    {DType::bf16, 64, 32, 256, 32, 3, 2, true, false, true, true, 2, false, true, true},
    {DType::f16, 64, 64, 256, 64, 2, 1, true, true, false, true, 1, true},
    {DType::bf16, 64, 64, 192, 48, 2, 2, false, true, false, true, 1, false, false, true},
    {DType::f16, 72, 40, 256, 32, 3, 2, false, true, false, false, 1, false, false, true},
    {DType::bf16, 72, 136, 192, 32, 3, 1, false, true, true, true, 1, false, false, true},
    {DType::f16, 136, 136, 192, 16, 3, 1, true, true, false, true, 1, false, true, true},
    {DType::bf16, 72, 72, 256, 64, 3, 2, true, true, false, true, 1, false, false, true},
    {DType::bf16, 128, 128, 128, 64, 2, 2, true, true, false, true, 1, false, false, false, false, true},
    {DType::f16, 80, 72, 128, 48, 2, 2, false, false, false, false, 1, false, false, false, false, true},
    {DType::bf16, 96, 96, 192, 64, 2, 2, true, true, false, true, 1, false, false, true, true, true},
    {DType::f16, 72, 128, 64, 32, 2, 1, true, false, true, true, 1, true, false, false, false, true},
    {DType::bf16, 64, 64, 256, 32, 3, 2, true, false, false, true, 1, false, false, true, false, true},
    {DType::bf16, 64, 64, 64, 48, 2, 1, true, false, true, true, 2, true, false, false, false, false, 2},
    {DType::f16, 40, 72, 64, 32, 3, 1, false, false, false, false, 1, true, false, false, false, true, 4},
    {DType::bf16, 64, 40, 64, 32, 2, 2, false, false, true, true, 1, true},
};

/// Of the Hopper forward for wide heads: V apart from K, in halves that are even or not.
void add_wide(std::vector<KernelSpec>& specs) {
  struct Shape {
    DType dtype;
    int d_qk, d_v, stages;
    bool causal, pack_gqa, split, positive_scale;
  };
  constexpr Shape kShapes[] = {
      {DType::bf16, 264, 264, 2, true, false, false, true}, {DType::f16, 512, 512, 1, false, false, false, true},
      {DType::bf16, 320, 64, 1, true, true, true, true},    {DType::f16, 8, 392, 2, true, true, false, false},
      {DType::bf16, 576, 512, 1, true, true, false, true},
  };
  for (const Shape& shape : kShapes) {
    KernelSpec spec;
    spec.own = fa::plan::Sm90WideForward{};
    spec.arch = {9, 0, 'a'};
    spec.dtype = shape.dtype;
    spec.d_qk = shape.d_qk;
    spec.d_v = shape.d_v;
    spec.tile_m = spec.tile_n = 64;
    spec.warps = 12;
    spec.stages = shape.stages;
    spec.causal = shape.causal;
    spec.pack_gqa = shape.pack_gqa;
    spec.split = shape.split;
    spec.positive_scale = shape.positive_scale;
    if (const std::string refusal = fa::plan::sm90_wide_forward_refusal(spec); !refusal.empty())
      throw std::logic_error(refusal);
    specs.push_back(spec);
  }
}

std::vector<KernelSpec> find_sm90_specs() {
  std::vector<KernelSpec> specs;
  for (const Sm90Shape& shape : kSm90Shapes) {
    KernelSpec spec;
    spec.own = fa::plan::Sm90Forward{};
    spec.arch = {9, 0, 'a'};
    spec.dtype = shape.dtype;
    spec.d_qk = shape.d_qk;
    spec.d_v = shape.d_v;
    spec.tile_m = shape.tile_m;
    spec.tile_n = shape.tile_n;
    spec.warps = 4 * (shape.tile_m / 64 + 1);
    spec.stages = shape.stages;
    spec.as<fa::plan::Sm90Forward>().q_buffers = shape.q_buffers;
    spec.causal = shape.causal;
    spec.as<fa::plan::Sm90Forward>().take_turns = shape.take_turns;
    spec.pack_gqa = shape.pack_gqa;
    spec.as<fa::plan::Sm90Forward>().softmax_chunks = shape.softmax_chunks;
    spec.split = shape.split;
    spec.as<fa::plan::Sm90Forward>().skips_hidden = shape.skips_hidden;
    spec.as<fa::plan::Sm90Forward>().own_ends = shape.own_ends;
    spec.as<fa::plan::Sm90Forward>().dynamic = shape.dynamic;
    spec.as<fa::plan::Sm90Forward>().exact_max = shape.exact_max;
    spec.as<fa::plan::Sm90Forward>().split_blocks = shape.split_blocks;
    spec.positive_scale = shape.positive_scale;
    specs.push_back(spec);
  }
  return specs;
}

}  // namespace

const std::vector<KernelSpec>& covering_specs() {
  static const std::vector<KernelSpec> specs = find_covering_specs();
  return specs;
}

const std::vector<KernelSpec>& accumulating_specs() {
  static const std::vector<KernelSpec> specs = [] {
    using Wanted = bool (*)(const KernelSpec&);
    constexpr Wanted kKinds[] = {
        [](const KernelSpec& spec) { return spec.warps_n == 2 && spec.aligned; },
        [](const KernelSpec& spec) { return spec.warps_n == 2 && !spec.aligned; },
        [](const KernelSpec& spec) { return spec.dtype == DType::f32 && spec.aligned && spec.causal; },
        [](const KernelSpec& spec) { return spec.dtype == DType::f32 && !spec.aligned && !spec.split; },
        [](const KernelSpec& spec) { return spec.split && spec.dtype == DType::f16; },
        [](const KernelSpec& spec) { return spec.pack_gqa && !spec.split && spec.dtype == DType::bf16; },
        [](const KernelSpec& spec) { return spec.causal && !spec.split && spec.d_v != spec.d_qk; },
        [](const KernelSpec& spec) { return spec.warps_n == 4 && !spec.aligned; },
    };
    std::vector<KernelSpec> found;
    for (const Wanted wanted : kKinds) found.push_back(*std::ranges::find_if(covering_specs(), wanted));
    for (const std::size_t i : {0U, 2U, 4U, 8U, 11U, 16U, 18U, 24U}) found.push_back(sm90_specs().at(i));
    for (KernelSpec& spec : found) spec.accumulate = true;
    return found;
  }();
  return specs;
}

std::vector<Problem> planned_problems() {
  std::vector<Problem> problems{problem(DType::bf16, 64, true, 200), problem(DType::f16, 128, false, 150),
                                problem(DType::f32, 64, true, 100), problem(DType::bf16, 128, true, 5, 4, 2),
                                problem(DType::bf16, 256, true, 150)};
  problems.push_back(problem(DType::bf16, 64, false, 1100, 2, 1));  // one query row over many keys: split and packed
  problems.back().s_q = 1;
  return problems;
}

int splits_of(const KernelSpec& spec, int wanted) {
  return !spec.split ? 1 : spec.cluster() > 1 ? spec.cluster() : wanted;
}

KernelSpec combine_spec(const KernelSpec& split) {
  KernelSpec spec;
  spec.own = fa::plan::ForwardCombine{};
  spec.arch = split.arch;
  spec.dtype = split.dtype;
  if (split.is<fa::plan::Sm90Fp8Forward>() || split.is<fa::plan::Sm80Fp8Forward>()) {
    const Fp8Facts own = fp8_facts(split);
    spec.dtype = own.byte_output ? fa::DType::e4m3 : own.half_output ? fa::DType::f16 : fa::DType::bf16;
  }
  spec.d_v = split.d_v;
  spec.warps = 4;
  spec.variants.sink = split.variants.sink;
  spec.accumulate = split.accumulate;
  spec.as<fa::plan::ForwardCombine>().folds = split.length_keys() > 0;
  return spec;
}

bool is_of_merge(const std::string& header, const KernelSpec& split) {
  return header == "common/forward_combine.cuh" || (header == "common/partial_merge.cuh" && split.length_keys() > 0);
}

KernelSpec backward_helper_spec(const KernelSpec& main, Op op) {
  KernelSpec spec;
  spec.own = fa::plan::own_of(op);
  spec.arch = main.arch;
  spec.dtype = main.dtype;
  spec.d_qk = main.d_qk;
  spec.d_v = main.d_v;
  spec.aligned = main.aligned;
  spec.varlen = main.varlen;
  spec.warps = 4;
  if (op == Op::backward_reduce) {
    spec.without_dk = main.without_dk;
    spec.without_dv = main.without_dv;
  }
  return spec;
}

KernelSpec backward_sink_spec(const KernelSpec& main) {
  KernelSpec spec;
  spec.own = fa::plan::BackwardSink{};
  spec.arch = main.arch;
  spec.dtype = main.dtype;
  spec.varlen = main.varlen;
  spec.warps = 8;
  return spec;
}

const std::vector<KernelSpec>& sm90_specs() {
  static const std::vector<KernelSpec> specs = [] {
    std::vector<KernelSpec> found = find_sm90_specs();
    add_wide(found);
    return found;
  }();
  return specs;
}

std::vector<KernelSpec> all_specs() {
  std::vector<KernelSpec> specs(covering_specs().begin(), covering_specs().end());
  specs.insert(specs.end(), accumulating_specs().begin(), accumulating_specs().end());
  specs.insert(specs.end(), sm90_specs().begin(), sm90_specs().end());
  for (const Problem& p : planned_problems()) specs.emplace_back(fa::plan::plan_forward(p, {}).kernel);
  for (const Mutation& mutation : mutations()) {
    if (!is_backward(mutation) && !mutation.subject.append && !mutation.subject.merge)
      specs.push_back(mutation.subject.spec);
  }
  specs.insert(specs.end(), packed_forward_specs().begin(), packed_forward_specs().end());
  std::set<std::string> seen;
  std::vector<KernelSpec> unique;
  const auto add = [&](const KernelSpec& spec) {
    if (seen.insert(canonical(spec)).second) unique.push_back(spec);
  };
  for (const KernelSpec& spec : specs) {
    add(spec);
    if (spec.op() == Op::forward && !spec.variants.mask.empty()) add(fa::plan::mask_tiles_spec(spec));
    if (spec.op() == Op::forward && spec.split) add(combine_spec(spec));
    if (spec.op() == Op::forward && spec.affine_reach()) add(fa::plan::row_norms_spec(spec));
  }
  std::vector<BackwardSpecs> backwards = all_backward_specs();
  backwards.insert(backwards.end(), packed_backward_specs().begin(), packed_backward_specs().end());
  for (const BackwardSpecs& backward : backwards) {
    add(backward.main);
    add(backward_helper_spec(backward.main, Op::backward_preprocess));
    if (backward.main.split) add(backward_helper_spec(backward.main, Op::backward_reduce));
    if (backward.passes_for_dq()) add(backward.dq);
    if (backward.main.adds_dq()) add(backward_helper_spec(backward.main, Op::backward_convert));
  }
  for (const Mutation& mutation : mutations()) {
    if (!mutation.subject.hopper_backward) continue;
    add(mutation.subject.spec);
    add(backward_helper_spec(mutation.subject.spec, Op::backward_preprocess));
    add(backward_helper_spec(mutation.subject.spec, Op::backward_convert));
    if (!mutation.subject.spec.variants.mask.empty()) add(fa::plan::mask_tiles_spec(mutation.subject.spec));
  }
  for (const Arch arch : {kArch, Arch{9, 0, 'a'}}) {
    for (const DType dtype : kDTypes) add(fa::plan::clear_padding_spec(arch, dtype));
  }
  for (const DType dtype : {DType::f16, DType::f32}) add(fa::plan::clear_padding_spec(Arch{7, 5, '\0'}, dtype));
  return unique;
}

std::vector<KernelSpec> all_variant_specs() {
  std::set<std::string> seen;
  std::vector<KernelSpec> unique;
  const auto add = [&](const KernelSpec& spec) {
    if (seen.insert(canonical(spec)).second) unique.push_back(spec);
  };
  std::vector<VariantKernels> all = variant_kernels();
  all.insert(all.end(), packed_variant_kernels().begin(), packed_variant_kernels().end());
  all.insert(all.end(), random_variant_kernels().begin(), random_variant_kernels().end());
  for (const VariantKernels& kernels : all) {
    const VariantSpecs variant = variant_specs(kernels);
    add(variant.forward);
    if (variant.forward.split) add(variant.combine);
    add(variant.backward);
    add(backward_helper_spec(variant.backward, Op::backward_preprocess));
    if (variant.backward.split) add(backward_helper_spec(variant.backward, Op::backward_reduce));
    add(kernels.deterministic ? variant.dq : backward_helper_spec(variant.backward, Op::backward_convert));
    if (variant.backward.variants.sink) add(backward_sink_spec(variant.backward));
    if (variant.forward.variants.mask.empty() || variant.forward.varlen) continue;
    add(fa::plan::mask_tiles_spec(variant.forward));
    add(fa::plan::mask_tiles_spec(variant.backward));
    if (kernels.deterministic) add(fa::plan::mask_tiles_spec(variant.dq));
  }
  std::vector<VariantKernels> hopper = hopper_variant_kernels();
  hopper.insert(hopper.end(), hopper_packed_variant_kernels().begin(), hopper_packed_variant_kernels().end());
  for (const VariantKernels& kernels : hopper) {
    const VariantSpecs variant = hopper_variant_specs(kernels);
    add(variant.forward);
    if (variant.forward.split) add(variant.combine);
    if (variant.forward.affine_reach()) add(fa::plan::row_norms_spec(variant.forward));
    if (variant.forward.variants.mask.empty() || variant.forward.varlen) continue;
    add(fa::plan::mask_tiles_spec(variant.forward));
  }
  for (const Sm90BackwardVariant& variant : sm90_backward_variants()) {
    const BackwardSpecs specs = backward_specs_of(variant);
    add(specs.main);
    add(backward_helper_spec(specs.main, Op::backward_preprocess));
    if (specs.main.split) add(backward_helper_spec(specs.main, Op::backward_reduce));
    if (specs.main.adds_dq()) add(backward_helper_spec(specs.main, Op::backward_convert));
    if (specs.passes_for_dq()) add(specs.dq);
    if (specs.main.variants.sink) add(backward_sink_spec(specs.main));
    if (specs.main.variants.mask.empty() || specs.main.varlen) continue;
    add(fa::plan::mask_tiles_spec(specs.main));
    if (specs.passes_for_dq()) add(fa::plan::mask_tiles_spec(specs.dq));
  }
  for (const Arch arch : {kArch, Arch{9, 0, 'a'}}) {
    for (const DType dtype : kDTypes) add(fa::plan::clear_padding_spec(arch, dtype));
  }
  return unique;
}

}  // namespace emulator
