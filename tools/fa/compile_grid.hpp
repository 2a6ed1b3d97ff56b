#ifndef FA_TOOLS_FA_COMPILE_GRID_HPP_
#define FA_TOOLS_FA_COMPILE_GRID_HPP_

#include <functional>
#include <set>
#include <string>
#include <vector>

#include <fa/attention.hpp>

#include "api/build.hpp"
#include "cache/store.hpp"
#include "plan_options.hpp"

namespace CLI {
class App;
}

namespace fa::cli {

/// The product of these is what `fa compile` and `fa pack` go through.
struct Grid {
  std::vector<std::string> archs;  ///< empty: the GPU's, else sm_90a
  std::vector<DType> dtypes;
  std::vector<int> head_dims;
  std::vector<bool> causal{false, true};
  std::vector<PlanOptions> problems;  ///< every other fact
};

void add_grid_options(CLI::App& command, Grid* grid);

/// One kernel with its alternatives, and what became of it.
struct Job {
  plan::Alternatives specs;
  cache::Lookup lookup;
  std::vector<cache::Lookup> passed_over;  ///< kernels that spill and were tried before it
  std::string problem;                     ///< empty when it is in the cache now
};

/// Kernels that several points of the grid share appear once. Throws fa::Error: invalid_argument, unsupported.
std::vector<Job> make_jobs(const Grid& grid);

/// Likewise of what programs recorded (FA_RECORD), with the kernels around those that another compiler may prefer.
std::vector<Job> make_jobs(const std::vector<std::string>& recordings);

/// Likewise of kernels by their canonical texts. Throws fa::Error(invalid_argument).
std::vector<Job> jobs_of_specs(const std::vector<std::string>& specs);

/// Where option `source` says everything that a grid would: refuses options that are neither it nor of `beside`. Throws
/// fa::Error(invalid_argument).
void check_nothing_beside(const CLI::App& command, const std::string& source, std::set<std::string> beside);

/// Looks every job up, compiling what is missing on up to `threads` threads (0: one a CPU), and calls `done` for one at
/// a time.
void run_jobs(cache::Store& store, const api::Supply& supply, int threads, std::vector<Job>* jobs,
              const std::function<void(const Job&)>& done);

std::size_t count_failed(const std::vector<Job>& jobs);

/// One line about a finished job.
std::string describe(const Job& job);

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_COMPILE_GRID_HPP_
