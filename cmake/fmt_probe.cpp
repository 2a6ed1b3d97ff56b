// Calls what fmt's headers only declare when FMT_HEADER_ONLY is not defined; in a probe the library's file defines it.
#include <fmt/chrono.h>
#include <fmt/ranges.h>

#include <ctime>
#include <iterator>
#include <string>
#include <vector>

int main(int argc, char** argv) {
  std::string text =
      fmt::format("{} {:.3f} {:L} {}", argv[0], 1.0 / argc, argc, fmt::join(std::vector<int>{1, 2}, ","));
  fmt::format_to(std::back_inserter(text), "{:>8} {}", 1.0F, fmt::ptr(argv));
  text += fmt::format("{:%F}", std::tm{});
  try {
    text += fmt::format(fmt::runtime(argv[0]), argc);
  } catch (const fmt::format_error&) {
    return 1;
  }
  return text.empty();
}
