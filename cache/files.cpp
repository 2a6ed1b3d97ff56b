#include "cache/files.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <ctime>
#include <optional>
#include <system_error>

namespace fa::cache {
namespace {

using platform::kHere;
using platform::Kind;
using platform::Links;
using platform::Readers;
using platform::Status;

Descriptor checked_directory(Handle handle, const std::string& name, std::string* problem) {
  Descriptor directory(handle);
  if (!directory.valid()) {
    const int error = errno;
    const bool in_the_way = error == ENOTDIR || error == ELOOP;
    *problem =
        fmt::format("{} {}", name, in_the_way ? "is not a directory, or it is a symbolic link" : error_text(error));
    return {};
  }
  Status status;
  if (!platform::status_of(directory.get(), &status)) {
    *problem = fmt::format("{}: {}", name, error_text(errno));
    return {};
  }
  if (const std::string reason = platform::ownership_problem(directory.get(), status); !reason.empty()) {
    *problem = fmt::format("{} {}", name, reason);
    return {};
  }
  return directory;
}

bool make_directory(Handle parent, const std::filesystem::path& path) {
  return platform::make_directory(parent, path) || errno == EEXIST;
}

bool make_directories(const std::filesystem::path& path) {
  if (make_directory(kHere, path)) return true;
  if (errno != ENOENT || !path.has_relative_path()) return false;
  return make_directories(path.parent_path()) && make_directory(kHere, path);
}

/// With errno 0 where the file ends too early.
bool read_all(Handle file, std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const std::ptrdiff_t count = platform::read(file, bytes);
    if (count < 0 && errno == EINTR) continue;
    if (count == 0) errno = 0;
    if (count <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
  return true;
}

/// A file is marked as used once an hour at most: enough to tell what is idle, and no write for each of many processes.
void mark_used(Handle file, const Status& status) {
  constexpr std::int64_t kGranularity = 3600;
  if (std::time(nullptr) - status.modified.seconds < kGranularity) return;
  platform::touch(file);
}

std::filesystem::path parent_of(const std::filesystem::path& file) {
  return file.has_parent_path() ? file.parent_path() : std::filesystem::path(".");
}

/// To what the links of a regular file, or of one that does not exist yet, lead. Links of /proc lead to open files,
/// which a rename would leave behind.
bool follow_links(Destination* destination) {
  constexpr int kMostLinks = 40;  // as Linux has it
  std::error_code error;
  for (int i = 0; i < kMostLinks; ++i) {
    Status status;
    if (!platform::status_at(kHere, destination->path, &status) || status.kind != Kind::link) return true;
    const std::filesystem::path parent = std::filesystem::canonical(parent_of(destination->path), error);
    destination->in_place = parent.generic_string().starts_with("/proc/");
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
  if (valid()) platform::close(descriptor_);
}

std::string error_text(int error) {
  return std::generic_category().message(error);
}

Descriptor open_private_directory(Handle parent, const std::string& name, Missing missing, std::string* problem) {
  Handle directory = platform::open_directory(parent, name);
  if (directory == platform::kNone && errno == ENOENT && missing == Missing::create && make_directory(parent, name)) {
    directory = platform::open_directory(parent, name);
  }
  return checked_directory(directory, name, problem);
}

Descriptor open_private_root(const std::filesystem::path& root, Missing missing, std::string* problem) {
  Handle directory = platform::open_directory(kHere, root);
  if (directory == platform::kNone && errno == ENOENT && missing == Missing::create && make_directories(root)) {
    directory = platform::open_directory(kHere, root);
  }
  return checked_directory(directory, root.string(), problem);
}

FileBytes read_private_file(Handle parent, const std::filesystem::path& name, std::uint64_t limit, Reading reading) {
  const Descriptor file(platform::open_file(parent, name));
  if (!file.valid()) {
    if (errno == ELOOP || errno == EACCES || errno == ENXIO) return refused(error_text(errno));
    return {};
  }
  Status status;
  if (!platform::status_of(file.get(), &status)) return {};
  if (status.kind != Kind::regular) return refused("not a regular file");
  if (std::string reason = platform::ownership_problem(file.get(), status); !reason.empty()) {
    return refused(std::move(reason));
  }
  if (status.bytes > limit) return refused(fmt::format("{} bytes are too many", status.bytes));
  // Whether the lock is granted or not, what is open can be read; it only keeps an eviction from choosing this file.
  platform::try_lock(file.get(), platform::Lock::shared);
  if (reading == Reading::use) mark_used(file.get(), status);
  FileBytes result{FileBytes::Status::read, std::vector<std::byte>(status.bytes), {}};
  if (read_all(file.get(), result.bytes)) return result;
  if (platform::removed_elsewhere(errno)) return {};
  return refused("cannot be read to its end");
}

Descriptor open_shipped_file(const std::filesystem::path& file, Status* status, std::string* problem) {
  Descriptor descriptor(platform::open_file(kHere, file, Links::follow));
  if (!descriptor.valid() || !platform::status_of(descriptor.get(), status)) {
    *problem = error_text(errno);
    return {};
  }
  if (status->kind != Kind::regular) {
    *problem = "not a regular file";
    return {};
  }
  *problem = platform::shipped_problem(descriptor.get(), *status);
  return problem->empty() ? std::move(descriptor) : Descriptor();
}

bool read_at(Handle file, std::uint64_t offset, std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const std::ptrdiff_t count = platform::read_at(file, offset, bytes);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(count));
    offset += static_cast<std::uint64_t>(count);
  }
  return true;
}

bool write_all(Handle file, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const std::ptrdiff_t count = platform::write(file, bytes);
    if (count < 0 && errno == EINTR) continue;
    if (count == 0) errno = ENOSPC;
    if (count <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
  return true;
}

bool remove_idle_file(Handle parent, const std::string& name, const platform::Time& used) {
  const Descriptor file(platform::open_file(parent, name));
  if (file.valid()) {
    if (!platform::try_lock(file.get(), platform::Lock::exclusive) && errno == EWOULDBLOCK) return false;
    Status status;
    if (!platform::status_of(file.get(), &status) || status.modified != used) return false;
  }
  return platform::remove_file(parent, name) || errno == ENOENT;
}

namespace {

/// Writes a new file through to the disk; on failure nothing is left behind.
bool write_new_file(Handle parent, const std::filesystem::path& name, Readers readers, std::span<const std::byte> bytes,
                    std::string* problem) {
  if (bytes.size() > platform::file_size_limit()) {
    *problem = error_text(EFBIG);
    return false;
  }
  Descriptor file(platform::create_file(parent, name, readers));
  if (!file.valid()) {
    *problem = error_text(errno);
    return false;
  }
  bool written = write_all(file.get(), bytes) && platform::flush(file.get());
  int error = errno;
  if (!platform::close(file.release()) && written) {
    written = false;
    error = errno;
  }
  if (written) return true;
  *problem = error_text(error);
  platform::remove_file(parent, name);
  return false;
}

}  // namespace

bool write_private_file(Handle parent, const std::string& name, std::span<const std::byte> bytes,
                        std::string* problem) {
  return write_new_file(parent, name, Readers::owner, bytes, problem);
}

std::optional<Destination> find_destination(const std::filesystem::path& file, std::string* problem) {
  const auto refuse = [problem](std::string reason) {
    *problem = std::move(reason);
    return std::nullopt;
  };
  Status status;
  const bool exists = platform::status_at(kHere, file, &status, Links::follow);
  if (!exists && errno != ENOENT) return refuse(error_text(errno));
  if (file.empty() || !file.has_filename()) return refuse("not the name of a file");
  if (exists && status.kind == Kind::directory) return refuse("is a directory");
  Destination destination{file, exists && status.kind != Kind::regular};
  if (!destination.in_place && !follow_links(&destination)) return refuse(error_text(ELOOP));
  if (destination.in_place) {
    return platform::writable(file, status.kind) ? std::optional(std::move(destination)) : refuse(error_text(errno));
  }
  const std::filesystem::path parent = parent_of(destination.path);
  if (!platform::writable(parent, Kind::directory))
    return refuse(fmt::format("{}: {}", parent.string(), error_text(errno)));
  return destination;
}

bool write_in_place(const Destination& destination, std::span<const std::byte> bytes, std::string* problem) {
  Descriptor file(platform::open_to_write(destination.path));
  const bool written = file.valid() && write_all(file.get(), bytes) && platform::close(file.release());
  if (!written) *problem = error_text(errno);
  return written;
}

bool write_shared_file(const std::filesystem::path& named, std::span<const std::byte> bytes, std::string* problem) {
  const std::optional<Destination> destination = find_destination(named, problem);
  if (!destination) return false;
  if (destination->in_place) return write_in_place(*destination, bytes, problem);
  const std::filesystem::path& file = destination->path;
  const std::filesystem::path temporary = file.parent_path() / temporary_name("." + file.filename().string());
  if (!write_new_file(kHere, temporary, Readers::everybody, bytes, problem)) return false;
  if (platform::rename_file(kHere, temporary, kHere, file)) return true;
  *problem = error_text(errno);
  platform::remove_file(kHere, temporary);
  return false;
}

std::string temporary_name(const std::string& stem) {
  static std::atomic<unsigned> counter{0};
  return fmt::format("{}.{}.{}.{:016x}", stem, platform::process_id(), counter.fetch_add(1), platform::random_number());
}

}  // namespace fa::cache
