#include "emulator/variant_specs.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "api/problem.hpp"
#include "emulator/joined.hpp"
#include "plan/backward.hpp"
#include "plan/planner.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::test::AttentionCase;

AttentionCase attention(DType dtype, std::int64_t d_qk, std::int64_t d_v, bool causal, float scale = 0) {
  AttentionCase c;
  c.dtype = dtype;
  c.d_qk = d_qk;
  c.d_v = d_v;
  c.causal = causal;
  if (scale != 0) c.scale = scale;
  return c;
}

/// Rows see a few keys anywhere, and the first ones: tiles of which they see nothing but the end, before others.
fa::test::VariantChoice late_keys() {
  fa::AttentionConfig config;
  config.mask = fa::MaskFunction{"kv >= s_kv - q - 6 && kv < s_kv - q || kv < 5"};
  return {"late_keys", config};
}

/// Scores whose exponentials are 0 in float, seen from anywhere on in a tile.
fa::test::VariantChoice deep_scores() {
  fa::AttentionConfig config;
  config.score = fa::ScoreFunction{"score - 100.0"};
  config.window_left = 3;
  return {"deep_scores", config};
}

/// The same with a captured tensor, which is read ahead.
fa::test::VariantChoice deep_bias() {
  fa::test::VariantChoice choice = deep_scores();
  choice.name = "deep_bias";
  choice.config.score = fa::ScoreFunction{"score + bias[h, q, kv] - 100.0", {{"bias", DType::f16}}};
  return choice;
}

/// Scores whose exponentials overflow beside those of the keys behind.
fa::test::VariantChoice steep_keys() {
  fa::AttentionConfig config;
  config.score = fa::ScoreFunction{"score - 0.05 * float(kv) * float(kv)"};
  return {"steep_keys", config};
}

/// The same of the score alone.
fa::test::VariantChoice steep_scores() {
  fa::AttentionConfig config;
  config.score = fa::ScoreFunction{"30.0 * score * abs(score)"};
  return {"steep_scores", config};
}

/// A captured tensor whose rows start at keys before or after those of the scores.
fa::test::VariantChoice shifted_bias(const char* score, DType dtype, bool gradient) {
  fa::AttentionConfig config;
  config.score = fa::ScoreFunction{score, {{"bias", dtype, gradient}}};
  return {"shifted_bias", config};
}

/// A number in the place of a captured tensor, read on one side of a test.
fa::test::VariantChoice number() {
  fa::AttentionConfig config;
  config.score = fa::ScoreFunction{"q >= kv - 1 ? score * number : score - 0.5", {{"number", DType::f32}}};
  return {"number", config};
}

/// Scores that grow with the key, so steeply that no part of the slope may be left out.
fa::test::VariantChoice steep(const char* name, const char* score) {
  fa::AttentionConfig config;
  config.score = fa::ScoreFunction{score, {{"slope", DType::f32}}};
  return {name, config};
}

/// So steep that nothing but the key on the diagonal counts, or that no float holds the bias of others: of every two
/// heads one.
fa::test::VariantChoice cliff(const char* score) {
  fa::AttentionConfig config;
  config.score = fa::ScoreFunction{score};
  return {"cliff", config};
}

constexpr fa::plan::Arch kArch{8, 0, '\0'};

fa::AttentionShape any_shape() {
  constexpr std::int64_t kAnyLength = 100;
  return {.b = 1,
          .h_q = 2,
          .h_kv = 1,
          .s_q = kAnyLength,
          .s_kv = kAnyLength,
          .total_q = kAnyLength,
          .total_kv = kAnyLength};
}

}  // namespace

