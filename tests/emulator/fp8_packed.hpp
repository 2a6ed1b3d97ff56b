#ifndef FA_TESTS_EMULATOR_FP8_PACKED_HPP_
#define FA_TESTS_EMULATOR_FP8_PACKED_HPP_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "emulator/fp8_specs.hpp"
#include "emulator/packed_run.hpp"
#include "plan/kernel_spec.hpp"
#include "support/attention_case.hpp"

/// Packed batches of 8-bit floats.
namespace emulator {

inline constexpr std::size_t kFp8Batches = 3;

/// No rows, no keys, more than a tile; rows and keys that are not used, some before all sequences.
inline Sequences fp8_sequences(std::size_t batch) {
  const std::vector<std::int32_t> rows[kFp8Batches] = {{5, 0, 150, 1, 20}, {64, 1, 33}, {40, 12, 8}};
  const std::vector<std::int32_t> keys[kFp8Batches] = {{9, 20, 170, 3, 0}, {64, 130, 200}, {35, 50, 108}};
  Sequences sequences;
  for (const auto& [lengths, cu] :
       {std::pair{&rows[batch], &sequences.cu_q}, std::pair{&keys[batch], &sequences.cu_kv}}) {
    cu->push_back(0);
    for (const std::int32_t length : *lengths) cu->push_back(cu->back() + length);
  }
  if (batch != 2) return sequences;
  sequences.used_q = {33, 0, 8};
  sequences.used_kv = {17, 50, 103};
  for (std::int32_t& at : sequences.cu_q) at += 3;
  for (std::int32_t& at : sequences.cu_kv) at += 5;
  return sequences;
}

inline PackedCase fp8_packed_case(const fa::plan::KernelSpec& spec, std::size_t batch) {
  const Fp8Facts own = fp8_facts(spec);
  PackedCase c;
  c.attention.dtype = spec.dtype;
  c.attention.o_dtype = own.byte_output ? fa::DType::e4m3 : own.half_output ? fa::DType::f16 : fa::DType::bf16;
  c.attention.d_qk = spec.d_qk;
  c.attention.d_v = spec.d_v;
  c.attention.causal = spec.causal;
  c.attention.h_q = 4;
  c.attention.h_kv = 2;
  c.attention.seed = 3 + batch;
  c.sequences = fp8_sequences(batch);
  c.attention.s_q = c.sequences->cu_q.back() + 2;
  c.attention.s_kv = c.sequences->cu_kv.back() + 4;
  if (batch == 0) {  // the lengths of the longest ones are known
    c.max_s_q = 150;
    c.max_s_kv = 170;
  }
  return c;
}

/// With scales of rows of q, and of the heads, or keys, of k and the heads of v of each sequence.
inline fa::test::AttentionInputs fp8_packed_inputs(const fa::plan::KernelSpec& spec, const PackedCase& c, bool scaled) {
  fa::test::AttentionInputs inputs = fa::test::make_inputs(c.attention);
  if (!scaled && spec.dtype != fa::DType::i8) return inputs;
  fa::test::add_scales(c.attention, inputs);
  fa::test::AttentionCase of_sequences = c.attention;
  of_sequences.b = c.sequences->count();
  fa::test::AttentionInputs scales;
  fa::test::add_scales(of_sequences, scales);
  inputs.k_scale = std::move(scales.k_scale);
  inputs.v_scale = std::move(scales.v_scale);
  if (fp8_facts(spec).key_scales) fa::test::add_key_scales(c.attention, inputs);
  if (fp8_facts(spec).value_scales) fa::test::add_value_scales(c.attention, inputs);
  return inputs;
}

struct Fp8PackedErrors {
  double o = 0;  ///< the worst, as a multiple of what rounding allows
  double lse = 0;
};

/// Of rows of sequences. P is rounded to e4m3, or to f16, and O to e4m3 where it is of that.
inline Fp8PackedErrors fp8_packed_errors(const PackedCase& c, const fa::test::AttentionInputs& inputs,
                                         const fa::test::AttentionOutputs& actual, bool precise = false) {
  fa::test::AttentionInputs magnitudes = inputs;
  for (fa::test::HostTensor* tensor : {&magnitudes.v, &magnitudes.v_scale}) {
    if (tensor->bytes().empty()) continue;
    const fa::TensorView view = tensor->view();
    for_each_row(view.shape[0], view.shape[1], view.shape[2], [&](std::int64_t b, std::int64_t h, std::int64_t s) {
      for (std::int64_t d = 0; d < (view.rank == 4 ? view.shape[3] : 1); ++d) {
        tensor->set(b, h, s, d, std::abs(tensor->at(b, h, s, d)));
      }
    });
  }
  const fa::test::AttentionOutputs expected = expected_of(c, inputs), terms = expected_of(c, magnitudes);
  const bool bytes = c.attention.o_dtype == fa::DType::e4m3;
  Fp8PackedErrors errors;
  for (std::int64_t i = 0; i < c.sequences->count(); ++i) {
    const auto n = static_cast<std::size_t>(i);
    const std::vector<std::int32_t>& cu = c.sequences->cu_q;
    const std::int32_t count = c.sequences->used_q.empty() ? cu[n + 1] - cu[n] : c.sequences->used_q[n];
    for_each_row(1, c.attention.h_q, count, [&](std::int64_t, std::int64_t h, std::int64_t row) {
      const std::int64_t s = cu[n] + row;
      const double lse = expected.lse.at(0, h, s);
      if (actual.lse.at(0, h, s) != lse) errors.lse = std::max(errors.lse, std::abs(actual.lse.at(0, h, s) - lse));
      for (std::int64_t d = 0; d < c.attention.d_v; ++d) {
        const double o = expected.o.at(0, h, s, d);
        const double error = std::abs(actual.o.at(0, h, s, d) - o);
        const double of_p = (precise ? 0x1p-11 + 0x1p-8 : 0x1p-4 + 0x1p-6) * terms.o.at(0, h, s, d);
        const double allowed = of_p + (bytes ? 0x1p-4 * (std::abs(o) + of_p) + 0x1p-10 : 0x1p-8 * std::abs(o)) + 1e-6;
        errors.o = std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(errors.o, error / allowed);
      }
    });
  }
  return errors;
}

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_FP8_PACKED_HPP_
