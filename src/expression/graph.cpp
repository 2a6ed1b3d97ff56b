#include "expression/graph.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace fa::expression {
namespace {

bool is_comparison(Op op) {
  return op == Op::less || op == Op::less_equal || op == Op::equal || op == Op::not_equal;
}

Type result_type(Op op, Type operand) {
  if (is_comparison(op)) return Type::boolean;
  switch (op) {
    case Op::logical_not:
    case Op::logical_and:
    case Op::logical_or:
    case Op::to_boolean:
      return Type::boolean;
    case Op::to_integer:
      return Type::integer;
    case Op::to_real:
      return Type::real;
    default:
      return operand;
  }
}

std::int32_t wrap(std::int64_t value) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(static_cast<std::uint64_t>(value)));
}

/// As the GPU converts: NaN is 0, what is out of range becomes the nearest.
std::int32_t truncate(double x) {
  if (std::isnan(x)) return 0;
  constexpr double kLow = std::numeric_limits<std::int32_t>::min();
  constexpr double kHigh = std::numeric_limits<std::int32_t>::max();
  return static_cast<std::int32_t>(std::clamp(std::trunc(x), kLow, kHigh));
}

std::int32_t apply_integer(Op op, std::int64_t a, std::int64_t b) {
  switch (op) {
    case Op::negate:
      return wrap(-a);
    case Op::bit_not:
      return wrap(~a);
    case Op::add:
      return wrap(a + b);
    case Op::subtract:
      return wrap(a - b);
    case Op::multiply:
      return wrap(a * b);
    case Op::divide:
      return b == 0 ? 0 : wrap(a / b);
    case Op::modulo:
      return b == 0 ? 0 : wrap(a % b);
    case Op::floor_divide:
      return b == 0 ? 0 : wrap(floor_divide(a, b));
    case Op::floor_modulo:
      return b == 0 ? 0 : wrap(a - floor_divide(a, b) * b);
    case Op::shift_left:
      return wrap(static_cast<std::int64_t>(static_cast<std::uint64_t>(a) << (b & 31)));
    case Op::shift_right:
      return wrap(a >> (b & 31));
    case Op::bit_and:
      return wrap(a & b);
    case Op::bit_or:
      return wrap(a | b);
    case Op::bit_xor:
      return wrap(a ^ b);
    case Op::less:
      return a < b;
    case Op::less_equal:
      return a <= b;
    case Op::equal:
      return a == b;
    case Op::not_equal:
      return a != b;
    case Op::logical_not:
      return a == 0;
    case Op::logical_and:
      return a != 0 && b != 0;
    case Op::logical_or:
      return a != 0 || b != 0;
    case Op::to_boolean:
      return a != 0;
    case Op::to_integer:
      return wrap(a);
    case Op::abs:
      return wrap(a < 0 ? -a : a);
    case Op::min:
      return wrap(std::min(a, b));
    case Op::max:
      return wrap(std::max(a, b));
    default:
      return 0;
  }
}

/// Whether the product of two constants stays one: as a literal of a kernel it is a float.
bool folds(double a, double b) {
  constexpr double kGreatest = std::numeric_limits<float>::max();
  return std::abs(a * b) <= kGreatest || !std::isfinite(a) || !std::isfinite(b);
}

double apply_real(Op op, double a, double b) {
  switch (op) {
    case Op::negate:
      return -a;
    case Op::add:
      return a + b;
    case Op::subtract:
      return a - b;
    case Op::multiply:
      return a * b;
    case Op::divide:
      return a / b;
    case Op::abs:
      return std::abs(a);
    case Op::min:
      return std::fmin(a, b);
    case Op::max:
      return std::fmax(a, b);
    case Op::floor:
      return std::floor(a);
    case Op::ceil:
      return std::ceil(a);
    case Op::exp:
      return std::exp(a);
    case Op::exp2:
      return std::exp2(a);
    case Op::log:
      return std::log(a);
    case Op::log2:
      return std::log2(a);
    case Op::sqrt:
      return std::sqrt(a);
    case Op::rsqrt:
      return 1 / std::sqrt(a);
    case Op::tanh:
      return std::tanh(a);
    case Op::sin:
      return std::sin(a);
    case Op::cos:
      return std::cos(a);
    default:
      return 0;
  }
}

bool compare(Op op, double a, double b) {
  return op == Op::less ? a < b : op == Op::less_equal ? a <= b : op == Op::equal ? a == b : a != b;
}

}  // namespace

Value apply(Op op, Type operand_type, std::span<const Value> operands) {
  const Value a = operands[0];
  if (op == Op::select) return a.integer != 0 ? operands[1] : operands[2];
  const Value b = operands.size() > 1 ? operands[1] : Value{};
  if (operand_type == Type::real) {
    if (op == Op::to_integer) return {truncate(a.real), 0};
    if (op == Op::to_boolean) return {a.real != 0 ? 1 : 0, 0};
    if (is_comparison(op)) return {compare(op, a.real, b.real) ? 1 : 0, 0};
    return {0, op == Op::to_real ? a.real : apply_real(op, a.real, b.real)};
  }
  if (op == Op::to_real) return {0, static_cast<double>(a.integer)};
  return {apply_integer(op, a.integer, b.integer), 0};
}

bool Graph::is_real(NodeId id, double value) const {
  const Node& node = (*this)[id];
  return node.op == Op::constant && node.type == Type::real && node.value == value;
}

NodeId Graph::boolean(bool value) {
  return add({.op = Op::constant, .type = Type::boolean, .index = value ? 1 : 0});
}

