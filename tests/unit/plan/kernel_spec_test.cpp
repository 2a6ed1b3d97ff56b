#include "plan/kernel_spec.hpp"

#include <gtest/gtest.h>

#include <iterator>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "plan/catalogue.hpp"

namespace fa::plan {
namespace {

struct Mutation {
  const char* field;
  void (*apply)(KernelSpec& spec);
};

/// Of the head. What else a kernel has, its list says.
constexpr Mutation kMutations[] = {
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
    {"warps_n", [](KernelSpec& spec) { spec.warps_n = 4; }},
    {"pack_gqa", [](KernelSpec& spec) { spec.pack_gqa = !spec.pack_gqa; }},
    {"split", [](KernelSpec& spec) { spec.split = !spec.split; }},
    {"write_dq", [](KernelSpec& spec) { spec.write_dq = !spec.write_dq; }},
    {"without_dk", [](KernelSpec& spec) { spec.without_dk = !spec.without_dk; }},
    {"without_dv", [](KernelSpec& spec) { spec.without_dv = !spec.without_dv; }},
    {"varlen", [](KernelSpec& spec) { spec.varlen = !spec.varlen; }},
    {"dropout", [](KernelSpec& spec) { spec.dropout = !spec.dropout; }},
    {"page_size", [](KernelSpec& spec) { spec.page_size = 1; }},
    {"accumulate", [](KernelSpec& spec) { spec.accumulate = !spec.accumulate; }},
    {"max_logit", [](KernelSpec& spec) { spec.max_logit = 2; }},
    {"max_logit_by_head", [](KernelSpec& spec) { spec.max_logit_by_head = true; }},
    {"entropy", [](KernelSpec& spec) { spec.entropy = true; }},
    {"column_sums", [](KernelSpec& spec) { spec.column_sums = true; }},
    {"bounded", [](KernelSpec& spec) { spec.bounded = !spec.bounded; }},
    {"place_in_memory", [](KernelSpec& spec) { spec.place_in_memory = !spec.place_in_memory; }},
    {"variants", [](KernelSpec& spec) { spec.variants.sink = true; }},
    {"debug", [](KernelSpec& spec) { spec.debug = !spec.debug; }},
    {"min_blocks", [](KernelSpec& spec) { spec.min_blocks = 3; }},
};

/// What every text says.
const std::set<std::string> kAlways = {"arch", "dtype", "variants", "debug"};

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

// A field added to the head breaks this binding: give it a mutation above, and a place in the lists of its kernels.
// Those of a kernel's own struct is_complete() holds to its list.
TEST(KernelSpec, MutationsCoverEveryFieldOfTheHead) {
  const auto& [arch, dtype, d_qk, d_v, causal, positive_scale, aligned, tile_m, tile_n, warps, stages, warps_n,
               pack_gqa, split, write_dq, without_dk, without_dv, varlen, dropout, page_size, accumulate, max_logit,
               max_logit_by_head, entropy, column_sums, bounded, place_in_memory, variants, debug, min_blocks] =
      static_cast<const SpecHead&>(some_spec());
  const auto count = [](const auto&... fields) { return sizeof...(fields); };
  EXPECT_EQ(std::size(kMutations),
            count(arch, dtype, d_qk, d_v, causal, positive_scale, aligned, tile_m, tile_n, warps, stages, warps_n,
                  pack_gqa, split, write_dq, without_dk, without_dv, varlen, dropout, page_size, accumulate, max_logit,
                  max_logit_by_head, entropy, column_sums, bounded, place_in_memory, variants, debug, min_blocks));
}

// Of kernels' own structs, the lists of fields are held to it where they stand.
struct OneMember {
  bool first = true;
};
struct ManyMembers {
  int numbers_1 = 1, numbers_2 = 2;
  bool flags_1 = false, flags_2 = true, flags_3 = false;
  int last = -1;
  static const Kernel& kernel() noexcept;
};
static_assert(detail::members<MaskKeys>() == 0);
static_assert(detail::members<OneMember>() == 1);
static_assert(detail::members<ManyMembers>() == 6);

// Likewise for what variants are made of.
TEST(KernelSpec, EveryPartOfVariantsChangesTheText) {
  // The last five follow from the texts of the functions.
  const auto& [left_window, chunked, sink, placed, strided, score, mask, captures, mask_on_batch, mask_on_head,
               constant_slopes, loads_ahead, affine] = Variants();
  EXPECT_FALSE(left_window || chunked || sink || placed || strided || !score.empty() || !mask.empty() ||
               !captures.empty() || mask_on_batch || mask_on_head || constant_slopes || loads_ahead || affine);
  Variants some;
  some.score = "score+a[h]";
  some.mask = "b[kv]>0";
  some.captures = {{"a", DType::f32, 1, false}, {"b", DType::i32, 1, false}};
  std::vector<Variants> all(13, some);
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
  all[11].placed = true;
  all[12].strided = true;
  std::set<std::string> texts;
  for (const Variants& variants : all) {
    EXPECT_TRUE(variants.any());
    EXPECT_TRUE(texts.insert(canonical(variants)).second) << canonical(variants);
  }
  EXPECT_EQ(canonical(Variants()), "");
  EXPECT_FALSE(Variants().any());
}

/// One of every kernel.
std::vector<KernelSpec> one_of_each() {
  std::vector<KernelSpec> specs;
  const auto add = [&]<std::size_t... I>(std::index_sequence<I...>) {
    (specs.emplace_back(some_spec()).own.emplace<I>(), ...);
  };
  add(std::make_index_sequence<std::variant_size_v<KernelSpec::Own>>());
  return specs;
}

TEST(KernelSpec, EveryFieldOfAKernelChangesItsText) {
  std::set<std::string> texts;
  for (const KernelSpec& base : one_of_each()) {
    EXPECT_TRUE(texts.insert(canonical(base)).second) << canonical(base);
    std::set<std::string> fields = kAlways;
    for (const Field& field : base.kernel().fields) {
      if (field.shown != Field::Shown::derived) fields.emplace(field.name);
      if (!field.own) continue;
      KernelSpec spec = base;
      field.set(spec, field.kind == Field::Kind::flag ? 1 - field.get(spec) : field.get(spec) + 2);
      EXPECT_NE(spec, base) << field.name;
      EXPECT_TRUE(texts.insert(canonical(spec)).second) << field.name << ": " << canonical(spec);
    }
    for (const Mutation& mutation : kMutations) {
      KernelSpec spec = base;
      mutation.apply(spec);
      EXPECT_NE(spec, base) << mutation.field;
      if (fields.contains(mutation.field)) {
        EXPECT_TRUE(texts.insert(canonical(spec)).second) << mutation.field << ": " << canonical(spec);
      } else {
        EXPECT_EQ(canonical(spec), canonical(base)) << mutation.field;
      }
    }
  }
}

TEST(Catalogue, NamesEachKernelOnceWithItsEntryPoint) {
  std::set<std::string_view> entries;
  EXPECT_EQ(catalogue().size(), one_of_each().size());
  for (const Kernel* const kernel : catalogue()) {
    EXPECT_TRUE(entries.insert(kernel->entry).second) << kernel->entry;
    EXPECT_TRUE(kernel->entry.starts_with(kernel->name)) << kernel->entry;
    EXPECT_FALSE(kernel->fields.empty()) << kernel->name;
    std::set<std::string_view> names, constants;
    for (const Field& field : kernel->fields) {
      EXPECT_TRUE(field.name.empty() || names.insert(field.name).second) << kernel->name << ' ' << field.name;
      EXPECT_TRUE(field.constant.empty() || constants.insert(field.constant).second) << field.constant;
      EXPECT_TRUE(field.help.empty() || field.set != nullptr || field.of_call) << field.name << " cannot be fixed";
    }
  }
  for (const KernelSpec& spec : one_of_each()) {
    const bool usual = spec.cluster() == 1 && !spec.is<AppendStored>();  // others do the same for fewer
    EXPECT_EQ(own_of(spec.op(), spec.family()).index() == spec.own.index(), usual) << canonical(spec);
  }
}

TEST(Catalogue, AFamilyIsFoundByItsName) {
  for (const ForwardFamily* const family : forward_families()) {
    EXPECT_EQ(&forward_family(family->family), family);
  }
  for (const BackwardFamily* const family : backward_families()) {
    EXPECT_EQ(&backward_family(family->family), family);
  }
  EXPECT_EQ(forward_families().back()->misfit, nullptr) << "the last one serves every problem";
  EXPECT_EQ(backward_families().back()->misfit, nullptr);
}

TEST(KernelSpec, EveryPartOfTheArchitectureChangesTheText) {
  std::set<std::string> texts;
  for (const Arch arch : {Arch{8, 0, '\0'}, Arch{9, 0, '\0'}, Arch{9, 0, 'a'}, Arch{9, 0, 'f'}, Arch{8, 6, '\0'}}) {
    for (const Op op : {Op::forward, Op::combine, Op::backward, Op::backward_dq, Op::backward_preprocess}) {
      KernelSpec spec = some_spec();
      spec.own = own_of(op);
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
  sm90.own = Sm90Forward{.q_buffers = 2, .take_turns = true};
  EXPECT_EQ(canonical(sm90),
            "sm90_forward arch=sm_80 dtype=bf16 d_qk=64 d_v=64 causal=0 positive_scale=1 tile_m=128 tile_n=64 stages=1 "
            "q_buffers=2 softmax_chunks=1 take_turns=1 pack_gqa=0 split=0 min_blocks=1");
  EXPECT_EQ(kernel_name(sm90), "fa_sm90_forward");
  KernelSpec backward = some_spec();
  backward.own = Sm80Backward{.dq_warps_m = 4};
  backward.warps_n = 2;
  EXPECT_EQ(canonical(backward),
            "sm80_backward arch=sm_80 dtype=bf16 d_qk=64 d_v=64 causal=0 aligned=1 tile_m=128 tile_n=64 warps=4 "
            "warps_n=2 dq_warps_m=4 substeps=1 stages=1 operands_in_registers=0 write_dq=1 delayed_dq=0 split=0 "
            "min_blocks=1");
  EXPECT_EQ(kernel_name(backward), "fa_sm80_backward");
  backward.own = Sm90Backward{};
  EXPECT_EQ(canonical(backward),
            "sm90_backward arch=sm_80 dtype=bf16 d_qk=64 d_v=64 causal=0 tile_m=128 tile_n=64 stages=1 write_dq=1 "
            "split=0 min_blocks=1");
  EXPECT_EQ(kernel_name(backward), "fa_sm90_backward");
}

}  // namespace
}  // namespace fa::plan
