// Mistakes in what reads pages.

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"
#include "emulator/paged_specs.hpp"

namespace emulator {

std::vector<Mutation> paged_mutations() {
  using enum FaultKind;
  return in("common/paged.cuh", {
                                    {"entries_behind_the_last_key",
                                     "|| index * int64_t{kPageSize} >= end) return -1;",
                                     ") return -1;",
                                     sm80_paged(),
                                     {global_out_of_bounds, global_uninitialised}},
                                    {"entries_in_front_of_the_first_key",
                                     "if (index < page_index(begin) ||",
                                     "if (",
                                     sm80_paged(),
                                     {global_out_of_bounds, global_uninitialised}},
                                    {"keys_in_front_of_the_first_are_read",
                                     "return key >= begin && key < end",
                                     "return key < end",
                                     sm80_paged(),
                                     {global_uninitialised}},
                                    {"keys_behind_the_last_are_read",
                                     "return key >= begin && key < end",
                                     "return key >= begin",
                                     sm80_paged(),
                                     {global_uninitialised}},
                                    {"row_of_a_shorter_page",
                                     "return static_cast<uint32_t>(key) % static_cast<uint32_t>(kPageSize);",
                                     "return static_cast<uint32_t>(key) % static_cast<uint32_t>(kPageSize - 1);",
                                     sm80_paged(),
                                     {global_uninitialised}},
                                    {"table_row_of_the_request",
                                     "if (paged.batch_index != nullptr) row =",
                                     "if (false) row =",
                                     sm80_paged(),
                                     {global_out_of_bounds, global_uninitialised}},
                                    {"first_position_ignored",
                                     "begin == nullptr ? 0 : clamp(ptx::ld_global(begin + batch), 0, request.s_kv);",
                                     "begin == nullptr ? 0 : 0;",
                                     sm80_paged(),
                                     {global_out_of_bounds, global_uninitialised}},
                                    {"rows_stand_at_the_first_keys",
                                     "request.diagonal = request.s_kv - request.s_q;",
                                     "request.diagonal = 0;",
                                     sm80_paged(),
                                     {}},
                                });
}

std::vector<Mutation> paged_copy_mutations() {
  using enum FaultKind;
  return in(
      "common/shared_tile.cuh",
      {
          {"one_page_for_all_rows",
           "step > 0 && step * kRowStep % kPageSize != 0;",
           "step > 0;",
           sm80_paged(),
           {global_uninitialised}},
          {"absent_keys_are_no_zeros",
           "copy_row(tile + Tile::offset(row, 0), pointer, step, kRows - row, valid ? kRows : 0, thread % kLanes);",
           "if (valid) copy_row(tile + Tile::offset(row, 0), pointer, step, kRows - row, kRows, thread % kLanes);",
           sm80_paged(),
           {shared_uninitialised}},
          {"keys_in_front_of_a_contiguous_request_are_read",
           "row + i * kRowStep >= begin ? end - row : 0;",
           "row + i * kRowStep >= begin ? end - row : end - row;",
           sm80_contiguous(),
           {global_uninitialised}},
      });
}

std::vector<Mutation> kept_keys_mutations() {
  return in("common/kept_keys.cuh", {
                                        {"tile_of_the_first_draft_kept",
                                         "maximum(Variant::kept_keys(params.variant, at), 0) / kTileN;",
                                         "maximum(Variant::kept_keys(params.variant, at), 0) / kTileN + 1;",
                                         over_pages("tree", Family::sm90),
                                         {}},
                                        {"context_of_the_longest_request",
                                         "lengths.s_q, lengths.s_kv, 0.f};",
                                         "lengths.s_q, params.s_kv, 0.f};",
                                         over_pages("tree", Family::sm80),
                                         {}},
                                    });
}

std::vector<Mutation> paged_forward_mutations() {
  using enum FaultKind;
  return joined({in("sm80/sm80_forward.cuh",
                    {
                        {"pages_that_no_row_sees",
                         "first_read = keys_begin<Variant>(params, lengths, rows.position(block_row));",
                         "first_read = 0;",
                         sm80_paged(),
                         {global_out_of_bounds, global_uninitialised}},
                        {"draft_taken_for_context",
                         "if (!kKeepsFirst || n_block >= range.kept_end) apply_mask(s, n_block);",
                         "if (!kKeepsFirst || n_block > range.kept_end) apply_mask(s, n_block);",
                         over_pages("tree", Family::sm80),
                         {}},
                    }),
                 in("sm80/sm80_forward_scores.cuh",
                    {
                        {"hidden_keys_in_front_count",
                         "begins[m][r] = keys_begin<Variant>(params, lengths, position) - first;",
                         "begins[m][r] = -first;",
                         sm80_paged(),
                         {}},
                    }),
                 in("sm80/sm80_forward_block.cuh", {
                                                       {"pages_of_the_first_head",
                                                        "static_cast<const Element*>(base) + rows.kv_head() * stride_h",
                                                        "static_cast<const Element*>(base) + 0 * stride_h",
                                                        sm80_paged(),
                                                        {}},
                                                       {"cache_row_of_the_request_before_its_index",
                                                        "cache + table_row * stride_b +",
                                                        "cache + tile.batch * stride_b +",
                                                        sm80_contiguous(),
                                                        {global_uninitialised}},
                                                       {"contiguous_keys_of_the_longest_request",
                                                        "end = lengths.s_kv - first;",
                                                        "end = params.s_kv - first;",
                                                        sm80_contiguous(),
                                                        {global_uninitialised}},
                                                       {"contiguous_keys_of_the_first_head",
                                                        "rows.kv_head() * stride_h + first * stride_s;",
                                                        "0 * stride_h + first * stride_s;",
                                                        sm80_contiguous(),
                                                        {}},
                                                   })});
}

}  // namespace emulator
