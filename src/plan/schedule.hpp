#ifndef FA_SRC_PLAN_SCHEDULE_HPP_
#define FA_SRC_PLAN_SCHEDULE_HPP_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <common/schedule_params.cuh>

#include "plan/kernel_spec.hpp"
#include "plan/problem.hpp"

namespace fa::plan {

/// The kernel that writes what a scheduled forward reads (templates/common/schedule.cuh).
KernelSpec schedule_spec(const KernelSpec& attention);

/// How the work of calls of a problem's limits is shared out: a function of these, of the kernel and of how many
/// multiprocessors there are, never of lengths.
struct ScheduleShape {
  std::int64_t slots = 0;  ///< that query tiles are found by
  std::int64_t segment_slots = 0;
  int segments = 0;  ///< thread blocks of the kernel that writes the schedule
  int parts = 0;     ///< thread blocks of the attention kernel

  std::size_t bytes() const noexcept;
};
ScheduleShape schedule_shape(const Problem& problem, const KernelSpec& attention, int multiprocessors) noexcept;

/// Rows that partial results of a scheduled forward have room for, all together.
std::int64_t partial_rows(const Problem& problem, const KernelSpec& attention, const ScheduleShape& shape) noexcept;

/// Names what a schedule depends on besides lengths. Never 0.
std::uint64_t schedule_tag(const Problem& problem, const KernelSpec& attention, const ScheduleShape& shape) noexcept;

/// Lengths of requests in memory of the host, as the device has them; empty where they are not given.
struct HostLengths {
  std::span<const std::int32_t> cu_q;     ///< [b + 1], of packed queries
  std::span<const std::int32_t> used_q;   ///< [b]
  std::span<const std::int32_t> used_kv;  ///< [b]
  std::span<const std::int32_t> begin;    ///< [b]
};

/// What the kernel writes, by a walk over rows, items and parts. `WorkItem::start` counts from the first item here.
struct HostSchedule {
  std::vector<kernel::WorkItem> items;
  std::vector<kernel::PartStart> starts;  ///< [parts + 1]
};
HostSchedule schedule_on_host(const Problem& problem, const KernelSpec& attention, const HostLengths& lengths,
                              int parts);

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_SCHEDULE_HPP_
