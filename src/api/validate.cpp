#include "api/validate.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <string_view>
#include <utility>

#include "api/build.hpp"
#include "support/text.hpp"

namespace fa::api {
namespace {

using support::throw_invalid;

constexpr int kMaxHeadDim = 256;
// Tile indices and rows are 32-bit in the kernels; the margin keeps index + tile from wrapping.
constexpr std::int64_t kMaxLength = (std::int64_t{1} << 31) - 65536;
constexpr std::int64_t kMaxRows = std::int64_t{1} << 48;
constexpr std::int64_t kMaxReach = std::int64_t{1} << 60;  // bytes from a tensor's first element to any other
constexpr int kMaxSplits = 64;
constexpr float kMaxScale = 2.3e38f;  // times log2(e) it is still finite

std::span<const std::int64_t> shape_of(const TensorView& view) {
  return {view.shape.data(), static_cast<std::size_t>(std::clamp(view.rank, 0, TensorView::kMaxRank))};
}

std::string shape_text(const TensorView& view) {
  return fmt::format("[{}]", fmt::join(shape_of(view), ", "));
}

void check_head_dim(std::string_view name, int value) {
  if (value < 8 || value > kMaxHeadDim || value % 8 != 0) throw_invalid(name, value, "a multiple of 8 from 8 to 256");
}

void check_override(std::string_view name, const std::optional<KernelOverride>& fixed) {
  if (fixed && (fixed->splits < 0 || fixed->splits > kMaxSplits)) {
    throw_invalid(fmt::format("{}.splits", name), fixed->splits, fmt::format("0 to {}", kMaxSplits));
  }
}

void check_size(std::string_view name, std::int64_t value) {
  if (value < 0 || value > kMaxLength) throw_invalid(name, value, fmt::format("0 to {}", kMaxLength));
}

void check_sizes(const AttentionShape& shape) {
  check_size("b", shape.b);
  check_size("h_q", shape.h_q);
  check_size("h_kv", shape.h_kv);
  check_size("s_q", shape.s_q);
  check_size("s_kv", shape.s_kv);
  // With this no product of sizes overflows anywhere later.
  for (const std::int64_t s : {shape.s_q, shape.s_kv}) {
    std::int64_t rows = 0;
    if (__builtin_mul_overflow(shape.b * std::max(shape.h_q, shape.h_kv), s, &rows) || rows > kMaxRows) {
      throw_invalid("b * h_q * s_q", fmt::format("{} * {} * {}", shape.b, shape.h_q, s),
                    fmt::format("at most {}", kMaxRows));
    }
  }
  const bool heads_match = shape.h_kv == 0 ? shape.h_q == 0 : shape.h_q % shape.h_kv == 0;
  if (!heads_match) throw_invalid("h_q", shape.h_q, fmt::format("a multiple of h_kv = {}", shape.h_kv));
}

/// Inserts the head axis that a tensor without heads leaves out.
TensorView with_heads(const TensorView& view, int full_rank) {
  if (view.rank == full_rank) return view;
  TensorView result = view;
  result.rank = full_rank;
  for (int axis = full_rank - 1; axis > 1; --axis) {
    result.shape[static_cast<std::size_t>(axis)] = view.shape[static_cast<std::size_t>(axis - 1)];
    result.strides[static_cast<std::size_t>(axis)] = view.strides[static_cast<std::size_t>(axis - 1)];
  }
  result.shape[1] = 1;
  result.strides[1] = 0;
  return result;
}

/// No offset into the tensor overflows.
void check_reach(std::string_view name, const TensorView& view) {
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(view.rank); ++axis) {
    std::int64_t reach = 0;
    if (view.shape[axis] > 1 && (__builtin_mul_overflow(view.strides[axis], 8 * (view.shape[axis] - 1), &reach) ||
                                 reach > kMaxReach || reach < -kMaxReach)) {
      throw_invalid(name, fmt::format("stride {} of axis {}", view.strides[axis], axis), "offsets below 2^60 bytes");
    }
  }
}

void check_alignment(std::string_view name, const TensorView& view) {
  if (reinterpret_cast<std::uintptr_t>(view.data) % size_of(view.dtype) != 0) {
    throw_invalid(name, fmt::format("pointer {}", view.data),
                  fmt::format("a multiple of {} bytes", size_of(view.dtype)));
  }
}

/// A packed tensor [total, h, d] as [1, h, total, d], a packed statistic [h, total] as [1, h, total]; others as they
/// are, to be refused for their rank.
TensorView unpacked(const TensorView& view, int packed_rank) {
  if (view.rank != packed_rank) return view;
  TensorView result = packed_rank == 3 ? view.swap_axes(0, 1) : view;
  for (auto axis = static_cast<std::size_t>(packed_rank); axis > 0; --axis) {
    result.shape[axis] = result.shape[axis - 1];
    result.strides[axis] = result.strides[axis - 1];
  }
  result.shape[0] = 1;
  result.strides[0] = 0;
  result.rank = packed_rank + 1;
  return result;
}

void check_packed(std::string_view name, const TensorView& view, int packed_rank, std::string_view axes) {
  if (view.rank != packed_rank + 1 || view.shape[0] != 1) {
    throw_invalid(name, fmt::format("shape {}", shape_text(view)), fmt::format("a packed tensor {}", axes));
  }
}

TensorView checked_tensor(std::string_view name, const TensorView& given, const AttentionConfig& config) {
  const DType dtype = config.dtype;
  const TensorView view = config.varlen ? unpacked(given, 3) : given;
  if (config.varlen && view.defined()) check_packed(name, view, 3, "[total, h, d]");
  if (!view.defined()) throw_invalid(name, "nothing", "a tensor [b, h, s, d] or [b, s, d]");
  if (view.rank != 3 && view.rank != 4) {
    throw_invalid(name, fmt::format("shape {}", shape_text(view)), "rank 4 [b, h, s, d] or rank 3 [b, s, d]");
  }
  if (view.dtype != dtype) throw_invalid(name, to_string(view.dtype), fmt::format("dtype {}", to_string(dtype)));
  for (const std::int64_t size : shape_of(view)) {
    if (size < 0 || size > kMaxLength) {
      throw_invalid(name, fmt::format("shape {}", shape_text(view)), fmt::format("sizes from 0 to {}", kMaxLength));
    }
  }
  const TensorView full = with_heads(view, 4);
  if (full.shape[3] > 1 && full.strides[3] != 1) {
    throw_invalid(name, fmt::format("stride {} of the last axis", full.strides[3]), "a contiguous head dim, stride 1");
  }
  check_reach(name, full);
  const bool empty = std::ranges::any_of(shape_of(full), [](std::int64_t size) { return size == 0; });
  if (full.data == nullptr && !empty) throw_invalid(name, "a null pointer", "memory for its elements");
  check_alignment(name, full);
  return full;
}

void check_shape(std::string_view name, const TensorView& view, const std::array<std::int64_t, 4>& expected,
                 std::string_view axes) {
  if (view.shape == expected) return;
  throw_invalid(name, fmt::format("shape {}", shape_text(view)),
                fmt::format("{} = [{}]", axes, fmt::join(expected, ", ")));
}

void check_writable(std::string_view name, const TensorView& view) {
  if (view.read_only) throw_invalid(name, "a view of const memory", "a writable tensor");
  if (overlaps_itself(view)) {
    throw_invalid(name, fmt::format("strides [{}]", fmt::join(view.strides, ", ")), "elements that do not overlap");
  }
}

TensorView checked_statistic(std::string_view name, const AttentionConfig& config, const TensorView& given,
                             const AttentionShape& shape, bool rank3) {
  const TensorView view = config.varlen ? unpacked(given, 2) : given;
  if (config.varlen && view.defined()) check_packed(name, view, 2, "[h_q, total_q]");
  const char* axes = rank3 ? "[b, s_q] or [b, 1, s_q]" : "[b, h_q, s_q]";
  if (!view.defined()) throw_invalid(name, "nothing", fmt::format("a tensor {}", axes));
  const DType dtype = config.dtype == DType::f64 ? DType::f64 : DType::f32;
  const int rank = rank3 ? 2 : 3;
  if (view.rank != rank && view.rank != 3) throw_invalid(name, fmt::format("shape {}", shape_text(view)), axes);
  if (view.dtype != dtype) throw_invalid(name, to_string(view.dtype), fmt::format("dtype {}", to_string(dtype)));
  const TensorView full = with_heads(view, 3);
  check_reach(name, full);
  if (full.shape != std::array<std::int64_t, 4>{shape.b, shape.h_q, shape.s_q, 0}) {
    throw_invalid(name, fmt::format("shape {}", shape_text(view)),
                  fmt::format("[b, h_q, s_q] = [{}, {}, {}]", shape.b, shape.h_q, shape.s_q));
  }
  if (full.data == nullptr && full.elements() != 0) throw_invalid(name, "a null pointer", "memory for its elements");
  check_alignment(name, full);
  return full;
}

void check_disjoint(std::string_view name, const TensorView& output, std::string_view other_name,
                    const TensorView& other) {
  if (overlap(output, other)) {
    throw_invalid(name, fmt::format("memory shared with {}", other_name), "an output that overlaps no other tensor");
  }
}

bool rows_aligned(const TensorView& view) noexcept {
  if (reinterpret_cast<std::uintptr_t>(view.data) % 16 != 0) return false;
  const auto elements = static_cast<std::int64_t>(16 / size_of(view.dtype));
  for (std::size_t axis = 0; axis < 3; ++axis) {
    if (view.shape[axis] > 1 && view.strides[axis] % elements != 0) return false;
  }
  return true;
}

void check_array(std::string_view name, const std::int32_t* array, bool needed) {
  if (array == nullptr && needed) throw_invalid(name, "a null pointer", "an array of int32 on the device");
  if (reinterpret_cast<std::uintptr_t>(array) % alignof(std::int32_t) != 0) {
    throw_invalid(name, fmt::format("pointer {}", fmt::ptr(array)), "a multiple of 4 bytes");
  }
}

/// Turns the shape of packed tensors, one batch entry of all rows, into that of the batch.
void set_packed(const AttentionConfig& config, const PackedSequences& sequences, AttentionShape& shape) {
  if (!config.varlen) {
    const bool given = sequences.b != 0 || sequences.cu_seqlens_q != nullptr || sequences.cu_seqlens_kv != nullptr;
    if (given) throw_invalid("sequences", "given", "none without AttentionConfig::varlen");
    return;
  }
  check_size("sequences.b", sequences.b);
  check_size("sequences.max_s_q", sequences.max_s_q);
  check_size("sequences.max_s_kv", sequences.max_s_kv);
  check_array("cu_seqlens_q", sequences.cu_seqlens_q, sequences.b != 0);
  check_array("cu_seqlens_kv", sequences.cu_seqlens_kv, sequences.b != 0);
  check_array("seqused_q", sequences.seqused_q, false);
  check_array("seqused_kv", sequences.seqused_kv, false);
  shape.b = sequences.b;
  shape.total_q = shape.s_q;
  shape.total_kv = shape.s_kv;
  shape.s_q = shape.total_q == 0 ? 0 : sequences.max_s_q;
  shape.s_kv = shape.total_kv == 0 ? 0 : sequences.max_s_kv;
  shape = checked(config, shape);
}

void check_dropout(const AttentionConfig& config, const DropoutState& state) {
  if (config.dropout == 0 && state.device != nullptr) {
    throw_invalid("dropout.device", "given", "none without AttentionConfig::dropout");
  }
  if (reinterpret_cast<std::uintptr_t>(state.device) % alignof(std::uint64_t) != 0) {
    throw_invalid("dropout.device", fmt::format("pointer {}", fmt::ptr(state.device)), "a multiple of 8 bytes");
  }
}

/// A tensor and what the caller knows it by.
struct Named {
  std::string_view name;
  const TensorView& view;
};

/// The sizes that q and k give a call, to hold the other tensors against.
struct Axes {
  Axes(const AttentionConfig& config, const TensorView& q, const TensorView& k)
      : d_qk(config.head_dim), d_v(config.head_dim_v != 0 ? config.head_dim_v : config.head_dim) {
    shape.b = q.shape[0];
    shape.h_q = q.shape[1];
    shape.h_kv = k.shape[1];
    shape.s_q = q.shape[2];
    shape.s_kv = k.shape[2];
  }

