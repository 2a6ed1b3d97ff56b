#ifndef FA_TOOLS_FA_BENCH_DECODE_HPP_
#define FA_TOOLS_FA_BENCH_DECODE_HPP_

#include "bench_grid.hpp"
#include "bench_timing.hpp"

namespace fa::cli {

/// Times decodes over a KV cache, contiguous and in pages, each beside a kernel that reads the same K, V, Q and O and
/// nothing else. Both are timed twice: over the same tensors again and again, and rotating over as many tensors as
/// fill four L2 caches.
///
/// Times are those of a graph of 100 calls, of fewer where these take longer than a round, divided by their number.
/// TB/s counts K, V, Q and O once. False where a problem was refused, or its result was wrong.
bool bench_decode(int device, const BenchGrid& grid, const KernelOverride& kernel, const TimingOptions& timing,
                  bool json);

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_BENCH_DECODE_HPP_
