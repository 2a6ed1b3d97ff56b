#include "reference/elements.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "reference/convert.hpp"

namespace fa::reference {
namespace {

template <class Stored>
Stored load_element(const std::byte* at) {
  Stored value;
  std::memcpy(&value, at, sizeof value);  // tensors live in memory of any type, at any alignment
  return value;
}

/// Reads `count` elements of type `Stored`, `stride` elements apart, through `decode`.
template <class Stored, class Acc, class Decode>
void load_strided(const std::byte* from, std::int64_t stride, std::int64_t count, Acc* to, Decode decode) {
  constexpr std::int64_t kSize = sizeof(Stored);
  if (stride == 1) {  // on its own, so that the usual case vectorises
    for (std::int64_t n = 0; n < count; ++n) to[n] = static_cast<Acc>(decode(load_element<Stored>(from + n * kSize)));
  } else {
    for (std::int64_t n = 0; n < count; ++n) {
      to[n] = static_cast<Acc>(decode(load_element<Stored>(from + n * stride * kSize)));
    }
  }
}

}  // namespace

template <class Acc>
void load(const TensorView& t, std::int64_t offset, std::int64_t stride, std::int64_t count, Acc* to) {
  const std::byte* from = static_cast<const std::byte*>(t.data) + offset * static_cast<std::int64_t>(size_of(t.dtype));
  switch (t.dtype) {
    case DType::f16:
      return load_strided<std::uint16_t>(from, stride, count, to, decode_f16);
    case DType::bf16:
      return load_strided<std::uint16_t>(from, stride, count, to, decode_bf16);
    case DType::f32:
      return load_strided<float>(from, stride, count, to, [](float x) { return x; });
    case DType::f64:
      return load_strided<double>(from, stride, count, to, [](double x) { return x; });
    case DType::i32:
      return load_strided<std::int32_t>(from, stride, count, to, [](std::int32_t x) { return x; });
    case DType::e4m3:
      return load_strided<std::uint8_t>(from, stride, count, to, decode_e4m3);
    case DType::i8:
      return load_strided<std::int8_t>(from, stride, count, to, [](std::int8_t x) { return x; });
    case DType::e5m2:
      return load_strided<std::uint8_t>(from, stride, count, to, decode_e5m2);
    case DType::u4x2:  // bytes: which code is where, u4.hpp knows
      return load_strided<std::uint8_t>(from, stride, count, to, [](std::uint8_t x) { return x; });
  }
}

template void load<float>(const TensorView&, std::int64_t, std::int64_t, std::int64_t, float*);
template void load<double>(const TensorView&, std::int64_t, std::int64_t, std::int64_t, double*);

void store_element(const TensorView& t, std::int64_t offset, double value) {
  std::byte* to = static_cast<std::byte*>(t.data) + offset * static_cast<std::int64_t>(size_of(t.dtype));
  const auto put = [to](auto stored) { std::memcpy(to, &stored, sizeof stored); };
  switch (t.dtype) {
    case DType::f16:
      return put(encode_f16(value));
    case DType::bf16:
      return put(encode_bf16(value));
    case DType::f32:
      return put(static_cast<float>(value));
    case DType::f64:
      return put(value);
    case DType::i32:
      return put(static_cast<std::int32_t>(value));
    case DType::e4m3:
      return put(encode_e4m3(value));
    case DType::i8:
      return put(encode_i8(value));
    case DType::e5m2:
      return put(encode_e5m2(value));
    case DType::u4x2:
      return put(std::isnan(value) ? std::uint8_t{255} : static_cast<std::uint8_t>(std::clamp(value, 0.0, 255.0)));
  }
}

}  // namespace fa::reference
