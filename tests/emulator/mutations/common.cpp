// Mistakes in what kernels of several architectures share.

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"

namespace emulator {

std::vector<Mutation> shared_tile_mutations() {
  using enum FaultKind;
  return in("common/shared_tile.cuh", {
                                          {"wide_copies_of_unaligned_rows",
                                           "if constexpr (kAligned) {",
                                           "if constexpr (true) {",
                                           sm80_unaligned(),
                                           {misaligned}},
                                          {"misaligned_ldmatrix_row",
                                           "return row * kPitch",
                                           "return row * (kPitch - 8)",
                                           sm80_unaligned(),
                                           {misaligned}},
                                          {"pitch_larger_than_planned",
                                           "return row * kPitch",
                                           "return row * (kPitch + 64)",
                                           sm80(1),
                                           {shared_out_of_bounds}},
                                          {"rows_of_zeros_left_out",
                                           "const bool valid = i * kRowStep < valid_rows;",
                                           "const bool valid = i * kRowStep < valid_rows; if (!valid) return;",
                                           sm80(1),
                                           {shared_uninitialised}},
                                          {"last_column_chunk_left_out",
                                           "copy_chunk(target + step",
                                           "if (chunk + step * kLanes != Tile::kChunks - 1) copy_chunk(target + step",
                                           sm80(1),
                                           {shared_uninitialised}},
                                      });
}

std::vector<Mutation> online_softmax_mutations() {
  using enum FaultKind;
  return in("common/online_softmax.cuh", {
                                             {"divergent_shuffle",
                                              "sum[m][r] += ptx::shfl_xor(sum[m][r], 2);",
                                              "if (ptx::thread_index() != 9) sum[m][r] += ptx::shfl_xor(sum[m][r], 2);",
                                              sm80(1),
                                              {divergence}},
                                         });
}

std::vector<Mutation> forward_combine_mutations() {
  using enum FaultKind;
  return in(
      "common/forward_combine.cuh",
      {
          {"combine_reads_past_the_splits",
           "row, rows, params.splits);",
           "row, rows, params.splits + 1);",
           sm80_split(),
           {global_out_of_bounds}},
          {"hopper_combine_beside_the_kernel_before", "ptx::griddepcontrol_wait();", "", sm90_split(), {too_early}},
          {"combine_slices_overlap",
           "params.partial_lse, slice * kWarpSize, row",
           "params.partial_lse, slice / 2 * kWarpSize, row",
           sm80_split(),
           {global_uninitialised}},
      });
}

std::vector<Mutation> dropout_mutations() {
  using enum FaultKind;
  return in("common/dropout.cuh", {
                                      {"neighbours_draws_not_exchanged",
                                       "ptx::prmt(drawn, ptx::shfl_xor(drawn, 4), (odd",
                                       "ptx::prmt(drawn, drawn, (odd",
                                       sm80_dropout(),
                                       {}},
                                      {"hopper_low_digits_do_not_count",
                                       "below = borrow(words[i], threshold_[4 + i], below);",
                                       "below = borrow(words[i], threshold_[4 + i], i == 0 ? 0 : below);",
                                       sm90_dropout(),
                                       {}},
                                      {"hopper_added_bits_do_not_count",
                                       "below = borrow(sums[i], threshold_[i], below);",
                                       "below = borrow(0, threshold_[i], below);",
                                       sm90_dropout(),
                                       {}},
                                  });
}

std::vector<Mutation> variant_mutations() {
  using enum FaultKind;
  return in("common/variant.cuh", {
                                      {"hopper_affine_bias_of_the_wrong_side",
                                       "if (rows[r].base + last < 0.f) factor[r] = -factor[r];",
                                       "",
                                       sm90_variant("alibi"),
                                       {}},
                                      {"hopper_affine_bias_of_two_sides_as_of_one",
                                       "by_steps = by_steps && rows[r].base * last >= 0.f;",
                                       "",
                                       sm90_variant("alibi"),
                                       {}},
                                  });
}

std::vector<Mutation> affine_reach_mutations() {
  using enum FaultKind;
  return in(
      "common/affine_reach.cuh",
      {
          {"hopper_reach_without_norms",
           "2.f * root(q) * root(k) + bits",
           "0.f * q * k + 0.1f * bits",
           sm90_variant("reach"),
           {}},
          {"hopper_reach_from_behind_the_diagonal",
           "return ptx::min(ptx::min(turn, 2.f * turn), end - 1.f);",
           "return end > 0.f ? turn : 0.f;",
           sm90_variant("reach_aside"),
           {}},
          {"hopper_reach_from_before_the_first_key",
           "return ptx::max(ptx::max(turn, 0.f), 2.f * turn - end + 1.f);",
           "return end > 0.f ? turn : 0.f;",
           sm90_variant("reach_before"),
           {}},
          {"hopper_reach_of_the_first_row_for_all", "at.q = last;", "at.q = first;", sm90_variant("reach_behind"), {}},
          {"hopper_reach_down_taken_for_up", "growth > 0.f", "growth != 0.f", sm90_variant("reach_down"), {}, 2},
      });
}

}  // namespace emulator
