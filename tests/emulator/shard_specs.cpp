#include "emulator/shard_specs.hpp"

#include <algorithm>
#include <utility>

#include "api/problem.hpp"
#include "emulator/joined.hpp"
#include "emulator/specs.hpp"
#include "plan/backward.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/planner.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::plan::KernelSpec;
using fa::test::AttentionCase;
using Family = ShardKernels::Family;

AttentionCase attention(DType dtype, std::int64_t d_qk, std::int64_t d_v, bool causal) {
  AttentionCase c;
  c.dtype = dtype;
  c.d_qk = d_qk;
  c.d_v = d_v;
  c.causal = causal;
  return c;
}

fa::test::VariantChoice score(const char* name, const char* text, std::vector<fa::Capture> captures) {
  fa::AttentionConfig config;
  config.score = fa::ScoreFunction{text, std::move(captures)};
  return {name, config};
}

fa::test::VariantChoice chunked() {
  fa::AttentionConfig config;
  config.chunk = 24;
  return {"chunks", config};
}

/// Which keys are kept follows from every index and length.
fa::test::VariantChoice mask_of_all() {
  fa::AttentionConfig config;
  config.mask = fa::MaskFunction{"(q / 8 + kv / 16 + h + b) % 3 != 0 && q + kv > s_q / 16 && kv < s_kv - 5"};
  return {"mask_of_all", config};
}

/// What a kernel is planned for: its calls may have any lengths.
fa::AttentionShape any_shape(const ShardKernels& shard) {
  constexpr std::int64_t kAnyLength = 100;
  return {.b = 1,
          .h_q = 2,
          .h_kv = 1,
          .s_q = kAnyLength,
          .s_kv = kAnyLength,
          .placed = true,
          .strided = shard.strided,
          .bounded = shard.bounded,
          .place_in_memory = shard.in_memory};
}

fa::plan::Arch arch_of(const ShardKernels& shard) {
  return shard.family == Family::sm80 ? fa::plan::Arch{8, 0, '\0'} : fa::plan::Arch{9, 0, 'a'};
}

/// Plans for a problem, which refers to functions of a case.
template <class Plan>
auto with_problem(const ShardKernels& shard, const Plan& plan) {
  const fa::test::VariantCase c = whole_case(shard, shard.kernels.attention);
  const fa::AttentionShape shape = any_shape(shard);
  return plan(fa::api::make_problem(c.config, shape, arch_of(shard), &c.functions.of(shape)));
}

fa::plan::Fixed fixed_forward(const ShardKernels& shard) {
  const VariantKernels& kernels = shard.kernels;
  fa::plan::Fixed fixed;
  fixed.set("tile_n", kernels.tile_n);
  fixed.set("pack_gqa", kernels.pack_gqa);
  fixed.set("splits", kernels.splits);
  if (shard.family == Family::sm80) {
    fixed.set("tile_m", 32);
    fixed.set("warps", 2);
    fixed.set("stages", kernels.loop_bodies);
    fixed.set("loop_bodies", kernels.loop_bodies);
    fixed.set("warps_n", shard.warps_n);
    return fixed;
  }
  fixed.family = fa::plan::Family::sm90;
  if (shard.own_tiles) return {.family = fa::plan::Family::sm90_wide};
  fixed.set("tile_m", kernels.loop_bodies == 2 ? 128 : 64);
  fixed.set("stages", 2);
  fixed.set("q_buffers", kernels.loop_bodies);
  if (kernels.affine_product) fixed.set("affine_product", *kernels.affine_product);
  fixed.set("affine_reach", kernels.affine_reach);
  return fixed;
}

fa::plan::Fixed fixed_backward(const ShardKernels& shard) {
  fa::plan::Fixed fixed;
  fixed.set("splits", shard.kernels.splits);
  if (shard.family == Family::sm80) {
    fixed.set("tile_m", 32);
    fixed.set("tile_n", 32);
    fixed.set("warps", 4);
    fixed.set("stages", shard.kernels.loop_bodies);
    return fixed;
  }
  fixed.family = fa::plan::Family::sm90;
  if (shard.own_tiles) return fixed;
  fixed.set("tile_m", shard.tile_m);
  fixed.set("tile_n", shard.tile_n);
  return fixed;
}

