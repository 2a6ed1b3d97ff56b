#include "plan/kernel_spec.hpp"

#include <gtest/gtest.h>

#include <iterator>
#include <set>
#include <string>
#include <vector>

namespace fa::plan {
namespace {

struct Mutation {
  const char* field;
  void (*apply)(KernelSpec& spec);
};

constexpr Mutation kMutations[] = {
    {"family", [](KernelSpec& spec) { spec.family = Family::automatic; }},
    {"op", [](KernelSpec& spec) { spec.op = Op::combine; }},
    {"arch", [](KernelSpec& spec) { spec.arch.minor = 6; }},
    {"dtype", [](KernelSpec& spec) { spec.dtype = DType::f16; }},
    {"d_qk", [](KernelSpec& spec) { spec.d_qk = 72; }},
    {"d_v", [](KernelSpec& spec) { spec.d_v = 72; }},
    {"causal", [](KernelSpec& spec) { spec.causal = !spec.causal; }},
    {"positive_scale", [](KernelSpec& spec) { spec.positive_scale = !spec.positive_scale; }},
    {"aligned", [](KernelSpec& spec) { spec.aligned = !spec.aligned; }},
    {"tile_m", [](KernelSpec& spec) { spec.tile_m = 192; }},
    {"tile_n", [](KernelSpec& spec) { spec.tile_n = 48; }},
    {"warps", [](KernelSpec& spec) { spec.warps = 2; }},
    {"stages", [](KernelSpec& spec) { spec.stages = 3; }},
    {"q_in_registers", [](KernelSpec& spec) { spec.q_in_registers = !spec.q_in_registers; }},
    {"loop_bodies", [](KernelSpec& spec) { spec.loop_bodies = 2; }},
    {"conditional_rescale", [](KernelSpec& spec) { spec.conditional_rescale = !spec.conditional_rescale; }},
    {"pack_gqa", [](KernelSpec& spec) { spec.pack_gqa = !spec.pack_gqa; }},
    {"split", [](KernelSpec& spec) { spec.split = !spec.split; }},
    {"warps_n", [](KernelSpec& spec) { spec.warps_n = 4; }},
    {"dq_warps_m", [](KernelSpec& spec) { spec.dq_warps_m = 1; }},
    {"substeps", [](KernelSpec& spec) { spec.substeps = 2; }},
    {"operands_in_registers", [](KernelSpec& spec) { spec.operands_in_registers = 2; }},
    {"write_dq", [](KernelSpec& spec) { spec.write_dq = !spec.write_dq; }},
    {"ordered_dq", [](KernelSpec& spec) { spec.ordered_dq = !spec.ordered_dq; }},
    {"delayed_dq", [](KernelSpec& spec) { spec.delayed_dq = !spec.delayed_dq; }},
    {"q_buffers", [](KernelSpec& spec) { spec.q_buffers = 2; }},
    {"softmax_chunks", [](KernelSpec& spec) { spec.softmax_chunks = 4; }},
    {"take_turns", [](KernelSpec& spec) { spec.take_turns = !spec.take_turns; }},
    {"skips_hidden", [](KernelSpec& spec) { spec.skips_hidden = !spec.skips_hidden; }},
    {"own_ends", [](KernelSpec& spec) { spec.own_ends = !spec.own_ends; }},
    {"dynamic", [](KernelSpec& spec) { spec.dynamic = !spec.dynamic; }},
    {"affine_product", [](KernelSpec& spec) { spec.affine_product = !spec.affine_product; }},
    {"affine_reach", [](KernelSpec& spec) { spec.affine_reach = !spec.affine_reach; }},
    {"exact_max", [](KernelSpec& spec) { spec.exact_max = !spec.exact_max; }},
    {"varlen", [](KernelSpec& spec) { spec.varlen = !spec.varlen; }},
    {"dropout", [](KernelSpec& spec) { spec.dropout = !spec.dropout; }},
    {"variants", [](KernelSpec& spec) { spec.variants.sink = true; }},
    {"cluster", [](KernelSpec& spec) { spec.cluster = 2; }},
    {"min_blocks", [](KernelSpec& spec) { spec.min_blocks = 3; }},
};

/// The fields that kernels of an operation are made of; every other one must not part their texts.
struct Operation {
  Op op;
  std::set<std::string> fields;
  Family family = Family::sm80;
};

const std::vector<Operation>& operations() {
  static const std::vector<Operation> list = {
      {Op::forward, {"family",   "arch",           "dtype",          "d_qk",        "d_v",
                     "causal",   "positive_scale", "aligned",        "tile_m",      "tile_n",
                     "warps",    "stages",         "q_in_registers", "loop_bodies", "conditional_rescale",
                     "pack_gqa", "split",          "varlen",         "dropout",     "variants",
                     "warps_n",  "min_blocks"}},
      {Op::forward,
       {"family",       "arch",           "dtype",        "d_qk",      "d_v",
        "causal",       "positive_scale", "tile_m",       "tile_n",    "stages",
        "q_buffers",    "softmax_chunks", "take_turns",   "own_ends",  "dynamic",
        "skips_hidden", "affine_product", "affine_reach", "exact_max", "pack_gqa",
        "split",        "varlen",         "dropout",      "variants",  "min_blocks"},
       Family::sm90},
      {Op::combine, {"arch", "dtype", "d_v", "warps", "variants"}},
      {Op::backward, {"family",   "arch",       "dtype",    "d_qk",   "d_v",
                      "causal",   "aligned",    "tile_m",   "tile_n", "warps",
                      "warps_n",  "dq_warps_m", "substeps", "stages", "operands_in_registers",
                      "write_dq", "delayed_dq", "split",    "varlen", "dropout",
                      "variants", "min_blocks"}},
      {Op::backward,
       {"family", "arch", "dtype", "d_qk", "d_v", "causal", "tile_m", "tile_n", "stages", "write_dq", "ordered_dq",
        "split", "varlen", "dropout", "variants", "cluster", "min_blocks"},
       Family::sm90},
      {Op::backward_dq,
       {"family", "arch", "dtype", "d_qk", "d_v", "causal", "aligned", "tile_m", "tile_n", "warps", "stages", "varlen",
        "dropout", "variants", "min_blocks"}},
      {Op::backward_preprocess, {"arch", "dtype", "d_qk", "d_v", "aligned", "varlen", "warps", "variants"}},
      {Op::backward_convert, {"arch", "dtype", "d_qk", "aligned", "varlen", "warps", "variants"}},
      {Op::backward_reduce, {"arch", "dtype", "d_qk", "d_v", "warps", "variants"}},
      {Op::backward_sink, {"arch", "dtype", "varlen", "warps", "variants"}},
      {Op::clear_padding, {"arch", "dtype", "warps", "variants"}},
      {Op::row_norms, {"arch", "dtype", "d_qk", "warps", "variants"}},
      {Op::mask_rows, {"arch", "dtype", "causal", "tile_m", "tile_n", "pack_gqa", "warps", "variants"}},
      {Op::mask_keys, {"arch", "dtype", "causal", "tile_m", "tile_n", "pack_gqa", "warps", "variants"}},
  };
  return list;
}

KernelSpec some_spec() {
  KernelSpec spec;
  spec.arch = {8, 0, '\0'};
  spec.d_qk = spec.d_v = 64;
  spec.tile_m = 128;
  spec.tile_n = 64;
  spec.warps = 4;
  spec.stages = 1;
  return spec;
}

// A field added to KernelSpec breaks this binding: give it a mutation above, and a place in canonical().
TEST(KernelSpec, MutationsCoverEveryField) {
  const auto& [family, op, arch, dtype, d_qk, d_v, causal, positive_scale, aligned, tile_m, tile_n, warps, stages,
               q_in_registers, loop_bodies, conditional_rescale, pack_gqa, split, warps_n, dq_warps_m, substeps,
               operands_in_registers, write_dq, ordered_dq, delayed_dq, q_buffers, softmax_chunks, take_turns, own_ends,
               dynamic, skips_hidden, affine_product, affine_reach, exact_max, varlen, dropout, variants, cluster,
               min_blocks] = some_spec();
  const auto count = [](const auto&... fields) { return sizeof...(fields); };
  EXPECT_EQ(std::size(kMutations),
            count(family, op, arch, dtype, d_qk, d_v, causal, positive_scale, aligned, tile_m, tile_n, warps, stages,
                  q_in_registers, loop_bodies, conditional_rescale, pack_gqa, split, warps_n, dq_warps_m, substeps,
                  operands_in_registers, write_dq, ordered_dq, delayed_dq, q_buffers, softmax_chunks, take_turns,
                  own_ends, dynamic, skips_hidden, affine_product, affine_reach, exact_max, varlen, dropout, variants,
                  cluster, min_blocks));
}

// Likewise for what variants are made of.
TEST(KernelSpec, EveryPartOfVariantsChangesTheText) {
  // The last five follow from the texts of the functions.
  const auto& [left_window, chunked, sink, score, mask, captures, mask_on_batch, mask_on_head, constant_slopes,
               loads_ahead, affine] = Variants();
  EXPECT_FALSE(left_window || chunked || sink || !score.empty() || !mask.empty() || !captures.empty() ||
               mask_on_batch || mask_on_head || constant_slopes || loads_ahead || affine);
  Variants some;
  some.score = "score+a[h]";
  some.mask = "b[kv]>0";
  some.captures = {{"a", DType::f32, 1, false}, {"b", DType::i32, 1, false}};
  std::vector<Variants> all(11, some);
  all[1].left_window = true;
  all[2].chunked = true;
  all[3].sink = true;
  all[4].score = "";
  all[5].mask = "";
  all[6].captures[0].dtype = DType::f16;
  all[7].captures[0].rank = 2;
  all[8].captures[0].requires_grad = true;
  all[9].captures[1].name = "c";
  all[10].captures.pop_back();
  std::set<std::string> texts;
  for (const Variants& variants : all) {
    EXPECT_TRUE(variants.any());
    EXPECT_TRUE(texts.insert(canonical(variants)).second) << canonical(variants);
  }
  EXPECT_EQ(canonical(Variants()), "");
  EXPECT_FALSE(Variants().any());
}

TEST(KernelSpec, EveryFieldOfAnOperationChangesItsText) {
  std::set<std::string> texts;
  for (const Operation& operation : operations()) {
    KernelSpec base = some_spec();
    base.op = operation.op;
    base.family = operation.family;
    EXPECT_TRUE(texts.insert(canonical(base)).second) << canonical(base);
    for (const Mutation& mutation : kMutations) {
      if (std::string(mutation.field) == "op") continue;
      KernelSpec spec = base;
      mutation.apply(spec);
      // The forward of no family at all is one text, whichever family it was.
      if (operation.family == Family::sm90 && spec.family != Family::sm90) continue;
      EXPECT_NE(spec, base) << mutation.field;
      if (operation.fields.contains(mutation.field)) {
        EXPECT_TRUE(texts.insert(canonical(spec)).second) << mutation.field << ": " << canonical(spec);
      } else {
        EXPECT_EQ(canonical(spec), canonical(base)) << mutation.field;
      }
    }
  }
}

TEST(KernelSpec, EveryPartOfTheArchitectureChangesTheText) {
  std::set<std::string> texts;
  for (const Arch arch : {Arch{8, 0, '\0'}, Arch{9, 0, '\0'}, Arch{9, 0, 'a'}, Arch{9, 0, 'f'}, Arch{8, 6, '\0'}}) {
    for (const Op op : {Op::forward, Op::combine, Op::backward, Op::backward_dq, Op::backward_preprocess}) {
      KernelSpec spec = some_spec();
      spec.op = op;
      spec.arch = arch;
      EXPECT_TRUE(texts.insert(canonical(spec)).second) << canonical(spec);
    }
  }
}

TEST(KernelSpec, TextNamesEveryFieldInOneLine) {
  const std::string text = canonical(some_spec());
  EXPECT_EQ(text,
            "sm80_forward arch=sm_80 dtype=bf16 d_qk=64 d_v=64 causal=0 positive_scale=1 aligned=1 tile_m=128 "
            "tile_n=64 warps=4 stages=1 q_in_registers=0 loop_bodies=1 "
            "conditional_rescale=1 pack_gqa=0 split=0 min_blocks=1");
  EXPECT_EQ(kernel_name(some_spec()), "fa_sm80_forward");
  KernelSpec sm90 = some_spec();
  sm90.family = Family::sm90;
  sm90.q_buffers = 2;
  sm90.take_turns = true;
  EXPECT_EQ(canonical(sm90),
            "sm90_forward arch=sm_80 dtype=bf16 d_qk=64 d_v=64 causal=0 positive_scale=1 tile_m=128 tile_n=64 stages=1 "
            "q_buffers=2 softmax_chunks=1 take_turns=1 pack_gqa=0 split=0 min_blocks=1");
  EXPECT_EQ(kernel_name(sm90), "fa_sm90_forward");
  KernelSpec backward = some_spec();
  backward.op = Op::backward;
  backward.warps_n = 2;
  backward.dq_warps_m = 4;
  EXPECT_EQ(canonical(backward),
            "sm80_backward arch=sm_80 dtype=bf16 d_qk=64 d_v=64 causal=0 aligned=1 tile_m=128 tile_n=64 warps=4 "
            "warps_n=2 dq_warps_m=4 substeps=1 stages=1 operands_in_registers=0 write_dq=1 delayed_dq=0 split=0 "
            "min_blocks=1");
  EXPECT_EQ(kernel_name(backward), "fa_sm80_backward");
  backward.family = Family::sm90;
  EXPECT_EQ(canonical(backward),
            "sm90_backward arch=sm_80 dtype=bf16 d_qk=64 d_v=64 causal=0 tile_m=128 tile_n=64 stages=1 write_dq=1 "
            "split=0 min_blocks=1");
  EXPECT_EQ(kernel_name(backward), "fa_sm90_backward");
}

}  // namespace
}  // namespace fa::plan
