#include "differential/expression.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <utility>

namespace fa::differential {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool is_comparison(Op op) {
  return op >= Op::less && op <= Op::not_equal;
}

std::int64_t wrap(std::int64_t value) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(static_cast<std::uint64_t>(value)));
}

std::int64_t floored(std::int64_t a, std::int64_t b) {
  const std::int64_t quotient = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}

bool compare(Op op, double x, double y) {
  switch (op) {
    case Op::less:
      return x < y;
    case Op::less_equal:
      return x <= y;
    case Op::greater:
      return x > y;
    case Op::greater_equal:
      return x >= y;
    case Op::equal:
      return x == y;
    default:
      return x != y;
  }
}

std::int64_t of_integers(Op op, std::int64_t x, std::int64_t y, std::int64_t z) {
  switch (op) {
    case Op::negate:
      return wrap(-x);
    case Op::add:
      return wrap(x + y);
    case Op::subtract:
      return wrap(x - y);
    case Op::multiply:
      return wrap(x * y);
    case Op::divide:
      return y == 0 ? 0 : wrap(x / y);
    case Op::modulo:
      return y == 0 ? 0 : wrap(x % y);
    case Op::floor_div:
      return y == 0 ? 0 : wrap(floored(x, y));
    case Op::floor_mod:
      return y == 0 ? 0 : wrap(x - floored(x, y) * y);
    case Op::absolute:
      return wrap(std::abs(x));
    case Op::minimum:
      return std::min(x, y);
    case Op::maximum:
      return std::max(x, y);
    case Op::clamp:
      return std::min(std::max(x, y), z);
    case Op::bit_and:
      return x & y;
    case Op::bit_or:
      return x | y;
    case Op::bit_xor:
      return x ^ y;
    case Op::bit_not:
      return wrap(~x);
    case Op::shift_left:
      return wrap(static_cast<std::int64_t>(static_cast<std::uint64_t>(x) << (y & 31)));
    case Op::shift_right:
      return x >> (y & 31);
    case Op::bit:
      return x >> (y & 31) & 1;
    case Op::logical_and:
      return x != 0 && y != 0 ? 1 : 0;
    case Op::logical_or:
      return x != 0 || y != 0 ? 1 : 0;
    case Op::logical_not:
      return x == 0 ? 1 : 0;
    case Op::to_integer:
      return x;
    default:
      return 0;
  }
}

ExprPtr widened(const ExprPtr& expr, Kind kind) {
  if (expr->kind == kind) return expr;
  return std::make_shared<Expr>(Expr{kind == Kind::real ? Op::to_real : Op::to_integer, kind, {expr}});
}

struct Symbol {
  const char* text;
  int precedence;  // of C, 15 a primary
};

Symbol symbol(Op op) {
  switch (op) {
    case Op::multiply:
      return {"*", 12};
    case Op::divide:
      return {"/", 12};
    case Op::modulo:
      return {"%", 12};
    case Op::add:
      return {"+", 11};
    case Op::subtract:
      return {"-", 11};
    case Op::shift_left:
      return {"<<", 10};
    case Op::shift_right:
      return {">>", 10};
    case Op::less:
      return {"<", 9};
    case Op::less_equal:
      return {"<=", 9};
    case Op::greater:
      return {">", 9};
    case Op::greater_equal:
      return {">=", 9};
    case Op::equal:
      return {"==", 8};
    case Op::not_equal:
      return {"!=", 8};
    case Op::bit_and:
      return {"&", 7};
    case Op::bit_xor:
      return {"^", 6};
    case Op::bit_or:
      return {"|", 5};
    case Op::logical_and:
      return {"&&", 4};
    case Op::logical_or:
      return {"||", 3};
    default:
      return {nullptr, 15};
  }
}

