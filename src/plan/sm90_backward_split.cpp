#include "plan/sm90_backward_split.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "plan/sm90_backward_pair.hpp"
#include "plan/variant_launch.hpp"
#include "plan/workspace.hpp"

namespace fa::plan {
namespace {

constexpr std::int64_t kKeysPerTile = 128;
// In steps of the main loop: what a tile costs besides, and what adding up in a cluster does.
constexpr double kTileSteps = 4;
constexpr double kClusterSteps = 1.5;
constexpr double kTail = 0.2;             // of the longest tile: multiprocessors end at different times
constexpr double kReduceSteps = 4;        // of the kernel that adds up partial sums
constexpr double kLeastSteps = 4;         // of a block: shorter ones only start and end
constexpr double kTurnSteps = 1.6;        // of a turn: sums are read, added to and left for the next
constexpr double kLeastStepsOfTurn = 32;  // of a block: those of shorter ones stay for several tiles
constexpr int kMostTurns = 64;
constexpr double kSectionBytes = 20 << 20;  // of Q, dO and dQ, of the parts that a launch has side by side
constexpr double kWorthwhile = 0.96;        // of the time without a cluster
// Bytes of Q, dO and dQ of the KV heads that run at once: as many are read from the L2 cache, and so many more make
// steps by kSlowestRows slower. These and the constants above: a fit to 21 grids on an H100, those of
// turns to 18 on an H200 (docs/experiments.md).
constexpr double kNearRows = 45e6;
constexpr double kFarRows = 100e6;
constexpr double kSlowestRows = 0.2;
constexpr double kTilesAlike = 64;
constexpr int kSamples = 64;  // key tiles that the model looks at

/// Key tiles of a problem, in query tiles that each of them meets.
struct Tiles {
  double count = 0;
  double of_head = 0;
  double longest = 0;
  double mean = 0;
  double bytes_of_head = 0;  ///< Q, dO and dQ of the query heads of a KV head

