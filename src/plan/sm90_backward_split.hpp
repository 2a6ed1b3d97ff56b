#ifndef FA_SRC_PLAN_SM90_BACKWARD_SPLIT_HPP_
#define FA_SRC_PLAN_SM90_BACKWARD_SPLIT_HPP_

#include "plan/problem.hpp"

namespace fa::plan {

/// How many blocks of a cluster share the query tiles of a key tile in the Hopper backward: what a model of the grid
/// takes to be fastest, from 1 to BackwardChoice::kMaxSplitBlocks. Query heads of a KV head meet in one key tile, so
/// that few KV heads are few tiles of much work. `splits`: those that the call has without a cluster, whose partial
/// sums another kernel adds up.
int sm90_backward_split_blocks(const Problem& problem, int splits) noexcept;

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_SM90_BACKWARD_SPLIT_HPP_
