// Statistics of forward kernels against the host device, and against themselves under other schedules.

#include <gtest/gtest.h>

#include <cstddef>
#include <string>

#include "emulator/statistics_gradients_run.hpp"
#include "emulator/statistics_run.hpp"

namespace emulator {
namespace {

class Statistics : public testing::TestWithParam<std::size_t> {};

TEST_P(Statistics, MatchTheHostDevice) {
  const StatisticsCase& c = statistics_cases()[GetParam()];
  const StatisticsData data(c);
  const StatisticsResults expected = expected_of(c, data);
  StatisticsResults first(c);
  ASSERT_NO_THROW(first = run_statistics(c, data, 1)) << c.name;
  EXPECT_LE(error_of(c, first, expected), 1);
  const StatisticsResults again = run_statistics(c, data, 2);
  EXPECT_EQ(again.max_logit, first.max_logit) << "the maxima depend on the schedule";
  EXPECT_EQ(again.entropy, first.entropy) << "the entropy depends on the schedule";
  EXPECT_EQ(again.column_sums, first.column_sums) << "the sums depend on the schedule";
  EXPECT_EQ(again.top_keys, first.top_keys) << "the top keys depend on the schedule";
}
INSTANTIATE_TEST_SUITE_P(All, Statistics, testing::Range<std::size_t>(0, statistics_cases().size()),
                         [](const auto& c) { return statistics_cases()[c.param].name; });

class StatisticsGradients : public testing::TestWithParam<std::size_t> {};

TEST_P(StatisticsGradients, MatchTheHostDevice) {
  const StatisticsGradientCase& c = gradient_cases()[GetParam()];
  const StatisticsGradientData data(c);
  const StatisticsGradientResults expected = fa::test::expected_of(c, data);
  StatisticsGradientResults first(c, data);
  ASSERT_NO_THROW(first = run_statistics_gradients(c, data, 1)) << c.of.name;
  EXPECT_LE(error_of(c, first, expected), 1);
  if (!c.of.config.deterministic) return;
  const StatisticsGradientResults again = run_statistics_gradients(c, data, 2);
  EXPECT_EQ(again.dq.bytes(), first.dq.bytes()) << "dq depends on the schedule";
  EXPECT_EQ(again.dk.bytes(), first.dk.bytes()) << "dk depends on the schedule";
  EXPECT_EQ(again.dv.bytes(), first.dv.bytes()) << "dv depends on the schedule";
}
INSTANTIATE_TEST_SUITE_P(All, StatisticsGradients, testing::Range<std::size_t>(0, gradient_cases().size()),
                         [](const auto& c) { return gradient_cases()[c.param].of.name; });

/// How far a mutant of a backward's kernel leaves the expected gradients.
double gradient_error(const StatisticsMutation& mutation, const StatisticsGradientCase& c, const std::string& name) {
  const StatisticsGradientData data(c);
  return error_of(c, run_statistics_gradients(c, data, 1, name, role_of(mutation)), fa::test::expected_of(c, data));
}

class StatisticsMutants : public testing::TestWithParam<std::size_t> {};

TEST_P(StatisticsMutants, AreCaught) {
  const StatisticsMutation& mutation = statistics_mutations()[GetParam()];
  const std::string name = "mutant " + mutation.name;
  try {
    if (const StatisticsGradientCase* const gradients = gradient_case_named(mutation.subject)) {
      EXPECT_FALSE(gradient_error(mutation, *gradients, name) <= 1) << mutation.name;
      return;
    }
    const StatisticsCase& c = case_named(mutation.subject);
    const StatisticsData data(c);
    const StatisticsResults actual =
        is_of_sums(mutation) ? run_statistics(c, data, 1, {}, name) : run_statistics(c, data, 1, name);
    EXPECT_FALSE(error_of(c, actual, expected_of(c, data)) <= 1) << mutation.name;
  } catch (const Fault& fault) {
    EXPECT_TRUE(mutation.faults.contains(fault.kind)) << fault.what();
  }
}
INSTANTIATE_TEST_SUITE_P(All, StatisticsMutants, testing::Range<std::size_t>(0, statistics_mutations().size()),
                         [](const auto& mutant) { return statistics_mutations()[mutant.param].name; });

}  // namespace
}  // namespace emulator