const char* name_of(Op op) {
  switch (op) {
    case Op::score:
      return "score";
    case Op::b:
      return "b";
    case Op::h:
      return "h";
    case Op::q:
      return "q";
    case Op::kv:
      return "kv";
    case Op::s_q:
      return "s_q";
    case Op::s_kv:
      return "s_kv";
    case Op::floor_div:
      return "floor_div";
    case Op::floor_mod:
      return "floor_mod";
    case Op::absolute:
      return "abs";
    case Op::minimum:
      return "min";
    case Op::maximum:
      return "max";
    case Op::clamp:
      return "clamp";
    case Op::floor:
      return "floor";
    case Op::ceil:
      return "ceil";
    case Op::exp:
      return "exp";
    case Op::exp2:
      return "exp2";
    case Op::log:
      return "log";
    case Op::log2:
      return "log2";
    case Op::sqrt:
      return "sqrt";
    case Op::rsqrt:
      return "rsqrt";
    case Op::tanh:
      return "tanh";
    case Op::sigmoid:
      return "sigmoid";
    case Op::sin:
      return "sin";
    case Op::cos:
      return "cos";
    case Op::bit:
      return "bit";
    case Op::to_real:
      return "float";
    case Op::to_integer:
      return "int";
    default:
      return "?";
  }
}

std::string number_text(const Expr& e) {
  if (e.kind != Kind::real) return std::to_string(static_cast<std::int64_t>(e.value));
  if (std::isinf(e.value)) return e.value < 0 ? "-infinity" : "infinity";
  char text[40];
  std::snprintf(text, sizeof text, "%.9g", e.value);
  std::string result = text;
  if (result.find_first_of(".e") == std::string::npos) result += ".0";
  return result;
}

/// The text and its precedence.
std::pair<std::string, int> print(const Expr& e, const std::vector<std::string>& captures) {
  const auto operand = [&](std::size_t i, int at_least) {
    auto [text, precedence] = print(*e.in[i], captures);
    return precedence < at_least ? "(" + text + ")" : text;
  };
  if (e.op == Op::constant) return {number_text(e), e.value < 0 ? 13 : 15};
  if (e.op == Op::load) {
    std::string text = captures[static_cast<std::size_t>(e.capture)];
    for (std::size_t i = 0; i < e.in.size(); ++i) text += (i == 0 ? "[" : ", ") + operand(i, 0);
    return {e.in.empty() ? text : text + "]", 15};
  }
  if (e.op == Op::negate || e.op == Op::logical_not || e.op == Op::bit_not) {
    return {(e.op == Op::negate ? "-" : e.op == Op::bit_not ? "~" : "!") + operand(0, 14), 13};
  }
  if (e.op == Op::select) return {operand(0, 3) + " ? " + operand(1, 2) + " : " + operand(2, 2), 2};
  if (const Symbol s = symbol(e.op); s.text != nullptr) {
    return {operand(0, s.precedence) + " " + s.text + " " + operand(1, s.precedence + 1), s.precedence};
  }
  std::string text = name_of(e.op);
  for (std::size_t i = 0; i < e.in.size(); ++i) text += (i == 0 ? "(" : ", ") + operand(i, 0);
  return {e.in.empty() ? text : text + ")", 15};
}

}  // namespace

ExprPtr real(double value) {
  return std::make_shared<Expr>(Expr{.op = Op::constant, .kind = Kind::real, .value = value});
}

ExprPtr integer(std::int64_t value) {
  return std::make_shared<Expr>(Expr{.op = Op::constant, .kind = Kind::integer, .value = static_cast<double>(value)});
}

ExprPtr leaf(Op op) {
  return std::make_shared<Expr>(Expr{.op = op, .kind = op == Op::score ? Kind::real : Kind::integer});
}

ExprPtr load(int capture, std::vector<ExprPtr> indices, bool integral) {
  return std::make_shared<Expr>(Expr{
      .op = Op::load, .kind = integral ? Kind::integer : Kind::real, .in = std::move(indices), .capture = capture});
}

