// Mistakes in the Hopper forward for wide heads.

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"
#include "emulator/paged_specs.hpp"

namespace emulator {

std::vector<Mutation> sm90_wide_forward_mutations() {
  using enum FaultKind;
  return in(
      "sm90/sm90_wide_forward.cuh",
      {
          {"wide_values_released_before_their_product",
           "ptx::wgmma_wait<kOutputParts - 1 - kPart + kBehind>();",
           "",
           sm90_wide_scheduled(),
           {source_overwritten, register_in_flight}},
          {"wide_columns_behind_values_released_early",
           "ptx::wgmma_wait<kBehind + 1>();",
           "",
           sm90_wide_scheduled(),
           {source_overwritten, shared_race}},
          {"wide_scores_read_early", "ptx::wgmma_wait<kBehind>();", "", sm90_wide_scheduled(), {register_in_flight}},
          {"wide_slab_not_waited_for",
           "ptx::mbarrier_wait(landed(i, slab), parity_of(i));",
           "",
           sm90_wide_scheduled(),
           {shared_in_flight, shared_uninitialised}},
          {"wide_query_released_by_one_lane",
           "ptx::sync_warp();                // all lanes have read what was sent",
           "",
           sm90_wide_scheduled(),
           {shared_race}},
          {"wide_probabilities_sent_by_one_lane",
           "ptx::sync_warp();  // all lanes have written",
           "",
           sm90_wide_scheduled(),
           {shared_race, shared_uninitialised}},
          {"wide_probabilities_not_waited_for",
           "ptx::mbarrier_wait(sent(1 - kHalf, at.warp), at.received % 2);",
           "",
           sm90_wide_scheduled(),
           {shared_race, shared_uninitialised, source_overwritten, shared_in_flight}},
          {"wide_output_keeps_old_maxima", "multiply(at.o, softmax.factor);", "", sm90_wide_scheduled(), {}},
          {"wide_own_maxima_do_not_count",
           "if (rises) multiply(at.o, at.softmax.factor);",
           "if (rises && at.lane >= kWarpSize) multiply(at.o, at.softmax.factor);",
           sm90_wide_scheduled(),
           {},
           2},
          {"wide_values_released_before_scores_queue",
           "await_parts<kHalf, 0, 1>(i, at.lane);",
           "await_parts<kHalf, 0, 2>(i, at.lane);",
           sm90_wide_multicast(),
           {source_overwritten, register_in_flight}},
          {"wide_sums_stay_at_home",
           "softmax.sum[r] = ptx::from_bits(words.word[2 + r]);",
           "",
           sm90_wide_scheduled(),
           {}},
          {"wide_last_keys_are_seen", "if (limit < kTileN) this->", "if (limit < 0) this->", sm90_wide_scheduled(), {}},
      });
}

std::vector<Mutation> sm90_wide_producer_mutations() {
  using enum FaultKind;
  return in("sm90/sm90_wide_producer.cuh",
            {
                {"wide_unit_loaded_without_waiting",
                 "ptx::mbarrier_wait(barrier, parity);",
                 "",
                 sm90_wide_scheduled(),
                 {source_overwritten, shared_race, shared_in_flight, barrier_misuse}},
                {"wide_slab_announced_in_part",
                 "ptx::mbarrier_arrive_expect_tx(landed(i, slab), KTile::kSlabBytes);",
                 "ptx::mbarrier_arrive_expect_tx(landed(i, slab), KTile::kSlabBytes / 2);",
                 sm90_wide_scheduled(),
                 {deadlock, shared_in_flight, shared_uninitialised, barrier_misuse}},
                {"wide_query_loaded_without_waiting",
                 "ptx::mbarrier_wait(query_read(), count % 2 ^ 1);  // all have read the Q that was there",
                 "",
                 sm90_wide_scheduled(),
                 {source_overwritten, shared_race, shared_in_flight, barrier_misuse}},
                {"wide_rows_of_the_first_tile",
                 "const int first = query.tile.m_block * kTileM;",
                 "const int first = 0 * kTileM;",
                 sm90_wide_scheduled(),
                 {}},
            });
}

std::vector<Mutation> sm90_wide_multicast_mutations() {
  const KernelSpec pair = sm90_wide_multicast();
  using enum FaultKind;
  return joined({in("sm90/sm90_wide_producer.cuh",
                    {
                        {"multicast_unit_loaded_without_waiting",
                         "ptx::mbarrier_wait_cluster(barrier, parity);",
                         "",
                         pair,
                         {source_overwritten, shared_race, shared_in_flight, barrier_misuse}},
                        {"multicast_keys_for_one_block",
                         "constexpr uint16_t kAll = (1 << Traits::kClusterBlocks) - 1;",
                         "constexpr uint16_t kAll = 1;",
                         pair,
                         {deadlock, shared_uninitialised, barrier_misuse}},
                        {"multicast_keys_copied_by_both",
                         "if (kMulticast && slab % Traits::kClusterBlocks != this->rank()) continue;  // the other "
                         "block copies it",
                         "",
                         pair,
                         {shared_race, shared_in_flight, source_overwritten, barrier_misuse, deadlock}},
                    }),
                 in("sm90/sm90_wide_forward.cuh",
                    {
                        {"multicast_barriers_of_the_other_block_not_waited_for",
                         "ptx::cluster_sync();  // the barriers of both blocks exist for all",
                         "ptx::sync_threads();",
                         pair,
                         {barrier_misuse, unfenced, shared_race, shared_uninitialised}},
                        {"multicast_block_leaves_while_the_other_copies",
                         "if constexpr (Traits::kMulticast) ptx::cluster_sync();",
                         "",
                         pair,
                         {exited_block, copies_at_exit, deadlock}},
                    }),
                 in("sm90/sm90_wide_traits.cuh",
                    {
                        {"multicast_units_wait_for_their_own_readers",
                         "ptx::mbarrier_init(emptied(0, i), kClusterBlocks * kWarps);",
                         "ptx::mbarrier_init(emptied(0, i), kWarps);",
                         pair,
                         {source_overwritten, shared_race, shared_in_flight, barrier_misuse, deadlock}},
                        {"multicast_blocks_have_the_same_head",
                         "kClusterBlocks * tile.head + rank();",
                         "kClusterBlocks * tile.head;",
                         pair,
                         {}},
                    }),
                 in("sm90/sm90_wide_epilogue.cuh",
                    {
                        {"multicast_blocks_share_partial_results",
                         "const int before = 2 * this->rank() * params.paged.parts;",
                         "const int before = 0;",
                         pair,
                         {global_uninitialised, unfenced, shared_race}},
                        {"multicast_partial_sums_not_added", "rows[r].total.sum += weights[r];", "", pair, {}},
                        {"multicast_partial_rows_of_the_neighbour",
                         "row_to_read(query, first + 8 * r));",
                         "row_to_read(query, first + r));",
                         pair,
                         {}},
                        {"multicast_blocks_share_counters",
                         "this->rank() * params.paged.parts + piece.first_part;",
                         "piece.first_part;",
                         pair,
                         {global_uninitialised, unfenced, shared_race}},
                    })});
}

std::vector<Mutation> sm90_pieces_mutations() {
  using enum FaultKind;
  return in("sm90/sm90_pieces.cuh",
            {
                {"wide_pieces_counted_before_they_are_written",
                 "ptx::barrier_sync(kBarrier, kThreads);  // the block's partial rows are written\n  int32_t*",
                 "int32_t*",
                 sm90_wide_scheduled(),
                 {unfenced, global_uninitialised, shared_race, barrier_misuse}},
                {"wide_pieces_counted_out_of_order",
                 "ptx::atomic_add_acq_rel_global(counter, 1)",
                 "ptx::atomic_add_global(counter, 1)",
                 sm90_wide_scheduled(),
                 {unfenced}},
                {"wide_pieces_stay_counted",
                 "if (thread == 0) ptx::st_global(counter, 0);  // for the next launch",
                 "",
                 sm90_wide_scheduled(),
                 {}},
                {"hopper_pieces_counted_before_they_are_written",
                 "ptx::barrier_sync(kBarrier, kThreads);  // the block's partial rows are written\n  int32_t*",
                 "int32_t*",
                 sm90_scheduled(),
                 {unfenced, global_uninitialised, shared_race, barrier_misuse}},
                {"hopper_pieces_counted_unseen",
                 "ptx::barrier_sync(kBarrier, kThreads);  // the number of blocks before this one is there; their rows "
                 "can be read",
                 "",
                 sm90_scheduled(),
                 {unfenced, shared_race, shared_uninitialised, barrier_misuse}},
                {"hopper_parts_do_not_wait",
                 "if (thread < kernel::kWarpSize) Own::await_others(params, piece);",
                 "",
                 sm90_own_parts(),
                 {unfenced, global_uninitialised}},
                {"hopper_parts_are_merged_unseen",
                 "ptx::barrier_sync(kBarrier, kThreads);  // the others' partial results can be read",
                 "",
                 sm90_own_parts(),
                 {unfenced, global_uninitialised}},
            });
}

std::vector<Mutation> sm90_wide_epilogue_mutations() {
  using enum FaultKind;
  return in("sm90/sm90_wide_epilogue.cuh",
            {
                {"wide_columns_of_the_other_half",
                 "const int column = half * kHalfColumns + 8 * (j + lane % 4);",
                 "const int column = (1 - half) * kHalfColumns + 8 * (j + lane % 4);",
                 sm90_wide_scheduled(),
                 {}},
                {"wide_partial_sums_not_added", "merge.total.sum += weight;", "", sm90_wide_scheduled(), {}},
                {"wide_partial_rows_of_the_neighbour",
                 "piece.place_of(piece.first_part + i), row_to_read(query, row));",
                 "piece.place_of(piece.first_part + i), row_to_read(query, row ^ 1));",
                 sm90_wide_scheduled(),
                 {}},
                {"wide_merged_columns_of_the_neighbour",
                 "target + 128 * (i / 2) + 32 * (own / 4) + 8 * (own % 4),",
                 "target + 128 * (i / 2) + 32 * (own / 4) + 8 * (own % 4 ^ 1),",
                 sm90_wide_scheduled(),
                 {}},
            });
}

}  // namespace emulator
