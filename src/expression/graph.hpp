#ifndef FA_SRC_EXPRESSION_GRAPH_HPP_
#define FA_SRC_EXPRESSION_GRAPH_HPP_

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <tuple>
#include <vector>

/// Score and mask functions: a small subset of C, read into a graph that is interpreted, differentiated and printed as
/// CUDA C++.
namespace fa::expression {

enum class Type : std::uint8_t { boolean, integer, real };

/// What a function is evaluated at. Indices are logical: of the batch, of the query head, of the query row, of the key.
enum class Input : std::uint8_t { score, b, h, q, kv, s_q, s_kv };

enum class Op : std::uint8_t {
  constant,
  input,
  load,  ///< of a captured tensor; the operands are its indices
  negate,
  logical_not,
  bit_not,
  add,
  subtract,
  multiply,
  divide,  ///< integers: towards zero; by zero: 0
  modulo,  ///< integers, of the sign of the dividend; by zero: 0
  floor_divide,
  floor_modulo,
  shift_left,
  shift_right,
  bit_and,
  bit_or,
  bit_xor,
  less,
  less_equal,
  equal,
  not_equal,
  logical_and,
  logical_or,
  select,
  to_boolean,
  to_integer,
  to_real,
  abs,
  min,
  max,
  floor,
  ceil,
  exp,
  exp2,
  log,
  log2,
  sqrt,
  rsqrt,
  tanh,
  sin,
  cos,
};

using NodeId = int;

struct Node {
  static constexpr int kMaxOperands = 4;

  Op op = Op::constant;
  Type type = Type::real;
  int index = 0;     ///< of an Input or a capture; the value of a boolean or integer constant
  double value = 0;  ///< of a real constant
  int operands = 0;
  std::array<NodeId, kMaxOperands> operand{};

  std::span<const NodeId> inputs() const { return {operand.data(), static_cast<std::size_t>(operands)}; }
};

/// Nodes, each once: equal operations on equal operands are one node, which is what makes a derivative share the work
/// of its function. Operands have smaller ids than what uses them.
class Graph {
 public:
  const Node& operator[](NodeId id) const { return nodes_[static_cast<std::size_t>(id)]; }
  int size() const { return static_cast<int>(nodes_.size()); }

  NodeId boolean(bool value);
  NodeId integer(std::int32_t value);
  NodeId real(double value);
  NodeId input(Input which);
  NodeId load(int capture, Type type, std::span<const NodeId> indices);

  /// An operation on operands of the types it needs, simplified: constants are folded, x + 0, 1 * x, ... are x.
  NodeId unary(Op op, NodeId a);
  NodeId binary(Op op, NodeId a, NodeId b);
  NodeId select(NodeId condition, NodeId a, NodeId b);
  NodeId convert(NodeId a, Type type);

  bool is_constant(NodeId id) const { return (*this)[id].op == Op::constant; }
  bool is_real(NodeId id, double value) const;

 private:
  using Key = std::tuple<Op, Type, int, std::uint64_t, std::array<NodeId, Node::kMaxOperands>>;

  NodeId add(const Node& node);
  NodeId fold(const Node& node);
  NodeId simplify_real(Op op, NodeId a, NodeId b, bool* done);

  std::vector<Node> nodes_;
  std::map<Key, NodeId> known_;
};

/// The value of a node: `integer` of booleans and integers, `real` of reals.
struct Value {
  std::int32_t integer = 0;
  double real = 0;
};

/// Rounds down, as floor_div of functions does.
constexpr std::int64_t floor_divide(std::int64_t a, std::int64_t b) {
  return a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
}

/// One operation other than input, load and constant, on the values of its operands. Integers wrap.
Value apply(Op op, Type operand_type, std::span<const Value> operands);

}  // namespace fa::expression

#endif  // FA_SRC_EXPRESSION_GRAPH_HPP_
