#ifndef FA_TESTS_FUZZ_C_ABI_CASE_HPP_
#define FA_TESTS_FUZZ_C_ABI_CASE_HPP_

#include <cstdint>

#include "fuzz/calls.hpp"

namespace fa::fuzz {

/// An attention made of random arguments with some calls, or calls that need none. The same for the same seed and
/// index. Throws std::runtime_error for what a call may not do and a sanitizer does not see.
void run_case(std::uint64_t seed, std::uint64_t index, Tally* tally);

}  // namespace fa::fuzz

#endif  // FA_TESTS_FUZZ_C_ABI_CASE_HPP_