const std::vector<VariantKernels>& variant_kernels() {
  static const std::vector<VariantKernels> list{
      {"softcap_bias", attention(DType::bf16, 24, 24, true)},
      {"alibi", attention(DType::f16, 16, 8, false), true, 3},
      {"table", attention(DType::f32, 8, 8, true), false, 1, 2},
      {"learned", attention(DType::bf16, 8, 16, false), false, 2},
      {"strided", attention(DType::f16, 16, 16, false, -0.4f), false, 1, 1, true},
      {"by_head", attention(DType::f16, 16, 16, true), true, 2, 2},
      {"documents", attention(DType::bf16, 16, 16, false), false, 1, 2},
      {"two_sided", attention(DType::bf16, 16, 16, false), false, 1, 2},
      {"window_sink", attention(DType::f32, 16, 8, true), true, 2, 1, true},
      {"everything", attention(DType::bf16, 16, 16, true), false, 1, 2},
      {"saturated", attention(DType::bf16, 16, 16, false)},
      {.choice = "late_keys", .attention = attention(DType::bf16, 16, 16, false), .own = late_keys()},
      {.choice = "deep_scores", .attention = attention(DType::f16, 16, 16, true), .own = deep_scores()},
      {.choice = "number", .attention = attention(DType::bf16, 16, 16, false), .own = number()},
      {.choice = "cliff",
       .attention = attention(DType::bf16, 16, 16, true),
       .own = cliff("score - (h % 2 == 0 ? 3e4 : 1e38) * abs(float(q + s_kv - s_q - kv))")},
      {.choice = "cliff",
       .attention = attention(DType::f32, 8, 8, true),
       .own = cliff("score + (h % 2 == 0 ? 1e20 : 1.1e38) * float(kv - q - s_kv + s_q)")},
      {.choice = "shifted_bias",
       .attention = attention(DType::bf16, 16, 16, false),
       .own = shifted_bias("score * 0.5 + bias[h, q, kv + 3]", DType::f32, true)},
      {.choice = "shifted_bias",
       .attention = attention(DType::f16, 16, 16, true),
       .deterministic = true,
       .own = shifted_bias("tanh(score + bias[b, h, q, kv])", DType::bf16, false)},
      {.choice = "everything", .attention = attention(DType::f16, 16, 16, true), .loop_bodies = 2, .pairs = true},
      {.choice = "window_sink", .attention = attention(DType::bf16, 24, 16, true), .pack_gqa = true, .pairs = true},
      {.choice = "two_sided", .attention = attention(DType::bf16, 16, 48, false), .splits = 2, .pairs = true},
      {.choice = "by_head", .attention = attention(DType::f16, 16, 16, false), .loop_bodies = 2, .pairs = true},
      {.choice = "everything", .attention = attention(DType::f16, 16, 16, true), .loop_bodies = 2, .turing = true},
      {.choice = "window_sink",
       .attention = attention(DType::f32, 16, 8, true),
       .pack_gqa = true,
       .splits = 2,
       .deterministic = true,
       .turing = true},
      {.choice = "documents", .attention = attention(DType::f16, 24, 16, false), .splits = 2, .turing = true},
  };
  return list;
}

const std::vector<VariantKernels>& packed_variant_kernels() {
  static const std::vector<VariantKernels> list{
      {"everything", attention(DType::bf16, 16, 16, true), false, 1, 2, false, true, true},
      {"bias", attention(DType::f16, 8, 16, false), true, 1, 1, false, true, true},
      {"softcap_bias", attention(DType::f32, 16, 8, true), false, 2, 1, false, false, true},
      {"window_sink", attention(DType::f32, 8, 8, true), true, 1, 2, true, true, true},
      {"prefix", attention(DType::bf16, 16, 16, false), false, 1, 2, false, true, false},
      {"ahead", attention(DType::f16, 16, 8, false, -0.4f), false, 1, 1, true, true, true},
      {.choice = "everything",
       .attention = attention(DType::bf16, 16, 16, true),
       .varlen = true,
       .dropout = true,
       .pairs = true},
      {.choice = "everything",
       .attention = attention(DType::f16, 16, 16, true),
       .varlen = true,
       .dropout = true,
       .turing = true},
      {.choice = "softcap_bias", .attention = attention(DType::f32, 16, 8, true), .dropout = true, .turing = true},
  };
  return list;
}

const std::vector<std::size_t>& emulated_random_kernels() {
  constexpr std::int64_t kMaxHeadDim = 64;
  static const std::vector<std::size_t> indices = fa::test::small_random_kernels(kRandomEmulated, kMaxHeadDim);
  return indices;
}

const std::vector<VariantKernels>& random_variant_kernels() {
  static const std::vector<VariantKernels> list = [] {
    std::vector<VariantKernels> result;
    for (const std::size_t index : emulated_random_kernels()) {
      const fa::test::RandomKernel random = fa::test::random_kernel(index);
      const fa::AttentionConfig& config = random.choice.config;
      VariantKernels kernels{random.choice.name, random.attention, random.pack_gqa, random.splits};
      kernels.loop_bodies = 1 + static_cast<int>(index % 2);
      kernels.deterministic = config.deterministic;
      kernels.varlen = config.varlen;
      kernels.dropout = config.dropout > 0;
      kernels.own = random.choice;
      result.push_back(std::move(kernels));
    }
    return result;
  }();
  return list;
}

