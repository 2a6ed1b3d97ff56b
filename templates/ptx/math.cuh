#ifndef FA_TEMPLATES_PTX_MATH_CUH_
#define FA_TEMPLATES_PTX_MATH_CUH_

#include <common/types.cuh>
#include <ptx/language.cuh>

namespace fa::ptx {

using kernel::bf16;
using kernel::f16;

/// ex2.approx.ftz.f32: 2^x, exact at 0 and -inf.
FA_DEVICE float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// lg2.approx.f32: log2(x); lg2(0) = -inf.
FA_DEVICE float lg2(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// rcp.approx.ftz.f32: 1 / x within 1 ulp.
FA_DEVICE float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// tanh.approx.f32: within 2^-11 of the result, relatively.
FA_DEVICE float tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// sqrt.approx.ftz.f32 and rsqrt.approx.ftz.f32.
FA_DEVICE float sqrt(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FA_DEVICE float rsqrt(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// sin.approx.ftz.f32 and cos.approx.ftz.f32: within 2^-20 for angles from -pi to pi.
FA_DEVICE float sin(float x) {
  float y;
  asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FA_DEVICE float cos(float x) {
  float y;
  asm("cos.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// abs.f32, cvt.rmi.f32.f32, cvt.rpi.f32.f32
FA_DEVICE float abs(float x) {
  return fabsf(x);
}
FA_DEVICE float floor(float x) {
  return floorf(x);
}
FA_DEVICE float ceil(float x) {
  return ceilf(x);
}

/// fma.rn.f32
FA_DEVICE float fma(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}

/// mul.rn.f32, which no addition is fused with.
FA_DEVICE float multiply(float a, float b) {
  return __fmul_rn(a, b);
}

/// max.f32: drops a NaN operand.
FA_DEVICE float max(float a, float b) {
  return fmaxf(a, b);
}

/// min.f32: likewise.
FA_DEVICE float min(float a, float b) {
  return fminf(a, b);
}

/// max.NaN.f32: NaN where an operand is.
FA_DEVICE float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

/// max.s32 of three: one instruction on sm_90.
FA_DEVICE int max3(int a, int b, int c) {
  return __vimax3_s32(a, b, c);
}

/// The bits of a float, and back.
FA_DEVICE uint32_t bits(float x) {
  return __float_as_uint(x);
}
FA_DEVICE float from_bits(uint32_t x) {
  return __uint_as_float(x);
}

/// popc.b32: how many bits are set.
FA_DEVICE int popc(uint32_t x) {
  return __popc(static_cast<int>(x));
}

/// prmt.b32: byte i of the result is the byte of {high, low} that nibble i of `selector` numbers.
FA_DEVICE uint32_t prmt(uint32_t low, uint32_t high, uint32_t selector) {
  return __byte_perm(low, high, selector);
}

/// prmt.b32 with bit 3 of every nibble of the selector: byte i of the result is eight copies of the highest bit of that
/// byte of `low` (0 to 3) and `high` (4 to 7) which nibble i of the selector numbers.
FA_DEVICE uint32_t prmt_sign(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t y;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(low), "r"(high), "r"(selector | 0x8888u));
  return y;
}

/// shf.l.wrap.b32: `count` from 1 to 31.
FA_DEVICE uint32_t rotate_left(uint32_t x, int count) {
  return __funnelshift_l(x, x, static_cast<uint32_t>(count));
}

/// mul.wide.u32: all 64 bits of a product.
FA_DEVICE uint64_t mul_wide(uint32_t a, uint32_t b) {
  uint64_t y;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(y) : "r"(a), "r"(b));
  return y;
}

/// cvt.rn: one float to storage type T.
template <class T>
FA_DEVICE T convert(float x);

template <>
FA_DEVICE float convert<float>(float x) {
  return x;
}
template <>
FA_DEVICE bf16 convert<bf16>(float x) {
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <>
FA_DEVICE f16 convert<f16>(float x) {
  f16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

/// The other way, exact.
FA_DEVICE float convert_to_float(bf16 x) {
  return from_bits(static_cast<uint32_t>(x.bits) << 16);
}
FA_DEVICE float convert_to_float(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

/// cvt.rn.{bf16x2,f16x2}.f32: `low` in bits 0-15, `high` in bits 16-31.
template <class T>
FA_DEVICE uint32_t convert_pair(float low, float high);

template <>
FA_DEVICE uint32_t convert_pair<bf16>(float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
template <>
FA_DEVICE uint32_t convert_pair<f16>(float low, float high) {
#ifdef FA_TURING  // which converts one at a time
  return convert<f16>(low).bits | static_cast<uint32_t>(convert<f16>(high).bits) << 16;
#else
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
#endif
}

/// mul.rn.{bf16x2,f16x2}: products of the halves.
template <class T>
FA_DEVICE uint32_t multiply_pair(uint32_t a, uint32_t b);

template <>
FA_DEVICE uint32_t multiply_pair<bf16>(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
template <>
FA_DEVICE uint32_t multiply_pair<f16>(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

}  // namespace fa::ptx

#endif  // FA_TEMPLATES_PTX_MATH_CUH_
