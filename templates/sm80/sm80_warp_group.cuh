#ifndef FA_TEMPLATES_SM80_SM80_WARP_GROUP_CUH_
#define FA_TEMPLATES_SM80_SM80_WARP_GROUP_CUH_

#include <common/constants.cuh>
#include <common/online_softmax.cuh>
#include <common/shared_tile.cuh>
#include <common/types.cuh>
#include <ptx/language.cuh>
#include <ptx/ldmatrix.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>
#include <sm80/sm80_mma16.cuh>
#include <sm80/sm80_products.cuh>
#include <sm80/sm80_tf32x3.cuh>

namespace fa::sm80 {

using namespace kernel;

/// S += Q K^T of 8 keys, for which WarpGemm::scores is too wide; `load_a(a, m, k)` gives Q's fragment. K is [8,
/// kHeadDim] in shared memory.
template <class T, class KTile, int kHeadDim, int kMTiles, class LoadA>
FA_DEVICE void scores_of_8_keys(Fragment<kMTiles, 1>& s, uint32_t k_tile, int lane, LoadA load_a) {
  using Gemm = WarpGemm<T>;
  constexpr int kStep = Gemm::kStep;
  constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(T));
  const auto multiply = [&](int k, uint32_t b0, uint32_t b1) {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      uint32_t a[4];
      load_a(a, m, k);
      if constexpr (sizeof(T) == 2) {
        ptx::mma_m16n8k16<T>(s[m][0], a, b0, b1);
      } else {
        const float values[4] = {ptx::from_bits(a[0]), ptx::from_bits(a[1]), ptx::from_bits(a[2]),
                                 ptx::from_bits(a[3])};
        typename Gemm::SplitA split;
        Gemm::split_a(split, values);
        float step[4] = {};
        Gemm::mma(step, split, split_tf32(ptx::from_bits(b0)), split_tf32(ptx::from_bits(b1)));
        Gemm::add(s[m][0], step);
      }
    }
  };
  const uint32_t k_lane = k_tile + KTile::offset(lane % 8, lane / 8 * kElements);
  [[maybe_unused]] constexpr int kDepthUnroll = sizeof(T) == 2 ? kHeadDim : 1;  // three products cost compile time
  FA_UNROLL_BY(kDepthUnroll)
  for (int k = 0; k + 1 < kHeadDim / kStep; k += 2) {
    uint32_t b[4];  // two steps of depth
    ptx::ldmatrix_x4(b, k_lane + KTile::offset(0, k * kStep));
    multiply(k, b[0], b[1]);
    multiply(k + 1, b[2], b[3]);
  }
  constexpr int kLast = kHeadDim / kStep - 1;
  // Of a last step, column lane % 4 of the row that is lane / 4: 4 bytes.
  const uint32_t k_rest = k_tile + KTile::offset(lane / 4, 0) + lane % 4 * 4;
  if constexpr (kLast % 2 == 0) {
    multiply(kLast, ptx::ld_shared_b32(k_rest + KTile::offset(0, kLast * kStep)),
             ptx::ld_shared_b32(k_rest + KTile::offset(0, kLast * kStep) + kChunkBytes));
  }
  if constexpr (kHeadDim % kStep != 0) {
    const uint32_t b0 = ptx::ld_shared_b32(k_rest + KTile::offset(0, (kLast + 1) * kStep));
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      uint32_t a[4];
      load_a(a, m, kLast + 1);
      ptx::mma_m16n8k8<T>(s[m][0], a[0], a[1], b0);
    }
  }
}

/// What kWarpsN warps that share 16 * kMTiles query rows tell each other through shared memory. A warp has 8 * kNTiles
/// of the keys, for S, and a slice of the columns of O; P of all keys goes through a tile.
///
/// In shared memory: P [rows, keys] of each group, then statistics [warps][rows] of floats.
template <class T, int kWarps, int kWarpsN, int kMTiles, int kNTiles>
struct WarpGroup {
  static constexpr int kRows = 16 * kMTiles;
  static constexpr int kKeys = 8 * kNTiles * kWarpsN;
  static constexpr int kGroups = kWarps / kWarpsN;
  static constexpr int kRowBytes = kRows * static_cast<int>(sizeof(float));  // of a warp
  using PTile = SharedTile<T, kRows, kKeys>;
  static constexpr int kPBytes = kGroups * PTile::kBytes;
  static constexpr int kBytes = kPBytes + kWarps * kRowBytes;
  static_assert(kKeys % 16 == 0, "P is consumed 16 keys at a time");
  static_assert(kGroups <= 15, "a named barrier a group");

