#include "differential/tensor.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "driver/driver.hpp"
#include "reference/convert.hpp"

namespace fa::differential {
namespace {

std::size_t guard_bytes = 256;

CUdeviceptr address(const std::byte* data) {
  return reinterpret_cast<CUdeviceptr>(data);
}

double load(DType dtype, const std::byte* from) {
  const auto get = [from](auto value) {
    std::memcpy(&value, from, sizeof value);
    return value;
  };
  switch (dtype) {
    case DType::f16:
      return static_cast<double>(reference::decode_f16(get(std::uint16_t{})));
    case DType::bf16:
      return static_cast<double>(reference::decode_bf16(get(std::uint16_t{})));
    case DType::f32:
      return static_cast<double>(get(float{}));
    case DType::f64:
      return get(double{});
    case DType::i32:
      return get(std::int32_t{});
    case DType::e4m3:
      return (get(std::uint8_t{}) & 0x7f) == 0x7f ? std::nan("")
                                                  : static_cast<double>(reference::decode_e4m3(get(std::uint8_t{})));
    case DType::i8:
      return get(std::int8_t{});
    case DType::e5m2:
      return static_cast<double>(reference::decode_e5m2(get(std::uint8_t{})));
    case DType::u4x2:  // two codes
      return get(std::uint8_t{});
  }
  return 0;
}

void store(DType dtype, double value, std::byte* to) {
  const auto put = [to](auto stored) { std::memcpy(to, &stored, sizeof stored); };
  switch (dtype) {
    case DType::f16:
      return put(reference::encode_f16(value));
    case DType::bf16:
      return put(reference::encode_bf16(value));
    case DType::f32:
      return put(static_cast<float>(value));
    case DType::f64:
      return put(value);
    case DType::i32:
      return put(static_cast<std::int32_t>(value));
    case DType::e4m3:
      return put(std::isnan(value) ? std::uint8_t{0x7f} : reference::encode_e4m3(value));
    case DType::i8:
      return put(reference::encode_i8(value));
    case DType::e5m2:
      return put(reference::encode_e5m2(value));
    case DType::u4x2:
      return put(static_cast<std::uint8_t>(value));
  }
}

}  // namespace

void set_guard(std::size_t bytes) {
  guard_bytes = bytes;
}

std::size_t guard() {
  return guard_bytes;
}

Memory::Memory(Where where, const std::vector<std::byte>& image) : where_(where), size_(image.size()) {
  const std::size_t size = std::max<std::size_t>(size_, 1);
  if (where == Where::cuda) {
    CUdeviceptr base = 0;
    driver::check(driver::api().cuMemAlloc(&base, size), "cuMemAlloc");
    data_ = reinterpret_cast<std::byte*>(base);
  } else {
    data_ = static_cast<std::byte*>(std::aligned_alloc(256, (size + 255) / 256 * 256));
    if (data_ == nullptr) throw std::bad_alloc();
  }
  write(image);
}

Memory::Memory(Memory&& other) noexcept
    : where_(other.where_), data_(std::exchange(other.data_, nullptr)), size_(other.size_) {}

Memory::~Memory() {
  if (data_ == nullptr) return;
  if (where_ == Where::cuda) {
    driver::api().cuMemFree(address(data_));
  } else {
    std::free(data_);
  }
}

void Memory::write(const std::vector<std::byte>& image) {
  if (image.empty()) return;
  if (where_ == Where::host) {
    std::memcpy(data_, image.data(), image.size());
    return;
  }
  driver::check(driver::api().cuMemcpyHtoD(address(data_), image.data(), image.size()), "cuMemcpyHtoD");
  driver::check(driver::api().cuStreamSynchronize(nullptr), "cuStreamSynchronize");
}

std::vector<std::byte> Memory::read() const {
  std::vector<std::byte> image(size_);
  if (size_ == 0) return image;
  if (where_ == Where::host) {
    std::memcpy(image.data(), data_, size_);
  } else {
    driver::check(driver::api().cuMemcpyDtoH(image.data(), address(data_), size_), "cuMemcpyDtoH");
  }
  return image;
}

void Tensor::allocate(std::int64_t low, std::int64_t high, std::int64_t front) {
  const auto size = static_cast<std::int64_t>(size_of(dtype_));
  const auto guarded = static_cast<std::int64_t>(guard_bytes);
  first_ = guarded / size + front - low;
  const bool empty = elements() == 0;
  const std::int64_t bytes = 2 * guarded + (front + (empty ? 0 : high - low + 1)) * size;
  image_.assign(static_cast<std::size_t>(bytes), std::byte{0xff});
}

Tensor::Tensor(DType dtype, std::vector<std::int64_t> shape, const Layout& layout)
    : dtype_(dtype), shape_(std::move(shape)), strides_(shape_.size(), 1) {
  const bool rows = shape_.size() == 4;
  std::int64_t stride = rows ? shape_[3] + layout.row_padding : layout.step;
  for (std::size_t n = 3; n-- > 0;) {
    const auto axis = static_cast<std::size_t>(layout.order[n]);
    strides_[axis] = stride;
    if ((layout.expanded >> axis & 1) != 0) {
      strides_[axis] = 0;
    } else {
      stride *= std::max<std::int64_t>(shape_[axis], 1);
    }
  }
  if (layout.negative >= 0) strides_[static_cast<std::size_t>(layout.negative)] *= -1;
  std::int64_t low = 0, high = 0;
  for (std::size_t axis = 0; axis < shape_.size(); ++axis) {
    const std::int64_t reach = strides_[axis] * (std::max<std::int64_t>(shape_[axis], 1) - 1);
    (reach < 0 ? low : high) += reach;
  }
  allocate(low, high, layout.offset);
}

Tensor Tensor::capture(DType dtype, std::vector<std::int64_t> shape, const Layout& layout) {
  Tensor result;
  result.dtype_ = dtype;
  result.shape_ = std::move(shape);
  const std::size_t rank = result.shape_.size();
  result.strides_.assign(rank, 1);
  for (std::size_t axis = rank; axis-- > 1;) {
    const std::int64_t padding = axis + 1 == rank ? layout.row_padding : 0;
    result.strides_[axis - 1] = result.strides_[axis] * (std::max<std::int64_t>(result.shape_[axis], 1) + padding);
  }
  if (layout.negative >= 0 && rank > 0) result.strides_[0] *= -1;
  std::int64_t low = 0, high = 0;
  for (std::size_t axis = 0; axis < rank; ++axis) {
    const std::int64_t reach = result.strides_[axis] * (std::max<std::int64_t>(result.shape_[axis], 1) - 1);
    (reach < 0 ? low : high) += reach;
  }
  result.allocate(low, high, layout.offset);
  return result;
}

Tensor Tensor::dense(DType dtype, std::vector<std::int64_t> shape) {
  return capture(dtype, std::move(shape), {});
}

std::int64_t Tensor::elements() const {
  std::int64_t count = 1;
  for (const std::int64_t length : shape_) count *= length;
  return count;
}

std::int64_t Tensor::offset(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d) const {
  const std::int64_t index[4] = {a, b, c, d};
  std::int64_t result = first_;
  for (std::size_t axis = 0; axis < shape_.size(); ++axis) result += index[axis] * strides_[axis];
  return result * static_cast<std::int64_t>(size_of(dtype_));
}

double Tensor::at(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d) const {
  return load(dtype_, image_.data() + offset(a, b, c, d));
}

void Tensor::set(double value, std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d) {
  store(dtype_, value, image_.data() + offset(a, b, c, d));
}

double Tensor::rounded(double value) const {
  std::byte bytes[8];
  store(dtype_, value, bytes);
  return load(dtype_, bytes);
}

void Tensor::row(std::int64_t a, std::int64_t b, std::int64_t c, double* to) const {
  const std::byte* from = image_.data() + offset(a, b, c, 0);
  for (std::int64_t n = 0; n < shape_[3]; ++n)
    to[n] = load(dtype_, from + n * static_cast<std::int64_t>(size_of(dtype_)));
}

void Tensor::upload(Where where) {
  before_ = image_;
  memory_ = std::make_shared<Memory>(where, image_);
}

void Tensor::refresh() {
  before_ = image_;
  memory_->write(image_);
}

void Tensor::download() {
  image_ = memory_->read();
}

void Tensor::poison() {
  std::fill(image_.begin(), image_.end(), std::byte{0xff});
}

bool Tensor::touched_outside() const {
  std::vector<std::byte> expected = before_;
  const std::size_t size = size_of(dtype_);
  const auto length = [&](std::size_t axis) { return axis < shape_.size() ? shape_[axis] : 1; };
  for (std::int64_t a = 0; a < length(0); ++a) {
    for (std::int64_t b = 0; b < length(1); ++b) {
      for (std::int64_t c = 0; c < length(2); ++c) {
        for (std::int64_t d = 0; d < length(3); ++d) {
          const auto at = static_cast<std::size_t>(offset(a, b, c, d));
          std::memcpy(expected.data() + at, image_.data() + at, size);
        }
      }
    }
  }
  return expected != image_;
}

TensorView Tensor::view() const {
  if (!defined()) return {};
  TensorView view;
  view.dtype = dtype_;
  view.rank = static_cast<int>(shape_.size());
  std::copy(shape_.begin(), shape_.end(), view.shape.begin());
  std::copy(strides_.begin(), strides_.end(), view.strides.begin());
  view.data = memory_->data() + first_ * static_cast<std::int64_t>(size_of(dtype_));
  return view;
}

TensorView Tensor::const_view() const {
  TensorView result = view();
  result.read_only = true;
  return result;
}

}  // namespace fa::differential