namespace {

/// Choices as they are.
std::vector<VariantKernels> hopper_choices() {
  return {
      {"softcap_bias", attention(DType::bf16, 24, 24, true)},
      {"alibi", attention(DType::f16, 16, 8, false), true, 3},
      {"learned", attention(DType::bf16, 8, 16, false), false, 2},
      {"bias", attention(DType::f16, 16, 16, true), false, 1, 2},
      {"strided", attention(DType::f16, 16, 16, false, -0.4f), false, 1, 1},
      {"by_head", attention(DType::f16, 16, 16, true), true, 2},
      {"documents", attention(DType::bf16, 16, 16, false), false, 1, 2},
      {"prefix", attention(DType::bf16, 16, 16, false)},
      {"window", attention(DType::bf16, 64, 16, true), false, 1, 2},
      {"two_sided", attention(DType::bf16, 16, 16, false), false, 2},
      {"chunked", attention(DType::f16, 16, 16, false), true, 1},
      {"sink", attention(DType::bf16, 16, 16, true), false, 1, 2},
      {"window_sink", attention(DType::f16, 16, 8, true), true, 2},
      {"everything", attention(DType::bf16, 16, 16, true), false, 1, 2},
      {"everything", attention(DType::f16, 16, 16, false), true, 3},
  };
}

/// Functions of these tests.
std::vector<VariantKernels> hopper_functions() {
  return {
      {.choice = "late_keys", .attention = attention(DType::bf16, 16, 16, false), .own = late_keys()},
      {.choice = "late_keys", .attention = attention(DType::f16, 16, 8, true), .pack_gqa = true, .own = late_keys()},
      {.choice = "shifted_bias",
       .attention = attention(DType::bf16, 16, 16, false),
       .own = shifted_bias("score + bias[h, q, kv + 8]", DType::bf16, false),
       .tile_n = 48},
      {.choice = "shifted_bias",
       .attention = attention(DType::f16, 16, 16, true),
       .loop_bodies = 2,
       .own = shifted_bias("score + bias[b, h, q, kv + 3]", DType::f16, false)},
      {.choice = "shifted_bias",
       .attention = attention(DType::bf16, 16, 16, false),
       .splits = 2,
       .own = shifted_bias("tanh(score * 0.5) * bias[h, q, 2 * kv] + bias[h, q, kv]", DType::bf16, false)},
      {.choice = "shifted_bias",
       .attention = attention(DType::f16, 16, 16, false),
       .loop_bodies = 2,
       .own = shifted_bias("score + bias[h, q, kv]", DType::f16, false),
       .tile_n = 64},
      {.choice = "deep_scores", .attention = attention(DType::f16, 16, 16, true), .own = deep_scores()},
      {.choice = "steep_keys", .attention = attention(DType::bf16, 16, 16, true), .own = steep_keys()},
      {.choice = "softcap",
       .attention = attention(DType::bf16, 24, 24, true),
       .pack_gqa = false,
       .splits = 1,
       .loop_bodies = 2,
       .tile_n = 16},
      {.choice = "softcap", .attention = attention(DType::f16, 16, 16, false), .pack_gqa = true, .splits = 2},
      {.choice = "steep_scores",
       .attention = attention(DType::f16, 16, 16, false),
       .own = steep_scores(),
       .tile_n = 16},
      {.choice = "deep_bias", .attention = attention(DType::f16, 16, 16, true), .own = deep_bias()},
  };
}

/// Affine functions, as steps of the product and not.
std::vector<VariantKernels> hopper_affine_functions() {
  return {
      {.choice = "steep_distance",
       .attention = attention(DType::bf16, 16, 16, false),
       .own = steep("steep_distance", "score + (15.0 + slope[h]) * float(kv - q)"),
       .tile_n = 80,
       .affine_product = true},
      {.choice = "steep_steps",
       .attention = attention(DType::f16, 16, 16, true),
       .loop_bodies = 2,
       .own = steep("steep_steps", "score - (1.5 + slope[h]) * float(q - 3 * kv)"),
       .tile_n = 176,
       .affine_product = true},
      {.choice = "magnitude",
       .attention = attention(DType::bf16, 16, 16, true),
       .loop_bodies = 2,
       .own = steep("magnitude", "score - slope[h] * abs(float(q + s_kv - s_q - kv))"),
       .affine_product = true},
      {.choice = "turning",
       .attention = attention(DType::f16, 16, 8, false),
       .pack_gqa = true,
       .splits = 2,
       .own = steep("turning", "score + slope[h] * abs(float(2 * kv - q - 41))"),
       .affine_product = true},
      {.choice = "steepest",
       .attention = attention(DType::f16, 16, 16, false, 1e-8f),
       .own = steep("steepest", "score + slope[h] * float(kv - q)"),
       .affine_product = true},
      {.choice = "cliff",
       .attention = attention(DType::bf16, 16, 16, true),
       .own = cliff("score - (h % 2 == 0 ? 3e4 : 1e38) * abs(float(q + s_kv - s_q - kv))"),
       .affine_product = true},
      {.choice = "cliff",
       .attention = attention(DType::f16, 16, 16, true),
       .own = cliff("score - (h % 2 == 0 ? 1e20 : 1e30) * float(q + s_kv - s_q - kv)"),
       .affine_product = true},
      {.choice = "cliff",
       .attention = attention(DType::bf16, 16, 16, true),
       .loop_bodies = 2,
       .own = cliff("score + (h % 2 == 0 ? 1.1e5 : 1.1e38) * float(kv - q - s_kv + s_q)"),
       .affine_product = false},
      {.choice = "magnitude_in_clusters",
       .attention = attention(DType::bf16, 16, 16, true),
       .splits = 4,
       .own = steep("magnitude", "score - slope[h] * abs(float(q + s_kv - s_q - kv))"),
       .affine_product = true,
       .split_blocks = 4},
      {.choice = "everything", .attention = attention(DType::bf16, 16, 16, true), .splits = 2, .split_blocks = 2},
      {.choice = "documents", .attention = attention(DType::f16, 16, 16, false), .splits = 4, .split_blocks = 4},
  };
}

/// Keys left out that are too far.
std::vector<VariantKernels> hopper_pruned_by_distance() {
  return {
      {.choice = "cliff",
       .attention = attention(DType::bf16, 16, 16, true),
       .loop_bodies = 2,
       .own = cliff("score - (h % 2 == 0 ? 1e20 : 1e38) * abs(float(q + s_kv - s_q - kv))"),
       .tile_n = 16,
       .affine_product = true,
       .affine_reach = true},
      {.choice = "reach",
       .attention = attention(DType::bf16, 24, 16, true),
       .loop_bodies = 2,
       .own = steep("reach", "score - (0.75 + 0.25 * slope[h]) * abs(float(q + s_kv - s_q - kv))"),
       .tile_n = 16,
       .affine_product = true,
       .affine_reach = true},
      {.choice = "reach_aside",
       .attention = attention(DType::f16, 16, 16, true),
       .own = steep("reach_aside", "score - (6.0 + slope[h]) * abs(float(q + 60 - kv))"),
       .tile_n = 16,
       .affine_reach = true},
      {.choice = "reach_before",
       .attention = attention(DType::f16, 8, 16, false),
       .own = steep("reach_before", "score - (0.39 + 0.02 * slope[h]) * abs(float(kv + 215))"),
       .tile_n = 16,
       .affine_product = true,
       .affine_reach = true},
      {.choice = "reach_behind",
       .attention = attention(DType::bf16, 256, 16, false),
       .own = steep("reach_behind", "score - (60.0 + slope[h]) * abs(float(90 - 3 * q - kv))"),
       .tile_n = 16,
       .affine_reach = true},
      {.choice = "reach_up",
       .attention = attention(DType::bf16, 16, 16, true),
       .loop_bodies = 2,
       .own = steep("reach_up", "score + (2.0 + slope[h]) * float(kv - q)"),
       .tile_n = 16,
       .affine_product = true,
       .affine_reach = true},
      {.choice = "reach_down",
       .attention = attention(DType::f16, 72, 16, false),
       .own = steep("reach_down", "score + (9.0 + slope[h]) * float(q - 2 * kv)"),
       .tile_n = 16,
       .affine_reach = true},
      {.choice = "reach_of_growth",
       .attention = attention(DType::bf16, 16, 16, false),
       .own = steep("reach_of_growth", "score + (2.0 + slope[h]) * abs(float(kv - q))"),
       .tile_n = 16,
       .affine_reach = true},
  };
}

}  // namespace

