// Three things around the library's tuner: filling a grid ahead of time, an oracle that measures what a choice loses
// against the best of all candidates, and repetitions that count how often a choice changes. All of them race
// candidates exactly as a first call does.

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "api/tuning.hpp"
#include "bench_grid.hpp"
#include "cache/files.hpp"
#include "choice.hpp"
#include "commands.hpp"
#include "gpu.hpp"
#include "options.hpp"
#include "output.hpp"
#include "render/source.hpp"
#include "terminal.hpp"
#include "tune/record.hpp"
#include "tune_carry.hpp"
#include "tune_report.hpp"

namespace fa::cli {
namespace {

struct TuneCommand {
  int device = 0;
  BenchGrid grid;
  std::vector<Operation> operations{Operation::forward, Operation::backward};
  api::TuneOptions tune;
  std::string directory;
  std::string output;
  bool force = false;
  bool explain = false;
  bool oracle = false;
  std::size_t most = 256;
  int repeat = 0;
  CarryOptions carry;
  bool json = false;
};

constexpr int kBarWidth = 24;

void show_bar(std::size_t done, std::size_t all, const std::string& what) {
  const auto filled = static_cast<int>(kBarWidth * done / std::max<std::size_t>(all, 1));
  show_progress(fmt::format("[{:#<{}}{:.<{}}] {} of {}  {}", "", filled, "", kBarWidth - filled, done, all, what));
}

api::Operation operation(const BenchProblem& problem) {
  return problem.op == Operation::backward ? api::Operation::backward : api::Operation::forward;
}

Attention attention_for(const TuneCommand& options, const Gpu& gpu, const BenchProblem& problem) {
  AttentionConfig config = problem.config();
  config.cache.directory = options.directory;
  config.tune = TunePolicy::cached;  // what is known; decisions are asked for
  return Attention::create(config, gpu.device());
}

std::vector<BenchProblem> problems_of(const TuneCommand& options) {
  std::vector<BenchProblem> problems;
  for (const Operation op : options.operations) {
    BenchGrid grid = options.grid;
    grid.op = op;
    const std::vector<BenchProblem> more = make_grid(grid);
    problems.insert(problems.end(), more.begin(), more.end());
  }
  return problems;
}

/// Every candidate that can matter, up to `most`, and rounds without an early end.
api::TuneOptions oracle_options(const TuneCommand& options) {
  api::TuneOptions result = options.tune;
  result.candidates = options.most;
  result.publish = false;
  result.budget.seconds = 600;
  result.budget.timing_seconds = 60;
  result.race = {.min_rounds = 4, .max_rounds = 16, .band = 0.05, .confidence = 0};
  return result;
}

void print_row(const BenchProblem& problem, const api::TuneReport& report) {
  const tune::Result& winner = report.outcome.results[report.outcome.winner];
  fmt::print("{:<58} {:>6.2f} s {:>7.2f} %  {}{}\n", problem.text(), report.seconds,
             100 * (1 - (winner.rounds > 0 ? winner.ratio : 1)),
             difference(report.specs[report.outcome.winner], report.specs.front()),
             report.outcome.complete ? "" : "  (the time was up)");
  std::fflush(stdout);
}

void write_table(const TuneCommand& options, const Gpu& gpu, const std::vector<api::TuneReport>& reports) {
  if (reports.empty()) {
    throw Error(ErrorCode::invalid_argument, "--output: nothing was tuned; --force tunes what is known already");
  }
  tune::Table table;
  table.gpu = gpu.info().name;
  table.multiprocessors = gpu.info().multiprocessors;
  std::map<std::string, tune::Table::Row> rows;  // problems of one bucket: the last one counts
  for (const api::TuneReport& report : reports) {
    const tune::Result& winner = report.outcome.results[report.outcome.winner];
    const plan::KernelSpec& best = report.specs[report.outcome.winner];
    rows[report.key.problem] = {report.key.problem,
                                {canonical(best), render::templates_digest(render::unit_of(best))},
                                winner.rounds > 0 ? winner.ratio : 1};
  }
  for (const auto& [problem, row] : rows) {
    table.rows.push_back(row);
  }
  const std::string text = tune::write_table(table);
  std::string problem;
  if (!cache::write_shared_file(options.output, std::as_bytes(std::span(text)), &problem)) {
    throw Error(ErrorCode::io, fmt::format("{} cannot be written: {}", options.output, problem));
  }
  fmt::print("{}: {} rows\n", options.output, table.rows.size());
}

bool is_known(const Attention& attention, const BenchProblem& problem) {
  const std::string by = prepare(attention, problem).chosen_by;
  return by == api::kByRecord || by == api::kByTable;
}

int fill(const TuneCommand& options, const Gpu& gpu, const std::vector<BenchProblem>& problems) {
  std::vector<api::TuneReport> reports;
  nlohmann::json records = nlohmann::json::array();
  std::size_t known = 0;
  double longest = 0;
  for (std::size_t i = 0; i < problems.size(); ++i) {
    const BenchProblem& problem = problems[i];
    show_bar(i, problems.size(), problem.text());
    const Attention attention = attention_for(options, gpu, problem);
    if (!options.force && !options.explain && is_known(attention, problem)) {
      ++known;
      continue;
    }
    api::TuneReport report = api::TuningAccess::tune(attention, operation(problem), problem.shape, options.tune);
    clear_progress();
    longest = std::max(longest, report.seconds);
    if (options.json) {
      records.push_back(to_json(problem, report));
    } else if (options.explain) {
      print_explanation(problem, report);
    } else {
      print_row(problem, report);
    }
    reports.push_back(std::move(report));
  }
  clear_progress();
  if (options.json) {
    print_json({{"gpu", to_json(gpu)}, {"results", records}});
  } else {
    fmt::print("{} tuned, {} known before; the longest took {:.2f} s\n", reports.size(), known, longest);
  }
  if (!options.output.empty()) {
    write_table(options, gpu, reports);
  }
  return kSuccess;
}

int ask_oracle(const TuneCommand& options, const Gpu& gpu, const std::vector<BenchProblem>& problems) {
  std::vector<Regret> regrets;
  nlohmann::json records = nlohmann::json::array();
  for (std::size_t i = 0; i < problems.size(); ++i) {
    const BenchProblem& problem = problems[i];
    show_bar(i, problems.size(), problem.text());
    const Attention attention = attention_for(options, gpu, problem);
    api::TuneOptions once = options.tune;
    once.publish = false;
    const api::TuneReport tuned = api::TuningAccess::tune(attention, operation(problem), problem.shape, once);
    const api::TuneReport all =
        api::TuningAccess::tune(attention, operation(problem), problem.shape, oracle_options(options));
    regrets.push_back(regret_of(problem, all, canonical(tuned.specs[tuned.outcome.winner])));
    if (options.json) {
      records.push_back({{"tuned", to_json(problem, tuned)}, {"oracle", to_json(problem, all)}});
    } else if (options.explain) {
      clear_progress();
      print_explanation(problem, all);
    }
  }
  clear_progress();
  if (options.json) {
    print_json({{"gpu", to_json(gpu)}, {"results", records}});
  } else {
    print_regrets(regrets);
  }
  return kSuccess;
}

int repeat(const TuneCommand& options, const Gpu& gpu, const std::vector<BenchProblem>& problems) {
  std::vector<Flips> flips;
  api::TuneOptions once = options.tune;
  once.publish = false;
  for (std::size_t i = 0; i < problems.size(); ++i) {
    const Attention attention = attention_for(options, gpu, problems[i]);
    std::vector<api::TuneReport> reports;
    for (int run = 0; run < options.repeat; ++run) {
      show_bar(i, problems.size(), fmt::format("{}: run {} of {}", problems[i].text(), run + 1, options.repeat));
      reports.push_back(api::TuningAccess::tune(attention, operation(problems[i]), problems[i].shape, once));
    }
    flips.push_back(flips_of(problems[i], reports));
  }
  clear_progress();
  print_flips(flips);
  return kSuccess;
}

int tune_grid(TuneCommand options) {
  if (!options.carry.from.empty()) {
    options.carry.output = options.output;
    options.carry.jobs = options.tune.budget.jobs;
    return carry_table(options.carry);
  }
  options.tune.replace = options.force;
  if (!options.output.empty()) {
    check_output(options.output, {}, false);
  }
  const Gpu gpu(options.device);
  const std::vector<BenchProblem> problems = problems_of(options);
  if (!options.json) {
    fmt::print("{}, {} multiprocessors, fa {}; up to {} candidates, {}\n\n", gpu.info().name,
               gpu.info().multiprocessors, version(), options.tune.candidates, tune::kMethod);
  }
  if (options.oracle) {
    return ask_oracle(options, gpu, problems);
  }
  return options.repeat > 0 ? repeat(options, gpu, problems) : fill(options, gpu, problems);
}

}  // namespace

void add_tune(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand("tune", "Find the fastest kernels of a grid ahead of time");
  const auto options = std::make_shared<TuneCommand>();
  command->add_option("--device", options->device, "CUDA device number");
  add_grid_options(*command, &options->grid);
  // The first: below, as a list; the last three: of calls that are not tuned.
  for (const char* option : {"--op", "--deterministic", "--layout", "--dropout", "--varlen", "--zero-padding"}) {
    command->remove_option(command->get_option(option));
  }
  const Choices<Operation> operations{{"forward", Operation::forward}, {"backward", Operation::backward}};
  add_choice_list(*command, "--op", &options->operations, operations, "Calls (default: both)");
  command->add_option("--directory", options->directory, "Instead of the default cache directory");
  command->add_option("--candidates", options->tune.candidates, "Kernels to try for a problem, the default included")
      ->check(whole_number(1))
      ->capture_default_str();
  command->add_option("--budget", options->tune.budget.seconds, "Seconds for a problem")
      ->check(positive_number())
      ->capture_default_str();
  command->add_option("--timing", options->tune.budget.timing_seconds, "Seconds of them for measuring")
      ->check(positive_number())
      ->capture_default_str();
  command->add_option("--jobs", options->tune.budget.jobs, "Threads that compile (default: one a CPU, up to 12)")
      ->check(whole_number());
  command->add_flag("--force", options->force, "Tune what is known too, and replace it");
  command->add_option("--output", options->output, "Also write the choices as a table to ship (cache/tuned/*.json)");
  command->add_flag("--explain", options->explain, "Print every candidate, its times, and why the winner won");
  command->add_flag("--oracle", options->oracle,
                    "Instead: measure what tuned choices lose against the best of many candidates");
  command->add_option("--most", options->most, "Candidates of the oracle")->capture_default_str();
  command->add_option("--repeat", options->repeat,
                      "Instead: tune so many times and count how often the choice differs");
  CLI::Option* carry = command->add_option("--carry", options->carry.from,
                                           "Instead, without a GPU: keep the rows of --table whose kernels have the "
                                           "same instructions as with the templates in this "
                                           "directory, which they were measured with");
  CLI::Option* table =
      command->add_option("--table", options->carry.table, "The table of --carry, replaced unless --output");
  carry->needs(table);
  table->needs(carry);
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options, exit_code] { *exit_code = tune_grid(*options); });
}

}  // namespace fa::cli
