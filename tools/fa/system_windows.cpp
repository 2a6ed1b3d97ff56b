#ifndef NOMINMAX
#define NOMINMAX
#endif
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#include <windows.h>

#include <fstream>
#include <iterator>
#include <memory>
#include <system_error>

#include <fa/error.hpp>

#include "cache/files.hpp"
#include "support/text.hpp"
#include "system.hpp"

namespace fa::cli {
namespace {

namespace fs = std::filesystem;
using OwnedHandle = std::unique_ptr<void, decltype([](void* handle) { CloseHandle(handle); })>;

/// A file in the user's temporary directory, which goes with its owner.
class TemporaryFile {
 public:
  TemporaryFile() : path_(fs::temp_directory_path() / cache::temporary_name("fa")) {}
  ~TemporaryFile() {
    std::error_code error;
    fs::remove(path_, error);
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

OwnedHandle inheritable_output(const fs::path& path) {
  SECURITY_ATTRIBUTES attributes{sizeof attributes, nullptr, TRUE};
  void* const file = CreateFileW(path.c_str(), GENERIC_WRITE, FILE_SHARE_READ, &attributes, CREATE_NEW,
                                 FILE_ATTRIBUTE_TEMPORARY, nullptr);
  if (file == INVALID_HANDLE_VALUE) throw Error(ErrorCode::io, "a temporary file cannot be made");
  return OwnedHandle(file);
}

/// Whether `command` ends with success, its output going to that file.
bool run(std::wstring command, void* output) {
  STARTUPINFOW startup{};
  startup.cb = sizeof startup;
  startup.dwFlags = STARTF_USESTDHANDLES;
  startup.hStdInput = GetStdHandle(STD_INPUT_HANDLE);
  startup.hStdOutput = output;
  startup.hStdError = GetStdHandle(STD_ERROR_HANDLE);
  PROCESS_INFORMATION child{};
  if (CreateProcessW(nullptr, command.data(), nullptr, nullptr, TRUE, 0, nullptr, nullptr, &startup, &child) == FALSE) {
    return false;
  }
  const OwnedHandle process(child.hProcess);
  const OwnedHandle thread(child.hThread);
  DWORD status = 1;
  WaitForSingleObject(process.get(), INFINITE);
  return GetExitCodeProcess(process.get(), &status) != FALSE && status == 0;
}

}  // namespace

bool stderr_is_terminal() {
  DWORD mode = 0;
  void* const console = GetStdHandle(STD_ERROR_HANDLE);
  // Sequences that clear a line have to be asked for.
  static const bool answer = GetConsoleMode(console, &mode) != FALSE &&
                             SetConsoleMode(console, mode | ENABLE_VIRTUAL_TERMINAL_PROCESSING) != FALSE;
  return answer;
}

fs::path program_in(const fs::path& directory, const std::string& name) {
  std::error_code error;
  fs::path program = directory / (name + ".exe");
  return fs::is_regular_file(program, error) ? program : fs::path();
}

std::string output_about(const fs::path& program, const std::string& option, const std::vector<std::byte>& bytes) {
  const TemporaryFile input;
  const TemporaryFile output;
  std::string problem;
  if (!cache::write_private_file(cache::platform::kHere, input.path().string(), bytes, &problem)) {
    throw Error(ErrorCode::io, "the kernel cannot be written to a temporary file: " + problem);
  }
  OwnedHandle file = inheritable_output(output.path());
  const std::wstring words = fs::path(option).wstring();
  const bool done =
      run(L"\"" + program.wstring() + L"\" " + words + L" \"" + input.path().wstring() + L"\"", file.get());
  file.reset();
  if (!done) throw Error(ErrorCode::io, program.string() + " cannot read the kernel");
  std::ifstream text(output.path(), std::ios::binary);
  return {std::istreambuf_iterator<char>(text), {}};
}

nlohmann::json run_in_child(const std::function<nlohmann::json()>& /*body*/) {
  throw Error(ErrorCode::unsupported,
              "first calls are measured in processes of their own, which this program starts by fork: accepted is a "
              "system that has it, and Windows has not",
              {{"argument", "latency"}, {"value", "Windows"}, {"accepted", "Linux"}});
}

}  // namespace fa::cli
