#include "expression/positions.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "expression/parse.hpp"

namespace fa::expression {
namespace {

// Of sums: factors of q, kv, s_q, s_kv and 1.
enum Term : std::size_t { kQ, kKv, kSq, kSkv, kOne, kTerms };

using Sum = std::array<std::int64_t, kTerms>;

constexpr std::int64_t kMostFactor = std::numeric_limits<std::int32_t>::max();

std::optional<Term> term_of(Input which) {
  switch (which) {
    case Input::q:
      return kQ;
    case Input::kv:
      return kKv;
    case Input::s_q:
      return kSq;
    case Input::s_kv:
      return kSkv;
    default:
      return std::nullopt;
  }
}

Sum times(const Sum& sum, std::int64_t factor) {
  Sum result;
  std::ranges::transform(sum, result.begin(), [factor](std::int64_t value) { return value * factor; });
  return result;
}

Sum plus(const Sum& a, const Sum& b) {
  Sum result;
  std::ranges::transform(a, b, result.begin(), std::plus<>());
  return result;
}

bool is_small(const Sum& sum) {
  return std::ranges::all_of(sum, [](std::int64_t x) { return x >= -kMostFactor && x <= kMostFactor; });
}

/// What integer nodes are as sums of inputs: of `other` ones that are none, and nothing where that is nothing.
class Sums {
 public:
  Sums(const Graph& graph, NodeId root) : graph_(graph), sums_(static_cast<std::size_t>(root) + 1) {}

  const std::optional<Sum>& of(NodeId id) const { return sums_[static_cast<std::size_t>(id)]; }
  void set(NodeId id, const std::optional<Sum>& sum) {
    if (sum && is_small(*sum)) sums_[static_cast<std::size_t>(id)] = sum;
  }

  std::optional<Sum> compute(const Node& node) const {
    if (node.type != Type::integer) return std::nullopt;
    Sum sum{};
    if (node.op == Op::constant) return sum[kOne] = node.index, sum;
    if (node.op == Op::input) {
      const std::optional<Term> term = term_of(static_cast<Input>(node.index));
      if (!term) return std::nullopt;
      return sum[*term] = 1, sum;
    }
    const auto operand = [&](std::size_t i) { return of(node.operand[i]); };
    if (node.op == Op::negate) return operand(0) ? std::optional(times(*operand(0), -1)) : std::nullopt;
    const bool linear = node.op == Op::add || node.op == Op::subtract || node.op == Op::multiply;
    if (!linear || !operand(0) || !operand(1)) return std::nullopt;
    if (node.op != Op::multiply) return plus(*operand(0), times(*operand(1), node.op == Op::add ? 1 : -1));
    for (const std::size_t i : {0U, 1U}) {
      const Node& factor = graph_[node.operand[i]];
      if (factor.op == Op::constant) return times(*operand(1 - i), factor.index);
    }
    return std::nullopt;
  }

 private:
  const Graph& graph_;
  std::vector<std::optional<Sum>> sums_;
};

/// Of q, s_q and s_kv as many as a row's position has.
bool is_position(const Sum& sum) {
  return sum[kQ] == sum[kSkv] && sum[kQ] == -sum[kSq];
}

/// Whether a sum is 0 or more for 0 <= q < s_q and 0 <= kv < s_kv - s_q: with s_q = q + 1 + r and s_kv = s_q + kv + 1 +
/// t it is a sum of q, kv, r and t, which are any numbers from 0 on.
bool is_positive(const Sum& sum) {
  const std::int64_t of_s_q = sum[kSq] + sum[kSkv];
  return sum[kSkv] >= 0 && of_s_q >= 0 && sum[kQ] + of_s_q >= 0 && sum[kKv] + sum[kSkv] >= 0 &&
         sum[kOne] + sum[kSkv] + of_s_q >= 0;
}

/// Whether a sum is from -s_kv to s_kv there, so that it has not wrapped.
bool is_exact(const Sum& sum) {
  constexpr Sum kLength{0, 0, 0, 1, 0};
  return is_positive(plus(kLength, sum)) && is_positive(plus(kLength, times(sum, -1)));
}

/// What is known of a condition for all keys in front.
struct Truth {
  bool always = false;
  bool never = false;
};

class KeysInFront {
 public:
  KeysInFront(const Graph& graph, NodeId mask)
      : graph_(graph), mask_(mask), sums_(graph, mask), known_(static_cast<std::size_t>(mask) + 1) {}

  bool run() {
    for (NodeId id = 0; id <= mask_; ++id) {
      sums_.set(id, sums_.compute(graph_[id]));
      if (graph_[id].type == Type::boolean) known_[static_cast<std::size_t>(id)] = truth(graph_[id]);
    }
    return of(mask_).always;
  }

 private:
  const Truth& of(NodeId id) const { return known_[static_cast<std::size_t>(id)]; }

  Truth truth(const Node& node) const {
    const auto [a, b, c, unused] = node.operand;
    switch (node.op) {
      case Op::constant:
        return {node.index != 0, node.index == 0};
      case Op::less:
        return {is_less(a, b, 1), is_less(b, a, 0)};
      case Op::less_equal:
        return {is_less(a, b, 0), is_less(b, a, 1)};
      case Op::logical_not:
        return {of(a).never, of(a).always};
      case Op::logical_or:
        return {of(a).always || of(b).always, of(a).never && of(b).never};
      case Op::logical_and:
        return {of(a).always && of(b).always, of(a).never || of(b).never};
      case Op::select:
        return {of(b).always && of(c).always, of(b).never && of(c).never};
      default:
        return {};
    }
  }

  /// Whether a + by <= b always.
  bool is_less(NodeId a, NodeId b, std::int64_t by) const {
    const std::optional<Sum>&left = sums_.of(a), &right = sums_.of(b);
    if (!left || !right || !is_exact(*left) || !is_exact(*right)) return false;
    Sum difference = plus(*right, times(*left, -1));
    difference[kOne] -= by;
    return is_positive(difference);
  }

  const Graph& graph_;
  const NodeId mask_;
  Sums sums_;
  std::vector<Truth> known_;
};

}  // namespace

bool sees_positions_alone(const Graph& graph, NodeId root) {
  Sums sums(graph, root);
  std::vector<bool> alone(static_cast<std::size_t>(root) + 1);
  for (NodeId id = 0; id <= root; ++id) {
    const Node& node = graph[id];
    std::optional<Sum> sum = sums.compute(node);
    const bool of_others = node.op != Op::input && std::ranges::all_of(node.inputs(), [&](NodeId i) {
                             return alone[static_cast<std::size_t>(i)];
                           });
    const bool other_input = node.op == Op::input && !sum;
    // What such nodes make of positions and of others counts as a sum of nothing.
    if (!sum && node.type == Type::integer && (of_others || other_input)) sum = Sum{};
    sums.set(id, sum);
    alone[static_cast<std::size_t>(id)] = sums.of(id) ? is_position(*sums.of(id)) : of_others || other_input;
  }
  return alone[static_cast<std::size_t>(root)];
}

std::string at_position(std::string_view argument, std::string_view text, std::string_view position) {
  const std::pair<std::string_view, std::string_view> names[] = {{"q", position}, {"s_q", "0"}, {"s_kv", "0"}};
  return with_names(argument, text, names);
}

bool keeps_keys_in_front(const Graph& graph, NodeId mask) {
  return KeysInFront(graph, mask).run();
}

}  // namespace fa::expression
