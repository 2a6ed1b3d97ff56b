#ifndef FA_TESTS_UNIT_API_NORMALS_HPP_
#define FA_TESTS_UNIT_API_NORMALS_HPP_

#include <cstdint>
#include <random>
#include <vector>

namespace fa::test {

/// Numbers of a standard normal distribution, the same for the same seed.
inline std::vector<double> normals(std::int64_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  std::vector<double> values(static_cast<std::size_t>(count));
  for (double& value : values) value = normal(generator);
  return values;
}

}  // namespace fa::test

#endif  // FA_TESTS_UNIT_API_NORMALS_HPP_