std::vector<ShardKernels> forwards() {
  using enum Family;
  const auto bias = [](const char* text, DType dtype) { return score("bias", text, {{"bias", dtype}}); };
  const fa::test::VariantChoice distance =
      score("distance", "score - slope[h] * abs(float(q + s_kv - s_q - kv))", {{"slope", DType::f32}});
  return {
      {.kernels = {.choice = "plain", .attention = attention(DType::f16, 16, 16, true), .own = {{"plain", {}}}}},
      {.kernels = {"alibi", attention(DType::f16, 16, 8, true), true, 2}},
      {.kernels = {.choice = "chunks",
                   .attention = attention(DType::bf16, 16, 16, true),
                   .loop_bodies = 2,
                   .dropout = true,
                   .own = chunked()}},
      {.kernels = {.choice = "plain",
                   .attention = attention(DType::f16, 16, 16, false),
                   .pack_gqa = true,
                   .dropout = true,
                   .own = {{"plain", {}}}}},
      {.kernels = {.choice = "mask_of_all", .attention = attention(DType::f16, 16, 16, true), .own = mask_of_all()}},
      {.kernels = {.choice = "bias",
                   .attention = attention(DType::bf16, 16, 16, false),
                   .own = bias("score + bias[b, h, q, kv]", DType::bf16)},
       .strided = true},
      {.kernels = {"everything", attention(DType::bf16, 16, 16, true)}, .strided = true},
      {.family = sm90,
       .kernels = {.choice = "plain", .attention = attention(DType::bf16, 16, 16, true), .own = {{"plain", {}}}}},
      {.family = sm90,
       .kernels = {.choice = "distance",
                   .attention = attention(DType::bf16, 24, 16, true),
                   .loop_bodies = 2,
                   .own = distance,
                   .tile_n = 16,
                   .affine_product = true,
                   .affine_reach = true}},
      {.family = sm90,
       .kernels = {.choice = "distance", .attention = attention(DType::f16, 16, 16, false), .own = distance},
       .strided = true},
      {.family = sm90,
       .kernels = {.choice = "bias",
                   .attention = attention(DType::f16, 16, 16, true),
                   .loop_bodies = 2,
                   .own = bias("score + bias[b, h, q, kv]", DType::f16)}},
      {.family = sm90,
       .kernels = {.choice = "mask_of_all", .attention = attention(DType::bf16, 16, 16, false), .own = mask_of_all()},
       .bounded = true},
      {.family = sm90,
       .kernels = {.choice = "chunks",
                   .attention = attention(DType::bf16, 16, 16, true),
                   .loop_bodies = 2,
                   .dropout = true,
                   .own = chunked()}},
      {.family = sm90,
       .kernels = {.choice = "plain",
                   .attention = attention(DType::f16, 16, 16, false),
                   .pack_gqa = true,
                   .dropout = true,
                   .own = {{"plain", {}}}}},
      {.family = sm90, .kernels = {"everything", attention(DType::bf16, 16, 16, true)}},
  };
}

/// Of the mma.sync kernels, whose blocks take several tiles.
std::vector<ShardKernels> bounded_forwards() {
  return {
      {.kernels = {.choice = "plain", .attention = attention(DType::bf16, 16, 16, true), .own = {{"plain", {}}}},
       .bounded = true,
       .warps_n = 2},
      {.kernels = {"alibi", attention(DType::f16, 16, 8, true), true, 2}, .bounded = true},
      {.kernels = {"everything", attention(DType::bf16, 16, 16, true)}, .bounded = true},
      {.kernels = {.choice = "mask_of_all", .attention = attention(DType::f32, 16, 16, false), .own = mask_of_all()},
       .bounded = true},
  };
}

std::vector<ShardKernels> bounded_backwards() {
  std::vector<ShardKernels> list{
      {.kernels = {"softcap_bias", attention(DType::bf16, 16, 16, true)}, .bounded = true},
      {.kernels = {.choice = "plain",
                   .attention = attention(DType::f16, 16, 16, true),
                   .deterministic = true,
                   .dropout = true,
                   .own = {{"plain", {}}}},
       .bounded = true},
      {.kernels = {"learned", attention(DType::bf16, 8, 16, false), false, 2}, .bounded = true},
  };
  for (ShardKernels& shard : list) shard.forward = false;
  return list;
}

