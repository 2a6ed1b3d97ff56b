// The race with costs from a generator: noise, drift, outliers.

#include "tune/race.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <vector>

namespace fa::tune {
namespace {

/// A GPU as a tuner meets it: noise of each measurement, a clock that drifts by a tenth, and every fiftieth measurement
/// interrupted.
class Machine {
 public:
  Machine(std::vector<double> costs, unsigned seed, double noise = 0.004) : costs_(std::move(costs)), random_(seed) {
    noise_ = std::normal_distribution<double>(1, noise);
  }
  double measure(std::size_t candidate) {
    ++measured_[candidate];
    const double drift = 1 + 0.1 * std::sin(0.02 * calls_++);
    const double interruption = std::uniform_int_distribution<int>(0, 49)(random_) == 0 ? 1.5 : 1;
    return costs_[candidate] * drift * noise_(random_) * interruption;
  }
  int measured(std::size_t candidate) { return measured_[candidate]; }
  int calls() const { return calls_; }

 private:
  std::vector<double> costs_;
  std::mt19937 random_;
  std::normal_distribution<double> noise_;
  std::map<std::size_t, int> measured_;
  int calls_ = 0;
};

std::size_t run(Race& race, Machine& machine) {
  while (const auto candidate = race.next()) race.add(machine.measure(*candidate));
  return race.best();
}

std::size_t winner(const std::vector<double>& costs, unsigned seed) {
  Race race(costs.size());
  Machine machine(costs, seed);
  return run(race, machine);
}

TEST(Race, FindsWhatIsClearlyFastest) {
  for (unsigned seed = 0; seed < 200; ++seed) EXPECT_EQ(winner({1.0, 1.2, 0.9, 1.1, 0.97}, seed), 2U) << seed;
}

TEST(Race, TheDefaultStaysAgainstWhatIsNotBetterByMoreThanTheBand) {
  int changed = 0;
  for (unsigned seed = 0; seed < 200; ++seed) {
    changed += winner({1.0, 0.995, 0.993, 1.0, 1.001}, seed) != 0 ? 1 : 0;
    changed += winner({1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0}, seed) != 0 ? 1 : 0;
  }
  EXPECT_LE(changed, 2);
}

TEST(Race, AmongEqualsTheFirstWinsEveryTime) {
  int changed = 0;
  for (unsigned seed = 0; seed < 200; ++seed) changed += winner({1.0, 0.904, 0.9, 0.902, 0.95}, seed) != 1 ? 1 : 0;
  EXPECT_LE(changed, 4);
}

TEST(Race, OfManyProblemsFewChoicesFlipAndLittleIsLost) {
  constexpr int kProblems = 40;
  constexpr int kRepeats = 20;
  std::mt19937 random(7);
  std::uniform_real_distribution<double> cost(0.9, 1.3);
  int flips = 0;
  double regret = 0;
  double worst = 0;
  for (int problem = 0; problem < kProblems; ++problem) {
    std::vector<double> costs{1.0};
    for (int i = 1; i < 10; ++i) costs.push_back(cost(random));
    const double best = *std::min_element(costs.begin(), costs.end());
    std::map<std::size_t, int> chosen;
    for (unsigned seed = 0; seed < kRepeats; ++seed) {
      const std::size_t choice = winner(costs, 1000 * static_cast<unsigned>(problem) + seed);
      ++chosen[choice];
      regret += costs[choice] / best - 1;
      worst = std::max(worst, costs[choice] - 1);
    }
    int most = 0;
    for (const auto& [choice, count] : chosen) most = std::max(most, count);
    flips += kRepeats - most;
  }
  RecordProperty("flips_percent", std::to_string(100.0 * flips / (kProblems * kRepeats)));
  RecordProperty("regret_percent", std::to_string(100 * regret / (kProblems * kRepeats)));
  EXPECT_LE(flips, kProblems * kRepeats / 20);
  EXPECT_LE(regret / (kProblems * kRepeats), 0.03);
  EXPECT_LE(worst, 0.005) << "slower than the default";
}

TEST(Race, WhoFallsBehindIsLeftAndTheRaceEndsEarly) {
  Race race(4);
  Machine machine({1.0, 0.8, 2.0, 1.5}, 3, 0.001);
  EXPECT_EQ(run(race, machine), 1U);
  EXPECT_EQ(machine.measured(2), RaceOptions{}.min_rounds);
  EXPECT_LT(machine.calls(), 4 * RaceOptions{}.max_rounds);
  EXPECT_FALSE(race.standing(2).active);
  EXPECT_NEAR(race.standing(2).ratio, 2.0, 0.05);
}

TEST(Race, NoisyCostsRunForAllRounds) {
  Race race(2);
  Machine machine({1.0, 0.99}, 3, 0.1);
  run(race, machine);
  EXPECT_EQ(race.rounds(), RaceOptions{}.max_rounds);
}

TEST(Race, WithoutConfidenceItNeverEndsEarly) {
  Race race(3, {.min_rounds = 2, .max_rounds = 12, .band = 0.5, .confidence = 0});
  Machine machine({1.0, 0.99, 1.1}, 3, 0.0001);
  run(race, machine);
  EXPECT_EQ(machine.measured(1), 12);
}

TEST(Race, EveryCandidateRunsBehindEveryOther) {
  Race race(3, {.min_rounds = 12, .max_rounds = 12});
  std::map<std::pair<std::size_t, std::size_t>, int> pairs;
  std::optional<std::size_t> before;
  while (const auto candidate = race.next()) {
    if (before) ++pairs[{*before, *candidate}];
    before = candidate;
    race.add(1.0);
  }
  for (std::size_t a = 0; a < 3; ++a) {
    for (std::size_t b = 0; b < 3; ++b) {
      EXPECT_TRUE(a == b || (pairs[{a, b}]) > 1) << a << " before " << b;
    }
  }
}

TEST(Race, CanNameItsBestAtAnyTime) {
  Race race(3);
  EXPECT_EQ(race.best(), 0U);
  while (race.rounds() < 3) race.add(*race.next() == 2 ? 0.5 : 1.0);
  EXPECT_EQ(race.best(), 2U);
}

TEST(Race, WhatFailsLeavesTheRaceAndAFailingDefaultEndsIt) {
  Race race(3);
  while (const auto candidate = race.next()) {
    race.add(*candidate == 1 ? std::numeric_limits<double>::quiet_NaN() : *candidate == 2 ? 0.9 : 1.0);
  }
  EXPECT_EQ(race.best(), 2U);
  EXPECT_EQ(race.standing(1).rounds, 0);

  Race broken(2);
  broken.add(std::numeric_limits<double>::infinity());
  EXPECT_EQ(broken.next(), std::nullopt);
  EXPECT_EQ(broken.best(), 0U);
}

TEST(Race, DroppedCandidatesNeverRun) {
  Race race(3);
  race.drop(1);
  while (const auto candidate = race.next()) {
    EXPECT_NE(*candidate, 1U);
    race.add(*candidate == 2 ? 0.9 : 1.0);
  }
  EXPECT_EQ(race.best(), 2U);

  Race nobody(2);
  nobody.drop(1);
  EXPECT_EQ(nobody.next(), std::nullopt);
  Race alone(1);
  EXPECT_EQ(alone.next(), std::nullopt);
  EXPECT_EQ(alone.best(), 0U);
}

}  // namespace
}  // namespace fa::tune
