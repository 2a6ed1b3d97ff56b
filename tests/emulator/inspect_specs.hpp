#ifndef FA_TESTS_EMULATOR_INSPECT_SPECS_HPP_
#define FA_TESTS_EMULATOR_INSPECT_SPECS_HPP_

#include <string>
#include <vector>

#include "emulator/statistics_specs.hpp"
#include "plan/inspect.hpp"

namespace emulator {

/// A forward whose P is written, by query head `h` of batch entry `b`.
struct DumpCase {
  StatisticsCase of;
  std::int64_t b = 0;
  std::int64_t h = 0;
};
const std::vector<DumpCase>& dump_cases();
const DumpCase& dump_case_named(const std::string& name);

/// `variant` is the case's, and outlives the problem.
fa::plan::Problem problem_of(const DumpCase& c, const fa::test::VariantCase& variant);
fa::plan::KernelSpec spec_of(const DumpCase& c);
fa::plan::KernelSpec scan_spec();

/// The kernels of debug calls, each once.
std::vector<fa::plan::KernelSpec> all_inspect_specs();

/// Mistakes in them. Those of the kernel that scans results have no subject.
const std::vector<StatisticsMutation>& inspect_mutations();
fa::plan::KernelSpec inspected_subject_of(const StatisticsMutation& mutation);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_INSPECT_SPECS_HPP_
