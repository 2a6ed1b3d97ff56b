#include "reference/backward.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <vector>

#include "reference/evaluator.hpp"
#include "reference/geometry.hpp"
#include "reference/parallel.hpp"
#include "reference/rows.hpp"

namespace fa::reference {
namespace {

constexpr std::int64_t kTile = 64;  // query rows or keys of a tile

/// Up to kTile rows of a tensor [b, h, s, d], as they are and transposed. Dot products of a row with the tile's rows
/// run over `columns`, so that they vectorise over the rows without reordering any sum.
template <class Acc>
struct Tile {
  explicit Tile(std::int64_t head_dim)
      : d(head_dim), width(round_up(head_dim)), rows(kTile * width), columns(head_dim * kTile) {}

  const Acc* row(std::int64_t n) const { return &rows[n * width]; }

  void load(const TensorView& t, std::int64_t b, std::int64_t h, std::int64_t first, std::int64_t count) {
    for (std::int64_t n = 0; n < count; ++n) {
      reference::load(t, row_offset(t, b, h, first + n), t.strides[3], d, &rows[n * width]);
      for (std::int64_t c = 0; c < d; ++c) columns[c * kTile + n] = rows[n * width + c];
    }
  }

  std::int64_t d;
  std::int64_t width;        // d and some columns of zeros
  std::vector<Acc> rows;     // [kTile, width]
  std::vector<Acc> columns;  // [d, kTile]
};

/// A row's log-sum-exp and D = rowsum(dout o O) - dlse + dentropy (H - W) + rowsum(P o g), W being the sum of its P and
/// g the gradient of column sums; and gradients of its statistics.
template <class Acc>
struct RowStatistics {
  Acc lse;
  Acc delta;
  Acc dentropy = 0;
  Acc dmax_logit = 0;
  std::int64_t max_key = -1;  // where the greatest logit is, of equal ones the first
};

/// What one thread needs for one tile of query rows, or of keys, reused from tile to tile.
template <class Acc>
struct Scratch {
  explicit Scratch(const Geometry& g)
      : q(g.d_qk), k(g.d_qk), v(g.d_v), dout(g.d_v), dq(kTile * q.width), dk(kTile * k.width), dv(kTile * v.width) {}

  Tile<Acc> q;
  Tile<Acc> k;
  Tile<Acc> v;
  Tile<Acc> dout;
  std::array<Acc, kTile> p{};                                 // of one query row, or of one key; before that the scores
  std::array<Acc, kTile> ds{};                                // likewise; before that dout V^T
  std::array<bool, kTile> kept{};                             // likewise, what no mask drops
  std::array<std::array<std::uint8_t, kTile>, kTile> keep{};  // [rows, keys], what dropout leaves of a tile of P
  std::vector<Acc> dq;                                        // [kTile, q.width], not yet scaled
  std::vector<Acc> dk;                                        // [kTile, k.width], not yet scaled
  std::vector<Acc> dv;                                        // [kTile, v.width]

  std::optional<Evaluator> functions;  // where the call has any
};

/// Two sweeps over the tiles of the scores: along the keys for dq, along the query rows for dk and dv. Each sum stays
/// in one thread and has one order.
template <class Acc>
class Backward {
 public:
  Backward(const BackwardArgs& args, const Geometry& geometry)
      : a_(args), g_(geometry), scale_(static_cast<Acc>(args.scale)) {}

