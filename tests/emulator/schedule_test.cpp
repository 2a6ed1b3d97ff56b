// Schedules of calls over pages: the kernel's lists are those of a walk on the host, and forwards that share keys by
// them are right.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <random>
#include <vector>

#include "emulator/paged_run.hpp"
#include "emulator/paged_specs.hpp"
#include "emulator/schedule_run.hpp"
#include "plan/catalogue.hpp"
#include "support/thorough.hpp"

namespace emulator {
namespace {

using fa::kernel::PartStart;
using fa::kernel::WorkItem;
using fa::plan::KernelSpec;
using fa::plan::Problem;
using fa::test::AttentionOutputs;
using fa::test::PagedCase;
using fa::test::PagedData;

/// Kernels that take schedules.
std::vector<PagedKernel> scheduled_kernels() {
  std::vector<PagedKernel> found;
  std::ranges::copy_if(paged_kernels(), std::back_inserter(found),
                       [](const PagedKernel& kernel) { return kernel.spec.scheduled(); });
  return found;
}

/// Those, and kernels whose blocks find their parts by themselves.
std::vector<PagedKernel> sharing_kernels() {
  std::vector<PagedKernel> found;
  std::ranges::copy_if(paged_kernels(), std::back_inserter(found),
                       [](const PagedKernel& kernel) { return kernel.spec.scheduled() || kernel.spec.own_parts(); });
  return found;
}

class SharedKeys : public testing::TestWithParam<std::size_t> {
 protected:
  const PagedKernel kernel_ = sharing_kernels()[GetParam()];
};

class Schedules : public testing::TestWithParam<std::size_t> {
 protected:
  void expect_lists_of_host(const Problem& problem, const Lengths& lengths, int multiprocessors) const {
    const fa::test::ScheduleLists lists = run_schedule(problem, kernel_.spec, lengths, multiprocessors, 7);
    EXPECT_EQ(difference(problem, kernel_.spec, lengths, lists), "");
  }

