#include "emulator/statistics_specs.hpp"

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "api/problem.hpp"
#include "emulator/joined.hpp"
#include "plan/mask_tiles.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::MaxLogit;
using fa::plan::KernelSpec;
using fa::test::attention_of;
using fa::test::AttentionCase;
using fa::test::AttentionSizes;

fa::AttentionConfig asks(MaxLogit max_logit, bool entropy, bool by_head = false) {
  fa::AttentionConfig config;
  config.statistics = {max_logit, by_head, entropy, fa::ColumnSums::none};
  return config;
}

fa::AttentionConfig with_score(fa::AttentionConfig config, const char* text, std::vector<fa::Capture> captures = {}) {
  config.score = fa::ScoreFunction{text, std::move(captures)};
  return config;
}

fa::AttentionConfig with_mask(fa::AttentionConfig config, const char* text) {
  config.mask = fa::MaskFunction{text};
  return config;
}

constexpr const char* kSmall = "tile_m=32 tile_n=32 warps=2 stages=1";

/// By mma.sync.
std::vector<StatisticsCase> sm80_cases() {
  const fa::AttentionConfig both = asks(MaxLogit::softmax, true);
  const fa::AttentionConfig heads = asks(MaxLogit::softmax, false, true);
  return {
      {"dense", attention_of(DType::bf16, {2, 2, 1, 45, 70, 16, 16}, false), both, {"sm80", kSmall}},
      {"causal", attention_of(DType::f16, {1, 2, 2, 70, 40, 24, 8}, true), both, {"sm80", std::string(kSmall)}},
      {"f32", attention_of(DType::f32, {1, 2, 1, 33, 50, 8, 8}, true), both, {"sm80", kSmall}},
      {"negative_scale", attention_of(DType::bf16, {1, 2, 1, 40, 50, 16, 16}, true, -0.7f), both, {"sm80", kSmall}},
      {"large_scale", attention_of(DType::f16, {1, 1, 1, 40, 70, 16, 16}, false, 900.f), both, {"sm80", kSmall}},
      {"no_scale", attention_of(DType::bf16, {1, 2, 1, 40, 50, 16, 16}, false, 0.f), both, {"sm80", kSmall}},
      {"entropy_alone",
       attention_of(DType::bf16, {1, 2, 2, 40, 40, 16, 136}, true),
       asks(MaxLogit::none, true),
       {"sm80", kSmall}},
      {"heads",
       attention_of(DType::bf16, {2, 3, 1, 45, 70, 16, 16}, true),
       heads,
       {"sm80", "tile_m=32 tile_n=32 warps=2 pack_gqa=0"}},
      {"heads_packed",
       attention_of(DType::f16, {2, 6, 2, 9, 70, 16, 16}, false, -0.3f),
       heads,
       {"sm80", "tile_m=32 tile_n=32 warps=2 pack_gqa=1"}},
      // What is not there has scores of 0.
      {"heads_below_zero",
       attention_of(DType::bf16, {1, 3, 1, 45, 70, 16, 16}, true),
       with_score(heads, "abs(score) < 0.000001 ? 0.0 : score * 0.1 - 50.0"),
       {"sm80", "tile_m=32 tile_n=32 warps=2 pack_gqa=0"}},
      {"pairs",
       attention_of(DType::bf16, {1, 2, 1, 70, 70, 32, 32}, true),
       both,
       {"sm80", "tile_m=32 tile_n=32 warps=2 warps_n=2"}},
      {"groups",
       attention_of(DType::f16, {1, 2, 1, 40, 50, 264, 264}, true),
       with_score(asks(MaxLogit::scaled, true), "score * 0.5 - 1.0"),
       {"sm80", "tile_m=16 tile_n=32 warps=2 warps_n=2"}},
      {"softcap_scaled",
       attention_of(DType::bf16, {1, 2, 1, 45, 70, 16, 16}, true, -1.5f),
       with_score(asks(MaxLogit::scaled, true), "2.0 * tanh(score / 2.0)"),
       {"sm80", kSmall}},
      {"slope_softmax",
       attention_of(DType::f16, {2, 2, 2, 45, 70, 16, 16}, true),
       with_score(asks(MaxLogit::softmax, true), "score - slope[h] * float(abs(q - kv))", {{"slope", DType::f32}}),
       {"sm80", kSmall}},
      {"mask_scaled",
       attention_of(DType::bf16, {1, 2, 1, 45, 70, 16, 16}, false),
       with_mask(with_score(asks(MaxLogit::scaled, true), "score + 3.0"), "(q + kv) % 3 != 0 && kv < 60"),
       {"sm80", kSmall}},
      {"few_steps",
       attention_of(DType::bf16, {1, 2, 1, 45, 200, 16, 16}, true),
       both,
       {"sm80", "tile_m=32 tile_n=32 warps=2 stages=2 loop_bodies=2"}},
  };
}