std::vector<ShardKernels> backwards() {
  using enum Family;
  std::vector<ShardKernels> list{
      {.kernels =
           {.choice = "chunks", .attention = attention(DType::bf16, 16, 16, true), .dropout = true, .own = chunked()}},
      {.kernels = {.choice = "plain",
                   .attention = attention(DType::f16, 16, 16, false),
                   .deterministic = true,
                   .dropout = true,
                   .own = {{"plain", {}}}}},
      {.kernels = {"softcap_bias", attention(DType::bf16, 16, 16, true)}},
      {.kernels = {"learned", attention(DType::bf16, 8, 16, false), false, 2}, .strided = true},
      {.kernels = {"everything", attention(DType::f16, 16, 16, true)}},
      {.family = sm90,
       .kernels = {.choice = "plain",
                   .attention = attention(DType::bf16, 64, 64, true),
                   .dropout = true,
                   .own = {{"plain", {}}}},
       .tile_n = 128},
      {.family = sm90,
       .kernels = {"everything", attention(DType::bf16, 16, 16, true), false, 1, 1, false, false, true}},
      {.family = sm90, .kernels = {"softcap_bias", attention(DType::f16, 16, 16, false)}, .strided = true},
      {.family = sm90, .kernels = {"by_head", attention(DType::f16, 16, 16, true)}, .bounded = true},
  };
  for (ShardKernels& shard : list) shard.forward = false;
  return list;
}

/// Kernels of the others whose calls' places come from memory, and those for wide heads.
std::vector<ShardKernels> in_memory() {
  using enum Family;
  std::vector<ShardKernels> list;
  const std::vector<ShardKernels> forward = forwards(), backward = backwards();
  for (const std::size_t i : {0U, 1U, 2U, 4U, 6U, 7U, 8U, 11U, 12U}) list.push_back(forward[i]);
  list.push_back(
      {.family = sm90,
       .kernels = {.choice = "plain", .attention = attention(DType::bf16, 264, 72, true), .own = {{"plain", {}}}},
       .own_tiles = true});
  for (const std::size_t i : {0U, 1U, 4U, 5U, 6U, 8U}) list.push_back(backward[i]);
  list.push_back(
      {.family = sm90,
       .kernels = {.choice = "plain", .attention = attention(DType::bf16, 136, 72, true), .own = {{"plain", {}}}},
       .forward = false,
       .own_tiles = true});
  for (ShardKernels& shard : list) shard.in_memory = true;
  return list;
}

}  // namespace

const std::vector<ShardKernels>& shard_kernels() {
  static const std::vector<ShardKernels> list = [] {
    std::vector<ShardKernels> all = forwards();
    for (ShardKernels& shard : backwards()) all.push_back(std::move(shard));
    for (ShardKernels& shard : bounded_forwards()) all.push_back(std::move(shard));
    for (ShardKernels& shard : bounded_backwards()) all.push_back(std::move(shard));
    for (ShardKernels& shard : in_memory()) all.push_back(std::move(shard));
    return all;
  }();
  return list;
}

fa::test::VariantCase whole_case(const ShardKernels& shard, const AttentionCase& whole) {
  fa::test::VariantCase c = variant_case(shard.kernels, whole);
  c.drops = shard.kernels.dropout;
  c.functions = fa::api::read_functions(c.config, true);  // now with dropout
  return c;
}

KernelSpec forward_spec(const ShardKernels& shard) {
  return with_problem(
      shard, [&](const fa::plan::Problem& problem) { return plan_forward(problem, fixed_forward(shard)).kernel; });
}

BackwardSpecs backward_specs(const ShardKernels& shard) {
  return with_problem(shard, [&](const fa::plan::Problem& problem) {
    const fa::plan::BackwardPlan plan = plan_backward(problem, fixed_backward(shard), shard.kernels.deterministic);
    BackwardSpecs specs{plan.main.front(), {}};
    if (!plan.dq.empty()) specs.dq = plan.dq.front();
    return specs;
  });
}

