#include "compile_grid.hpp"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <mutex>
#include <string_view>

#include "api/recording.hpp"
#include "choice.hpp"
#include "options.hpp"
#include "parallel.hpp"
#include "plan/arch.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/parse_spec.hpp"
#include "plan/planner.hpp"
#include "plan/schedule.hpp"
#include "terminal.hpp"

namespace fa::cli {
namespace {

void add_jobs(const std::vector<plan::Alternatives>& kernels, std::vector<Job>* jobs) {
  for (const plan::Alternatives& specs : kernels) {
    if (std::none_of(jobs->begin(), jobs->end(), [&](const Job& job) { return job.specs == specs; })) {
      jobs->push_back({specs, {}, {}, {}});
    }
  }
}

/// What runs in front of an attention kernel whose spec says that.
std::vector<plan::Alternatives> around(const plan::KernelSpec& spec) {
  std::vector<plan::Alternatives> kernels;
  if (plan::reads_tile_lists(spec.op()) && !spec.variants.mask.empty())
    kernels.push_back({plan::mask_tiles_spec(spec)});
  if (spec.affine_reach()) kernels.push_back({plan::row_norms_spec(spec)});
  if (spec.scheduled()) kernels.push_back({plan::schedule_spec(spec)});
  return kernels;
}

/// The first lines of what the compiler said; the rest mostly follows from them.
std::string head(std::string_view log) {
  constexpr int kLines = 12;
  std::size_t end = 0;
  for (int line = 0; line < kLines && end < log.size(); ++line) {
    end = std::min(log.find('\n', end), log.size() - 1) + 1;
  }
  return std::string(log.substr(0, end)) + (end < log.size() ? "...\n" : "");
}

/// Spilling kernels that were looked at before the one that was chosen: a program with the same plan looks at them too.
std::vector<cache::Lookup> looked_at_before(const api::ChosenKernel& chosen, const plan::Alternatives& specs,
                                            cache::Store& store) {
  std::vector<cache::Lookup> lookups;
  for (const plan::KernelSpec& spec : specs) {
    const bool last = chosen.lookup.entry->local_bytes == 0 && spec == chosen.spec;
    if (last) break;
    cache::Lookup lookup = store.get(api::cache_key(spec), nullptr);
    if (lookup.entry && spec != chosen.spec) lookups.push_back(std::move(lookup));
  }
  return lookups;
}

void run_job(cache::Store& store, api::Supply supply, Job* job) {
  supply.exact = true;  // a grid names its targets
  try {
    api::ChosenKernel chosen = api::choose_kernel(job->specs, store, supply);
    job->passed_over = looked_at_before(chosen, job->specs, store);
    job->lookup = std::move(chosen.lookup);
  } catch (const Error& error) {
    job->problem = std::string(error.what()) + "\n" + head(error.field("log"));
  } catch (const std::exception& exception) {
    job->problem = exception.what();
  }
}

}  // namespace

void add_grid_options(CLI::App& command, Grid* grid) {
  command.add_option("--arch", grid->archs, "Targets, as sm_90a,sm_80 (default: the GPU's, else sm_90a)")
      ->delimiter(',');
  add_dtype_list_option(command, &grid->dtypes);
  command.add_option("--head-dim", grid->head_dims, "d_qk, a list")
      ->delimiter(',')
      ->check(whole_number(1))
      ->capture_default_str();
  add_causal_list_option(command, &grid->causal);
}

std::vector<Job> make_jobs(const Grid& grid) {
  std::vector<plan::Arch> archs;
  for (const std::string& name : grid.archs) {
    archs.push_back(plan::parse_target(name));
  }
  if (archs.empty()) {
    archs.push_back(default_arch());
  }
  std::vector<Job> jobs;
  for (const plan::Arch arch : archs) {
    for (const DType dtype : grid.dtypes) {
      for (const int head_dim : grid.head_dims) {
        for (const bool causal : grid.causal) {
          for (const PlanOptions& problem : grid.problems) {
            add_jobs(plan_kernels(problem, {arch, dtype, head_dim, causal}), &jobs);
          }
        }
      }
    }
  }
  return jobs;
}

std::vector<Job> make_jobs(const std::vector<std::string>& recordings) {
  std::vector<Job> jobs;
  for (const std::string& file : recordings) {
    const std::vector<plan::Alternatives> requests = api::read_recording(file);
    for (const plan::Alternatives& specs : requests) {
      for (const plan::KernelSpec& spec : specs) add_jobs(around(spec), &jobs);
    }
    add_jobs(requests, &jobs);
  }
  return jobs;
}

std::vector<Job> jobs_of_specs(const std::vector<std::string>& specs) {
  std::vector<Job> jobs;
  for (const std::string& spec : specs) add_jobs({{plan::parse_spec(spec)}}, &jobs);
  return jobs;
}

void check_nothing_beside(const CLI::App& command, const std::string& source, std::set<std::string> beside) {
  beside.insert({source, "help"});
  for (const CLI::Option* option : command.get_options()) {
    const std::string name = option->get_lnames().empty() ? option->get_name() : option->get_lnames().front();
    if (option->count() == 0 || beside.contains(name)) continue;
    throw Error(ErrorCode::invalid_argument, fmt::format("--{}: accepted is nothing with --{}", name, source),
                {{"argument", name}, {"accepted", "nothing"}});
  }
}

void run_jobs(cache::Store& store, const api::Supply& supply, int threads, std::vector<Job>* jobs,
              const std::function<void(const Job&)>& done) {
  std::mutex mutex;
  std::size_t finished = 0;
  parallel_for(jobs->size(), threads, [&](std::size_t i) {
    Job& job = (*jobs)[i];
    run_job(store, supply, &job);
    const std::lock_guard lock(mutex);
    clear_progress();
    done(job);
    show_progress(fmt::format("{} of {}", ++finished, jobs->size()));
  });
  clear_progress();
}

std::size_t count_failed(const std::vector<Job>& jobs) {
  return static_cast<std::size_t>(
      std::count_if(jobs.begin(), jobs.end(), [](const Job& job) { return !job.problem.empty(); }));
}

std::string describe(const Job& job) {
  if (!job.problem.empty()) {
    return fmt::format("failed   {}\n{}", canonical(job.specs.front()), job.problem);
  }
  const cache::Entry& entry = *job.lookup.entry;
  return fmt::format("{:<8} {:>7.0f} ms {:>4} registers {:>4} bytes local  {}",
                     job.lookup.origin == cache::Origin::built ? "compiled" : "cached", entry.compile_ms,
                     entry.registers, entry.local_bytes, entry.key.spec);
}

}  // namespace fa::cli
