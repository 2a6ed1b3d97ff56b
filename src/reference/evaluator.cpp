#include "reference/evaluator.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "reference/convert.hpp"
#include "support/shard_place.hpp"

namespace fa::reference {
namespace {

using expression::CapturedView;
using expression::Input;
using expression::Lengths;
using expression::Node;
using expression::NodeId;
using expression::Op;
using expression::Program;
using expression::Value;

template <class Stored>
Stored stored_at(const TensorView& view, std::int64_t offset) {
  Stored value;
  std::memcpy(&value, static_cast<const std::byte*>(view.data) + offset * static_cast<std::int64_t>(sizeof value),
              sizeof value);
  return value;
}

Value element(const TensorView& view, std::int64_t offset) {
  switch (view.dtype) {
    case DType::f16:
      return {0, decode_f16(stored_at<std::uint16_t>(view, offset))};
    case DType::bf16:
      return {0, decode_bf16(stored_at<std::uint16_t>(view, offset))};
    case DType::f32:
      return {0, stored_at<float>(view, offset)};
    case DType::f64:
      return {0, stored_at<double>(view, offset)};
    case DType::i32:
      return {stored_at<std::int32_t>(view, offset), 0};
    case DType::e4m3:
    case DType::i8:
    case DType::e5m2:
    case DType::u4x2:
      break;  // of caches alone
  }
  return {};
}

}  // namespace

TensorView fetched(const TensorView& t, std::int64_t offset, std::int64_t stride, std::int64_t count,
                   const Fetch& fetch, std::vector<std::byte>& buffer) {
  if (count == 0) return t;
  const auto size = static_cast<std::int64_t>(size_of(t.dtype));
  const std::int64_t reach = (count - 1) * stride;
  const std::int64_t first = (offset + std::min<std::int64_t>(reach, 0)) * size;
  buffer.resize(static_cast<std::size_t>((std::abs(reach) + 1) * size));
  fetch(buffer.data(), static_cast<const std::byte*>(t.data) + first, buffer.size());
  TensorView view = t;
  view.data =
      reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(buffer.data()) - static_cast<std::uintptr_t>(first));
  return view;
}

Evaluator::Evaluator(const Program& program, std::span<const NodeId> roots, const VariantArgs& variant,
                     const Lengths& lengths)
    : program_(program),
      order_(program.needed(roots)),
      captures_(variant.captures),
      place_(support::resolved(variant.place, {lengths.b, lengths.h_q, lengths.s_q, lengths.s_kv})),
      values_(static_cast<std::size_t>(program.graph.size())) {}

void Evaluator::run(const Point& point) {
  for (const NodeId id : order_) values_[static_cast<std::size_t>(id)] = evaluate(program_.graph[id], point);
}

Evaluator::Operands Evaluator::operands(const Node& node) const {
  Operands result{};
  for (std::size_t i = 0; i < static_cast<std::size_t>(node.operands); ++i) result[i] = (*this)[node.operand[i]];
  return result;
}

std::int64_t Evaluator::gradient_offset(NodeId load) const {
  const Node& node = program_.graph[load];
  const Operands indices = operands(node);
  return CapturedView::offset(captures_[static_cast<std::size_t>(node.index)].gradient,
                              std::span(indices).first(static_cast<std::size_t>(node.operands)));
}

Value Evaluator::load(const Node& node) const {
  const CapturedView& captured = captures_[static_cast<std::size_t>(node.index)];
  if (!captured.view.defined()) {
    if (node.type == expression::Type::integer) return {static_cast<std::int32_t>(captured.scalar), 0};
    return {0, captured.scalar};
  }
  const Operands indices = operands(node);
  const std::int64_t offset =
      CapturedView::offset(captured.view, std::span(indices).first(static_cast<std::size_t>(node.operands)));
  if (fetch_ == nullptr) return element(captured.view, offset);
  std::vector<std::byte> buffer;
  return element(fetched(captured.view, offset, 1, 1, *fetch_, buffer), offset);
}

std::optional<ReadElement> Evaluator::broken_read() const {
  for (const NodeId id : order_) {
    const Node& node = program_.graph[id];
    if (node.op != Op::load || node.type != expression::Type::real || std::isfinite((*this)[id].real)) continue;
    ReadElement read{node.index, (*this)[id].real};
    const TensorView& view = captures_[static_cast<std::size_t>(node.index)].view;
    for (int axis = 0; view.defined() && axis < node.operands; ++axis) {
      const auto at = static_cast<std::size_t>(axis);
      const std::int64_t given = (*this)[node.operand[at]].integer;
      read.index.push_back(view.shape[at] == 1 ? 0 : given);
    }
    return read;
  }
  return std::nullopt;
}

Value Evaluator::evaluate(const Node& node, const Point& point) const {
  if (node.op == Op::constant) return {node.index, node.value};
  if (node.op == Op::load) return load(node);
  if (node.op != Op::input) {
    const Operands given = operands(node);
    return apply(node.op, program_.graph[node.operand[0]].type,
                 std::span(given).first(static_cast<std::size_t>(node.operands)));
  }
  switch (static_cast<Input>(node.index)) {
    case Input::score:
      return {0, point.score};
    case Input::b:
      return {static_cast<std::int32_t>(place_.b + point.b), 0};
    case Input::h:
      return {static_cast<std::int32_t>(place_.h_q + point.h), 0};
    case Input::q:
      return {static_cast<std::int32_t>(place_.q + point.q * place_.q_step), 0};
    case Input::kv:
      return {static_cast<std::int32_t>(place_.kv + point.kv * place_.kv_step), 0};
    case Input::s_q:
      return {static_cast<std::int32_t>(place_.whole_s_q), 0};
    case Input::s_kv:
      return {static_cast<std::int32_t>(place_.whole_s_kv), 0};
  }
  return {};
}

}  // namespace fa::reference
