#include "emulator/sm80_fp8_specs.hpp"

#include <span>
#include <stdexcept>

#include <fa/paged.hpp>

#include "plan/sm80_fp8_forward.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::plan::KernelSpec;

struct Shape {
  DType dtype;
  int d_qk, d_v, tile_m, tile_n, warps, stages;
  bool causal, q_in_registers, half_output, pack_gqa;
  bool byte_output = false;
  bool key_scales = false;
  bool value_scales = false;
  bool split = false;
  bool single_level = false;
  bool bounded = false;
  int page_size = 0;
  bool varlen = false;
};

constexpr Shape kShapes[] = {
    {DType::e4m3, 64, 64, 64, 64, 4, 1, true, false, false, false},  // mutants
    {DType::e4m3, 128, 128, 64, 96, 4, 1, true, true, false, false},
    {DType::e4m3, 64, 64, 128, 64, 4, 1, false, false, true, false},
    {DType::e5m2, 80, 48, 64, 32, 2, 2, true, false, false, true},
    {DType::e4m3, 256, 256, 64, 32, 4, 1, false, false, false, false},
    {DType::e4m3, 48, 112, 64, 64, 2, 3, true, true, false, false, true},
    {DType::e5m2, 64, 96, 32, 64, 1, 1, false, true, true, false, false, true},
    {DType::e4m3, 64, 64, 64, 64, 4, 2, true, false, false, false, false, true, true},  // mutants
    {DType::e5m2, 16, 16, 16, 96, 1, 1, true, false, false, true, true, false, true},
    {DType::e4m3, 64, 64, 64, 64, 4, 2, true, false, false, true, false, false, false, true},  // mutants
    {DType::e4m3, 96, 64, 64, 32, 4, 4, false, true, false, false, true, true, true, true},
    {DType::e4m3, 64, 64, 64, 128, 4, 1, false, false, false, false, false, false, false, false, true},
    {DType::e4m3, 64, 80, 64, 64, 4, 2, true, true, false, true, false, false, false, false, false, true},
};
constexpr std::size_t kOfScales = 7, kOfSplits = 9;

constexpr Shape kPackedShapes[] = {
    {DType::e4m3, 64, 64, 64, 64, 4, 1, true, false, false, false},
    {DType::e5m2, 48, 80, 64, 32, 2, 2, false, true, true, true},
    {DType::e4m3, 128, 96, 64, 64, 4, 2, true, true, false, true, true, true, true},  // mutants
};
constexpr std::size_t kOfPackedScales = 2;

constexpr Shape kPagedShapes[] = {
    {DType::e4m3, 64, 64, 64, 64, 4, 2, true, false, false, false, false, true, true, false, false, false, 16, true},
    {DType::e4m3, 128, 128, 64, 64, 4, 1, true, false, false, true, false, false, false, false, false, false, 64},
    {DType::e5m2, 48, 80, 32, 96, 2, 1, false, true, true, true, false, false, true, false, false, false, 5, true},
    {DType::e4m3, 64, 96, 64, 64, 4, 1, true, false, false, false, true, true, false, false, false, false,
     static_cast<int>(fa::kContiguous)},
};

KernelSpec spec_of(const Shape& shape, bool varlen) {
  KernelSpec spec;
  auto& own = spec.own.emplace<fa::plan::Sm80Fp8Forward>();
  spec.arch = {8, 9, '\0'};
  spec.dtype = shape.dtype;
  spec.d_qk = shape.d_qk;
  spec.d_v = shape.d_v;
  spec.tile_m = shape.tile_m;
  spec.tile_n = shape.tile_n;
  spec.warps = shape.warps;
  spec.stages = shape.stages;
  spec.causal = shape.causal;
  spec.pack_gqa = shape.pack_gqa;
  spec.split = shape.split;
  spec.bounded = shape.bounded;
  spec.page_size = shape.page_size;
  spec.varlen = varlen || shape.varlen;
  own.q_in_registers = shape.q_in_registers;
  own.half_output = shape.half_output;
  own.byte_output = shape.byte_output;
  own.key_scales = shape.key_scales;
  own.value_scales = shape.value_scales;
  own.single_level = shape.single_level;
  const std::string refusal = fa::plan::sm80_fp8_forward_refusal(spec);
  if (!refusal.empty()) throw std::logic_error(refusal);
  return spec;
}

std::vector<KernelSpec> specs_of(std::span<const Shape> shapes, bool varlen) {
  std::vector<KernelSpec> found;
  for (const Shape& shape : shapes) found.push_back(spec_of(shape, varlen));
  return found;
}

constexpr const char* kFp8 = "sm80/sm80_fp8.cuh";
constexpr const char* kStored = "sm80/sm80_stored.cuh";
constexpr const char* kEpilogue = "sm80/sm80_forward_epilogue.cuh";
constexpr const char* kSoftmax = "common/online_softmax.cuh";
constexpr const char* kProducts = "sm80/sm80_products.cuh";

