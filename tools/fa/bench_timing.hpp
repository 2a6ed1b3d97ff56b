#ifndef FA_TOOLS_FA_BENCH_TIMING_HPP_
#define FA_TOOLS_FA_BENCH_TIMING_HPP_

#include <optional>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "bench_problem.hpp"
#include "gpu.hpp"

namespace fa::cli {

struct TimingOptions {
  int rounds = 10;
  double round_ms = 20;   ///< GPU time that one round of one candidate aims at
  int jobs = 0;           ///< threads that compile; 0: one a CPU
  bool flush_l2 = false;  ///< each call finds nothing of its tensors in the L2 cache, and is timed alone
};

/// One way of computing one problem, and what was found out about it.
struct Trial {
  std::size_t problem = 0;
  KernelOverride kernel;
  std::optional<Attention> attention;
  KernelInfo info;
  std::string refusal;         ///< why it cannot run; empty when it can
  double error = 0;            ///< BenchTensors::check; above 1 is wrong
  std::vector<double> rounds;  ///< milliseconds of a call, mean of each round

  bool runs() const noexcept { return refusal.empty(); }
  double median_ms() const;
};

/// Median of a non-empty list.
double median(std::vector<double> values);

/// A trial of every problem with every kernel, compiled in parallel.
std::vector<Trial> prepare_trials(const Gpu& gpu, const std::vector<BenchProblem>& problems,
                                  const std::vector<KernelOverride>& kernels, const TimingOptions& options);

/// Checks and times the trials of `problem`. Rounds of the candidates take turns, so that a change of clocks or
/// temperature touches all of them alike.
void time_trials(const Gpu& gpu, const BenchProblem& problem, const std::vector<Trial*>& trials,
                 const TimingOptions& options);

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_BENCH_TIMING_HPP_
