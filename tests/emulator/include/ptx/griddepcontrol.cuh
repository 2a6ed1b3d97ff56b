#ifndef FA_TESTS_EMULATOR_PTX_GRIDDEPCONTROL_CUH_
#define FA_TESTS_EMULATOR_PTX_GRIDDEPCONTROL_CUH_

#include <emulator/instructions.hpp>

#include <ptx/language.cuh>

namespace fa::ptx {

FA_DEVICE void griddepcontrol_wait() {
  emulator::griddepcontrol_wait();
}

template <class T>
FA_DEVICE void compute_ahead(T&) {}

/// Launches of the emulator follow one another.
FA_DEVICE void griddepcontrol_launch_dependents() {}

}  // namespace fa::ptx

#endif  // FA_TESTS_EMULATOR_PTX_GRIDDEPCONTROL_CUH_
