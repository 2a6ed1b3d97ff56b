#include "plan/fixed.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include <fa/error.hpp>

#include "plan/catalogue.hpp"
#include "support/text.hpp"

namespace fa::plan {
namespace {

constexpr int kMostValue = 1 << 20;
constexpr std::string_view kSeparators = " \t\n,";

const Field* open_field(const Kernel& kernel, std::string_view name) noexcept {
  for (const Field& field : kernel.fields) {
    if (field.name == name && !field.help.empty()) return &field;
  }
  return nullptr;
}

/// That some kernel has.
const Field& known_field(std::string_view name) {
  for (const Kernel* const kernel : catalogue()) {
    if (const Field* const field = open_field(*kernel, name)) return *field;
  }
  throw Error(ErrorCode::internal, fmt::format("no kernel has a field {} that may be fixed", name));
}

/// The kernels that an override may mean: of a family, or by name; empty means any.
std::vector<const Kernel*> meant(std::string_view wanted, Op op) {
  std::vector<const Kernel*> kernels;
  for (const Kernel* const kernel : catalogue()) {
    if (kernel->op != op || (kernel->family == Family::automatic && op != Op::column_sums)) continue;
    if (wanted.empty() || wanted == to_string(kernel->family) || wanted == kernel->name) kernels.push_back(kernel);
  }
  return kernels;
}

void add_name(std::string& list, std::string_view name) {
  list += (list.empty() ? "" : ", ") + std::string(name);
}

std::string accepted_kernels(Op op) {
  std::string families, names;
  for (const Kernel* const kernel : meant({}, op)) {
    if (families.find(to_string(kernel->family)) == std::string::npos) add_name(families, to_string(kernel->family));
    if (names.find(kernel->name) == std::string::npos) add_name(names, kernel->name);
  }
  return families + ", " + names;
}

std::string accepted_fields(const std::vector<const Kernel*>& kernels) {
  std::vector<std::string_view> names;
  std::string list, owners;
  for (const Kernel* const kernel : kernels) {
    add_name(owners, kernel->entry);
    for (const Field& field : kernel->fields) {
      if (field.help.empty() || std::ranges::find(names, field.name) != names.end()) continue;
      names.push_back(field.name);
      add_name(list, field.name);
    }
  }
  return fmt::format("{} (of {})", list, owners);
}

int read_value(const Field& field, std::string_view text, std::string_view argument) {
  const std::string what = fmt::format("{}={}", field.name, text);
  if (field.kind == Field::Kind::flag) {
    if (text == "0" || text == "false") return 0;
    if (text == "1" || text == "true") return 1;
    support::throw_invalid(argument, what, "0 or 1");
  }
  int value = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (problem != std::errc() || end != text.data() + text.size() || value < 0 || value > kMostValue) {
    support::throw_invalid(argument, what, fmt::format("a whole number from 0 to {}", kMostValue));
  }
  return value;
}

}  // namespace

Fixed::Fixed(Family wanted, std::initializer_list<std::pair<std::string_view, int>> fields) : family(wanted) {
  for (const auto& [name, value] : fields) set(name, value);
}

std::optional<int> Fixed::find(std::string_view name) const noexcept {
  for (const auto& [field, value] : fields_) {
    if (field->name == name) return value;
  }
  return std::nullopt;
}

bool Fixed::fixes_tile() const noexcept {
  return std::ranges::any_of(fields_, [](const auto& fixed) { return !fixed.first->of_call; });
}

bool Fixed::fixes_tile_of(const Kernel& of) const noexcept {
  return std::ranges::any_of(fields_, [&](const auto& fixed) {
    return !fixed.first->of_call && open_field(of, fixed.first->name) != nullptr;
  });
}

bool Fixed::fits(const Kernel& of) const noexcept {
  return std::ranges::all_of(fields_, [&](const auto& fixed) { return open_field(of, fixed.first->name) != nullptr; });
}

void Fixed::set_others(KernelSpec& spec) const {
  for (const Field& field : spec.kernel().fields) {
    const std::optional<int> value = field.of_override ? find(field.name) : std::nullopt;
    if (value) field.set(spec, *value);
  }
}

void Fixed::set(std::string_view name, int value) {
  const Field& field = known_field(name);
  std::erase_if(fields_, [&](const auto& fixed) { return fixed.first->name == name; });
  if (field.kind == Field::Kind::flag || value != 0) fields_.emplace_back(&field, value);
}

Fixed Fixed::without_tile(Family other) const {
  Fixed rest(other);
  std::ranges::copy_if(fields_, std::back_inserter(rest.fields_),
                       [](const auto& fixed) { return fixed.first->of_call; });
  return rest;
}

std::string Fixed::text() const {
  std::string text;
  for (const auto& [field, value] : fields_)
    text += fmt::format("{}{}={}", text.empty() ? "" : " ", field->name, value);
  return text;
}

std::vector<std::pair<std::string_view, int>> Fixed::fields() const {
  std::vector<std::pair<std::string_view, int>> all;
  for (const auto& [field, value] : fields_) all.emplace_back(field->name, value);
  return all;
}

Fixed fixed_to(const KernelSpec& spec) {
  Fixed fixed(spec.family());
  fixed.kernel = &spec.kernel();
  for (const Field& field : spec.kernel().fields) {
    if (field.help.empty()) continue;
    if (field.get != nullptr) {
      fixed.set(field.name, field.get(spec));
    } else if (field.name == "splits" && !spec.split) {
      fixed.set(field.name, 1);
    }
  }
  return fixed;
}

namespace {

Fixed read_fields(const KernelOverride& given, Op op, std::string_view argument) {
  const std::vector<const Kernel*> kernels = meant(given.kernel, op);
  if (kernels.empty()) {
    support::throw_invalid(fmt::format("{}.kernel", argument), given.kernel, accepted_kernels(op));
  }
  const std::string text_argument = fmt::format("{}.text", argument);
  Fixed fixed;
  if (!given.kernel.empty()) {
    fixed.family = kernels.front()->family;
    if (given.kernel != to_string(fixed.family) && kernels.size() == 1) fixed.kernel = kernels.front();
  }
  std::vector<std::string_view> seen;
  for (const auto& [name, text] : split_fields(given.text, text_argument)) {
    const Field* field = nullptr;
    for (const Kernel* const kernel : kernels) {
      if (field == nullptr) field = open_field(*kernel, name);
    }
    if (field == nullptr) support::throw_invalid(text_argument, name, accepted_fields(kernels));
    const int value = read_value(*field, text, text_argument);
    const bool again = std::ranges::find(seen, name) != seen.end();
    if (again && fixed.number(name) != value) {
      support::throw_invalid(text_argument, fmt::format("{0}={1} {0}={2}", name, fixed.number(name), value),
                             "one value for a field");
    }
    seen.push_back(name);
    fixed.set(name, value);
  }
  return fixed;
}

constexpr std::string_view kRowBuffers = "row_buffers";

/// Of the pass behind a forward.
bool names_column_sums(const KernelOverride& given) noexcept {
  return given.kernel == ColumnSumsPass::kernel().name;
}

}  // namespace

Fixed read_override(const KernelOverride& given, Op op, std::string_view argument) {
  if (op != Op::forward || !names_column_sums(given)) return read_fields(given, op, argument);
  const int buffers = read_fields(given, Op::column_sums, argument).number(kRowBuffers);
  if (buffers > 2) support::throw_invalid(fmt::format("{}.{}", argument, kRowBuffers), buffers, "1 or 2");
  return {};
}

int sum_buffers(const std::optional<KernelOverride>& given) noexcept {
  if (!given || !names_column_sums(*given)) return 0;
  int buffers = 0;
  const std::string_view text = given->text;
  const std::size_t at = text.find(kRowBuffers);
  if (at == std::string_view::npos) return 0;
  std::from_chars(text.data() + at + kRowBuffers.size() + 1, text.data() + text.size(), buffers);
  return buffers;
}

bool names_portable(const std::optional<KernelOverride>& given) noexcept {
  return given && (given->kernel == to_string(Family::sm80) || given->kernel == Sm80Forward::kernel().name);
}

Fixed read_override(const std::optional<KernelOverride>& given, Op op, std::string_view argument) {
  return given ? read_override(*given, op, argument) : Fixed();
}

void check_kernel(const Fixed& fixed, const KernelSpec& planned, std::string_view argument) {
  if (fixed.kernel == nullptr || planned.family() != fixed.family || &planned.kernel() == fixed.kernel) return;
  support::throw_invalid(fmt::format("{}.kernel", argument), fixed.kernel->name,
                         fmt::format("{}, which serves this problem", planned.kernel().name));
}

std::vector<const Field*> open_fields(Op op) {
  std::vector<const Field*> fields;
  for (const Kernel* const kernel : meant({}, op)) {
    for (const Field& field : kernel->fields) {
      if (!field.help.empty() && std::ranges::find(fields, field.name, &Field::name) == fields.end()) {
        fields.push_back(&field);
      }
    }
  }
  return fields;
}

std::vector<std::pair<std::string_view, std::string_view>> split_fields(std::string_view text,
                                                                        std::string_view argument) {
  std::vector<std::pair<std::string_view, std::string_view>> fields;
  while (true) {
    text.remove_prefix(std::min(text.find_first_not_of(kSeparators), text.size()));
    if (text.empty()) return fields;
    const std::string_view word = text.substr(0, text.find_first_of(kSeparators));
    text.remove_prefix(word.size());
    const std::size_t equals = word.find('=');
    if (equals == std::string_view::npos || equals == 0) {
      support::throw_invalid(argument, word, "field=value, with spaces between fields");
    }
    fields.emplace_back(word.substr(0, equals), word.substr(equals + 1));
  }
}

}  // namespace fa::plan
