#include "fake_driver/fake_driver.hpp"

#include <cuda.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <common/append_params.cuh>
#include <common/debug_report.cuh>
#include <common/fp8_params.cuh>
#include <common/merge_states_params.cuh>
#include <common/padding_params.cuh>
#include <common/quantize_params.cuh>
#include <sm90/sm90_backward_params.cuh>
#include <sm90/sm90_forward_params.cuh>

// One Hopper GPU with one context, whose memory nobody touches.
namespace {

constexpr int kVersion = 13000;

std::vector<fake_driver::Launch>& launches() {
  static std::vector<fake_driver::Launch> all;
  return all;
}

template <class Handle>
Handle handle() {
  static int place = 0;
  return reinterpret_cast<Handle>(&place);
}

std::mutex g_mutex;  // of launches, kernels, libraries, and what a kernel stops with

/// What a kernel's handle points to. It lives on when its library is unloaded.
struct Kernel {
  std::string name;
  CUlibrary library = nullptr;
};

const Kernel* intern(CUlibrary library, const char* name) {
  static std::map<std::pair<CUlibrary, std::string>, Kernel> kernels;
  const std::scoped_lock lock(g_mutex);
  return &kernels.try_emplace({library, name}, Kernel{name, library}).first->second;
}

std::set<const void*>& loaded_libraries() {
  static std::set<const void*> all;
  return all;
}

/// Where calls are timed, the driver does nothing: FA_FAKE_DRIVER=idle.
bool is_idle() {
  static const bool idle = [] {
    const char* const wanted = std::getenv("FA_FAKE_DRIVER");
    return wanted != nullptr && std::string_view(wanted) == "idle";
  }();
  return idle;
}

void remember(fake_driver::Launch launch) {
  if (is_idle()) return;
  const std::scoped_lock lock(g_mutex);
  launches().push_back(std::move(launch));
}

fake_driver::Scales& scales() {
  static fake_driver::Scales all;
  return all;
}

/// Whose scales are where no other kernel's are: its parameters are told whole.
constexpr std::string_view kBytesBySync = "fa_sm80_fp8_forward";

/// Bytes of what the library launches a kernel with, without padding at the end.
std::size_t params_size(std::string_view kernel) {
  using namespace fa::kernel;
  if (kernel == kBytesBySync) return sizeof(ForwardFp8Params);
  if (kernel.starts_with("fa_sm90") && kernel.ends_with("forward"))
    return 4 * sizeof(TensorMap) + sizeof(ForwardVariantParams);
  if (kernel.starts_with("fa_sm90_backward")) return 4 * sizeof(TensorMap) + sizeof(BackwardVariantParams);
  if (kernel == "fa_append") return sizeof(AppendParams);
  if (kernel == "fa_merge_states") return sizeof(MergeStatesParams);
  if (kernel == "fa_quantize") return sizeof(QuantizeParams);
  if (kernel == "fa_clear_padding") return sizeof(PaddingParams);
  if (kernel.starts_with("fa_mask_")) return sizeof(MaskTilesParams);
  if (kernel.find("backward") != std::string_view::npos) return sizeof(BackwardVariantParams);
  if (kernel == "fa_row_norms" || kernel == "fa_schedule" || kernel.find("forward") != std::string_view::npos)
    return sizeof(ForwardVariantParams);
  return 0;
}

/// FNV-1a, of words.
std::uint64_t digest(const void* data, std::size_t bytes, std::uint64_t from = 0xcbf29ce484222325u) {
  for (std::size_t i = 0; i < bytes; i += sizeof(std::uint32_t)) {
    std::uint32_t word = 0;
    std::memcpy(&word, static_cast<const char*>(data) + i, std::min(sizeof word, bytes - i));
    from = (from ^ word) * 0x100000001b3u;
  }
  return from;
}

void remember(CUfunction function, bool early, unsigned grid, unsigned threads, unsigned shared, void** arguments,
              CUstream stream) {
  if (is_idle()) return;
  const auto& [kernel, library] = *reinterpret_cast<const Kernel*>(function);
  const std::size_t bytes = params_size(kernel);
  std::uint64_t params = bytes == 0 ? 0 : digest(arguments[0], bytes);
  if (kernel.ends_with("_forward") && kernel != kBytesBySync && scales().bytes != 0) {
    params = digest(static_cast<const char*>(arguments[0]) + scales().offset, scales().bytes, params);
  }
  remember({kernel, early, 0, 0, grid, threads, shared, params, library, stream});
}

CUresult device_attribute(int* value, CUdevice_attribute which, CUdevice) {
  *value = which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? 9
           : which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? 0
           : which == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT     ? 132
                                                                   : 1;
  return CUDA_SUCCESS;
}
CUresult device_name(char* name, int, CUdevice) {
  name[std::string_view("fake").copy(name, 4)] = '\0';
  return CUDA_SUCCESS;
}
CUresult library_load(CUlibrary* library, const void*, CUjit_option*, void**, unsigned, CUlibraryOption*, void**,
                      unsigned) {
  static std::uintptr_t last = std::uintptr_t{1} << 30;
  const std::scoped_lock lock(g_mutex);
  *library = reinterpret_cast<CUlibrary>(last += 64);
  loaded_libraries().insert(*library);
  return CUDA_SUCCESS;
}
CUresult library_unload(CUlibrary library) {
  const std::scoped_lock lock(g_mutex);
  return loaded_libraries().erase(library) != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
CUresult library_kernel(CUkernel* kernel, CUlibrary library, const char* name) {
  *kernel = reinterpret_cast<CUkernel>(const_cast<Kernel*>(intern(library, name)));
  return CUDA_SUCCESS;
}
CUresult launch(CUfunction function, unsigned grid, unsigned, unsigned, unsigned threads, unsigned, unsigned,
                unsigned shared, CUstream stream, void** arguments, void**) {
  remember(function, false, grid, threads, shared, arguments, stream);
  return CUDA_SUCCESS;
}
CUresult launch_ex(const CUlaunchConfig* config, CUfunction function, void** arguments, void**) {
  bool early = false;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    early = early || (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION &&
                      config->attrs[i].value.programmaticStreamSerializationAllowed != 0);
  }
  remember(function, early, config->gridDimX, config->blockDimX, config->sharedMemBytes, arguments, config->hStream);
  return CUDA_SUCCESS;
}

/// A digest of what is described stands for the map.
CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base, const cuuint64_t* sizes,
                      const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave,
                      CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (is_idle()) return CUDA_SUCCESS;
  std::uint64_t all = digest(&base, sizeof base, static_cast<std::uint64_t>(type));
  all = digest(sizes, rank * sizeof *sizes, all);
  all = digest(strides, (rank - 1) * sizeof *strides, all);
  all = digest(box, rank * sizeof *box, all);
  all = digest(steps, rank * sizeof *steps, all);
  std::memset(map, 0, sizeof *map);
  std::memcpy(map, &all, sizeof all);
  return CUDA_SUCCESS;
}

