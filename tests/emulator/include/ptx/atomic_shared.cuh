#ifndef FA_TESTS_EMULATOR_PTX_ATOMIC_SHARED_CUH_
#define FA_TESTS_EMULATOR_PTX_ATOMIC_SHARED_CUH_

#include <emulator/instructions.hpp>

#include <common/types.cuh>
#include <ptx/language.cuh>

namespace fa::ptx {

FA_DEVICE void red_add_shared(uint32_t address, uint32_t value,
                              const emulator::Site& site = emulator::Site::current()) {
  emulator::add_shared(address, value, "red.shared.add.u32", site);
}
FA_DEVICE uint32_t atomic_add_shared(uint32_t address, uint32_t value,
                                     const emulator::Site& site = emulator::Site::current()) {
  return emulator::add_shared(address, value, "atom.shared.add.u32", site);
}

}  // namespace fa::ptx

#endif  // FA_TESTS_EMULATOR_PTX_ATOMIC_SHARED_CUH_
