#ifndef FA_TEMPLATES_COMMON_HALF_BYTES_CUH_
#define FA_TEMPLATES_COMMON_HALF_BYTES_CUH_

#include <common/types.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>

namespace fa::kernel {

/// 2^8 times four floats from 0 to 1, as the bytes of e4m3, by way of f16: exponents of f16 are 8 above, so that its
/// bits 7 to 14 are such a byte, subnormal ones too. What is behind them is rounded, ties away from 0.
FA_DEVICE uint32_t bytes_by_halves(float x0, float x1, float x2, float x3) {
  constexpr uint32_t kHalfUnits = 0x00800080u;
  const uint32_t low = ptx::convert_pair<f16>(x0, x1), high = ptx::convert_pair<f16>(x2, x3);
  return ptx::prmt(low + low + kHalfUnits, high + high + kHalfUnits, 0x7531);
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_HALF_BYTES_CUH_
