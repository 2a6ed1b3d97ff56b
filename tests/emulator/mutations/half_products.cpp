// Mistakes in what reads caches of 8 bits where products are of f16, and in how warps copy the keys that they have.

#include <utility>

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"
#include "emulator/paged_specs.hpp"

namespace emulator {

std::vector<Mutation> own_keys_mutations() {
  using enum FaultKind;
  return in("sm80/sm80_own_keys.cuh",
            {
                {"own_keys_of_the_first_ones_page",
                 "ptx::shfl(page, of_tile % kKeys)",
                 "ptx::shfl(page, 0)",
                 sm80_own_keys(),
                 {global_uninitialised}},
                {"own_keys_of_one_page_alone",
                 "i * kStep % kTogether == 0",
                 "i == 0",
                 sm80_half_tile(),
                 {global_uninitialised}},
                {"own_scales_of_the_first_ones_page",
                 "page = ptx::shfl(at.page, row);",
                 "page = ptx::shfl(at.page, 0);",
                 sm80_own_keys(),
                 {global_uninitialised}},
                {"own_scales_of_keys_for_values",
                 "const int slot = word >= kKeyWords ? word - kKeyWords + Block::kKeyScales : word;",
                 "const int slot = word ^ 1;",
                 sm80_own_keys(),
                 {}},
            });
}

std::vector<Mutation> half_tile_mutations() {
  return in("sm80/sm80_forward_epilogue.cuh", {{"half_tiles_store_rows_of_the_next",
                                                "Forward::kHalfTile ? kTileM : Forward::kWarpRows",
                                                "Forward::kWarpRows",
                                                sm80_half_tile(),
                                                {}}});
}

std::vector<Mutation> half_products_mutations() {
  using enum FaultKind;
  return in(
      "sm80/sm80_half_products.cuh",
      {
          {"half_rows_in_the_order_of_memory",
           "lane / 8 * 8 + lane % 2 * 4 + lane % 8 / 2",
           "lane",
           sm80_own_keys(),
           {}},
          {"half_rows_written_before_all_have_read",
           "ptx::sync_warp();  // all have read the row",
           "// all have read the row",
           sm80_own_keys(),
           {shared_race}},
          {"half_rows_not_divided", "s[m][n][2 * r] *= inverse;", "", sm80_own_keys(), {}},
          {"lift_leaves_o_behind", "power_of_two(within(grown, 126))", "power_of_two(0 * grown)", sm80_own_keys(), {}},
          {"lift_not_undone", "power_of_two(exponent_of(greatest[m][r]) - kTarget)", "1.f", sm80_own_keys(), {}},
      });
}

std::vector<Mutation> own_keys_forward_mutations() {
  using enum FaultKind;
  return in("sm80/sm80_forward.cuh", {
                                         {"own_keys_of_the_page_of_the_tile_before",
                                          "walk.keys.page = own.page(next - 1);",
                                          "walk.keys.page = own.page(next);",
                                          sm80_own_keys(),
                                          {}},
                                         {"queries_read_before_they_are_halves",
                                          "meet_at_queries();  // Q is of f16",
                                          "// Q is of f16",
                                          sm80_own_keys(),
                                          {shared_race, shared_uninitialised}},
                                     });
}

}  // namespace emulator
