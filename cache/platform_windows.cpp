// Windows 10 or later. Files are opened as the kernel opens them (NtCreateFile), because that alone takes a name
// relative to an open directory.

#ifndef NOMINMAX
#define NOMINMAX
#endif
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#ifndef _CRT_RAND_S
#define _CRT_RAND_S
#endif
// clang-format off
#include <windows.h>
#include <winternl.h>
// clang-format on

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "cache/access_list_windows.hpp"
#include "cache/platform.hpp"

extern "C" NTSTATUS NTAPI NtSetInformationFile(HANDLE file, PIO_STATUS_BLOCK result, PVOID information, ULONG size,
                                               FILE_INFORMATION_CLASS kind);

namespace fa::cache::platform {
namespace {

// Of <ntstatus.h>, which cannot be included behind <windows.h>.
enum : ULONG {
  kStatusAccessDenied = 0xC0000022,
  kStatusSharingViolation = 0xC0000043,
  kStatusDeletePending = 0xC0000056,
  kStatusFileIsADirectory = 0xC00000BA,
  kStatusNotADirectory = 0xC0000103,
  kStatusCannotDelete = 0xC0000121,
};
// Of the driver kit's headers.
constexpr auto kRenameInformation = static_cast<FILE_INFORMATION_CLASS>(10);
constexpr auto kDispositionInformation = static_cast<FILE_INFORMATION_CLASS>(13);
constexpr auto kDispositionInformationEx = static_cast<FILE_INFORMATION_CLASS>(64);
constexpr auto kRenameInformationEx = static_cast<FILE_INFORMATION_CLASS>(65);
constexpr ULONG kRenameReplace = 1;
constexpr ULONG kRenamePosix = 2;
constexpr ULONG kDispositionDelete = 1;
constexpr ULONG kDispositionPosix = 2;
constexpr ULONG kDispositionReadOnlyToo = 0x10;

constexpr ULONG kShareAll = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE;

HANDLE native(Handle handle) {
  return reinterpret_cast<HANDLE>(handle);
}

int errno_of_error(DWORD error) {
  switch (error) {
    case ERROR_SUCCESS:
      return 0;
    case ERROR_FILE_NOT_FOUND:
    case ERROR_PATH_NOT_FOUND:
    case ERROR_INVALID_NAME:
    case ERROR_BAD_PATHNAME:
    case ERROR_BAD_NETPATH:
    case ERROR_BAD_NET_NAME:
    case ERROR_INVALID_DRIVE:
      return ENOENT;
    case ERROR_ACCESS_DENIED:
    case ERROR_SHARING_VIOLATION:
    case ERROR_WRITE_PROTECT:
      return EACCES;
    case ERROR_FILE_EXISTS:
    case ERROR_ALREADY_EXISTS:
      return EEXIST;
    case ERROR_DELETE_PENDING:
      return EBUSY;
    case ERROR_DIRECTORY:
      return ENOTDIR;
    case ERROR_DISK_FULL:
    case ERROR_HANDLE_DISK_FULL:
      return ENOSPC;
    case ERROR_LOCK_VIOLATION:
    case ERROR_IO_PENDING:
      return EWOULDBLOCK;
    case ERROR_TOO_MANY_OPEN_FILES:
    case ERROR_NO_SYSTEM_RESOURCES:
      return EMFILE;
    case ERROR_NOT_ENOUGH_MEMORY:
    case ERROR_OUTOFMEMORY:
      return ENOMEM;
    case ERROR_CANT_RESOLVE_FILENAME:
      return ELOOP;
    case ERROR_FILENAME_EXCED_RANGE:
      return ENAMETOOLONG;
    case ERROR_INVALID_PARAMETER:
      return EINVAL;
    case ERROR_NOT_SUPPORTED:
    case ERROR_INVALID_FUNCTION:
      return ENOSYS;
    default:
      return EIO;
  }
}

int errno_of_status(NTSTATUS status) {
  switch (static_cast<ULONG>(status)) {
    case kStatusDeletePending:
      return EBUSY;
    case kStatusFileIsADirectory:
      return EISDIR;
    case kStatusNotADirectory:
      return ENOTDIR;
    default:
      return errno_of_error(RtlNtStatusToDosError(status));
  }
}

bool succeeded(NTSTATUS status) {
  if (status >= 0) return true;
  errno = errno_of_status(status);
  return false;
}

bool succeeded(BOOL result) {
  if (result != FALSE) return true;
  errno = errno_of_error(GetLastError());
  return false;
}

/// The kernel's name of a path that stands alone; empty where there is none.
std::wstring kernel_name(const std::filesystem::path& path) {
  std::array<wchar_t, MAX_PATH> room{};
  std::wstring full(room.size(), L'\0');
  const std::wstring& given = path.native();
  if (given.empty() || given.find(L'\0') != std::wstring::npos) return {};
  DWORD size = GetFullPathNameW(given.c_str(), static_cast<DWORD>(full.size()), full.data(), nullptr);
  if (size > full.size()) {
    full.resize(size);
    size = GetFullPathNameW(given.c_str(), static_cast<DWORD>(full.size()), full.data(), nullptr);
  }
  full.resize(std::min<std::size_t>(size, full.size()));
  if (full.empty()) return {};
  if (full.starts_with(L"\\\\?\\") || full.starts_with(L"\\\\.\\")) return L"\\??\\" + full.substr(4);
  if (full.starts_with(L"\\\\")) return L"\\??\\UNC\\" + full.substr(2);
  return L"\\??\\" + full;
}

/// A name and where it starts, as the kernel takes them.
class Target {
 public:
  Target(Handle parent, const std::filesystem::path& name)
      : root_(parent == kHere ? nullptr : native(parent)), name_(parent == kHere ? kernel_name(name) : name.native()) {}

