#ifndef FA_TESTS_EMULATOR_SCHEDULE_RUN_HPP_
#define FA_TESTS_EMULATOR_SCHEDULE_RUN_HPP_

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "emulator/paged_specs.hpp"
#include "plan/schedule.hpp"
#include "support/schedule_lists.hpp"

/// Schedules on the emulator, made as the library makes them.
namespace emulator {

/// Of requests; empty where they are not given.
struct Lengths {
  std::vector<std::int32_t> cu_q, used_q, used_kv, begin;
};

/// What the kernel leaves, or the one registered as `name`. Throws the first Fault.
fa::test::ScheduleLists run_schedule(const fa::plan::Problem& problem, const fa::plan::KernelSpec& attention,
                                     const Lengths& lengths, int multiprocessors, std::uint64_t seed,
                                     const std::string& name = {});

/// Where lists are not those of the host; empty: nowhere.
std::string difference(const fa::plan::Problem& problem, const fa::plan::KernelSpec& attention, const Lengths& lengths,
                       const fa::test::ScheduleLists& lists);

/// Requests with 6 query heads and 2 KV heads, of at most `s_q` rows and `s_kv` keys.
fa::plan::Problem schedule_problem(const PagedKernel& kernel, std::int64_t b, std::int64_t s_q, std::int64_t s_kv);

/// Of random lengths, some without rows or keys, some long.
Lengths random_lengths(const fa::plan::Problem& problem, std::mt19937_64& engine, bool prefills);

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_SCHEDULE_RUN_HPP_
