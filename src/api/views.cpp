#include "api/views.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <span>
#include <utility>

#include "support/text.hpp"

namespace fa::api {
namespace {

using support::throw_invalid;

std::size_t axes_of(const TensorView& view) noexcept {
  return static_cast<std::size_t>(std::clamp(view.rank, 0, TensorView::kMaxRank));
}

std::int64_t element_of(const TensorView& view) noexcept {
  return static_cast<std::int64_t>(size_of(view.dtype));
}

bool has_rank(const TensorView& view) noexcept {
  return view.rank >= 1 && view.rank <= TensorView::kMaxRank;
}

/// Byte offsets that a view reaches: its first byte + sum of steps[i] * [0, counts[i]).
struct Lattice {
  struct Axis {
    std::int64_t step;   ///< bytes, positive
    std::int64_t count;  ///< positions, at least 2
  };
  std::array<Axis, TensorView::kMaxRank + 1> axes{};
  std::size_t rank = 0;
};

/// Of a view whose reach is known.
Lattice lattice_of(const TensorView& view) noexcept {
  Lattice result;
  for (std::size_t axis = 0; axis < axes_of(view); ++axis) {
    if (view.shape[axis] <= 1 || view.strides[axis] == 0) continue;
    result.axes[result.rank++] = {std::abs(view.strides[axis]) * element_of(view), view.shape[axis]};
  }
  result.axes[result.rank++] = {1, element_of(view)};  // the bytes of an element
  return result;
}

/// Insertion sort by step, for a handful of elements.
template <class Item>
void sort_by_step(std::span<Item> items, bool descending) noexcept {
  for (std::size_t i = 1; i < items.size(); ++i) {
    for (std::size_t j = i; j > 0 && (items[j].step > items[j - 1].step) == descending; --j) {
      std::swap(items[j], items[j - 1]);
    }
  }
}

/// A multiple of `step` between `low` and `high` times.
struct Term {
  std::int64_t step, low, high;
};

/// Whether target = sum of t_i * step_i with low_i <= t_i <= high_i has a solution; steps descend. Gives up with `true`
/// when the budget is spent. The sums stay within the reaches of two views.
bool solvable(std::span<const Term> terms, std::int64_t target, int& budget) noexcept {
  if (terms.empty()) return target == 0;
  if (--budget < 0) return true;
  std::int64_t rest_low = 0;
  std::int64_t rest_high = 0;
  for (const Term& term : terms.subspan(1)) {
    rest_low += term.step * term.low;
    rest_high += term.step * term.high;
  }
  const auto floor_div = [](std::int64_t a, std::int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); };
  const std::int64_t step = terms.front().step;
  const std::int64_t low = std::max(terms.front().low, -floor_div(-(target - rest_high), step));
  const std::int64_t high = std::min(terms.front().high, floor_div(target - rest_low, step));
  for (std::int64_t t = low; t <= high; ++t) {
    if (solvable(terms.subspan(1), target - t * step, budget)) return true;
  }
  return false;
}

constexpr int kSolveBudget = 512;

}  // namespace

Reach reach_of(const TensorView& view) noexcept {
  Reach reach;
  reach.high = element_of(view) - 1;
  for (std::size_t axis = 0; axis < axes_of(view); ++axis) {
    const std::int64_t size = view.shape[axis];
    reach.empty = reach.empty || size <= 0;
    std::int64_t length = 0;
    if (size <= 1 || !reach.known()) continue;
    const bool far = __builtin_mul_overflow(view.strides[axis], size - 1, &length) ||
                     __builtin_mul_overflow(length, element_of(view), &length) || length > kMaxReach ||
                     length < -kMaxReach;
    if (!far) (length < 0 ? reach.low : reach.high) += length;  // four axes at most: no overflow
    if (far || reach.high - reach.low > kMaxReach) reach.too_far = static_cast<int>(axis);
  }
  return reach;
}

std::string Label::text() const {
  if (of == Of::argument) return std::string(name);
  return fmt::format("{}captures[{}]", of == Of::gradient ? "gradient of " : "", name);
}

std::string shape_text(const TensorView& view) {
  return fmt::format("[{}]", fmt::join(std::span(view.shape).first(axes_of(view)), ", "));
}

void check_memory(const Label& label, const TensorView& view) {
  if (!has_rank(view)) throw_invalid(label.text(), fmt::format("rank {}", view.rank), "a rank from 1 to 4");
  if (view.dtype > DType::u4x2) {
    throw_invalid(label.text(), fmt::format("dtype {}", static_cast<int>(view.dtype)),
                  "f16, bf16, f32, f64, i32, e4m3, i8, e5m2 or u4x2");
  }
  if (std::ranges::any_of(std::span(view.shape).first(axes_of(view)), [](std::int64_t size) { return size < 0; })) {
    throw_invalid(label.text(), fmt::format("shape {}", shape_text(view)), "sizes from 0");
  }
  if (const Reach reach = reach_of(view); !reach.known()) {
    const auto axis = static_cast<std::size_t>(reach.too_far);
    throw_invalid(label.text(), fmt::format("stride {} of axis {}", view.strides[axis], axis),
                  "offsets below 2^60 bytes");
  }
  if (view.data == nullptr && view.elements() != 0) {
    throw_invalid(label.text(), "a null pointer", "memory for its elements");
  }
  if (reinterpret_cast<std::uintptr_t>(view.data) % size_of(view.dtype) != 0) {
    throw_invalid(label.text(), fmt::format("pointer {}", view.data),
                  fmt::format("a multiple of {} bytes", size_of(view.dtype)));
  }
}

