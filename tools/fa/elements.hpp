#ifndef FA_TOOLS_FA_ELEMENTS_HPP_
#define FA_TOOLS_FA_ELEMENTS_HPP_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <fa/tensor.hpp>

#include "reference/convert.hpp"

namespace fa::cli {

/// Element `index` of densely packed memory, exact.
inline double load_element(const void* data, DType dtype, std::size_t index) {
  const auto read = [&]<typename T>(T value) {
    std::memcpy(&value, static_cast<const std::byte*>(data) + index * sizeof(T), sizeof(T));
    return value;
  };
  switch (dtype) {
    case DType::f16:
      return reference::decode_f16(read(std::uint16_t{}));
    case DType::bf16:
      return reference::decode_bf16(read(std::uint16_t{}));
    case DType::f32:
      return read(float{});
    case DType::f64:
      return read(double{});
    case DType::i32:
      return read(std::int32_t{});
    case DType::e4m3:
      return reference::decode_e4m3(read(std::uint8_t{}));
    case DType::i8:
      return read(std::int8_t{});
    case DType::e5m2:
      return reference::decode_e5m2(read(std::uint8_t{}));
    case DType::u4x2:  // two codes
      return read(std::uint8_t{});
  }
  return 0;
}

/// Stores `value`, rounded to nearest.
inline void store_element(void* data, DType dtype, std::size_t index, double value) {
  const auto write = [&]<typename T>(T rounded) {
    std::memcpy(static_cast<std::byte*>(data) + index * sizeof(T), &rounded, sizeof(T));
  };
  switch (dtype) {
    case DType::f16:
      return write(reference::encode_f16(value));
    case DType::bf16:
      return write(reference::encode_bf16(value));
    case DType::f32:
      return write(static_cast<float>(value));
    case DType::f64:
      return write(value);
    case DType::i32:
      return write(static_cast<std::int32_t>(value));
    case DType::e4m3:
      return write(reference::encode_e4m3(value));
    case DType::i8:
      return write(reference::encode_i8(value));
    case DType::e5m2:
      return write(reference::encode_e5m2(value));
    case DType::u4x2:
      return write(static_cast<std::uint8_t>(value));
  }
}

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_ELEMENTS_HPP_
