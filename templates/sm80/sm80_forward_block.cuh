#ifndef FA_TEMPLATES_SM80_SM80_FORWARD_BLOCK_CUH_
#define FA_TEMPLATES_SM80_SM80_FORWARD_BLOCK_CUH_

#include <common/bounded_items.cuh>
#include <common/constants.cuh>
#include <common/forward_params.cuh>
#include <common/forward_schedule.cuh>
#include <common/mask.cuh>
#include <common/paged.cuh>
#include <common/sequences.cuh>
#include <common/stored.cuh>
#include <common/switches.cuh>
#include <common/variant.cuh>
#include <common/work_lists.cuh>
#include <ptx/language.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <sm80/sm80_forward_traits.cuh>
#include <sm80/sm80_own_keys.cuh>
#include <sm80/sm80_stored.cuh>

namespace fa::sm80 {

/// What a thread knows of a query tile, and copies of Q, K and V to shared memory.
template <class Config>
struct ForwardBlock : ForwardTraits<Config> {
  using Base = ForwardTraits<Config>;
  using T = typename Base::T;
  using Variant = typename Base::Variant;
  using Params = typename Base::Params;
  using KElement = typename Base::KElement;
  using VElement = typename Base::VElement;
  using KTile = typename Base::KTile;
  using VTile = typename Base::VTile;
  using Pair = typename Base::Pair;
  using Group = typename Base::Group;
  using QCopy = typename Base::QCopy;
  using KCopy = typename Base::KCopy;
  using VCopy = typename Base::VCopy;
  using Base::kTileM, Base::kTileN, Base::kHeadDimV, Base::kStages, Base::kSplitWarps, Base::kWarpsN, Base::kWarpRows,
      Base::kWarpKeys, Base::kMTiles, Base::kGroups, Base::kOutColumns, Base::kWarpColumns, Base::kUnevenColumns,
      Base::kVarlen, Base::kPageSize, Base::kPaged, Base::kContiguous, Base::kScheduled, Base::kBounded,
      Base::kScalesOfKeys, Base::kScalesOfValues, Base::kShares, Base::kTwoSided, Base::kLists, Base::kValueInKey,
      Base::kWarpQBytes, Base::kQBytes, Base::kTileBytes;

  const Params& params;
  // Of a scheduled block's pieces; of a bounded grid the round.
  const int index;
  Piece piece{};
  const ForwardTile tile;
  using Entry = typename Either<Request, BatchEntry<kVarlen, ForwardParams>, kPaged>::type;

  const Entry lengths;
  const RowMap<Config::kPackGqa> rows;
  const int thread = ptx::thread_index();
  const int lane = thread % kWarpSize;
  const int warp = thread / kWarpSize;
  const int half = kWarpsN > 1 ? warp % kWarpsN : 0;            // or slice, of the tile's keys and of O's columns
  const int copier = thread % (kWarpsN * kWarpSize);            // of those that copy this warp's rows of Q
  const int block_row = tile.m_block * kTileM;                  // first packed row of the block
  const int warp_row = block_row + warp / kWarpsN * kWarpRows;  // and of this warp
  const int row_count = Config::kPackGqa ? lengths.s_q * params.group : lengths.s_q;
  const KElement* const k_thread = k_pointer(thread);  // into [s_kv, d_qk]; not of pages
  const VElement* const v_thread = v_pointer(thread);  // into [s_kv, d_v]; likewise
  const uint32_t shared = shared_memory();
  const uint32_t q_shared = shared + warp / kWarpsN * kWarpQBytes;  // this warp's rows of Q, later of O

  // Of the rows' heads, which are one unless they are packed.
  static constexpr int kFixedTiles = Config::kPackGqa ? kMTiles : 1;
  static constexpr int kFixedHalves = Config::kPackGqa ? 2 : 1;
  Fixed<Variant> fixed[kFixedTiles][kFixedHalves];
  struct NoScales {};
  typename Either<RowScales<kMTiles>, NoScales, Base::kBytes>::type row_scales;

  // Over pages.
  int table_row = 0;   // the request's row of the block table, or of a contiguous cache
  int first_read = 0;  // keys before it are hidden from all rows

  FA_DEVICE explicit ForwardBlock(const Params& p, int i = 0)
      : params(p),
        index(i),
        tile(this_tile(p, i, piece)),
        lengths(this_entry(p, tile.batch)),
        rows{p.group, tile.head} {}
  FA_DEVICE ForwardBlock(const Params& p, const Piece& of, const ForwardTile& at)
      : params(p), index(0), piece(of), tile(at), lengths(this_entry(p, at.batch)), rows{p.group, at.head} {}

  /// Where copies keep it by, it comes out of a shuffle: what is not made anew in every step.
  static FA_DEVICE uint32_t shared_memory() {
    if constexpr (Base::kOwnKeys) return ptx::shfl(ptx::dynamic_shared(), 0);
    return ptx::dynamic_shared();
  }

  static FA_DEVICE Entry this_entry(const Params& p, int batch) {
    if constexpr (kPaged) {
      return request_of<kVarlen>(p, batch);
    } else {
      return batch_entry<kVarlen>(p, batch);
    }
  }

