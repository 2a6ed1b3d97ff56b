#include "gpu.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include <fa/error.hpp>

namespace fa::cli {
namespace {

CUdeviceptr offset(void* data, std::size_t bytes) {
  return reinterpret_cast<CUdeviceptr>(data) + bytes;
}

}  // namespace

Gpu::Gpu(int ordinal) : context_(driver::ContextRef::acquire(Device::cuda(ordinal))), scope_(context_.context()) {
  driver::check(driver::api().cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
}

Gpu::~Gpu() {
  driver::api().cuStreamDestroy(stream_);
}

void Gpu::synchronize() const {
  driver::check(driver::api().cuStreamSynchronize(stream_), "cuStreamSynchronize");
}

std::size_t Gpu::l2_bytes() const {
  CUdevice device = 0;
  int bytes = 0;
  driver::check(driver::api().cuDeviceGet(&device, info().ordinal), "cuDeviceGet");
  driver::check(driver::api().cuDeviceGetAttribute(&bytes, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, device),
                "cuDeviceGetAttribute");
  return static_cast<std::size_t>(std::max(bytes, 0));
}

DeviceBuffer::DeviceBuffer(std::size_t bytes) : bytes_(bytes) {
  driver::check(driver::api().cuMemAlloc(&pointer_, std::max<std::size_t>(bytes, 1)), "cuMemAlloc");
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : pointer_(std::exchange(other.pointer_, 0)), bytes_(std::exchange(other.bytes_, 0)) {}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(pointer_, other.pointer_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

DeviceBuffer::~DeviceBuffer() {
  if (pointer_ != 0) {
    driver::api().cuMemFree(pointer_);
  }
}

void DeviceBuffer::clear(Stream stream) {
  driver::check(driver::api().cuMemsetD8Async(pointer_, 0, bytes_, stream), "cuMemsetD8Async");
}

void DeviceBuffer::upload(const void* source, std::size_t bytes) {
  if (bytes == 0) return;
  driver::check(driver::api().cuMemcpyHtoD(pointer_, source, bytes), "cuMemcpyHtoD");
  // The bytes may still be on their way, and a stream of its own would not wait for them.
  driver::check(driver::api().cuStreamSynchronize(nullptr), "cuStreamSynchronize");
}

void DeviceBuffer::download(void* target, std::size_t bytes, std::size_t from) const {
  driver::check(driver::api().cuMemcpyDtoH(target, offset(data(), from), bytes), "cuMemcpyDtoH");
}

void DeviceBuffer::tile(const void* pattern, std::size_t bytes) {
  std::size_t filled = std::min(bytes, bytes_);
  upload(pattern, filled);
  while (filled < bytes_) {
    const std::size_t count = std::min(filled, bytes_ - filled);
    driver::check(driver::api().cuMemcpyDtoDAsync(offset(data(), filled), pointer_, count, nullptr),
                  "cuMemcpyDtoDAsync");
    filled += count;
  }
  driver::check(driver::api().cuCtxSynchronize(), "cuCtxSynchronize");
}

Event::Event() {
  driver::check(driver::api().cuEventCreate(&event_, CU_EVENT_DEFAULT), "cuEventCreate");
}

Event::Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}

Event::~Event() {
  if (event_ != nullptr) {
    driver::api().cuEventDestroy(event_);
  }
}

void Event::record(Stream stream) {
  driver::check(driver::api().cuEventRecord(event_, stream), "cuEventRecord");
}

void Event::synchronize() const {
  driver::check(driver::api().cuEventSynchronize(event_), "cuEventSynchronize");
}

double Event::milliseconds_since(const Event& start) const {
  float milliseconds = 0;
  driver::check(driver::api().cuEventElapsedTime(&milliseconds, start.event_, event_), "cuEventElapsedTime");
  return milliseconds;
}

std::optional<driver::DeviceInfo> find_gpu(std::string* problem) {
  try {
    std::vector<driver::DeviceInfo> devices = driver::list_devices();
    if (!devices.empty()) {
      return devices.front();
    }
    *problem = "the CUDA driver sees no GPU";
  } catch (const Error& error) {
    if (error.code() != ErrorCode::no_driver) {
      throw;
    }
    *problem = error.what();
  }
  return std::nullopt;
}

}  // namespace fa::cli
