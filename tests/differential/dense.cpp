#include "differential/dense.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/dropout.hpp"

namespace fa::differential {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
/// Hoeffding: a sum of independent errors |e_n| <= a_n without bias exceeds t sqrt(sum a_n^2) with a probability of
/// 2 exp(-t^2 / 2): 10^-16 here, for 10^10 elements a year.
constexpr double kDeviations = 8.7;
constexpr double kMostError = 20;  ///< of a score: beyond it a row's bounds say nothing

/// Units of rounding of one device and one dtype.
struct Units {
  double f32;            ///< of sums and scores
  double element, tiny;  ///< of P and dS, before a product; the least step
  double output, output_tiny;
  double greatest;     ///< finite element
  double statistic;    ///< of LSE and of gradients of captures and sinks, as they are stored
  double exponential;  ///< of an exponential, relatively
  double left_out;     ///< what may be missing of a sum, relatively
  /// Exponentials that become 0: below the least normal float, of a reference that sums may have raised past the
  /// greatest score by as much as a lane has terms.
  double flushed;
  double step;       ///< of a product's sum, for each term: tensor cores cut
  double cut = 0;    ///< of 32 products of 8 bits, relative to the greatest term or partial sum
  double tile = 0;   ///< of a KV tile's P V, relative to its terms
  double whole = 0;  ///< of a score that is made of whole numbers
  double products;   ///< of a product
  // docs/numerics.md, caches of 8 bits: numbers of K in 4 bits may be rounded, and may not; of V P is rounded behind
  // scales, relative to the greatest number.
  double key_codes = 0, value_codes = 0;

  Units(const Arithmetic& arithmetic, const AttentionConfig& config) {
    const DType dtype = output_dtype(config);
    f32 = arithmetic.f64 ? 0x1p-52 : 0x1p-24;  // in double, the reference is as wrong as what it judges
    const bool half = dtype == DType::f16 || dtype == DType::bf16;
    output = dtype == DType::e4m3   ? 0x1p-4
             : dtype == DType::bf16 ? 0x1p-8
             : dtype == DType::f16  ? 0x1p-11
             : dtype == DType::f32  ? 0x1p-24
                                    : 0x1p-52;
    output_tiny = dtype == DType::f16 ? 0x1p-25 : dtype == DType::f64 ? 0x1p-1022 : 0x1p-126;
    if (dtype == DType::e4m3) output_tiny = 0x1p-10;
    greatest = dtype == DType::e4m3 ? 448 : dtype == DType::f16 ? 65504 : dtype == DType::f64 ? 1e308 : 3.3e38;
    statistic = dtype == DType::f64 ? 0x1p-52 : 0x1p-24;
    element = arithmetic.device && half ? output : 0;
    tiny = arithmetic.device && half ? output_tiny : 0;
    if (element != 0 && (config.v_dtype == DType::e4m3 || config.v_dtype == DType::i8)) set_stored(arithmetic);
    exponential = arithmetic.f64 ? 0x1p-50 : 0x1p-21;
    left_out = arithmetic.device ? 0x1p-29 : 0;
    flushed = arithmetic.device ? 0x1p-119 : 0;
    step = !arithmetic.device ? f32 : half ? 0x1p-26 : 0x1p-23;
    products = arithmetic.device && !half ? 0x1p-20 : 0;
    if (arithmetic.device && has_bytes(config)) set_bytes(config);
    if (element != 0 && config.k_dtype == DType::u4x2) key_codes = output / 2;
    if (element != 0 && config.v_dtype == DType::u4x2) value_codes = 0x1p-10;
  }

  /// docs/numerics.md, caches of 8 bits: P times the scale of V, in f16 relative to the greatest.
  void set_stored(const Arithmetic& arithmetic) {
    element = arithmetic.half_products ? 0x1p-11 : 0x1p-8;
    tiny = arithmetic.half_products ? 0x1p-39 : 0x1p-126;
  }

  /// docs/numerics.md: P relative to its greatest, 2^8 times itself; what sums of products of 8 bits lose.
  void set_bytes(const AttentionConfig& config) {
    constexpr double kTileSteps = 4;  // of 32 keys
    element = config.precise ? 0x1p-11 : 0x1p-4;
    tiny = config.precise ? 0x1p-33 : 0x1p-18;
    step = 0x1p-26;
    products = 0;
    cut = config.dtype == DType::i8 ? 0 : 34 * 0x1p-13;
    tile = config.precise ? 0 : kTileSteps * 34 * 0x1p-13;
    whole = config.dtype == DType::i8 ? 0x1p-20 : 0;
  }

  double sum(double terms) const { return f32 * (std::min(terms, kDeviations * std::sqrt(terms)) + 4); }
  double product(double terms) const { return step * terms + 8 * f32 + products; }
  /// The bound of what is rounded into an element: none where that may be infinite.
  double stored(double value, double bound) const {
    const double size = std::abs(value) + bound;
    return size >= greatest ? kInfinity : bound + output * size + output_tiny;
  }
};

FunctionErrors function_errors(const Arithmetic& arithmetic, DType dtype) {
  FunctionErrors errors;
  if (arithmetic.f64 || !arithmetic.device) {  // the host's functions are in double
    const double unit = 0x1p-51;
    return {unit, unit, 4 * unit, 4 * unit, unit, 4 * unit};
  }
  if (size_of(dtype) <= 2) errors.tanh = 0x1.1p-11;
  return errors;
}

using Row = std::vector<double>;

/// target[c] += weight * source[c]
void add(double weight, const double* source, std::int64_t count, double* target) {
  for (std::int64_t c = 0; c < count; ++c) target[c] += weight * source[c];
}

double dot(const double* a, const double* b, std::int64_t count) {
  double sums[4] = {};
  std::int64_t c = 0;
  for (; c + 4 <= count; c += 4) {
    for (int lane = 0; lane < 4; ++lane) sums[lane] += a[c + lane] * b[c + lane];
  }
  for (; c < count; ++c) sums[0] += a[c] * b[c];
  return sums[0] + sums[1] + sums[2] + sums[3];
}

/// Rows of a head, their magnitudes, squares and norms.
struct Matrix {
  std::int64_t rows = 0, columns = 0;
  Row value, size, square, norm;

