#ifndef FA_TESTS_UNIT_CACHE_SYSTEM_HPP_
#define FA_TESTS_UNIT_CACHE_SYSTEM_HPP_

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

/// What tests of the store do to files and processes, on every system: system_posix.cpp or system_windows.cpp.
namespace fa::cache::testing {

/// Gives everybody the right to write.
void let_others_write(const std::filesystem::path& path);
/// Whether nobody but us, and who may do everything anyway, can read or write it.
bool is_private(const std::filesystem::path& path);
/// Whether symbolic links can be made here.
bool have_links();
/// Files, directories and the like that this process has open.
std::size_t open_handles();

/// What a child process runs, by a name under which it is registered before main.
using ChildBody = int (*)(const std::vector<std::string>& arguments);
struct ChildProgram {
  ChildProgram(const char* name, ChildBody body);
};

/// A process of its own; its result is what the body returns. Killed at the end of the scope if it still runs.
class Process {
 public:
  Process(const std::string& program, const std::vector<std::string>& arguments);
  ~Process();
  Process(Process&& other) noexcept;
  Process& operator=(Process&&) = delete;
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  /// At once, with nothing cleaned up.
  void kill();
  /// The result, or kKilled.
  int wait();

  static constexpr int kKilled = -9;

 private:
  std::intptr_t id_;
};

/// Ends this process as a kill from outside would.
[[noreturn]] void die();

/// For main: what a child has to run; -1 where this is no child.
int run_child_program(int argc, char** argv);

/// A file that processes wait for.
void open_gate(const std::filesystem::path& gate);
void wait_for_gate(const std::filesystem::path& gate);

}  // namespace fa::cache::testing

#endif  // FA_TESTS_UNIT_CACHE_SYSTEM_HPP_
