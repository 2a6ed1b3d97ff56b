#include "emulator/inspect_specs.hpp"

#include <algorithm>
#include <stdexcept>

#include "api/problem.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::plan::KernelSpec;
using fa::test::attention_of;

std::vector<DumpCase> make_cases() {
  std::vector<DumpCase> cases;
  const auto add = [&](const char* name, const fa::test::AttentionCase& of, std::int64_t b, std::int64_t h,
                       const fa::AttentionConfig& config = {}) {
    return &cases.emplace_back(DumpCase{{name, of, config}, b, h}).of;
  };
  add("dense", attention_of(DType::bf16, {2, 4, 2, 20, 45, 16, 16}, false), 1, 3);
  add("causal_f32", attention_of(DType::f32, {1, 2, 1, 30, 21, 8, 8}, true, -0.7f), 0, 1);
  add("no_scale", attention_of(DType::f16, {1, 2, 1, 9, 300, 24, 8}, true, 0.f), 0, 0);
  fa::AttentionConfig function;
  function.score = fa::ScoreFunction{"2.0 * (score - slope[h] * float(abs(q - kv)) + bias[b, kv])",
                                     {{"slope", DType::f32}, {"bias", DType::bf16}}};
  function.mask = fa::MaskFunction{"(q + kv) % 3 != 0"};
  add("function", attention_of(DType::bf16, {2, 2, 1, 20, 45, 16, 16}, true), 1, 1, function);
  fa::AttentionConfig window;
  window.window_left = 9;
  window.sink = true;
  add("window_sink", attention_of(DType::bf16, {1, 2, 1, 40, 50, 16, 16}, true), 0, 1, window);
  fa::AttentionConfig chunked;
  chunked.chunk = 13;
  add("chunks", attention_of(DType::f16, {1, 2, 1, 40, 40, 16, 16}, true), 0, 0, chunked);
  fa::AttentionConfig drops;
  drops.dropout = 0.375f;
  add("dropout", attention_of(DType::bf16, {2, 2, 1, 40, 75, 16, 16}, false), 1, 1, drops);
  StatisticsCase* const packed = add("packed", attention_of(DType::bf16, {1, 2, 1, 90, 110, 16, 16}, true), 2, 1);
  packed->cu_q = {2, 40, 40, 85};
  packed->cu_kv = {0, 30, 50, 110};
  packed->config.varlen = true;
  packed->config.dropout = 0.25f;
  StatisticsCase* const pages = add("pages", attention_of(DType::bf16, {3, 4, 2, 3, 100, 16, 16}, true), 2, 3);
  pages->config.page_size = 8;
  pages->used_kv = {100, 0, 41};
  return cases;
}

}  // namespace

const std::vector<DumpCase>& dump_cases() {
  static const std::vector<DumpCase> cases = make_cases();
  return cases;
}

const DumpCase& dump_case_named(const std::string& name) {
  const auto found = std::ranges::find_if(dump_cases(), [&](const DumpCase& c) { return c.of.name == name; });
  if (found == dump_cases().end()) throw std::invalid_argument("no case is named " + name);
  return *found;
}

fa::plan::Problem problem_of(const DumpCase& c, const fa::test::VariantCase& variant) {
  fa::plan::Problem problem = problem_of(c.of, variant);
  problem.aligned = true;
  return problem;
}

KernelSpec spec_of(const DumpCase& c) {
  const fa::test::VariantCase variant = variant_of(c.of);
  return fa::plan::probabilities_spec(problem_of(c, variant));
}

KernelSpec scan_spec() {
  return fa::plan::scan_results_spec({8, 0, '\0'});
}

std::vector<KernelSpec> all_inspect_specs() {
  std::vector<KernelSpec> unique{scan_spec()};
  for (const DumpCase& c : dump_cases()) {
    const KernelSpec spec = spec_of(c);
    if (std::ranges::find(unique, spec) == unique.end()) unique.push_back(spec);
  }
  return unique;
}