  void read(const Tensor& t, std::int64_t b, std::int64_t h, std::int64_t first, std::int64_t count) {
    rows = count, columns = t.shape()[3];
    value.resize(static_cast<std::size_t>(rows * columns));
    size.resize(value.size());
    square.resize(value.size());
    norm.resize(static_cast<std::size_t>(rows));
    for (std::int64_t s = 0; s < rows; ++s) {
      double* to = value.data() + s * columns;
      t.row(b, h, first + s, to);
      double sum = 0;
      for (std::int64_t c = 0; c < columns; ++c) {
        const double x = to[c];
        size[static_cast<std::size_t>(s * columns + c)] = std::abs(x);
        square[static_cast<std::size_t>(s * columns + c)] = x * x;
        sum += x * x;
      }
      norm[static_cast<std::size_t>(s)] = std::sqrt(sum);
    }
  }
  const double* at(std::int64_t s) const { return value.data() + s * columns; }
  const double* size_at(std::int64_t s) const { return size.data() + s * columns; }
  const double* square_at(std::int64_t s) const { return square.data() + s * columns; }
};

/// A row of sums: their values, systematic errors, and errors of independent roundings.
struct Sums {
  Row value, fixed, linear, squares;

  void reset(std::size_t count) {
    for (Row* row : {&value, &fixed, &linear, &squares}) row->assign(count, 0.0);
  }
  double bound(std::size_t n) const { return fixed[n] + std::min(linear[n], kDeviations * std::sqrt(squares[n])); }
};

struct Scalar {
  double value = 0, fixed = 0, linear = 0, squares = 0, sizes = 0, sum_squares = 0, terms = 0;
};

struct Pair {
  std::int64_t key;
  double score, error;     // of the function's value
  double p = 0, kept = 1;  // kept: Z / (1 - probability)
  double slope = 1, slope_error = 0;
  std::size_t first_load = 0, loads = 0;
};

class Evaluation {
 public:
  Evaluation(const Configuration& c, const Call& call, const Inputs& inputs, const Arithmetic& arithmetic,
             Mistake mistake)
      : c_(c),
        call_(call),
        in_(inputs),
        mistake_(mistake),
        units_(arithmetic, c.config),
        d_qk_(c.config.head_dim),
        d_v_(c.config.head_dim_v != 0 ? c.config.head_dim_v : c.config.head_dim),
        scale_(c.config.scale ? static_cast<double>(*c.config.scale) : 1 / std::sqrt(static_cast<double>(d_qk_))),
        dropout_(static_cast<double>(c.config.dropout), call.dropout.seed, call.dropout.offset) {
    const auto loader = [this](int capture, const std::int64_t* indices, std::size_t count) {
      return read_capture(capture, indices, count);
    };
    const FunctionErrors errors = function_errors(arithmetic, c.config.dtype);
    if (mistake != Mistake::no_score_function) score_ = Function(c.score, loader, errors);
    if (mistake != Mistake::no_mask_function) mask_ = Function(c.mask, loader, errors);
    const unsigned repeated = 2u | 4u;  // over heads or rows: equal rows round equally
    const bool equal = ((call.q.expanded | call.k.expanded | call.v.expanded | call.dout.expanded) & repeated) != 0;
    independent_ = !equal && scale_ != 0 && call.hostile != Hostile::equal_keys;
  }

  Results run() {
    prepare();
    const std::vector<Segment> segments = segments_of(c_, call_, mistake_ == Mistake::used_ignored);
    if (call_.h_kv > 0) {
      for (const Segment& segment : segments) {
        make_columns(segment);
        for (std::int64_t h_kv = 0; h_kv < call_.h_kv; ++h_kv) run_head(segment, h_kv);
      }
    }
    finish_scalars();
    return std::move(results_);
  }

 private:
  // ---- bookkeeping ----

  void prepare() {
    const auto size = [](std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d) {
      return static_cast<std::size_t>(a * b * c * d);
    };
    const auto make = [](Expected& e, std::size_t count, double value) {
      e.value.assign(count, value);
      e.bound.assign(count, 0.0);
    };
    make(results_.o, size(call_.b, call_.h_q, call_.s_q, d_v_), 0);
    make(results_.lse, size(call_.b, call_.h_q, call_.s_q, 1), -kInfinity);
    make(results_.dq, size(call_.b, call_.h_q, call_.s_q, d_qk_), 0);
    make(results_.dk, size(call_.b, call_.h_kv, call_.s_kv, d_qk_), 0);
    make(results_.dv, size(call_.b, call_.h_kv, call_.s_kv, d_v_), 0);
    if (wanted().max_logit != MaxLogit::none) make(results_.max_logit, results_.lse.value.size(), -kInfinity);
    if (wanted().entropy) make(results_.entropy, results_.lse.value.size(), 0);
    results_.empty_rows.assign(results_.lse.value.size(), false);
    results_.q_rows.assign(static_cast<std::size_t>(call_.s_q), !c_.config.varlen);
    results_.kv_rows.assign(static_cast<std::size_t>(call_.s_kv), !c_.config.varlen);
    sinks_.assign(c_.config.sink ? static_cast<std::size_t>(call_.h_q) : 0, {});
    captures_.resize(c_.captures.size());
    rows_.resize(c_.captures.size());
    for (std::size_t i = 0; i < c_.captures.size(); ++i) {
      if (!c_.captures[i].requires_grad || !in_.captures[i].defined()) continue;
      captures_[i].assign(static_cast<std::size_t>(in_.captures[i].elements()), {});
      rows_[i].assign(captures_[i].size(), {});
    }
  }

  const Statistics& wanted() const { return c_.config.statistics; }

  // ---- column sums ----

