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

/// Owns memory that `kTake` of a source has given, until `kGive` has it back.
template <class Source, auto kTake, auto kGive>
class Owned {
 public:
  Owned() = default;
  Owned(Source& source, std::size_t bytes) : source_(&source), data_((source.*kTake)(bytes)), size_(bytes) {}
  Owned(Owned&& other) noexcept { swap(other); }
  Owned& operator=(Owned&& other) noexcept {
    swap(other);
    return *this;
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (data_ != nullptr) (source_->*kGive)(data_);
  }

  void* at(std::size_t offset) const noexcept { return static_cast<std::byte*>(data_) + offset; }
  std::size_t size() const noexcept { return size_; }

 private:
  void swap(Owned& other) noexcept {
    std::swap(source_, other.source_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }
  Source* source_ = nullptr;
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

/// Memory of a device.
using Buffer = Owned<Memory, &Memory::allocate, &Memory::free>;
/// This rank's part of memory that ranks share.
using SharedBuffer = Owned<Communicator, &Communicator::share, &Communicator::unshare>;

}  // namespace fa::parallel

#endif  // FA_SRC_PARALLEL_MEMORY_HPP_
