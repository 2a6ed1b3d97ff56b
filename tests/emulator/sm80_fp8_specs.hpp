#ifndef FA_TESTS_EMULATOR_SM80_FP8_SPECS_HPP_
#define FA_TESTS_EMULATOR_SM80_FP8_SPECS_HPP_

#include <cstddef>
#include <vector>

#include "emulator/fp8_specs.hpp"
#include "plan/kernel_spec.hpp"

/// Forwards of 8-bit floats by mma.sync, which stand behind those of Hopper (fp8_specs.hpp).
namespace emulator {

const std::vector<fa::plan::KernelSpec>& sm80_fp8_specs();
const std::vector<fa::plan::KernelSpec>& sm80_fp8_packed_specs();
const std::vector<fa::plan::KernelSpec>& sm80_fp8_paged_specs();

/// Where the lists of both begin: specs of mutations count from there.
struct Fp8Places {
  std::size_t dense, packed, paged;
};
std::vector<Fp8Mutation> sm80_fp8_mutations(const Fp8Places& places);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_SM80_FP8_SPECS_HPP_