/// By wgmma.
std::vector<StatisticsCase> sm90_cases() {
  const fa::AttentionConfig both = asks(MaxLogit::softmax, true);
  const fa::AttentionConfig heads = asks(MaxLogit::softmax, false, true);
  std::vector<StatisticsCase> cases;
  for (const fa::DType dtype : {DType::bf16, DType::f16}) {
    const bool causal = dtype == DType::bf16;
    const std::string small = "tile_m=64 tile_n=64 stages=2 q_buffers=1 pack_gqa=0";
    const std::string name = causal ? "sm90_causal" : "sm90";
    cases.push_back({name, attention_of(dtype, {2, 2, 1, 100, 150, 32, 32}, causal), both, {"sm90", small}});
    cases.push_back(
        {name + "_heads", attention_of(dtype, {2, 3, 1, 100, 150, 32, 32}, causal, -0.3f), heads, {"sm90", small}});
    cases.push_back({name + "_heads_packed",
                     attention_of(dtype, {2, 4, 2, 40, 150, 16, 16}, causal),
                     asks(MaxLogit::softmax, true, true),
                     {"sm90", "tile_m=64 tile_n=64 stages=2 q_buffers=1 pack_gqa=1"}});
  }
  cases.push_back({"sm90_no_keys",
                   attention_of(DType::bf16, {1, 2, 1, 150, 70, 16, 16}, true),
                   both,
                   {"sm90", "tile_m=128 tile_n=32 stages=2 q_buffers=2"}});
  cases.push_back({"sm90_three_warpgroups",
                   attention_of(DType::f16, {1, 2, 1, 250, 150, 32, 32}, true),
                   both,
                   {"sm90", "tile_m=192 tile_n=64 stages=2 q_buffers=1 pack_gqa=0"}});
  const fa::AttentionConfig entropy = asks(MaxLogit::none, true);
  const std::string trailing = "tile_m=64 tile_n=64 stages=2 q_buffers=1 pack_gqa=0 exact_max=0";
  const auto add = [&](const char* name, bool causal, std::optional<float> scale = std::nullopt) {
    return &cases.emplace_back(StatisticsCase{
        name, attention_of(DType::f16, {1, 2, 1, 100, 300, 16, 16}, causal, scale), entropy, {"sm90", trailing}});
  };
  add("sm90_trailing", true);
  add("sm90_trailing_raised", false, -8.f);
  add("sm90_trailing_lost", false)->steep = 60;
  add("sm90_trailing_far", false, 1.f)->common = 4000;
  add("sm90_trailing_no_scale", true, 0.f);
  add("sm90_trailing_sink", true)->config.sink = true;
  cases.push_back({"sm90_trailing_no_keys",
                   attention_of(DType::bf16, {1, 2, 1, 150, 70, 16, 16}, true),
                   entropy,
                   {"sm90", "tile_m=128 tile_n=32 stages=2 q_buffers=2 exact_max=0"}});
  StatisticsCase sink{"sm90_sink",
                      attention_of(DType::bf16, {1, 2, 1, 100, 150, 16, 16}, true),
                      both,
                      {"sm90", "tile_m=64 tile_n=64 stages=2 q_buffers=1 pack_gqa=0"}};
  sink.config.sink = true;
  cases.push_back(sink);
  return cases;
}

/// Sums of columns.
std::vector<StatisticsCase> column_sum_cases() {
  std::vector<StatisticsCase> cases;
  for (const fa::ColumnSums sums : {fa::ColumnSums::query_heads, fa::ColumnSums::kv_heads}) {
    const std::string name = sums == fa::ColumnSums::kv_heads ? "sums_of_kv_heads" : "sums";
    fa::AttentionConfig config;
    config.statistics.column_sums = sums;
    const auto add = [&](const char* suffix, const AttentionCase& of, const fa::AttentionConfig& wanted) {
      return &cases.emplace_back(StatisticsCase{name + suffix, of, wanted, {"sm80", kSmall}});
    };
    add("", attention_of(DType::bf16, {2, 4, 2, 150, 100, 16, 16}, false), config);
    add("_causal", attention_of(DType::f16, {1, 2, 1, 300, 140, 24, 16}, true, -0.4f), config);
    add("_f32", attention_of(DType::f32, {1, 2, 1, 70, 90, 8, 8}, true), config);
    add("_one_part", attention_of(DType::bf16, {1, 2, 1, 140, 100, 112, 16}, true), config);
    add("_function", attention_of(DType::bf16, {2, 2, 1, 150, 100, 16, 16}, true),
        with_mask(with_score(config, "score - slope[h] * float(abs(q - kv))", {{"slope", DType::f32}}),
                  "(q + kv) % 3 != 0"));
    StatisticsCase* const window =
        add("_window_sink", attention_of(DType::bf16, {1, 2, 1, 150, 150, 16, 16}, true), config);
    window->config.window_left = 40;
    window->config.sink = true;
    StatisticsCase* const chunked =
        add("_chunks", attention_of(DType::bf16, {1, 2, 1, 150, 150, 16, 16}, true), config);
    chunked->config.chunk = 50;
    StatisticsCase* const packed = add("_packed", attention_of(DType::bf16, {1, 2, 1, 190, 210, 16, 16}, true), config);
    packed->cu_q = {2, 140, 140, 185};
    packed->cu_kv = {0, 130, 150, 210};
    packed->config.varlen = true;
    add("_one_buffer", attention_of(DType::bf16, {1, 2, 1, 600, 140, 16, 16}, true), config)->config.kernel =
        fa::KernelOverride{"column_sums", "row_buffers=1"};
    // More tiles of 128 keys than one round has, which are of two parts then.
    if (sums == fa::ColumnSums::query_heads)
      add("_many_heads", attention_of(DType::bf16, {1, 134, 67, 40, 140, 16, 16}, true), config);
    add("_sections", attention_of(DType::bf16, {2, 4, 2, 150, 260, 16, 16}, true), config)->sum_heads_in_flight = 3;
    config.statistics.top_keys = 7;
    add("_top_keys", attention_of(DType::bf16, {2, 4, 2, 150, 100, 16, 16}, true), config);
    add("_top_keys_alone", attention_of(DType::f16, {2, 4, 2, 150, 100, 16, 16}, true), config)->without_sums = true;
    StatisticsCase* const ragged =
        add("_top_keys_packed", attention_of(DType::bf16, {1, 2, 1, 190, 210, 16, 16}, true), config);
    ragged->cu_q = {2, 140, 140, 185};
    ragged->cu_kv = {0, 130, 150, 155};
    ragged->config.varlen = true;
    ragged->without_sums = true;
  }
  return cases;
}

