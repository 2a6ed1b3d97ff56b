#include <array>
#include <cstddef>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cache/digest.hpp"
#include "cache/entry.hpp"
#include "support.hpp"

namespace fa::cache {
namespace {

using testing::make_key;

TEST(Digest, IsXxh3With128Bits) {
  EXPECT_EQ(digest(std::string_view{}), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(digest("abc"), digest(std::as_bytes(std::span("abc", 3))));
  EXPECT_NE(digest("abc"), digest("abd"));
}

TEST(Digest, FieldsDoNotRunTogether) {
  EXPECT_NE(FieldHasher().text("ab").text("c").hex(), FieldHasher().text("a").text("bc").hex());
  EXPECT_NE(FieldHasher().text("").text("a").hex(), FieldHasher().text("a").text("").hex());
  EXPECT_NE(FieldHasher().text("a").hex(), FieldHasher().text("a").text("").hex());
  EXPECT_NE(FieldHasher().number(1).hex(), FieldHasher().number(256).hex());
  EXPECT_EQ(FieldHasher().text("a").number(7).hex(), FieldHasher().text("a").number(7).hex());
}

TEST(Key, DigestIsPinned) {
  // A change here invalidates every cache in the field: raise kSchemaVersion with it.
  EXPECT_EQ(kSchemaVersion, 2);
  EXPECT_EQ(make_key().digest(), "ca20ee1eec0644d373c2b4b8232767cf");
  EXPECT_EQ(digest(encode_entry(testing::make_entry(make_key()))), "6e6faa48228cec44b3ba7520027ebc3e");
}

TEST(Key, EveryBitOfEveryFieldCounts) {
  const Key key = make_key();
  std::set<std::string> digests{key.digest()};
  std::set<std::string> encodings{encode_key(key)};
  std::size_t variants = 1;
  const auto flip_all = [&](auto field_of) {
    Key changed = key;
    std::string& text = field_of(changed);
    for (char& c : text) {
      for (unsigned bit = 0; bit < 8; ++bit) {
        const char before = std::exchange(c, static_cast<char>(static_cast<unsigned char>(c) ^ (1U << bit)));
        digests.insert(changed.digest());
        encodings.insert(encode_key(changed));
        ++variants;
        c = before;
      }
    }
  };
  flip_all([](Key& k) -> std::string& { return k.templates; });
  flip_all([](Key& k) -> std::string& { return k.spec; });
  flip_all([](Key& k) -> std::string& { return k.options[0]; });
  flip_all([](Key& k) -> std::string& { return k.options[1]; });
  flip_all([](Key& k) -> std::string& { return k.target; });
  flip_all([](Key& k) -> std::string& { return k.unit; });
  EXPECT_EQ(digests.size(), variants);
  EXPECT_EQ(encodings.size(), variants);
}

TEST(Key, FieldBoundariesCount) {
  const std::vector<Key> keys = {
      {"ab", "c", {"d", "e"}, "f"},     {"a", "bc", {"d", "e"}, "f"}, {"ab", "cd", {"", "e"}, "f"},
      {"ab", "c", {"de", ""}, "f"},     {"ab", "c", {"", "de"}, "f"}, {"ab", "c", {"de"}, "f"},
      {"ab", "c", {"d"}, "ef"},         {"ab", "c", {}, "def"},       {"ab", "c", {"d", "e", "f"}, ""},
      {"ab", "c", {"d", "e", ""}, "f"}, {"ab", "c", {"e", "d"}, "f"}, {"", "abc", {"d", "e"}, "f"},
      {"abc", "", {"d", "e"}, "f"},     {"ab", "c", {"d", "ef"}, ""}, {"ab", "c", {"d", "e"}, std::string("f\0", 2)},
  };
  std::set<std::string> digests;
  std::set<std::string> encodings;
  for (const Key& key : keys) {
    digests.insert(key.digest());
    encodings.insert(encode_key(key));
  }
  EXPECT_EQ(digests.size(), keys.size());
  EXPECT_EQ(encodings.size(), keys.size());
}

}  // namespace
}  // namespace fa::cache
