#ifndef FA_TESTS_EMULATOR_PTX_ATOMIC_CUH_
#define FA_TESTS_EMULATOR_PTX_ATOMIC_CUH_

#include <emulator/instructions.hpp>

#include <common/types.cuh>
#include <ptx/language.cuh>

namespace fa::ptx {

FA_DEVICE int32_t atomic_add_acq_rel_global(int32_t* address, int32_t value,
                                            const emulator::Site& site = emulator::Site::current()) {
  return emulator::atomic_add_acq_rel_global(address, value, site);
}

FA_DEVICE void red_max_s32(int32_t* address, int32_t value, const emulator::Site& site = emulator::Site::current()) {
  emulator::red_max_s32(address, value, site);
}
FA_DEVICE void red_min_u32(uint32_t* address, uint32_t value, const emulator::Site& site = emulator::Site::current()) {
  emulator::red_min_u32(address, value, site);
}
FA_DEVICE void red_max_u64(uint64_t* address, uint64_t value, const emulator::Site& site = emulator::Site::current()) {
  emulator::red_max_u64(address, value, site);
}

template <class Word>
FA_DEVICE void raise_flag_global(Word* address, Word value, const emulator::Site& site = emulator::Site::current()) {
  emulator::raise_flag_global(address, value, site);
}
template <class Word>
FA_DEVICE void await_flag_global(const Word* address, Word value,
                                 const emulator::Site& site = emulator::Site::current()) {
  emulator::await_flag_global(address, value, site);
}

}  // namespace fa::ptx

#endif  // FA_TESTS_EMULATOR_PTX_ATOMIC_CUH_
