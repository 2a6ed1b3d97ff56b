#ifndef FA_TESTS_EMULATOR_PTX_FP8_CUH_
#define FA_TESTS_EMULATOR_PTX_FP8_CUH_

#include <emulator/instructions.hpp>

#include <common/types.cuh>
#include <ptx/language.cuh>

namespace fa::ptx {

FA_DEVICE uint32_t convert_e4m3(float x0, float x1, float x2, float x3,
                                const emulator::Site& site = emulator::Site::current()) {
  const float values[] = {x0, x1, x2, x3};
  uint32_t y = 0;
  for (int i = 0; i < 4; ++i) {
    emulator::check_register(values[i], "cvt.rn.satfinite.e4m3x2.f32", site);
    y |= static_cast<uint32_t>(emulator::convert_e4m3(values[i])) << 8 * i;
  }
  return y;
}

// The stores that never happen, where they do.
template <int kSteps>
FA_DEVICE void settle(const uint32_t (&pairs)[kSteps][4], uint32_t shared,
                      const emulator::Site& site = emulator::Site::current()) {
  uint32_t signs = 0;
  for (int i = 0; i < 4 * kSteps; ++i) signs |= pairs[i / 4][i % 4];
  if ((signs & 0x80808080) != 0) emulator::store_shared(shared, &signs, sizeof signs, "st.shared.u32", site);
}

template <int kSteps>
FA_DEVICE void settle_signed(const uint32_t (&pairs)[kSteps][4], uint32_t shared,
                             const emulator::Site& site = emulator::Site::current()) {
  uint32_t common = ~0u;
  for (int i = 0; i < 4 * kSteps; ++i) common &= pairs[i / 4][i % 4];
  if (common == ~0u) emulator::store_shared(shared, &common, sizeof common, "st.shared.u32", site);
}

}  // namespace fa::ptx

#endif  // FA_TESTS_EMULATOR_PTX_FP8_CUH_
