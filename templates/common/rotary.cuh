#ifndef FA_TEMPLATES_COMMON_ROTARY_CUH_
#define FA_TEMPLATES_COMMON_ROTARY_CUH_

#include <common/types.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>

namespace fa::kernel {

/// Where a pair stands at a position: a fraction of a revolution in 2^-32. The product wraps around with every
/// revolution, and so loses no digit: it is within 2^-33 + |position| 2^-65 of a revolution, plus what `turns` is off
/// by at the position.
FA_DEVICE uint32_t turn_at(int64_t position, uint64_t turns) {
  return static_cast<uint32_t>((static_cast<uint64_t>(position) * turns + (uint64_t{1} << 31)) >> 32);
}

/// Cosine and sine of a fraction of a revolution in 2^-32, each within 2^-22.9. Polynomials around the next quarter, by
/// Cephes (sinf.c).
FA_DEVICE void cos_sin(uint32_t turn, float& cosine, float& sine) {
  const uint32_t quarter = (turn + (1u << 29)) >> 30;
  const float x = static_cast<float>(static_cast<int32_t>(turn - (quarter << 30))) * 1.46291807926715968e-9f;  // 2 pi
  const float z = x * x;
  const float odd = ptx::fma(z, ptx::fma(z, -1.9515295891e-4f, 8.3321608736e-3f), -1.6666654611e-1f);
  const float even = ptx::fma(z, ptx::fma(z, 2.443315711809948e-5f, -1.388731625493765e-3f), 4.166664568298827e-2f);
  const float near_sine = ptx::fma(ptx::multiply(x, z), odd, x);
  const float near_cosine = ptx::fma(ptx::multiply(z, z), even, ptx::fma(z, -0.5f, 1.f));
  const bool swapped = quarter % 2 != 0;
  const float a = swapped ? near_cosine : near_sine;
  const float b = swapped ? near_sine : near_cosine;
  sine = (quarter & 2u) != 0 ? -a : a;
  cosine = ((quarter + 1u) & 2u) != 0 ? -b : b;
}

/// Turns a pair of a row.
FA_DEVICE void rotate(float& first, float& second, float cosine, float sine) {
  const float before = first;
  first = ptx::fma(before, cosine, -ptx::multiply(second, sine));
  second = ptx::fma(second, cosine, ptx::multiply(before, sine));
}

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_ROTARY_CUH_
