#ifndef FA_TEMPLATES_COMMON_BACKWARD_SINK_CUH_
#define FA_TEMPLATES_COMMON_BACKWARD_SINK_CUH_

#include <common/backward_schedule.cuh>
#include <common/constants.cuh>
#include <common/sequences.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// The gradient of a head's sink, whose weight in a row is P = exp(sink - lse) and whose value is 0:
///   dsink = sum over b and rows of P * (0 - delta).
/// A block takes one query head; the order of its sum is fixed. Dropout leaves the sink alone, and delta knows of it.
///
/// Config: kWarps; optionally kVarlen.
template <class Config>
FA_DEVICE void backward_sink(const BackwardVariantParams& params) {
  constexpr int kThreads = Config::kWarps * kWarpSize;
  const int head = ptx::block_index();
  const int thread = ptx::thread_index();
  const float sink = sink_of(params.variant, head) * kLog2e;
  float sum = 0.f;
  for (int batch = 0; batch < params.b; ++batch) {
    const BatchEntry<kVarlen<Config>, BackwardParams> lengths =
        backward_entry<kVarlen<Config>, kRowGroup>(params, batch);
    const int64_t row = padded_rows_before<kVarlen<Config>>(params, lengths, batch, head);
    for (int i = thread; i < lengths.s_q; i += kThreads) {
      sum -= ptx::ex2(sink - ptx::ld_global(params.lse_log2 + row + i)) * ptx::ld_global(params.delta + row + i);
    }
  }
  FA_UNROLL
  for (int mask = 1; mask < kWarpSize; mask *= 2) sum += ptx::shfl_xor(sum, mask);
  const uint32_t shared = ptx::dynamic_shared();
  if (thread % kWarpSize == 0) ptx::st_shared_b32(shared + thread / kWarpSize * 4, ptx::bits(sum));
  ptx::sync_threads();
  if (thread != 0) return;
  float total = 0.f;
  for (int warp = 0; warp < Config::kWarps; ++warp) total += ptx::from_bits(ptx::ld_shared_b32(shared + warp * 4));
  ptx::st_global(params.dsink + head * params.stride_dsink, total);
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_BACKWARD_SINK_CUH_
