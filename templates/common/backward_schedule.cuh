#ifndef FA_TEMPLATES_COMMON_BACKWARD_SCHEDULE_CUH_
#define FA_TEMPLATES_COMMON_BACKWARD_SCHEDULE_CUH_

#include <common/backward_params.cuh>
#include <common/constants.cuh>
#include <common/sequences.cuh>
#include <common/variant.cuh>
#include <ptx/language.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// Which tile a thread block works on: of keys in the main kernel, of query rows in the pass for dQ.
struct BackwardTile {
  int block;
  int head;  // a KV head, in the pass for dQ a query head
  int batch;
  int split;
};

/// Heads of a causal grid whose tiles run together.
struct Section {
  int index;
  int first_head;
  int heads;
  int place;  // of a tile among theirs
};

/// That of a tile, of `blocks` a head. Every section has `heads_in_flight` heads but the last, which has all that are
/// left of `heads`.
FA_DEVICE Section section_of_tile(const BackwardParams& params, int index, int blocks, int heads) {
  const int section_size = params.heads_in_flight * blocks;
  Section section;
  section.index = index / section_size;
  if (section.index > params.last_section) section.index = params.last_section;
  section.first_head = section.index * params.heads_in_flight;
  const int rest = heads - section.first_head;
  const bool takes_all = section.index == params.last_section || rest < params.heads_in_flight;
  section.heads = takes_all ? rest : params.heads_in_flight;
  section.place = index - section.index * section_size;
  return section;
}

/// Block index -> tile. Tiles of `heads_in_flight` heads run together, so that what they share stays in the L2 cache;
/// among them the longest of a causal grid start first: the first keys, or with kLastFirst the last rows. Heads follow
/// each other as those of `place_of_head`.
template <class Variant, bool kCausal, bool kLastFirst>
FA_DEVICE BackwardTile backward_tile(const BackwardParams& params, int index, int blocks, int heads) {
  BackwardTile tile;
  tile.split = kLastFirst ? 0 : index % params.splits;
  if constexpr (!kLastFirst) index /= params.splits;
  if constexpr (kCausal) {
    const Section section = section_of_tile(params, index, blocks, heads * params.b);
    const int head = section.first_head + section.place % section.heads;
    place_of_head<Variant>(tile.batch, tile.head, head, params.b, heads);
    tile.block = section.place / section.heads;
    if constexpr (kLastFirst) tile.block = blocks - 1 - tile.block;
  } else {
    tile.block = index % blocks;
    place_of_head<Variant>(tile.batch, tile.head, index / blocks, params.b, heads);
  }
  return tile;
}

/// The same where the blocks that share a key tile add in turns: in the grid, parts of a KV head's query heads are as
/// heads are. Each block has a lower number than those that wait for it.
template <class Variant, bool kCausal>
FA_DEVICE BackwardTile backward_tile_in_turns(const BackwardParams& params, int index, int blocks, int heads) {
  BackwardTile tile;
  int part;
  if constexpr (kCausal) {
    const Section section = section_of_tile(params, index, blocks, heads * params.splits * params.b);
    part = section.first_head + section.place % section.heads;
    tile.block = section.place / section.heads;
  } else {
    tile.block = index % blocks;
    part = index / blocks;
  }
  tile.split = part % params.splits;
  place_of_head<Variant>(tile.batch, tile.head, part / params.splits, params.b, heads);
  return tile;
}

/// The section of heads that a tile of a causal grid is in, where the last has no more heads than others.
FA_DEVICE int section_of(const BackwardParams& params, int index, int blocks) {
  return index / params.splits / (params.heads_in_flight * blocks);
}

/// The same for a packed batch: `blocks` slots of kTile rows (keys, or with kLastFirst query rows), those of all
/// sequences one after the other. The tiles of a slot run together for `heads_in_flight` heads. A slot without a tile
/// has one before the first row or after the last.
template <int kTile, bool kLastFirst>
FA_DEVICE BackwardTile backward_tile_of_batch(const BackwardParams& params, int index, int blocks, int heads) {
  const Section section = section_of_tile(params, index, blocks, heads);
  const int place = section.place / section.heads;
  const int slot = kLastFirst ? blocks - 1 - place : place;
  const SequenceParams& sequences = params.sequences;
  const int32_t* cu = kLastFirst ? sequences.cu_q : sequences.cu_kv;
  const int total = kLastFirst ? sequences.total_q : sequences.total_kv;
  BackwardTile tile;
  tile.split = 0;
  tile.head = section.first_head + section.place % section.heads;
  tile.batch = sequence_of_slot<kTile>(cu, params.b, total, 1, slot);
  tile.block = slot - first_slot<kTile>(cu, tile.batch, total, 1);
  return tile;
}

/// A group of 16 query rows of one head, for the kernels that take these one by one.
struct RowGroup {
  int index;  // in the batch entry
  int head;
  int batch;
};

