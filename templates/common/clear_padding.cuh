#ifndef FA_TEMPLATES_COMMON_CLEAR_PADDING_CUH_
#define FA_TEMPLATES_COMMON_CLEAR_PADDING_CUH_

#include <common/constants.cuh>
#include <common/padding_params.cuh>
#include <common/sequences.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// Whether a row of a packed tensor belongs to a sequence. Sequences of no row share their start with the next, and the
/// last of those is the one that has rows. Called by whole warps.
FA_DEVICE bool in_sequence(const PaddingParams& params, int row) {
  if (params.b == 0) return false;
  const int sequence =
      last_sequence(params.b, [&](int i) { return clamp(ptx::ld_global(params.cu + i), 0, params.total) <= row; });
  const Span span = span_of(params.cu, params.used, sequence, params.total, params.longest);
  return row >= span.first && row < span.first + span.count;
}

/// Writes `value` to the rows of a packed tensor that belong to no sequence. One warp a row, with all its heads.
///
/// Config: Element, kWarps.
template <class Config>
FA_DEVICE void clear_padding(const PaddingParams& params) {
  using T = typename Config::Element;
  const int lane = ptx::thread_index() % kWarpSize;
  const int64_t row = static_cast<int64_t>(ptx::block_index()) * Config::kWarps + ptx::thread_index() / kWarpSize;
  if (row >= params.total || in_sequence(params, static_cast<int>(row))) return;
  T* target = static_cast<T*>(params.data) + row * params.stride_s;
  for (int head = 0; head < params.h; ++head) {
    for (int column = lane; column < params.d; column += kWarpSize) {
      ptx::st_global(target + head * params.stride_h + column, ptx::convert<T>(params.value));
    }
  }
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_CLEAR_PADDING_CUH_
