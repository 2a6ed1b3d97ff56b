#include "emulator/quantize_specs.hpp"

#include <algorithm>
#include <stdexcept>

namespace emulator {

using fa::DType;
using fa::plan::KernelSpec;

const std::vector<QuantizeCase>& quantize_cases() {
  static const std::vector<QuantizeCase> cases{
      {.name = "usual", .b = 2, .h_q = 4, .h_kv = 2, .s_q = 21, .s_kv = 300, .d = 64},
      {.name = "f32", .dtype = DType::f32, .h_q = 3, .h_kv = 3, .s_kv = 70, .d = 96},
      {.name = "wide", .dtype = DType::f16, .s_q = 9, .s_kv = 1300, .d = 256},
      {.name = "one_key", .s_q = 1, .s_kv = 1, .d = 16},
      {.name = "unaligned", .b = 2, .s_kv = 40, .d = 48, .aligned = false},
      {.name = "unaligned_f32", .dtype = DType::f32, .s_kv = 40, .d = 16, .aligned = false},
      {.name = "bytes", .codes = DType::e4m3, .h_q = 4, .h_kv = 4, .s_kv = 33, .d = 128},
      {.name = "plain", .b = 3, .s_q = 70, .s_kv = 31, .d = 80, .smooths = false},
      {.name = "given", .s_q = 40, .s_kv = 31, .d = 128, .mean_given = true, .scales_given = true},
  };
  return cases;
}

const QuantizeCase& quantize_case_named(const std::string& name) {
  const auto found = std::ranges::find(quantize_cases(), name, &QuantizeCase::name);
  if (found == quantize_cases().end()) throw std::invalid_argument("no case is named " + name);
  return *found;
}

std::vector<KernelSpec> specs_of(const QuantizeCase& c) {
  fa::plan::QuantizePass pass;
  const std::int64_t of_rows = c.aligned ? c.d : c.d + 1;
  pass.x.dtype = c.dtype;
  pass.x.rank = 4;
  pass.x.shape = {c.b, c.h_q, 2, c.d};
  pass.x.strides = {c.h_q * 2 * of_rows, 2 * of_rows, of_rows, 1};
  pass.codes.dtype = c.codes;
  std::vector<KernelSpec> specs{quantize_spec(pass, {8, 0, '\0'})};
  if (!c.smooths || c.mean_given) return specs;
  pass.means = true;
  pass.codes = {};
  specs.push_back(quantize_spec(pass, {8, 0, '\0'}));
  return specs;
}

std::vector<KernelSpec> all_quantize_specs() {
  std::vector<KernelSpec> unique;
  for (const QuantizeCase& c : quantize_cases()) {
    for (const KernelSpec& spec : specs_of(c)) {
      if (std::ranges::find(unique, spec) == unique.end()) unique.push_back(spec);
    }
  }
  return unique;
}

const std::vector<StatisticsMutation>& quantize_mutations() {
  constexpr const char* kQuantize = "common/quantize.cuh";
  static const std::vector<StatisticsMutation> list{
      {"quantize_rows_behind_the_last",
       kQuantize,
       "const bool has_row = b < params.b,",
       "const bool has_row = true,",
       "usual",
       {FaultKind::global_out_of_bounds, FaultKind::global_not_writable, FaultKind::global_uninitialised}},
      {"quantize_columns_behind_the_last",
       kQuantize,
       "has_piece = has_row && lane < kPieces;",
       "has_piece = has_row;",
       "plain",
       {FaultKind::global_out_of_bounds, FaultKind::global_not_writable, FaultKind::global_uninitialised}},
      {"quantize_with_the_mean_of_another_head", kQuantize, "h / params.group * params.stride_mean_h",
       "0 * h * params.stride_mean_h", "usual"},
      {"quantize_with_the_mean_of_another_batch", kQuantize,
       "params.mean + b * params.stride_mean_b + h / params.group",
       "params.mean + 0 * b * params.stride_mean_b + h / params.group", "usual"},
      {"quantize_adds_the_mean", kQuantize, "x[i] -= mean[i];", "x[i] += mean[i];", "usual"},
      {"quantize_bias_of_one_lane", kQuantize, "for (int mask = kLanes / 2; mask > 0; mask /= 2) sum",
       "for (int mask = kLanes / 4; mask > 0; mask /= 2) sum", "usual"},
      {"quantize_by_the_greatest_of_a_lane", kQuantize, "most = ptx::max(most, ptx::shfl_xor(most, mask));", "",
       "plain"},
      {"quantize_with_scales_of_its_own",
       kQuantize,
       "if (params.scale_given != 0) {",
       "if (params.scale_given > 1) {",
       "given",
       {FaultKind::global_not_writable}},
      {"quantize_without_the_factor", kQuantize, "encode(Code{}, ptx::multiply(x[i], factor))",
       "encode(Code{}, x[i] + 0.f * factor)", "plain"},
      {"quantize_bytes_in_another_order", kQuantize, "<< 8 * i; }", "<< 8 * (i ^ 1); }", "plain"},
      {"quantize_wide_pieces_of_unaligned_rows",
       kQuantize,
       "load_columns<(Config::kAligned ? kOfPiece : 1)>",
       "load_columns<kOfPiece>",
       "unaligned",
       {FaultKind::misaligned}},
      {"mean_of_the_first_rows", kQuantize, "first += kTogether * kRowsOfStep", "first += params.s", "wide"},
      {"mean_of_rows_behind_the_last",
       kQuantize,
       "if (row < params.s) load(x[i]",
       "if (row < params.s + 1) load(x[i]",
       "wide",
       {FaultKind::global_out_of_bounds, FaultKind::global_uninitialised}},
      {"mean_of_one_warp", kQuantize, "warp < Config::kWarps", "warp < 1", "wide"},
      {"mean_of_half_of_the_lanes", kQuantize, "for (int mask = 2; mask < kWarpSize; mask *= 2) part",
       "for (int mask = 4; mask < kWarpSize; mask *= 2) part", "usual"},
      {"mean_before_all_have_summed",
       kQuantize,
       "ptx::sync_threads(); if (thread >= kMeanColumns) return;",
       "if (thread >= kMeanColumns) return;",
       "usual",
       {FaultKind::shared_race, FaultKind::shared_uninitialised}},
      {"mean_is_the_sum", kQuantize, "total / static_cast<float>(params.s)", "total", "usual"},
      {"mean_of_the_first_columns", kQuantize, "block * kMeanColumns + thread % 2 * kColumns;",
       "thread % 2 * kColumns;", "usual"},
  };
  return list;
}

KernelSpec quantized_subject_of(const StatisticsMutation& mutation) {
  const std::vector<KernelSpec> specs = specs_of(quantize_case_named(mutation.subject));
  return mutation.name.starts_with("mean") ? specs.back() : specs.front();
}

}  // namespace emulator