NodeId Graph::integer(std::int32_t value) {
  return add({.op = Op::constant, .type = Type::integer, .index = value});
}

NodeId Graph::real(double value) {
  return add({.op = Op::constant, .type = Type::real, .value = value});
}

NodeId Graph::input(Input which) {
  return add(
      {.op = Op::input, .type = which == Input::score ? Type::real : Type::integer, .index = static_cast<int>(which)});
}

NodeId Graph::load(int capture, Type type, std::span<const NodeId> indices) {
  Node node{.op = Op::load, .type = type, .index = capture, .operands = static_cast<int>(indices.size())};
  std::ranges::copy(indices, node.operand.begin());
  return add(node);
}

NodeId Graph::convert(NodeId a, Type type) {
  const Type from = (*this)[a].type;
  if (from == type) return a;
  const Op op = type == Type::boolean ? Op::to_boolean : type == Type::integer ? Op::to_integer : Op::to_real;
  Node node{.op = op, .type = type, .operands = 1};
  node.operand[0] = a;
  return fold(node);
}

NodeId Graph::unary(Op op, NodeId a) {
  const Node& operand = (*this)[a];
  if ((op == Op::negate || op == Op::logical_not) && operand.op == op) return operand.operand[0];
  Node node{.op = op, .type = result_type(op, operand.type), .operands = 1};
  node.operand[0] = a;
  return fold(node);
}

NodeId Graph::binary(Op op, NodeId a, NodeId b) {
  const Type type = (*this)[a].type;
  if (type == Type::real && !is_comparison(op)) {
    bool done = false;
    const NodeId simple = simplify_real(op, a, b, &done);
    if (done) return simple;
  }
  if (op == Op::logical_and || op == Op::logical_or) {
    const bool absorbing = op == Op::logical_or;
    for (const auto& [constant, other] : {std::pair(a, b), std::pair(b, a)}) {
      if (is_constant(constant)) return ((*this)[constant].index != 0) == absorbing ? boolean(absorbing) : other;
    }
  }
  Node node{.op = op, .type = result_type(op, type), .operands = 2};
  node.operand[0] = a;
  node.operand[1] = b;
  return fold(node);
}

/// Identities of real arithmetic: products have their constant first, and one of it.
NodeId Graph::simplify_real(Op op, NodeId a, NodeId b, bool* done) {
  *done = true;
  if (is_constant(a) && is_constant(b)) {
    *done = false;
    return 0;
  }
  if (op == Op::add) {
    if (is_real(a, 0)) return b;
    if (is_real(b, 0)) return a;
    if ((*this)[b].op == Op::negate) return binary(Op::subtract, a, (*this)[b].operand[0]);
  }
  if (op == Op::subtract) {
    if (is_real(b, 0)) return a;
    if (is_real(a, 0)) return unary(Op::negate, b);
  }
  if (op == Op::divide) {
    if (is_real(a, 0)) return a;
    if (is_constant(b) && (*this)[b].value != 0) return binary(Op::multiply, real(1 / (*this)[b].value), a);
  }
  if (op == Op::multiply) {
    if (is_constant(b)) return binary(Op::multiply, b, a);
    if (is_real(a, 0) || is_real(b, 0)) return real(0);
    if (is_real(a, 1)) return b;
    if (is_real(a, -1)) return unary(Op::negate, b);
    const Node right = (*this)[b];
    if (right.op == Op::multiply && is_constant(right.operand[0])) {
      const double factor = (*this)[right.operand[0]].value;
      if (!is_constant(a)) return binary(Op::multiply, right.operand[0], binary(Op::multiply, a, right.operand[1]));
      if (folds((*this)[a].value, factor)) {
        return binary(Op::multiply, binary(Op::multiply, a, right.operand[0]), right.operand[1]);
      }
    }
    const Node left = (*this)[a];
    if (left.op == Op::multiply && is_constant(left.operand[0])) {
      return binary(Op::multiply, left.operand[0], binary(Op::multiply, left.operand[1], b));
    }
    if (left.op == Op::negate) return unary(Op::negate, binary(Op::multiply, left.operand[0], b));
    if (right.op == Op::negate) return unary(Op::negate, binary(Op::multiply, a, right.operand[0]));
  }
  *done = false;
  return 0;
}

NodeId Graph::select(NodeId condition, NodeId a, NodeId b) {
  if (a == b) return a;
  if (is_constant(condition)) return (*this)[condition].index != 0 ? a : b;
  Node node{.op = Op::select, .type = (*this)[a].type, .operands = 3};
  node.operand = {condition, a, b, 0};
  return add(node);
}

/// A constant when every operand is one.
NodeId Graph::fold(const Node& node) {
  std::array<Value, Node::kMaxOperands> values{};
  for (int i = 0; i < node.operands; ++i) {
    const Node& operand = (*this)[node.operand[static_cast<std::size_t>(i)]];
    if (operand.op != Op::constant) return add(node);
    values[static_cast<std::size_t>(i)] = {operand.index, operand.value};
  }
  const Value value =
      apply(node.op, (*this)[node.operand[0]].type, std::span(values).first(static_cast<std::size_t>(node.operands)));
  if (node.type == Type::real) return real(value.real);
  return node.type == Type::integer ? integer(value.integer) : boolean(value.integer != 0);
}

NodeId Graph::add(const Node& node) {
  const Key key{node.op, node.type, node.index, std::bit_cast<std::uint64_t>(node.value), node.operand};
  const auto [found, inserted] = known_.emplace(key, size());
  if (inserted) nodes_.push_back(node);
  return found->second;
}

}  // namespace fa::expression
