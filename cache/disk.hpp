#ifndef FA_CACHE_DISK_HPP_
#define FA_CACHE_DISK_HPP_

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "cache/files.hpp"
#include "cache/store.hpp"

namespace fa::cache {

/// The right to build one key, among processes. The kernel drops it with its holder; nothing else depends on the file.
class BuildLock {
 public:
  BuildLock() = default;
  BuildLock(Descriptor folder, Descriptor file, std::string name);
  BuildLock(BuildLock&&) noexcept = default;
  BuildLock& operator=(BuildLock&&) = delete;
  BuildLock(const BuildLock&) = delete;
  BuildLock& operator=(const BuildLock&) = delete;
  ~BuildLock();

  bool held() const noexcept { return file_.valid(); }

 private:
  Descriptor folder_;
  Descriptor file_;
  std::string name_;
};

/// The files of a store:
///
///     <root>/v1/<target>/<first two digits>/<digest>.fac    one entry a file
///     <root>/v1/locks/<digest>                              exist while a key is built
///     <root>/v1/tmp/                                        entries on their way in
///
/// No descriptor outlives a call, so a program that closes all of its descriptors, or deletes the cache under a running
/// process, disturbs nothing. Thread-safe; nothing throws for what a file system does.
class Disk {
 public:
  /// Creates the root if it is missing and clears what crashed writers left behind; nullopt with the reason in
  /// `*problem` when the root cannot be trusted or used.
  static std::optional<Disk> open(const std::filesystem::path& root, std::string* problem);

  /// Every trusted entry under `root`, in no order; entry files that fail are counted.
  static std::vector<Entry> list(const std::filesystem::path& root, int* damaged);

  struct Found {
    std::optional<Entry> entry;
    std::string damage;  ///< why the stored entry was refused; empty when there is none
  };
  Found load(const Key& key) const;

  /// Makes `entry` visible to everybody at once, or not at all.
  bool publish(const Entry& entry, std::string* problem) const;

  /// Waits at most `wait`. Not held, with an empty `*problem`, where no lock file can be made at all.
  BuildLock lock(const Key& key, std::chrono::milliseconds wait, std::string* problem) const;

  const std::filesystem::path& root() const noexcept { return root_; }

 private:
  explicit Disk(std::filesystem::path root) : root_(std::move(root)) {}
  Descriptor open_folder(const std::vector<std::string>& names, Missing missing, std::string* problem) const;
  void remove_stale_files() const;

  std::filesystem::path root_;
};

}  // namespace fa::cache

#endif  // FA_CACHE_DISK_HPP_
