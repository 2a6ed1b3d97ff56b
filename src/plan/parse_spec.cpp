#include "plan/parse_spec.hpp"

#include <algorithm>
#include <charconv>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fa/error.hpp>

#include "expression/program.hpp"
#include "plan/catalogue.hpp"
#include "support/text.hpp"

namespace fa::plan {
namespace {

/// What stands before `separator`; takes both from `text`.
std::string_view take(std::string_view* text, char separator) {
  const std::string_view part = text->substr(0, text->find(separator));
  text->remove_prefix(std::min(part.size() + 1, text->size()));
  return part;
}

/// Of all kernels of a name: some are told apart by their fields.
std::vector<KernelSpec::Own> owns_of(std::string_view name) {
  std::vector<KernelSpec::Own> found;
  const auto search = [&]<std::size_t... I>(std::index_sequence<I...>) {
    const auto look = [&]<class Which>(Which which) {
      if (Which::kernel().name == name) found.emplace_back(which);
    };
    (look(std::variant_alternative_t<I, KernelSpec::Own>{}), ...);
  };
  search(std::make_index_sequence<std::variant_size_v<KernelSpec::Own>>());
  if (found.empty()) support::throw_invalid("kernel", name, "a kernel of this version");
  return found;
}

/// Of a captured tensor.
DType dtype_of(std::string_view text) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64, DType::i32}) {
    if (text == to_string(dtype)) return dtype;
  }
  support::throw_invalid("dtype", text, "f16, bf16, f32, f64 or i32");
}

DType kernel_dtype_of(std::string_view text) {
  for (const DType dtype : {DType::e4m3, DType::e5m2, DType::i8}) {
    if (text == to_string(dtype)) return dtype;
  }
  return dtype_of(text);
}

int number_of(std::string_view name, std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) support::throw_invalid(name, text, "a whole number");
  return value;
}

/// Of a field that enters sums of bytes and registers, which are ints; a page may have any size.
int size_of_field(std::string_view name, std::string_view text) {
  constexpr int kMost = 1 << 16;
  const int value = number_of(name, text);
  if (name != "page_size" && (value < -kMost || value > kMost)) {
    support::throw_invalid(name, text, "a number of at most 65536");
  }
  return value;
}

/// "slope:f32:1:grad,doc:i32:1"
std::vector<expression::Capture> captures_of(std::string_view text) {
  std::vector<expression::Capture> captures;
  while (!text.empty()) {
    std::string_view one = take(&text, ',');
    expression::Capture& capture = captures.emplace_back();
    capture.name = take(&one, ':');
    capture.dtype = dtype_of(take(&one, ':'));
    capture.rank = number_of("captures", take(&one, ':'));
    if (!one.empty() && one != "grad") support::throw_invalid("captures", one, "grad, or nothing");
    capture.requires_grad = !one.empty();
  }
  return captures;
}

/// Whether `name` is a word of variants, which is read then.
bool read_variant(std::string_view name, std::string_view value, Variants* variants) {
  const std::pair<std::string_view, bool*> flags[] = {{"left_window", &variants->left_window},
                                                      {"chunked", &variants->chunked},
                                                      {"sink", &variants->sink},
                                                      {"placed", &variants->placed},
                                                      {"strided", &variants->strided}};
  for (const auto& [flag, member] : flags) {
    if (name == flag) return *member = value == "1", true;
  }
  if (name == "score") return variants->score = value, true;
  if (name == "mask") return variants->mask = value, true;
  if (name == "captures") return variants->captures = captures_of(value), true;
  return false;
}

void read_word(std::string_view name, std::string_view value, KernelSpec* spec) {
  if (name == "arch") {
    spec->arch = parse_arch(value);
  } else if (name == "dtype") {
    spec->dtype = kernel_dtype_of(value);
  } else if (name == "debug") {
    spec->debug = value == "1";
  } else if (!read_variant(name, value, &spec->variants)) {
    const auto fields = spec->kernel().fields;
    const auto field = std::ranges::find_if(fields, [&](const Field& f) { return f.name == name; });
    if (field == fields.end()) support::throw_invalid("field", name, "a field of the kernel");
    if (field->set != nullptr) field->set(*spec, size_of_field(name, value));  // else it follows from others
  }
}

/// What `text` says of the kernel whose own part is given; it ends with `words`.
KernelSpec read(const KernelSpec::Own& own, std::string_view text, std::string_view words) {
  KernelSpec spec;
  spec.own = own;
  for (const Field& field : spec.kernel().fields) {
    if (field.shown != Field::Shown::when_set || field.set == nullptr) continue;
    field.set(spec, field.kind == Field::Kind::number ? field.unset : 0);
  }
  while (!words.empty()) {
    std::string_view value = take(&words, ' ');
    const std::string_view name = take(&value, '=');
    read_word(name, value, &spec);
  }
  const Variants& variants = spec.variants;
  describe_functions(expression::Program::parse(variants.score, variants.mask, variants.captures), &spec.variants);
  if (const auto warps = spec.kernel().warps) spec.warps = warps(spec);
  if (canonical(spec) != text) support::throw_invalid("kernel", text, canonical(spec));
  if (const std::string reason = refusal(spec); !reason.empty()) {
    support::throw_invalid("kernel", text, "a kernel that can be built: " + reason);
  }
  return spec;
}

}  // namespace

KernelSpec parse_spec(std::string_view text) {
  std::string_view words = text;
  std::optional<Error> problem;
  for (const KernelSpec::Own& own : owns_of(take(&words, ' '))) {
    try {
      return read(own, text, words);
    } catch (const Error& error) {
      if (!problem) problem = error;
    }
  }
  throw *problem;
}

}  // namespace fa::plan
