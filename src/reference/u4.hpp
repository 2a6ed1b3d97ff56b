#ifndef FA_SRC_REFERENCE_U4_HPP_
#define FA_SRC_REFERENCE_U4_HPP_

#include <cstddef>
#include <cstdint>

#include <fa/tensor.hpp>

#include "reference/convert.hpp"

namespace fa::reference {

/// Where the code of a column is in a row of u4x2: which byte, and from which bit on. Of eight columns the even ones
/// are in the first two bytes, the odd ones in the last two.
struct U4Place {
  std::int64_t byte;
  int shift;
};
constexpr U4Place u4_place(std::int64_t column) noexcept {
  const std::int64_t in_word = column % 8;
  return {column / 8 * 4 + in_word % 2 * 2 + in_word / 4, static_cast<int>(in_word / 2 % 2 * 4)};
}

constexpr int u4_code(const std::byte* row, std::int64_t column) noexcept {
  const U4Place place = u4_place(column);
  return static_cast<int>(row[place.byte]) >> place.shift & 15;
}
constexpr void set_u4_code(std::byte* row, std::int64_t column, int code) noexcept {
  const U4Place place = u4_place(column);
  const auto others = static_cast<int>(row[place.byte]) & ~(15 << place.shift);
  row[place.byte] = static_cast<std::byte>(others | code << place.shift);
}

/// The number of f16 or bf16 that is nearest to x.
inline double round_to(DType dtype, double x) {
  return dtype == DType::f16 ? decode_f16(encode_f16(x)) : decode_bf16(encode_bf16(x));
}

}  // namespace fa::reference

#endif  // FA_SRC_REFERENCE_U4_HPP_
