#ifndef FA_TEMPLATES_SM90_SM90_SCHEDULE_CUH_
#define FA_TEMPLATES_SM90_SM90_SCHEDULE_CUH_

#include <common/affine_reach.cuh>
#include <common/fixed_splits.cuh>
#include <common/forward_schedule.cuh>
#include <common/own_parts.cuh>
#include <common/paged.cuh>
#include <common/sequences.cuh>
#include <common/variant.cuh>
#include <common/whole_tiles.cuh>
#include <common/work_lists.cuh>
#include <ptx/math.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <sm90/sm90_forward_block.cuh>
#include <sm90/sm90_ring.cuh>

namespace fa::sm90 {

/// Which query tiles a thread block works on, what each sees, and how its warps hear of it.
///
/// The persistent tile scheduler has three kinds: static rounds over the tiles, waves of blocks, and dynamic, by an
/// atomic counter. A producer posts each query tile as a work descriptor next to its Q; consumers and dropout RNG warps
/// consume it.
template <class Traits>
struct Schedule : ForwardBlock<Traits> {
  using Base = ForwardBlock<Traits>;
  using Config = typename Base::Config;
  using Variant = typename Base::Variant;
  using Params = typename Base::Params;
  using Rows = typename Base::Rows;
  using Query = typename Base::Query;
  using Base::kTileM, Base::kTileN, Base::kQBuffers, Base::kConsumers, Base::kVarlen, Base::kPaged, Base::kRagged,
      Base::kPostsPieces, Base::kNamesLast, Base::kLengthSplits, Base::kFixedSplits, Base::kShares, Base::kSplitTiles,
      Base::kWindowed, Base::kLists, Base::kKeepsFirst, Base::kWaves, Base::kDistancePruning, Base::kEndsAligned,
      Base::kWholeTiles, Base::kPostsFirstRow, Base::kRotates, Base::kExchange, Base::kLayout, Base::params,
      Base::q_full, Base::work_shared, Base::listed_shared;

  const int dense_rows;
  const int dense_before_rows;
  const int tiles;

  FA_DEVICE explicit Schedule(const Params& all)
      : Base(all),
        dense_rows(Config::kPackGqa ? all.base.s_q * all.base.group : all.base.s_q),
        dense_before_rows(kEndsAligned && !kRagged ? (all.base.m_blocks * kTileM - all.base.s_q) / 16 * 16 : 0),
        tiles(all.base.m_blocks * all.base.heads * (kVarlen ? 1 : all.base.b) * all.base.splits) {}

  // The persistent tile scheduler is static where the order of rounds evens out the tiles: blocks stay for all rounds.
  // Where tiles differ by more the grid has several waves of blocks. With a counter these are the rounds of the warp
  // that looks for empty tiles alone.
  FA_DEVICE int wave_size() const { return kWaves ? params.sequences.wave : ptx::block_count(); }
  FA_DEVICE int place_in_wave() const {
    return kWaves ? ptx::block_index() % params.sequences.wave : ptx::block_index();
  }
  FA_DEVICE Rounds rounds() const {
    if constexpr (!kWaves) return {0, 0};
    return rounds_of_wave(kernel::ceil_div(tiles, wave_size()), ptx::block_index() / wave_size());
  }
  FA_DEVICE int tile_index(int round) const {
    if constexpr (kShares) return round * wave_size() + place_in_wave();  // blocks of a tile wait for lower numbers
    return tile_of_round(round, place_in_wave(), wave_size());
  }
  FA_DEVICE bool has_tile(const Rounds& own, int round) const {
    return (!kWaves || round < own.end) && tile_index(round) < tiles;
  }

  /// The lengths of a query's batch entry: those of a dense batch are the launch parameters.
  FA_DEVICE const auto& lengths_of(const Query& query) const {
    if constexpr (kRagged) {
      return query.sequence;
    } else {
      return static_cast<const kernel::ForwardParams&>(params);
    }
  }

  /// The (packed) row of a head with which a query tile begins.
  FA_DEVICE int first_row_of(const Query& query) const {
    if constexpr (kPostsFirstRow) return query.first_row;
    return query.tile.m_block * kTileM - dense_before_rows;
  }