  /// Sums of a segment, of which those of its keys come behind those of the segments before.
  void make_columns(const Segment& segment) {
    if (wanted().column_sums == ColumnSums::none) return;
    const std::int64_t heads = wanted().column_sums == ColumnSums::kv_heads ? call_.h_kv : call_.h_q;
    first_column_ = results_.column_sums.value.size();
    const std::size_t end = first_column_ + static_cast<std::size_t>(heads * segment.s_kv);
    results_.column_sums.value.resize(end, 0);
    results_.column_sums.bound.resize(end, 0);
    results_.summed.push_back(segment);
  }

  /// P by the row's log-sum-exp, which has an error of its own, as the pass computes it.
  void add_columns(const Segment& segment, std::int64_t h, std::int64_t i) {
    if (wanted().column_sums == ColumnSums::none) return;
    if (mistake_ == Mistake::sums_without_last_row && i + 1 == segment.s_q) return;
    const std::int64_t group = call_.h_q / call_.h_kv;
    const std::int64_t head = wanted().column_sums == ColumnSums::kv_heads ? h / group : h;
    const std::size_t first = first_column_ + static_cast<std::size_t>(head * segment.s_kv);
    Expected& sums = results_.column_sums;
    for (std::size_t j = 0; row_unsure_ && j < static_cast<std::size_t>(segment.s_kv); ++j) {
      sums.bound[first + j] = kInfinity;
    }
    if (row_unsure_) return;
    const double added = units_.sum(static_cast<double>(group * segment.s_q));
    for (const Pair& pair : pairs_) {
      const double error = pair.error + lse_error_ + 8 * units_.f32 * (std::abs(pair.score) + std::abs(lse_));
      const std::size_t at = first + static_cast<std::size_t>(pair.key);
      sums.value[at] += pair.p;
      sums.bound[at] += pair.p * (std::expm1(error) + added + units_.statistic) + units_.flushed + 0x1p-126;
    }
  }

  // ---- statistics of rows ----

  void put_statistics(std::size_t row) {
    if (wanted().max_logit != MaxLogit::none) {
      const bool other = mistake_ == Mistake::logit_of_the_other_side;
      Approximate greatest = scaled_;
      if ((wanted().max_logit == MaxLogit::softmax) != other) {
        greatest = {-kInfinity, 0};
        for (const Pair& pair : pairs_) greatest = greater(greatest, {pair.score, pair.error});
      }
      const double unit = 8 * units_.f32 + units_.statistic;
      const double rounding = std::isfinite(greatest.value) ? unit * std::abs(greatest.value) : 0;
      results_.max_logit.value[row] = greatest.value;
      results_.max_logit.bound[row] = row_unsure_ ? kInfinity : greatest.error + rounding;
    }
    if (wanted().entropy) put_entropy(row);
  }

  /// Of two numbers that are known nearly the greater one.
  static Approximate greater(const Approximate& a, const Approximate& b) {
    return {std::max(a.value, b.value), std::max(a.error, b.error)};
  }

  void put_entropy(std::size_t row) {
    double sum = 0, bound = 0, sizes = 0;
    for (const Pair& pair : pairs_) {
      const double log_p = pair.score - lse_, error = pair.error + lse_error_;
      sum -= pair.p * log_p;
      sizes += pair.p * (1 + std::abs(log_p));
      bound += pair.p * (1 + std::abs(log_p) + error) * std::expm1(error);
    }
    constexpr double kMostLogarithm = 128;  // of what is left out, or becomes 0
    const auto count = static_cast<double>(pairs_.size());
    bound += (units_.sum(count) + 16 * units_.f32 + units_.exponential) * (sizes + std::abs(lse_));
    bound += units_.statistic * std::abs(sum) + kMostLogarithm * (units_.left_out + count * units_.flushed) + 0x1p-126;
    results_.entropy.value[row] = mistake_ == Mistake::entropy_in_bits ? sum / std::log(2) : sum;
    results_.entropy.bound[row] = row_unsure_ || pairs_.empty() ? (row_unsure_ ? kInfinity : 0) : bound;
  }

  Function::Loaded read_capture(int capture, const std::int64_t* indices, std::size_t count) const {
    const auto n = static_cast<std::size_t>(capture);
    const Tensor& tensor = in_.captures[n];
    if (!tensor.defined()) return {in_.numbers[n], 0};
    std::array<std::int64_t, 4> at{};
    std::int64_t element = 0;
    for (std::size_t axis = 0; axis < count; ++axis) {
      at[axis] = tensor.shape()[axis] == 1 ? 0 : indices[axis];
      element = element * tensor.shape()[axis] + at[axis];
    }
    return {tensor.at(at[0], at[1], at[2], at[3]), element};
  }

  void run_head(const Segment& segment, std::int64_t h_kv) {
    const std::int64_t group = call_.h_q / call_.h_kv;
    k_.read(in_.k, segment.tensor_b, mistake_ == Mistake::wrong_kv_head ? call_.h_kv - 1 - h_kv : h_kv,
            segment.first_kv, segment.s_kv);
    v_.read(in_.v, segment.tensor_b, h_kv, segment.first_kv, segment.s_kv);
    read_value_scales(segment, h_kv);
    dk_.reset(k_.value.size());
    dv_.reset(v_.value.size());
    head_unsure_ = false;
    column_terms_ = static_cast<double>(group * segment.s_q);
    for (std::int64_t n = 0; n < group; ++n) {
      const std::int64_t h = h_kv * group + n;
      q_.read(in_.q, segment.tensor_b, h, segment.first_q, segment.s_q);
      if (call_.backward) dout_.read(in_.dout, segment.tensor_b, h, segment.first_q, segment.s_q);
      for (std::int64_t i = 0; i < segment.s_q; ++i) run_row(segment, h, i);
    }
    for (std::int64_t i = 0; i < segment.s_q; ++i)
      results_.q_rows[static_cast<std::size_t>(segment.first_q + i)] = true;
    for (std::int64_t j = 0; j < segment.s_kv; ++j) {
      results_.kv_rows[static_cast<std::size_t>(segment.first_kv + j)] = true;
      const auto row =
          static_cast<std::size_t>((segment.tensor_b * call_.h_kv + h_kv) * call_.s_kv + segment.first_kv + j);
      put(dk_, static_cast<std::size_t>(j * d_qk_), d_qk_, row * static_cast<std::size_t>(d_qk_), &results_.dk);
      put(dv_, static_cast<std::size_t>(j * d_v_), d_v_, row * static_cast<std::size_t>(d_v_), &results_.dv);
    }
  }

