#include "expression/emit.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <utility>

namespace fa::expression {
namespace {

const char* element_name(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return "fa::kernel::f16";
    case DType::bf16:
      return "fa::kernel::bf16";
    case DType::i32:
      return "fa::int32_t";
    case DType::f32:
    case DType::f64:
    case DType::e4m3:
    case DType::i8:
      break;
  }
  return "fa::kernel::f32";
}

/// Where a derivative has constants beyond float, so has its value.
std::string literal(double value) {
  constexpr double kGreatest = std::numeric_limits<float>::max();
  if (std::isnan(value)) return "(fa::kernel::kInfinity - fa::kernel::kInfinity)";
  if (std::abs(value) > kGreatest) return value > 0 ? "fa::kernel::kInfinity" : "(-fa::kernel::kInfinity)";
  std::string text = fmt::format("{:.9g}", static_cast<double>(static_cast<float>(value)));
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return value < 0 || text[0] == '-' ? fmt::format("({}f)", text) : text + "f";
}

const char* infix(Op op) {
  switch (op) {
    case Op::add:
      return "+";
    case Op::subtract:
      return "-";
    case Op::multiply:
      return "*";
    case Op::shift_left:
      return "<<";
    case Op::shift_right:
      return ">>";
    case Op::bit_and:
      return "&";
    case Op::bit_or:
      return "|";
    case Op::bit_xor:
      return "^";
    case Op::less:
      return "<";
    case Op::less_equal:
      return "<=";
    case Op::equal:
      return "==";
    case Op::not_equal:
      return "!=";
    case Op::logical_and:
      return "&&";
    case Op::logical_or:
      return "||";
    default:
      return nullptr;
  }
}

/// What an integer adds as the steps of query and key go on: constants.
struct Steps {
  std::int64_t query = 0;
  std::int64_t key = 0;
};

/// One function: statements for what is used more than once, and expressions. `given` and `fixed`: loads that its
/// caller has the values of. `name`: what names begin with.
class Function {
 public:
  Function(const Program& program, bool approximate, std::span<const NodeId> roots, std::span<const NodeId> given = {},
           std::span<const NodeId> fixed = {}, char name = 't')
      : program_(program),
        graph_(program.graph),
        approximate_(approximate),
        given_(given),
        fixed_(fixed),
        name_(name),
        on_query_(program.dependent(Input::q)),
        on_key_(program.dependent(Input::kv)),
        on_score_(program.dependent(Input::score)),
        uses_(static_cast<std::size_t>(program.graph.size()), 0),
        steps_(static_cast<std::size_t>(program.graph.size())) {
    for (NodeId id = 0; id < graph_.size(); ++id) steps_[static_cast<std::size_t>(id)] = find_steps(id);
    for (const NodeId id : program.needed(roots)) {
      for (const NodeId input : graph_[id].inputs()) ++uses_[static_cast<std::size_t>(input)];
    }
    for (const NodeId root : roots) ++uses_[static_cast<std::size_t>(root)];
  }

  std::string value(NodeId id) { return print(id, Mode::value); }

  /// The indices of a load, each behind a comma.
  std::string indices(NodeId load) {
    std::string text;
    for (const NodeId index : graph_[load].inputs()) text += ", " + print(index, Mode::index);
    return text;
  }

  /// Where a load's element for the base of a Place is, and how far steps of query and key go from there, in terms of
  /// `capture`. Empty unless each index is affine in q and kv.
  std::string steps_in_memory(NodeId load, const char* data, const char* strides) {
    std::string query, key;
    std::string text = fmt::format("{{{} + fa::kernel::element_offset(capture.{}", data, strides);
    for (std::size_t axis = 0; axis < graph_[load].inputs().size(); ++axis) {
      const NodeId index = graph_[load].inputs()[axis];
      const auto found = steps(index);
      if (!found || on_score_[static_cast<std::size_t>(index)]) return {};
      for (const auto& [factor, sum] : {std::pair(found->query, &query), std::pair(found->key, &key)}) {
        if (factor == 0) continue;
        *sum += fmt::format("{}{}capture.{}[{}]", sum->empty() ? "" : " + ",
                            factor == 1 ? "" : fmt::format("({}) * ", factor), strides, axis);
      }
      text += ", " + print(index, Mode::start);
    }
    return fmt::format("{}), {}, {}}}", text, query.empty() ? "0" : query, key.empty() ? "0" : key);
  }

