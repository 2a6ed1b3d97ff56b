#ifndef FA_TEMPLATES_COMMON_BACKWARD_CONVERT_CUH_
#define FA_TEMPLATES_COMMON_BACKWARD_CONVERT_CUH_

#include <common/backward_params.cuh>
#include <common/backward_schedule.cuh>
#include <common/constants.cuh>
#include <common/elements.cuh>
#include <common/switches.cuh>
#include <common/transpose.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// Where a row of dQ starts.
template <class T, bool kPacked>
FA_DEVICE T* row_of_dq(const BackwardParams& params, const BatchEntry<kPacked, BackwardParams>& lengths,
                       const RowGroup& group, int position) {
  return static_cast<T*>(params.dq) +
         offset_of_rows<kPacked>(lengths, group.batch, params.stride_dq_b, params.stride_dq_s) +
         group.head * params.stride_dq_h + position * params.stride_dq_s;
}

/// A warp takes four neighbouring fragments as they lie in the accumulator, whole cache lines each, and its quads
/// exchange what they hold, so that each lane stores 16 bytes of a row.
template <class Config>
FA_DEVICE void convert_fragments(const BackwardParams& params,
                                 const BatchEntry<kVarlen<Config>, BackwardParams>& lengths, const RowGroup& group) {
  using T = typename Config::Element;
  constexpr int kColumnGroups = Config::kHeadDimQk / 8;
  const int lane = ptx::thread_index() % kWarpSize;
  for (int first = ptx::thread_index() / kWarpSize * 4; first < kColumnGroups; first += 4 * Config::kWarps) {
    const float* fragments =
        params.dq_accum +
        fragment_offset<kVarlen<Config>>(params, lengths, group.batch, group.head, group.index, first, kColumnGroups);
    Chunk chunks[4];
    FA_UNROLL
    for (int i = 0; i < 4; ++i) chunks[i] = ptx::ld_global_chunk(fragments + i * (kRowGroup * 8) + 4 * lane);
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      uint32_t words[4];
      FA_UNROLL
      for (int i = 0; i < 4; ++i) {
        words[i] = ptx::convert_pair<T>(ptx::from_bits(chunks[i].word[2 * r]) * params.scale,
                                        ptx::from_bits(chunks[i].word[2 * r + 1]) * params.scale);
      }
      transpose_quad(words, lane);
      const int position = group.index * kRowGroup + 8 * r + lane / 4;
      if (position < lengths.s_q) {
        ptx::st_global_chunk(row_of_dq<T, kVarlen<Config>>(params, lengths, group, position) + 8 * (first + lane % 4),
                             {{words[0], words[1], words[2], words[3]}});
      }
    }
  }
}

/// Where quads cannot share the work, a thread takes rows g and g + 8 of a fragment, which are 64 bytes of the
/// accumulator.
template <class Config>
FA_DEVICE void convert_pieces(const BackwardParams& params, const BatchEntry<kVarlen<Config>, BackwardParams>& lengths,
                              const RowGroup& group) {
  using T = typename Config::Element;
  constexpr int kColumnGroups = Config::kHeadDimQk / 8;
  constexpr bool kPacked = kVarlen<Config>;
  for (int i = ptx::thread_index(); i < 8 * kColumnGroups; i += Config::kWarps * kWarpSize) {
    const int column_group = i % kColumnGroups;
    const int g = i / kColumnGroups;
    const float* fragment = params.dq_accum + fragment_offset<kPacked>(params, lengths, group.batch, group.head,
                                                                       group.index, column_group, kColumnGroups);
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
      T* target = row_of_dq<T, kPacked>(params, lengths, group, position) + 8 * column_group;
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

/// dQ = scale * accumulator, rounded and in rows. A block takes one group of 16 rows.
///
/// Config: Element, kHeadDimQk, kWarps, kAligned, kVectorReduce; optionally kVarlen, kOverlaps.
template <class Config>
FA_DEVICE void backward_convert(const BackwardParams& params) {
  using T = typename Config::Element;
  constexpr int kColumnGroups = Config::kHeadDimQk / 8;
  constexpr bool kPacked = kVarlen<Config>;
  const RowGroup group = row_group<kPacked>(params);
  const BatchEntry<kPacked, BackwardParams> lengths = backward_entry<kPacked, kRowGroup>(params, group.batch);
  if constexpr (kOverlaps<Config>) ptx::griddepcontrol_wait();            // for the sums
  if (group.index < 0 || group.index * kRowGroup >= lengths.s_q) return;  // padding, or a slot without rows
  if constexpr (Config::kVectorReduce && Config::kAligned && sizeof(T) == 2 && kColumnGroups % 4 == 0) {
    convert_fragments<Config>(params, lengths, group);
  } else {
    convert_pieces<Config>(params, lengths, group);
  }
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_BACKWARD_CONVERT_CUH_
