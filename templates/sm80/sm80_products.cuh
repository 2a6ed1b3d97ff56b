#ifndef FA_TEMPLATES_SM80_SM80_PRODUCTS_CUH_
#define FA_TEMPLATES_SM80_SM80_PRODUCTS_CUH_

#include <ptx/language.cuh>
#include <ptx/mma.cuh>
#include <ptx/mma_fp8.cuh>

#ifdef FA_TURING
namespace fa::ptx {

/// Compute capability 7.5 has half of it: each column of B in the lower, and in the upper half of the depth.
template <class T>
FA_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_m16n8k8<T>(d, a[0], a[1], b0);
  mma_m16n8k8<T>(d, a[2], a[3], b1);
}

}  // namespace fa::ptx
#endif

namespace fa::sm80 {

/// A step of a product: 32 bytes of each row of A and column of B, or the last 16.
template <class T>
FA_DEVICE void multiply_step(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (sizeof(T) == 1) {
    ptx::mma_m16n8k32<T, T>(d, a, b0, b1);
  } else {
    ptx::mma_m16n8k16<T>(d, a, b0, b1);
  }
}
template <class T>
FA_DEVICE void multiply_half_step(float (&d)[4], const uint32_t (&a)[4], uint32_t b) {
  if constexpr (sizeof(T) == 1) {
    const uint32_t first[4] = {a[0], a[1], 0, 0};
    ptx::mma_m16n8k32<T, T>(d, first, b, 0);
  } else {
    ptx::mma_m16n8k8<T>(d, a[0], a[1], b);
  }
}

/// O += P V of the n tiles `n` and `n + 1`, whose B operands are `even` and `odd`. Of half an m tile (kHalves = 1) O is
/// transposed: the two are rows 0 to 7 and 8 to 15 of tile n / 2 of O^T += V^T P^T, in one product.
template <class P, int kHalves, int kMTiles, int kOTiles>
FA_DEVICE void add_two_tiles(float (&o)[kMTiles][kOTiles][4], int n, const uint32_t (&a)[kMTiles][4],
                             const uint32_t (&even)[2], const uint32_t (&odd)[2]) {
  if constexpr (kHalves == 1) {
    const uint32_t v[4] = {even[0], odd[0], even[1], odd[1]};
    ptx::mma_m16n8k16<P>(o[0][n / 2], v, a[0][0], a[0][2]);
  } else {
    FA_UNROLL
    for (int m = 0; m < kMTiles; ++m) {
      ptx::mma_m16n8k16<P>(o[m][n], a[m], even[0], even[1]);
      ptx::mma_m16n8k16<P>(o[m][n + 1], a[m], odd[0], odd[1]);
    }
  }
}

}  // namespace fa::sm80

#endif  // FA_TEMPLATES_SM80_SM80_PRODUCTS_CUH_
