#include "run_verify.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "elements.hpp"
#include "parallel.hpp"
#include "reference/dropout.hpp"
#include "reference/geometry.hpp"
#include "run_wide.hpp"
#include "tolerance.hpp"

namespace fa::cli {
namespace {

using tools::Tensor;

std::size_t elements(const Tensor& tensor) {
  return tensor.bytes.size() / size_of(tensor.dtype);
}

/// Equal infinities and two NaNs differ by nothing; anything else that is not finite is infinitely wrong.
double difference(double actual, double expected) {
  if (actual == expected || (std::isnan(actual) && std::isnan(expected))) {
    return 0;
  }
  const double absolute = std::abs(actual - expected);
  return std::isnan(absolute) ? std::numeric_limits<double>::infinity() : absolute;
}

double greatest_finite_magnitude(const Tensor& tensor) {
  double greatest = 0;
  for (std::size_t i = 0; i < elements(tensor); ++i) {
    const double magnitude = std::abs(number_at(tensor, i));
    greatest = std::isfinite(magnitude) ? std::max(greatest, magnitude) : greatest;
  }
  return greatest;
}

Deviation deviation(const Tensor& actual, const Tensor& expected, double allowed) {
  Deviation result;
  result.allowed = allowed;
  result.elements = elements(actual);
  double squares = 0, of_expected = 0;
  for (std::size_t i = 0; i < elements(actual); ++i) {
    const double error = difference(number_at(actual, i), number_at(expected, i));
    result.max = std::max(result.max, error);
    result.mean += error / static_cast<double>(elements(actual));
    if (std::isfinite(number_at(expected, i))) {
      squares += error * error;
      of_expected += number_at(expected, i) * number_at(expected, i);
    }
    result.nans += std::isnan(number_at(actual, i)) && std::isnan(number_at(expected, i)) ? 1 : 0;
  }
  result.relative = squares == 0 ? 0 : std::sqrt(squares / of_expected);
  return result;
}

/// The greatest elements of the gradients' sums with every term made positive: what a relative error of the terms is
/// relative to.
struct Magnitudes {
  double dq = 0;
  double dk = 0;
  double dv = 0;
};

/// Sums over the pairs of a query row and a key, for the gradients of one KV head.
class HeadMagnitudes {
 public:
  /// Of f64 tensors in host memory. `scale` is that of the scores.
  HeadMagnitudes(const BackwardInputs& in, const reference::Geometry& geometry, double scale)
      : in_(in), g_(geometry), scale_(scale) {}

  Magnitudes of(std::int64_t b, std::int64_t h_kv) const {
    std::vector<double> dk(static_cast<std::size_t>(g_.s_kv * g_.d_qk)), dv(static_cast<std::size_t>(g_.s_kv * g_.d_v));
    Magnitudes result;
    for (std::int64_t h = 0; h < g_.h_q; ++h) {
      if (g_.kv_head(h) != h_kv) continue;
      for (std::int64_t i = 0; i < g_.s_q; ++i) {
        result.dq = std::max(result.dq, add_row(b, h, i, dk.data(), dv.data()));
      }
    }
    for (const double sum : dk) result.dk = std::max(result.dk, sum);
    for (const double sum : dv) result.dv = std::max(result.dv, sum);
    return result;
  }

 private:
  static const double* row(const TensorView& t, std::int64_t b, std::int64_t h, std::int64_t s) {
    return static_cast<const double*>(t.data) + reference::row_offset(t, b, h, s);
  }

