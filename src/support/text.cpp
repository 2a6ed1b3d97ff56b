#include "support/text.hpp"

#include <fa/error.hpp>

#include "support/platform.hpp"

namespace fa::support {
namespace {

[[noreturn]] void throw_value(ErrorCode code, std::string_view argument, std::string_view value,
                              std::string_view accepted) {
  throw Error(
      code, fmt::format("{} = {}: accepted is {}", argument, value, accepted),
      {{"argument", std::string(argument)}, {"value", std::string(value)}, {"accepted", std::string(accepted)}});
}

}  // namespace

void throw_invalid_text(std::string_view argument, std::string_view value, std::string_view accepted) {
  throw_value(ErrorCode::invalid_argument, argument, value, accepted);
}

void throw_unsupported_text(std::string_view argument, std::string_view value, std::string_view accepted) {
  throw_value(ErrorCode::unsupported, argument, value, accepted);
}

std::string environment(const char* name) {
  return platform::environment(name);
}

}  // namespace fa::support
