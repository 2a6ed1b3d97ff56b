#ifndef FA_TESTS_EMULATOR_PTX_WGMMA_INT8_CUH_
#define FA_TESTS_EMULATOR_PTX_WGMMA_INT8_CUH_

#include <emulator/instructions.hpp>

#include <ptx/language.cuh>

namespace fa::ptx {

template <int kN>
struct WgmmaInt8 {
  static_assert(kN % 16 == 0 && kN >= 16 && kN <= 256, "N of wgmma");

  static FA_DEVICE void shared(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate,
                               const emulator::Site& site = emulator::Site::current()) {
    emulator::wgmma({.d = d,
                     .a = a,
                     .b = b,
                     .columns = kN,
                     .half = emulator::Half::s8,
                     .accumulate = accumulate,
                     .half_b = emulator::Half::s8},
                    site);
  }
};

}  // namespace fa::ptx

#endif  // FA_TESTS_EMULATOR_PTX_WGMMA_INT8_CUH_