  /// P is rounded times these, relative to the greatest.
  void read_value_scales(const Segment& segment, std::int64_t h_kv) {
    value_scale_.assign(static_cast<std::size_t>(segment.s_kv), 1.0);
    const Tensor& scales = in_.stored_v.scales;
    for (std::int64_t j = 0; c_.config.value_scales && scales.defined() && j < segment.s_kv; ++j) {
      value_scale_[static_cast<std::size_t>(j)] = std::abs(scales.at(segment.tensor_b, h_kv, segment.first_kv + j));
    }
    most_value_scale_ = 0;
    for (const double scale : value_scale_) most_value_scale_ = std::max(most_value_scale_, scale);
  }

  /// What tensor cores lose of a product of 8-bit floats: they keep 13 bits below the greatest of 32 terms and the sum.
  double cut(const double* q, const double* k) const {
    double sum = 0, error = 0;
    for (std::int64_t first = 0; first < d_qk_; first += 32) {
      double greatest = std::abs(sum);
      for (std::int64_t c = first; c < std::min(first + 32, d_qk_); ++c) {
        greatest = std::max(greatest, std::abs(q[c] * k[c]));
        sum += q[c] * k[c];
      }
      error += units_.cut * std::max(greatest, std::abs(sum));
    }
    return error;
  }

  /// Rounds what was summed, and its bound, into a result.
  void put(const Sums& sums, std::size_t from, std::int64_t count, std::size_t to, Expected* e) const {
    for (std::size_t c = 0; c < static_cast<std::size_t>(count); ++c) {
      const double value = sums.value[from + c], bound = head_unsure_ ? kInfinity : sums.bound(from + c);
      e->value[to + c] = value;
      const bool exact = value == 0 && bound == 0;  // nobody saw it
      e->bound[to + c] = exact ? 0 : units_.stored(value, bound);
    }
  }

  void finish_scalars() {
    for (std::size_t i = 0; i < captures_.size(); ++i) {
      results_.captures.emplace_back();
      for (const Scalar& s : captures_[i]) finish(s, &results_.captures.back());
    }
    for (const Scalar& s : sinks_) finish(s, &results_.dsink);
  }

  void finish(const Scalar& s, Expected* e) const {
    const double partial = std::min(s.sizes, std::abs(s.value) + kDeviations * std::sqrt(s.sum_squares));
    const double random = independent_ ? std::min(s.linear, kDeviations * std::sqrt(s.squares)) : s.linear;
    e->value.push_back(s.value);
    e->bound.push_back(any_unsure_ ? kInfinity
                                   : s.fixed + random + units_.sum(s.terms) * partial +
                                         units_.statistic * std::abs(s.value) + 0x1p-126);
  }

  // ---- a row ----

  void run_row(const Segment& segment, std::int64_t h, std::int64_t i) {
    const auto row = static_cast<std::size_t>((segment.tensor_b * call_.h_q + h) * call_.s_q + segment.first_q + i);
    Place place{segment.b, h, i, 0, segment.s_q, segment.s_kv};
    find_pairs(segment, place);
    double sink = c_.config.sink && mistake_ != Mistake::no_sink ? in_.sink.at(h) : -kInfinity;
    if (pairs_.empty() && !row_unsure_) {
      put_statistics(row);
      return empty_row(row, h, sink, segment, i);
    }
    forward_row(sink, place);
    put_forward(row);
    put_statistics(row);
    add_columns(segment, h, i);
    if (call_.backward) backward_row(segment, h, i, row, sink);
  }

  void empty_row(std::size_t row, std::int64_t h, double sink, const Segment& segment, std::int64_t i) {
    results_.empty_rows[row] = true;
    results_.lse.value[row] = sink;
    results_.lse.bound[row] = std::isinf(sink) ? 0 : 8 * units_.f32 * std::abs(sink) + 8 * units_.f32;
    if (!c_.config.sink || !call_.backward || !call_.dlse) return;
    Scalar& s = sinks_[static_cast<std::size_t>(h)];  // P of the sink is 1, O is 0
    const double dlse = in_.dlse.at(segment.tensor_b, h, segment.first_q + i);
    s.value += dlse;
    s.fixed += (units_.exponential + 16 * units_.f32 * (1 + std::abs(sink))) * std::abs(dlse);
    s.sizes += std::abs(dlse), s.sum_squares += dlse * dlse, s.terms += 1;
  }

  void find_pairs(const Segment& segment, Place place) {
    pairs_.clear();
    loads_.clear();
    row_unsure_ = false;
    scaled_ = {-kInfinity, 0};
    const double* q = q_.at(mistake_ == Mistake::first_row_again ? 0 : place.q);
    const double norm = q_.norm[static_cast<std::size_t>(place.q)];
    const bool biased = in_.row_bias.defined() && mistake_ != Mistake::no_row_bias;
    const double bias = biased ? in_.row_bias.at(segment.tensor_b, place.h, segment.first_q + place.q) : 0;
    const std::int64_t end = segment.s_kv - (mistake_ == Mistake::last_key_lost ? 1 : 0);
    for (std::int64_t j = mistake_ == Mistake::begin_ignored ? 0 : segment.begin; j < end; ++j) {
      place.kv = j;
      const Place at = mistake_ == Mistake::place_ignored ? place : in_whole(call_, place);
      if (!in_closed_form(c_.config, at.s_q, at.s_kv, at.q, at.kv, mistake_)) continue;
      if (mask_.defined() && !mask_.boolean_at(at)) continue;
      const double scale = mistake_ == Mistake::score_unscaled ? 1 : scale_;
      Pair pair{.key = j, .score = scale * (dot(q, k_.at(j), d_qk_) + bias), .error = 0};
      const double terms = std::abs(scale) * norm * k_.norm[static_cast<std::size_t>(j)];
      pair.error = units_.product(static_cast<double>(d_qk_)) * terms + 4 * units_.f32 * std::abs(pair.score);
      pair.error +=
          units_.whole * (std::abs(pair.score) + std::abs(scale * bias)) + 4 * units_.f32 * std::abs(scale * bias);
      pair.error += units_.key_codes * terms;
      if (units_.cut != 0) pair.error += std::abs(scale) * cut(q, k_.at(j));
      scaled_ = greater(scaled_, {pair.score, pair.error});
      if (score_.defined()) apply_score(at, &pair);
      if (pair.score == -kInfinity && pair.error == 0) continue;
      if (!(pair.error < kMostError) || !std::isfinite(pair.score)) {
        row_unsure_ = true;
        return;
      }
      pairs_.push_back(pair);
    }
    if (!dropout_.active()) return;
    keep_.resize(static_cast<std::size_t>(segment.s_kv));
    const std::int64_t shifted = mistake_ == Mistake::dropout_shifted ? 1 : 0;
    place.kv = 0;
    const Place at = in_whole(call_, place);
    dropout_.row(at.b * call_.heads_of_captures() + at.h, at.q + shifted, at.kv, segment.s_kv, keep_.data());
    const double scale = mistake_ == Mistake::dropout_scale ? 1 : dropout_.scale();
    for (Pair& pair : pairs_) pair.kept = keep_[static_cast<std::size_t>(pair.key)] != 0 ? scale : 0;
  }

