#pragma once

#include <array>
#include <cstddef>
#include <cstdlib>
#include <span>
#include <string_view>

namespace fa::test {

/// Whether a run takes the time for every combination: with FA_TESTS=thorough, which `tools/test.sh --full` sets.
inline bool thorough() {
  const char* const wanted = std::getenv("FA_TESTS");
  return wanted != nullptr && std::string_view(wanted) == "thorough";
}

/// What case `index` of a test tries of `all`: everything in a thorough run, else one, which goes round with the index.
template <class T, std::size_t n>
std::span<const T> tried(const std::array<T, n>& all, std::size_t index) {
  return thorough() ? std::span<const T>(all) : std::span<const T>(all).subspan(index % n, 1);
}

/// Whether a run tries case `index`: a thorough one all, others every `of`-th.
inline bool tries(std::size_t index, std::size_t of) {
  return thorough() || index % of == 0;
}

}  // namespace fa::test
