#include "support/gradient_bounds.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "reference/geometry.hpp"
#include "reference/packed.hpp"

namespace fa::test {
namespace {

using reference::BackwardArgs;
using reference::Geometry;

constexpr double kF32 = 0x1p-24;

/// A row of numbers, in float64.
using Row = std::vector<double>;

Row row_of(const TensorView& t, std::int64_t b, std::int64_t h, std::int64_t s) {
  Row values(static_cast<std::size_t>(t.rank == 4 ? t.shape[3] : 1));
  reference::load(t, reference::row_offset(t, b, h, s), t.rank == 4 ? t.strides[3] : 1,
                  static_cast<std::int64_t>(values.size()), values.data());
  return values;
}

void add_to(const TensorView& t, std::int64_t b, std::int64_t h, std::int64_t s, const Row& values) {
  Row sum = row_of(t, b, h, s);
  for (std::size_t c = 0; c < sum.size(); ++c) sum[c] += values[c];
  const std::int64_t first = reference::row_offset(t, b, h, s);
  for (std::size_t c = 0; c < sum.size(); ++c) {
    reference::store_element(t, first + static_cast<std::int64_t>(c) * t.strides[3], sum[c]);
  }
}

struct Dot {
  double value = 0, terms = 0;
};
Dot dot(const Row& a, const Row& b) {
  Dot result;
  for (std::size_t c = 0; c < a.size(); ++c) {
    result.value += a[c] * b[c];
    result.terms += std::abs(a[c] * b[c]);
  }
  return result;
}

/// What the bounds of one dense batch entry, or of one sequence, are made of.
class Terms {
 public:
  Terms(const BackwardArgs& args, DType dtype)
      : args_(args),
        geometry_(Geometry::of(args.q, args.k, args.v, args.causal, args.causal_align)),
        u_(dtype == DType::bf16  ? 0x1p-8
           : dtype == DType::f16 ? 0x1p-11
                                 : 0),
        products_(dtype == DType::f32 ? 0x1p-20 : 0),
        tiny_(dtype == DType::f16 ? 0x1p-25 : 0) {}

  void add() const {
    const Geometry& g = geometry_;
    for (std::int64_t b = 0; b < g.b; ++b) {
      for (std::int64_t h = 0; h < g.h_q; ++h) {
        for (std::int64_t i = 0; i < g.s_q; ++i) add_row(b, h, i);
      }
    }
  }

 private:
  /// A key that the row keeps.
  struct Pair {
    std::int64_t key;
    double p, kept, relative;  // of P, what dropout multiplies it with; P's error in float
    Dot dp;
  };

  void add_row(std::int64_t b, std::int64_t h, std::int64_t i) const {
    const double lse = row_of(args_.lse, b, h, i).front();
    if (std::isinf(lse)) return;
    const Row q = row_of(args_.q, b, h, i), dout = row_of(args_.dout, b, h, i);
    const double dlse = args_.dlse.defined() ? std::abs(row_of(args_.dlse, b, h, i).front()) : 0;
    const std::int64_t kv_head = geometry_.kv_head(h);
    double whole = dlse;  // A + |dLSE|
    std::vector<Pair> pairs = pairs_of(b, h, i, q, dout, lse);
    for (const Pair& pair : pairs) whole += pair.p * pair.kept * pair.dp.terms;
    const double scale = std::abs(args_.scale);
    Row of_q(q.size());
    for (const Pair& pair : pairs) {
      const double error = 2 * u_ + pair.relative;
      Row of_v(dout.size()), of_k(q.size());
      for (std::size_t c = 0; c < dout.size(); ++c) {
        of_v[c] = (pair.p * pair.kept * error + pair.kept * tiny_) * std::abs(dout[c]) + tiny_;
      }
      const double terms = pair.kept * (u_ == 0 ? pair.dp.terms : std::abs(pair.dp.value)) + whole;
      const double in_float = pair.relative * pair.p * (pair.kept * pair.dp.terms + whole);
      const double of_ds = 4 * u_ * pair.p * terms + in_float + tiny_;
      const Row k = row_of(args_.k, b, kv_head, pair.key);
      for (std::size_t c = 0; c < q.size(); ++c) {
        of_q[c] += scale * of_ds * std::abs(k[c]) + tiny_;
        of_k[c] = scale * of_ds * std::abs(q[c]) + tiny_;
      }
      add_to(args_.dv, b, kv_head, pair.key, of_v);
      add_to(args_.dk, b, kv_head, pair.key, of_k);
    }
    add_to(args_.dq, b, h, i, of_q);
  }

