// Mistakes in the softmax of the Hopper forward.

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"
#include "emulator/paged_specs.hpp"

namespace emulator {

std::vector<Mutation> sm90_softmax_mutations() {
  using enum FaultKind;
  return in(
      "sm90/sm90_softmax.cuh",
      {
          {"wide_maxima_never_raised",
           "const bool stays = kLogSlack > 0 && (score[r] - greatest[r]) * scale_log2 <= "
           "static_cast<float>(kLogSlack);",
           "const bool stays = kLogSlack > 0;",
           sm90_wide_scheduled(),
           {}},
          {"hopper_greatest_of_negative_scores_not_found",
           "if (rare) {\n      FA_UNROLL",
           "if (false) {\n      FA_UNROLL",
           sm90_exact_max(),
           {}},
          {"hopper_sum_not_rescaled", "sum[r] *= factor[r];", "sum[r] *= 1.f;", sm90_exact_max(), {}},
          {"hopper_exact_scores_far_away",
           "if (rare) subtract_first(s,",
           "if (rare && kCount == 0) subtract_first(s,",
           far(sm90_exact_max()),
           {}},
          {"hopper_exact_last_scores_not_in_the_sum",
           "    add_tile(s, kTiles - 1, sum);\n    if constexpr (kEntropy)",
           "    if constexpr (kEntropy)",
           sm90_exact_max(),
           {}},
          {"hopper_far_scores_scaled_first", "fits(greatest) ? greatest : mark(greatest)", "greatest", far(sm90()), {}},
          {"hopper_far_greatest_score_lost",
           "if (far && place == kScoreLane) sum[r] = next_score;",
           "",
           far(sm90()),
           {}},
          {"hopper_greatest_score_without_its_shift",
           "quad_max(ptx::fma(best, scale_log2, shift[r]))",
           "ptx::fma(quad_max(best), scale_log2, shift[r])",
           sm90_variant("alibi"),
           {}},
          {"hopper_last_scores_not_in_the_sum", "if (end == kTiles) add_tile(s, kTiles - 1, total);", "", sm90(), {}},
          {"hopper_last_scores_before_a_hidden_piece_not_in_the_sum",
           "        add_tile(s, begin - 1, total);\n",
           "",
           sm90_skipping(),
           {}},
          {"hopper_offset_not_raised", "offset[r] = raised;", "", sm90(), {}},
          {"hopper_sum_not_shrunk", "sum[r] *= step;\n      own[r] *=", "own[r] *=", sm90(), {}},
          {"hopper_offset_of_a_lane",
           "const bool first = quad_sum(sum[r]) == 0.f && !is_far(r);",
           "const bool first = sum[r] == 0.f && !is_far(r);",
           sm90_causal(),
           {}},
          {"hopper_output_of_an_offset_before", "    factor[r] *= step;\n    if", "    if", steep(sm90()), {}},
      });
}

}  // namespace emulator
