#ifndef FA_TEMPLATES_COMMON_MASK_TILES_CUH_
#define FA_TEMPLATES_COMMON_MASK_TILES_CUH_

#include <common/constants.cuh>
#include <common/variant.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// What a mask keeps of a tile of scores; kept: all that masks in closed form leave.
enum class TileClass : int { empty = 0, full = 1, kept = 2, mixed = 3 };

template <class Config>
FA_DEVICE constexpr bool wants_order_of_tiles() {
  if constexpr (requires { Config::kInOrder; }) return Config::kInOrder;
  return false;
}

/// Looks at a mask function before attention does: a thread block takes a tile of query rows (with kByKey of keys),
/// tells of each tile of keys (of rows) whether the mask keeps nothing, all or some of it, and lists those that are not
/// empty: full, kept, mixed. With kInOrder all of these are listed as mixed, in their order: the sums of a row are then
/// formed in one order, whatever else is in its tile.
///
/// Config: kTileM, kTileN, kWarps, kCausal, kByKey, kPackGqa, Variant; optionally kInOrder.
template <class Config>
struct MaskTiles {
  using Variant = typename Config::Variant;
  static constexpr bool kInOrder = wants_order_of_tiles<Config>();
  static constexpr int kRowsTogether = 4;
  static_assert(Config::kTileM % kRowsTogether == 0);

  const MaskTilesParams& params;
  const int list = ptx::block_index();
  const int block = list % params.blocks;
  const int head = list / params.blocks % params.heads;
  const int batch = list / params.blocks / params.heads;
  const int lane = ptx::thread_index() % kWarpSize;
  const int warp = ptx::thread_index() / kWarpSize;

  FA_DEVICE void run() const {
    for (int other = warp; other < params.others; other += Config::kWarps) {
      const TileClass found = classify(other);
      if (lane == 0) ptx::st_global(classes() + other, static_cast<int32_t>(found));
    }
    ptx::sync_threads();  // every class is told
    if (warp == 0) compact();
  }

 private:
  FA_DEVICE int32_t* classes() const { return params.classes + static_cast<int64_t>(list) * params.others; }
  FA_DEVICE int32_t* entries() const { return tile_list(params.lists, list, params.others); }

  FA_DEVICE TileClass classify(int other) const {
    const int first_row = (Config::kByKey ? other : block) * Config::kTileM;
    const int first_key = (Config::kByKey ? block : other) * Config::kTileN;
    Seen seen;
    // Most tiles outside of the masks in closed form need no look at their elements.
    const int last_row = position(first_row + Config::kTileM - 1);
    if (first_key >= keys_end<Config::kCausal, Variant>(params, params, minimum(last_row, params.s_q - 1)) ||
        first_key + Config::kTileN <= keys_begin<Variant>(params, params, position(first_row))) {
      return TileClass::empty;
    }
    const bool whole =
        last_row < params.s_q && first_key >= keys_begin<Variant>(params, params, last_row) &&
        first_key + Config::kTileN <= keys_end<Config::kCausal, Variant>(params, params, position(first_row));
    const bool mixed = whole ? is_mixed<true>(first_row, first_key, seen) : is_mixed<false>(first_row, first_key, seen);
    if (mixed) return TileClass::mixed;
    const bool any_hidden = ptx::vote_any(seen.hidden);
    const bool any_outside = ptx::vote_any(seen.outside);
    if (!ptx::vote_any(seen.kept)) return TileClass::empty;
    if constexpr (kInOrder) return TileClass::mixed;
    return any_hidden ? TileClass::mixed : any_outside ? TileClass::kept : TileClass::full;
  }

  FA_DEVICE int position(int row) const { return Config::kPackGqa ? row / params.group : row; }

  struct Seen {
    bool kept = false;
    bool hidden = false;   // by the function
    bool outside = false;  // of masks in closed form, or of the rows
  };

  /// Looks at a tile until the function is known to keep some of it and to hide some. kWhole: no other mask hides any.
  template <bool kWhole>
  FA_DEVICE bool is_mixed(int first_row, int first_key, Seen& seen) const {
    const int heads = Config::kByKey && Variant::kMaskOnHead ? params.group : 1;
    for (int i = 0; i < heads; ++i) {
      FA_UNROLL_BY(1)
      for (int row = 0; row < Config::kTileM; row += kRowsTogether) {
        FA_UNROLL
        for (int r = 0; r < kRowsTogether; ++r) look<kWhole>(first_row + row + r, first_key, i, seen);
        if (ptx::vote_any(seen.kept) && ptx::vote_any(seen.hidden)) return true;
      }
    }
    return false;
  }

  /// A row of the tile: each lane at keys of its own, so that what the function reads of a key is read once for all
  /// rows.
  template <bool kWhole>
  FA_DEVICE void look(int row, int first_key, int head_in_group, Seen& seen) const {
    const int query = position(row);
    int query_head = head;
    if constexpr (Config::kPackGqa) query_head = head * params.group + row % params.group;
    if constexpr (Config::kByKey) query_head = head * params.group + head_in_group;
    Place at{batch, query_head, query, first_key + lane, 0, 0, params.s_q, params.s_kv, 0.f};
    const bool is_row = kWhole || query < params.s_q;
    const int begin = kWhole ? 0 : keys_begin<Variant>(params, params, query) - at.kv;
    const int end = kWhole ? 0 : keys_end<Config::kCausal, Variant>(params, params, query) - at.kv;
    FA_UNROLL
    for (int step = 0; step < Config::kTileN; step += kWarpSize) {
      at.kv_step = step;
      const bool is_key = step + kWarpSize <= Config::kTileN || step + lane < Config::kTileN;
      const bool inside = is_key & (kWhole | (is_row & (step >= begin) & (step < end)));
      const bool keep = Variant::keep(params.variant, at);
      seen.kept = seen.kept | (inside & keep);
      seen.hidden = seen.hidden | (inside & !keep);
      // The backward's rows behind the end are masked; the forward's are not stored.
      seen.outside = seen.outside | (is_key & !inside & (is_row | Config::kByKey));
    }
  }

  FA_DEVICE void compact() const {
    const int full = append(TileClass::full, 0);
    const int kept = append(TileClass::kept, full);
    const int all = append(TileClass::mixed, kept);
    if (lane != 0) return;
    ptx::st_global(entries() - 3, all);
    ptx::st_global(entries() - 2, kept);
    ptx::st_global(entries() - 1, full);
  }

  /// Appends the tiles of one class in their order; the new length.
  FA_DEVICE int append(TileClass wanted, int length) const {
    for (int first = 0; first < params.others; first += kWarpSize) {
      const int other = first + lane;
      const bool mine = other < params.others && ptx::ld_global(classes() + other) == static_cast<int32_t>(wanted);
      int before = mine ? 1 : 0;  // of the class up to this lane
      FA_UNROLL
      for (int step = 1; step < kWarpSize; step *= 2) {
        const int lower = ptx::shfl(before, lane >= step ? lane - step : lane);
        if (lane >= step) before += lower;
      }
      if (mine) ptx::st_global(entries() + length + before - 1, other);
      length += ptx::shfl(before, kWarpSize - 1);
    }
    return length;
  }
};

template <class Config>
FA_DEVICE void mask_tiles(const MaskTilesParams& params) {
  MaskTiles<Config>{params}.run();
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_MASK_TILES_CUH_
