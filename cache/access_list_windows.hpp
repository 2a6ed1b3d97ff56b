#ifndef FA_CACHE_ACCESS_LIST_WINDOWS_HPP_
#define FA_CACHE_ACCESS_LIST_WINDOWS_HPP_

#ifndef NOMINMAX
#define NOMINMAX
#endif
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#include <windows.h>

#include <memory>
#include <string>

/// Who may write to a file on Windows: what platform_windows.cpp gives to what it creates, and asks of what it finds.
namespace fa::cache::platform {

/// Memory that LocalFree releases.
struct FreeLocal {
  void operator()(void* memory) const noexcept { LocalFree(memory); }
};
template <class T>
using Local = std::unique_ptr<T, FreeLocal>;

/// Full access for the user, the system and administrators, nothing inherited and nobody else; null where that cannot
/// be said, so that the parent's rules hold and are checked.
Local<void> private_security(bool directory);

/// Why others than the user, the system and administrators may write to it; empty: they may not.
std::string security_problem(HANDLE file);

}  // namespace fa::cache::platform

#endif  // FA_CACHE_ACCESS_LIST_WINDOWS_HPP_
