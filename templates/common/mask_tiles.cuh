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

/// Looks at a mask function before attention does: a thread block takes a tile of query rows (with kByKey of keys),
/// tells of each tile of keys (of rows) whether the mask keeps nothing, all or some of it, and lists those that are not
/// empty: full, kept, mixed.
///
/// Config: kTileM, kTileN, kWarps, kCausal, kByKey, kPackGqa, Variant.
template <class Config>
struct MaskTiles {
  using Variant = typename Config::Variant;
  static constexpr int kElements = Config::kTileM * Config::kTileN;
  static constexpr int kTileOthers = Config::kByKey ? Config::kTileM : Config::kTileN;
  static_assert(kElements % kWarpSize == 0, "a warp takes as many elements in every step");

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
    constexpr int kHeads = Config::kByKey && Variant::kMaskOnHead ? 0 : 1;  // 0: all of the group
    const int heads = kHeads == 0 ? params.group : 1;
    for (int i = 0; i < heads; ++i) {
      for (int element = 0; element < kElements; element += kWarpSize) {
        look(first_row, first_key, element + lane, i, seen);
        if (element % (4 * kWarpSize) == 0 && ptx::vote_any(seen.kept) && ptx::vote_any(seen.hidden)) {
          return TileClass::mixed;
        }
      }
    }
    const bool any_hidden = ptx::vote_any(seen.hidden);
    const bool any_outside = ptx::vote_any(seen.outside);
    if (!ptx::vote_any(seen.kept)) return TileClass::empty;
    return any_hidden ? TileClass::mixed : any_outside ? TileClass::kept : TileClass::full;
  }

  FA_DEVICE int position(int row) const { return Config::kPackGqa ? row / params.group : row; }

  struct Seen {
    bool kept = false;
    bool hidden = false;   // by the function
    bool outside = false;  // of masks in closed form, or of the rows
  };

  FA_DEVICE void look(int first_row, int first_key, int element, int head_in_group, Seen& seen) const {
    const int row = first_row + element / Config::kTileN;
    const int key = first_key + element % Config::kTileN;
    const int query = position(row);
    if (query >= params.s_q) {
      seen.outside = seen.outside ||
                     Config::kByKey;  // the backward's rows behind the end are masked; the forward's are not stored
      return;
    }
    int query_head = head;
    if constexpr (Config::kPackGqa) query_head = head * params.group + row % params.group;
    if constexpr (Config::kByKey) query_head = head * params.group + head_in_group;
    const Place at{batch, query_head, query, inside(key, params.s_kv), 0, 0, params.s_q, params.s_kv, 0.f};
    if (key < keys_begin<Variant>(params, params, query) ||
        key >= keys_end<Config::kCausal, Variant>(params, params, query)) {
      seen.outside = true;
    } else if (Variant::keep(params.variant, at)) {
      seen.kept = true;
    } else {
      seen.hidden = true;
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
