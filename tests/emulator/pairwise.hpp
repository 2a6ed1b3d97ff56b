#ifndef FA_TESTS_EMULATOR_PAIRWISE_HPP_
#define FA_TESTS_EMULATOR_PAIRWISE_HPP_

#include <cstddef>
#include <functional>
#include <vector>

namespace emulator {

/// One level for each factor.
using Row = std::vector<std::size_t>;

/// Rows in which every two levels of different factors that `valid` allows together meet at least once, found greedily
/// and the same on every machine. `levels` gives the number of levels of each factor.
std::vector<Row> pairwise_cover(const std::vector<std::size_t>& levels, const std::function<bool(const Row&)>& valid);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_PAIRWISE_HPP_
