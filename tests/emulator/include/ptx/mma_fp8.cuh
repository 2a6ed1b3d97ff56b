#ifndef FA_TESTS_EMULATOR_PTX_MMA_FP8_CUH_
#define FA_TESTS_EMULATOR_PTX_MMA_FP8_CUH_

#include <emulator/instructions.hpp>

#include <common/fp8.cuh>
#include <common/types.cuh>
#include <ptx/language.cuh>

namespace fa::ptx {

template <class T>
inline constexpr emulator::Half kByteOf = emulator::Half::e4m3;
template <>
inline constexpr emulator::Half kByteOf<kernel::e5m2> = emulator::Half::e5m2;

template <class A, class B>
FA_DEVICE void mma_m16n8k32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                            const emulator::Site& site = emulator::Site::current()) {
  emulator::mma_m16n8k32<kByteOf<A>, kByteOf<B>>(d, a, b0, b1, site);
}

}  // namespace fa::ptx

#endif  // FA_TESTS_EMULATOR_PTX_MMA_FP8_CUH_
