#ifndef FA_TESTS_SUPPORT_THOROUGH_HPP_
#define FA_TESTS_SUPPORT_THOROUGH_HPP_

#include <array>
#include <bit>
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

/// Whether kind `kind` of `kinds` tries case `index`: a thorough run tries all, others one of them. Which one it is
/// goes with no bit of the index, so that each of loops within loops meets all kinds.
inline bool alternates(std::size_t index, std::size_t kind, std::size_t kinds = 2) {
  return thorough() || static_cast<std::size_t>(std::popcount(index)) % kinds == kind;
}

/// Whether a run tries case `index`: a thorough one all, others every `of`-th.
inline bool tries(std::size_t index, std::size_t of) {
  return thorough() || index % of == 0;
}

/// Whether sanitizers watch, which makes code several times slower.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

/// Of cases that a build without sanitizers tries one and all: under sanitizers, where not thorough, every eighth. What
/// the results are, the other build sees; neighbours use memory alike.
inline bool tries_watched(std::size_t index) {
  return !kSanitized || tries(index, 8);
}

}  // namespace fa::test

#endif  // FA_TESTS_SUPPORT_THOROUGH_HPP_
