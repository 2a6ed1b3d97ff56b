#ifndef FA_TEMPLATES_COMMON_BACKWARD_PREPROCESS_CUH_
#define FA_TEMPLATES_COMMON_BACKWARD_PREPROCESS_CUH_

#include <common/backward_params.cuh>
#include <common/backward_schedule.cuh>
#include <common/constants.cuh>
#include <common/elements.cuh>
#include <common/row_statistics.cuh>
#include <common/switches.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// The block's rows of the accumulator of dQ, and their counters.
template <int kThreads, int kHeadDimQk>
FA_DEVICE void clear_sums(const BackwardParams& params, int thread) {
  if (params.dq_accum != nullptr) {
    constexpr int kChunks = kRowGroup * kHeadDimQk / 4;
    float* accum = params.dq_accum + static_cast<int64_t>(ptx::block_index()) * (kRowGroup * kHeadDimQk);
    for (int i = thread; i < kChunks; i += kThreads) ptx::st_global_chunk(accum + 4 * i, Chunk{});
  }
  if (params.turns != nullptr && thread < kTurnsPerGroup) {
    ptx::st_global(params.turns + static_cast<int64_t>(ptx::block_index()) * kTurnsPerGroup + thread, int32_t{0});
  }
}

/// What gradients of statistics come to in a row's delta: the sum of P times the gradient of column sums, and of the
/// entropy H dentropy (H - W), where W is the sum of P: 1, or less with a sink, whose own gradient is right by it too.
template <class Config>
FA_DEVICE float statistics_part(const BackwardStatisticsParams& params,
                                const BatchEntry<kVarlen<Config>, BackwardParams>& lengths, int batch, int head,
                                int position, float lse) {
  const int64_t first = kVarlen<Config> ? offset_of_rows<kVarlen<Config>>(lengths, batch, 0, 1)
                                        : static_cast<int64_t>(batch) * params.h_q * params.s_q;
  const int64_t at = statistic_of_row<kVarlen<Config>>(params, first, head, position);
  float part = 0.f;
  if constexpr (kColumnSumsGradient<Config>) part += ptx::ld_global(params.row_sums + at);
  if constexpr (kEntropyGradient<Config>) {
    float weight = 1.f;
    if (params.variant.sink != nullptr) {
      weight -= ptx::ex2((ptx::ld_global(params.variant.sink + head * params.variant.stride_sink) - lse) * kLog2e);
    }
    part += ptx::ld_global(params.dentropy + at) * (ptx::ld_global(params.entropy + at) - weight);
  }
  return part;
}

/// The row statistics that the backward kernels read, and a zeroed accumulator of dQ with its counters. A block takes
/// one group of 16 rows.
///
/// What a thread reads is under way before it needs any of it, and zeros leave beside.
///
/// Config: Element, kHeadDimQk, kHeadDimV, kWarps, kAligned; optionally kVarlen, kOverlaps, kEntropyGradient,
/// kColumnSumsGradient.
template <class Config>
FA_DEVICE void backward_preprocess(const BackwardParamsOf<Config>& params) {
  using T = typename Config::Element;
  constexpr int kThreads = Config::kWarps * kWarpSize;
  constexpr int kPieces = Config::kHeadDimV / kPieceElements<T>;
  // Threads side by side on a row.
  constexpr int kLanes = ceil_power_of_two(kPieces) < kWarpSize ? ceil_power_of_two(kPieces) : kWarpSize;
  constexpr int kRowsTogether = kThreads / kLanes;
  constexpr int kRounds = ceil_div(kRowGroup, kRowsTogether);
  constexpr int kPiecesOfLane = ceil_div(kPieces, kLanes);
  // The main kernel's blocks need a multiprocessor each: they come as the last of these leave.
  if constexpr (kOverlaps<Config>) ptx::griddepcontrol_launch_dependents();
  const int thread = ptx::thread_index();
  constexpr bool kPacked = kVarlen<Config>;
  const RowGroup group = row_group<kPacked>(params);
  const int head = group.head;
  const int batch = group.batch;
  const BatchEntry<kPacked, BackwardParams> lengths = backward_entry<kPacked, kRowGroup>(params, batch);
  if constexpr (kPacked) {
    if (group.index < 0 || group.index * kRowGroup >= lengths.s_q) return;  // a slot without rows
  }

  float lse[kRounds];
  float a[kRounds][kPiecesOfLane][kPieceElements<T>];
  float b[kRounds][kPiecesOfLane][kPieceElements<T>];
  FA_UNROLL
  for (int round = 0; round < kRounds; ++round) {
    const int row = round * kRowsTogether + thread / kLanes;
    const int position = group.index * kRowGroup + row;
    lse[round] = kInfinity;
    if (row >= kRowGroup || position >= lengths.s_q) continue;
    lse[round] =
        ptx::ld_global(params.lse + offset_of_rows<kPacked>(lengths, batch, params.stride_lse_b, params.stride_lse_s) +
                       head * params.stride_lse_h + position * params.stride_lse_s);
    const T* o = static_cast<const T*>(params.o) +
                 offset_of_rows<kPacked>(lengths, batch, params.stride_o_b, params.stride_o_s) +
                 head * params.stride_o_h + position * params.stride_o_s;
    const T* dout = static_cast<const T*>(params.dout) +
                    offset_of_rows<kPacked>(lengths, batch, params.stride_dout_b, params.stride_dout_s) +
                    head * params.stride_dout_h + position * params.stride_dout_s;
    FA_UNROLL
    for (int piece = 0; piece < kPiecesOfLane; ++piece) {
      const int index = piece * kLanes + thread % kLanes;
      if (index >= kPieces) continue;
      load_piece<Config::kAligned>(a[round][piece], o + index * kPieceElements<T>);
      load_piece<Config::kAligned>(b[round][piece], dout + index * kPieceElements<T>);
    }
  }

  clear_sums<kThreads, Config::kHeadDimQk>(params, thread);

  FA_UNROLL
  for (int round = 0; round < kRounds; ++round) {
    const int row = round * kRowsTogether + thread / kLanes;
    const int position = group.index * kRowGroup + row;
    // No key has a weight in this row, and O may be anything.
    const bool weightless = lse[round] == kInfinity || lse[round] == -kInfinity;
    float sum = 0.f;
    FA_UNROLL
    for (int piece = 0; piece < kPiecesOfLane; ++piece) {
      if (weightless || piece * kLanes + thread % kLanes >= kPieces) continue;
      FA_UNROLL
      for (int i = 0; i < kPieceElements<T>; ++i) sum += a[round][piece][i] * b[round][piece][i];
    }
    FA_UNROLL
    for (int mask = 1; mask < kLanes; mask *= 2) sum += ptx::shfl_xor(sum, mask);
    if (thread % kLanes != 0 || row >= kRowGroup) continue;
    if (!weightless && params.dlse != nullptr) {
      sum -= ptx::ld_global(params.dlse +
                            offset_of_rows<kPacked>(lengths, batch, params.stride_dlse_b, params.stride_dlse_s) +
                            head * params.stride_dlse_h + position * params.stride_dlse_s);
    }
    if constexpr (kStatisticsGradients<Config>) {
      if (!weightless) sum += statistics_part<Config>(params, lengths, batch, head, position, lse[round]);
    }
    const int64_t index = padded_rows_before<kPacked>(params, lengths, batch, head) + position;
    ptx::st_global(params.lse_log2 + index, weightless ? kInfinity : lse[round] * kLog2e);
    ptx::st_global(params.delta + index, sum);
  }
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_BACKWARD_PREPROCESS_CUH_
