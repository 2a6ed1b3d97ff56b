#ifndef FA_TOOLS_FA_BENCH_HOST_HPP_
#define FA_TOOLS_FA_BENCH_HOST_HPP_

#include <nlohmann/json.hpp>

#include <vector>

#include "bench_problem.hpp"
#include "gpu.hpp"

namespace fa::cli {

/// Microseconds that the calling thread spends in a warm call.
struct HostCost {
  double median_us = 0;
  double best_us = 0;
  int calls = 0;
};
/// Of a forward, a backward, or a decode over pages by a schedule.
HostCost measure_host_cost(const Gpu& gpu, Operation op, const KernelOverride& kernel);

/// What a first call costs a process that has its CUDA context, in milliseconds.
struct Latency {
  BenchProblem problem;
  double compile_ms = 0;  ///< NVRTC alone
  double cold_ms = 0;     ///< create and first call with an empty cache
  double warm_ms = 0;     ///< create and first call with the kernels on disk
};

/// Every problem in one process with an empty cache, then in another with the cache that the first has filled. To be
/// called before anything in this process has opened the CUDA driver.
std::vector<Latency> measure_latency(int device, const std::vector<BenchProblem>& problems);

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_BENCH_HOST_HPP_
