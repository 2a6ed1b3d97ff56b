#ifndef FA_TESTS_EMULATOR_PTX_PREFETCH_CUH_
#define FA_TESTS_EMULATOR_PTX_PREFETCH_CUH_

#include <ptx/language.cuh>

namespace fa::ptx {

/// Changes nothing that a thread sees.
FA_DEVICE void prefetch_global(const void*) {}

}  // namespace fa::ptx

#endif  // FA_TESTS_EMULATOR_PTX_PREFETCH_CUH_