std::vector<KernelSpec> all_shard_specs() {
  using fa::plan::Op;
  std::vector<KernelSpec> unique;
  const auto add = [&](const KernelSpec& spec) {
    if (std::ranges::find(unique, spec) == unique.end()) unique.push_back(spec);
  };
  for (const ShardKernels& shard : shard_kernels()) {
    if (shard.forward) {
      const KernelSpec forward = forward_spec(shard);
      add(forward);
      if (forward.split) add(combine_spec(forward));
      if (forward.affine_reach()) add(fa::plan::row_norms_spec(forward));
      if (!forward.variants.mask.empty()) add(fa::plan::mask_tiles_spec(forward));
      continue;
    }
    const BackwardSpecs specs = backward_specs(shard);
    add(specs.main);
    add(backward_helper_spec(specs.main, Op::backward_preprocess));
    if (specs.main.split) add(backward_helper_spec(specs.main, Op::backward_reduce));
    if (specs.main.adds_dq()) add(backward_helper_spec(specs.main, Op::backward_convert));
    if (specs.passes_for_dq()) add(specs.dq);
    if (specs.main.variants.sink) add(backward_sink_spec(specs.main));
    if (specs.main.variants.mask.empty()) continue;
    add(fa::plan::mask_tiles_spec(specs.main));
    if (specs.passes_for_dq()) add(fa::plan::mask_tiles_spec(specs.dq));
  }
  return unique;
}

