#ifndef FA_TESTS_EMULATOR_MERGE_RUN_HPP_
#define FA_TESTS_EMULATOR_MERGE_RUN_HPP_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "plan/kernel_spec.hpp"
#include "support/merge_case.hpp"

namespace emulator {

/// What lies in the buffers of a merge afterwards, by the kernel registered as `name`, or by that of `spec`. Rows alone
/// can be read and written, not what lies between them. Throws the first Fault.
std::vector<std::vector<std::byte>> run_merge(const fa::test::MergeCase& c, const fa::test::MergeData& data,
                                              const fa::plan::KernelSpec& spec, std::uint64_t seed,
                                              const std::string& name = {});

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_MERGE_RUN_HPP_
