// SHA-256 against FIPS 180-4 and against another implementation (Python's hashlib).

#include "cache/sha256.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

namespace fa::cache {
namespace {

std::string hex_of(std::string_view text) {
  return to_hex(sha256(std::as_bytes(std::span(text))));
}

TEST(Sha256, OfTheStandardsExamples) {
  EXPECT_EQ(hex_of(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex_of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex_of(std::string(1'000'000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

/// Byte i of n is (7 i + n) mod 256.
std::vector<std::byte> pattern(std::size_t size) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>((7 * i + size) % 256);
  return bytes;
}

TEST(Sha256, OfLengthsAroundABlockAndItsPadding) {
  const struct {
    std::size_t size;
    const char* digest;
  } cases[] = {{1, "4bf5122f344554c53bde2ebb8cd2b7e3d1600ad631c385a5d7cce23c7785459a"},
               {55, "81afe5b788dc2ce138ff83d9b20164db75a94d75d2b2432eea4a0ef605088c72"},
               {56, "2aba54f0ac632420a2b502431408866e40e1d5e430df4cd822642c78ab2eb9c1"},
               {57, "903284efbf9100e8ba1614ec65eacacad125e03f857cae7acbf8b73b23e0fdfe"},
               {63, "733d3d4ee79ee67145bf73da13588f6f235d37414fc64b14a2f00f1762792f5e"},
               {64, "79322907b3e9d013d7dc2c2f256674dbf733045cde01df3539271c6f5605feb8"},
               {65, "d85c007c6eb440f085afa2b84f6f2bce4658b240e9f62cb1364bf0485a57e720"},
               {119, "6c87eedf096b345de205b702e5223b73b447a3207791ded3ea007ba15ed6736e"},
               {120, "42500cf6a1e3936d6b9e0bcfe296d654b63255e525487d3634d0b15fde591c4d"},
               {127, "68f6ff710276900c0ffbbc57426f67e00c2e01f0750c7edc25ac06b8ce7a8095"},
               {128, "489d55fea9a73af36b6dd0be7b4117d8e5683386d39544e8a44c99a87f368707"},
               {1000, "6b0df76627243d095b0c4400cb658b7e804dd03461cc03aee8fc8fe0bcada168"}};
  for (const auto& c : cases) EXPECT_EQ(to_hex(sha256(pattern(c.size))), c.digest) << c.size;
}

TEST(Sha256, DoesNotDependOnTheParts) {
  std::mt19937 random(1);
  const std::vector<std::byte> bytes = pattern(1000);
  for (int i = 0; i < 200; ++i) {
    Sha256 hash;
    for (std::span<const std::byte> rest(bytes); !rest.empty();) {
      const std::size_t size = std::min<std::size_t>(random() % 200, rest.size());
      hash.update(rest.first(size));
      rest = rest.subspan(size);
    }
    EXPECT_EQ(hash.finish(), sha256(bytes));
  }
}

TEST(Sha256, ReadsItsOwnText) {
  const Sha256Bytes digest = sha256(pattern(3));
  std::string text = to_hex(digest);
  EXPECT_EQ(parse_sha256(text), digest);
  std::ranges::transform(text, text.begin(), [](char c) { return c >= 'a' ? static_cast<char>(c - 'a' + 'A') : c; });
  EXPECT_EQ(parse_sha256(text), digest);
  EXPECT_FALSE(parse_sha256(""));
  EXPECT_FALSE(parse_sha256(text.substr(1)));
  EXPECT_FALSE(parse_sha256(text + "0"));
  for (const char wrong : {'g', ' ', '-', '\0', '/', ':', '@', 'G', '`'}) {
    std::string bad = text;
    bad[40] = wrong;
    EXPECT_FALSE(parse_sha256(bad)) << wrong;
  }
}

}  // namespace
}  // namespace fa::cache
