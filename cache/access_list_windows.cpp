#include "cache/access_list_windows.hpp"

// clang-format off
#include <aclapi.h>
#include <sddl.h>
// clang-format on
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

namespace fa::cache::platform {
namespace {

constexpr ACCESS_MASK kWriting = FILE_WRITE_DATA | FILE_APPEND_DATA | FILE_WRITE_EA | FILE_WRITE_ATTRIBUTES |
                                 FILE_DELETE_CHILD | DELETE | WRITE_DAC | WRITE_OWNER | GENERIC_WRITE | GENERIC_ALL;

/// The user's SID as text; empty where the token does not say.
std::wstring user_sid() {
  HANDLE token = nullptr;
  if (OpenProcessToken(GetCurrentProcess(), TOKEN_QUERY, &token) == FALSE) return {};
  alignas(TOKEN_USER) std::array<std::byte, sizeof(TOKEN_USER) + SECURITY_MAX_SID_SIZE> room{};
  DWORD size = 0;
  const BOOL known = GetTokenInformation(token, TokenUser, room.data(), static_cast<DWORD>(room.size()), &size);
  CloseHandle(token);
  wchar_t* text = nullptr;
  if (known == FALSE ||
      ConvertSidToStringSidW(reinterpret_cast<const TOKEN_USER*>(room.data())->User.Sid, &text) == FALSE) {
    return {};
  }
  const Local<wchar_t> held(text);
  return text;
}

bool is_one_of(PSID sid, std::span<const wchar_t* const> texts) {
  return std::ranges::any_of(texts, [sid](const wchar_t* text) {
    PSID other = nullptr;
    if (ConvertStringSidToSidW(text, &other) == FALSE) return false;
    const Local<void> held(other);
    return EqualSid(sid, other) != FALSE;
  });
}

/// Whose writing is no danger: the user, and who may do everything anyway.
bool is_trusted(PSID sid) {
  static constexpr std::array<const wchar_t*, 4> kSystem = {
      L"S-1-5-18",                                                        // the system
      L"S-1-5-32-544",                                                    // administrators
      L"S-1-3-4",                                                         // the rights of the owner, who is checked
      L"S-1-5-80-956008885-3418522649-1831038044-1853292631-2271478464",  // the installer of Windows
  };
  static const std::wstring user = user_sid();
  const std::array<const wchar_t*, 1> ours = {user.c_str()};
  return is_one_of(sid, kSystem) || (!user.empty() && is_one_of(sid, ours));
}

std::string sid_text(PSID sid) {
  char* text = nullptr;
  if (ConvertSidToStringSidA(sid, &text) == FALSE) return "unknown";
  const Local<char> held(text);
  return text;
}

/// Whom an entry of an access list lets write; null: nobody.
PSID writer_of(const ACE_HEADER* entry) {
  if ((entry->AceFlags & INHERIT_ONLY_ACE) != 0) return nullptr;
  const auto* allowed = reinterpret_cast<const ACCESS_ALLOWED_ACE*>(entry);
  switch (entry->AceType) {
    case ACCESS_ALLOWED_ACE_TYPE:
    case ACCESS_ALLOWED_CALLBACK_ACE_TYPE:
      break;
    default:  // denials take away, and entries for objects are of directories of another kind
      return nullptr;
  }
  if ((allowed->Mask & kWriting) == 0) return nullptr;
  return const_cast<DWORD*>(&allowed->SidStart);
}

}  // namespace

Local<void> private_security(bool directory) {
  const std::wstring user = user_sid();
  if (user.empty()) return nullptr;
  const std::wstring who = directory ? L"(A;OICI;FA;;;" : L"(A;;FA;;;";
  const std::wstring text = L"O:" + user + L"D:P" + who + user + L")" + who + L"SY)" + who + L"BA)";
  void* descriptor = nullptr;
  ConvertStringSecurityDescriptorToSecurityDescriptorW(text.c_str(), SDDL_REVISION_1, &descriptor, nullptr);
  return Local<void>(descriptor);
}

std::string security_problem(HANDLE file) {
  PSID owner = nullptr;
  PACL list = nullptr;
  PSECURITY_DESCRIPTOR descriptor = nullptr;
  const DWORD error = GetSecurityInfo(file, SE_FILE_OBJECT, OWNER_SECURITY_INFORMATION | DACL_SECURITY_INFORMATION,
                                      &owner, nullptr, &list, nullptr, &descriptor);
  if (error != ERROR_SUCCESS) return fmt::format("does not say who may write to it (error {})", error);
  const Local<void> held(descriptor);
  if (owner == nullptr || !is_trusted(owner)) {
    return fmt::format("belongs to another user ({})", owner == nullptr ? "unknown" : sid_text(owner));
  }
  if (list == nullptr) return "can be written by other users (it has no access list)";
  for (DWORD i = 0; i < list->AceCount; ++i) {
    void* entry = nullptr;
    if (GetAce(list, i, &entry) == FALSE) return "has an access list that cannot be read";
    PSID writer = writer_of(static_cast<const ACE_HEADER*>(entry));
    if (writer != nullptr && !is_trusted(writer)) {
      return fmt::format("can be written by other users ({}; icacls shows them)", sid_text(writer));
    }
  }
  return {};
}

}  // namespace fa::cache::platform
