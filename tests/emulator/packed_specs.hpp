#ifndef FA_TESTS_EMULATOR_PACKED_SPECS_HPP_
#define FA_TESTS_EMULATOR_PACKED_SPECS_HPP_

#include <vector>

#include "emulator/backward_run.hpp"
#include "plan/kernel_spec.hpp"

/// Kernels of packed batches and with dropout, alone and together: each flag that meets one of them in the kernels.
namespace emulator {

const std::vector<fa::plan::KernelSpec>& packed_forward_specs();
const std::vector<BackwardSpecs>& packed_backward_specs();

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_PACKED_SPECS_HPP_
