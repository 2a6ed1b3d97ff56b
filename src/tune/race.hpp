#ifndef FA_SRC_TUNE_RACE_HPP_
#define FA_SRC_TUNE_RACE_HPP_

#include <cstddef>
#include <optional>
#include <vector>

namespace fa::tune {

struct RaceOptions {
  int min_rounds = 5;
  int max_rounds = 24;
  /// The noise band: a candidate that is better by less is not better. Repeated on an H200, medians of a few rounds
  /// agree to some tenths of a percent; kernels that differ by less than this are a matter of taste.
  double band = 0.015;
  /// The race ends early when all errors are below this part of the band; 0: never.
  double confidence = 0.25;
};

/// Finds the cheapest of several candidates from noisy costs. It knows no clock and no GPU: it says which candidate to
/// measure next, is told the cost, and can name its best at any time.
///
/// Rounds. In a round every candidate still in the race is measured once; the order changes from round to round, so
/// that nobody always runs behind the same neighbour. Costs are compared inside a round only, as ratios to candidate 0,
/// the default: a clock that drifts, or a GPU that another process shares, moves all costs of a round alike and
/// cancels.
///
/// Estimate. The median of a candidate's ratios: an interrupted measurement is an outlier that a median does not see.
/// Its standard error follows from the median absolute deviation, as for normal noise.
///
/// Elimination. From `min_rounds` on, who is behind the leader by more than the band, twice both errors added, cannot
/// win any more and goes. The race ends when the errors of all that are left are small beside the band.
///
/// Decision. The default stays unless the leader beats it by more than the band, twice its error added. Else the winner
/// is the candidate with the lowest number among those within the band of the leader: a fixed choice between equals,
/// where the cheapest would be a coin that falls differently every time.
class Race {
 public:
  /// Candidate 0 is the default; the others are in order of preference.
  explicit Race(std::size_t candidates, RaceOptions options = {});

  /// Whom to measure; nullopt when the race is over.
  std::optional<std::size_t> next() const;

  /// The cost of `next()`, in any unit. One that is not positive and finite takes the candidate out of the race; the
  /// default's ends it.
  void add(double cost);

  /// Takes a candidate out before it has run.
  void drop(std::size_t candidate);

  /// The winner, as far as costs are known: the default before anything is.
  std::size_t best() const;

  struct Standing {
    int rounds = 0;
    double ratio = 0;  ///< to the default; 0 without rounds
    double error = 0;  ///< standard error of the ratio
    double cost = 0;   ///< median
    bool active = true;
  };
  Standing standing(std::size_t candidate) const;
  int rounds() const noexcept { return round_; }  ///< that are complete

 private:
  struct Runner {
    std::vector<double> costs;  ///< by round, as long as it was in the race
    bool active = true;
  };
  void start_round();
  void end_round();
  std::size_t leader() const;

  RaceOptions options_;
  std::vector<Runner> runners_;
  std::vector<std::size_t> order_;  ///< of the round that is under way
  std::size_t position_ = 0;
  int round_ = 0;
  bool over_ = false;
};

}  // namespace fa::tune

#endif  // FA_SRC_TUNE_RACE_HPP_
