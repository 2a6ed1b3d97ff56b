#include "expression/emit.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <utility>

#include "expression/function_text.hpp"
#include "support/text.hpp"

namespace fa::expression {
namespace {

// Not every function reads both.
constexpr const char* kArguments = "[[maybe_unused]] const Params& params, [[maybe_unused]] const Place& at";
// Of a call that is a part of a whole.
constexpr const char* kPlacedArguments = "[[maybe_unused]] const Params& params, [[maybe_unused]] const Place& in_call";

/// A score function that ends in a product with a positive constant leaves that to the softmax.
std::pair<NodeId, double> without_factor(const Program& program) {
  const Node& root = program.graph[*program.score];
  if (root.op == Op::multiply && program.graph.is_constant(root.operand[0])) {
    const double factor = program.graph[root.operand[0]].value;
    if (factor > 0 && std::isfinite(factor)) return {root.operand[1], factor};
  }
  return {*program.score, 1};
}

/// The loads that `roots` need whose element moves with the key by as much at each step: reals, so that they are given
/// to a function as one list.
std::vector<NodeId> loads_along_keys(const Program& program, std::span<const NodeId> roots) {
  const std::vector<bool> on_key = program.dependent(Input::kv);
  std::vector<NodeId> loads;
  for (const NodeId id : program.needed(roots)) {
    const Node& node = program.graph[id];
    if (node.op != Op::load || node.type != Type::real || !on_key[static_cast<std::size_t>(id)]) continue;
    if (!FunctionText(program, false, node.inputs()).steps_in_memory(id, "", "").empty()) loads.push_back(id);
  }
  return loads;
}

/// The loads that `roots` need of reals that are the same for all rows and keys of a head: the first few.
std::vector<NodeId> loads_of_head(const Program& program, std::span<const NodeId> roots) {
  constexpr std::size_t kMost = 4;  // that a kernel may keep
  const FunctionText function(program, false, roots);
  std::vector<NodeId> loads;
  for (const NodeId id : program.needed(roots)) {
    const Node& node = program.graph[id];
    if (node.op != Op::load || node.type != Type::real || !function.of_head(node)) continue;
    if (loads.size() < kMost) loads.push_back(id);
  }
  return loads;
}

DType dtype_of(const Program& program, NodeId load) {
  return program.captures[static_cast<std::size_t>(program.graph[load].index)].dtype;
}

/// Whether loads are few enough for a kernel to keep a tile of them in registers.
bool fit_ahead(const Program& program, std::span<const NodeId> loads) {
  return loads.size() == 1 && size_of(dtype_of(program, loads[0])) == 2;
}

/// b of a score function score + b, b + score or score - b.
std::optional<NodeId> added_to_score(const Program& program) {
  const Node& root = program.graph[*program.score];
  const auto is_score = [&](NodeId id) {
    const Node& node = program.graph[id];
    return node.op == Op::input && static_cast<Input>(node.index) == Input::score;
  };
  if ((root.op == Op::add || root.op == Op::subtract) && is_score(root.operand[0])) return root.operand[1];
  if (root.op == Op::add && is_score(root.operand[1])) return root.operand[0];
  return std::nullopt;
}

class Emitter {
 public:
  Emitter(const Program& program, Part part, bool approximate, Positions positions)
      : program_(program),
        part_(part),
        approximate_(approximate),
        positions_(positions),
        arguments_(placed() ? kPlacedArguments : kArguments) {
    if (!program.score) return;
    std::vector<NodeId> roots{without_factor(program).first};
    if (part != Part::values) roots.push_back(program.score_derivative);
    if (part == Part::gradients) {
      for (const CapturedGradient& gradient : program.gradients) roots.push_back(gradient.derivative);
    }
    loads_ = loads_along_keys(program, roots);
    if (part == Part::values) fixed_ = loads_of_head(program, roots);
  }

