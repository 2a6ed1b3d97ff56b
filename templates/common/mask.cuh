#ifndef FA_TEMPLATES_COMMON_MASK_CUH_
#define FA_TEMPLATES_COMMON_MASK_CUH_

#include <common/online_softmax.cuh>

namespace fa::kernel {

/// Sets the scores of hidden keys to -inf. `limit[m][r]` is the first hidden key of a thread's row, counted from the
/// tile's first key and this thread's first column (2 * (lane % 4)): one comparison with a constant an element.
template <int kMTiles, int kNTiles>
FA_DEVICE void mask_scores(Fragment<kMTiles, kNTiles>& s, const int (&limit)[kMTiles][2]) {
  FA_UNROLL
  for (int m = 0; m < kMTiles; ++m) {
    FA_UNROLL
    for (int n = 0; n < kNTiles; ++n) {
      FA_UNROLL
      for (int e = 0; e < 4; ++e) {
        if (8 * n + e % 2 >= limit[m][e / 2]) s[m][n][e] = -kInfinity;
      }
    }
  }
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_MASK_CUH_