  void run() {
    compute_statistics();
    if (a_.variant.has_score() || a_.variant.has_mask()) list_functions();
    if (a_.dmax_logit.defined() || a_.dcolumn_sums.defined()) scan_rows();
    if (a_.variant.dsink.defined()) compute_dsink();
    const double cost = static_cast<double>(kTile) * (2 * g_.d_qk + g_.d_v);
    const std::int64_t row_tiles = a_.dq.defined() ? (g_.s_q + kTile - 1) / kTile : 0;
    sweep(g_.b * g_.h_q, row_tiles, cost * static_cast<double>(g_.s_kv),
          [&](std::int64_t head, std::int64_t i0, Scratch<Acc>& s) { row_tile(head / g_.h_q, head % g_.h_q, i0, s); });
    const std::int64_t key_tiles = a_.dk.defined() || a_.dv.defined() ? (g_.s_kv + kTile - 1) / kTile : 0;
    sweep(
        g_.b * g_.h_kv, key_tiles, cost * static_cast<double>(g_.s_q * group()),
        [&](std::int64_t head, std::int64_t j0, Scratch<Acc>& s) { key_tile(head / g_.h_kv, head % g_.h_kv, j0, s); });
    compute_captured_gradients();
  }

 private:
  static constexpr Acc kInfinity = std::numeric_limits<Acc>::infinity();

  std::int64_t group() const { return g_.h_kv == 0 ? 0 : g_.h_q / g_.h_kv; }

  const RowStatistics<Acc>& statistics(std::int64_t b, std::int64_t h, std::int64_t i) const {
    return statistics_[(b * g_.h_q + h) * g_.s_q + i];
  }

  template <class Work>
  void sweep(std::int64_t heads, std::int64_t tiles, double cost, const Work& work) const {
    const std::int64_t items = heads * tiles;
    if (items == 0) return;
    std::vector<Scratch<Acc>> scratch(thread_count(items, cost), Scratch<Acc>(g_));
    for (Scratch<Acc>& s : scratch) add_functions(s);
    parallel_for(items, scratch,
                 [&](Scratch<Acc>& s, std::int64_t item) noexcept { work(item / tiles, item % tiles * kTile, s); });
  }

  expression::Lengths lengths() const { return {g_.b, g_.h_q, g_.s_q, g_.s_kv}; }

  void list_functions() {
    const expression::Program& program = *a_.variant.program;
    if (program.score) roots_ = {*program.score, program.score_derivative};
    if (program.mask) roots_.push_back(*program.mask);
  }

  void add_functions(Scratch<Acc>& s) const {
    if (!roots_.empty()) s.functions.emplace(*a_.variant.program, roots_, a_.variant, lengths());
  }

  /// dsink = sum over rows of P of the sink times (0 - D): its value is 0.
  void compute_dsink() const {
    for (std::int64_t h = 0; h < g_.h_q; ++h) {
      Acc sink = 0;
      load(a_.variant.sink, h * a_.variant.sink.strides[0], 1, 1, &sink);
      const std::int64_t place = h * a_.variant.dsink.strides[0];
      double sum = 0;
      if (a_.variant.accumulate) load(a_.variant.dsink, place, 1, 1, &sum);
      for (std::int64_t b = 0; b < g_.b; ++b) {
        for (std::int64_t i = 0; i < g_.s_q; ++i) {
          const RowStatistics<Acc>& row = statistics(b, h, i);
          sum -= static_cast<double>(std::exp(sink - row.lse) * row.delta);
        }
      }
      store_element(a_.variant.dsink, place, sum);
    }
  }

  /// One more sweep, in one order, by one thread: elements that are read at many places are sums over all of these.
  void compute_captured_gradients() const {
    if (a_.variant.program == nullptr) return;
    const expression::Program& program = *a_.variant.program;
    std::vector<std::vector<double>> sums(program.captures.size());
    for (std::size_t i = 0; i < sums.size(); ++i) {
      const TensorView& view = a_.variant.captures[i].gradient;
      if (!view.defined()) continue;
      sums[i].resize(static_cast<std::size_t>(view.elements()), 0.0);
      if (a_.variant.accumulate) load(view, 0, 1, view.elements(), sums[i].data());
    }
    std::vector<expression::CapturedGradient> wanted;
    for (const expression::CapturedGradient& gradient : program.gradients) {
      if (!sums[static_cast<std::size_t>(program.graph[gradient.load].index)].empty()) wanted.push_back(gradient);
    }
    if (!wanted.empty()) sum_gradients(program, wanted, sums);
    for (std::size_t i = 0; i < sums.size(); ++i) {
      const TensorView& view = a_.variant.captures[i].gradient;
      for (std::size_t n = 0; n < sums[i].size(); ++n) store_element(view, static_cast<std::int64_t>(n), sums[i][n]);
    }
  }