  void apply_score(const Place& place, Pair* pair) {
    const Approximate value = score_.real_at(place, {pair->score, pair->error});
    pair->score = value.value;
    pair->error = value.error;
    if (!call_.backward || !std::isfinite(value.value)) return;
    const Approximate slope = score_.by_score();
    pair->slope = mistake_ == Mistake::no_score_derivative ? 1 : slope.value;
    pair->slope_error = slope.error;
    pair->first_load = loads_.size();
    for (const Function::ByLoad& load : score_.by_loads()) {
      if (captures_[static_cast<std::size_t>(load.capture)].empty()) continue;
      loads_.push_back(load);
    }
    pair->loads = loads_.size() - pair->first_load;
  }

  void forward_row(double sink, const Place& place) {
    o_.reset(static_cast<std::size_t>(d_v_));
    if (row_unsure_) return;
    const double u = units_.f32;
    double greatest = sink;
    for (const Pair& pair : pairs_) greatest = std::max(greatest, pair.score);
    double sum = std::exp(sink - greatest);
    for (const Pair& pair : pairs_) sum += std::exp(pair.score - greatest);
    lse_ = greatest + std::log(sum);
    const auto count = static_cast<double>(pairs_.size());
    double most = 0, least = 0;
    if (std::isfinite(sink)) {
      const double p = std::exp(sink - lse_),
                   error = units_.exponential + 4 * u * (std::abs(sink) + std::abs(greatest));
      most += p * std::exp(error), least += p * std::exp(-error);
    }
    for (Pair& pair : pairs_) {
      pair.p = std::exp(pair.score - lse_);
      pair.error += 4 * u * (std::abs(pair.score) + std::abs(greatest)) + units_.exponential;
      most += pair.p * std::exp(pair.error), least += pair.p * std::exp(-pair.error);
      if (!(pair.error < kMostError)) row_unsure_ = true;
    }
    lse_error_ = std::max(std::log(most), -std::log(least)) + units_.sum(count) + units_.left_out +
                 u * (4 * std::abs(lse_) + 4) + units_.statistic * std::abs(lse_);
    if (!(lse_error_ < kMostError)) row_unsure_ = true;
    if (mistake_ == Mistake::lse_base_two) lse_ /= std::log(2);
    if (mistake_ == Mistake::sink_not_in_lse && std::isfinite(sink)) lse_ += std::log1p(-std::exp(sink - lse_));
    alike_ = count_alike();
    add_values(greatest, least, count, sink);
    (void)place;
  }

  /// How many of the row's P lie so close that they are rounded alike: to half a unit in the last place.
  double count_alike() {
    if (units_.element == 0) return 1;
    buckets_.clear();
    for (const Pair& pair : pairs_) {
      int exponent = 0;
      const double mantissa = std::frexp(pair.p * value_scale_[static_cast<std::size_t>(pair.key)], &exponent);
      if (mantissa == 0 || mantissa == 0.5) continue;
      buckets_.push_back(exponent * 0x1p20 + std::floor(mantissa / units_.element));
    }
    std::sort(buckets_.begin(), buckets_.end());
    double most = 1, run = 0;
    for (std::size_t n = 0; n < buckets_.size(); ++n) {
      run = n > 0 && buckets_[n] == buckets_[n - 1] ? run + 1 : 1;
      most = std::max(most, run);
    }
    return most;
  }

  bool row_independent() const {
    return independent_ && 4 * alike_ <= std::max<double>(static_cast<double>(pairs_.size()), 4);
  }

  double rounding_of_p(const Pair& pair, double tiny) const {
    const double scale = value_scale_[static_cast<std::size_t>(pair.key)];
    if (scale == 0) return 0;
    return std::max(units_.element * pair.p, tiny == 0 ? 0 : tiny * most_value_scale_ / scale);
  }

  void add_values(double greatest, double least, double count, double sink) {
    const double tiny = units_.tiny * std::exp(greatest - lse_);
    const double accumulated =
        units_.product(count) + units_.sum(count) + 4 * units_.f32 + units_.left_out + units_.tile;
    double own = std::isfinite(sink)
                     ? std::exp(sink - lse_) *
                           std::expm1(units_.exponential + 4 * units_.f32 * (std::abs(sink) + std::abs(greatest)))
                     : 0;
    const double denominator = std::max(least, 1e-300);
    for (const Pair& pair : pairs_) {
      const double moved = pair.p * std::expm1(pair.error) + units_.flushed;
      own += moved;
      const double rounding = rounding_of_p(pair, tiny) * pair.kept;
      const double* sizes = v_.size_at(pair.key);
      add(pair.p * pair.kept, v_.at(pair.key), d_v_, o_.value.data());
      add(pair.kept * (moved / denominator + accumulated * pair.p), sizes, d_v_, o_.fixed.data());
      if (units_.value_codes != 0) {
        const double code = pair.kept * pair.p * units_.value_codes * *std::max_element(sizes, sizes + d_v_);
        for (double& fixed : o_.fixed) fixed += code;
      }
      if (units_.element == 0) continue;
      add(rounding, sizes, d_v_, o_.linear.data());
      add(rounding * rounding * alike_, v_.square_at(pair.key), d_v_, o_.squares.data());
    }
    for (std::int64_t c = 0; c < d_v_; ++c) {
      const auto n = static_cast<std::size_t>(c);
      o_.fixed[n] += std::abs(o_.value[n]) * (own / denominator + units_.left_out);
      if (!row_independent()) o_.squares[n] = kInfinity;
    }
  }

