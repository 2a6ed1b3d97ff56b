// Mistakes in the Hopper forward.

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"

namespace emulator {

std::vector<Mutation> sm90_forward_traits_mutations() {
  using enum FaultKind;
  return in("sm90/sm90_forward_traits.cuh", {
                                                {"hopper_odd_registers",
                                                 "kThreads < 4 * kWarpgroup ? 40",
                                                 "kThreads < 4 * kWarpgroup ? 44",
                                                 sm90(),
                                                 {register_pool}},
                                            });
}

std::vector<Mutation> sm90_forward_block_mutations() {
  using enum FaultKind;
  return in("sm90/sm90_forward_block.cuh",
            {
                {"hopper_barrier_counts_one_reader_less",
                 "constexpr int kReaders = 4 * kConsumers;",
                 "constexpr int kReaders = 4 * kConsumers - 1;",
                 sm90(),
                 {shared_race, source_overwritten, deadlock, barrier_misuse}},
                {"hopper_drawers_counted_out",
                 "mbarrier_init(mask_full(i), kDropoutWarps)",
                 "mbarrier_init(mask_full(i), kDropoutWarps - 1)",
                 sm90_dropout(),
                 {shared_race, shared_uninitialised, deadlock, barrier_misuse}},
                {"hopper_barriers_unfenced", "ptx::fence_mbarrier_init();", "", sm90(), {unfenced}},
            });
}

namespace {

/// Buffers: waited for, and released.
std::vector<Mutation> buffers() {
  using enum FaultKind;
  return in(
      "sm90/sm90_forward.cuh",
      {{"hopper_k_not_released", "release(k_empty(slot.index), lane);", "(void)lane;", sm90(), {deadlock}},
       {"hopper_v_not_released", "release(v_empty(at.v_slot.index), at.lane);", "", sm90(), {deadlock}, 2},
       {"hopper_q_not_released",
        "if constexpr (!kStageO) release(q_empty(at.q_slot.index), at.lane);",
        "",
        sm90(),
        {deadlock}},
       {"hopper_k_released_too_early",
        "ptx::wgmma_wait<1>();\nptx::wgmma_tie(at.s);\nrelease_k(at.k_slot, at.lane);",
        "release_k(at.k_slot, at.lane);\nptx::wgmma_wait<1>();\nptx::wgmma_tie(at.s);",
        sm90(),
        {source_overwritten, shared_race}},
       {"hopper_v_read_without_waiting",
        "ptx::mbarrier_wait(v_full(at.v_slot.index), at.v_slot.parity);\nissue_output",
        "issue_output",
        sm90(),
        {shared_in_flight, shared_uninitialised, shared_race}},
       {"hopper_wrong_parity_of_full",
        "ptx::mbarrier_wait(k_full(at.k_slot.index), at.k_slot.parity);\nthis->template with_keys<false>",
        "ptx::mbarrier_wait(k_full(at.k_slot.index), at.k_slot.parity ^ 1);\nthis->template with_keys<false>",
        sm90(),
        {shared_in_flight, shared_uninitialised, deadlock}},
       {"hopper_barriers_without_block_barrier", "ptx::sync_threads();", "", sm90(), {barrier_misuse, shared_race}}});
}

/// Products, and from tile to tile.
std::vector<Mutation> products_and_tiles() {
  using enum FaultKind;
  return in(
      "sm90/sm90_forward.cuh",
      {{"hopper_scores_not_waited_for", "ptx::wgmma_wait<1>();", "", sm90(), {register_in_flight}},
       {"hopper_output_not_waited_for",
        "ptx::wgmma_wait<0>();\nptx::wgmma_tie(at.o);\nif",
        "if",
        sm90(),
        {register_in_flight}},
       {"hopper_p_packed_before_the_wait",
        "ptx::wgmma_wait<0>();\nptx::wgmma_tie(at.o);\nrelease(v_empty",
        "pack(at.p, at.s, at.tile);\nptx::wgmma_wait<0>();\nptx::wgmma_tie(at.o);\nrelease(v_empty",
        sm90(),
        {register_in_flight}},
       {"hopper_passed_tile_not_released",
        "release(empty, lane);",
        "if (lane > 31) release(empty, lane);",
        sm90_own_ends(),
        {deadlock}},
       {"hopper_turn_of_a_passed_tile_kept", "&& !had_pingpong) {", "&& had_pingpong) {", sm90_own_ends(), {deadlock}},
       {"hopper_rows_not_exchanged",
        "if constexpr (kExchange) at.warp_row = other_rows(at.warp_row, at.consumer);",
        "",
        sm90_exchanging(),
        {shared_race, source_overwritten}},
       {"hopper_rows_of_the_next_tile_stored",
        "kExchange && more ? other_rows(at.warp_row, at.consumer) : at.warp_row;",
        "at.warp_row;",
        sm90_exchanging(),
        {shared_race}},
       {"hopper_stages_exchanged",
        "issue_output(at.o, at.p, at.v_slot.index, !at.first);\nif (kPingpong)",
        "issue_output(at.o, at.p, at.k_slot.index, !at.first);\nif (kPingpong)",
        sm90(),
        {shared_in_flight, shared_uninitialised, shared_race}}});
}

/// Rescaling, ping-pong scheduling and what else the main loop does.
std::vector<Mutation> rescaling_and_turns() {
  using enum FaultKind;
  return in(
      "sm90/sm90_forward.cuh",
      {{"hopper_output_never_rescaled", "multiply(at.o, at.softmax.factor);", "", sm90(), {}},
       {"hopper_output_not_rescaled_beside_scores",
        "multiply_risen(at);\nptx::mbarrier_wait",
        "ptx::mbarrier_wait",
        sm90_exact_max(),
        {}},
       {"hopper_output_not_rescaled_for_the_last_tile",
        "multiply_risen(at);\nif constexpr",
        "if constexpr",
        sm90_exact_max(),
        {}},
       {"hopper_beside_the_kernel_before",
        "ptx::griddepcontrol_wait();  // for what earlier kernels write",
        "// for what earlier kernels write",
        sm90(),
        {too_early}},
       {"hopper_turns_not_passed_on",
        "consumer == kConsumers - 1) ptx::barrier_arrive(first_of(NamedBarrier::pingpong), 2 * kWarpgroup);",
        "consumer == kConsumers) ptx::barrier_arrive(first_of(NamedBarrier::pingpong), 2 * kWarpgroup);",
        sm90(),
        {deadlock}},
       {"hopper_turns_counted_wrong",
        "ptx::barrier_sync(first_of(NamedBarrier::pingpong) + consumer, 2 * kWarpgroup);",
        "ptx::barrier_sync(first_of(NamedBarrier::pingpong) + consumer, 3 * kWarpgroup);",
        sm90(),
        {barrier_misuse, deadlock}},
       {"hopper_registers_not_given_back", "ptx::decrease_registers<kProducerRegisters>();", "", sm90(), {deadlock}},
       {"hopper_slopes_of_the_head_before",
        "begin_rows(at.tile, at.ahead, at.warp_row, at.lane);\nreturn true;",
        "return true;",
        sm90_variant("steep_distance"),
        {}},
       {"hopper_sums_of_the_last_tile_left_out",
        "if constexpr (kSummed) at.softmax.add_own();\nif",
        "if",
        sm90(),
        {}}});
}

}  // namespace

std::vector<Mutation> sm90_forward_mutations() {
  return joined({buffers(), products_and_tiles(), rescaling_and_turns()});
}

std::vector<Mutation> sm90_products_mutations() {
  using enum FaultKind;
  return in("sm90/sm90_products.cuh", {
                                          {"hopper_scores_without_fence",
                                           "ptx::wgmma_tie(s);\n    ptx::wgmma_fence();",
                                           "ptx::wgmma_tie(s);",
                                           sm90(),
                                           {unfenced}},
                                          {"hopper_output_without_fence",
                                           "ptx::wgmma_tie(o);\n    ptx::wgmma_fence();",
                                           "ptx::wgmma_tie(o);",
                                           sm90(),
                                           {unfenced}},
                                          {"hopper_products_not_committed",
                                           "accumulate || step != 0);\n    }\n    ptx::wgmma_commit();",
                                           "accumulate || step != 0);\n    }",
                                           sm90(),
                                           {register_in_flight, copies_at_exit}},
                                      });
}

std::vector<Mutation> sm90_shared_tile_mutations() {
  using enum FaultKind;
  return in("sm90/sm90_shared_tile.cuh",
            {
                {"hopper_stride_of_k_groups",
                 "8 * kStepBytes / 16 | kSwizzle128",
                 "16 * kStepBytes / 16 | kSwizzle128",
                 sm90(),
                 {shared_in_flight, shared_uninitialised, shared_out_of_bounds, shared_race, barrier_misuse}},
                {"hopper_no_swizzle",
                 "constexpr uint32_t kSwizzle128 = 1u << 30;",
                 "constexpr uint32_t kSwizzle128 = 0;",
                 sm90(),
                 {bad_descriptor}},
                {"hopper_stride_of_v_slabs",
                 "step * 16 * kStepBytes / 16, kSlabBytes / 16);",
                 "step * 16 * kStepBytes / 16, kSlabBytes / 32);",
                 sm90(),
                 {}},
                {"hopper_step_of_k", "step % 4 * 32) / 16", "step % 4 * 16) / 16", sm90(), {}},
            });
}

}  // namespace emulator
