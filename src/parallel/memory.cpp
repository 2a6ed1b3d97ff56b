#include "parallel/memory.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include <fa/types.hpp>

#include "parallel/cuda.hpp"
#include "parallel/errors.hpp"
#include "parallel/pause.hpp"

namespace fa::parallel {
namespace {

constexpr std::size_t kAlignment = 256;

/// Calls visit(to offset, from offset) for each row of all but the `skipped` innermost axes.
template <class Visit>
void for_each(const CopyRows& rows, std::size_t skipped, const Visit& visit) {
  const auto& axes = rows.axes;
  const auto count = [&](std::size_t axis) { return axis < skipped ? 1 : axes[axis].count; };
  for (std::int64_t l = 0; l < count(3); ++l) {
    for (std::int64_t k = 0; k < count(2); ++k) {
      for (std::int64_t j = 0; j < count(1); ++j) {
        for (std::int64_t i = 0; i < count(0); ++i) {
          visit(l * axes[3].to + k * axes[2].to + j * axes[1].to + i * axes[0].to,
                l * axes[3].from + k * axes[2].from + j * axes[1].from + i * axes[0].from);
        }
      }
    }
  }
}

std::byte* address(const TensorView& view, std::int64_t offset) {
  return static_cast<std::byte*>(view.data) + offset;
}

class HostMemory final : public Memory {
 public:
  void* allocate(std::size_t bytes) override {
    return ::operator new (std::max<std::size_t>(bytes, 1), std::align_val_t{kAlignment});
  }
  void free(void* memory) noexcept override { ::operator delete (memory, std::align_val_t{kAlignment}); }

  void copy(const TensorView& to, const TensorView& from, Stream) override {
    const CopyRows rows = rows_of_copy(to, from);
    for_each(rows, 0, [&](std::int64_t at, std::int64_t source) {
      std::memcpy(address(to, at), address(from, source), static_cast<std::size_t>(rows.width));
    });
  }

  void clear(const TensorView& to, bool minus_infinity, Stream) override {
    const CopyRows rows = rows_of_copy(to, to);
    for_each(rows, 0, [&](std::int64_t at, std::int64_t) {
      if (!minus_infinity) {
        std::memset(address(to, at), 0, static_cast<std::size_t>(rows.width));
      } else if (to.dtype == DType::f64) {
        std::fill_n(reinterpret_cast<double*>(address(to, at)), rows.width / 8,
                    -std::numeric_limits<double>::infinity());
      } else {
        std::fill_n(reinterpret_cast<float*>(address(to, at)), rows.width / 4, -std::numeric_limits<float>::infinity());
      }
    });
  }

