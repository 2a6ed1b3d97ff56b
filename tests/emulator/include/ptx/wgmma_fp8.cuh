#ifndef FA_TESTS_EMULATOR_PTX_WGMMA_FP8_CUH_
#define FA_TESTS_EMULATOR_PTX_WGMMA_FP8_CUH_

#include <emulator/instructions.hpp>

#include <common/fp8.cuh>
#include <ptx/language.cuh>
#include <ptx/wgmma.cuh>

namespace fa::ptx {

using kernel::e4m3;
using kernel::e5m2;

template <class T>
inline constexpr emulator::Half kWgmmaByte = emulator::Half::e4m3;
template <>
inline constexpr emulator::Half kWgmmaByte<e5m2> = emulator::Half::e5m2;

template <class A, class B, int kN>
struct WgmmaFp8 {
  static_assert(kN % 16 == 0 && kN >= 16 && kN <= 256, "N of wgmma");

  static FA_DEVICE void shared(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate,
                               const emulator::Site& site = emulator::Site::current()) {
    emulator::wgmma({.d = d,
                     .a = a,
                     .b = b,
                     .columns = kN,
                     .half = kWgmmaByte<A>,
                     .accumulate = accumulate,
                     .half_b = kWgmmaByte<B>},
                    site);
  }

  static FA_DEVICE void registers(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate,
                                  const emulator::Site& site = emulator::Site::current()) {
    emulator::wgmma({.d = d,
                     .a_registers = a,
                     .b = b,
                     .columns = kN,
                     .half = kWgmmaByte<A>,
                     .accumulate = accumulate,
                     .half_b = kWgmmaByte<B>},
                    site);
  }
};

}  // namespace fa::ptx

#endif  // FA_TESTS_EMULATOR_PTX_WGMMA_FP8_CUH_