  /// Sums by the offsets of gradients, which have no gaps between elements.
  void sum_gradients(const expression::Program& program, const std::vector<expression::CapturedGradient>& wanted,
                     std::vector<std::vector<double>>& sums) const {
    std::vector<expression::NodeId> roots = roots_;
    for (const expression::CapturedGradient& gradient : wanted) {
      roots.push_back(gradient.load);
      roots.push_back(gradient.derivative);
    }
    Evaluator functions(program, roots, a_.variant, lengths());
    std::vector<Acc> q(g_.d_qk), k(g_.d_qk), v(g_.d_v), dout(g_.d_v);
    std::vector<std::uint8_t> keep(g_.s_kv, 1);
    for (std::int64_t row = 0; row < g_.b * g_.h_q * g_.s_q; ++row) {
      Point point{row / g_.s_q / g_.h_q, row / g_.s_q % g_.h_q, row % g_.s_q, 0, 0};
      load_row(a_.q, point.b, point.h, point.q, q);
      load_row(a_.dout, point.b, point.h, point.q, dout);
      if (a_.dropout.active()) a_.dropout.row(g_.head_of_whole(point.b, point.h), point.q, 0, g_.s_kv, keep.data());
      const std::int64_t end = g_.visible_keys(point.q);
      for (point.kv = g_.first_key(point.q); point.kv < end; ++point.kv) {
        load_row(a_.k, point.b, g_.kv_head(point.h), point.kv, k);
        load_row(a_.v, point.b, g_.kv_head(point.h), point.kv, v);
        Acc p = std::inner_product(q.begin(), q.end(), k.begin(), Acc(0));
        Acc ds = std::inner_product(dout.begin(), dout.end(), v.begin(), Acc(0));
        Acc slope = 1;
        differentiate(point, keep[point.kv], functions, p, ds, slope);
        for (const expression::CapturedGradient& gradient : wanted) {
          const double term = functions[gradient.derivative].real * static_cast<double>(ds);
          const auto capture = static_cast<std::size_t>(program.graph[gradient.load].index);
          if (ds != Acc(0)) sums[capture][functions.gradient_offset(gradient.load)] += term;
        }
      }
    }
  }

  static void load_row(const TensorView& t, std::int64_t b, std::int64_t h, std::int64_t s, std::vector<Acc>& to) {
    load(t, row_offset(t, b, h, s), t.strides[3], static_cast<std::int64_t>(to.size()), to.data());
  }

  void compute_statistics() {
    statistics_.resize(g_.b * g_.h_q * g_.s_q);
    const std::int64_t heads = g_.b * g_.h_q;
    if (heads == 0) return;
    std::vector<std::vector<Acc>> scratch(thread_count(heads, static_cast<double>(g_.s_q * g_.d_v)),
                                          std::vector<Acc>(2 * g_.d_v));
    parallel_for(heads, scratch, [&](std::vector<Acc>& rows, std::int64_t head) noexcept {
      for (std::int64_t i = 0; i < g_.s_q; ++i) {
        statistics_[head * g_.s_q + i] = row_statistics(head / g_.h_q, head % g_.h_q, i, rows);
      }
    });
  }

