#ifndef FA_TEMPLATES_SM80_SM80_SPLIT_WARPS_CUH_
#define FA_TEMPLATES_SM80_SM80_SPLIT_WARPS_CUH_

#include <common/constants.cuh>
#include <common/online_softmax.cuh>
#include <ptx/language.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

namespace fa::sm80 {

using namespace kernel;

/// Joins what the warps of a Forward have made of their own keys, where all of them have the same query rows: row
/// statistics [warps, tile_m] and O [warps, tile_m, d_v], in the place of the K and V tiles. Every warp gets its
/// columns of the whole.
template <int kWarps, int kTileM, int kHeadDimV>
struct SplitWarps {
  static constexpr int kMTiles = ceil_div(kTileM, 16);
  static constexpr int kHalves = kTileM < 16 ? 1 : 2;  // of rows of an m tile
  using Softmax = OnlineSoftmax<kMTiles, false, 0, kHalves>;
  static constexpr int kOutTiles = kHeadDimV / kWarps / 8;
  static constexpr int kFloat = static_cast<int>(sizeof(float));
  static constexpr int kPitch = kHeadDimV + 8;  // floats of a row: eight of them fall on different banks
  static constexpr int kStatisticBytes = kWarps * kTileM * 2 * kFloat;
  static constexpr int kBytes = kStatisticBytes + kWarps * kTileM * kPitch * kFloat;

  uint32_t shared;
  int warp;
  int lane;

  /// `sum` is that of a finished softmax. Called by all threads.
  template <int kOTiles>
  FA_DEVICE void join(const Fragment<kMTiles, kOTiles>& o, Softmax& softmax, float scale_log2,
                      Fragment<kMTiles, kOutTiles>& whole) const {
    ptx::sync_threads();  // all have left the K and V tiles, and Q
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < kHalves; ++r) {
        const int row = 16 * m + 8 * r + lane / 4;
        store_statistics(row, softmax.max[m][r], softmax.sum[m][r]);
        FA_UNROLL
        for (int n = 0; n < kOTiles; ++n) {
          ptx::st_shared_b64(column(warp, row, 8 * n), ptx::bits(o[m][n][2 * r]), ptx::bits(o[m][n][2 * r + 1]));
        }
      }
    }
    join_rows(softmax, scale_log2, whole);
  }

  /// The same of a transposed O, whose rows are the columns that `Products` says.
  template <class Products, int kOTiles>
  FA_DEVICE void join_transposed(const Fragment<1, kOTiles>& o, Softmax& softmax, float scale_log2,
                                 Fragment<1, kOutTiles>& whole) const {
    ptx::sync_threads();  // likewise
    store_statistics(lane / 4, softmax.max[0][0], softmax.sum[0][0]);
    FA_UNROLL
    for (int i = 0; i < kHeadDimV / 16 * 4; ++i) {
      const int n = i / 4, e = i % 4;
      const int row = 2 * (lane % 4) + e % 2;
      ptx::st_shared_b32(element(warp, row, Products::column(n, e / 2, lane / 4)), ptx::bits(o[0][n][e]));
    }
    join_rows(softmax, scale_log2, whole);
  }

 private:
  FA_DEVICE void store_statistics(int row, float max, float sum) const {
    if (lane % 4 == 0) ptx::st_shared_b64(statistic(warp, row), ptx::bits(max), ptx::bits(sum));
  }

  FA_DEVICE void join_rows(Softmax& softmax, float scale_log2, Fragment<kMTiles, kOutTiles>& whole) const {
    ptx::sync_threads();  // every warp's rows are in shared memory
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      FA_UNROLL
      for (int r = 0; r < kHalves; ++r) join_row(16 * m + 8 * r + lane / 4, m, r, softmax, scale_log2, whole);
    }
  }

  FA_DEVICE uint32_t statistic(int of, int row) const { return shared + (of * kTileM + row) * 2 * kFloat; }
  FA_DEVICE uint32_t column(int of, int row, int first) const { return element(of, row, first + 2 * (lane % 4)); }
  FA_DEVICE uint32_t element(int of, int row, int column) const {
    return shared + kStatisticBytes + ((of * kTileM + row) * kPitch + column) * kFloat;
  }

  FA_DEVICE void join_row(int row, int m, int r, Softmax& softmax, float scale_log2,
                          Fragment<kMTiles, kOutTiles>& whole) const {
    float statistics[kWarps][2];  // maximum and sum
    float max = -kInfinity;
    FA_UNROLL
    for (int i = 0; i < kWarps; ++i) {
      ptx::ld_shared_f32x2(statistics[i], statistic(i, row));
      max = ptx::max(max, statistics[i][0]);
    }
    float sum = 0.f;
    FA_UNROLL
    for (int n = 0; n < kOutTiles; ++n) whole[m][n][2 * r] = whole[m][n][2 * r + 1] = 0.f;
    FA_UNROLL
    for (int i = 0; i < kWarps; ++i) {
      const float weight = Softmax::shrink_between(statistics[i][0], max, scale_log2);
      sum += weight * statistics[i][1];
      FA_UNROLL
      for (int n = 0; n < kOutTiles; ++n) {
        float values[2];
        ptx::ld_shared_f32x2(values, column(i, row, 8 * (warp * kOutTiles + n)));
        whole[m][n][2 * r] += weight * values[0];
        whole[m][n][2 * r + 1] += weight * values[1];
      }
    }
    softmax.max[m][r] = max;
    softmax.sum[m][r] = sum;
  }
};

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_SPLIT_WARPS_CUH_
