// Method: inputs are seeded standard normals; every kernel first proves its answer against float64 on the last rows of
// the last head; a round queues enough calls to fill a fixed time between two events; the rounds of all candidates of a
// problem are interleaved; the figure is the median over rounds. With --flush-l2 each call has events of its own,
// behind a write that fills the L2 cache. TFLOP/s counts 2 b h_q s_q s_kv (d_qk + d_v) operations, half of that under a
// causal mask, 2.5 times that for backward; of packed batches by the lengths that they have. Appends: bench_append.hpp,
// decodes: bench_decode.hpp, merges: bench_merge.hpp, shared prefixes: bench_shared.hpp.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "bench_append.hpp"
#include "bench_decode.hpp"
#include "bench_grid.hpp"
#include "bench_host.hpp"
#include "bench_merge.hpp"
#include "bench_problem.hpp"
#include "bench_shared.hpp"
#include "bench_timing.hpp"
#include "choice.hpp"
#include "commands.hpp"
#include "gpu.hpp"
#include "options.hpp"
#include "plan/arch.hpp"
#include "support/text.hpp"
#include "terminal.hpp"

namespace fa::cli {
namespace {

struct BenchOptions {
  int device = 0;
  BenchGrid grid;
  KernelOverride kernel;
  std::string sweep;
  TimingOptions timing;
  bool host_cost = false;
  bool latency = false;
  bool dry_run = false;
  bool json = false;
};

double tflops(const BenchProblem& problem, double milliseconds) {
  return problem.flops() / milliseconds / 1e9;
}

nlohmann::json to_json(const BenchProblem& problem, const Trial& trial) {
  nlohmann::json record = {{"problem", to_json(problem)}, {"given", describe(trial.kernel)}};
  if (!trial.runs()) {
    record["refused"] = trial.refusal;
    return record;
  }
  const double milliseconds = trial.median_ms();
  record["ms"] = milliseconds;
  record["ms_min"] = *std::min_element(trial.rounds.begin(), trial.rounds.end());
  record["ms_max"] = *std::max_element(trial.rounds.begin(), trial.rounds.end());
  record["tflops"] = tflops(problem, milliseconds);
  record["error_of_allowed"] = trial.error;
  record["kernel"] = {{"name", trial.info.name},
                      {"spec", trial.info.spec},
                      {"registers", trial.info.registers},
                      {"local_bytes", trial.info.local_bytes},
                      {"shared_bytes", trial.info.shared_bytes},
                      {"threads", trial.info.threads}};
  return record;
}

void print_heading(const Gpu& gpu, const TimingOptions& timing) {
  fmt::print("{}, {}, fa {}; median of {} rounds of about {} ms{}\n\n", gpu.info().name,
             plan::to_string(gpu.info().arch), version(), timing.rounds, timing.round_ms,
             timing.flush_l2 ? ", each call with a cold L2 cache" : "");
}

void print_table_head() {
  fmt::print("{:<5} {:>4} {:>4} {:>6} {:>5} {:>5} {:>5} {:>6} {:>6} {:>9} {:>8} {:>6}\n", "dtype", "d_qk", "d_v",
             "causal", "b", "h_q", "h_kv", "s_q", "s_kv", "ms", "TFLOP/s", "spread");
}

/// (max - min) / median over the rounds.
double spread(const Trial& trial) {
  const auto [least, greatest] = std::minmax_element(trial.rounds.begin(), trial.rounds.end());
  return (*greatest - *least) / trial.median_ms();
}

void print_row(const BenchProblem& problem, const Trial& trial) {
  const AttentionShape& shape = problem.shape;
  fmt::print("{:<5} {:>4} {:>4} {:>6} {:>5} {:>5} {:>5} {:>6} {:>6} ", to_string(problem.dtype), problem.d_qk,
             problem.d_v, problem.causal ? "yes" : "no", shape.b, shape.h_q, shape.h_kv, shape.s_q, shape.s_kv);
  if (!trial.runs()) {
    fmt::print("refused: {}\n", trial.refusal);
    return;
  }
  std::string more = problem.page_size > 0   ? fmt::format("  pages of {}", problem.page_size)
                     : problem.page_size < 0 ? "  contiguous cache"
                                             : "";
  if (problem.place) more += fmt::format("  at {}x{}", problem.place->q, problem.place->kv);
  if (problem.max_multiprocessors > 0) more += fmt::format("  on {} multiprocessors", problem.max_multiprocessors);
  fmt::print("{:>9.4f} {:>8.1f} {:>5.1f}%{}\n", trial.median_ms(), tflops(problem, trial.median_ms()),
             100 * spread(trial), more);
}

/// Fastest first; what was refused last.
void print_candidates(const BenchProblem& problem, std::vector<Trial*> trials) {
  std::stable_sort(trials.begin(), trials.end(),
                   [](const Trial* a, const Trial* b) { return a->median_ms() < b->median_ms(); });
  fmt::print("{}\n", problem.text());
  for (const Trial* trial : trials) {
    if (!trial->runs()) {
      fmt::print("  refused            {}: {}\n", describe(trial->kernel), trial->refusal);
      continue;
    }
    fmt::print("  {:>8.1f} {:>9.4f} ms  {:>3} registers {:>4} local {:>6} shared  {}\n",
               tflops(problem, trial->median_ms()), trial->median_ms(), trial->info.registers, trial->info.local_bytes,
               trial->info.shared_bytes, describe(trial->kernel));
  }
  fmt::print("\n");
}

void print_result(const BenchProblem& problem, const std::vector<Trial*>& trials, bool sweep) {
  if (sweep) {
    print_candidates(problem, trials);
  } else {
    print_row(problem, *trials.front());
  }
  std::fflush(stdout);
}

/// Of the candidates of a problem, one is enough.
bool served(const std::vector<Trial*>& trials) {
  return std::any_of(trials.begin(), trials.end(), [](const Trial* trial) { return trial->runs(); });
}

int bench_grid(const BenchOptions& options) {
  const bool sweep = !options.sweep.empty();
  const std::vector<BenchProblem> problems = make_grid(options.grid);
  const std::vector<KernelOverride> kernels = parse_sweep(options.sweep, options.kernel);
  const Gpu gpu(options.device);
  std::vector<Trial> trials = prepare_trials(gpu, problems, kernels, options.timing);
  if (!options.json) {
    print_heading(gpu, options.timing);
    if (!sweep) {
      print_table_head();
    }
  }
  nlohmann::json records = nlohmann::json::array();
  bool all_served = true;
  for (std::size_t problem = 0; problem < problems.size(); ++problem) {
    std::vector<Trial*> group;
    for (std::size_t i = 0; i < kernels.size(); ++i) {
      group.push_back(&trials[problem * kernels.size() + i]);
    }
    time_trials(gpu, problems[problem], group, options.timing);
    all_served = all_served && served(group);
    if (!options.json) {
      print_result(problems[problem], group, sweep);
    }
    for (const Trial* trial : group) {
      records.push_back(to_json(problems[problem], *trial));
    }
  }
  if (options.json) {
    print_json({{"gpu", to_json(gpu)},
                {"rounds", options.timing.rounds},
                {"round_ms", options.timing.round_ms},
                {"flush_l2", options.timing.flush_l2},
                {"results", records}});
  }
  return all_served ? kSuccess : kFailure;
}

void bench_host_cost(const BenchOptions& options) {
  const Gpu gpu(options.device);
  const HostCost cost = measure_host_cost(gpu, options.grid.op, options.kernel);
  if (options.json) {
    print_json(
        {{"gpu", to_json(gpu)}, {"median_us", cost.median_us}, {"best_us", cost.best_us}, {"calls", cost.calls}});
  } else {
    fmt::print("warm {} on the host: median {:.2f} us, best {:.2f} us, of {} calls\n", to_string(options.grid.op),
               cost.median_us, cost.best_us, cost.calls);
  }
}

/// One sequence of 1024 rows a problem: the grid is over what has kernels of its own.
std::vector<BenchProblem> latency_grid(BenchGrid grid) {
  grid.seqs = {1024};
  grid.tokens = 1024;
  return make_grid(grid);
}

void print_latencies(const std::vector<Latency>& results) {
  std::vector<double> compile, cold, warm;
  fmt::print("{:<64} {:>10} {:>10} {:>10}\n", "problem", "compile ms", "cold ms", "warm ms");
  for (const Latency& result : results) {
    fmt::print("{:<64} {:>10.1f} {:>10.1f} {:>10.2f}\n", result.problem.text(), result.compile_ms, result.cold_ms,
               result.warm_ms);
    compile.push_back(result.compile_ms);
    cold.push_back(result.cold_ms);
    warm.push_back(result.warm_ms);
  }
  const auto greatest = [](const std::vector<double>& values) {
    return *std::max_element(values.begin(), values.end());
  };
  fmt::print("{:<64} {:>10.1f} {:>10.1f} {:>10.2f}\n", "median", median(compile), median(cold), median(warm));
  fmt::print("{:<64} {:>10.1f} {:>10.1f} {:>10.2f}\n", "max", greatest(compile), greatest(cold), greatest(warm));
}

void bench_latency(const BenchOptions& options) {
  const std::vector<Latency> results = measure_latency(options.device, latency_grid(options.grid));
  if (!options.json) {
    print_latencies(results);
    return;
  }
  nlohmann::json records = nlohmann::json::array();
  for (const Latency& result : results) {
    records.push_back({{"problem", to_json(result.problem)},
                       {"compile_ms", result.compile_ms},
                       {"cold_ms", result.cold_ms},
                       {"warm_ms", result.warm_ms}});
  }
  print_json({{"gpu", to_json(Gpu(options.device))}, {"results", records}});
}

/// Sizes of appends are few, and their caches of 16 or 32 bits.
void check_append(const BenchGrid& grid) {
  const auto refuse = [](bool given, const char* option, const char* operations) {
    if (given) support::throw_invalid("--op", "append", fmt::format("{} with {}", operations, option));
  };
  refuse(grid.k_dtype.has_value(), "--k-dtype", "forward or decode");
  refuse(grid.v_dtype.has_value(), "--v-dtype", "forward or decode");
  refuse(grid.group_size != 0, "--group-size", "forward or decode");
  refuse(grid.head_dim_v != 0, "--head-dim-v", "forward, backward or decode");
  refuse(!grid.seqs.empty(), "--seq", "forward, backward or decode");
  refuse(!grid.seqs_kv.empty(), "--seq-kv", "forward, backward or decode");
  refuse(grid.batch != 0, "--batch", "forward, backward or decode");
}

/// Appends and decodes have a method of their own.
void check(const BenchOptions& options) {
  const Operation op = options.grid.op;
  const auto refuse = [&](bool given, const char* option, const char* operations) {
    if (given) support::throw_invalid("--op", to_string(op), fmt::format("{} with {}", operations, option));
  };
  if (op == Operation::append) check_append(options.grid);
  const bool decode = op == Operation::decode || op == Operation::mla;
  refuse(!options.grid.lengths.empty() && !decode, "--lengths", "decode");
  const bool is_call = op == Operation::forward || op == Operation::backward || op == Operation::decode;
  refuse(options.host_cost && !is_call, "--host-cost", "forward, backward or decode");
  if (!decode && op != Operation::append) return;
  refuse(options.latency, "--latency", "forward or backward");
  refuse(!options.sweep.empty(), "--sweep", "forward or backward");
  refuse(options.grid.packed.varlen, "--varlen", "forward or backward");
  refuse(options.dry_run && !decode, "--dry-run", "forward, backward or decode");
  refuse(options.timing.flush_l2 && decode, "--flush-l2", "forward, backward or append");
}

/// "1,2,2" as text, of what has different lengths.
std::string lengths_text(const BenchProblem& problem) {
  if (problem.cumulative_kv.empty()) return "";
  return fmt::format(" lengths={}", fmt::join(problem.lengths_kv(), ","));
}

int print_problems(const BenchOptions& options) {
  const bool decode = options.grid.op == Operation::decode || options.grid.op == Operation::mla;
  nlohmann::json records = nlohmann::json::array();
  for (const BenchProblem& problem : decode ? make_decodes(options.grid) : make_grid(options.grid)) {
    if (options.json) {
      records.push_back(to_json(problem));
      if (!problem.cumulative_kv.empty()) records.back()["lengths"] = problem.lengths_kv();
    } else {
      fmt::print("{}{}\n", problem.text(), lengths_text(problem));
    }
  }
  if (options.json) print_json({{"problems", records}});
  return kSuccess;
}

int bench(const BenchOptions& options) {
  check(options);
  if (options.dry_run) return print_problems(options);
  if (options.grid.op == Operation::append) {
    bench_append(options.device, options.grid, options.timing, options.json);
    return kSuccess;
  }
  if (options.grid.op == Operation::merge) {
    bench_merge(options.device, options.grid, options.timing, options.json);
    return kSuccess;
  }
  if (options.grid.op == Operation::shared) {
    return bench_shared(options.device, options.grid, options.timing, options.json) ? kSuccess : kFailure;
  }
  if ((options.grid.op == Operation::decode && !options.host_cost) || options.grid.op == Operation::mla) {
    const bool all = bench_decode(options.device, options.grid, options.kernel, options.timing, options.json);
    return all ? kSuccess : kFailure;
  }
  if (options.latency) {  // first: it needs a process without a driver
    bench_latency(options);
  }
  if (options.host_cost) {
    bench_host_cost(options);
  }
  return options.host_cost || options.latency ? kSuccess : bench_grid(options);
}

}  // namespace

void add_bench(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand("bench", "Time kernels on the GPU");
  const auto options = std::make_shared<BenchOptions>();
  command->add_option("--device", options->device, "CUDA device number");
  add_grid_options(*command, &options->grid, true);
  add_variant_options(*command, &options->grid.variant);
  add_kernel_options(*command, &options->kernel);
  command->add_option("--sweep", options->sweep,
                      "Try every combination and sort, as \"tile_m=64,128;tile_n=64,128;warps=4,8\"; fields: tile_m, "
                      "tile_n, warps, stages, q_in_registers, loop_bodies, pack_gqa, splits, warps_n");
  const Choices<TunePolicy> policies{{"off", TunePolicy::off}, {"cached", TunePolicy::cached}, {"on", TunePolicy::on}};
  add_choice(*command, "--tune", &options->grid.tune, policies,
             "The planner's kernels, tuned ones where they are known (the default), or tune");
  command->add_option("--rounds", options->timing.rounds, "Rounds a candidate")->check(whole_number(1));
  command->add_option("--round-ms", options->timing.round_ms, "GPU time of a round")->check(whole_number(1));
  CLI::Option* const flush = command->add_flag("--flush-l2", options->timing.flush_l2,
                                               "Empty the L2 cache before each call, which is then timed alone");
  command->add_option("--jobs", options->timing.jobs, "Threads that compile (default: one a CPU)")
      ->check(whole_number());
  command->add_flag("--host-cost", options->host_cost, "Instead: what a warm call costs the calling thread")
      ->excludes(flush);
  command->add_flag("--latency", options->latency, "Instead: what a first call costs with an empty and a warm cache")
      ->excludes(flush);
  command->add_flag("--dry-run", options->dry_run, "Only print the problems; needs no GPU");
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options, exit_code] { *exit_code = bench(*options); });
}

}  // namespace fa::cli