  RowStatistics<Acc> row_statistics(std::int64_t b, std::int64_t h, std::int64_t i, std::vector<Acc>& rows) const {
    Acc lse = 0;
    load(a_.lse, row_offset(a_.lse, b, h, i), 1, 1, &lse);
    // No weight at all in this row: any finite or -inf score less +inf gives P = 0.
    if (std::isinf(lse)) return {kInfinity, Acc(0)};
    Acc dlse = 0;
    if (a_.dlse.defined()) load(a_.dlse, row_offset(a_.dlse, b, h, i), 1, 1, &dlse);
    Acc* dout = rows.data();
    Acc* o = dout + g_.d_v;
    load(a_.dout, row_offset(a_.dout, b, h, i), a_.dout.strides[3], g_.d_v, dout);
    load(a_.o, row_offset(a_.o, b, h, i), a_.o.strides[3], g_.d_v, o);
    RowStatistics<Acc> row{lse, std::inner_product(dout, o, o, Acc(0)) - dlse};
    if (a_.dmax_logit.defined()) load(a_.dmax_logit, row_offset(a_.dmax_logit, b, h, i), 1, 1, &row.dmax_logit);
    if (!a_.dentropy.defined()) return row;
    Acc entropy = 0, weight = 1;
    load(a_.dentropy, row_offset(a_.dentropy, b, h, i), 1, 1, &row.dentropy);
    load(a_.entropy, row_offset(a_.entropy, b, h, i), 1, 1, &entropy);
    if (a_.variant.sink.defined()) {
      Acc sink = 0;
      load(a_.variant.sink, h * a_.variant.sink.strides[0], 1, 1, &sink);
      weight -= std::exp(sink - lse);
    }
    row.delta += row.dentropy * (entropy - weight);
    return row;
  }

  /// By one sweep along the keys.
  void scan_rows() {
    const double cost = static_cast<double>(kTile * g_.d_qk) * static_cast<double>(g_.s_kv);
    sweep(g_.b * g_.h_q, (g_.s_q + kTile - 1) / kTile, cost,
          [&](std::int64_t head, std::int64_t i0, Scratch<Acc>& s) { scan_tile(head / g_.h_q, head % g_.h_q, i0, s); });
  }

  /// Finds where the greatest logits are, and sums P times the gradients of column sums.
  void scan_tile(std::int64_t b, std::int64_t h, std::int64_t i0, Scratch<Acc>& s) {
    const std::int64_t rows = std::min(kTile, g_.s_q - i0);
    s.q.load(a_.q, b, h, i0, rows);
    std::array<Acc, kTile> greatest;
    greatest.fill(-kInfinity);
    const std::int64_t keys = g_.visible_keys(i0 + rows - 1);
    for (std::int64_t j0 = g_.first_key(i0) / kTile * kTile; j0 < keys; j0 += kTile) {
      const std::int64_t count = std::min(kTile, keys - j0);
      s.k.load(a_.k, b, g_.kv_head(h), j0, count);
      for (std::int64_t n = 0; n < rows; ++n) {
        RowStatistics<Acc>& row = statistics_[(b * g_.h_q + h) * g_.s_q + i0 + n];
        if (row.lse == kInfinity) continue;
        multiply(s.q.row(n), s.k, s.p);
        const std::int64_t last = std::min(count, g_.visible_keys(i0 + n) - j0);
        for (std::int64_t j = std::max<std::int64_t>(g_.first_key(i0 + n) - j0, 0); j < last; ++j) {
          const std::optional<Logits> logits = logits_of({b, h, i0 + n, j0 + j, 0}, s, s.p[j]);
          if (!logits) continue;
          if (a_.dcolumn_sums.defined()) {
            row.delta += std::exp(logits->of_softmax - row.lse) * column_gradient(b, h, j0 + j);
          }
          const Acc logit = a_.of_scaled ? logits->scaled : logits->of_softmax;
          if (!(logit > greatest[n])) continue;
          greatest[n] = logit;
          row.max_key = j0 + j;
        }
      }
    }
  }

  /// In front of the score function, and as the softmax takes it.
  struct Logits {
    Acc scaled;
    Acc of_softmax;
  };

