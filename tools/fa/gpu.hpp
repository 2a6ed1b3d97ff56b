#ifndef FA_TOOLS_FA_GPU_HPP_
#define FA_TOOLS_FA_GPU_HPP_

#include <cstddef>
#include <optional>
#include <string>

#include <fa/device.hpp>

#include "driver/driver.hpp"

namespace fa::cli {

/// A GPU with its context current on the creating thread, and a stream.
class Gpu {
 public:
  explicit Gpu(int ordinal);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  const driver::DeviceInfo& info() const noexcept { return context_.info(); }
  Device device() const noexcept { return Device::cuda(context_.info().ordinal); }
  Stream stream() const noexcept { return stream_; }
  void synchronize() const;
  std::size_t l2_bytes() const;

 private:
  driver::ContextRef context_;
  driver::ContextScope scope_;
  CUstream stream_ = nullptr;
};

/// Device memory of the current context.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::size_t bytes);
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  ~DeviceBuffer();

  void* data() const noexcept { return reinterpret_cast<void*>(pointer_); }
  std::size_t size() const noexcept { return bytes_; }
  void upload(const void* source, std::size_t bytes);
  void download(void* target, std::size_t bytes, std::size_t from = 0) const;

  /// Queues zeros for the whole buffer.
  void clear(Stream stream);

  /// Repeats the `bytes` at `pattern` over the whole buffer.
  void tile(const void* pattern, std::size_t bytes);

 private:
  CUdeviceptr pointer_ = 0;
  std::size_t bytes_ = 0;
};

/// A point in a stream that can be timed.
class Event {
 public:
  Event();
  Event(Event&& other) noexcept;
  Event& operator=(Event&&) = delete;
  ~Event();

  void record(Stream stream);
  void synchronize() const;
  double milliseconds_since(const Event& start) const;

 private:
  CUevent event_ = nullptr;
};

/// The first GPU, or nothing with the reason in `*problem`.
std::optional<driver::DeviceInfo> find_gpu(std::string* problem);

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_GPU_HPP_
