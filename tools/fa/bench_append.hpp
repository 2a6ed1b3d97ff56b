#ifndef FA_TOOLS_FA_BENCH_APPEND_HPP_
#define FA_TOOLS_FA_BENCH_APPEND_HPP_

#include "bench_grid.hpp"
#include "bench_timing.hpp"

namespace fa::cli {

/// Times appends of decodes and prefills, into pages and a contiguous cache, without and with rotary embedding. Each
/// stands beside a kernel that copies as many bytes, with what is in the L2 cache alike. Times are those of a graph of
/// calls, divided by their number. With --flush-l2 calls rotate over so many tensors that none is in the cache.
void bench_append(int device, const BenchGrid& grid, const TimingOptions& timing, bool json);

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_BENCH_APPEND_HPP_
