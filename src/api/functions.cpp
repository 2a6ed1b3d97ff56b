#include <fa/functions.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <utility>

#include "expression/parse.hpp"
#include "expression/program.hpp"
#include "support/text.hpp"

namespace fa {

Captures::Captures(std::initializer_list<Captured> given) {
  for (const Captured& captured : given) add(captured);
}

void Captures::add(const Captured& captured) {
  if (count_ == kMax) support::throw_invalid("captures", count_ + 1, fmt::format("at most {}", kMax));
  items_[count_++] = captured;
}

namespace functions {
namespace {

std::vector<Capture> joined(std::vector<Capture> first, const std::vector<Capture>& second) {
  for (const Capture& capture : second) {
    const auto known = std::ranges::find(first, capture.name, &Capture::name);
    if (known == first.end()) {
      first.push_back(capture);
    } else if (known->dtype != capture.dtype || known->requires_grad != capture.requires_grad) {
      support::throw_invalid(fmt::format("captures[{}]", capture.name), "two different declarations", "one");
    }
  }
  return first;
}

/// Parses a part by itself: a mistake is told by its column there, not in the text that becomes of both.
void check_part(const std::string& score, const std::string& mask, const std::vector<Capture>& captures) {
  std::vector<expression::Capture> declared;
  for (const Capture& capture : captures) {
    declared.push_back({capture.name, capture.dtype, -1, capture.requires_grad});
  }
  expression::Program::parse(score, mask, declared);
}

}  // namespace

ScoreFunction softcap(double cap) {
  if (!(cap > 0) || !std::isfinite(cap)) support::throw_invalid("cap", cap, "a positive number");
  return {fmt::format("{0:#.9g} * tanh(score / {0:#.9g})", cap)};
}

ScoreFunction alibi(bool requires_grad) {
  return {"score - slope[h] * abs(float(q + s_kv - s_q - kv))", {{"slope", DType::f32, requires_grad}}};
}

ScoreFunction bias(std::string_view axes, DType dtype, bool requires_grad) {
  std::string indices;
  for (const char axis : axes) {
    const std::string_view name = axis == 'k' ? "kv" : std::string_view(&axis, 1);
    if (std::string_view("bhqk").find(axis) == std::string_view::npos || axes.size() > TensorView::kMaxRank) {
      support::throw_invalid("axes", axes, "up to four of b, h, q and k");
    }
    indices += fmt::format("{}{}", indices.empty() ? "" : ", ", name);
  }
  return {indices.empty() ? "score + bias" : fmt::format("score + bias[{}]", indices),
          {{"bias", dtype, requires_grad}}};
}

ScoreFunction relative_table(int distance, DType dtype, bool requires_grad) {
  if (distance < 1) support::throw_invalid("distance", distance, "1 and more");
  return {fmt::format("score + table[h, clamp(kv - (q + s_kv - s_q), -{0}, {0}) + {0}]", distance),
          {{"table", dtype, requires_grad}}};
}

MaskFunction prefix_lm() {
  return {"kv < prefix[b] || kv <= q + s_kv - s_q", {{"prefix", DType::i32}}};
}

MaskFunction documents(bool batched) {
  return {batched ? "doc[b, q] == doc[b, kv]" : "doc[q] == doc[kv]", {{"doc", DType::i32}}};
}

MaskFunction block_sparse(int rows, int keys, bool by_head) {
  if (rows < 1 || keys < 1) support::throw_invalid("rows, keys", std::min(rows, keys), "1 and more");
  return {fmt::format("blocks[{}q / {}, kv / {}] != 0", by_head ? "h, " : "", rows, keys), {{"blocks", DType::i32}}};
}

MaskFunction tree(bool batched) {
  // A row's number is that of its draft. The clamp is for the range of the index alone.
  return {fmt::format("kv < s_kv - s_q || bit(tree[{}q, clamp(kv - (s_kv - s_q), 0, s_q - 1) >> 5], kv - (s_kv - s_q))",
                      batched ? "b, " : ""),
          {{"tree", DType::i32}}};
}

std::vector<std::int32_t> tree_words(std::span<const std::int32_t> parents, int words) {
  constexpr std::size_t kBits = 32;
  const std::size_t needed = (parents.size() + kBits - 1) / kBits;
  if (words < 0 || (words > 0 && static_cast<std::size_t>(words) < needed)) {
    support::throw_invalid("words", words, fmt::format("0, or {} and more for {} drafts", needed, parents.size()));
  }
  const std::size_t width = std::max(needed, static_cast<std::size_t>(words));
  std::vector<std::int32_t> result(parents.size() * width, 0);
  for (std::size_t row = 0; row < parents.size(); ++row) {
    std::size_t steps = 0;
    for (std::int64_t at = static_cast<std::int64_t>(row); at >= 0; at = parents[static_cast<std::size_t>(at)]) {
      if (static_cast<std::size_t>(at) >= parents.size()) {
        support::throw_invalid("parents", at, fmt::format("-1, or a draft's number, below {}", parents.size()));
      }
      if (++steps > parents.size()) {
        support::throw_invalid(fmt::format("parents[{}]", row), "a circle", "drafts that hang on the context");
      }
      const auto bit = static_cast<std::size_t>(at);
      std::int32_t& word = result[row * width + bit / kBits];
      word = static_cast<std::int32_t>(static_cast<std::uint32_t>(word) | std::uint32_t{1} << bit % kBits);
    }
  }
  return result;
}

TensorView tree_view(const std::int64_t* words, std::span<const std::int64_t> shape) {
  static_assert(std::endian::native == std::endian::little, "the lower half of a word of 64 bits is first");
  if (shape.empty() || shape.size() > TensorView::kMaxRank) {
    support::throw_invalid("shape", shape.size(), fmt::format("1 to {} axes", TensorView::kMaxRank));
  }
  std::array<std::int64_t, TensorView::kMaxRank> lengths{}, strides{};
  std::int64_t next = 1;
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    lengths[axis] = shape[axis] * (axis + 1 == shape.size() ? 2 : 1);
    strides[axis] = next;
    next *= lengths[axis];
  }
  return TensorView(static_cast<const void*>(words), DType::i32, std::span(lengths).first(shape.size()),
                    std::span(strides).first(shape.size()));
}

ScoreFunction compose(const ScoreFunction& first, const ScoreFunction& second) {
  if (first.expression.empty()) return second;
  if (second.expression.empty()) return first;
  std::vector<Capture> captures = joined(first.captures, second.captures);
  check_part(first.expression, "", captures);
  check_part(second.expression, "", captures);
  return {expression::with_score("score", second.expression, first.expression), std::move(captures)};
}

MaskFunction both(const MaskFunction& first, const MaskFunction& second) {
  if (first.expression.empty()) return second;
  if (second.expression.empty()) return first;
  std::vector<Capture> captures = joined(first.captures, second.captures);
  check_part("", first.expression, captures);
  check_part("", second.expression, captures);
  return {fmt::format("({}) && ({})", first.expression, second.expression), std::move(captures)};
}

}  // namespace functions
}  // namespace fa
