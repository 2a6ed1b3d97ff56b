// Mistakes in what reads caches of 8 bits where products are of f16, and in how warps copy the keys that they have.

#include <utility>

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"
#include "emulator/paged_specs.hpp"

namespace emulator {

std::vector<Mutation> own_keys_mutations() {
  using enum FaultKind;
  return in("sm80/sm80_own_keys.cuh", {
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
                                           "(lane() / kKeys * Block::kTileN + own()",
                                           "((lane() / kKeys ^ 1) * Block::kTileN + own()",
                                           sm80_own_keys(),
                                           {}},
                                          {"own_keys_of_the_last_tile_again",
                                           "at.v -= Block::kTileN * f.params.stride_v_s;",
                                           "",
                                           sm80_half_tile_contiguous(),
                                           {global_uninitialised}},
                                      });
}

std::vector<Mutation> half_tile_mutations() {
  using enum FaultKind;
  std::vector<Mutation> list =
      in("sm80/sm80_forward_epilogue.cuh", {{"half_tiles_store_rows_of_the_next",
                                             "Forward::kHalfTile ? kTileM : Forward::kWarpRows",
                                             "Forward::kWarpRows",
                                             sm80_half_tile(),
                                             {}}});
  const auto add = [&list](std::vector<Mutation> more) {
    for (Mutation& mutation : more) list.push_back(std::move(mutation));
  };
  add(in("common/online_softmax.cuh", {
                                          {"transposed_o_shrinks_odd_rows_as_even_ones",
                                           "ptx::shfl(ptx::bits(factor), first + 4 * e)",
                                           "ptx::shfl(ptx::bits(factor), first + e)",
                                           sm80_half_tile(),
                                           {}},
                                          {"maxima_of_a_lane_for_those_of_its_quad",
                                           "new_max[0][0] = quad_max(own);",
                                           "new_max[0][0] = own;",
                                           sm80_half_tile(),
                                           {}},
                                          {"offsets_of_the_maxima_before",
                                           "offsets[0][0] = offset(new_max[0][0], scale_log2);",
                                           "offsets[0][0] = offset(max[0][0], scale_log2);",
                                           sm80_half_tile(),
                                           {}},
                                      }));
  add(in("sm80/sm80_products.cuh", {{"transposed_tiles_of_the_lower_keys",
                                     "{even[0], odd[0], even[1], odd[1]}",
                                     "{even[0], odd[0], even[0], odd[0]}",
                                     sm80_half_tile(),
                                     {}}}));
  add(in("sm80/sm80_stored.cuh",
         {{"transposed_columns_of_halves", "16 * n + 2 * g + half", "16 * n + 8 * half + g", sm80_half_tile(), {}}}));
  add(in("sm80/sm80_split_warps.cuh", {{"transposed_rows_of_o_as_they_were",
                                        "2 * (lane % 4) + e % 2;",
                                        "lane % 4 + 4 * (e % 2);",
                                        sm80_half_tile(),
                                        {}}}));
  add(in("sm80/sm80_u4.cuh", {
                                 {"u4_transposed_columns_in_the_order_of_tiles",
                                  "g / 2 * 8 + n % 2 * 4",
                                  "g / 2 * 8 + n % 2 * 2",
                                  sm80_u4_half_tile(),
                                  {shared_uninitialised}},
                                 {"u4_transposed_offsets_of_one_key",
                                  "{even, even, odd, odd}",
                                  "{even, even, even, even}",
                                  sm80_u4_half_tile(),
                                  {}},
                                 {"u4_transposed_odd_columns_as_even_ones",
                                  "(i % 4 < 2 ? 0x1p24f : 0x1p20f)",
                                  "0x1p24f",
                                  sm80_u4_half_tile(),
                                  {}},
                                 {"u4_transposed_offsets_of_the_first_group",
                                  "4 * group + lane % 4)",
                                  "0 * group + lane % 4)",
                                  sm80_u4_half_tile(),
                                  {}},
                             }));
  return list;
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