  /// Whether a load reads the same element for all rows and keys of a head: its indices are held to their axes before
  /// a launch, so that the element exists where the head does.
  bool of_head(const Node& load) const {
    return load.operands > 0 && std::ranges::none_of(load.inputs(), [this](NodeId index) {
             return moves(index) || on_score_[static_cast<std::size_t>(index)];
           });
  }

  /// A captured element.
  std::string load(NodeId id, bool of_head) {
    const Node& node = graph_[id];
    return fmt::format("fa::kernel::captured{}<{}>(params.captures[{}]{}{})", of_head ? "_of_head" : "",
                       element_name(program_.captures[static_cast<std::size_t>(node.index)].dtype), node.index,
                       of_head ? ", at.b, params.b" : "", indices(id));
  }

  const std::string& statements() const { return statements_; }

  /// Of `added`, what stays the same over the steps, times an integer that is affine in the key, or its magnitude.
  struct Affine {
    std::string factor;
    std::string base;
    std::int64_t step = 0;
    bool magnitude = false;
  };
  std::optional<Affine> affine(NodeId added) {
    const Node& node = graph_[added];
    if (node.op != Op::multiply || node.type != Type::real) return std::nullopt;
    for (const auto& [a, b] :
         {std::pair(node.operand[0], node.operand[1]), std::pair(node.operand[1], node.operand[0])}) {
      if (moves(a) || on_score_[static_cast<std::size_t>(a)]) continue;
      const auto number = affine_number(b);
      if (!number) continue;
      const auto [integer, magnitude] = *number;
      const auto found = steps(integer);
      if (!found || found->key == 0 || std::abs(found->key) > kMostAffineStep) continue;
      return Affine{print(a, Mode::value), fmt::format("static_cast<float>({})", print(integer, Mode::base)),
                    found->key, magnitude};
    }
    return std::nullopt;
  }

 private:
  /// The integer that a real is the value, or the magnitude of.
  std::optional<std::pair<NodeId, bool>> affine_number(NodeId id) const {
    bool magnitude = false;
    for (const Node* node = &graph_[id]; node->op == Op::to_real || node->op == Op::abs; node = &graph_[id]) {
      magnitude = magnitude || node->op == Op::abs;
      id = node->operand[0];
    }
    return graph_[id].type == Type::integer ? std::optional(std::pair(id, magnitude)) : std::nullopt;
  }

  static constexpr std::int64_t kMostAffineStep = 1024;  // steps of a tile are exact in float

  /// What q and kv stand for: the element's place; the same, kept inside of the tensors; the base of the step; the
  /// same, kept inside.
  enum class Mode : std::uint8_t { value, index, base, start };

  /// A node as it is asked for.
  using Asked = std::pair<NodeId, Mode>;

  /// What stands for a node, and how many operations deep that is.
  struct Text {
    std::string text;
    int depth = 0;
  };
  static constexpr int kMostDepth = 64;  // compilers have limits

  /// Operands are printed before what uses them, from a list: chains of operators are as long as texts allow.
  std::string print(NodeId id, Mode mode) {
    if (printing_) return printed({id, mode});
    std::vector<Asked> open{{id, mode}};
    while (!open.empty()) {
      const Asked asked = open.back();
      missing_.reset();
      deepest_ = 0;
      printing_ = true;
      std::string text = is_leaf(asked.first) ? std::string() : expression(asked.first, asked.second);
      printing_ = false;
      if (missing_) {
        open.push_back(*missing_);
        continue;
      }
      open.pop_back();
      if (!is_leaf(asked.first) && !texts_.contains(asked)) keep(asked, std::move(text));
    }
    return printed({id, mode});
  }

