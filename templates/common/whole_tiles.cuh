#ifndef FA_TEMPLATES_COMMON_WHOLE_TILES_CUH_
#define FA_TEMPLATES_COMMON_WHOLE_TILES_CUH_

#include <common/constants.cuh>
#include <common/forward_params.cuh>
#include <common/sequences.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

inline constexpr int64_t kTilesOfBlock = 16;  // at least, of lengths that differ

FA_DEVICE int keys_of_request(const ForwardParams& params, int batch) {
  return clamp(ptx::ld_global(params.sequences.used_kv + batch), 0, params.s_kv);
}

/// Sum and greatest of the keys of a batch's requests.
struct KeyCounts {
  int64_t all;
  int longest;

  /// Called by whole warps.
  static FA_DEVICE KeyCounts of(const ForwardParams& params) {
    KeyCounts counts{0, 0};
    FA_UNROLL_BY(4)
    for (int batch = ptx::thread_index() % kWarpSize; batch < params.b; batch += kWarpSize) {
      const int keys = keys_of_request(params, batch);
      counts.all += keys;
      if (keys > counts.longest) counts.longest = keys;
    }
    FA_UNROLL
    for (int mask = 1; mask < kWarpSize; mask *= 2) {
      const auto low = static_cast<uint32_t>(counts.all), high = static_cast<uint32_t>(counts.all >> 32);
      const uint64_t other = ptx::shfl_xor(low, mask) | uint64_t{ptx::shfl_xor(high, mask)} << 32;
      counts.all += static_cast<int64_t>(other);
      const int longest = ptx::shfl_xor(counts.longest, mask);
      if (longest > counts.longest) counts.longest = longest;
    }
    return counts;
  }
};

/// Keys that a request may have at most for a block to take all splits of a query tile. Where lengths are nearly alike
/// all requests are so. Else a tile is no more than a small part of what blocks have in the mean, and the splits of
/// others even that out. It decides who computes what, and no bit.
FA_DEVICE int most_whole_keys(const KeyCounts& counts, const ForwardParams& params) {
  if (10 * int64_t{counts.longest} * params.b <= 11 * counts.all) return counts.longest;
  const int64_t tiles = int64_t{params.m_blocks} * params.heads;
  const int64_t part = counts.all * tiles / (kTilesOfBlock * int64_t{ptx::block_count()});
  return part < counts.longest ? static_cast<int>(part) : counts.longest;
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_WHOLE_TILES_CUH_
