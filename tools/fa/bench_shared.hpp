#ifndef FA_TOOLS_FA_BENCH_SHARED_HPP_
#define FA_TOOLS_FA_BENCH_SHARED_HPP_

#include "bench_grid.hpp"
#include "bench_timing.hpp"

namespace fa::cli {

/// Times decodes whose requests share prefixes, beside the same decodes without that knowledge, over the same pages,
/// and beside a kernel that reads every page once. A decode's own schedule is made once in front, those of levels in
/// each call. Both answers are compared first. False where they are not the same.
bool bench_shared(int device, const BenchGrid& grid, const TimingOptions& timing, bool json);

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_BENCH_SHARED_HPP_