  /// Constants, inputs, and what the caller has the values of.
  bool is_leaf(NodeId id) const {
    const Op op = graph_[id].op;
    return op == Op::constant || op == Op::input || std::ranges::find(given_, id) != given_.end() ||
           std::ranges::find(fixed_, id) != fixed_.end();
  }

  /// The text of an operand; the first that has none is noted.
  std::string printed(const Asked& asked) {
    const Node& node = graph_[asked.first];
    if (node.op == Op::constant) return constant(node);
    if (node.op == Op::input) return input(static_cast<Input>(node.index), asked.second);
    if (const auto at = std::ranges::find(given_, asked.first); at != given_.end()) {
      return fmt::format("loaded[{}]", at - given_.begin());
    }
    if (const auto at = std::ranges::find(fixed_, asked.first); at != fixed_.end()) {
      return fmt::format("fixed[{}]", at - fixed_.begin());
    }
    const auto found = texts_.find(asked);
    if (found == texts_.end()) {
      if (!missing_) missing_ = asked;
      return {};
    }
    deepest_ = std::max(deepest_, found->second.depth);
    return found->second.text;
  }

  /// A name for what is used more than once, or is deep.
  void keep(const Asked& asked, std::string text) {
    const int depth = deepest_ + 1;
    if (uses_[static_cast<std::size_t>(asked.first)] < 2 && depth <= kMostDepth) {
      texts_[asked] = {std::move(text), depth};
      return;
    }
    std::string name = fmt::format("{}{}", name_, names_++);
    const Type of = graph_[asked.first].type;
    const char* type = of == Type::real ? "float" : of == Type::integer ? "int" : "bool";
    fmt::format_to(std::back_inserter(statements_), "    const {} {} = {};\n", type, name, text);
    texts_[asked] = {std::move(name), 0};
  }

  static std::string constant(const Node& node) {
    if (node.type == Type::real) return literal(node.value);
    if (node.type == Type::boolean) return node.index != 0 ? "true" : "false";
    if (node.index == std::numeric_limits<int>::min()) return "(-2147483647 - 1)";  // -2147483648 is no int
    return node.index < 0 ? fmt::format("({})", node.index) : std::to_string(node.index);
  }

  static std::string input(Input which, Mode mode) {
    const auto indexed = [mode](const char* name, const char* length) {
      if (mode == Mode::base) return fmt::format("at.{}", name);
      if (mode == Mode::start) return fmt::format("fa::kernel::inside(at.{}, at.{})", name, length);
      if (mode == Mode::value) return fmt::format("(at.{0} + at.{0}_step)", name);
      return fmt::format("fa::kernel::inside(at.{0} + at.{0}_step, at.{1})", name, length);
    };
    switch (which) {
      case Input::score:
        return "(raw * at.scale)";
      case Input::b:
        return "at.b";
      case Input::h:
        return "at.h";
      case Input::q:
        return indexed("q", "s_q");
      case Input::kv:
        return indexed("kv", "s_kv");
      case Input::s_q:
        return "at.s_q";
      case Input::s_kv:
        return "at.s_kv";
    }
    return {};
  }

  bool moves(NodeId id) const {
    return on_query_[static_cast<std::size_t>(id)] || on_key_[static_cast<std::size_t>(id)];
  }

  const std::optional<Steps>& steps(NodeId id) const { return steps_[static_cast<std::size_t>(id)]; }

  /// None where a step itself leaves 32 bits.
  static std::optional<Steps> within_range(std::int64_t query, std::int64_t key) {
    constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
    if (std::abs(query) > kMost || std::abs(key) > kMost) return std::nullopt;
    return Steps{query, key};
  }

