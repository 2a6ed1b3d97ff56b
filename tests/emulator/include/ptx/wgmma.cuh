#ifndef FA_TESTS_EMULATOR_PTX_WGMMA_CUH_
#define FA_TESTS_EMULATOR_PTX_WGMMA_CUH_

#include <emulator/instructions.hpp>

#include <common/types.cuh>
#include <ptx/language.cuh>

namespace fa::ptx {

using kernel::bf16;
using kernel::f16;

FA_DEVICE void wgmma_fence(const emulator::Site& site = emulator::Site::current()) {
  emulator::wgmma_fence(site);
}

FA_DEVICE void wgmma_commit(const emulator::Site& site = emulator::Site::current()) {
  emulator::wgmma_commit(site);
}

template <int kPending>
FA_DEVICE void wgmma_wait(const emulator::Site& site = emulator::Site::current()) {
  static_assert(kPending >= 0 && kPending <= 7, "a count of groups");
  emulator::wgmma_wait(kPending, site);
}

FA_DEVICE void settle(float x, uint32_t, const emulator::Site& site = emulator::Site::current()) {
  emulator::check_register(x, "setp.lt.f32", site);
}
FA_DEVICE void settle(float x, bool, uint32_t shared, const emulator::Site& site = emulator::Site::current()) {
  settle(x, shared, site);
}

template <int kCount>
FA_DEVICE void wgmma_tie(float (&d)[kCount], const emulator::Site& site = emulator::Site::current()) {
  emulator::wgmma_tie(d, kCount, site);
}

template <int kCount>
FA_DEVICE void wgmma_forget(float (&d)[kCount], const emulator::Site& site = emulator::Site::current()) {
  emulator::wgmma_tie(d, kCount, site);
  for (float& value : d) value = __builtin_nanf("");
}

template <class T>
inline constexpr emulator::Half kWgmmaHalf = emulator::Half::f16;
template <>
inline constexpr emulator::Half kWgmmaHalf<bf16> = emulator::Half::bf16;

template <class T, int kN>
struct Wgmma {
  static_assert(kN % 8 == 0 && kN >= 8 && kN <= 256, "N of wgmma");

  template <bool kTransposeB, bool kTransposeA = false>
  static FA_DEVICE void shared(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate,
                               const emulator::Site& site = emulator::Site::current()) {
    emulator::wgmma({d, nullptr, a, b, kN, kWgmmaHalf<T>, kTransposeB, accumulate, kTransposeA}, site);
  }

  template <bool kTransposeB>
  static FA_DEVICE void registers(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate,
                                  const emulator::Site& site = emulator::Site::current()) {
    emulator::wgmma({d, a, 0, b, kN, kWgmmaHalf<T>, kTransposeB, accumulate}, site);
  }
};

}  // namespace fa::ptx

#endif  // FA_TESTS_EMULATOR_PTX_WGMMA_CUH_
