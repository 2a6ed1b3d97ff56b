#ifndef FA_TEMPLATES_COMMON_BACKWARD_SCHEDULE_CUH_
#define FA_TEMPLATES_COMMON_BACKWARD_SCHEDULE_CUH_

#include <common/backward_params.cuh>
#include <common/constants.cuh>
#include <common/variant.cuh>
#include <ptx/language.cuh>

namespace fa::kernel {

/// Which tile a thread block works on: of keys in the main kernel, of query rows in the pass for dQ.
struct BackwardTile {
  int block;
  int head;  // a KV head, in the pass for dQ a query head
  int batch;
  int split;
};

/// Block index -> tile. Tiles of `heads_in_flight` heads run together, so that what they share stays in the L2 cache;
/// among them the longest of a causal grid start first: the first keys, or with kLastFirst the last rows.
template <bool kCausal, bool kLastFirst>
FA_DEVICE BackwardTile backward_tile(const BackwardParams& params, int index, int blocks, int heads) {
  BackwardTile tile;
  tile.split = kLastFirst ? 0 : index % params.splits;
  if constexpr (!kLastFirst) index /= params.splits;
  if constexpr (kCausal) {
    const int section_size = params.heads_in_flight * blocks;
    const int section = index / section_size;
    const int first_head = section * params.heads_in_flight;
    const int rest = heads * params.b - first_head;
    const int in_section = rest < params.heads_in_flight ? rest : params.heads_in_flight;
    const int place = index - section * section_size;
    const int head = first_head + place % in_section;
    tile.block = kLastFirst ? blocks - 1 - place / in_section : place / in_section;
    tile.batch = head / heads;
    tile.head = head - tile.batch * heads;
  } else {
    tile.block = index % blocks;
    index /= blocks;
    tile.head = index % heads;
    tile.batch = index / heads;
  }
  return tile;
}

/// The steps of a key tile: the query tiles that see it, [first, m_blocks), of every query head of the group.
struct QuerySteps {
  int first;
  int begin;  // of the steps, numbered head by head
  int end;
  int stop;  // behind the last query tile: m_blocks, but for variants
};

template <bool kCausal, int kTileM>
FA_DEVICE QuerySteps query_steps(const BackwardParams& params, int first_key, int split) {
  QuerySteps steps;
  steps.first = 0;
  steps.stop = params.m_blocks;
  if constexpr (kCausal) {
    const int first_row = first_key - params.causal_shift;
    steps.first = first_row > 0 ? first_row / kTileM : 0;
  }
  const int visible = steps.first < params.m_blocks ? params.m_blocks - steps.first : 0;
  const int64_t total = static_cast<int64_t>(visible) * params.group;
  steps.begin = static_cast<int>(total * split / params.splits);
  steps.end = static_cast<int>(total * (split + 1) / params.splits);
  return steps;
}

/// The same under a mask in closed form, for the keys from `first_key` to `last_key`.
template <bool kCausal, class Variant, int kTileM, class Params>
FA_DEVICE QuerySteps variant_steps(const Params& params, int first_key, int last_key, int split) {
  QuerySteps steps;
  const int begin = rows_begin<kCausal, Variant>(params, first_key);
  const int end = rows_end<Variant>(params, last_key);
  steps.first = begin / kTileM;
  steps.stop = end > begin ? ceil_div(end, kTileM) : steps.first;
  const int64_t total = static_cast<int64_t>(steps.stop - steps.first) * params.group;
  steps.begin = static_cast<int>(total * split / params.splits);
  steps.end = static_cast<int>(total * (split + 1) / params.splits);
  return steps;
}

/// The steps through a tile list, once for each query head of the group.
FA_DEVICE QuerySteps list_steps(const int32_t* list, int group, int splits, int split) {
  QuerySteps steps;
  steps.first = 0;
  steps.stop = ptx::ld_global_nc(list - 2);
  const int64_t total = static_cast<int64_t>(steps.stop) * group;
  steps.begin = static_cast<int>(total * split / splits);
  steps.end = static_cast<int>(total * (split + 1) / splits);
  return steps;
}

/// Index of a fragment register in the accumulator of dQ: fragments of 16 rows and 8 columns follow each other as they
/// lie in the registers of a warp, so that each addition of a warp fills whole cache lines. With kVector the four
/// registers of a lane are neighbours.
template <bool kVector>
FA_DEVICE constexpr int fragment_index(int lane, int e) {
  return kVector ? lane * 4 + e : e * kWarpSize + lane;
}

/// Where the fragment of rows [16 * row_group, + 16) and columns [8 * column_group, + 8) starts.
FA_DEVICE int64_t fragment_offset(const BackwardParams& params, int batch, int head, int row_group, int column_group,
                                  int column_groups) {
  const int64_t row_groups = params.padded_rows / kRowGroup;
  return (((static_cast<int64_t>(batch) * params.h_q + head) * row_groups + row_group) * column_groups + column_group) *
         (kRowGroup * 8);
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_BACKWARD_SCHEDULE_CUH_
