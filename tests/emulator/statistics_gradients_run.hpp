#ifndef FA_TESTS_EMULATOR_STATISTICS_GRADIENTS_RUN_HPP_
#define FA_TESTS_EMULATOR_STATISTICS_GRADIENTS_RUN_HPP_

#include <cstdint>
#include <string>

#include "emulator/statistics_specs.hpp"
#include "plan/call_plan.hpp"
#include "support/statistics_gradients.hpp"

namespace emulator {

using fa::test::StatisticsGradientData;
using fa::test::StatisticsGradientResults;

/// On the emulator; `mutant`: the registered name of the kernel of `role`, if not its spec's.
StatisticsGradientResults run_statistics_gradients(const StatisticsGradientCase& c, const StatisticsGradientData& data,
                                                   std::uint64_t seed, const std::string& mutant = {},
                                                   fa::plan::Role role = fa::plan::Role::attention);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_STATISTICS_GRADIENTS_RUN_HPP_