  void check_q(std::string_view name, const TensorView& view) const {
    check_shape(name, view, {shape.b, shape.h_q, shape.s_q, d_qk}, "[b, h_q, s_q, head_dim]");
  }
  void check_k(std::string_view name, const TensorView& view) const {
    check_shape(name, view, {shape.b, shape.h_kv, shape.s_kv, d_qk}, "[b, h_kv, s_kv, head_dim]");
  }
  void check_v(std::string_view name, const TensorView& view) const {
    check_shape(name, view, {shape.b, shape.h_kv, shape.s_kv, d_v}, "[b, h_kv, s_kv, head_dim_v]");
  }
  void check_o(std::string_view name, const TensorView& view) const {
    check_shape(name, view, {shape.b, shape.h_q, shape.s_q, d_v}, "[b, h_q, s_q, head_dim_v]");
  }

  AttentionShape shape;
  std::int64_t d_qk;
  std::int64_t d_v;
};

/// No gradient shares memory with itself, another gradient or what it is computed from.
void check_backward_overlap(const BackwardCall& call) {
  const std::array<Named, 3> written = {{{"dq", call.dq}, {"dk", call.dk}, {"dv", call.dv}}};
  const std::array<Named, 7> read = {{{"q", call.q},
                                      {"k", call.k},
                                      {"v", call.v},
                                      {"o", call.o},
                                      {"lse", call.lse},
                                      {"dout", call.dout},
                                      {"dlse", call.dlse}}};
  for (std::size_t n = 0; n < written.size(); ++n) {
    const auto& [name, view] = written[n];
    check_writable(name, view);
    for (const Named& other : read) check_disjoint(name, view, other.name, other.view);
    for (const Named& other : std::span(written).first(n)) check_disjoint(name, view, other.name, other.view);
  }
}

// ---- overlap ----

/// The bytes between which a view lies.
struct Reach {
  std::int64_t first = 0;  ///< lowest
  std::int64_t last = 0;   ///< highest
  bool empty = false;
};

Reach reach_of(const TensorView& view) noexcept {
  const auto element = static_cast<std::int64_t>(size_of(view.dtype));
  Reach reach;
  reach.first = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(view.data));
  reach.last = reach.first + element - 1;
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(view.rank); ++axis) {
    if (view.shape[axis] == 0) reach.empty = true;
    const std::int64_t length = view.strides[axis] * element * (view.shape[axis] - 1);
    (length < 0 ? reach.first : reach.last) += length;
  }
  return reach;
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

