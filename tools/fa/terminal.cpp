#include "terminal.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

namespace fa::cli {
namespace {

bool stderr_is_terminal() {
  static const bool answer = isatty(STDERR_FILENO) != 0;
  return answer;
}

}  // namespace

void print_failure(std::string_view message) {
  clear_progress();
  fmt::print(stderr, "fa: {}\n", message);
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
  fmt::print("{}\n", value.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
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