void check_writable(const Label& label, const TensorView& view) {
  if (view.read_only) throw_invalid(label.text(), "a view of const memory", "a writable tensor");
  if (overlaps_itself(view)) {
    const auto strides = std::span(view.strides).first(axes_of(view));
    throw_invalid(label.text(), fmt::format("strides [{}]", fmt::join(strides, ", ")), "elements that do not overlap");
  }
}

bool overlaps_itself(const TensorView& view) noexcept {
  const Reach reach = reach_of(view);
  if (!has_rank(view)) return view.defined();
  if (reach.empty) return false;
  if (!reach.known()) return true;
  for (std::size_t axis = 0; axis < axes_of(view); ++axis) {
    if (view.shape[axis] > 1 && view.strides[axis] == 0) return true;
  }
  Lattice lattice = lattice_of(view);
  const std::span<Lattice::Axis> axes(lattice.axes.data(), lattice.rank);
  sort_by_step(axes, false);
  std::int64_t finer = 0;  // the largest offset of the finer axes
  for (const Lattice::Axis& axis : axes) {
    if (axis.step <= finer) return true;
    finer += axis.step * (axis.count - 1);
  }
  return false;
}

bool overlap(const TensorView& a, const TensorView& b) noexcept {
  if (!a.defined() || !b.defined()) return false;
  if (!has_rank(a) || !has_rank(b)) return true;
  const Reach reach_a = reach_of(a);
  const Reach reach_b = reach_of(b);
  if (reach_a.empty || reach_b.empty) return false;
  if (!reach_a.known() || !reach_b.known()) return true;
  if (!spans_meet(a.data, reach_a.low, reach_a.high, b.data, reach_b.low, reach_b.high)) return false;
  const auto distance =
      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(b.data) - reinterpret_cast<std::uintptr_t>(a.data));
  const Lattice first = lattice_of(a);
  const Lattice second = lattice_of(b);
  std::array<Term, 2 * (TensorView::kMaxRank + 1)> terms{};
  std::size_t count = 0;
  const auto add = [&](std::int64_t step, std::int64_t low, std::int64_t high) {
    for (std::size_t i = 0; i < count; ++i) {
      if (terms[i].step != step) continue;
      terms[i].low += low;
      terms[i].high += high;
      return;
    }
    terms[count++] = {step, low, high};
  };
  for (std::size_t i = 0; i < first.rank; ++i) add(first.axes[i].step, 0, first.axes[i].count - 1);
  for (std::size_t i = 0; i < second.rank; ++i) add(second.axes[i].step, -(second.axes[i].count - 1), 0);
  const std::span<Term> used(terms.data(), count);
  sort_by_step(used, true);
  int budget = kSolveBudget;
  return solvable(used, distance + reach_b.low - reach_a.low, budget);
}

void CallTensors::List::add(const Label& label, const TensorView& view) {
  if (view.defined()) items.at(count++) = {label, &view, reach_of(view)};
}

void CallTensors::add_read(const Label& label, const void* array, DType dtype, std::int64_t count) {
  if (array == nullptr) return;
  TensorView& view = arrays_.at(array_count_++);
  view = TensorView(array, dtype, {count});
  read_.add(label, view);
}

void CallTensors::add_memory(const Label& label, const void* data, std::size_t bytes) {
  if (data == nullptr) return;
  TensorView& view = memory_views_.at(memory_count_);
  view = TensorView(data, DType::i8, {static_cast<std::int64_t>(std::min<std::size_t>(bytes, kMaxReach))});
  memory_[memory_count_++] = {label, &view, reach_of(view)};
}

void CallTensors::check_disjoint() const {
  const auto check = [](const Item& written, const Item& other, const char* accepted) {
    const Reach& a = written.reach;
    const Reach& b = other.reach;
    const bool exact = a.known() && b.known();
    if (exact && !spans_meet(written.view->data, a.low, a.high, other.view->data, b.low, b.high)) return;
    if (!overlap(*written.view, *other.view)) return;
    throw_invalid(written.label.text(), fmt::format("memory shared with {}", other.label.text()), accepted);
  };
  constexpr const char* kOutput = "an output that overlaps no other tensor";
  constexpr const char* kMemory = "memory that nothing else of the call lies in";
  for (std::size_t i = 0; i < written_.count; ++i) {
    for (std::size_t j = 0; j < read_.count; ++j) check(written_.items[i], read_.items[j], kOutput);
    for (std::size_t j = 0; j < i; ++j) check(written_.items[i], written_.items[j], kOutput);
  }
  for (std::size_t i = 0; i < memory_count_; ++i) {
    for (const Item& item : read()) check(memory_[i], item, kMemory);
    for (const Item& item : written()) check(memory_[i], item, kMemory);
    for (std::size_t j = 0; j < i; ++j) check(memory_[i], memory_[j], kMemory);
  }
}

}  // namespace fa::api
