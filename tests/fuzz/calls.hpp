#ifndef FA_TESTS_FUZZ_CALLS_HPP_
#define FA_TESTS_FUZZ_CALLS_HPP_

#include <cstdint>
#include <map>
#include <string>

/// Programs that make random calls of a C ABI: cases, each of some calls, until there were enough of them.
namespace fa::fuzz {

/// What became of calls, by function and status.
struct Tally {
  std::uint64_t calls = 0;
  std::map<std::string, std::map<int, std::uint64_t>> outcomes;

  void add(const Tally& other);
  std::string text() const;
};

/// A case, the same for the same seed and index. Throws std::runtime_error for what a call may not do and a sanitizer
/// does not see.
using RunCase = void (*)(std::uint64_t seed, std::uint64_t index, Tally* tally);

/// What a program does, with its name for lines that replay a case.
int main_of(const char* program, RunCase run_case, int count, char** arguments);

/// Which case the calling thread is of, for the line that says how to replay it.
std::uint64_t current_case();
void set_current_case(std::uint64_t index);

}  // namespace fa::fuzz

#endif  // FA_TESTS_FUZZ_CALLS_HPP_