Lattice lattice_of(const TensorView& view) noexcept {
  Lattice result;
  const auto element = static_cast<std::int64_t>(size_of(view.dtype));
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(view.rank); ++axis) {
    if (view.shape[axis] <= 1 || view.strides[axis] == 0) continue;
    result.axes[result.rank++] = {std::abs(view.strides[axis]) * element, view.shape[axis]};
  }
  result.axes[result.rank++] = {1, element};  // the bytes of an element
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
/// when the budget is spent.
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

void validate(const AttentionConfig& config, bool host) {
  check_head_dim("head_dim", config.head_dim);
  if (config.head_dim_v != 0) check_head_dim("head_dim_v", config.head_dim_v);
  if (config.dtype > DType::f64) throw_invalid("dtype", static_cast<int>(config.dtype), "f16, bf16, f32 or f64");
  if (config.dtype == DType::f64 && !host) throw_invalid("dtype", "f64", "f16, bf16 or f32 on a GPU");
  if (config.scale && !(std::abs(*config.scale) <= kMaxScale)) {
    throw_invalid("scale", *config.scale, fmt::format("a finite number of at most {:g}", kMaxScale));
  }
  if (config.causal_align > CausalAlign::top_left) {
    throw_invalid("causal_align", static_cast<int>(config.causal_align), "bottom_right or top_left");
  }
  if (!(config.dropout >= 0 && config.dropout < 1)) {
    throw_invalid("dropout", config.dropout, "a probability from 0 to below 1");
  }
  if (!config.varlen && config.zero_padding) throw_invalid("zero_padding", "true", "false without varlen");
  if (!config.varlen && config.check_sequences) throw_invalid("check_sequences", "true", "false without varlen");
  check_override("kernel", config.kernel);
  check_override("kernel_backward", config.kernel_backward);
  if (!config.cache.compilers.empty()) cache_acceptance(config.cache);
}

