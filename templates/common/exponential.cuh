#ifndef FA_TEMPLATES_COMMON_EXPONENTIAL_CUH_
#define FA_TEMPLATES_COMMON_EXPONENTIAL_CUH_

#include <ptx/language.cuh>
#include <ptx/math.cuh>

namespace fa::kernel {

/// 2^x for x up to 127, within 2^-13 of itself, without the unit of exponentials: a polynomial of what is left of x
/// beside the nearest whole number, times a power of two. 0 of -inf, as below 2^-126; a NaN stays one.
FA_DEVICE float ex2_of_products(float x) {
  constexpr float kRounder = 12582912.f;  // 1.5 * 2^23, whose units are 1
  const float inside = ptx::max_nan(x, -127.f);
  const float whole = inside + kRounder;
  const float rest = inside - (whole - kRounder);  // from -1/2 to 1/2
  const float of_rest =
      ptx::fma(ptx::fma(ptx::fma(0.05517167f, rest, 0.24261113f), rest, 0.693261f), rest, 0.99992806f);
  return of_rest * ptx::from_bits((ptx::bits(whole) << 23) + 0x3f800000u);
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_EXPONENTIAL_CUH_
