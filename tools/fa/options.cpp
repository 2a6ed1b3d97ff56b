#include "options.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <utility>

#include "choice.hpp"
#include "plan/catalogue.hpp"
#include "plan/fixed.hpp"
#include "support/text.hpp"

namespace fa::cli {
namespace {

const Choices<DType> kStoredDTypes{{"e4m3", DType::e4m3, {"fp8", "float8_e4m3fn"}},
                                   {"i8", DType::i8, {"int8"}},
                                   {"u4x2", DType::u4x2, {"int4", "u4"}}};
const Choices<DType> kDTypes{{"f16", DType::f16, {"fp16", "float16", "half"}},
                             {"bf16", DType::bf16, {"bfloat16"}},
                             {"f32", DType::f32, {"fp32", "float32", "float"}},
                             {"f64", DType::f64, {"fp64", "float64", "double"}},
                             {"e4m3", DType::e4m3, {"fp8", "float8_e4m3fn"}},
                             {"e5m2", DType::e5m2, {"float8_e5m2"}},
                             {"i8", DType::i8, {"int8"}}};
const Choices<CausalAlign> kCausalAligns{{"bottom-right", CausalAlign::bottom_right},
                                         {"top-left", CausalAlign::top_left}};
std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(separator), text.size());
    if (end != 0) {
      parts.push_back(text.substr(0, end));
    }
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

int parse_int(std::string_view argument, std::string_view text) {
  int value = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (problem != std::errc() || end != text.data() + text.size() || value < 0) {
    support::throw_invalid(argument, text, "whole numbers from 0");
  }
  return value;
}

/// Of the kernels for both operations, each name once.
std::vector<const plan::Field*> all_fields() {
  std::vector<const plan::Field*> fields = plan::open_fields(plan::Op::forward);
  for (const plan::Field* const field : plan::open_fields(plan::Op::backward)) {
    if (std::ranges::find(fields, field->name, &plan::Field::name) == fields.end()) fields.push_back(field);
  }
  return fields;
}

/// The families that have kernels with a field, "sm80, sm90".
std::string owners_of(const plan::Field& field) {
  std::vector<std::string> owners;
  for (const plan::Kernel* const kernel : plan::catalogue()) {
    const bool has = std::ranges::any_of(
        kernel->fields, [&](const plan::Field& other) { return other.name == field.name && !other.help.empty(); });
    const std::string family = to_string(kernel->family);
    if (has && std::ranges::find(owners, family) == owners.end()) owners.push_back(family);
  }
  std::ranges::sort(owners);
  return fmt::format("{}", fmt::join(owners, ", "));
}

void add_word(std::string* text, std::string_view word) {
  *text += (text->empty() ? "" : " ") + std::string(word);
}

/// An override's text with `name` fixed at `value`, whatever it says of it.
std::string with_field(std::string_view text, std::string_view name, std::string_view value) {
  std::string result;
  for (const auto& [other, old] : plan::split_fields(text, "--kernel")) {
    if (other != name) add_word(&result, fmt::format("{}={}", other, old));
  }
  add_word(&result, fmt::format("{}={}", name, value));
  return result;
}

void check_sweep_field(std::string_view name) {
  std::string accepted;
  for (const plan::Field* const field : all_fields()) {
    if (field->name == name) return;
    accepted += (accepted.empty() ? "" : ", ") + std::string(field->name);
  }
  support::throw_invalid("--sweep", name, accepted);
}

/// Replaces `candidates` by their product with one "name=value,value".
void multiply(std::string_view axis, std::vector<KernelOverride>* candidates) {
  const std::size_t equals = axis.find('=');
  if (equals == std::string_view::npos) {
    support::throw_invalid("--sweep", axis, "name=value,value;name=...");
  }
  const std::string_view name = axis.substr(0, equals);
  check_sweep_field(name);
  std::vector<KernelOverride> product;
  for (const std::string_view text : split(axis.substr(equals + 1), ',')) {
    parse_int(name, text);
    for (KernelOverride candidate : *candidates) {
      candidate.text = with_field(candidate.text, name, text);
      product.push_back(std::move(candidate));
    }
  }
  if (product.empty()) {
    support::throw_invalid("--sweep", axis, "at least one value for each name");
  }
  *candidates = std::move(product);
}

/// "sm90 tile_m=192": a word without a value names the kernel.
void read_words(std::string_view text, KernelOverride* kernel) {
  for (const std::string_view word : split(text, ' ')) {
    if (word.find('=') == std::string_view::npos) {
      kernel->kernel = word;
    } else {
      add_word(&kernel->text, word);
    }
  }
}

}  // namespace

