#include "variant_options.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>

#include "expression/parse.hpp"
#include "expression/program.hpp"
#include "support/text.hpp"

namespace fa::cli {
namespace {

constexpr std::array kCaptureDTypes{DType::f16, DType::bf16, DType::f32, DType::f64, DType::i32};

/// "name:dtype" or "name:dtype:grad".
Capture parse_capture(const std::string& text) {
  const auto refuse = [&]() -> Capture { support::throw_invalid("--capture", text, "NAME:DTYPE or NAME:DTYPE:grad"); };
  const std::size_t first = text.find(':');
  if (first == std::string::npos) return refuse();
  const std::size_t second = std::min(text.find(':', first + 1), text.size());
  Capture capture{text.substr(0, first)};
  const std::string name = text.substr(first + 1, second - first - 1);
  const auto* const dtype = std::ranges::find_if(kCaptureDTypes, [&](DType type) { return name == to_string(type); });
  if (dtype == kCaptureDTypes.end()) return refuse();
  capture.dtype = *dtype;
  if (second == text.size()) return capture;
  if (text.substr(second) != ":grad") return refuse();
  capture.requires_grad = true;
  return capture;
}

/// A capture that no function names: a name in a function that is misspelt is what is said then, with its column.
[[noreturn]] void refuse_unnamed(const std::string& name, const ScoreFunction& score, const MaskFunction& mask) {
  std::vector<expression::Capture> declared;
  for (const auto* captures : {&score.captures, &mask.captures}) {
    for (const Capture& capture : *captures) declared.push_back({capture.name, capture.dtype, -1, false});
  }
  declared.push_back({name, DType::f32, -1, false});
  expression::Program::parse(score.expression, mask.expression, declared);
  support::throw_invalid("--capture", name, "names that --score or --mask use");
}

/// Gives each capture to the functions that name it.
void declare(const std::vector<std::string>& captures, ScoreFunction* score, MaskFunction* mask) {
  std::vector<std::string> unnamed;
  for (const std::string& text : captures) {
    const Capture capture = parse_capture(text);
    const bool in_score = expression::mentions("score", score->expression, capture.name);
    const bool in_mask = expression::mentions("mask", mask->expression, capture.name);
    if (!in_score && !in_mask) unnamed.push_back(capture.name);
    if (in_score) score->captures.push_back(capture);
    if (in_mask) mask->captures.push_back(in_score ? Capture{capture.name, capture.dtype} : capture);
  }
  if (!unnamed.empty()) refuse_unnamed(unnamed.front(), *score, *mask);
}

}  // namespace

void add_variant_options(CLI::App& command, VariantOptions* options) {
  const std::string group = "Variants (docs/variants.md)";
  command.add_option("--score", options->score, "Score function: 'score + slope[h] * float(kv - q)'")->group(group);
  command.add_option("--mask", options->mask, "Mask function: 'doc[q] == doc[kv]'")->group(group);
  command
      .add_option("--capture", options->captures,
                  "What functions name, NAME:DTYPE or NAME:DTYPE:grad; may be given several times")
      ->group(group);
  command.add_option("--softcap", options->softcap, "Scores stay within plus and minus this")->group(group);
  command.add_flag("--alibi", options->alibi, "Less slope[h] times the distance")->group(group);
  command.add_option("--bias", options->bias, "Plus bias[...]: its axes, of b, h, q and k, as 'hqk'")->group(group);
  command.add_flag("--documents", options->documents, "Keep doc[q] == doc[kv]")->group(group);
  command.add_flag("--tree", options->tree, "A tree of drafts: rows see the context, and what bits of tree say")
      ->group(group);
  command.add_flag("--gradients", options->gradients, "Gradients of slope and bias too")->group(group);
  command.add_option("--window-left", options->window_left, "Keys kept before the diagonal (-1: all)")->group(group);
  command.add_option("--window-right", options->window_right, "Keys kept behind the diagonal (-1: all)")->group(group);
  command.add_option("--chunk", options->chunk, "Keep the keys of the same chunk of so many")->group(group);
  command.add_flag("--sink", options->sink, "A logit of each head takes part in every sum")->group(group);
}

bool wants_gradients(const VariantOptions& options) {
  const bool built_in = options.gradients && (options.alibi || !options.bias.empty());
  return built_in ||
         std::ranges::any_of(options.captures, [](const std::string& text) { return text.ends_with(":grad"); });
}

std::string text(const VariantOptions& options) {
  std::vector<std::string> parts;
  if (!options.score.empty()) parts.push_back(fmt::format("score={}", options.score));
  if (!options.mask.empty()) parts.push_back(fmt::format("mask={}", options.mask));
  if (options.softcap != 0) parts.push_back(fmt::format("softcap={:g}", options.softcap));
  if (options.alibi) parts.emplace_back("alibi");
  if (!options.bias.empty()) parts.push_back("bias=" + options.bias);
  if (options.documents) parts.emplace_back("documents");
  if (options.tree) parts.emplace_back("tree");
  if (options.gradients) parts.emplace_back("gradients");
  if (options.window_left >= 0) parts.push_back(fmt::format("window_left={}", options.window_left));
  if (options.window_right >= 0) parts.push_back(fmt::format("window_right={}", options.window_right));
  if (options.chunk != 0) parts.push_back(fmt::format("chunk={}", options.chunk));
  if (options.sink) parts.emplace_back("sink");
  return fmt::format("{}", fmt::join(parts, "+"));
}

void apply(const VariantOptions& options, AttentionConfig* config) {
  ScoreFunction score{options.score};
  MaskFunction mask{options.mask};
  declare(options.captures, &score, &mask);
  if (options.softcap != 0) score = functions::compose(score, functions::softcap(options.softcap));
  if (options.alibi) score = functions::compose(score, functions::alibi(options.gradients));
  if (!options.bias.empty()) {
    const DType dtype = config->dtype == DType::f64 ? DType::f32 : config->dtype;
    score = functions::compose(score, functions::bias(options.bias, dtype, options.gradients));
  }
  if (options.documents) mask = functions::both(mask, functions::documents());
  if (options.tree) mask = functions::both(mask, functions::tree());
  config->score = score;
  config->mask = mask;
  config->window_left = options.window_left;
  config->window_right = options.window_right;
  config->chunk = options.chunk;
  config->sink = options.sink;
}

}  // namespace fa::cli
