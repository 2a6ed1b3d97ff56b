#include "disassemble.hpp"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <sstream>

#include <fa/error.hpp>

#include "support/text.hpp"

namespace fa::cli {
namespace {

namespace fs = std::filesystem;

struct Tool {
  const char* name;
  const char* option;
};
constexpr std::array<Tool, 2> kTools{{{"nvdisasm", "-c"}, {"cuobjdump", "-sass"}}};

std::vector<fs::path> directories() {
  std::vector<fs::path> found;
  std::istringstream path(support::environment("PATH"));
  for (std::string directory; std::getline(path, directory, ':');) {
    if (!directory.empty()) found.emplace_back(directory);
  }
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH"}) {
    const std::string root = support::environment(variable);
    if (!root.empty()) found.push_back(fs::path(root) / "bin");
  }
  found.emplace_back("/usr/local/cuda/bin");
  return found;
}

/// A file without a name, which children have, too, and which goes with its owner.
class TemporaryFile {
 public:
  TemporaryFile() : file_(std::tmpfile()) {
    if (file_ == nullptr) throw Error(ErrorCode::io, "a temporary file for the kernel cannot be made");
  }
  ~TemporaryFile() { std::fclose(file_); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  void write(const std::vector<std::byte>& bytes) {
    if (std::fwrite(bytes.data(), 1, bytes.size(), file_) != bytes.size() || std::fflush(file_) != 0) {
      throw Error(ErrorCode::io, "the kernel cannot be written to a temporary file");
    }
  }
  std::string read() {
    std::string text;
    std::array<char, 65536> chunk{};
    std::rewind(file_);
    while (const std::size_t count = std::fread(chunk.data(), 1, chunk.size(), file_)) text.append(chunk.data(), count);
    return text;
  }
  int descriptor() const { return fileno(file_); }

 private:
  std::FILE* file_;
};

/// What `command` prints; throws where it fails.
std::string output_of(std::vector<std::string> command) {
  std::vector<char*> arguments;
  for (std::string& word : command) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  TemporaryFile output;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, output.descriptor(), STDOUT_FILENO);
  pid_t child = 0;
  const int problem = posix_spawn(&child, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  int status = problem;
  while (problem == 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (status != 0) throw Error(ErrorCode::io, command[0] + " cannot read the kernel");
  return output.read();
}

}  // namespace

std::string disassemble(const std::vector<std::byte>& cubin) {
  for (const fs::path& directory : directories()) {
    for (const Tool& tool : kTools) {
      const fs::path program = directory / tool.name;
      if (access(program.c_str(), X_OK) != 0) continue;
      TemporaryFile input;
      input.write(cubin);
      return output_of({program.string(), tool.option, "/proc/self/fd/" + std::to_string(input.descriptor())});
    }
  }
  throw Error(ErrorCode::unsupported,
              "--sass: neither nvdisasm nor cuobjdump is in PATH, CUDA_HOME, CUDA_PATH or /usr/local/cuda; both come "
              "with the CUDA toolkit, and nvdisasm with `pip install nvidia-cuda-nvdisasm`",
              {{"argument", "--sass"}});
}

}  // namespace fa::cli
