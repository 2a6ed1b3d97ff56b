#include "reference/forward.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

#include "reference/evaluator.hpp"
#include "reference/geometry.hpp"
#include "reference/parallel.hpp"
#include "reference/rows.hpp"
#include "reference/tensor_rows.hpp"

namespace fa::reference {
namespace {

constexpr std::int64_t kTileM = 64;  // query rows of a work item
constexpr std::int64_t kTileN = 64;  // keys of one step

/// What one thread needs for one query tile, reused from tile to tile.
template <class Acc>
struct Scratch {
  explicit Scratch(const Geometry& g)
      : width(round_up(g.d_v)),
        q(kTileM * g.d_qk),
        k(g.d_qk * kTileN),
        v(kTileN * width),
        row(g.d_qk),
        scores(kTileN),
        keep(kTileN),
        o(kTileM * width),
        max(kTileM),
        sum(kTileM),
        weighted(kTileM),
        scaled(kTileM) {}

  std::int64_t width;              // d_v and some columns of zeros
  std::vector<Acc> q;              // [kTileM, d_qk]
  std::vector<Acc> k;              // [d_qk, kTileN], transposed: neighbouring keys are neighbours, and the dot products
                                   // vectorise over them without reordering any sum
  std::vector<Acc> v;              // [kTileN, width]
  std::vector<Acc> row;            // [d_qk], one row of K on its way into k
  std::vector<Acc> scores;         // [kTileN], of one query row
  std::vector<std::uint8_t> keep;  // [kTileN], what dropout leaves of one query row
  std::vector<Acc> o;              // [kTileM, width], not yet divided by the sum
  std::vector<Acc> max;            // [kTileM]
  std::vector<Acc> sum;            // [kTileM]
  std::vector<Acc> weighted;       // [kTileM], the sum of P times its logarithm, relative to the maximum
  std::vector<Acc> scaled;         // [kTileM], the greatest score in front of a function

  std::optional<Evaluator> functions;  // where the call has any
};

/// Query rows [i0, i0 + rows) of one head.
struct QueryTile {
  std::int64_t b;
  std::int64_t h;
  std::int64_t i0;
  std::int64_t rows;
};

/// The `k` greatest of `sums`, in order; -1 behind them.
void find_top_keys(const std::vector<double>& sums, std::span<std::int32_t> keys) {
  std::vector<std::int32_t> order(sums.size());
  std::iota(order.begin(), order.end(), 0);
  const auto comes_first = [&](std::int32_t i, std::int32_t j) {
    const double a = sums[static_cast<std::size_t>(i)], b = sums[static_cast<std::size_t>(j)];
    if (std::isnan(a) != std::isnan(b)) return std::isnan(a);
    return a > b || (!(a < b) && i < j);
  };
  const std::size_t count = std::min(order.size(), keys.size());
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count), order.end(), comes_first);
  std::copy_n(order.begin(), count, keys.begin());
  std::fill(keys.begin() + static_cast<std::ptrdiff_t>(count), keys.end(), -1);
}

/// Of the keys from `begin` to before `end`.
void find_top_keys(const RowStatistics& statistics, std::int64_t begin, std::int64_t end) {
  const TensorView &sums = statistics.column_sums, &to = statistics.top_keys;
  if (!to.defined()) return;
  std::vector<double> row(static_cast<std::size_t>(end - begin));
  for (std::int64_t b = 0; b < to.shape[0]; ++b) {
    for (std::int64_t h = 0; h < to.shape[1]; ++h) {
      load(sums, row_offset(sums, b, h, begin), sums.strides[2], end - begin, row.data());
      const std::span keys(static_cast<std::int32_t*>(to.data) + row_offset(to, b, h, 0),
                           static_cast<std::size_t>(to.shape[2]));
      find_top_keys(row, keys);
      for (std::int32_t& key : keys) key = key < 0 ? key : key + static_cast<std::int32_t>(begin);
    }
  }
}

template <class Acc>
class Forward {
 public:
  Forward(const ForwardArgs& args, const Geometry& geometry)
      : a_(args), g_(geometry), rows_(args), scale_(static_cast<Acc>(args.scale)) {}

