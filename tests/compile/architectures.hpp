#ifndef FA_TESTS_COMPILE_ARCHITECTURES_HPP_
#define FA_TESTS_COMPILE_ARCHITECTURES_HPP_

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>

#include "support/thorough.hpp"

namespace fa::test {

inline constexpr std::array kArchitectures{"sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"};

/// Whether `architecture` has a turn at case `n`: a quick run compiles each case for one of them, and later cases for
/// others than a period before.
inline bool has_turn(std::string_view architecture, std::size_t n) {
  const auto at = std::ranges::find(kArchitectures, architecture) - kArchitectures.begin();
  return tries(n + n / kArchitectures.size() + static_cast<std::size_t>(at), kArchitectures.size());
}

}  // namespace fa::test

#endif  // FA_TESTS_COMPILE_ARCHITECTURES_HPP_