  /// Steps of an integer that is affine in q and kv, from those of its operands.
  std::optional<Steps> find_steps(NodeId id) const {
    if (!moves(id)) return Steps{};
    const Node& node = graph_[id];
    if (node.op == Op::input) {
      return static_cast<Input>(node.index) == Input::q ? Steps{1, 0} : Steps{0, 1};
    }
    if (node.op == Op::negate) {
      const auto a = steps(node.operand[0]);
      return a ? std::optional(Steps{-a->query, -a->key}) : std::nullopt;
    }
    if (node.op == Op::add || node.op == Op::subtract) {
      const auto a = steps(node.operand[0]);
      const auto b = steps(node.operand[1]);
      if (!a || !b) return std::nullopt;
      const std::int64_t sign = node.op == Op::add ? 1 : -1;
      return within_range(a->query + sign * b->query, a->key + sign * b->key);
    }
    if (node.op == Op::multiply) {
      const bool first = graph_.is_constant(node.operand[0]);
      if (!first && !graph_.is_constant(node.operand[1])) return std::nullopt;
      const std::int64_t factor = graph_[node.operand[first ? 0 : 1]].index;
      const auto a = steps(node.operand[first ? 1 : 0]);
      return a ? within_range(factor * a->query, factor * a->key) : std::nullopt;
    }
    return std::nullopt;
  }

  /// A real made of an affine integer: the conversion of its base, and of its step, which is a constant.
  struct Split {
    std::string base;
    std::string step;
  };
  std::optional<Split> split(NodeId id) {
    const Node& node = graph_[id];
    if (node.op != Op::to_real || !moves(id) || graph_[node.operand[0]].type != Type::integer) return std::nullopt;
    const auto found = steps(node.operand[0]);
    if (!found) return std::nullopt;
    std::string step;
    for (const auto& [factor, name] : {std::pair(found->query, "at.q_step"), std::pair(found->key, "at.kv_step")}) {
      if (factor == 0) continue;
      step += step.empty() ? (factor < 0 ? "-" : "") : (factor < 0 ? " - " : " + ");
      if (factor != 1 && factor != -1) step += fmt::format("{} * ", std::abs(factor));
      step += name;
    }
    if (step.empty()) return std::nullopt;
    return Split{fmt::format("static_cast<float>({})", print(node.operand[0], Mode::base)),
                 fmt::format("static_cast<float>({})", step)};
  }

  std::string expression(NodeId id, Mode mode) {
    const Node& node = graph_[id];
    const auto operand = [&](int i) { return print(node.operand[static_cast<std::size_t>(i)], mode); };
    switch (node.op) {
      case Op::load:
        return load(id, of_head(node));
      case Op::select:
        return fmt::format("({} ? {} : {})", operand(0), operand(1), operand(2));
      case Op::to_real:
        if (const auto parts = split(id); parts && mode == Mode::value) {
          return fmt::format("({} + {})", parts->base, parts->step);
        }
        return fmt::format("static_cast<float>({})", operand(0));
      case Op::to_integer:
        return fmt::format("static_cast<int>({})", operand(0));
      case Op::to_boolean:
        return fmt::format("({} != 0)", operand(0));
      case Op::negate:
        return fmt::format("(-{})", operand(0));
      case Op::logical_not:
        return fmt::format("(!{})", operand(0));
      case Op::bit_not:
        return fmt::format("(~{})", operand(0));
      case Op::subtract:
        if (const auto x = argument_of_slope(node); x && !approximate_) {
          return fmt::format("fa::kernel::tanh_slope({})", print(*x, mode));
        }
        break;
      case Op::multiply:
        if (node.type == Type::real && mode == Mode::value) {
          if (std::string text = product(node); !text.empty()) return text;
        }
        break;
      default:
        break;
    }
    if (const char* sign = infix(node.op)) return fmt::format("({} {} {})", operand(0), sign, operand(1));
    return node.type == Type::integer ? integer_function(node, mode) : real_function(node, mode);
  }

