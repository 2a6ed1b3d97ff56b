#ifndef FA_TEMPLATES_SM90_SM90_CLUSTER_PARTS_CUH_
#define FA_TEMPLATES_SM90_SM90_CLUSTER_PARTS_CUH_

#include <common/constants.cuh>
#include <common/log_sum.cuh>
#include <common/types.cuh>
#include <ptx/cluster.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <sm90/sm90_forward_layout.cuh>

namespace fa::sm90 {

/// O [64, 8 * kTiles] of a query tile whose keys the kBlocks blocks of a cluster share. Each block leaves its fp32
/// result and what its sums are in its own shared memory. Then each warp of the cluster merges some columns of all
/// blocks, in the order of ranks: the result does not depend on time.
template <int kBlocks, int kTiles>
struct ClusterParts {
  static constexpr int kWarps = 4;
  static constexpr int kFragmentBytes = kernel::kWarpSize * kernel::kChunkBytes;  // of a warp's n8 tile
  static constexpr int kOBytes = kWarps * kTiles * kFragmentBytes;
  static constexpr int kBytes = kOBytes + 16 * kWarps * kernel::kChunkBytes;
  static_assert(kBytes == cluster_part_bytes(8 * kTiles), "the host reserves as much");
  static constexpr int kOfLane = kernel::ceil_div(kBlocks, 4);  // blocks whose sums a lane of a quad reads

  uint32_t parts;  // in this block's shared memory: O as it lies in registers, then a SplitSum a row

  /// Leaves a warp's 16 rows, of which a lane has two.
  FA_DEVICE void leave(const float (&o)[4 * kTiles], const kernel::SplitSum (&sums)[2], int warp, int lane) const {
    FA_UNROLL
    for (int j = 0; j < kTiles; ++j) {
      ptx::st_shared_chunk(place(warp, j, lane), {{ptx::bits(o[4 * j]), ptx::bits(o[4 * j + 1]),
                                                   ptx::bits(o[4 * j + 2]), ptx::bits(o[4 * j + 3])}});
    }
    if (lane % 4 != 0) return;
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      ptx::st_shared_chunk(sum_at(warp, lane / 4 + 8 * r),
                           {{ptx::bits(sums[r].high), ptx::bits(sums[r].low), ptx::bits(sums[r].sum), 0}});
    }
  }

  /// A warp's n8 tile, of each block.
  struct Loaded {
    kernel::Chunk of_block[kBlocks];
  };

  /// On its way while parts are weighed. Of rows that are not there nothing is read: nobody would wait for it.
  FA_DEVICE Loaded load(bool exists, int warp, int tile, int lane) const {
    Loaded loaded;
    FA_UNROLL
    for (int rank = 0; rank < kBlocks; ++rank) {
      loaded.of_block[rank] = {};
      if (exists) loaded.of_block[rank] = ptx::ld_shared_cluster_chunk(ptx::map_shared(place(warp, tile, lane), rank));
    }
    return loaded;
  }

  /// What the blocks' results of two rows are multiplied with.
  struct Weights {
    kernel::SplitSum total[2];
    float of_block[2][kBlocks];
  };

  /// Called by whole warps, whose lanes have one row each where `pairs` is false; `others[r]` is another term of a
  /// row's sum, which counts where its sum is not 0.
  FA_DEVICE Weights weigh(bool exists, bool pairs, int warp, int lane, const kernel::SplitSum (&others)[2]) const {
    kernel::SplitSum sums[2][kOfLane];
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (r == 1 && !pairs) break;
      FA_UNROLL
      for (int i = 0; i < kOfLane; ++i) {
        const int rank = 4 * i + lane % 4;
        sums[r][i] = kernel::SplitSum::of_no_keys();
        if (!exists || rank >= kBlocks) continue;
        const kernel::Chunk chunk = ptx::ld_shared_cluster_chunk(ptx::map_shared(sum_at(warp, lane / 4 + 8 * r), rank));
        sums[r][i] = {ptx::from_bits(chunk.word[0]), ptx::from_bits(chunk.word[1]), ptx::from_bits(chunk.word[2])};
      }
    }
    Weights weights = {};
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (r == 1 && !pairs) break;
      kernel::SplitSum& total = weights.total[r];
      total = kernel::SplitSum::of_no_keys();
      if (others[r].sum != 0.f) join(total, others[r]);
      FA_UNROLL
      for (int i = 0; i < kOfLane; ++i) join(total, sums[r][i]);
      FA_UNROLL
      for (int other = 1; other < 4; other *= 2) {
        join(total, {ptx::shfl_xor(total.high, other), ptx::shfl_xor(total.low, other), 0.f});
      }
      if (total.high == -kernel::kInfinity) total.high = 0.f;  // no keys: -inf has no difference to itself
      float of_lane[kOfLane];
      FA_UNROLL
      for (int i = 0; i < kOfLane; ++i) of_lane[i] = sums[r][i].over(total) * sums[r][i].sum;
      FA_UNROLL
      for (int rank = 0; rank < kBlocks; ++rank) {
        weights.of_block[r][rank] = ptx::from_bits(ptx::shfl(ptx::bits(of_lane[rank / 4]), lane / 4 * 4 + rank % 4));
        total.sum += weights.of_block[r][rank];
      }
      if (others[r].sum != 0.f) total.sum += others[r].over(total) * others[r].sum;
    }
    return weights;
  }

  /// sum_i weight_i O_i of a warp's n8 tile, over the denominator: two columns of each row.
  FA_DEVICE void merge(float (&o)[4], const Loaded& loaded, const Weights& weights) const {
    FA_UNROLL
    for (int i = 0; i < 4; ++i) o[i] = 0.f;
    FA_UNROLL
    for (int rank = 0; rank < kBlocks; ++rank) {
      FA_UNROLL
      for (int i = 0; i < 4; ++i) {
        o[i] = ptx::fma(ptx::from_bits(loaded.of_block[rank].word[i]), weights.of_block[i / 2][rank], o[i]);
      }
    }
    FA_UNROLL
    for (int r = 0; r < 2; ++r) {
      const float sum = weights.total[r].sum;
      const float inverse = sum == 0.f ? 0.f : 1.f / sum;
      o[2 * r] *= inverse;
      o[2 * r + 1] *= inverse;
    }
  }

 private:
  FA_DEVICE uint32_t place(int warp, int tile, int lane) const {
    return parts + (warp * kTiles + tile) * kFragmentBytes + lane * kernel::kChunkBytes;
  }
  FA_DEVICE uint32_t sum_at(int warp, int row) const {
    return parts + kOBytes + (16 * warp + row) * kernel::kChunkBytes;
  }
  FA_DEVICE static void join(kernel::SplitSum& total, const kernel::SplitSum& part) {
    if (!part.is_above(total)) return;
    total.high = part.high;
    total.low = part.low;
  }
};

}  // namespace fa::sm90

#endif  // FA_TEMPLATES_SM90_SM90_CLUSTER_PARTS_CUH_
