#ifndef FA_TEMPLATES_COMMON_BACKWARD_CONVERT_CUH_
#define FA_TEMPLATES_COMMON_BACKWARD_CONVERT_CUH_

#include <common/backward_params.cuh>
#include <common/backward_schedule.cuh>
#include <common/constants.cuh>
#include <common/elements.cuh>
#include <common/switches.cuh>
#include <ptx/language.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// dQ = scale * accumulator, rounded and in rows. A block takes one group of 16 rows; a thread takes rows g and g + 8
/// of a fragment, which are 64 bytes of the accumulator.
///
/// Config: Element, kHeadDimQk, kWarps, kAligned, kVectorReduce; optionally kVarlen.
template <class Config>
FA_DEVICE void backward_convert(const BackwardParams& params) {
  using T = typename Config::Element;
  constexpr int kColumnGroups = Config::kHeadDimQk / 8;
  constexpr bool kPacked = kVarlen<Config>;
  const RowGroup group = row_group<kPacked>(params);
  const int head = group.head;
  const int batch = group.batch;
  const BatchEntry<kPacked, BackwardParams> lengths = backward_entry<kPacked, kRowGroup>(params, batch);
  if constexpr (kPacked) {
    if (group.index < 0 || group.index * kRowGroup >= lengths.s_q) return;  // a slot without rows
  }

  for (int i = ptx::thread_index(); i < 8 * kColumnGroups; i += Config::kWarps * kWarpSize) {
    const int column_group = i % kColumnGroups;
    const int g = i / kColumnGroups;
    const float* fragment = params.dq_accum + fragment_offset<kPacked>(params, lengths, batch, head, group.index,
                                                                       column_group, kColumnGroups);
    float rows[2][8];
    FA_UNROLL
    for (int j = 0; j < 4; ++j) {
      // Lane 4g + j, registers 0 to 3; or register j of lanes 4g to 4g + 3.
      const Chunk chunk = ptx::ld_global_chunk(fragment + (Config::kVectorReduce ? 4 * (4 * g + j) : 32 * j + 4 * g));
      FA_UNROLL
      for (int e = 0; e < 4; ++e) {
        const int lane = Config::kVectorReduce ? j : e;
        const int word = Config::kVectorReduce ? e : j;
        rows[word / 2][2 * lane + word % 2] = ptx::from_bits(chunk.word[e]) * params.scale;
      }
    }
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int position = group.index * kRowGroup + 8 * r + g;
      if (position >= lengths.s_q) continue;
      T* target = static_cast<T*>(params.dq) +
                  offset_of_rows<kPacked>(lengths, batch, params.stride_dq_b, params.stride_dq_s) +
                  head * params.stride_dq_h + position * params.stride_dq_s + 8 * column_group;
      FA_UNROLL
      for (int piece = 0; piece < 8 / kPieceElements<T>; ++piece) {
        float values[kPieceElements<T>];
        FA_UNROLL
        for (int e = 0; e < kPieceElements<T>; ++e) values[e] = rows[r][piece * kPieceElements<T> + e];
        store_piece<Config::kAligned>(target + piece * kPieceElements<T>, values);
      }
    }
  }
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_BACKWARD_CONVERT_CUH_
