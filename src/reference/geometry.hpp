#ifndef FA_SRC_REFERENCE_GEOMETRY_HPP_
#define FA_SRC_REFERENCE_GEOMETRY_HPP_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <fa/tensor.hpp>
#include <fa/types.hpp>

#include "reference/convert.hpp"
#include "reference/variant.hpp"

namespace fa::reference {

/// Sizes and mask of one attention call, and what follows from them for a head or a row.
struct Geometry {
  std::int64_t b = 0;
  std::int64_t h_q = 0;
  std::int64_t h_kv = 0;
  std::int64_t s_q = 0;
  std::int64_t s_kv = 0;
  std::int64_t d_qk = 0;
  std::int64_t d_v = 0;
  bool causal = false;
  CausalAlign causal_align = CausalAlign::bottom_right;
  std::int64_t window_left = -1;  ///< -1: unbounded
  std::int64_t window_right = -1;
  std::int64_t chunk = 0;  ///< 0: none
  std::int64_t begin = 0;  ///< keys before it are hidden from all rows

  /// Axes of q [b, h_q, s_q, d_qk], k [b, h_kv, s_kv, d_qk] and v [b, h_kv, s_kv, d_v].
  static Geometry of(const TensorView& q, const TensorView& k, const TensorView& v, bool causal, CausalAlign align,
                     const VariantArgs& variant = {}) {
    return of(q, k, v, k.shape[2], causal, align, variant);
  }
  /// The same of `s_kv` keys, however k and v have them.
  static Geometry of(const TensorView& q, const TensorView& k, const TensorView& v, std::int64_t s_kv, bool causal,
                     CausalAlign align, const VariantArgs& variant) {
    // Windows that reach from any row to any key hide nothing, whatever their size.
    const std::int64_t most = q.shape[2] + s_kv;
    return {q.shape[0],
            q.shape[1],
            k.shape[1],
            q.shape[2],
            s_kv,
            q.shape[3],
            v.dtype == DType::u4x2 ? 2 * v.shape[3] : v.shape[3],
            causal,
            align,
            std::min(variant.window_left, most),
            std::min(variant.window_right, most),
            variant.chunk};
  }

  /// The KV head that query head `h` reads.
  std::int64_t kv_head(std::int64_t h) const { return h / (h_q / h_kv); }

  /// Row i keeps the keys [first_key(i), visible_keys(i)), if there are any. Neither ever decreases with i.
  std::int64_t first_key(std::int64_t i) const {
    const std::int64_t diagonal = i + diagonal_shift();
    std::int64_t first = begin;
    if (window_left >= 0) first = std::max(first, diagonal - window_left);
    if (chunk > 0) first = std::max(first, chunk_of(diagonal) * chunk);
    return first;
  }
  std::int64_t visible_keys(std::int64_t i) const {
    const std::int64_t diagonal = i + diagonal_shift();
    std::int64_t end = s_kv;
    if (causal) end = std::min(end, diagonal + 1);
    if (window_right >= 0) end = std::min(end, diagonal + window_right + 1);
    if (chunk > 0) end = std::min(end, (chunk_of(diagonal) + 1) * chunk);
    return std::max<std::int64_t>(end, 0);
  }

  /// Key j is kept by the rows [first_row(j), last_row(j)). Neither ever decreases with j.
  std::int64_t first_row(std::int64_t j) const {
    return first_of([&](std::int64_t i) { return visible_keys(i) > j; });
  }
  std::int64_t last_row(std::int64_t j) const {
    return window_left < 0 && chunk <= 0 ? s_q : first_of([&](std::int64_t i) { return first_key(i) > j; });
  }

  /// The first row for which `holds`, which it does for all after that; else s_q.
  template <class Predicate>
  std::int64_t first_of(const Predicate& holds) const {
    std::int64_t low = 0;
    for (std::int64_t count = s_q; count > 0;) {
      const std::int64_t half = count / 2;
      if (holds(low + half)) {
        count = half;
      } else {
        low += half + 1;
        count -= half + 1;
      }
    }
    return low;
  }

  std::int64_t chunk_of(std::int64_t key) const { return key / chunk - (key % chunk < 0 ? 1 : 0); }

  /// The last key that row i keeps is i + diagonal_shift(), where that is a key.
  std::int64_t diagonal_shift() const { return causal_align == CausalAlign::bottom_right ? s_kv - s_q : 0; }
};

/// Offset, in elements, of row (b, h, s) of a [b, h, s, d] or [b, h, s] tensor.
inline std::int64_t row_offset(const TensorView& t, std::int64_t b, std::int64_t h, std::int64_t s) {
  return b * t.strides[0] + h * t.strides[1] + s * t.strides[2];
}

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

/// Reads `count` elements of `t` from element `offset` on, `stride` apart, as `Acc`.
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

/// Writes one element of `t`, rounded to nearest even.
inline void store_element(const TensorView& t, std::int64_t offset, double value) {
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
      return put(std::isnan(value) ? std::uint8_t{255} : static_cast<std::uint8_t>(value));
  }
}

}  // namespace fa::reference

#endif  // FA_SRC_REFERENCE_GEOMETRY_HPP_
