#ifndef FA_TEMPLATES_COMMON_ENCODE_CUH_
#define FA_TEMPLATES_COMMON_ENCODE_CUH_

#include <common/stored.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>

namespace fa::kernel {

/// The nearest code, ties to even, and at most the greatest, which NaN becomes too.
FA_DEVICE uint32_t encode(e4m3, float x) {
  constexpr float kGreatest = 448.f, kSmallestNormal = 0.015625f, kRounder = 16384.f;  // units of 2^-9 at its end
  const uint32_t sign = ptx::bits(x) >> 24 & 0x80u;
  const float magnitude = ptx::min(ptx::abs(x), kGreatest);
  if (magnitude < kSmallestNormal) return sign | (ptx::bits(magnitude + kRounder) - ptx::bits(kRounder));
  const uint32_t bits = ptx::bits(magnitude);
  return sign | (((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - (120u << 3));
}
FA_DEVICE uint32_t encode(i8, float x) {
  constexpr float kGreatest = 127.f, kRounder = 12582912.f;  // 3 * 2^22, whose units are 1
  const float inside = ptx::max(ptx::min(x, kGreatest), -kGreatest);
  return ptx::bits(inside + kRounder) & 0xffu;
}
/// An element of O: of e4m3 at most the greatest, and a NaN stays one.
template <class T>
FA_DEVICE T element_of(T, float x) {
  return ptx::convert<T>(x);
}
FA_DEVICE e4m3 element_of(e4m3 type, float x) {
  return {static_cast<uint8_t>(x == x ? encode(type, x) : 0x7fu)};
}
FA_DEVICE constexpr float greatest(e4m3) {
  return 448.f;
}
FA_DEVICE constexpr float greatest(i8) {
  return 127.f;
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_ENCODE_CUH_
