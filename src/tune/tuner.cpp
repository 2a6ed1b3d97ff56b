#include "tune/tuner.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

namespace fa::tune {
namespace {

constexpr unsigned kMostJobs = 12;

class Tuner {
 public:
  Tuner(Subject& subject, std::size_t candidates, const Budget& budget, const RaceOptions& options,
        const std::function<double()>& now)
      : subject_(subject), budget_(budget), options_(options), now_(now), start_(now()) {
    outcome_.results.resize(candidates);
  }

  Outcome run() && {
    prepare();
    outcome_.prepare_seconds = now_() - start_;
    const double begin = now_();
    Race race(outcome_.results.size(), options_);
    if (check(&race, begin)) measure(&race, begin);
    outcome_.timing_seconds = now_() - begin;
    conclude(race);
    return std::move(outcome_);
  }

 private:
  bool late(double deadline) const { return now_() >= deadline; }

  /// Candidates are in order of preference: what the time is too short for are the last ones.
  void prepare() {
    const std::size_t count = outcome_.results.size();
    const double deadline = start_ + budget_.seconds - budget_.timing_seconds;
    std::atomic<std::size_t> next{0};
    std::mutex mutex;
    std::exception_ptr failure;
    const auto work = [&] {
      for (std::size_t i = next++; i < count; i = next++) {
        std::string& refusal = outcome_.results[i].refusal;
        try {
          refusal = i > 0 && late(deadline) ? kNoTime : subject_.prepare(i);
        } catch (...) {
          const std::scoped_lock lock(mutex);
          failure = std::current_exception();
          next = count;
        }
      }
    };
    const unsigned wanted = threads_of(budget_);
    {
      std::vector<std::jthread> helpers;
      for (std::size_t i = 1; i < std::min<std::size_t>(wanted, count); ++i) helpers.emplace_back(work);
      work();
    }
    if (failure) std::rethrow_exception(failure);
  }

  /// False when the default itself is not right.
  bool check(Race* race, double begin) {
    for (std::size_t i = 0; i < outcome_.results.size(); ++i) {
      std::string& refusal = outcome_.results[i].refusal;
      if (refusal.empty()) {
        // Half of the time is for measuring what has been checked.
        refusal = i > 0 && late(begin + budget_.timing_seconds / 2) ? kNoTime : subject_.check(i);
      }
      if (refusal.empty()) continue;
      race->drop(i);
      if (i == 0) return false;
    }
    return true;
  }

  void measure(Race* race, double begin) {
    while (const std::optional<std::size_t> candidate = race->next()) {
      if (late(begin + budget_.timing_seconds)) {
        timed_out_ = true;
        return;
      }
      race->add(subject_.time(*candidate));
    }
  }

  void conclude(const Race& race) {
    for (std::size_t i = 0; i < outcome_.results.size(); ++i) {
      const Race::Standing standing = race.standing(i);
      Result& result = outcome_.results[i];
      result.rounds = standing.rounds;
      result.milliseconds = standing.cost;
      result.ratio = standing.ratio;
      result.error = standing.error;
      result.finished = standing.active;
      if (result.refusal == kNoTime) timed_out_ = true;
    }
    outcome_.rounds = race.rounds();
    outcome_.complete = !timed_out_;
    outcome_.winner = race.best();
    outcome_.reason = reason();
  }

  std::string reason() const {
    const Result& winner = outcome_.results[outcome_.winner];
    const auto ran = std::ranges::count_if(outcome_.results, [](const Result& r) { return r.rounds > 0; });
    if (!outcome_.results.front().refusal.empty()) {
      return fmt::format("the default stays: {}", outcome_.results.front().refusal);
    }
    if (ran < 2) return "the default stays: nothing else ran";
    const double band = 100 * options_.band;
    if (outcome_.winner == 0) {
      return fmt::format("the default stays: none of {} others is better by more than {:.1f} %", ran - 1, band);
    }
    const Result* best = &winner;
    for (const Result& result : outcome_.results) {
      if (result.finished && result.rounds > 0 && result.ratio < best->ratio) best = &result;
    }
    const double gain = 100 * (1 - winner.ratio);
    if (best == &winner) return fmt::format("the fastest of {}, {:.1f} % faster than the default", ran, gain);
    return fmt::format(
        "{:.1f} % faster than the default; the fastest of {} gains {:.1f} % more, less than the noise band of "
        "{:.1f} %, and comes later in the order of the cost model",
        gain, ran, 100 * (winner.ratio - best->ratio), band);
  }

  static constexpr const char* kNoTime = "the time was too short";

  Subject& subject_;
  const Budget& budget_;
  const RaceOptions& options_;
  const std::function<double()>& now_;
  double start_;
  bool timed_out_ = false;
  Outcome outcome_;
};

}  // namespace

unsigned threads_of(const Budget& budget) {
  if (budget.jobs > 0) return static_cast<unsigned>(budget.jobs);
  return std::min(std::max(std::thread::hardware_concurrency(), 1U), kMostJobs);
}

Outcome tune(Subject& subject, std::size_t candidates, const Budget& budget, const RaceOptions& options,
             const std::function<double()>& now) {
  return Tuner(subject, candidates, budget, options, now).run();
}

}  // namespace fa::tune