const std::vector<VariantKernels>& hopper_variant_kernels() {
  static const std::vector<VariantKernels> list =
      joined({hopper_choices(), hopper_functions(), hopper_affine_functions(), hopper_pruned_by_distance()});
  return list;
}

const std::vector<VariantKernels>& hopper_packed_variant_kernels() {
  static const std::vector<VariantKernels> list{
      {"everything", attention(DType::bf16, 16, 16, true), false, 1, 2, false, true, true},
      {"bias", attention(DType::f16, 8, 16, false), true, 1, 1, false, true, true},
      {"softcap_bias", attention(DType::f16, 16, 8, true), false, 2, 1, false, false, true},
      {"window_sink", attention(DType::bf16, 8, 8, true), true, 1, 1, false, true, true},
      {"prefix", attention(DType::bf16, 16, 16, false), false, 1, 2, false, true, false},
      {"chunked", attention(DType::bf16, 16, 16, true), false, 1, 1, false, true, false},
      {"ahead", attention(DType::f16, 16, 8, false, -0.4f), false, 1, 2, false, true, true},
      {.choice = "steep_keys",
       .attention = attention(DType::f16, 16, 16, false),
       .loop_bodies = 2,
       .varlen = true,
       .dropout = true,
       .own = steep_keys()},
      {.choice = "everything",
       .attention = attention(DType::bf16, 16, 16, true),
       .loop_bodies = 2,
       .varlen = true,
       .dynamic = true},
      {.choice = "prefix", .attention = attention(DType::f16, 16, 8, false), .varlen = true, .dynamic = true},
  };
  return list;
}