  /// The same of a tile that ends where the ragged head's rows do, or a tile's rows earlier. Whole warpgroups lie
  /// before the first row, so that the others cross the diagonal as in a whole tile.
  FA_DEVICE int place_of(const Query& query) const {
    const int rows = row_count(query);
    return query.tile.m_block * kTileM - (kernel::ceil_div(rows, kTileM) * kTileM - rows) / 64 * 64;
  }

  /// Whether there is such a row.
  FA_DEVICE bool has_row(const Query& query, int row) const {
    return static_cast<uint32_t>(row) < static_cast<uint32_t>(row_count(query));
  }

  /// (Packed) rows of a head.
  FA_DEVICE int row_count(const Query& query) const {
    if constexpr (!kRagged) return dense_rows;
    return Config::kPackGqa ? lengths_of(query).s_q * params.group : lengths_of(query).s_q;
  }

  /// Not so of the slots of a packed batch that have no tile.
  FA_DEVICE bool has_rows(const Query& query) const {
    if constexpr (!kRagged) return true;
    return query.tile.m_block >= 0 && query.tile.m_block * kTileM < row_count(query);
  }

  /// Called by whole warps where the batch is packed, or in pages.
  FA_DEVICE Query query_of_round(int round) const { return query_of(tile_index(round)); }

  /// Likewise.
  FA_DEVICE Query query_of(int index) const {
    Query query;
    take_tile(query, index);
    look(query);
    return query;
  }

  /// Which tile it is.
  FA_DEVICE void take_tile(Query& query, int index) const {
    if constexpr (kVarlen) {
      query.tile =
          kernel::forward_tile_of_batch<kTileM, Config::kPackGqa>(params, kShares ? index / params.splits : index);
      if constexpr (kShares) query.tile.split = index % params.splits;
      if constexpr (!kPaged) query.sequence = kernel::sequence_of(params, query.tile.batch);
    } else {
      query.tile = kernel::forward_tile<Variant, Config::kCausal>(params, index);
      if constexpr (kRotates) query.tile.m_block = rotated(query.tile);
      // ALiBi prunes least in the last heads: long tiles first.
      if constexpr (kDistancePruning) query.tile.head = params.heads - 1 - query.tile.head;
    }
  }

  /// The first query tile of this block that sees a key, if there is one.
  FA_DEVICE Query first_with_keys() const {
    const Rounds own = rounds();
    Query query;
    for (int round = own.begin; has_tile(own, round); ++round) {
      query = query_of_round(round);
      if (query.range.begin < query.range.end) break;
    }
    return query;
  }

  /// Calls `body(query)` for each query tile that this block takes whole, and for each single split of others. With
  /// kAll also for such as their request has not. Called by whole warps over pages. First splits of all tiles are
  /// first, so that whole tiles go round the blocks.
  template <bool kAll = false, class Body>
  FA_DEVICE void for_each_split(const Body& body) const {
    const int query_tiles = tiles / params.splits;
    if constexpr (!kPaged) {  // the lengths of dense requests are one
      FA_UNROLL_BY(1)
      for (int tile = ptx::block_index(); tile < query_tiles; tile += ptx::block_count()) {
        Query query = query_of(tile * params.splits);
        query.ahead.last = tile + ptx::block_count() >= query_tiles;
        take_whole(query, params.splits);
        body(query);
      }
    } else {
      const kernel::KeyCounts counts = kernel::KeyCounts::of(params);
      const int whole_keys = kernel::most_whole_keys(counts, params);
      const int end = counts.longest <= whole_keys ? query_tiles : tiles;
      FA_UNROLL_BY(1)
      for (int first = ptx::block_index(); first < end; first += kernel::kWarpSize * ptx::block_count()) {
        uint32_t wanted = splits_that_exist<kAll>(first, end, query_tiles, whole_keys);
        const bool more = first + kernel::kWarpSize * int64_t{ptx::block_count()} < end;
        FA_UNROLL_BY(1)
        for (int i = 0; i < kernel::kWarpSize; ++i) {
          if (wanted == 0) break;
          const int index = first + ptx::popc((wanted & (0 - wanted)) - 1) * ptx::block_count();
          wanted &= wanted - 1;
          const int split = index / query_tiles;
          Query query = query_of((index - split * query_tiles) * params.splits + split);
          query.ahead.last = wanted == 0 && !more;
          if (query.sequence.s_kv <= whole_keys) take_whole(query, query.sequence.splits);
          body(query);
        }
      }
    }
  }

