#include "bench_timing.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>

#include "options.hpp"
#include "parallel.hpp"
#include "terminal.hpp"

namespace fa::cli {
namespace {

constexpr int kMaxIterations = 1000;
constexpr int kMaxFlushes = 100;  // each with two events
constexpr std::size_t kLeastFlush = std::size_t{32} << 20;

void prepare_trial(const Gpu& gpu, const BenchProblem& problem, Trial* trial) {
  try {
    trial->attention.emplace(Attention::create(problem.config(trial->kernel), gpu.device()));
    trial->info = prepare(*trial->attention, problem);
  } catch (const Error& error) {
    trial->refusal = error.what();
  } catch (const std::exception& exception) {
    trial->refusal = std::string("unexpected exception: ") + exception.what();
  }
}

/// Runs a trial on fixed tensors.
class Launcher {
 public:
  Launcher(const Gpu& gpu, const BenchTensors& tensors, const BenchProblem& problem, const Trial& trial,
           DeviceBuffer* flush)
      : gpu_(gpu),
        problem_(problem),
        tensors_(tensors),
        attention_(*trial.attention),
        workspace_(workspace_size(attention_, problem)),
        flush_(flush) {
    if (problem.op == Operation::backward) {  // it needs o and lse
      attention_.forward(tensors.inputs(), tensors.outputs(), gpu.stream());
    }
  }

  void launch() const {
    cli::launch(attention_, problem_, tensors_, gpu_.stream(), {workspace_.data(), workspace_.size()});
  }

  /// Milliseconds of a call, averaged over `iterations`: queued back to back, or each behind a flush of the L2 cache.
  double time(int iterations) { return flush_ == nullptr ? time_back_to_back(iterations) : time_flushed(iterations); }

 private:
  double time_back_to_back(int iterations) {
    start_.record(gpu_.stream());
    for (int i = 0; i < iterations; ++i) {
      launch();
    }
    end_.record(gpu_.stream());
    end_.synchronize();
    return end_.milliseconds_since(start_) / iterations;
  }

  double time_flushed(int iterations) {
    const auto count = static_cast<std::size_t>(iterations);
    while (starts_.size() < count) {
      starts_.emplace_back();
      ends_.emplace_back();
    }
    for (std::size_t i = 0; i < count; ++i) {
      flush_->clear(gpu_.stream());  // and keeps the GPU busy while the call is queued
      starts_[i].record(gpu_.stream());
      launch();
      ends_[i].record(gpu_.stream());
    }
    gpu_.synchronize();
    double sum = 0;
    for (std::size_t i = 0; i < count; ++i) sum += ends_[i].milliseconds_since(starts_[i]);
    return sum / iterations;
  }

  const Gpu& gpu_;
  const BenchProblem& problem_;
  const BenchTensors& tensors_;
  const Attention& attention_;
  DeviceBuffer workspace_;
  DeviceBuffer* flush_;  ///< nullptr: caches stay as they are
  Event start_;
  Event end_;
  std::vector<Event> starts_;
  std::vector<Event> ends_;
};

struct Runner {
  Trial* trial;
  Launcher launcher;
  int iterations;
};

/// Runs once for the answer, then finds out how many calls fill a round.
std::optional<Runner> warm_up(const Gpu& gpu, BenchTensors* tensors, const BenchProblem& problem, Trial* trial,
                              const TimingOptions& options, DeviceBuffer* flush) {
  tensors->spoil_output();
  Runner runner{trial, Launcher(gpu, *tensors, problem, *trial, flush), 1};
  runner.launcher.launch();
  gpu.synchronize();
  trial->error = tensors->check();
  if (!(trial->error <= 1)) {
    trial->refusal = fmt::format("wrong result: {:.2f} times the allowed error", trial->error);
    return std::nullopt;
  }
  const double once = runner.launcher.time(3);
  const double wanted = std::round(options.round_ms / std::max(once, 1e-3));
  const int most = flush == nullptr ? kMaxIterations : kMaxFlushes;
  runner.iterations = static_cast<int>(std::clamp(wanted, 1.0, static_cast<double>(most)));
  return runner;
}

}  // namespace

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

double Trial::median_ms() const {
  return rounds.empty() ? std::numeric_limits<double>::infinity() : median(rounds);
}

std::vector<Trial> prepare_trials(const Gpu& gpu, const std::vector<BenchProblem>& problems,
                                  const std::vector<KernelOverride>& kernels, const TimingOptions& options) {
  std::vector<Trial> trials;
  for (std::size_t problem = 0; problem < problems.size(); ++problem) {
    for (const KernelOverride& kernel : kernels) {
      Trial& trial = trials.emplace_back();
      trial.problem = problem;
      trial.kernel = kernel;
    }
  }
  std::mutex mutex;
  std::size_t done = 0;
  parallel_for(trials.size(), options.jobs, [&](std::size_t i) {
    prepare_trial(gpu, problems[trials[i].problem], &trials[i]);
    const std::lock_guard lock(mutex);
    show_progress(fmt::format("preparing kernels: {} of {}", ++done, trials.size()));
  });
  clear_progress();
  return trials;
}

void time_trials(const Gpu& gpu, const BenchProblem& problem, const std::vector<Trial*>& trials,
                 const TimingOptions& options) {
  BenchTensors tensors(problem);
  std::optional<DeviceBuffer> flush;
  if (options.flush_l2) flush.emplace(std::max(2 * gpu.l2_bytes(), kLeastFlush));
  std::vector<Runner> runners;
  for (Trial* trial : trials) {
    if (!trial->runs()) {
      continue;
    }
    show_progress(fmt::format("checking {} {}", problem.text(), describe(trial->kernel)));
    if (std::optional<Runner> runner = warm_up(gpu, &tensors, problem, trial, options, flush ? &*flush : nullptr)) {
      runners.push_back(std::move(*runner));
    }
  }
  for (int round = 0; round < options.rounds; ++round) {
    show_progress(fmt::format("timing {}: round {} of {}", problem.text(), round + 1, options.rounds));
    for (Runner& runner : runners) {
      runner.trial->rounds.push_back(runner.launcher.time(runner.iterations));
    }
  }
  clear_progress();
}

}  // namespace fa::cli
