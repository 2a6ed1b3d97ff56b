#ifndef FA_TESTS_FUZZ_TARGETS_TARGET_HPP_
#define FA_TESTS_FUZZ_TARGETS_TARGET_HPP_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

/// A target reads any bytes: it defines the two functions below, and libFuzzer or replay.cpp calls them.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace fa::fuzz {

/// Inputs to begin with, made by the code under test.
std::vector<std::string> seeds();

/// Ends the process where the code under test breaks a promise.
inline void require(bool holds, const char* promise) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s\n", promise);
  std::abort();
}

}  // namespace fa::fuzz

#endif  // FA_TESTS_FUZZ_TARGETS_TARGET_HPP_
