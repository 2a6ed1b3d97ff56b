#ifndef FA_DEVICE_HPP_
#define FA_DEVICE_HPP_

#include <string>

#include <fa/export.hpp>

struct CUstream_st;

namespace fa {

/// A CUDA stream: `CUstream` and `cudaStream_t` are this type. nullptr is the legacy default stream.
using Stream = CUstream_st*;

/// Where an Attention runs.
class FA_API Device {
 public:
  enum class Kind { current, cuda, host };

  /// The device of the CUDA context current on the calling thread, else CUDA device 0 and its primary context.
  static constexpr Device current() noexcept { return Device(Kind::current, -1); }
  /// CUDA device `ordinal`: its context if current, else its primary context, retained for the Attention's lifetime.
  static constexpr Device cuda(int ordinal) noexcept { return Device(Kind::cuda, ordinal); }
  /// The CPU: tensors are host memory, calls are synchronous, the stream is ignored.
  static constexpr Device host() noexcept { return Device(Kind::host, -1); }

  constexpr Kind kind() const noexcept { return kind_; }
  constexpr int ordinal() const noexcept { return ordinal_; }
  friend constexpr bool operator==(Device, Device) = default;

 private:
  constexpr Device(Kind kind, int ordinal) noexcept : kind_(kind), ordinal_(ordinal) {}
  Kind kind_;
  int ordinal_;
};

/// "host", "cuda:1" or "current".
FA_API std::string to_string(Device device);

}  // namespace fa

#endif  // FA_DEVICE_HPP_
