#ifndef FA_TESTS_EMULATOR_FP8_SPECS_HPP_
#define FA_TESTS_EMULATOR_FP8_SPECS_HPP_

#include <cstddef>
#include <set>
#include <string>
#include <vector>

#include "emulator/fault.hpp"
#include "plan/kernel_spec.hpp"

namespace emulator {

/// What the kernels of both families may have.
struct Fp8Facts {
  bool half_output = false, byte_output = false, key_scales = false, value_scales = false, precise = false;
};
Fp8Facts fp8_facts(const fa::plan::KernelSpec& spec);

/// Forwards of 8-bit floats on Hopper, and behind them those by mma.sync (sm80_fp8_specs.hpp).
const std::vector<fa::plan::KernelSpec>& fp8_specs();
/// Those of packed batches.
const std::vector<fa::plan::KernelSpec>& fp8_packed_specs();

/// Those over pages, and of contiguous caches.
const std::vector<fa::plan::KernelSpec>& fp8_paged_specs();

/// With what fa::test::variant_choices() call `choice`.
struct Fp8Variant {
  std::string choice;
  fa::plan::KernelSpec spec;
};
const std::vector<Fp8Variant>& fp8_variants();
/// Those of packed batches, in turn with scales of heads and of keys.
const std::vector<Fp8Variant>& fp8_packed_variants();

/// A mistake in one of them, and the faults that may name it; empty: the results are wrong.
struct Fp8Mutation {
  std::string name;
  std::string header;
  std::string before;
  std::string after;
  std::set<FaultKind> faults;
  std::size_t spec = 0;  ///< of fp8_specs(), behind them fp8_packed_specs() and fp8_paged_specs()
  int count = 1;
  bool scaled = true;  ///< what it is given has scales, some of them negative
};
const std::vector<Fp8Mutation>& fp8_mutations();

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_FP8_SPECS_HPP_
