#include "cache/pack.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>

#include "cache/encoding.hpp"
#include "cache/entry.hpp"
#include "cache/files.hpp"

namespace fa::cache {
namespace {

constexpr std::string_view kMagic =
    "\x89"
    "FAP\r\n\x1a\n";
constexpr std::size_t kHeaderBytes = 24;
constexpr std::size_t kItemBytes = sizeof(DigestBytes) + 16;

std::string_view as_text(const DigestBytes& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

DigestBytes key_digest(const Key& key) {
  const std::string hex = key.digest();
  DigestBytes bytes{};
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes.at(i) = static_cast<std::byte>(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
  }
  return bytes;
}

/// Entries by the digest of their keys, encoded.
std::map<DigestBytes, std::vector<std::byte>> encode_all(const std::vector<Entry>& entries) {
  std::map<DigestBytes, std::vector<std::byte>> encoded;
  for (const Entry& entry : entries) {
    Entry timeless = entry;
    timeless.compile_ms = 0;
    encoded.try_emplace(key_digest(entry.key), encode_entry(timeless));
  }
  return encoded;
}

}  // namespace

Pack::Identity Pack::identity_of(const platform::Status& status) {
  return {status.device, status.inode, status.bytes, status.modified};
}

std::optional<Pack> Pack::open(const std::filesystem::path& file, std::string* problem,
                               const std::optional<Sha256Bytes>& pin) {
  platform::Status status;
  const Descriptor descriptor = open_shipped_file(file, &status, problem);
  Pack pack;
  std::error_code error;  // a program may change its working directory later
  pack.file_ = std::filesystem::absolute(file, error);
  if (error) pack.file_ = file;
  if (descriptor.valid()) {
    pack.identity_ = identity_of(status);
    std::vector<std::byte> head;
    if (pack.read_index(descriptor.get(), &head, problem) &&
        (!pin || pack.check_pin(descriptor.get(), head, *pin, problem))) {
      return pack;
    }
  }
  *problem = fmt::format("{}: {}", file.string(), *problem);
  return std::nullopt;
}

bool Pack::read_index(Handle file, std::vector<std::byte>* head, std::string* problem) {
  const auto refuse = [problem](const char* reason) {
    *problem = reason;
    return false;
  };
  std::vector<std::byte>& bytes = *head;
  bytes.resize(kHeaderBytes);
  if (!read_at(file, 0, bytes)) return refuse("shorter than any pack");
  Reader header(bytes);
  if (!std::ranges::equal(header.raw(kMagic.size()), std::as_bytes(std::span(kMagic)))) return refuse("not a pack");
  if (header.number<std::uint32_t>() != kPackVersion || header.number<std::uint32_t>() != kSchemaVersion) {
    return refuse("written by another version of fa");
  }
  const auto count = header.number<std::uint64_t>();
  const std::uint64_t index_end = kHeaderBytes + count * kItemBytes;
  if (count > kMaxPackEntries || index_end + sizeof(DigestBytes) > identity_.bytes) return refuse("cut short");
  bytes.resize(index_end + sizeof(DigestBytes));
  if (!read_at(file, 0, bytes)) return refuse("cannot be read");
  const std::span<const std::byte> all(bytes);
  if (!std::ranges::equal(digest_bytes(all.first(index_end)), all.last(sizeof(DigestBytes)))) {
    return refuse("the digest of its index does not match");
  }
  Reader items(all.subspan(kHeaderBytes, count * kItemBytes));
  std::uint64_t end = bytes.size();
  for (std::uint64_t i = 0; i < count; ++i) {
    Item item;
    std::ranges::copy(items.raw(item.digest.size()), item.digest.begin());
    item.offset = items.number<std::uint64_t>();
    item.size = items.number<std::uint64_t>();
    const bool ascending = index_.empty() || index_.back().digest < item.digest;
    if (!ascending || item.offset != end || item.size > kMaxEntryBytes) return refuse("its index makes no sense");
    end += item.size;
    index_.push_back(item);
  }
  return end == identity_.bytes || refuse("its size is not that of its entries");
}

bool Pack::check_pin(Handle file, std::span<const std::byte> head, const Sha256Bytes& pin, std::string* problem) {
  Sha256 whole;
  whole.update(head);
  std::vector<std::byte> bytes;
  for (const Item& item : index_) {
    bytes.resize(item.size);
    if (!read_at(file, item.offset, bytes)) {
      *problem = "cannot be read";
      return false;
    }
    whole.update(bytes);
    pinned_.push_back(sha256(bytes));
  }
  const Sha256Bytes found = whole.finish();
  if (found == pin) return true;
  *problem = fmt::format("its SHA-256 is {}, and {} is expected", to_hex(found), to_hex(pin));
  return false;
}

Pack::Found Pack::load(const Key& key) const {
  const DigestBytes digest = key_digest(key);
  const auto item = std::ranges::lower_bound(index_, digest, {}, &Item::digest);
  if (item == index_.end() || item->digest != digest) return {};
  Found found = read_item(static_cast<std::size_t>(item - index_.begin()));
  if (found.entry && found.entry->key != key) {
    return {std::nullopt, fmt::format("{}: it holds another key under this digest", file_.string())};
  }
  return found;
}

Pack::Found Pack::read(std::size_t i) const {
  return read_item(i);
}

Pack::Found Pack::read_item(std::size_t i) const {
  const Item& item = index_.at(i);
  const auto damaged = [this](std::string_view reason) {
    return Found{std::nullopt, fmt::format("an entry of {}: {}", file_.string(), reason)};
  };
  std::string problem;
  platform::Status status;
  const Descriptor file = open_shipped_file(file_, &status, &problem);
  if (!file.valid()) return damaged(problem);
  if (identity_of(status) != identity_) return damaged("the file has changed since it was opened");
  std::vector<std::byte> bytes(item.size);
  if (!read_at(file.get(), item.offset, bytes)) return damaged("cannot be read");
  if (!pinned_.empty() && sha256(bytes) != pinned_[i]) return damaged("it is not what was there when it was pinned");
  std::optional<Entry> entry = decode_entry(bytes, &problem);
  if (!entry) return damaged(problem);
  if (key_digest(entry->key) != item.digest) return damaged("it holds the kernel of another key");
  return {std::move(entry), {}};
}

std::optional<WrittenPack> write_pack(const std::filesystem::path& file, const std::vector<Entry>& entries,
                                      std::string* problem) {
  const std::map<DigestBytes, std::vector<std::byte>> encoded = encode_all(entries);
  Writer writer;
  writer.raw(kMagic);
  writer.number(kPackVersion);
  writer.number(static_cast<std::uint32_t>(kSchemaVersion));
  writer.number(std::uint64_t{encoded.size()});
  std::uint64_t offset = kHeaderBytes + encoded.size() * kItemBytes + sizeof(DigestBytes);
  for (const auto& [digest, bytes] : encoded) {
    if (bytes.empty()) {
      *problem = "a kernel's size is out of bounds";
      return std::nullopt;
    }
    writer.raw(as_text(digest));
    writer.number(offset);
    writer.number(std::uint64_t{bytes.size()});
    offset += bytes.size();
  }
  const std::string index = writer.take();
  std::vector<std::byte> all;
  all.reserve(offset);
  const auto append = [&all](std::span<const std::byte> part) { all.insert(all.end(), part.begin(), part.end()); };
  append(std::as_bytes(std::span(index)));
  append(digest_bytes(all));
  for (const auto& [digest, bytes] : encoded) append(bytes);
  if (!write_shared_file(file, all, problem)) return std::nullopt;
  return WrittenPack{encoded.size(), all.size(), sha256(all)};
}

std::vector<StoredEntry> list_pack(const std::filesystem::path& file, std::string* problem) {
  std::vector<StoredEntry> stored;
  const std::optional<Pack> pack = Pack::open(file, problem);
  for (std::size_t i = 0; pack && i < pack->size(); ++i) {
    Pack::Found found = pack->read(i);
    StoredEntry item;
    item.path = file;
    item.problem = found.damage;
    if (found.entry) {
      item.entry = std::move(*found.entry);
      item.cubin_bytes = item.entry.cubin.size();
      item.entry.cubin.clear();
    }
    stored.push_back(std::move(item));
  }
  return stored;
}

}  // namespace fa::cache
