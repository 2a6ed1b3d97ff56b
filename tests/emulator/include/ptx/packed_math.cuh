#ifndef FA_TESTS_EMULATOR_PTX_PACKED_MATH_CUH_
#define FA_TESTS_EMULATOR_PTX_PACKED_MATH_CUH_

#include <common/types.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>

namespace fa::ptx {

template <class T>
FA_DEVICE uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
  // Products of the halves are exact in double, and so are sums of those whose exponents are near.
  const auto half = [](uint32_t pair, int which) {
    return static_cast<double>(convert_to_float(T{static_cast<uint16_t>(pair >> 16 * which)}));
  };
  const auto result = [&](int which) { return static_cast<float>(half(a, which) * half(b, which) + half(c, which)); };
  return convert_pair<T>(result(0), result(1));
}

}  // namespace fa::ptx

#endif  // FA_TESTS_EMULATOR_PTX_PACKED_MATH_CUH_
