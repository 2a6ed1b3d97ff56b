// Mistakes in the Hopper backward whose key tiles several blocks share: those of a cluster, or in turns.

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"

namespace emulator {
namespace {

KernelSpec cluster_of(int blocks) {
  KernelSpec spec = sm90_backward();
  spec.as<fa::plan::Sm90Backward>().split_blocks = blocks;
  return spec;
}

KernelSpec in_turns() {
  KernelSpec spec = sm90_backward();
  spec.as<fa::plan::Sm90Backward>().in_turns = true;
  return spec;
}

}  // namespace

std::vector<Mutation> sm90_backward_split_mutations() {
  const KernelSpec pair = cluster_of(2);
  using enum FaultKind;
  return joined(
      {in("sm90/sm90_backward.cuh",
          {
              {"cluster_sums_take_tiles_that_products_read",
               "ptx::barrier_sync(1, kConsumers * kWarpgroup);  // no warpgroup's products read the tiles",
               "// no warpgroup's products read the tiles",
               pair,
               {shared_race, source_overwritten}},
              {"cluster_sums_read_before_they_are_there",
               "ptx::cluster_sync();  // all sums are there",
               "// all sums are there",
               pair,
               {shared_in_flight, shared_race, shared_uninitialised}},
              {"cluster_block_leaves_with_its_sums",
               "ptx::cluster_sync();  // another block may still read sums here",
               "// another block may still read sums here",
               pair,
               {exited_block}},
              {"cluster_blocks_store_the_same_keys",
               "const int first = work.tile.split * 4 * kConsumers + warp;",
               "const int first = warp;",
               pair,
               {global_uninitialised}},
          }),
       in("sm90/sm90_backward_block.cuh", {
                                              {"cluster_rank_in_a_descriptor",
                                               "if constexpr (kSplitBlocks > 1) return ptx::without_rank(tile);",
                                               "",
                                               pair,
                                               {bad_descriptor}},
                                          })});
}

std::vector<Mutation> sm90_backward_cluster_mutations() {
  const KernelSpec pair = cluster_of(2);
  return in(
      "sm90/sm90_backward_cluster.cuh",
      {
          {"cluster_last_block_left_out", "rank < kBlocks; ++rank", "rank < kBlocks - 1; ++rank", pair, {}},
          {"cluster_own_sums_for_all_blocks", "ptx::map_shared(from, rank)", "ptx::map_shared(from, 0)", pair, {}},
          {"cluster_some_groups_of_columns_stay",
           "i += kBlocks * kWarps",
           "i += 2 * kBlocks * kWarps",
           pair,
           {FaultKind::global_uninitialised}},
      });
}

std::vector<Mutation> sm90_backward_turn_mutations() {
  const KernelSpec turns = in_turns();
  using enum FaultKind;
  return joined({in("sm90/sm90_backward_turns.cuh",
                    {
                        {"turn_taken_before_it_comes",
                         "if (lane() == 0) ptx::await_flag_global(turn, number);",
                         "static_cast<void>(number);",
                         turns,
                         {unfenced}},
                        {"turn_given_before_all_lanes_have_left_sums",
                         "ptx::sync_warp();\n    if (lane() == 0) ptx::raise_flag_global(turn, number);",
                         "if (lane() == 0) ptx::raise_flag_global(turn, number);",
                         turns,
                         {unfenced, global_uninitialised}},
                        {"turn_sums_of_all_warps_in_one_place",
                         "(warp * (kDkTiles + kDvTiles) + tile)",
                         "tile",
                         turns,
                         {unfenced}},
                    }),
                 in("sm90/sm90_backward.cuh",
                    {
                        {"turn_sums_of_others_left_out",
                         "if constexpr (kWantsDv) turns.template load<Turns::kDkTiles>(dv);",
                         "",
                         turns,
                         {}},
                        {"turn_sums_of_dv_in_those_of_dk",
                         "turns.template leave<Turns::kDkTiles>(dv);",
                         "turns.template leave<0>(dv);",
                         turns,
                         {global_uninitialised}},
                        {"turn_whole_sums_not_stored",
                         "work.tile.split + 1 == params.splits",
                         "work.tile.split == params.splits",
                         turns,
                         {global_uninitialised}},
                    }),
                 in("common/backward_schedule.cuh", {
                                                        {"turn_parts_have_the_same_heads",
                                                         "tile.split = part % params.splits;",
                                                         "tile.split = 0;",
                                                         turns,
                                                         {global_uninitialised}},
                                                    })});
}

}  // namespace emulator
