#ifndef FA_TEMPLATES_COMMON_MASK_CUH_
#define FA_TEMPLATES_COMMON_MASK_CUH_

#include <common/constants.cuh>
#include <common/forward_schedule.cuh>
#include <common/online_softmax.cuh>
#include <common/variant.cuh>

namespace fa::kernel {

/// Sets the scores of hidden keys to -inf. `limit[m][r]` is the first hidden key of a thread's row, counted from the
/// tile's first key and this thread's first column (2 * (lane % 4)): one comparison with a constant an element.
template <int kHalves = 2, int kMTiles, int kNTiles>
FA_DEVICE void mask_scores(Fragment<kMTiles, kNTiles>& s, const int (&limit)[kMTiles][2]) {
  FA_UNROLL
  for (int m = 0; m < kMTiles; ++m) {
    FA_UNROLL
    for (int n = 0; n < kNTiles; ++n) {
      FA_UNROLL
      for (int e = 0; e < 2 * kHalves; ++e) {
        if (8 * n + e % 2 >= limit[m][e / 2]) s[m][n][e] = -kInfinity;
      }
    }
  }
}

/// The same for keys before `begin[m][r]` and from `end[m][r]` on, counted alike.
template <int kHalves = 2, int kMTiles, int kNTiles>
FA_DEVICE void mask_scores(Fragment<kMTiles, kNTiles>& s, const int (&begin)[kMTiles][2],
                           const int (&end)[kMTiles][2]) {
  FA_UNROLL
  for (int m = 0; m < kMTiles; ++m) {
    FA_UNROLL
    for (int n = 0; n < kNTiles; ++n) {
      FA_UNROLL
      for (int e = 0; e < 2 * kHalves; ++e) {
        const int key = 8 * n + e % 2;
        if (key < begin[m][e / 2] || key >= end[m][e / 2]) s[m][n][e] = -kInfinity;
      }
    }
  }
}

/// KV tiles of the rows from `first_row` to `last_row` (query positions) under a mask in closed form, shared by
/// `splits` blocks.
template <bool kCausal, class Variant, int kTileN, class Params, class Lengths>
FA_DEVICE KvRange variant_range(const Params& params, const Lengths& lengths, int first_row, int last_row, int split) {
  KvRange range;
  const int begin = keys_begin<Variant>(params, lengths, first_row);
  const int end = keys_end<kCausal, Variant>(params, lengths, last_row);
  const int plain_end = keys_end<kCausal, Variant>(params, lengths, first_row);
  range.begin = end > begin ? begin / kTileN : 0;
  range.end = end > begin ? ceil_div(end, kTileN) : 0;
  range.plain_begin = ceil_div(keys_begin<Variant>(params, lengths, last_row), kTileN);
  range.plain_end = plain_end > 0 ? plain_end / kTileN : 0;
  if (lengths.splits > 1) {
    const int tiles = range.end - range.begin;
    const int first = range.begin;
    range.begin = first + start_of_part(tiles, lengths.splits, split);
    range.end = first + start_of_part(tiles, lengths.splits, split + 1);
  }
  return range;
}

/// Places of a tile list, shared by `splits` blocks.
FA_DEVICE KvRange list_range(const int32_t* list, int splits, int split) {
  const int count = ptx::ld_global_nc(list - 3);
  KvRange range;
  range.plain_begin = 0;
  range.kept_end = ptx::ld_global_nc(list - 2);
  range.plain_end = ptx::ld_global_nc(list - 1);
  range.begin = start_of_part(count, splits, split);
  range.end = start_of_part(count, splits, split + 1);
  return range;
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_MASK_CUH_
