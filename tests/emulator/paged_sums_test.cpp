// Column sums and top keys of requests over a KV cache: rendered kernels against float64. What no row needs can be read
// neither in the pool nor in the table.

#include <gtest/gtest.h>

#include <cstddef>
#include <string>

#include "emulator/fault.hpp"
#include "emulator/paged_run.hpp"
#include "emulator/paged_sums_specs.hpp"

namespace emulator {
namespace {

using fa::plan::KernelSpec;
using fa::test::PagedData;
using fa::test::PagedSums;

PagedSums expected_of(const PagedSumsCase& c, const PagedData& data) {
  PagedSums sums(c.of, data);
  reference_f64(c.of, data, &sums);
  return sums;
}

class PagedColumnSums : public testing::TestWithParam<std::size_t> {};

TEST_P(PagedColumnSums, MatchTheReference) {
  const PagedSumsCase& c = paged_sums_cases()[GetParam()];
  SCOPED_TRACE(testing::PrintToString(c.of));
  const PagedData data = make_data(c.of);
  const KernelSpec spec = plan_of(c, data).kernel;
  PagedRun run{.without_sums = c.without_sums};
  PagedSums first(c.of, data), again(c.of, data);
  ASSERT_NO_THROW(run_paged(spec, c.of, data, run, &first));
  EXPECT_LE(error_of(c.of, first, expected_of(c, data), c.without_sums), 1);
  run.schedule = 2;
  ASSERT_NO_THROW(run_paged(spec, c.of, data, run, &again));
  EXPECT_EQ(again.sums, first.sums) << "the sums depend on the schedule";
  EXPECT_EQ(again.top_keys, first.top_keys) << "the top keys depend on the schedule";
}
INSTANTIATE_TEST_SUITE_P(All, PagedColumnSums, testing::Range<std::size_t>(0, paged_sums_cases().size()),
                         [](const auto& c) { return paged_sums_cases()[c.param].name; });

class PagedColumnSumsMutants : public testing::TestWithParam<std::size_t> {};

TEST_P(PagedColumnSumsMutants, AreCaught) {
  const StatisticsMutation& mutation = paged_sums_mutations()[GetParam()];
  const PagedSumsCase& c = paged_sums_case_named(mutation.subject);
  const PagedData data = make_data(c.of);
  PagedSums sums(c.of, data);
  try {
    run_paged(plan_of(c, data).kernel, c.of, data, {.sums_kernel = "mutant " + mutation.name}, &sums);
    EXPECT_FALSE(error_of(c.of, sums, expected_of(c, data)) <= 1) << mutation.name;
  } catch (const NotWritten&) {
    EXPECT_TRUE(mutation.faults.empty()) << mutation.name;
  } catch (const Fault& fault) {
    EXPECT_TRUE(mutation.faults.contains(fault.kind)) << fault.what();
  }
}
INSTANTIATE_TEST_SUITE_P(All, PagedColumnSumsMutants, testing::Range<std::size_t>(0, paged_sums_mutations().size()),
                         [](const auto& mutant) { return paged_sums_mutations()[mutant.param].name; });

}  // namespace
}  // namespace emulator