  void run() const {
    const std::int64_t tiles = (g_.s_q + kTileM - 1) / kTileM;
    const std::int64_t items = g_.b * g_.h_q * tiles;
    const double cost = static_cast<double>(kTileM) * g_.s_kv * (g_.d_qk + g_.d_v);
    std::vector<Scratch<Acc>> scratch(thread_count(items, cost), Scratch<Acc>(g_));
    for (Scratch<Acc>& s : scratch) add_functions(s);
    parallel_for(items, scratch, [&](Scratch<Acc>& s, std::int64_t item) noexcept {
      const std::int64_t i0 = item % tiles * kTileM;
      const std::int64_t head = item / tiles;
      query_tile({head / g_.h_q, head % g_.h_q, i0, std::min(kTileM, g_.s_q - i0)}, s);
    });
    if (a_.statistics.column_sums.defined()) {
      const std::int64_t heads = a_.statistics.of_kv_heads ? g_.h_kv : g_.h_q;
      parallel_for(g_.b * heads, scratch, [&](Scratch<Acc>& s, std::int64_t item) noexcept {
        sum_columns(item / heads, item % heads, g_.h_q / heads, s);
      });
    }
    find_top_keys(a_.statistics, g_.begin, g_.s_kv);
  }

 private:
  static constexpr Acc kInfinity = std::numeric_limits<Acc>::infinity();

  void add_functions(Scratch<Acc>& s) const {
    if (!a_.variant.has_score() && !a_.variant.has_mask()) return;
    const expression::Program& program = *a_.variant.program;
    std::vector<expression::NodeId> roots;
    if (program.score) roots.push_back(*program.score);
    if (program.mask) roots.push_back(*program.mask);
    s.functions.emplace(program, roots, a_.variant, expression::Lengths{g_.b, g_.h_q, g_.s_q, g_.s_kv});
  }

  void query_tile(const QueryTile& tile, Scratch<Acc>& s) const {
    load_q(tile, s);
    std::fill(s.max.begin(), s.max.end(), -kInfinity);
    std::fill(s.sum.begin(), s.sum.end(), Acc(0));
    std::fill(s.weighted.begin(), s.weighted.end(), Acc(0));
    std::fill(s.scaled.begin(), s.scaled.end(), -kInfinity);
    std::fill(s.o.begin(), s.o.end(), Acc(0));
    for_each_step(tile, s, [&](const Point& point, std::int64_t i, std::int64_t first, std::int64_t visible) {
      step(point, i, first, visible, s);
    });
    for (std::int64_t i = 0; i < tile.rows; ++i) finish(tile, i, s);
  }

  /// Sums P of `group` query heads over their rows, by what they have left in lse.
  void sum_columns(std::int64_t b, std::int64_t head, std::int64_t group, Scratch<Acc>& s) const {
    std::vector<Acc> sums(static_cast<std::size_t>(a_.statistics.column_sums.shape[2]));
    for (std::int64_t h = head * group; h < (head + 1) * group; ++h) {
      for (std::int64_t i0 = 0; i0 < g_.s_q; i0 += kTileM) {
        const QueryTile tile{b, h, i0, std::min(kTileM, g_.s_q - i0)};
        load_q(tile, s);
        for_each_step(tile, s, [&](const Point& point, std::int64_t i, std::int64_t first, std::int64_t visible) {
          scores_of(point, i, first, visible, s);
          Acc lse = 0;
          load(a_.lse, row_offset(a_.lse, b, h, i0 + i), 1, 1, &lse);
          if (lse == -kInfinity) return;
          for (std::int64_t j = first; j < visible; ++j) sums[point.kv + j] += std::exp(s.scores[j] - lse);
        });
      }
    }
    const TensorView& to = a_.statistics.column_sums;
    for (std::int64_t j = 0; j < to.shape[2]; ++j) store_element(to, row_offset(to, b, head, j), sums[j]);
  }

