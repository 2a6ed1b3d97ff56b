#ifndef FA_CACHE_STORE_HPP_
#define FA_CACHE_STORE_HPP_

#include <chrono>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fa::cache {

/// Raised whenever the entry format or the meaning of a key changes.
inline constexpr int kSchemaVersion = 2;

/// What a kernel is looked up by: its meaning. No path, host, user, time, driver or compiler version is part of it, so
/// a cache that was copied elsewhere keeps every hit.
struct Key {
  std::string templates;             ///< digest of the template set
  std::string spec;                  ///< canonical text of the kernel spec
  std::vector<std::string> options;  ///< exactly the options that change code, in order
  std::string target;                ///< "sm_90a"
  std::string unit = {};             ///< digest of the rendered unit, which no template and no spec describes fully

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
  std::int32_t min_driver = 0;  ///< CUDA version that the driver must support: 12000 is 12.0; 0: not known
  double compile_ms = 0;
  std::vector<std::byte> cubin;
  std::string source = {};  ///< the text it was compiled from, if it is to lie beside the entry; not part of the entry
};

enum class Origin : std::uint8_t { memory, disk, built, pack };

struct Lookup {
  std::shared_ptr<const Entry> entry;
  Origin origin = Origin::memory;
  std::string refused = {};  ///< why what is stored under the key was not used; empty when nothing was there
  bool busy = false;         ///< no entry, because the key is under construction and was not to be waited for
};

/// Whether a look-up may wait for a key that somebody else is building.
enum class Wait : std::uint8_t { allowed, never };

struct Counters {
  std::uint64_t memory_hits = 0;
  std::uint64_t pack_hits = 0;
  std::uint64_t disk_hits = 0;
  std::uint64_t builds = 0;
  std::uint64_t damaged = 0;           ///< entries that failed their check and were not used
  std::uint64_t unaccepted = 0;        ///< sound entries of a compiler, or for a driver, that is not accepted
  std::uint64_t publish_failures = 0;  ///< kernels that stayed in memory because the disk refused them
  std::uint64_t evictions = 0;         ///< entries removed to keep the directory within its limits
};

/// Which entries serve, beyond having the right key. By default any compiler's.
struct Acceptance {
  enum class Rule : std::uint8_t { any, exactly, at_least };
  Rule rule = Rule::any;
  int major = 0;
  int minor = 0;
  int driver = 0;  ///< the CUDA version that the driver supports, 12040; 0: not known, every entry goes

  /// Whether a compiler of that version is accepted.
  bool accepts(int compiler_major, int compiler_minor) const noexcept;
  /// Why `entry` is not accepted; empty when it is.
  std::string refusal(const Entry& entry) const;

  friend auto operator<=>(const Acceptance&, const Acceptance&) = default;
};

/// "": any compiler; "13.0": exactly that version; ">=12.8": that one or a later one. Nullopt for any other text.
std::optional<Acceptance> parse_acceptance(std::string_view text);

/// Caps of a directory; 0: none. What was used least recently goes first.
struct Limits {
  std::uint64_t bytes = 0;
  std::uint64_t entries = 0;

  friend auto operator<=>(const Limits&, const Limits&) = default;
};

inline constexpr Limits kDefaultLimits{256ULL << 20U, 4096};

struct StoreOptions {
  /// Made with mode 0700 if missing; everything else must be an absolute path to a directory (no symbolic link) that is
  /// ours and that nobody else can write to. Empty: memory only.
  std::filesystem::path directory;
  /// Told, in one sentence, about everything that costs speed without failing a call: at most one message a cause.
  /// Called from any thread that uses the store, several at a time.
  std::function<void(const std::string&)> warn;
  /// How long to wait for another process that builds the same key before building it here too.
  std::chrono::milliseconds lock_wait{30'000};
  /// Packs (cache/pack.hpp) that are searched before the directory, in this order, and never written. One that cannot
  /// be opened costs a warning.
  std::vector<std::filesystem::path> packs = {};
  Acceptance accept = {};
  Limits limits = kDefaultLimits;
  /// The SHA-256 that packs must have, 64 hex digits for each in their order; empty, or none: any.
  std::vector<std::string> pack_sha256 = {};
};

/// A layered store of kernels: packs over files, and memory before both. Thread-safe; different keys are built in
/// parallel, the same key once.
class Store {
 public:
  using Build = std::function<Entry()>;
  using Substitutes = std::function<std::vector<Key>()>;

  explicit Store(const StoreOptions& options);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  /// The entry of `key`, from memory, else from a pack, else from disk, else from `build`, whose result is published.
  /// Threads that ask for a key under construction wait for it; when `build` throws, its exception reaches every waiter
  /// and the next call tries again. A missing `build` makes a miss return an empty entry. Damaged entries and those
  /// that are not accepted are rebuilt; what `build` returns is used without being asked for its compiler. `build` need
  /// not set the key, runs without any lock of this process, and may use the store for other keys; its own is busy. An
  /// entry without a cubin is handed on and not kept.
  ///
  /// `substitutes`, if given, names other keys whose entries serve as well, in order of preference. They are looked for
  /// in packs only, before anything is built; the entry has its own key, and memory keeps it under `key`. It is asked
  /// where packs lack `key`, at most once, under the rules of `build`.
  Lookup get(const Key& key, const Build& build, const Substitutes& substitutes = nullptr, Wait wait = Wait::allowed);

  Counters counters() const;

  /// Where the files are; empty when the store keeps to memory, by choice or because the directory is unusable.
  const std::filesystem::path& directory() const noexcept;

  /// What is wrong with packs that could not be opened, a sentence each.
  const std::vector<std::string>& pack_problems() const noexcept;

  /// The store of that directory (in whichever spelling), those packs with their pins, that acceptance and those limits
  /// in this process; its first caller's `warn` and `lock_wait` count for as long as somebody holds it.
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

/// One entry file as it lies in a directory, checked to the last byte; its cubin is not kept.
struct StoredEntry {
  std::filesystem::path path;
  std::string problem;  ///< why it cannot be trusted; empty when it can
  Entry entry;          ///< without its cubin; meaningful without a problem
  std::uint64_t cubin_bytes = 0;
  std::uint64_t file_bytes = 0;                          ///< with the source beside it
  std::chrono::system_clock::time_point last_used = {};  ///< to the hour
};
std::vector<StoredEntry> list_stored(const std::filesystem::path& directory);

/// What a directory holds, without a look into the files.
struct Usage {
  std::uint64_t entries = 0;
  std::uint64_t bytes = 0;
};
Usage directory_usage(const std::filesystem::path& directory);

struct Collected {
  Usage removed;
  Usage left;
};
struct Garbage {
  Limits limits = {};    ///< what was used least recently goes until they are kept, and nothing that is being read
  bool damaged = false;  ///< every entry that cannot be trusted
  bool other_versions = false;  ///< what older and newer versions of fa keep in the same directory
};
/// Removes that, and what crashed writers left behind.
Collected collect_garbage(const std::filesystem::path& directory, const Garbage& garbage);

/// FA_CACHE_DIR, else XDG_CACHE_HOME/fa, else HOME/.cache/fa; empty (memory only) when none is an absolute path, with
/// the reason in `*problem`. A path that is not absolute is skipped, and `*problem` says so.
std::filesystem::path default_directory(std::string* problem = nullptr);

}  // namespace fa::cache

#endif  // FA_CACHE_STORE_HPP_
