#ifndef FA_TOOLS_FA_BENCH_MERGE_HPP_
#define FA_TOOLS_FA_BENCH_MERGE_HPP_

#include "bench_grid.hpp"
#include "bench_timing.hpp"

namespace fa::cli {

/// Times merges of partial results: of two in place of the first, of more, and of stacks in f32 as splits of the keys
/// leave them. Each stands beside a kernel that copies half as many bytes as the merge reads and writes together, with
/// what is in the L2 cache alike. Times are those of a graph of calls, divided by their number. With --flush-l2 calls
/// use so many tensors, one after the other, that none is in the cache.
void bench_merge(int device, const BenchGrid& grid, const TimingOptions& timing, bool json);

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_BENCH_MERGE_HPP_