/// Addresses of their own, of nothing.
CUresult mem_alloc(CUdeviceptr* address, std::size_t bytes) {
  constexpr std::size_t kPage = std::size_t{1} << 21;
  static std::atomic<CUdeviceptr> next = CUdeviceptr{1} << 40;
  *address = next.fetch_add((bytes / kPage + 1) * kPage);
  return CUDA_SUCCESS;
}

std::atomic<bool>& capturing() {
  static std::atomic<bool> now{false};
  return now;
}

CUresult stream_is_capturing(CUstream, CUstreamCaptureStatus* status) {
  *status = capturing() ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

std::map<std::uintptr_t, std::vector<std::byte>>& contents() {
  static std::map<std::uintptr_t, std::vector<std::byte>> all;
  return all;
}

CUresult copy_to_host(void* to, CUdeviceptr from, std::size_t bytes) {
  auto next = contents().upper_bound(from);
  if (next == contents().begin()) return CUDA_SUCCESS;
  const auto& [base, memory] = *--next;
  const std::size_t offset = from - base;
  if (offset + bytes <= memory.size()) std::memcpy(to, memory.data() + offset, bytes);
  return CUDA_SUCCESS;
}
CUresult copy_to_host_async(void* to, CUdeviceptr from, std::size_t bytes, CUstream) {
  return copy_to_host(to, from, bytes);
}

/// A kernel's variable that the host writes: where a debug kernel reports.
constexpr CUdeviceptr kReportPlace = CUdeviceptr{3} << 58;
std::atomic<CUdeviceptr> g_report{0};

CUresult library_global(CUdeviceptr* address, std::size_t* bytes, CUlibrary, const char* name) {
  if (std::string_view(name) != "fa_debug_report") return CUDA_ERROR_NOT_FOUND;
  *address = kReportPlace;
  *bytes = sizeof(void*);
  return CUDA_SUCCESS;
}
CUresult device_pointer(CUdeviceptr* address, void* host, unsigned) {
  *address = reinterpret_cast<CUdeviceptr>(host);
  return CUDA_SUCCESS;
}
CUresult copy_to_device(CUdeviceptr to, const void* from, std::size_t bytes) {
  CUdeviceptr value = 0;
  if (to != kReportPlace || bytes != sizeof value) return CUDA_SUCCESS;
  std::memcpy(&value, from, bytes);
  g_report = value;
  return CUDA_SUCCESS;
}

std::string& stop() {
  static std::string text;
  return text;
}
CUresult stream_synchronize(CUstream) {
  const std::string text = [] {
    const std::scoped_lock lock(g_mutex);
    return std::exchange(stop(), {});
  }();
  if (text.empty()) return CUDA_SUCCESS;
  if (auto* const report = reinterpret_cast<fa::kernel::DebugReport*>(g_report.load()); report != nullptr) {
    report->block = 3;
    report->thread = 128;
    report->text[text.copy(report->text, sizeof report->text - 1)] = '\0';
    report->written = 1;
  }
  return CUDA_ERROR_LAUNCH_FAILED;
}

std::vector<fake_driver::StreamCall>& stream_calls() {
  static std::vector<fake_driver::StreamCall> all;
  return all;
}

std::atomic<bool>& done() {
  static std::atomic<bool> now{true};
  return now;
}

void remember_call(const char* what, CUstream stream, CUevent event, std::size_t bytes) {
  const std::scoped_lock lock(g_mutex);
  stream_calls().push_back({what, stream, event, bytes});
}

/// Streams and events of their own: what waits for what can be told.
template <class Handle>
CUresult new_handle(Handle* out) {
  static std::atomic<std::uintptr_t> next{std::uintptr_t{1} << 20};
  *out = reinterpret_cast<Handle>(next.fetch_add(64));
  return CUDA_SUCCESS;
}
fake_driver::Handles& handles() {
  static fake_driver::Handles all;
  return all;
}
template <class Handle>
CUresult counted_handle(Handle* out) {
  if (handles().left == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  if (handles().left > 0) --handles().left;
  ++handles().made;
  return new_handle(out);
}
CUresult stream_create(CUstream* stream, unsigned, int) {
  return counted_handle(stream);
}
CUresult event_create(CUevent* event, unsigned flags) {
  return flags == CU_EVENT_DISABLE_TIMING ? counted_handle(event) : new_handle(event);
}
/// Those that are counted are the ones that end.
template <class Handle>
CUresult give_back(Handle handle) {
  if (handle != nullptr) --handles().made;
  return CUDA_SUCCESS;
}
CUresult event_record(CUevent event, CUstream stream) {
  remember_call("record", stream, event, 0);
  return CUDA_SUCCESS;
}
CUresult stream_wait(CUstream stream, CUevent event, unsigned) {
  remember_call("wait", stream, event, 0);
  return CUDA_SUCCESS;
}
CUresult stream_query(CUstream) {
  return done() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
std::atomic<const void*>& reached() {
  static std::atomic<const void*> event{nullptr};
  return event;
}

CUresult event_query(CUevent event) {
  return done() || event == reached() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
CUresult copy(CUdeviceptr, CUdeviceptr, std::size_t bytes, CUstream stream) {
  remember_call("copy", stream, nullptr, bytes);
  return CUDA_SUCCESS;
}
CUresult copy_2d(const CUDA_MEMCPY2D* plan, CUstream stream) {
  remember_call("copy rows", stream, nullptr, plan->WidthInBytes * plan->Height);
  return CUDA_SUCCESS;
}
CUresult write_value(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned) {
  remember_call("write value", stream, reinterpret_cast<CUevent>(address), value);
  return CUDA_SUCCESS;
}
CUresult wait_value(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned) {
  remember_call("wait value", stream, reinterpret_cast<CUevent>(address), value);
  return CUDA_SUCCESS;
}
CUresult set_2d_8(CUdeviceptr, std::size_t, unsigned char, std::size_t width, std::size_t height, CUstream stream) {
  remember_call("set", stream, nullptr, width * height);
  return CUDA_SUCCESS;
}
CUresult set_2d_32(CUdeviceptr, std::size_t, unsigned, std::size_t width, std::size_t height, CUstream stream) {
  remember_call("set", stream, nullptr, 4 * width * height);
  return CUDA_SUCCESS;
}

CUresult mem_alloc_async(CUdeviceptr* address, std::size_t bytes, CUstream) {
  remember({fake_driver::kAllocation, false, fake_driver::kPool, bytes});
  *address = fake_driver::kPool;
  return CUDA_SUCCESS;
}

CUresult mem_free_async(CUdeviceptr address, CUstream) {
  remember({fake_driver::kRelease, false, static_cast<std::uintptr_t>(address)});
  return CUDA_SUCCESS;
}

CUresult mem_info(std::size_t* free, std::size_t* all) {
  *free = *all = std::size_t{1} << 36;
  return CUDA_SUCCESS;
}

/// Every kernel is as fast as every other.
CUresult elapsed_time(float* milliseconds, CUevent, CUevent) {
  *milliseconds = 1;
  return CUDA_SUCCESS;
}

CUresult memset_async(CUdeviceptr address, unsigned char, std::size_t bytes, CUstream) {
  remember({fake_driver::kMemset, false, static_cast<std::uintptr_t>(address), bytes});
  return CUDA_SUCCESS;
}

CUresult memset_32_async(CUdeviceptr address, unsigned, std::size_t words, CUstream) {
  remember({fake_driver::kMemset, false, static_cast<std::uintptr_t>(address), 4 * words});
  return CUDA_SUCCESS;
}

/// Gives kValue by the first argument and succeeds.
template <auto kValue, class Out, class... Rest>
CUresult give(Out* out, Rest...) {
  *out = static_cast<Out>(kValue);
  return CUDA_SUCCESS;
}
template <class Handle, class... Rest>
CUresult give_handle(Handle* out, Rest...) {
  *out = handle<Handle>();
  return CUDA_SUCCESS;
}
template <class... Arguments>
CUresult succeed(Arguments...) {
  return CUDA_SUCCESS;
}
/// Of a signature, whatever it is.
template <class... Arguments>
void* success(CUresult (*)(Arguments...)) {
  return reinterpret_cast<void*>(&succeed<Arguments...>);
}

const std::map<std::string_view, void*>& functions() {
  static const std::map<std::string_view, void*> all = [] {
    std::map<std::string_view, void*> table;
#define FA_DRIVER_ENTRY(name, since) table[#name] = success(static_cast<decltype(&::name)>(nullptr));
#define FA_DRIVER_OPTIONAL(name, since, ...)
#include "driver/entries.inc"
#undef FA_DRIVER_OPTIONAL
#undef FA_DRIVER_ENTRY
#define FA_PARALLEL_CUDA_ENTRY(name, since) table.try_emplace(#name, success(static_cast<decltype(&::name)>(nullptr)));
#include "parallel/cuda_entries.inc"
#undef FA_PARALLEL_CUDA_ENTRY
    const auto set = [&](const char* name, auto* function) { table[name] = reinterpret_cast<void*>(function); };
    set("cuDeviceGetCount", &give<1, int>);
    set("cuDeviceGet", &give<0, CUdevice, int>);
    set("cuDeviceGetAttribute", &device_attribute);
    set("cuDeviceGetName", &device_name);
    set("cuDeviceTotalMem", &give<std::size_t{1} << 36, std::size_t, CUdevice>);
    set("cuCtxGetCurrent", &give_handle<CUcontext>);
    set("cuCtxGetDevice", &give<0, CUdevice>);
    set("cuLibraryLoadData", &library_load);
    set("cuLibraryUnload", &library_unload);
    set("cuLibraryGetKernel", &library_kernel);
    set("cuKernelGetAttribute", &give<0, int, CUfunction_attribute, CUkernel, CUdevice>);
    set("cuKernelGetFunction", &give_handle<CUfunction, CUkernel>);
    set("cuStreamIsCapturing", &stream_is_capturing);
    set("cuLaunchKernel", &launch);
    set("cuLaunchKernelEx", &launch_ex);
    set("cuTensorMapEncodeTiled", &encode_tiled);
    set("cuMemAlloc", &mem_alloc);
    set("cuMemAllocAsync", &mem_alloc_async);
    set("cuMemGetInfo", &mem_info);
    set("cuStreamCreate", &give_handle<CUstream, unsigned>);
    set("cuEventCreate", &event_create);
    set("cuStreamCreateWithPriority", &stream_create);
    set("cuEventDestroy", &give_back<CUevent>);
    set("cuStreamDestroy", &give_back<CUstream>);
    set("cuEventRecord", &event_record);
    set("cuStreamWaitEvent", &stream_wait);
    set("cuStreamQuery", &stream_query);
    set("cuStreamSynchronize", &stream_synchronize);
    set("cuLibraryGetGlobal", &library_global);
    set("cuMemHostGetDevicePointer", &device_pointer);
    set("cuMemcpyHtoD", &copy_to_device);
    set("cuEventQuery", &event_query);
    set("cuMemcpyDtoH", &copy_to_host);
    set("cuMemcpyDtoHAsync", &copy_to_host_async);
    set("cuMemcpyDtoDAsync", &copy);
    set("cuMemcpy2DAsync", &copy_2d);
    set("cuStreamWriteValue64", &write_value);
    set("cuStreamWaitValue64", &wait_value);
    set("cuMemsetD2D8Async", &set_2d_8);
    set("cuMemsetD2D32Async", &set_2d_32);
    set("cuEventElapsedTime", &elapsed_time);
    set("cuMemFreeAsync", &mem_free_async);
    set("cuMemsetD8Async", &memset_async);
    set("cuMemsetD32Async", &memset_32_async);
    return table;
  }();
  return all;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) CUresult cuDriverGetVersion(int* version) {
  *version = kVersion;
  return CUDA_SUCCESS;
}

__attribute__((visibility("default"))) CUresult cuGetProcAddress_v2(const char* name, void** function, int, cuuint64_t,
                                                                    CUdriverProcAddressQueryResult* status) {
  const auto found = functions().find(name);
  *function = found == functions().end() ? nullptr : found->second;
  *status = *function == nullptr ? CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND : CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}

__attribute__((visibility("default"))) std::vector<fake_driver::Launch>& fa_fake_driver_launches() {
  return launches();
}

__attribute__((visibility("default"))) std::vector<fake_driver::StreamCall>& fa_fake_driver_stream_calls() {
  return stream_calls();
}

__attribute__((visibility("default"))) std::map<std::uintptr_t, std::vector<std::byte>>& fa_fake_driver_contents() {
  return contents();
}

__attribute__((visibility("default"))) bool fa_fake_driver_is_loaded(const void* library) {
  const std::scoped_lock lock(g_mutex);
  return loaded_libraries().contains(library);
}

__attribute__((visibility("default"))) fake_driver::Scales& fa_fake_driver_scales() {
  return scales();
}

__attribute__((visibility("default"))) std::string& fa_fake_driver_stop() {
  return stop();
}

__attribute__((visibility("default"))) std::atomic<bool>& fa_fake_driver_done() {
  return done();
}

__attribute__((visibility("default"))) std::atomic<const void*>& fa_fake_driver_reached() {
  return reached();
}

__attribute__((visibility("default"))) fake_driver::Handles& fa_fake_driver_handles() {
  return handles();
}

__attribute__((visibility("default"))) std::atomic<bool>& fa_fake_driver_capturing() {
  return capturing();
}
}