  /// Of 32 splits of this block from number `first` on: a bit each.
  template <bool kAll>
  FA_DEVICE uint32_t splits_that_exist(int first, int end, int query_tiles, int whole_keys) const {
    const int64_t index = first + ptx::thread_index() % kernel::kWarpSize * int64_t{ptx::block_count()};
    bool exists = false;
    if (index < end) {
      const int split = static_cast<int>(index) / query_tiles;
      const int tile = static_cast<int>(index) - split * query_tiles;
      const int batch = kernel::forward_tile<Variant, Config::kCausal>(params, tile * params.splits).batch;
      const int keys = kernel::keys_of_request(params, batch);
      const int splits = kernel::splits_of_length(keys, params.splits, kernel::kLengthKeys<Config>);
      exists = keys <= whole_keys ? split == 0 : kAll || split < splits;
    }
    return ptx::vote_ballot(exists);
  }

  /// From its first split to all of a query tile.
  FA_DEVICE void take_whole(Query& query, int splits) const {
    const int begin = query.range.begin;
    query.tile.split = splits - 1;
    look<true>(query);
    query.range.begin = begin;
    query.whole = true;
  }

  FA_DEVICE int row_of_q(const Query& work) const {
    int row = Config::kPackGqa ? first_row_of(work) / params.group : first_row_of(work);
    if constexpr (kVarlen) row += work.sequence.first_row;  // rows behind the sequence come along, and are not stored
    return row;
  }

  /// Calls `body(query)` for each piece of this block's part. Called by whole warps. Without a schedule from the last
  /// piece, which another part may wait for, to the first, which may have to wait: else parts would wait in a chain.
  template <class Body>
  FA_DEVICE void for_each_piece(const Body& body) const {
    if constexpr (kernel::kOwnParts<Config>) {
      const kernel::OwnParts<Config, kernel::ForwardParamsOf<Config>, true> own(params);
      FA_UNROLL_BY(1)
      for (int i = own.pieces() - 1; i >= 0; --i) {
        Query query;
        take_piece(query, own.piece(i, query.tile), body);
      }
    } else {
      const kernel::WorkLists lists(params.paged);
      const int pieces = kernel::pieces_of(lists, ptx::block_index());
      FA_UNROLL_BY(1)
      for (int i = 0; i < pieces; ++i) {
        Query query;
        take_piece(query, kernel::piece_of(lists, ptx::block_index(), i, query.tile), body);
      }
    }
  }
  template <class Body>
  FA_DEVICE void take_piece(Query& query, const kernel::Piece& piece, const Body& body) const {
    look(query);
    query.range = kernel::cut(query.range, piece);
    query.sharing = SharingParts::of(piece);
    body(query);
  }

  /// What a query tile sees, and where it is. kAgain: what another split of it sees. kKnown: its request is.
  template <bool kAgain = false, bool kKnown = false>
  FA_DEVICE void look(Query& query) const {
    if constexpr (!kAgain) {
      if constexpr (kPaged && !kKnown) query.sequence = kernel::request_of<kVarlen>(params, query.tile.batch);
      if constexpr (kPaged && Base::kLeavesSplits) query.sequence.splits = splits_of_request(query);
      if constexpr (kPostsFirstRow) query.first_row = place_of(query);
    }
    const Rows rows{params.group, query.tile.head};
    const int first = first_row_of(query);
    const int end = row_count(query);
    const int last = (first + kTileM < end ? first + kTileM : end) - 1;
    query.range = visible(query, rows.position(first), rows.position(last));
    if constexpr (kDistancePruning) {
      query.range = kernel::within<kTileN>(
          query.range, kernel::AffineReach<Variant, Config::kCausal>::of(params, query.tile.batch, query.tile.head,
                                                                         first < 0 ? 0 : first, last));
    }
    if constexpr (kRagged) {
      if (!has_rows(query)) query.range = {};
    }
    if constexpr (kKeepsFirst) {
      query.range.kept_end = kernel::kept_tiles<Variant, kTileN>(params, lengths_of(query), query.tile.batch);
    }
    if constexpr (kLengthSplits) {
      if (query.tile.split >= query.sequence.splits) query.range = {};
    }
    if constexpr (!kAgain) {
      if constexpr (kPaged) query.pages.first_read = first_read_of(query);
      if constexpr (kPaged && !kKnown) query.pages.table_row = kernel::table_row_of(params.paged, query.tile.batch);
      query.kv_head = rows.kv_head();
      query.head_in_group = Config::kPackGqa ? 0 : query.tile.head - query.kv_head * params.group;
    }
  }

