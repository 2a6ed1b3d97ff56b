#ifndef FA_TEMPLATES_COMMON_CONSTANTS_CUH_
#define FA_TEMPLATES_COMMON_CONSTANTS_CUH_

#include <ptx/language.cuh>

namespace fa::kernel {

#if defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ < 3
// Which know no constant expression of that value.
struct Infinity {
  FA_DEVICE operator float() const { return __int_as_float(0x7f800000); }
};
inline constexpr Infinity kInfinity{};
#else
inline constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);
#endif
inline constexpr float kLn2 = 0.693147180559945309f;
inline constexpr float kLog2e = 1.44269504088896341f;
inline constexpr int kWarpSize = 32;
inline constexpr int kChunkBytes = 16;

FA_DEVICE constexpr int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}

/// Where a part of `total` things starts that are shared out in `parts`, which differ by one at most.
FA_DEVICE constexpr int start_of_part(int total, int parts, int part) {
  const int more = total % parts;
  return total / parts * part + (part < more ? part : more);
}

/// The smallest power of two that is at least n.
FA_DEVICE constexpr int ceil_power_of_two(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_CONSTANTS_CUH_
