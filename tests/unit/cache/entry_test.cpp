#include "cache/entry.hpp"

#include <algorithm>
#include <cmath>
#include <random>

#include "cache/digest.hpp"
#include "support.hpp"

namespace fa::cache {
namespace {

using testing::make_entry;
using testing::make_key;
using testing::TemporaryDirectory;
using Bytes = std::vector<std::byte>;

constexpr std::size_t kDigestBytes = 16;
constexpr int kMutations = 100'000;
constexpr int kForgeries = 20'000;

/// One random edit: a bit, a byte, a cut, more bytes, a moved block, a zeroed block, an extreme length.
Bytes mutated(Bytes bytes, std::mt19937_64& random) {
  const auto below = [&random](std::size_t limit) {
    return limit == 0 ? 0 : static_cast<std::size_t>(random() % limit);
  };
  const auto at = [](Bytes& all, std::size_t i) { return all.begin() + static_cast<std::ptrdiff_t>(i); };
  const std::size_t where = below(bytes.size());
  switch (below(7)) {
    case 0:
      bytes[where] ^= std::byte{1} << below(8);
      break;
    case 1:
      bytes[where] = static_cast<std::byte>(random());
      break;
    case 2:
      bytes.resize(where);
      break;
    case 3:
      bytes.insert(at(bytes, where), 1 + below(40), static_cast<std::byte>(random()));
      break;
    case 4:
      std::rotate(at(bytes, where), at(bytes, where + below(bytes.size() - where)), bytes.end());
      break;
    case 5:
      std::fill_n(at(bytes, where), below(bytes.size() - where), std::byte{0});
      break;
    default:
      std::fill_n(at(bytes, where), std::min<std::size_t>(bytes.size() - where, 1 + below(8)), std::byte{0xff});
      break;
  }
  return bytes;
}

Bytes resealed(Bytes bytes) {
  bytes.erase(bytes.end() - static_cast<std::ptrdiff_t>(std::min(bytes.size(), kDigestBytes)), bytes.end());
  const DigestBytes digest = digest_bytes(bytes);
  bytes.insert(bytes.end(), digest.begin(), digest.end());
  return bytes;
}

TEST(Entry, RoundTrip) {
  Entry entry = make_entry(make_key());
  entry.registers = -1;
  entry.threads = std::numeric_limits<std::int32_t>::max();
  entry.key.options.emplace_back("");
  entry.key.spec += std::string("\0\xff\n", 3);
  std::string problem;
  const std::optional<Entry> back = decode_entry(encode_entry(entry), &problem);
  ASSERT_TRUE(back) << problem;
  testing::expect_same(*back, entry);
}

TEST(Entry, NothingIsWrittenThatWouldBeRefused) {
  EXPECT_TRUE(encode_entry(make_entry(make_key(), 0)).empty());
  Entry long_text = make_entry(make_key());
  long_text.key.spec.assign(kMaxTextBytes, 'x');
  EXPECT_TRUE(decode_entry(encode_entry(long_text)));
  long_text.key.spec += 'x';
  EXPECT_TRUE(encode_entry(long_text).empty());
  Entry many_options = make_entry(make_key());
  many_options.key.options.assign(kMaxOptions, "-G");
  EXPECT_TRUE(decode_entry(encode_entry(many_options)));
  many_options.key.options.emplace_back("-G");
  EXPECT_TRUE(encode_entry(many_options).empty());
  many_options.key.options.assign(20, std::string(kMaxTextBytes, 'x'));
  EXPECT_TRUE(encode_entry(many_options).empty());
}

TEST(Entry, EveryTruncationAndEveryBitFlipIsRefused) {
  const Bytes good = encode_entry(make_entry(make_key(), 64));
  for (std::size_t size = 0; size < good.size(); ++size) {
    EXPECT_FALSE(decode_entry(std::span(good).first(size))) << size;
  }
  for (std::size_t i = 0; i < good.size() * 8; ++i) {
    Bytes bad = good;
    bad[i / 8] ^= std::byte{1} << (i % 8);
    EXPECT_FALSE(decode_entry(bad)) << i;
  }
}

TEST(Entry, RandomMutationsAreRefused) {
  const Bytes good = encode_entry(make_entry(make_key(), 300));
  std::mt19937_64 random(1);
  for (int i = 0; i < kMutations;) {
    Bytes bad = mutated(good, random);
    if (random() % 4 == 0 && !bad.empty()) bad = mutated(std::move(bad), random);
    if (bad == good) continue;
    ++i;
    std::string problem;
    ASSERT_FALSE(decode_entry(bad, &problem)) << "mutation " << i;
    ASSERT_FALSE(problem.empty());
  }
}

TEST(Entry, ForgedDigestsDoNotMakeTheParserUnsafe) {
  const Bytes good = encode_entry(make_entry(make_key(), 60));
  std::mt19937_64 random(2);
  int accepted = 0;
  for (int i = 0; i < kForgeries; ++i) {
    const Bytes forged = resealed(mutated(good, random));
    const std::optional<Entry> entry = decode_entry(forged);
    if (!entry) continue;
    ++accepted;
    ASSERT_EQ(encode_entry(*entry), forged) << "mutation " << i;
  }
  EXPECT_GT(accepted, 0);
  EXPECT_LT(accepted, kForgeries);
}

TEST(Entry, RandomBytesAreRefused) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 2000; ++i) {
    Bytes bytes(random() % 300);
    std::ranges::generate(bytes, [&random] { return static_cast<std::byte>(random()); });
    ASSERT_FALSE(decode_entry(resealed(bytes)));
  }
}

}  // namespace
}  // namespace fa::cache
