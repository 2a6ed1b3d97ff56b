#include "driver/driver.hpp"

#include <fmt/format.h>

#include <array>
#include <atomic>
#include <fa/error.hpp>
#include <mutex>
#include <utility>

#include "driver/debug_report.hpp"
#include "support/dynamic_library.hpp"
#include "support/log.hpp"
#include "support/platform.hpp"
#include "support/text.hpp"

namespace fa::driver {
namespace {

using support::DynamicLibrary;

constexpr int kOldestDriver = 12000;
constexpr const char* kInstall = "install an NVIDIA driver of CUDA 12.0 (525.60) or newer";

using GetProcAddress = CUresult(CUDAAPI*)(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);
using GetVersion = CUresult(CUDAAPI*)(int*);

std::mutex g_mutex;
std::atomic<const Api*> g_api{nullptr};

[[noreturn]] void throw_no_driver(const std::string& problem, const std::string& remedy) {
  throw Error(ErrorCode::no_driver, fmt::format("no CUDA device can be used: {}; {}", problem, remedy),
              {{"problem", problem}, {"remedy", remedy}});
}

DynamicLibrary open_driver() {
  std::string problem;
  const auto libraries = support::platform::driver_libraries();
  for (const char* name : libraries) {
    std::string* first = problem.empty() ? &problem : nullptr;
    if (DynamicLibrary library = DynamicLibrary::open(name, first)) return library;
  }
  throw_no_driver(fmt::format("the driver library {} cannot be opened ({})", libraries.front(), problem),
                  std::string(kInstall) + ", and in a container pass the GPU through; Device::host() needs neither");
}

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

int driver_version(const DynamicLibrary& library) {
  const auto get = library.function<GetVersion>("cuDriverGetVersion");
  int version = 0;
  if (get == nullptr || get(&version) != CUDA_SUCCESS) return 0;
  return version;
}

/// Looks functions up by base name and version, the way that keeps the meaning of each fixed for ever.
class Resolver {
 public:
  explicit Resolver(const DynamicLibrary& library)
      : get_(library.function<GetProcAddress>("cuGetProcAddress_v2")), version_(driver_version(library)) {
    if (version_ == 0) throw_no_driver("the driver library does not answer", kInstall);
    if (version_ < kOldestDriver || get_ == nullptr) {
      throw_no_driver("the driver serves CUDA " + version_text(version_) + ", at least 12.0 is needed", kInstall);
    }
  }

  int version() const noexcept { return version_; }

  template <class Function>
  void optional(const char* name, int since, Function& function) const {
    void* address = nullptr;
    auto status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    const CUresult result = get_(name, &address, since, CU_GET_PROC_ADDRESS_LEGACY_STREAM, &status);
    const bool found = result == CUDA_SUCCESS && status == CU_GET_PROC_ADDRESS_SUCCESS;
    function = found ? reinterpret_cast<Function>(address) : nullptr;
  }

  template <class Function>
  void required(const char* name, int since, Function& function) const {
    optional(name, since, function);
    if (function == nullptr) throw_no_driver(fmt::format("the driver has no function {}", name), kInstall);
  }

