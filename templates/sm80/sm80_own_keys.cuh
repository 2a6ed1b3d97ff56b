#ifndef FA_TEMPLATES_SM80_SM80_OWN_KEYS_CUH_
#define FA_TEMPLATES_SM80_SM80_OWN_KEYS_CUH_

#include <common/constants.cuh>
#include <common/copies.cuh>
#include <common/paged.cuh>
#include <common/shared_tile.cuh>
#include <common/stored_params.cuh>
#include <ptx/cp_async_4.cuh>
#include <ptx/language.cuh>
#include <ptx/thread.cuh>

namespace fa::sm80 {

using namespace kernel;

/// Where a lane of OwnKeys reads, of page 0, or without pages of the tile that is copied next (kWalks); and where it
/// writes in the first buffer. All of it is kept: steps have no time to find it anew.
template <class KElement, class VElement>
struct KeyPointers {
  const KElement* k;
  const VElement* v;
  const float* scales;  // of K; or of K or V, and their strides
  const float* value_scales;
  int64_t scale_stride_b;
  int64_t scale_stride_s;
  uint32_t k_target;
  uint32_t v_target;
  uint32_t scale_target;
  int page;  // of this lane's key, or of all of them, in the tile that is copied next
};

/// Copies K, V and the scales of the keys that a warp has of a KV tile to shared memory, where warps share query rows
/// (kSplitWarps): each copies its own keys, and waits for no other.
template <class Block>
struct OwnKeys {
  using KElement = typename Block::KElement;
  using VElement = typename Block::VElement;
  using Pointers = KeyPointers<KElement, VElement>;
  static constexpr int kKeys = Block::kWarpKeys;
  static constexpr int kWord = 4;
  static constexpr int kKeyWords = Block::kStoredKeys ? Block::kKeyScales : 0;
  static constexpr int kValueWords = Block::kStoredValues ? Block::kValueScales : 0;
  static constexpr int kWords = kKeyWords + kValueWords;  // of scales, of a key
  // A warp's keys of a tile begin at a multiple of kKeys.
  static constexpr bool kOnePage = Block::kPageSize <= 0 || Block::kPageSize % kKeys == 0;
  static constexpr int kTogether = kOnePage ? kKeys : common_divisor(Block::kPageSize, kKeys);  // sure to share a page
  static constexpr int kSpans = kKeys / kTogether;                           // that a warp's keys have of such
  static constexpr bool kOneRequest = !Block::kPaged || Block::kContiguous;  // whose keys are all in one place
  static constexpr bool kWalks = kOneRequest && !Block::kLists;              // from each tile to the one before it
  static constexpr bool kOneWord = kKeys * kWords <= kWarpSize && kKeyWords <= 1 && kValueWords <= 1;  // of a lane
  static_assert(kKeys <= kWarpSize && kWarpSize % kKeys == 0, "a lane has a key to look up");

  const Block& f;

  /// Those for KV tile `n`.
  FA_DEVICE Pointers pointers(int n) const {
    using K = typename Block::KTile;
    using V = typename Block::VTile;
    const int first = kWalks ? first_key(n) : 0;
    Pointers result;
    result.k = start<K>(static_cast<const KElement*>(f.params.k), f.params.stride_k_b, f.params.stride_k_h,
                        f.params.stride_k_s, first);
    result.v = start<V>(static_cast<const VElement*>(f.params.v), f.params.stride_v_b, f.params.stride_v_h,
                        f.params.stride_v_s, first);
    result.k_target = kept(f.k_shared(0) + target<K>());
    result.v_target = kept(f.v_shared(0) + target<V>());
    result.scale_target = kept(f.scales_shared(0) + (lane() / kKeys * Block::kTileN + own() + lane() % kKeys) * kWord);
    if constexpr (kOneWord) {
      const ScaleParams& from = f.params.scales;
      const bool of_value = lane() / kKeys >= kKeyWords;
      result.scale_stride_b = of_value ? from.stride_v_b : from.stride_k_b;
      result.scale_stride_s = of_value ? from.stride_v_s : from.stride_k_s;
      result.scales = start_scales(of_value ? from.v : from.k, result.scale_stride_b,
                                   of_value ? from.stride_v_h : from.stride_k_h, result.scale_stride_s, first, 0);
      // K's words have their place where K has no scales, too.
      if (kKeyWords == 0) result.scale_target += Block::kKeyScales * Block::kTileN * kWord;
    } else {
      const ScaleParams& from = f.params.scales;
      if constexpr (kKeyWords > 0)
        result.scales = start_scales(from.k, from.stride_k_b, from.stride_k_h, from.stride_k_s, first, lane() / kKeys);
      if constexpr (kValueWords > 0) {
        result.value_scales =
            start_scales(from.v, from.stride_v_b, from.stride_v_h, from.stride_v_s, first, lane() / kKeys);
      }
    }
    return result;
  }