  std::string run() {
    const std::size_t gradients = part_ == Part::gradients ? program_.gradients.size() : 0;
    line("  [[maybe_unused]] static constexpr bool kScore = {};\n", program_.score.has_value());
    line("  [[maybe_unused]] static constexpr bool kMask = {};\n", program_.mask.has_value());
    for (const auto& [name, input] : {std::pair("kMaskOnBatch", Input::b), std::pair("kMaskOnHead", Input::h)}) {
      const bool depends = program_.mask && program_.dependent(input)[static_cast<std::size_t>(*program_.mask)];
      line("  [[maybe_unused]] static constexpr bool {} = {};\n", name, depends);
    }
    line("  [[maybe_unused]] static constexpr float kFactor = {};  // of what score returns\n",
         literal(program_.score ? without_factor(program_).second : 1));
    line("  [[maybe_unused]] static constexpr int kGradients = {};\n", gradients);
    line("  [[maybe_unused]] static constexpr bool kScoreAlone = {};\n", program_.score && is_of_score_alone());
    if (!program_.score || part_ != Part::values) no_affine();
    if (!loads_.empty()) {
      line("  [[maybe_unused]] static constexpr int kLoads = {};  // `load`, of what functions are given\n",
           loads_.size());
      line("  [[maybe_unused]] static constexpr bool kLoadsAhead = {};\n", fit_ahead(program_, loads_));
      line("  using Loaded = {};  // the first\n", element_name(dtype_of(program_, loads_[0])));
    }
    if (!fixed_.empty())
      line("  [[maybe_unused]] static constexpr int kFixed = {};  // `fix`, likewise\n", fixed_.size());
    if (gradients > 0) gradient_constants();
    if (!program_.score && !program_.mask) return std::move(text_);
    line("\n  using Params = fa::kernel::VariantParams;\n  using Place = fa::kernel::Place;\n");
    loads();
    if (program_.score && part_ == Part::values) {
      score();
      affine();
    }
    if (program_.score && part_ == Part::slopes) slope();
    if (program_.score && part_ == Part::gradients) slopes();
    if (program_.mask) mask();
    if (gradients > 0) gradient_targets();
    return std::move(text_);
  }

 private:
  bool placed() const { return positions_ != Positions::of_call; }
  bool strided() const { return positions_ == Positions::of_whole_in_steps; }

  /// The statements of a function, for elements of the whole where the call is a part of one.
  std::string body(const FunctionText& function) const {
    if (!placed()) return function.statements();
    return fmt::format("    [[maybe_unused]] const Place at = fa::kernel::in_whole<{}>(params, in_call);\n{}",
                       strided(), function.statements());
  }

  /// Steps in memory, a braced list, as those from element to element of the call.
  std::string steps_of_call(const char* type, const std::string& steps) const {
    if (!strided()) return steps;
    return fmt::format("fa::kernel::steps_of_call<true>(params, fa::kernel::CapturedSteps<{}>{})", type, steps);
  }

  template <class... Values>
  void line(fmt::format_string<Values...> format, Values&&... values) {
    support::append_format(text_, format, std::forward<Values>(values)...);
  }

  template <class Get>
  void constants(const char* type, const char* name, const Get& get) {
    std::string values;
    for (const CapturedGradient& gradient : program_.gradients) {
      values += fmt::format("{}{}", values.empty() ? "" : ", ", get(gradient));
    }
    line("  [[maybe_unused]] static constexpr {} {}[] = {{{}}};\n", type, name, values);
  }

  /// Whether the score function is one of the score and of constants.
  bool is_of_score_alone() const {
    const std::array root{without_factor(program_).first};
    return std::ranges::all_of(program_.needed(root), [this](NodeId id) {
      const Node& node = program_.graph[id];
      return node.op != Op::load && (node.op != Op::input || static_cast<Input>(node.index) == Input::score);
    });
  }

  /// Where the index of each gradient comes from, so that sums over what it does not depend on are taken first.
  void gradient_constants() {
    const auto on = [this](Input input) {
      return [dependent = program_.dependent(input), this](const CapturedGradient& gradient) {
        return std::ranges::any_of(program_.graph[gradient.load].inputs(),
                                   [&](NodeId id) { return dependent[static_cast<std::size_t>(id)]; });
      };
    };
    const auto distinct = [this](const CapturedGradient& gradient) {
      const auto has = [&](Input input) {
        return std::ranges::any_of(program_.graph[gradient.load].inputs(), [&](NodeId id) {
          return program_.graph[id].op == Op::input && program_.graph[id].index == static_cast<int>(input);
        });
      };
      return has(Input::q) && has(Input::kv);
    };
    constants("int", "kGradientCapture", [this](const CapturedGradient& g) { return program_.graph[g.load].index; });
    constants("bool", "kGradientOnQuery", on(Input::q));
    constants("bool", "kGradientOnKey", on(Input::kv));
    constants("bool", "kGradientDistinct", distinct);
    constants("bool", "kGradientInSteps", [this](const CapturedGradient& g) { return !gradient_steps(g).empty(); });
  }

