#ifndef FA_SRC_SUPPORT_TEXT_HPP_
#define FA_SRC_SUPPORT_TEXT_HPP_

#include <fmt/format.h>

#include <string>
#include <string_view>

namespace fa::support {

/// Throws fa::Error(invalid_argument) "head_dim = 20: accepted is a multiple of 8 from 8 to 256", with the fields
/// argument, value and accepted.
[[noreturn]] void throw_invalid_text(std::string_view argument, std::string_view value, std::string_view accepted);

/// Same, for any value that fmt can print.
template <class Value>
[[noreturn]] void throw_invalid(std::string_view argument, const Value& value, std::string_view accepted) {
  throw_invalid_text(argument, fmt::format("{}", value), accepted);
}

/// Same with ErrorCode::unsupported: a valid wish that nothing here can serve.
[[noreturn]] void throw_unsupported_text(std::string_view argument, std::string_view value, std::string_view accepted);

template <class Value>
[[noreturn]] void throw_unsupported(std::string_view argument, const Value& value, std::string_view accepted) {
  throw_unsupported_text(argument, fmt::format("{}", value), accepted);
}

/// Formats to the end of `text`. fmt::format_to would compile fmt's formatting once more into each file that calls it.
template <class... Values>
void append_format(std::string& text, fmt::format_string<Values...> format, Values&&... values) {
  text += fmt::vformat(format, fmt::make_format_args(values...));
}

/// The environment variable, or empty.
std::string environment(const char* name);

}  // namespace fa::support

#endif  // FA_SRC_SUPPORT_TEXT_HPP_
