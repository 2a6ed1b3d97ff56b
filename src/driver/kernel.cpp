#include <fa/error.hpp>
#include <utility>

#include "driver/debug_report.hpp"
#include "driver/driver.hpp"
#include "support/log.hpp"

namespace fa::driver {
namespace {

constexpr int kDefaultSharedLimit = 48 * 1024;  // above it a kernel has to opt in

/// Unloads unless released.
class LibraryGuard {
 public:
  explicit LibraryGuard(CUlibrary library) : library_(library) {}
  ~LibraryGuard() {
    if (library_ != nullptr) api().cuLibraryUnload(library_);
  }
  LibraryGuard(const LibraryGuard&) = delete;
  LibraryGuard& operator=(const LibraryGuard&) = delete;
  CUlibrary release() noexcept { return std::exchange(library_, nullptr); }

 private:
  CUlibrary library_;
};

int attribute(CUkernel kernel, CUfunction_attribute which, CUdevice device) {
  int value = 0;
  check(api().cuKernelGetAttribute(&value, which, kernel, device), "cuKernelGetAttribute");
  return value;
}

/// Loading is lazy: this copies the code to the current context's device now.
void force_load(CUkernel kernel) {
  CUfunction function = nullptr;
  check(api().cuKernelGetFunction(&function, kernel), "cuKernelGetFunction");
  if (api().cuFuncLoad != nullptr) check(api().cuFuncLoad(function), "cuFuncLoad");
}

}  // namespace

RelaxedCapture::RelaxedCapture() : mode_(CU_STREAM_CAPTURE_MODE_RELAXED) {
  check(api().cuThreadExchangeStreamCaptureMode(&mode_), "cuThreadExchangeStreamCaptureMode");
}

RelaxedCapture::~RelaxedCapture() {
  api().cuThreadExchangeStreamCaptureMode(&mode_);
}

LoadedKernel::LoadedKernel(const std::vector<std::byte>& cubin, const std::string& name, int dynamic_shared,
                           CUcontext context, bool debug) {
  const ContextScope scope(context);
  const RelaxedCapture relaxed;
  CUdevice device = 0;
  check(api().cuCtxGetDevice(&device), "cuCtxGetDevice");
  CUlibrary library = nullptr;
  check(api().cuLibraryLoadData(&library, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0), "cuLibraryLoadData");
  LibraryGuard guard(library);
  CUkernel kernel = nullptr;
  check(api().cuLibraryGetKernel(&kernel, library, name.c_str()), "cuLibraryGetKernel");
  registers_ = attribute(kernel, CU_FUNC_ATTRIBUTE_NUM_REGS, device);
  local_bytes_ = attribute(kernel, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, device);
  static_shared_ = attribute(kernel, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, device);
  if (dynamic_shared + static_shared_ > kDefaultSharedLimit) {
    check(api().cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, dynamic_shared, kernel, device),
          "cuKernelSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES)");
  }
  constexpr int kPortableCluster = 8;
  if (attribute(kernel, CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH, device) > kPortableCluster)
    check(api().cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, kernel, device),
          "cuKernelSetAttribute(NON_PORTABLE_CLUSTER_SIZE_ALLOWED)");
  force_load(kernel);
  if (debug) listen_to(library);
  library_ = guard.release();
  function_ = reinterpret_cast<CUfunction>(kernel);  // launches in the context of the stream, by the driver's contract
}

LoadedKernel::~LoadedKernel() {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  const bool relaxed = api().cuThreadExchangeStreamCaptureMode(&mode) == CUDA_SUCCESS;
  const CUresult result = api().cuLibraryUnload(library_);
  if (relaxed) api().cuThreadExchangeStreamCaptureMode(&mode);
  if (result == CUDA_SUCCESS || result == CUDA_ERROR_DEINITIALIZED) return;  // the latter: the process is ending
  support::logf(LogLevel::debug, "a kernel could not be unloaded (CUDA error {})", static_cast<int>(result));
}

Start start_with(Start wanted, int driver_version) noexcept {
  constexpr int kEdgesOfGraphs = 12030;  // from which on a captured launch keeps the attribute
  return driver_version >= kEdgesOfGraphs ? wanted : Start::in_order;
}

EarlyLaunch::EarlyLaunch(unsigned grid, unsigned threads, unsigned dynamic_shared, CUstream stream) noexcept {
  config_.gridDimX = grid;
  config_.gridDimY = config_.gridDimZ = 1;
  config_.blockDimX = threads;
  config_.blockDimY = config_.blockDimZ = 1;
  config_.sharedMemBytes = dynamic_shared;
  config_.hStream = stream;
  attribute_.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attribute_.value.programmaticStreamSerializationAllowed = 1;
  config_.attrs = &attribute_;
  config_.numAttrs = 1;
}

void launch(CUfunction function, unsigned grid, unsigned threads, unsigned dynamic_shared, CUstream stream,
            void* params, Start start, void* second) {
  void* arguments[] = {params, second};  // of which the driver reads as many as the kernel has
  if (start_with(start, api().version) == Start::in_order) {
    check(api().cuLaunchKernel(function, grid, 1, 1, threads, 1, 1, dynamic_shared, stream, arguments, nullptr),
          "cuLaunchKernel");
    return;
  }
  const EarlyLaunch early(grid, threads, dynamic_shared, stream);
  check(api().cuLaunchKernelEx(&early.get(), function, arguments, nullptr), "cuLaunchKernelEx");
}

}  // namespace fa::driver