  void loads() {
    for (std::size_t i = 0; i < loads_.size(); ++i) {
      const Node& load = program_.graph[loads_[i]];
      const char* type = element_name(dtype_of(program_, loads_[i]));
      FunctionText function(program_, approximate_, load.inputs());
      const std::string value = function.steps_in_memory(
          loads_[i], fmt::format("static_cast<const {}*>(capture.data)", type).c_str(), "strides");
      line("\n  static FA_DEVICE fa::kernel::CapturedSteps<const {}> load({}, fa::kernel::Constant<{}>) {{\n{}", type,
           arguments_, i, body(function));
      line("    const fa::kernel::CaptureParams& capture = params.captures[{}];\n    return {};\n  }}\n", load.index,
           steps_of_call(fmt::format("const {}", type).c_str(), value));
    }
  }

  /// The parameter of a function for the values of loads, where there are any.
  std::string loaded() const { return loads_.empty() ? "" : fmt::format(", const float (&loaded)[{}]", loads_.size()); }

  void score() {
    score(loaded(), {});
    if (fixed_.empty()) return;
    const std::string fixed = fmt::format(", float (&fixed)[{}]", fixed_.size());
    FunctionText function(program_, approximate_, fixed_);
    std::string values;
    for (std::size_t i = 0; i < fixed_.size(); ++i) {
      support::append_format(values, "    fixed[{}] = {};\n", i, function.load(fixed_[i], false));
    }
    line("\n  static FA_DEVICE void fix({}{}) {{\n{}{}  }}\n", arguments_, fixed, body(function), values);
    score(fmt::format("{}, const float (&fixed)[{}]", loaded(), fixed_.size()), fixed_);
  }

  void score(const std::string& given, std::span<const NodeId> fixed) {
    const std::array root{without_factor(program_).first};
    FunctionText function(program_, approximate_, root, loads_, fixed);
    const std::string value = function.value(root[0]);
    line("\n  static FA_DEVICE float score({}, [[maybe_unused]] float raw{}) {{\n{}    return {};\n  }}\n", arguments_,
         given, body(function), value);
  }

  void affine() {
    const auto added = added_to_score(program_);
    if (!added || strided()) return no_affine();
    FunctionText function(program_, approximate_, std::array{*added});
    const auto found = function.affine(*added);
    if (!found) return no_affine();
    const bool subtracted = program_.graph[*program_.score].op == Op::subtract;
    line("  [[maybe_unused]] static constexpr bool kAffine = true;\n");
    line("  [[maybe_unused]] static constexpr bool kAffineAbs = {};\n", found->magnitude);
    line("  [[maybe_unused]] static constexpr int kAffineStep = {};\n", found->step);
    line(
        "\n  static FA_DEVICE fa::kernel::AffineRow affine({}) {{\n{}    return {{fa::kernel::affine_factor({}({}), "
        "params.inverse_scale), {}}};\n  }}\n",
        arguments_, body(function), subtracted ? "-" : "", found->factor, found->base);
  }

  void no_affine() { line("  [[maybe_unused]] static constexpr bool kAffine = false;\n"); }

  void slope() {
    const std::array roots{without_factor(program_).first, program_.score_derivative};
    FunctionText function(program_, approximate_, roots, loads_);
    const std::string value = function.value(roots[0]);
    const std::string by_score = function.value(roots[1]);
    line(
        "\n  static FA_DEVICE float slope({}, [[maybe_unused]] float raw,\n"
        "                               float& by_score{}) {{\n{}    by_score = {};\n    return {};\n  }}\n",
        arguments_, loaded(), body(function), by_score, value);
  }

  /// The gradients of captures are sums over many keys: a fast tanh would bias them where it is flat.
  bool captures_are_exact(std::span<const NodeId> derivatives) const {
    return approximate_ && std::ranges::any_of(program_.needed(derivatives),
                                               [this](NodeId id) { return program_.graph[id].op == Op::tanh; });
  }

