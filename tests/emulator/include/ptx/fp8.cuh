#ifndef FA_TESTS_EMULATOR_PTX_FP8_CUH_
#define FA_TESTS_EMULATOR_PTX_FP8_CUH_

#include <emulator/instructions.hpp>

#include <common/fp8.cuh>
#include <common/types.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>

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

template <class T>
FA_DEVICE void widen_bytes(uint32_t& low, uint32_t& high, uint32_t bytes,
                           const emulator::Site& site = emulator::Site::current());

template <>
inline void widen_bytes<kernel::e4m3>(uint32_t& low, uint32_t& high, uint32_t bytes, const emulator::Site& site) {
  emulator::check_register(from_bits(bytes), "cvt.rn.f16x2.e4m3x2", site);
  uint32_t* const words[] = {&low, &high};
  for (int i = 0; i < 2; ++i) {
    *words[i] = convert_pair<kernel::f16>(emulator::widen_e4m3(static_cast<uint8_t>(bytes >> 16 * i)),
                                          emulator::widen_e4m3(static_cast<uint8_t>(bytes >> (16 * i + 8))), site);
  }
}
template <>
inline void widen_bytes<kernel::e5m2>(uint32_t& low, uint32_t& high, uint32_t bytes, const emulator::Site&) {
  low = (bytes & 0xff) << 8 | (bytes & 0xff00) << 16;
  high = (bytes & 0xff0000) >> 8 | (bytes & 0xff000000);
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