/// The one of this thread block.
template <bool kVarlen>
FA_DEVICE RowGroup row_group(const BackwardParams& params) {
  const int groups = params.padded_rows / kRowGroup;
  RowGroup group;
  group.index = ptx::block_index() % groups;
  group.head = ptx::block_index() / groups % params.h_q;
  if constexpr (kVarlen) {
    const SequenceParams& sequences = params.sequences;
    group.batch = sequence_of_slot<kRowGroup>(sequences.cu_q, params.b, sequences.total_q, 1, group.index);
    group.index -= first_slot<kRowGroup>(sequences.cu_q, group.batch, sequences.total_q, 1);
  } else {
    group.batch = ptx::block_index() / groups / params.h_q;
  }
  return group;
}

/// Rows of the workspace before those of a head of a batch entry.
template <bool kVarlen>
FA_DEVICE int64_t padded_rows_before(const BackwardParams& params, const BatchEntry<kVarlen, BackwardParams>& entry,
                                     int batch, int head) {
  if constexpr (kVarlen) {
    return static_cast<int64_t>(head) * params.padded_rows + entry.first_padded_row;
  } else {
    return (static_cast<int64_t>(batch) * params.h_q + head) * params.padded_rows;
  }
}

/// What a backward kernel knows of a batch entry; kTileM: query rows of a tile.
template <bool kVarlen, int kTileM>
FA_DEVICE BatchEntry<kVarlen, BackwardParams> backward_entry(const BackwardParams& params, int batch) {
  if constexpr (kVarlen) {
    Sequence sequence = sequence_of(params, batch);
    sequence.m_blocks = ceil_div(sequence.s_q, kTileM);
    sequence.padded_rows = ceil_div(sequence.s_q, kRowGroup) * kRowGroup;
    sequence.first_padded_row =
        first_slot<kRowGroup>(params.sequences.cu_q, batch, params.sequences.total_q, 1) * kRowGroup;
    return sequence;
  } else {
    return params;
  }
}

/// The steps of a key tile: the query tiles that see it, [first, m_blocks), of every query head of the group.
struct QuerySteps {
  int first;
  int begin;  // of the steps, numbered head by head
  int end;
  int stop;  // behind the last query tile: m_blocks, but for variants
};

template <bool kCausal, int kTileM, class Params>
FA_DEVICE QuerySteps query_steps(const Params& params, int first_key, int split) {
  QuerySteps steps;
  steps.first = 0;
  steps.stop = params.m_blocks;
  if constexpr (kCausal) {
    const int first_row = first_key - params.causal_shift;
    steps.first = first_row > 0 ? first_row / kTileM : 0;
  }
  const int visible = steps.first < params.m_blocks ? params.m_blocks - steps.first : 0;
  steps.begin = start_of_part(visible * params.group, params.splits, split);
  steps.end = start_of_part(visible * params.group, params.splits, split + 1);
  return steps;
}

/// The same under a mask in closed form, for the keys from `first_key` to `last_key`.
template <bool kCausal, class Variant, int kTileM, class Params, class Lengths>
FA_DEVICE QuerySteps variant_steps(const Params& params, const Lengths& lengths, int first_key, int last_key,
                                   int split) {
  QuerySteps steps;
  const int begin = rows_begin<kCausal, Variant>(params, lengths, first_key);
  const int end = rows_end<Variant>(params, lengths, last_key);
  steps.first = begin / kTileM;
  steps.stop = end > begin ? ceil_div(end, kTileM) : steps.first;
  const int total = (steps.stop - steps.first) * lengths.group;
  steps.begin = start_of_part(total, lengths.splits, split);
  steps.end = start_of_part(total, lengths.splits, split + 1);
  return steps;
}

/// The steps through a tile list, once for each query head of the group.
FA_DEVICE QuerySteps list_steps(const int32_t* list, int group, int splits, int split) {
  QuerySteps steps;
  steps.first = 0;
  steps.stop = ptx::ld_global_nc(list - 3);
  steps.begin = start_of_part(steps.stop * group, splits, split);
  steps.end = start_of_part(steps.stop * group, splits, split + 1);
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

/// The same for a batch entry.
template <bool kVarlen>
FA_DEVICE int64_t fragment_offset(const BackwardParams& params, const BatchEntry<kVarlen, BackwardParams>& entry,
                                  int batch, int head, int row_group, int column_group, int column_groups) {
  if constexpr (kVarlen) {
    const int64_t groups_before = padded_rows_before<true>(params, entry, batch, head) / kRowGroup;
    return ((groups_before + row_group) * column_groups + column_group) * (kRowGroup * 8);
  } else {
    return fragment_offset(params, batch, head, row_group, column_group, column_groups);
  }
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_BACKWARD_SCHEDULE_CUH_