  /// From q . k; nothing where a mask drops the pair.
  std::optional<Logits> logits_of(Point point, Scratch<Acc>& s, Acc product) const {
    const Acc scaled = product * scale_;
    if (!s.functions) return Logits{scaled, scaled};
    const expression::Program& program = *a_.variant.program;
    point.score = static_cast<double>(scaled);
    s.functions->run(point);
    if (program.mask && (*s.functions)[*program.mask].integer == 0) return std::nullopt;
    return Logits{scaled, program.score ? static_cast<Acc>((*s.functions)[*program.score].real) : scaled};
  }

  /// Of a key's column sum; 0 where none is given.
  Acc column_gradient(std::int64_t b, std::int64_t h, std::int64_t j) const {
    if (!a_.dcolumn_sums.defined()) return 0;
    Acc gradient = 0;
    const bool of_query_heads = a_.dcolumn_sums.shape[1] == g_.h_q;
    load(a_.dcolumn_sums, row_offset(a_.dcolumn_sums, b, of_query_heads ? h : g_.kv_head(h), j), 1, 1, &gradient);
    return gradient;
  }

  /// dq of the query rows [i0, i0 + kTile) of one head.
  void row_tile(std::int64_t b, std::int64_t h, std::int64_t i0, Scratch<Acc>& s) const {
    const std::int64_t rows = std::min(kTile, g_.s_q - i0);
    s.q.load(a_.q, b, h, i0, rows);
    s.dout.load(a_.dout, b, h, i0, rows);
    std::fill(s.dq.begin(), s.dq.end(), Acc(0));
    const std::int64_t keys = g_.visible_keys(i0 + rows - 1);  // later keys are masked in every row
    for (std::int64_t j0 = g_.first_key(i0) / kTile * kTile; j0 < keys; j0 += kTile) {
      const std::int64_t count = std::min(kTile, keys - j0);
      s.k.load(a_.k, b, g_.kv_head(h), j0, count);
      s.v.load(a_.v, b, g_.kv_head(h), j0, count);
      if (a_.dropout.active()) fill_keep(b, h, i0, rows, j0, count, s);
      for (std::int64_t n = 0; n < rows; ++n) {
        const std::int64_t visible = std::min(count, g_.visible_keys(i0 + n) - j0);
        const std::int64_t first = std::max<std::int64_t>(g_.first_key(i0 + n) - j0, 0);
        if (visible <= first) continue;
        multiply(s.q.row(n), s.k, s.p);
        multiply(s.dout.row(n), s.v, s.ds);
        for (std::int64_t j = first; j < visible; ++j) {
          s.kept[j] = differentiate({b, h, i0 + n, j0 + j, 0}, s.keep[n][j], s, s.p[j], s.ds[j]);
        }
        add_kept_rows(s.ds, s, first, visible, s.k, &s.dq[n * s.q.width]);
      }
    }
    for (std::int64_t n = 0; n < rows; ++n) store(a_.dq, b, h, i0 + n, &s.dq[n * s.q.width], g_.d_qk, scale_);
  }

  /// dk and dv of the keys [j0, j0 + kTile) of one KV head, summed over its query heads.
  void key_tile(std::int64_t b, std::int64_t h_kv, std::int64_t j0, Scratch<Acc>& s) const {
    const std::int64_t keys = std::min(kTile, g_.s_kv - j0);
    s.k.load(a_.k, b, h_kv, j0, keys);
    s.v.load(a_.v, b, h_kv, j0, keys);
    std::fill(s.dk.begin(), s.dk.end(), Acc(0));
    std::fill(s.dv.begin(), s.dv.end(), Acc(0));
    const std::int64_t first = g_.first_row(j0) / kTile * kTile;  // earlier rows see none of these keys
    const std::int64_t last = g_.last_row(j0 + keys - 1);         // nor do later ones
    for (std::int64_t h = h_kv * group(); h < (h_kv + 1) * group(); ++h) {
      for (std::int64_t i0 = first; i0 < last; i0 += kTile) add_row_tile(b, h, i0, j0, keys, s);
    }
    for (std::int64_t n = 0; n < keys; ++n) {
      if (a_.dk.defined()) store(a_.dk, b, h_kv, j0 + n, &s.dk[n * s.k.width], g_.d_qk, scale_);
      if (a_.dv.defined()) store(a_.dv, b, h_kv, j0 + n, &s.dv[n * s.v.width], g_.d_v, Acc(1));
    }
  }

