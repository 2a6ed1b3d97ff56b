#ifndef FA_TESTS_EMULATOR_PAGED_SUMS_SPECS_HPP_
#define FA_TESTS_EMULATOR_PAGED_SUMS_SPECS_HPP_

#include <string>
#include <vector>

#include "emulator/statistics_specs.hpp"
#include "support/paged_case.hpp"

namespace emulator {

/// Column sums, and top keys, of requests over a KV cache.
struct PagedSumsCase {
  std::string name;
  fa::test::PagedCase of;
  bool without_sums = false;  ///< the call leaves column_sums out
};

const std::vector<PagedSumsCase>& paged_sums_cases();
const PagedSumsCase& paged_sums_case_named(const std::string& name);

/// The forward, the pass for column sums and the search for top keys. `data` is the case's.
fa::plan::ForwardPlan plan_of(const PagedSumsCase& c, const fa::test::PagedData& data);
std::vector<fa::plan::KernelSpec> all_paged_sums_specs();

/// Mistakes in the pass for column sums.
const std::vector<StatisticsMutation>& paged_sums_mutations();
fa::plan::KernelSpec paged_sums_subject_of(const StatisticsMutation& mutation);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_PAGED_SUMS_SPECS_HPP_
