#ifndef FA_TEMPLATES_SM90_SM90_BACKWARD_CLUSTER_CUH_
#define FA_TEMPLATES_SM90_SM90_BACKWARD_CLUSTER_CUH_

#include <common/constants.cuh>
#include <common/types.cuh>
#include <ptx/cluster.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <sm90/sm90_backward_store.cuh>

namespace fa::sm90 {

/// dK or dV [16 * kWarps keys, 8 * kTiles] of a key tile whose query tiles the kBlocks blocks of a cluster share. Each
/// block leaves its fp32 sums in its own shared memory, a chunk a thread and n8 tile as they lie in registers. Then
/// each warp of the cluster adds up some chunks of all blocks, in the order of ranks: the result does not depend on
/// time.
template <int kBlocks, int kWarps, int kTiles>
struct ClusterSums {
  static constexpr int kChunkTiles = 4;  // n8 tiles whose rows leave as whole chunks of T
  static constexpr int kGroups = (kTiles + kChunkTiles - 1) / kChunkTiles;
  static constexpr int kFragmentBytes = kernel::kWarpSize * kernel::kChunkBytes;  // of a warp's n8 tile
  static constexpr int kBytes = kWarps * kTiles * kFragmentBytes;

  uint32_t sums;  // in this block's shared memory

  /// Leaves a warp's 16 keys.
  FA_DEVICE void leave(const float (&sum)[4 * kTiles], int warp, int lane) const {
    const uint32_t own = place(warp, 0, lane);
    FA_UNROLL
    for (int j = 0; j < kTiles; ++j) {
      ptx::st_shared_chunk(own + j * kFragmentBytes, {{ptx::bits(sum[4 * j]), ptx::bits(sum[4 * j + 1]),
                                                       ptx::bits(sum[4 * j + 2]), ptx::bits(sum[4 * j + 3])}});
    }
  }

  /// Stores scale * sum for every `warps_of_cluster`th group of columns from `first` on. `rows`: [keys, 8 * kTiles] of
  /// one head, of which the tile begins at `first_key`.
  template <class T>
  FA_DEVICE void store(T* rows, int64_t stride_s, int first_key, int keys, float scale, int first, int lane) const {
    FA_UNROLL_BY(1)
    for (int i = first; i < kWarps * kGroups; i += kBlocks * kWarps) {
      const int warp = i / kGroups;
      const int group = i % kGroups;
      const uint32_t from = place(warp, group * kChunkTiles, lane);
      T* const columns = rows + group * (8 * kChunkTiles);
      const int key = first_key + 16 * warp;
      if (kTiles % kChunkTiles == 0 || group < kTiles / kChunkTiles) {
        store_group<kChunkTiles>(columns, stride_s, key, keys, scale, from, lane);
      } else {
        store_group<(kTiles - 1) % kChunkTiles + 1>(columns, stride_s, key, keys, scale, from, lane);
      }
    }
  }

 private:
  FA_DEVICE uint32_t place(int warp, int tile, int lane) const {
    return sums + (warp * kTiles + tile) * kFragmentBytes + lane * kernel::kChunkBytes;
  }

  template <int kCount, class T>
  FA_DEVICE static void store_group(T* rows, int64_t stride_s, int key, int keys, float scale, uint32_t from,
                                    int lane) {
    float sum[4 * kCount] = {};
    FA_UNROLL
    for (int rank = 0; rank < kBlocks; ++rank) {
      const uint32_t there = ptx::map_shared(from, rank);
      FA_UNROLL
      for (int j = 0; j < kCount; ++j) {
        const kernel::Chunk chunk = ptx::ld_shared_cluster_chunk(there + j * kFragmentBytes);
        FA_UNROLL
        for (int i = 0; i < 4; ++i) sum[4 * j + i] += ptx::from_bits(chunk.word[i]);
      }
    }
    FA_UNROLL
    for (int i = 0; i < 4 * kCount; ++i) sum[i] *= scale;
    store_rows(sum, rows, stride_s, key, keys, lane);
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_BACKWARD_CLUSTER_CUH_
