#ifndef FA_TOOLS_FA_CHOICE_HPP_
#define FA_TOOLS_FA_CHOICE_HPP_

#include <CLI/CLI.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fa::cli {

/// A value that an option has a name for, and perhaps further names that others use.
template <typename Value>
struct Named {
  std::string name;
  Value value;
  std::vector<std::string> aliases = {};
};

/// The names of an option's values. Not CLI::CheckedTransformer: its help shows numbers as characters.
template <typename Value>
class Choices {
 public:
  Choices(std::initializer_list<Named<Value>> items) : items_(items) {}

  /// "f16, bf16 or f32".
  std::string names() const {
    std::string text;
    for (std::size_t i = 0; i < items_.size(); ++i) {
      text += i == 0 ? "" : i + 1 == items_.size() ? " or " : ", ";
      text += items_[i].name;
    }
    return text;
  }

  std::vector<std::string> list() const {
    std::vector<std::string> result;
    for (const Named<Value>& item : items_) result.push_back(item.name);
    return result;
  }

  /// "(also fp16, bfloat16)", or empty.
  std::string others() const {
    std::string text;
    for (const Named<Value>& item : items_) {
      for (const std::string& alias : item.aliases) text += (text.empty() ? "" : ", ") + alias;
    }
    return text.empty() ? "" : " (also " + text + ")";
  }

  const Value& find(const std::string& option, const std::string& text) const {
    for (const Named<Value>& item : items_) {
      if (item.name == text) return item.value;
      for (const std::string& alias : item.aliases) {
        if (alias == text) return item.value;
      }
    }
    throw CLI::ValidationError(option, "'" + text + "': accepted is " + names() + others());
  }

  auto begin() const { return items_.begin(); }
  auto end() const { return items_.end(); }

 private:
  std::vector<Named<Value>> items_;
};

/// Begins the name of a validator that accepts everything: behind it are the values that completions offer.
inline constexpr const char* kOffered = "offered";

/// The first validator of an option whose values are few.
inline CLI::Validator offered(const std::vector<std::string>& values) {
  std::string name = kOffered;
  for (const std::string& value : values) name += " " + value;
  return {[](std::string&) { return std::string(); }, "", name};
}

/// Adds an option that takes one of the names; `value` is one, or may hold one.
template <typename Target, typename Value>
CLI::Option* add_choice(CLI::App& command, const std::string& option, Target* value, const Choices<Value>& choices,
                        const std::string& description) {
  const auto set = [option, value, choices](const std::string& text) { *value = choices.find(option, text); };
  return command.add_option_function<std::string>(option, set, description + ": " + choices.names() + choices.others())
      ->check(offered(choices.list()));
}

/// Adds an option that takes several, separated by commas.
template <typename Value>
CLI::Option* add_choice_list(CLI::App& command, const std::string& option, std::vector<Value>* values,
                             const Choices<Value>& choices, const std::string& description) {
  const auto set = [option, values, choices](const std::vector<std::string>& texts) {
    values->clear();
    for (const std::string& text : texts) values->push_back(choices.find(option, text));
  };
  return command
      .add_option_function<std::vector<std::string>>(
          option, set, description + ", separated by commas: " + choices.names() + choices.others())
      ->delimiter(',')
      ->check(offered(choices.list()));
}

/// Accepts whole numbers from `least` on. Not CLI::Range: its message shows bounds of 309 digits, and an unsigned
/// option takes -1.
CLI::Validator whole_number(std::uint64_t least = 0);

/// Accepts finite numbers above 0. A budget of NaN would compare as neither spent nor left.
CLI::Validator positive_number();

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_CHOICE_HPP_
