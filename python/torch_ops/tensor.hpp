#ifndef FA_PYTHON_TORCH_OPS_TENSOR_HPP_
#define FA_PYTHON_TORCH_OPS_TENSOR_HPP_

#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <fa/fa.h>

namespace fa_torch {

/// Of a function of PyTorch's C interface.
inline void check(AOTITorchError error, const char* what) {
  if (error != AOTI_TORCH_SUCCESS) throw std::runtime_error(std::string(what) + " of PyTorch failed");
}

struct Place {
  std::int32_t type = 0;  ///< PyTorch's number of a kind of device
  std::int32_t index = 0;

  bool operator==(const Place&) const = default;
  [[nodiscard]] bool is_host() const { return type == aoti_torch_device_type_cpu(); }
};

/// A tensor of PyTorch: a reference of its own, and what the calls of libfa want to know of it.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle handle);  ///< takes the reference over
  Tensor(Tensor&& other) noexcept { *this = std::move(other); }
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    place_ = other.place_, dtype_ = other.dtype_, sizes_ = other.sizes_, strides_ = other.strides_, data_ = other.data_;
    return *this;
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }

  [[nodiscard]] AtenTensorHandle get() const { return handle_; }
  [[nodiscard]] AtenTensorHandle release() { return std::exchange(handle_, nullptr); }
  explicit operator bool() const { return handle_ != nullptr; }

  [[nodiscard]] Place place() const { return place_; }
  [[nodiscard]] std::int32_t dtype() const { return dtype_; }  ///< PyTorch's number
  [[nodiscard]] std::span<const std::int64_t> sizes() const { return sizes_; }
  [[nodiscard]] std::span<const std::int64_t> strides() const { return strides_; }
  [[nodiscard]] std::int64_t size(std::size_t axis) const { return sizes_[axis]; }
  [[nodiscard]] std::size_t rank() const { return sizes_.size(); }
  [[nodiscard]] std::int64_t elements() const;
  [[nodiscard]] void* data() const { return data_; }

 private:
  AtenTensorHandle handle_ = nullptr;
  Place place_;
  std::int32_t dtype_ = -1;
  std::span<const std::int64_t> sizes_, strides_;
  void* data_ = nullptr;
};

/// An empty tensor where `place` says.
Tensor empty(std::span<const std::int64_t> sizes, std::span<const std::int64_t> strides, std::int32_t dtype,
             Place place);
Tensor empty_row_major(std::span<const std::int64_t> sizes, std::int32_t dtype, Place place);

/// An empty [b, h, s, d] in the memory order of `like`, or [total, h, d].
Tensor empty_like(const Tensor& like, std::int64_t heads, std::int64_t rows, std::int64_t head_dim);

/// `tensor` itself where its head dim is contiguous, else a contiguous copy.
Tensor readable(Tensor tensor);
Tensor to_dtype(Tensor tensor, std::int32_t dtype);

/// enum fa_dtype of PyTorch's number; -1 for one that libfa has none of.
std::int32_t fa_dtype_of(std::int32_t dtype);
std::string name_of(std::int32_t dtype);
std::int32_t row_dtype(std::int32_t dtype);  ///< of the log-sum-exp

/// What libfa is told. Of at most 4 axes.
fa_tensor describe(const Tensor& tensor);
/// Whether all its rows start at multiples of 16 bytes.
bool rows_aligned(const Tensor& tensor);

}  // namespace fa_torch

#endif  // FA_PYTHON_TORCH_OPS_TENSOR_HPP_
