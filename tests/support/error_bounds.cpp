#include "support/error_bounds.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "reference/evaluator.hpp"
#include "reference/geometry.hpp"
#include "reference/packed.hpp"

namespace fa::test {
namespace {

using reference::BackwardArgs;
using reference::Geometry;
using reference::Point;

constexpr double kF32 = 0x1p-24;
constexpr double kTanh = 0x1p-21;           // of tanh in gradients of captures, at a factor of 1
constexpr double kTanhSlope = 0x1p-16;      // of its derivative there, relatively
constexpr double kNone = 1e300;             // no bound
const double kSigmas = 5 / std::sqrt(3.0);  // five, of what is uniform between -1 and 1

/// What the error of one element is made of, row by row.
struct Sums {
  double worst = 0, variance = 0;          // of D's error
  double worst_f32 = 0, variance_f32 = 0;  // of the terms
  double variance_tanh = 0;
  double total = 0, sizes = 0, squares = 0, terms = 0;  // of the sum itself

  double bound() const {
    return std::min(worst, kSigmas * std::sqrt(variance)) + std::min(worst_f32, kSigmas * std::sqrt(variance_f32)) +
           kSigmas * std::sqrt(variance_tanh) + kSigmas * kF32 * std::sqrt(terms) * partial_sum();
  }
  /// What is rounded on the way to the sum, in whatever order it is taken.
  double partial_sum() const { return std::min(sizes, std::abs(total) + kSigmas * std::sqrt(3 * squares)); }
};

/// Of one row, before it is known how far its D is off.
struct RowSums {
  double weight = 0;  // r[i]
  double f32 = 0, tanh = 0;
  double total = 0, sizes = 0, squares = 0, terms = 0;

  void add(double term) {
    total += term;
    sizes += std::abs(term);
    squares += term * term;
    terms += 1;
  }
};

/// A pair of a row and a key that it keeps.
struct Pair {
  std::int64_t key;
  double p, kept, dp, ds;      // kept: Z
  double magnitude, relative;  // of the terms of dS; of their error in f32
};

class Bounds {
 public:
  Bounds(const BackwardArgs& args, DType dtype)
      : dtype_(dtype),
        tanh_error_(!uses_tanh(args)      ? 0
                    : dtype == DType::f32 ? 0x1p-21
                                          : 0x1p-10),
        sums_(args.variant.program == nullptr ? 0 : args.variant.program->captures.size()),
        row_(sums_.size()) {
    for (std::size_t i = 0; i < sums_.size(); ++i) {
      const TensorView& view = args.variant.captures[i].gradient;
      if (view.defined()) sums_[i].resize(static_cast<std::size_t>(view.elements()));
      row_[i].resize(sums_[i].size());
    }
    if (args.variant.dsink.defined()) dsink_.resize(static_cast<std::size_t>(args.q.shape[1]));
  }

  bool wanted() const {
    return !dsink_.empty() || std::ranges::any_of(sums_, [](const auto& sums) { return !sums.empty(); });
  }

  /// The rows of a dense batch, or of one sequence.
  void add(const BackwardArgs& args) {
    const Geometry g = Geometry::of(args.q, args.k, args.v, args.causal, args.causal_align, args.variant);
    std::vector<expression::NodeId> roots = functions_of(args);
    static const expression::Program kNoFunctions;
    const bool any = args.variant.program != nullptr;
    reference::Evaluator functions(any ? *args.variant.program : kNoFunctions, roots, args.variant,
                                   {g.b, g.h_q, g.s_q, g.s_kv});
    for (std::int64_t row = 0; row < g.b * g.h_q * g.s_q; ++row) {
      add_row(args, g, functions, row / g.s_q / g.h_q, row / g.s_q % g.h_q, row % g.s_q);
    }
  }

  ErrorBounds result() const {
    ErrorBounds bounds;
    for (const std::vector<Sums>& of_capture : sums_) {
      bounds.captures.emplace_back();
      for (const Sums& sums : of_capture) bounds.captures.back().push_back(sums.bound());
    }
    for (const Sums& sums : dsink_) bounds.dsink.push_back(sums.bound());
    return bounds;
  }

 private:
  static bool uses_tanh(const BackwardArgs& args) {
    if (!args.variant.has_score()) return false;
    const expression::Graph& graph = args.variant.program->graph;
    for (expression::NodeId id = 0; id < static_cast<expression::NodeId>(graph.size()); ++id) {
      if (graph[id].op == expression::Op::tanh) return true;
    }
    return false;
  }

