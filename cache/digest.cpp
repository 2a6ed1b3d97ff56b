#include "cache/digest.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>

namespace fa::cache {
namespace {

DigestBytes canonical(XXH128_hash_t hash) {
  XXH128_canonical_t bytes;
  XXH128_canonicalFromHash(&bytes, hash);
  DigestBytes out{};
  std::ranges::transform(bytes.digest, out.begin(), [](unsigned char byte) { return std::byte{byte}; });
  return out;
}

std::string hex_digits(const DigestBytes& bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes.size());
  for (const std::byte byte : bytes) {
    const auto value = std::to_integer<unsigned>(byte);
    text += kDigits[value >> 4U];
    text += kDigits[value & 15U];
  }
  return text;
}

}  // namespace

DigestBytes digest_bytes(std::span<const std::byte> bytes) {
  return canonical(XXH3_128bits(bytes.data(), bytes.size()));
}

std::string digest(std::span<const std::byte> bytes) {
  return hex_digits(digest_bytes(bytes));
}

std::string digest(std::string_view text) {
  return digest(std::as_bytes(std::span(text)));
}

struct FieldHasher::State {
  XXH3_state_t stream;
};

FieldHasher::FieldHasher() : state_(std::make_unique<State>()) {
  XXH3_128bits_reset(&state_->stream);
}

FieldHasher::~FieldHasher() = default;

FieldHasher& FieldHasher::text(std::string_view field) {
  number(field.size());
  XXH3_128bits_update(&state_->stream, field.data(), field.size());
  return *this;
}

FieldHasher& FieldHasher::number(std::uint64_t field) {
  std::array<unsigned char, sizeof field> bytes{};
  for (unsigned char& byte : bytes) {
    byte = static_cast<unsigned char>(field & 0xffU);
    field >>= 8U;
  }
  XXH3_128bits_update(&state_->stream, bytes.data(), bytes.size());
  return *this;
}

std::string FieldHasher::hex() const {
  return hex_digits(canonical(XXH3_128bits_digest(&state_->stream)));
}

}  // namespace fa::cache
