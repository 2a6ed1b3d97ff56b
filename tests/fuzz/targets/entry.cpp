#include <optional>

#include "fuzz/targets/entry_bytes.hpp"
#include "fuzz/targets/target.hpp"

namespace fa::fuzz {
namespace {

void decode(const std::string& bytes) {
  std::string problem;
  const std::optional<cache::Entry> entry = cache::decode_entry(bytes_of(bytes), &problem);
  require(entry.has_value() == problem.empty(), "an entry, or a reason");
  if (!entry) return;
  require(text_of(cache::encode_entry(*entry)) == bytes, "an entry is written as it was read");
  require(cache::encoded_size(*entry) == bytes.size(), "the size of an entry");
  require(entry->key.digest().size() == 32, "a digest");
  for (const char* const rule : {"", "13.0", ">=12.8"}) {
    cache::Acceptance accept = *cache::parse_acceptance(rule);
    accept.driver = 12040;
    static_cast<void>(accept.refusal(*entry));
  }
}

}  // namespace

std::vector<std::string> seeds() {
  std::vector<std::string> result;
  for (int i = 0; i < 3; ++i) result.push_back(text_of(cache::encode_entry(sample_entry(i))));
  return result;
}

}  // namespace fa::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::string bytes(reinterpret_cast<const char*>(data), size);
  fa::fuzz::decode(bytes);
  static_cast<void>(fa::cache::parse_acceptance(bytes));
  constexpr std::size_t kDigest = sizeof(fa::cache::DigestBytes);
  if (size < kDigest) return 0;
  fa::fuzz::sign(&bytes, size - kDigest);
  fa::fuzz::decode(bytes);
  return 0;
}
