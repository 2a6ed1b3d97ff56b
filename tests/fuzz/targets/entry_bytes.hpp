#ifndef FA_TESTS_FUZZ_TARGETS_ENTRY_BYTES_HPP_
#define FA_TESTS_FUZZ_TARGETS_ENTRY_BYTES_HPP_

#include <cstddef>
#include <cstring>
#include <span>
#include <string>

#include "cache/digest.hpp"
#include "cache/entry.hpp"

namespace fa::fuzz {

inline std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

inline std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// The digest of what is before `end` takes the place of what stands there: damage that no digest finds.
inline void sign(std::string* bytes, std::size_t end) {
  const cache::DigestBytes digest = cache::digest_bytes(bytes_of(*bytes).first(end));
  std::memcpy(bytes->data() + end, digest.data(), digest.size());
}

inline cache::Entry sample_entry(int number) {
  cache::Entry entry;
  entry.key = {
      "0123456789abcdef", "sm90_forward dtype=bf16 d=" + std::to_string(64 + number), {"-std=c++20"}, "sm_90a", "unit"};
  entry.kernel_name = "fa_sm90_forward";
  entry.compiler = "nvrtc 13." + std::to_string(number);
  entry.registers = 168;
  entry.threads = 384;
  entry.min_driver = 12000;
  entry.compile_ms = 812.5;
  entry.cubin.assign(static_cast<std::size_t>(7 + number), std::byte{0x7f});
  return entry;
}

}  // namespace fa::fuzz

#endif  // FA_TESTS_FUZZ_TARGETS_ENTRY_BYTES_HPP_
