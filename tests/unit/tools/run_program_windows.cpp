#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>

#include <array>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "run_program.hpp"

namespace fa::test {
namespace {

/// Words as a shell sees them: quotes of both kinds keep everything between them together, and as it is.
std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words;
  bool inside = false;
  char quote = 0;
  for (const char c : text) {
    if (quote == 0 && c == ' ') {
      inside = false;
      continue;
    }
    if (!std::exchange(inside, true)) words.emplace_back();
    if (quote == 0 && (c == '\'' || c == '"')) {
      quote = c;
    } else if (c == quote) {
      quote = 0;
    } else {
      words.back() += c;
    }
  }
  return words;
}

/// What CommandLineToArgvW reads as this word.
std::wstring quoted(const std::string& word) {
  std::wstring result = L"\"";
  std::size_t slashes = 0;
  for (const wchar_t c : std::filesystem::path(word).wstring()) {
    if (c == L'"') result.append(slashes + 1, L'\\');
    slashes = c == L'\\' ? slashes + 1 : 0;
    result += c;
  }
  return result.append(slashes, L'\\') + L'"';
}

/// A variable of this process, and of those that it starts, for as long as this lives.
class Variable {
 public:
  explicit Variable(const std::string& assignment) : name_(assignment.substr(0, assignment.find('='))) {
    if (const char* const value = std::getenv(name_.c_str())) before_ = value;
    _putenv(assignment.c_str());
  }
  ~Variable() { _putenv((name_ + "=" + before_.value_or("")).c_str()); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  std::string name_;
  std::optional<std::string> before_;
};

HANDLE inherited(HANDLE handle) {
  SetHandleInformation(handle, HANDLE_FLAG_INHERIT, HANDLE_FLAG_INHERIT);
  return handle;
}

/// Lines end as they do everywhere else.
std::string read_all(HANDLE pipe) {
  std::string bytes, text;
  std::array<char, 4096> buffer{};
  DWORD count = 0;
  while (ReadFile(pipe, buffer.data(), static_cast<DWORD>(buffer.size()), &count, nullptr) != FALSE && count > 0)
    bytes.append(buffer.data(), count);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (bytes.compare(i, 2, "\r\n") != 0) text += bytes[i];
  }
  return text;
}

}  // namespace

Ran run_program(const std::string& program, const std::string& arguments, const std::string& variables) {
  std::vector<std::unique_ptr<Variable>> environment;
  for (const std::string& assignment : words_of(variables))
    environment.push_back(std::make_unique<Variable>(assignment));
  std::wstring command = quoted(program);
  for (const std::string& word : words_of(arguments)) command += L" " + quoted(word);

  HANDLE read = nullptr, write = nullptr;
  if (CreatePipe(&read, &write, nullptr, 0) == FALSE) throw std::runtime_error("CreatePipe");
  HANDLE const nothing = CreateFileW(L"NUL", GENERIC_READ, 0, nullptr, OPEN_EXISTING, 0, nullptr);
  STARTUPINFOW startup{};
  startup.cb = sizeof startup;
  startup.dwFlags = STARTF_USESTDHANDLES;
  startup.hStdInput = inherited(nothing);
  startup.hStdOutput = startup.hStdError = inherited(write);
  PROCESS_INFORMATION child{};
  const bool started =
      CreateProcessW(nullptr, command.data(), nullptr, nullptr, TRUE, 0, nullptr, nullptr, &startup, &child) != FALSE;
  CloseHandle(write);
  CloseHandle(nothing);
  Ran result;
  if (started) {
    result.output = read_all(read);
    WaitForSingleObject(child.hProcess, INFINITE);
    DWORD status = 0;
    GetExitCodeProcess(child.hProcess, &status);
    result.status = static_cast<int>(status);
    CloseHandle(child.hThread);
    CloseHandle(child.hProcess);
  }
  CloseHandle(read);
  return result;
}

}  // namespace fa::test