  /// Equal parts of its keys, whoever else there is where bits follow from the request alone.
  FA_DEVICE int splits_of_request([[maybe_unused]] const Query& query) const {
    if constexpr (kLengthSplits) {
      return kernel::splits_of_length(query.sequence.s_kv, params.splits, kernel::kLengthKeys<Config>);
    } else {
      return params.splits;
    }
  }

  /// Of a query whose request is known.
  FA_DEVICE typename Base::Pages pages_of(const Query& query) const {
    return {kernel::table_row_of(params.paged, query.tile.batch), first_read_of(query)};
  }
  FA_DEVICE int first_read_of(const Query& query) const {
    const Rows rows{params.group, query.tile.head};
    return kernel::keys_begin<Variant>(params, query.sequence, rows.position(first_row_of(query)));
  }

  /// Splits of a fixed size of a query tile, whoever has them.
  FA_DEVICE int splits_of_tile(const Query& query) const {
    const Rows rows{params.group, query.tile.head};
    const int first = first_row_of(query);
    const int end = row_count(query);
    const int last = (first + kTileM < end ? first + kTileM : end) - 1;
    return kernel::splits_of<kSplitTiles>(kernel::kv_range<Config::kCausal, kTileN, false>(
        lengths_of(query), rows.position(first), rows.position(last), 0));
  }

  /// By the pair of rounds in which the head begins.
  FA_DEVICE int rotated(const ForwardTile& tile) const {
    const int pair = (tile.batch * params.heads + tile.head) * params.m_blocks / (2 * ptx::block_count());
    return (tile.m_block + pair) % params.m_blocks;
  }

  FA_DEVICE KvRange visible(const Query& query, int first_row, int last_row) const {
    if constexpr (kFixedSplits) {
      KvRange range = kernel::kv_range<Config::kCausal, kTileN, false>(lengths_of(query), first_row, last_row, 0);
      if constexpr (kShares) range = kernel::shared_splits<kSplitTiles>(range, params.splits, query.tile.split);
      return range;
    } else if constexpr (kLists) {
      return kernel::list_range(tile_list(query.tile), params.splits, query.tile.split);
    } else if constexpr (kWindowed) {
      return kernel::variant_range<Config::kCausal, Variant, kTileN>(params, lengths_of(query), first_row, last_row,
                                                                     query.tile.split);
    } else {
      return kernel::kv_range<Config::kCausal, kTileN>(lengths_of(query), first_row, last_row, query.tile.split);
    }
  }

  /// End of the KV tiles that the 64 rows of a warpgroup see: one at least. Of all its warps the same.
  FA_DEVICE int own_range_end(const Query& query, int warp_row) const {
    const Rows rows{params.group, 0};
    const int first = first_row_of(query) + warp_row / 64 * 64;
    const int end = row_count(query);
    const int last = first + 63 < end ? first + 63 : end - 1;
    const int limit = kernel::key_limit<Config::kCausal>(lengths_of(query), rows.position(last));
    const int tiles_seen = first < end && last >= 0 ? kernel::ceil_div(limit, kTileN) : 0;
    return tiles_seen > query.range.begin ? tiles_seen : query.range.begin + 1;
  }

