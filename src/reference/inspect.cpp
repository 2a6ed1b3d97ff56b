#include "reference/inspect.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "reference/geometry.hpp"
#include "reference/tensor_rows.hpp"

namespace fa::reference {
namespace {

/// In the order in which they are named.
enum class Kind : std::uint8_t {
  q,
  q_scale,
  k,
  k_scale,
  v,
  v_scale,
  row_bias,
  sink,
  captured,
  o,
  lse,
  dout,
  dlse,
  entropy,
  dentropy,
  dmax_logit,
  dcolumn_sums,
  score,
  p,
  dp,
  ds
};
constexpr std::array kNames{
    "q",    "q_scale", "k",       "k_scale",  "v",          "v_scale",      "row_bias", "sink", "captured", "o", "lse",
    "dout", "dlse",    "entropy", "dentropy", "dmax_logit", "dcolumn_sums", "score",    "p",    "dp",       "ds"};
constexpr double kInfinity = std::numeric_limits<double>::infinity();

auto order_of(const ErrorLocation& at) {
  return std::tie(at.b, at.h, at.q, at.kv, at.d);
}

Geometry geometry_of(const ForwardArgs& args) {
  const std::int64_t s_kv = args.paged.given() ? args.paged.s_kv : args.k.shape[2];
  Geometry geometry = Geometry::of(args.q, args.k, args.v, s_kv, args.causal, args.causal_align, args.variant);
  geometry.begin = args.paged.begin;
  return geometry;
}

/// What overflows in the arithmetic of a call is infinite: floats, but where it is in double.
double number_of(const ForwardArgs& args, double x) {
  return args.f64 || args.q.dtype == DType::f64 ? x : static_cast<double>(static_cast<float>(x));
}

/// The lowest logit that may be the greatest of a kernel, which adds products in another order.
double nearly(double greatest) {
  return std::isfinite(greatest) ? greatest - 0x1p-10 * (1 + std::abs(greatest)) : greatest;
}

/// Whether a gradient of the greatest logit is too small to break dS by itself.
bool is_small(double gradient) {
  return std::abs(gradient) < 1e30;
}

/// Scores of pairs of a row and a key, and what is read for them.
class Pairs {
 public:
  Pairs(const ForwardArgs& args, const Geometry& geometry, const Fetch* fetch, bool differentiates = false)
      : a_(args), g_(geometry), rows_(args, fetch), q(g_.d_qk), k(g_.d_qk) {
    if (!a_.variant.has_score() && !a_.variant.has_mask()) return;
    const expression::Program& program = *a_.variant.program;
    std::vector<expression::NodeId> roots;
    if (program.score) roots.push_back(*program.score);
    if (program.mask) roots.push_back(*program.mask);
    differentiates_ = differentiates && program.score;
    if (differentiates_) roots.push_back(program.score_derivative);
    functions.emplace(program, roots, a_.variant, expression::Lengths{g_.b, g_.h_q, g_.s_q, g_.s_kv});
    functions->read_by(fetch);
  }

  /// Has keys of a head read once. For who takes them for many rows.
  void keep_keys() { keeps_ = true; }

  void take_row(std::int64_t b, std::int64_t h, std::int64_t i) {
    at_ = {b, h, i, 0, 0};
    rows_.query(b, h, i, g_.d_qk, q.data());
    bias = a_.row_bias.defined() ? number_of_row(a_.row_bias) : 0.0;
  }

  /// Whether the row keeps a key that masks in closed form do. `score` is made of `k` then.
  bool take_key(std::int64_t j) {
    read_key(j);
    score = scaled = number_of(a_, number_of(a_, std::inner_product(q.begin(), q.end(), k.begin(), bias)) * a_.scale);
    if (!functions) return true;
    const expression::Program& program = *a_.variant.program;
    at_.kv = j;
    at_.score = score;
    functions->run(at_);
    if (program.score) score = number_of(a_, (*functions)[*program.score].real);
    if (differentiates_) slope = (*functions)[program.score_derivative].real;
    return !program.mask || (*functions)[*program.mask].integer != 0;
  }

