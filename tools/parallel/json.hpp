#ifndef FA_TOOLS_PARALLEL_JSON_HPP_
#define FA_TOOLS_PARALLEL_JSON_HPP_

#include <cmath>
#include <concepts>
#include <cstdio>
#include <string>
#include <string_view>

namespace bench {

/// An object of JSON, on one line, whose members stand in the order in which they were set.
class Json {
 public:
  Json& set(std::string_view name, const Json& object) { return add(name, object.text()); }
  Json& set(std::string_view name, const char* text) { return set(name, std::string_view(text)); }
  Json& set(std::string_view name, std::string_view text) { return add(name, quoted(text)); }
  Json& set(std::string_view name, bool value) { return add(name, value ? "true" : "false"); }
  template <std::integral Number>
  Json& set(std::string_view name, Number number) {
    return add(name, std::to_string(number));
  }
  /// Six digits; what is no number is null.
  Json& set(std::string_view name, double number) {
    char text[32];
    std::snprintf(text, sizeof text, "%.6g", number);
    return add(name, std::isfinite(number) ? text : "null");
  }
  std::string text() const { return "{" + members_ + "}"; }

 private:
  static std::string quoted(std::string_view text) {
    std::string result = "\"";
    for (const char c : text) {
      if (c == '"' || c == '\\') result += '\\';
      result += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
    }
    return result + '"';
  }
  Json& add(std::string_view name, const std::string& value) {
    if (!members_.empty()) members_ += ", ";
    members_ += quoted(name) + ": " + value;
    return *this;
  }

  std::string members_;
};

}  // namespace bench

#endif  // FA_TOOLS_PARALLEL_JSON_HPP_
