#include "tensor.hpp"

#include <array>

#include <torch/csrc/stable/ops.h>

namespace fa_torch {
namespace {

struct Dtype {
  std::int32_t torch;
  std::int32_t fa;
  std::int32_t bytes;
  const char* name;
};

const std::array<Dtype, 7>& dtypes() {
  static const std::array<Dtype, 7> all{{{aoti_torch_dtype_bfloat16(), FA_BF16, 2, "torch.bfloat16"},
                                         {aoti_torch_dtype_float16(), FA_F16, 2, "torch.float16"},
                                         {aoti_torch_dtype_float32(), FA_F32, 4, "torch.float32"},
                                         {aoti_torch_dtype_float64(), FA_F64, 8, "torch.float64"},
                                         {aoti_torch_dtype_int32(), FA_I32, 4, "torch.int32"},
                                         {aoti_torch_dtype_int64(), -1, 8, "torch.int64"},
                                         {aoti_torch_dtype_bool(), -1, 1, "torch.bool"}}};
  return all;
}

const Dtype* find(std::int32_t dtype) {
  for (const Dtype& known : dtypes()) {
    if (known.torch == dtype) return &known;
  }
  return nullptr;
}

torch::stable::Tensor stable(Tensor& tensor) {
  return torch::stable::Tensor(tensor.release());
}

Tensor own(const torch::stable::Tensor& tensor) {
  AtenTensorHandle handle = nullptr;
  check(aoti_torch_new_tensor_handle(tensor.get(), &handle), "aoti_torch_new_tensor_handle");
  return Tensor(handle);
}

}  // namespace

Tensor::Tensor(AtenTensorHandle handle) : handle_(handle) {
  std::int64_t rank = 0, *sizes = nullptr, *strides = nullptr;
  const bool known = aoti_torch_get_dim(handle, &rank) == AOTI_TORCH_SUCCESS &&
                     aoti_torch_get_sizes(handle, &sizes) == AOTI_TORCH_SUCCESS &&
                     aoti_torch_get_strides(handle, &strides) == AOTI_TORCH_SUCCESS &&
                     aoti_torch_get_dtype(handle, &dtype_) == AOTI_TORCH_SUCCESS &&
                     aoti_torch_get_device_type(handle, &place_.type) == AOTI_TORCH_SUCCESS &&
                     aoti_torch_get_device_index(handle, &place_.index) == AOTI_TORCH_SUCCESS &&
                     aoti_torch_get_data_ptr(handle, &data_) == AOTI_TORCH_SUCCESS;
  if (!known) {
    aoti_torch_delete_tensor_object(handle_);
    throw std::runtime_error("a tensor has no strides or no memory: accepted are dense tensors");
  }
  sizes_ = {sizes, static_cast<std::size_t>(rank)};
  strides_ = {strides, static_cast<std::size_t>(rank)};
}

std::int64_t Tensor::elements() const {
  std::int64_t count = 1;
  for (const std::int64_t size : sizes_) count *= size;
  return count;
}

Tensor empty(std::span<const std::int64_t> sizes, std::span<const std::int64_t> strides, std::int32_t dtype,
             Place place) {
  AtenTensorHandle handle = nullptr;
  check(aoti_torch_empty_strided(static_cast<std::int64_t>(sizes.size()), sizes.data(), strides.data(), dtype,
                                 place.type, place.index, &handle),
        "empty_strided");
  return Tensor(handle);
}

Tensor empty_row_major(std::span<const std::int64_t> sizes, std::int32_t dtype, Place place) {
  std::array<std::int64_t, 8> strides{};
  if (sizes.size() > strides.size()) throw std::invalid_argument("a tensor has more than 8 axes");
  std::int64_t step = 1;
  for (std::size_t axis = sizes.size(); axis-- > 0;) {
    strides[axis] = step;
    step *= sizes[axis] > 1 ? sizes[axis] : 1;
  }
  return empty(sizes, std::span(strides).first(sizes.size()), dtype, place);
}

Tensor empty_like(const Tensor& like, std::int64_t heads, std::int64_t rows, std::int64_t head_dim) {
  if (like.rank() == 3) return empty_row_major(std::array{rows, heads, head_dim}, like.dtype(), like.place());
  const std::array sizes{like.size(0), heads, rows, head_dim};
  if (like.strides()[1] >= like.strides()[2]) return empty_row_major(sizes, like.dtype(), like.place());
  const auto least_one = [](std::int64_t n) { return n > 1 ? n : 1; };
  const std::int64_t row = least_one(heads) * least_one(head_dim);  // memory [b, s, h, d]
  return empty(sizes, std::array{row * least_one(rows), least_one(head_dim), row, std::int64_t{1}}, like.dtype(),
               like.place());
}

Tensor readable(Tensor tensor) {
  if (tensor.rank() == 0 || tensor.strides().back() == 1 || tensor.sizes().back() <= 1) return tensor;
  if (tensor.elements() == 0) return empty_row_major(tensor.sizes(), tensor.dtype(), tensor.place());
  return own(torch::stable::contiguous(stable(tensor)));
}

Tensor to_dtype(Tensor tensor, std::int32_t dtype) {
  if (tensor.dtype() == dtype) return tensor;
  using torch::headeronly::ScalarType;
  return own(
      torch::stable::to(stable(tensor), torch::stable::detail::to<ScalarType>(torch::stable::detail::from(dtype))));
}

std::int32_t fa_dtype_of(std::int32_t dtype) {
  const Dtype* known = find(dtype);
  return known != nullptr ? known->fa : -1;
}

std::string name_of(std::int32_t dtype) {
  const Dtype* known = find(dtype);
  return known != nullptr ? known->name : "dtype " + std::to_string(dtype) + " of PyTorch";
}

std::int32_t row_dtype(std::int32_t dtype) {
  return dtype == aoti_torch_dtype_float64() ? dtype : aoti_torch_dtype_float32();
}

fa_tensor describe(const Tensor& tensor) {
  if (tensor.rank() > 4) throw std::invalid_argument("a tensor has more than 4 axes");
  fa_tensor result = {};
  result.struct_size = sizeof result;
  result.dtype = fa_dtype_of(tensor.dtype());
  result.rank = static_cast<std::int32_t>(tensor.rank());
  result.data = tensor.data();
  for (std::size_t axis = 0; axis < tensor.rank(); ++axis) {
    result.shape[axis] = tensor.size(axis);
    result.strides[axis] = tensor.strides()[axis];
  }
  return result;
}

bool rows_aligned(const Tensor& tensor) {
  const Dtype* known = find(tensor.dtype());
  if (known == nullptr || reinterpret_cast<std::uintptr_t>(tensor.data()) % 16 != 0) return false;
  for (std::size_t axis = 0; axis + 1 < tensor.rank(); ++axis) {
    if (tensor.size(axis) > 1 && tensor.strides()[axis] * known->bytes % 16 != 0) return false;
  }
  return true;
}

}  // namespace fa_torch