  /// What a grid without a bound has a block for: a query tile, or a split of one.
  FA_DEVICE int item() const { return item_of(index); }
  static FA_DEVICE int item_of([[maybe_unused]] int index) {
    if constexpr (kBounded) {
      return item_of_round(index);
    } else {
      return ptx::block_index();
    }
  }
  static FA_DEVICE int items(const Params& p) {
    const int tiles = p.m_blocks * p.heads * (kVarlen ? 1 : p.b) * p.splits;
    return kShares ? tiles * p.sequences.wave : tiles;
  }

  /// Of a schedule, or of those that blocks find by themselves, the part that this block has.
  static FA_DEVICE int part_of([[maybe_unused]] const Params& p) {
    if constexpr (Base::kBesideHeads) return part_beside_heads(p);
    return ptx::block_index();
  }

  static FA_DEVICE ForwardTile this_tile(const Params& p, int index, Piece& piece) {
    if constexpr (kScheduled) {
      ForwardTile tile;
      piece = piece_of(WorkLists(p.paged), part_of(p), index, tile);
      return tile;
    } else if constexpr (kShares) {
      const int sharing = p.sequences.wave;
      const int block = item_of(index) / sharing;
      ForwardTile tile;
      if constexpr (kVarlen) {
        tile = forward_tile_of_batch<kTileM, Config::kPackGqa>(p, block);
      } else {
        tile = forward_tile<Variant, Config::kCausal>(p, block);
      }
      tile.split = item_of(index) - block * sharing;
      return tile;
    } else if constexpr (kVarlen) {
      return forward_tile_of_batch<kTileM, Config::kPackGqa>(p, item_of(index));
    } else {
      return forward_tile<Variant, Config::kCausal>(p, item_of(index));
    }
  }

  /// Offset of the batch entry's first row (of q, o and lse), and of its first key.
  FA_DEVICE int64_t first_row(int64_t stride_b, int64_t stride_s) const {
    return offset_of_rows<kVarlen>(lengths, tile.batch, stride_b, stride_s);
  }
  FA_DEVICE int64_t first_key(int64_t stride_b, int64_t stride_s) const {
    if constexpr (kPaged) {
      return 0;
    } else {
      return offset_of_keys<kVarlen>(lengths, tile.batch, stride_b, stride_s);
    }
  }

  /// Where a thread starts copying the keys of a batch entry.
  FA_DEVICE const KElement* k_pointer(int of) const {
    return KCopy::thread_pointer(static_cast<const KElement*>(params.k) +
                                     first_key(params.stride_k_b, params.stride_k_s) +
                                     rows.kv_head() * params.stride_k_h,
                                 params.stride_k_s, of);
  }
  FA_DEVICE const VElement* v_pointer(int of) const {
    return VCopy::thread_pointer(static_cast<const VElement*>(params.v) +
                                     first_key(params.stride_v_b, params.stride_v_s) +
                                     rows.kv_head() * params.stride_v_h,
                                 params.stride_v_s, of);
  }
  /// The same in the main loop. Of 8-bit floats no register is left to keep it in.
  template <class Pointer>
  FA_DEVICE Pointer derived(Pointer kept, Pointer (ForwardBlock::*pointer)(int) const) const {
    if constexpr (Base::kBytes) return (this->*pointer)(ptx::thread_index());
    return kept;
  }

  FA_DEVICE uint32_t k_shared(int stage) const { return shared + kQBytes + stage * KTile::kBytes; }
  FA_DEVICE uint32_t v_shared(int stage) const {
    if constexpr (kValueInKey) return k_shared(stage);
    return shared + kQBytes + kStages * KTile::kBytes + stage * VTile::kBytes;
  }

  /// The scales [words, tile_n] of a K and V tile.
  FA_DEVICE uint32_t scales_shared(int stage) const {
    return shared + kTileBytes +
           stage * (Base::kKeyScales + Base::kValueScales) * kTileN * static_cast<int>(sizeof(float));
  }

  FA_DEVICE void load_q() const {
    const T* base = static_cast<const T*>(params.q) + first_row(params.stride_q_b, params.stride_q_s);
    const int valid = row_count - warp_row;
    if constexpr (Config::kPackGqa) {
      QCopy::gathered(
          q_shared,
          [&](int row) {
            return base + rows.query_head(warp_row + row) * params.stride_q_h +
                   rows.position(warp_row + row) * params.stride_q_s;
          },
          valid, copier);
    } else {
      base += tile.head * params.stride_q_h + warp_row * params.stride_q_s;
      QCopy::strided(q_shared, QCopy::thread_pointer(base, params.stride_q_s, copier), params.stride_q_s, valid,
                     copier);
    }
  }

