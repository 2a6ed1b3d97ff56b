#ifndef FA_TESTS_EMULATOR_MUTATIONS_PIECES_HPP_
#define FA_TESTS_EMULATOR_MUTATIONS_PIECES_HPP_

#include <string>
#include <vector>

#include "emulator/joined.hpp"
#include "emulator/mutations.hpp"

/// Deliberate mistakes, in a file for each piece of a kernel.
namespace emulator {

/// Sets the header of a list.
std::vector<Mutation> in(const std::string& header, std::vector<Mutation> list);

std::vector<Mutation> shared_tile_mutations();
std::vector<Mutation> online_softmax_mutations();
std::vector<Mutation> forward_combine_mutations();
std::vector<Mutation> dropout_mutations();
std::vector<Mutation> variant_mutations();
std::vector<Mutation> affine_reach_mutations();
std::vector<Mutation> append_mutations();
std::vector<Mutation> rotary_mutations();
std::vector<Mutation> merge_states_mutations();
std::vector<Mutation> accumulate_mutations();
std::vector<Mutation> accumulating_epilogue_mutations();
std::vector<Mutation> backward_preprocess_mutations();
std::vector<Mutation> backward_convert_mutations();
std::vector<Mutation> backward_reduce_mutations();
std::vector<Mutation> paged_mutations();
std::vector<Mutation> paged_copy_mutations();
std::vector<Mutation> latent_mutations();
std::vector<Mutation> u4_mutations();
std::vector<Mutation> own_keys_mutations();
std::vector<Mutation> half_products_mutations();
std::vector<Mutation> own_keys_forward_mutations();
std::vector<Mutation> half_tile_mutations();
std::vector<Mutation> u4_number_mutations();
std::vector<Mutation> u4_in_place_mutations();
std::vector<Mutation> append_u4_mutations();
std::vector<Mutation> kept_keys_mutations();
std::vector<Mutation> paged_forward_mutations();
std::vector<Mutation> schedule_mutations();
std::vector<Mutation> schedule_slots_mutations();
std::vector<Mutation> work_lists_mutations();
std::vector<Mutation> split_row_mutations();
std::vector<Mutation> scheduled_forward_mutations();
std::vector<Mutation> scheduled_epilogue_mutations();
std::vector<Mutation> own_parts_mutations();
std::vector<Mutation> sm80_forward_mutations();
std::vector<Mutation> sm80_forward_epilogue_mutations();
std::vector<Mutation> sm80_warp_pair_mutations();
std::vector<Mutation> sm80_group_mutations();
std::vector<Mutation> sm80_warp_group_mutations();
std::vector<Mutation> sm80_mma16_mutations();
std::vector<Mutation> sm80_tf32x3_mutations();
std::vector<Mutation> sm80_backward_mutations();
std::vector<Mutation> sm80_backward_dq_mutations();
std::vector<Mutation> turing_copies_mutations();
std::vector<Mutation> sm80_products_mutations();
std::vector<Mutation> turing_fp32_mutations();
std::vector<Mutation> turing_barrier_mutations();
std::vector<Mutation> sm90_forward_traits_mutations();
std::vector<Mutation> sm90_forward_block_mutations();
std::vector<Mutation> sm90_schedule_mutations();
std::vector<Mutation> sm90_producer_mutations();
std::vector<Mutation> sm90_dropout_warps_mutations();
std::vector<Mutation> sm90_affine_scores_mutations();
std::vector<Mutation> sm90_scores_mutations();
std::vector<Mutation> sm90_probabilities_mutations();
std::vector<Mutation> sm90_products_mutations();
std::vector<Mutation> sm90_epilogue_mutations();
std::vector<Mutation> sm90_forward_mutations();
std::vector<Mutation> sm90_affine_mutations();
std::vector<Mutation> sm90_shared_tile_mutations();
std::vector<Mutation> sm90_softmax_mutations();
std::vector<Mutation> sm90_wide_forward_mutations();
std::vector<Mutation> sm90_wide_producer_mutations();
std::vector<Mutation> sm90_wide_multicast_mutations();
std::vector<Mutation> sm90_pieces_mutations();
std::vector<Mutation> sm90_wide_epilogue_mutations();
std::vector<Mutation> sm90_backward_mutations();
std::vector<Mutation> sm90_backward_store_mutations();
std::vector<Mutation> sm90_backward_variant_mutations();
std::vector<Mutation> variant_backward_mutations();
std::vector<Mutation> sm90_backward_split_mutations();
std::vector<Mutation> sm90_backward_cluster_mutations();
std::vector<Mutation> sm90_backward_halves_mutations();
std::vector<Mutation> sm90_backward_turn_mutations();
std::vector<Mutation> sm90_merge_in_cluster_mutations();
std::vector<Mutation> sm90_cluster_parts_mutations();
std::vector<Mutation> sm90_few_rows_mutations();
std::vector<Mutation> sm90_backward_pair_mutations();
std::vector<Mutation> sm90_backward_wide_mutations();

}  // namespace emulator

#endif  // FA_TESTS_EMULATOR_MUTATIONS_PIECES_HPP_
