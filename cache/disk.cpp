#include "cache/disk.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <ctime>
#include <memory>
#include <random>
#include <string_view>
#include <thread>
#include <utility>

#include "cache/entry.hpp"

namespace fa::cache {
namespace {

constexpr std::time_t kStaleSeconds = 3600;
constexpr std::size_t kMaxTargetLength = 64;
constexpr const char* kEntrySuffix = ".fac";

std::string version_folder() {
  return fmt::format("v{}", kSchemaVersion);
}

/// A key's target as a folder name. Whatever could leave the store or meet one of its own folders shares one folder:
/// the name only sorts the files, the key inside decides.
std::string target_folder(const std::string& target) {
  const auto harmless = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
  };
  const bool usable = !target.empty() && target.size() <= kMaxTargetLength && std::ranges::all_of(target, harmless) &&
                      target != "locks" && target != "tmp";
  return usable ? target : "other";
}

std::vector<std::string> entry_folders(const Key& key, const std::string& digest) {
  return {version_folder(), target_folder(key.target), digest.substr(0, 2)};
}

std::string entry_name(const std::string& digest) {
  return digest + kEntrySuffix;
}

/// Unique among threads by the counter, among processes and hosts by chance; O_EXCL catches what is left.
std::string temporary_name(const std::string& digest) {
  static std::atomic<unsigned> counter{0};
  std::random_device random;
  return fmt::format("{}.{}.{}.{:08x}{:08x}", digest, getpid(), counter.fetch_add(1), random(), random());
}

/// False once the holder before us has removed the name from the file that we have open.
bool still_named(int folder, const std::string& name, int file) {
  struct stat by_name {};
  struct stat by_file {};
  return fstatat(folder, name.c_str(), &by_name, AT_SYMLINK_NOFOLLOW) == 0 && fstat(file, &by_file) == 0 &&
         by_name.st_ino == by_file.st_ino && by_name.st_dev == by_file.st_dev;
}

std::vector<std::string> names_in(Descriptor folder) {
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(fdopendir(folder.get()), &closedir);
  if (stream == nullptr) return {};
  folder.release();
  std::vector<std::string> names;
  // The stream is ours alone, which is all that readdir asks of threads.
  while (const dirent* item = readdir(stream.get())) {  // NOLINT(concurrency-mt-unsafe)
    const std::string_view name(static_cast<const char*>(item->d_name));
    if (name != "." && name != "..") names.emplace_back(name);
  }
  return names;
}

std::filesystem::path normalized(const std::filesystem::path& root) {
  std::filesystem::path normal = root.lexically_normal();
  if (!normal.has_filename()) normal = normal.parent_path();  // behind a final slash, a symbolic link would be followed
  return normal;
}

std::optional<Entry> load_named(int folder, const std::string& name) {
  const FileBytes content = read_private_file(folder, name, kMaxEntryBytes);
  std::optional<Entry> entry = decode_entry(content.bytes);
  if (entry && entry_name(entry->key.digest()) != name) entry.reset();
  return entry;
}

}  // namespace

BuildLock::BuildLock(Descriptor folder, Descriptor file, std::string name)
    : folder_(std::move(folder)), file_(std::move(file)), name_(std::move(name)) {}

BuildLock::~BuildLock() {
  if (!held()) return;
  unlinkat(folder_.get(), name_.c_str(), 0);
  // Where the name could not be removed: a child forked meanwhile has the descriptor too, so closing is not unlocking.
  flock(file_.get(), LOCK_UN);
}

std::optional<Disk> Disk::open(const std::filesystem::path& root, std::string* problem) {
  if (!root.is_absolute()) {
    *problem = fmt::format("{} is not an absolute path", root.string());
    return std::nullopt;
  }
  Disk disk(normalized(root));
  if (!open_private_root(disk.root_, Missing::create, problem).valid()) return std::nullopt;
  disk.remove_stale_files();
  return disk;
}

std::vector<Entry> Disk::list(const std::filesystem::path& root, int* damaged) {
  const Disk disk(normalized(root));
  std::string problem;
  std::vector<Entry> entries;
  const auto names = [&](const std::vector<std::string>& folders) {
    return names_in(disk.open_folder(folders, Missing::fail, &problem));
  };
  for (const std::string& target : names({version_folder()})) {
    if (target == "tmp" || target == "locks") continue;
    for (const std::string& prefix : names({version_folder(), target})) {
      const Descriptor folder = disk.open_folder({version_folder(), target, prefix}, Missing::fail, &problem);
      for (const std::string& name : names({version_folder(), target, prefix})) {
        if (!name.ends_with(kEntrySuffix)) continue;
        std::optional<Entry> entry = load_named(folder.get(), name);
        if (entry)
          entries.push_back(std::move(*entry));
        else if (damaged != nullptr)
          ++*damaged;
      }
    }
  }
  return entries;
}

