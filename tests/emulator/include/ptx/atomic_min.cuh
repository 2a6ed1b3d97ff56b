#ifndef FA_TESTS_EMULATOR_PTX_ATOMIC_MIN_CUH_
#define FA_TESTS_EMULATOR_PTX_ATOMIC_MIN_CUH_

#include <emulator/instructions.hpp>

#include <common/types.cuh>
#include <ptx/language.cuh>

namespace fa::ptx {

FA_DEVICE void red_min_u64(uint64_t* address, uint64_t value, const emulator::Site& site = emulator::Site::current()) {
  emulator::red_min_u64(address, value, site);
}

}  // namespace fa::ptx

#endif  // FA_TESTS_EMULATOR_PTX_ATOMIC_MIN_CUH_
