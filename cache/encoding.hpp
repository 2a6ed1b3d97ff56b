#ifndef FA_CACHE_ENCODING_HPP_
#define FA_CACHE_ENCODING_HPP_

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

/// Little-endian, fixed-width numbers and counted texts: what entry and pack files are made of.
namespace fa::cache {

class Writer {
 public:
  template <std::unsigned_integral Number>
  void number(Number value) {
    for (std::size_t i = 0; i < sizeof value; ++i) out_ += static_cast<char>((value >> (8 * i)) & 0xffU);
  }
  void raw(std::string_view bytes) { out_ += bytes; }
  void text(std::string_view text) {
    number(static_cast<std::uint32_t>(text.size()));
    raw(text);
  }
  void signed32(std::int32_t value) { number(static_cast<std::uint32_t>(value)); }
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

/// Reads what Writer wrote. The first thing that does not fit spoils it, and all that follows reads as zero.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : left_(bytes) {}

  bool good() const { return good_; }
  bool at_end() const { return left_.empty(); }

  std::span<const std::byte> raw(std::uint64_t size) {
    good_ = good_ && size <= left_.size();
    if (!good_) return {};
    const std::span<const std::byte> bytes = left_.first(size);
    left_ = left_.subspan(size);
    return bytes;
  }
  template <std::unsigned_integral Number>
  Number number() {
    Number value = 0;
    const std::span<const std::byte> bytes = raw(sizeof(Number));
    for (std::size_t i = 0; i < bytes.size(); ++i) value |= std::to_integer<Number>(bytes[i]) << (8 * i);
    return value;
  }
  std::int32_t signed32() { return static_cast<std::int32_t>(number<std::uint32_t>()); }
  std::uint32_t count(std::uint32_t limit) {
    const auto value = number<std::uint32_t>();
    good_ = good_ && value <= limit;
    return good_ ? value : 0;
  }
  std::string text(std::uint32_t limit) {
    const std::span<const std::byte> bytes = raw(count(limit));
    std::string out(bytes.size(), '\0');
    std::ranges::transform(bytes, out.begin(), [](std::byte byte) { return std::to_integer<char>(byte); });
    return out;
  }

 private:
  std::span<const std::byte> left_;
  bool good_ = true;
};

}  // namespace fa::cache

#endif  // FA_CACHE_ENCODING_HPP_
