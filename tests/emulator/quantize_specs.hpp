#ifndef FA_TESTS_EMULATOR_QUANTIZE_SPECS_HPP_
#define FA_TESTS_EMULATOR_QUANTIZE_SPECS_HPP_

#include <cstdint>
#include <string>
#include <vector>

#include "emulator/statistics_specs.hpp"
#include "plan/quantize.hpp"

namespace emulator {

/// A call of quantize: q, and k with what is subtracted from it.
struct QuantizeCase {
  std::string name;
  fa::DType dtype = fa::DType::bf16;  ///< of q and k
  fa::DType codes = fa::DType::i8;
  std::int64_t b = 1, h_q = 2, h_kv = 1, s_q = 5, s_kv = 9, d = 32;
  bool aligned = true;
  bool smooths = true;      ///< K less its mean
  bool mean_given = false;  ///< likewise, a given one
  bool scales_given = false;
};

const std::vector<QuantizeCase>& quantize_cases();
const QuantizeCase& quantize_case_named(const std::string& name);

/// The kernels of a case: of means, where it takes any, and of rows.
std::vector<fa::plan::KernelSpec> specs_of(const QuantizeCase& c);
std::vector<fa::plan::KernelSpec> all_quantize_specs();

/// Mistakes; `of` names a case.
const std::vector<StatisticsMutation>& quantize_mutations();
fa::plan::KernelSpec quantized_subject_of(const StatisticsMutation& mutation);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_QUANTIZE_SPECS_HPP_
