#include <fa/error.hpp>

#include <utility>

namespace fa {

const char* to_string(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::invalid_argument:
      return "invalid_argument";
    case ErrorCode::unsupported:
      return "unsupported";
    case ErrorCode::no_driver:
      return "no_driver";
    case ErrorCode::no_compiler:
      return "no_compiler";
    case ErrorCode::compile_failed:
      return "compile_failed";
    case ErrorCode::cuda:
      return "cuda";
    case ErrorCode::out_of_memory:
      return "out_of_memory";
    case ErrorCode::io:
      return "io";
    case ErrorCode::cache_miss:
      return "cache_miss";
    case ErrorCode::internal:
      return "internal";
  }
  return "unknown";
}

Error::Error(ErrorCode code, const std::string& message, std::vector<ErrorField> fields)
    : std::runtime_error(message),
      code_(code),
      fields_(std::make_shared<const std::vector<ErrorField>>(std::move(fields))) {}

std::string_view Error::field(std::string_view name) const noexcept {
  for (const ErrorField& field : *fields_) {
    if (field.name == name) return field.value;
  }
  return {};
}

}  // namespace fa
