#ifndef FA_TESTS_EMULATOR_TURING_SPECS_HPP_
#define FA_TESTS_EMULATOR_TURING_SPECS_HPP_

#include <string>
#include <vector>

#include "emulator/backward_run.hpp"
#include "plan/kernel_spec.hpp"

namespace emulator {

/// Forward and backward kernels for compute capability 7.5.
struct TuringForward {
  std::string name;
  fa::plan::KernelSpec spec;
  fa::plan::KernelSpec combine;  ///< of a spec that splits keys
};
struct TuringBackward {
  std::string name;
  BackwardSpecs specs;
};
const std::vector<TuringForward>& turing_forwards();
const std::vector<TuringBackward>& turing_backwards();

/// All kernels of these, each once.
std::vector<fa::plan::KernelSpec> all_turing_specs();

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_TURING_SPECS_HPP_