/// Windows, dropout, packed batches and pages.
std::vector<StatisticsCase> variant_cases() {
  const fa::AttentionConfig both = asks(MaxLogit::softmax, true);
  std::vector<StatisticsCase> cases;
  StatisticsCase window{
      "window_sink", attention_of(DType::bf16, {1, 2, 1, 45, 70, 16, 16}, true), both, {"sm80", kSmall}};
  window.config.window_left = 9;
  window.config.sink = true;
  cases.push_back(window);
  StatisticsCase drops{"dropout", attention_of(DType::bf16, {1, 2, 1, 45, 70, 16, 16}, false), both, {"sm80", kSmall}};
  drops.config.dropout = 0.5f;
  cases.push_back(drops);
  StatisticsCase packed{"packed", attention_of(DType::bf16, {1, 2, 1, 90, 110, 16, 16}, true), both, {"sm80", kSmall}};
  packed.cu_q = {2, 40, 40, 85};
  packed.cu_kv = {0, 30, 50, 110};
  packed.config.varlen = true;
  cases.push_back(packed);
  StatisticsCase pages{"pages",
                       attention_of(DType::bf16, {3, 4, 1, 3, 100, 16, 16}, true),
                       both,
                       {"sm80", "tile_m=32 tile_n=32 warps=2 stages=2"}};
  pages.config.page_size = 8;
  pages.used_kv = {100, 0, 41};
  cases.push_back(pages);
  return cases;
}

std::vector<StatisticsCase> make_cases() {
  return joined({sm80_cases(), sm90_cases(), column_sum_cases(), variant_cases()});
}

}  // namespace

const std::vector<StatisticsCase>& statistics_cases() {
  static const std::vector<StatisticsCase> cases = make_cases();
  return cases;
}

const StatisticsCase& case_named(const std::string& name) {
  const auto found = std::ranges::find(statistics_cases(), name, &StatisticsCase::name);
  if (found == statistics_cases().end()) throw std::invalid_argument("no case is named " + name);
  return *found;
}

fa::plan::Problem problem_of(const StatisticsCase& c, const fa::test::VariantCase& variant) {
  const AttentionCase& a = c.attention;
  fa::AttentionShape shape{.b = a.b, .h_q = a.h_q, .h_kv = a.h_kv, .s_q = a.s_q, .s_kv = a.s_kv};
  if (!c.cu_q.empty()) {
    shape.b = static_cast<std::int64_t>(c.cu_q.size()) - 1;
    shape.total_q = a.s_q;
    shape.total_kv = a.s_kv;
  }
  const bool hopper = c.kernel.kernel == "sm90";
  return fa::api::make_problem(variant.config, shape, hopper ? fa::plan::Arch{9, 0, 'a'} : fa::plan::Arch{8, 0, '\0'},
                               &variant.functions.variants);
}

fa::plan::ForwardPlan plan_of(const StatisticsCase& c) {
  const fa::test::VariantCase variant = variant_of(c);
  return plan_forward(problem_of(c, variant), fa::plan::read_override(c.kernel, fa::plan::Op::forward, "kernel"));
}

