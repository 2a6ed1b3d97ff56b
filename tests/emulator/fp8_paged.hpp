#ifndef FA_TESTS_EMULATOR_FP8_PAGED_HPP_
#define FA_TESTS_EMULATOR_FP8_PAGED_HPP_

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "emulator/fp8_specs.hpp"
#include "emulator/paged_run.hpp"
#include "plan/kernel_spec.hpp"
#include "support/paged_case.hpp"

/// 8-bit floats over pages.
namespace emulator {

inline constexpr std::size_t kFp8PagedBatches = 3;

/// Prefills, chunks of them and decodes; requests without rows or keys, of one key, of whole pages.
inline fa::test::PagedCase fp8_paged_case(const fa::plan::KernelSpec& spec, std::size_t batch, bool scaled) {
  const Fp8Facts own = fp8_facts(spec);
  fa::test::PagedCase c;
  c.attention.dtype = spec.dtype;
  c.attention.o_dtype = own.byte_output ? fa::DType::e4m3 : own.half_output ? fa::DType::f16 : fa::DType::bf16;
  c.attention.d_qk = spec.d_qk;
  c.attention.d_v = spec.d_v;
  c.attention.causal = spec.causal;
  c.attention.h_q = 4;
  c.attention.h_kv = 2;
  c.attention.seed = 21 + batch;
  c.attention.layout = batch == 0 ? fa::test::Layout::bhsd : fa::test::Layout::bshd;
  c.page_size = spec.page_size;
  c.packed = spec.varlen;
  c.indexed = batch == 1;
  c.bounded = batch != 1;
  c.scaled = scaled || own.key_scales || spec.dtype == fa::DType::i8;
  c.key_scales = own.key_scales;
  c.value_scales = own.value_scales;
  const std::int32_t page = std::max(spec.page_size, 32);
  const std::vector<std::int32_t> keys[kFp8PagedBatches] = {
      {37, 80, 5, 0, 64, 3}, {2 * page, 190, 1, page + 1, 33}, {1, 100, 47, 96}};
  const std::vector<std::int32_t> rows[kFp8PagedBatches] = {{37, 20, 1, 1, 4, 5}, {1, 145, 1, 0, 3}, {1, 1, 1, 1}};
  c.keys = keys[batch];
  c.rows =
      c.packed ? rows[batch] : std::vector<std::int32_t>(c.keys.size(), std::array<std::int32_t, 3>{1, 75, 4}[batch]);
  return c;
}

/// The worst error of O, as a multiple of what rounding allows, and of LSE.
struct Fp8PagedErrors {
  double o = 0, lse = 0;
};

inline Fp8PagedErrors fp8_paged_errors(const fa::plan::KernelSpec& spec, const fa::test::PagedCase& c,
                                       const fa::test::PagedData& data, const fa::test::AttentionOutputs& actual) {
  fa::test::PagedData magnitudes = data;
  for (fa::test::HostTensor* const tensor : {&magnitudes.v, &magnitudes.v_scale}) {
    if (tensor->bytes().empty()) continue;
    const fa::TensorView view = tensor->view();
    for_each_row(view.shape[0], view.shape[1], view.shape[2], [&](std::int64_t b, std::int64_t h, std::int64_t s) {
      for (std::int64_t d = 0; d < (view.rank == 4 ? view.shape[3] : 1); ++d) {
        tensor->set(b, h, s, d, std::abs(tensor->at(b, h, s, d)));
      }
    });
  }
  const fa::test::AttentionOutputs expected = reference_f64(c, data), terms = reference_f64(c, magnitudes);
  const double of_row = fp8_facts(spec).precise ? 0x1p-11 + 0x1p-8 : 0x1p-4 + 0x1p-6;
  const bool bytes = c.attention.o_dtype == fa::DType::e4m3;
  Fp8PagedErrors errors;
  errors.lse = worst_of(c, data, actual.lse, expected.lse);
  const fa::TensorView view = expected.o.view();
  std::vector<bool> taken(static_cast<std::size_t>(view.shape[2]), !c.packed);
  for (std::size_t i = 0; c.packed && i < c.rows.size(); ++i) {
    for (std::int32_t row = 0; row < c.rows[i]; ++row) taken[static_cast<std::size_t>(data.cu_q[i] + row)] = true;
  }
  for_each_row(view.shape[0], view.shape[1], view.shape[2], [&](std::int64_t b, std::int64_t h, std::int64_t s) {
    for (std::int64_t d = 0; taken[static_cast<std::size_t>(s)] && d < view.shape[3]; ++d) {
      const double o = expected.o.at(b, h, s, d);
      const double error = std::abs(actual.o.at(b, h, s, d) - o);
      const double of_p = of_row * terms.o.at(b, h, s, d);
      const double allowed = of_p + (bytes ? 0x1p-4 * (std::abs(o) + of_p) + 0x1p-10 : 0x1p-8 * std::abs(o)) + 1e-6;
      errors.o = std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(errors.o, error / allowed);
    }
  });
  return errors;
}

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_FP8_PAGED_HPP_
