#ifndef FA_TEMPLATES_COMMON_FORWARD_SCHEDULE_CUH_
#define FA_TEMPLATES_COMMON_FORWARD_SCHEDULE_CUH_

#include <common/constants.cuh>
#include <common/forward_params.cuh>
#include <common/sequences.cuh>
#include <common/variant.cuh>
#include <ptx/language.cuh>

namespace fa::kernel {

/// Which query tile a thread block works on.
struct ForwardTile {
  int m_block;
  int head;  // of the grid: a query head, or a KV head when query heads are packed
  int batch;
  int split;
};

/// Block index -> tile. Tiles of `heads_in_flight` heads run together, so that their K and V stay in the L2 cache;
/// among them a causal grid starts the longest tiles (the last rows) first, which evens out the tail. Heads follow each
/// other as those of `place_of_head`.
template <class Variant, bool kLongestFirst>
FA_DEVICE ForwardTile forward_tile(const ForwardParams& params, int block) {
  ForwardTile tile;
  tile.split = block % params.splits;
  block /= params.splits;
  if constexpr (kLongestFirst) {
    const int all_heads = params.heads * params.b;
    const int section_size = params.heads_in_flight * params.m_blocks;
    const int section = block / section_size;
    const int first_head = section * params.heads_in_flight;
    const int rest = all_heads - first_head;
    const int heads = rest < params.heads_in_flight ? rest : params.heads_in_flight;
    const int index = block - section * section_size;
    tile.m_block = params.m_blocks - 1 - index / heads;
    place_of_head<Variant>(tile.batch, tile.head, first_head + index % heads, params.b, params.heads);
  } else {
    tile.m_block = block % params.m_blocks;
    place_of_head<Variant>(tile.batch, tile.head, block / params.m_blocks, params.b, params.heads);
  }
  return tile;
}

/// The same for a packed batch, whose m_blocks are slots: those of all sequences, one after the other. The tiles of a
/// slot run together for `heads_in_flight` heads, slots from the last to the first, so that a causal sequence starts
/// its longest tiles first. A slot without a tile has one before the first row or after the last.
template <int kTileM, bool kPackGqa>
FA_DEVICE ForwardTile forward_tile_of_batch(const ForwardParams& params, int block) {
  const int section_size = params.heads_in_flight * params.m_blocks;
  const int section = block / section_size;
  const int first_head = section * params.heads_in_flight;
  const int rest = params.heads - first_head;
  const int heads = rest < params.heads_in_flight ? rest : params.heads_in_flight;
  const int index = block - section * section_size;
  const int slot = params.m_blocks - 1 - index / heads;
  const int rows_each = kPackGqa ? params.group : 1;
  const SequenceParams& sequences = params.sequences;
  ForwardTile tile;
  tile.split = 0;
  tile.head = first_head + index % heads;
  tile.batch = sequence_of_slot<kTileM>(sequences.cu_q, params.b, sequences.total_q, rows_each, slot);
  tile.m_block = slot - first_slot<kTileM>(sequences.cu_q, tile.batch, sequences.total_q, rows_each);
  return tile;
}

/// Rows of a query tile. With packed GQA, row r is query position r / group of query head r % group of the KV head.
template <bool kPackGqa>
struct RowMap {
  int group;
  int head;  // of the grid

  FA_DEVICE int position(int row) const { return kPackGqa ? row / group : row; }
  FA_DEVICE int query_head(int row) const { return kPackGqa ? head * group + row % group : head; }
  FA_DEVICE int kv_head() const { return kPackGqa ? head : head / group; }
};

/// KV tiles of a query tile, walked from `end - 1` down to `begin`; those before `plain_end` need no mask, unless masks
/// of variants hide keys before `plain_begin`. Of a tile list: those before `kept_end` need no mask function.
struct KvRange {
  int begin;
  int plain_end;
  int end;
  int plain_begin = 0;
  int kept_end = 0;
};

/// `first_row` and `last_row` are query positions. With kParts `splits` blocks share the range in parts that differ by
/// one tile at most. `params` may be a Sequence.
template <bool kCausal, int kTileN, bool kParts = true, class Params>
FA_DEVICE KvRange kv_range(const Params& params, int first_row, int last_row, int split) {
  int visible_to_any = params.s_kv;
  int visible_to_all = params.s_kv;
  if constexpr (kCausal) {
    const int last = last_row + params.causal_shift + 1;
    const int first = first_row + params.causal_shift + 1;
    visible_to_any = last < visible_to_any ? last : visible_to_any;
    visible_to_all = first < visible_to_all ? first : visible_to_all;
  }
  KvRange range;
  range.begin = 0;
  range.end = visible_to_any > 0 ? ceil_div(visible_to_any, kTileN) : 0;
  range.plain_end = visible_to_all > 0 ? visible_to_all / kTileN : 0;
  if (kParts && params.splits > 1) {
    const int tiles = range.end;
    range.begin = start_of_part(tiles, params.splits, split);
    range.end = start_of_part(tiles, params.splits, split + 1);
  }
  return range;
}

/// Hides from row `row` (a query position) the keys at and after `key_limit(row)`.
template <bool kCausal, class Params>
FA_DEVICE int key_limit(const Params& params, int row) {
  if constexpr (!kCausal) return params.s_kv;
  const int limit = row + params.causal_shift + 1;
  return limit < params.s_kv ? limit : params.s_kv;
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_FORWARD_SCHEDULE_CUH_
