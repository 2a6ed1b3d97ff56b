// Mistakes in the forward on mma.sync.

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"

namespace emulator {

namespace {

/// Copies, and what waits for them.
std::vector<Mutation> copies() {
  using enum FaultKind;
  return in(
      "sm80/sm80_forward.cuh",
      {{"no_wait_before_k", "ptx::cp_async_wait<(kStages == 1 ? 1 : kStages - 2)>();", "", sm80(2), {shared_in_flight}},
       {"wait_leaves_one_group_too_many",
        "(kStages == 1 ? 1 : kStages - 2)",
        "(kStages - 1)",
        sm80(3),
        {shared_in_flight}},
       {"no_commit_in_loop",
        "    ptx::cp_async_commit();\n\n    Fragment",
        "\n    Fragment",
        sm80(2),
        {shared_in_flight, copies_at_exit}},
       {"v_waits_for_nothing",
        "ptx::cp_async_wait<0>();\n      ptx::sync_threads();",
        "ptx::sync_threads();",
        sm80(1),
        {shared_in_flight}},
       {"q_in_registers_without_wait",
        "ptx::cp_async_wait<0>();\n      ptx::sync_warp();",
        "ptx::sync_warp();",
        sm80_q_in_registers(),
        {shared_in_flight}},
       {"loads_one_tile_too_many",
        "if (n_block > range.begin) load_k(n_block - 1, 0);",
        "load_k(n_block > 0 ? n_block - 1 : 0, 0);",
        sm80(1),
        {copies_at_exit}}});
}

/// Barriers of the block and of warps.
std::vector<Mutation> barriers() {
  using enum FaultKind;
  return in("sm80/sm80_forward.cuh",
            {{"no_barrier_before_k",
              "ptx::sync_threads();  // this tile's K",
              "// this tile's K",
              sm80(2),
              {shared_race, shared_in_flight}},
             {"no_barrier_before_refill",
              "ptx::sync_threads();  // V has landed",
              "// V has landed",
              sm80(1),
              {shared_race, shared_in_flight}},
             {"no_warp_barrier_after_q",
              "ptx::sync_warp();  // the other lanes'",
              "// the other lanes'",
              sm80_q_in_registers(),
              {shared_race}},
             {"barrier_in_half_a_warp",
              "ptx::sync_threads();  // this tile's K",
              "if (lane < 16) ptx::sync_threads();  // this tile's K",
              sm80(1),
              {divergence}},
             {"barrier_in_one_warp",
              "ptx::sync_threads();  // V has landed",
              "if (warp == 0) ptx::sync_threads();  // V has landed",
              sm80(1),
              {deadlock, shared_race}},
             {"rows_beyond_the_end_leave_early",
              "    if (range.begin < range.end) {\n      read_what_stays();",
              "    if (this->warp_row >= row_count) return;\n    if (range.begin < range.end) {\n      "
              "read_what_stays();",
              sm80(1),
              {deadlock}},
             {"no_barrier_before_maxima",
              "pair().meet();  // the maxima are in",
              "static_cast<void>(0);  // the maxima are in",
              sm80_pair(2),
              {shared_race, shared_uninitialised}},
             {"no_block_barrier_before_maxima",
              "ptx::sync_threads();  // V has landed",
              "// V has landed",
              sm80_pair(1),
              {shared_race, shared_uninitialised, shared_in_flight}}});
}

/// What the block loads.
std::vector<Mutation> block() {
  using enum FaultKind;
  return in("sm80/sm80_forward_block.cuh",
            {{"rows_past_the_end_of_kv", "lengths.s_kv - first,", "kTileN,", sm80(1), {global_out_of_bounds}, 2},
             {"q_rows_past_the_end",
              "const int valid = row_count - warp_row;",
              "const int valid = kWarpRows;",
              sm80(1),
              {global_out_of_bounds}},
             {"packed_rows_past_the_end",
              "const int valid = row_count - warp_row;",
              "const int valid = kWarpRows;",
              sm80_packed_gqa(),
              {global_out_of_bounds}}});
}

}  // namespace

std::vector<Mutation> sm80_forward_mutations() {
  return joined({copies(), barriers(), block()});
}

std::vector<Mutation> sm80_forward_epilogue_mutations() {
  using enum FaultKind;
  return in("sm80/sm80_forward_epilogue.cuh",
            {
                {"o_staged_over_q",
                 "ptx::sync_warp();  // every lane has read",
                 "// every lane has read",
                 sm80(2),
                 {shared_race}},
                {"rows_leave_before_they_are_staged",
                 "ptx::sync_warp();  // the warp's rows",
                 "// the warp's rows",
                 sm80(1),
                 {shared_race, shared_uninitialised}},
                {"half_rows_leave_before_they_are_staged",
                 "f.meet();  // the rows of O of warps",
                 "// the rows of O of warps",
                 sm80_pair(1),
                 {shared_race, shared_uninitialised}},
                {"columns_of_o_twice",
                 "f.first_o_column() + 8 * n + 2 * (f.lane % 4)),",
                 "8 * n + 2 * (f.lane % 4)),",
                 sm80_pair(1),
                 {shared_race, shared_uninitialised}},
                {"o_past_the_end",
                 "if (f.warp_row + row >= f.row_count) break;",
                 "",
                 sm80(1),
                 {global_out_of_bounds, global_not_writable}},
                {"lse_past_the_end",
                 "f.lane % 4 == 0 && row < f.row_count",
                 "f.lane % 4 == 0",
                 sm80(1),
                 {global_out_of_bounds}},
                {"wide_stores_to_unaligned_rows",
                 "ptx::st_global(target, T{ptx::ld_shared_b16(source)});",
                 "ptx::st_global(reinterpret_cast<uint32_t*>(target), uint32_t{ptx::ld_shared_b16(source)});",
                 sm80_unaligned(),
                 {misaligned, global_not_writable}},
                {"partials_of_one_split_only",
                 "static_cast<int64_t>(f.tile.split) * f.params.b",
                 "static_cast<int64_t>(0) * f.params.b",
                 sm80_split(),
                 {global_uninitialised}},
            });
}

std::vector<Mutation> sm80_group_mutations() {
  using enum FaultKind;
  return in(
      "sm80/sm80_forward.cuh",
      {
          {"group_p_is_read_before_it_is_there",
           "group().meet();  // P of all keys",
           "// P of all keys",
           sm80_group(2),
           {shared_race, shared_uninitialised}},
          {"group_maxima_are_read_before_they_are_there",
           "if constexpr (kStages > 1) group().meet();  // all maxima",
           "// all maxima",
           sm80_group(2),
           {shared_race, shared_uninitialised}},
          {"groups_have_own_sums_only", "if constexpr (kGroups) group().add_sums(softmax.sum);", "", sm80_group(1), {}},
          {"groups_take_the_first_columns",
           "v_shared(stage) + VTile::offset(0, first_o_column())",
           "v_shared(stage)",
           sm80_group(1),
           {}},
      });
}

std::vector<Mutation> sm80_warp_group_mutations() {
  using enum FaultKind;
  return in("sm80/sm80_warp_group.cuh",
            {
                {"group_sums_before_all_have_told",
                 "meet();  // the sums are in",
                 "// the sums are in",
                 sm80_group(1),
                 {shared_race}},
                {"group_maxima_of_own_keys_only",
                 "result[m][r] = ptx::max(result[m][r], ptx::from_bits(ptx::ld_shared_b32(statistic(from, m, r))));",
                 "result[m][r] = ptx::from_bits(ptx::ld_shared_b32(statistic(warp % kWarpsN, m, r)));",
                 sm80_group(1),
                 {}},
                {"group_p_in_the_place_of_others",
                 "warp % kWarpsN * 8 * kNTiles + 2 * (lane % 4)",
                 "2 * (lane % 4)",
                 sm80_group(1),
                 {shared_race, shared_uninitialised}},
            });
}

std::vector<Mutation> sm80_warp_pair_mutations() {
  using enum FaultKind;
  return in(
      "sm80/sm80_warp_pair.cuh",
      {
          {"own_values_for_the_others_p", "(1 - part) * kKeys", "part * kKeys", sm80_pair(1), {}},

          {"p_is_not_announced", "ptx::barrier_arrive(1 + (warp ^ 1), 2 * kWarpSize);", "", sm80_pair(1), {deadlock}},
          {"p_is_not_waited_for",
           "ptx::barrier_sync(1 + warp, 2 * kWarpSize);",
           "",
           sm80_pair(1),
           {shared_race, shared_uninitialised}},
          {"sums_before_the_partner_has_told",
           "meet();  // the sums are in",
           "// the sums are in",
           sm80_pair(1),
           {shared_race, shared_uninitialised}},
          {"maxima_of_own_keys_only",
           "ptx::max(ptx::from_bits(own.word[i]), ptx::from_bits(other.word[i]))",
           "ptx::from_bits(own.word[i] + 0 * other.word[i])",
           sm80_pair(1),
           {}},
          {"sums_of_own_keys_only",
           "+= ptx::from_bits(other.word[i])",
           "+= 0.f * ptx::from_bits(other.word[i])",
           sm80_pair(1),
           {}},
      });
}

std::vector<Mutation> sm80_mma16_mutations() {
  using enum FaultKind;
  return in("sm80/sm80_mma16.cuh", {
                                       {"divergent_ldmatrix",
                                        "for (int n = 0; n + 1 < kHeadDimV / 8; n += 2) {",
                                        "for (int n = 0; n + 1 < kHeadDimV / 8 - (lane == 7 ? 2 : 0); n += 2) {",
                                        sm80(1),
                                        {divergence}},
                                   });
}

std::vector<Mutation> sm80_tf32x3_mutations() {
  using enum FaultKind;
  return in("sm80/sm80_tf32x3.cuh", {
                                        {"fp32_v_of_the_next_stage",
                                         "VTile::offset(2 * (lane % 4), lane / 4)",
                                         "VTile::offset(2 * (lane % 4) + kNTiles * 8, lane / 4)",
                                         sm80_fp32(),
                                         {shared_out_of_bounds, shared_uninitialised}},
                                    });
}

}  // namespace emulator