ExprPtr make(Op op, std::vector<ExprPtr> in) {
  const std::size_t first = op == Op::select ? 1 : 0;
  Kind kind = Kind::integer;
  for (std::size_t i = first; i < in.size(); ++i) kind = std::max(kind, in[i]->kind);
  if (op >= Op::floor && op <= Op::cos) kind = Kind::real;
  if (op == Op::to_real || op == Op::to_integer) return widened(in[0], op == Op::to_real ? Kind::real : Kind::integer);
  const bool logical = op >= Op::logical_and && op <= Op::logical_not;
  if (!logical) {
    for (std::size_t i = first; i < in.size(); ++i) {
      // The text leaves the conversion to the language where that does it.
      if (in[i]->kind != kind && op >= Op::floor && op <= Op::cos) in[i] = widened(in[i], kind);
    }
  }
  if (logical || is_comparison(op) || op == Op::bit) kind = Kind::boolean;
  return std::make_shared<Expr>(Expr{.op = op, .kind = kind, .in = std::move(in)});
}

std::string to_text(const ExprPtr& expr, const std::vector<std::string>& captures) {
  return expr == nullptr ? "" : print(*expr, captures).first;
}

void visit(const ExprPtr& expr, const std::function<void(const Expr&)>& visitor) {
  if (expr == nullptr) return;
  visitor(*expr);
  for (const ExprPtr& in : expr->in) visit(in, visitor);
}

Function::Function(const ExprPtr& expr, Loader loader, const FunctionErrors& errors)
    : loader_(std::move(loader)), errors_(errors) {
  if (expr != nullptr) flatten(expr);
  values_.resize(nodes_.size());
  adjoints_.resize(nodes_.size());
}

int Function::flatten(const ExprPtr& expr) {
  Node node{expr->op, expr->kind, {}, expr->value, expr->capture, false};
  for (const ExprPtr& in : expr->in) {
    node.in.push_back(flatten(in));
    if (in->kind == Kind::real) node.on_reals = true;
  }
  nodes_.push_back(std::move(node));
  return static_cast<int>(nodes_.size()) - 1;
}

void Function::run(const Place& place, Approximate score) {
  for (std::size_t n = 0; n < nodes_.size(); ++n) values_[n] = evaluate(nodes_[n], place, score);
}

Approximate Function::real_at(const Place& place, Approximate score) {
  run(place, score);
  const Value& value = values_.back();
  if (nodes_.back().kind != Kind::real) return {static_cast<double>(value.integer), 0};
  return {value.real, value.error};
}

bool Function::boolean_at(const Place& place) {
  run(place, {});
  return values_.back().integer != 0;
}

Function::Value Function::number(std::int64_t value) {
  Value result;
  result.integer = value;
  result.real = static_cast<double>(value);
  return result;
}

Function::Value Function::evaluate(const Node& node, const Place& place, Approximate score) {
  if (node.op == Op::load || node.in.empty()) return evaluate_leaf(node, place, score);
  static const Value kNothing;
  const auto operand = [&](std::size_t i) -> const Value& {
    return i < node.in.size() ? values_[static_cast<std::size_t>(node.in[i])] : kNothing;
  };
  const Value &a = operand(0), &b = operand(1), &c = operand(2);
  if (node.op == Op::select) {
    const Value &chosen = a.integer != 0 ? b : c, &other = a.integer != 0 ? c : b;
    Value value = chosen;
    if (a.unsure && node.kind == Kind::real) value.error += std::abs(b.real - c.real) + other.error;
    if (a.unsure) value.unsure = true;
    return value;
  }
  if (is_comparison(node.op)) {
    const double x = a.real, y = b.real;
    Value value = number(compare(node.op, x, y) ? 1 : 0);
    const double error = a.error + b.error;
    value.unsure = a.unsure || b.unsure || (node.on_reals && error > 0 && !(std::abs(x - y) > error));
    return value;
  }
  if (node.kind == Kind::real) return evaluate_real(node, a, b, c);
  const bool rounds = node.op == Op::to_integer && node.on_reals;
  Value value = number(rounds ? static_cast<std::int64_t>(std::trunc(a.real))
                              : of_integers(node.op, a.integer, b.integer, c.integer));
  value.unsure = a.unsure || b.unsure || c.unsure;
  if (rounds && std::trunc(a.real - a.error) != std::trunc(a.real + a.error)) value.unsure = true;
  return value;
}

