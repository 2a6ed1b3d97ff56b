// Mistakes in what ends a query tile of the Hopper forward.

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"
#include "emulator/paged_specs.hpp"

namespace emulator {

std::vector<Mutation> sm90_epilogue_mutations() {
  using enum FaultKind;
  return in("sm90/sm90_epilogue.cuh", {
                                          {"hopper_rows_before_the_first_stored",
                                           "if (lane == 0 && first_row >= 0) {",
                                           "if (lane == 0) {",
                                           sm90_own_ends(),
                                           {bad_descriptor}},
                                          {"hopper_sums_before_the_first_stored",
                                           "if (has_row(query, first_row)) ptx",
                                           "if (first_row < row_count(query)) ptx",
                                           sm90_own_ends(),
                                           {global_out_of_bounds, global_not_writable}},
                                          {"hopper_lse_past_the_end",
                                           "if (has_row(query, first_row)) ptx::st_global(target, lse[0]);",
                                           "ptx::st_global(target, lse[0]);",
                                           sm90(),
                                           {global_out_of_bounds, global_not_writable}},
                                          {"hopper_parts_stored_as_the_whole",
                                           "return !query.sharing.piece().is_whole();",
                                           "return query.sharing.piece().is_whole() && false;",
                                           sm90_scheduled(),
                                           {}},
                                      });
}

}  // namespace emulator