  /// The page of this lane's key, or of all of them, of KV tile `n`. Asked for before the tile is copied, so that no
  /// copy waits for it.
  FA_DEVICE int page(int n) const {
    if constexpr (Block::kContiguous) return f.table_row;
    if constexpr (!Block::kPaged) return f.tile.batch;
    return f.paged_keys().page_of(first_key(n) + lane() % kKeys);
  }

  /// Starts the copies, of page `at.page`. Keys that are not there become zero. `at` goes on to the tile before it.
  FA_DEVICE void load(int n, int stage, Pointers& at) const {
    using K = typename Block::KTile;
    using V = typename Block::VTile;
    const int first = first_key(n);
    int pages[kSpans];
    if constexpr (kSpans == 1) {
      pages[0] = at.page;
    } else if constexpr (kRowsTogether<K> || kRowsTogether<V>) {
      FA_UNROLL
      for (int i = 0; i < kSpans; ++i) pages[i] = ptx::shfl(at.page, i * kTogether);
    }
    copy<K>(at.k_target + stage * K::kBytes, at.k, f.params.stride_k_b, f.params.stride_k_s, first, at.page, pages);
    copy<V>(at.v_target + stage * V::kBytes, at.v, f.params.stride_v_b, f.params.stride_v_s, first, at.page, pages);
    copy_scales(at.scale_target + stage * kScaleBytes, first, at);
    if constexpr (kWalks) {
      const ScaleParams& scales = f.params.scales;
      at.k -= Block::kTileN * f.params.stride_k_s;
      at.v -= Block::kTileN * f.params.stride_v_s;
      if constexpr (kOneWord) {
        at.scales -= Block::kTileN * at.scale_stride_s;
      } else {
        if constexpr (kKeyWords > 0) at.scales -= Block::kTileN * scales.stride_k_s;
        if constexpr (kValueWords > 0) at.value_scales -= Block::kTileN * scales.stride_v_s;
      }
    }
  }

 private:
  static constexpr int kScaleBytes = (Block::kKeyScales + Block::kValueScales) * Block::kTileN * kWord;

  template <class Tile>
  static constexpr int kLanes =  // of a row
      ceil_power_of_two(Tile::kChunks) < kWarpSize ? ceil_power_of_two(Tile::kChunks) : kWarpSize;

  template <class Tile>
  static constexpr int kRows = kWarpSize / kLanes<Tile>;  // that are copied at a time
  /// Whether all of them are always in one page.
  template <class Tile>
  static constexpr bool kRowsTogether = kOnePage || kTogether % kRows<Tile> == 0;

  /// Known to be from 0 to 31, so that of quotients no code is left.
  FA_DEVICE int lane() const { return f.thread & (kWarpSize - 1); }
  FA_DEVICE int own() const { return f.half * kKeys; }  // the warp's first row of a tile
  FA_DEVICE int first_key(int n) const { return f.kv_tile(n) * Block::kTileN + own(); }
  /// Of places that are not there, too, which are not read.
  static FA_DEVICE int64_t times(int count, int64_t stride) { return static_cast<uint32_t>(count) * stride; }
  /// From where the pointers are, of page 0 or of the request.
  static FA_DEVICE int64_t of_page(int page, int64_t stride_b) { return kOneRequest ? 0 : times(page, stride_b); }
  FA_DEVICE int64_t of_request(int64_t stride_b) const { return kOneRequest ? times(page(0), stride_b) : 0; }

  /// What comes out of a shuffle is kept in a register, and not made anew where it is wanted.
  static FA_DEVICE uint32_t kept(uint32_t x) { return ptx::shfl(x, ptx::lane_index()); }
  template <class Element>
  static FA_DEVICE const Element* kept(const Element* pointer) {
    const uint64_t bits = reinterpret_cast<uint64_t>(pointer);
    const uint64_t high = kept(static_cast<uint32_t>(bits >> 32));
    return reinterpret_cast<const Element*>(high << 32 | kept(static_cast<uint32_t>(bits)));
  }

  /// Whether the tile's first key plus `row` is there.
  struct There {
    int begin;
    uint32_t count;
    FA_DEVICE bool has(int row) const { return static_cast<uint32_t>(row - begin) < count; }
  };
  FA_DEVICE There there(int first, int page) const {
    if constexpr (Block::kPaged) {
      const auto keys = f.paged_keys();
      const bool in_pool = keys.in_pool(page);
      return {keys.begin - first, in_pool && keys.end > keys.begin ? static_cast<uint32_t>(keys.end - keys.begin) : 0};
    } else {
      return {-first, static_cast<uint32_t>(f.lengths.s_kv)};
    }
  }
  FA_DEVICE int row_in_page(int key) const {
    if constexpr (Block::kPaged) {
      return f.paged_keys().row_in_page(key);
    } else {
      return key;
    }
  }