  /// Calls `run` for each row of a query tile and each tile of keys that it sees, which is loaded.
  template <class Run>
  void for_each_step(const QueryTile& tile, Scratch<Acc>& s, const Run& run) const {
    const std::int64_t keys = g_.visible_keys(tile.i0 + tile.rows - 1);  // later keys are masked in every row
    for (std::int64_t j0 = g_.first_key(tile.i0) / kTileN * kTileN; j0 < keys; j0 += kTileN) {
      const std::int64_t count = std::min(kTileN, keys - j0);
      load_kv(tile, j0, count, s);
      for (std::int64_t i = 0; i < tile.rows; ++i) {
        const std::int64_t visible = std::min(count, g_.visible_keys(tile.i0 + i) - j0);
        const std::int64_t first = std::max<std::int64_t>(g_.first_key(tile.i0 + i) - j0, 0);
        if (visible > first) run({tile.b, tile.h, tile.i0 + i, j0}, i, first, visible);
      }
    }
  }

  void load_q(const QueryTile& tile, Scratch<Acc>& s) const {
    for (std::int64_t i = 0; i < tile.rows; ++i) rows_.query(tile.b, tile.h, tile.i0 + i, g_.d_qk, &s.q[i * g_.d_qk]);
  }

  void load_kv(const QueryTile& tile, std::int64_t j0, std::int64_t count, Scratch<Acc>& s) const {
    const std::int64_t h = g_.kv_head(tile.h);
    // What is hidden from all rows need not be there.
    const std::int64_t hidden = std::max<std::int64_t>(g_.first_key(tile.i0) - j0, 0);
    for (std::int64_t j = hidden; j < count; ++j) {
      rows_.key(a_.k, a_.k_scale, tile.b, h, j0 + j, g_.d_qk, s.row.data());
      for (std::int64_t d = 0; d < g_.d_qk; ++d) s.k[d * kTileN + j] = s.row[d];
      rows_.key(a_.v, a_.v_scale, tile.b, h, j0 + j, g_.d_v, &s.v[j * s.width]);
    }
  }

  /// Adds the keys from `first` to before `visible` of the tile that starts at `point` to row i of the online softmax.
  /// The others are masked: whatever they hold, it reaches no sum.
  void step(Point point, std::int64_t i, std::int64_t first, std::int64_t visible, Scratch<Acc>& s) const {
    scores_of(point, i, first, visible, s);
    const Acc old_max = s.max[i];
    Acc new_max = old_max;
    for (std::int64_t j = first; j < visible; ++j) new_max = s.scores[j] > new_max ? s.scores[j] : new_max;
    // While every score is -inf (or NaN) any finite origin serves, and -inf - -inf must not make a NaN of its own.
    const Acc origin = new_max == -kInfinity ? Acc(0) : new_max;
    const Acc rescale = std::exp(old_max - origin);
    if (a_.statistics.entropy.defined()) weigh(origin, rescale, i, first, visible, s);
    Acc sum = 0;
    for (std::int64_t j = first; j < visible; ++j) {
      s.scores[j] = std::exp(s.scores[j] - origin);
      sum += s.scores[j];
    }
    s.max[i] = new_max;
    s.sum[i] = s.sum[i] * rescale + sum;  // a NaN score lives on here: the maximum does not see it
    if (a_.dropout.active()) drop(point, first, visible, s);
    add_values(&s.o[i * s.width], rescale, first, visible, s);
  }

  /// What the softmax takes of row i and the keys from `first` to before `visible` of the tile that starts at `point`.
  void scores_of(Point point, std::int64_t i, std::int64_t first, std::int64_t visible, Scratch<Acc>& s) const {
    dot_products(&s.q[i * g_.d_qk], s);
    if (a_.row_bias.defined()) {
      Acc bias = 0;
      load(a_.row_bias, row_offset(a_.row_bias, point.b, point.h, point.q), 1, 1, &bias);
      for (std::int64_t j = first; j < visible; ++j) s.scores[j] += bias;
    }
    for (std::int64_t j = first; j < visible; ++j) s.scores[j] *= scale_;
    if (s.functions) {
      apply_functions(point, i, first, visible, s);
    } else if (a_.statistics.scaled) {
      for (std::int64_t j = first; j < visible; ++j) s.scaled[i] = std::max(s.scaled[i], s.scores[j]);
    }
  }

  /// Adds the keys of a step to the sum of P log P of row i.
  void weigh(Acc origin, Acc rescale, std::int64_t i, std::int64_t first, std::int64_t visible, Scratch<Acc>& s) const {
    Acc weighted = rescale == Acc(0) ? Acc(0) : rescale * (s.weighted[i] + (s.max[i] - origin) * s.sum[i]);
    for (std::int64_t j = first; j < visible; ++j) {
      const Acc lower = s.scores[j] - origin;
      if (lower != -kInfinity) weighted += std::exp(lower) * lower;
    }
    s.weighted[i] = weighted;
  }

