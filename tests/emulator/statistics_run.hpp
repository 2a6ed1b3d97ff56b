#ifndef FA_TESTS_EMULATOR_STATISTICS_RUN_HPP_
#define FA_TESTS_EMULATOR_STATISTICS_RUN_HPP_

#include <cstdint>
#include <string>

#include "emulator/statistics_specs.hpp"

namespace emulator {

using fa::test::StatisticsData;
using fa::test::StatisticsResults;

/// On the emulator; `kernel` and `sums`: registered names of the attention kernel and that for column sums, if not
/// their specs'.
StatisticsResults run_statistics(const StatisticsCase& c, const StatisticsData& data, std::uint64_t seed,
                                 const std::string& kernel = {}, const std::string& sums = {});

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_STATISTICS_RUN_HPP_
