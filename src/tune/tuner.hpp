#ifndef FA_SRC_TUNE_TUNER_HPP_
#define FA_SRC_TUNE_TUNER_HPP_

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "tune/race.hpp"

namespace fa::tune {

/// What is tuned: numbered candidates, of which 0 is the default.
class Subject {
 public:
  virtual ~Subject() = default;
  /// Makes a candidate ready to run; called by several threads, once for each candidate. Returns why it cannot run;
  /// empty when it can.
  virtual std::string prepare(std::size_t candidate) = 0;
  /// Runs a prepared candidate once and compares what it computes with the default, which is checked first. Returns
  /// what is wrong; empty when nothing is.
  virtual std::string check(std::size_t candidate) = 0;
  /// Milliseconds of one run of a checked candidate.
  virtual double time(std::size_t candidate) = 0;
};

/// How long a decision may take. Compilations that have begun are finished, so `seconds` may be exceeded by one.
struct Budget {
  double seconds = 2;           ///< of everything
  double timing_seconds = 0.5;  ///< of that, of checks and measurements
  int jobs = 0;                 ///< threads that prepare; 0: one a CPU, up to 12
};

/// Threads that prepare candidates under `budget`.
unsigned threads_of(const Budget& budget);

/// What became of one candidate.
struct Result {
  std::string refusal;  ///< why it did not run; empty when it did
  int rounds = 0;
  double milliseconds = 0;  ///< median
  double ratio = 0;         ///< median of its times relative to the default's in the same round
  double error = 0;         ///< standard error of the ratio
  bool finished = true;     ///< false: it fell so far behind that it was left
};

struct Outcome {
  std::size_t winner = 0;
  std::vector<Result> results;
  std::string reason;  ///< why the winner won, in one sentence
  double prepare_seconds = 0;
  double timing_seconds = 0;
  int rounds = 0;
  bool complete = false;  ///< every candidate had its chance; else the budget ended first
};

/// Prepares candidates in parallel, checks them, and races those that are right. The winner is the default whenever
/// anything else cannot be shown to be better. `now` is a clock in seconds. Only what `subject` throws is thrown.
Outcome tune(Subject& subject, std::size_t candidates, const Budget& budget, const RaceOptions& options,
             const std::function<double()>& now);

}  // namespace fa::tune

#endif  // FA_SRC_TUNE_TUNER_HPP_