  /// Adds what the query rows [i0, i0 + kTile) of head h give to dk and dv of the keys [j0, j0 + keys).
  void add_row_tile(std::int64_t b, std::int64_t h, std::int64_t i0, std::int64_t j0, std::int64_t keys,
                    Scratch<Acc>& s) const {
    const std::int64_t rows = std::min(kTile, g_.s_q - i0);
    s.q.load(a_.q, b, h, i0, rows);
    s.dout.load(a_.dout, b, h, i0, rows);
    if (a_.dropout.active()) fill_keep(b, h, i0, rows, j0, keys, s);
    for (std::int64_t n = 0; n < keys; ++n) {
      const std::int64_t first = std::max<std::int64_t>(g_.first_row(j0 + n) - i0, 0);
      const std::int64_t last = std::min(rows, g_.last_row(j0 + n) - i0);
      if (first >= last) continue;
      multiply(s.k.row(n), s.q, s.p);
      multiply(s.v.row(n), s.dout, s.ds);
      for (std::int64_t i = first; i < last; ++i) {
        s.kept[i] = differentiate({b, h, i0 + i, j0 + n, 0}, s.keep[i][n], s, s.p[i], s.ds[i]);
      }
      add_kept_rows(s.p, s, first, last, s.dout, &s.dv[n * s.v.width]);
      add_kept_rows(s.ds, s, first, last, s.q, &s.dk[n * s.k.width]);
    }
  }

  /// sum[d] += sum over the kept n of weights[n] * tile[n, d]: what a mask drops has no part, be it NaN.
  void add_kept_rows(const std::array<Acc, kTile>& weights, const Scratch<Acc>& s, std::int64_t first,
                     std::int64_t last, const Tile<Acc>& tile, Acc* sum) const {
    while (first < last) {
      std::int64_t end = first;
      while (end < last && s.kept[end]) ++end;
      if (end > first) add_weighted_rows(&weights[first], end - first, tile.row(first), tile.width, sum);
      first = end + 1;
    }
  }

  /// products[n] = sum over d of row[d] * tile[n, d], for the whole tile; rows that are not part of it are never used.
  void multiply(const Acc* row, const Tile<Acc>& tile, std::array<Acc, kTile>& products) const {
    products.fill(Acc(0));
    add_weighted_rows(row, tile.d, tile.columns.data(), kTile, products.data());
  }

  void fill_keep(std::int64_t b, std::int64_t h, std::int64_t i0, std::int64_t rows, std::int64_t j0, std::int64_t keys,
                 Scratch<Acc>& s) const {
    const std::int64_t head = g_.head_of_whole(b, h);
    for (std::int64_t n = 0; n < rows; ++n) a_.dropout.row(head, i0 + n, j0, keys, s.keep[n].data());
  }

