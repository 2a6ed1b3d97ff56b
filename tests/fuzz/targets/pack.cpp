#include "cache/pack.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <string_view>

#include "cache/encoding.hpp"
#include "fuzz/targets/entry_bytes.hpp"
#include "fuzz/targets/memory_file.hpp"
#include "fuzz/targets/target.hpp"

namespace fa::fuzz {
namespace {

constexpr std::size_t kHeader = 24;
constexpr std::size_t kItem = 32;
constexpr std::size_t kDigest = sizeof(cache::DigestBytes);

void open(const std::string& bytes) {
  const MemoryFile file(bytes);
  std::string problem;
  const std::optional<cache::Pack> pack = cache::Pack::open(file.path(), &problem);
  require(pack.has_value() == problem.empty(), "a pack, or a reason");
  static_cast<void>(cache::list_pack(file.path(), &problem));
  if (!pack) return;
  require(pack->file_bytes() == bytes.size(), "the size of a pack");
  for (std::size_t i = 0; i < pack->size(); ++i) {
    const cache::Pack::Found found = pack->read(i);
    require(found.entry.has_value() == found.damage.empty(), "an entry, or what damaged it");
    if (found.entry) require(pack->load(found.entry->key).entry.has_value(), "an entry is found by its key");
  }
  require(!pack->load(sample_entry(77).key).entry.has_value(), "a key that no pack has");
}

std::uint64_t count_of(const std::string& bytes) {
  cache::Reader reader(bytes_of(bytes));
  reader.raw(16);
  return reader.number<std::uint64_t>();
}

/// The digest of the index is made to fit.
std::string with_signed_index(std::string bytes) {
  const std::uint64_t count = count_of(bytes);
  if (bytes.size() < kHeader + kDigest || count > (bytes.size() - kHeader - kDigest) / kItem) return {};
  sign(&bytes, kHeader + count * kItem);
  return bytes;
}

/// Every entry of the pack, cut as its index says or nearly so, with a digest that fits, under an index that fits.
std::string rebuilt(const std::string& bytes) {
  const std::uint64_t count = std::min<std::uint64_t>(count_of(bytes), 64);
  const std::size_t begin = kHeader + count * kItem + kDigest;
  if (bytes.size() < begin) return {};
  std::string_view rest = std::string_view(bytes).substr(begin);
  std::map<std::string, std::string> entries;
  cache::Reader index(bytes_of(bytes).subspan(kHeader, count * kItem));
  for (std::uint64_t i = 0; i < count; ++i) {
    std::string digest = text_of(index.raw(kDigest));
    index.number<std::uint64_t>();
    std::string entry(rest.substr(0, index.number<std::uint64_t>()));
    rest.remove_prefix(entry.size());
    if (entry.size() >= kDigest) sign(&entry, entry.size() - kDigest);
    if (const auto known = cache::decode_entry(bytes_of(entry))) {
      const std::string hex = known->key.digest();
      for (std::size_t at = 0; at < kDigest; ++at) {
        digest[at] = static_cast<char>(std::stoi(hex.substr(2 * at, 2), nullptr, 16));
      }
    }
    entries.try_emplace(std::move(digest), std::move(entry));
  }
  cache::Writer writer;
  writer.raw(std::string_view(bytes).substr(0, 16));
  writer.number(std::uint64_t{entries.size()});
  std::uint64_t offset = kHeader + entries.size() * kItem + kDigest;
  for (const auto& [digest, entry] : entries) {
    writer.raw(digest);
    writer.number(offset);
    writer.number(std::uint64_t{entry.size()});
    offset += entry.size();
  }
  std::string result = writer.take();
  result.resize(result.size() + kDigest);
  sign(&result, result.size() - kDigest);
  for (const auto& [digest, entry] : entries) result += entry;
  return result;
}

std::string pack_of(int count) {
  const MemoryFile file("");
  std::vector<cache::Entry> entries;
  for (int i = 0; i < count; ++i) entries.push_back(sample_entry(i));
  // A pack appears by a rename, which a file in memory has no folder for.
  std::string folder = "/tmp/fa_fuzz_XXXXXX";
  require(mkdtemp(folder.data()) != nullptr, "a folder");
  const std::string path = folder + "/pack";
  std::string problem;
  require(cache::write_pack(path, entries, &problem).has_value(), "a pack is written");
  std::string bytes;
  std::FILE* const stream = std::fopen(path.c_str(), "rb");
  require(stream != nullptr, "a pack is read");
  for (int byte = std::fgetc(stream); byte != EOF; byte = std::fgetc(stream)) bytes += static_cast<char>(byte);
  std::fclose(stream);
  std::filesystem::remove_all(folder);
  return bytes;
}

}  // namespace

std::vector<std::string> seeds() {
  return {pack_of(0), pack_of(1), pack_of(3)};
}

}  // namespace fa::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  fa::fuzz::open(bytes);
  fa::fuzz::open(fa::fuzz::with_signed_index(bytes));
  fa::fuzz::open(fa::fuzz::rebuilt(bytes));
  return 0;
}
