#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstdlib>

#include "run_program.hpp"

namespace fa::test {

Ran run_program(const std::string& program, const std::string& arguments, const std::string& variables) {
  const char* const runner = std::getenv("FA_TEST_RUNNER");
  const std::string before = runner != nullptr ? std::string(runner) + " " : "";
  Ran result;
  FILE* pipe = popen((variables + " " + before + program + " " + arguments + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return result;
  std::array<char, 4096> buffer{};
  while (const std::size_t count = fread(buffer.data(), 1, buffer.size(), pipe))
    result.output.append(buffer.data(), count);
  const int status = pclose(pipe);
  if (WIFEXITED(status)) result.status = WEXITSTATUS(status);
  return result;
}

}  // namespace fa::test
