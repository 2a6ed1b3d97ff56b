#ifndef FA_TESTS_UNIT_TOOLS_RUN_PROGRAM_HPP_
#define FA_TESTS_UNIT_TOOLS_RUN_PROGRAM_HPP_

#include <string>

namespace fa::test {

struct Ran {
  int status = -1;
  std::string output;  ///< standard error's too
};

/// Runs `VARIABLES PROGRAM ARGUMENTS` as a shell would. Windows has no such shell: there, words, quotes and variables
/// are understood, and nothing else. Where a build is for another machine, FA_TEST_RUNNER says what runs its programs.
Ran run_program(const std::string& program, const std::string& arguments, const std::string& variables = "");

}  // namespace fa::test

#endif  // FA_TESTS_UNIT_TOOLS_RUN_PROGRAM_HPP_
