#include "tune_report.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <sstream>

namespace fa::cli {
namespace {

std::vector<std::string> words(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> result;
  for (std::string word; stream >> word;) {
    result.push_back(word);
  }
  return result;
}

std::string difference_of_texts(const std::string& text, const std::string& from) {
  const std::vector<std::string> known = words(from);
  std::string result;
  for (const std::string& word : words(text)) {
    if (std::find(known.begin(), known.end(), word) == known.end()) {
      result += (result.empty() ? "" : " ") + word;
    }
  }
  return result.empty() ? "the default" : result;
}

std::string state_of(const tune::Result& result) {
  if (!result.refusal.empty()) {
    return result.refusal.substr(0, result.refusal.find('\n')).substr(0, 100);
  }
  return result.finished ? "" : "left behind";
}

std::size_t index_of(const api::TuneReport& report, const std::string& kernel) {
  for (std::size_t i = 0; i < report.specs.size(); ++i) {
    if (canonical(report.specs[i]) == kernel) {
      return i;
    }
  }
  return report.specs.size();
}

double percent(double fraction) {
  return 100 * fraction;
}

}  // namespace

std::string difference(const plan::KernelSpec& spec, const plan::KernelSpec& from) {
  return difference_of_texts(canonical(spec), canonical(from));
}

void print_explanation(const BenchProblem& problem, const api::TuneReport& report) {
  const tune::Outcome& outcome = report.outcome;
  fmt::print("{}\n  default: {}\n", problem.text(), canonical(report.specs.front()));
  std::vector<std::size_t> order(report.specs.size());
  std::iota(order.begin(), order.end(), 0);
  const auto rank = [&](std::size_t i) {
    const tune::Result& result = outcome.results[i];
    return result.rounds > 0 ? result.ratio : std::numeric_limits<double>::infinity();
  };
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return rank(a) < rank(b); });
  for (const std::size_t i : order) {
    const tune::Result& result = outcome.results[i];
    const std::string mark = i == outcome.winner ? "*" : " ";
    const std::string name = difference(report.specs[i], report.specs.front());
    if (result.rounds == 0) {
      fmt::print("  {}                                        {}  ({})\n", mark, name, state_of(result));
    } else {
      fmt::print("  {} {:>9.4f} ms {:>7.2f} % +- {:<5.2f} {:>3} rounds  {}{}\n", mark, result.milliseconds,
                 percent(result.ratio), percent(result.error), result.rounds, name,
                 result.finished ? "" : "  (left behind)");
    }
  }
  fmt::print("  {}; {:.2f} s compiling and loading, {:.2f} s measuring{}\n\n", outcome.reason, outcome.prepare_seconds,
             outcome.timing_seconds, outcome.complete ? "" : ", and the time was up");
}

nlohmann::json to_json(const BenchProblem& problem, const api::TuneReport& report) {
  nlohmann::json candidates = nlohmann::json::array();
  for (std::size_t i = 0; i < report.specs.size(); ++i) {
    const tune::Result& result = report.outcome.results[i];
    candidates.push_back({{"kernel", canonical(report.specs[i])},
                          {"refusal", result.refusal},
                          {"ms", result.milliseconds},
                          {"ratio", result.ratio},
                          {"error", result.error},
                          {"rounds", result.rounds}});
  }
  return {{"problem", problem.text()},
          {"bucket", report.key.problem},
          {"winner", canonical(report.specs[report.outcome.winner])},
          {"kernel", report.kernel},
          {"reason", report.outcome.reason},
          {"seconds", report.seconds},
          {"prepare_seconds", report.outcome.prepare_seconds},
          {"timing_seconds", report.outcome.timing_seconds},
          {"complete", report.outcome.complete},
          {"candidates", candidates}};
}

Regret regret_of(const BenchProblem& problem, const api::TuneReport& oracle, const std::string& tuned) {
  Regret regret;
  regret.problem = problem.text();
  double best = 1;
  std::size_t best_index = 0;
  for (std::size_t i = 0; i < oracle.specs.size(); ++i) {
    const tune::Result& result = oracle.outcome.results[i];
    regret.candidates += result.rounds > 0 ? 1 : 0;
    if (result.rounds > 0 && result.finished && result.ratio < best) {
      best = result.ratio;
      best_index = i;
    }
  }
  const std::size_t chosen = index_of(oracle, tuned);
  const bool measured = chosen < oracle.specs.size() && oracle.outcome.results[chosen].rounds > 0;
  const bool alone = chosen == 0 && oracle.specs.size() == 1;  // nothing to compare it with
  const double ratio = measured ? oracle.outcome.results[chosen].ratio
                       : alone  ? 1.
                                : std::numeric_limits<double>::quiet_NaN();
  regret.of_tuned = ratio / best - 1;
  regret.of_default = 1 / best - 1;
  regret.over_default = ratio - 1;
  regret.error = measured ? oracle.outcome.results[chosen].error : 0;
  regret.best = difference(oracle.specs[best_index], oracle.specs.front());
  return regret;
}

void print_regrets(const std::vector<Regret>& regrets) {
  if (regrets.empty()) {
    return;
  }
  fmt::print("{:<58} {:>5} {:>8} {:>8} {:>10}  {}\n", "problem", "tried", "tuned %", "deflt %", "t/d - 1 %",
             "the oracle's choice");
  double tuned = 0;
  double planned = 0;
  double worst = 0;
  for (const Regret& regret : regrets) {
    fmt::print("{:<58} {:>5} {:>8.2f} {:>8.2f} {:>10.2f}  {}\n", regret.problem, regret.candidates,
               percent(regret.of_tuned), percent(regret.of_default), percent(regret.over_default), regret.best);
    tuned += regret.of_tuned;
    planned += regret.of_default;
    worst = std::max(worst, regret.over_default - 2 * regret.error);
  }
  const auto count = static_cast<double>(regrets.size());
  fmt::print(
      "\nmean regret over {} problems: tuned {:.2f} %, default {:.2f} %; tuned slower than the default by at most "
      "{:.2f} % beyond twice the error\n",
      regrets.size(), percent(tuned / count), percent(planned / count), percent(worst));
}

Flips flips_of(const BenchProblem& problem, const std::vector<api::TuneReport>& reports) {
  std::map<std::string, int> counts;
  for (const api::TuneReport& report : reports) {
    ++counts[difference(report.specs[report.outcome.winner], report.specs.front())];
  }
  Flips flips;
  flips.problem = problem.text();
  flips.runs = static_cast<int>(reports.size());
  int most = 0;
  for (const auto& [choice, count] : counts) {
    most = std::max(most, count);
    flips.choices.push_back(fmt::format("{} x {}", count, choice));
  }
  flips.flips = flips.runs - most;
  return flips;
}

void print_flips(const std::vector<Flips>& flips) {
  int runs = 0;
  int changed = 0;
  for (const Flips& item : flips) {
    fmt::print("{:<58} {:>3} of {:>3} flip   {}\n", item.problem, item.flips, item.runs,
               fmt::join(item.choices, ";  "));
    runs += item.runs;
    changed += item.flips;
  }
  if (runs > 0) {
    fmt::print("\n{} of {} choices flip: {:.1f} %\n", changed, runs, 100.0 * changed / runs);
  }
}

}  // namespace fa::cli