  const int thread = ptx::thread_index();  // read anew, like all that follows from it
  const int lane = thread % kWarpSize;
  const int warp = thread / kWarpSize;
  const uint32_t p_tile;
  const uint32_t statistics;  // of the group

  FA_DEVICE explicit WarpGroup(uint32_t shared)
      : p_tile(shared + warp / kWarpsN * PTile::kBytes),
        statistics(shared + kPBytes + warp / kWarpsN * (kWarpsN * kRowBytes)) {}

  /// All warps of the group, and their shared memory accesses.
  FA_DEVICE void meet() const { ptx::barrier_sync(1 + warp / kWarpsN, kWarpsN * kWarpSize); }

  FA_DEVICE uint32_t statistic(int from, int m, int r) const {
    return statistics + from * kRowBytes + (16 * m + 8 * r + lane / 4) * static_cast<int>(sizeof(float));
  }

  FA_DEVICE void publish(const float (&own)[kMTiles][2]) const {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (lane % 4 == 0) ptx::st_shared_b32(statistic(warp % kWarpsN, m, r), ptx::bits(own[m][r]));
      }
    }
  }

  /// The largest scores of this warp's keys and `start`, for `maxima` after a barrier of the group.
  FA_DEVICE void publish_maxima(const Fragment<kMTiles, kNTiles>& s, const float (&start)[kMTiles][2]) const {
    float own[kMTiles][2];
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        float result = start[m][r];
        FA_UNROLL
        for (int n = 0; n < kNTiles; ++n) result = ptx::max(result, ptx::max(s[m][n][2 * r], s[m][n][2 * r + 1]));
        result = ptx::max(result, ptx::shfl_xor(result, 1));
        own[m][r] = ptx::max(result, ptx::shfl_xor(result, 2));
      }
    }
    publish(own);
  }

  /// The largest of all warps' maxima.
  FA_DEVICE void maxima(float (&result)[kMTiles][2]) const {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        result[m][r] = -kInfinity;
        FA_UNROLL
        for (int from = 0; from < kWarpsN; ++from) {
          result[m][r] = ptx::max(result[m][r], ptx::from_bits(ptx::ld_shared_b32(statistic(from, m, r))));
        }
      }
    }
  }

  /// The sums of all warps, in their order; all have left the main loop then.
  FA_DEVICE void add_sums(float (&sum)[kMTiles][2]) const {
    publish(sum);
    meet();  // the sums are in shared memory, and all have read Q for the last time
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < 2; ++r) {
        sum[m][r] = 0.f;
        FA_UNROLL
        for (int from = 0; from < kWarpsN; ++from)
          sum[m][r] += ptx::from_bits(ptx::ld_shared_b32(statistic(from, m, r)));
      }
    }
  }

  /// P of the warp's keys. A barrier of the group is to come before it is read, and one of the block before the next.
  FA_DEVICE void send(const Fragment<kMTiles, kNTiles>& p) const {
    const uint32_t own = p_tile + PTile::offset(lane / 4, warp % kWarpsN * 8 * kNTiles + 2 * (lane % 4));
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int n = 0; n < kNTiles; ++n) {
        FA_UNROLL
        for (int r = 0; r < 2; ++r) {
          const uint32_t address = own + PTile::offset(16 * m + 8 * r, 8 * n);
          const float(&c)[4] = p[m][n];
          if constexpr (sizeof(T) == 2) {
            ptx::st_shared_b32(address, ptx::convert_pair<T>(c[2 * r], c[2 * r + 1]));
          } else {
            ptx::st_shared_b64(address, ptx::bits(c[2 * r]), ptx::bits(c[2 * r + 1]));
          }
        }
      }
    }
  }

  /// O += P V for the warp's columns of O, at which `v_columns` starts.
  template <class VTile, int kOTiles>
  FA_DEVICE void accumulate(Fragment<kMTiles, kOTiles>& o, uint32_t v_columns) const {
    WarpGemm<T>::template multiply<VTile, kKeys>(o, v_columns, lane, [&](uint32_t(&a)[4], int m, int k) {
      WarpGemm<T>::template load_a<PTile, kKeys>(a, p_tile, 16 * m, k, lane);
    });
  }
};

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_WARP_GROUP_CUH_
