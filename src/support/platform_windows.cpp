#ifndef NOMINMAX
#define NOMINMAX
#endif
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
// clang-format off
#include <windows.h>
#include <process.h>
// clang-format on

#include <array>
#include <cerrno>
#include <memory>
#include <system_error>

#include "support/platform.hpp"

namespace fa::support::platform {
namespace {

std::wstring wide(std::string_view text) {
  const int size = static_cast<int>(text.size());
  std::wstring result(static_cast<std::size_t>(MultiByteToWideChar(CP_UTF8, 0, text.data(), size, nullptr, 0)), L'\0');
  MultiByteToWideChar(CP_UTF8, 0, text.data(), size, result.data(), static_cast<int>(result.size()));
  return result;
}

std::string narrow(std::wstring_view text) {
  const int size = static_cast<int>(text.size());
  const int bytes = WideCharToMultiByte(CP_UTF8, 0, text.data(), size, nullptr, 0, nullptr, nullptr);
  std::string result(static_cast<std::size_t>(bytes), '\0');
  WideCharToMultiByte(CP_UTF8, 0, text.data(), size, result.data(), bytes, nullptr, nullptr);
  return result;
}

std::string error_text(DWORD error) {
  std::string text = std::system_category().message(static_cast<int>(error));
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r' || text.back() == '.')) text.pop_back();
  return text;
}

bool fail(DWORD error) {
  const std::error_condition condition =
      std::error_code(static_cast<int>(error), std::system_category()).default_error_condition();
  errno = condition.category() == std::generic_category() ? condition.value() : EIO;
  return false;
}

HMODULE module_of(void* library) {
  return static_cast<HMODULE>(library);
}

}  // namespace

void* open_library(const std::string& name, std::string* problem) {
  // Neither the working directory nor PATH: anybody may have put a library there.
  const bool is_path = name.find_first_of("/\\") != std::string::npos;
  const DWORD beside = is_path ? LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR : 0;
  std::wstring file = wide(name);
  for (wchar_t& c : file) c = c == L'/' ? L'\\' : c;
  const HMODULE library = LoadLibraryExW(file.c_str(), nullptr, LOAD_LIBRARY_SEARCH_DEFAULT_DIRS | beside);
  if (library == nullptr && problem != nullptr) *problem = name + ": " + error_text(GetLastError());
  return library;
}

void* open_loaded_library(const std::string& name) {
  HMODULE library = nullptr;
  return GetModuleHandleExW(0, wide(name).c_str(), &library) != FALSE ? library : nullptr;
}

void close_library(void* library) {
  FreeLibrary(module_of(library));
}

void* find_symbol(void* library, const char* name) {
  return reinterpret_cast<void*>(GetProcAddress(module_of(library), name));
}

std::string library_path(void* library) {
  std::wstring path(32768, L'\0');
  path.resize(GetModuleFileNameW(module_of(library), path.data(), static_cast<DWORD>(path.size())));
  return narrow(path);
}

std::span<const char* const> driver_libraries() {
  static constexpr std::array kNames = {"nvcuda.dll"};
  return kNames;
}

std::span<const char* const> compiler_libraries() {
  static constexpr std::array kNames = {"nvrtc64_130_0.dll", "nvrtc64_120_0.dll"};
  return kNames;
}

std::string compiler_builtins(int major, int minor) {
  return "nvrtc-builtins64_" + std::to_string(major) + std::to_string(minor) + ".dll";
}

std::span<const char* const> compiler_directories() {
  static constexpr std::array kDirectories = {
      "$CUDA_HOME/bin/x64",
      "$CUDA_HOME/bin",
      "$CUDA_PATH/bin/x64",
      "$CUDA_PATH/bin",
      "$VIRTUAL_ENV/Lib/site-packages/nvidia/cu13/bin/x86_64",
      "$VIRTUAL_ENV/Lib/site-packages/nvidia/cuda_nvrtc/bin",
      "$CONDA_PREFIX/Library/bin/x64",
      "$CONDA_PREFIX/Library/bin",
      "$CONDA_PREFIX/Lib/site-packages/nvidia/cu13/bin/x86_64",
      "$CONDA_PREFIX/Lib/site-packages/nvidia/cuda_nvrtc/bin",
      "$ProgramFiles/NVIDIA GPU Computing Toolkit/CUDA/v*/bin/x64",
      "$ProgramFiles/NVIDIA GPU Computing Toolkit/CUDA/v*/bin",
      "$PATH",
  };
  return kDirectories;
}

bool around_fork(void (*)(), void (*)()) {
  return true;
}

int run_with_stack(std::size_t bytes, const std::function<void()>& work) {
  const auto entry = [](void* function) -> unsigned {
    (*static_cast<const std::function<void()>*>(function))();
    return 0;
  };
  const std::uintptr_t thread =
      _beginthreadex(nullptr, static_cast<unsigned>(bytes), entry, const_cast<void*>(static_cast<const void*>(&work)),
                     STACK_SIZE_PARAM_IS_A_RESERVATION, nullptr);
  if (thread == 0) return errno;
  WaitForSingleObject(reinterpret_cast<HANDLE>(thread), INFINITE);
  CloseHandle(reinterpret_cast<HANDLE>(thread));
  return 0;
}

bool append_line(const std::string& file, std::string_view line) {
  const HANDLE opened =
      CreateFileW(wide(file).c_str(), FILE_APPEND_DATA, FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, nullptr,
                  OPEN_ALWAYS, FILE_ATTRIBUTE_NORMAL, nullptr);
  if (opened == INVALID_HANDLE_VALUE) return fail(GetLastError());
  DWORD written = 0;
  const BOOL done = WriteFile(opened, line.data(), static_cast<DWORD>(line.size()), &written, nullptr);
  const DWORD error = done != FALSE ? ERROR_DISK_FULL : GetLastError();
  CloseHandle(opened);
  return written == line.size() || fail(error);
}

char list_separator() {
  return ';';
}

unsigned long process_id() {
  return GetCurrentProcessId();
}

std::string environment(const char* name) {
  const std::wstring variable = wide(name);
  std::wstring value(GetEnvironmentVariableW(variable.c_str(), nullptr, 0), L'\0');
  if (value.empty()) return {};
  value.resize(GetEnvironmentVariableW(variable.c_str(), value.data(), static_cast<DWORD>(value.size())));
  return narrow(value);
}

}  // namespace fa::support::platform
