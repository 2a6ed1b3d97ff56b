#include <algorithm>
#include <exception>
#include <string>

#include "parallel/config.hpp"
#include "parallel/errors.hpp"
#include "parallel/layout.hpp"

namespace fa {
namespace parallel {
namespace {

constexpr double kFlopsOfScore = 4;           // times the head dim: two products
constexpr double kFlopsOfBackwardScore = 10;  // five products
// A call ends with half a round of tiles, in the mean.
constexpr double kTileRows = 128;
constexpr double kMultiprocessors = 132;

// How many times longer a step's kernels have to take than its transfers, where these are messages, for calls side by
// side to be the faster. Measured on two H200s, packed batches of 128k tokens: 6 and 21 times gain, 1.5 and 5 times do
// not. Nor do dense ones. By copy engines all gain whose transfers hide.
constexpr double kFewTransfers = 4;
constexpr double kFewGradientTransfers = 10;

/// Scores of rows of a piece, from some of them: the number of keys is linear in between, but for a few corners.
double scores_of(const Problem& problem, const Piece& piece) {
  constexpr std::int64_t kSamples = 64;
  const std::int64_t samples = std::min(piece.count, kSamples);
  double scores = 0;
  for (std::int64_t i = 0; i < samples; ++i) {
    const std::int64_t row = (2 * i + 1) * piece.count / (2 * samples);
    const KeyRange keys = keys_of(problem, piece.sequence, piece.begin + row * piece.step);
    scores += static_cast<double>(keys.end - keys.begin);
  }
  return samples == 0 ? 0 : scores * static_cast<double>(piece.count) / static_cast<double>(samples);
}

/// How far keys of the first rank travel: in closed form where layouts are neighbours', else to all.
int hops_of(const Problem& problem) {
  const int n = problem.ranks;
  if (problem.layout != ShardLayout::contiguous || problem.packed || n == 1) return n - 1;
  const std::vector<std::int64_t>& lengths = problem.lengths_kv;
  const Pieces keys = pieces_of(problem.layout, n, lengths, 0);
  int hops = 0;
  for (int rank = 1; rank < n; ++rank) {
    if (any_visible(problem, pieces_of(problem.layout, n, problem.lengths_q, rank), keys)) hops = rank;
  }
  return hops;
}

/// Times of one choice are sums and maxima of these.
struct Costs {
  double forward = 0;  ///< kernels of the rank that has most to do
  double backward = 0;
  double kv = 0;  ///< bytes of K and V of a rank
  double q = 0;   ///< bytes of Q, and O, of a rank
  double statistics = 0;
  double wide = 1;    ///< bytes of a dK element for one of K
  double rounds = 1;  ///< tiles of all rows and heads of a rank, by multiprocessors
};

struct Links {
  double inner = 0, outer = 0;  ///< bytes a second
};

Links links_of(const ClusterSpeeds& speeds, int ranks, int ulysses) {
  const bool one_node = ranks <= speeds.ranks_of_node;
  return {ulysses <= speeds.ranks_of_node ? speeds.link : speeds.network, one_node ? speeds.link : speeds.network};
}

/// Kernels in calls of some of the heads each. A last round takes the longer, the more keys a tile has.
double calls_time(double kernels, double calls, double rounds, const ClusterSpeeds& speeds) {
  return kernels * (1 + 0.5 * calls / rounds) + calls * speeds.launch;
}

/// Steps of one length, of which transfers overlap with kernels but for the first kernel.
double ring_time(double kernel, double bytes, int steps, int hops, double link, const ClusterSpeeds& speeds) {
  const double transfer = hops == 0 ? 0 : bytes / link + speeds.latency;
  return kernel + hops * std::max(kernel, transfer) + (steps - 1 - hops) * speeds.launch;
}

double gather_time(double kernels, double bytes, double copied, int groups, double link, const ClusterSpeeds& speeds) {
  const double kernel = kernels / groups + 2 * copied / speeds.memory / groups;
  const double transfer = bytes / link / groups + speeds.latency;
  return transfer + (groups - 1) * std::max(kernel, transfer) + kernel;
}

/// What follows a ring's last step: some heads of dK and dV come home, and are added to the own ones, as dQ is.
double home_time(const Problem& problem, const Costs& costs, int hops, double link, const ClusterSpeeds& speeds) {
  const double sums = 3 * (costs.q + costs.kv) / speeds.memory;
  if (hops == 0) return sums;
  const double bytes = costs.kv * (hops == 1 ? 1 : costs.wide);
  return sums + bytes / link / static_cast<double>(last_step_calls(problem.h_kv / problem.ulysses)) + speeds.latency;
}

SchemeTime time_of(const Problem& problem, const Costs& costs, const Shares& shares, const ClusterSpeeds& speeds) {
  const int u = problem.ulysses, n = problem.ranks / u;
  const Links links = links_of(speeds, problem.ranks, u);
  const int hops = std::min((shares.hops + u - 1) / u, n - 1);
  SchemeTime time;
  time.scheme = n == 1 && u > 1 ? Scheme::ulysses : problem.scheme;
  time.ulysses = u;
  const double gradients = costs.kv * costs.wide;
  if (n == 1) {
    time.forward = calls_time(costs.forward, 1, costs.rounds, speeds);
    time.backward = calls_time(costs.backward, 1, costs.rounds, speeds) + 2 * speeds.launch;
  } else if (problem.scheme == Scheme::ring) {
    const double steps = hops + 1;
    const double forward = calls_time(costs.forward / steps, 1, costs.rounds, speeds);
    const double backward = calls_time(costs.backward / steps, 1, costs.rounds, speeds);
    const double last = hops == 0
                            ? backward
                            : calls_time(costs.backward / steps, static_cast<double>(last_step_calls(problem.h_kv / u)),
                                         costs.rounds, speeds);
    time.forward = ring_time(forward, costs.kv, n, hops, links.outer, speeds);
    time.backward = ring_time(backward, costs.kv + (hops > 1 ? gradients : 0), n, hops, links.outer, speeds) + last -
                    backward + home_time(problem, costs, hops, links.outer, speeds);
  } else {
    const double others = n - 1, groups = problem.head_groups;
    time.forward = gather_time(calls_time(costs.forward, groups, costs.rounds, speeds), others * costs.kv, n * costs.kv,
                               problem.head_groups, links.outer, speeds);
    time.backward =
        gather_time(calls_time(costs.backward, groups, costs.rounds, speeds), others * (costs.kv + gradients),
                    n * (costs.kv + gradients), problem.head_groups, links.outer, speeds) +
        others * gradients / links.outer / groups;
  }
  if (u > 1) {
    const double part = (u - 1.0) / u;
    const auto all_to_all = [&](double bytes) {
      return part * bytes / links.inner + speeds.latency + 4 * bytes / speeds.memory;
    };
    time.forward += all_to_all(costs.q + costs.kv) + all_to_all(costs.q + costs.statistics);
    time.backward += all_to_all(3 * costs.q + costs.kv + costs.statistics) + all_to_all(costs.q + costs.kv);
  }
  return time;
}

Costs costs_of(const Problem& problem, std::size_t element_size, const Shares& shares, const ClusterSpeeds& speeds) {
  Costs costs;
  const double heads = static_cast<double>(problem.b) * static_cast<double>(problem.h_q);
  const auto columns = static_cast<double>(problem.d_qk + problem.d_v);
  const double flops = heads * shares.greatest * columns / 2;
  costs.forward = kFlopsOfScore * flops / speeds.flops;
  costs.backward = kFlopsOfBackwardScore * flops / speeds.backward_flops;
  const auto size = static_cast<double>(element_size);
  const double ranks = problem.ranks;
  const double rows_q = static_cast<double>(total(problem.lengths_q)) / ranks;
  const double rows_kv = static_cast<double>(total(problem.lengths_kv)) / ranks;
  costs.kv = static_cast<double>(problem.b) * static_cast<double>(problem.h_kv) * rows_kv * columns * size;
  costs.q = heads * rows_q * columns / 2 * size;
  costs.statistics = heads * rows_q * 4;
  costs.rounds = heads * rows_q / kTileRows / kMultiprocessors;
  costs.wide = problem.wide_gradients ? std::max(4.0, size) / size : 1;
  return costs;
}

void add_choices(const ContextParallelConfig& config, int ranks, std::vector<SchemeTime>& choices) {
  const bool automatic = config.scheme == Scheme::automatic;
  for (int u = 1; u <= ranks; ++u) {
    if (ranks % u != 0) continue;
    if (config.ulysses > 0 && u != config.ulysses) continue;
    if (config.ulysses == 0 && !automatic && u != (config.scheme == Scheme::ulysses ? ranks : 1)) continue;
    if (u == ranks) {
      SchemeTime alone;
      alone.scheme = ranks > 1 && (automatic || config.scheme == Scheme::ulysses) ? Scheme::ulysses : Scheme::ring;
      alone.ulysses = u;
      choices.push_back(alone);
      continue;
    }
    for (const Scheme scheme : {Scheme::ring, Scheme::all_gather}) {
      if (!automatic && scheme != config.scheme) continue;
      SchemeTime choice;
      choice.scheme = scheme;
      choice.ulysses = u;
      choices.push_back(choice);
    }
  }
}

}  // namespace

Shares shares_of(const Problem& problem) {
  Shares shares;
  // Neighbours of a group of Ulysses share heads, and so their work, whatever the layout.
  double of_group = 0;
  for (int rank = 0; rank < problem.ranks; ++rank) {
    double scores = 0;
    for (const Piece& piece : pieces_of(problem.layout, problem.ranks, problem.lengths_q, rank)) {
      scores += scores_of(problem, piece);
    }
    shares.scores += scores;
    of_group = (rank % problem.ulysses == 0 ? 0 : of_group) + scores;
    shares.greatest = std::max(shares.greatest, of_group / problem.ulysses);
  }
  shares.hops = hops_of(problem);
  return shares;
}

void set_late_heads(Problem& problem, std::size_t element_size, const ClusterSpeeds& speeds, bool by_copy_engines) {
  problem.late_heads = problem.late_gradient_heads = 0;
  const int n = problem.ranks / problem.ulysses;
  if (problem.scheme != Scheme::ring || n == 1 || !problem.packed) return;
  const Shares shares = shares_of(problem);
  const Costs costs = costs_of(problem, element_size, shares, speeds);
  const double steps = 1 + std::min((shares.hops + problem.ulysses - 1) / problem.ulysses, n - 1);
  const double transfer = costs.kv / links_of(speeds, problem.ranks, problem.ulysses).outer + speeds.latency;
  const std::int64_t half = problem.h_kv / problem.ulysses / 2;
  const double few = by_copy_engines ? 1 : kFewTransfers, few_gradients = by_copy_engines ? 1 : kFewGradientTransfers;
  if (costs.forward / steps > few * transfer) problem.late_heads = half;
  if (costs.backward / steps > few_gradients * transfer) problem.late_gradient_heads = half;
}

std::vector<SchemeTime> scheme_times(const ContextParallelConfig& config, ShardLayout layout, const ContextShape& shape,
                                     std::span<const std::int64_t> lengths, int ranks, const ClusterSpeeds& speeds) {
  std::vector<SchemeTime> choices;
  add_choices(config, ranks, choices);
  std::vector<SchemeTime> times;
  std::exception_ptr refusal;  // of the first choice, which asks for the least
  for (const SchemeTime& choice : choices) {
    try {
      const Problem problem = problem_of(config, layout, ranks, shape, lengths, choice);
      const Shares shares = shares_of(problem);
      const std::size_t size = size_of(config.attention.dtype);
      SchemeTime time = time_of(problem, costs_of(problem, size, shares, speeds), shares, speeds);
      Problem single = problem;
      single.ranks = single.ulysses = 1;
      Shares all;
      all.scores = all.greatest = shares.scores;
      const Costs costs = costs_of(single, size, all, speeds);
      time.single = calls_time(costs.forward + costs.backward, 1, costs.rounds, speeds) + 3 * speeds.launch;
      times.push_back(time);
    } catch (const Error&) {
      if (!refusal) refusal = std::current_exception();
    }
  }
  if (times.empty() && refusal) std::rethrow_exception(refusal);
  if (times.empty()) throw_invalid("scheme", to_string(config.scheme), "a scheme that divides the ranks");
  std::ranges::stable_sort(times, {}, [](const SchemeTime& time) { return time.forward + time.backward; });
  return times;
}

}  // namespace parallel

std::vector<SchemeTime> compare_schemes(const ContextParallelConfig& config, ShardLayout layout,
                                        const ContextShape& shape, int ranks, const ClusterSpeeds& speeds) {
  parallel::check_ranks("ranks", ranks);
  parallel::check_config(config, layout, ranks);
  if (config.attention.varlen) parallel::throw_invalid("varlen", "true", "false: sizes are of one dense batch");
  return parallel::scheme_times(config, layout, shape, {}, ranks, speeds);
}

}  // namespace fa
