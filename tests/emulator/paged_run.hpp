#ifndef FA_TESTS_EMULATOR_PAGED_RUN_HPP_
#define FA_TESTS_EMULATOR_PAGED_RUN_HPP_

#include <cstdint>
#include <string>

#include "emulator/placement.hpp"
#include "plan/kernel_spec.hpp"
#include "support/paged_case.hpp"

/// Calls over pages on the emulator, launched as the library launches them.
namespace emulator {

struct PagedRun {
  Placement pool = Placement::bhsd;  ///< how k and v lie in memory
  /// What no row needs, of the pool and of the table, cannot be read; else all of the tensors and arrays can.
  bool trust = true;
  bool one_page = false;  ///< the table has one entry, which all positions of a request share (stride 0)
  std::uint64_t schedule = 1;
  std::string kernel = {};  ///< registered name, if not the spec's
};

/// What the kernel makes of the data; rows of no request keep the NaNs of make_outputs.
fa::test::AttentionOutputs run_paged(const fa::plan::KernelSpec& spec, const fa::test::PagedCase& c,
                                     const fa::test::PagedData& data, const PagedRun& run);

/// The greatest distance of O from `expected`, of rows that belong to a request. Infinite for a NaN.
double worst_of(const fa::test::PagedCase& c, const fa::test::PagedData& data, const fa::test::HostTensor& actual,
                const fa::test::HostTensor& expected);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_PAGED_RUN_HPP_