  /// The warp's first row in the query tiles before and behind this one.
  FA_DEVICE static int other_rows(int warp_row, int consumer) {
    if constexpr (!kExchange) return warp_row;
    return warp_row % 64 + (warp_row / 64 == consumer ? kConsumers - 1 - consumer : consumer) * 64;
  }

  FA_DEVICE const int32_t* tile_list(const ForwardTile& tile) const {
    return kernel::tile_list_of<Variant>(params.variant, tile.batch, tile.head, params.heads, tile.m_block,
                                         params.m_blocks);
  }

  /// The KV tile at a place of a tile list.
  FA_DEVICE int listed(const Query& query, int place) const { return ptx::ld_global_nc(tile_list(query.tile) + place); }

  // A query travels from the producer to the consumers as a work descriptor next to its Q: the divisions behind it are
  // done by a warp that has time.
  static FA_DEVICE int work_of(const RingSlot<kQBuffers>& slot) {
    return Base::kTwoPlaces ? static_cast<int>(slot.parity) : slot.index;
  }
  /// The descriptor before that.
  static FA_DEVICE int work_before(const RingSlot<kQBuffers>& slot) {
    return Base::kTwoPlaces ? static_cast<int>(slot.parity ^ 1) : kQBuffers - 1 - slot.index;
  }
  static constexpr int kFirstKeyWord = 11;   // of a work descriptor
  static constexpr int kWholeBit = 1 << 16;  // in the word of the split

  FA_DEVICE void post(int buffer, const Query& query) const {
    const auto word = [&](int i, int value) {
      ptx::st_shared_b32(work_shared(buffer) + 4 * i, static_cast<uint32_t>(value));
    };
    if constexpr (kPostsFirstRow) {
      word(0, query.first_row);
    } else {
      word(0, query.tile.m_block);
    }
    word(1, query.tile.head);
    word(2, query.tile.batch);
    if constexpr (kPostsPieces) {
      word(3, static_cast<int>(query.sharing.word));
    } else if constexpr (kWholeTiles) {
      const int split = query.tile.split | (query.whole ? kWholeBit : 0);
      word(3, query.ahead.last ? ~split : split);
    } else if constexpr (kNamesLast) {
      word(3, query.ahead.last ? ~query.tile.split : query.tile.split);
    } else {
      word(3, query.tile.split);
    }
    word(4, query.range.begin);
    word(5, query.range.end);
    word(6, query.kv_head);
    word(7, query.head_in_group);
    if constexpr (kLayout.work_bytes > 32) {
      word(8, query.range.plain_begin);
      word(9, query.range.plain_end);
      word(10, query.range.kept_end);
    }
    if constexpr (kRagged) {
      word(kFirstKeyWord, query.sequence.first_key);
      word(12, query.sequence.s_q);
      word(13, query.sequence.s_kv);
      word(14, query.sequence.diagonal);
      word(15, query.sequence.first_row);
    }
  }

  FA_DEVICE Query read_work(int buffer) const {
    const kernel::Chunk tile = ptx::ld_shared_chunk(work_shared(buffer));
    const kernel::Chunk rest = ptx::ld_shared_chunk(work_shared(buffer) + 16);
    const auto word = [](const kernel::Chunk& chunk, int i) { return static_cast<int>(chunk.word[i]); };
    Query query{{word(tile, 0), word(tile, 1), word(tile, 2), word(tile, 3)},
                {word(rest, 0), 0, word(rest, 1)},
                word(rest, 2),
                word(rest, 3),
                {},
                {}};
    if constexpr (kPostsFirstRow) query.first_row = word(tile, 0);
    if constexpr (kPostsPieces) query.sharing.word = tile.word[3];
    if constexpr (kNamesLast) {
      query.ahead.last = query.tile.split < 0;
      if (query.ahead.last) query.tile.split = ~query.tile.split;
    }
    if constexpr (kWholeTiles) {
      query.whole = (query.tile.split & kWholeBit) != 0;
      query.tile.split &= kWholeBit - 1;
    }
    if constexpr (kWindowed || kLists || kKeepsFirst) {
      query.range.plain_begin = static_cast<int>(ptx::ld_shared_b32(work_shared(buffer) + 32));
      query.range.plain_end = static_cast<int>(ptx::ld_shared_b32(work_shared(buffer) + 36));
      if constexpr (kLists || kKeepsFirst)
        query.range.kept_end = static_cast<int>(ptx::ld_shared_b32(work_shared(buffer) + 40));
    }
    if constexpr (kRagged) {
      const kernel::Chunk of_sequence = ptx::ld_shared_chunk(work_shared(buffer) + 48);
      query.sequence.s_q = word(of_sequence, 0);
      query.sequence.s_kv = word(of_sequence, 1);
      query.sequence.diagonal = word(of_sequence, 2);
      query.sequence.first_row = word(of_sequence, 3);
      query.sequence.causal_shift = query.sequence.diagonal + params.causal_shift;
    }
    return query;
  }