  void put_forward(std::size_t row) {
    results_.lse.value[row] = lse_;
    results_.lse.bound[row] = row_unsure_ ? kInfinity : lse_error_;
    for (std::size_t c = 0; c < static_cast<std::size_t>(d_v_); ++c) {
      const double bound = row_unsure_ ? kInfinity : o_.bound(c);
      const std::size_t to = row * static_cast<std::size_t>(d_v_) + c;
      results_.o.value[to] = o_.value[c];
      results_.o.bound[to] = units_.stored(o_.value[c], bound);
    }
  }

  // ---- gradients of a row ----

  /// D and its errors: fixed ones, and those of roundings, which are common to a row and independent between rows.
  struct Common {
    double value = 0, size = 0, fixed = 0, linear = 0, deviation = 0, random = 0;
  };

  Common find_common(const Segment& segment, std::int64_t h, std::int64_t i, const double* dout) {
    Common d;
    double squares = 0;
    for (std::int64_t c = 0; c < d_v_; ++c) {
      const auto n = static_cast<std::size_t>(c);
      const double term = dout[c] * o_.value[n], size = std::abs(dout[c]);
      const double rounding = size * std::max(units_.output * std::abs(o_.value[n]), units_.output_tiny);
      d.value += term;
      d.size += std::abs(term);
      d.fixed += size * o_.fixed[n];
      d.linear += rounding;
      squares += rounding * rounding;
    }
    const double dlse =
        call_.dlse && mistake_ != Mistake::no_dlse ? in_.dlse.at(segment.tensor_b, h, segment.first_q + i) : 0;
    d.value -= dlse;
    d.size += std::abs(dlse);
    d.fixed += (units_.sum(static_cast<double>(d_v_)) + 8 * units_.f32) * d.size;
    for (std::size_t n = 0; n < pairs_.size(); ++n) {
      const double rounding = rounding_of_p(pairs_[n], units_.tiny) * pairs_[n].kept * std::abs(dp_[n]);
      d.linear += rounding;
      squares += rounding * rounding * alike_;
    }
    d.deviation = row_independent() ? std::sqrt(squares) : kInfinity;
    d.random = std::min(d.linear, kDeviations * d.deviation);
    if (mistake_ == Mistake::d_not_subtracted) d.value = 0;
    return d;
  }

  void backward_row(const Segment& segment, std::int64_t h, std::int64_t i, std::size_t row, double sink) {
    if (row_unsure_) {
      head_unsure_ = any_unsure_ = true;
      for (std::int64_t c = 0; c < d_qk_; ++c)
        results_.dq.bound[row * static_cast<std::size_t>(d_qk_) + static_cast<std::size_t>(c)] = kInfinity;
      return;
    }
    const double* dout = dout_.at(i);
    dp_.clear();
    for (const Pair& pair : pairs_) dp_.push_back(dot(dout, v_.at(pair.key), d_v_));
    const Common d = find_common(segment, h, i, dout);
    dq_.reset(static_cast<std::size_t>(d_qk_));
    weights_.assign(static_cast<std::size_t>(d_qk_), 0.0);
    touched_.clear();
    for (std::size_t n = 0; n < pairs_.size(); ++n) backward_pair(pairs_[n], dp_[n], d, i);
    for (std::size_t c = 0; c < static_cast<std::size_t>(d_qk_); ++c) {
      dq_.fixed[c] += d.random * std::abs(weights_[c]);
      if (!row_independent()) dq_.squares[c] = kInfinity;
    }
    const bool head_unsure = head_unsure_;
    head_unsure_ = false;
    put(dq_, 0, d_qk_, row * static_cast<std::size_t>(d_qk_), &results_.dq);
    head_unsure_ = head_unsure;
    finish_row_of_captures(d);
    if (c_.config.sink) add_sink(h, sink, d);
  }

