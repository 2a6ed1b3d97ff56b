// The one translation unit that compiles fmt's own functions; every other one only declares them, which makes it
// several times faster to build. Debian ships fmt as headers and as a shared library, and libfa depends on no shared
// library, so the definitions come from the headers: inline here, and emitted because cmake/fmt.cmake asks the compiler
// to keep them. They stay weak, so that a program that links fa statically may bring a fmt of its own.
#ifndef FMT_HEADER_ONLY
#define FMT_HEADER_ONLY
#endif
#include <fmt/format.h>

#include <locale>
#include <string>

// What formatting a date calls.
template std::locale fmt::detail::locale_ref::get<std::locale>() const;

namespace fa {

// Templates are emitted where they are used: every one that fmt's headers declare as defined elsewhere.
[[gnu::used]] std::string use_fmt_templates(float f, double d, long double l, int i) {
  return fmt::format("{} {} {} {:L} {:L} {:L}", f, d, l, f, d, i);
}

}  // namespace fa
