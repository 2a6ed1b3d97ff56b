#ifndef FA_SRC_PARALLEL_CUDA_HPP_
#define FA_SRC_PARALLEL_CUDA_HPP_

#include <cuda.h>

#include <fa/device.hpp>

namespace fa::parallel {

/// The driver's functions that this library calls itself, opened at run time like fa's own (driver/entries.inc).
struct Cuda {
#define FA_PARALLEL_CUDA_ENTRY(name, since) decltype(&::name) name = nullptr;
#include "parallel/cuda_entries.inc"
#undef FA_PARALLEL_CUDA_ENTRY
};

/// Throws fa::Error(no_driver).
const Cuda& cuda();

/// Throws fa::Error naming the call and what CUDA says.
void cuda_check(CUresult result, const char* call);

/// The context of a device: the one that is current, or the device's primary one, retained.
class CudaContext {
 public:
  explicit CudaContext(Device device);
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  CUcontext get() const noexcept { return context_; }
  int ordinal() const noexcept { return ordinal_; }
  int multiprocessors() const noexcept { return multiprocessors_; }

 private:
  CUcontext context_ = nullptr;
  int ordinal_ = 0;
  int multiprocessors_ = 0;
  bool retained_ = false;
};

/// Makes a context current for a scope.
class CudaScope {
 public:
  explicit CudaScope(const CudaContext& context) noexcept;
  ~CudaScope();
  CudaScope(const CudaScope&) = delete;
  CudaScope& operator=(const CudaScope&) = delete;

 private:
  bool pushed_ = false;
};

bool cuda_is_capturing(CUstream stream);

}  // namespace fa::parallel

#endif  // FA_SRC_PARALLEL_CUDA_HPP_
