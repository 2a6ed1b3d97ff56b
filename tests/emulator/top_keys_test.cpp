// The keys of the greatest column sums against a sort of the whole rows, under other schedules, and with mistakes.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "emulator/emulator.hpp"
#include "emulator/memory.hpp"
#include "emulator/registry.hpp"
#include "emulator/top_keys_specs.hpp"
#include "plan/column_sums.hpp"
#include "plan/planner.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::TensorView;
using fa::plan::KernelSpec;

std::vector<float> sums_of(const TopKeysCase& c) {
  std::vector<float> sums(static_cast<std::size_t>(c.b * c.h * c.s_kv));
  for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = c.sum(i);
  return sums;
}

/// Of one row.
std::vector<std::int32_t> sorted(std::span<const float> row, int count) {
  std::vector<std::int32_t> keys(row.size());
  std::iota(keys.begin(), keys.end(), 0);
  std::ranges::stable_sort(keys, [&](std::int32_t i, std::int32_t j) {
    const float a = row[static_cast<std::size_t>(i)], b = row[static_cast<std::size_t>(j)];
    return std::isnan(a) ? !std::isnan(b) : a > b;
  });
  keys.resize(static_cast<std::size_t>(count), -1);
  return keys;
}

std::vector<std::int32_t> expected_of(const TopKeysCase& c) {
  const std::vector<float> sums = sums_of(c);
  std::vector<std::int32_t> expected;
  for (std::int64_t b = 0; b < c.sequences(); ++b) {
    const auto i = static_cast<std::size_t>(b);
    std::int64_t first = b * c.h * c.s_kv, keys = c.s_kv;
    std::int32_t begin = 0;
    if (c.packed()) {
      first = c.cu_kv[i];
      keys = c.used_kv.empty() ? c.cu_kv[i + 1] - c.cu_kv[i] : c.used_kv[i];
    } else if (c.of_requests()) {
      begin = c.begin.empty() ? 0 : c.begin[i];
      keys = c.used_kv[i] - begin;
      first += begin;
    }
    if (!c.cu_q.empty() && c.cu_q[i + 1] == c.cu_q[i]) keys = 0;
    for (std::int64_t h = 0; h < c.h; ++h) {
      const std::span<const float> row(sums.data() + first + h * c.s_kv, static_cast<std::size_t>(keys));
      std::vector<std::int32_t> top = sorted(row, c.count);
      for (std::int32_t& key : top) key = key < 0 ? key : key + begin;
      expected.insert(expected.end(), top.begin(), top.end());
    }
  }
  return expected;
}

/// `name`: of the kernel in the place of the case's.
std::vector<std::int32_t> run(const TopKeysCase& c, std::uint64_t seed, const std::string& name = {}) {
  Memory memory;
  const auto place = [&](const char* label, const std::vector<std::int32_t>& values) {
    return values.empty() ? nullptr
                          : reinterpret_cast<std::int32_t*>(memory.add_input(label, std::as_bytes(std::span(values))));
  };
  std::vector<float> sums = sums_of(c);
  sums.insert(sums.begin(), static_cast<std::size_t>(c.first), 0.F);
  std::byte* const base = memory.add_input("sums", std::as_bytes(std::span(sums)));
  const auto in_front = static_cast<std::size_t>(c.first) * sizeof(float);
  memory.set_flags(base, in_front, 0);
  std::vector<std::int32_t> keys(static_cast<std::size_t>(c.sequences() * c.h * c.count));
  std::byte* const to = memory.add_output("keys", keys.size() * sizeof(std::int32_t));

  const fa::plan::Problem problem = problem_of(c);
  const KernelSpec spec = top_keys_spec(problem);
  fa::kernel::SequenceParams sequences{};
  sequences.cu_q = place("cu_q", c.cu_q);
  sequences.cu_kv = place("cu_kv", c.cu_kv);
  sequences.used_kv = place("used_kv", c.used_kv);
  sequences.total_q = static_cast<int>(problem.total_q);
  sequences.total_kv = static_cast<int>(problem.total_kv);
  fa::kernel::TopKeysParams params;
  LaunchOptions options;
  options.grid = static_cast<int>(
      top_keys_params(problem, sequences, place("begin", c.begin), reinterpret_cast<const float*>(base + in_front),
                      TensorView(to, DType::i32, {c.sequences(), c.h, std::int64_t{c.count}}), params));
  const RegisteredKernel& kernel = registered_kernel(name.empty() ? canonical(spec) : name);
  options.threads = kernel.threads;
  options.shared_bytes = fa::plan::shared_bytes(spec);
  options.seed = seed;
  launch(kernel.entry, &params, memory, options);
  if (!memory.written(to, keys.size() * sizeof(std::int32_t))) return {};
  std::memcpy(keys.data(), to, keys.size() * sizeof(std::int32_t));
  return keys;
}

class TopKeys : public testing::TestWithParam<std::size_t> {};

TEST_P(TopKeys, AreThoseOfASort) {
  const TopKeysCase& c = top_keys_cases()[GetParam()];
  std::vector<std::int32_t> first;
  ASSERT_NO_THROW(first = run(c, 1));
  EXPECT_EQ(first, expected_of(c));
  EXPECT_EQ(run(c, 2), first);
}
INSTANTIATE_TEST_SUITE_P(All, TopKeys, testing::Range<std::size_t>(0, top_keys_cases().size()),
                         [](const auto& c) { return top_keys_cases()[c.param].name; });

class TopKeysMutants : public testing::TestWithParam<std::size_t> {};

TEST_P(TopKeysMutants, AreCaught) {
  const StatisticsMutation& mutation = top_keys_mutations()[GetParam()];
  const TopKeysCase& c = top_keys_case_named(mutation.subject);
  try {
    EXPECT_NE(run(c, 1, "mutant " + mutation.name), expected_of(c)) << "not caught";
  } catch (const Fault& fault) {
    EXPECT_TRUE(mutation.faults.contains(fault.kind)) << fault.what();
  }
}
INSTANTIATE_TEST_SUITE_P(All, TopKeysMutants, testing::Range<std::size_t>(0, top_keys_mutations().size()),
                         [](const auto& mutant) { return top_keys_mutations()[mutant.param].name; });

}  // namespace
}  // namespace emulator
