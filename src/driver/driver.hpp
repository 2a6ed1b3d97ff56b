#ifndef FA_SRC_DRIVER_DRIVER_HPP_
#define FA_SRC_DRIVER_DRIVER_HPP_

#include <cuda.h>

#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include <common/types.cuh>
#include <fa/device.hpp>

#include "support/arch.hpp"
#include "support/tensor_map.hpp"

namespace fa::driver {

/// The driver entry points that the library uses, each resolved by cuGetProcAddress for the version named here.
struct Api {
  int version = 0;  ///< cuDriverGetVersion
#define FA_DRIVER_ENTRY(name, since) decltype(&::name) name = nullptr;
#define FA_DRIVER_OPTIONAL(name, since, ...) std::type_identity_t<__VA_ARGS__> name = nullptr;
#include "driver/entries.inc"
#undef FA_DRIVER_OPTIONAL
#undef FA_DRIVER_ENTRY
};

/// Opens libcuda.so.1 and initialises it, once; a failed attempt is not remembered. Throws fa::Error(no_driver) with
/// what is missing and what to do.
const Api& api();

/// Throws fa::Error naming the call, CUDA_ERROR_… and its text, unless `result` is CUDA_SUCCESS: out_of_memory for that
/// result, else cuda; fields: call, result, and stopped with what a debug kernel has said.
void check(CUresult result, const char* call);

/// Facts of one GPU.
struct DeviceInfo {
  int ordinal = 0;
  std::string name;
  support::Arch arch;  ///< with the 'a' suffix where the architecture has one
  int multiprocessors = 0;
  std::size_t memory = 0;
};
DeviceInfo device_info(int ordinal);
std::vector<DeviceInfo> list_devices();

/// The context that is current on this thread, or nullptr.
CUcontext current_context();

/// A device and a context on it: the one that is current if it belongs to the device, else the device's primary
/// context, retained until destruction. Never changes what is current on any thread.
class ContextRef {
 public:
  static ContextRef acquire(Device device);
  ContextRef(ContextRef&& other) noexcept;
  ContextRef& operator=(ContextRef&& other) noexcept;
  ~ContextRef();

  CUcontext context() const noexcept { return context_; }
  const DeviceInfo& info() const noexcept { return info_; }

 private:
  ContextRef() = default;
  CUcontext context_ = nullptr;
  bool retained_ = false;
  DeviceInfo info_;
};

/// Makes a context current for a scope, unless one on the same device is: then the caller's stays, so that its default
/// stream is the one that is meant.
class ContextScope {
 public:
  explicit ContextScope(CUcontext context);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  bool pushed_ = false;
};

/// While another thread captures a stream in the global mode, calls that may synchronise are refused in every thread,
/// and break that capture. In the relaxed mode, for a scope, this thread is not concerned.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  CUstreamCaptureMode mode_;  ///< the one to restore
};

/// A kernel that is ready to launch in any context of the process.
class LoadedKernel {
 public:
  /// Loads verified bytes. Sets the dynamic shared memory limit for `context`'s device and forces the code onto it, so
  /// that no later launch synchronises. Safe while another thread captures a stream. What a `debug` kernel says when it
  /// stops is heard.
  LoadedKernel(const std::vector<std::byte>& cubin, const std::string& name, int dynamic_shared, CUcontext context,
               bool debug = false);
  ~LoadedKernel();
  LoadedKernel(const LoadedKernel&) = delete;
  LoadedKernel& operator=(const LoadedKernel&) = delete;

  CUfunction function() const noexcept { return function_; }
  int registers() const noexcept { return registers_; }
  int local_bytes() const noexcept { return local_bytes_; }
  int static_shared() const noexcept { return static_shared_; }

 private:
  CUlibrary library_ = nullptr;
  CUfunction function_ = nullptr;
  int registers_ = 0;
  int local_bytes_ = 0;
  int static_shared_ = 0;
};

/// When a kernel may start: once everything before it in its stream is complete, or as soon as the kernel before it
/// lets it (griddepcontrol.launch_dependents), which it then waits for itself.
enum class Start : unsigned char { in_order, early };

/// `wanted`, where the driver knows early starts outside of graphs and in them.
Start start_with(Start wanted, int driver_version) noexcept;

/// What cuLaunchKernelEx is given for an early start. Refers to itself.
class EarlyLaunch {
 public:
  EarlyLaunch(unsigned grid, unsigned threads, unsigned dynamic_shared, CUstream stream) noexcept;
  EarlyLaunch(const EarlyLaunch&) = delete;
  EarlyLaunch& operator=(const EarlyLaunch&) = delete;

  const CUlaunchConfig& get() const noexcept { return config_; }

 private:
  CUlaunchConfig config_{};
  CUlaunchAttribute attribute_{};
};

/// Queues one launch; `params` is the kernel's only argument, unless it has a `second`. Allocates nothing.
void launch(CUfunction function, unsigned grid, unsigned threads, unsigned dynamic_shared, CUstream stream,
            void* params, Start start = Start::in_order, void* second = nullptr);

/// Describes a tensor to the copy engine: boxes with the 128-byte swizzle, zeros outside of the tensor, 256 bytes
/// fetched into the L2 cache at a time. Work of the host alone, without locks or allocations. Throws fa::Error(cuda)
/// for what breaks cuTensorMapEncodeTiled's rules: base and strides multiples of 16 bytes, strides below 2^40, sizes 1
/// to 2^32, boxes 1 to 256.
void encode_tensor_map(const support::TensorMapSpec& spec, kernel::TensorMap& map);

/// Whether `stream` records into a graph, or is the legacy default stream while another one does and forbids its use.
/// Loading, allocating outside of the graph and synchronising must wait then.
bool is_capturing(CUstream stream);

/// Stream-ordered memory of the current context's pool; 0 bytes give 0. Throws fa::Error(out_of_memory).
CUdeviceptr allocate(std::size_t size, CUstream stream);
void free(CUdeviceptr memory, CUstream stream);

}  // namespace fa::driver

#endif  // FA_SRC_DRIVER_DRIVER_HPP_