  /// What readers of a work descriptor do not all need: the packed row where the sequence's keys begin.
  FA_DEVICE int read_first_key(int buffer) const {
    return static_cast<int>(ptx::ld_shared_b32(work_shared(buffer) + 4 * kFirstKeyWord));
  }

  /// A consumer's place in the stream of KV tiles.
  struct Cursor {
    Query query;
    int n;                                 // place in the range
    int listed;                            // KV tile of that place, where there are tile lists
    [[maybe_unused]] int split_begin = 0;  // with kWholeTiles: the KV tile that its split begins with
  };

  /// The split of the next KV tile, which the query has from here on. Of a tile that is not whole the only one.
  FA_DEVICE void enter_split(Cursor& cursor) const {
    cursor.split_begin = cursor.query.range.begin;
    if (!cursor.query.whole) return;
    const int splits = splits_of_request(cursor.query);
    int& split = cursor.query.tile.split;
    FA_UNROLL_BY(1)
    for (; split > 0; --split) {  // splits may be without KV tiles
      cursor.split_begin = kernel::start_of_part(cursor.query.range.end, splits, split);
      if (cursor.split_begin <= cursor.n) return;
    }
    cursor.split_begin = cursor.query.range.begin;
  }

  /// The same behind a split of the tile: it has another one.
  FA_DEVICE void enter_next_split(Cursor& cursor) const {
    --cursor.query.tile.split;
    enter_split(cursor);
  }

  /// The KV tile whose scores are in the making.
  FA_DEVICE int kv_tile(const Cursor& cursor) const { return kLists ? cursor.listed : cursor.n; }

  /// Takes the KV tile's number from next to its K, which has landed.
  FA_DEVICE void read_listed(Cursor& cursor, int stage) const {
    if constexpr (kLists) {
      cursor.listed = static_cast<int>(ptx::ld_shared_b32(listed_shared(stage)));
      ptx::sync_warp();  // all lanes have read it before one of them releases the buffer
    }
  }

  /// The last KV tile of the next query tile; false at the end.
  FA_DEVICE bool consume_work(Cursor& cursor, const RingSlot<kQBuffers>& q_slot) const {
    ptx::mbarrier_wait(q_full(q_slot.index), q_slot.parity);
    cursor.query = read_work(work_of(q_slot));
    ptx::sync_warp();  // all lanes have read it before one of them releases the buffer
    cursor.n = cursor.query.range.end - 1;
    if constexpr (kWholeTiles) enter_split(cursor);
    return cursor.query.range.begin < cursor.query.range.end;
  }

  /// Where element 0 of register pair r stands.
  FA_DEVICE kernel::Place place(const Cursor& cursor, int warp_row, int r, int lane) const {
    const Rows rows{params.group, cursor.query.tile.head};
    const auto& lengths = lengths_of(cursor.query);
    const int row = first_row_of(cursor.query) + warp_row + lane / 4 + 8 * r;
    const int existing = kEndsAligned && row < 0 ? 0 : rows.position(row);
    const int position = kernel::inside(existing, lengths.s_q);
    const int key = kv_tile(cursor) * kTileN + 2 * (lane % 4);
    return {cursor.query.tile.batch, rows.query_head(row), position, key, 0, 0, lengths.s_q, lengths.s_kv,
            params.variant.scale};
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_SCHEDULE_CUH_