  const PagedKernel kernel_ = scheduled_kernels()[GetParam()];
};

TEST_P(Schedules, AreThoseOfTheHost) {
  std::mt19937_64 engine(GetParam() + 1);
  for (const std::int64_t b : {1, 3, 40}) {
    for (const int multiprocessors : {1, 3, 16, 132}) {
      const Problem problem = schedule_problem(kernel_, b, b == 3 ? 300 : 2, 3000);
      SCOPED_TRACE(testing::Message() << canonical(kernel_.spec) << " b = " << b << ", " << multiprocessors);
      expect_lists_of_host(problem, random_lengths(problem, engine, b == 3), multiprocessors);
    }
  }
}

/// So many that several blocks write the lists, and that each takes more than one turn.
TEST_P(Schedules, OfManyRequestsToo) {
  if (GetParam() > 2) GTEST_SKIP() << "three kinds of kernels are enough";
  std::mt19937_64 engine(GetParam() + 1);
  for (const std::int64_t b : {3000, 40000}) {
    const Problem problem = schedule_problem(kernel_, b, 2, 2000);
    expect_lists_of_host(problem, random_lengths(problem, engine, true), 132);
  }
}

/// Of equal requests, which parts of latent attention and of stored caches share evenly.
TEST_P(Schedules, OfEqualRequests) {
  if (fa::plan::schedule_spec(kernel_.spec).as<fa::plan::Schedule>().whole_items == 0) GTEST_SKIP() << "cut anywhere";
  for (const std::int64_t b : {4, 7}) {
    for (const int multiprocessors : {16, 32, 56}) {
      const Problem problem = schedule_problem(kernel_, b, 1, 3000);
      Lengths lengths;
      lengths.used_kv.assign(static_cast<std::size_t>(b), 1920);
      for (std::int32_t row = 0; problem.varlen && row <= b; ++row) lengths.cu_q.push_back(row);
      expect_lists_of_host(problem, lengths, multiprocessors);
    }
  }
}

/// No request, and none that has keys.
TEST_P(Schedules, OfNothing) {
  Problem problem = schedule_problem(kernel_, 70, 5, 1000);
  Lengths lengths;
  lengths.used_kv.assign(70, 0);
  if (problem.varlen) lengths.cu_q.assign(71, 0);
  expect_lists_of_host(problem, lengths, 16);
}

/// Lengths that are anything lead nowhere outside of the lists, and what these say stays within the limits.
TEST_P(Schedules, OfWrongLengthsStayInside) {
  std::mt19937_64 engine(GetParam() + 1);
  constexpr std::int32_t kLow = std::numeric_limits<std::int32_t>::min();
  constexpr std::int32_t kHigh = std::numeric_limits<std::int32_t>::max();
  for (const std::int64_t b : {5, 2500}) {
    const Problem problem = schedule_problem(kernel_, b, 70, 1000);
    Lengths lengths = random_lengths(problem, engine, true);
    for (std::vector<std::int32_t>* values : {&lengths.cu_q, &lengths.used_kv, &lengths.begin}) {
      for (std::int32_t& value : *values) {
        const std::int32_t wild[] = {-1, kLow, kHigh, 1 << 24, 0, 999};
        if (engine() % 2 == 0) value = wild[engine() % std::size(wild)];
      }
    }
    fa::test::ScheduleLists lists;
    ASSERT_NO_THROW(lists = run_schedule(problem, kernel_.spec, lengths, 16, 3));
    for (const WorkItem& item : lists.items) {
      EXPECT_TRUE(item.batch >= 0 && item.batch < b && item.m_block >= 0);
    }
    for (const PartStart& start : lists.starts) {
      EXPECT_TRUE(start.head >= 0 && start.head <= problem.h_q);
      EXPECT_TRUE(start.item >= 0 && (start.item == 0 || start.item < static_cast<int>(lists.items.size())));
    }
  }
}

/// A few long decodes, prefills, chunks and drafts; requests without rows or keys.
PagedCase make_case(const PagedKernel& kernel, std::size_t batch) {
  const KernelSpec& spec = kernel.spec;
  PagedCase c;
  c.attention.dtype = spec.dtype;
  c.attention.d_qk = spec.d_qk;
  c.attention.d_v = spec.d_v;
  c.attention.causal = spec.causal && kernel.choice.config.window_right < 0;
  c.attention.h_q = 4;
  c.attention.h_kv = 2;
  c.attention.seed = 11 + batch;
  c.variant = kernel.choice;
  c.page_size = spec.page_size;
  set_storage(spec, c);
  c.packed = spec.varlen;
  c.indexed = batch == 1;
  c.bounded = true;
  const std::vector<std::int32_t> keys[] = {{430}, {37, 0, 250, 64, 90}, {0, 0, 0}};
  const std::vector<std::int32_t> rows[] = {{1}, {37, 5, 1, 0, 3}, {1, 0, 2}};
  c.keys = keys[batch];
  c.rows = spec.varlen ? rows[batch]
                       : std::vector<std::int32_t>(c.keys.size(), std::array<std::int32_t, 3>{1, 35, 4}[batch]);
  if (batch == 1 && !spec.kernel().tensor_maps) c.begin = {3, 0, 77, 1, 33};
  return c;
}

constexpr std::size_t kBatches = 3;

double tolerance(fa::DType dtype) {
  return dtype == fa::DType::bf16 ? 2e-2 : dtype == fa::DType::f16 ? 3e-3 : 1e-5;
}

TEST_P(SharedKeys, ForwardsThatShareKeysAreRight) {
  for (std::size_t batch = 0; batch < kBatches; ++batch) {
    if (batch < 2 && !fa::test::tries(GetParam() / 2 + batch, 2)) continue;  // in turn
    const PagedCase c = make_case(kernel_, batch);
    const PagedData data = make_data(c);
    const AttentionOutputs expected = reference_f64(c, data);
    constexpr std::array kMultiprocessors{1, 5, 33};
    for (const int multiprocessors : fa::test::tried(kMultiprocessors, GetParam() + batch)) {
      SCOPED_TRACE(testing::Message() << canonical(kernel_.spec) << ", " << testing::PrintToString(c) << ", "
                                      << multiprocessors);
      AttentionOutputs actual;
      ASSERT_NO_THROW(actual = run_paged(kernel_.spec, c, data, {.multiprocessors = multiprocessors}));
      EXPECT_LE(worst_of(c, data, actual.o, expected.o), 4 * tolerance(kernel_.spec.dtype)) << "o";
      EXPECT_LE(worst_of(c, data, actual.lse, expected.lse), kernel_.spec.dtype == fa::DType::f32 ? 1e-4 : 1e-2)
          << "lse";
    }
  }
}

/// Whichever block of those that share an item is the last, and whether the schedule is the call's own.
TEST_P(SharedKeys, BitsDoNotDependOnTheOrderOfBlocks) {
  constexpr std::array<std::size_t, 2> kBatchesWithKeys{0, 1};
  for (const std::size_t batch : fa::test::tried(kBatchesWithKeys, GetParam() / 2)) {
    const PagedCase c = make_case(kernel_, batch);
    const PagedData data = make_data(c);
    const AttentionOutputs first = run_paged(kernel_.spec, c, data, {.multiprocessors = 16});
    constexpr std::array<std::uint64_t, 2> kSeeds{2, 3};
    for (const std::uint64_t seed : fa::test::tried(kSeeds, GetParam() + batch)) {
      AttentionOutputs other;
      ASSERT_NO_THROW(other =
                          run_paged(kernel_.spec, c, data, {.schedule = seed, .multiprocessors = 16, .launches = 3}));
      EXPECT_TRUE(equal_outside(first.o, other.o, {})) << "o";
      EXPECT_TRUE(equal_outside(first.lse, other.lse, {})) << "lse";
    }
  }
}

TEST_P(SharedKeys, WrongTablesAndLengthsReadNothingElse) {
  constexpr std::int32_t kLow = std::numeric_limits<std::int32_t>::min();
  constexpr std::int32_t kHigh = std::numeric_limits<std::int32_t>::max();
  constexpr std::array<std::uint64_t, 3> kSeeds{1, 2, 3};
  for (const std::uint64_t seed : fa::test::tried(kSeeds, GetParam())) {
    const PagedCase c = make_case(kernel_, 1);
    PagedData data = make_data(c);
    std::mt19937_64 engine(seed);
    const auto spoil = [&](std::vector<std::int32_t>& values, std::int32_t edge) {
      const std::int32_t wild[] = {-1, kLow, kHigh, edge, edge - 1, edge + 1, 1 << 24};
      for (std::int32_t& value : values) {
        if (engine() % 2 == 0) value = wild[engine() % std::size(wild)];
      }
    };
    spoil(data.table, static_cast<std::int32_t>(data.k.view().shape[0]));
    const auto positions = static_cast<std::int32_t>(data.max_pages * data.page_rows);
    spoil(data.used_kv, positions);
    spoil(data.begin, positions);
    spoil(data.batch_index, static_cast<std::int32_t>(data.table_rows));
    if (seed == 3) spoil(data.cu_q, static_cast<std::int32_t>(data.q.view().shape[2]));
    EXPECT_NO_THROW(run_paged(kernel_.spec, c, data, {.trust = false, .multiprocessors = 16}));
  }
}

INSTANTIATE_TEST_SUITE_P(All, Schedules, testing::Range<std::size_t>(0, scheduled_kernels().size()));
INSTANTIATE_TEST_SUITE_P(All, SharedKeys, testing::Range<std::size_t>(0, sharing_kernels().size()));

/// Launched before the kernel in front is complete, which may still write lengths, tables and lists.
TEST(EarlySchedules, WaitForWhatTheyRead) {
  const PagedKernel kernel{sm80_scheduled_early(), {}};
  const PagedCase c = make_case(kernel, 1);
  const PagedData data = make_data(c);
  AttentionOutputs actual;
  ASSERT_NO_THROW(actual = run_paged(kernel.spec, c, data, {.multiprocessors = 16}));
  EXPECT_LE(worst_of(c, data, actual.o, reference_f64(c, data).o), 4 * tolerance(kernel.spec.dtype));
}

}  // namespace
}  // namespace emulator
