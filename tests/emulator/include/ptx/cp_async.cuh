#ifndef FA_TESTS_EMULATOR_PTX_CP_ASYNC_CUH_
#define FA_TESTS_EMULATOR_PTX_CP_ASYNC_CUH_

#include <emulator/instructions.hpp>

#include <common/types.cuh>
#include <ptx/language.cuh>

namespace fa::ptx {

#ifndef FA_TURING
FA_DEVICE void cp_async_16(uint32_t shared, const void* global, bool valid,
                           const emulator::Site& site = emulator::Site::current()) {
  emulator::cp_async_16(shared, global, valid, site);
}

FA_DEVICE void cp_async_commit() {
  emulator::cp_async_commit();
}

template <int kPending>
FA_DEVICE void cp_async_wait() {
  static_assert(kPending >= 0, "a count of groups");
  emulator::cp_async_wait(kPending);
}
#endif

}  // namespace fa::ptx

#endif  // FA_TESTS_EMULATOR_PTX_CP_ASYNC_CUH_
