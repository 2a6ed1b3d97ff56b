#ifndef FA_SRC_PARALLEL_TIMEOUT_HPP_
#define FA_SRC_PARALLEL_TIMEOUT_HPP_

#include <algorithm>
#include <chrono>

#include "parallel/errors.hpp"

namespace fa::parallel {

/// A bound that clocks can count to: a year stands for more.
inline std::chrono::milliseconds checked_timeout(std::chrono::milliseconds given) {
  if (given.count() <= 0) throw_invalid("timeout", given.count(), "1 ms or more");
  return std::min<std::chrono::milliseconds>(given, std::chrono::hours(24 * 365));
}

}  // namespace fa::parallel

#endif  // FA_SRC_PARALLEL_TIMEOUT_HPP_
