#ifndef FA_TESTS_EMULATOR_PTX_MATH_CUH_
#define FA_TESTS_EMULATOR_PTX_MATH_CUH_

#include <emulator/instructions.hpp>

#include <common/types.cuh>
#include <ptx/language.cuh>

namespace fa::ptx {

using kernel::bf16;
using kernel::f16;

FA_DEVICE float ex2(float x, const emulator::Site& site = emulator::Site::current()) {
  emulator::check_register(x, "ex2.approx.ftz.f32", site);
  return emulator::ex2(x);
}

FA_DEVICE float lg2(float x) {
  return emulator::lg2(x);
}

FA_DEVICE float rcp(float x) {
  return emulator::rcp(x);
}

FA_DEVICE float tanh(float x) {
  return emulator::tanh(x);
}
FA_DEVICE float sqrt(float x) {
  return __builtin_sqrtf(emulator::flush(x));
}
FA_DEVICE float rsqrt(float x) {
  return 1.f / __builtin_sqrtf(emulator::flush(x));
}
FA_DEVICE float sin(float x) {
  return __builtin_sinf(emulator::flush(x));
}
FA_DEVICE float cos(float x) {
  return __builtin_cosf(emulator::flush(x));
}

FA_DEVICE float abs(float x) {
  return __builtin_fabsf(x);
}
FA_DEVICE float floor(float x) {
  return __builtin_floorf(x);
}
FA_DEVICE float ceil(float x) {
  return __builtin_ceilf(x);
}

FA_DEVICE float fma(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}

FA_DEVICE float multiply(float a, float b) {
  const volatile float product = a * b;  // no addition is fused with it
  return product;
}

FA_DEVICE float max(float a, float b) {
  return a > b || b != b ? a : b;
}

FA_DEVICE float min(float a, float b) {
  return a < b || b != b ? a : b;
}

FA_DEVICE float max_nan(float a, float b) {
  return a != a ? a : b != b || b > a ? b : a;
}

FA_DEVICE int max3(int a, int b, int c) {
  const int ab = a > b ? a : b;
  return ab > c ? ab : c;
}

FA_DEVICE uint32_t bits(float x) {
  return __builtin_bit_cast(uint32_t, x);
}
FA_DEVICE float from_bits(uint32_t x) {
  return __builtin_bit_cast(float, x);
}

FA_DEVICE int popc(uint32_t x) {
  return __builtin_popcount(x);
}

FA_DEVICE uint32_t prmt(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>((bytes >> (8 * ((selector >> (4 * i)) & 7))) & 0xff) << (8 * i);
  }
  return result;
}

FA_DEVICE uint32_t rotate_left(uint32_t x, int count) {
  return x << count | x >> (32 - count);
}

FA_DEVICE uint64_t mul_wide(uint32_t a, uint32_t b) {
  return static_cast<uint64_t>(a) * b;
}

FA_DEVICE uint32_t prmt_sign(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    if ((bytes >> (8 * ((selector >> (4 * i)) & 7) + 7) & 1) != 0) result |= 0xffu << (8 * i);
  }
  return result;
}

template <class T>
FA_DEVICE T convert(float x);

template <>
FA_DEVICE float convert<float>(float x) {
  return x;
}
template <>
FA_DEVICE bf16 convert<bf16>(float x) {
  return {emulator::convert_bf16(x)};
}
template <>
FA_DEVICE f16 convert<f16>(float x) {
  return {emulator::convert_f16(x)};
}

FA_DEVICE float convert_to_float(bf16 x) {
  return from_bits(static_cast<uint32_t>(x.bits) << 16);
}
FA_DEVICE float convert_to_float(f16 x) {
  return emulator::convert_from_f16(x.bits);
}

template <class T>
FA_DEVICE uint32_t convert_pair(float low, float high, const emulator::Site& site = emulator::Site::current()) {
  emulator::check_register(low, "cvt.rn", site);
  emulator::check_register(high, "cvt.rn", site);
  return convert<T>(low).bits | static_cast<uint32_t>(convert<T>(high).bits) << 16;
}

template <class T>
FA_DEVICE uint32_t multiply_pair(uint32_t a, uint32_t b) {
  const auto half = [](uint32_t pair, int which) {
    return convert_to_float(T{static_cast<uint16_t>(pair >> 16 * which)});
  };
  return convert_pair<T>(half(a, 0) * half(b, 0), half(a, 1) * half(b, 1));
}

}  // namespace fa::ptx

#endif  // FA_TESTS_EMULATOR_PTX_MATH_CUH_
