#ifndef FA_TESTS_SUPPORT_PACKED_CODES_HPP_
#define FA_TESTS_SUPPORT_PACKED_CODES_HPP_

#include <cstddef>
#include <cstdint>
#include <cstring>

/// Codes of u4x2 as its documentation has them: of eight columns, a word of 32 bits, the even ones are in its lower
/// half from the lowest bits on, the odd ones in its upper half.
namespace fa::test {

constexpr int bit_of_code(std::int64_t column) {
  return static_cast<int>(column % 2 * 16 + column % 8 / 2 * 4);
}

inline int packed_code(const std::byte* row, std::int64_t column) {
  std::uint32_t word = 0;
  std::memcpy(&word, row + column / 8 * 4, sizeof word);
  return static_cast<int>(word >> bit_of_code(column) & 15U);
}

inline void set_packed_code(std::byte* row, std::int64_t column, int code) {
  std::uint32_t word = 0;
  std::memcpy(&word, row + column / 8 * 4, sizeof word);
  word = (word & ~(15U << bit_of_code(column))) | static_cast<std::uint32_t>(code) << bit_of_code(column);
  std::memcpy(row + column / 8 * 4, &word, sizeof word);
}

}  // namespace fa::test

#endif  // FA_TESTS_SUPPORT_PACKED_CODES_HPP_
