#include "cache/files.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <optional>
#include <system_error>

namespace fa::cache {
namespace {

constexpr int kDirectoryFlags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
constexpr mode_t kDirectoryMode = 0700;
constexpr mode_t kFileMode = 0600;
constexpr mode_t kOthersWrite = 022;

std::string writable_problem(const struct stat& status) {
  if ((status.st_mode & kOthersWrite) != 0) {
    return fmt::format("can be written by other users (mode {:04o}; chmod go-w makes it usable)",
                       static_cast<unsigned>(status.st_mode) & 07777U);
  }
  return {};
}

/// What keeps an open file from being ours alone; empty when nothing does.
std::string ownership_problem(const struct stat& status) {
  if (status.st_uid != geteuid()) return fmt::format("belongs to another user (uid {})", status.st_uid);
  return writable_problem(status);
}

Descriptor checked_directory(int descriptor, const std::string& name, std::string* problem) {
  Descriptor directory(descriptor);
  if (!directory.valid()) {
    const int error = errno;
    const bool in_the_way = error == ENOTDIR || error == ELOOP;
    *problem =
        fmt::format("{} {}", name, in_the_way ? "is not a directory, or it is a symbolic link" : error_text(error));
    return {};
  }
  struct stat status {};
  if (fstat(directory.get(), &status) != 0) {
    *problem = fmt::format("{}: {}", name, error_text(errno));
    return {};
  }
  if (const std::string reason = ownership_problem(status); !reason.empty()) {
    *problem = fmt::format("{} {}", name, reason);
    return {};
  }
  return directory;
}

bool make_directory(const std::filesystem::path& path) {
  return mkdirat(AT_FDCWD, path.c_str(), kDirectoryMode) == 0 || errno == EEXIST;
}

bool make_directories(const std::filesystem::path& path) {
  if (make_directory(path)) return true;
  if (errno != ENOENT || !path.has_relative_path()) return false;
  return make_directories(path.parent_path()) && make_directory(path);
}

/// With errno 0 where the file ends too early.
bool read_all(int file, std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = read(file, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count == 0) errno = 0;
    if (count <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
  return true;
}

/// A file is marked as used once an hour at most: enough to tell what is idle, and no write for each of many processes.
void mark_used(int file, const struct stat& status) {
  constexpr std::time_t kGranularity = 3600;
  if (std::time(nullptr) - status.st_mtime < kGranularity) return;
  const struct timespec times[2] = {{0, UTIME_OMIT}, {0, UTIME_NOW}};
  futimens(file, times);  // a read-only file system keeps its times, and evicts nothing either
}

bool write_all(int file, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = write(file, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count == 0) errno = ENOSPC;
    if (count <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
  return true;
}

bool flush(int file) {
  // Some file systems know no fsync; the rename stays atomic there, and the digest catches the rest.
  return fsync(file) == 0 || errno == EINVAL || errno == ENOSYS || errno == ENOTSUP;
}

/// Writing past the limit would not only fail: its signal ends a process that does not expect it.
bool within_file_size_limit(std::size_t size) {
  struct rlimit limit {};
  return getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || size <= limit.rlim_cur;
}

std::filesystem::path parent_of(const std::filesystem::path& file) {
  return file.has_parent_path() ? file.parent_path() : std::filesystem::path(".");
}

/// To what the links of a regular file, or of one that does not exist yet, lead. Links of /proc lead to open files,
/// which a rename would leave behind.
bool follow_links(Destination* destination) {
  constexpr int kMostLinks = 40;  // as the kernel has it
  std::error_code error;
  for (int i = 0; i < kMostLinks; ++i) {
    struct stat status {};
    if (lstat(destination->path.c_str(), &status) != 0 || !S_ISLNK(status.st_mode)) return true;
    const std::filesystem::path parent = std::filesystem::canonical(parent_of(destination->path), error);
    destination->in_place = parent.native().starts_with("/proc/");
    if (destination->in_place) return true;
    const std::filesystem::path target = std::filesystem::read_symlink(destination->path, error);
    if (error) return false;
    destination->path = parent / target;  // an absolute target stands alone
  }
  return false;
}

FileBytes refused(std::string problem) {
  return {FileBytes::Status::refused, {}, std::move(problem)};
}

}  // namespace

Descriptor::~Descriptor() {
  if (descriptor_ >= 0) close(descriptor_);
}

std::string error_text(int error) {
  return std::generic_category().message(error);
}

Descriptor open_private_directory(int parent, const std::string& name, Missing missing, std::string* problem) {
  int descriptor = openat(parent, name.c_str(), kDirectoryFlags);
  if (descriptor < 0 && errno == ENOENT && missing == Missing::create &&
      (mkdirat(parent, name.c_str(), kDirectoryMode) == 0 || errno == EEXIST)) {
    descriptor = openat(parent, name.c_str(), kDirectoryFlags);
  }
  return checked_directory(descriptor, name, problem);
}

Descriptor open_private_root(const std::filesystem::path& root, Missing missing, std::string* problem) {
  int descriptor = openat(AT_FDCWD, root.c_str(), kDirectoryFlags);
  if (descriptor < 0 && errno == ENOENT && missing == Missing::create && make_directories(root)) {
    descriptor = openat(AT_FDCWD, root.c_str(), kDirectoryFlags);
  }
  return checked_directory(descriptor, root.string(), problem);
}

FileBytes read_private_file(int parent, const std::string& name, std::uint64_t limit, Reading reading) {
  // O_NONBLOCK: opening a FIFO must not wait for its writer.
  const Descriptor file(openat(parent, name.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  if (!file.valid()) {
    if (errno == ELOOP || errno == EACCES || errno == ENXIO) return refused(error_text(errno));
    return {};
  }
  struct stat status {};
  if (fstat(file.get(), &status) != 0) return {};
  if (!S_ISREG(status.st_mode)) return refused("not a regular file");
  if (std::string reason = ownership_problem(status); !reason.empty()) return refused(std::move(reason));
  const auto size = static_cast<std::uint64_t>(status.st_size);
  if (size > limit) return refused(fmt::format("{} bytes are too many", size));
  // Whether the lock is granted or not, what is open can be read; it only keeps an eviction from choosing this file.
  flock(file.get(), LOCK_SH | LOCK_NB);
  if (reading == Reading::use) mark_used(file.get(), status);
  FileBytes result{FileBytes::Status::read, std::vector<std::byte>(size), {}};
  if (read_all(file.get(), result.bytes)) return result;
  if (errno == ESTALE) return {};  // removed by another host of a network file system
  return refused("cannot be read to its end");
}

Descriptor open_shipped_file(const std::filesystem::path& file, struct stat* status, std::string* problem) {
  Descriptor descriptor(open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!descriptor.valid() || fstat(descriptor.get(), status) != 0) {
    *problem = error_text(errno);
    return {};
  }
  if (!S_ISREG(status->st_mode)) {
    *problem = "not a regular file";
    return {};
  }
  *problem = status->st_uid == 0 ? writable_problem(*status) : ownership_problem(*status);
  return problem->empty() ? std::move(descriptor) : Descriptor();
}

bool read_at(int file, std::uint64_t offset, std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = pread(file, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(count));
    offset += static_cast<std::uint64_t>(count);
  }
  return true;
}

bool remove_idle_file(int parent, const std::string& name, const struct timespec& used) {
  const Descriptor file(openat(parent, name.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  if (file.valid()) {
    if (flock(file.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return false;
    struct stat status {};
    const bool same = fstat(file.get(), &status) == 0 && status.st_mtim.tv_sec == used.tv_sec &&
                      status.st_mtim.tv_nsec == used.tv_nsec;
    if (!same) return false;
  }
  return unlinkat(parent, name.c_str(), 0) == 0 || errno == ENOENT;
}

namespace {

/// Writes a new file of that mode through to the disk; on failure nothing is left behind.
bool write_new_file(int parent, const std::string& name, mode_t mode, std::span<const std::byte> bytes,
                    std::string* problem) {
  if (!within_file_size_limit(bytes.size())) {
    *problem = error_text(EFBIG);
    return false;
  }
  Descriptor file(openat(parent, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode));
  if (!file.valid()) {
    *problem = error_text(errno);
    return false;
  }
  bool written = write_all(file.get(), bytes) && flush(file.get());
  int error = errno;
  if (close(file.release()) != 0 && written) {
    written = false;
    error = errno;
  }
  if (written) return true;
  *problem = error_text(error);
  unlinkat(parent, name.c_str(), 0);
  return false;
}

}  // namespace

bool write_private_file(int parent, const std::string& name, std::span<const std::byte> bytes, std::string* problem) {
  return write_new_file(parent, name, kFileMode, bytes, problem);
}

std::optional<Destination> find_destination(const std::filesystem::path& file, std::string* problem) {
  const auto refuse = [problem](std::string reason) {
    *problem = std::move(reason);
    return std::nullopt;
  };
  struct stat status {};
  const bool exists = stat(file.c_str(), &status) == 0;
  if (!exists && errno != ENOENT) return refuse(error_text(errno));
  if (file.empty() || !file.has_filename()) return refuse("not the name of a file");
  if (exists && S_ISDIR(status.st_mode)) return refuse("is a directory");
  Destination destination{file, exists && !S_ISREG(status.st_mode)};
  if (!destination.in_place && !follow_links(&destination)) return refuse(error_text(ELOOP));
  if (destination.in_place) {
    return access(file.c_str(), W_OK) == 0 ? std::optional(std::move(destination)) : refuse(error_text(errno));
  }
  const std::filesystem::path parent = parent_of(destination.path);
  if (access(parent.c_str(), W_OK | X_OK) != 0)
    return refuse(fmt::format("{}: {}", parent.string(), error_text(errno)));
  return destination;
}

bool write_in_place(const Destination& destination, std::span<const std::byte> bytes, std::string* problem) {
  Descriptor file(openat(AT_FDCWD, destination.path.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY));
  const bool written = file.valid() && write_all(file.get(), bytes) && close(file.release()) == 0;
  if (!written) *problem = error_text(errno);
  return written;
}

bool write_shared_file(const std::filesystem::path& named, std::span<const std::byte> bytes, std::string* problem) {
  constexpr mode_t kSharedMode = 0644;
  const std::optional<Destination> destination = find_destination(named, problem);
  if (!destination) return false;
  if (destination->in_place) return write_in_place(*destination, bytes, problem);
  const std::filesystem::path& file = destination->path;
  const std::filesystem::path temporary = file.parent_path() / temporary_name("." + file.filename().string());
  if (!write_new_file(AT_FDCWD, temporary.string(), kSharedMode, bytes, problem)) return false;
  if (renameat(AT_FDCWD, temporary.c_str(), AT_FDCWD, file.c_str()) == 0) return true;
  *problem = error_text(errno);
  unlinkat(AT_FDCWD, temporary.c_str(), 0);
  return false;
}

std::string temporary_name(const std::string& stem) {
  static std::atomic<unsigned> counter{0};
  // Not std::random_device: linked into a wheel, that asks for a newer C library than the rest does.
  std::uint64_t random = 0;
  if (getrandom(&random, sizeof random, 0) != sizeof random) {
    random = static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  }
  return fmt::format("{}.{}.{}.{:016x}", stem, getpid(), counter.fetch_add(1), random);
}

}  // namespace fa::cache
