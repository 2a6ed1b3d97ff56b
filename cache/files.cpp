#include "cache/files.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace fa::cache {
namespace {

constexpr int kDirectoryFlags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
constexpr mode_t kDirectoryMode = 0700;
constexpr mode_t kFileMode = 0600;
constexpr mode_t kOthersWrite = 022;

/// What keeps an open file from being ours alone; empty when nothing does.
std::string ownership_problem(const struct stat& status) {
  if (status.st_uid != geteuid()) return fmt::format("belongs to another user (uid {})", status.st_uid);
  if ((status.st_mode & kOthersWrite) != 0) {
    return fmt::format("can be written by other users (mode {:04o}; chmod go-w makes it usable)",
                       static_cast<unsigned>(status.st_mode) & 07777U);
  }
  return {};
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

bool read_all(int file, std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = read(file, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
  return true;
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

FileBytes read_private_file(int parent, const std::string& name, std::uint64_t limit) {
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
  FileBytes result{FileBytes::Status::read, std::vector<std::byte>(size), {}};
  if (!read_all(file.get(), result.bytes)) return refused("cannot be read to its end");
  return result;
}

bool write_private_file(int parent, const std::string& name, std::span<const std::byte> bytes, std::string* problem) {
  if (!within_file_size_limit(bytes.size())) {
    *problem = error_text(EFBIG);
    return false;
  }
  Descriptor file(openat(parent, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, kFileMode));
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

}  // namespace fa::cache
