#ifndef FA_TEMPLATES_COMMON_BACKWARD_PREPROCESS_CUH_
#define FA_TEMPLATES_COMMON_BACKWARD_PREPROCESS_CUH_

#include <common/backward_params.cuh>
#include <common/backward_schedule.cuh>
#include <common/constants.cuh>
#include <common/elements.cuh>
#include <common/switches.cuh>
#include <ptx/language.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// The row statistics that the backward kernels read, and a zeroed accumulator of dQ. A block takes one group of 16
/// rows.
///
/// Config: Element, kHeadDimQk, kHeadDimV, kWarps, kAligned; optionally kVarlen.
template <class Config>
FA_DEVICE void backward_preprocess(const BackwardParams& params) {
  using T = typename Config::Element;
  constexpr int kThreads = Config::kWarps * kWarpSize;
  constexpr int kPieces = Config::kHeadDimV / kPieceElements<T>;
  // Threads side by side on a row.
  constexpr int kLanes = ceil_power_of_two(kPieces) < kWarpSize ? ceil_power_of_two(kPieces) : kWarpSize;
  const int thread = ptx::thread_index();
  constexpr bool kPacked = kVarlen<Config>;
  const RowGroup group = row_group<kPacked>(params);
  const int head = group.head;
  const int batch = group.batch;
  const BatchEntry<kPacked, BackwardParams> lengths = backward_entry<kPacked, kRowGroup>(params, batch);
  if constexpr (kPacked) {
    if (group.index < 0 || group.index * kRowGroup >= lengths.s_q) return;  // a slot without rows
  }

  for (int row = thread / kLanes; row < kRowGroup; row += kThreads / kLanes) {
    const int position = group.index * kRowGroup + row;
    const bool valid = position < lengths.s_q;
    float lse = kInfinity;
    if (valid) {
      lse = ptx::ld_global(params.lse +
                           offset_of_rows<kPacked>(lengths, batch, params.stride_lse_b, params.stride_lse_s) +
                           head * params.stride_lse_h + position * params.stride_lse_s);
    }
    const bool weightless = lse == kInfinity || lse == -kInfinity;  // no key has a weight in this row
    float sum = 0.f;
    if (!weightless) {
      const T* o = static_cast<const T*>(params.o) +
                   offset_of_rows<kPacked>(lengths, batch, params.stride_o_b, params.stride_o_s) +
                   head * params.stride_o_h + position * params.stride_o_s;
      const T* dout = static_cast<const T*>(params.dout) +
                      offset_of_rows<kPacked>(lengths, batch, params.stride_dout_b, params.stride_dout_s) +
                      head * params.stride_dout_h + position * params.stride_dout_s;
      FA_UNROLL
      for (int piece = 0; piece < ceil_div(kPieces, kLanes); ++piece) {
        const int index = piece * kLanes + thread % kLanes;
        if (index >= kPieces) continue;
        float a[kPieceElements<T>];
        float b[kPieceElements<T>];
        load_piece<Config::kAligned>(a, o + index * kPieceElements<T>);
        load_piece<Config::kAligned>(b, dout + index * kPieceElements<T>);
        FA_UNROLL
        for (int i = 0; i < kPieceElements<T>; ++i) sum += a[i] * b[i];
      }
    }
    FA_UNROLL
    for (int mask = 1; mask < kLanes; mask *= 2) sum += ptx::shfl_xor(sum, mask);
    if (thread % kLanes != 0) continue;
    if (!weightless && params.dlse != nullptr) {
      sum -= ptx::ld_global(params.dlse +
                            offset_of_rows<kPacked>(lengths, batch, params.stride_dlse_b, params.stride_dlse_s) +
                            head * params.stride_dlse_h + position * params.stride_dlse_s);
    }
    const int64_t index = padded_rows_before<kPacked>(params, lengths, batch, head) + position;
    ptx::st_global(params.lse_log2 + index, weightless ? kInfinity : lse * kLog2e);
    ptx::st_global(params.delta + index, sum);
  }

  if (params.dq_accum == nullptr) return;
  constexpr int kChunks = kRowGroup * Config::kHeadDimQk / 4;
  float* accum = params.dq_accum + static_cast<int64_t>(ptx::block_index()) * (kRowGroup * Config::kHeadDimQk);
  for (int i = thread; i < kChunks; i += kThreads) ptx::st_global_chunk(accum + 4 * i, Chunk{});
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_BACKWARD_PREPROCESS_CUH_
