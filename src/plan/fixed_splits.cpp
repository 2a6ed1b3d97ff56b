#include "plan/fixed_splits.hpp"

#include <algorithm>

#include <common/forward_params.cuh>

#include "plan/catalogue.hpp"
#include "plan/forward_launch.hpp"
#include "plan/rounding.hpp"

namespace fa::plan {
namespace {

// Thread blocks that fill any GPU so far, two a multiprocessor.
constexpr std::int64_t kEnoughBlocks = 384;
constexpr std::int64_t kLanes = 4;  // that share a row

/// Blocks that share a tile's splits, of tiles whose blocks stay: those that are done first. A block takes about as
/// long as a split to start, and to end.
int usual_sharing(std::int64_t tiles, std::int64_t splits, std::int64_t resident) {
  const std::int64_t most = std::min(splits, ceil_div(2 * resident, std::max<std::int64_t>(tiles, 1)));
  std::int64_t best = 1;
  const auto time_of = [&](std::int64_t blocks) {
    return ceil_div(tiles * blocks, resident) * (ceil_div(splits, blocks) + 1);
  };
  for (std::int64_t blocks = 2; blocks <= most; ++blocks) {
    if (time_of(blocks) < time_of(best)) best = blocks;
  }
  return static_cast<int>(best);
}

}  // namespace

FixedSplits fixed_splits(const Problem& problem, const KernelSpec& attention) noexcept {
  FixedSplits result;
  const std::int64_t group = attention.pack_gqa ? problem.h_q / problem.h_kv : 1;
  const std::int64_t heads = problem.h_q / group;
  const std::int64_t tiles = problem.varlen ? slots(problem.total_q * group, attention.tile_m, problem.b)
                                            : ceil_div(problem.s_q * group, attention.tile_m) * problem.b;
  result.tiles = tiles * heads;
  result.splits = ceil_div(problem.s_kv, attention.split_keys());
  if (attention.split) {
    const std::int64_t most =
        std::max<std::int64_t>(ceil_div(kEnoughBlocks, std::max<std::int64_t>(result.tiles, 1)), 1);
    result.sharing = attention.kernel().persistent
                         ? usual_sharing(result.tiles, result.splits, kHopperMultiprocessors * attention.min_blocks)
                         : static_cast<int>(std::clamp<std::int64_t>(result.splits, 1, most));
    if (result.splits <= 1) return result;  // nothing is left for others
    const std::int64_t rows = std::min<std::int64_t>(problem.s_q * group, attention.tile_m);
    if (attention.kernel().persistent) {
      result.flags = result.tiles * result.sharing;
    } else {
      result.counters = result.tiles;
    }
    result.partial_o = result.tiles * result.splits * rows * attention.d_v;
    result.partial_lse = result.tiles * result.splits * rows * kernel::kSplitSumFloats;
  } else if (result.splits > 1 && !attention.kernel().persistent) {
    result.partial_o = result.tiles * attention.tile_m * (attention.d_v + kLanes * kernel::kSplitSumFloats);
  }
  return result;
}

}  // namespace fa::plan
