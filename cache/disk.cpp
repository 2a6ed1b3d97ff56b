#include "cache/disk.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <map>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>

#include "cache/entry.hpp"

namespace fa::cache {
namespace {

constexpr std::time_t kStaleSeconds = 3600;
constexpr std::size_t kMaxTargetLength = 64;
constexpr const char* kEntrySuffix = ".fac";
constexpr const char* kSourceSuffix = ".cu";

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

std::string source_name(const std::string& digest) {
  return digest + kSourceSuffix;
}

/// False once the holder before us has removed the name from the file that we have open.
bool still_named(Handle folder, const std::string& name, Handle file) {
  platform::Status by_name;
  platform::Status by_file;
  return platform::status_at(folder, name, &by_name) && platform::status_of(file, &by_file) &&
         by_name.inode == by_file.inode && by_name.device == by_file.device;
}

std::vector<std::string> names_in(Descriptor folder) {
  return folder.valid() ? platform::names_in(folder.release()) : std::vector<std::string>();
}

std::filesystem::path normalized(const std::filesystem::path& root) {
  std::filesystem::path normal = root.lexically_normal();
  if (!normal.has_filename()) normal = normal.parent_path();  // behind a final slash, a symbolic link would be followed
  return normal;
}

std::optional<Entry> load_named(Handle folder, const std::string& name, std::string* problem) {
  const FileBytes content = read_private_file(folder, name, kMaxEntryBytes);
  *problem = content.problem;
  if (content.status != FileBytes::Status::read) return std::nullopt;
  std::optional<Entry> entry = decode_entry(content.bytes, problem);
  if (!entry || entry_name(entry->key.digest()) == name) return entry;
  *problem = "it holds the kernel of another key";
  return std::nullopt;
}

bool over(const Usage& usage, const Limits& limits) {
  return (limits.bytes != 0 && usage.bytes > limits.bytes) || (limits.entries != 0 && usage.entries > limits.entries);
}

/// A tenth below `limits`, so that a full store does not look through its files for every new one.
Limits with_room(const Limits& limits) {
  return {limits.bytes - limits.bytes / 10, limits.entries - limits.entries / 10};
}

}  // namespace

BuildLock::BuildLock(Descriptor folder, Descriptor file, std::string name)
    : folder_(std::move(folder)), file_(std::move(file)), name_(std::move(name)) {}

BuildLock::~BuildLock() {
  if (!held()) return;
  platform::remove_file(folder_.get(), name_);
  platform::unlock(file_.get());  // where the name could not be removed
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

Disk Disk::existing(const std::filesystem::path& root) {
  return Disk(normalized(root));
}

/// An entry as a directory shows it, with the source beside it.
struct Disk::File {
  std::vector<std::string> folders;
  std::string digest;
  std::uint64_t bytes = 0;
  platform::Time used;
};

std::vector<std::vector<std::string>> Disk::all_entry_folders() const {
  std::string problem;
  std::vector<std::vector<std::string>> folders;
  for (const std::string& target : names_in(open_folder({version_folder()}, Missing::fail, &problem))) {
    if (target == "tmp" || target == "locks") continue;
    const std::vector<std::string> of_target{version_folder(), target};
    for (const std::string& prefix : names_in(open_folder(of_target, Missing::fail, &problem))) {
      folders.push_back({version_folder(), target, prefix});
    }
  }
  return folders;
}

void Disk::visit(const Visit& visit) const {
  for (const std::vector<std::string>& names : all_entry_folders()) {
    std::string problem;
    const Descriptor folder = open_folder(names, Missing::fail, &problem);
    for (const std::string& name : names_in(open_folder(names, Missing::fail, &problem))) {
      if (!name.ends_with(kEntrySuffix)) continue;
      problem.clear();
      std::optional<Entry> entry = load_named(folder.get(), name, &problem);
      const bool gone = !entry && problem.empty();
      if (!gone) visit(root_ / names[0] / names[1] / names[2] / name, std::move(entry), problem);
    }
  }
}

std::vector<Disk::File> Disk::files() const {
  std::vector<File> files;
  for (const std::vector<std::string>& names : all_entry_folders()) {
    std::string problem;
    const Descriptor folder = open_folder(names, Missing::fail, &problem);
    std::map<std::string, File> by_digest;
    for (const std::string& name : names_in(open_folder(names, Missing::fail, &problem))) {
      const bool entry = name.ends_with(kEntrySuffix);
      platform::Status status;
      if (!entry && !name.ends_with(kSourceSuffix)) continue;
      if (!platform::status_at(folder.get(), name, &status)) continue;
      File& file = by_digest[name.substr(0, name.rfind('.'))];
      file.bytes += status.bytes;
      if (entry || file.used.seconds == 0) file.used = status.modified;
    }
    for (auto& [digest, file] : by_digest) {
      file.folders = names;
      file.digest = digest;
      files.push_back(std::move(file));
    }
  }
  return files;
}

Usage Disk::usage() const {
  Usage usage;
  for (const File& file : files()) {
    ++usage.entries;
    usage.bytes += file.bytes;
  }
  return usage;
}

Collected Disk::collect(const Limits& limits) const {
  std::vector<File> all = files();
  Collected result;
  for (const File& file : all) {
    ++result.left.entries;
    result.left.bytes += file.bytes;
  }
  if (!over(result.left, limits)) return result;
  std::ranges::sort(
      all, [](const File& a, const File& b) { return std::tie(a.used, a.digest) < std::tie(b.used, b.digest); });
  for (const File& file : all) {
    // Room for the next ones is worth every entry but the last, which may have just been written.
    const bool last = &file == &all.back();
    if (!over(result.left, last ? limits : with_room(limits))) break;
    std::string problem;
    const Descriptor folder = open_folder(file.folders, Missing::fail, &problem);
    if (!folder.valid() || !remove_idle_file(folder.get(), entry_name(file.digest), file.used)) continue;
    platform::remove_file(folder.get(), source_name(file.digest));
    ++result.removed.entries;
    result.removed.bytes += file.bytes;
    --result.left.entries;
    result.left.bytes -= file.bytes;
  }
  return result;
}

void Disk::remove(const std::filesystem::path& entry) const {
  const std::filesystem::path inside = entry.lexically_relative(root_);
  std::vector<std::string> names;
  for (const std::filesystem::path& part : inside) names.push_back(part.string());
  if (names.size() != 4 || names[0] != version_folder() || !names[3].ends_with(kEntrySuffix)) return;
  std::string problem;
  const Descriptor folder = open_folder({names[0], names[1], names[2]}, Missing::fail, &problem);
  if (!folder.valid()) return;
  platform::remove_file(folder.get(), names[3]);
  platform::remove_file(folder.get(), source_name(names[3].substr(0, names[3].rfind('.'))));
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
  const FileBytes content = read_private_file(folder.get(), entry_name(digest), kMaxEntryBytes, Reading::use);
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
  const Descriptor folder = open_folder(entry_folders(entry.key, digest), Missing::create, problem);
  if (!folder.valid()) return false;
  if (!entry.source.empty()) {
    // Before the entry, and whatever becomes of it: a source without an entry goes when space is made.
    write(source_name(digest), std::as_bytes(std::span(entry.source)), folder.get(), problem);
  }
  if (!write(entry_name(digest), bytes, folder.get(), problem)) return false;
  platform::flush(folder.get());  // best effort: an entry lost to a power cut is built again
  return true;
}

bool Disk::write(const std::string& name, std::span<const std::byte> bytes, Handle folder, std::string* problem) const {
  const Descriptor temporaries = open_folder({version_folder(), "tmp"}, Missing::create, problem);
  if (!temporaries.valid()) return false;
  const std::string temporary = temporary_name(name);
  if (!write_private_file(temporaries.get(), temporary, bytes, problem)) return false;
  if (platform::rename_file(temporaries.get(), temporary, folder, name)) return true;
  *problem = error_text(errno);
  platform::remove_file(temporaries.get(), temporary);
  return false;
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
    Descriptor file(platform::open_lock_file(folder.get(), name));
    const bool leaving = !file.valid() && errno == EBUSY;  // the holder before us is removing it
    if (!file.valid() && !leaving) return {};
    if (file.valid() && platform::try_lock(file.get(), platform::Lock::exclusive)) {
      if (still_named(folder.get(), name, file.get())) return {std::move(folder), std::move(file), name};
    } else if (!leaving && errno != EWOULDBLOCK && errno != EINTR) {
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

void Disk::remove_other_versions() const {
  std::string problem;
  for (const std::string& name : names_in(open_private_root(root_, Missing::fail, &problem))) {
    const bool version = name.size() > 1 && name[0] == 'v' && name.find_first_not_of("0123456789", 1) == name.npos;
    std::error_code error;  // what cannot be removed stays
    if (version && name != version_folder()) std::filesystem::remove_all(root_ / name, error);
  }
}

void Disk::remove_stale_files() const {
  std::string problem;
  const std::vector<std::string> folder_names{version_folder(), "tmp"};
  const Descriptor folder = open_folder(folder_names, Missing::fail, &problem);
  if (!folder.valid()) return;
  const std::time_t now = std::time(nullptr);
  for (const std::string& name : names_in(open_folder(folder_names, Missing::fail, &problem))) {
    platform::Status status;
    const bool known = platform::status_at(folder.get(), name, &status);
    if (known && now - status.modified.seconds > kStaleSeconds) platform::remove_file(folder.get(), name);
  }
}

}  // namespace fa::cache
