#include <fa/tensor.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "support/text.hpp"

namespace fa {
namespace {

std::int64_t saturating_multiply(std::int64_t a, std::int64_t b) noexcept {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<std::int64_t>::max() : product;
}

void set_shape(TensorView& view, std::span<const std::int64_t> shape) {
  if (shape.empty() || shape.size() > TensorView::kMaxRank) {
    support::throw_invalid("tensor rank", shape.size(), "1 to 4 axes");
  }
  view.rank = static_cast<int>(shape.size());
  for (std::size_t axis = 0; axis < shape.size(); ++axis) view.shape[axis] = shape[axis];
}

void set_row_major_strides(TensorView& view) noexcept {
  std::int64_t stride = 1;
  for (int axis = view.rank - 1; axis >= 0; --axis) {
    const auto index = static_cast<std::size_t>(axis);
    view.strides[index] = stride;
    stride = saturating_multiply(stride, view.shape[index]);
  }
}

std::size_t checked_axis(const TensorView& view, int axis) {
  if (axis < 0 || axis >= std::min(view.rank, TensorView::kMaxRank)) {
    support::throw_invalid("axis", axis, "0 to rank - 1 of a tensor of rank " + std::to_string(view.rank));
  }
  return static_cast<std::size_t>(axis);
}

}  // namespace

const char* to_string(DType dtype) noexcept {
  switch (dtype) {
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
    case DType::f32:
      return "f32";
    case DType::f64:
      return "f64";
    case DType::i32:
      return "i32";
    case DType::e4m3:
      return "e4m3";
    case DType::i8:
      return "i8";
    case DType::e5m2:
      return "e5m2";
    case DType::u4x2:
      return "u4x2";
  }
  return "unknown";
}

TensorView::TensorView(void* memory, DType type, std::initializer_list<std::int64_t> sizes)
    : data(memory), dtype(type) {
  set_shape(*this, {sizes.begin(), sizes.size()});
  set_row_major_strides(*this);
}

TensorView::TensorView(const void* memory, DType type, std::initializer_list<std::int64_t> sizes)
    : TensorView(const_cast<void*>(memory), type, sizes) {
  read_only = true;
}

TensorView::TensorView(void* memory, DType type, std::span<const std::int64_t> sizes,
                       std::span<const std::int64_t> steps)
    : data(memory), dtype(type) {
  set_shape(*this, sizes);
  if (steps.size() != sizes.size()) support::throw_invalid("number of strides", steps.size(), "one for each axis");
  for (std::size_t axis = 0; axis < steps.size(); ++axis) strides[axis] = steps[axis];
}

TensorView::TensorView(const void* memory, DType type, std::span<const std::int64_t> sizes,
                       std::span<const std::int64_t> steps)
    : TensorView(const_cast<void*>(memory), type, sizes, steps) {
  read_only = true;
}

std::int64_t TensorView::elements() const noexcept {
  if (rank < 1 || rank > kMaxRank) return 0;
  std::int64_t count = 1;
  for (int axis = 0; axis < rank; ++axis) {
    const std::int64_t size = shape[static_cast<std::size_t>(axis)];
    if (size <= 0) return 0;
    count = saturating_multiply(count, size);
  }
  return count;
}

TensorView TensorView::swap_axes(int first, int second) const {
  const std::size_t a = checked_axis(*this, first);
  const std::size_t b = checked_axis(*this, second);
  TensorView view = *this;
  std::swap(view.shape[a], view.shape[b]);
  std::swap(view.strides[a], view.strides[b]);
  return view;
}

}  // namespace fa
