#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <stdexcept>
#include <utility>

#include "child_programs.hpp"
#include "system.hpp"

namespace fa::cache::testing {

void let_others_write(const std::filesystem::path& path) {
  if (chmod(path.c_str(), std::filesystem::is_directory(path) ? 0777 : 0666) != 0) throw std::runtime_error("chmod");
}

bool is_private(const std::filesystem::path& path) {
  struct stat status {};
  if (lstat(path.c_str(), &status) != 0) return false;
  return (status.st_mode & 07777U) == (S_ISDIR(status.st_mode) ? 0700U : 0600U) && status.st_uid == geteuid();
}

std::size_t open_handles() {
  const std::filesystem::directory_iterator descriptors("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(descriptors, std::filesystem::directory_iterator()));
}

Process::Process(const std::string& program, const std::vector<std::string>& arguments) : id_(fork()) {
  if (id_ != 0) return;
  alarm(120);  // outlives no test that failed
  _exit(run_program(program, arguments));
}

Process::~Process() {
  if (id_ <= 0) return;
  kill();
  wait();
}

Process::Process(Process&& other) noexcept : id_(std::exchange(other.id_, -1)) {}

void Process::kill() {
  ::kill(static_cast<pid_t>(id_), SIGKILL);
}

int Process::wait() {
  int status = 0;
  const auto child = static_cast<pid_t>(std::exchange(id_, -1));
  if (waitpid(child, &status, 0) != child) return -1000;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

void die() {
  std::raise(SIGKILL);
  std::abort();
}

}  // namespace fa::cache::testing
