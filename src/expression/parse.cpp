#include "expression/parse.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>

#include <fa/error.hpp>

namespace fa::expression {
namespace {

constexpr std::size_t kMaxText = 8192;
constexpr int kMaxDepth = 200;

struct NamedInput {
  std::string_view name;
  Input input;
};
constexpr NamedInput kInputs[] = {{"score", Input::score}, {"b", Input::b},     {"h", Input::h},      {"q", Input::q},
                                  {"kv", Input::kv},       {"s_q", Input::s_q}, {"s_kv", Input::s_kv}};

struct NamedFunction {
  std::string_view name;
  Op op;
};
constexpr NamedFunction kRealFunctions[] = {{"floor", Op::floor}, {"ceil", Op::ceil},   {"exp", Op::exp},
                                            {"exp2", Op::exp2},   {"log", Op::log},     {"log2", Op::log2},
                                            {"sqrt", Op::sqrt},   {"rsqrt", Op::rsqrt}, {"tanh", Op::tanh},
                                            {"sin", Op::sin},     {"cos", Op::cos}};
constexpr std::string_view kOtherFunctions[] = {"abs", "min",     "max",       "clamp",
                                                "bit", "sigmoid", "floor_div", "floor_mod"};
constexpr std::string_view kKeywords[] = {"float", "int", "bool", "true", "false", "infinity"};

struct BinaryOperator {
  std::string_view text;
  int precedence;  ///< the higher, the tighter
  Op op;
  bool swapped = false;  ///< a > b is b < a
};
constexpr BinaryOperator kOperators[] = {{"||", 1, Op::logical_or},
                                         {"&&", 2, Op::logical_and},
                                         {"|", 3, Op::bit_or},
                                         {"^", 4, Op::bit_xor},
                                         {"&", 5, Op::bit_and},
                                         {"==", 6, Op::equal},
                                         {"!=", 6, Op::not_equal},
                                         {"<", 7, Op::less},
                                         {"<=", 7, Op::less_equal},
                                         {">", 7, Op::less, true},
                                         {">=", 7, Op::less_equal, true},
                                         {"<<", 8, Op::shift_left},
                                         {">>", 8, Op::shift_right},
                                         {"+", 9, Op::add},
                                         {"-", 9, Op::subtract},
                                         {"*", 10, Op::multiply},
                                         {"/", 10, Op::divide},
                                         {"%", 10, Op::modulo}};

constexpr std::string_view kSymbols[] = {"||", "&&", "==", "!=", "<=", ">=", "<<", ">>", "|", "^", "&", "<", ">", "+",
                                         "-",  "*",  "/",  "%",  "!",  "~",  "?",  ":",  "(", ")", "[", "]", ","};

enum class Kind : std::uint8_t { name, integer, real, symbol, end };

struct Token {
  Kind kind = Kind::end;
  std::string_view text;
  std::size_t column = 1;
};

[[noreturn]] void throw_at(std::string_view argument, std::size_t column, std::string_view expected,
                           std::string_view found) {
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{}, column {}: expected {}, found {}", argument, column, expected, found),
              {{"argument", std::string(argument)},
               {"column", std::to_string(column)},
               {"value", std::string(found)},
               {"accepted", std::string(expected)}});
}

bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}
bool is_digit(char c) {
  return c >= '0' && c <= '9';
}
bool is_space(char c) {
  return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

/// The token that starts at `at`, which is no space.
Token next_token(std::string_view argument, std::string_view text, std::size_t at) {
  const std::string_view rest = text.substr(at);
  const auto token = [&](Kind kind, std::size_t length) { return Token{kind, rest.substr(0, length), at + 1}; };
  std::size_t length = 0;
  if (is_letter(rest[0])) {
    while (length < rest.size() && (is_letter(rest[length]) || is_digit(rest[length]))) ++length;
    return token(Kind::name, length);
  }
  if (is_digit(rest[0]) || (rest[0] == '.' && rest.size() > 1 && is_digit(rest[1]))) {
    Kind kind = Kind::integer;
    const auto digits = [&] {
      while (length < rest.size() && is_digit(rest[length])) ++length;
    };
    digits();
    if (length < rest.size() && rest[length] == '.') {
      kind = Kind::real;
      ++length;
      digits();
    }
    if (length < rest.size() && (rest[length] == 'e' || rest[length] == 'E')) {
      std::size_t exponent = length + 1;
      if (exponent < rest.size() && (rest[exponent] == '+' || rest[exponent] == '-')) ++exponent;
      if (exponent >= rest.size() || !is_digit(rest[exponent])) {
        throw_at(argument, at + exponent + 1, "the digits of an exponent", "something else");
      }
      kind = Kind::real;
      length = exponent;
      digits();
    }
    return token(kind, length);
  }
  for (const std::string_view symbol : kSymbols) {
    if (rest.starts_with(symbol)) return token(Kind::symbol, symbol.size());
  }
  throw_at(argument, at + 1, "an operator, a number or a name", fmt::format("'{}'", rest[0]));
}

std::vector<Token> tokens_of(std::string_view argument, std::string_view text) {
  if (text.size() > kMaxText) {
    throw_at(argument, kMaxText + 1, fmt::format("at most {} characters", kMaxText),
             fmt::format("{} characters", text.size()));
  }
  std::vector<Token> tokens;
  for (std::size_t at = 0; at < text.size();) {
    if (is_space(text[at])) {
      ++at;
      continue;
    }
    tokens.push_back(next_token(argument, text, at));
    at += tokens.back().text.size();
    // 1.5f is C; anything else that sticks to a number is a mistake.
    const bool number = tokens.back().kind == Kind::integer || tokens.back().kind == Kind::real;
    if (!number || at >= text.size()) continue;
    if (tokens.back().kind == Kind::real && text[at] == 'f') ++at;
    if (at < text.size() && (is_letter(text[at]) || text[at] == '.')) {
      throw_at(argument, at + 1, "an operator after a number", fmt::format("'{}'", text[at]));
    }
  }
  tokens.push_back({Kind::end, {}, text.size() + 1});
  return tokens;
}

class Parser {
 public:
  Parser(std::string_view argument, std::string_view text, Type result, std::vector<Capture>* captures, Graph* graph)
      : argument_(argument),
        tokens_(tokens_of(argument, text)),
        result_(result),
        captures_(*captures),
        graph_(*graph) {}

  NodeId parse() {
    const std::size_t column = peek().column;
    const NodeId root = conditional();
    if (peek().kind != Kind::end) fail(peek(), "an operator or the end");
    if (result_ == Type::boolean && type(root) == Type::real) {
      throw_at(argument_, column, "a condition: the mask keeps a score where it is true", "a number");
    }
    return graph_.convert(root, result_);
  }

 private:
  const Token& peek() const { return tokens_[at_]; }
  bool is(std::string_view symbol) const { return peek().kind == Kind::symbol && peek().text == symbol; }
  Token take() { return tokens_[peek().kind == Kind::end ? at_ : at_++]; }
  Type type(NodeId id) const { return graph_[id].type; }

  bool accept(std::string_view symbol) {
    if (!is(symbol)) return false;
    ++at_;
    return true;
  }

  [[noreturn]] void fail(const Token& token, std::string_view expected) const {
    throw_at(argument_, token.column, expected,
             token.kind == Kind::end ? std::string("the end") : fmt::format("'{}'", token.text));
  }

  void expect(std::string_view symbol) {
    if (!accept(symbol)) fail(peek(), fmt::format("'{}'", symbol));
  }

  /// The usual conversions: the wider of two types, at least an integer.
  static Type common(Type a, Type b) { return std::max({a, b, Type::integer}); }

  NodeId integral(NodeId id, const Token& where) {
    if (type(id) == Type::real) {
      throw_at(argument_, where.column, fmt::format("integers on both sides of '{}'", where.text), "a real number");
    }
    return graph_.convert(id, Type::integer);
  }

  NodeId conditional() {
    struct Depth {
      explicit Depth(int* depth) : value(depth) { ++*value; }
      ~Depth() { --*value; }
      int* value;
    } depth(&depth_);
    if (depth_ > kMaxDepth) fail(peek(), fmt::format("at most {} levels", kMaxDepth));
    const NodeId condition = operators();
    if (!accept("?")) return condition;
    const NodeId a = conditional();
    expect(":");
    const NodeId b = conditional();
    const Type wide = std::max(type(a), type(b));
    return graph_.select(graph_.convert(condition, Type::boolean), graph_.convert(a, wide), graph_.convert(b, wide));
  }

  const BinaryOperator* binary_operator() const {
    if (peek().kind != Kind::symbol) return nullptr;
    const auto* const found = std::ranges::find(kOperators, peek().text, &BinaryOperator::text);
    return found == std::end(kOperators) ? nullptr : found;
  }

  /// Operands that wait for the right side of their operator are in a list: a level of nesting is one call, however
  /// many precedences it has.
  NodeId operators() {
    struct Waiting {
      NodeId left;
      const BinaryOperator* binary;
      Token token;
    };
    std::vector<Waiting> waiting;
    NodeId value = prefix();
    while (true) {
      const BinaryOperator* next = binary_operator();
      for (; !waiting.empty() && (next == nullptr || waiting.back().binary->precedence >= next->precedence);
           waiting.pop_back()) {
        value = completed(*waiting.back().binary, waiting.back().token, waiting.back().left, value);
      }
      if (next == nullptr) return value;
      waiting.push_back({value, next, take()});
      value = prefix();
    }
  }

  static constexpr double kGreatest = std::numeric_limits<float>::max();

  /// Holds a constant, which kernels have as a literal of float, to what float has.
  NodeId representable(NodeId id, const Token& where) const {
    const Node& node = graph_[id];
    if (node.op == Op::constant && std::isfinite(node.value) && std::abs(node.value) > kGreatest) {
      throw_at(argument_, where.column,
               fmt::format("constants of magnitude {:.9g} and less, which float has", kGreatest),
               fmt::format("{:g}", node.value));
    }
    return id;
  }

  /// Kernels divide by multiplying with the reciprocal.
  void check_divisor(NodeId id, const Token& where) const {
    const Node& node = graph_[id];
    if (node.op == Op::constant && node.value != 0 && std::abs(1 / node.value) > kGreatest) {
      throw_at(argument_, where.column,
               fmt::format("a divisor of magnitude {:.9g} and more, whose reciprocal float has", 1 / kGreatest),
               fmt::format("{:g}", node.value));
    }
  }

  /// An operator with both of its sides.
  NodeId completed(const BinaryOperator& binary, const Token& token, NodeId left, NodeId right) {
    if (binary.op == Op::divide) check_divisor(right, token);
    return representable(combine(binary, token, left, right), token);
  }

  NodeId combine(const BinaryOperator& binary, const Token& token, NodeId a, NodeId b) {
    if (binary.swapped) std::swap(a, b);
    switch (binary.op) {
      case Op::logical_and:
      case Op::logical_or:
        return graph_.binary(binary.op, graph_.convert(a, Type::boolean), graph_.convert(b, Type::boolean));
      case Op::bit_and:
      case Op::bit_or:
      case Op::bit_xor:
      case Op::shift_left:
      case Op::shift_right:
      case Op::modulo:
        return graph_.binary(binary.op, integral(a, token), integral(b, token));
      default:
        return arithmetic(binary.op, a, b);
    }
  }

  NodeId arithmetic(Op op, NodeId a, NodeId b) {
    const Type wide = common(type(a), type(b));
    return graph_.binary(op, graph_.convert(a, wide), graph_.convert(b, wide));
  }

  NodeId prefix() {
    std::vector<Token> signs;
    while (is("-") || is("+") || is("!") || is("~")) signs.push_back(take());
    NodeId value = primary();
    for (; !signs.empty(); signs.pop_back()) {
      const Token& sign = signs.back();
      if (sign.text == "!") {
        value = graph_.unary(Op::logical_not, graph_.convert(value, Type::boolean));
        continue;
      }
      if (sign.text == "~") {
        value = graph_.unary(Op::bit_not, integral(value, sign));
        continue;
      }
      value = graph_.convert(value, common(type(value), Type::integer));
      if (sign.text == "-") value = graph_.unary(Op::negate, value);
    }
    return value;
  }

  NodeId primary() {
    const Token token = take();
    switch (token.kind) {
      case Kind::integer:
        return integer_literal(token);
      case Kind::real:
        return real_literal(token);
      case Kind::name:
        return named(token);
      case Kind::symbol:
        if (token.text == "(") {
          const NodeId inner = conditional();
          expect(")");
          return inner;
        }
        break;
      case Kind::end:
        break;
    }
    fail(token, "a number, a name or '('");
  }

  NodeId integer_literal(const Token& token) {
    std::int32_t value = 0;
    const auto [end, problem] = std::from_chars(token.text.data(), token.text.data() + token.text.size(), value);
    if (problem != std::errc()) fail(token, "an integer of 32 bits");
    return graph_.integer(value);
  }

  NodeId real_literal(const Token& token) {
    double value = 0;
    const auto [end, problem] = std::from_chars(token.text.data(), token.text.data() + token.text.size(), value);
    if (problem != std::errc() || std::abs(value) > kGreatest) {
      fail(token, "a number within the range of float");
    }
    return graph_.real(value);
  }

  NodeId named(const Token& token) {
    if (token.text == "true" || token.text == "false") return graph_.boolean(token.text == "true");
    if (token.text == "infinity") return graph_.real(std::numeric_limits<double>::infinity());
    if (const auto* found = std::ranges::find(kInputs, token.text, &NamedInput::name); found != std::end(kInputs)) {
      return input(token, found->input);
    }
    const auto capture = std::ranges::find(captures_, token.text, &Capture::name);
    if (capture != captures_.end()) return captured(token, *capture);
    if (is("(")) return representable(call(token), token);
    std::string known;
    for (const NamedInput& in : kInputs) known += fmt::format("{}, ", in.name);
    for (const Capture& c : captures_) known += fmt::format("{}, ", c.name);
    fail(token, known + "a function or a declared capture");
  }

  NodeId input(const Token& token, Input which) const {
    if (which == Input::score && result_ == Type::boolean)
      fail(token, "an index or a capture: a mask does not see the score");
    return graph_.input(which);
  }

  /// name, name[i], name[i, j] or name[i][j].
  NodeId captured(const Token& token, Capture& capture) {
    std::array<NodeId, Node::kMaxOperands> indices{};
    int rank = 0;
    const std::size_t first_column = peek().column;
    while (accept("[")) {
      do {
        if (rank == Node::kMaxOperands) fail(peek(), fmt::format("at most {} indices", Node::kMaxOperands));
        const Token where = peek();
        const NodeId index = conditional();
        if (type(index) == Type::real) throw_at(argument_, where.column, "an integer index", "a real number");
        indices[static_cast<std::size_t>(rank++)] = graph_.convert(index, Type::integer);
      } while (accept(","));
      expect("]");
    }
    if (capture.rank < 0) capture.rank = rank;
    if (capture.rank != rank) {
      throw_at(argument_, first_column, fmt::format("{} indices of '{}', as before", capture.rank, token.text),
               std::to_string(rank));
    }
    const Type element = capture.dtype == DType::i32 ? Type::integer : Type::real;
    const auto index = static_cast<int>(&capture - captures_.data());
    return graph_.load(index, element, std::span(indices).first(static_cast<std::size_t>(rank)));
  }

  NodeId call(const Token& token) {
    const auto* const real_function = std::ranges::find(kRealFunctions, token.text, &NamedFunction::name);
    const std::string_view name = token.text;
    if (real_function != std::end(kRealFunctions)) {
      return graph_.unary(real_function->op, graph_.convert(arguments(token, 1)[0], Type::real));
    }
    if (name == "float") return graph_.convert(arguments(token, 1)[0], Type::real);
    if (name == "int") return graph_.convert(arguments(token, 1)[0], Type::integer);
    if (name == "bool") return graph_.convert(arguments(token, 1)[0], Type::boolean);
    if (name == "abs") {
      const NodeId a = arguments(token, 1)[0];
      return graph_.unary(Op::abs, graph_.convert(a, common(type(a), Type::integer)));
    }
    if (name == "sigmoid") {
      const NodeId a = graph_.convert(arguments(token, 1)[0], Type::real);
      const NodeId power = graph_.unary(Op::exp, graph_.unary(Op::negate, a));
      return graph_.binary(Op::divide, graph_.real(1), graph_.binary(Op::add, graph_.real(1), power));
    }
    if (name == "min" || name == "max") {
      const auto given = arguments(token, 2);
      return arithmetic(name == "min" ? Op::min : Op::max, given[0], given[1]);
    }
    if (name == "clamp") {
      const auto given = arguments(token, 3);
      return arithmetic(Op::min, arithmetic(Op::max, given[0], given[1]), given[2]);
    }
    if (name == "floor_div" || name == "floor_mod") {
      const auto given = arguments(token, 2);
      return graph_.binary(name == "floor_div" ? Op::floor_divide : Op::floor_modulo, integral(given[0], token),
                           integral(given[1], token));
    }
    if (name == "bit") {
      const auto given = arguments(token, 2);
      return bit(integral(given[0], token), integral(given[1], token));
    }
    std::string known;
    for (const NamedFunction& function : kRealFunctions) known += fmt::format("{}, ", function.name);
    for (const std::string_view other : kOtherFunctions) known += fmt::format("{}, ", other);
    fail(token, known + "float, int or bool");
  }

  /// Whether bit i % 32 of `word` is set, counted from the lowest; of a negative i likewise, as two's complement has
  /// it.
  NodeId bit(NodeId word, NodeId i) {
    const NodeId place = graph_.binary(Op::bit_and, i, graph_.integer(31));
    const NodeId shifted = graph_.binary(Op::shift_right, word, place);
    return graph_.convert(graph_.binary(Op::bit_and, shifted, graph_.integer(1)), Type::boolean);
  }

  std::vector<NodeId> arguments(const Token& function, std::size_t count) {
    expect("(");
    std::vector<NodeId> given;
    do {
      given.push_back(conditional());
      if (given.size() == count) break;
    } while (accept(","));
    if (given.size() != count) {
      fail(peek(), fmt::format("',': {} takes {} arguments", function.text, count));
    }
    expect(")");
    return given;
  }

  std::string_view argument_;
  std::vector<Token> tokens_;
  std::size_t at_ = 0;
  int depth_ = 0;
  const Type result_;
  std::vector<Capture>& captures_;
  Graph& graph_;
};

}  // namespace

