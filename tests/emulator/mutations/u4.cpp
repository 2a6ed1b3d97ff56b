// Mistakes in what reads and writes caches of 4 bits.

#include <utility>

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"
#include "emulator/paged_specs.hpp"

namespace emulator {

std::vector<Mutation> latent_mutations() {
  using enum FaultKind;
  std::vector<Mutation> list =
      in("sm80/sm80_latent.cuh",
         {
             {"latent_rows_widened_before_all_lanes_read", "ptx::sync_warp();", "", sm80_latent(), {shared_race}},
             {"latent_scale_of_another_group",
              "16 * lane / kGroup * 4",
              "(16 * lane / kGroup + 1) % 4 * 4",
              sm80_latent(),
              {}},
             {"latent_codes_in_another_order",
              "i % 2 == 0 ? e4m3::pair<T, Bytes::first>(word) : e4m3::pair<T, Bytes::last>(word)",
              "e4m3::pair<T, Bytes::first>(word)",
              sm80_latent(),
              {}},
             {"latent_rotary_from_the_scales",
              "ptx::ld_shared_b32(from + kRotary + 4 * lane)",
              "ptx::ld_shared_b32(from + kCodes + 4 * lane)",
              sm80_latent(),
              {}},
         });
  for (Mutation& mutation :
       in("sm80/sm80_forward.cuh", {
                                       {"latent_rows_read_before_they_are_wide",
                                        "ptx::sync_threads();  // K, and V, are of the queries' type",
                                        "",
                                        sm80_latent(),
                                        {shared_race, shared_uninitialised}},
                                   })) {
    list.push_back(std::move(mutation));
  }
  return list;
}

std::vector<Mutation> u4_mutations() {
  return in(
      "sm80/sm80_u4.cuh",
      {
          {"u4_depth_of_q_not_permuted",
           "Tile::offset(lane / 4, 8 * (lane % 4)) + Tile::offset(row, k / 2 * 32 + k % 2 * 4)",
           "Tile::offset(lane / 4, 4 * (lane % 4)) + Tile::offset(row, 16 * k)",
           sm80_u4(),
           {}},
          {"u4_scale_of_another_key", "(kInPlace ? 2 * (lane % 4) : lane / 4)", "(lane % 4)", sm80_u4(), {}},
          {"u4_values_of_one_group",
           "const uint32_t of_group = own + group_of(c + half) * kPitch * kWord;",
           "const uint32_t of_group = own;",
           sm80_u4(),
           {}},
          {"u4_values_of_the_lower_keys",
           "numbers(pairs[1], b[2 * half + 1], of_group + 8 * kWord);",
           "numbers(pairs[1], b[2 * half + 1], of_group);",
           sm80_u4(),
           {}},
          {"u4_columns_of_o_not_restored", "exchange(o[m][n + 1][r], o[m][n + 3][r], lane, 2);", "", sm80_u4(), {}},
      });
}

std::vector<Mutation> u4_in_place_mutations() {
  return in("sm80/sm80_u4.cuh",
            {
                {"u4_parts_of_s_go_on_into_the_next_group",
                 "if (32 * chunk % Stored::kGroup == 0) {",
                 "if (chunk == 0) {",
                 sm80_u4_in_place(),
                 {}},
                {"u4_sums_of_q_without_the_second_half",
                 "0x3c003c00u, 0x4c004c00u",
                 "0x3c003c00u, 0u",
                 sm80_u4_in_place(),
                 {}},
                {"u4_sums_of_q_of_another_group",
                 "4 * step + lane % 4 < kGroups ? 4 * step + lane % 4 : kGroups - 1",
                 "0",
                 sm80_u4_in_place(),
                 {}},
                {"u4_offsets_of_another_key", "p[0][n][i % 2 * 2 + i / 2]", "p[0][n][i]", sm80_u4_in_place(), {}},
                {"u4_scales_of_one_group_for_p",
                 "if (32 * (c + half) % Stored::kGroup == 0) scaled_step",
                 "if (c + half == 0) scaled_step",
                 sm80_u4_in_place(),
                 {}},
                {"u4_lift_beyond_f16", "kTarget = 14,", "kTarget = 20,", sm80_u4_in_place(), {}},
                {"u4_odd_tiles_as_even_ones", "(n % 2 == 0 ? 0x1p24f : 0x1p20f)", "0x1p24f", sm80_u4_in_place(), {}},
                {"u4_offsets_of_a_neighbouring_group",
                 "o[0][kOTiles - 1][2 * r + group % 2]",
                 "o[0][kOTiles - 1][2 * r]",
                 sm80_u4_in_place(),
                 {}},
            });
}

std::vector<Mutation> u4_number_mutations() {
  return in("common/u4.cuh",
            {
                {"u4_codes_in_the_order_of_bytes", "word >> 4 * kPair", "word >> 4 * (kPair ^ 1)", sm80_u4(), {}},
                {"u4_codes_without_offsets",
                 "pairs[3] = ptx::fma_pair<T>(NibblePairs<T>::template codes<3>(word), scale, offset);",
                 "pairs[3] = ptx::fma_pair<T>(NibblePairs<T>::template codes<3>(word), scale, 0u);",
                 sm80_u4(),
                 {}},
            });
}

}  // namespace emulator
