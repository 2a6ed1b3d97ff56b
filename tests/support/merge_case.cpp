#include "support/merge_case.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <ostream>
#include <random>

#include "reference/geometry.hpp"
#include "support/half_unit.hpp"

namespace fa::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
using Random = std::mt19937;

template <class T, std::size_t kCount>
T pick(Random& random, const std::array<T, kCount>& values) {
  return values[random() % kCount];
}

DType dtype_of(const MergeCase& c, std::int64_t state) {
  const bool floats = c.kinds == MergeCase::Kinds::floats || (c.kinds == MergeCase::Kinds::mixed && state % 2 == 1);
  return floats ? DType::f32 : c.dtype;
}

DType statistic(const MergeCase& c) {
  return c.dtype == DType::f64 ? DType::f64 : DType::f32;
}

}  // namespace

AttentionConfig MergeCase::config() const {
  AttentionConfig config;
  config.head_dim = 64;
  config.head_dim_v = static_cast<int>(d_v);
  config.dtype = dtype;
  config.varlen = packed;
  return config;
}

MergeShape MergeCase::shape() const {
  MergeShape shape;
  if (kinds == Kinds::floats) shape.states = DType::f32;
  shape.mixed = kinds == Kinds::mixed && states > 1;
  if (float_result) shape.result = DType::f32;
  shape.aligned = aligned;
  shape.sum = sum;
  return shape;
}

std::string to_string(const MergeCase& c) {
  return fmt::format(
      "{}{} {} states of kind {}{} [{}, {}, {}, {}]{} into {}{}{}{} in place {} {} rows {} spread {} level {} seed {}",
      c.sum ? "sum of " : "", to_string(c.dtype), c.states, static_cast<int>(c.kinds), c.stacked ? " stacked" : "", c.b,
      c.h_q, c.s_q, c.d_v, c.packed ? " packed" : "", c.float_result ? "f32" : "the dtype", c.lse ? "" : " without lse",
      c.aligned ? "" : " unaligned", c.sink ? " sink" : "", c.in_place, c.lse_in_place, static_cast<int>(c.rows),
      c.spread, c.level, c.seed);
}

void PrintTo(const MergeCase& c, std::ostream* out) {
  *out << to_string(c);
}

void draw_rows(MergeCase& c, std::uint32_t seed) {
  Random random(seed);
  c.seed = seed;
  c.packed = random() % 3 == 0;
  c.b = pick(random, std::array<std::int64_t, 4>{1, 2, 3, 7});
  c.h_q = pick(random, std::array<std::int64_t, 4>{1, 2, 5, 8});
  c.s_q = pick(random, std::array<std::int64_t, 4>{1, 3, 17, 40});
  c.stacked = c.kinds != MergeCase::Kinds::mixed && random() % 3 == 0;
  c.states = pick(random, std::array<std::int64_t, 7>{2, 2, 3, 4, 5, 8, 16});
  if (c.stacked && random() % 2 == 0) c.states = 37;
  if (random() % 12 == 0 && c.kinds != MergeCase::Kinds::mixed) c.states = 1;
  c.sink = random() % 3 == 0;
  c.lse = random() % 5 != 0;
  c.in_place = c.lse_in_place = -1;
  const auto state = static_cast<int>(random() % static_cast<std::uint32_t>(c.states));
  const DType result = c.float_result ? DType::f32 : c.dtype;
  if (random() % 2 == 0 && dtype_of(c, state) == result) c.in_place = state;
  if (c.sum) c.sink = c.lse = false;
  if (random() % 2 == 0 && c.lse) c.lse_in_place = random() % 4 == 0 ? 0 : state;
  c.rows = pick(random, std::array{MergeCase::Rows::usual, MergeCase::Rows::without_keys, MergeCase::Rows::nans});
  c.spread = pick(random, std::array{4.0, 0.0, 30.0, 300.0});
  c.level = pick(random, std::array{0.0, 10.0, -2000.0, 50000.0});
}

MergeCase random_merge_case(std::uint32_t seed) {
  Random random(seed * 2654435761u + 1);
  MergeCase c;
  c.dtype = pick(random, std::array{DType::f16, DType::bf16, DType::f32});
  c.d_v = pick(random, std::array<std::int64_t, 9>{8, 24, 40, 64, 80, 128, 136, 192, 256});
  if (c.dtype != DType::f32) {
    c.kinds = pick(random, std::array{MergeCase::Kinds::own, MergeCase::Kinds::floats, MergeCase::Kinds::mixed});
    c.float_result = random() % 2 == 0;
  }
  c.aligned = random() % 4 != 0;
  draw_rows(c, seed + 1);
  return c;
}

