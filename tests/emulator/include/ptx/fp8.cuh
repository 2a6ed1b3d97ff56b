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

template <int kSteps>
FA_DEVICE void settle(const uint32_t (&)[kSteps][4], uint32_t) {}

}  // namespace fa::ptx

#endif  // FA_TESTS_EMULATOR_PTX_FP8_CUH_
