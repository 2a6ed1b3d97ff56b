#ifndef FA_SRC_PARALLEL_MEMORY_HPP_
#define FA_SRC_PARALLEL_MEMORY_HPP_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include <fa/device.hpp>
#include <fa/parallel.hpp>
#include <fa/tensor.hpp>

namespace fa::parallel {

/// Memory of a device, and work on it that is not attention. Views are of rank 4, [b, h, s, d].
class Memory {
 public:
  virtual ~Memory() = default;
  virtual void* allocate(std::size_t bytes) = 0;  ///< 256-byte aligned, not 0
  virtual void free(void* memory) noexcept = 0;
  /// Of one shape and dtype.
  virtual void copy(const TensorView& to, const TensorView& from, Stream stream) = 0;
  /// Zeros; minus infinity, of f32 and f64.
  virtual void clear(const TensorView& to, bool minus_infinity, Stream stream) = 0;
  /// Waits.
  virtual void upload(void* to, const void* from, std::size_t bytes) = 0;
  virtual void download(void* to, const void* from, std::size_t bytes) = 0;
  /// Loads what pauses take; outside of captures.
  virtual void load_pause() = 0;
  /// Some microseconds of `stream` in which others come first.
  virtual void pause(Stream stream) = 0;
  /// Makes the streams that `lane` has; outside of captures.
  virtual void load_lanes() = 0;
  /// Streams beside a caller's, by number, 0 and 1. None on the host.
  virtual Stream lane(int number) const = 0;
  /// What is queued on `stream` from now on comes behind what `other` holds.
  virtual void follow(Stream stream, Stream other) = 0;
  virtual bool is_capturing(Stream stream) const = 0;
  virtual int multiprocessors() const noexcept = 0;  ///< 0 on the host
};

/// Throws fa::Error(no_driver, cuda).
std::unique_ptr<Memory> memory_of(Device device);

/// Rows of bytes: what a copy comes to where axes are joined.
struct CopyRows {
  struct Axis {
    std::int64_t count = 1, to = 0, from = 0;  ///< strides in bytes
  };
  std::int64_t width = 0;      ///< bytes of a row
  std::array<Axis, 4> axes{};  ///< the innermost first
};
CopyRows rows_of_copy(const TensorView& to, const TensorView& from);

/// Owns memory of a device.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Memory& memory, std::size_t bytes) : memory_(&memory), data_(memory.allocate(bytes)), size_(bytes) {}
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (data_ != nullptr) memory_->free(data_);
  }

  void* at(std::size_t offset) const noexcept { return static_cast<std::byte*>(data_) + offset; }
  std::size_t size() const noexcept { return size_; }

 private:
  void swap(Buffer& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }
  Memory* memory_ = nullptr;
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

/// Owns this rank's part of memory that ranks share.
class SharedBuffer {
 public:
  SharedBuffer() = default;
  SharedBuffer(Communicator& communicator, std::size_t bytes)
      : communicator_(&communicator), data_(communicator.share(bytes)), size_(bytes) {}
  SharedBuffer(SharedBuffer&& other) noexcept { swap(other); }
  SharedBuffer& operator=(SharedBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  SharedBuffer(const SharedBuffer&) = delete;
  SharedBuffer& operator=(const SharedBuffer&) = delete;
  ~SharedBuffer() {
    if (data_ != nullptr) communicator_->unshare(data_);
  }

  void* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }

 private:
  void swap(SharedBuffer& other) noexcept {
    std::swap(communicator_, other.communicator_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }
  Communicator* communicator_ = nullptr;
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace fa::parallel

#endif  // FA_SRC_PARALLEL_MEMORY_HPP_
