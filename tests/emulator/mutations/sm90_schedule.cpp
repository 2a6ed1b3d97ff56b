// Mistakes in the schedule and the work descriptors of the Hopper forward.

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"
#include "emulator/paged_specs.hpp"

namespace emulator {

std::vector<Mutation> sm90_schedule_mutations() {
  using enum FaultKind;
  return in(
      "sm90/sm90_schedule.cuh",
      {
          {"hopper_end_of_the_first_row", "first + 63 < end ? first + 63 : end - 1", "first", sm90_own_ends(), {}},

          {"hopper_first_rows_left_out",
           "(all.base.m_blocks * kTileM - all.base.s_q) / 16 * 16",
           "(all.base.m_blocks * kTileM - all.base.s_q) / 16 * 16 + 16",
           sm90_own_ends(),
           {global_uninitialised}},
          {"hopper_last_rows_of_a_request_left_out",
           "* kTileM - rows) / 64 * 64;",
           "* kTileM - rows) / 64 * 64 - 64;",
           sm90_paged_own_ends(),
           {}},
          {"hopper_first_row_not_posted",
           "word(0, query.first_row);",
           "word(0, query.tile.m_block);",
           sm90_paged_own_ends(),
           {}},
          {"hopper_rotated_tile_behind_the_head",
           "return (tile.m_block + pair) % params.m_blocks;",
           "return (tile.m_block + pair + 1) % (params.m_blocks + 1);",
           sm90_rotating(),
           {global_uninitialised}},
          {"hopper_scores_made_again_of_another_sequence",
           "word(kFirstKeyWord, query.sequence.first_key);",
           "word(kFirstKeyWord, 0);",
           steep(sm90_varlen()),
           {global_uninitialised}},
          {"hopper_table_row_of_the_request",
           "return {kernel::table_row_of(params.paged, query.tile.batch),",
           "return {query.tile.batch,",
           sm90_paged_dynamic(),
           {global_uninitialised, global_out_of_bounds}},
          {"hopper_requests_have_a_split_too_many",
           "return params.splits;",
           "return params.splits + 1;",
           sm90_splits_request(),
           {}},
      });
}

}  // namespace emulator
