#include "expression/kept_keys.hpp"

#include <algorithm>
#include <limits>
#include <vector>

namespace fa::expression {
namespace {

class KeptKeys {
 public:
  KeptKeys(Graph* graph, NodeId root) : graph_(*graph), root_(root) {}

  /// Operands come before what uses them, so that no chain is too long for a walk along the nodes.
  std::optional<NodeId> run() {
    const auto count = static_cast<std::size_t>(root_) + 1;
    moves_.resize(count);
    bounds_.resize(count);
    for (NodeId id = 0; id <= root_; ++id) {
      const Node node = graph_[id];  // a copy: the graph grows
      moves_[static_cast<std::size_t>(id)] = moves(node);
      if (node.type == Type::boolean) bounds_[static_cast<std::size_t>(id)] = bounds(node);
    }
    return bounds_[static_cast<std::size_t>(root_)].to_true;
  }

 private:
  static constexpr int kEveryKey = std::numeric_limits<std::int32_t>::max();

  /// Before these keys a condition is known to be true, or to be false.
  struct Bounds {
    std::optional<NodeId> to_true;
    std::optional<NodeId> to_false;
  };

  const Bounds& of(NodeId id) const { return bounds_[static_cast<std::size_t>(id)]; }

  /// Whether a node differs between the scores of a batch entry.
  bool moves(const Node& node) const {
    if (node.op == Op::input) {
      const auto which = static_cast<Input>(node.index);
      return which == Input::q || which == Input::kv || which == Input::h || which == Input::score;
    }
    return std::ranges::any_of(node.inputs(), [this](NodeId id) { return moves_[static_cast<std::size_t>(id)]; });
  }

  bool is_key(NodeId id) const {
    const Node& node = graph_[id];
    return node.op == Op::input && static_cast<Input>(node.index) == Input::kv;
  }

  Bounds bounds(const Node& node) {
    switch (node.op) {
      case Op::constant:
        return node.index != 0 ? Bounds{graph_.integer(kEveryKey), {}} : Bounds{{}, graph_.integer(kEveryKey)};
      case Op::less:
      case Op::less_equal:
        return comparison(node);
      case Op::logical_not:
        return {of(node.operand[0]).to_false, of(node.operand[0]).to_true};
      case Op::logical_or:
        return {either(node, &Bounds::to_true), both(node, &Bounds::to_false)};
      case Op::logical_and:
        return {both(node, &Bounds::to_true), either(node, &Bounds::to_false)};
      case Op::select:
        return {both(node, &Bounds::to_true, 1), both(node, &Bounds::to_false, 1)};
      default:
        return {};
    }
  }

  /// kv < e and kv <= e hold up to e, e < kv and e <= kv do not. An e + 1 that wraps keeps nothing.
  Bounds comparison(const Node& node) {
    const NodeId left = node.operand[0], right = node.operand[1];
    const bool equal = node.op == Op::less_equal;
    if (graph_[left].type != Type::integer) return {};
    if (is_key(left) && !moves_[static_cast<std::size_t>(right)]) return {behind(right, equal), {}};
    if (is_key(right) && !moves_[static_cast<std::size_t>(left)]) return {{}, behind(left, !equal)};
    return {};
  }

  NodeId behind(NodeId e, bool by_one) { return by_one ? graph_.binary(Op::add, e, graph_.integer(1)) : e; }

  std::optional<NodeId> either(const Node& node, std::optional<NodeId> Bounds::*side) {
    const auto a = of(node.operand[0]).*side, b = of(node.operand[1]).*side;
    return a && b ? graph_.binary(Op::max, *a, *b) : a ? a : b;
  }
  std::optional<NodeId> both(const Node& node, std::optional<NodeId> Bounds::*side, std::size_t first = 0) {
    const auto a = of(node.operand[first]).*side, b = of(node.operand[first + 1]).*side;
    return a && b ? std::optional(graph_.binary(Op::min, *a, *b)) : std::nullopt;
  }

  Graph& graph_;
  const NodeId root_;
  std::vector<bool> moves_;
  std::vector<Bounds> bounds_;
};

}  // namespace

std::optional<NodeId> find_kept_keys(Graph* graph, NodeId mask) {
  return KeptKeys(graph, mask).run();
}

}  // namespace fa::expression
