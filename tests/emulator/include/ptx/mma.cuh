#ifndef FA_TESTS_EMULATOR_PTX_MMA_CUH_
#define FA_TESTS_EMULATOR_PTX_MMA_CUH_

#include <emulator/instructions.hpp>

#include <common/types.cuh>
#include <ptx/language.cuh>

namespace fa::ptx {

using kernel::bf16;
using kernel::f16;

template <class T>
inline constexpr emulator::Half kHalfOf = emulator::Half::f16;
template <>
inline constexpr emulator::Half kHalfOf<bf16> = emulator::Half::bf16;

template <class T>
FA_DEVICE void mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0,
                           const emulator::Site& site = emulator::Site::current()) {
  emulator::mma_m16n8k8<kHalfOf<T>>(d, a0, a1, b0, site);
}

#ifndef FA_TURING
template <class T>
FA_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                            const emulator::Site& site = emulator::Site::current()) {
  emulator::mma_m16n8k16<kHalfOf<T>>(d, a, b0, b1, site);
}
#endif

FA_DEVICE void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                const emulator::Site& site = emulator::Site::current()) {
  emulator::mma_m16n8k8_tf32(d, a, b0, b1, site);
}

}  // namespace fa::ptx

#endif  // FA_TESTS_EMULATOR_PTX_MMA_CUH_