  /// x of 1 - tanh(x)^2, which nothing is left of where the tanh that it is made from is 1.
  std::optional<NodeId> argument_of_slope(const Node& node) const {
    if (node.type != Type::real || !graph_.is_real(node.operand[0], 1)) return std::nullopt;
    const Node& square = graph_[node.operand[1]];
    if (square.op != Op::multiply || square.operand[0] != square.operand[1]) return std::nullopt;
    const Node& root = graph_[square.operand[0]];
    return root.op == Op::tanh ? std::optional(root.operand[0]) : std::nullopt;
  }

  /// A constant times the score is one factor of the raw score.
  std::string product(const Node& node) {
    for (const auto& [a, b] :
         {std::pair(node.operand[0], node.operand[1]), std::pair(node.operand[1], node.operand[0])}) {
      if (graph_.is_constant(a) && graph_[b].op == Op::input) {
        return fmt::format("(raw * (at.scale * {}))", print(a, Mode::value));
      }
    }
    return {};
  }

  std::string integer_function(const Node& node, Mode mode) {
    const std::string a = print(node.operand[0], mode);
    const std::string b = node.operands > 1 ? print(node.operand[1], mode) : "";
    const bool plain = node.operands > 1 && graph_.is_constant(node.operand[1]) && graph_[node.operand[1]].index > 0;
    switch (node.op) {
      case Op::abs:
        return fmt::format("fa::kernel::absolute({})", a);
      case Op::min:
        return fmt::format("fa::kernel::minimum({}, {})", a, b);
      case Op::max:
        return fmt::format("fa::kernel::maximum({}, {})", a, b);
      case Op::divide:
        return plain ? fmt::format("({} / {})", a, b) : fmt::format("fa::kernel::quotient({}, {})", a, b);
      case Op::modulo:
        return plain ? fmt::format("({} % {})", a, b) : fmt::format("fa::kernel::remainder({}, {})", a, b);
      case Op::floor_divide:
        return fmt::format("fa::kernel::floor_quotient({}, {})", a, b);
      case Op::floor_modulo:
        return fmt::format("fa::kernel::floor_remainder({}, {})", a, b);
      default:
        return {};
    }
  }

  std::string real_function(const Node& node, Mode mode) {
    const std::string a = print(node.operand[0], mode);
    const std::string b = node.operands > 1 ? print(node.operand[1], mode) : "";
    switch (node.op) {
      case Op::divide:
        return fmt::format("fa::kernel::divide({}, {})", a, b);
      case Op::abs:
        return fmt::format("fa::ptx::abs({})", a);
      case Op::min:
        return fmt::format("fa::ptx::min({}, {})", a, b);
      case Op::max:
        return fmt::format("fa::ptx::max({}, {})", a, b);
      case Op::floor:
        return fmt::format("fa::ptx::floor({})", a);
      case Op::ceil:
        return fmt::format("fa::ptx::ceil({})", a);
      case Op::exp:
        return fmt::format("fa::ptx::ex2({} * fa::kernel::kLog2e)", a);
      case Op::exp2:
        return fmt::format("fa::ptx::ex2({})", a);
      case Op::log:
        return fmt::format("(fa::ptx::lg2({}) * fa::kernel::kLn2)", a);
      case Op::log2:
        return fmt::format("fa::ptx::lg2({})", a);
      case Op::sqrt:
        return fmt::format("fa::ptx::sqrt({})", a);
      case Op::rsqrt:
        return fmt::format("fa::ptx::rsqrt({})", a);
      case Op::tanh:
        return fmt::format("fa::{}::tanh({})", approximate_ ? "ptx" : "kernel", a);
      case Op::sin:
        return fmt::format("fa::ptx::sin(fa::kernel::reduced_angle({}))", a);
      case Op::cos:
        return fmt::format("fa::ptx::cos(fa::kernel::reduced_angle({}))", a);
      default:
        return {};
    }
  }

