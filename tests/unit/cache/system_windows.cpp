#ifndef NOMINMAX
#define NOMINMAX
#endif
// clang-format off
#include <windows.h>
#include <aclapi.h>
// clang-format on

#include <memory>
#include <stdexcept>
#include <utility>

#include "cache/files.hpp"
#include "child_programs.hpp"
#include "system.hpp"

namespace fa::cache::testing {
namespace {

/// What a process ends with that is killed; no body returns it.
constexpr UINT kKilledCode = 0xdead;

std::wstring quoted(const std::string& word) {
  return L"\"" + std::filesystem::path(word).wstring() + L"\"";  // no argument of a test has quotes of its own
}

}  // namespace

void let_others_write(const std::filesystem::path& path) {
  EXPLICIT_ACCESSW everybody{};
  wchar_t name[] = L"Everyone";
  BuildExplicitAccessWithNameW(&everybody, name, GENERIC_ALL, GRANT_ACCESS, NO_INHERITANCE);
  SID_IDENTIFIER_AUTHORITY world = SECURITY_WORLD_SID_AUTHORITY;
  PSID sid = nullptr;
  if (AllocateAndInitializeSid(&world, 1, SECURITY_WORLD_RID, 0, 0, 0, 0, 0, 0, 0, &sid) == FALSE) {
    throw std::runtime_error("AllocateAndInitializeSid");
  }
  BuildTrusteeWithSidW(&everybody.Trustee, sid);
  PACL list = nullptr;
  std::wstring file = path.wstring();
  const bool done = SetEntriesInAclW(1, &everybody, nullptr, &list) == ERROR_SUCCESS &&
                    SetNamedSecurityInfoW(file.data(), SE_FILE_OBJECT, DACL_SECURITY_INFORMATION, nullptr, nullptr,
                                          list, nullptr) == ERROR_SUCCESS;
  LocalFree(list);
  FreeSid(sid);
  if (!done) throw std::runtime_error("SetNamedSecurityInfo");
}

bool is_private(const std::filesystem::path& path) {
  std::string problem;
  if (std::filesystem::is_directory(path)) return open_private_root(path, Missing::fail, &problem).valid();
  return read_private_file(platform::kHere, path, 1U << 30U).status == FileBytes::Status::read;
}

std::size_t open_handles() {
  DWORD count = 0;
  GetProcessHandleCount(GetCurrentProcess(), &count);
  return count;
}

Process::Process(const std::string& program, const std::vector<std::string>& arguments) : id_(-1) {
  std::wstring self(32768, L'\0');
  self.resize(GetModuleFileNameW(nullptr, self.data(), static_cast<DWORD>(self.size())));
  std::wstring command = L"\"" + self + L"\" " + quoted(kChildOption) + L" " + quoted(program);
  for (const std::string& argument : arguments) command += L" " + quoted(argument);
  STARTUPINFOW startup{};
  startup.cb = sizeof startup;
  PROCESS_INFORMATION child{};
  if (CreateProcessW(nullptr, command.data(), nullptr, nullptr, FALSE, 0, nullptr, nullptr, &startup, &child) ==
      FALSE) {
    throw std::runtime_error("CreateProcess");
  }
  CloseHandle(child.hThread);
  id_ = reinterpret_cast<std::intptr_t>(child.hProcess);
}

Process::~Process() {
  if (id_ == -1) return;
  kill();
  wait();
}

Process::Process(Process&& other) noexcept : id_(std::exchange(other.id_, -1)) {}

void Process::kill() {
  TerminateProcess(reinterpret_cast<HANDLE>(id_), kKilledCode);
}

int Process::wait() {
  HANDLE const process = reinterpret_cast<HANDLE>(std::exchange(id_, -1));
  DWORD status = 1;
  const bool ended = WaitForSingleObject(process, 120'000) == WAIT_OBJECT_0;
  GetExitCodeProcess(process, &status);
  CloseHandle(process);
  if (!ended) return -1000;
  return status == kKilledCode ? kKilled : static_cast<int>(status);
}

void die() {
  TerminateProcess(GetCurrentProcess(), kKilledCode);
  std::abort();
}

}  // namespace fa::cache::testing
