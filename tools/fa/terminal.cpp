#include "terminal.hpp"

#include <fmt/format.h>

#include <cstdio>

#include "system.hpp"

namespace fa::cli {
namespace {

/// How many bytes the UTF-8 character at the front of `text` has; 0 where there is none.
std::size_t character_size(std::string_view text) {
  const auto byte = [text](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const std::size_t size = byte(0) < 0x80 ? 1 : byte(0) < 0xc2 ? 0 : byte(0) < 0xe0 ? 2 : byte(0) < 0xf0 ? 3 : 4;
  if (size == 0 || byte(0) > 0xf4 || text.size() < size) return 0;
  for (std::size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xc0U) != 0x80) return 0;
  }
  if (size < 3) return size;
  // Spelled longer than need be, a surrogate, or beyond the last character.
  const unsigned lead = byte(0) << 8U | byte(1);
  const bool wrong = (lead >= 0xe080 && lead < 0xe0a0) || (lead >= 0xeda0 && lead < 0xedc0) ||
                     (lead >= 0xf080 && lead < 0xf090) || lead >= 0xf490;
  return wrong ? 0 : size;
}

/// Of one character: C0, DEL, C1, and what turns the direction of the text around it.
bool is_control(std::string_view character) {
  const auto first = static_cast<unsigned char>(character[0]);
  if (character.size() == 1) return first < 0x20 || first == 0x7f;
  if (character.size() == 2) return first == 0xc2 && static_cast<unsigned char>(character[1]) < 0xa0;
  return (character >= "\u202a" && character <= "\u202e") || (character >= "\u2066" && character <= "\u2069");
}

std::string escaped(std::string_view text, std::string_view passing) {
  std::string result;
  while (!text.empty()) {
    const std::size_t size = character_size(text);
    const std::string_view character = text.substr(0, size == 0 ? 1 : size);
    text.remove_prefix(character.size());
    if (size != 0 && (!is_control(character) || passing.find(character) != std::string_view::npos)) {
      result += character;
      continue;
    }
    for (const char byte : character) result += fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
  }
  return result;
}

}  // namespace

std::string printable(std::string_view text) {
  return escaped(text, "");
}

void print_failure(std::string_view message) {
  clear_progress();
  fmt::print(stderr, "fa: {}\n", escaped(message, "\n\t"));
}

void show_progress(const std::string& line) {
  if (stderr_is_terminal()) {
    fmt::print(stderr, "\r\x1b[K{}", line);
    std::fflush(stderr);
  }
}

void clear_progress() {
  show_progress("");
}

void print_json(const nlohmann::json& value) {
  fmt::print("{}\n", value.dump(2, ' ', true, nlohmann::json::error_handler_t::replace));
}

std::string format_bytes(double bytes) {
  static constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (bytes >= 1024 && unit < 4) {
    bytes /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} bytes", bytes) : fmt::format("{:.1f} {}", bytes, kUnits[unit]);
}

}  // namespace fa::cli