std::size_t MergeData::add_buffer(const std::string& name, std::size_t bytes) {
  buffers_.push_back({name, std::vector<std::byte>(bytes, std::byte{0xff}), false, false});
  return buffers_.size() - 1;
}

std::size_t MergeData::offset(const Tensor& tensor, At at) {
  std::int64_t elements = 0;
  for (std::size_t axis = 0; axis < 4; ++axis) elements += at[axis] * tensor.view.strides[axis];
  return tensor.start + static_cast<std::size_t>(elements) * size_of(tensor.view.dtype);
}

/// A tensor whose rows lie in one of the orders of three axes. Unaligned ones start one element behind a multiple of 16
/// bytes, and have a gap of one between rows.
MergeData::Tensor MergeData::layout(DType dtype, bool is_row, std::uint32_t order, std::size_t* bytes) const {
  static constexpr std::array<std::array<std::size_t, 3>, 6> kOrders{
      {{0, 1, 2}, {0, 2, 1}, {2, 0, 1}, {1, 0, 2}, {2, 1, 0}, {1, 2, 0}}};
  Tensor tensor;
  TensorView& view = tensor.view;
  view.dtype = dtype;
  view.rank = is_row ? 4 : 3;
  view.shape = {c_.packed ? 1 : c_.b, c_.h_q, c_.packed ? c_.b * c_.s_q : c_.s_q, is_row ? c_.d_v : 0};
  const std::int64_t gap = c_.aligned ? 16 / static_cast<std::int64_t>(size_of(dtype)) : 1;
  std::int64_t stride = is_row ? c_.d_v + gap : 1;
  view.strides[3] = is_row ? 1 : 0;
  for (std::size_t i = 3; i-- > 0;) {
    const std::size_t axis = kOrders[order % kOrders.size()][i];
    view.strides[axis] = stride;
    stride *= view.shape[axis];
  }
  tensor.start = is_row && !c_.aligned ? size_of(dtype) : 0;
  *bytes = static_cast<std::size_t>(stride) * size_of(dtype) + tensor.start;
  return tensor;
}

MergeData::Tensor MergeData::add_tensor(const std::string& name, DType dtype, bool is_row, std::uint32_t order) {
  std::size_t bytes = 0;
  Tensor tensor = layout(dtype, is_row, order, &bytes);
  tensor.buffer = add_buffer(name, bytes);
  tensors_.push_back(tensor);
  return tensor;
}

void MergeData::add_states() {
  Random random(c_.seed * 31 + 5);
  if (!c_.stacked) {
    for (std::int64_t i = 0; i < c_.states; ++i) {
      o_.push_back(add_tensor(fmt::format("states[{}].o", i), dtype_of(c_, i), true, random()));
      lse_.push_back(add_tensor(fmt::format("states[{}].lse", i), statistic(c_), false, random()));
    }
    return;
  }
  for (const bool is_row : {true, false}) {
    std::size_t bytes = 0;
    Tensor tensor = layout(is_row ? dtype_of(c_, 0) : statistic(c_), is_row, random(), &bytes);
    const std::size_t each = bytes - tensor.start;
    tensor.buffer = add_buffer(is_row ? "o of the stack" : "lse of the stack",
                               each * static_cast<std::size_t>(c_.states) + tensor.start);
    (is_row ? stride_o_ : stride_lse_) = static_cast<std::int64_t>(each / size_of(tensor.view.dtype));
    for (std::int64_t i = 0; i < c_.states; ++i, tensor.start += each) {
      tensors_.push_back(tensor);
      (is_row ? o_ : lse_).push_back(tensor);
    }
  }
}

MergeData::MergeData(const MergeCase& c) : c_(c) {
  add_states();
  Random random(c_.seed * 17 + 3);
  const DType result = c_.float_result ? DType::f32 : c_.dtype;
  merged_o_ = c_.in_place >= 0 ? o_[static_cast<std::size_t>(c_.in_place)] : add_tensor("o", result, true, random());
  if (c_.lse) {
    merged_lse_ = c_.lse_in_place >= 0 ? lse_[static_cast<std::size_t>(c_.lse_in_place)]
                                       : add_tensor("lse", statistic(c_), false, random());
  }
  if (c_.sink) {
    sink_.view = TensorView(static_cast<void*>(nullptr), statistic(c_), {1, 1, c_.h_q});
    sink_.buffer = add_buffer("sink", static_cast<std::size_t>(c_.h_q) * size_of(statistic(c_)));
    tensors_.push_back(sink_);
  }
  fill();
  for (const Tensor& tensor : o_) buffers_[tensor.buffer].read = true;
  for (const Tensor& tensor : lse_) buffers_[tensor.buffer].read = !c_.sum;
  if (c_.sink) buffers_[sink_.buffer].read = true;
  buffers_[merged_o_.buffer].written = true;
  if (c_.lse) buffers_[merged_lse_.buffer].written = true;
}

