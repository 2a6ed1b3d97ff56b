// Mistakes in schedules, and in what shares keys by them.

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"
#include "emulator/paged_specs.hpp"

namespace emulator {

std::vector<Mutation> schedule_mutations() {
  using enum FaultKind;
  return in("common/schedule.cuh",
            {
                {"schedule_segments_counted_out_of_order",
                 "ptx::atomic_add_acq_rel_global(&lists.head->arrived, 1);",
                 "ptx::atomic_add_global(&lists.head->arrived, 1);",
                 sm80_scheduled(),
                 {unfenced}},
                {"schedule_by_the_first_block",
                 "return static_cast<int>(ptx::ld_shared_b32(word)) == segments - 1;",
                 "return static_cast<int>(ptx::ld_shared_b32(word)) == 0;",
                 sm80_scheduled(),
                 {global_uninitialised, unfenced}},
                {"schedule_items_start_without_the_warps_before",
                 "cost + cost_before + to_here - slot.cost",
                 "cost + 0 * cost_before + to_here - slot.cost",
                 sm80_scheduled(),
                 {}},
                {"schedule_keeps_counters", "ptx::st_global(lists.counters + part, 0);", "", sm80_scheduled(), {}},
                {"schedule_sums_read_too_early",
                 "ptx::sync_threads();  // all warps' sums are there",
                 "",
                 sm80_scheduled(),
                 {shared_race, shared_uninitialised}},
                {"schedule_sums_overwritten",
                 "ptx::sync_threads();  // all have read the sums",
                 "",
                 sm80_scheduled(),
                 {shared_race}},
                {"schedule_searches_among_starts_not_there",
                 "ptx::sync_threads();  // what the search reads is there",
                 "",
                 sm80_scheduled(),
                 {shared_race, shared_uninitialised}},
            });
}

std::vector<Mutation> schedule_slots_mutations() {
  return in("common/schedule_slots.cuh", {
                                             {"schedule_parts_start_a_tile_late",
                                              "start.tile = static_cast<int>(wanted);",
                                              "start.tile = static_cast<int>(wanted) + 1;",
                                              sm80_scheduled(),
                                              {}},
                                             {"schedule_last_part_is_the_next",
                                              "(item_start + kCost + tiles - kFewestTiles) / length",
                                              "(item_start + kCost + tiles) / length",
                                              sm80_scheduled(),
                                              {}},
                                             {"schedule_sequences_that_start_in_a_slot",
                                              "(0xffffffffu >> (kWarpSize - 1 - lane))",
                                              "(0x7fffffffu >> (kWarpSize - 1 - lane))",
                                              sm80_scheduled(),
                                              {}},
                                         });
}

std::vector<Mutation> work_lists_mutations() {
  using enum FaultKind;
  return in("common/work_lists.cuh",
            {
                {"pieces_begin_with_the_item",
                 "range.begin += piece.begin < tiles ? piece.begin : tiles;",
                 "",
                 sm80_scheduled(),
                 {}},
                {"items_of_the_first_segment_place",
                 "segment_slots + (item - ptx::shfl(first, segment))",
                 "segment_slots + (item - ptx::shfl(first, segment) + 1)",
                 sm80_scheduled(),
                 {global_uninitialised}},
                {"parts_end_behind_a_shared_item", "(end.tile > 0 ? 1 : 0);", "0;", sm80_scheduled(), {}},
                {"parts_beside_heads_of_one_part",
                 "block % params.heads * (parts / params.heads) + block / params.heads",
                 "block % params.heads * (parts / params.heads)",
                 sm80_u4_half_tile(),
                 {}},
            });
}

std::vector<Mutation> split_row_mutations() {
  return in("common/partial_merge.cuh", {
                                            {"splits_weigh_the_same",
                                             "const float weight = shuffled(weight_of_lane, at + i);",
                                             "const float weight = 1.f + 0.f * shuffled(weight_of_lane, at + i);",
                                             sm80_scheduled(),
                                             {}},
                                            {"splits_weigh_without_their_sums",
                                             "return part.over(total) * part.sum;",
                                             "return part.over(total);",
                                             sm80_scheduled(),
                                             {}},
                                        });
}

std::vector<Mutation> scheduled_forward_mutations() {
  using enum FaultKind;
  return in(
      "sm80/sm80_forward.cuh",
      {
          {"pieces_take_tiles_that_are_in_use",
           "if (i > 0) ptx::sync_threads();",
           "",
           sm80_scheduled(),
           {shared_race, shared_in_flight, source_overwritten}},
          {"scheduled_blocks_start_too_early", "ptx::griddepcontrol_wait();", "", sm80_scheduled_early(), {too_early}},
      });
}

std::vector<Mutation> own_parts_mutations() {
  using enum FaultKind;
  return in(
      "common/own_parts.cuh",
      {
          {"flags_stay_up", "ptx::st_global(flag, uint64_t{0});  // for the next launch", "", sm80_own_parts(), {}},
          {"parts_start_in_the_first_item",
           "item_in(lanes_of(item));",
           "item_in(lanes_of(0 * item));",
           sm80_own_parts(),
           {global_uninitialised}},
          {"parts_are_of_one_head",
           "(int64_t{cost} * params.heads + parts - 1) / parts",
           "(int64_t{cost} + parts - 1) / parts",
           sm80_own_parts(),
           {}},
      });
}

std::vector<Mutation> scheduled_epilogue_mutations() {
  using enum FaultKind;
  return in(
      "sm80/sm80_forward_epilogue.cuh",
      {
          {"pieces_counted_out_of_order",
           "ptx::atomic_add_acq_rel_global(counter, 1);",
           "ptx::atomic_add_global(counter, 1);",
           sm80_scheduled(),
           {unfenced}},
          {"pieces_counted_before_they_are_written",
           "ptx::sync_threads();  // the block's partial rows are written, and Q has been read, whose place is taken",
           "",
           sm80_scheduled(),
           {unfenced, global_uninitialised, shared_race}},
          {"pieces_stay_counted",
           "if (f.thread == 0) ptx::st_global(counter, 0);  // for the next launch",
           "",
           sm80_scheduled(),
           {}},
          {"own_parts_do_not_wait",
           "if (f.warp == 0) Own::await_others(f.params, f.piece);",
           "",
           sm80_own_parts(),
           {unfenced, global_uninitialised}},
          {"own_parts_tell_before_they_have_written",
           "ptx::sync_threads();  // the block's partial rows are written, and Q has been read, whose place is taken",
           "",
           sm80_own_parts(),
           {unfenced, global_uninitialised, shared_race}},
          {"own_parts_are_merged_unseen",
           "ptx::sync_threads();  // the others' partial results can be read",
           "",
           sm80_own_parts(),
           {unfenced, global_uninitialised}},
          {"pieces_merged_without_the_last",
           "merge_splits<T, Variant, kHeadDimV>(f.params, last + 1, MergedRow",
           "merge_splits<T, Variant, kHeadDimV>(f.params, last, MergedRow",
           sm80_scheduled(),
           {}},
      });
}

}  // namespace emulator
