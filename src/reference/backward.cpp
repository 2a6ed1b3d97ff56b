#include "reference/backward.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

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

/// A row's log-sum-exp and D = rowsum(dout o O) - dlse.
template <class Acc>
struct RowStatistics {
  Acc lse;
  Acc delta;
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
  std::array<std::array<std::uint8_t, kTile>, kTile> keep{};  // [rows, keys], what dropout leaves of a tile of P
  std::vector<Acc> dq;                                        // [kTile, q.width], not yet scaled
  std::vector<Acc> dk;                                        // [kTile, k.width], not yet scaled
  std::vector<Acc> dv;                                        // [kTile, v.width]
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
    const double cost = static_cast<double>(kTile) * (2 * g_.d_qk + g_.d_v);
    const std::int64_t row_tiles = (g_.s_q + kTile - 1) / kTile;
    sweep(g_.b * g_.h_q, row_tiles, cost * static_cast<double>(g_.s_kv),
          [&](std::int64_t head, std::int64_t i0, Scratch<Acc>& s) { row_tile(head / g_.h_q, head % g_.h_q, i0, s); });
    const std::int64_t key_tiles = (g_.s_kv + kTile - 1) / kTile;
    sweep(
        g_.b * g_.h_kv, key_tiles, cost * static_cast<double>(g_.s_q * group()),
        [&](std::int64_t head, std::int64_t j0, Scratch<Acc>& s) { key_tile(head / g_.h_kv, head % g_.h_kv, j0, s); });
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
    parallel_for(items, scratch,
                 [&](Scratch<Acc>& s, std::int64_t item) noexcept { work(item / tiles, item % tiles * kTile, s); });
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
    return {lse, std::inner_product(dout, o, o, Acc(0)) - dlse};
  }

  /// dq of the query rows [i0, i0 + kTile) of one head.
  void row_tile(std::int64_t b, std::int64_t h, std::int64_t i0, Scratch<Acc>& s) const {
    const std::int64_t rows = std::min(kTile, g_.s_q - i0);
    s.q.load(a_.q, b, h, i0, rows);
    s.dout.load(a_.dout, b, h, i0, rows);
    std::fill(s.dq.begin(), s.dq.end(), Acc(0));
    const std::int64_t keys = g_.visible_keys(i0 + rows - 1);  // later keys are masked in every row
    for (std::int64_t j0 = 0; j0 < keys; j0 += kTile) {
      const std::int64_t count = std::min(kTile, keys - j0);
      s.k.load(a_.k, b, g_.kv_head(h), j0, count);
      s.v.load(a_.v, b, g_.kv_head(h), j0, count);
      if (a_.dropout.active()) fill_keep(b, h, i0, rows, j0, count, s);
      for (std::int64_t n = 0; n < rows; ++n) {
        const std::int64_t visible = std::min(count, g_.visible_keys(i0 + n) - j0);
        if (visible <= 0) continue;
        multiply(s.q.row(n), s.k, s.p);
        multiply(s.dout.row(n), s.v, s.ds);
        const RowStatistics<Acc>& row = statistics(b, h, i0 + n);
        for (std::int64_t j = 0; j < visible; ++j) differentiate(row, s.keep[n][j], s.p[j], s.ds[j]);
        add_weighted_rows(s.ds.data(), visible, s.k.rows.data(), s.k.width, &s.dq[n * s.q.width]);
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
    for (std::int64_t h = h_kv * group(); h < (h_kv + 1) * group(); ++h) {
      for (std::int64_t i0 = first; i0 < g_.s_q; i0 += kTile) add_row_tile(b, h, i0, j0, keys, s);
    }
    for (std::int64_t n = 0; n < keys; ++n) {
      store(a_.dk, b, h_kv, j0 + n, &s.dk[n * s.k.width], g_.d_qk, scale_);
      store(a_.dv, b, h_kv, j0 + n, &s.dv[n * s.v.width], g_.d_v, Acc(1));
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
      if (first >= rows) continue;
      multiply(s.k.row(n), s.q, s.p);
      multiply(s.v.row(n), s.dout, s.ds);
      for (std::int64_t i = first; i < rows; ++i) {
        differentiate(statistics(b, h, i0 + i), s.keep[i][n], s.p[i], s.ds[i]);
      }
      const std::int64_t seen = rows - first;
      add_weighted_rows(&s.p[first], seen, s.dout.row(first), s.v.width, &s.dv[n * s.v.width]);
      add_weighted_rows(&s.ds[first], seen, s.q.row(first), s.k.width, &s.dk[n * s.k.width]);
    }
  }

  /// products[n] = sum over d of row[d] * tile[n, d], for the whole tile; rows that are not part of it are never used.
  void multiply(const Acc* row, const Tile<Acc>& tile, std::array<Acc, kTile>& products) const {
    products.fill(Acc(0));
    add_weighted_rows(row, tile.d, tile.columns.data(), kTile, products.data());
  }

  void fill_keep(std::int64_t b, std::int64_t h, std::int64_t i0, std::int64_t rows, std::int64_t j0, std::int64_t keys,
                 Scratch<Acc>& s) const {
    const std::int64_t head = b * g_.h_q + h;
    for (std::int64_t n = 0; n < rows; ++n) a_.dropout.row(head, i0 + n, j0, keys, s.keep[n].data());
  }

  /// Turns q . k into P, less what was dropped, and dout . v into dS, the gradient of the scaled score.
  void differentiate(const RowStatistics<Acc>& row, std::uint8_t keep, Acc& p, Acc& ds) const {
    p = std::exp(p * scale_ - row.lse);
    if (!a_.dropout.active()) {
      ds = p * (ds - row.delta);
      return;
    }
    const Acc kept = keep != 0 ? static_cast<Acc>(a_.dropout.scale()) : Acc(0);
    ds = p * ((keep != 0 ? ds * kept : Acc(0)) - row.delta);
    p = keep != 0 ? p * kept : Acc(0);
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
};

}  // namespace

void backward(const BackwardArgs& args) {
  const Geometry geometry = Geometry::of(args.q, args.k, args.v, args.causal, args.causal_align);
  const auto is_f64 = [](const TensorView& view) { return view.dtype == DType::f64; };
  if (args.f64 || is_f64(args.q) || is_f64(args.k) || is_f64(args.v) || is_f64(args.dout)) {
    Backward<double>(args, geometry).run();
  } else {
    Backward<float>(args, geometry).run();
  }
}

}  // namespace fa::reference
