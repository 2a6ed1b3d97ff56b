#include "support/schedule_lists.hpp"

#include <algorithm>
#include <tuple>

namespace fa::test {
namespace {

auto fields(const kernel::PartStart& start) {
  return std::tie(start.head, start.item, start.tile, start.first_part, start.last_part, start.batch, start.m_block);
}

auto fields(const kernel::WorkItem& item) {
  return std::tie(item.batch, item.m_block, item.start);
}

template <class T>
std::string first_difference(const std::string& what, const std::vector<T>& actual, const std::vector<T>& expected) {
  if (actual.size() != expected.size()) {
    return std::to_string(actual.size()) + " " + what + ", not " + std::to_string(expected.size());
  }
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (fields(actual[i]) != fields(expected[i])) return what + " " + std::to_string(i);
  }
  return {};
}

}  // namespace

ScheduleLists read_schedule(const std::byte* memory, const plan::ScheduleShape& shape) {
  const auto* const head = reinterpret_cast<const kernel::ScheduleHead*>(memory);
  const auto* const starts = reinterpret_cast<const kernel::PartStart*>(head + 1);
  const auto* const counters = reinterpret_cast<const std::int32_t*>(starts + shape.parts + 1);
  const auto* const items = reinterpret_cast<const kernel::WorkItem*>(counters + (2 * shape.parts + 3) / 4 * 4);
  ScheduleLists lists;
  lists.starts.assign(starts, starts + shape.parts + 1);
  lists.counters.assign(counters, counters + 2 * shape.parts);
  std::int64_t before = 0;
  for (int segment = 0; segment < shape.segments; ++segment) {
    const std::int64_t count = std::min<std::int64_t>(head->segment_items[segment], shape.segment_slots);
    for (std::int64_t i = 0; i < count; ++i) {
      kernel::WorkItem item = items[segment * shape.segment_slots + i];
      item.start += before;
      lists.items.push_back(item);
    }
    before += head->segment_costs[segment];
  }
  return lists;
}

std::string difference(const ScheduleLists& lists, const plan::HostSchedule& expected) {
  std::string found = first_difference("items", lists.items, expected.items);
  if (found.empty()) found = first_difference("starts", lists.starts, expected.starts);
  const bool zero = std::ranges::all_of(lists.counters, [](std::int32_t counter) { return counter == 0; });
  return found.empty() && !zero ? "counters" : found;
}

}  // namespace fa::test
