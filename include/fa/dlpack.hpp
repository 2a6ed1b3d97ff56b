#ifndef FA_DLPACK_HPP_
#define FA_DLPACK_HPP_

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include <fa/device.hpp>
#include <fa/error.hpp>
#include <fa/tensor.hpp>

/// DLPack tensors (https://dmlc.github.io/dlpack) as views. This header includes no DLPack header: its templates fit
/// the types of whichever <dlpack/dlpack.h> the program uses, DLTensor, DLManagedTensor and DLManagedTensorVersioned.
///
///   DLManagedTensor* q = ...;                       // from PyTorch, JAX, CuPy, ...
///   attention.forward({fa::from_dlpack(*q), fa::from_dlpack(*k), fa::from_dlpack(*v)}, {fa::from_dlpack(*o)}, stream);
///   q->deleter(q);                                  // once the stream has finished: a view owns nothing
namespace fa {

/// Has the fields of a DLTensor.
template <typename T>
concept DLTensorLike = requires(const T& tensor) {
  { tensor.data } -> std::convertible_to<const void*>;
  { tensor.shape } -> std::convertible_to<const std::int64_t*>;
  { tensor.strides } -> std::convertible_to<const std::int64_t*>;
  { tensor.ndim } -> std::convertible_to<int>;
  tensor.byte_offset;
  tensor.device.device_type;
  tensor.device.device_id;
  tensor.dtype.code;
  tensor.dtype.bits;
  tensor.dtype.lanes;
};

/// Has a DLTensor in its field `dl_tensor`: DLManagedTensor and DLManagedTensorVersioned.
template <typename T>
concept DLManagedTensorLike = requires(const T& managed) {
  { managed.dl_tensor } -> DLTensorLike;
};

namespace detail {

/// Numbers that DLPack documents.
enum class DLDeviceType : int { cpu = 1, cuda = 2, cuda_host = 3, cuda_managed = 13 };
enum class DLTypeCode : int { integer = 0, floating = 2, bfloat = 4, float8_e4m3fn = 10 };
inline constexpr std::uint64_t kDLReadOnly = 1;
inline constexpr std::uint32_t kDLMajorVersion = 1;

[[noreturn]] inline void refuse_dlpack(ErrorCode code, const std::string& what, const std::string& value,
                                       const std::string& accepted) {
  throw Error(code, "DLPack tensor: " + what + " is " + value + "; accepted: " + accepted,
              {{"argument", what}, {"value", value}, {"accepted", accepted}});
}

inline DType dlpack_dtype(int code, int bits, int lanes) {
  if (lanes == 1 && code == static_cast<int>(DLTypeCode::bfloat) && bits == 16) {
    return DType::bf16;
  }
  if (lanes == 1 && code == static_cast<int>(DLTypeCode::floating)) {
    if (bits == 16) {
      return DType::f16;
    }
    if (bits == 32) {
      return DType::f32;
    }
    if (bits == 64) {
      return DType::f64;
    }
  }
  if (lanes == 1 && code == static_cast<int>(DLTypeCode::integer)) {
    if (bits == 32) {
      return DType::i32;
    }
    if (bits == 8) {
      return DType::i8;
    }
  }
  if (lanes == 1 && code == static_cast<int>(DLTypeCode::float8_e4m3fn) && bits == 8) {
    return DType::e4m3;
  }
  refuse_dlpack(ErrorCode::invalid_argument, "dtype",
                "code " + std::to_string(code) + ", bits " + std::to_string(bits) + ", lanes " + std::to_string(lanes),
                "kDLFloat with 16, 32 or 64 bits, kDLBfloat with 16 bits, kDLInt with 8 or 32 bits or "
                "kDLFloat8_e4m3fn, one lane");
}

/// A view whose strides are row-major where `strides` is null.
inline TensorView dlpack_view(void* data, DType dtype, int rank, const std::int64_t* shape,
                              const std::int64_t* strides) {
  if (rank < 1 || rank > TensorView::kMaxRank) {
    refuse_dlpack(ErrorCode::invalid_argument, "ndim", std::to_string(rank), "1 to 4");
  }
  const auto axes = static_cast<std::size_t>(rank);
  std::array<std::int64_t, TensorView::kMaxRank> dense{};
  std::int64_t stride = 1;
  for (std::size_t axis = axes; axis-- > 0;) {
    if (shape[axis] < 0) {
      refuse_dlpack(ErrorCode::invalid_argument, "shape[" + std::to_string(axis) + "]", std::to_string(shape[axis]),
                    "0 or more");
    }
    dense[axis] = stride;
    // Unsigned, so that impossible sizes wrap here and are refused where sizes are validated.
    stride = static_cast<std::int64_t>(static_cast<std::uint64_t>(stride) *
                                       static_cast<std::uint64_t>(shape[axis] == 0 ? 1 : shape[axis]));
  }
  const std::int64_t* chosen = strides != nullptr ? strides : dense.data();
  return TensorView(data, dtype, std::span(shape, axes), std::span(chosen, axes));
}

}  // namespace detail

/// The memory of `tensor` as a view; byte_offset is honoured, absent strides mean row-major. Throws
/// fa::Error(invalid_argument) for a rank beyond 4 and for element types that fa::DType does not have.
template <DLTensorLike Tensor>
TensorView from_dlpack(const Tensor& tensor) {
  const DType dtype = detail::dlpack_dtype(static_cast<int>(tensor.dtype.code), static_cast<int>(tensor.dtype.bits),
                                           static_cast<int>(tensor.dtype.lanes));
  void* data = tensor.data == nullptr ? nullptr : static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  return detail::dlpack_view(data, dtype, static_cast<int>(tensor.ndim), tensor.shape, tensor.strides);
}

/// The same for a managed tensor, which must outlive the queued work. A tensor that its producer flagged as read-only
/// is refused as an output. Throws also for a major version of DLPack other than 1.
template <DLManagedTensorLike Managed>
TensorView from_dlpack(const Managed& managed) {
  if constexpr (requires { managed.version.major; }) {
    const auto major = static_cast<std::uint32_t>(managed.version.major);
    if (major != detail::kDLMajorVersion) {
      detail::refuse_dlpack(ErrorCode::unsupported, "version.major", std::to_string(major),
                            std::to_string(detail::kDLMajorVersion));
    }
  }
  TensorView view = from_dlpack(managed.dl_tensor);
  if constexpr (requires { managed.flags; }) {
    view.read_only = (static_cast<std::uint64_t>(managed.flags) & detail::kDLReadOnly) != 0;
  }
  return view;
}

/// Where the memory of `tensor` can be used: the host for kDLCPU and kDLCUDAHost (pinned memory), that GPU for kDLCUDA
/// and kDLCUDAManaged. Throws fa::Error(unsupported) for other devices.
template <DLTensorLike Tensor>
Device device_of(const Tensor& tensor) {
  const int type = static_cast<int>(tensor.device.device_type);
  switch (static_cast<detail::DLDeviceType>(type)) {
    case detail::DLDeviceType::cpu:
    case detail::DLDeviceType::cuda_host:
      return Device::host();
    case detail::DLDeviceType::cuda:
    case detail::DLDeviceType::cuda_managed:
      return Device::cuda(static_cast<int>(tensor.device.device_id));
  }
  detail::refuse_dlpack(ErrorCode::unsupported, "device_type", std::to_string(type),
                        "kDLCPU (1), kDLCUDA (2), kDLCUDAHost (3) or kDLCUDAManaged (13)");
}

template <DLManagedTensorLike Managed>
Device device_of(const Managed& managed) {
  return device_of(managed.dl_tensor);
}

}  // namespace fa

#endif  // FA_DLPACK_HPP_
