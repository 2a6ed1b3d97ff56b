#ifndef FA_TESTS_EMULATOR_PTX_CP_ASYNC_4_CUH_
#define FA_TESTS_EMULATOR_PTX_CP_ASYNC_4_CUH_

#include <emulator/instructions.hpp>

#include <common/types.cuh>
#include <ptx/language.cuh>

namespace fa::ptx {

FA_DEVICE void cp_async_4(uint32_t shared, const void* global, bool valid,
                          const emulator::Site& site = emulator::Site::current()) {
  emulator::cp_async_4(shared, global, valid, site);
}

}  // namespace fa::ptx

#endif  // FA_TESTS_EMULATOR_PTX_CP_ASYNC_4_CUH_
