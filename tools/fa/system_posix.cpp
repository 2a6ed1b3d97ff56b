#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>

#include <fa/error.hpp>

#include "support/text.hpp"
#include "system.hpp"

namespace fa::cli {
namespace {

std::string read_all(int descriptor) {
  std::string text;
  std::array<char, 65536> chunk{};
  for (;;) {
    const ssize_t count = read(descriptor, chunk.data(), chunk.size());
    if (count > 0) {
      text.append(chunk.data(), static_cast<std::size_t>(count));
    } else if (count == 0 || errno != EINTR) {
      return text;
    }
  }
}

void write_all(int descriptor, const std::string& text) {
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t count = write(descriptor, text.data() + done, text.size() - done);
    if (count < 0 && errno != EINTR) {
      return;
    }
    done += count > 0 ? static_cast<std::size_t>(count) : 0;
  }
}

nlohmann::json outcome_of(const std::function<nlohmann::json()>& body) {
  try {
    return {{"result", body()}};
  } catch (const Error& error) {
    return {{"error", error.what()}, {"code", static_cast<int>(error.code())}};
  } catch (const std::exception& exception) {
    return {{"error", exception.what()}, {"code", static_cast<int>(ErrorCode::internal)}};
  }
}

[[noreturn]] void run_child(int descriptor, const std::function<nlohmann::json()>& body) {
  write_all(descriptor, outcome_of(body).dump());
  _exit(0);  // no handlers: they belong to the parent
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

bool stderr_is_terminal() {
  static const bool answer = isatty(STDERR_FILENO) != 0;
  return answer;
}

std::filesystem::path program_in(const std::filesystem::path& directory, const std::string& name) {
  std::filesystem::path program = directory / name;
  return access(program.c_str(), X_OK) == 0 ? program : std::filesystem::path();
}

std::string output_about(const std::filesystem::path& program, const std::string& option,
                         const std::vector<std::byte>& bytes) {
  TemporaryFile input;
  input.write(bytes);
  return output_of({program.string(), option, "/proc/self/fd/" + std::to_string(input.descriptor())});
}

nlohmann::json run_in_child(const std::function<nlohmann::json()>& body) {
  std::fflush(nullptr);
  std::array<int, 2> ends{};
  if (pipe(ends.data()) != 0) {
    throw Error(ErrorCode::io, "pipe failed");
  }
  const pid_t child = fork();
  if (child < 0) {
    throw Error(ErrorCode::io, "fork failed");
  }
  if (child == 0) {
    close(ends[0]);
    run_child(ends[1], body);
  }
  close(ends[1]);
  const std::string text = read_all(ends[0]);
  close(ends[0]);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  const nlohmann::json outcome = nlohmann::json::parse(text, nullptr, false);
  if (outcome.is_discarded()) {
    throw Error(ErrorCode::internal, "the measuring process ended without a result");
  }
  if (outcome.contains("error")) {
    throw Error(static_cast<ErrorCode>(outcome["code"].get<int>()), outcome["error"].get<std::string>());
  }
  return outcome["result"];
}

}  // namespace fa::cli