AttentionShape checked(const AttentionConfig& config, const AttentionShape& shape) {
  AttentionShape result = shape;
  if (result.h_kv == 0) result.h_kv = result.h_q;
  if (config.varlen) {
    check_size("b", result.b);
    check_size("s_q", result.s_q);
    check_size("s_kv", result.s_kv);
    if (result.total_q == 0) result.total_q = result.b * result.s_q;
    if (result.total_kv == 0) result.total_kv = result.b * result.s_kv;
    check_size("total_q", result.total_q);
    check_size("total_kv", result.total_kv);
    check_size("total_q + 16 * b", result.total_q + 16 * result.b);  // rows of the backward's workspace
    result.s_q = result.s_q > 0 ? std::min(result.s_q, result.total_q) : result.total_q;
    result.s_kv = result.s_kv > 0 ? std::min(result.s_kv, result.total_kv) : result.total_kv;
  } else {
    result.total_q = result.total_kv = 0;
  }
  check_sizes(result);
  return result;
}

void check_lengths(const PackedSequences& sequences, const AttentionShape& shape) {
  if (sequences.b == 0) return;  // the arrays may be null
  const auto check = [&](const char* cu_name, const std::int32_t* cu, const char* used_name, const std::int32_t* used,
                         std::int64_t total, std::int64_t longest) {
    for (std::int64_t i = 0; i <= sequences.b; ++i) {
      const std::int64_t least = i == 0 ? 0 : cu[i - 1];
      if (cu[i] < least || cu[i] > total) {
        throw_invalid(fmt::format("{}[{}]", cu_name, i), cu[i], fmt::format("{} to {}", least, total));
      }
      if (i == 0) continue;
      const std::int64_t length = cu[i] - least;
      if (used != nullptr && (used[i - 1] < 0 || used[i - 1] > length)) {
        throw_invalid(fmt::format("{}[{}]", used_name, i - 1), used[i - 1], fmt::format("0 to {}", length));
      }
      const std::int64_t count = used != nullptr ? used[i - 1] : length;
      if (count > longest) {
        throw_invalid(fmt::format("{}[{}] - {}[{}]", cu_name, i, cu_name, i - 1), count,
                      fmt::format("at most {}, the longest sequence", longest));
      }
    }
  };
  check("cu_seqlens_q", sequences.cu_seqlens_q, "seqused_q", sequences.seqused_q, shape.total_q, shape.s_q);
  check("cu_seqlens_kv", sequences.cu_seqlens_kv, "seqused_kv", sequences.seqused_kv, shape.total_kv, shape.s_kv);
}