CLI::Validator whole_number(std::uint64_t least) {
  const auto check = [least](const std::string& text) {
    std::uint64_t value = 0;
    const char* const end = text.data() + text.size();
    const auto [rest, problem] = std::from_chars(text.data(), end, value);
    if (problem == std::errc() && rest == end && value >= least) return std::string();
    return fmt::format("'{}': accepted is a whole number from {} on", text, least);
  };
  return {check, "", "whole number"};
}

CLI::Validator positive_number() {
  const auto check = [](const std::string& text) {
    double value = 0;
    const char* const end = text.data() + text.size();
    const auto [rest, problem] = std::from_chars(text.data(), end, value);
    if (problem == std::errc() && rest == end && value > 0 && std::isfinite(value)) return std::string();
    return fmt::format("'{}': accepted is a finite number above 0", text);
  };
  return {check, "", "positive number"};
}

void add_kernel_options(CLI::App& command, KernelOverride* kernel) {
  const std::string group = "Kernel (left to the planner unless given)";
  const auto read = [kernel](const std::string& text) { read_words(text, kernel); };
  command
      .add_option_function<std::string>(
          "--kernel", read, "A family or one of its kernels, and fields of it: \"sm90 tile_m=192 stages=2\"")
      ->group(group);
  const auto take_family = [kernel](const std::string& family) {
    if (family != "automatic") kernel->kernel = family;
  };
  std::vector<std::string> families{plan::to_string(plan::Family::automatic)};
  for (const plan::ForwardFamily* const family : plan::forward_families()) {
    families.emplace_back(plan::to_string(family->family));
  }
  std::ranges::sort(families);
  command.add_option_function<std::string>("--family", take_family, "Kernel family")
      ->check(offered(families))
      ->check(CLI::IsMember(families))
      ->group(group);
  for (const plan::Field* const field : all_fields()) {
    std::string option = "--" + std::string(field->name);
    std::ranges::replace(option, '_', '-');
    const auto add = [kernel, name = std::string(field->name)](const std::string& value) {
      add_word(&kernel->text, fmt::format("{}={}", name, value));
    };
    const std::string values = field->kind == plan::Field::Kind::flag ? ": 0 or 1" : "";
    command
        .add_option_function<std::string>(option, add, fmt::format("{}: {}{}", owners_of(*field), field->help, values))
        ->group(group);
  }
}

std::optional<KernelOverride> if_given(const KernelOverride& kernel) {
  return describe(kernel).empty() ? std::nullopt : std::optional(kernel);
}

std::string describe(const KernelOverride& kernel) {
  std::string text = kernel.kernel.empty() ? "" : "family=" + kernel.kernel;
  if (!kernel.text.empty()) add_word(&text, kernel.text);
  return text;
}

std::vector<KernelOverride> parse_sweep(std::string_view text, const KernelOverride& base) {
  std::vector<KernelOverride> candidates{base};
  for (const std::string_view axis : split(text, ';')) {
    multiply(axis, &candidates);
  }
  return candidates;
}

void PackedOptions::apply(AttentionConfig* config) const {
  config->varlen = varlen;
  config->dropout = dropout;
  config->zero_padding = zero_padding;
}

std::string PackedOptions::text() const {
  std::string result = varlen ? "varlen" : "";
  if (dropout > 0) {
    result += fmt::format("{}dropout={:g}", result.empty() ? "" : "+", dropout);
  }
  return result.empty() ? "plain" : result;
}

void add_packed_options(CLI::App& command, PackedOptions* packed, bool varlen) {
  const std::string group = "Packed batches and dropout";
  command.add_option("--dropout", packed->dropout, "Probability with which an element of P is dropped")->group(group);
  if (!varlen) {
    return;
  }
  command.add_flag("--varlen", packed->varlen, "Sequences of different lengths in packed tensors")->group(group);
  command.add_flag("--zero-padding", packed->zero_padding, "Varlen: rows of no sequence become 0")->group(group);
}

void add_causal_align_option(CLI::App& command, CausalAlign* align) {
  add_choice(command, "--causal-align", align, kCausalAligns, "Diagonal of the causal mask when s_q != s_kv");
}

void add_stored_options(CLI::App& command, std::optional<DType>* k_dtype, std::optional<DType>* v_dtype,
                        int* group_size) {
  add_choice(command, "--k-dtype", k_dtype, kStoredDTypes, "What K of a cache is stored as, with a scale a row");
  add_choice(command, "--v-dtype", v_dtype, kStoredDTypes, "What V of a cache is stored as");
  command.add_option("--group-size", *group_size, "Of u4x2: columns that share a scale and an offset (default: 32)");
}

