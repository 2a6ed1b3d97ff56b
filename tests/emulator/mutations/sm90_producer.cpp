// Mistakes in the producers of the Hopper forward.

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"
#include "emulator/paged_specs.hpp"

namespace emulator {

namespace {

/// Boxes of pages.
std::vector<Mutation> boxes() {
  using enum FaultKind;
  return in("sm90/sm90_page_box.cuh",
            {{"hopper_box_of_a_page_ends_with_the_page",
              "kPageSize < 0 || behind < kPageSize ? behind : kPageSize;",
              "behind < 0 ? 0 : kPageSize;",
              sm90_paged(),
              {global_uninitialised}},
             {"hopper_box_of_a_contiguous_cache_ends_with_its_rows",
              "kPageSize < 0 || behind < kPageSize ? behind : kPageSize;",
              "behind < 0 ? 0 : row + kBoxRows;",
              sm90_contiguous(),
              {global_uninitialised, global_out_of_bounds}},
             {"hopper_box_of_a_page_not_brought_back",
              "return {kernel::kBoundedRows - end + row, head, end, kernel::kBoundedRows};",
              "return {kernel::kBoundedRows - end + row, head, kPageSize, kernel::kBoundedRows};",
              sm90_paged(),
              {global_uninitialised, global_out_of_bounds}},
             {"hopper_box_of_the_page_in_front",
              "return loads && needed < first + kBoxRows ? keys.template page_of<kGuessed>(needed) : -1;",
              "return loads && needed < first + kBoxRows ? keys.template page_of<kGuessed>(needed < kPageSize ? needed "
              ": needed - "
              "kPageSize) : -1;",
              sm90_paged(),
              {}}});
}

/// What the producer waits for and announces.
std::vector<Mutation> producer() {
  using enum FaultKind;
  return in(
      "sm90/sm90_producer.cuh",
      {{"hopper_pages_asked_for_too_far_ahead",
        "page = page_ahead(n - 1, work);",
        "page = page_ahead(n - 2, work);",
        sm90_own_parts(),
        {}},
       {"hopper_box_loaded_without_waiting",
        "ptx::mbarrier_wait(empty, parity ^ 1);",
        "if (lane > kWarpSize) ptx::mbarrier_wait(empty, parity ^ 1);",
        sm90_paged(),
        {source_overwritten, shared_race, shared_in_flight, barrier_misuse}},
       {"hopper_boxes_announce_a_slab",
        "ptx::mbarrier_arrive_expect_tx(full, Tile::kBytes);",
        "ptx::mbarrier_arrive_expect_tx(full, Tile::kBytes / 2);",
        sm90_paged(),
        {deadlock, shared_in_flight, shared_uninitialised, barrier_misuse}},
       {"hopper_k_loaded_without_waiting",
        "ptx::mbarrier_wait(k_empty(slot.index), slot.parity ^ 1);",
        "",
        sm90(),
        {source_overwritten, shared_race, shared_in_flight, barrier_misuse}},
       {"hopper_wrong_parity_of_empty",
        "ptx::mbarrier_wait(v_empty(slot.index), slot.parity ^ 1);",
        "ptx::mbarrier_wait(v_empty(slot.index), slot.parity);",
        sm90(),
        {deadlock}},
       {"hopper_too_many_bytes_announced",
        "mbarrier_arrive_expect_tx(k_full(slot.index), KTile::kBytes);",
        "mbarrier_arrive_expect_tx(k_full(slot.index), KTile::kBytes + 16);",
        sm90(),
        {deadlock}},
       {"hopper_one_slab_announced",
        "mbarrier_arrive_expect_tx(v_full(slot.index), VTile::kBytes);",
        "mbarrier_arrive_expect_tx(v_full(slot.index), VTile::kSlabBytes);",
        sm90(),
        {deadlock, shared_in_flight, shared_uninitialised}},
       {"hopper_tile_of_the_counter_left_out",
        "next = ptx::block_count() +",
        "next = 1 + ptx::block_count() +",
        sm90_own_ends(),
        {global_uninitialised}},
       {"hopper_job_not_announced_to_v",
        "if constexpr (kDynamic) ptx::mbarrier_arrive(work_full(slot.index));",
        "",
        sm90_own_ends(),
        {deadlock}},
       {"hopper_job_not_released_by_v", "ptx::mbarrier_arrive(q_empty(slot.index));", "", sm90_own_ends(), {deadlock}},
       {"hopper_k_of_another_map",
        "p.map_k, k_full(slot.index)",
        "p.map_q, k_full(slot.index)",
        sm90(),
        {bad_descriptor}},
       {"hopper_listed_tile_not_posted",
        "if constexpr (kLists) ptx::st_shared_b32(listed_shared(slot.index), static_cast<uint32_t>(n));",
        "",
        sm90_variant("strided"),
        {shared_uninitialised}}});
}

/// Who waits for the work descriptor that the producer of V reads.
std::vector<Mutation> work_barriers() {
  using enum FaultKind;
  return in("sm90/sm90_forward_block.cuh", {{"hopper_work_barrier_of_two_arrivals",
                                             "ptx::mbarrier_init(work_full(i), 1);",
                                             "ptx::mbarrier_init(work_full(i), 2);",
                                             sm90_varlen_dynamic(),
                                             {deadlock}},
                                            {"hopper_work_released_without_v",
                                             "+ (kDynamic ? 1 : 0);",
                                             ";",
                                             sm90_paged_dynamic(),
                                             {barrier_misuse, shared_race, shared_in_flight}}});
}

/// Query tiles of ragged batches that come from a counter, which whole warps look for.
std::vector<Mutation> counter() {
  using enum FaultKind;
  return in("sm90/sm90_producer.cuh", {{"hopper_answer_of_the_counter_kept_by_a_lane",
                                        "index = kRagged ? ptx::shfl(next, 0) : next;",
                                        "index = next;",
                                        sm90_paged_dynamic(),
                                        {divergence, deadlock, barrier_misuse, shared_race}},
                                       {"hopper_answer_of_the_counter_kept_by_a_lane_of_a_packed_batch",
                                        "index = kRagged ? ptx::shfl(next, 0) : next;",
                                        "index = next;",
                                        sm90_varlen_dynamic(),
                                        {divergence, deadlock}},
                                       {"hopper_counter_asked_by_all_lanes",
                                        "if (leads) next = ptx::block_count() +",
                                        "next = ptx::block_count() +",
                                        sm90_paged_dynamic(),
                                        {}},
                                       {"hopper_last_tile_of_the_counter_left_out",
                                        "while (index < tiles) {",
                                        "while (index < tiles - 1) {",
                                        sm90_paged_dynamic(),
                                        {}},
                                       {"hopper_end_of_the_counter_not_announced_to_v",
                                        "if constexpr (kDynamic) ptx::mbarrier_arrive(work_full(q_slot.index));",
                                        "",
                                        sm90_varlen_dynamic(),
                                        {deadlock}},
                                       {"hopper_end_posted_by_all_lanes",
                                        "if (!leads) return;\n    } else if constexpr (kPostsPieces) {",
                                        "} else if constexpr (kPostsPieces) {",
                                        sm90_paged_dynamic(),
                                        {barrier_misuse, shared_race, deadlock}},
                                       {"hopper_work_released_before_all_lanes_have_read_it",
                                        "ptx::sync_warp();  // all lanes have read it",
                                        "",
                                        sm90_paged_dynamic(),
                                        {shared_race}},
                                       {"hopper_work_released_by_all_lanes",
                                        "release(q_empty(slot.index), ptx::thread_index() % kWarpSize);",
                                        "ptx::mbarrier_arrive(q_empty(slot.index)), release(q_empty(slot.index), 1);",
                                        sm90_paged_dynamic(),
                                        {barrier_misuse, shared_race}},
                                       {"hopper_values_of_another_request",
                                        "work.pages = pages_of(work);",
                                        "work.pages = {0, 0};",
                                        sm90_paged_dynamic(),
                                        {global_uninitialised, global_out_of_bounds}},
                                       {"hopper_values_of_a_packed_batch_copied_by_all_lanes",
                                        "if (!kPaged && !leads) return;",
                                        "",
                                        sm90_varlen_dynamic(),
                                        {barrier_misuse, shared_race, shared_in_flight, deadlock}},
                                       {"hopper_values_of_the_first_sequence",
                                        "work.sequence.first_key = read_first_key(slot.index);",
                                        "work.sequence.first_key = 0;",
                                        sm90_varlen_dynamic(),
                                        {global_uninitialised}}});
}

/// Boxes of all columns, and what is cleared behind the last key.
std::vector<Mutation> wide_boxes() {
  using enum FaultKind;
  return joined(
      {in("sm90/sm90_producer.cuh",
          {{"hopper_values_behind_the_last_key_not_cleared",
            "const bool clears = kClears && end < kTileN && end % kBoxRows != 0;",
            "const bool clears = false;",
            sm90_wide_boxes(),
            {}},
           {"hopper_first_value_behind_the_last_key_not_cleared",
            "for (; row % kBoxRows != 0; ++row) {",
            "for (++row; row % kBoxRows != 0; ++row) {",
            sm90_wide_boxes(),
            {}},
           {"hopper_values_cleared_in_the_first_slab",
            "if (lane < 8 * Tile::kSlabs) {",
            "if (lane < 8) {",
            sm90_wide_boxes(),
            {}},
           {"hopper_values_cleared_in_rows_of_a_plain_tile",
            "row / 8 * (8 * Tile::kStepBytes) + row % 8 * Tile::kRowBytes",
            "row * Tile::kRowBytes",
            sm90_wide_boxes(),
            {shared_race}},
           {"hopper_values_cleared_before_they_have_landed",
            "ptx::mbarrier_wait(v_landed(), 0);",
            "",
            sm90_wide_boxes(),
            {shared_race, shared_in_flight}},
           {"hopper_values_are_full_before_they_are_cleared",
            "const uint32_t landed = clears ? v_landed() : full;",
            "const uint32_t landed = full;",
            sm90_wide_boxes(),
            {shared_race, shared_in_flight, barrier_misuse, deadlock}},
           {"hopper_values_cleared_without_a_fence",
            "ptx::fence_proxy_async();  // in front of the products",
            "",
            sm90_wide_boxes(),
            {unfenced}},
           {"hopper_values_full_before_all_lanes_have_cleared",
            "ptx::sync_warp();          // all lanes have waited, and written",
            "",
            sm90_wide_boxes(),
            {shared_race}},
           {"hopper_landed_barrier_left_in_an_odd_phase",
            "ptx::mbarrier_arrive(v_landed());",
            "",
            changed(sm90_wide_boxes(), [](KernelSpec& spec) { spec.as<fa::plan::Sm90Forward>().dynamic = true; }),
            {deadlock, shared_race, shared_in_flight, barrier_misuse}},
           {"hopper_boxes_of_all_columns_a_slab_apart",
            "tile + lane * (kBoxRows * Tile::kStepBytes), map, landed",
            "tile + lane * (kBoxRows * Tile::kRowBytes), map, landed",
            sm90_wide_boxes(),
            {shared_race, shared_in_flight, shared_uninitialised}}}),
       in("sm90/sm90_page_box.cuh", {{"hopper_box_of_all_columns_not_in_whole_rows",
                                      "return {keys.row_in_page(first) / 8,",
                                      "return {keys.row_in_page(first),",
                                      changed(sm90_wide_boxes(), [](KernelSpec& spec) { spec.page_size = 64; }),
                                      {}}}),
       in("sm90/sm90_shared_tile.cuh", {{"slabs_side_by_side_a_plain_slab_apart",
                                         "(kSideBySide ? 8 : kRows) * kRowBytes",
                                         "kRows * kRowBytes",
                                         sm90_wide_boxes(),
                                         {shared_uninitialised, shared_in_flight, shared_race}},
                                        {"slabs_side_by_side_in_rows_of_a_plain_tile",
                                         "kSideBySide ? kSlabs * kRowBytes : kRowBytes;",
                                         "kRowBytes;",
                                         sm90_wide_boxes(),
                                         {shared_race, shared_in_flight, shared_uninitialised}}})});
}

}  // namespace

std::vector<Mutation> sm90_producer_mutations() {
  return joined({boxes(), producer(), work_barriers(), counter(), wide_boxes()});
}

}  // namespace emulator