  double lse() const { return number_of_row(a_.lse); }
  double number_of_row(const TensorView& t) const {
    double value = 0;
    rows_.elements(t, row_offset(t, at_.b, at_.h, at_.q), 1, 1, &value);
    return value;
  }
  const TensorRows<double, true>& rows() const { return rows_; }

 private:
  void read_key(std::int64_t j) {
    const std::int64_t h = g_.kv_head(at_.h);
    const std::tuple key(at_.b, h, j);
    if (key == std::exchange(key_, key)) return;
    if (!keeps_) return rows_.key(a_.k, a_.k_scale, at_.b, h, j, g_.d_qk, k.data());
    if (std::pair head(at_.b, h); head != std::exchange(head_, head)) {
      kept_.assign(static_cast<std::size_t>(g_.s_kv), {});
    }
    std::vector<double>& row = kept_[static_cast<std::size_t>(j)];
    if (row.empty()) {
      row.resize(k.size());
      rows_.key(a_.k, a_.k_scale, at_.b, h, j, g_.d_qk, row.data());
    }
    k = row;
  }

  const ForwardArgs& a_;
  const Geometry& g_;
  const TensorRows<double, true> rows_;
  Point at_;
  std::tuple<std::int64_t, std::int64_t, std::int64_t> key_{-1, -1, -1};
  bool differentiates_ = false;
  bool keeps_ = false;
  std::pair<std::int64_t, std::int64_t> head_{-1, -1};  // whose keys are kept
  std::vector<std::vector<double>> kept_;               // by key; empty: not read yet

 public:
  std::vector<double> q, k;
  double bias = 0;
  double scaled = 0;  // in front of the score function
  double score = 0;
  double slope = 1;                    // of the score by what is in front
  std::optional<Evaluator> functions;  // where the call has any
};

class Search {
 public:
  explicit Search(const InspectedCall& call)
      : call_(call),
        a_(call.args),
        g_(geometry_of(a_)),
        pairs_(a_, g_, call.fetch, backward()),
        v_(g_.d_v),
        o_(g_.d_v),
        dout_(g_.d_v) {
    if (scans()) pairs_.keep_keys();
  }

  /// First among what masks keep. Tiles have keys, and rows, that masks hide: where 0 is multiplied by what these hold,
  /// they reach a result too.
  std::optional<ErrorLocation> run(const BrokenResult& result) {
    made_ = result.made;
    for (const bool hidden : {false, true}) {
      hidden_ = hidden;
      look_at(result);
      for (std::optional<ErrorLocation>& found : found_) {
        if (found) return std::move(found);
      }
    }
    return std::nullopt;
  }

 private:
  struct Row {
    std::int64_t b, h, q;
  };

  void look_at(const BrokenResult& result) {
    const bool of_key = made_ == Made::of_key || made_ == Made::of_p;
    const bool of_row = made_ == Made::of_row;
    for (std::int64_t h = result.first_h; h < result.end_h; ++h) {
      std::int64_t first = of_row ? result.at : 0, end = of_row ? result.at + 1 : g_.s_q;
      if (of_key && !hidden_) {
        first = g_.first_row(result.at);
        end = g_.last_row(result.at);
      }
      for (std::int64_t i = first; i < end; ++i) {
        const Row row{result.b, h, i};
        if (of_key) {
          look_at_row(row, result.at, result.at + 1);
        } else if (hidden_) {
          look_at_row(row, 0, g_.s_kv);
        } else {
          look_at_row(row, g_.first_key(i), g_.visible_keys(i));
        }
      }
    }
  }

  bool backward() const { return call_.dout.defined(); }
  /// Whether a row's gradient depends on all of its keys.
  bool scans() const { return call_.dmax_logit.defined() || call_.dcolumn_sums.defined(); }
  bool reads_values() const { return made_ == Made::of_row || made_ == Made::of_key; }