std::vector<KernelSpec> all_statistics_specs() {
  std::vector<KernelSpec> unique;
  const auto add = [&](const KernelSpec& spec) {
    if (std::ranges::find(unique, spec) == unique.end()) unique.push_back(spec);
  };
  for (const StatisticsCase& c : statistics_cases()) {
    const KernelSpec forward = plan_of(c).kernel;
    add(forward);
    const fa::plan::ForwardPlan plan = plan_of(c);
    for (const KernelSpec& spec : {plan.sums, plan.top_keys}) {
      if (spec.warps != 0) add(spec);
    }
    if (!forward.variants.mask.empty()) add(fa::plan::mask_tiles_spec(forward));
  }
  for (const StatisticsGradientCase& c : gradient_cases()) {
    const fa::test::VariantCase variant = variant_of(c.of);
    const fa::plan::KernelSet kernels = gradient_kernels(c, variant);
    const fa::plan::KernelSet others = companions(problem_of(c.of, variant), kernels);
    for (const fa::plan::Role role : fa::plan::kAllRoles) {
      if (kernels[role].warps != 0) add(kernels[role]);
      if (others[role].warps != 0) add(others[role]);
    }
  }
  return unique;
}

const std::vector<StatisticsGradientCase>& gradient_cases() {
  static const std::vector<StatisticsGradientCase> cases = fa::test::statistics_gradient_cases();
  return cases;
}

const StatisticsGradientCase* gradient_case_named(const std::string& name) {
  const auto found = std::ranges::find(gradient_cases(), name, [](const auto& c) { return c.of.name; });
  return found == gradient_cases().end() ? nullptr : &*found;
}

fa::plan::KernelSet gradient_kernels(const StatisticsGradientCase& c, const fa::test::VariantCase& variant) {
  const fa::plan::Fixed fixed = fa::plan::read_override(c.kernel, fa::plan::Op::backward, "kernel_backward");
  const fa::plan::KernelChoices choices =
      backward_kernel_choices(problem_of(c.of, variant), fixed, c.of.config.deterministic);
  fa::plan::KernelSet kernels;
  for (const fa::plan::Role role : fa::plan::kAllRoles) {
    if (!choices[role].empty()) kernels[role] = choices[role].front();
  }
  return kernels;
}

