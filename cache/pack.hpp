#ifndef FA_CACHE_PACK_HPP_
#define FA_CACHE_PACK_HPP_

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cache/digest.hpp"
#include "cache/platform.hpp"
#include "cache/sha256.hpp"
#include "cache/store.hpp"

/// The bytes of a pack: many entries in one file that is written once and then only read.
///
///     magic[8]  u32 pack version  u32 entry schema  u64 count
///     index:    count times  key digest[16]  u64 offset  u64 size      ascending by digest
///     digest[16] over all bytes before it
///     entries   as entry files (cache/entry.hpp), in the order of the index, nothing between them
namespace fa::cache {

inline constexpr std::uint32_t kPackVersion = 1;
inline constexpr std::uint64_t kMaxPackEntries = 1ULL << 20U;

/// An open pack: its index in memory, its entries in the file. Thread-safe; no descriptor outlives a call, and a file
/// that is cut, replaced or deleted under a running process is a miss (a mapping of it would be a signal).
class Pack {
 public:
  /// nullopt with the reason in `*problem` when the file is no whole pack, or when others than we and the
  /// administrator can write to it. With a `pin` also when that is not its SHA-256: the whole file is read then, and
  /// what is served later are the very bytes that were hashed.
  static std::optional<Pack> open(const std::filesystem::path& file, std::string* problem,
                                  const std::optional<Sha256Bytes>& pin = std::nullopt);

  struct Found {
    std::optional<Entry> entry;
    std::string damage;  ///< why the entry was refused; empty when there is none
  };
  /// Reads the entry of `key` into memory of our own and checks it there.
  Found load(const Key& key) const;

  std::size_t size() const noexcept { return index_.size(); }
  std::uint64_t file_bytes() const noexcept { return identity_.bytes; }
  /// The `i`th entry, by digest.
  Found read(std::size_t i) const;

  const std::filesystem::path& file() const noexcept { return file_; }

 private:
  struct Item {
    DigestBytes digest{};
    std::uint64_t offset = 0;
    std::uint64_t size = 0;
  };
  /// What tells a file from the one that was opened.
  struct Identity {
    std::uint64_t device = 0;
    std::uint64_t inode = 0;
    std::uint64_t bytes = 0;
    platform::Time modified;
    friend bool operator==(const Identity&, const Identity&) = default;
  };
  static Identity identity_of(const platform::Status& status);
  /// `*head`: header, index and its digest, as they were read.
  bool read_index(platform::Handle file, std::vector<std::byte>* head, std::string* problem);
  bool check_pin(platform::Handle file, std::span<const std::byte> head, const Sha256Bytes& pin, std::string* problem);
  Found read_item(std::size_t i) const;

  std::filesystem::path file_;
  Identity identity_;
  std::vector<Item> index_;
  std::vector<Sha256Bytes> pinned_;  ///< of each entry, where the pack is pinned
};

struct WrittenPack {
  std::size_t entries = 0;
  std::uint64_t bytes = 0;
  Sha256Bytes sha256{};
};

/// Writes `entries` as a pack; nullopt with the reason in `*problem` on failure. Equal kernels give equal bytes:
/// duplicates go, the order is that of the digests, and how long compiling took is not kept.
std::optional<WrittenPack> write_pack(const std::filesystem::path& file, const std::vector<Entry>& entries,
                                      std::string* problem);

/// What `list_stored` says of a directory, of a pack; `problem` is that of the pack itself.
std::vector<StoredEntry> list_pack(const std::filesystem::path& file, std::string* problem);

}  // namespace fa::cache

#endif  // FA_CACHE_PACK_HPP_