void MergeData::set(const Tensor& tensor, At at, double value) {
  const TensorView element(buffers_[tensor.buffer].bytes.data() + offset(tensor, at), tensor.view.dtype, {1});
  reference::store_element(element, 0, value);
}

double MergeData::number(const Tensor& tensor, const std::vector<std::byte>& bytes, At at) const {
  const TensorView element(static_cast<const void*>(bytes.data() + offset(tensor, at)), tensor.view.dtype, {1});
  double value = 0;
  reference::load(element, 0, 1, 1, &value);
  return value;
}

void MergeData::fill_row(std::size_t state, std::int64_t b, std::int64_t h, std::int64_t s, std::uint32_t random) {
  Random row(random);
  double lse = c_.level + c_.spread * (static_cast<double>(row() % 4096) / 2048.0 - 1.0);
  bool is_nan = false;
  if (c_.rows != MergeCase::Rows::usual && row() % 3 == 0) {
    lse = row() % 4 == 0 ? kInfinity : -kInfinity;
    is_nan = true;  // which reaches nothing
  } else if (c_.rows == MergeCase::Rows::nans && row() % 9 == 0) {
    if (row() % 2 == 0) lse = kNan;
    is_nan = !std::isnan(lse);
  }
  set(lse_[state], {b, h, s, 0}, lse);
  for (std::int64_t d = 0; d < c_.d_v; ++d) {
    const double value = static_cast<double>(row() % 4096) / 1024.0 - 2.0;
    set(o_[state], {b, h, s, d}, is_nan && row() % 2 == 0 ? kNan : value);
  }
}

void MergeData::fill() {
  Random random(c_.seed * 7 + 11);
  const At& shape = merged_o_.view.shape;
  for (std::int64_t b = 0; b < shape[0]; ++b) {
    for (std::int64_t h = 0; h < shape[1]; ++h) {
      for (std::int64_t s = 0; s < shape[2]; ++s) {
        for (std::size_t i = 0; i < o_.size(); ++i) fill_row(i, b, h, s, random());
      }
    }
  }
  if (!c_.sink) return;
  for (std::int64_t h = 0; h < c_.h_q; ++h) {
    const double sink = h % 4 == 3 ? -kInfinity : c_.level + static_cast<double>(random() % 64) / 16.0 - 2.0;
    set(sink_, {0, 0, h, 0}, sink);
  }
}

TensorView MergeData::view_at(const Tensor& tensor, const std::vector<void*>& at) const {
  TensorView view = tensor.view;
  view.data = static_cast<std::byte*>(at[tensor.buffer]) + tensor.start;
  if (!c_.packed) return view;
  // [1, h, total, d] is [total, h, d], and [1, h, total] is [h, total].
  TensorView packed = view;
  packed.rank = view.rank - 1;
  packed.shape =
      view.rank == 4 ? At{view.shape[2], view.shape[1], view.shape[3], 0} : At{view.shape[1], view.shape[2], 0, 0};
  packed.strides = view.rank == 4 ? At{view.strides[2], view.strides[1], view.strides[3], 0}
                                  : At{view.strides[1], view.strides[2], 0, 0};
  return packed;
}

MergeData::Call MergeData::call(const std::vector<void*>& at) const {
  Call call;
  for (std::size_t i = 0; i < (c_.stacked ? 1 : o_.size()); ++i) {
    call.states.push_back({view_at(o_[i], at), c_.sum ? TensorView{} : view_at(lse_[i], at)});
  }
  call.inputs.states = call.states;  // a vector that is moved keeps its memory
  if (c_.stacked) {
    call.inputs.stacked = c_.states;
    call.inputs.stride_o = stride_o_;
    call.inputs.stride_lse = c_.sum ? 0 : stride_lse_;
  }
  call.inputs.sum = c_.sum;
  if (c_.sink) call.inputs.sink = TensorView(at[sink_.buffer], statistic(c_), {c_.h_q});
  call.outputs.o = view_at(merged_o_, at);
  if (c_.lse) call.outputs.lse = view_at(merged_lse_, at);
  return call;
}

MergeData::Call MergeData::call() {
  std::vector<void*> at;
  for (Buffer& buffer : buffers_) at.push_back(buffer.bytes.data());
  return call(at);
}

