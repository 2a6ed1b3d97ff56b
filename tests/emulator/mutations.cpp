#include "emulator/mutations.hpp"

#include <iterator>
#include <utility>

#include "emulator/backward_specs.hpp"
#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"

namespace emulator {
namespace {

std::vector<Mutation> all_mutations() {
  std::vector<Mutation> list;
  for (const auto piece : {&shared_tile_mutations,
                           &online_softmax_mutations,
                           &forward_combine_mutations,
                           &dropout_mutations,
                           &variant_mutations,
                           &affine_reach_mutations,
                           &append_mutations,
                           &rotary_mutations,
                           &merge_states_mutations,
                           &accumulate_mutations,
                           &accumulating_epilogue_mutations,
                           &backward_preprocess_mutations,
                           &backward_convert_mutations,
                           &backward_reduce_mutations,
                           &paged_mutations,
                           &paged_copy_mutations,
                           &latent_mutations,
                           &u4_mutations,
                           &own_keys_mutations,
                           &half_products_mutations,
                           &own_keys_forward_mutations,
                           &half_tile_mutations,
                           &u4_number_mutations,
                           &u4_in_place_mutations,
                           &append_u4_mutations,
                           &kept_keys_mutations,
                           &paged_forward_mutations,
                           &schedule_mutations,
                           &schedule_slots_mutations,
                           &work_lists_mutations,
                           &split_row_mutations,
                           &scheduled_forward_mutations,
                           &scheduled_epilogue_mutations,
                           &own_parts_mutations,
                           &sm80_forward_mutations,
                           &sm80_forward_epilogue_mutations,
                           &sm80_warp_pair_mutations,
                           &sm80_group_mutations,
                           &sm80_warp_group_mutations,
                           &sm80_mma16_mutations,
                           &sm80_tf32x3_mutations,
                           &sm80_backward_mutations,
                           &sm80_backward_dq_mutations,
                           &turing_copies_mutations,
                           &sm80_products_mutations,
                           &turing_fp32_mutations,
                           &turing_barrier_mutations,
                           &sm90_forward_traits_mutations,
                           &sm90_forward_block_mutations,
                           &sm90_schedule_mutations,
                           &sm90_producer_mutations,
                           &sm90_dropout_warps_mutations,
                           &sm90_affine_scores_mutations,
                           &sm90_scores_mutations,
                           &sm90_probabilities_mutations,
                           &sm90_products_mutations,
                           &sm90_epilogue_mutations,
                           &sm90_merge_in_cluster_mutations,
                           &sm90_cluster_parts_mutations,
                           &sm90_few_rows_mutations,
                           &sm90_forward_mutations,
                           &sm90_affine_mutations,
                           &sm90_shared_tile_mutations,
                           &sm90_softmax_mutations,
                           &sm90_wide_forward_mutations,
                           &sm90_wide_producer_mutations,
                           &sm90_wide_multicast_mutations,
                           &sm90_pieces_mutations,
                           &sm90_wide_epilogue_mutations,
                           &sm90_backward_mutations,
                           &sm90_backward_store_mutations,
                           &sm90_backward_variant_mutations,
                           &variant_backward_mutations,
                           &sm90_backward_split_mutations,
                           &sm90_backward_cluster_mutations,
                           &sm90_backward_halves_mutations,
                           &sm90_backward_turn_mutations,
                           &sm90_backward_pair_mutations,
                           &sm90_backward_wide_mutations}) {
    std::vector<Mutation> more = piece();
    list.insert(list.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
  }
  return list;
}

}  // namespace

std::vector<Mutation> in(const std::string& header, std::vector<Mutation> list) {
  for (Mutation& mutation : list) mutation.header = header;
  return list;
}

const std::vector<Mutation>& mutations() {
  static const std::vector<Mutation> instance = all_mutations();
  return instance;
}

const std::vector<std::size_t>& built_mutations() {
#ifdef FA_EVERY_THIRD_MUTANT
  constexpr std::size_t kStep = 3;
#else
  constexpr std::size_t kStep = 1;
#endif
  static const std::vector<std::size_t> instance = [] {
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i < mutations().size(); i += kStep) places.push_back(i);
    return places;
  }();
  return instance;
}

bool is_of_schedule(const Mutation& mutation) {
  const bool of_slots = mutation.header == "common/schedule_slots.cuh" && mutation.subject.spec.scheduled();
  return of_slots || mutation.header == "common/schedule.cuh";
}

bool is_backward(const Mutation& mutation) {
  const Op op = mutation.subject.spec.op();
  return op != Op::forward && op != Op::append && op != Op::merge;
}

BackwardSpecs backward_specs_of(const Mutation& mutation) {
  const KernelSpec& spec = mutation.subject.spec;
  BackwardSpecs specs{sm80_backward(), sm80_backward_dq()};
  switch (spec.op()) {
    case Op::backward:
      specs.main = spec;
      specs.dq.arch = specs.main.arch;
      specs.dq.d_qk = specs.main.d_qk;
      specs.dq.d_v = specs.main.d_v;
      break;
    case Op::backward_dq:
      specs.main.arch = spec.arch;
      specs.main.dtype = spec.dtype;
      specs.main.write_dq = false;
      specs.main.causal = spec.causal;
      specs.dq = spec;
      break;
    case Op::backward_reduce:
      if (spec.arch.major >= 9) specs.main = sm90_backward();
      specs.main.split = true;
      break;
    case Op::backward_convert:
      specs.main = sm90_backward();
      specs.main.d_qk = spec.d_qk;
      break;
    default:
      break;
  }
  return specs;
}

}  // namespace emulator