  void backward_pair(const Pair& pair, double dp, const Common& d, std::int64_t i) {
    const double u = units_.f32, p = pair.p, z = pair.kept;
    const auto count = static_cast<double>(pairs_.size());
    const double relative =
        pair.error + lse_error_ + 4 * u * (std::abs(pair.score) + std::abs(lse_)) + units_.exponential;
    const double moved = p * std::expm1(relative) + units_.flushed;
    const double dp_error = units_.product(static_cast<double>(d_v_)) * dout_.norm[static_cast<std::size_t>(i)] *
                            v_.norm[static_cast<std::size_t>(pair.key)];
    const double ds = p * (z * dp - d.value);
    const double ds_size = p * (z * std::abs(dp) + d.size);
    const double ds_error =
        moved * std::abs(z * dp - d.value) + (p + moved) * (z * dp_error + d.fixed) + 4 * u * ds_size;
    add_captures(pair, ds, ds_error, d);
    const double t = ds * pair.slope;
    const double t_error = ds_error * std::abs(pair.slope) +
                           (std::abs(ds) + ds_error + p * d.random) * pair.slope_error + 4 * u * std::abs(t);
    const double rounding = std::max(units_.element * (std::abs(t) + t_error + p * std::abs(pair.slope) * d.random),
                                     units_.tiny * dropout_.scale());
    const double scale = mistake_ == Mistake::dk_unscaled ? 1 : scale_, size = std::abs(scale_);
    const double of_d = p * std::abs(pair.slope);
    const std::int64_t j = pair.key;
    const bool independent = row_independent();
    // dq
    add(scale_ * t, k_.at(j), d_qk_, dq_.value.data());
    add(size * (t_error + (units_.product(count) + units_.sum(count)) * std::abs(t)), k_.size_at(j), d_qk_,
        dq_.fixed.data());
    add(size * p * pair.slope, k_.at(j), d_qk_, weights_.data());
    // dk and dv: sums over the rows of every head of the group
    const double accumulated = units_.product(column_terms_) + units_.sum(column_terms_);
    const auto at_k = static_cast<std::size_t>(j * d_qk_), at_v = static_cast<std::size_t>(j * d_v_);
    const double plain_t_error = t_error + accumulated * std::abs(t);
    const double linear = rounding + of_d * d.linear;
    const double group_weight = mistake_ == Mistake::group_not_summed ? 0.5 : 1;
    add(group_weight * scale * t, q_.at(i), d_qk_, dk_.value.data() + at_k);
    add(size * (plain_t_error + (independent ? 0 : linear)), q_.size_at(i), d_qk_, dk_.fixed.data() + at_k);
    const double p_rounding = rounding_of_p(pair, units_.tiny) * z;
    add(p * z, dout_.at(i), d_v_, dv_.value.data() + at_v);
    add(z * (moved + accumulated * p) + (independent ? 0 : p_rounding), dout_.size_at(i), d_v_,
        dv_.fixed.data() + at_v);
    if (units_.element == 0 && d.linear == 0) return;
    add(size * rounding, k_.size_at(j), d_qk_, dq_.linear.data());
    add(size * size * rounding * rounding * alike_, k_.square_at(j), d_qk_, dq_.squares.data());
    if (!independent) return;
    const double columns = alike_ * std::max(1.0, column_terms_ / static_cast<double>(k_.rows));
    const double squares = rounding * rounding * columns + of_d * of_d * d.deviation * d.deviation;
    add(size * linear, q_.size_at(i), d_qk_, dk_.linear.data() + at_k);
    add(size * size * squares, q_.square_at(i), d_qk_, dk_.squares.data() + at_k);
    add(p_rounding, dout_.size_at(i), d_v_, dv_.linear.data() + at_v);
    add(p_rounding * p_rounding * columns, dout_.square_at(i), d_v_, dv_.squares.data() + at_v);
  }

  void add_captures(const Pair& pair, double ds, double ds_error, const Common& d) {
    for (std::size_t n = pair.first_load; n < pair.first_load + pair.loads; ++n) {
      const Function::ByLoad& load = loads_[n];
      const auto capture = static_cast<std::size_t>(load.capture), element = static_cast<std::size_t>(load.element);
      Scalar& row = rows_[capture][element];
      if (row.terms == 0) touched_.emplace_back(capture, element);
      const double slope = load.derivative.value, term = ds * slope;
      row.value += term;
      row.linear += pair.p * slope;  // the weight of D
      row.fixed += ds_error * std::abs(slope) + (std::abs(ds) + ds_error + pair.p * d.random) * load.derivative.error +
                   2 * units_.f32 * std::abs(term);
      row.sizes += std::abs(term);
      row.sum_squares += term * term;
      row.terms += 1;
    }
  }

  void finish_row_of_captures(const Common& d) {
    for (const auto& [capture, element] : touched_) {
      Scalar &row = rows_[capture][element], &sum = captures_[capture][element];
      const double weight = std::abs(row.linear);
      sum.value += row.value;
      sum.fixed += row.fixed;
      sum.linear += weight * d.linear;
      sum.squares += weight == 0 ? 0 : weight * weight * d.deviation * d.deviation;
      sum.sizes += row.sizes;
      sum.sum_squares += row.sum_squares;
      sum.terms += row.terms;
      row = {};
    }
  }

  void add_sink(std::int64_t h, double sink, const Common& d) {
    if (!std::isfinite(sink)) return;
    Scalar& s = sinks_[static_cast<std::size_t>(h)];
    const double p = std::exp(sink - lse_);
    const double relative = lse_error_ + units_.exponential + 4 * units_.f32 * (std::abs(sink) + std::abs(lse_));
    const double term = p * d.value;
    s.value -= term;
    s.fixed +=
        p * std::expm1(relative) * std::abs(d.value) + p * std::exp(relative) * d.fixed + 4 * units_.f32 * p * d.size;
    s.linear += p * d.linear;
    s.squares += p == 0 ? 0 : p * p * d.deviation * d.deviation;
    s.sizes += std::abs(term), s.sum_squares += term * term, s.terms += 1;
  }

  const Configuration& c_;
  const Call& call_;
  const Inputs& in_;
  const Mistake mistake_;
  const Units units_;
  const std::int64_t d_qk_, d_v_;
  const double scale_;
  const reference::DropoutMask dropout_;
  Function score_, mask_;
  bool independent_ = true;
  Results results_;

  Matrix q_, k_, v_, dout_;  // of a head of a segment
  Sums dk_, dv_;
  bool head_unsure_ = false, any_unsure_ = false;
  double column_terms_ = 0;

  std::vector<Pair> pairs_;  // of a row
  std::vector<Function::ByLoad> loads_;
  std::vector<std::uint8_t> keep_;
  std::vector<double> buckets_;
  bool row_unsure_ = false;
  double lse_ = 0, lse_error_ = 0, alike_ = 1;
  Approximate scaled_;            // the greatest score in front of the function
  std::size_t first_column_ = 0;  // of the segment
  Sums o_, dq_;
  Row dp_, weights_, value_scale_;
  double most_value_scale_ = 1;

  std::vector<std::vector<Scalar>> captures_, rows_;
  std::vector<std::pair<std::size_t, std::size_t>> touched_;
  std::vector<Scalar> sinks_;
};

}  // namespace

