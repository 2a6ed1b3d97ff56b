// Mistakes in score functions and masks of the Hopper forward.

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"

namespace emulator {

std::vector<Mutation> sm90_scores_mutations() {
  using enum FaultKind;
  return in("sm90/sm90_scores.cuh", {
                                        {"hopper_last_rows_taken_for_missing",
                                         "if (kPartial && row >= row_count(cursor.query)) return 0;",
                                         "if (kPartial && row + 16 > row_count(cursor.query)) return 0;",
                                         sm90_skipping(),
                                         {}},
                                        {"hopper_piece_of_one_key_skipped",
                                         "last_limit > 8 * first_tile(piece)",
                                         "last_limit > 8 * first_tile(piece) + 1",
                                         flat(sm90_skipping()),
                                         {}},
                                        {"hopper_no_mask",
                                         "if (i / 4 * 8 + i % 2 >= limit[i / 2 % 2]) s[",
                                         "if (i / 4 * 8 + i % 2 >= limit[i / 2 % 2] + kTileN) s[",
                                         sm90_causal(),
                                         {}},
                                        {"hopper_mixed_tile_taken_for_a_full_one",
                                         "cursor.n < cursor.query.range.plain_end) return kPieces;",
                                         "cursor.n <= cursor.query.range.plain_end) return kPieces;",
                                         sm90_variant("strided"),
                                         {}},
                                        {"hopper_draft_taken_for_context",
                                         "if (!kKeepsFirst || cursor.n >= cursor.query.range.kept_end)",
                                         "if (!kKeepsFirst || cursor.n > cursor.query.range.kept_end)",
                                         over_pages("tree", Family::sm90),
                                         {}},
                                        {"hopper_affine_bias_of_a_row_left_out",
                                         "shift[r] *= softmax_scale_log2();",
                                         "shift[r] = 0.f;",
                                         sm90_variant("alibi"),
                                         {}},
                                        {"hopper_mixed_tile_taken_for_a_kept_one",
                                         "if (cursor.n >= cursor.query.range.kept_end)",
                                         "if (cursor.n > cursor.query.range.kept_end)",
                                         sm90_variant("strided"),
                                         {}},
                                        {"hopper_keys_before_the_window",
                                         "if (key < begin[i / 2 % 2] || key >= end[i / 2 % 2])",
                                         "if (key < begin[i / 2 % 2] - kTileN || key >= end[i / 2 % 2])",
                                         sm90_variant("two_sided"),
                                         {}},
                                    });
}

}  // namespace emulator
