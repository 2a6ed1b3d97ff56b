// Mistakes in affine score functions of the Hopper forward.

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"

namespace emulator {

std::vector<Mutation> sm90_affine_scores_mutations() {
  using enum FaultKind;
  return in("sm90/sm90_affine_scores.cuh", {
                                               {"hopper_numbers_of_keys_without_a_proxy_fence",
                                                "    ptx::fence_proxy_async();  // products read them\n",
                                                "",
                                                sm90_variant("steep_distance"),
                                                {unfenced}},
                                               {"hopper_slopes_of_the_wrong_side",
                                                "n < slopes.low ? -1 : n > slopes.high ? 1 : 0",
                                                "n < slopes.low ? 1 : n > slopes.high ? 1 : 0",
                                                sm90_variant("turning"),
                                                {}},
                                               {"hopper_turn_of_one_row_for_all",
                                                "    if constexpr (kTurnsSlopes) share_turn(slopes);\n",
                                                "",
                                                sm90_variant("turning"),
                                                {}},
                                           });
}

std::vector<Mutation> sm90_affine_mutations() {
  using enum FaultKind;
  return in("sm90/sm90_affine.cuh", {
                                        {"hopper_part_of_a_slope_left_out",
                                         "ptx::convert_pair<T>(high, middle)",
                                         "ptx::convert_pair<T>(high, 0.f)",
                                         sm90_variant("steep_distance"),
                                         {}},
                                        {"hopper_keys_numbered_from_one",
                                         "static_cast<float>(key)",
                                         "static_cast<float>(key + 1)",
                                         sm90_variant("steep_distance"),
                                         {}},
                                    });
}

}  // namespace emulator
