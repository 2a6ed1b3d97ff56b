#include "expression/function_text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "support/text.hpp"

namespace fa::expression {
namespace {

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

}  // namespace

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
    case DType::e5m2:
    case DType::u4x2:
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

FunctionText::FunctionText(const Program& program, bool approximate, std::span<const NodeId> roots,
                           std::span<const NodeId> given, std::span<const NodeId> fixed, char name)
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

std::string FunctionText::indices(NodeId load) {
  std::string text;
  for (const NodeId index : graph_[load].inputs()) text += ", " + print(index, Mode::index);
  return text;
}

std::string FunctionText::steps_in_memory(NodeId load, const char* data, const char* strides) {
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

bool FunctionText::of_head(const Node& load) const {
  return load.operands > 0 && std::ranges::none_of(load.inputs(), [this](NodeId index) {
           return moves(index) || on_score_[static_cast<std::size_t>(index)];
         });
}

std::string FunctionText::load(NodeId id, bool of_head) {
  const Node& node = graph_[id];
  return fmt::format("fa::kernel::captured{}<{}>(params.captures[{}]{}{})", of_head ? "_of_head" : "",
                     element_name(program_.captures[static_cast<std::size_t>(node.index)].dtype), node.index,
                     of_head ? ", at.b, params.b" : "", indices(id));
}

std::optional<FunctionText::Affine> FunctionText::affine(NodeId added) {
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
    return Affine{print(a, Mode::value), fmt::format("static_cast<float>({})", print(integer, Mode::base)), found->key,
                  magnitude};
  }
  return std::nullopt;
}

std::optional<std::pair<NodeId, bool>> FunctionText::affine_number(NodeId id) const {
  bool magnitude = false;
  for (const Node* node = &graph_[id]; node->op == Op::to_real || node->op == Op::abs; node = &graph_[id]) {
    magnitude = magnitude || node->op == Op::abs;
    id = node->operand[0];
  }
  return graph_[id].type == Type::integer ? std::optional(std::pair(id, magnitude)) : std::nullopt;
}

std::string FunctionText::print(NodeId id, Mode mode) {
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

bool FunctionText::is_leaf(NodeId id) const {
  const Op op = graph_[id].op;
  return op == Op::constant || op == Op::input || std::ranges::find(given_, id) != given_.end() ||
         std::ranges::find(fixed_, id) != fixed_.end();
}

std::string FunctionText::printed(const Asked& asked) {
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

void FunctionText::keep(const Asked& asked, std::string text) {
  const int depth = deepest_ + 1;
  if (uses_[static_cast<std::size_t>(asked.first)] < 2 && depth <= kMostDepth) {
    texts_[asked] = {std::move(text), depth};
    return;
  }
  std::string name = fmt::format("{}{}", name_, names_++);
  const Type of = graph_[asked.first].type;
  const char* type = of == Type::real ? "float" : of == Type::integer ? "int" : "bool";
  support::append_format(statements_, "    const {} {} = {};\n", type, name, text);
  texts_[asked] = {std::move(name), 0};
}

std::string FunctionText::constant(const Node& node) {
  if (node.type == Type::real) return literal(node.value);
  if (node.type == Type::boolean) return node.index != 0 ? "true" : "false";
  if (node.index == std::numeric_limits<int>::min()) return "(-2147483647 - 1)";  // -2147483648 is no int
  return node.index < 0 ? fmt::format("({})", node.index) : std::to_string(node.index);
}

std::string FunctionText::input(Input which, Mode mode) {
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

bool FunctionText::moves(NodeId id) const {
  return on_query_[static_cast<std::size_t>(id)] || on_key_[static_cast<std::size_t>(id)];
}

std::optional<Steps> FunctionText::within_range(std::int64_t query, std::int64_t key) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (std::abs(query) > kMost || std::abs(key) > kMost) return std::nullopt;
  return Steps{query, key};
}

std::optional<Steps> FunctionText::find_steps(NodeId id) const {
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

std::optional<FunctionText::Split> FunctionText::split(NodeId id) {
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

std::string FunctionText::expression(NodeId id, Mode mode) {
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

std::optional<NodeId> FunctionText::argument_of_slope(const Node& node) const {
  if (node.type != Type::real || !graph_.is_real(node.operand[0], 1)) return std::nullopt;
  const Node& square = graph_[node.operand[1]];
  if (square.op != Op::multiply || square.operand[0] != square.operand[1]) return std::nullopt;
  const Node& root = graph_[square.operand[0]];
  return root.op == Op::tanh ? std::optional(root.operand[0]) : std::nullopt;
}

std::string FunctionText::product(const Node& node) {
  for (const auto& [a, b] :
       {std::pair(node.operand[0], node.operand[1]), std::pair(node.operand[1], node.operand[0])}) {
    if (graph_.is_constant(a) && graph_[b].op == Op::input) {
      return fmt::format("(raw * (at.scale * {}))", print(a, Mode::value));
    }
  }
  return {};
}

std::string FunctionText::integer_function(const Node& node, Mode mode) {
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

std::string FunctionText::real_function(const Node& node, Mode mode) {
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

}  // namespace fa::expression
