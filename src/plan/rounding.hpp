#ifndef FA_SRC_PLAN_ROUNDING_HPP_
#define FA_SRC_PLAN_ROUNDING_HPP_

#include <cstdint>

namespace fa::plan {

/// How many parts of `b` hold `a` that are not negative.
constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) noexcept {
  return (a + b - 1) / b;
}

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_ROUNDING_HPP_