/// V, P and the order that both have.
std::vector<Fp8Mutation> operand_mutations(std::size_t dense) {
  return {
      {"mma_fp8_columns_of_v_exchanged", kFp8, "odd == 0 ? 0x6420 : 0x7531", "odd != 0 ? 0x6420 : 0x7531", {}, dense},
      {"mma_fp8_keys_of_v_exchanged",
       kFp8,
       "b0 = ptx::prmt(b[0], b[1], selector)",
       "b0 = ptx::prmt(b[1], b[0], selector)",
       {},
       dense},
      {"mma_fp8_keys_of_another_step", kFp8, "VTile::offset(32 * k, 8 * n)", "VTile::offset(0, 8 * n)", {}, dense},
      {"mma_fp8_rows_of_p_exchanged", kFp8, "const int r = i % 2 * 2;", "const int r = (1 - i % 2) * 2;", {}, dense},
      {"mma_fp8_keys_of_p_exchanged",
       kFp8,
       "ptx::convert_e4m3(low[r], low[r + 1], high[r], high[r + 1])",
       "ptx::convert_e4m3(low[r], high[r], low[r + 1], high[r + 1])",
       {},
       dense},
      {"mma_fp8_half_step_reads_the_whole",
       kProducts,
       "ptx::mma_m16n8k32<T, T>(d, first, b, 0);",
       "ptx::mma_m16n8k32<T, T>(d, first, b, b); ptx::mma_m16n8k32<T, T>(d, first, b, 0);",
       {},
       dense + 3},
      {"mma_fp8_added_twice",
       kFp8,
       "if constexpr (!kSingleLevel) add(o, added, n, factor);",
       "if constexpr (!kSingleLevel) { add(o, added, n, factor); add(o, added, n, factor); }",
       {},
       dense},
      {"mma_fp8_output_columns_as_of_16_bits",
       kEpilogue,
       "{even[2 * r] * factor, odd[2 * r] * factor,",
       "{even[2 * r] * factor, even[2 * r + 1] * factor,",
       {},
       dense},
      {"mma_fp8_partial_columns_of_another_lane",
       kEpilogue,
       "target + 8 * n + 4 * (f.lane % 4)",
       "target + 8 * n + 4 * (3 - f.lane % 4)",
       {},
       dense + kOfSplits}};
}

/// Scales, and what P is times.
std::vector<Fp8Mutation> scale_mutations(const Fp8Places& places) {
  using enum FaultKind;
  const std::size_t dense = places.dense, scales = dense + kOfScales;
  return {{"mma_fp8_scale_of_another_row", kFp8, "s[m][n][e] *= of[m][e / 2];", "s[m][n][e] *= of[m][0];", {}, dense},
          {"mma_fp8_scale_of_k_left_out", kFp8, "of[m][r] = key;", "of[m][r] = key == key ? 1.f : key;", {}, dense},
          {"mma_fp8_scale_of_v_left_out",
           kEpilogue,
           "softmax.inverse_sum(m, r) * f.row_scales.value(f)",
           "softmax.inverse_sum(m, r)",
           {},
           dense},
          {"mma_fp8_scales_of_rows_that_are_not_there",
           kFp8,
           "if (scales.q == nullptr || row >= f.row_count) continue;",
           "if (scales.q == nullptr) continue;",
           {global_out_of_bounds, global_uninitialised},
           dense},
          {"mma_fp8_greatest_scale_of_one_lane",
           kStored,
           "most = ptx::max(most, ptx::shfl_xor(most, mask));",
           "most = ptx::max(most, 0.f);",
           {},
           scales},
          {"mma_fp8_greatest_scale_is_lost", kStored, "return any ? most : 0.f;", "return 1.f;", {}, scales},
          {"mma_fp8_scales_of_keys_not_relative",
           kStored,
           "multiply(p, of_v(stage), any ? inverse : 0.f);",
           "multiply(p, of_v(stage), 1.f);",
           {},
           scales},
          {"mma_fp8_packed_scales_of_the_first_sequence",
           kStored,
           "int64_t at = f.first_key(stride_b, stride_s) + key * stride_s;",
           "int64_t at = f.tile.batch * stride_b + key * stride_s;",
           {global_out_of_bounds, global_uninitialised},
           places.packed + kOfPackedScales},
          {"mma_fp8_scales_of_another_page",
           kStored,
           "at = page * stride_b + keys.row_in_page(key) * stride_s;",
           "at = page * stride_b;",
           {},
           places.paged}};
}

/// P is 2^8 times what it is elsewhere.
std::vector<Fp8Mutation> softmax_mutations(std::size_t dense) {
  return {{"mma_fp8_probabilities_up_to_1",
           "sm80/sm80_forward_traits.cuh",
           "OnlineSoftmax<kMTiles, false, 8>",
           "OnlineSoftmax<kMTiles, false, 9>",  // saturates
           {},
           dense},
          {"mma_fp8_shift_left_out_of_the_exponent",
           kSoftmax,
           "s[n][e] = ptx::ex2(ptx::fma(s[n][e], scale_log2, -offset));",
           "s[n][e] = ptx::ex2(ptx::fma(s[n][e], scale_log2, -offset - 8.f));",  // subnormal bytes
           {},
           dense}};
}

}  // namespace

const std::vector<KernelSpec>& sm80_fp8_specs() {
  static const std::vector<KernelSpec> specs = specs_of(kShapes, false);
  return specs;
}

const std::vector<KernelSpec>& sm80_fp8_packed_specs() {
  static const std::vector<KernelSpec> specs = specs_of(kPackedShapes, true);
  return specs;
}

const std::vector<KernelSpec>& sm80_fp8_paged_specs() {
  static const std::vector<KernelSpec> specs = specs_of(kPagedShapes, false);
  return specs;
}

std::vector<Fp8Mutation> sm80_fp8_mutations(const Fp8Places& places) {
  std::vector<Fp8Mutation> all = operand_mutations(places.dense);
  for (const auto& more : {scale_mutations(places), softmax_mutations(places.dense)}) {
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

}  // namespace emulator
