// The tuner over a subject that is no GPU, with a clock that the subject turns.

#include "tune/tuner.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>

namespace fa::tune {
namespace {

class FakeSubject final : public Subject {
 public:
  explicit FakeSubject(std::vector<double> milliseconds) : milliseconds_(std::move(milliseconds)) {}

  std::string prepare(std::size_t candidate) override {
    const std::scoped_lock lock(mutex_);
    prepared.insert(candidate);
    threads.insert(std::this_thread::get_id());
    clock = clock + prepare_seconds;
    if (candidate == throwing) throw std::runtime_error("the driver is gone");
    return candidate == uncompilable ? "it spills" : "";
  }
  std::string check(std::size_t candidate) override {
    checked.insert(candidate);
    clock = clock + check_seconds;
    return candidate == wrong ? "it computed 2 where the default computed 1" : "";
  }
  double time(std::size_t candidate) override {
    timed.insert(candidate);
    clock = clock + milliseconds_[candidate] / 1000;
    return milliseconds_[candidate];
  }

  static constexpr std::size_t kNone = 1000;
  std::size_t uncompilable = kNone, wrong = kNone, throwing = kNone;
  double prepare_seconds = 0, check_seconds = 0;
  std::atomic<double> clock = 0;
  std::set<std::size_t> prepared, checked, timed;
  std::set<std::thread::id> threads;

 private:
  std::mutex mutex_;
  std::vector<double> milliseconds_;
};

Outcome run(FakeSubject& subject, std::size_t candidates, const Budget& budget = {}) {
  const std::function<double()> now = [&] { return subject.clock.load(); };
  return tune(subject, candidates, budget, {}, now);
}

TEST(Tuner, PreparesChecksTimesAndSaysWhy) {
  FakeSubject subject({1.0, 0.8, 1.2});
  const Outcome outcome = run(subject, 3);
  EXPECT_EQ(outcome.winner, 1U);
  EXPECT_TRUE(outcome.complete);
  EXPECT_EQ(subject.prepared.size(), 3U);
  EXPECT_EQ(subject.checked.size(), 3U);
  EXPECT_NEAR(outcome.results[1].ratio, 0.8, 1e-9);
  EXPECT_DOUBLE_EQ(outcome.results[2].milliseconds, 1.2);
  EXPECT_NE(outcome.reason.find("20.0 % faster than the default"), std::string::npos) << outcome.reason;
}

TEST(Tuner, OnlyWhatComputesTheSameMayWin) {
  FakeSubject subject({1.0, 0.5, 0.4, 0.9});
  subject.wrong = 1;
  subject.uncompilable = 2;
  const Outcome outcome = run(subject, 4);
  EXPECT_EQ(outcome.winner, 3U);
  EXPECT_FALSE(subject.timed.contains(1));
  EXPECT_FALSE(subject.checked.contains(2));
  EXPECT_EQ(outcome.results[1].refusal, "it computed 2 where the default computed 1");
  EXPECT_EQ(outcome.results[2].refusal, "it spills");
}

TEST(Tuner, AWrongDefaultMeansThatNothingCanBeCompared) {
  FakeSubject subject({1.0, 0.5});
  subject.wrong = 0;
  const Outcome outcome = run(subject, 2);
  EXPECT_EQ(outcome.winner, 0U);
  EXPECT_TRUE(subject.timed.empty());
  EXPECT_NE(outcome.reason.find("the default stays"), std::string::npos);
}

TEST(Tuner, WhatTheTimeIsTooShortForIsLeftOutFromTheEnd) {
  FakeSubject subject(std::vector<double>(20, 1.0));
  subject.prepare_seconds = 0.4;
  const Outcome outcome = run(subject, 20, {.seconds = 2, .timing_seconds = 0.5, .jobs = 1});
  EXPECT_EQ(subject.prepared, (std::set<std::size_t>{0, 1, 2, 3}));
  EXPECT_FALSE(outcome.complete);
  EXPECT_EQ(outcome.winner, 0U);
  EXPECT_FALSE(outcome.results[19].refusal.empty());
  EXPECT_LE(subject.clock, 2 + subject.prepare_seconds);
}

TEST(Tuner, MeasuringKeepsToItsTimeAndUsesWhatIsKnown) {
  FakeSubject subject({100.0, 60.0, 110.0});
  const Outcome outcome = run(subject, 3, {.seconds = 2, .timing_seconds = 0.7, .jobs = 1});
  EXPECT_LE(subject.clock, 0.7 + 0.11);
  EXPECT_EQ(outcome.winner, 1U) << outcome.reason;
  EXPECT_FALSE(outcome.complete);
}

TEST(Tuner, PreparesInParallelAndPassesExceptionsOn) {
  FakeSubject subject(std::vector<double>(8, 1.0));
  run(subject, 8, {.jobs = 4});
  EXPECT_EQ(subject.prepared.size(), 8U);
  EXPECT_LE(subject.threads.size(), 4U);
  FakeSubject broken({1.0, 1.0});
  broken.throwing = 0;
  EXPECT_THROW(run(broken, 2), std::runtime_error);
}

TEST(Tuner, NothingElseThatRunsLeavesTheDefault) {
  FakeSubject subject({1.0, 0.5});
  subject.uncompilable = 1;
  const Outcome outcome = run(subject, 2);
  EXPECT_EQ(outcome.winner, 0U);
  EXPECT_EQ(outcome.reason, "the default stays: nothing else ran");
}

}  // namespace
}  // namespace fa::tune
