#ifndef FA_EXAMPLES_DECODE_MEMORY_HPP_
#define FA_EXAMPLES_DECODE_MEMORY_HPP_

#include <cuda.h>
#include <dlfcn.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include <fa/attention.hpp>

/// Memory that attention works on where it runs and the loops of the examples on the CPU, and work that is captured
/// once and replayed.
namespace decode {

/// The CUDA driver, opened at run time: the program also starts on a machine without one.
class Gpu {
 public:
  /// Nothing where there is no usable GPU.
  static std::shared_ptr<Gpu> open() {
    auto gpu = std::shared_ptr<Gpu>(new Gpu);
    return gpu->ready_ ? gpu : nullptr;
  }

  void* allocate(std::size_t bytes) const {
    CUdeviceptr pointer = 0;
    if (allocate_(&pointer, bytes, CU_MEM_ATTACH_GLOBAL) != CUDA_SUCCESS) throw std::bad_alloc();
    return reinterpret_cast<void*>(pointer);
  }
  void release(void* memory) const { release_(reinterpret_cast<CUdeviceptr>(memory)); }
  fa::Stream stream() const { return stream_; }

  /// Waits until the GPU has done what was queued: then the CPU may look.
  void synchronize() const { check(synchronize_(stream_), "cuStreamSynchronize"); }

  /// What `queue` queues on the stream, as a graph; it does not run.
  CUgraphExec capture(const std::function<void()>& queue) const {
    CUgraph graph = nullptr;
    CUgraphExec executable = nullptr;
    check(begin_capture_(stream_, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "cuStreamBeginCapture");
    queue();
    check(end_capture_(stream_, &graph), "cuStreamEndCapture");
    const CUresult status = instantiate_(&executable, graph, 0);
    destroy_graph_(graph);
    check(status, "cuGraphInstantiateWithFlags");
    return executable;
  }
  void launch(CUgraphExec graph) const { check(launch_(graph, stream_), "cuGraphLaunch"); }
  void destroy(CUgraphExec graph) const { destroy_(graph); }

 private:
  Gpu() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) return;
    decltype(&cuInit) initialize = nullptr;
    decltype(&cuDevicePrimaryCtxRetain) retain = nullptr;
    decltype(&cuCtxSetCurrent) set_current = nullptr;
    decltype(&cuStreamCreate) create_stream = nullptr;
    CUcontext context = nullptr;
    ready_ = find(library, "cuInit", initialize) && find(library, "cuDevicePrimaryCtxRetain", retain) &&
             find(library, "cuCtxSetCurrent", set_current) && find(library, "cuStreamCreate", create_stream) &&
             find(library, "cuMemAllocManaged", allocate_) && find(library, "cuMemFree_v2", release_) &&
             find(library, "cuStreamSynchronize", synchronize_) &&
             find(library, "cuStreamBeginCapture_v2", begin_capture_) &&
             find(library, "cuStreamEndCapture", end_capture_) &&
             find(library, "cuGraphInstantiateWithFlags", instantiate_) && find(library, "cuGraphLaunch", launch_) &&
             find(library, "cuGraphExecDestroy", destroy_) && find(library, "cuGraphDestroy", destroy_graph_) &&
             initialize(0) == CUDA_SUCCESS && retain(&context, 0) == CUDA_SUCCESS &&
             set_current(context) == CUDA_SUCCESS && create_stream(&stream_, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS;
  }

  template <typename Function>
  static bool find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
  }
  static void check(CUresult status, const char* call) {
    if (status != CUDA_SUCCESS) throw std::runtime_error(std::string(call) + " has failed: " + std::to_string(status));
  }

  bool ready_ = false;
  CUstream stream_ = nullptr;
  CUresult (*allocate_)(CUdeviceptr*, std::size_t, unsigned) = nullptr;
  CUresult (*release_)(CUdeviceptr) = nullptr;
  CUresult (*synchronize_)(CUstream) = nullptr;
  CUresult (*begin_capture_)(CUstream, CUstreamCaptureMode) = nullptr;
  CUresult (*end_capture_)(CUstream, CUgraph*) = nullptr;
  CUresult (*instantiate_)(CUgraphExec*, CUgraph, unsigned long long) = nullptr;
  CUresult (*launch_)(CUgraphExec, CUstream) = nullptr;
  CUresult (*destroy_)(CUgraphExec) = nullptr;
  CUresult (*destroy_graph_)(CUgraph) = nullptr;
};

/// Numbers that the CPU and attention's device see: zeros at first.
template <typename Number>
class Shared {
 public:
  Shared(std::shared_ptr<Gpu> gpu, std::size_t size) : gpu_(std::move(gpu)), size_(size) {
    static_assert(std::is_trivially_copyable_v<Number>);
    data_ = gpu_ ? static_cast<Number*>(gpu_->allocate((size + 1) * sizeof(Number))) : new Number[size + 1];
    for (std::size_t i = 0; i < size_; ++i) data_[i] = Number{};
  }
  ~Shared() {
    if (gpu_) {
      gpu_->release(data_);
    } else {
      delete[] data_;
    }
  }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  Number* data() { return data_; }
  Number& operator[](std::size_t i) { return data_[i]; }
  std::size_t size() const { return size_; }

 private:
  std::shared_ptr<Gpu> gpu_;
  std::size_t size_;
  Number* data_ = nullptr;
};

/// Work that is queued again and again: on a GPU captured by the first run, and replayed by all. The arrays that it
/// reads may change in between, their places not.
class Replayed {
 public:
  Replayed(std::shared_ptr<Gpu> gpu, std::function<void(fa::Stream)> queue)
      : gpu_(std::move(gpu)), queue_(std::move(queue)) {}
  Replayed(Replayed&& other) noexcept
      : gpu_(std::move(other.gpu_)), queue_(std::move(other.queue_)), graph_(std::exchange(other.graph_, nullptr)) {}
  Replayed& operator=(Replayed&&) = delete;
  ~Replayed() {
    if (graph_ != nullptr) gpu_->destroy(graph_);
  }

  /// Returns when it is done.
  void run() {
    if (!gpu_) return queue_(nullptr);
    if (graph_ == nullptr) graph_ = gpu_->capture([&] { queue_(gpu_->stream()); });
    gpu_->launch(graph_);
    gpu_->synchronize();
  }

 private:
  std::shared_ptr<Gpu> gpu_;
  std::function<void(fa::Stream)> queue_;
  CUgraphExec graph_ = nullptr;
};

}  // namespace decode

#endif  // FA_EXAMPLES_DECODE_MEMORY_HPP_