  /// Returns the greatest element of the row's dq.
  double add_row(std::int64_t b, std::int64_t h, std::int64_t i, double* dk, double* dv) const {
    const double *q = row(in_.q, b, h, i), *dout = row(in_.dout, b, h, i), *o = row(in_.o, b, h, i);
    const double lse = *row(in_.lse, b, h, i);
    if (std::isinf(lse)) return 0;
    double centre = in_.dlse.defined() ? std::abs(*row(in_.dlse, b, h, i)) : 0;
    for (std::int64_t d = 0; d < g_.d_v; ++d) centre += std::abs(dout[d] * o[d]);
    std::vector<double> dq(static_cast<std::size_t>(g_.d_qk));
    for (std::int64_t j = 0; j < g_.visible_keys(i); ++j) {
      const double *k = row(in_.k, b, g_.kv_head(h), j), *v = row(in_.v, b, g_.kv_head(h), j);
      double score = 0, dp = 0;
      for (std::int64_t d = 0; d < g_.d_qk; ++d) score += q[d] * k[d];
      for (std::int64_t d = 0; d < g_.d_v; ++d) dp += dout[d] * v[d];
      const double p = std::exp(scale_ * score - lse);
      const double ds = std::abs(scale_) * p * (std::abs(dp) + centre);
      for (std::int64_t d = 0; d < g_.d_qk; ++d) dq[static_cast<std::size_t>(d)] += ds * std::abs(k[d]);
      for (std::int64_t d = 0; d < g_.d_qk; ++d) dk[j * g_.d_qk + d] += ds * std::abs(q[d]);
      for (std::int64_t d = 0; d < g_.d_v; ++d) dv[j * g_.d_v + d] += p * std::abs(dout[d]);
    }
    return *std::max_element(dq.begin(), dq.end());
  }

