#ifndef FA_TESTS_EMULATOR_REGISTRY_HPP_
#define FA_TESTS_EMULATOR_REGISTRY_HPP_

#include <string>

#include "emulator/emulator.hpp"

namespace emulator {

/// A rendered kernel that was compiled for the emulator.
struct RegisteredKernel {
  ErasedKernel entry = nullptr;
  int threads = 0;
  int min_blocks = 1;  ///< resident on a multiprocessor
};

/// What generated translation units define, to be found by name.
struct Registration {
  Registration(const std::string& name, ErasedKernel entry, int threads, int min_blocks);
};

/// Throws std::out_of_range for a name that nobody registered.
const RegisteredKernel& registered_kernel(const std::string& name);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_REGISTRY_HPP_
