#ifndef FA_TESTS_FUZZ_PARALLEL_ABI_CASE_HPP_
#define FA_TESTS_FUZZ_PARALLEL_ABI_CASE_HPP_

#include <cstdint>

#include "fuzz/calls.hpp"

namespace fa::fuzz {

/// A group with some calls, or calls that need none.
void run_parallel_case(std::uint64_t seed, std::uint64_t index, Tally* tally);

}  // namespace fa::fuzz

#endif  // FA_TESTS_FUZZ_PARALLEL_ABI_CASE_HPP_