 private:
  GetProcAddress get_;
  int version_;
};

std::unique_ptr<Api> resolve(const DynamicLibrary& library) {
  const Resolver resolver(library);
  auto api = std::make_unique<Api>();
  api->version = resolver.version();
#define FA_DRIVER_ENTRY(name, since) resolver.required(#name, since, api->name);
#define FA_DRIVER_OPTIONAL(name, since, ...) resolver.optional(#name, since, api->name);
#include "driver/entries.inc"
#undef FA_DRIVER_OPTIONAL
#undef FA_DRIVER_ENTRY
  return api;
}

std::string remedy_for(CUresult result) {
  switch (result) {
    case CUDA_ERROR_NO_DEVICE:
      return "check that this machine has an NVIDIA GPU and that CUDA_VISIBLE_DEVICES does not hide it";
    case CUDA_ERROR_STUB_LIBRARY:
      return "the toolkit's stub stands in for the driver: take it off the library path";
    case CUDA_ERROR_NOT_INITIALIZED:
      return "a process that was forked after CUDA was used cannot use it: start it anew instead";
    default:
      return "check the driver's installation with nvidia-smi";
  }
}

void initialise(const Api& api) {
  const CUresult result = api.cuInit(0);
  if (result == CUDA_SUCCESS) return;
  const char* name = nullptr;
  if (api.cuGetErrorName(result, &name) != CUDA_SUCCESS || name == nullptr) name = "an unknown error";
  throw_no_driver(fmt::format("cuInit failed with {} ({})", name, static_cast<int>(result)), remedy_for(result));
}

int attribute(CUdevice device, CUdevice_attribute which) {
  int value = 0;
  check(api().cuDeviceGetAttribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

support::Arch device_arch(CUdevice device) {
  return support::device_target(attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                                attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
}

CUdevice context_device() {
  CUdevice device = 0;
  check(api().cuCtxGetDevice(&device), "cuCtxGetDevice");
  return device;
}

int device_count() {
  int count = 0;
  check(api().cuDeviceGetCount(&count), "cuDeviceGetCount");
  return count;
}

CUdevice device_handle(int ordinal) {
  const int count = device_count();
  if (ordinal < 0 || ordinal >= count) support::throw_invalid("device", ordinal, fmt::format("0 to {}", count - 1));
  CUdevice device = 0;
  check(api().cuDeviceGet(&device, ordinal), "cuDeviceGet");
  return device;
}

}  // namespace

const Api& api() {
  if (const Api* ready = g_api.load(std::memory_order_acquire)) return *ready;
  const std::lock_guard<std::mutex> lock(g_mutex);
  if (const Api* ready = g_api.load(std::memory_order_acquire)) return *ready;
  DynamicLibrary library = open_driver();
  std::unique_ptr<Api> resolved = resolve(library);
  initialise(*resolved);
  library.keep_loaded();
  g_api.store(resolved.get(), std::memory_order_release);
  support::logf(LogLevel::info, "opened the CUDA driver, which serves CUDA {}", version_text(resolved->version));
  return *resolved.release();  // for the life of the process, like the driver itself
}

void check(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  const char* name = nullptr;
  const char* text = nullptr;
  if (const Api* ready = g_api.load(std::memory_order_acquire)) {
    ready->cuGetErrorName(result, &name);
    ready->cuGetErrorString(result, &text);
  }
  const std::string named =
      name != nullptr ? std::string(name) : fmt::format("CUDA error {}", static_cast<int>(result));
  const ErrorCode code = result == CUDA_ERROR_OUT_OF_MEMORY ? ErrorCode::out_of_memory : ErrorCode::cuda;
  std::string message = fmt::format("{} failed with {}: {}", call, named, text != nullptr ? text : "unknown error");
  std::vector<ErrorField> fields{{"call", call}, {"result", named}};
  if (const std::string stopped = take_debug_report(); !stopped.empty()) {
    message.append("; a debug kernel has stopped: ").append(stopped);
    fields.push_back({"stopped", stopped});
  }
  throw Error(code, message, std::move(fields));
}

DeviceInfo device_info(int ordinal) {
  const CUdevice device = device_handle(ordinal);
  DeviceInfo info;
  info.ordinal = ordinal;
  std::array<char, 256> name{};
  check(api().cuDeviceGetName(name.data(), static_cast<int>(name.size()), device), "cuDeviceGetName");
  info.name = name.data();
  info.arch = device_arch(device);
  info.multiprocessors = attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  check(api().cuDeviceTotalMem(&info.memory, device), "cuDeviceTotalMem");
  return info;
}

std::vector<DeviceInfo> list_devices() {
  std::vector<DeviceInfo> devices;
  const int count = device_count();
  for (int ordinal = 0; ordinal < count; ++ordinal) devices.push_back(device_info(ordinal));
  return devices;
}

CUcontext current_context() {
  CUcontext context = nullptr;
  check(api().cuCtxGetCurrent(&context), "cuCtxGetCurrent");
  return context;
}

ContextRef ContextRef::acquire(Device device) {
  if (device.kind() == Device::Kind::host) throw Error(ErrorCode::internal, "the host device has no CUDA context");
  ContextRef reference;
  CUcontext current = current_context();
  const int current_ordinal = current == nullptr ? -1 : static_cast<int>(context_device());
  const int fallback = current == nullptr ? 0 : current_ordinal;
  reference.info_ = device_info(device.kind() == Device::Kind::cuda ? device.ordinal() : fallback);
  if (reference.info_.ordinal == current_ordinal) {
    reference.context_ = current;
    return reference;
  }
  check(api().cuDevicePrimaryCtxRetain(&reference.context_, device_handle(reference.info_.ordinal)),
        "cuDevicePrimaryCtxRetain");
  reference.retained_ = true;
  return reference;
}

ContextRef::ContextRef(ContextRef&& other) noexcept
    : context_(std::exchange(other.context_, nullptr)),
      retained_(std::exchange(other.retained_, false)),
      info_(std::move(other.info_)) {}

ContextRef& ContextRef::operator=(ContextRef&& other) noexcept {
  std::swap(context_, other.context_);
  std::swap(retained_, other.retained_);
  std::swap(info_, other.info_);
  return *this;
}

ContextRef::~ContextRef() {
  // CUDA may be gone already when this runs at exit: the result does not matter.
  if (retained_) api().cuDevicePrimaryCtxRelease(static_cast<CUdevice>(info_.ordinal));
}

ContextScope::ContextScope(CUcontext context) {
  const CUcontext current = current_context();
  if (current == context || context == nullptr) return;
  const CUdevice current_device = current == nullptr ? -1 : context_device();
  check(api().cuCtxPushCurrent(context), "cuCtxPushCurrent");
  pushed_ = true;
  CUdevice device = -1;
  if (current == nullptr || api().cuCtxGetDevice(&device) != CUDA_SUCCESS || device != current_device) return;
  CUcontext popped = nullptr;
  api().cuCtxPopCurrent(&popped);
  pushed_ = false;
}

ContextScope::~ContextScope() {
  CUcontext popped = nullptr;
  if (pushed_) api().cuCtxPopCurrent(&popped);
}

bool is_capturing(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult result = api().cuStreamIsCapturing(stream, &status);
  if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) return true;
  check(result, "cuStreamIsCapturing");
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

CUdeviceptr allocate(std::size_t size, CUstream stream) {
  CUdeviceptr memory = 0;
  if (size != 0) check(api().cuMemAllocAsync(&memory, size, stream), "cuMemAllocAsync");
  return memory;
}

void free(CUdeviceptr memory, CUstream stream) {
  if (memory != 0) check(api().cuMemFreeAsync(memory, stream), "cuMemFreeAsync");
}

}  // namespace fa::driver
