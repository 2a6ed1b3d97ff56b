#include "support/attention_case.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <ostream>
#include <random>
#include <span>
#include <utility>

#include "reference/backward.hpp"
#include "reference/forward.hpp"
#include "reference/geometry.hpp"

namespace fa::test {
namespace {

constexpr std::uint64_t kGradientSeeds = std::uint64_t{1} << 40;  // far from those of q, k and v

/// The sum of twelve 16-bit uniforms, which integer arithmetic makes the same everywhere, shifted to mean 0 and scaled
/// to variance 1.
double next_normal(std::mt19937_64& engine) {
  std::int64_t sum = 0;
  for (int draw = 0; draw < 3; ++draw) {
    const std::uint64_t bits = engine();
    for (int part = 0; part < 4; ++part) sum += static_cast<std::int64_t>(bits >> (16 * part) & 0xffff);
  }
  return (static_cast<double>(sum) - 12 * 32767.5) / 65536;
}

void fill_with_normals(HostTensor& tensor, std::uint64_t seed, double unit = 1) {
  std::mt19937_64 engine(seed);
  const TensorView t = tensor.view();
  for (std::int64_t b = 0; b < t.shape[0]; ++b) {
    for (std::int64_t h = 0; h < t.shape[1]; ++h) {
      for (std::int64_t s = 0; s < t.shape[2]; ++s) {
        for (std::int64_t d = 0; d < (t.rank == 4 ? t.shape[3] : 1); ++d) {
          tensor.set(b, h, s, d, unit * next_normal(engine));
        }
      }
    }
  }
}

double element(const TensorView& t, std::int64_t offset) {
  double value = 0;
  reference::load(t, offset, 1, 1, &value);
  return value;
}

/// 0 for equal infinities; infinite where one is NaN or they are infinitely far apart.
double distance(double actual, double expected) {
  if (actual == expected) return 0;
  const double difference = std::abs(actual - expected);
  return std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
}

/// Calls visit(offset in a, offset in b) for every element of two tensors of one shape.
template <class Visit>
void for_each_pair(const TensorView& a, const TensorView& b, const Visit& visit) {
  std::array<std::int64_t, 4> shape{1, 1, 1, 1};
  std::copy_n(a.shape.begin(), a.rank, shape.begin());
  for (std::int64_t n0 = 0; n0 < shape[0]; ++n0) {
    for (std::int64_t n1 = 0; n1 < shape[1]; ++n1) {
      for (std::int64_t n2 = 0; n2 < shape[2]; ++n2) {
        for (std::int64_t n3 = 0; n3 < shape[3]; ++n3) {
          const auto offset = [&](const TensorView& t) {
            return n0 * t.strides[0] + n1 * t.strides[1] + n2 * t.strides[2] + (t.rank == 4 ? n3 * t.strides[3] : 0);
          };
          visit(offset(a), offset(b));
        }
      }
    }
  }
}

bool same_shape(const TensorView& a, const TensorView& b) {
  return a.rank == b.rank && std::equal(a.shape.begin(), a.shape.begin() + a.rank, b.shape.begin());
}

DType statistics_dtype(const AttentionCase& c) {
  return c.dtype == DType::f64 ? DType::f64 : DType::f32;
}

AttentionGradients gradients_of(const AttentionCase& c, DType dtype) {
  return {HostTensor(dtype, c.b, c.h_q, c.s_q, c.d_qk, c.layout),
          HostTensor(dtype, c.b, c.h_kv, c.s_kv, c.d_qk, c.layout),
          HostTensor(dtype, c.b, c.h_kv, c.s_kv, c.d_v, c.layout)};
}

}  // namespace

float AttentionCase::softmax_scale() const {
  return scale.value_or(static_cast<float>(1.0 / std::sqrt(static_cast<double>(d_qk))));
}

std::string to_string(const AttentionCase& c) {
  const auto number = [](auto value) { return std::to_string(value); };
  std::string text = std::string(fa::to_string(c.dtype)) + "_b" + number(c.b) + "_h" + number(c.h_q) + "kv" +
                     number(c.h_kv) + "_s" + number(c.s_q) + "x" + number(c.s_kv) + "_d" + number(c.d_qk) + "x" +
                     number(c.d_v);
  if (c.causal) text += c.causal_align == CausalAlign::bottom_right ? "_causal" : "_causal_top_left";
  if (c.scale) {
    std::string value = number(*c.scale);
    std::replace(value.begin(), value.end(), '-', 'm');
    std::replace(value.begin(), value.end(), '.', 'p');
    text += "_scale" + value;
  }
  if (c.layout == Layout::bshd) text += "_bshd";
  if (c.early_keys) text += "_early_keys";
  return text;
}

void PrintTo(const AttentionCase& c, std::ostream* out) {
  *out << to_string(c) << " seed " << c.seed;
}

HostTensor::HostTensor(DType dtype, std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t d, Layout layout)
    : bytes_(static_cast<std::size_t>(b * h * s * d) * size_of(dtype)) {
  layout_.dtype = dtype;
  layout_.rank = 4;
  layout_.shape = {b, h, s, d};
  layout_.strides = layout == Layout::bhsd ? std::array{h * s * d, s * d, d, std::int64_t{1}}
                                           : std::array{s * h * d, d, h * d, std::int64_t{1}};
}

HostTensor::HostTensor(DType dtype, std::int64_t b, std::int64_t h, std::int64_t s)
    : bytes_(static_cast<std::size_t>(b * h * s) * size_of(dtype)) {
  layout_.dtype = dtype;
  layout_.rank = 3;
  layout_.shape = {b, h, s};
  layout_.strides = {h * s, s, 1};
}

TensorView HostTensor::view() {
  TensorView v = layout_;
  v.data = bytes_.data();
  return v;
}

TensorView HostTensor::view() const {
  TensorView v = layout_;
  v.data = const_cast<std::byte*>(bytes_.data());
  v.read_only = true;
  return v;
}

void HostTensor::fill_with_nan() {
  std::fill(bytes_.begin(), bytes_.end(), std::byte{0xff});
}

double HostTensor::at(std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t d) const {
  return element(view(), reference::row_offset(layout_, b, h, s) + d * layout_.strides[3]);
}

void HostTensor::set(std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t d, double value) {
  reference::store_element(view(), reference::row_offset(layout_, b, h, s) + d * layout_.strides[3], value);
}

void fill(HostTensor& tensor, const Rows& rows, double value) {
  const TensorView t = tensor.view();
  for (std::int64_t b = 0; b < t.shape[0]; ++b) {
    for (std::int64_t h = 0; h < t.shape[1]; ++h) {
      for (std::int64_t s = rows.first; s < rows.first + rows.count; ++s) {
        for (std::int64_t d = 0; d < (t.rank == 4 ? t.shape[3] : 1); ++d) tensor.set(b, h, s, d, value);
      }
    }
  }
}

bool equal_outside(const HostTensor& a, const HostTensor& b, const Rows& rows) {
  const TensorView t = a.view();
  const auto equal = [](double x, double y) { return x == y || (std::isnan(x) && std::isnan(y)); };
  for (std::int64_t n = 0; n < t.shape[0]; ++n) {
    for (std::int64_t h = 0; h < t.shape[1]; ++h) {
      for (std::int64_t s = 0; s < t.shape[2]; ++s) {
        if (rows.contain(s)) continue;
        for (std::int64_t d = 0; d < (t.rank == 4 ? t.shape[3] : 1); ++d) {
          if (!equal(a.at(n, h, s, d), b.at(n, h, s, d))) return false;
        }
      }
    }
  }
  return true;
}

namespace {

/// Those of the second half to a twentieth: one KV tile brings all of the rise.
void shorten_late_keys(HostTensor& k, const AttentionCase& c) {
  constexpr double kShort = 0.05;
  for (std::int64_t b = 0; b < c.b; ++b) {
    for (std::int64_t h = 0; h < c.h_kv; ++h) {
      for (std::int64_t s = c.s_kv / 2; s < c.s_kv; ++s) {
        for (std::int64_t d = 0; d < c.d_qk; ++d) k.set(b, h, s, d, kShort * k.at(b, h, s, d));
      }
    }
  }
}

}  // namespace

DType value_dtype(DType dtype) {
  return dtype == DType::i8 ? DType::e4m3 : dtype;
}

namespace {

/// What a code of q or k of standard normal inputs stands for.
double scale_unit(const AttentionCase& c) {
  return c.dtype == DType::i8 ? 1.0 / 32 : 1;
}

void add_unit_scales(const AttentionCase& c, AttentionInputs& inputs) {
  inputs.q_scale = HostTensor(DType::f32, c.b, c.h_q, c.s_q);
  inputs.k_scale = HostTensor(DType::f32, c.b, c.h_kv, 1);
  inputs.v_scale = HostTensor(DType::f32, c.b, c.h_kv, 1);
  fill(inputs.q_scale, {0, c.s_q}, scale_unit(c));
  fill(inputs.k_scale, {0, 1}, scale_unit(c));
  fill(inputs.v_scale, {0, 1}, 1);
}

}  // namespace

AttentionInputs make_inputs(const AttentionCase& c) {
  AttentionInputs inputs{HostTensor(c.dtype, c.b, c.h_q, c.s_q, c.d_qk, c.layout),
                         HostTensor(c.dtype, c.b, c.h_kv, c.s_kv, c.d_qk, c.layout),
                         HostTensor(value_dtype(c.dtype), c.b, c.h_kv, c.s_kv, c.d_v, c.layout)};
  // mt19937_64 spreads neighbouring seeds well; the streams of a case must only not coincide with another case's.
  fill_with_normals(inputs.q, 3 * c.seed, 1 / scale_unit(c));
  fill_with_normals(inputs.k, 3 * c.seed + 1, 1 / scale_unit(c));
  fill_with_normals(inputs.v, 3 * c.seed + 2);
  if (c.early_keys) shorten_late_keys(inputs.k, c);
  if (c.dtype == DType::i8) add_unit_scales(c, inputs);
  return inputs;
}

TensorView scale_of_heads(const HostTensor& scale, std::int64_t rows) {
  if (scale.bytes().empty()) return {};
  TensorView view = scale.view();
  if (view.shape[2] != 1) return view;
  view.shape[2] = rows;
  view.strides[2] = 0;
  return view;
}

void add_scales(const AttentionCase& c, AttentionInputs& inputs) {
  inputs.q_scale = HostTensor(DType::f32, c.b, c.h_q, c.s_q);
  inputs.k_scale = HostTensor(DType::f32, c.b, c.h_kv, 1);
  inputs.v_scale = HostTensor(DType::f32, c.b, c.h_kv, 1);
  std::mt19937_64 engine(c.seed);
  for (HostTensor* const scale : {&inputs.q_scale, &inputs.k_scale, &inputs.v_scale}) {
    const TensorView t = scale->view();
    for (std::int64_t i = 0; i < t.shape[0] * t.shape[1] * t.shape[2]; ++i) {
      const std::int64_t row = i / t.shape[2];
      const double sign = engine() % 4 == 0 ? -1 : 1;
      scale->set(
          row / t.shape[1], row % t.shape[1], i % t.shape[2], 0,
          sign * (0.5 + static_cast<double>(engine() % 64) / 64) * (scale == &inputs.v_scale ? 1 : scale_unit(c)));
    }
  }
  if (c.dtype != DType::i8) return;
  inputs.row_bias = HostTensor(DType::f32, c.b, c.h_q, c.s_q);
  fill_with_normals(inputs.row_bias, c.seed, 20);
}

namespace {

HostTensor scales_of_keys(const AttentionCase& c, std::uint64_t seed, double unit = 1) {
  HostTensor scales(DType::f32, c.b, c.h_kv, c.s_kv);
  std::mt19937_64 engine(seed);
  for (std::int64_t i = 0; i < c.b * c.h_kv * c.s_kv; ++i) {
    const double magnitude = engine() % 16 == 0 ? 0 : unit * (0.25 + static_cast<double>(engine() % 64) / 32);
    scales.set(i / c.s_kv / c.h_kv, i / c.s_kv % c.h_kv, i % c.s_kv, 0, engine() % 4 == 0 ? -magnitude : magnitude);
  }
  return scales;
}

}  // namespace

void add_key_scales(const AttentionCase& c, AttentionInputs& inputs) {
  inputs.k_scale = scales_of_keys(c, c.seed + 77, scale_unit(c));
}

void add_value_scales(const AttentionCase& c, AttentionInputs& inputs) {
  inputs.v_scale = scales_of_keys(c, c.seed + 78);
}

AttentionOutputs make_outputs(const AttentionCase& c) {
  AttentionOutputs outputs{HostTensor(size_of(c.dtype) == 1 ? c.o_dtype : c.dtype, c.b, c.h_q, c.s_q, c.d_v, c.layout),
                           HostTensor(statistics_dtype(c), c.b, c.h_q, c.s_q)};
  outputs.o.fill_with_nan();
  outputs.lse.fill_with_nan();
  return outputs;
}

void add_scale_views(const AttentionCase& c, const AttentionInputs& inputs, reference::ForwardArgs& args) {
  if (!inputs.q_scale.bytes().empty()) args.q_scale = inputs.q_scale.view();
  if (!inputs.row_bias.bytes().empty()) args.row_bias = inputs.row_bias.view();
  args.k_scale = scale_of_heads(inputs.k_scale, c.s_kv);
  args.v_scale = scale_of_heads(inputs.v_scale, c.s_kv);
}

AttentionOutputs reference_f64(const AttentionCase& c, const AttentionInputs& inputs) {
  AttentionOutputs outputs{HostTensor(DType::f64, c.b, c.h_q, c.s_q, c.d_v, c.layout),
                           HostTensor(DType::f64, c.b, c.h_q, c.s_q)};
  reference::ForwardArgs args;
  args.q = inputs.q.view();
  args.k = inputs.k.view();
  args.v = inputs.v.view();
  args.o = outputs.o.view();
  args.lse = outputs.lse.view();
  args.scale = c.softmax_scale();
  args.causal = c.causal;
  args.causal_align = c.causal_align;
  add_scale_views(c, inputs, args);
  args.f64 = true;
  reference::forward(args);
  return outputs;
}

AttentionOutputs reference_f64(const AttentionCase& c) {
  return reference_f64(c, make_inputs(c));
}

HostTensor make_dout(const AttentionCase& c) {
  HostTensor dout(c.dtype, c.b, c.h_q, c.s_q, c.d_v, c.layout);
  fill_with_normals(dout, kGradientSeeds + 2 * c.seed);
  return dout;
}

HostTensor make_dlse(const AttentionCase& c) {
  HostTensor dlse(statistics_dtype(c), c.b, c.h_q, c.s_q);
  fill_with_normals(dlse, kGradientSeeds + 2 * c.seed + 1);
  return dlse;
}

AttentionGradients make_gradients(const AttentionCase& c) {
  AttentionGradients gradients = gradients_of(c, c.dtype);
  for (HostTensor* tensor : {&gradients.dq, &gradients.dk, &gradients.dv}) tensor->fill_with_nan();
  return gradients;
}

AttentionGradients reference_gradients_f64(const AttentionCase& c, const AttentionInputs& inputs,
                                           const TensorView& dout, const TensorView& dlse) {
  const AttentionOutputs forward = reference_f64(c, inputs);
  AttentionGradients gradients = gradients_of(c, DType::f64);
  reference::BackwardArgs args;
  args.q = inputs.q.view();
  args.k = inputs.k.view();
  args.v = inputs.v.view();
  args.o = forward.o.view();
  args.lse = forward.lse.view();
  args.dout = dout;
  args.dlse = dlse;
  args.dq = gradients.dq.view();
  args.dk = gradients.dk.view();
  args.dv = gradients.dv.view();
  args.scale = c.softmax_scale();
  args.causal = c.causal;
  args.causal_align = c.causal_align;
  args.f64 = true;
  reference::backward(args);
  return gradients;
}

ErrorMetrics compare(const TensorView& actual, const TensorView& expected) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (!same_shape(actual, expected)) return {kInfinity, kInfinity, kInfinity};
  ErrorMetrics metrics;
  double sum = 0;
  double largest = 0;
  std::int64_t count = 0;
  for_each_pair(actual, expected, [&](std::int64_t at_actual, std::int64_t at_expected) {
    const double reference = element(expected, at_expected);
    const double error = distance(element(actual, at_actual), reference);
    metrics.max_abs = std::max(metrics.max_abs, error);
    largest = std::max(largest, std::abs(reference));
    sum += error;
    ++count;
  });
  if (count == 0 || metrics.max_abs == 0) return metrics;
  metrics.mean_abs = sum / static_cast<double>(count);
  metrics.max_abs_over_max_ref = std::isinf(metrics.max_abs) ? kInfinity : metrics.max_abs / largest;
  return metrics;
}

double largest(const HostTensor& tensor) {
  HostTensor zero = tensor;
  std::fill(zero.bytes().begin(), zero.bytes().end(), std::byte{0});
  return compare(tensor.view(), std::as_const(zero).view()).max_abs;
}

double lse_max_abs_error(const TensorView& actual, const TensorView& expected) {
  return compare(actual, expected).max_abs;
}

}  // namespace fa::test