bool overlaps_itself(const TensorView& view) noexcept {
  if (reach_of(view).empty) return false;
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(view.rank); ++axis) {
    if (view.shape[axis] > 1 && view.strides[axis] == 0) return true;
  }
  Lattice lattice = lattice_of(view);
  const std::span<Lattice::Axis> axes(lattice.axes.data(), lattice.rank);
  sort_by_step(axes, false);
  std::int64_t reach = 0;  // the largest offset of the finer axes
  for (const Lattice::Axis& axis : axes) {
    if (axis.step <= reach) return true;
    reach += axis.step * (axis.count - 1);
  }
  return false;
}

bool overlap(const TensorView& a, const TensorView& b) noexcept {
  if (!a.defined() || !b.defined()) return false;
  const Reach reach_a = reach_of(a);
  const Reach reach_b = reach_of(b);
  if (reach_a.empty || reach_b.empty || reach_a.last < reach_b.first || reach_b.last < reach_a.first) return false;
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
  return solvable(used, reach_b.first - reach_a.first, budget);
}

ForwardCall check_forward(const AttentionConfig& config, const ForwardInputs& inputs, const ForwardOutputs& outputs) {
  ForwardCall call;
  call.q = checked_tensor("q", inputs.q, config);
  call.k = checked_tensor("k", inputs.k, config);
  call.v = checked_tensor("v", inputs.v, config);
  call.o = checked_tensor("o", outputs.o, config);
  const Axes axes(config, call.q, call.k);
  AttentionShape& shape = call.shape;
  shape = axes.shape;
  call.sequences = inputs.sequences;
  call.dropout = inputs.dropout;
  axes.check_q("q", call.q);
  axes.check_k("k", call.k);
  axes.check_v("v", call.v);
  axes.check_o("o", call.o);
  check_sizes(shape);
  check_writable("o", call.o);
  if (outputs.lse.defined()) {
    call.lse = checked_statistic("lse", config, outputs.lse, shape, inputs.q.rank == 3);
    check_writable("lse", call.lse);
    check_disjoint("lse", call.lse, "o", call.o);
  }
  const std::array<Named, 3> read = {{{"q", call.q}, {"k", call.k}, {"v", call.v}}};
  for (const auto& [name, view] : read) {
    check_disjoint("o", call.o, name, view);
    check_disjoint("lse", call.lse, name, view);
  }
  shape.aligned = rows_aligned(call.q) && rows_aligned(call.k) && rows_aligned(call.v) && rows_aligned(call.o);
  set_packed(config, call.sequences, shape);
  call.empty = shape.b == 0 || shape.h_q == 0 || shape.s_q == 0;
  check_dropout(config, call.dropout);
  return call;
}

