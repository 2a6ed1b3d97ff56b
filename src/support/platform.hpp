#ifndef FA_SRC_SUPPORT_PLATFORM_HPP_
#define FA_SRC_SUPPORT_PLATFORM_HPP_

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <string_view>

/// What systems do differently, apart from the files of the store (cache/platform.hpp). platform_posix.cpp or
/// platform_windows.cpp stands behind it. Paths and names are UTF-8 on Windows.
namespace fa::support::platform {

/// Null, with the loader's reason, where a library cannot be opened. Its symbols are bound locally.
void* open_library(const std::string& name, std::string* problem);
/// Null unless the process has it loaded already.
void* open_loaded_library(const std::string& name);
void close_library(void* library);
void* find_symbol(void* library, const char* name);
/// The file that was loaded; empty where the system does not say.
std::string library_path(void* library);

/// The CUDA driver, in order of preference.
std::span<const char* const> driver_libraries();
/// NVRTC, newest first.
std::span<const char* const> compiler_libraries();
/// The file that NVRTC of that version opens by its bare name.
std::string compiler_builtins(int major, int minor);
/// Directories that may hold NVRTC, most preferred first. "$NAME" in front is the value of an environment variable, of
/// "$PATH" each of its directories; a component may have one "*", which stands for the newest version first.
std::span<const char* const> compiler_directories();

/// Around every fork: `before` in the parent, `after` in parent and child. Nothing where processes do not fork.
bool around_fork(void (*before)(), void (*after)());

/// Runs `work` on a thread with a stack of that size and waits for it; an error number where there is no thread. `work`
/// does not throw.
int run_with_stack(std::size_t bytes, const std::function<void()>& work);

/// One write to the end of a file, which is made if it is missing, so that lines of processes do not mix. Says in errno
/// why not.
bool append_line(const std::string& file, std::string_view line);

/// Between the paths of a list in an environment variable.
char list_separator();

unsigned long process_id();

/// Empty where the variable is not set.
std::string environment(const char* name);

}  // namespace fa::support::platform

#endif  // FA_SRC_SUPPORT_PLATFORM_HPP_
