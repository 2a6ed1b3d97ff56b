#include "faults.hpp"

#include <sys/types.h>

#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstddef>
#include <thread>
#include <utility>

namespace fa::cache::testing {

Faults& faults() {
  static Faults state;
  return state;
}

namespace {

/// Only the thread that runs the tests: faults are not meant for several.
bool fails(const char* call, int error) {
  Faults& state = faults();
  if (++state.calls == state.kill_at) std::raise(SIGKILL);
  if (state.once && state.at == call) std::exchange(state.once, nullptr)();
  if (error == 0) return false;
  errno = error;
  return true;
}

bool armed() {
  static const std::thread::id tests = std::this_thread::get_id();
  return std::this_thread::get_id() == tests;
}

}  // namespace
}  // namespace fa::cache::testing

using fa::cache::testing::armed;
using fa::cache::testing::fails;
using fa::cache::testing::faults;

// The linker's --wrap gives these names. NOLINTBEGIN
extern "C" {

int __real_flock(int file, int operation);
int __real_fsync(int file);
int __real_mkdirat(int parent, const char* name, mode_t mode);
int __real_openat(int parent, const char* name, int flags, ...);
ssize_t __real_read(int file, void* bytes, size_t size);
int __real_renameat(int from, const char* old_name, int to, const char* new_name);
int __real_unlinkat(int parent, const char* name, int flags);
ssize_t __real_write(int file, const void* bytes, size_t size);

int __wrap_flock(int file, int operation) {
  return armed() && fails("flock", faults().flock_error) ? -1 : __real_flock(file, operation);
}

int __wrap_fsync(int file) {
  return armed() && fails("fsync", faults().fsync_error) ? -1 : __real_fsync(file);
}

int __wrap_mkdirat(int parent, const char* name, mode_t mode) {
  return armed() && fails("mkdirat", 0) ? -1 : __real_mkdirat(parent, name, mode);
}

int __wrap_openat(int parent, const char* name, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = va_arg(arguments, mode_t);  // there is always room for it in the register save area
  va_end(arguments);
  return armed() && fails("openat", 0) ? -1 : __real_openat(parent, name, flags, mode);
}

ssize_t __wrap_read(int file, void* bytes, size_t size) {
  return armed() && fails("read", 0) ? -1 : __real_read(file, bytes, size);
}

int __wrap_renameat(int from, const char* old_name, int to, const char* new_name) {
  return armed() && fails("renameat", faults().renameat_error) ? -1 : __real_renameat(from, old_name, to, new_name);
}

int __wrap_unlinkat(int parent, const char* name, int flags) {
  return armed() && fails("unlinkat", 0) ? -1 : __real_unlinkat(parent, name, flags);
}

ssize_t __wrap_write(int file, const void* bytes, size_t size) {
  if (!armed()) return __real_write(file, bytes, size);
  if (fails("write", faults().write_error)) return -1;
  return __real_write(file, bytes, faults().short_writes && size > 1 ? size / 2 : size);
}

}  // extern "C"
// NOLINTEND