  void add(Kind kind, double value, const ErrorLocation& at) {
    std::optional<ErrorLocation>& found = found_[static_cast<std::size_t>(kind)];
    if (found && order_of(*found) <= order_of(at)) return;
    found = at;
    found->value = value;
    if (found->tensor.empty()) found->tensor = kNames[static_cast<std::size_t>(kind)];
  }
  void check(Kind kind, double value, const ErrorLocation& at) {
    if (!std::isfinite(value)) add(kind, value, at);
  }
  /// What -inf is legal of.
  void check_upper(Kind kind, double value, const ErrorLocation& at) {
    if (!std::isfinite(value) && value != -kInfinity) add(kind, value, at);
  }
  void check_all(Kind kind, const std::vector<double>& values, ErrorLocation at) {
    const auto broken = std::ranges::find_if(values, [](double x) { return !std::isfinite(x); });
    if (broken == values.end()) return;
    at.d = broken - values.begin();
    add(kind, *broken, at);
  }

  static ErrorLocation of_row(const Row& row) {
    ErrorLocation at;
    at.b = row.b;
    at.h = row.h;
    at.q = row.q;
    return at;
  }
  ErrorLocation of_key(const Row& row, std::int64_t j) const {
    ErrorLocation at;
    at.b = row.b;
    at.h = g_.kv_head(row.h);
    at.kv = j;
    return at;
  }

  void look_at_row(const Row& row, std::int64_t first, std::int64_t end) {
    pairs_.take_row(row.b, row.h, row.q);
    const ErrorLocation at = of_row(row);
    if (backward()) {
      lse_ = pairs_.lse();
      if (std::isinf(lse_)) return;  // no keys: the row has no part in anything
      check(Kind::lse, lse_, at);
    }
    if (a_.variant.sink.defined() && reads_sink()) look_at_sink(row.h);
    if (backward()) look_at_gradients(row);
    bool looked = made_ == Made::of_all_rows || (hidden_ && !backward());
    for (std::int64_t j = first; j < end && made_ != Made::of_all_rows; ++j) {
      if (!pairs_.take_key(j) && !hidden_) continue;
      if (!std::exchange(looked, true)) look_at_query(row);
      look_at_pair(row, j);
    }
  }

  /// The entropy's gradient takes the sum of a row's P, which a sink is less of.
  bool reads_sink() const {
    if (!backward()) return made_ == Made::of_row;
    return made_ == Made::of_all_rows || (call_.dentropy.defined() && made_ != Made::of_p);
  }

  void look_at_query(const Row& row) {
    const auto offset = [&] { return row_offset(a_.q_scale, row.b, row.h, row.q); };
    const ErrorLocation at = of_row(row);
    if (look_at_scale(Kind::q_scale, a_.q_scale, offset, of_shared(a_.q_scale, at))) return;
    check_all(Kind::q, pairs_.q, at);
  }

  /// Without the axis that a number of a head does not have.
  ErrorLocation of_shared(const TensorView& scales, ErrorLocation at) const {
    const bool in_pages = a_.paged.entries != nullptr && at.kv >= 0;
    if (scales.defined() && scales.strides[2] == 0 && (!in_pages || scales.strides[0] == 0)) at.q = at.kv = -1;
    return at;
  }

  /// Whether a row's scale is broken, or one of a row's scales and offsets, along which d counts then.
  template <class Offset>
  bool look_at_scale(Kind kind, const TensorView& scales, const Offset& offset, ErrorLocation at) {
    if (!scales.defined()) return false;
    scales_.resize(scales.rank == 4 ? static_cast<std::size_t>(scales.shape[3]) : 1);
    pairs_.rows().elements(scales, offset(), 1, static_cast<std::int64_t>(scales_.size()), scales_.data());
    const auto broken = std::ranges::find_if(scales_, [](double x) { return !std::isfinite(x); });
    if (broken == scales_.end()) return false;
    if (scales.rank == 4) at.d = broken - scales_.begin();
    add(kind, *broken, at);
    return true;
  }

  void look_at_sink(std::int64_t h) {
    pairs_.rows().elements(a_.variant.sink, h * a_.variant.sink.strides[0], 1, 1, &sink_);
    ErrorLocation at;
    at.h = h;
    check_upper(Kind::sink, sink_, at);
  }

