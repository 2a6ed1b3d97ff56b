#include <fa/error.hpp>

#include <cmath>
#include <string>
#include <utility>

namespace fa {
namespace {

std::string text_of(double value) {
  return std::isnan(value) ? "NaN" : value > 0 ? "+inf" : "-inf";
}

/// The axes that a location has, each with its name.
template <class Visit>
void visit_axes(const ErrorLocation& location, const Visit& visit) {
  constexpr std::pair<const char*, std::int64_t ErrorLocation::*> kAxes[] = {
      {"b", &ErrorLocation::b},   {"h", &ErrorLocation::h}, {"q", &ErrorLocation::q},
      {"kv", &ErrorLocation::kv}, {"d", &ErrorLocation::d},
  };
  for (const auto& [name, axis] : kAxes) {
    if (location.*axis >= 0) visit(name, location.*axis);
  }
}

std::string list_of(const std::vector<std::int64_t>& numbers) {
  std::string text;
  for (const std::int64_t number : numbers) text.append(text.empty() ? "" : ", ").append(std::to_string(number));
  return text;
}

/// "k[b=0, h=1, kv=17, d=3] is NaN, and reaches o"
std::string message_of(const ErrorLocation& location) {
  std::string place;
  visit_axes(location, [&](const char* name, std::int64_t index) {
    place.append(place.empty() ? "" : ", ").append(name).append("=").append(std::to_string(index));
  });
  std::string text = location.tensor;
  if (!location.index.empty()) text.append("[").append(list_of(location.index)).append("]");
  if (!place.empty()) text.append(location.index.empty() ? "[" : " at [").append(place).append("]");
  text.append(" is ").append(text_of(location.value));
  if (location.tensor == location.result) return text + ", of finite tensors and scores";
  return text.append(", and reaches ").append(location.result);
}

std::vector<ErrorField> fields_of(const ErrorLocation& location) {
  std::vector<ErrorField> fields{{"tensor", location.tensor}, {"value", text_of(location.value)}};
  visit_axes(location, [&](const char* name, std::int64_t index) { fields.push_back({name, std::to_string(index)}); });
  if (!location.index.empty()) fields.push_back({"index", list_of(location.index)});
  fields.push_back({"result", location.result});
  return fields;
}

}  // namespace

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
    case ErrorCode::not_finite:
      return "not_finite";
  }
  return "unknown";
}

Error::Error(ErrorCode code, const std::string& message, std::vector<ErrorField> fields)
    : std::runtime_error(message),
      code_(code),
      fields_(std::make_shared<const std::vector<ErrorField>>(std::move(fields))) {}

Error::Error(const ErrorLocation& location)
    : std::runtime_error(message_of(location)),
      code_(ErrorCode::not_finite),
      fields_(std::make_shared<const std::vector<ErrorField>>(fields_of(location))),
      location_(std::make_shared<const ErrorLocation>(location)) {}

std::string_view Error::field(std::string_view name) const noexcept {
  for (const ErrorField& field : *fields_) {
    if (field.name == name) return field.value;
  }
  return {};
}

}  // namespace fa
