#ifndef FA_TESTS_EMULATOR_APPEND_RUN_HPP_
#define FA_TESTS_EMULATOR_APPEND_RUN_HPP_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "plan/kernel_spec.hpp"
#include "support/append_case.hpp"

namespace emulator {

/// What lies in the buffers of a call afterwards, by the kernel registered as `name`, or by that of `spec`. Rows alone
/// can be read and written, not what lies between them. Throws the first Fault.
std::array<std::vector<std::byte>, fa::test::kAppendParts> run_append(const fa::test::AppendCase& c,
                                                                      const fa::test::AppendData& data,
                                                                      const fa::plan::KernelSpec& spec,
                                                                      std::uint64_t seed, const std::string& name = {});

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_APPEND_RUN_HPP_
