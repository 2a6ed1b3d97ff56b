#ifndef FA_TEMPLATES_SM80_SM80_PRODUCTS_CUH_
#define FA_TEMPLATES_SM80_SM80_PRODUCTS_CUH_

#include <ptx/language.cuh>
#include <ptx/mma.cuh>

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

#endif  // FA_TEMPLATES_SM80_SM80_PRODUCTS_CUH_