NodeId parse(std::string_view argument, std::string_view text, Type result, std::vector<Capture>* captures,
             Graph* graph) {
  return Parser(argument, text, result, captures, graph).parse();
}

std::string without_spaces(std::string_view argument, std::string_view text) {
  std::string result;
  for (const Token& token : tokens_of(argument, text)) result += token.text;
  return result;
}

std::string with_names(std::string_view argument, std::string_view text,
                       std::span<const std::pair<std::string_view, std::string_view>> names) {
  std::string result;
  std::size_t copied = 0;
  for (const Token& token : tokens_of(argument, text)) {
    const auto found = std::ranges::find_if(names, [&](const auto& name) { return name.first == token.text; });
    if (token.kind != Kind::name || found == names.end()) continue;
    result += text.substr(copied, token.column - 1 - copied);
    result += found->second;
    copied = token.column - 1 + token.text.size();
  }
  return result + std::string(text.substr(copied));
}

std::string with_score(std::string_view argument, std::string_view text, std::string_view score) {
  const std::string in_parentheses = fmt::format("({})", score);
  const std::pair<std::string_view, std::string_view> names[] = {{"score", in_parentheses}};
  return with_names(argument, text, names);
}

bool mentions(std::string_view argument, std::string_view text, std::string_view name) {
  return std::ranges::any_of(tokens_of(argument, text),
                             [&](const Token& token) { return token.kind == Kind::name && token.text == name; });
}

bool is_free_name(std::string_view name) {
  if (name.empty() || name.size() > 64 || !is_letter(name[0])) return false;
  if (!std::ranges::all_of(name, [](char c) { return is_letter(c) || is_digit(c); })) return false;
  const auto is_name = [&](const auto& entry) { return entry.name == name; };
  return std::ranges::none_of(kInputs, is_name) && std::ranges::none_of(kRealFunctions, is_name) &&
         std::ranges::find(kOtherFunctions, name) == std::end(kOtherFunctions) &&
         std::ranges::find(kKeywords, name) == std::end(kKeywords);
}

}  // namespace fa::expression