void join_state(const Configuration& c, const State& state, Results& results, Mistake mistake) {
  const double u = c.config.dtype == DType::bf16  ? 0x1p-8
                   : c.config.dtype == DType::f16 ? 0x1p-11
                   : c.config.dtype == DType::f32 ? 0x1p-22
                                                  : 0x1p-50;
  const double f = c.config.dtype == DType::f64 ? 0x1p-48 : 0x1p-21;
  const std::size_t rows = state.lse.size();
  for (std::size_t row = 0; row < rows && mistake != Mistake::state_ignored; ++row) {
    const double old = state.lse[row];
    if (std::isinf(old) || std::isnan(old)) continue;
    double& lse = results.lse.value[row];
    double& lse_bound = results.lse.bound[row];
    const double base = std::max(lse, old);
    const double keys = std::exp(lse - base), kept = std::exp(old - base), sum = keys + kept;
    const double own = keys / sum, other = kept / sum;
    // A logarithm that is off by so much moves weight from one part to the other; floats lose what they cannot hold.
    const double moved = std::isinf(lse) ? 0 : own * other * (lse_bound + f * (1 + std::abs(lse) + std::abs(old)));
    const std::size_t d_v = results.o.value.size() / rows;
    for (std::size_t n = row * d_v; n < (row + 1) * d_v; ++n) {
      const double of_keys = own == 0 ? 0 : results.o.value[n], of_state = state.o[n];
      const double size = own * std::abs(of_keys) + other * std::abs(of_state);
      results.o.bound[n] = (own == 0 ? 0 : own * results.o.bound[n]) +
                           2 * moved * (std::abs(of_keys) + std::abs(of_state)) + (u + f) * size + 0x1p-25;
      results.o.value[n] = own * of_keys + other * of_state;
    }
    lse_bound = (own == 0 ? 0 : own * lse_bound) + f * (1 + std::abs(base) + std::abs(old));
    lse = base + std::log(sum);
  }
}

std::vector<Segment> segments_of(const Configuration& c, const Call& call, bool ignore_used) {
  std::vector<Segment> segments;
  const auto begin = [&](std::size_t i) { return call.begin.empty() ? 0 : std::int64_t{call.begin[i]}; };
  const bool all_q = call.used_q.empty() || ignore_used, all_kv = call.used_kv.empty() || ignore_used;
  if (!c.config.varlen) {
    for (std::int64_t b = 0; b < call.b; ++b) {
      const auto i = static_cast<std::size_t>(b);
      segments.push_back({b, b, 0, call.s_q, 0, all_kv ? call.s_kv : call.used_kv[i], begin(i)});
    }
    return segments;
  }
  for (std::size_t i = 0; i + 1 < call.cu_q.size(); ++i) {
    segments.push_back({static_cast<std::int64_t>(i), 0, call.cu_q[i],
                        all_q ? call.cu_q[i + 1] - call.cu_q[i] : call.used_q[i], call.cu_kv[i],
                        all_kv ? call.cu_kv[i + 1] - call.cu_kv[i] : call.used_kv[i], begin(i)});
  }
  return segments;
}

Place in_whole(const Call& call, Place place) {
  if (!call.place) return place;
  const ShardPlace& at = *call.place;
  return {at.b + place.b, at.h_q + place.h, at.q + at.q_step * place.q, at.kv + at.kv_step * place.kv,
          at.whole_s_q,   at.whole_s_kv};
}

bool in_closed_form(const AttentionConfig& config, std::int64_t s_q, std::int64_t s_kv, std::int64_t i, std::int64_t j,
                    Mistake mistake) {
  const bool top_left = (config.causal_align == CausalAlign::top_left) != (mistake == Mistake::wrong_align);
  const std::int64_t place = top_left ? i : i + s_kv - s_q;
  if (config.causal && j > place + (mistake == Mistake::causal_by_one ? 1 : 0)) return false;
  const std::int64_t by = mistake == Mistake::window_by_one ? 1 : 0;
  if (config.window_left >= 0 && j < place - config.window_left + by) return false;
  if (config.window_right >= 0 && j > place + config.window_right) return false;
  if (config.chunk <= 0) return true;
  const auto chunk = [&](std::int64_t x) {
    return static_cast<std::int64_t>(std::floor(static_cast<double>(x) / static_cast<double>(config.chunk)));
  };
  return chunk(place + (mistake == Mistake::chunk_by_one ? 1 : 0)) == chunk(j);
}

Function mask_function(const Configuration& c, const Inputs& inputs) {
  const auto loader = [&inputs](int capture, const std::int64_t* indices, std::size_t count) -> Function::Loaded {
    const Tensor& tensor = inputs.captures[static_cast<std::size_t>(capture)];
    if (!tensor.defined()) return {inputs.numbers[static_cast<std::size_t>(capture)], 0};
    std::array<std::int64_t, 4> at{};
    for (std::size_t axis = 0; axis < count; ++axis) at[axis] = tensor.shape()[axis] == 1 ? 0 : indices[axis];
    return {tensor.at(at[0], at[1], at[2], at[3]), 0};
  };
  return Function(c.mask, loader, {});
}

Results evaluate(const Configuration& c, const Call& call, const Inputs& inputs, const Arithmetic& arithmetic,
                 Mistake mistake) {
  return Evaluation(c, call, inputs, arithmetic, mistake).run();
}

const char* to_string(Mistake mistake) {
  static constexpr const char* kNames[] = {"none",
                                           "causal_by_one",
                                           "wrong_align",
                                           "window_by_one",
                                           "chunk_by_one",
                                           "last_key_lost",
                                           "first_row_again",
                                           "wrong_kv_head",
                                           "no_sink",
                                           "sink_not_in_lse",
                                           "dropout_scale",
                                           "dropout_shifted",
                                           "score_unscaled",
                                           "no_score_function",
                                           "no_mask_function",
                                           "no_dlse",
                                           "d_not_subtracted",
                                           "group_not_summed",
                                           "no_score_derivative",
                                           "dk_unscaled",
                                           "lse_base_two",
                                           "used_ignored",
                                           "begin_ignored",
                                           "state_ignored",
                                           "place_ignored",
                                           "no_row_bias",
                                           "logit_of_the_other_side",
                                           "entropy_in_bits",
                                           "sums_without_last_row"};
  return kNames[static_cast<std::size_t>(mistake)];
}

}  // namespace fa::differential
