// Mistakes on the way from scores to P, and in the rescue path.

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"

namespace emulator {

std::vector<Mutation> sm90_probabilities_mutations() {
  using enum FaultKind;
  return in("sm90/sm90_probabilities.cuh",
            {
                {"hopper_mask_read_without_waiting",
                 "ptx::mbarrier_wait(mask_full(slot.index), slot.parity);",
                 "",
                 sm90_dropout(),
                 {shared_race, shared_uninitialised}},
                {"hopper_mask_released_before_all_lanes_have_read_it",
                 "ptx::sync_warp();  // all lanes have read it before one of them releases the buffer\n    "
                 "release(mask_empty",
                 "release(mask_empty",
                 sm90_dropout(),
                 {shared_race}},  // they run ahead by any number of phases
                {"hopper_mask_not_released", "release(mask_empty(slot.index), lane);", "", sm90_dropout(), {deadlock}},
                {"hopper_hidden_piece_not_cleared",
                 "if (piece < visible) continue;",
                 "if (piece <= visible) continue;",
                 sm90_skipping(),
                 {}},
                {"hopper_p_of_the_wrong_rows",
                 "pairs[i / 4][i % 4] = ptx::convert_pair",
                 "pairs[i / 4][(i + 1) % 4] = ptx::convert_pair",
                 sm90(),
                 {}},
                {"hopper_p_not_shrunk", "s[i] *= step;", "s[i] *= step > 0.f ? 1.f : 0.f;", sm90(), {}},
                {"hopper_pairs_not_shrunk",
                 "= ptx::multiply_pair<T>(pair, steps);",
                 "= steps != 0 ? pair : 0;",
                 sm90_dropout(),
                 {}},
                {"hopper_first_offsets_of_the_first_tile_alone",
                 "spans || limit <= kTileN;",
                 "spans;",
                 steep(sm90_causal()),
                 {}},
                {"hopper_lost_p_left", "round < kRounds &&", "round < 0 * kRounds &&", steep(sm90()), {}},
                {"hopper_scores_made_again_of_other_rows",
                 "q_shared(q_buffer) + warp_row * QTile::kRowBytes;",
                 "q_shared(q_buffer);",
                 steep(sm90()),
                 {}},
                {"hopper_scores_made_again_of_other_keys",
                 "int64_t key = kv_tile(cursor) * kTileN;",
                 "int64_t key = 0;",
                 steep(sm90()),
                 {}},
                {"hopper_scores_made_again_of_another_head",
                 "int64_t before = query.kv_head * params.stride_k_h;",
                 "int64_t before = 0;",
                 two_entries(steep(sm90())),
                 {}},
                {"hopper_scores_made_again_of_another_entry",
                 "before += query.tile.batch * params.stride_k_b;",
                 "",
                 two_entries(steep(sm90())),
                 {}},
                // Without `limit >= kTileN` in front of it nothing changes. Where the limit lies in the tile, the
                // warp's first row sees no key behind, and its sum is still 0: may_lack_offset() says so.
                {"hopper_score_beside_exponentials_left_out",
                 "[&](int n) { apply_score_to_tile(s, n); }",
                 "[](int) {}",
                 sm90_variant("softcap"),
                 {}},
                {"hopper_hidden_scores_made_again",
                 "Softmax::is_seen(before, d[e]) ? d[e] : -kInfinity",
                 "before >= -kInfinity ? d[e] : -kInfinity",
                 steep(sm90_causal()),
                 {}},
            });
}

}  // namespace emulator