  const BackwardInputs& in_;
  const reference::Geometry& g_;
  double scale_;
};

/// A tensor [b, h, s, d], [b, s, d], [b, h, s] or [b, s] as what has a head axis.
TensorView with_heads(Tensor& tensor, bool heads) {
  TensorView view = tensor.view();
  if (heads) return view;
  for (std::size_t axis = 3; axis > 1; --axis) {
    view.shape[axis] = view.shape[axis - 1];
    view.strides[axis] = view.strides[axis - 1];
  }
  view.shape[1] = 1;
  ++view.rank;
  return view;
}

/// The rows [cumulative[i], cumulative[i + 1]) of a tensor [total, h, d], or [h, total], as a batch of one entry.
TensorView sequence(Tensor& tensor, const std::vector<std::int32_t>& cumulative, std::size_t i) {
  TensorView view = tensor.view();
  const std::size_t rows = view.rank == 3 ? 0 : 1, heads = 1 - rows;
  const std::int64_t first = cumulative[i];
  TensorView result = view;
  result.data =
      static_cast<std::byte*>(view.data) + first * view.strides[rows] * static_cast<std::int64_t>(size_of(view.dtype));
  result.shape = {1, view.shape[heads], cumulative[i + 1] - first, view.rank == 3 ? view.shape[2] : 0};
  result.strides = {0, view.strides[heads], view.strides[rows], 1};
  ++result.rank;
  return result;
}

Magnitudes magnitudes_of(const AttentionConfig& config, const BackwardInputs& views) {
  const auto geometry = reference::Geometry::of(views.q, views.k, views.v, config.causal, config.causal_align);
  const double scale = config.scale ? double{*config.scale} : 1 / std::sqrt(static_cast<double>(config.head_dim));
  const HeadMagnitudes head(views, geometry, scale);
  std::vector<Magnitudes> of_heads(static_cast<std::size_t>(geometry.b * geometry.h_kv));
  parallel_for(of_heads.size(), 0, [&](std::size_t n) {
    const auto index = static_cast<std::int64_t>(n);
    of_heads[n] = head.of(index / geometry.h_kv, index % geometry.h_kv);
  });
  Magnitudes result;
  for (const Magnitudes& one : of_heads) {
    result = {std::max(result.dq, one.dq), std::max(result.dk, one.dk), std::max(result.dv, one.dv)};
  }
  return result;
}

Magnitudes gradient_magnitudes(const AttentionConfig& config, RunInputs* in, RunOutputs* out) {
  Magnitudes result;
  // View(tensor, whether it has rows of q).
  const auto add = [&](const auto& view) {
    const BackwardInputs views{view(in->q, true),
                               view(in->k, false),
                               view(*in->v, false),
                               view(out->o, true),
                               view(out->lse, true),
                               view(*in->dout, true),
                               in->dlse ? view(*in->dlse, true) : TensorView()};
    const Magnitudes one = magnitudes_of(config, views);
    result = {std::max(result.dq, one.dq), std::max(result.dk, one.dk), std::max(result.dv, one.dv)};
  };
  for (std::size_t i = 0; i + 1 < in->cumulative_q.size(); ++i) {
    add([&](Tensor& t, bool of_q) { return sequence(t, of_q ? in->cumulative_q : in->cumulative_kv, i); });
  }
  if (!in->packed()) {
    add([&](Tensor& t, bool) { return with_heads(t, in->q.shape.size() == 4); });
  }
  const double kept = reference::DropoutMask(double{config.dropout}, 0, 0).scale();
  return {result.dq * kept, result.dk * kept, result.dv * kept};
}

bool has_functions(const AttentionConfig& config) {
  return !config.score.expression.empty() || !config.mask.expression.empty() || config.window_left >= 0 ||
         config.window_right >= 0 || config.chunk > 0 || config.sink;
}

/// Gradients under functions, whose terms are not summed up here: an error is relative to the greatest element. `kept`:
/// what dropout multiplies what it keeps with.
void compare_relatively(const RunOutputs& outputs, const RunOutputs& expected, DType dtype, double kept,
                        Verdict* verdict) {
  const RunGradients &actual = *outputs.gradients, &wanted = *expected.gradients;
  const auto compare = [&](const std::string& name, const Tensor& tensor, const Tensor& reference) {
    const double allowed =
        4 * kept * score_gradient_tolerance(dtype) * std::max(1.0, greatest_finite_magnitude(reference));
    verdict->emplace_back(name, deviation(tensor, reference, allowed));
  };
  compare("dq", actual.dq, wanted.dq);
  compare("dk", actual.dk, wanted.dk);
  compare("dv", actual.dv, wanted.dv);
  for (const auto& [name, tensor] : actual.captures) compare("d" + name, tensor, wanted.captures.at(name));
  if (actual.dsink) compare("dsink", *actual.dsink, *wanted.dsink);
}

/// The first `columns` of each row.
Tensor first_columns(const Tensor& wide, std::int64_t columns) {
  std::vector<std::int64_t> shape = wide.shape;
  shape.back() = columns;
  Tensor result = make_tensor(wide.dtype, shape);
  const std::size_t of = static_cast<std::size_t>(wide.shape.back()), to = static_cast<std::size_t>(columns);
  for (std::size_t i = 0; i < elements(result); ++i) {
    store_element(result.bytes.data(), wide.dtype, i, number_at(wide, i / to * of + i % to));
  }
  return result;
}

/// Of the values that count: a page may hold anything behind the keys of its request.
double greatest_value(RunInputs& wide) {
  Tensor of_rows = wide.v ? *wide.v : first_columns(wide.k, wide.d_v());
  if (!wide.cache) return greatest_finite_magnitude(of_rows);
  RunCache& cache = *wide.cache;
  const TensorView pool = cache.nhd ? of_rows.view().swap_axes(1, 2) : of_rows.view();
  const TensorView table = cache.block_table ? cache.block_table->view() : TensorView();
  const auto number = [](Tensor& tensor, std::int64_t i) {
    return std::int64_t{static_cast<const std::int32_t*>(tensor.view().data)[i]};
  };
  double greatest = 0;
  for (std::int64_t i = 0; i < cache.seqused_kv.shape[0]; ++i) {
    const std::int64_t row = cache.batch_index ? number(*cache.batch_index, i) : i;
    std::int64_t key = cache.seq_begin ? number(*cache.seq_begin, i) : 0;
    for (; key < number(cache.seqused_kv, i); ++key) {
      const std::int64_t page =
          table.defined() ? number(*cache.block_table, row * table.strides[0] + key / pool.shape[2]) : row;
      if (page < 0 || page >= pool.shape[0]) continue;  // no row sees it, or the call would have been refused
      for (std::int64_t head = 0; head < pool.shape[1]; ++head) {
        const auto* const values =
            static_cast<const double*>(pool.data) + reference::row_offset(pool, page, head, key % pool.shape[2]);
        for (std::int64_t d = 0; d < pool.shape[3]; ++d) greatest = std::max(greatest, std::abs(values[d]));
      }
    }
  }
  return greatest;
}

constexpr double kGreatestOfE4m3 = 448;

/// How far o may be from float64, where the greatest value is `greatest`.
double allowed_of_o(const AttentionConfig& config, DType products, double greatest) {
  const double allowed = output_tolerance(products) * greatest;
  // Rounding to e4m3 is at most 2^-4 of a number, or half of the least one.
  return output_dtype(config) == DType::e4m3 ? allowed + std::min(greatest, kGreatestOfE4m3) / 16 + 0x1p-10 : allowed;
}

/// O of e4m3 saturates.
void clamp_to(DType dtype, Tensor* expected) {
  if (dtype != DType::e4m3) return;
  for (std::size_t i = 0; i < elements(*expected); ++i) {
    const double number = number_at(*expected, i);
    if (std::abs(number) > kGreatestOfE4m3) {
      store_element(expected->bytes.data(), expected->dtype, i, std::copysign(kGreatestOfE4m3, number));
    }
  }
}

}  // namespace

Verdict verify(const AttentionConfig& config, const RunInputs& inputs, const RunOutputs& outputs, DType products) {
  const DType dtype = config.dtype;
  WideCall call(config, inputs, Of::codes);
  RunInputs& wide = call.inputs;
  RunOutputs expected = call.run();
  clamp_to(outputs.o.dtype, &expected.o);
  Verdict verdict;
  const auto compare = [&](const char* name, const Tensor& actual, const Tensor& wanted, double allowed) {
    verdict.emplace_back(name, deviation(actual, wanted, allowed));
  };
  // A fast tanh moves scores by 2^-11 of what they are.
  const bool approximate =
      dtype != DType::f32 && dtype != DType::f64 && config.score.expression.find("tanh") != std::string::npos;
  const double kept = reference::DropoutMask(double{config.dropout}, 0, 0).scale();
  const double greatest = greatest_value(wide) * (call.v_heads ? greatest_finite_magnitude(*call.v_heads) : 1);
  compare("o", outputs.o, expected.o, (approximate ? 3 : 1) * kept * allowed_of_o(config, products, greatest));
  compare("lse", outputs.lse, expected.lse,
          (approximate ? 40 : 1) * lse_tolerance(products) * std::max(1.0, greatest_finite_magnitude(expected.lse)));
  for (const auto& [name, tensor] : outputs.statistics) {
    const Tensor& wanted = expected.statistics.at(name);
    compare(name.c_str(), tensor, wanted,
            (approximate ? 40 : 8) * lse_tolerance(dtype) * std::max(1.0, greatest_finite_magnitude(wanted)));
  }
  if (!outputs.gradients) {
    return verdict;
  }
  if (has_functions(config)) {
    compare_relatively(outputs, expected, dtype, kept, &verdict);
    return verdict;
  }
  const Magnitudes magnitudes = gradient_magnitudes(config, &wide, &expected);
  const RunGradients &actual = *outputs.gradients, &wanted = *expected.gradients;
  compare("dq", actual.dq, wanted.dq, score_gradient_tolerance(dtype) * magnitudes.dq);
  compare("dk", actual.dk, wanted.dk, score_gradient_tolerance(dtype) * magnitudes.dk);
  compare("dv", actual.dv, wanted.dv, output_tolerance(dtype) * magnitudes.dv);
  return verdict;
}

Verdict compare_originals(const AttentionConfig& config, const RunInputs& inputs, const RunOutputs& outputs) {
  if (!inputs.originals.given()) return {};
  const RunOutputs expected = WideCall(config, inputs, Of::originals).run();
  constexpr double kAny = std::numeric_limits<double>::infinity();
  return {{"o", deviation(outputs.o, expected.o, kAny)}, {"lse", deviation(outputs.lse, expected.lse, kAny)}};
}

bool passes(const Verdict& verdict) noexcept {
  return std::all_of(verdict.begin(), verdict.end(), [](const auto& tensor) { return tensor.second.passes(); });
}

}  // namespace fa::cli