  FA_DEVICE void load_k(int n_block, int stage) const {
    const int first = kv_tile(n_block) * kTileN;
    if constexpr (kContiguous) {
      load_rows<KCopy>(k_shared(stage), static_cast<const KElement*>(params.k), params.stride_k_b, params.stride_k_h,
                       params.stride_k_s, first);
    } else if constexpr (kPaged) {
      KCopy::template paged<kPageSize>(k_shared(stage), pool<KCopy, KElement>(params.k, params.stride_k_h),
                                       params.stride_k_b, params.stride_k_s, first, paged_keys(), thread);
    } else {
      KCopy::strided(k_shared(stage), derived(k_thread, &ForwardBlock::k_pointer) + first * params.stride_k_s,
                     params.stride_k_s, lengths.s_kv - first, thread);
    }
    if constexpr (kScalesOfKeys) {
      StoredScales<ForwardBlock>{*this}.load_k(stage, first);
    }
  }

  FA_DEVICE void load_v(int n_block, int stage) const {
    if constexpr (kValueInKey) return;
    const int first = kv_tile(n_block) * kTileN;
    if constexpr (kContiguous) {
      load_rows<VCopy>(v_shared(stage), static_cast<const VElement*>(params.v), params.stride_v_b, params.stride_v_h,
                       params.stride_v_s, first);
    } else if constexpr (kPaged) {
      VCopy::template paged<kPageSize>(v_shared(stage), pool<VCopy, VElement>(params.v, params.stride_v_h),
                                       params.stride_v_b, params.stride_v_s, first, paged_keys(), thread);
    } else {
      VCopy::strided(v_shared(stage), derived(v_thread, &ForwardBlock::v_pointer) + first * params.stride_v_s,
                     params.stride_v_s, lengths.s_kv - first, thread);
    }
    if constexpr (kScalesOfValues) {
      StoredScales<ForwardBlock>{*this}.load_v(stage, first);
    }
  }

  FA_DEVICE PagedKeys<kPageSize> paged_keys() const {
    return keys_in_cache<kPageSize>(params.paged, table_row, first_read, lengths.s_kv);
  }

  /// The keys from `first` on of the request's row of a contiguous cache [rows, h_kv, s_max, d].
  template <class Copy, class Element>
  FA_DEVICE void load_rows(uint32_t target, const Element* cache, int64_t stride_b, int64_t stride_h, int64_t stride_s,
                           int first) const {
    const Element* const base = cache + table_row * stride_b + rows.kv_head() * stride_h + first * stride_s;
    const int begin = first_read - first, end = lengths.s_kv - first;
    Copy::between(target, Copy::thread_pointer(base, stride_s, thread), stride_s, begin, end, thread);
  }

  /// Page 0 of the KV head, at this thread's first column. Derived in every step: no register is left to keep it in.
  template <class Copy, class Element>
  FA_DEVICE const Element* pool(const void* base, int64_t stride_h) const {
    return Copy::thread_pointer(static_cast<const Element*>(base) + rows.kv_head() * stride_h, 0, ptx::thread_index());
  }

  FA_DEVICE Pair pair() const { return Pair(shared + kTileBytes); }
  FA_DEVICE Group group() const { return Group(shared + kTileBytes); }

  FA_DEVICE void meet() const {
    if constexpr (kSplitWarps) {
      ptx::sync_threads();
    } else if constexpr (kGroups) {
      group().meet();
    } else {
      pair().meet();
    }
  }

  /// This warp's first column of O. Where slices of groups are not even, the last ones begin in those before them.
  FA_DEVICE int first_o_column() const {
    if constexpr (kUnevenColumns) {
      return half * kWarpColumns < kHeadDimV - kWarpColumns ? half * kWarpColumns : kHeadDimV - kWarpColumns;
    }
    return half * kOutColumns;
  }
  /// Whether n tile `n` of this warp is in no slice before its own.
  FA_DEVICE bool owns(int n) const { return !kUnevenColumns || first_o_column() + 8 * n >= half * kWarpColumns; }

  /// This thread's first key of a KV tile.
  FA_DEVICE int first_column(int n_block) const { return n_block * kTileN + half * kWarpKeys + 2 * (lane % 4); }

  /// The packed row that fragment registers 2r and 2r + 1 of m tile `m` belong to.
  FA_DEVICE int fragment_row(int m, int r) const { return warp_row + 16 * m + 8 * r + lane / 4; }

  FA_DEVICE KvRange tile_range(int first_row, int last_row) const {
    if constexpr (kLists) {
      return list_range(tile_list(), params.splits, tile.split);
    } else if constexpr (kTwoSided) {
      return variant_range<Config::kCausal, Variant, kTileN>(params, lengths, first_row, last_row, tile.split);
    } else {
      return kv_range<Config::kCausal, kTileN>(lengths, first_row, last_row, tile.split);
    }
  }

  FA_DEVICE const int32_t* tile_list() const {
    return tile_list_of<Variant>(params.variant, tile.batch, tile.head, params.heads, tile.m_block, params.m_blocks);
  }

  /// The KV tile at a place of the range: of the tile list, where there is one.
  FA_DEVICE int kv_tile(int place) const {
    if constexpr (kLists) return ptx::ld_global_nc(tile_list() + place);
    return place;
  }
};

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_FORWARD_BLOCK_CUH_
