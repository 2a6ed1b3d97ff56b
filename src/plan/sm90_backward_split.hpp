#ifndef FA_SRC_PLAN_SM90_BACKWARD_SPLIT_HPP_
#define FA_SRC_PLAN_SM90_BACKWARD_SPLIT_HPP_

#include "plan/backward.hpp"
#include "plan/problem.hpp"

namespace fa::plan {

/// How many blocks share the query tiles of a key tile in the Hopper backward: what a model of the grid takes to be
/// fastest. Query heads of a KV head meet in one key tile, so that few KV heads are few tiles of much work. Those of a
/// cluster, 1 to BackwardChoice::kMaxSplitBlocks, add up dK and dV on the chip; or each has query heads of its own, and
/// adds to sums in memory behind the one in front of it. `splits`: those that the call has without either, whose
/// partial sums another kernel adds up.
KeyTileShares sm90_backward_shares(const Problem& problem, int splits) noexcept;

/// Whether `parts` blocks may add to dK and dV of a key tile in turns: whole query heads each, in a grid whose blocks
/// have one tile.
bool sm90_backward_takes_turns(const Problem& problem, int parts) noexcept;

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_SM90_BACKWARD_SPLIT_HPP_
