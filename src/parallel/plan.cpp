#include "parallel/plan.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "parallel/builder.hpp"
#include "parallel/errors.hpp"
#include "parallel/layout.hpp"
#include "parallel/ulysses.hpp"

namespace fa::parallel {
namespace {

std::vector<Pieces> pieces_of_all(const Problem& problem, const std::vector<std::int64_t>& lengths) {
  std::vector<Pieces> all;
  for (int rank = 0; rank < problem.ranks; ++rank)
    all.push_back(pieces_of(problem.layout, problem.ranks, lengths, rank));
  return all;
}

/// Ranks in two dimensions: `ulysses` neighbours share heads, and groups of them share rows.
struct Grid {
  std::vector<int> inner;     ///< the ranks of this one's group
  int me = 0;                 ///< its place there
  std::vector<Pieces> q, kv;  ///< of each of them
  Local outer;                ///< groups, one rank of each
};

Grid grid_of(const Problem& problem, int rank) {
  const std::vector<Pieces> q = pieces_of_all(problem, problem.lengths_q);
  const std::vector<Pieces> kv = pieces_of_all(problem, problem.lengths_kv);
  const int width = problem.ulysses, groups = problem.ranks / width;
  Grid grid;
  grid.me = rank % width;
  grid.outer.me = rank / width;
  for (int i = 0; i < width; ++i) {
    const int member = grid.outer.me * width + i;
    const auto at = static_cast<std::size_t>(member);
    grid.inner.push_back(member);
    grid.q.push_back(q[at]);
    grid.kv.push_back(kv[at]);
  }
  for (int group = 0; group < groups; ++group) {
    grid.outer.members.push_back(group * width + grid.me);
    const int first_rank = group * width;
    const auto first = static_cast<std::size_t>(first_rank), count = static_cast<std::size_t>(width);
    const auto part = [&](const std::vector<Pieces>& all) {
      return width == 1 ? all[first] : united(std::span(all).subspan(first, count));
    };
    grid.outer.q_pieces.push_back(part(q));
    grid.outer.kv_pieces.push_back(part(kv));
  }
  grid.outer.h_q = problem.h_q / width;
  grid.outer.h_kv = problem.h_kv / width;
  grid.outer.head_offset = grid.me * grid.outer.h_q;
  grid.outer.by_rows = problem.packed && width == 1 && problem.scheme != Scheme::all_gather;
  grid.outer.dense_kv = width > 1 || (grid.outer.by_rows ? problem.dense_rows : problem.dense_kv);
  return grid;
}

void scheme_forward(Builder& builder, const Local& local) {
  if (builder.problem().scheme == Scheme::all_gather && local.size() > 1) {
    all_gather_forward(builder, local);
  } else {
    ring_forward(builder, local);
  }
}

void scheme_backward(Builder& builder, const Local& local) {
  if (builder.problem().scheme == Scheme::all_gather && local.size() > 1) {
    all_gather_backward(builder, local);
  } else {
    ring_backward(builder, local);
  }
}

/// dsink of all ranks, summed in their order. A sum is of rows of 8.
void add_sink_gradient(Builder& builder, int rank) {
  const Problem& problem = builder.problem();
  const std::int64_t rows = (problem.h_q + 7) / 8;
  const auto flat = [&](const char* name) { return builder.flat(name, rows, 8); };
  const int own = flat("dsink of a rank");
  builder.add(Clear{builder.whole(own)});
  SinkGradient gradient;
  gradient.q = builder.whole(kQ);
  gradient.k = builder.whole(kK);
  gradient.v = builder.whole(kV);
  gradient.o = builder.whole(kO);
  gradient.lse = builder.whole(kLse);
  gradient.dout = builder.whole(kDout);
  if (problem.dlse) gradient.dlse = builder.whole(kDlse);
  gradient.sink = builder.whole(kSink);
  gradient.dsink = builder.whole(own);
  builder.add(gradient);
  std::vector<PlanTransfer> transfers;
  std::vector<Region> all;
  for (int peer = 0; peer < problem.ranks; ++peer) {
    if (peer == rank) {
      all.push_back(builder.whole(own));
      continue;
    }
    all.push_back(builder.whole(flat("dsink come")));
    transfers.push_back({true, peer, builder.whole(own)});
    transfers.push_back({false, peer, all.back()});
  }
  builder.wait(builder.exchange(std::move(transfers)));
  const int sum = flat("dsink in the sum");
  builder.add(Sum{builder.whole(sum), std::move(all)});
  builder.add(TakeSink{builder.whole(kDsink), builder.whole(sum)});
}

Builder builder_of(const Problem& problem, const Grid& grid) {
  const auto me = static_cast<std::size_t>(grid.me);
  return Builder(problem, rows_of(grid.q[me]), rows_of(grid.kv[me]));
}

/// q, k and v of this rank's heads, of all rows of its neighbours.
void send_inputs(Ulysses& heads, Grid& grid) {
  Local& local = grid.outer;
  heads.send_heads(kQ, grid.q, local.q_rows(), &local.q);
  heads.send_heads(kK, grid.kv, local.kv_rows(), &local.k);
  heads.send_heads(kV, grid.kv, local.kv_rows(), &local.v);
}

/// No product of sizes overflows anywhere.
void check_rows(const Problem& problem) {
  constexpr std::int64_t kMost = std::int64_t{1} << 44;  // of all heads
  const std::int64_t heads = std::max(problem.h_q, problem.h_kv);
  for (const auto* const lengths : {&problem.lengths_q, &problem.lengths_kv}) {
    std::int64_t rows = 0;
    if (!__builtin_mul_overflow(problem.b * heads, total(*lengths), &rows) && rows <= kMost) continue;
    throw_invalid("b * h_q * s_q",
                  std::to_string(problem.b) + " * " + std::to_string(heads) + " * " + std::to_string(total(*lengths)),
                  "at most " + std::to_string(kMost));
  }
}

}  // namespace

Plan forward_plan(const Problem& problem, int rank) {
  Grid grid = grid_of(problem, rank);
  Builder builder = builder_of(problem, grid);
  if (problem.ulysses == 1) {
    scheme_forward(builder, grid.outer);
  } else {
    Local& local = grid.outer;
    Ulysses heads(builder, grid.inner, grid.me);
    send_inputs(heads, grid);
    heads.take_heads();
    local.o = heads.result("o", Element::own, local.h_q, local.q_rows(), problem.d_v);
    local.lse = heads.result("lse", Element::statistic, local.h_q, local.q_rows(), 1);
    scheme_forward(builder, local);
    heads.send_rows(local.o, kO, grid.q, local.q_rows());
    heads.send_rows(local.lse, kLse, grid.q, local.q_rows());
    heads.take_rows();
  }
  if (problem.sink) builder.add(AddSink{builder.whole(kO), builder.whole(kLse), builder.whole(kSink)});
  builder.wait(builder.last_exchange());
  return builder.take();
}

Plan backward_plan(const Problem& problem, int rank) {
  Grid grid = grid_of(problem, rank);
  Builder builder = builder_of(problem, grid);
  if (problem.ulysses == 1) {
    scheme_backward(builder, grid.outer);
  } else {
    Local& local = grid.outer;
    Ulysses heads(builder, grid.inner, grid.me);
    send_inputs(heads, grid);
    heads.send_heads(kO, grid.q, local.q_rows(), &local.o);
    heads.send_heads(kLse, grid.q, local.q_rows(), &local.lse);
    heads.send_heads(kDout, grid.q, local.q_rows(), &local.dout);
    if (problem.dlse) heads.send_heads(kDlse, grid.q, local.q_rows(), &local.dlse);
    heads.take_heads();
    local.dq = heads.result("dq", Element::own, local.h_q, local.q_rows(), problem.d_qk);
    local.dk = heads.result("dk", Element::own, local.h_kv, local.kv_rows(), problem.d_qk);
    local.dv = heads.result("dv", Element::own, local.h_kv, local.kv_rows(), problem.d_v);
    scheme_backward(builder, local);
    heads.send_rows(local.dq, kDq, grid.q, local.q_rows());
    heads.send_rows(local.dk, kDk, grid.kv, local.kv_rows());
    heads.send_rows(local.dv, kDv, grid.kv, local.kv_rows());
    heads.take_rows();
  }
  if (problem.sink) add_sink_gradient(builder, rank);
  builder.wait(builder.last_exchange());
  return builder.take();
}

std::int64_t Plan::scratch_elements(Element element) const {
  std::int64_t elements = 0;
  for (std::size_t i = kGivenCount; i < tensors.size(); ++i) {
    if (tensors[i].element == element) elements += tensors[i].elements();
  }
  return elements;
}

bool Plan::has_lanes() const noexcept {
  return std::ranges::any_of(ops, [](const Op& op) { return std::holds_alternative<Fork>(op); });
}

std::int64_t Plan::kv_in_flight() const {
  std::int64_t elements = 0;
  for (const PlanTensor& tensor : tensors) elements += tensor.is_kv_in_flight ? tensor.elements() : 0;
  return elements;
}

void check(const Problem& problem) {
  check_ranks("ranks", problem.ranks);
  check_size("b", problem.b);
  check_size("h_q", problem.h_q);
  check_size("h_kv", problem.h_kv);
  if (problem.ulysses < 1 || problem.ranks % problem.ulysses != 0) {
    throw_invalid("ulysses", problem.ulysses, "a divisor of the " + std::to_string(problem.ranks) + " ranks");
  }
  if (problem.h_kv < 1 || problem.h_q % problem.h_kv != 0) {
    throw_invalid("h_q", problem.h_q, "a multiple of h_kv = " + std::to_string(problem.h_kv) + ", which is at least 1");
  }
  if (problem.h_kv % problem.ulysses != 0) {
    throw_invalid("h_kv", problem.h_kv,
                  "a multiple of the " + std::to_string(problem.ulysses) + " ranks that share heads");
  }
  const std::int64_t heads = problem.h_kv / problem.ulysses;
  for (const std::int64_t late : {problem.late_heads, problem.late_gradient_heads}) {
    if (late < 0 || (late > 0 && late >= heads)) throw_internal("heads of a rank's own keys that come last");
  }
  if (problem.head_groups < 1 || heads % problem.head_groups != 0) {
    throw_invalid("head_groups", problem.head_groups,
                  "a divisor of the " + std::to_string(heads) + " KV heads of a rank");
  }
  check_lengths(problem.layout, problem.ranks, problem.lengths_q, problem.packed ? "lengths" : "s_q");
  check_lengths(problem.layout, problem.ranks, problem.lengths_kv, problem.packed ? "lengths" : "s_kv");
  if (problem.packed) check_size("sum of lengths", total(problem.lengths_q));
  check_rows(problem);
}

}  // namespace fa::parallel
