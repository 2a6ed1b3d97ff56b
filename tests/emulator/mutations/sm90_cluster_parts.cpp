// Mistakes in the Hopper forward whose splits the blocks of a cluster merge.

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"

namespace emulator {
namespace {

/// Two KV tiles, or four.
KernelSpec cluster_of(int blocks, int tile_n = 32) {
  KernelSpec spec = sm90_split();
  spec.tile_m = 64;
  spec.tile_n = tile_n;
  spec.warps = 8;
  spec.as<fa::plan::Sm90Forward>().take_turns = false;
  spec.as<fa::plan::Sm90Forward>().split_blocks = blocks;
  return spec;
}

}  // namespace

std::vector<Mutation> sm90_merge_in_cluster_mutations() {
  const KernelSpec pair = cluster_of(2);
  using enum FaultKind;
  return joined({in("sm90/sm90_epilogue.cuh",
                    {
                        {"cluster_parts_take_tiles_that_products_read",
                         "ptx::barrier_sync(first_of(NamedBarrier::partial_rows), kWarpgroup);  // no warp's products",
                         "//",
                         pair,
                         {shared_race, source_overwritten}},
                        {"cluster_parts_read_before_they_are_there",
                         "ptx::cluster_sync();  // the parts of all blocks are there",
                         "",
                         pair,
                         {shared_in_flight, shared_race, shared_uninitialised}},
                        {"cluster_block_leaves_with_its_part",
                         "ptx::cluster_sync_relaxed();  // another block may still read parts here",
                         "//",
                         pair,
                         {exited_block}},
                        {"cluster_parts_handed_on_relaxed",
                         "ptx::cluster_sync();  // the parts of all blocks are there",
                         "ptx::cluster_sync_relaxed();",
                         pair,
                         {shared_in_flight, shared_race, shared_uninitialised}},
                        {"cluster_part_of_the_last_warp_not_left",
                         "if (16 * warp < rows_here) parts.leave",
                         "if (16 * warp + 16 < rows_here) parts.leave",
                         pair,
                         {}},
                        {"cluster_second_rows_left_out", "rows_here > 16 * from + 8", "rows_here < 0", pair, {}},
                        {"cluster_blocks_store_the_same_columns",
                         "return ptx::cluster_rank() * Parts::kWarps + warp;",
                         "return warp;",
                         pair,
                         {global_uninitialised}},
                    }),
                 in("sm90/sm90_forward_block.cuh", {{"cluster_rank_in_a_descriptor_of_forward",
                                                     "if constexpr (Base::kInCluster) return",
                                                     "if constexpr (false) return",
                                                     pair,
                                                     {bad_descriptor}}}),
                 in("sm90/sm90_forward.cuh", {{"cluster_block_without_keys_leaves_nothing",
                                               "epilogue().merge_nothing(at.factors, first, at.warp_row, at.lane);",
                                               "",
                                               cluster_of(4, 64),
                                               {shared_uninitialised, exited_block}}})});
}

std::vector<Mutation> sm90_cluster_parts_mutations() {
  const KernelSpec pair = cluster_of(2);
  return in(
      "sm90/sm90_cluster_parts.cuh",
      {
          {"cluster_last_part_left_out",
           "for (int rank = 0; rank < kBlocks; ++rank) {\nFA_UNROLL\nfor (int i = 0; i < 4; ++i)",
           "for (int rank = 0; rank < kBlocks - 1; ++rank) {\nFA_UNROLL\nfor (int i = 0; i < 4; ++i)",
           pair,
           {}},
          {"cluster_own_part_for_all_blocks",
           "ptx::map_shared(place(warp, tile, lane), rank)",
           "ptx::map_shared(place(warp, tile, lane), 0)",
           pair,
           {}},
          {"cluster_parts_weighed_alike", "sums[r][i].over(total) * sums[r][i].sum;", "sums[r][i].sum;", pair, {}},
          {"cluster_weights_of_one_lane", "lane / 4 * 4 + rank % 4", "lane / 4 * 4", pair, {}},
      });
}

}  // namespace emulator
