#ifndef FA_TESTS_DIFFERENTIAL_EXPRESSION_HPP_
#define FA_TESTS_DIFFERENTIAL_EXPRESSION_HPP_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

/// Score and mask functions as trees of the tester's own: printed for the library to parse, evaluated and
/// differentiated here without it.
namespace fa::differential {

enum class Kind : std::uint8_t { boolean, integer, real };

enum class Op : std::uint8_t {
  constant,
  score,
  b,
  h,
  q,
  kv,
  s_q,
  s_kv,
  load,
  negate,
  add,
  subtract,
  multiply,
  divide,
  modulo,
  floor_div,
  floor_mod,
  absolute,
  minimum,
  maximum,
  clamp,
  floor,
  ceil,
  exp,
  exp2,
  log,
  log2,
  sqrt,
  rsqrt,
  tanh,
  sigmoid,
  sin,
  cos,
  to_real,
  to_integer,
  less,
  less_equal,
  greater,
  greater_equal,
  equal,
  not_equal,
  logical_and,
  logical_or,
  logical_not,
  bit_and,
  bit_or,
  bit_xor,
  bit_not,
  shift_left,
  shift_right,
  bit,
  select,
};

struct Expr;
using ExprPtr = std::shared_ptr<const Expr>;

struct Expr {
  Op op = Op::constant;
  Kind kind = Kind::real;
  std::vector<ExprPtr> in = {};
  double value = 0;  ///< of a constant
  int capture = 0;   ///< of a load
};

ExprPtr real(double value);
ExprPtr integer(std::int64_t value);
ExprPtr leaf(Op op);
ExprPtr load(int capture, std::vector<ExprPtr> indices, bool integral = false);
/// Operands of mixed kinds are widened, as the language does.
ExprPtr make(Op op, std::vector<ExprPtr> in);

/// The text, with the parentheses that C needs.
std::string to_text(const ExprPtr& expr, const std::vector<std::string>& captures);

/// Calls visit for every node.
void visit(const ExprPtr& expr, const std::function<void(const Expr&)>& visitor);

/// What rounding does to the functions that a device computes, relative to their results.
struct FunctionErrors {
  double unit = 0x1p-24;         ///< a rounding of +, -, *
  double quotient = 0x1p-22;     ///< /, sqrt, rsqrt
  double exponential = 0x1p-21;  ///< exp2; log2, absolutely near 1
  double tanh = 0x1p-21;         ///< of its value; twice that, absolutely, of its derivative
  double tanh_floor = 0x1p-24;   ///< absolutely
  double angle = 0x1p-19;        ///< sin and cos, absolutely
};

struct Place {
  std::int64_t b = 0, h = 0, q = 0, kv = 0, s_q = 0, s_kv = 0;
};

/// A number and how far a device may be from it.
struct Approximate {
  double value = 0;
  double error = 0;
};

/// Evaluates one tree with a running analysis of rounding errors.
class Function {
 public:
  /// Reads a capture's element; `element` is what gradients are added to.
  struct Loaded {
    double value = 0;
    std::int64_t element = 0;
  };
  using Loader = std::function<Loaded(int capture, const std::int64_t* indices, std::size_t count)>;

  Function() = default;
  Function(const ExprPtr& expr, Loader loader, const FunctionErrors& errors);

  bool defined() const { return !nodes_.empty(); }
  Approximate real_at(const Place& place, Approximate score = {});
  bool boolean_at(const Place& place);

  /// Of the last real_at: the derivative by the score, and by each element that was read.
  Approximate by_score();
  struct ByLoad {
    int capture;
    std::int64_t element;
    Approximate derivative;
  };
  const std::vector<ByLoad>& by_loads() const { return by_loads_; }

 private:
  struct Node {
    Op op;
    Kind kind;
    std::vector<int> in;
    double constant;
    int capture;
    bool on_reals;  // of a comparison
  };
  struct Value {
    double real = 0, error = 0;
    std::int64_t integer = 0;
    bool unsure = false;  // of a boolean: within rounding of the other
    std::int64_t element = 0;
  };

  int flatten(const ExprPtr& expr);
  void run(const Place& place, Approximate score);
  struct Slope {
    double value = 0, error = 0;
  };

  static Value number(std::int64_t value);
  Value evaluate(const Node& node, const Place& place, Approximate score);
  Value evaluate_leaf(const Node& node, const Place& place, Approximate score);
  Value evaluate_real(const Node& node, const Value& a, const Value& b, const Value& c) const;
  Value evaluate_transcendental(Op op, const Value& a) const;
  /// Of a function of one number, where it is `y`.
  Slope slope_of(Op op, const Value& a, const Value& y) const;
  void back(std::size_t n, const Approximate& adjoint);
  void give(int node, const Approximate& adjoint, double slope, double slope_error);

  std::vector<Node> nodes_;
  std::vector<Value> values_;
  std::vector<Approximate> adjoints_;
  std::vector<ByLoad> by_loads_;
  Loader loader_;
  FunctionErrors errors_;
};

}  // namespace fa::differential

#endif  // FA_TESTS_DIFFERENTIAL_EXPRESSION_HPP_
