#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <memory>
#include <string>
#include <vector>

#include "api/build.hpp"
#include "cache/store.hpp"
#include "choice.hpp"
#include "commands.hpp"
#include "compile_grid.hpp"
#include "plan_options.hpp"
#include "terminal.hpp"

namespace fa::cli {
namespace {

struct CompileOptions {
  Grid grid{.archs = {}, .dtypes = {DType::bf16}, .head_dims = {64, 128}, .causal = {false, true}, .problems = {}};
  PlanOptions plan;
  std::vector<std::string> specs;
  std::string directory;
  int jobs = 0;
  bool json = false;
  bool dry_run = false;
  bool keep_source = false;
};

nlohmann::json to_json(const Job& job) {
  if (!job.problem.empty()) {
    return {{"spec", canonical(job.specs.front())}, {"error", job.problem}};
  }
  const cache::Entry& entry = *job.lookup.entry;
  return {{"spec", entry.key.spec},
          {"kernel", entry.kernel_name},
          {"digest", entry.key.digest()},
          {"origin", job.lookup.origin == cache::Origin::built ? "compiled" : "cached"},
          {"compiler", entry.compiler},
          {"compile_ms", entry.compile_ms},
          {"registers", entry.registers},
          {"local_bytes", entry.local_bytes},
          {"shared_bytes", entry.shared_bytes},
          {"threads", entry.threads},
          {"cubin_bytes", entry.cubin.size()}};
}

int report(const CompileOptions& options, const cache::Store& store, const std::vector<Job>& jobs) {
  const std::size_t failed = count_failed(jobs);
  const std::uint64_t lost = store.counters().publish_failures;
  const std::string directory = store.directory().string();
  if (options.json) {
    nlohmann::json kernels = nlohmann::json::array();
    for (const Job& job : jobs) {
      kernels.push_back(to_json(job));
    }
    print_json({{"directory", directory}, {"not_stored", lost}, {"kernels", kernels}});
  } else {
    fmt::print("{} kernels in {}, {} failed{}\n", jobs.size() - failed, directory, failed,
               lost == 0 ? "" : fmt::format(", {} could not be stored", lost));
  }
  return failed == 0 && lost == 0 ? kSuccess : kFailure;
}

/// The first choices; which alternatives are needed besides, only the compiler can say.
int print_plan(const std::vector<Job>& jobs, bool json) {
  if (json) {
    nlohmann::json kernels = nlohmann::json::array();
    for (const Job& job : jobs) {
      kernels.push_back({{"spec", canonical(job.specs.front())}});
    }
    print_json({{"kernels", kernels}});
    return kSuccess;
  }
  for (const Job& job : jobs) {
    fmt::print("{}\n", canonical(job.specs.front()));
  }
  return kSuccess;
}

int compile(CompileOptions options) {
  options.grid.problems = {options.plan};
  std::vector<Job> jobs = options.specs.empty() ? make_jobs(options.grid) : jobs_of_specs(options.specs);
  if (options.dry_run) {
    return print_plan(jobs, options.json);
  }
  CachePolicy policy;
  policy.directory = options.directory;
  const std::shared_ptr<cache::Store> store = api::open_store(policy);
  if (store->directory().empty()) {
    throw Error(ErrorCode::io, "there is no cache directory that compiled kernels could be stored in",
                {{"argument", "directory"}, {"value", options.directory}});
  }
  api::Supply supply(CompilePolicy::allow);
  supply.keep_source = options.keep_source;
  run_jobs(*store, supply, options.jobs, &jobs, [&options](const Job& job) {
    if (!options.json) {
      fmt::print("{}\n", describe(job));
      std::fflush(stdout);
    }
  });
  return report(options, *store, jobs);
}

}  // namespace

void add_compile(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand("compile", "Compile kernels into the cache; needs no GPU");
  const auto options = std::make_shared<CompileOptions>();
  add_grid_options(*command, &options->grid);
  command
      ->add_option("--spec", options->specs,
                   "Instead of a grid: a kernel, as an error names it and --dry-run prints it; may be given again")
      ->allow_extra_args(false);
  command->add_option("--directory", options->directory, "Instead of the default cache directory");
  command->add_option("--jobs", options->jobs, "Threads that compile (default: one a CPU)")->check(whole_number());
  command->add_flag("--keep-source", options->keep_source, "Put the source of each kernel beside it");
  command->add_flag("--dry-run", options->dry_run, "Only print the kernels");
  command->add_flag("--json", options->json, "Print JSON");
  add_plan_options(*command, &options->plan);
  command->callback([command, options, exit_code] {
    if (!options->specs.empty()) {
      check_nothing_beside(*command, "spec", {"directory", "jobs", "keep-source", "dry-run", "json"});
    }
    *exit_code = compile(*options);
  });
}

}  // namespace fa::cli
