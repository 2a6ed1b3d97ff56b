#include "tune/race.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fa::tune {
namespace {

constexpr double kErrors = 2;            // of the mean, on either side
constexpr double kMadToSigma = 1.4826;   // of normal noise
constexpr double kMedianError = 1.2533;  // of normal noise: the median's standard error, relative to the mean's
constexpr int kEnoughForError = 3;

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

}  // namespace

Race::Race(std::size_t candidates, RaceOptions options) : options_(options), runners_(candidates) {
  if (candidates < 2) over_ = true;
  start_round();
}

void Race::start_round() {
  order_.clear();
  position_ = 0;
  const std::size_t count = runners_.size();
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t candidate = (i + static_cast<std::size_t>(round_)) % count;
    if (runners_[candidate].active) order_.push_back(candidate);
  }
  if (round_ % 2 == 1) std::reverse(order_.begin(), order_.end());
  if (order_.size() < 2) over_ = true;
}

std::optional<std::size_t> Race::next() const {
  if (over_) return std::nullopt;
  return order_[position_];
}

void Race::add(double cost) {
  if (over_) return;
  const std::size_t candidate = order_[position_++];
  if (std::isfinite(cost) && cost > 0) {
    runners_[candidate].costs.push_back(cost);
  } else if (candidate == 0) {
    over_ = true;
    return;
  } else {
    runners_[candidate].active = false;
  }
  if (position_ == order_.size()) end_round();
}

void Race::drop(std::size_t candidate) {
  if (candidate == 0) {
    over_ = true;
    return;
  }
  runners_[candidate].active = false;
  if (position_ == 0) start_round();
}

void Race::end_round() {
  ++round_;
  const auto count_active = [this] {
    return std::ranges::count_if(runners_, [](const Runner& runner) { return runner.active; });
  };
  if (round_ >= options_.max_rounds || count_active() < 2) {
    over_ = true;
    return;
  }
  if (round_ >= options_.min_rounds) {
    const Standing first = standing(leader());
    bool confident = options_.confidence > 0;
    for (std::size_t i = 1; i < runners_.size(); ++i) {
      if (!runners_[i].active) continue;
      const Standing own = standing(i);
      const double behind = own.ratio - first.ratio;
      if (behind > options_.band + kErrors * (own.error + first.error)) {
        runners_[i].active = false;
      } else {
        confident = confident && own.error <= options_.confidence * options_.band;
      }
    }
    if (confident || count_active() < 2) {
      over_ = true;
      return;
    }
  }
  start_round();
}

Race::Standing Race::standing(std::size_t candidate) const {
  const Runner& runner = runners_[candidate];
  const Runner& base = runners_.front();
  Standing result;
  result.active = runner.active;
  // A round that is under way counts for those that the default has run with.
  const std::size_t rounds = std::min(runner.costs.size(), base.costs.size());
  result.rounds = static_cast<int>(rounds);
  if (rounds == 0) return result;
  result.cost = median(runner.costs);
  std::vector<double> ratios;
  for (std::size_t round = 0; round < rounds; ++round) ratios.push_back(runner.costs[round] / base.costs[round]);
  result.ratio = median(ratios);
  for (double& ratio : ratios) ratio = std::abs(ratio - result.ratio);
  result.error = rounds < kEnoughForError
                     ? options_.band
                     : kMedianError * kMadToSigma * median(ratios) / std::sqrt(static_cast<double>(rounds));
  if (candidate == 0) result.error = 0;
  return result;
}

std::size_t Race::leader() const {
  std::size_t best = 0;
  double least = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < runners_.size(); ++i) {
    const Standing own = standing(i);
    if (own.active && own.rounds > 0 && own.ratio < least) {
      least = own.ratio;
      best = i;
    }
  }
  return best;
}

std::size_t Race::best() const {
  const std::size_t first = leader();
  const Standing lead = standing(first);
  if (first == 0 || lead.ratio + kErrors * lead.error >= 1 - options_.band) return 0;
  for (std::size_t i = 1; i < runners_.size(); ++i) {
    const Standing own = standing(i);
    if (own.active && own.rounds > 0 && own.ratio <= lead.ratio + options_.band) return i;
  }
  return first;
}

}  // namespace fa::tune
