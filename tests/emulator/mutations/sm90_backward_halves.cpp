// Mistakes in the Hopper backward's loop over halves of query tiles.

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"

namespace emulator {

std::vector<Mutation> sm90_backward_halves_mutations() {
  const KernelSpec halves = changed(sm90_backward(), [](KernelSpec& spec) {
    spec.d_qk = spec.d_v = 64;
    spec.tile_m = 128;
  });
  const KernelSpec causal = changed(halves, [](KernelSpec& spec) {
    spec.causal = true;
    spec.as<fa::plan::Sm90Backward>().ordered_dq = true;
  });
  using enum FaultKind;
  return in(
      "sm90/sm90_backward.cuh",
      {{"hopper_halves_ds_unfenced",
        "ptx::fence_proxy_async();\n      ptx::sync_warp();  // dS",
        "ptx::sync_warp();  // dS",
        halves,
        {unfenced}},
       {"hopper_halves_ds_told_by_one_lane_only", "ptx::sync_warp();  // dS", "// dS", halves, {shared_race, unfenced}},
       {"hopper_halves_ds_is_read_before_it_is_there",
        "ptx::mbarrier_wait(ds_full(), static_cast<uint32_t>(buffer));",
        "",
        halves,
        {shared_race, shared_uninitialised, unfenced, barrier_misuse},
        2},
       {"hopper_halves_one_buffer_of_ds",
        "const int buffer = count % 2;\n      const int rows = rows_of(work, next);\n      ptx::wgmma_wait<0>();  // "
        "dP and dV of the first",
        "const int buffer = 0;\n      const int rows = rows_of(work, next);\n      ptx::wgmma_wait<0>();  // dP and dV "
        "of the first",
        halves,
        {source_overwritten, shared_race, unfenced, deadlock}},
       {"hopper_halves_second_scores_of_the_first_rows",
        "issue_scores_of<64>(s, keys, stage);",
        "issue_scores_of<0>(s, keys, stage);",
        halves,
        {}},
       {"hopper_halves_second_scores_not_waited_for",
        "ptx::wgmma_wait<1>();  // S of the second half",
        "ptx::wgmma_wait<2>();  // S of the second half",
        halves,
        {register_in_flight}},
       {"hopper_halves_dp_not_waited_for",
        "ptx::wgmma_wait<0>();  // dP and dV of the second half",
        "// dP and dV of the second half",
        halves,
        {register_in_flight}},
       {"hopper_halves_dq_not_waited_for",
        "ptx::wgmma_wait<1>();  // dQ of the tile",
        "ptx::wgmma_wait<2>();  // dQ of the tile",
        halves,
        {register_in_flight}},
       {"hopper_halves_statistics_of_the_other_half",
        "delta_shared(stage) + 4 * kFirst",
        "delta_shared(stage) + 4 * (64 - kFirst)",
        halves,
        {}},
       {"hopper_halves_mask_of_the_first_rows", "take_weights<64>(weights,", "take_weights<0>(weights,", causal, {}},
       {"hopper_halves_q_released_before_dk_has_read_it",
        "ptx::wgmma_wait<0>();  // dK of the second half\n      tie_dk(dk);\n      release(step_empty(stage));",
        "release(step_empty(stage));\n      ptx::wgmma_wait<0>();  // dK of the second half\n      tie_dk(dk);",
        halves,
        {source_overwritten, shared_race}}});
}

}  // namespace emulator