  template <class Tile, class Element>
  FA_DEVICE const Element* start(const Element* cache, int64_t stride_b, int64_t stride_h, int64_t stride_s,
                                 int first) const {
    constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(Element));
    return kept(cache + of_request(stride_b) + f.rows.kv_head() * stride_h + lane() % kLanes<Tile> * kElements +
                times(first, stride_s) + (kRowsTogether<Tile> ? lane() / kLanes<Tile> * stride_s : 0));
  }
  /// Where a lane's first chunk goes in a tile.
  template <class Tile>
  FA_DEVICE int target() const {
    return Tile::offset(own() + lane() / kLanes<Tile>, 0) + lane() % kLanes<Tile> * kChunkBytes;
  }

  template <class Tile, class Element>
  FA_DEVICE void copy(uint32_t target, const Element* from, int64_t stride_b, int64_t stride_s, int first,
                      [[maybe_unused]] int page, const int (&pages)[kSpans]) const {
    constexpr int kStep = kRows<Tile>;
    constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(Element));
    const int row = lane() / kLanes<Tile>, chunk = lane() % kLanes<Tile>;
    const Element* pointer = from;
    There valid;
    FA_UNROLL
    for (int i = 0; i < ceil_div(kKeys, kStep); ++i) {
      const int of_tile = row + i * kStep;
      if (!kRowsTogether<Tile> || i * kStep % kTogether == 0) {
        int of_key, in_page;
        if constexpr (kRowsTogether<Tile>) {
          in_page = i * kStep;
          of_key = pages[in_page / kTogether];
        } else {
          in_page = of_tile;
          of_key = ptx::shfl(page, of_tile % kKeys);
        }
        pointer = from + of_page(of_key, stride_b);
        if (!kWalks && (Block::kPageSize != kTogether || !kRowsTogether<Tile>)) {
          pointer += times(row_in_page(first + in_page), stride_s);
        }
        valid = there(first, of_key);
      }
      if (kStep > kKeys && row >= kKeys) continue;
      FA_UNROLL
      for (int step = 0; step < ceil_div(Tile::kChunks, kLanes<Tile>); ++step) {
        if (Tile::kChunks % kLanes<Tile> != 0 && chunk + step * kLanes<Tile> >= Tile::kChunks) continue;
        ptx::cp_async_16(target + Tile::offset(i * kStep, 0) + step * kLanes<Tile> * kChunkBytes,
                         pointer + step * kLanes<Tile> * kElements, valid.has(of_tile));
      }
      pointer += kStep * stride_s;
    }
  }

  /// Words [kKeyScales + kValueScales, tile_n].
  FA_DEVICE void copy_scales(uint32_t target, int first, const Pointers& at) const {
    if constexpr (kOneWord) {
      const int row = lane() % kKeys, word = lane() / kKeys;
      int page = at.page;
      if constexpr (!kOnePage) page = ptx::shfl(at.page, row);
      if (kKeys * kWords < kWarpSize && word >= kWords) return;
      ptx::cp_async_4(target, scales_of(at.scales, page, at.scale_stride_b, at.scale_stride_s, first),
                      there(first, page).has(row));
    } else {
      const ScaleParams& from = f.params.scales;
      if constexpr (kKeyWords > 0) {
        copy_words<kKeyWords>(target, at.scales, from.stride_k_b, from.stride_k_s, first, at.page);
      }
      if constexpr (kValueWords > 0) {
        copy_words<kValueWords>(target + Block::kKeyScales * Block::kTileN * kWord, at.value_scales, from.stride_v_b,
                                from.stride_v_s, first, at.page);
      }
    }
  }

  /// Where a lane reads scales of `from`: of its key, where keys share a page, and of its first word.
  FA_DEVICE const float* start_scales(const float* from, int64_t stride_b, int64_t stride_h, int64_t stride_s,
                                      int first, int word) const {
    return kept(from + of_request(stride_b) + f.rows.kv_head() * stride_h + word +
                times(first + (kOnePage ? lane() % kKeys : 0), stride_s));
  }
  FA_DEVICE const float* scales_of(const float* start, int page, int64_t stride_b, int64_t stride_s, int first) const {
    if constexpr (kWalks) return start;
    return start + of_page(page, stride_b) + times(row_in_page(kOnePage ? first : first + lane() % kKeys), stride_s);
  }

  template <int kCount>
  FA_DEVICE void copy_words(uint32_t target, const float* from, int64_t stride_b, int64_t stride_s, int first,
                            int page) const {
    constexpr int kStep = kWarpSize / kKeys;  // words at a time
    const int row = lane() % kKeys, word = lane() / kKeys;
    if constexpr (!kOnePage && kKeys < kWarpSize) page = ptx::shfl(page, row);
    const float* const scales = scales_of(from, page, stride_b, stride_s, first);
    FA_UNROLL
    for (int i = 0; i < kCount; i += kStep) {
      if (kCount % kStep != 0 && word + i >= kCount) continue;
      ptx::cp_async_4(target + i * Block::kTileN * kWord, scales + i, there(first, page).has(row));
    }
  }
};

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_OWN_KEYS_CUH_
