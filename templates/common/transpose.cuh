#ifndef FA_TEMPLATES_COMMON_TRANSPOSE_CUH_
#define FA_TEMPLATES_COMMON_TRANSPOSE_CUH_

#include <common/types.cuh>
#include <ptx/language.cuh>
#include <ptx/thread.cuh>

namespace fa::kernel {

/// words[i] of lane q becomes words[q] of lane i, among the four lanes of a quad.
FA_DEVICE void transpose_quad(uint32_t (&words)[4], int lane) {
  FA_UNROLL
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool high = (lane & bit) != 0;
    FA_UNROLL
    for (int i = 0; i < 4; ++i) {
      if ((i & bit) != 0) continue;
      const uint32_t received = ptx::shfl_xor(high ? words[i] : words[i | bit], bit);
      words[i] = high ? received : words[i];
      words[i | bit] = high ? words[i | bit] : received;
    }
  }
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_TRANSPOSE_CUH_
