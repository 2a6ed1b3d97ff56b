#ifndef FA_TESTS_EMULATOR_STATISTICS_SPECS_HPP_
#define FA_TESTS_EMULATOR_STATISTICS_SPECS_HPP_

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "emulator/fault.hpp"
#include "plan/call_plan.hpp"
#include "plan/kernel_spec.hpp"
#include "plan/planner.hpp"
#include "support/statistics_case.hpp"
#include "support/statistics_gradients.hpp"

namespace emulator {

using fa::test::StatisticsCase;
using fa::test::StatisticsGradientCase;

/// With small kernels.
const std::vector<StatisticsCase>& statistics_cases();

/// `variant` is the case's, and outlives the problem.
fa::plan::Problem problem_of(const StatisticsCase& c, const fa::test::VariantCase& variant);
fa::plan::ForwardPlan plan_of(const StatisticsCase& c);

/// Backwards that are given gradients of statistics, and the kernels of one.
const std::vector<StatisticsGradientCase>& gradient_cases();
const StatisticsGradientCase* gradient_case_named(const std::string& name);  ///< nullptr when there is none
fa::plan::KernelSet gradient_kernels(const StatisticsGradientCase& c, const fa::test::VariantCase& variant);

/// All kernels of the cases, each once.
std::vector<fa::plan::KernelSpec> all_statistics_specs();

/// A mistake in a kernel of a case, and the faults that may name it; empty: results are wrong.
struct StatisticsMutation {
  std::string name;
  std::string header;
  std::string before;
  std::string after;
  std::string subject;  ///< name of a case
  std::set<FaultKind> faults = {};
  int count = 1;
};
const std::vector<StatisticsMutation>& statistics_mutations();
bool is_of_sums(const StatisticsMutation& mutation);  ///< the kernel is that for column sums
fa::plan::KernelSpec subject_of(const StatisticsMutation& mutation);
fa::plan::Role role_of(const StatisticsMutation& mutation);  ///< of a backward's kernel that has the header
const StatisticsCase& case_named(const std::string& name);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_STATISTICS_SPECS_HPP_
