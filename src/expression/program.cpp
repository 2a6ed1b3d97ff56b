#include "expression/program.hpp"

#include <algorithm>
#include <span>
#include <vector>

#include "expression/kept_keys.hpp"

namespace fa::expression {
namespace {

class Differentiator {
 public:
  Differentiator(Graph* graph, NodeId by) : graph_(*graph), by_(by) {}

  /// Operands come before what uses them, so that no chain is too long for a walk along the nodes.
  NodeId run(NodeId root) {
    known_.assign(static_cast<std::size_t>(root) + 1, kNotNeeded);
    known_[static_cast<std::size_t>(root)] = kNeeded;
    for (NodeId id = root; id >= 0; --id) {
      if (known_[static_cast<std::size_t>(id)] != kNeeded || id == by_) continue;
      for (const NodeId input : parts_of(graph_[id])) known_[static_cast<std::size_t>(input)] = kNeeded;
    }
    for (NodeId id = 0; id <= root; ++id) {
      NodeId& known = known_[static_cast<std::size_t>(id)];
      if (known == kNeeded) known = id == by_ ? graph_.real(1) : compute(id);
    }
    return of(root);
  }

 private:
  static constexpr NodeId kNotNeeded = -1;
  static constexpr NodeId kNeeded = -2;

  static bool is_constant(const Node& node) {
    return node.type != Type::real || node.operands == 0 || node.op == Op::load || node.op == Op::to_real;
  }

  /// The operands whose derivatives are part of a node's.
  static std::span<const NodeId> parts_of(const Node& node) {
    if (is_constant(node)) return {};
    return node.op == Op::select ? node.inputs().subspan(1) : node.inputs();
  }

  NodeId of(NodeId id) const { return known_[static_cast<std::size_t>(id)]; }
  NodeId multiply(NodeId a, NodeId b) { return graph_.binary(Op::multiply, a, b); }
  NodeId divide(NodeId a, NodeId b) { return graph_.binary(Op::divide, a, b); }
  NodeId negate(NodeId a) { return graph_.unary(Op::negate, a); }
  NodeId square(NodeId a) { return multiply(a, a); }
  NodeId real(double value) { return graph_.real(value); }

  NodeId compute(NodeId id) {
    const Node node = graph_[id];  // a copy: the graph grows
    if (is_constant(node)) return real(0);
    const NodeId a = node.operand[0];
    const NodeId b = node.operand[1];
    switch (node.op) {
      case Op::add:
      case Op::subtract:
        return graph_.binary(node.op, of(a), of(b));
      case Op::multiply:
        return graph_.binary(Op::add, multiply(of(a), b), multiply(a, of(b)));
      case Op::divide: {
        const NodeId top = graph_.binary(Op::subtract, of(a), multiply(id, of(b)));
        return divide(top, b);
      }
      case Op::select:
        return graph_.select(a, of(b), of(node.operand[2]));
      case Op::min:
        return graph_.select(graph_.binary(Op::less_equal, a, b), of(a), of(b));
      case Op::max:
        return graph_.select(graph_.binary(Op::less_equal, b, a), of(a), of(b));
      default:
        break;
    }
    const NodeId inner = of(a);
    return graph_.is_real(inner, 0) ? inner : multiply(of_function(node.op, id, a), inner);
  }

  /// The derivative of a function of one number, which is node `id` at `a`.
  NodeId of_function(Op op, NodeId id, NodeId a) {
    constexpr double kLn2 = 0.69314718055994530942;
    switch (op) {
      case Op::negate:
        return real(-1);
      case Op::abs: {
        const NodeId zero = real(0);
        const NodeId negative = graph_.select(graph_.binary(Op::less, a, zero), real(-1), zero);
        return graph_.select(graph_.binary(Op::less, zero, a), real(1), negative);
      }
      case Op::exp:
        return id;
      case Op::exp2:
        return multiply(real(kLn2), id);
      case Op::log:
        return divide(real(1), a);
      case Op::log2:
        return divide(real(1 / kLn2), a);
      case Op::sqrt:
        return divide(real(0.5), id);
      case Op::rsqrt:
        return multiply(real(-0.5), multiply(id, square(id)));
      case Op::tanh:
        return graph_.binary(Op::subtract, real(1), square(id));
      case Op::sin:
        return graph_.unary(Op::cos, a);
      case Op::cos:
        return negate(graph_.unary(Op::sin, a));
      default:
        return real(0);  // steps
    }
  }

  Graph& graph_;
  NodeId by_;
  std::vector<NodeId> known_;  // derivatives
};

}  // namespace

NodeId differentiate(Graph* graph, NodeId of, NodeId by) {
  return Differentiator(graph, by).run(of);
}

Program Program::parse(const std::string& score, const std::string& mask, const std::vector<Capture>& captures) {
  Program program;
  program.captures = captures;
  for (Capture& capture : program.captures) capture.rank = -1;
  Graph& graph = program.graph;
  if (!score.empty()) {
    program.score = expression::parse("score", score, Type::real, &program.captures, &graph);
    program.score_derivative = differentiate(&graph, *program.score, graph.input(Input::score));
    const std::array root{*program.score};
    for (const NodeId id : program.needed(root)) {
      const Node node = graph[id];
      if (node.op != Op::load || !program.captures[static_cast<std::size_t>(node.index)].requires_grad) continue;
      const NodeId derivative = differentiate(&graph, *program.score, id);
      if (!graph.is_real(derivative, 0)) program.gradients.push_back({id, derivative});
    }
  }
  if (!mask.empty()) {
    program.mask = expression::parse("mask", mask, Type::boolean, &program.captures, &graph);
    program.kept_keys = find_kept_keys(&graph, *program.mask);
  }
  return program;
}

std::vector<NodeId> Program::needed(std::span<const NodeId> roots) const {
  std::vector<bool> wanted(static_cast<std::size_t>(graph.size()), false);
  for (const NodeId root : roots) wanted[static_cast<std::size_t>(root)] = true;
  for (NodeId id = graph.size() - 1; id >= 0; --id) {
    if (!wanted[static_cast<std::size_t>(id)]) continue;
    for (const NodeId input : graph[id].inputs()) wanted[static_cast<std::size_t>(input)] = true;
  }
  std::vector<NodeId> result;
  for (NodeId id = 0; id < graph.size(); ++id) {
    if (wanted[static_cast<std::size_t>(id)]) result.push_back(id);
  }
  return result;
}

std::vector<bool> Program::dependent(Input which) const {
  std::vector<bool> result(static_cast<std::size_t>(graph.size()), false);
  for (NodeId id = 0; id < graph.size(); ++id) {
    const Node& node = graph[id];
    result[static_cast<std::size_t>(id)] =
        (node.op == Op::input && node.index == static_cast<int>(which)) ||
        std::ranges::any_of(node.inputs(), [&](NodeId input) { return result[static_cast<std::size_t>(input)]; });
  }
  return result;
}

}  // namespace fa::expression