  /// Turns q . k into P, less what was dropped, and dout . v into dS, the gradient of the scaled score. `keep` is that
  /// of dropout. False where a mask drops the pair, or the row keeps no key.
  bool differentiate(const Point& point, std::uint8_t keep, Scratch<Acc>& s, Acc& p, Acc& ds) const {
    if (s.functions) {
      Acc slope = 1;
      const bool kept = differentiate(point, keep, *s.functions, p, ds, slope);
      ds = ds == Acc(0) ? ds : ds * slope;
      const RowStatistics<Acc>& row = statistics(point.b, point.h, point.q);
      if (kept && max_is_scaled() && point.kv == row.max_key) ds += row.dmax_logit;
      return kept;
    }
    const RowStatistics<Acc>& row = statistics(point.b, point.h, point.q);
    if (row.lse == kInfinity) return drop(p, ds);
    const Acc log_p = p * scale_ - row.lse;
    p = std::exp(log_p);
    weigh(row, keep, log_p, column_gradient(point.b, point.h, point.kv), p, ds);
    if (point.kv == row.max_key) ds += row.dmax_logit;
    return true;
  }

  /// Whether the maximum is in front of a score function.
  bool max_is_scaled() const { return a_.of_scaled && a_.variant.has_score(); }

  static bool drop(Acc& p, Acc& ds) {
    p = ds = Acc(0);
    return false;
  }

  /// The same from the whole P.
  void weigh(const RowStatistics<Acc>& row, std::uint8_t keep, Acc log_p, Acc by_column, Acc& p, Acc& ds) const {
    const Acc by_entropy = row.dentropy == Acc(0) || p == Acc(0) ? Acc(0) : row.dentropy * p * (log_p + 1);
    if (!a_.dropout.active()) {
      ds = p * (ds + by_column - row.delta) - by_entropy;
      return;
    }
    const Acc kept = keep != 0 ? static_cast<Acc>(a_.dropout.scale()) : Acc(0);
    ds = p * ((keep != 0 ? ds * kept : Acc(0)) + by_column - row.delta) - by_entropy;
    p = keep != 0 ? p * kept : Acc(0);
  }

  /// The same with ds the gradient of what the score function returns, and `slope` that by the score.
  bool differentiate(Point point, std::uint8_t keep, Evaluator& functions, Acc& p, Acc& ds, Acc& slope) const {
    const expression::Program& program = *a_.variant.program;
    const RowStatistics<Acc>& row = statistics(point.b, point.h, point.q);
    if (row.lse == kInfinity) return drop(p, ds);
    point.score = static_cast<double>(p * scale_);
    functions.run(point);
    Acc score = static_cast<Acc>(point.score);
    if (program.score) {
      score = static_cast<Acc>(functions[*program.score].real);
      slope = static_cast<Acc>(functions[program.score_derivative].real);
    }
    if (program.mask && functions[*program.mask].integer == 0) return drop(p, ds);
    p = std::exp(score - row.lse);
    weigh(row, keep, score - row.lse, column_gradient(point.b, point.h, point.kv), p, ds);
    if (!max_is_scaled() && point.kv == row.max_key) ds += row.dmax_logit;
    return true;
  }

  static void store(const TensorView& t, std::int64_t b, std::int64_t h, std::int64_t n, const Acc* from,
                    std::int64_t count, Acc factor) {
    const std::int64_t offset = row_offset(t, b, h, n);
    for (std::int64_t d = 0; d < count; ++d) store_element(t, offset + d * t.strides[3], factor * from[d]);
  }

  const BackwardArgs& a_;
  const Geometry& g_;
  const Acc scale_;
  std::vector<RowStatistics<Acc>> statistics_;  // [b, h_q, s_q]
  std::vector<expression::NodeId> roots_;       // what every element needs of the functions
};

}  // namespace

void backward(const BackwardArgs& args) {
  const Geometry geometry = Geometry::of(args.q, args.k, args.v, args.causal, args.causal_align, args.variant);
  const auto is_f64 = [](const TensorView& view) { return view.dtype == DType::f64; };
  if (args.f64 || is_f64(args.q) || is_f64(args.k) || is_f64(args.v) || is_f64(args.dout)) {
    Backward<double>(args, geometry).run();
  } else {
    Backward<float>(args, geometry).run();
  }
}

}  // namespace fa::reference