  void upload(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void download(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void load_pause() override {}
  void pause(Stream) override {}
  void load_lanes() override {}
  Stream lane(int) const override { return nullptr; }
  void follow(Stream, Stream) override {}
  bool is_capturing(Stream) const override { return false; }
  int multiprocessors() const noexcept override { return 0; }
};

class CudaMemory final : public Memory {
 public:
  explicit CudaMemory(Device device) : context_(device) {}
  ~CudaMemory() override {
    // Queued work keeps what it needs; CUDA may be gone already when this runs at exit.
    const CudaScope scope(context_);
    if (event_ != nullptr) cuda().cuEventDestroy(event_);
    for (CUstream const lane : lanes_) {
      if (lane != nullptr) cuda().cuStreamDestroy(lane);
    }
  }
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;

  void* allocate(std::size_t bytes) override {
    const CudaScope scope(context_);
    CUdeviceptr memory = 0;
    cuda_check(cuda().cuMemAlloc(&memory, std::max<std::size_t>(bytes, 1)), "cuMemAlloc");
    return reinterpret_cast<void*>(memory);
  }
  void free(void* memory) noexcept override {
    // The context may be gone, with all of its memory.
    const CudaScope scope(context_);
    cuda().cuMemFree(reinterpret_cast<CUdeviceptr>(memory));
  }

  void copy(const TensorView& to, const TensorView& from, Stream stream) override {
    const CudaScope scope(context_);
    const CopyRows rows = rows_of_copy(to, from);
    const CopyRows::Axis& inner = rows.axes[0];
    const bool pitched = inner.count > 1 && is_pitch(inner.to, rows.width) && is_pitch(inner.from, rows.width);
    for_each(rows, pitched ? 1 : 0, [&](std::int64_t at, std::int64_t source) {
      if (!pitched) {
        cuda_check(cuda().cuMemcpyDtoDAsync(device_pointer(to, at), device_pointer(from, source),
                                            static_cast<std::size_t>(rows.width), stream),
                   "cuMemcpyDtoDAsync");
        return;
      }
      CUDA_MEMCPY2D plan{};
      plan.srcMemoryType = plan.dstMemoryType = CU_MEMORYTYPE_DEVICE;
      plan.srcDevice = device_pointer(from, source);
      plan.dstDevice = device_pointer(to, at);
      plan.srcPitch = static_cast<std::size_t>(inner.from);
      plan.dstPitch = static_cast<std::size_t>(inner.to);
      plan.WidthInBytes = static_cast<std::size_t>(rows.width);
      plan.Height = static_cast<std::size_t>(inner.count);
      cuda_check(cuda().cuMemcpy2DAsync(&plan, stream), "cuMemcpy2DAsync");
    });
  }

  void clear(const TensorView& to, bool minus_infinity, Stream stream) override {
    const CudaScope scope(context_);
    const CopyRows rows = rows_of_copy(to, to);
    const CopyRows::Axis& inner = rows.axes[0];
    const bool pitched = inner.count > 1 && is_pitch(inner.to, rows.width);
    for_each(rows, pitched ? 1 : 0, [&](std::int64_t at, std::int64_t) {
      const auto height = static_cast<std::size_t>(pitched ? inner.count : 1);
      const auto pitch = static_cast<std::size_t>(pitched ? inner.to : rows.width);
      const auto width = static_cast<std::size_t>(rows.width);
      if (minus_infinity) {
        constexpr unsigned kMinusInfinity = 0xff800000;
        cuda_check(cuda().cuMemsetD2D32Async(device_pointer(to, at), pitch, kMinusInfinity, width / 4, height, stream),
                   "cuMemsetD2D32Async");
      } else {
        cuda_check(cuda().cuMemsetD2D8Async(device_pointer(to, at), pitch, 0, width, height, stream),
                   "cuMemsetD2D8Async");
      }
    });
  }

  void upload(void* to, const void* from, std::size_t bytes) override {
    const CudaScope scope(context_);
    cuda_check(cuda().cuMemcpyHtoD(reinterpret_cast<CUdeviceptr>(to), from, bytes), "cuMemcpyHtoD");
    // Which may return before the device has the bytes; streams that do not block would not wait for them.
    cuda_check(cuda().cuStreamSynchronize(nullptr), "cuStreamSynchronize");
  }
  void download(void* to, const void* from, std::size_t bytes) override {
    const CudaScope scope(context_);
    cuda_check(cuda().cuMemcpyDtoH(to, reinterpret_cast<CUdeviceptr>(from), bytes), "cuMemcpyDtoH");
  }
  void load_pause() override {
    const CudaScope scope(context_);
    pause_.load();
  }
  void pause(Stream stream) override {
    const CudaScope scope(context_);
    pause_.queue(stream);
  }
  void load_lanes() override {
    const CudaScope scope(context_);
    if (event_ == nullptr) cuda_check(cuda().cuEventCreate(&event_, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    for (CUstream& lane : lanes_) {
      if (lane != nullptr) continue;
      cuda_check(cuda().cuStreamCreateWithPriority(&lane, CU_STREAM_NON_BLOCKING, 0), "cuStreamCreateWithPriority");
    }
  }
  Stream lane(int number) const override { return lanes_[static_cast<std::size_t>(number)]; }
  void follow(Stream stream, Stream other) override {
    const CudaScope scope(context_);
    cuda_check(cuda().cuEventRecord(event_, other), "cuEventRecord");
    cuda_check(cuda().cuStreamWaitEvent(stream, event_, 0), "cuStreamWaitEvent");
  }
  bool is_capturing(Stream stream) const override {
    const CudaScope scope(context_);
    return cuda_is_capturing(stream);
  }
  int multiprocessors() const noexcept override { return context_.multiprocessors(); }

 private:
  static CUdeviceptr device_pointer(const TensorView& view, std::int64_t offset) {
    return reinterpret_cast<CUdeviceptr>(address(view, offset));
  }
  static bool is_pitch(std::int64_t stride, std::int64_t width) {
    constexpr std::int64_t kMaxPitch = std::numeric_limits<std::int32_t>::max();
    return stride >= width && stride <= kMaxPitch;
  }

  CudaContext context_;
  Pause pause_;
  std::array<CUstream, 2> lanes_{};
  CUevent event_ = nullptr;
};

}  // namespace

std::unique_ptr<Memory> memory_of(Device device) {
  if (device.kind() == Device::Kind::host) return std::make_unique<HostMemory>();
  return std::make_unique<CudaMemory>(device);
}

CopyRows rows_of_copy(const TensorView& to, const TensorView& from) {
  const auto size = static_cast<std::int64_t>(size_of(to.dtype));
  CopyRows rows;
  rows.width = size;
  std::size_t used = 0;
  for (std::size_t axis = 4; axis-- > 0;) {
    const CopyRows::Axis next{to.shape[axis], to.strides[axis] * size, from.strides[axis] * size};
    if (next.count == 1) continue;
    CopyRows::Axis* const last = used > 0 ? &rows.axes[used - 1] : nullptr;
    if (last == nullptr && next.to == rows.width && next.from == rows.width) {
      rows.width *= next.count;
    } else if (last != nullptr && next.to == last->to * last->count && next.from == last->from * last->count) {
      last->count *= next.count;
    } else {
      rows.axes[used++] = next;
    }
  }
  return rows;
}

}  // namespace fa::parallel