/// Numbers, positions, the score, and captured elements.
Function::Value Function::evaluate_leaf(const Node& node, const Place& place, Approximate score) {
  switch (node.op) {
    case Op::constant: {
      Value value = number(node.kind == Kind::real ? 0 : static_cast<std::int64_t>(node.constant));
      value.real = node.constant;
      if (node.kind == Kind::real && std::isfinite(node.constant) && errors_.unit > 0x1p-50) {
        value.error = std::abs(static_cast<double>(static_cast<float>(node.constant)) - node.constant);
      }
      return value;
    }
    case Op::score: {
      Value value;
      value.real = score.value;
      value.error = score.error;
      return value;
    }
    case Op::b:
      return number(place.b);
    case Op::h:
      return number(place.h);
    case Op::q:
      return number(place.q);
    case Op::kv:
      return number(place.kv);
    case Op::s_q:
      return number(place.s_q);
    case Op::s_kv:
      return number(place.s_kv);
    case Op::load: {
      std::array<std::int64_t, 4> indices{};
      for (std::size_t i = 0; i < node.in.size(); ++i)
        indices[i] = values_[static_cast<std::size_t>(node.in[i])].integer;
      const Loaded loaded = loader_(node.capture, indices.data(), node.in.size());
      Value value = number(node.kind == Kind::integer ? static_cast<std::int64_t>(loaded.value) : 0);
      value.real = loaded.value;
      value.element = loaded.element;
      return value;
    }
    default:
      return {};
  }
}

Function::Value Function::evaluate_real(const Node& node, const Value& a, const Value& b, const Value& c) const {
  const FunctionErrors& e = errors_;
  Value value;
  double& y = value.real;
  double& error = value.error;
  const double x = a.real;
  switch (node.op) {
    case Op::to_real:
      y = static_cast<double>(a.integer);
      error = std::abs(y) > 0x1p24 ? e.unit * std::abs(y) : 0;
      break;
    case Op::negate:
      y = -x, error = a.error;
      break;
    case Op::add:
    case Op::subtract:
      y = node.op == Op::add ? x + b.real : x - b.real;
      error = a.error + b.error;
      if (std::isfinite(y)) error += 2 * e.unit * std::abs(y);
      break;
    case Op::multiply:
      y = x * b.real;
      error = std::abs(x) * b.error + std::abs(b.real) * a.error + a.error * b.error + 2 * e.unit * std::abs(y);
      break;
    case Op::divide: {
      y = x / b.real;
      const double least = std::abs(b.real) - b.error;
      error = least > 0 ? (a.error + std::abs(y) * b.error) / least + e.quotient * std::abs(y) : kInfinity;
      break;
    }
    case Op::absolute:
      y = std::abs(x), error = a.error;
      break;
    case Op::minimum:
      y = std::fmin(x, b.real), error = std::max(a.error, b.error);
      break;
    case Op::maximum:
      y = std::fmax(x, b.real), error = std::max(a.error, b.error);
      break;
    case Op::clamp:
      y = std::fmin(std::fmax(x, b.real), c.real);
      error = std::min(a.error, std::abs(c.real - b.real)) + b.error + c.error;
      break;
    case Op::floor:
    case Op::ceil: {
      const auto step = [&](double v) { return node.op == Op::floor ? std::floor(v) : std::ceil(v); };
      y = step(x);
      error = a.error > 0 ? step(x + a.error) - step(x - a.error) : 0;
      break;
    }
    default:
      value = evaluate_transcendental(node.op, a);
      break;
  }
  if (a.unsure || b.unsure || c.unsure) value.unsure = true;
  if (value.unsure) error = kInfinity;  // an integer that may be another: rare, and not worth a bound
  return value;
}

