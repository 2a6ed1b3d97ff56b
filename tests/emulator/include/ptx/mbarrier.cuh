#ifndef FA_TESTS_EMULATOR_PTX_MBARRIER_CUH_
#define FA_TESTS_EMULATOR_PTX_MBARRIER_CUH_

#include <emulator/instructions.hpp>

#include <common/types.cuh>
#include <ptx/language.cuh>

namespace fa::ptx {

FA_DEVICE void mbarrier_init(uint32_t barrier, int count, const emulator::Site& site = emulator::Site::current()) {
  emulator::mbarrier_init(barrier, count, site);
}

FA_DEVICE void fence_mbarrier_init() {
  emulator::fence_mbarrier_init();
}

FA_DEVICE void mbarrier_arrive(uint32_t barrier, const emulator::Site& site = emulator::Site::current()) {
  emulator::mbarrier_arrive(barrier, site);
}

FA_DEVICE void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes,
                                         const emulator::Site& site = emulator::Site::current()) {
  emulator::mbarrier_arrive_expect_tx(barrier, bytes, site);
}

FA_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity,
                             const emulator::Site& site = emulator::Site::current()) {
  emulator::mbarrier_wait(barrier, parity, site);
}

FA_DEVICE bool mbarrier_test(uint32_t barrier, uint32_t parity,
                             const emulator::Site& site = emulator::Site::current()) {
  return emulator::mbarrier_test(barrier, parity, site);
}

}  // namespace fa::ptx

#endif  // FA_TESTS_EMULATOR_PTX_MBARRIER_CUH_
