#ifndef FA_CACHE_DIGEST_HPP_
#define FA_CACHE_DIGEST_HPP_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace fa::cache {

/// XXH3-128 in canonical (big-endian) byte order.
using DigestBytes = std::array<std::byte, 16>;

DigestBytes digest_bytes(std::span<const std::byte> bytes);

/// 32 lower-case hex digits.
std::string digest(std::span<const std::byte> bytes);
std::string digest(std::string_view text);

/// XXH3-128 over fields. Each goes in behind its length, so text cannot move between neighbours unnoticed.
class FieldHasher {
 public:
  FieldHasher();
  ~FieldHasher();
  FieldHasher(const FieldHasher&) = delete;
  FieldHasher& operator=(const FieldHasher&) = delete;

  FieldHasher& text(std::string_view field);
  FieldHasher& number(std::uint64_t field);

  /// Of the fields so far; 32 lower-case hex digits.
  std::string hex() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fa::cache

#endif  // FA_CACHE_DIGEST_HPP_