namespace {

constexpr std::size_t kAlibi = 1, kChunks = 2, kDropout = 3, kBias = 5, kHopperChunks = 12, kHopperDropout = 13,
                      kFirstBackward = 15, kBoundedPairs = 24, kBoundedSplits = 25, kBoundedBackward = 28,
                      kInMemory = 31;

/// Places that a call is given.
std::vector<ShardMutation> place_mutations() {
  return {{"shard_batch_is_the_calls", "common/shard_place.cuh", "whole.b += place_entry(params, PlaceEntry::b);", "",
           kBias},
          {"shard_head_is_the_calls", "common/shard_place.cuh", "whole.h += place_entry(params, PlaceEntry::h);", "",
           kAlibi},
          {"shard_row_is_the_calls", "common/shard_place.cuh", "whole.q += place_entry(params, PlaceEntry::q);", "",
           kAlibi},
          {"shard_key_is_the_calls", "common/shard_place.cuh", "whole.kv += place_entry(params, PlaceEntry::kv);", "",
           kAlibi},
          {"shard_rows_are_the_calls", "common/shard_place.cuh", "whole.s_q = place_entry(params, PlaceEntry::s_q);",
           "", kAlibi},
          {"shard_keys_are_the_calls", "common/shard_place.cuh", "whole.s_kv = place_entry(params, PlaceEntry::s_kv);",
           "", kAlibi},
          {"shard_base_row_without_steps", "common/shard_place.cuh", "whole.q *= q_step;", "", kBias},
          {"shard_base_key_without_steps", "common/shard_place.cuh", "whole.kv *= kv_step;", "", kBias},
          {"shard_loads_without_steps", "common/shard_place.cuh",
           "steps.kv *= place_entry(params, PlaceEntry::kv_step);", "", kBias},
          {"shard_chunks_begin_with_the_call", "common/variant.cuh", "return params.variant.chunk_keys;",
           "return 0 * params.variant.chunk_keys;", kChunks},
          {"shard_dropout_of_the_calls_heads", "common/dropout_place.cuh", "batch) * params.dropout.heads",
           "batch) * params.h_q", kDropout},
          {"shard_dropout_of_the_calls_rows", "common/dropout_place.cuh",
           "return row + place_entry(params.variant, PlaceEntry::q);",
           "return row + 0 * place_entry(params.variant, PlaceEntry::q);", kHopperDropout},
          {"shard_dropout_of_the_calls_keys", "common/dropout_place.cuh",
           "return key + place_entry(params.variant, PlaceEntry::kv);",
           "return key + 0 * place_entry(params.variant, PlaceEntry::kv);", kHopperChunks},
          {"shard_backward_drops_the_calls_rows", "common/dropout_place.cuh",
           "return row + place_entry(params.variant, PlaceEntry::q);",
           "return row + 0 * place_entry(params.variant, PlaceEntry::q);", kFirstBackward + 5},
          {"shard_backward_drops_the_calls_keys", "common/dropout_place.cuh",
           "return key + place_entry(params.variant, PlaceEntry::kv);",
           "return key + 0 * place_entry(params.variant, PlaceEntry::kv);", kFirstBackward},
          {"shard_rows_of_a_key_by_chunks_of_the_call",
           "common/variant.cuh",
           "const int chunk = (key + keys_before_chunk<Variant>(params)) / params.variant.chunk;",
           "const int chunk = key / params.variant.chunk;",
           kFirstBackward,
           {},
           2}};
}

/// Bounded grids, and places in device memory.
std::vector<ShardMutation> bounded_mutations() {
  return {{"bounded_blocks_do_not_wait",
           "common/bounded_items.cuh",
           "if (round > 0) ptx::sync_threads();",
           "",
           kBoundedSplits,
           {FaultKind::shared_race, FaultKind::source_overwritten}},
          {"bounded_backward_does_not_wait",
           "common/bounded_items.cuh",
           "if (round > 0) ptx::sync_threads();",
           "",
           kBoundedBackward + 2,
           {FaultKind::shared_race, FaultKind::source_overwritten}},
          {"bounded_rounds_leave_out_an_item",
           "common/bounded_items.cuh",
           "blocks - 1 - block",
           "blocks - block",
           kBoundedPairs,
           {FaultKind::global_uninitialised}},
          {"bounded_items_are_of_one_split",
           "sm80/sm80_forward_block.cuh",
           "(kVarlen ? 1 : p.b) * p.splits;",
           "(kVarlen ? 1 : p.b);",
           kBoundedSplits,
           {FaultKind::global_uninitialised}},
          {"bounded_masks_of_the_first_item", "sm80/sm80_forward.cuh", "const Forward derived(params, index);",
           "const Forward derived(params);", kBoundedPairs},
          {"place_in_memory_without_its_diagonal", "common/place_in_memory.cuh",
           "params.causal_shift = static_cast<int32_t>(masks.causal_shift);", "", kInMemory},
          {"place_in_memory_without_its_window", "common/place_in_memory.cuh",
           "params.variant.window_left = static_cast<int32_t>(masks.window_left);", "", kInMemory + 4},
          {"place_in_memory_without_its_chunk", "common/place_in_memory.cuh",
           "params.variant.chunk_keys = static_cast<int32_t>(masks.chunk_keys);", "", kInMemory + 2},
          {"place_in_memory_without_its_head", "common/place_in_memory.cuh",
           "set_entry(params.variant, PlaceEntry::h, begin.h_q);", "", kInMemory + 1},
          {"place_in_memory_without_its_row", "common/place_in_memory.cuh",
           "set_entry(params.variant, PlaceEntry::q, begin.q);", "", kInMemory + 3},
          {"place_in_memory_without_its_key", "common/place_in_memory.cuh",
           "set_entry(params.variant, PlaceEntry::kv, begin.kv);", "", kInMemory + 3},
          {"place_in_memory_drops_the_first_heads", "common/place_in_memory.cuh",
           "params.dropout.offset += static_cast<uint64_t>(begin.b * place.whole_h_q + begin.h_q);", "", kInMemory + 2},
          {"place_in_memory_aligned_at_the_top", "common/place_params.cuh",
           "place.bottom_right != 0 ? int64_t{place.whole_s_kv} - place.whole_s_q : 0", "0", kInMemory + 5},
          {"bounded_stores_to_the_first_item",
           "sm80/sm80_backward.cuh",
           "const Backward epilogue(params, round);",
           "const Backward epilogue(params);",
           kBoundedBackward,
           {FaultKind::global_uninitialised}}};
}

}  // namespace

const std::vector<ShardMutation>& shard_mutations() {
  static const std::vector<ShardMutation> all = joined({place_mutations(), bounded_mutations()});
  return all;
}

KernelSpec subject_of(const ShardMutation& mutation) {
  const ShardKernels& shard = shard_kernels()[mutation.entry];
  return shard.forward ? forward_spec(shard) : backward_specs(shard).main;
}

}  // namespace emulator
