#ifndef FA_TEMPLATES_COMMON_BACKWARD_REDUCE_CUH_
#define FA_TEMPLATES_COMMON_BACKWARD_REDUCE_CUH_

#include <common/backward_params.cuh>
#include <common/constants.cuh>
#include <common/switches.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// Sums the partial dK and dV of the splits of a key tile in their order. One warp a row; rows are numbered [b, h_kv,
/// s_kv].
///
/// Config: Element, kHeadDimQk, kHeadDimV, kWarps; optionally kOverlaps, kWithoutDk, kWithoutDv.
template <class Config>
FA_DEVICE void backward_reduce(const BackwardParams& params) {
  using T = typename Config::Element;
  constexpr int kColumns = Config::kHeadDimQk + Config::kHeadDimV;
  if constexpr (kOverlaps<Config>) ptx::griddepcontrol_wait();  // for the partial sums
  const int64_t rows = static_cast<int64_t>(params.b) * params.h_kv * params.s_kv;
  const int64_t row = static_cast<int64_t>(ptx::block_index()) * Config::kWarps + ptx::thread_index() / kWarpSize;
  if (row >= rows) return;
  const int position = static_cast<int>(row % params.s_kv);
  const int head = static_cast<int>(row / params.s_kv % params.h_kv);
  const int batch = static_cast<int>(row / params.s_kv / params.h_kv);
  T* dk = static_cast<T*>(params.dk) + batch * params.stride_dk_b + head * params.stride_dk_h +
          position * params.stride_dk_s;
  T* dv = static_cast<T*>(params.dv) + batch * params.stride_dv_b + head * params.stride_dv_h +
          position * params.stride_dv_s;
  constexpr int kFirst = kWantsDk<Config> ? 0 : Config::kHeadDimQk;
  constexpr int kEnd = kWantsDv<Config> ? kColumns : Config::kHeadDimQk;
  for (int column = kFirst + ptx::thread_index() % kWarpSize; column < kEnd; column += kWarpSize) {
    float sum = 0.f;
    for (int split = 0; split < params.splits; ++split) {
      sum += ptx::ld_global(params.partial + (split * rows + row) * kColumns + column);
    }
    if (column < Config::kHeadDimQk) {
      ptx::st_global(dk + column, ptx::convert<T>(sum * params.scale));
    } else {
      ptx::st_global(dv + (column - Config::kHeadDimQk), ptx::convert<T>(sum));
    }
  }
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_BACKWARD_REDUCE_CUH_
