#ifndef FA_TESTS_EMULATOR_PTX_E4M3_CUH_
#define FA_TESTS_EMULATOR_PTX_E4M3_CUH_

#include <emulator/instructions.hpp>

#include <common/types.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>

namespace fa::ptx {

FA_DEVICE uint32_t widen_e4m3(uint16_t pair, const emulator::Site& site = emulator::Site::current()) {
  return convert_pair<kernel::f16>(emulator::widen_e4m3(static_cast<uint8_t>(pair)),
                                   emulator::widen_e4m3(static_cast<uint8_t>(pair >> 8)), site);
}

FA_DEVICE void widen_e4m3_pairs(uint32_t& low, uint32_t& high, uint32_t bytes,
                                const emulator::Site& site = emulator::Site::current()) {
  emulator::check_register(from_bits(bytes), "cvt.rn.f16x2.e4m3x2", site);
  low = widen_e4m3(static_cast<uint16_t>(bytes), site);
  high = widen_e4m3(static_cast<uint16_t>(bytes >> 16), site);
}

}  // namespace fa::ptx

#endif  // FA_TESTS_EMULATOR_PTX_E4M3_CUH_
