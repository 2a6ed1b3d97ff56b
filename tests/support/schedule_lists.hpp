#ifndef FA_TESTS_SUPPORT_SCHEDULE_LISTS_HPP_
#define FA_TESTS_SUPPORT_SCHEDULE_LISTS_HPP_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "plan/schedule.hpp"

/// What lies in the memory of a schedule.
namespace fa::test {

struct ScheduleLists {
  std::vector<kernel::WorkItem> items;  ///< starts count from the first
  std::vector<kernel::PartStart> starts;
  std::vector<std::int32_t> counters;
};
ScheduleLists read_schedule(const std::byte* memory, const plan::ScheduleShape& shape);

/// Where lists are not those of the host; empty: nowhere.
std::string difference(const ScheduleLists& lists, const plan::HostSchedule& expected);

}  // namespace fa::test

#endif  // FA_TESTS_SUPPORT_SCHEDULE_LISTS_HPP_
