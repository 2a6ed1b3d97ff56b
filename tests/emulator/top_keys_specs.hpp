#ifndef FA_TESTS_EMULATOR_TOP_KEYS_SPECS_HPP_
#define FA_TESTS_EMULATOR_TOP_KEYS_SPECS_HPP_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "emulator/statistics_specs.hpp"

namespace emulator {

/// Rows of sums, and how many keys are wanted of each.
struct TopKeysCase {
  std::string name;
  float (*sum)(std::size_t i) = nullptr;  ///< of element i of the tensor
  int count = 5;
  std::int64_t b = 2, h = 2, s_kv = 100;
  std::vector<std::int32_t> cu_q = {}, cu_kv = {}, used_kv = {};  ///< of a packed batch, whose rows of keys s_kv counts
  std::int64_t first = 0;                                         ///< elements from a multiple of 16 bytes
  std::vector<std::int32_t> begin = {};  ///< of requests over a KV cache, whose keys used_kv counts

  bool of_requests() const { return !used_kv.empty() && !packed(); }
  bool packed() const { return !cu_kv.empty(); }
  std::int64_t sequences() const { return packed() ? static_cast<std::int64_t>(cu_kv.size()) - 1 : b; }
};

const std::vector<TopKeysCase>& top_keys_cases();
const TopKeysCase& top_keys_case_named(const std::string& name);

fa::plan::Problem problem_of(const TopKeysCase& c);
std::vector<fa::plan::KernelSpec> all_top_keys_specs();

/// Mistakes; `of` names a case.
const std::vector<StatisticsMutation>& top_keys_mutations();
fa::plan::KernelSpec top_keys_subject_of(const StatisticsMutation& mutation);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_TOP_KEYS_SPECS_HPP_