  void look_at_gradients(const Row& row) {
    const ErrorLocation at = of_row(row);
    load_row(call_.dout, row, dout_);
    check_all(Kind::dout, dout_, at);
    if (made_ == Made::of_p) return;
    load_row(a_.o, row, o_);
    check_all(Kind::o, o_, at);
    delta_ = std::inner_product(dout_.begin(), dout_.end(), o_.begin(), 0.0);
    if (call_.dlse.defined()) delta_ -= checked_of_row(Kind::dlse, call_.dlse, at);
    if (call_.dentropy.defined()) {
      const double weight = a_.variant.sink.defined() ? 1 - std::exp(sink_ - lse_) : 1;
      dentropy_ = checked_of_row(Kind::dentropy, call_.dentropy, at);
      delta_ += dentropy_ * (checked_of_row(Kind::entropy, call_.entropy, at) - weight);
    }
    if (scans() && !hidden_) scan_row(row);
  }

  double checked_of_row(Kind kind, const TensorView& t, const ErrorLocation& at) {
    const double value = pairs_.number_of_row(t);
    check(kind, value, at);
    return value;
  }

  /// Finds the greatest logit, and sums P times the gradients of column sums.
  void scan_row(const Row& row) {
    greatest_ = -kInfinity;
    const std::int64_t end = g_.visible_keys(row.q);
    for (std::int64_t j = g_.first_key(row.q); j < end; ++j) {
      if (!pairs_.take_key(j)) continue;
      if (call_.dcolumn_sums.defined()) delta_ += std::exp(pairs_.score - lse_) * checked_of_column(row, j);
      greatest_ = logit() > greatest_ ? logit() : greatest_;
    }
    if (!call_.dmax_logit.defined()) return;
    if (call_.dmax_logit.rank != 1) {
      dmax_logit_ = pairs_.number_of_row(call_.dmax_logit);
      return;
    }
    dmax_logit_ = 0;
    if (greatest_ < nearly(call_.greatest[static_cast<std::size_t>(row.h)])) return;
    pairs_.rows().elements(call_.dmax_logit, row.h * call_.dmax_logit.strides[0], 1, 1, &dmax_logit_);
  }

  double logit() const { return call_.of_scaled ? pairs_.scaled : pairs_.score; }

  /// Of a key's column sum; 0 where none is given.
  double checked_of_column(const Row& row, std::int64_t j) {
    const TensorView& t = call_.dcolumn_sums;
    if (!t.defined()) return 0;
    const std::int64_t h = t.shape[1] == g_.h_q ? row.h : g_.kv_head(row.h);
    if (std::pair head(row.b, h); head != std::exchange(columns_of_, head)) {
      columns_.resize(static_cast<std::size_t>(g_.s_kv));
      pairs_.rows().elements(t, row_offset(t, row.b, h, 0), t.strides[2], g_.s_kv, columns_.data());
    }
    ErrorLocation at;
    at.b = row.b;
    at.h = h;
    at.kv = j;
    const double gradient = columns_[static_cast<std::size_t>(j)];
    check(Kind::dcolumn_sums, gradient, at);
    return gradient;
  }

  /// Of the greatest logit, where the pair may have it; else 0.
  double checked_of_greatest(const Row& row) {
    if (!call_.dmax_logit.defined() || greatest_ == -kInfinity || !(logit() >= nearly(greatest_))) return 0;
    ErrorLocation at = of_row(row);
    if (call_.dmax_logit.rank == 1) at.b = at.q = -1;
    check(Kind::dmax_logit, dmax_logit_, at);
    return dmax_logit_;
  }

  void load_row(const TensorView& t, const Row& row, std::vector<double>& to) const {
    pairs_.rows().elements(t, row_offset(t, row.b, row.h, row.q), t.strides[3], g_.d_v, to.data());
  }

