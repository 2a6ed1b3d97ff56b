#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "api/build.hpp"
#include "cache/store.hpp"
#include "commands.hpp"
#include "options.hpp"
#include "parallel.hpp"
#include "plan/arch.hpp"
#include "plan_options.hpp"
#include "terminal.hpp"

namespace fa::cli {
namespace {

struct CompileOptions {
  std::vector<std::string> archs;
  std::vector<DType> dtypes{DType::bf16};
  std::vector<int> head_dims{64, 128};
  std::vector<bool> causal{false, true};
  PlanOptions plan;
  std::string directory;
  int jobs = 0;
  bool json = false;
};

/// One kernel and what became of it.
struct Job {
  plan::ForwardPlan plan;
  cache::Lookup lookup;
  std::string problem;  ///< empty when it is in the cache now
};

/// Kernels that several points share appear once.
void add_jobs(const std::vector<plan::ForwardPlan>& plans, std::vector<Job>* jobs) {
  for (const plan::ForwardPlan& plan : plans) {
    if (std::none_of(jobs->begin(), jobs->end(), [&](const Job& job) { return job.plan.kernel == plan.kernel; })) {
      jobs->push_back({plan, {}, {}});
    }
  }
}

std::vector<Job> make_jobs(const CompileOptions& options) {
  std::vector<plan::Arch> archs;
  for (const std::string& name : options.archs) {
    archs.push_back(plan::parse_arch(name));
  }
  if (archs.empty()) {
    archs.push_back(default_arch());
  }
  std::vector<Job> jobs;
  for (const plan::Arch arch : archs) {
    for (const DType dtype : options.dtypes) {
      for (const int head_dim : options.head_dims) {
        for (const bool causal : options.causal) {
          add_jobs(plan_kernels(options.plan, {arch, dtype, head_dim, causal}), &jobs);
        }
      }
    }
  }
  return jobs;
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

void build(cache::Store& store, Job* job) {
  try {
    job->lookup = api::choose_kernel(job->plan, store, CompilePolicy::allow).lookup;
  } catch (const Error& error) {
    job->problem = std::string(error.what()) + "\n" + head(error.field("log"));
  } catch (const std::exception& exception) {
    job->problem = exception.what();
  }
}

const char* origin_name(cache::Origin origin) {
  return origin == cache::Origin::built ? "compiled" : "cached";
}

void print_job(const Job& job) {
  if (!job.problem.empty()) {
    fmt::print("failed   {}\n{}\n", canonical(job.plan.kernel), job.problem);
    return;
  }
  const cache::Entry& entry = *job.lookup.entry;
  fmt::print("{:<8} {:>7.0f} ms {:>4} registers {:>4} bytes local  {}\n", origin_name(job.lookup.origin),
             entry.compile_ms, entry.registers, entry.local_bytes, entry.key.spec);
  std::fflush(stdout);
}

nlohmann::json to_json(const Job& job) {
  if (!job.problem.empty()) {
    return {{"spec", canonical(job.plan.kernel)}, {"error", job.problem}};
  }
  const cache::Entry& entry = *job.lookup.entry;
  return {{"spec", entry.key.spec},
          {"kernel", entry.kernel_name},
          {"digest", entry.key.digest()},
          {"origin", origin_name(job.lookup.origin)},
          {"compiler", entry.compiler},
          {"compile_ms", entry.compile_ms},
          {"registers", entry.registers},
          {"local_bytes", entry.local_bytes},
          {"shared_bytes", entry.shared_bytes},
          {"threads", entry.threads},
          {"cubin_bytes", entry.cubin.size()}};
}

void build_all(const CompileOptions& options, cache::Store& store, std::vector<Job>* jobs) {
  std::mutex mutex;
  std::size_t done = 0;
  parallel_for(jobs->size(), options.jobs, [&](std::size_t i) {
    Job& job = (*jobs)[i];
    build(store, &job);
    const std::lock_guard lock(mutex);
    clear_progress();
    if (!options.json) {
      print_job(job);
    }
    show_progress(fmt::format("{} of {}", ++done, jobs->size()));
  });
  clear_progress();
}

int report(const CompileOptions& options, const cache::Store& store, const std::vector<Job>& jobs) {
  const auto failed = std::count_if(jobs.begin(), jobs.end(), [](const Job& job) { return !job.problem.empty(); });
  const std::string directory = store.directory().empty() ? "memory only" : store.directory().string();
  if (options.json) {
    nlohmann::json kernels = nlohmann::json::array();
    for (const Job& job : jobs) {
      kernels.push_back(to_json(job));
    }
    print_json({{"directory", directory}, {"kernels", kernels}});
  } else {
    fmt::print("{} kernels in {}, {} failed\n", static_cast<std::ptrdiff_t>(jobs.size()) - failed, directory, failed);
  }
  return failed == 0 ? kSuccess : kFailure;
}

int compile(const CompileOptions& options) {
  std::vector<Job> jobs = make_jobs(options);
  CachePolicy policy;
  policy.directory = options.directory;
  const std::shared_ptr<cache::Store> store = api::open_store(policy);
  build_all(options, *store, &jobs);
  return report(options, *store, jobs);
}

}  // namespace

void add_compile(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand("compile", "Compile kernels into the cache; needs no GPU");
  const auto options = std::make_shared<CompileOptions>();
  command->add_option("--arch", options->archs, "Targets, as sm_90a,sm_80 (default: the GPU's, else sm_90a)")
      ->delimiter(',');
  add_dtype_list_option(*command, &options->dtypes);
  command->add_option("--head-dim", options->head_dims, "d_qk, a list (default: 64,128)")->delimiter(',');
  add_causal_list_option(*command, &options->causal);
  command->add_option("--directory", options->directory, "Instead of the default cache directory");
  command->add_option("--jobs", options->jobs, "Threads that compile (default: one a CPU)");
  command->add_flag("--json", options->json, "Print JSON");
  add_plan_options(*command, &options->plan);
  command->callback([options, exit_code] { *exit_code = compile(*options); });
}

}  // namespace fa::cli
