#include "parallel/pause.hpp"

#include <cstdint>

#include "parallel/cuda.hpp"

namespace fa::parallel {
namespace {

constexpr std::uint64_t kNanoseconds = 15000;

// Parameter: nanoseconds. The clock alone ends it.
constexpr const char* kText = R"(.version 7.0
.target sm_70
.address_size 64
.visible .entry fa_parallel_pause(.param .u64 nanoseconds)
{
  .reg .pred %waits;
  .reg .b64 %begin, %now, %length;
  ld.param.u64 %length, [nanoseconds];
  mov.u64 %begin, %globaltimer;
again:
  nanosleep.u32 200;
  mov.u64 %now, %globaltimer;
  sub.u64 %now, %now, %begin;
  setp.lt.u64 %waits, %now, %length;
  @%waits bra again;
  ret;
}
)";

}  // namespace

Pause::~Pause() {
  if (library_ != nullptr) cuda().cuLibraryUnload(library_);
}

void Pause::load() {
  if (library_ != nullptr) return;
  if (cuda().cuLibraryLoadData(&library_, kText, nullptr, nullptr, 0, nullptr, nullptr, 0) != CUDA_SUCCESS) {
    library_ = nullptr;
    return;
  }
  CUkernel kernel = nullptr;
  cuda_check(cuda().cuLibraryGetKernel(&kernel, library_, "fa_parallel_pause"), "cuLibraryGetKernel");
  // Loads it now: a launch within a capture must not. Launches take the kernel itself, by the driver's contract.
  CUfunction loaded = nullptr;
  cuda_check(cuda().cuKernelGetFunction(&loaded, kernel), "cuKernelGetFunction");
  function_ = reinterpret_cast<CUfunction>(kernel);
}

void Pause::queue(CUstream stream) const {
  if (function_ == nullptr) return;
  std::uint64_t nanoseconds = kNanoseconds;
  void* arguments[] = {&nanoseconds};
  cuda_check(cuda().cuLaunchKernel(function_, 1, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr), "cuLaunchKernel");
}

}  // namespace fa::parallel
