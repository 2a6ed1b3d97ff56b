#ifndef FA_CACHE_STORE_HPP_
#define FA_CACHE_STORE_HPP_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fa::cache {

/// Raised whenever the entry format or the meaning of a key changes.
inline constexpr int kSchemaVersion = 1;

/// What a kernel is looked up by: its meaning. No path, host, user, time, driver or compiler version is part of it, so
/// a cache that was copied elsewhere keeps every hit.
struct Key {
  std::string templates;             ///< digest of the template set
  std::string spec;                  ///< canonical text of the kernel spec
  std::vector<std::string> options;  ///< exactly the options that change code, in order
  std::string target;                ///< "sm_90a"

  /// XXH3-128 over schema and fields, each with its length; 32 hex digits.
  std::string digest() const;
  friend bool operator==(const Key&, const Key&) = default;
};

/// A stored kernel: the cubin and what is known about it without loading it.
struct Entry {
  Key key;
  std::string kernel_name;
  std::string compiler;  ///< "nvrtc 13.0"; recorded, not part of the key
  std::int32_t registers = 0;
  std::int32_t local_bytes = 0;
  std::int32_t shared_bytes = 0;
  std::int32_t threads = 0;
  double compile_ms = 0;
  std::vector<std::byte> cubin;
};

enum class Origin : std::uint8_t { memory, disk, built };

struct Lookup {
  std::shared_ptr<const Entry> entry;
  Origin origin = Origin::memory;
};

struct Counters {
  std::uint64_t memory_hits = 0;
  std::uint64_t disk_hits = 0;
  std::uint64_t builds = 0;
  std::uint64_t damaged = 0;           ///< entries that failed their check and were replaced
  std::uint64_t publish_failures = 0;  ///< kernels that stayed in memory because the disk refused them
};

struct StoreOptions {
  /// Made with mode 0700 if missing; everything else must be an absolute path to a directory (no symbolic link) that is
  /// ours and that nobody else can write to. Empty: memory only.
  std::filesystem::path directory;
  /// Told, in one sentence, about everything that costs speed without failing a call: at most one message a cause.
  /// Called from any thread that uses the store, several at a time.
  std::function<void(const std::string&)> warn;
  /// How long to wait for another process that builds the same key before building it here too.
  std::chrono::milliseconds lock_wait{30'000};
};

/// A layered store of kernels: memory over files. Thread-safe; different keys are built in parallel, the same key once.
class Store {
 public:
  using Build = std::function<Entry()>;

  explicit Store(const StoreOptions& options);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  /// The entry of `key`, from memory, else from disk, else from `build`, whose result is published. Threads that ask
  /// for a key under construction wait for it; when `build` throws, its exception reaches every waiter and the next
  /// call tries again. A missing `build` makes a miss return an empty entry. Damaged entries are rebuilt. `build` need
  /// not set the key, runs without any lock of this process, may use the store for other keys, and not for its own. An
  /// entry without a cubin is handed on and not kept.
  Lookup get(const Key& key, const Build& build);

  Counters counters() const;

  /// Where the files are; empty when the store keeps to memory, by choice or because the directory is unusable.
  const std::filesystem::path& directory() const noexcept;

  /// The store of that directory in this process, whichever spelling of the path; its first caller's `warn` and
  /// `lock_wait` count for as long as somebody holds it.
  static std::shared_ptr<Store> shared(const StoreOptions& options);

 private:
  class Impl;
  explicit Store(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Reads one entry file and checks magic, schema, sizes and digest of the very bytes that are returned; nullopt with
/// the reason in `*problem` when it cannot be trusted.
std::optional<Entry> read_entry(const std::filesystem::path& file, std::string* problem = nullptr);

/// Every trusted entry of the store in `directory`, sorted by target and spec; files that fail are counted in
/// `*damaged`.
std::vector<Entry> list_entries(const std::filesystem::path& directory, int* damaged = nullptr);

/// FA_CACHE_DIR, else XDG_CACHE_HOME/fa, else HOME/.cache/fa; empty (memory only) when none is an absolute path.
std::filesystem::path default_directory();

}  // namespace fa::cache

#endif  // FA_CACHE_STORE_HPP_