  void slopes() {
    std::vector<NodeId> roots{without_factor(program_).first, program_.score_derivative};
    std::vector<NodeId> derivatives;
    for (const CapturedGradient& gradient : program_.gradients) derivatives.push_back(gradient.derivative);
    const bool exact = captures_are_exact(derivatives);
    if (!exact) roots.insert(roots.end(), derivatives.begin(), derivatives.end());
    FunctionText function(program_, approximate_, roots, loads_);
    FunctionText exactly(program_, false, derivatives, loads_, {}, 'd');
    FunctionText& of_captures = exact ? exactly : function;
    std::string last = fmt::format("    by_score = {};\n", function.value(roots[1]));
    std::string by_capture;
    for (std::size_t i = 0; i < derivatives.size(); ++i) {
      by_capture += fmt::format("    by_capture[{}] = {};\n", i, of_captures.value(derivatives[i]));
    }
    if (exact) last += exactly.statements();
    last += by_capture;
    last += fmt::format("    return {};\n", function.value(roots[0]));
    line(
        "\n  static FA_DEVICE float slopes({}, [[maybe_unused]] float raw,\n"
        "                                float& by_score, [[maybe_unused]] float (&by_capture)[{}]{}) {{\n{}{}  }}\n",
        arguments_, std::max<std::size_t>(program_.gradients.size(), 1), loaded(), body(function), last);
  }

  void mask() {
    const std::array root{*program_.mask};
    FunctionText function(program_, approximate_, root);
    const std::string value = function.value(root[0]);
    line("\n  static FA_DEVICE bool keep({}) {{\n{}    return {};\n  }}\n", arguments_, body(function), value);
    if (!program_.kept_keys || placed()) return;  // of packed batches and pages, which are no parts of a whole
    FunctionText bound(program_, approximate_, std::array{*program_.kept_keys});
    const std::string end = bound.value(*program_.kept_keys);
    line("  [[maybe_unused]] static constexpr bool kKeepsFirst = true;  // all keys before kept_keys\n");
    line("\n  static FA_DEVICE int kept_keys({}) {{\n{}    return {};\n  }}\n", arguments_, body(bound), end);
  }

  /// The gradient's elements for steps of query and key, where they are steps in memory.
  std::string gradient_steps(const CapturedGradient& gradient) const {
    FunctionText function(program_, approximate_, program_.graph[gradient.load].inputs());
    const std::string steps = function.steps_in_memory(gradient.load, "capture.gradient", "gradient_strides");
    if (steps.empty()) return {};
    return fmt::format("{}    return {};\n", body(function), steps_of_call("float", steps));
  }

  void gradient_targets() {
    for (std::size_t i = 0; i < program_.gradients.size(); ++i) {
      const Node& load = program_.graph[program_.gradients[i].load];
      FunctionText function(program_, approximate_, load.inputs());
      const std::string indices = function.indices(program_.gradients[i].load);
      line("\n  static FA_DEVICE float* gradient_target({}, fa::kernel::Constant<{}>) {{\n{}", arguments_, i,
           body(function));
      line("    const fa::kernel::CaptureParams& capture = params.captures[{}];\n", load.index);
      line("    return capture.gradient + fa::kernel::element_offset(capture.gradient_strides{});\n  }}\n", indices);
      const std::string steps = gradient_steps(program_.gradients[i]);
      if (steps.empty()) continue;
      line("\n  static FA_DEVICE fa::kernel::CapturedSteps<float> gradient_steps({}, fa::kernel::Constant<{}>) {{\n",
           arguments_, i);
      line("    const fa::kernel::CaptureParams& capture = params.captures[{}];\n{}  }}\n", load.index, steps);
    }
  }

  const Program& program_;
  const Part part_;
  const bool approximate_;
  const Positions positions_;
  const char* const arguments_;
  std::vector<NodeId> loads_;
  std::vector<NodeId> fixed_;
  std::string text_;
};

}  // namespace

bool loads_ahead(const Program& program) {
  if (!program.score) return false;
  const std::array root{without_factor(program).first};
  return fit_ahead(program, loads_along_keys(program, root));
}

bool is_affine(const Program& program) {
  if (!program.score) return false;
  const auto added = added_to_score(program);
  return added && FunctionText(program, false, std::array{*added}).affine(*added).has_value();
}

bool has_positions(const Program& program) {
  std::vector<NodeId> roots;
  if (program.score) roots.push_back(*program.score);
  if (program.mask) roots.push_back(*program.mask);
  return std::ranges::any_of(program.needed(roots), [&](NodeId id) {
    const Node& node = program.graph[id];
    return node.op == Op::input && static_cast<Input>(node.index) != Input::score;
  });
}

std::string emit(const Program& program, Part part, bool approximate, Positions positions) {
  return Emitter(program, part, approximate, positions).run();
}

}  // namespace fa::expression