  bool are_equal() const noexcept { return longest <= 1.02 * mean; }
};

/// Rows that a window or a chunk leaves a key tile at most.
std::int64_t most_rows(const Problem& problem) noexcept {
  if (problem.variants == nullptr) return problem.typical_s_q();
  std::int64_t rows = problem.typical_s_q();
  if (problem.variants->left_window) {
    const std::int64_t behind = problem.causal ? std::max<std::int64_t>(problem.window_right, 0) : rows;
    rows = std::min(rows, std::min(problem.window_left, rows) + std::min(behind, rows) + kKeysPerTile);
  }
  if (problem.variants->chunked) rows = std::min(rows, std::min(problem.chunk, rows) + kKeysPerTile);
  return rows;
}

Tiles tiles_of(const Problem& problem) noexcept {
  const std::int64_t s_q = problem.typical_s_q();
  const std::int64_t s_kv = problem.typical_s_kv();
  const std::int64_t n_blocks = (s_kv + kKeysPerTile - 1) / kKeysPerTile;
  const double rows_per_step = std::max(problem.d_qk, problem.d_v) > 64 ? 64 : 128;
  const double group = static_cast<double>(problem.h_q) / static_cast<double>(problem.h_kv);
  Problem anywhere = problem;  // kernels do not depend on where a call stands
  anywhere.place.reset();
  const std::int64_t shift = problem.causal ? causal_shift(anywhere) : 0;
  const std::int64_t samples = std::min<std::int64_t>(n_blocks, kSamples);
  const std::int64_t most = most_rows(problem);
  Tiles tiles;
  tiles.of_head = static_cast<double>(n_blocks);
  tiles.bytes_of_head = group * static_cast<double>(s_q * ((problem.d_qk + problem.d_v) * 2 + problem.d_qk * 4));
  tiles.count = static_cast<double>(n_blocks * problem.h_kv * problem.b);
  for (std::int64_t i = 0; i < samples; ++i) {
    const std::int64_t first_key = i * n_blocks / samples * kKeysPerTile;
    const std::int64_t hidden = problem.causal ? std::clamp<std::int64_t>(first_key - shift, 0, s_q) : 0;
    const std::int64_t rows = std::min(s_q - hidden, most);
    const double steps = std::ceil(static_cast<double>(rows) / rows_per_step) * group;
    tiles.longest = std::max(tiles.longest, steps);
    tiles.mean += steps / static_cast<double>(samples);
  }
  return tiles;
}

/// Clusters that run at once, as an H100 says: groups of 14 to 18 multiprocessors hold whole clusters only.
int clusters_at_once(int blocks) noexcept {
  static constexpr std::array kClusters{132, 66, 39, 30, 22, 17, 15, 15};
  static_assert(kClusters.size() == BackwardChoice::kMaxSplitBlocks);
  return kClusters[static_cast<std::size_t>(blocks - 1)];
}

/// What steps take longer because the rows that blocks read do not fit into the L2 cache. Tiles of equal length read
/// the same rows at the same time, and so do nearly those of a head of many tiles. Others are anywhere in the rows of
/// their heads.
double slowed_by_rows(const Tiles& tiles, double shares, double at_once) noexcept {
  if (tiles.are_equal()) return 1;
  const double heads = std::max(1., std::floor(at_once / (tiles.of_head * shares)));
  const double beyond = std::min(heads, tiles.count / tiles.of_head) * tiles.bytes_of_head - kNearRows;
  const double apart = std::min(1., kTilesAlike / tiles.of_head);
  return 1 + kSlowestRows * apart * std::clamp(beyond / kFarRows, 0., 1.);
}

/// Steps until all tiles are done, each by `shares` blocks, of which `at_once` run. Those of unequal length, the
/// longest first, fill the GPU to the end.
double time_of(const Tiles& tiles, double shares, double at_once, double besides) noexcept {
  const double rounds = tiles.count * shares / at_once;
  const double longest = std::ceil(tiles.longest / shares) + besides;
  if (tiles.are_equal()) return std::ceil(rounds) * longest;
  return slowed_by_rows(tiles, shares, at_once) *
         std::max(longest, rounds * (tiles.mean / shares + besides) + kTail * longest);
}

double time_of_cluster(const Tiles& tiles, int blocks) noexcept {
  return time_of(tiles, blocks, blocks * clusters_at_once(blocks), kTileSteps + kClusterSteps);
}

/// Of `parts` blocks in turns, each with query heads of its own.
double time_of_turns(const Tiles& tiles, int parts) noexcept {
  Tiles each = tiles;
  each.count *= parts;
  each.longest /= parts;
  each.mean /= parts;
  each.bytes_of_head /= parts;
  // Parts that start side by side end so, and wait for those in front. One block after the other starts, in a tile's
  // time as many as run at once.
  constexpr double kAtOnce = kHopperMultiprocessors;
  const double fills_cache = std::floor(kSectionBytes / std::max(each.bytes_of_head, 1.));
  const double beside = std::min(std::max({std::floor(kAtOnce / each.of_head), fills_cache, 1.}), double(parts));
  const double waits = std::max(kTurnSteps - each.mean / kAtOnce, 0.) * (beside - 1) / 2;
  return time_of(each, 1, kHopperMultiprocessors, kTileSteps + kTurnSteps + waits);
}

}  // namespace

bool sm90_backward_takes_turns(const Problem& problem, int parts) noexcept {
  if (is_pair(problem) || problem.varlen || problem.bounded || problem.h_kv == 0) return false;
  if (!problem.gradients.dk && !problem.gradients.dv) return false;
  const std::int64_t group = problem.h_q / problem.h_kv;
  // Turns of keys lie beside those of rows.
  return parts > 1 && group % parts == 0 && keys_in_tiles(problem) <= group * problem.s_q;
}

KeyTileShares sm90_backward_shares(const Problem& problem, int splits) noexcept {
  if (is_pair(problem)) return {};
  const Tiles tiles = tiles_of(problem);
  KeyTileShares best;
  const double reduce = splits > 1 ? kReduceSteps : 0;
  double least = (time_of(tiles, splits, kHopperMultiprocessors, kTileSteps) + reduce) * kWorthwhile;
  for (int blocks = 2; blocks <= BackwardChoice::kMaxSplitBlocks; ++blocks) {
    if (tiles.longest < kLeastSteps * blocks) break;
    const double time = time_of_cluster(tiles, blocks);
    if (time >= least) continue;
    best = {.blocks = blocks};
    least = time;
  }
  const auto group =
      static_cast<int>(problem.h_kv == 0 ? 0 : std::min<std::int64_t>(problem.h_q / problem.h_kv, kMostTurns));
  for (int parts = 2; parts <= group; ++parts) {
    if (tiles.longest < kLeastStepsOfTurn * parts || !sm90_backward_takes_turns(problem, parts)) continue;
    const double time = time_of_turns(tiles, parts);
    if (time >= least) continue;
    best = {.turns = parts};
    least = time;
  }
  return best;
}

}  // namespace fa::plan
