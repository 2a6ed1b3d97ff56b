// Mistakes in what tiles of few rows do by themselves in the Hopper forward: waits of each role, and the last query
// tile.

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"
#include "emulator/paged_specs.hpp"

namespace emulator {
namespace {

/// One block has all query tiles.
KernelSpec few_rows() {
  KernelSpec spec = sm90_split();
  spec.tile_m = 64;
  spec.warps = 8;
  spec.as<fa::plan::Sm90Forward>().take_turns = false;
  return spec;
}

/// Each role waits for the kernel before.
std::vector<Mutation> waits() {
  using enum FaultKind;
  return joined(
      {in("sm90/sm90_producer.cuh",
          {{"few_rows_q_and_k_beside_the_kernel_before",
            "announce_k(second);\n}\nptx::griddepcontrol_wait();",
            "announce_k(second);\n}",
            few_rows(),
            {too_early}},
           {"few_rows_v_beside_the_kernel_before",
            "announce_v(second);\n}\nptx::griddepcontrol_wait();",
            "announce_v(second);\n}",
            few_rows(),
            {too_early}},
           {"few_rows_lengths_beside_the_kernel_before",
            "if constexpr (!Base::kRowsAhead) ptx::griddepcontrol_wait();  // lengths and lists may be new",
            "",
            sm90_scheduled(),
            {too_early}},
           {"few_rows_pages_of_v_beside_the_kernel_before",
            "FA_DEVICE void produce_v(bool leads) const {\nif constexpr (Base::kRolesWait) {\nif constexpr "
            "(!Base::kRowsAhead) ptx::griddepcontrol_wait();",
            "FA_DEVICE void produce_v(bool leads) const {\nif constexpr (Base::kRolesWait) {",
            sm90_scheduled(),
            {too_early}}}),
       in("sm90/sm90_walks.cuh", {{"few_rows_pages_beside_the_kernel_before",
                                   "ptx::compute_ahead(query.ahead.q_row);\nif (guessed) ptx::griddepcontrol_wait();",
                                   "ptx::compute_ahead(query.ahead.q_row);",
                                   sm90_splits_request(),
                                   {too_early}},
                                  {"few_rows_by_a_length_that_is_guessed",
                                   "if (!ptx::vote_any(keys != guess)) break;",
                                   "if (!ptx::vote_any(keys != keys + 0 * guess)) break;",
                                   sm90_splits_request(),
                                   {deadlock, barrier_misuse, global_uninitialised}}}),
       in("sm90/sm90_forward.cuh",
          {{"few_rows_stored_beside_the_kernel_before",
            "if constexpr (kRolesWait) ptx::griddepcontrol_wait();\nif constexpr (!kEmptyWarp",
            "if constexpr (!kEmptyWarp",
            few_rows(),
            {too_early}},
           {"few_rows_without_keys_beside_the_kernel_before",
            "if constexpr (kRolesWait) ptx::griddepcontrol_wait();\nepilogue().store_empty_tiles(lane);",
            "epilogue().store_empty_tiles(lane);",
            sm90_scheduled(),
            {too_early}},
           {"few_rows_barriers_without_block_barrier",
            "ptx::sync_threads();",
            "",
            few_rows(),
            {barrier_misuse, shared_race}}})});
}

/// Who knows of the last query tile, and where rows go.
std::vector<Mutation> last_tiles() {
  using enum FaultKind;
  return joined({in("sm90/sm90_producer.cuh", {{"few_rows_every_tile_is_the_last",
                                                "{!has_tile(own, round + 1), row_of_q(work)}",
                                                "{true, row_of_q(work)}",
                                                few_rows(),
                                                {deadlock, global_uninitialised}}}),
                 in("sm90/sm90_schedule.cuh", {{"few_rows_last_tile_not_told",
                                                "query.ahead.last ? ~query.tile.split : query.tile.split",
                                                "query.tile.split",
                                                few_rows(),
                                                {deadlock}},
                                               {"few_rows_split_of_the_last_tile_mistaken",
                                                "if (query.ahead.last) query.tile.split = ~query.tile.split;",
                                                "if (query.ahead.last) query.tile.split = 0;",
                                                sm90_splits_request(),
                                                {global_uninitialised}}}),
                 in("sm90/sm90_forward.cuh",
                    {{"few_rows_of_the_last_tile_not_finished",
                      "if (at.query.ahead.last) epilogue()",
                      "if (false) epilogue()",
                      few_rows(),
                      {global_uninitialised}},
                     {"few_rows_go_where_those_before_went",
                      "if constexpr (kRowsAhead) epilogue().find_rows(at.factors, at.query, at.warp_row, at.lane);",
                      "",
                      few_rows(),
                      {global_uninitialised}}}),
                 in("sm90/sm90_epilogue.cuh", {{"few_rows_past_the_end_stored",
                                                "factors.row[r] = has_row(query, row) ?",
                                                "factors.row[r] = true ?",
                                                few_rows(),
                                                {global_out_of_bounds, global_not_writable}}})});
}

}  // namespace

std::vector<Mutation> sm90_few_rows_mutations() {
  return joined({waits(), last_tiles()});
}

}  // namespace emulator
