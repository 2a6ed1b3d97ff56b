#ifndef FA_CACHE_DISK_HPP_
#define FA_CACHE_DISK_HPP_

#include <chrono>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
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
///     <root>/v2/<target>/<first two digits>/<digest>.fac    one entry a file
///     <root>/v2/<target>/<first two digits>/<digest>.cu     its source, where that was asked for
///     <root>/v2/locks/<digest>                              exist while a key is built
///     <root>/v2/tmp/                                        entries on their way in
///
/// No descriptor outlives a call, so a program that closes all of its descriptors, or deletes the cache under a running
/// process, disturbs nothing. Thread-safe; nothing throws for what a file system does.
class Disk {
 public:
  /// Creates the root if it is missing and clears what crashed writers left behind; nullopt with the reason in
  /// `*problem` when the root cannot be trusted or used.
  static std::optional<Disk> open(const std::filesystem::path& root, std::string* problem);

  /// The store under `root` as it is: nothing is made, and what cannot be opened reads as empty.
  static Disk existing(const std::filesystem::path& root);

  /// Calls `visit` for every entry file, in no order: the file's path, and its entry or else what is wrong with it.
  using Visit = std::function<void(const std::filesystem::path&, std::optional<Entry>, const std::string& problem)>;
  void visit(const Visit& visit) const;

  Usage usage() const;

  /// Removes entries, and the sources beside them, until `limits` are kept with a tenth to spare: those that were used
  /// least recently, and none that is being read.
  Collected collect(const Limits& limits) const;

  /// Removes the entry of that path if it is one of ours.
  void remove(const std::filesystem::path& entry) const;

  struct Found {
    std::optional<Entry> entry;
    std::string damage;  ///< why the stored entry was refused; empty when there is none
  };
  Found load(const Key& key) const;

  /// Makes `entry` visible to everybody at once, or not at all; its source, if it has one, lies beside it then.
  bool publish(const Entry& entry, std::string* problem) const;

  /// Waits at most `wait`. Not held, with an empty `*problem`, where no lock file can be made at all.
  BuildLock lock(const Key& key, std::chrono::milliseconds wait, std::string* problem) const;

  /// Removes what crashed writers left behind more than an hour ago.
  void remove_stale_files() const;

  /// Removes the folders of other schema versions.
  void remove_other_versions() const;

  const std::filesystem::path& root() const noexcept { return root_; }

 private:
  explicit Disk(std::filesystem::path root) : root_(std::move(root)) {}
  Descriptor open_folder(const std::vector<std::string>& names, Missing missing, std::string* problem) const;
  std::vector<std::vector<std::string>> all_entry_folders() const;
  struct File;
  std::vector<File> files() const;
  bool write(const std::string& name, std::span<const std::byte> bytes, Handle folder, std::string* problem) const;

  std::filesystem::path root_;
};

}  // namespace fa::cache

#endif  // FA_CACHE_DISK_HPP_