  std::vector<Pair> pairs_of(std::int64_t b, std::int64_t h, std::int64_t i, const Row& q, const Row& dout,
                             double lse) const {
    const Geometry& g = geometry_;
    std::vector<std::uint8_t> keep(static_cast<std::size_t>(g.s_kv), 1);
    if (args_.dropout.active()) args_.dropout.row(b * g.h_q + h, i, 0, g.s_kv, keep.data());
    std::vector<Pair> pairs;
    for (std::int64_t j = g.first_key(i); j < g.visible_keys(i); ++j) {
      const Dot score = dot(q, row_of(args_.k, b, g.kv_head(h), j));
      const double scaled = args_.scale * score.value, terms = std::abs(args_.scale) * score.terms;
      const double kept = keep[static_cast<std::size_t>(j)] != 0 ? args_.dropout.scale() : 0;
      const double rounds = 16 + 4 * (terms + std::abs(scaled) + std::abs(lse)) +
                            std::sqrt(static_cast<double>(g.s_q * g.h_q / g.h_kv + g.s_kv));  // and of a sum
      pairs.push_back({j, std::exp(scaled - lse), kept, kF32 * rounds + products_ * (1 + terms),
                       dot(dout, row_of(args_.v, b, g.kv_head(h), j))});
    }
    return pairs;
  }

  const BackwardArgs& args_;
  const Geometry geometry_;
  const double u_;         // unit roundoff of the element type, but of float
  const double products_;  // relative error of products of three parts
  const double tiny_;      // error of a subnormal number
};

}  // namespace

GradientBounds gradient_bounds(const BackwardArgs& args, DType dtype, const PackedSequences* sequences) {
  const auto like = [](const TensorView& t) {
    return HostTensor(DType::f64, t.shape[0], t.shape[1], t.shape[2], t.shape[3], Layout::bhsd);
  };
  GradientBounds bounds{like(args.dq), like(args.dk), like(args.dv)};
  BackwardArgs into = args;
  into.dq = bounds.dq.view();
  into.dk = bounds.dk.view();
  into.dv = bounds.dv.view();
  if (sequences == nullptr) {
    Terms(into, dtype).add();
  } else {
    for (std::int64_t i = 0; i < sequences->b; ++i) {
      const BackwardArgs part = reference::call_of_sequence(into, *sequences, i);
      Terms(part, dtype).add();
    }
  }
  return bounds;
}

double worst_ratio(const HostTensor& actual, const HostTensor& expected, const HostTensor& bounds, bool untouched) {
  const TensorView view = expected.view();
  const std::int64_t rows = view.shape[0] * view.shape[1] * view.shape[2];
  double worst = 0;
  for (std::int64_t i = 0; i < rows * view.shape[3]; ++i) {
    const std::int64_t row = i / view.shape[3], d = i % view.shape[3];
    const std::int64_t b = row / view.shape[2] / view.shape[1], h = row / view.shape[2] % view.shape[1];
    const std::int64_t s = row % view.shape[2];
    const double wanted = expected.at(b, h, s, d), bound = bounds.at(b, h, s, d);
    const double error = std::abs(actual.at(b, h, s, d) - wanted);
    if (error == 0 || (untouched && wanted == 0 && bound == 0)) continue;
    worst = std::isnan(error) ? HUGE_VAL : std::max(worst, error / (bound + 0x1p-126));
  }
  return worst;
}

}  // namespace fa::test
