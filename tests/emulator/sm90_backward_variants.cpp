#include "emulator/sm90_backward_variants.hpp"

#include <algorithm>
#include <array>
#include <random>
#include <stdexcept>

#include "api/problem.hpp"
#include "plan/planner.hpp"

namespace emulator {
namespace {

using fa::DType;

constexpr int kRandom = 10;
constexpr std::int64_t kAnyLength = 200;

std::vector<Sm90BackwardVariant> chosen() {
  return {
      {.choice = "softcap_bias", .d_qk = 56, .d_v = 48, .causal = true, .tile_n = 128},
      {.choice = "alibi", .dtype = DType::f16, .d_qk = 16, .d_v = 8, .splits = 3},
      {.choice = "table", .d_qk = 64, .d_v = 40, .causal = true, .tile_m = 128, .tile_n = 128},
      {.choice = "learned", .dtype = DType::f16, .d_qk = 8, .d_v = 64, .splits = 2},
      {.choice = "strided", .d_qk = 72, .d_v = 64, .tile_n = 128, .deterministic = true, .scale = -0.4f},
      {.choice = "by_head", .dtype = DType::f16, .causal = true, .splits = 2},
      {.choice = "documents", .d_qk = 32, .d_v = 32, .tile_n = 192},
      {.choice = "two_sided", .d_qk = 64, .d_v = 96, .tile_n = 128},
      {.choice = "ahead", .dtype = DType::f16, .d_qk = 40, .d_v = 40, .tile_m = 128, .tile_n = 128, .splits = 2},
      {.choice = "chunked", .causal = true, .deterministic = true},
      {.choice = "window_sink", .dtype = DType::f16, .d_qk = 24, .d_v = 16, .causal = true, .splits = 2},
      {.choice = "everything", .d_qk = 16, .d_v = 16, .causal = true, .tile_n = 128},
      {.choice = "saturated", .dtype = DType::f16, .d_qk = 16, .d_v = 16},
      {.choice = "plain", .causal = true, .tile_m = 128, .tile_n = 128, .dropout = true},
      {.choice = "plain", .dtype = DType::f16, .tile_n = 128, .dropout = true, .splits = 3},
      {.choice = "plain", .d_qk = 80, .d_v = 64, .causal = true, .tile_n = 128, .varlen = true},
      {.choice = "plain", .dtype = DType::f16, .tile_m = 128, .tile_n = 128, .varlen = true, .dropout = true},
      {.choice = "plain", .d_qk = 24, .d_v = 72, .causal = true, .varlen = true, .deterministic = true},
      {.choice = "everything", .causal = true, .tile_n = 128, .varlen = true, .dropout = true},
      {.choice = "bias", .dtype = DType::f16, .d_qk = 8, .d_v = 16, .varlen = true, .dropout = true},
      {.choice = "prefix", .tile_n = 128, .varlen = true},
      {.choice = "plain", .d_qk = 40, .d_v = 64, .causal = true, .tile_n = 128, .varlen = true, .split_blocks = 2},
      {.choice = "documents", .dtype = DType::f16, .causal = true, .split_blocks = 3},
      {.choice = "everything",
       .d_qk = 16,
       .d_v = 24,
       .causal = true,
       .tile_n = 128,
       .dropout = true,
       .split_blocks = 2},
      {.choice = "plain", .varlen = true, .dropout = true, .split_blocks = 4, .deterministic = true},
      {.choice = "softcap_bias", .d_qk = 40, .d_v = 48, .causal = true, .tile_n = 128, .splits = 2, .in_turns = true},
      {.choice = "documents", .dtype = DType::f16, .causal = true, .splits = 2, .in_turns = true},
      {.choice = "window_sink", .causal = true, .splits = 2, .in_turns = true, .deterministic = true},
      {.choice = "plain", .tile_n = 128, .dropout = true, .splits = 2, .in_turns = true, .wanted = {true, true, false}},
      {.choice = "plain", .causal = true, .tile_n = 128, .dropout = true, .wanted = {true, false, false}},
      {.choice = "plain", .d_qk = 72, .causal = true, .varlen = true, .wanted = {true, false, false}},
      {.choice = "two_sided", .tile_n = 128, .deterministic = true, .wanted = {true, false, false}},
      {.choice = "documents", .causal = true, .tile_n = 128, .wanted = {true, false, false}},
      {.choice = "softcap_bias", .causal = true, .splits = 2, .wanted = {true, false, false}},
      {.choice = "learned", .dtype = DType::f16, .wanted = {false, false, false}},
      {.choice = "everything", .causal = true, .varlen = true, .dropout = true, .wanted = {false, true, true}},
  };
}

Sm90BackwardVariant random_variant(std::mt19937& engine) {
  const auto pick = [&engine](auto... values) {
    const std::array all{values...};
    return all[engine() % all.size()];
  };
  const std::vector<fa::test::VariantChoice> choices = fa::test::variant_choices();
  Sm90BackwardVariant v;
  v.choice = choices[engine() % choices.size()].name;
  v.dtype = pick(DType::f16, DType::bf16);
  v.d_qk = pick(8, 16, 40, 64);
  v.d_v = pick(8, 24, 64);
  v.causal = pick(false, true);
  v.tile_n = pick(64, 128);
  v.tile_m = pick(64, v.tile_n);
  v.varlen = pick(false, true);
  v.dropout = pick(false, true);
  v.splits = v.varlen ? 1 : pick(1, 1, 2);
  v.deterministic = pick(false, false, true);
  return v;
}

}  // namespace

const std::vector<Sm90BackwardVariant>& sm90_backward_variants() {
  static const std::vector<Sm90BackwardVariant> list = [] {
    std::vector<Sm90BackwardVariant> all = chosen();
    std::mt19937 engine(2024);
    for (int i = 0; i < kRandom; ++i) all.push_back(random_variant(engine));
    return all;
  }();
  return list;
}

fa::test::VariantCase variant_case(const Sm90BackwardVariant& variant, const fa::test::AttentionCase& attention) {
  // Gradients of captures have no place in a deterministic backward.
  std::vector<fa::test::VariantChoice> choices = fa::test::variant_choices(!variant.deterministic);
  choices.push_back({"plain", {}});
  const auto found = std::ranges::find(choices, variant.choice, &fa::test::VariantChoice::name);
  if (found == choices.end()) throw std::out_of_range("no such choice: " + variant.choice);
  fa::test::VariantCase c(attention, *found);
  c.config.varlen = variant.varlen;
  if (variant.dropout) c.config.dropout = 0.5f;  // which one it is, no kernel depends on
  return c;
}

BackwardSpecs backward_specs_of(const Sm90BackwardVariant& variant) {
  fa::test::AttentionCase attention;
  attention.dtype = variant.dtype;
  attention.d_qk = variant.d_qk;
  attention.d_v = variant.d_v;
  attention.causal = variant.causal;
  const fa::test::VariantCase c = variant_case(variant, attention);
  const fa::AttentionShape shape{.b = 1,
                                 .h_q = 2,
                                 .h_kv = 1,
                                 .s_q = 2 * kAnyLength,  // rows in front of any diagonal
                                 .s_kv = kAnyLength,
                                 .total_q = kAnyLength,
                                 .total_kv = kAnyLength,
                                 .gradients = variant.wanted};
  const fa::plan::Problem problem = fa::api::make_problem(c.config, shape, {9, 0, 'a'}, &c.functions.variants);
  fa::plan::Fixed fixed;
  fixed.family = fa::plan::Family::sm90;
  fixed.set("tile_m", variant.tile_m);
  fixed.set("tile_n", variant.tile_n);
  if (variant.split_blocks == 1) fixed.set("splits", variant.splits);
  fixed.set("split_blocks", variant.split_blocks);
  if (variant.in_turns) fixed.set("in_turns", 1);
  const fa::plan::BackwardPlan plan = plan_backward(problem, fixed, variant.deterministic);
  BackwardSpecs specs{plan.main.front(), {}};
  if (!plan.dq.empty()) specs.dq = plan.dq.front();
  specs.without_dq = !variant.wanted.dq;
  return specs;
}

}  // namespace emulator