  static std::vector<expression::NodeId> functions_of(const BackwardArgs& args) {
    std::vector<expression::NodeId> roots;
    if (args.variant.program == nullptr) return roots;
    const expression::Program& program = *args.variant.program;
    if (program.score) roots = {*program.score, program.score_derivative};
    if (program.mask) roots.push_back(*program.mask);
    for (const expression::CapturedGradient& gradient : program.gradients) {
      roots.push_back(gradient.load);
      roots.push_back(gradient.derivative);
    }
    return roots;
  }

  static std::vector<double> row_of(const TensorView& t, std::int64_t b, std::int64_t h, std::int64_t s) {
    std::vector<double> values(static_cast<std::size_t>(t.rank == 4 ? t.shape[3] : 1));
    reference::load(t, reference::row_offset(t, b, h, s), t.rank == 4 ? t.strides[3] : 1,
                    static_cast<std::int64_t>(values.size()), values.data());
    return values;
  }

  double unit_roundoff() const { return dtype_ == DType::f32 ? 0 : dtype_ == DType::bf16 ? 0x1p-8 : 0x1p-11; }

  /// The greatest error of a number that is rounded to the element type.
  double rounding(double x) const {
    if (dtype_ == DType::f32) return 0;
    return std::max(unit_roundoff() * std::abs(x), dtype_ == DType::f16 ? 0x1p-25 : 0.0);
  }

  /// The same of a number that is known: half of what its last bit is worth.
  double half_step(double x) const { return x == 0 ? 0 : rounding(std::ldexp(1, std::ilogb(x))); }

  void add_row(const BackwardArgs& args, const Geometry& g, reference::Evaluator& functions, std::int64_t b,
               std::int64_t h, std::int64_t i) {
    const double lse = row_of(args.lse, b, h, i).front();
    if (std::isinf(lse)) return;
    const std::vector<double> dout = row_of(args.dout, b, h, i), o = row_of(args.o, b, h, i);
    const double dlse = args.dlse.defined() ? row_of(args.dlse, b, h, i).front() : 0;
    double d = -dlse, terms_of_d = std::abs(dlse), worst = 0, variance = 0;
    for (std::size_t c = 0; c < dout.size(); ++c) {
      const double error = std::abs(dout[c]) * half_step(o[c]);
      d += dout[c] * o[c];
      terms_of_d += std::abs(dout[c] * o[c]);
      worst += error;
      variance += error * error;
    }
    double greatest_score = 0;
    std::vector<Pair> pairs;
    visit_pairs(args, g, functions, {b, h, i, 0, 0}, dout, lse, [&](Pair pair, double score) {
      pair.ds = pair.p * (pair.kept * pair.dp - d);
      pair.magnitude = pair.p * (pair.kept * pair.magnitude + terms_of_d);
      const double error = pair.kept * std::abs(pair.dp) * rounding(pair.p);
      worst += error;
      variance += error * error;
      greatest_score = std::max(greatest_score, std::abs(score));
      pairs.push_back(pair);
    });
    const double moved = tanh_error_ * (1 + greatest_score);  // S less LSE, by tanh
    for (const Pair& pair : pairs) variance += moved * moved * pair.ds * pair.ds;
    if (tanh_error_ != 0) worst = kNone;
    if (!dsink_.empty()) add_sink(args, h, lse, terms_of_d, worst, variance);
    add_captures(args, functions, {b, h, i, 0, 0}, pairs, worst, variance, moved);
  }

  template <class Visit>
  void visit_pairs(const BackwardArgs& args, const Geometry& g, reference::Evaluator& functions, Point point,
                   const std::vector<double>& dout, double lse, const Visit& visit) const {
    const std::vector<double> q = row_of(args.q, point.b, point.h, point.q);
    std::vector<std::uint8_t> keep(static_cast<std::size_t>(g.s_kv), 1);
    if (args.dropout.active()) args.dropout.row(g.head_of_whole(point.b, point.h), point.q, 0, g.s_kv, keep.data());
    const std::int64_t end = g.visible_keys(point.q);
    for (point.kv = g.first_key(point.q); point.kv < end; ++point.kv) {
      const std::vector<double> k = row_of(args.k, point.b, g.kv_head(point.h), point.kv);
      const std::vector<double> v = row_of(args.v, point.b, g.kv_head(point.h), point.kv);
      double score = 0, score_terms = 0;
      for (std::size_t c = 0; c < q.size(); ++c) {
        score += args.scale * q[c] * k[c];
        score_terms += std::abs(args.scale * q[c] * k[c]);
      }
      if (args.variant.program != nullptr) {
        const expression::Program& program = *args.variant.program;
        point.score = score;
        functions.run(point);
        if (program.mask && functions[*program.mask].integer == 0) continue;
        if (program.score) score = functions[*program.score].real;
      }
      Pair pair{};
      pair.key = point.kv;
      pair.p = std::exp(score - lse);
      pair.kept = keep[static_cast<std::size_t>(point.kv)] != 0 ? args.dropout.scale() : 0;
      for (std::size_t c = 0; c < v.size(); ++c) {
        pair.dp += dout[c] * v[c];
        pair.magnitude += std::abs(dout[c] * v[c]);
      }
      pair.relative = kF32 * (16 + 4 * (score_terms + std::abs(score) + std::abs(lse)));
      visit(pair, score);
    }
  }

