#ifndef FA_CACHE_SHA256_HPP_
#define FA_CACHE_SHA256_HPP_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace fa::cache {

using Sha256Bytes = std::array<std::byte, 32>;

/// SHA-256 (FIPS 180-4) of bytes that come in parts. Where XXH3 finds damage, this one finds malice too.
class Sha256 {
 public:
  void update(std::span<const std::byte> bytes);
  /// Of all bytes so far; the object is used up.
  Sha256Bytes finish();

 private:
  static constexpr std::size_t kBlock = 64;
  void compress(const std::byte* block);

  std::array<std::uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::byte, kBlock> block_{};
  std::uint64_t size_ = 0;
};

Sha256Bytes sha256(std::span<const std::byte> bytes);

/// 64 lower-case hex digits.
std::string to_hex(const Sha256Bytes& digest);

/// 64 hex digits of either case; nullopt for any other text.
std::optional<Sha256Bytes> parse_sha256(std::string_view text);

}  // namespace fa::cache

#endif  // FA_CACHE_SHA256_HPP_