namespace {

/// Statistics of rows.
std::vector<StatisticsMutation> row_mutations() {
  return {
      {"entropy_keeps_old_references", "common/row_entropy.cuh", "ptx::fma(lower, sum, weighted_sum)",
       "ptx::fma(lower, 0.f * sum, weighted_sum)", "dense"},
      {"entropy_does_not_shrink", "common/row_entropy.cuh", "shrink * ptx::fma(lower", "ptx::fma(lower", "dense"},
      {"entropy_of_hidden_keys", "common/row_entropy.cuh", "ptx::max(t, kLowest)", "t", "causal"},
      {"entropy_of_one_lane", "common/row_entropy.cuh", "weighted[m][r] += ptx::shfl_xor(weighted[m][r], 2);", "",
       "dense"},
      {"entropy_without_the_sinks_weight", "common/row_entropy.cuh", "return weight * (keys", "return 1.f * (keys",
       "window_sink"},
      {"entropy_without_the_logarithm_of_a_weight", "common/row_entropy.cuh", "(keys - ptx::lg2(weight) * kLn2)",
       "(keys - 0.f * weight)", "window_sink"},
      {"entropy_in_bits", "common/row_entropy.cuh", "weighted[m][r] / sum) * kLn2", "weighted[m][r] / sum)", "dense"},
      {"scaled_of_hidden_keys", "common/row_statistics.cuh", "score == -kInfinity ? -kInfinity : score * scale",
       "score * scale", "softcap_scaled"},
      {"scaled_of_one_lane", "common/row_statistics.cuh",
       "scaled[m][r] = ptx::max(scaled[m][r], ptx::shfl_xor(scaled[m][r], 2));", "", "softcap_scaled"},
      {"maxima_without_their_factor", "common/row_statistics.cuh", "-kInfinity : max * factor",
       "-kInfinity : max + 0.f * factor", "dense"},
      {"maxima_by_the_scale_as_it_is", "sm80/sm80_forward_statistics.cuh", "ptx::abs(f.params.scale)", "f.params.scale",
       "negative_scale"},
      {"maxima_of_negative_numbers_upside_down", "common/row_statistics.cuh", "ptx::red_min_u32(", "ptx::red_max_u32(",
       "heads_below_zero"}};
}

/// Where rows have them, and what they are exchanged through.
std::vector<StatisticsMutation> place_mutations() {
  return {
      {"statistics_of_the_wrong_head",
       "common/row_statistics.cuh",
       "static_cast<int64_t>(head) * rows",
       "head % 1 * rows",
       "dense",
       {FaultKind::global_uninitialised}},
      {"statistics_of_packed_rows_as_dense",
       "common/row_statistics.cuh",
       "kVarlen ? params.sequences.total_q : params.s_q",
       "params.s_q - 1",
       "packed",
       {FaultKind::global_uninitialised, FaultKind::global_out_of_bounds}},
      {"pairs_exchange_in_the_sums_place",
       "sm80/sm80_forward_statistics.cuh",
       "f.meet();  // both have read the other's sums, in whose place these go",
       "",
       "pairs",
       {FaultKind::shared_race}},
      {"groups_exchange_in_the_sums_place",
       "sm80/sm80_forward_statistics.cuh",
       "f.meet();  // all have read the sums, in whose place these go",
       "",
       "groups",
       {FaultKind::shared_race}},
      {"groups_read_maxima_that_are_not_there",
       "sm80/sm80_forward_statistics.cuh",
       "f.meet();  // the maxima are in shared memory",
       "",
       "groups",
       {FaultKind::shared_race}},
      {"sm90_heads_of_rows_that_are_not_there",
       "sm90/sm90_row_statistics.cuh",
       "if (!e.has_row(query, row)) continue;",
       "",
       "sm90",
       {FaultKind::global_out_of_bounds}},
      {"sm90_maxima_by_the_scale_as_it_is", "sm90/sm90_row_statistics.cuh", "ptx::abs(e.params.scale)",
       "e.params.scale", "sm90_heads"},
      {"sm90_entropy_does_not_follow_the_maxima", "sm90/sm90_softmax.cuh",
       "this->shrink_entropy(0, r, sum[r], factor[r]);", "this->shrink_entropy(0, r, sum[r], 1.f);", "sm90_causal"},
      {"sm90_entropy_of_a_tile_by_its_old_offset", "sm90/sm90_softmax.cuh",
       "own_weighted[r] = this->shrunk(own_weighted[r], own[r], step);", "own_weighted[r] *= step;",
       "sm90_trailing_raised"},
      {"sm90_entropy_by_its_old_offset", "sm90/sm90_softmax.cuh",
       "this->shrink_entropy(0, r, sum[r], step);\n        own", "this->shrink_entropy(0, r, 0.f, step);\n        own",
       "sm90_trailing_raised"},
      {"sm90_entropy_by_the_reference_before", "sm90/sm90_softmax.cuh",
       "if constexpr (kEntropy) this->shrink_entropy(0, r, sum[r], step);",
       "if constexpr (kEntropy) this->shrink_entropy(0, r, 0.f, step);", "sm90_trailing_lost"},
      {"sm90_entropy_by_the_score_before", "sm90/sm90_softmax.cuh",
       "if constexpr (kEntropy) this->shrink_entropy(0, r, sum[r], step);",
       "if constexpr (kEntropy) this->shrink_entropy(0, r, 0.f, step);", "sm90_trailing_far"},
      {"sm90_entropy_without_a_tile", "sm90/sm90_softmax.cuh",
       "if constexpr (kEntropy) this->add_of_tile(own_weighted);", "", "sm90_trailing"},
      {"sm90_entropy_of_lost_scores", "sm90/sm90_softmax.cuh",
       "    if constexpr (kEntropy) own_weighted[0] = own_weighted[1] = 0.f;\n    FA_UNROLL\n    for (int j = 0; j < "
       "kCount / 4; ++j) {",
       "    FA_UNROLL\n    for (int j = 0; j < kCount / 4; ++j) {", "sm90_trailing_far"},
      {"sm90_entropy_follows_no_greater_maxima", "sm90/sm90_softmax.cuh", "if (ptx::vote_any(rises)) {",
       "if (ptx::vote_any(rises && sum[0] < 0.f)) {", "sm90"},
      {"sm90_entropy_of_hidden_keys", "common/row_entropy.cuh", "of_tile[0] != of_tile[0] || of_tile[1] != of_tile[1]",
       "of_tile[0] < of_tile[0] || of_tile[1] < of_tile[1]", "sm90_causal"},
      {"sm90_entropy_of_the_other_row", "common/row_entropy.cuh",
       "of_tile[i / 2 % 2] = ptx::fma(p[i], ptx::lg2(p[i]), of_tile[i / 2 % 2]);",
       "of_tile[1 - i / 2 % 2] = ptx::fma(p[i], ptx::lg2(p[i]), of_tile[1 - i / 2 % 2]);", "sm90_causal"},
      {"sm90_entropy_without_the_sinks_weight", "sm90/sm90_epilogue.cuh",
       "weight[r] = kernel::weight_of(keys, lse[r]);",
       "weight[r] = 1.f; inverse_sum[r] *= kernel::weight_of(keys, lse[r]);", "sm90_sink"}};
}

/// Sums of columns.
std::vector<StatisticsMutation> column_sum_mutations() {
  return {
      {"sums_of_one_warp", "sm80/sm80_column_sums.cuh", "total += ptx::from_bits", "total = ptx::from_bits", "sums"},
      {"sums_take_the_rows_place_early",
       "sm80/sm80_column_sums.cuh",
       "ptx::sync_threads();  // all have left Q, whose place the sums take",
       "",
       "sums",
       {FaultKind::shared_race}},
      {"sums_before_all_warps_are_there",
       "sm80/sm80_column_sums.cuh",
       "ptx::sync_threads();  // the sums of all warps are there",
       "",
       "sums",
       {FaultKind::shared_race, FaultKind::shared_uninitialised}},
      {"sums_of_rows_that_have_not_landed",
       "sm80/sm80_column_sums.cuh",
       "ptx::sync_warp();  // the other lanes' copies of this step's rows have landed",
       "",
       "sums",
       {FaultKind::shared_race, FaultKind::shared_in_flight}},
      {"sums_read_keys_that_have_not_landed",
       "sm80/sm80_column_sums.cuh",
       "ptx::sync_threads();  // K has landed for all, and the first rows",
       "ptx::sync_warp();",
       "sums",
       {FaultKind::shared_race, FaultKind::shared_uninitialised, FaultKind::shared_in_flight}},
      {"sums_wait_for_one_buffer_only",
       "sm80/sm80_column_sums.cuh",
       "ptx::cp_async_wait<kOneBuffer ? 0 : 1>();",
       "ptx::cp_async_wait<2>();",
       "sums",
       {FaultKind::shared_in_flight, FaultKind::shared_uninitialised}},
      {"sums_of_one_buffer_overwrite_rows_that_are_read",
       "sm80/sm80_column_sums.cuh",
       "ptx::sync_warp();  // all lanes have read the rows before these copies overwrite them",
       "",
       "sums_one_buffer",
       {FaultKind::shared_race, FaultKind::shared_in_flight}},
      {"sums_of_one_buffer_that_has_not_landed",
       "sm80/sm80_column_sums.cuh",
       "ptx::cp_async_wait<kOneBuffer ? 0 : 1>();",
       "ptx::cp_async_wait<1>();",
       "sums_one_buffer",
       {FaultKind::shared_in_flight, FaultKind::shared_uninitialised}},
      {"sums_of_one_buffer_copied_ahead_of_its_products",
       "sm80/sm80_column_sums.cuh",
       "if (part + 1 == kParts) after_products();",
       "if (part == 0) after_products();",
       "sums_one_buffer",
       {FaultKind::shared_race, FaultKind::shared_in_flight}},
      {"sums_of_rows_without_keys", "sm80/sm80_column_sums.cuh", "lse == -kInfinity ? float{kInfinity} : lse * kLog2e",
       "lse * kLog2e", "sums_causal"},
      {"sums_of_rows_that_are_not_there", "sm80/sm80_column_sums.cuh", "if (row >= rows.row_count) return kInfinity;",
       "if (row >= rows.row_count) return 0.f;", "sums"},
      {"sums_of_heads_of_the_first_section", "sm80/sm80_column_sums.cuh", "first_head + place - block * heads}",
       "place - block * heads}", "sums_sections"},
      {"sums_of_a_last_section_as_of_others",
       "sm80/sm80_column_sums.cuh",
       "rest < p.heads_in_flight ? rest",
       "rest < 0 ? rest",
       "sums_sections",
       {FaultKind::global_out_of_bounds}},
      {"sums_of_hidden_keys", "sm80/sm80_column_sums.cuh", "if (hides_any(rows, block)) rows.mask(s, block);", "",
       "sums_causal"},
      {"sums_of_the_first_part_of_keys", "sm80/sm80_column_sums.cuh", "first = first_key + part * kPartKeys;",
       "first = first_key;", "sums"},
      {"sums_of_parts_masked_as_the_first", "sm80/sm80_column_sums.cuh", "tile.block * kParts + part;",
       "tile.block * kParts;", "sums_many_heads"},
      {"sums_of_parts_at_one_place", "sm80/sm80_column_sums.cuh", "sums[n / kNTiles]", "sums[0]", "sums"},
      {"sums_of_parts_by_one_tile",
       "sm80/sm80_column_sums.cuh",
       "rows.k_shared(0) + part * KTile::kBytes;",
       "rows.k_shared(0) + 0 * part;",
       "sums",
       {FaultKind::shared_race, FaultKind::shared_in_flight}},
      {"sums_of_one_query_head", "sm80/sm80_column_sums.cuh", "tile.head * params.splits + step.head;",
       "tile.head * params.splits + 0 * step.head;", "sums_of_kv_heads"},
      {"sums_skip_the_last_rows", "sm80/sm80_column_sums.cuh", "blocks = ceil_div(end, kTileM) - first_block;",
       "blocks = end / kTileM - first_block;", "sums"},
      {"sums_of_packed_keys_as_dense",
       "sm80/sm80_column_sums.cuh",
       "lengths.first_key + first_key;",
       "first_key;",
       "sums_packed",
       {FaultKind::global_not_writable}},
      {"heads_of_rows_that_are_not_there", "sm80/sm80_forward_statistics.cuh", "if (row >= f.row_count) return;", "",
       "heads_below_zero"}};
}

/// Gradients of statistics.
std::vector<StatisticsMutation> gradient_mutations() {
  return {
      {"gradient_of_entropy_without_its_entropy", "common/backward_preprocess.cuh", "(params.entropy + at) - weight",
       "(params.entropy + at) * 0.f - weight", "gradients_entropy"},
      {"gradient_of_entropy_with_a_sink_as_without", "common/backward_preprocess.cuh",
       "if (params.variant.sink != nullptr) {", "if (params.variant.sink != nullptr && head < 0) {",
       "gradients_window_sink"},
      {"gradient_of_entropy_in_bits", "common/statistics_gradients.cuh", "(params.dentropy + at) * kLn2",
       "(params.dentropy + at)", "gradients_entropy"},
      {"gradient_of_entropy_without_its_one", "common/statistics_gradients.cuh", "(ptx::max(log2_p, kLowest) + kLog2e)",
       "ptx::max(log2_p, kLowest)", "gradients_entropy"},
      {"gradient_of_rows_without_keys", "common/statistics_gradients.cuh",
       "if (row >= lengths.s_q || lse_log2 == kInfinity) return;",
       "if (row >= lengths.s_q || lse_log2 == -kInfinity) return;", "gradients_no_keys"},
      {"gradient_of_packed_rows_as_dense",
       "common/statistics_gradients.cuh",
       "return lengths.first_row;",
       "return 0 * lengths.first_row;",
       "gradients_packed",
       {FaultKind::global_uninitialised}},
      {"gradient_of_the_wrong_entry", "common/statistics_gradients.cuh",
       "static_cast<int64_t>(batch) * params.h_q * params.s_q", "static_cast<int64_t>(batch) * params.h_q",
       "gradients_dense"},
      {"gradient_of_maximum_at_the_next_key", "common/statistics_gradients.cuh", "key == max_key", "key == max_key + 1",
       "gradients_max_logit"},
      {"gradient_of_maximum_through_dropout", "common/variant_backward.cuh",
       "if constexpr (kDropout) return gradient * params.dropout.keep;", "", "gradients_dropout"},
      {"gradient_of_scaled_maximum_by_the_slope", "common/variant_backward.cuh",
       "ds += undropped(rows[e % 2].template of_logit<true>(at.kv + at.kv_step));",
       "ds += slope * undropped(rows[e % 2].template of_logit<true>(at.kv + at.kv_step));", "gradients_softcap_scaled"},
      {"gradient_of_maximum_past_the_slope", "common/variant_backward.cuh",
       "gradient += undropped(rows[e % 2].template of_logit<false>(at.kv + at.kv_step));",
       "ds += 0.f * undropped(rows[e % 2].template of_logit<false>(at.kv + at.kv_step));", "gradients_slope_softmax"},
      {"gradient_of_entropy_of_dropped", "common/variant_backward.cuh", "gradient += whole * undropped(rows",
       "gradient += weight * undropped(rows", "gradients_dropout"},
      {"pass_for_dq_without_entropy", "sm80/sm80_backward_dq.cuh", "float of_p = of_row.of_probability(log2_p);",
       "float of_p = 0.f * of_row.of_probability(log2_p);", "gradients_causal_deterministic"},
      {"pass_for_dq_without_scaled_maxima", "sm80/sm80_backward_dq.cuh",
       "logit * slope + undropped(of_row.template of_logit<true>(key))", "logit * slope",
       "gradients_softcap_scaled_deterministic"},
      {"gradient_of_heads_in_all_rows", "common/statistics_gradients.cuh",
       "if (row_of_max != row_of_all<kVarlen<Config>>(params, lengths, batch, row)) return;",
       "if (row_of_max == 0xffffffffu) return;", "gradients_heads"},
      {"gradient_of_heads_of_the_first_head", "common/statistics_gradients.cuh", "params.dmax_logit + head",
       "params.dmax_logit + 0 * head", "gradients_heads"},
      {"rows_of_heads_of_one_entry", "common/statistics_gradients.cuh",
       "static_cast<uint32_t>(batch) * static_cast<uint32_t>(params.s_q)",
       "static_cast<uint32_t>(batch) * static_cast<uint32_t>(0 * params.s_q)", "gradients_heads"},
      {"rows_of_heads_of_one_sequence", "common/statistics_gradients.cuh", "lengths.first_row + row);",
       "0 * lengths.first_row + row);", "gradients_heads_packed"},
      {"rows_of_heads_by_unordered_logits", "sm80/sm80_statistic_rows.cuh", "logit_and_row(found.score[m][r],",
       "logit_and_row(-found.score[m][r],", "gradients_heads_below_zero"},
      {"max_keys_of_hidden_keys", "sm80/sm80_statistic_rows.cuh", "scores.mask(s, block);", "", "gradients_causal"},
      {"max_keys_by_the_mask_as_without", "sm80/sm80_statistic_rows.cuh",
       "if constexpr (Variant::kMask) scores.apply_mask(s, block);", "", "gradients_mask"},
      {"max_keys_by_raw_scores", "sm80/sm80_statistic_rows.cuh", "scores.apply_score(s, block);", "",
       "gradients_slope_softmax"},
      {"max_keys_whatever_the_sign", "sm80/sm80_statistic_rows.cuh", "scores.scale_scores(s);", "",
       "gradients_negative_scale"},
      {"max_keys_of_scaled_scores_whatever_the_sign", "sm80/sm80_statistic_rows.cuh", "* scores.scale_sign();",
       "* ptx::abs(scores.scale_sign());", "gradients_softcap_scaled"},
      {"row_sums_of_one_lane", "sm80/sm80_statistic_rows.cuh", "sum += ptx::shfl_xor(sum, lanes);",
       "sum += 0.f * static_cast<float>(lanes);", "gradients_sums"},
      {"row_sums_of_scores_as_they_are", "sm80/sm80_statistic_rows.cuh", "scores.softmax_scale_log2()",
       "0.5f * scores.softmax_scale_log2()", "gradients_sums"},
      {"gradient_of_sums_without_row_sums", "common/backward_preprocess.cuh",
       "part += ptx::ld_global(params.row_sums + at);", "part += 0.f * ptx::ld_global(params.row_sums + at);",
       "gradients_sums"},
      {"gradient_of_sums_of_packed_keys_as_dense", "common/statistics_gradients.cuh", "row + lengths.first_key + key",
       "row + key", "gradients_sums_packed"},
      {"gradient_of_sums_of_the_wrong_head", "common/statistics_gradients.cuh", "head / params.sum_group;",
       "head % params.sum_group;", "gradients_sums_kv"},
      {"gradient_of_sums_of_keys_that_are_not_there",
       "common/statistics_gradients.cuh",
       "if (key >= lengths.s_kv) return 0.f;",
       "",
       "gradients_sums",
       {FaultKind::global_out_of_bounds}},
      {"gradient_of_sums_of_dropped", "common/variant_backward.cuh", "gradient += whole * undropped(by_key",
       "gradient += weight * undropped(by_key", "gradients_sums_dropout"},
      {"pass_for_dq_without_sums", "sm80/sm80_backward_dq.cuh", "of_p += column_gradient",
       "of_p += 0.f * column_gradient", "gradients_sums_kv_deterministic"},
      {"max_keys_of_one_lane", "sm80/sm80_statistic_rows.cuh", "for (int lanes = 1; lanes < 4; lanes *= 2)",
       "for (int lanes = 2; lanes < 4; lanes *= 2)", "gradients_max_logit"},
      {"max_keys_of_the_last_of_equals", "sm80/sm80_statistic_rows.cuh", "!(s[m][n][2 * r + e] > found.score[m][r])",
       "!(s[m][n][2 * r + e] >= found.score[m][r])", "gradients_ties"},
      {"max_keys_of_the_last_lane_of_equals", "sm80/sm80_statistic_rows.cuh", "other_key < key", "other_key > key",
       "gradients_ties"},
      {"max_keys_before_keys_have_landed",
       "sm80/sm80_statistic_rows.cuh",
       "ptx::sync_threads();  // this tile has landed for all, and all have left the buffer that is filled next",
       "",
       "gradients_dense",
       {FaultKind::shared_race, FaultKind::shared_in_flight, FaultKind::shared_uninitialised}},
      {"max_keys_in_one_buffer",
       "sm80/sm80_statistic_rows.cuh",
       "rows.k_shared(0) + stage * KTile::kBytes;",
       "rows.k_shared(0) + 0 * stage;",
       "gradients_dense",
       {FaultKind::shared_race, FaultKind::shared_in_flight}},
      {"max_keys_of_rows_that_are_not_there",
       "sm80/sm80_statistic_rows.cuh",
       "if (row >= rows.row_count || rows.lane % 4 != 0) continue;",
       "if (rows.lane % 4 != 0) continue;",
       "gradients_dense",
       {FaultKind::global_out_of_bounds}},
  };
}

}  // namespace

const std::vector<StatisticsMutation>& statistics_mutations() {
  static const std::vector<StatisticsMutation> all =
      joined({row_mutations(), place_mutations(), column_sum_mutations(), gradient_mutations()});
  return all;
}

fa::plan::Role role_of(const StatisticsMutation& mutation) {
  if (mutation.header == "common/backward_preprocess.cuh") return fa::plan::Role::statistics;
  if (mutation.header == "sm80/sm80_statistic_rows.cuh") return fa::plan::Role::statistic_rows;
  if (mutation.header == "sm80/sm80_backward_dq.cuh") return fa::plan::Role::dq;
  return fa::plan::Role::attention;
}

bool is_of_sums(const StatisticsMutation& mutation) {
  return mutation.header == "sm80/sm80_column_sums.cuh";
}

KernelSpec subject_of(const StatisticsMutation& mutation) {
  if (const StatisticsGradientCase* const c = gradient_case_named(mutation.subject)) {
    return gradient_kernels(*c, variant_of(c->of))[role_of(mutation)];
  }
  const fa::plan::ForwardPlan plan = plan_of(case_named(mutation.subject));
  return is_of_sums(mutation) ? plan.sums : plan.kernel;
}

}  // namespace emulator