namespace {

fa::test::VariantChoice choice_of(const VariantKernels& kernels) {
  if (kernels.own) return *kernels.own;
  // Gradients of captures have no place in a deterministic backward.
  const std::vector<fa::test::VariantChoice> choices = fa::test::variant_choices(!kernels.deterministic);
  const auto found = std::ranges::find(choices, kernels.choice, &fa::test::VariantChoice::name);
  if (found == choices.end()) throw std::out_of_range("no such choice: " + kernels.choice);
  return *found;
}

}  // namespace

fa::test::VariantCase variant_case(const VariantKernels& kernels, const AttentionCase& attention) {
  fa::test::VariantCase c(attention, choice_of(kernels));
  c.config.varlen = kernels.varlen;
  if (kernels.dropout) c.config.dropout = 0.5f;  // which one it is, no kernel depends on
  return c;
}

VariantSpecs hopper_variant_specs(const VariantKernels& kernels) {
  const fa::test::VariantCase c = variant_case(kernels, kernels.attention);
  fa::plan::Fixed forward;
  forward.family = fa::plan::Family::sm90;
  const std::int64_t group = kernels.attention.h_q / kernels.attention.h_kv;  // of 2 or of 3, where packed
  const bool packs = kernels.pack_gqa && !(kernels.dropout && group == 3);
  forward.set("tile_m", packs && !kernels.dropout ? 192 : kernels.loop_bodies == 2 ? 128 : 64);
  forward.set("tile_n", kernels.tile_n);
  forward.set("stages", 2);
  forward.set("q_buffers", kernels.loop_bodies);
  forward.set("pack_gqa", packs);
  forward.set("splits", kernels.splits);
  if (kernels.affine_product) forward.set("affine_product", *kernels.affine_product);
  forward.set("affine_reach", kernels.affine_reach);
  if (kernels.dynamic) forward.set("dynamic", 1);
  fa::AttentionShape shape = any_shape();
  if (kernels.split_blocks > 1) {
    forward.set("split_blocks", kernels.split_blocks);
    forward.set("stages", 3);  // which have room for O
    shape.s_q = 1;
  }
  const fa::plan::ForwardPlan planned =
      plan_forward(fa::api::make_problem(c.config, shape, {9, 0, 'a'}, &c.functions.variants), forward);
  return {planned.kernel, planned.combine, {}, {}, {}};
}

VariantSpecs variant_specs(const VariantKernels& kernels) {
  const fa::test::VariantCase c = variant_case(kernels, kernels.attention);
  const fa::plan::Arch arch = kernels.turing ? fa::plan::Arch{7, 5, '\0'} : kArch;
  const fa::plan::Problem problem = fa::api::make_problem(c.config, any_shape(), arch, &c.functions.variants);
  fa::plan::Fixed forward;
  forward.set("tile_m", 32);
  forward.set("tile_n", 32);
  forward.set("warps", 2);
  if (kernels.pairs) forward.set("warps_n", 2);
  forward.set("stages", kernels.loop_bodies);
  forward.set("loop_bodies", kernels.loop_bodies);
  forward.set("pack_gqa", kernels.pack_gqa);
  forward.set("splits", kernels.splits);
  fa::plan::Fixed backward;
  backward.set("tile_m", 32);
  backward.set("tile_n", 32);
  backward.set("warps", 4);
  backward.set("stages", kernels.loop_bodies);
  backward.set("splits", kernels.splits);
  const fa::plan::ForwardPlan planned = plan_forward(problem, forward);
  const fa::plan::BackwardPlan planned_backward = plan_backward(problem, backward, kernels.deterministic);
  VariantSpecs specs{planned.kernel, planned.combine, planned_backward.main.front(), {}, planned_backward.sink};
  if (!planned_backward.dq.empty()) specs.dq = planned_backward.dq.front();
  return specs;
}

}  // namespace emulator