const std::vector<StatisticsMutation>& inspect_mutations() {
  constexpr const char* kScan = "common/scan_results.cuh";
  constexpr const char* kP = "common/probabilities.cuh";
  static const std::vector<StatisticsMutation> list{
      {"scan_takes_the_last_one", kScan, "if (found < lowest) lowest = found;", "lowest = found;", ""},
      {"scan_of_infinities_alone", kScan, "(bits & result.exponent) == result.exponent", "bits == result.exponent", ""},
      {"scan_finds_what_is_legal", kScan, "result.exponent && !legal", "result.exponent && (!legal || true)", ""},
      {"scan_of_every_legal_bit_pattern", kScan, "bits == result.minus_infinity;",
       "(bits & result.minus_infinity) != 0;", ""},
      {"scan_of_the_first_chunk", kScan, "int64_t{part} * kChunkRows; first", "int64_t{0} * part; first", ""},
      {"scan_of_as_many_heads_as_blocks", kScan, "job += kScanBlocks", "job += jobs", ""},
      {"scan_of_packed_rows_as_dense",
       kScan,
       "offset += span.first * result.stride_s;",
       "",
       "",
       {FaultKind::global_uninitialised}},
      {"scan_leaves_sequences",
       kScan,
       "rows = span.count;",
       "",
       "",
       {FaultKind::global_uninitialised, FaultKind::global_out_of_bounds}},
      {"scan_of_the_first_head", kScan, "(head - batch * result.h) * result.stride_h", "0 * result.stride_h", ""},
      {"scan_of_a_result_as_another", kScan, "ptx::red_min_u64(params.found + which", "ptx::red_min_u64(params.found",
       ""},
      {"scan_of_one_piece_of_four", kScan, "const int which = i + n * kThreads;", "const int which = i;", ""},
      {"scan_of_the_lowest_element_of_words", kScan, "(missing - ones)", "(missing - 1)", ""},
      {"scan_of_the_first_word_of_pieces", kScan, "~piece.word[w]", "~piece.word[0]", ""},
      {"scan_of_the_first_element_of_pieces", kScan, "is_broken(result, place[n] + e)", "is_broken(result, place[n])",
       ""},
      {"scan_of_unaligned_rows_by_pieces",
       kScan,
       "% kChunkBytes == 0",
       "% kChunkBytes >= 0",
       "",
       {FaultKind::misaligned, FaultKind::global_uninitialised, FaultKind::global_out_of_bounds}},
      {"scan_leaves_rows",
       kScan,
       "if (which < all) {",
       "if (which < all + 9) {",
       "",
       {FaultKind::global_uninitialised, FaultKind::global_out_of_bounds}},
      {"scan_of_first_columns", kScan, "column)) return i;", "column)) return row * result.d;", ""},
      {"p_of_one_head", kP, "params.head / (params.h_q / params.h_kv) * params.stride_k_h", "0 * params.stride_k_h",
       "dense"},
      {"p_of_hidden_keys", kP, "keys_end<Config::kCausal, Variant>(params, lengths, row)", "lengths.s_kv",
       "causal_f32"},
      {"p_before_the_window", kP, "keys_begin<Variant>(params, lengths, row)", "0", "window_sink"},
      {"p_without_the_scale", kP, ": params.scale_log2;", ": kLog2e;", "causal_f32"},
      {"p_by_scores_alone", kP, "kernel::apply_score<Variant, 1>(params.variant, at, fixed, score);", "", "function"},
      {"p_without_the_functions_factor", kP, "Variant::kFactor * kLog2e", "kLog2e", "function"},
      {"p_of_masked_keys", kP, "if constexpr (Variant::kMask) kernel::apply_mask",
       "if constexpr (false) kernel::apply_mask", "function"},
      {"p_before_dropout", kP, "if constexpr (kDropout<Config>) p[e]", "if constexpr (false) p[e]", "dropout"},
      {"p_not_scaled_behind_dropout", kP, "p[e] * params.dropout.inverse_keep", "p[e]", "dropout"},
      {"p_drops_the_neighbour", kP, "drawn % 8 / 2", "drawn % 4 / 2", "dropout"},
      {"p_drops_by_another_bit", kP, "4 * (drawn % 2) + 2 * (drawn % 16 / 8)", "4 * (drawn % 2)", "dropout"},
      {"p_of_packed_keys_as_dense", kP,
       "offset_of_keys<kVarlen<Config>>(lengths, params.batch, params.stride_k_b, params.stride_k_s)",
       "0 * params.stride_k_s", "packed"},
      {"p_of_the_first_page", kP, "page * params.stride_k_b + Keys", "0 * params.stride_k_b + Keys", "pages"},
      {"p_leaves_the_row",
       kP,
       "if (key + e < params.columns)",
       "if (key < params.columns)",
       "causal_f32",
       {FaultKind::global_out_of_bounds}},
  };
  return list;
}

KernelSpec inspected_subject_of(const StatisticsMutation& mutation) {
  return mutation.subject.empty() ? scan_spec() : spec_of(dump_case_named(mutation.subject));
}

}  // namespace emulator