  void add_captures(const BackwardArgs& args, reference::Evaluator& functions, Point point,
                    const std::vector<Pair>& pairs, double worst, double variance, double moved) {
    if (args.variant.program == nullptr) return;
    const expression::Program& program = *args.variant.program;
    std::vector<std::pair<std::size_t, std::size_t>> read;
    for (const Pair& pair : pairs) {
      point.kv = pair.key;
      const std::vector<double> q = row_of(args.q, point.b, point.h, point.q);
      const std::int64_t kv_head = point.h / (args.q.shape[1] / args.k.shape[1]);
      const std::vector<double> k = row_of(args.k, point.b, kv_head, point.kv);
      point.score = 0;
      for (std::size_t c = 0; c < q.size(); ++c) point.score += args.scale * q[c] * k[c];
      functions.run(point);
      for (const expression::CapturedGradient& gradient : program.gradients) {
        const auto capture = static_cast<std::size_t>(program.graph[gradient.load].index);
        if (sums_[capture].empty()) continue;
        const auto element = static_cast<std::size_t>(functions.gradient_offset(gradient.load));
        const double slope = functions[gradient.derivative].real;
        RowSums& row = row_[capture][element];
        if (row.terms == 0) read.emplace_back(capture, element);
        row.weight += pair.p * slope;
        row.f32 += pair.relative * pair.magnitude * std::abs(slope);
        row.add(pair.ds * slope);
        if (tanh_error_ == 0) continue;
        const double error = std::abs(slope) * (moved + kTanhSlope) + kTanh;
        row.tanh += error * error * pair.ds * pair.ds;
      }
    }
    for (const auto& [capture, element] : read)
      add_row_sums(row_[capture][element], worst, variance, &sums_[capture][element]);
  }

  static void add_row_sums(RowSums& row, double worst, double variance, Sums* sums) {
    sums->worst += worst * std::abs(row.weight);
    sums->variance += variance * row.weight * row.weight;
    sums->worst_f32 += row.f32;
    sums->variance_f32 += row.f32 * row.f32;
    sums->variance_tanh += row.tanh;
    sums->total += row.total;
    sums->sizes += row.sizes;
    sums->squares += row.squares;
    sums->terms += row.terms;
    row = {};
  }

  void add_sink(const BackwardArgs& args, std::int64_t h, double lse, double terms_of_d, double worst,
                double variance) {
    double sink = 0;
    reference::load(args.variant.sink, h * args.variant.sink.strides[0], 1, 1, &sink);
    RowSums row;
    row.weight = std::exp(sink - lse);
    row.add(row.weight * terms_of_d);
    row.f32 = kF32 * (16 + 4 * (std::abs(sink) + std::abs(lse))) * row.sizes;
    add_row_sums(row, worst, variance, &dsink_[static_cast<std::size_t>(h)]);
  }

  DType dtype_;
  double tanh_error_;                      // twice that of its value in scores, relatively
  std::vector<std::vector<Sums>> sums_;    // of each element of each capture
  std::vector<std::vector<RowSums>> row_;  // zeros between rows
  std::vector<Sums> dsink_;
};

}  // namespace

ErrorBounds error_bounds(const BackwardArgs& args, DType dtype, const PackedSequences* sequences) {
  Bounds bounds(args, dtype);
  if (!bounds.wanted()) return bounds.result();
  if (sequences == nullptr) {
    bounds.add(args);
  } else {
    for (std::int64_t i = 0; i < sequences->b; ++i) bounds.add(reference::call_of_sequence(args, *sequences, i));
  }
  return bounds.result();
}

double worst_ratio(std::span<const float> actual, std::span<const double> expected, std::span<const double> bounds) {
  if (actual.size() != expected.size() || actual.size() != bounds.size()) return HUGE_VAL;
  double worst = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double error = std::abs(static_cast<double>(actual[i]) - expected[i]);
    if (error == 0) continue;
    worst = std::isnan(error) ? HUGE_VAL : std::max(worst, error / bounds[i]);
  }
  return worst;
}

}  // namespace fa::test