  /// The score function acts after the scale and before the masks.
  void apply_functions(Point point, std::int64_t i, std::int64_t first, std::int64_t visible, Scratch<Acc>& s) const {
    const expression::Program& program = *a_.variant.program;
    const std::int64_t tile = point.kv;
    for (std::int64_t j = first; j < visible; ++j) {
      point.kv = tile + j;
      point.score = static_cast<double>(s.scores[j]);
      s.functions->run(point);
      const bool hidden = program.mask && (*s.functions)[*program.mask].integer == 0;
      if (!hidden) s.scaled[i] = std::max(s.scaled[i], s.scores[j]);
      if (program.score) s.scores[j] = static_cast<Acc>((*s.functions)[*program.score].real);
      if (hidden) s.scores[j] = -kInfinity;
    }
  }

  /// Dropout of P, after the row's sum has taken it whole.
  void drop(const Point& point, std::int64_t first, std::int64_t visible, Scratch<Acc>& s) const {
    a_.dropout.row(g_.head_of_whole(point.b, point.h), point.q, point.kv, visible, s.keep.data());
    const auto kept = static_cast<Acc>(a_.dropout.scale());
    for (std::int64_t j = first; j < visible; ++j) s.scores[j] = s.keep[j] != 0 ? s.scores[j] * kept : Acc(0);
  }

  /// scores[j] = sum over d of q[d] * k[d, j], for the whole tile; columns that hold no visible key are never used.
  void dot_products(const Acc* q, Scratch<Acc>& s) const {
    std::fill(s.scores.begin(), s.scores.end(), Acc(0));
    add_weighted_rows(q, g_.d_qk, s.k.data(), kTileN, s.scores.data());
  }

  /// o = o * rescale + sum over the visible keys of scores[j] * v[j].
  void add_values(Acc* o, Acc rescale, std::int64_t first, std::int64_t visible, const Scratch<Acc>& s) const {
    for (std::int64_t d = 0; d < s.width; ++d) o[d] *= rescale;
    add_weighted_rows(&s.scores[first], visible - first, &s.v[first * s.width], s.width, o);
  }

  /// The sink is a key of value 0.
  void add_sink(const QueryTile& tile, std::int64_t i, Scratch<Acc>& s) const {
    Acc sink = 0;
    load(a_.variant.sink, tile.h * a_.variant.sink.strides[0], 1, 1, &sink);
    const Acc old_max = s.max[i];
    const Acc new_max = sink > old_max ? sink : old_max;
    const Acc origin = new_max == -kInfinity ? Acc(0) : new_max;
    const Acc rescale = std::exp(old_max - origin);
    s.max[i] = new_max;
    s.sum[i] = s.sum[i] * rescale + std::exp(sink - origin);
    for (std::int64_t d = 0; d < s.width; ++d) s.o[i * s.width + d] *= rescale;
  }

  /// What o and lse hold is a key of that value and score.
  void add_state(const QueryTile& tile, std::int64_t i, Scratch<Acc>& s) const {
    Acc lse = 0;
    load(a_.lse, row_offset(a_.lse, tile.b, tile.h, tile.i0 + i), 1, 1, &lse);
    if (lse == kInfinity || lse == -kInfinity) return;  // no keys
    const Acc old_max = s.max[i];
    const Acc new_max = lse > old_max ? lse : old_max;
    const Acc origin = new_max == -kInfinity ? Acc(0) : new_max;
    const Acc rescale = std::exp(old_max - origin);
    const Acc weight = std::exp(lse - origin);
    s.max[i] = origin;
    s.sum[i] = s.sum[i] * rescale + weight;
    std::vector<Acc> state(static_cast<std::size_t>(g_.d_v));
    load(a_.o, row_offset(a_.o, tile.b, tile.h, tile.i0 + i), a_.o.strides[3], g_.d_v, state.data());
    for (std::int64_t d = 0; d < g_.d_v; ++d) {
      Acc& o = s.o[i * s.width + d];
      o = o * rescale + weight * state[static_cast<std::size_t>(d)];
    }
  }