  const Program& program_;
  const Graph& graph_;
  const bool approximate_;
  const std::span<const NodeId> given_;
  const std::span<const NodeId> fixed_;
  const char name_;
  const std::vector<bool> on_query_;
  const std::vector<bool> on_key_;
  const std::vector<bool> on_score_;
  std::vector<int> uses_;
  std::vector<std::optional<Steps>> steps_;
  std::map<Asked, Text> texts_;
  int names_ = 0;
  std::string statements_;
  // While a node is printed:
  bool printing_ = false;
  std::optional<Asked> missing_;  ///< the first operand without a text
  int deepest_ = 0;               ///< of the operands
};

// Not every function reads both.
constexpr const char* kArguments = "[[maybe_unused]] const Params& params, [[maybe_unused]] const Place& at";

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
    if (!Function(program, false, node.inputs()).steps_in_memory(id, "", "").empty()) loads.push_back(id);
  }
  return loads;
}

/// The loads that `roots` need of reals that are the same for all rows and keys of a head: the first few.
std::vector<NodeId> loads_of_head(const Program& program, std::span<const NodeId> roots) {
  constexpr std::size_t kMost = 4;  // that a kernel may keep
  const Function function(program, false, roots);
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
  Emitter(const Program& program, Part part, bool approximate)
      : program_(program), part_(part), approximate_(approximate) {
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
  template <class... Values>
  void line(fmt::format_string<Values...> format, Values&&... values) {
    fmt::format_to(std::back_inserter(text_), format, std::forward<Values>(values)...);
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
      Function function(program_, approximate_, load.inputs());
      const std::string value = function.steps_in_memory(
          loads_[i], fmt::format("static_cast<const {}*>(capture.data)", type).c_str(), "strides");
      line("\n  static FA_DEVICE fa::kernel::CapturedSteps<const {}> load({}, fa::kernel::Constant<{}>) {{\n{}", type,
           kArguments, i, function.statements());
      line("    const fa::kernel::CaptureParams& capture = params.captures[{}];\n    return {};\n  }}\n", load.index,
           value);
    }
  }

  /// The parameter of a function for the values of loads, where there are any.
  std::string loaded() const { return loads_.empty() ? "" : fmt::format(", const float (&loaded)[{}]", loads_.size()); }

  void score() {
    score(loaded(), {});
    if (fixed_.empty()) return;
    const std::string fixed = fmt::format(", float (&fixed)[{}]", fixed_.size());
    Function function(program_, approximate_, fixed_);
    std::string values;
    for (std::size_t i = 0; i < fixed_.size(); ++i) {
      fmt::format_to(std::back_inserter(values), "    fixed[{}] = {};\n", i, function.load(fixed_[i], false));
    }
    line("\n  static FA_DEVICE void fix({}{}) {{\n{}{}  }}\n", kArguments, fixed, function.statements(), values);
    score(fmt::format("{}, const float (&fixed)[{}]", loaded(), fixed_.size()), fixed_);
  }

  void score(const std::string& given, std::span<const NodeId> fixed) {
    const std::array root{without_factor(program_).first};
    Function function(program_, approximate_, root, loads_, fixed);
    const std::string value = function.value(root[0]);
    line("\n  static FA_DEVICE float score({}, [[maybe_unused]] float raw{}) {{\n{}    return {};\n  }}\n", kArguments,
         given, function.statements(), value);
  }

  void affine() {
    const auto added = added_to_score(program_);
    if (!added) return no_affine();
    Function function(program_, approximate_, std::array{*added});
    const auto found = function.affine(*added);
    if (!found) return no_affine();
    const bool subtracted = program_.graph[*program_.score].op == Op::subtract;
    line("  [[maybe_unused]] static constexpr bool kAffine = true;\n");
    line("  [[maybe_unused]] static constexpr bool kAffineAbs = {};\n", found->magnitude);
    line("  [[maybe_unused]] static constexpr int kAffineStep = {};\n", found->step);
    line(
        "\n  static FA_DEVICE fa::kernel::AffineRow affine({}) {{\n{}    return {{fa::kernel::affine_factor({}({}), "
        "params.inverse_scale), {}}};\n  }}\n",
        kArguments, function.statements(), subtracted ? "-" : "", found->factor, found->base);
  }

  void no_affine() { line("  [[maybe_unused]] static constexpr bool kAffine = false;\n"); }

  void slope() {
    const std::array roots{without_factor(program_).first, program_.score_derivative};
    Function function(program_, approximate_, roots, loads_);
    const std::string value = function.value(roots[0]);
    const std::string by_score = function.value(roots[1]);
    line(
        "\n  static FA_DEVICE float slope({}, [[maybe_unused]] float raw,\n"
        "                               float& by_score{}) {{\n{}    by_score = {};\n    return {};\n  }}\n",
        kArguments, loaded(), function.statements(), by_score, value);
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
    Function function(program_, approximate_, roots, loads_);
    Function exactly(program_, false, derivatives, loads_, {}, 'd');
    Function& of_captures = exact ? exactly : function;
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
        kArguments, std::max<std::size_t>(program_.gradients.size(), 1), loaded(), function.statements(), last);
  }

  void mask() {
    const std::array root{*program_.mask};
    Function function(program_, approximate_, root);
    const std::string value = function.value(root[0]);
    line("\n  static FA_DEVICE bool keep({}) {{\n{}    return {};\n  }}\n", kArguments, function.statements(), value);
    if (!program_.kept_keys) return;
    Function bound(program_, approximate_, std::array{*program_.kept_keys});
    const std::string end = bound.value(*program_.kept_keys);
    line("  [[maybe_unused]] static constexpr bool kKeepsFirst = true;  // all keys before kept_keys\n");
    line("\n  static FA_DEVICE int kept_keys({}) {{\n{}    return {};\n  }}\n", kArguments, bound.statements(), end);
  }

  /// The gradient's elements for steps of query and key, where they are steps in memory.
  std::string gradient_steps(const CapturedGradient& gradient) const {
    Function function(program_, approximate_, program_.graph[gradient.load].inputs());
    const std::string steps = function.steps_in_memory(gradient.load, "capture.gradient", "gradient_strides");
    return steps.empty() ? "" : fmt::format("{}    return {};\n", function.statements(), steps);
  }

  void gradient_targets() {
    for (std::size_t i = 0; i < program_.gradients.size(); ++i) {
      const Node& load = program_.graph[program_.gradients[i].load];
      Function function(program_, approximate_, load.inputs());
      const std::string indices = function.indices(program_.gradients[i].load);
      line("\n  static FA_DEVICE float* gradient_target({}, fa::kernel::Constant<{}>) {{\n{}", kArguments, i,
           function.statements());
      line("    const fa::kernel::CaptureParams& capture = params.captures[{}];\n", load.index);
      line("    return capture.gradient + fa::kernel::element_offset(capture.gradient_strides{});\n  }}\n", indices);
      const std::string steps = gradient_steps(program_.gradients[i]);
      if (steps.empty()) continue;
      line("\n  static FA_DEVICE fa::kernel::CapturedSteps<float> gradient_steps({}, fa::kernel::Constant<{}>) {{\n",
           kArguments, i);
      line("    const fa::kernel::CaptureParams& capture = params.captures[{}];\n{}  }}\n", load.index, steps);
    }
  }

  const Program& program_;
  const Part part_;
  const bool approximate_;
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
  return added && Function(program, false, std::array{*added}).affine(*added).has_value();
}

std::string emit(const Program& program, Part part, bool approximate) {
  return Emitter(program, part, approximate).run();
}

}  // namespace fa::expression