  bool usable() const {
    constexpr std::size_t kMost = std::numeric_limits<USHORT>::max() / sizeof(wchar_t);
    return !name_.empty() && name_.size() < kMost;
  }
  HANDLE root() const { return root_; }
  const std::wstring& name() const { return name_; }

 private:
  HANDLE root_;
  std::wstring name_;
};

struct Opening {
  ACCESS_MASK access = 0;
  ULONG disposition = FILE_OPEN;
  ULONG options = 0;
  void* security = nullptr;  ///< of what is created
};

NTSTATUS open_status(const Target& target, const Opening& opening, HANDLE* file) {
  UNICODE_STRING name{};
  name.Buffer = const_cast<wchar_t*>(target.name().data());
  name.Length = name.MaximumLength = static_cast<USHORT>(target.name().size() * sizeof(wchar_t));
  OBJECT_ATTRIBUTES attributes{};
  attributes.Length = sizeof attributes;
  attributes.RootDirectory = target.root();
  attributes.ObjectName = &name;
  attributes.Attributes = OBJ_CASE_INSENSITIVE;
  attributes.SecurityDescriptor = opening.security;
  IO_STATUS_BLOCK result{};
  return NtCreateFile(file, opening.access | SYNCHRONIZE, &attributes, &result, nullptr, FILE_ATTRIBUTE_NORMAL,
                      kShareAll, opening.disposition, opening.options | FILE_SYNCHRONOUS_IO_NONALERT, nullptr, 0);
}

Handle open(Handle parent, const std::filesystem::path& name, const Opening& opening) {
  const Target target(parent, name);
  if (!target.usable()) {
    errno = ENOENT;
    return kNone;
  }
  HANDLE file = nullptr;
  if (!succeeded(open_status(target, opening, &file))) return kNone;
  return reinterpret_cast<Handle>(file);
}

bool is_link(HANDLE file) {
  FILE_ATTRIBUTE_TAG_INFO info{};
  return GetFileInformationByHandleEx(file, FileAttributeTagInfo, &info, sizeof info) != FALSE &&
         (info.FileAttributes & FILE_ATTRIBUTE_REPARSE_POINT) != 0 && IsReparseTagNameSurrogate(info.ReparseTag);
}

/// The same, and no link.
Handle open_no_link(Handle parent, const std::filesystem::path& name, Opening opening) {
  opening.options |= FILE_OPEN_REPARSE_POINT;
  const Handle file = open(parent, name, opening);
  if (file == kNone || !is_link(native(file))) return file;
  close(file);
  errno = ELOOP;
  return kNone;
}

Time time_of(FILETIME time) {
  constexpr std::int64_t kTicks = 10'000'000;
  constexpr std::int64_t kFrom1601To1970 = 11'644'473'600;
  const auto ticks = static_cast<std::int64_t>(std::uint64_t{time.dwHighDateTime} << 32U | time.dwLowDateTime);
  return {ticks / kTicks - kFrom1601To1970, ticks % kTicks * 100};
}

/// Bytes far behind the end of any file: Windows keeps others from what is locked, and here locks are an agreement.
OVERLAPPED lock_place() {
  OVERLAPPED place{};
  place.OffsetHigh = 0x40000000;
  return place;
}

/// Without POSIX semantics a name is free only when the last who has the file open closes it.
template <class Try>
bool insist(const Try& attempt) {
  constexpr int kTries = 40;
  for (int i = 0;; ++i) {
    if (attempt()) return true;
    if ((errno != EACCES && errno != EBUSY) || i == kTries) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

bool rename(Handle from, const std::filesystem::path& old_name, Handle to, const std::filesystem::path& name,
            bool replace) {
  const Handle opened =
      open(from, old_name, {DELETE, FILE_OPEN, FILE_NON_DIRECTORY_FILE | FILE_OPEN_REPARSE_POINT, nullptr});
  if (opened == kNone) return false;
  const std::unique_ptr<void, decltype(&CloseHandle)> file(native(opened), &CloseHandle);
  const Target target(to, name);
  if (!target.usable()) {
    errno = ENOENT;
    return false;
  }
  const std::size_t bytes = target.name().size() * sizeof(wchar_t);
  std::vector<std::byte> room(sizeof(FILE_RENAME_INFO) + bytes);
  auto* info = reinterpret_cast<FILE_RENAME_INFO*>(room.data());
  info->RootDirectory = target.root();
  info->FileNameLength = static_cast<DWORD>(bytes);
  std::memcpy(info->FileName, target.name().data(), bytes);
  const auto set = [&](FILE_INFORMATION_CLASS kind) {
    IO_STATUS_BLOCK result{};
    return succeeded(NtSetInformationFile(file.get(), &result, info, static_cast<ULONG>(room.size()), kind));
  };
  // The flags of the newer call lie where the older one has its truth value.
  const ULONG flags = kRenamePosix | (replace ? kRenameReplace : 0);
  std::memcpy(room.data(), &flags, sizeof flags);
  if (set(kRenameInformationEx)) return true;
  if (errno != EINVAL && errno != ENOSYS) return false;
  const ULONG old_flags = replace ? 1 : 0;
  std::memcpy(room.data(), &old_flags, sizeof old_flags);
  return insist([&] { return set(kRenameInformation); });
}

}  // namespace

Handle open_directory(Handle parent, const std::filesystem::path& name) {
  return open_no_link(parent, name,
                      {FILE_LIST_DIRECTORY | FILE_TRAVERSE | FILE_READ_ATTRIBUTES | READ_CONTROL, FILE_OPEN,
                       FILE_DIRECTORY_FILE, nullptr});
}

bool make_directory(Handle parent, const std::filesystem::path& name) {
  const Local<void> security = private_security(true);
  const Handle made = open(parent, name, {FILE_READ_ATTRIBUTES, FILE_CREATE, FILE_DIRECTORY_FILE, security.get()});
  return made != kNone && close(made);
}

Handle open_file(Handle parent, const std::filesystem::path& name, Links links) {
  constexpr ACCESS_MASK kReading = FILE_READ_DATA | FILE_READ_ATTRIBUTES | READ_CONTROL;
  const auto opened = [&](ACCESS_MASK access) {
    const Opening opening{access, FILE_OPEN, 0, nullptr};
    return links == Links::follow ? open(parent, name, opening) : open_no_link(parent, name, opening);
  };
  const Handle file = opened(kReading | FILE_WRITE_ATTRIBUTES);  // to say when it was used
  return file == kNone && errno == EACCES ? opened(kReading) : file;
}

Handle create_file(Handle parent, const std::filesystem::path& name, Readers readers) {
  const Local<void> security = readers == Readers::owner ? private_security(false) : nullptr;
  return open(parent, name,
              {FILE_WRITE_DATA | FILE_APPEND_DATA | FILE_READ_ATTRIBUTES, FILE_CREATE, FILE_NON_DIRECTORY_FILE,
               security.get()});
}

Handle open_lock_file(Handle parent, const std::filesystem::path& name) {
  const Local<void> security = private_security(false);
  return open_no_link(
      parent, name,
      {FILE_READ_DATA | FILE_WRITE_DATA | FILE_READ_ATTRIBUTES, FILE_OPEN_IF, FILE_NON_DIRECTORY_FILE, security.get()});
}

Handle open_to_write(const std::filesystem::path& name) {
  return open(kHere, name, {FILE_WRITE_DATA | FILE_APPEND_DATA | FILE_READ_ATTRIBUTES, FILE_OPEN, 0, nullptr});
}

bool close(Handle file) {
  return succeeded(CloseHandle(native(file)));
}

std::ptrdiff_t read(Handle file, std::span<std::byte> bytes) {
  const auto size = static_cast<DWORD>(std::min<std::size_t>(bytes.size(), 1U << 30U));
  DWORD count = 0;
  if (ReadFile(native(file), bytes.data(), size, &count, nullptr) != FALSE) return count;
  if (GetLastError() == ERROR_HANDLE_EOF) return 0;
  errno = errno_of_error(GetLastError());
  return -1;
}

std::ptrdiff_t read_at(Handle file, std::uint64_t offset, std::span<std::byte> bytes) {
  const auto size = static_cast<DWORD>(std::min<std::size_t>(bytes.size(), 1U << 30U));
  OVERLAPPED place{};
  place.Offset = static_cast<DWORD>(offset);
  place.OffsetHigh = static_cast<DWORD>(offset >> 32U);
  DWORD count = 0;
  if (ReadFile(native(file), bytes.data(), size, &count, &place) != FALSE) return count;
  if (GetLastError() == ERROR_HANDLE_EOF) return 0;
  errno = errno_of_error(GetLastError());
  return -1;
}

bool removed_elsewhere(int error) {
  return error == EBUSY;
}

std::ptrdiff_t write(Handle file, std::span<const std::byte> bytes) {
  const auto size = static_cast<DWORD>(std::min<std::size_t>(bytes.size(), 1U << 30U));
  DWORD count = 0;
  return succeeded(WriteFile(native(file), bytes.data(), size, &count, nullptr)) ? static_cast<std::ptrdiff_t>(count)
                                                                                 : -1;
}

bool flush(Handle file) {
  if (FlushFileBuffers(native(file)) != FALSE) return true;
  const DWORD error = GetLastError();
  // Of a directory, which is open to be read, nobody can ask it; some file systems do not know it.
  if (error == ERROR_ACCESS_DENIED || error == ERROR_INVALID_FUNCTION || error == ERROR_NOT_SUPPORTED) return true;
  errno = errno_of_error(error);
  return false;
}

void touch(Handle file) {
  FILETIME now{};
  GetSystemTimeAsFileTime(&now);
  SetFileTime(native(file), nullptr, nullptr, &now);  // where it may not be set, nothing is evicted either
}

bool status_of(Handle file, Status* status) {
  BY_HANDLE_FILE_INFORMATION info{};
  *status = {};
  if (GetFileType(native(file)) != FILE_TYPE_DISK) return true;
  if (!succeeded(GetFileInformationByHandle(native(file), &info))) return false;
  const bool directory = (info.dwFileAttributes & FILE_ATTRIBUTE_DIRECTORY) != 0;
  status->kind = is_link(native(file)) ? Kind::link : directory ? Kind::directory : Kind::regular;
  status->device = info.dwVolumeSerialNumber;
  status->inode = std::uint64_t{info.nFileIndexHigh} << 32U | info.nFileIndexLow;
  status->bytes = std::uint64_t{info.nFileSizeHigh} << 32U | info.nFileSizeLow;
  status->modified = time_of(info.ftLastWriteTime);
  return true;
}

bool status_at(Handle parent, const std::filesystem::path& name, Status* status, Links links) {
  const ULONG options = links == Links::follow ? 0 : FILE_OPEN_REPARSE_POINT;
  const Handle file = open(parent, name, {FILE_READ_ATTRIBUTES, FILE_OPEN, options, nullptr});
  if (file == kNone) return false;
  const bool known = status_of(file, status);
  close(file);
  return known;
}

std::vector<std::string> names_in(Handle directory) {
  std::vector<std::string> names;
  alignas(FILE_FULL_DIR_INFO) std::array<std::byte, 32768> room{};
  FILE_INFO_BY_HANDLE_CLASS kind = FileFullDirectoryRestartInfo;
  while (GetFileInformationByHandleEx(native(directory), kind, room.data(), static_cast<DWORD>(room.size())) != FALSE) {
    kind = FileFullDirectoryInfo;
    for (std::size_t at = 0;;) {
      const auto* item = reinterpret_cast<const FILE_FULL_DIR_INFO*>(room.data() + at);
      const std::wstring name(item->FileName, item->FileNameLength / sizeof(wchar_t));
      if (name != L"." && name != L"..") names.push_back(std::filesystem::path(name).string());
      if (item->NextEntryOffset == 0) break;
      at += item->NextEntryOffset;
    }
  }
  close(directory);
  return names;
}

bool remove_file(Handle parent, const std::filesystem::path& name) {
  const Handle file =
      open(parent, name, {DELETE, FILE_OPEN, FILE_NON_DIRECTORY_FILE | FILE_OPEN_REPARSE_POINT, nullptr});
  if (file == kNone) return false;
  const auto set = [file](FILE_INFORMATION_CLASS kind, auto information) {
    IO_STATUS_BLOCK result{};
    return succeeded(NtSetInformationFile(native(file), &result, &information, sizeof information, kind));
  };
  bool removed = set(kDispositionInformationEx, kDispositionDelete | kDispositionPosix | kDispositionReadOnlyToo);
  if (!removed && (errno == EINVAL || errno == ENOSYS)) removed = set(kDispositionInformation, BOOLEAN{TRUE});
  const int error = errno;
  close(file);
  errno = error;
  return removed;
}

bool rename_file(Handle from, const std::filesystem::path& old_name, Handle to, const std::filesystem::path& name) {
  return rename(from, old_name, to, name, true);
}

bool name_exclusively(Handle from, const std::filesystem::path& old_name, Handle to,
                      const std::filesystem::path& name) {
  return rename(from, old_name, to, name, false);
}

bool try_lock(Handle file, Lock lock) {
  OVERLAPPED place = lock_place();
  const DWORD flags = LOCKFILE_FAIL_IMMEDIATELY | (lock == Lock::exclusive ? LOCKFILE_EXCLUSIVE_LOCK : 0);
  return succeeded(LockFileEx(native(file), flags, 0, 1, 0, &place));
}

void unlock(Handle file) {
  OVERLAPPED place = lock_place();
  UnlockFileEx(native(file), 0, 1, 0, &place);
}

std::string ownership_problem(Handle file, const Status& /*status*/) {
  return security_problem(native(file));
}

std::string shipped_problem(Handle file, const Status& /*status*/) {
  return security_problem(native(file));
}

bool writable(const std::filesystem::path& path, Kind kind) {
  const DWORD attributes = GetFileAttributesW(path.c_str());
  if (attributes == INVALID_FILE_ATTRIBUTES) return kind == Kind::other || succeeded(FALSE);
  if (kind == Kind::directory) {
    errno = ENOTDIR;
    return (attributes & FILE_ATTRIBUTE_DIRECTORY) != 0;
  }
  errno = EACCES;
  return (attributes & FILE_ATTRIBUTE_READONLY) == 0;
}

std::uint64_t file_size_limit() {
  return std::numeric_limits<std::uint64_t>::max();
}

unsigned long process_id() {
  return GetCurrentProcessId();
}

std::uint64_t random_number() {
  unsigned high = 0;
  unsigned low = 0;
  if (rand_s(&high) == 0 && rand_s(&low) == 0) return std::uint64_t{high} << 32U | low;
  return static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
}

std::span<const CachePlace> cache_places() {
  static constexpr std::array<CachePlace, 2> kPlaces = {
      {{"LOCALAPPDATA", "fa/cache"}, {"USERPROFILE", "AppData/Local/fa/cache"}}};
  return kPlaces;
}

std::filesystem::path environment_path(const char* variable) {
  const std::wstring name(variable, variable + std::strlen(variable));
  std::wstring value(GetEnvironmentVariableW(name.c_str(), nullptr, 0), L'\0');
  if (value.empty()) return {};
  value.resize(GetEnvironmentVariableW(name.c_str(), value.data(), static_cast<DWORD>(value.size())));
  return value;
}

}  // namespace fa::cache::platform
