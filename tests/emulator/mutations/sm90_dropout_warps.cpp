// Mistakes in the dropout RNG warps.

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"

namespace emulator {

std::vector<Mutation> sm90_dropout_warps_mutations() {
  using enum FaultKind;
  return in("sm90/sm90_dropout_warps.cuh",
            {
                {"hopper_mask_drawn_without_waiting",
                 "ptx::mbarrier_wait(mask_empty(slot.index), slot.parity ^ 1);",
                 "",
                 sm90_dropout(),
                 {shared_race, shared_uninitialised, barrier_misuse, deadlock}},
                {"hopper_mask_announced_before_all_lanes_have_written_it",
                 "ptx::sync_warp();  // the warp's rows are complete\n        release(mask_full",
                 "release(mask_full",
                 sm90_dropout(),
                 {shared_race, shared_uninitialised}},
                {"hopper_job_not_released_by_drawers",
                 "release(q_empty(q_slot.index), lane);  // of Q",
                 "// of Q",
                 sm90_dropout(),
                 {deadlock}},
                {"hopper_columns_drawn_before_all_lanes_have_written_them",
                 "store_column_bits(stream, warp, n, lane);\n          ptx::sync_warp();",
                 "store_column_bits(stream, warp, n, lane);",
                 sm90_dropout(),
                 {shared_race, shared_uninitialised}},
                {"hopper_draws_of_odd_tiles_not_turned",
                 "return kPSteps % 2 != 0 && n % 2 != 0;",
                 "return kPSteps % 2 != 0 && n % 2 > 1;",
                 sm90_dropout(),
                 {}},
                {"hopper_drawers_stay_with_their_rows",
                 "if constexpr (kKeepsRowBits) {\n        FA_UNROLL\n        for",
                 "if constexpr (kKeepsRowBits) {\n        if (cursor.query.tile.m_block == 0) for",
                 sm90_dropout(),
                 {shared_uninitialised}},
            });
}

}  // namespace emulator