  /// Normalises row i and stores it. A row without keys has sum 0 and maximum -inf: O = 0, LSE = -inf.
  void finish(const QueryTile& tile, std::int64_t i, Scratch<Acc>& s) const {
    const Acc keys = s.max[i] + std::log(s.sum[i]);
    const Acc entropy = s.sum[i] == Acc(0) ? Acc(0) : std::log(s.sum[i]) - s.weighted[i] / s.sum[i];
    const std::int64_t row = tile.i0 + i;
    if (a_.statistics.max_logit.defined()) {
      store_element(a_.statistics.max_logit, row_offset(a_.statistics.max_logit, tile.b, tile.h, row),
                    a_.statistics.scaled ? s.scaled[i] : s.max[i]);
    }
    if (a_.variant.sink.defined()) add_sink(tile, i, s);
    if (a_.statistics.entropy.defined()) store_entropy(tile, i, keys, entropy, s);
    if (a_.accumulate) add_state(tile, i, s);
    const Acc sum = s.sum[i];
    const bool empty = sum == Acc(0);
    const std::int64_t offset = row_offset(a_.o, tile.b, tile.h, tile.i0 + i);
    for (std::int64_t d = 0; d < g_.d_v; ++d) {
      store_output(offset + d * a_.o.strides[3], empty ? Acc(0) : s.o[i * s.width + d] / sum);
    }
    if (!a_.lse.defined()) return;
    store_element(a_.lse, row_offset(a_.lse, tile.b, tile.h, tile.i0 + i), s.max[i] + std::log(sum));
  }

  /// `keys` and `of_keys`: the log-sum-exp and the entropy of the keys alone. A sink takes its weight of them.
  void store_entropy(const QueryTile& tile, std::int64_t i, Acc keys, Acc of_keys, const Scratch<Acc>& s) const {
    const TensorView& entropy = a_.statistics.entropy;
    Acc value = 0;
    if (keys != -kInfinity) {
      const Acc lower = keys - (s.max[i] + std::log(s.sum[i]));  // than with the sink: of all P
      const Acc weight = std::exp(lower);
      if (weight != Acc(0)) value = weight * (of_keys - lower);
    }
    store_element(entropy, row_offset(entropy, tile.b, tile.h, tile.i0 + i), value);
  }

  /// NaN stays NaN in e4m3 too: store_element makes the greatest number of it, as caches have it.
  void store_output(std::int64_t offset, Acc value) const {
    if (a_.o.dtype == DType::e4m3 && std::isnan(value)) {
      static_cast<std::uint8_t*>(a_.o.data)[offset] = 0x7f;
      return;
    }
    store_element(a_.o, offset, value);
  }

  const ForwardArgs& a_;
  const Geometry& g_;
  const TensorRows<Acc> rows_;
  const Acc scale_;
};

/// Of no rows.
void clear_sums(const RowStatistics& statistics) {
  const TensorView &sums = statistics.column_sums, &keys = statistics.top_keys;
  if (keys.defined()) std::fill_n(static_cast<std::int32_t*>(keys.data), keys.elements(), -1);
  if (!sums.defined()) return;
  for (std::int64_t b = 0; b < sums.shape[0]; ++b) {
    for (std::int64_t h = 0; h < sums.shape[1]; ++h) {
      for (std::int64_t j = 0; j < sums.shape[2]; ++j) store_element(sums, row_offset(sums, b, h, j), 0);
    }
  }
}

}  // namespace

void forward(const ForwardArgs& args) {
  const bool paged = args.paged.given();
  Geometry geometry = Geometry::of(args.q, args.k, args.v, paged ? args.paged.s_kv : args.k.shape[2], args.causal,
                                   args.causal_align, args.variant);
  geometry.begin = args.paged.begin;
  if (geometry.b == 0 || geometry.h_q == 0 || geometry.s_q == 0) return clear_sums(args.statistics);
  const bool f64_input = args.q.dtype == DType::f64 || args.k.dtype == DType::f64 || args.v.dtype == DType::f64;
  if (args.f64 || f64_input) {
    Forward<double>(args, geometry).run();
  } else {
    Forward<float>(args, geometry).run();
  }
}

}  // namespace fa::reference