BackwardCall check_backward(const AttentionConfig& config, const BackwardInputs& inputs,
                            const BackwardOutputs& outputs) {
  BackwardCall call;
  call.q = checked_tensor("q", inputs.q, config);
  call.k = checked_tensor("k", inputs.k, config);
  call.v = checked_tensor("v", inputs.v, config);
  call.o = checked_tensor("o", inputs.o, config);
  call.dout = checked_tensor("dout", inputs.dout, config);
  call.dq = checked_tensor("dq", outputs.dq, config);
  call.dk = checked_tensor("dk", outputs.dk, config);
  call.dv = checked_tensor("dv", outputs.dv, config);
  const Axes axes(config, call.q, call.k);
  call.shape = axes.shape;
  call.sequences = inputs.sequences;
  call.dropout = inputs.dropout;
  axes.check_q("q", call.q);
  axes.check_k("k", call.k);
  axes.check_v("v", call.v);
  axes.check_o("o", call.o);
  axes.check_o("dout", call.dout);
  axes.check_q("dq", call.dq);
  axes.check_k("dk", call.dk);
  axes.check_v("dv", call.dv);
  check_sizes(call.shape);
  const bool rank3 = inputs.q.rank == 3;
  call.lse = checked_statistic("lse", config, inputs.lse, call.shape, rank3);
  if (inputs.dlse.defined()) call.dlse = checked_statistic("dlse", config, inputs.dlse, call.shape, rank3);
  check_backward_overlap(call);
  call.shape.aligned = std::ranges::all_of(
      std::array{call.q, call.k, call.v, call.o, call.dout, call.dq, call.dk, call.dv}, rows_aligned);
  const std::array gradients = {call.dq, call.dk, call.dv};
  call.empty = std::ranges::all_of(gradients, [](const TensorView& view) { return view.elements() == 0; });
  set_packed(config, call.sequences, call.shape);
  call.empty = call.empty || call.shape.b == 0;
  check_dropout(config, call.dropout);
  return call;
}

}  // namespace fa::api
