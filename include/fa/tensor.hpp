#ifndef FA_TENSOR_HPP_
#define FA_TENSOR_HPP_

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

#include <fa/export.hpp>

namespace fa {

/// Element types. The host device alone accepts f64. Captured tensors and tables alone may be i32. e4m3 and e5m2 are
/// OCP 8-bit floating point, of q, k and v (AttentionConfig::dtype); q and k may be i8. K and V of a cache may be e4m3,
/// i8 or u4x2 (AttentionConfig::k_dtype). An element of u4x2 is a byte with two columns of a row, from 0 to 15 each.
/// The last axis of such a tensor is half of the head dim (docs/quantized_caches.md).
enum class DType : std::uint8_t { f16 = 0, bf16 = 1, f32 = 2, f64 = 3, i32 = 4, e4m3 = 5, i8 = 6, e5m2 = 7, u4x2 = 8 };

/// Bytes of one element.
constexpr std::size_t size_of(DType dtype) noexcept {
  // g++ 12 makes wrong code of one more comparison for equality.
  return dtype == DType::f64 ? 8 : dtype == DType::f32 || dtype == DType::i32 ? 4 : dtype >= DType::e4m3 ? 1 : 2;
}

/// "f16", "bf16", "f32", "f64", "i32", "e4m3", "i8", "e5m2" or "u4x2".
FA_API const char* to_string(DType dtype) noexcept;

/// A tensor that somebody else owns: pointer, dtype, shape and strides in elements.
///
/// Axes are [b, h, s, d] by meaning, whatever their order in memory; [b, s, d] is a tensor with one head. Row
/// statistics (the log-sum-exp) are [b, h, s] or [b, s]. Strides are any int64, 0 and negative included; the last axis
/// of q, k, v and o must be contiguous (stride 1). A default-constructed view means "not given".
///
/// The memory must stay valid until the work queued on the stream has finished.
struct FA_API TensorView {
  static constexpr int kMaxRank = 4;

  void* data = nullptr;
  DType dtype = DType::bf16;
  int rank = 0;
  bool read_only = false;  ///< built from a const pointer: refused as an output
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> strides{};  ///< in elements

  TensorView() = default;

  /// A row-major view. Throws fa::Error(invalid_argument) for a rank above 4.
  TensorView(void* data, DType dtype, std::initializer_list<std::int64_t> shape);
  TensorView(const void* data, DType dtype, std::initializer_list<std::int64_t> shape);

  /// A view with explicit strides, one for each axis.
  TensorView(void* data, DType dtype, std::span<const std::int64_t> shape, std::span<const std::int64_t> strides);
  TensorView(const void* data, DType dtype, std::span<const std::int64_t> shape, std::span<const std::int64_t> strides);

  bool defined() const noexcept { return rank != 0; }
  std::int64_t elements() const noexcept;

  /// The same memory with two axes exchanged: a [b, s, h, d] tensor becomes [b, h, s, d] by `swap_axes(1, 2)`.
  TensorView swap_axes(int first, int second) const;
};

}  // namespace fa

#endif  // FA_TENSOR_HPP_