void add_o_dtype_option(CLI::App& command, std::optional<DType>* o_dtype) {
  const Choices<DType> choices{{"bf16", DType::bf16}, {"f16", DType::f16}, {"e4m3", DType::e4m3}};
  add_choice(command, "--o-dtype", o_dtype, choices, "Of 8-bit floats: what o is of (default: bf16)");
}

void add_key_scales_options(CLI::App& command, bool* key_scales, bool* value_scales, bool* precise) {
  command.add_flag("--key-scales", *key_scales, "Of 8-bit floats: each key has a scale for its row of K");
  command.add_flag("--value-scales", *value_scales, "Likewise for its row of V");
  command.add_flag("--precise", *precise, "Of 8-bit floats: P and V are multiplied as f16");
}

void add_statistics_options(CLI::App& command, Statistics* statistics) {
  const std::string group = "Statistics";
  const Choices<MaxLogit> logits{
      {"none", MaxLogit::none}, {"softmax", MaxLogit::softmax}, {"scaled", MaxLogit::scaled}};
  add_choice(command, "--max-logit", &statistics->max_logit, logits, "Forward: the greatest logits of rows, of these")
      ->group(group);
  command.add_flag("--max-logit-by-head", statistics->max_logit_by_head, "Of query heads, not of rows")->group(group);
  command.add_flag("--entropy", statistics->entropy, "Forward: the entropy of rows of P, in nats")->group(group);
  const Choices<ColumnSums> sums{
      {"none", ColumnSums::none}, {"query_heads", ColumnSums::query_heads}, {"kv_heads", ColumnSums::kv_heads}};
  add_choice(command, "--column-sums", &statistics->column_sums, sums, "Forward: P summed over rows, of these heads")
      ->group(group);
  command.add_option("--top-keys", statistics->top_keys, "Forward: so many keys of the greatest sums, of each head")
      ->group(group);
}

void add_statistics_gradient_options(CLI::App& command, Statistics* statistics) {
  const std::string group = "Statistics";
  command.add_flag("--entropy-gradient", statistics->entropy_gradient, "Backward: a gradient of --entropy is given")
      ->group(group);
  command.add_flag("--max-logit-gradient", statistics->max_logit_gradient, "Backward: likewise of --max-logit")
      ->group(group);
  command.add_flag("--column-sums-gradient", statistics->column_sums_gradient, "Backward: likewise of --column-sums")
      ->group(group);
}

void add_invariance_option(CLI::App& command, Invariance* invariance) {
  const Choices<Invariance> choices{
      {"none", Invariance::none}, {"batch", Invariance::batch}, {"rows", Invariance::rows}};
  add_choice(command, "--invariance", invariance, choices, "What the bits of forward's o and lse are a function of");
}

CLI::Option* add_outputs_option(CLI::App& command, Gradients* gradients) {
  const Choices<Gradients> choices{{"all", {}},
                                   {"dq", {true, false, false}},
                                   {"dk", {false, true, false}},
                                   {"dv", {false, false, true}},
                                   {"dqdk", {true, true, false}},
                                   {"dqdv", {true, false, true}},
                                   {"dkdv", {false, true, true}},
                                   {"none", {false, false, false}}};
  return add_choice(command, "--outputs", gradients, choices, "Backward: which of dq, dk and dv are computed");
}

void add_dtype_option(CLI::App& command, DType* dtype) {
  add_choice(command, "--dtype", dtype, kDTypes, "Element type of q, k, v and o");
}

void add_dtype_list_option(CLI::App& command, std::vector<DType>* dtypes) {
  add_choice_list(command, "--dtype", dtypes, kDTypes, "Element types");
}

void add_causal_list_option(CLI::App& command, std::vector<bool>* causal) {
  const auto set = [causal](const std::string& text) {
    *causal = text == "both" ? std::vector{false, true} : std::vector{text == "yes"};
  };
  command.add_option_function<std::string>("--causal", set, "Causal mask: no, yes or both")
      ->check(offered({"no", "yes", "both"}))
      ->check(CLI::IsMember({"no", "yes", "both"}));
}

Device parse_device(std::string_view text) {
  constexpr std::string_view kPrefix = "cuda:";
  if (text == "host") {
    return Device::host();
  }
  if (text == "cuda") {
    return Device::cuda(0);
  }
  if (text.starts_with(kPrefix)) {
    return Device::cuda(parse_int("--device", text.substr(kPrefix.size())));
  }
  support::throw_invalid("--device", text, "auto, host, cuda or cuda:N");
}

}  // namespace fa::cli