Descriptor Disk::open_folder(const std::vector<std::string>& names, Missing missing, std::string* problem) const {
  Descriptor folder = open_private_root(root_, missing, problem);
  for (const std::string& name : names) {
    if (!folder.valid()) break;
    folder = open_private_directory(folder.get(), name, missing, problem);
  }
  return folder;
}

Disk::Found Disk::load(const Key& key) const {
  const std::string digest = key.digest();
  std::string problem;
  const Descriptor folder = open_folder(entry_folders(key, digest), Missing::fail, &problem);
  if (!folder.valid()) return {};
  const FileBytes content = read_private_file(folder.get(), entry_name(digest), kMaxEntryBytes);
  if (content.status == FileBytes::Status::absent) return {};
  const auto damaged = [&](const std::string& reason) {
    return Found{std::nullopt, fmt::format("{} under {}: {}", entry_name(digest), root_.string(), reason)};
  };
  if (content.status == FileBytes::Status::refused) return damaged(content.problem);
  std::optional<Entry> entry = decode_entry(content.bytes, &problem);
  if (!entry) return damaged(problem);
  if (entry->key != key) return damaged("it holds the kernel of another key");
  return {std::move(entry), {}};
}

bool Disk::publish(const Entry& entry, std::string* problem) const {
  const std::vector<std::byte> bytes = encode_entry(entry);
  if (bytes.empty()) {
    *problem = "its size is out of bounds";
    return false;
  }
  const std::string digest = entry.key.digest();
  const Descriptor temporaries = open_folder({version_folder(), "tmp"}, Missing::create, problem);
  if (!temporaries.valid()) return false;
  const Descriptor folder = open_folder(entry_folders(entry.key, digest), Missing::create, problem);
  if (!folder.valid()) return false;
  const std::string temporary = temporary_name(digest);
  if (!write_private_file(temporaries.get(), temporary, bytes, problem)) return false;
  if (renameat(temporaries.get(), temporary.c_str(), folder.get(), entry_name(digest).c_str()) != 0) {
    *problem = error_text(errno);
    unlinkat(temporaries.get(), temporary.c_str(), 0);
    return false;
  }
  fsync(folder.get());  // best effort: an entry lost to a power cut is built again
  return true;
}

BuildLock Disk::lock(const Key& key, std::chrono::milliseconds wait, std::string* problem) const {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kLongestPause{50};
  const Clock::time_point deadline = Clock::now() + wait;
  const std::string name = key.digest();
  std::string reason;
  Descriptor folder = open_folder({version_folder(), "locks"}, Missing::create, &reason);
  if (!folder.valid()) return {};
  for (std::chrono::milliseconds pause{1};; pause = std::min(2 * pause, kLongestPause)) {
    Descriptor file(openat(folder.get(), name.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!file.valid()) return {};
    if (flock(file.get(), LOCK_EX | LOCK_NB) == 0) {
      if (still_named(folder.get(), name, file.get())) return {std::move(folder), std::move(file), name};
    } else if (errno != EWOULDBLOCK && errno != EINTR) {
      *problem = fmt::format("files under {} cannot be locked ({})", root_.string(), error_text(errno));
      return {};
    }
    if (Clock::now() >= deadline) {
      *problem = fmt::format("another process has been building the same kernel for {} ms", wait.count());
      return {};
    }
    std::this_thread::sleep_for(pause);
  }
}

void Disk::remove_stale_files() const {
  std::string problem;
  const std::vector<std::string> folder_names{version_folder(), "tmp"};
  const Descriptor folder = open_folder(folder_names, Missing::fail, &problem);
  if (!folder.valid()) return;
  const std::time_t now = std::time(nullptr);
  for (const std::string& name : names_in(open_folder(folder_names, Missing::fail, &problem))) {
    struct stat status {};
    const bool known = fstatat(folder.get(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0;
    if (known && now - status.st_mtime > kStaleSeconds) unlinkat(folder.get(), name.c_str(), 0);
  }
}

}  // namespace fa::cache
