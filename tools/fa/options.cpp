#include "options.hpp"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <charconv>
#include <functional>
#include <utility>

#include "choice.hpp"
#include "support/text.hpp"

namespace fa::cli {
namespace {

const Choices<DType> kDTypes{{"f16", DType::f16, {"fp16", "float16", "half"}},
                             {"bf16", DType::bf16, {"bfloat16"}},
                             {"f32", DType::f32, {"fp32", "float32", "float"}},
                             {"f64", DType::f64, {"fp64", "float64", "double"}}};
const Choices<CausalAlign> kCausalAligns{{"bottom-right", CausalAlign::bottom_right},
                                         {"top-left", CausalAlign::top_left}};
const Choices<Family> kFamilies{{"automatic", Family::automatic}, {"sm80", Family::sm80}, {"sm90", Family::sm90}};

/// A field of KernelOverride by the name a sweep uses.
struct SweepField {
  std::string_view name;
  void (*set)(KernelOverride&, int);
};

constexpr SweepField kSweepFields[] = {
    {"tile_m", [](KernelOverride& kernel, int value) { kernel.tile_m = value; }},
    {"tile_n", [](KernelOverride& kernel, int value) { kernel.tile_n = value; }},
    {"warps", [](KernelOverride& kernel, int value) { kernel.warps = value; }},
    {"stages", [](KernelOverride& kernel, int value) { kernel.stages = value; }},
    {"q_in_registers", [](KernelOverride& kernel, int value) { kernel.q_in_registers = value != 0; }},
    {"loop_bodies", [](KernelOverride& kernel, int value) { kernel.loop_bodies = value; }},
    {"pack_gqa", [](KernelOverride& kernel, int value) { kernel.pack_gqa = value != 0; }},
    {"splits", [](KernelOverride& kernel, int value) { kernel.splits = value; }},
    {"q_buffers", [](KernelOverride& kernel, int value) { kernel.q_buffers = value; }},
    {"take_turns", [](KernelOverride& kernel, int value) { kernel.take_turns = value != 0; }},
    {"affine_product", [](KernelOverride& kernel, int value) { kernel.affine_product = value != 0; }},
    {"exact_max", [](KernelOverride& kernel, int value) { kernel.exact_max = value != 0; }},
    {"affine_reach", [](KernelOverride& kernel, int value) { kernel.affine_reach = value != 0; }},
    {"warps_n", [](KernelOverride& kernel, int value) { kernel.warps_n = value; }},
};

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

const SweepField& find_sweep_field(std::string_view name) {
  for (const SweepField& field : kSweepFields) {
    if (field.name == name) {
      return field;
    }
  }
  std::string accepted;
  for (const SweepField& field : kSweepFields) {
    accepted += (accepted.empty() ? "" : ", ") + std::string(field.name);
  }
  support::throw_invalid("--sweep", name, accepted);
}

/// Replaces `candidates` by their product with one "name=value,value".
void multiply(std::string_view axis, std::vector<KernelOverride>* candidates) {
  const std::size_t equals = axis.find('=');
  if (equals == std::string_view::npos) {
    support::throw_invalid("--sweep", axis, "name=value,value;name=...");
  }
  const SweepField& field = find_sweep_field(axis.substr(0, equals));
  std::vector<KernelOverride> product;
  for (const std::string_view text : split(axis.substr(equals + 1), ',')) {
    const int value = parse_int(field.name, text);
    for (KernelOverride candidate : *candidates) {
      field.set(candidate, value);
      product.push_back(candidate);
    }
  }
  if (product.empty()) {
    support::throw_invalid("--sweep", axis, "at least one value for each name");
  }
  *candidates = std::move(product);
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

void add_kernel_options(CLI::App& command, KernelOverride* kernel) {
  const std::string group = "Kernel (left to the planner unless given)";
  add_choice(command, "--family", &kernel->family, kFamilies, "Kernel family")->group(group);
  command.add_option("--tile-m", kernel->tile_m, "Query rows of a thread block")->group(group);
  command.add_option("--tile-n", kernel->tile_n, "Keys of one step of the main loop")->group(group);
  command.add_option("--warps", kernel->warps, "Warps of a thread block")->group(group);
  command.add_option("--stages", kernel->stages, "K and V tiles in flight")->group(group);
  command.add_option("--q-in-registers", kernel->q_in_registers, "Keep the query tile in registers: 0 or 1")
      ->group(group);
  command.add_option("--loop-bodies", kernel->loop_bodies, "1: masked and plain tiles share a loop body, 2: one each")
      ->group(group);
  command.add_option("--pack-gqa", kernel->pack_gqa, "Query heads of a KV head share a tile: 0 or 1")->group(group);
  command.add_option("--splits", kernel->splits, "Thread blocks that share the keys of a query tile")->group(group);
  command.add_option("--q-buffers", kernel->q_buffers, "sm90: query tiles in flight")->group(group);
  command.add_option("--take-turns", kernel->take_turns, "sm90: warpgroups feed the tensor cores in turn: 0 or 1")
      ->group(group);
  command
      .add_option("--affine-product", kernel->affine_product,
                  "sm90: the tensor cores add an affine score function: 0 or 1")
      ->group(group);
  command
      .add_option("--exact-max", kernel->exact_max,
                  "sm90: P is relative to the exact maximum of a row's scores: 0 or 1")
      ->group(group);
  command
      .add_option("--affine-reach", kernel->affine_reach,
                  "sm90: keys out of an affine score function's reach are left out: 0 or 1")
      ->group(group);
  command.add_option("--warps-n", kernel->warps_n, "sm80: 2: pairs of warps share query rows, 1: none do")
      ->group(group);
}

std::optional<KernelOverride> if_given(const KernelOverride& kernel) {
  return describe(kernel).empty() ? std::nullopt : std::optional(kernel);
}

std::string describe(const KernelOverride& kernel) {
  std::string text;
  const auto add = [&](const char* name, int value) {
    text += fmt::format("{}{}={}", text.empty() ? "" : " ", name, value);
  };
  const auto add_count = [&](const char* name, int value) {
    if (value != 0) {
      add(name, value);
    }
  };
  const auto add_switch = [&](const char* name, const std::optional<bool>& value) {
    if (value) {
      add(name, *value ? 1 : 0);
    }
  };
  for (const Named<Family>& family : kFamilies) {
    if (family.value == kernel.family && family.value != Family::automatic) {
      text = "family=" + family.name;
    }
  }
  add_count("tile_m", kernel.tile_m);
  add_count("tile_n", kernel.tile_n);
  add_count("warps", kernel.warps);
  add_count("stages", kernel.stages);
  add_switch("q_in_registers", kernel.q_in_registers);
  add_count("loop_bodies", kernel.loop_bodies);
  add_switch("pack_gqa", kernel.pack_gqa);
  add_count("splits", kernel.splits);
  add_count("q_buffers", kernel.q_buffers);
  add_switch("take_turns", kernel.take_turns);
  add_switch("affine_product", kernel.affine_product);
  add_switch("exact_max", kernel.exact_max);
  add_switch("affine_reach", kernel.affine_reach);
  add_count("warps_n", kernel.warps_n);
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
