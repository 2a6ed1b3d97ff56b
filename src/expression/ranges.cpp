#include "expression/ranges.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "support/text.hpp"

namespace fa::expression {
namespace {

/// What an integer may be, both ends included.
struct Range {
  std::int64_t low = std::numeric_limits<std::int32_t>::min();
  std::int64_t high = std::numeric_limits<std::int32_t>::max();

  /// Everything, if arithmetic may have wrapped.
  Range wrapped() const {
    const Range all;
    return low < all.low || high > all.high ? all : *this;
  }
};

Range hull(std::initializer_list<std::int64_t> values) {
  return Range{std::min(values), std::max(values)}.wrapped();
}

Range quotient(Op op, const Range& a, const Range& b) {
  if (b.low <= 0) return {};
  const auto divide = [op](std::int64_t x, std::int64_t y) { return op == Op::divide ? x / y : floor_divide(x, y); };
  return hull({divide(a.low, b.low), divide(a.low, b.high), divide(a.high, b.low), divide(a.high, b.high)});
}

Range remainder(Op op, const Range& a, const Range& b) {
  if (b.low <= 0) return {};
  const std::int64_t most = b.high - 1;
  if (a.low >= 0) return {0, std::min(a.high, most)};
  return {op == Op::floor_modulo ? 0 : -most, most};
}

Range of_operation(const Node& node, const Range& a, const Range& b) {
  switch (node.op) {
    case Op::negate:
      return Range{-a.high, -a.low}.wrapped();
    case Op::add:
      return Range{a.low + b.low, a.high + b.high}.wrapped();
    case Op::subtract:
      return Range{a.low - b.high, a.high - b.low}.wrapped();
    case Op::multiply:
      return hull({a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high});
    case Op::divide:
    case Op::floor_divide:
      return quotient(node.op, a, b);
    case Op::modulo:
    case Op::floor_modulo:
      return remainder(node.op, a, b);
    case Op::min:
      return {std::min(a.low, b.low), std::min(a.high, b.high)};
    case Op::max:
      return {std::max(a.low, b.low), std::max(a.high, b.high)};
    case Op::abs:
      return a.low >= 0 ? a : Range{a.high <= 0 ? -a.high : 0, std::max(-a.low, a.high)}.wrapped();
    case Op::shift_right:
      return b.low >= 0 && b.high < 32 ? hull({a.low >> b.low, a.low >> b.high, a.high >> b.low, a.high >> b.high})
                                       : Range{};
    case Op::bit_and:
      if (b.low >= 0) return {0, b.high};
      return a.low >= 0 ? Range{0, a.high} : Range{};
    default:
      return {};
  }
}

Range of_input(Input which, const Lengths& lengths) {
  switch (which) {
    case Input::b:
      return {0, lengths.b - 1};
    case Input::h:
      return {0, lengths.h_q - 1};
    case Input::q:
      return {0, lengths.s_q - 1};
    case Input::kv:
      return {0, lengths.s_kv - 1};
    case Input::s_q:
      return {lengths.packed ? 1 : lengths.s_q, lengths.s_q};
    case Input::s_kv:
      return {lengths.packed ? 1 : lengths.s_kv, lengths.s_kv};
    case Input::score:
      break;
  }
  return {};
}

/// Calls visit(capture, axis, range) for every index of every load.
template <class Visit>
void visit_indices(const Program& program, const Lengths& lengths, const Visit& visit) {
  const auto nodes = static_cast<std::size_t>(program.graph.size());
  std::array<Range, 256> few;
  std::vector<Range> many;  // a call allocates nothing for functions of the usual size
  if (nodes > few.size()) many.resize(nodes);
  const std::span<Range> ranges = many.empty() ? std::span<Range>(few) : many;
  const auto of = [&](NodeId id) -> const Range& { return ranges[static_cast<std::size_t>(id)]; };
  for (NodeId id = 0; id < program.graph.size(); ++id) {
    const Node& node = program.graph[id];
    if (node.op == Op::load) {
      for (int axis = 0; axis < node.operands; ++axis) {
        visit(static_cast<std::size_t>(node.index), static_cast<std::size_t>(axis),
              of(node.operand[static_cast<std::size_t>(axis)]));
      }
    }
    if (node.type != Type::integer) continue;
    Range& range = ranges[static_cast<std::size_t>(id)];
    if (node.op == Op::constant) {
      range = {node.index, node.index};
    } else if (node.op == Op::input) {
      range = of_input(static_cast<Input>(node.index), lengths);
    } else if (node.op == Op::select) {
      const Range &a = of(node.operand[1]), &b = of(node.operand[2]);
      range = {std::min(a.low, b.low), std::max(a.high, b.high)};
    } else if (node.op == Op::to_integer) {
      if (program.graph[node.operand[0]].type == Type::boolean) range = {0, 1};
    } else if (node.operands > 0 && node.op != Op::load) {
      range = of_operation(node, of(node.operand[0]), node.operands > 1 ? of(node.operand[1]) : Range{});
    }
  }
}

}  // namespace

std::int64_t CapturedView::offset(const TensorView& of, std::span<const Value> indices) {
  std::int64_t result = 0;
  for (std::size_t axis = 0; axis < indices.size(); ++axis) {
    if (of.shape[axis] != 1) result += indices[axis].integer * of.strides[axis];
  }
  return result;
}

void check_indices(const Program& program, std::span<const CapturedView> captures, const Lengths& lengths) {
  if (lengths.b == 0 || lengths.h_q == 0 || lengths.s_q == 0 || lengths.s_kv == 0) return;
  visit_indices(program, lengths, [&](std::size_t capture, std::size_t axis, const Range& range) {
    const std::int64_t length = captures[capture].view.shape[axis];
    if (length == 1 || (range.low >= 0 && range.high < length)) return;
    support::throw_invalid(
        fmt::format("captures[{}]", program.captures[capture].name),
        fmt::format("index {} from {} to {}, into an axis of {} elements", axis, range.low, range.high, length),
        "indices that the lengths of the call keep inside; clamp(index, 0, length - 1) does too");
  });
}

std::vector<std::vector<std::int64_t>> smallest_shapes(const Program& program, const Lengths& lengths) {
  std::vector<std::vector<std::int64_t>> shapes;
  for (const Capture& capture : program.captures) {
    shapes.emplace_back(static_cast<std::size_t>(std::max(capture.rank, 1)), capture.rank == 0 ? 1 : 0);
  }
  constexpr std::int64_t kUnbounded = std::numeric_limits<std::int32_t>::max();
  visit_indices(program, lengths, [&](std::size_t capture, std::size_t axis, const Range& range) {
    if (range.low < 0 || range.high >= kUnbounded) return;
    shapes[capture][axis] = std::max(shapes[capture][axis], range.high + 1);
  });
  return shapes;
}

}  // namespace fa::expression