/// The kernel takes weights relative to the greatest logarithm, in f32: each is off by what its exponent is rounded by,
/// 2^-23 of that, and by its exponential, 2^-22 of the weight (docs/numerics.md).
std::string MergeData::judge_row(At at, const std::vector<std::vector<std::byte>>& after) const {
  std::vector<double> logs;
  for (std::size_t i = 0; i < lse_.size(); ++i) {
    const double lse = c_.sum ? 0 : number(lse_[i], buffers_[lse_[i].buffer].bytes, at);
    logs.push_back(lse == kInfinity ? -kInfinity : lse);
  }
  if (c_.sink) logs.push_back(number(sink_, buffers_[sink_.buffer].bytes, {0, 0, at[1], 0}));
  double base = -kInfinity;
  for (const double lse : logs) base = lse > base ? lse : base;
  if (base == -kInfinity) base = 0;
  double sum = 0;
  for (const double lse : logs) sum += std::exp(lse - base);
  const bool f64 = c_.dtype == DType::f64;
  double off = 0;  // of the sum of weights, relatively
  std::vector<double> weights, errors;
  for (const double lse : logs) {
    const double weight = lse == -kInfinity || sum == 0 ? 0 : std::exp(lse - base) / sum;
    const double far = lse == -kInfinity ? 0 : base - lse;
    weights.push_back(weight);
    errors.push_back(f64 ? weight * 0x1p-50 : weight * (0x1p-22 + far * 0x1p-22) + 0x1p-125);
    off += errors.back();
  }
  if (c_.sum) {
    weights.assign(logs.size(), 1.0);
    errors.assign(logs.size(), 0.0);
    off = 0;
  }
  const double rounding = static_cast<double>(logs.size() + 3) * (f64 ? 0x1p-52 : 0x1p-24);
  for (std::int64_t d = 0; d < c_.d_v; ++d) {
    at[3] = d;
    double expected = 0, magnitude = 0, error = 0;
    for (std::size_t i = 0; i < o_.size(); ++i) {
      if (logs[i] == -kInfinity) continue;
      const double o = number(o_[i], buffers_[o_[i].buffer].bytes, at);
      expected += weights[i] * o;
      magnitude += weights[i] * std::abs(o);
      error += errors[i] * std::abs(o);
    }
    const double bound =
        error + magnitude * (off + rounding) + half_unit(merged_o_.view.dtype, std::abs(expected), 3) * 1.001;
    const double is = number(merged_o_, after[merged_o_.buffer], at);
    const bool right = std::isnan(expected) ? std::isnan(is) : std::abs(is - expected) <= bound;
    if (!right)
      return fmt::format("o[{}, {}, {}, {}] is {}, not {} +- {}", at[0], at[1], at[2], d, is, expected, bound);
  }
  if (!c_.lse) return {};
  at[3] = 0;
  const double expected = sum == 0 ? -kInfinity : base + std::log(sum);
  const double is = number(merged_lse_, after[merged_lse_.buffer], at);
  const double bound = off + (f64 ? 0 : 0x1p-21 + std::abs(std::log(std::max(sum, 1.0))) * 0x1p-22) +
                       half_unit(statistic(c_), std::abs(expected), 3) * 1.001;
  const bool right = std::isnan(expected)   ? std::isnan(is)
                     : std::isinf(expected) ? is == expected
                                            : std::abs(is - expected) <= bound;
  if (!right) return fmt::format("lse[{}, {}, {}] is {}, not {} +- {}", at[0], at[1], at[2], is, expected, bound);
  return {};
}

std::string MergeData::judge(const std::vector<std::vector<std::byte>>& after) const {
  const At& shape = merged_o_.view.shape;
  for (std::int64_t b = 0; b < shape[0]; ++b) {
    for (std::int64_t h = 0; h < shape[1]; ++h) {
      for (std::int64_t s = 0; s < shape[2]; ++s) {
        std::string wrong = judge_row({b, h, s, 0}, after);
        if (!wrong.empty()) return wrong;
      }
    }
  }
  // What is not of the result is what it was.
  std::vector<std::vector<std::byte>> kept;
  for (const Buffer& buffer : buffers_) kept.push_back(buffer.bytes);
  for (const Tensor* const tensor : {&merged_o_, &merged_lse_}) {
    if (!tensor->view.defined()) continue;
    const std::size_t bytes =
        static_cast<std::size_t>(tensor->view.rank == 4 ? c_.d_v : 1) * size_of(tensor->view.dtype);
    for (std::int64_t b = 0; b < shape[0]; ++b) {
      for (std::int64_t h = 0; h < shape[1]; ++h) {
        for (std::int64_t s = 0; s < shape[2]; ++s) {
          const auto at = static_cast<std::ptrdiff_t>(offset(*tensor, {b, h, s, 0}));
          std::copy_n(after[tensor->buffer].begin() + at, bytes, kept[tensor->buffer].begin() + at);
        }
      }
    }
  }
  for (std::size_t i = 0; i < kept.size(); ++i) {
    if (kept[i] != after[i]) return fmt::format("{} was written beside the result", buffers_[i].name);
  }
  return {};
}

}  // namespace fa::test
