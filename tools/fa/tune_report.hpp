#ifndef FA_TOOLS_FA_TUNE_REPORT_HPP_
#define FA_TOOLS_FA_TUNE_REPORT_HPP_

#include <nlohmann/json.hpp>

#include <string>
#include <vector>

#include "api/tuning.hpp"
#include "bench_problem.hpp"

namespace fa::cli {

/// "tile_m=128 tile_n=96 stages=2 ...": what tells a candidate from the default of its problem.
std::string difference(const plan::KernelSpec& spec, const plan::KernelSpec& from);

/// Every candidate with its times, fastest first, and why the winner won.
void print_explanation(const BenchProblem& problem, const api::TuneReport& report);
nlohmann::json to_json(const BenchProblem& problem, const api::TuneReport& report);

/// How far a tuned choice is from the best of many candidates, all measured in one race.
struct Regret {
  std::string problem;
  std::size_t candidates = 0;
  double of_tuned = 0;      ///< time over the oracle's best, minus 1
  double of_default = 0;    ///< likewise
  double over_default = 0;  ///< of the tuned choice: time over the default's, minus 1
  double error = 0;         ///< standard error of over_default
  std::string best;         ///< the oracle's kernel, as a difference from the default
};
Regret regret_of(const BenchProblem& problem, const api::TuneReport& oracle, const std::string& tuned);
void print_regrets(const std::vector<Regret>& regrets);

/// How often repeated decisions agree.
struct Flips {
  std::string problem;
  int runs = 0;
  int flips = 0;  ///< that did not choose what most chose
  std::vector<std::string> choices;
};
Flips flips_of(const BenchProblem& problem, const std::vector<api::TuneReport>& reports);
void print_flips(const std::vector<Flips>& flips);

}  // namespace fa::cli

#endif  // FA_TOOLS_FA_TUNE_REPORT_HPP_
