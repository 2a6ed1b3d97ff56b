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
              "const int page = needed < first + kBoxRows ? keys.page_of(needed) : -1;",
              "const int page = needed < first + kBoxRows ? keys.page_of(needed < kPageSize ? needed : needed - "
              "kPageSize) : -1;",
              sm90_paged(),
              {}}});
}

/// What the producer waits for and announces.
std::vector<Mutation> producer() {
  using enum FaultKind;
  return in("sm90/sm90_producer.cuh",
            {{"hopper_box_loaded_without_waiting",
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
              "const int next = ptx::block_count() +",
              "const int next = 1 + ptx::block_count() +",
              sm90_own_ends(),
              {global_uninitialised}},
             {"hopper_job_not_announced_to_v",
              "if constexpr (kDynamic) ptx::mbarrier_arrive(work_full(slot.index));",
              "",
              sm90_own_ends(),
              {deadlock}},
             {"hopper_job_not_released_by_v",
              "ptx::mbarrier_arrive(q_empty(work_slot.index));",
              "",
              sm90_own_ends(),
              {deadlock}},
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

}  // namespace

std::vector<Mutation> sm90_producer_mutations() {
  return joined({boxes(), producer()});
}

}  // namespace emulator