  void look_at_pair(const Row& row, std::int64_t j) {
    const ErrorLocation of_k = of_key(row, j);
    ErrorLocation at = of_row(row);
    at.kv = j;
    const auto look_at_key = [&](Kind kind, Kind scale_kind, const TensorView& scales,
                                 const std::vector<double>& values) {
      const auto offset = [&] { return pairs_.rows().key_offset(scales, row.b, g_.kv_head(row.h), j); };
      if (!look_at_scale(scale_kind, scales, offset, of_shared(scales, of_k))) check_all(kind, values, of_k);
    };
    // A hidden score is selected, whatever it is; gradients are products with K.
    if (!hidden_ || backward()) look_at_key(Kind::k, Kind::k_scale, a_.k_scale, pairs_.k);
    if (reads_values()) {
      pairs_.rows().key(a_.v, a_.v_scale, row.b, g_.kv_head(row.h), j, g_.d_v, v_.data());
      look_at_key(Kind::v, Kind::v_scale, a_.v_scale, v_);
    }
    if (hidden_) {  // it has no score
      if (backward() && reads_values()) checked_of_column(row, j);
      return;
    }
    if (a_.row_bias.defined()) look_at_bias(row);
    if (pairs_.functions) look_at_captures(at);
    check_upper(Kind::score, pairs_.score, at);
    if (!backward() || !std::isfinite(lse_)) return;
    const double p = number_of(a_, std::exp(pairs_.score - lse_));
    check(Kind::p, p, at);
    if (reads_values()) look_at_derivatives(row, at, p);
  }

  void look_at_derivatives(const Row& row, const ErrorLocation& at, double p) {
    double dp = 0;
    if (const double kept = kept_of(row, at.kv); kept != 0) {
      dp = number_of(a_, std::inner_product(dout_.begin(), dout_.end(), v_.begin(), 0.0));
      check(Kind::dp, dp, at);
      dp *= kept;
    }
    const double log_p = pairs_.score - lse_;
    const double by_entropy = !call_.dentropy.defined() || dentropy_ == 0 || p == 0 ? 0 : dentropy_ * p * (log_p + 1);
    const double by_greatest = checked_of_greatest(row);
    const bool in_front = call_.of_scaled && a_.variant.has_score();
    double ds = p * (dp + checked_of_column(row, at.kv) - delta_) - by_entropy + (in_front ? 0 : by_greatest);
    ds = ds == 0 ? ds : ds * pairs_.slope;
    check(Kind::ds, number_of(a_, ds + (in_front ? by_greatest : 0)), at);
  }

  /// What dropout multiplies P by.
  double kept_of(const Row& row, std::int64_t j) const {
    if (!a_.dropout.active()) return 1;
    std::uint8_t keep = 0;
    a_.dropout.row(g_.head_of_whole(row.b, row.h), row.q, j, 1, &keep);
    return keep != 0 ? a_.dropout.scale() : 0;
  }

  void look_at_bias(const Row& row) {
    if (pairs_.score != -kInfinity) check(Kind::row_bias, pairs_.bias, of_shared(a_.row_bias, of_row(row)));
  }

  void look_at_captures(ErrorLocation at) {
    const std::optional<ReadElement> read = pairs_.functions->broken_read();
    if (!read) return;
    // -inf hides a key.
    const bool hides = read->value < 0 && pairs_.score == -kInfinity;
    if (hides) return;
    at.tensor = a_.variant.program->captures[static_cast<std::size_t>(read->capture)].name;
    at.index = read->index;
    add(Kind::captured, read->value, at);
  }