Function::Value Function::evaluate_transcendental(Op op, const Value& a) const {
  const FunctionErrors& e = errors_;
  Value value;
  double& y = value.real;
  double& error = value.error;
  const double x = a.real;
  switch (op) {
    case Op::exp:
    case Op::exp2: {
      const double rate = op == Op::exp ? 1 : std::log(2);
      y = op == Op::exp ? std::exp(x) : std::exp2(x);
      error = y * (std::expm1(rate * a.error) + e.exponential + 4 * e.unit * std::abs(x) * rate) + 0x1p-126;
      break;
    }
    case Op::log:
    case Op::log2: {
      const double rate = op == Op::log ? 1 : 1 / std::log(2);
      y = op == Op::log ? std::log(x) : std::log2(x);
      error = x > a.error ? -std::log1p(-a.error / x) * rate + e.exponential * (1 + std::abs(y)) : kInfinity;
      break;
    }
    case Op::sqrt:
      y = std::sqrt(x);
      error = x > a.error ? a.error / (std::sqrt(x - a.error) + y) + e.quotient * y : std::sqrt(x + a.error) + y;
      break;
    case Op::rsqrt:
      y = 1 / std::sqrt(x);
      error = x > a.error ? 1 / std::sqrt(x - a.error) - y + e.quotient * y : kInfinity;
      break;
    case Op::tanh:
      y = std::tanh(x);
      error = std::min(2.0, a.error * std::min(1.0, 1 - y * y + 2 * a.error) + e.tanh * std::abs(y) + e.tanh_floor);
      break;
    case Op::sigmoid:
      y = 1 / (1 + std::exp(-x));
      error = y * (std::expm1(std::min(a.error, 1.0)) + e.exponential + e.quotient + 4 * e.unit * (1 + std::abs(x))) +
              0x1p-126;
      break;
    case Op::sin:
    case Op::cos:
      y = op == Op::sin ? std::sin(x) : std::cos(x);
      error = std::min(2.0, a.error + e.angle + 4 * e.unit * std::abs(x));
      break;
    default:
      break;
  }
  return value;
}

Approximate Function::by_score() {
  by_loads_.clear();
  std::fill(adjoints_.begin(), adjoints_.end(), Approximate{});
  adjoints_.back() = {1, 0};
  Approximate score;
  for (std::size_t n = nodes_.size(); n-- > 0;) {
    const Approximate adjoint = adjoints_[n];
    if (adjoint.value == 0 && adjoint.error == 0) continue;
    if (nodes_[n].op == Op::score) {
      score.value += adjoint.value;
      score.error += adjoint.error + 2 * errors_.unit * std::abs(adjoint.value);
    } else if (nodes_[n].op == Op::load) {
      by_loads_.push_back({nodes_[n].capture, values_[n].element, adjoint});
    } else {
      back(n, adjoint);
    }
  }
  return score;
}

/// adjoint * slope, to an operand.
void Function::give(int node, const Approximate& adjoint, double slope, double slope_error) {
  if (nodes_[static_cast<std::size_t>(node)].kind != Kind::real) return;
  Approximate& to = adjoints_[static_cast<std::size_t>(node)];
  const double product = adjoint.value * slope;
  to.value += product;
  to.error += std::abs(adjoint.value) * slope_error + std::abs(slope) * adjoint.error + adjoint.error * slope_error +
              4 * errors_.unit * std::abs(product);
}

Function::Slope Function::slope_of(Op op, const Value& a, const Value& y) const {
  const FunctionErrors& e = errors_;
  switch (op) {
    case Op::exp:
      return {y.real, y.error};
    case Op::exp2:
      return {std::log(2) * y.real, y.error + 2 * e.unit * y.real};
    case Op::log:
    case Op::log2: {
      const double rate = op == Op::log ? 1 : 1 / std::log(2);
      const double least = std::max(a.real - a.error, 1e-300);
      return {rate / a.real, rate * (a.error / (a.real * least) + e.quotient / least)};
    }
    case Op::sqrt: {
      const double least = std::max(y.real - y.error, 1e-300);
      return {0.5 / y.real, 0.5 * (y.error / (y.real * least) + e.quotient / least)};
    }
    case Op::rsqrt: {
      const double most = y.real + y.error;
      return {-0.5 * y.real * y.real * y.real, 1.5 * most * most * y.error + 8 * e.unit * most * most * most};
    }
    case Op::tanh:  // of 1 - y^2, with a fast y
      return {1 - y.real * y.real, 2 * std::abs(y.real) * y.error + y.error * y.error + 4 * e.unit};
    case Op::sigmoid: {
      const double slope = y.real * (1 - y.real);
      return {slope, y.error * 2 + 8 * (e.exponential + e.quotient) * y.real};
    }
    case Op::sin:
    case Op::cos: {
      const double slope = op == Op::sin ? std::cos(a.real) : -std::sin(a.real);
      return {slope, std::min(2.0, a.error + e.angle + 4 * e.unit * std::abs(a.real))};
    }
    default:
      return {};
  }
}

