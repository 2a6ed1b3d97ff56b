#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <limits>
#include <memory>
#include <string_view>

#include "cache/platform.hpp"

namespace fa::cache::platform {
namespace {

constexpr mode_t kOthersWrite = 022;
constexpr mode_t kPrivateDirectory = 0700;
constexpr mode_t kPrivateFile = 0600;

int descriptor(Handle handle) {
  return handle == kHere ? AT_FDCWD : static_cast<int>(handle);
}

mode_t mode_for(Readers readers) {
  switch (readers) {
    case Readers::everybody:
      return 0644;
    case Readers::system_default:
      return 0666;
    case Readers::owner:
      break;
  }
  return kPrivateFile;
}

Status status_from(const struct stat& found) {
  Status status;
  status.kind = S_ISREG(found.st_mode)   ? Kind::regular
                : S_ISDIR(found.st_mode) ? Kind::directory
                : S_ISLNK(found.st_mode) ? Kind::link
                                         : Kind::other;
  status.device = found.st_dev;
  status.inode = found.st_ino;
  status.bytes = static_cast<std::uint64_t>(found.st_size);
  status.modified = {found.st_mtim.tv_sec, found.st_mtim.tv_nsec};
  status.owner = found.st_uid;
  status.mode = static_cast<std::uint32_t>(found.st_mode) & 07777U;
  return status;
}

std::string writable_problem(const Status& status) {
  if ((status.mode & kOthersWrite) != 0) {
    return fmt::format("can be written by other users (mode {:04o}; chmod go-w makes it usable)", status.mode);
  }
  return {};
}

}  // namespace

Handle open_directory(Handle parent, const std::filesystem::path& name) {
  return openat(descriptor(parent), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

bool make_directory(Handle parent, const std::filesystem::path& name) {
  return mkdirat(descriptor(parent), name.c_str(), kPrivateDirectory) == 0;
}

Handle open_file(Handle parent, const std::filesystem::path& name, Links links) {
  // O_NONBLOCK: opening a FIFO must not wait for its writer.
  const int follow = links == Links::follow ? 0 : O_NOFOLLOW;
  return openat(descriptor(parent), name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | follow);
}

Handle create_file(Handle parent, const std::filesystem::path& name, Readers readers) {
  constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  return openat(descriptor(parent), name.c_str(), kFlags, mode_for(readers));
}

Handle open_lock_file(Handle parent, const std::filesystem::path& name) {
  return openat(descriptor(parent), name.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, kPrivateFile);
}

Handle open_to_write(const std::filesystem::path& name) {
  return openat(AT_FDCWD, name.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY);
}

bool close(Handle file) {
  return ::close(static_cast<int>(file)) == 0;
}

std::ptrdiff_t read(Handle file, std::span<std::byte> bytes) {
  return ::read(static_cast<int>(file), bytes.data(), bytes.size());
}

std::ptrdiff_t read_at(Handle file, std::uint64_t offset, std::span<std::byte> bytes) {
  return pread(static_cast<int>(file), bytes.data(), bytes.size(), static_cast<off_t>(offset));
}

bool removed_elsewhere(int error) {
  return error == ESTALE;
}

std::ptrdiff_t write(Handle file, std::span<const std::byte> bytes) {
  return ::write(static_cast<int>(file), bytes.data(), bytes.size());
}

bool flush(Handle file) {
  // Some file systems know no fsync; the rename stays atomic there, and the digest catches the rest.
  return fsync(static_cast<int>(file)) == 0 || errno == EINVAL || errno == ENOSYS || errno == ENOTSUP;
}

void touch(Handle file) {
  const struct timespec times[2] = {{0, UTIME_OMIT}, {0, UTIME_NOW}};
  futimens(static_cast<int>(file), times);  // a read-only file system keeps its times, and evicts nothing either
}

bool status_of(Handle file, Status* status) {
  struct stat found {};
  if (fstat(static_cast<int>(file), &found) != 0) return false;
  *status = status_from(found);
  return true;
}

bool status_at(Handle parent, const std::filesystem::path& name, Status* status, Links links) {
  struct stat found {};
  const int flags = links == Links::follow ? 0 : AT_SYMLINK_NOFOLLOW;
  if (fstatat(descriptor(parent), name.c_str(), &found, flags) != 0) return false;
  *status = status_from(found);
  return true;
}

std::vector<std::string> names_in(Handle directory) {
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(fdopendir(static_cast<int>(directory)), &closedir);
  if (stream == nullptr) {
    close(directory);
    return {};
  }
  std::vector<std::string> names;
  // The stream is ours alone, which is all that readdir asks of threads.
  while (const dirent* item = readdir(stream.get())) {  // NOLINT(concurrency-mt-unsafe)
    const std::string_view name(static_cast<const char*>(item->d_name));
    if (name != "." && name != "..") names.emplace_back(name);
  }
  return names;
}

bool remove_file(Handle parent, const std::filesystem::path& name) {
  return unlinkat(descriptor(parent), name.c_str(), 0) == 0;
}

bool rename_file(Handle from, const std::filesystem::path& old_name, Handle to, const std::filesystem::path& name) {
  return renameat(descriptor(from), old_name.c_str(), descriptor(to), name.c_str()) == 0;
}

// Where the file system has no links, a rename that takes no name away from another file does it.
bool name_exclusively(Handle from, const std::filesystem::path& old_name, Handle to,
                      const std::filesystem::path& name) {
  const int source = descriptor(from);
  const int target = descriptor(to);
  if (linkat(source, old_name.c_str(), target, name.c_str(), 0) == 0) return true;
  if (errno == EEXIST) return false;
  if (renameat2(source, old_name.c_str(), target, name.c_str(), RENAME_NOREPLACE) == 0) return true;
  if (errno != EINVAL && errno != ENOSYS) return false;
  // Neither: two writers may then both believe to be the first, for as long as they run.
  if (faccessat(target, name.c_str(), F_OK, 0) == 0) {
    errno = EEXIST;
    return false;
  }
  return renameat(source, old_name.c_str(), target, name.c_str()) == 0;
}

bool try_lock(Handle file, Lock lock) {
  return flock(static_cast<int>(file), (lock == Lock::shared ? LOCK_SH : LOCK_EX) | LOCK_NB) == 0;
}

void unlock(Handle file) {
  // A child forked meanwhile has the descriptor too, so closing is not unlocking.
  flock(static_cast<int>(file), LOCK_UN);
}

std::string ownership_problem(Handle /*file*/, const Status& status) {
  if (status.owner != geteuid()) return fmt::format("belongs to another user (uid {})", status.owner);
  return writable_problem(status);
}

std::string shipped_problem(Handle file, const Status& status) {
  return status.owner == 0 ? writable_problem(status) : ownership_problem(file, status);
}

bool writable(const std::filesystem::path& path, Kind kind) {
  return access(path.c_str(), kind == Kind::directory ? W_OK | X_OK : W_OK) == 0;
}

std::uint64_t file_size_limit() {
  struct rlimit limit {};
  const bool limited = getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  return limited ? limit.rlim_cur : std::numeric_limits<std::uint64_t>::max();
}

unsigned long process_id() {
  return static_cast<unsigned long>(getpid());
}

std::uint64_t random_number() {
  // Not std::random_device: linked into a wheel, that asks for a newer C library than the rest does.
  std::uint64_t random = 0;
  if (getrandom(&random, sizeof random, 0) == sizeof random) return random;
  return static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
}

std::span<const CachePlace> cache_places() {
  static constexpr std::array<CachePlace, 2> kPlaces = {{{"XDG_CACHE_HOME", "fa"}, {"HOME", ".cache/fa"}}};
  return kPlaces;
}

std::filesystem::path environment_path(const char* variable) {
  const char* value = std::getenv(variable);  // NOLINT(concurrency-mt-unsafe): read only, as every program does
  return value == nullptr ? "" : value;
}

}  // namespace fa::cache::platform
