#include "parallel/cuda.hpp"

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>

#include <fa/error.hpp>

#include "support/dynamic_library.hpp"

namespace fa::parallel {
namespace {

using support::DynamicLibrary;

constexpr const char* kInstall = "install an NVIDIA driver of CUDA 12.0 (525.60) or newer";

using GetProcAddress = CUresult(CUDAAPI*)(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);

std::mutex g_mutex;
std::atomic<const Cuda*> g_cuda{nullptr};

[[noreturn]] void throw_no_driver(const std::string& problem) {
  throw Error(ErrorCode::no_driver, "no CUDA device can be used: " + problem + "; " + kInstall,
              {{"problem", problem}, {"remedy", kInstall}});
}

std::unique_ptr<Cuda> open(DynamicLibrary& library) {
  std::string problem;
  for (const char* name : {"libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"}) {
    if ((library = DynamicLibrary::open(name, problem.empty() ? &problem : nullptr))) break;
  }
  if (!library) throw_no_driver("the driver library libcuda.so.1 cannot be opened (" + problem + ")");
  const auto get = library.function<GetProcAddress>("cuGetProcAddress_v2");
  if (get == nullptr) throw_no_driver("the driver is older than CUDA 12.0");
  auto api = std::make_unique<Cuda>();
  const auto resolve = [get](const char* name, int since, auto& function) {
    void* address = nullptr;
    auto status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    const CUresult result = get(name, &address, since, CU_GET_PROC_ADDRESS_LEGACY_STREAM, &status);
    if (result != CUDA_SUCCESS || status != CU_GET_PROC_ADDRESS_SUCCESS) {
      throw_no_driver(std::string("the driver has no function ") + name);
    }
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
  };
#define FA_PARALLEL_CUDA_ENTRY(name, since) resolve(#name, since, api->name);
#include "parallel/cuda_entries.inc"
#undef FA_PARALLEL_CUDA_ENTRY
  if (const CUresult result = api->cuInit(0); result != CUDA_SUCCESS) {
    throw_no_driver("cuInit failed with " + std::to_string(static_cast<int>(result)));
  }
  return api;
}

}  // namespace

const Cuda& cuda() {
  if (const Cuda* ready = g_cuda.load(std::memory_order_acquire)) return *ready;
  const std::lock_guard<std::mutex> lock(g_mutex);
  if (const Cuda* ready = g_cuda.load(std::memory_order_acquire)) return *ready;
  DynamicLibrary library;
  std::unique_ptr<Cuda> api = open(library);
  library.keep_loaded();
  g_cuda.store(api.get(), std::memory_order_release);
  return *api.release();  // for the life of the process, like the driver itself
}

void cuda_check(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  const char* name = nullptr;
  const char* text = nullptr;
  cuda().cuGetErrorName(result, &name);
  cuda().cuGetErrorString(result, &text);
  const std::string named = name != nullptr ? name : "CUDA error " + std::to_string(static_cast<int>(result));
  const ErrorCode code = result == CUDA_ERROR_OUT_OF_MEMORY ? ErrorCode::out_of_memory : ErrorCode::cuda;
  throw Error(code, std::string(call) + " failed with " + named + ": " + (text != nullptr ? text : "unknown error"),
              {{"call", call}, {"result", named}});
}

CudaContext::CudaContext(Device device) {
  CUcontext current = nullptr;
  CUdevice current_device = -1;
  cuda_check(cuda().cuCtxGetCurrent(&current), "cuCtxGetCurrent");
  if (current != nullptr) cuda_check(cuda().cuCtxGetDevice(&current_device), "cuCtxGetDevice");
  CUdevice wanted = current != nullptr ? current_device : 0;
  if (device.kind() == Device::Kind::cuda) {
    cuda_check(cuda().cuDeviceGet(&wanted, device.ordinal()), "cuDeviceGet");
  }
  ordinal_ = static_cast<int>(wanted);
  cuda_check(cuda().cuDeviceGetAttribute(&multiprocessors_, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, wanted),
             "cuDeviceGetAttribute");
  if (current != nullptr && current_device == wanted) {
    context_ = current;
    return;
  }
  cuda_check(cuda().cuDevicePrimaryCtxRetain(&context_, wanted), "cuDevicePrimaryCtxRetain");
  retained_ = true;
}

CudaContext::~CudaContext() {
  // CUDA may be gone already when this runs at exit: the result does not matter.
  if (retained_) cuda().cuDevicePrimaryCtxRelease(static_cast<CUdevice>(ordinal_));
}

CudaScope::CudaScope(const CudaContext& context) noexcept {
  CUcontext current = nullptr;
  CUdevice device = -1;
  const bool has = cuda().cuCtxGetCurrent(&current) == CUDA_SUCCESS && current != nullptr &&
                   cuda().cuCtxGetDevice(&device) == CUDA_SUCCESS;
  // A context on the same device stays: its default stream is the one that is meant.
  if (has && static_cast<int>(device) == context.ordinal()) return;
  pushed_ = cuda().cuCtxPushCurrent(context.get()) == CUDA_SUCCESS;
}

CudaScope::~CudaScope() {
  CUcontext popped = nullptr;
  if (pushed_) cuda().cuCtxPopCurrent(&popped);
}

bool cuda_is_capturing(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult result = cuda().cuStreamIsCapturing(stream, &status);
  // The legacy default stream, while another one is captured.
  if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) return true;
  cuda_check(result, "cuStreamIsCapturing");
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

}  // namespace fa::parallel
