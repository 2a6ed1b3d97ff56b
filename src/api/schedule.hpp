#ifndef FA_SRC_API_SCHEDULE_HPP_
#define FA_SRC_API_SCHEDULE_HPP_

#include <cstddef>
#include <cstdint>

#include <fa/attention.hpp>

namespace fa::api {

/// The lengths and limits of a schedule, checked.
struct ScheduleCall {
  AttentionShape shape;  ///< with defaults filled in
  PackedSequences sequences;
  PagedCache cache;    ///< its seq_begin alone
  bool empty = false;  ///< no call of these limits has an output element
};

/// Throws fa::Error(invalid_argument) for anything that a schedule must not be made of, and for arrays in its memory.
ScheduleCall check_schedule(const AttentionConfig& config, const ScheduleInputs& inputs, const Schedule& memory);

/// Throws fa::Error(invalid_argument) for a schedule that a configuration has no use for.
void check_takes_schedules(const AttentionConfig& config, const Schedule& schedule);

/// Holds the memory of a schedule to what it needs. Throws fa::Error: invalid_argument, out_of_memory.
void check_schedule_memory(const Schedule& schedule, std::size_t needed);

/// Holds a call's schedule to `tag` (plan::schedule_tag). Takes no lock. Throws fa::Error(invalid_argument).
void expect_scheduled(const Schedule& schedule, std::uint64_t tag);

}  // namespace fa::api

#endif  // FA_SRC_API_SCHEDULE_HPP_