void Function::back(std::size_t n, const Approximate& adjoint) {
  const Node& node = nodes_[n];
  const FunctionErrors& e = errors_;
  static const Value kNothing;
  const auto value = [&](std::size_t i) -> const Value& {
    return i < node.in.size() ? values_[static_cast<std::size_t>(node.in[i])] : kNothing;
  };
  const Value &a = value(0), &b = value(1), &c = value(2), &y = values_[n];
  const auto between = [&](const Value& left, const Value& right) {  // within rounding of a kink
    return std::abs(left.real - right.real) <= left.error + right.error ? 1.0 : 0.0;
  };
  switch (node.op) {
    case Op::negate:
      return give(node.in[0], adjoint, -1, 0);
    case Op::add:
      give(node.in[0], adjoint, 1, 0);
      return give(node.in[1], adjoint, 1, 0);
    case Op::subtract:
      give(node.in[0], adjoint, 1, 0);
      return give(node.in[1], adjoint, -1, 0);
    case Op::multiply:
      give(node.in[0], adjoint, b.real, b.error);
      return give(node.in[1], adjoint, a.real, a.error);
    case Op::divide: {
      const double least = std::max(std::abs(b.real) - b.error, 1e-300);
      const double inverse = 1 / b.real, inverse_error = b.error / (std::abs(b.real) * least) + e.quotient / least;
      give(node.in[0], adjoint, inverse, inverse_error);
      return give(node.in[1], adjoint, -y.real * inverse,
                  std::abs(y.real) * inverse_error + y.error * (std::abs(inverse) + inverse_error));
    }
    case Op::absolute:
      return give(node.in[0], adjoint, a.real < 0 ? -1 : a.real > 0 ? 1 : 0, 2 * between(a, kNothing));
    case Op::minimum:
    case Op::maximum: {
      const bool first = node.op == Op::minimum ? a.real <= b.real : b.real <= a.real;
      give(node.in[0], adjoint, first ? 1 : 0, between(a, b));
      return give(node.in[1], adjoint, first ? 0 : 1, between(a, b));
    }
    case Op::clamp: {
      const bool inside = a.real > b.real && a.real < c.real;
      const double unsure = std::max(between(a, b), between(a, c));
      give(node.in[0], adjoint, inside ? 1 : 0, unsure);
      give(node.in[1], adjoint, a.real <= b.real && b.real < c.real ? 1 : 0, unsure);
      return give(node.in[2], adjoint, !inside && a.real >= c.real ? 1 : 0, unsure);
    }
    case Op::exp:
    case Op::exp2:
    case Op::log:
    case Op::log2:
    case Op::sqrt:
    case Op::rsqrt:
    case Op::tanh:
    case Op::sigmoid:
    case Op::sin:
    case Op::cos: {
      const Slope slope = slope_of(node.op, a, y);
      return give(node.in[0], adjoint, slope.value, slope.error);
    }
    case Op::select: {
      const double unsure = a.unsure ? 1 : 0;
      give(node.in[1], adjoint, a.integer != 0 ? 1 : 0, unsure);
      return give(node.in[2], adjoint, a.integer != 0 ? 0 : 1, unsure);
    }
    default:
      return;  // steps, conversions, integers
  }
}

}  // namespace fa::differential
