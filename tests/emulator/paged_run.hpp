#ifndef FA_TESTS_EMULATOR_PAGED_RUN_HPP_
#define FA_TESTS_EMULATOR_PAGED_RUN_HPP_

#include <cstdint>
#include <string>

#include "emulator/placement.hpp"
#include "emulator/plan_run.hpp"
#include "plan/kernel_spec.hpp"
#include "support/paged_case.hpp"

/// Calls over pages on the emulator, launched as the library launches them.
namespace emulator {

struct PagedRun {
  Placement pool = Placement::bhsd;  ///< how k and v lie in memory
  /// What no row needs, of the pool and of the table, cannot be read; else all of the tensors and arrays can.
  bool trust = true;
  bool one_page = false;       ///< the table has one entry, which all positions of a request share (stride 0)
  std::uint64_t schedule = 1;  ///< of threads
  int multiprocessors = 1;     ///< of a scheduled kernel: among how many blocks the work is shared
  int launches = 0;            ///< of one schedule; 0: one that makes its own
  std::string kernel = {};     ///< registered name, if not the spec's
  std::string schedule_kernel = {};
  std::string sums_kernel = {};
  bool without_sums = false;  ///< the call leaves column_sums out, where it asks for top keys
};

/// What the kernel makes of the data; rows of no request keep the NaNs of make_outputs. `sums`: of a case that asks for
/// column sums or top keys.
fa::test::AttentionOutputs run_paged(const fa::plan::KernelSpec& spec, const fa::test::PagedCase& c,
                                     const fa::test::PagedData& data, const PagedRun& run,
                                     fa::test::PagedSums* sums = nullptr);

/// The greatest distance of O from `expected`, of rows that belong to a request. Infinite for a NaN.
double worst_of(const fa::test::PagedCase& c, const fa::test::PagedData& data, const fa::test::HostTensor& actual,
                const fa::test::HostTensor& expected);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_PAGED_RUN_HPP_