  const InspectedCall& call_;
  const ForwardArgs& a_;
  const Geometry g_;
  Pairs pairs_;
  std::vector<double> v_, o_, dout_;
  Made made_ = Made::of_anything;
  bool hidden_ = false;
  // Of the row.
  double lse_ = 0;
  double delta_ = 0;
  double dentropy_ = 0;
  double dmax_logit_ = 0;
  double greatest_ = 0;
  double sink_ = 0;
  std::vector<double> scales_;
  std::vector<double> columns_;  // gradients of column sums
  std::pair<std::int64_t, std::int64_t> columns_of_{-1, -1};
  std::array<std::optional<ErrorLocation>, kNames.size()> found_;
};

void write_probabilities(const ForwardArgs& args, std::int64_t b, std::int64_t h, const TensorView& p) {
  const Geometry geometry = geometry_of(args);
  Pairs pairs(args, geometry, nullptr);
  std::vector<std::uint8_t> keep(static_cast<std::size_t>(geometry.s_kv), 1);
  const double kept = args.dropout.active() ? args.dropout.scale() : 1.0;
  for (std::int64_t i = 0; i < p.shape[0]; ++i) {
    for (std::int64_t j = 0; j < p.shape[1]; ++j) store_element(p, i * p.strides[0] + j * p.strides[1], 0);
    if (i >= geometry.s_q) continue;
    pairs.take_row(b, h, i);
    const double lse = pairs.lse();
    if (std::isinf(lse)) continue;
    if (args.dropout.active()) {
      args.dropout.row(geometry.head_of_whole(b, h), i, 0, geometry.s_kv, keep.data());
    }
    const std::int64_t end = std::min(geometry.visible_keys(i), p.shape[1]);
    for (std::int64_t j = geometry.first_key(i); j < end; ++j) {
      if (!pairs.take_key(j)) continue;
      const double value = keep[static_cast<std::size_t>(j)] != 0 ? std::exp(pairs.score - lse) * kept : 0.0;
      store_element(p, i * p.strides[0] + j * p.strides[1], value);
    }
  }
}

}  // namespace

std::optional<ErrorLocation> find_cause(const InspectedCall& call, const BrokenResult& result) {
  if (result.made == Made::of_anything) return std::nullopt;
  return Search(call).run(result);
}

void raise_greatest(const InspectedCall& call, std::int64_t first_h, std::int64_t end_h,
                    std::vector<double>& greatest) {
  const Geometry geometry = geometry_of(call.args);
  Pairs pairs(call.args, geometry, call.fetch);
  pairs.keep_keys();
  for (std::int64_t h = first_h; h < end_h; ++h) {
    double gradient = 0;
    pairs.rows().elements(call.dmax_logit, h * call.dmax_logit.strides[0], 1, 1, &gradient);
    if (is_small(gradient)) continue;
    double& most = greatest[static_cast<std::size_t>(h)];
    for (std::int64_t row = 0; row < geometry.b * geometry.s_q; ++row) {
      const std::int64_t i = row % geometry.s_q;
      pairs.take_row(row / geometry.s_q, h, i);
      for (std::int64_t j = geometry.first_key(i); j < geometry.visible_keys(i); ++j) {
        if (!pairs.take_key(j)) continue;
        const double logit = call.of_scaled ? pairs.scaled : pairs.score;
        most = logit > most ? logit : most;
      }
    }
  }
}

std::optional<ErrorLocation> first_not_finite(const TensorView& view, bool minus) {
  if (!view.defined() || view.elements() == 0) return std::nullopt;
  const std::int64_t d = view.rank == 4 ? view.shape[3] : 1;
  std::vector<double> row(static_cast<std::size_t>(d));
  ErrorLocation at;
  for (at.b = 0; at.b < view.shape[0]; ++at.b) {
    for (at.h = 0; at.h < view.shape[1]; ++at.h) {
      for (at.q = 0; at.q < view.shape[2]; ++at.q) {
        load(view, row_offset(view, at.b, at.h, at.q), view.rank == 4 ? view.strides[3] : 1, d, row.data());
        const auto broken = std::ranges::find_if(row, [&](double x) {
          const bool nan_code = view.dtype == DType::e4m3 && std::abs(x) == 480;
          return nan_code || (!std::isfinite(x) && !(minus && x == -std::numeric_limits<double>::infinity()));
        });
        if (broken == row.end()) continue;
        if (view.rank == 4) at.d = broken - row.begin();
        at.value = view.dtype == DType::e4m3 ? std::numeric_limits<double>::quiet_NaN() : *broken;
        return at;
      }
    }
  }
  return std::nullopt;
}

void probabilities(const ForwardArgs& args, std::int64_t b, std::int64_t h, const TensorView& p) {
  write_probabilities(args, b, h, p);
}

}  // namespace fa::reference
