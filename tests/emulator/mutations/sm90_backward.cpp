// Mistakes in the Hopper backward.

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"

namespace emulator {

namespace {

/// What the main loop waits for.
std::vector<Mutation> waits() {
  const KernelSpec hopper = sm90_backward();
  using enum FaultKind;
  return in("sm90/sm90_backward.cuh",
            {{"hopper_backward_stores_beside_the_kernel_before",
              "ptx::griddepcontrol_wait();  // before anything is stored",
              "// before anything is stored",
              hopper,
              {too_early}},
             {"hopper_backward_ds_unfenced",
              "share(ds_operand, ds_shared(buffer), consumer_index());\n        ptx::fence_proxy_async();",
              "share(ds_operand, ds_shared(buffer), consumer_index());",
              hopper,
              {unfenced},
              2},
             {"hopper_backward_ds_is_read_before_it_is_there",
              "ptx::barrier_sync(first_of(NamedBarrier::ds), kConsumers * kWarpgroup);  // dS",
              "// dS",
              hopper,
              {shared_race, shared_uninitialised, unfenced},
              4},
             {"hopper_backward_one_buffer_of_ds",
              "const int buffer = count % 2;",
              "const int buffer = 0;",
              hopper,
              {source_overwritten, shared_race},
              3},
             {"hopper_backward_scores_not_waited_for",
              "ptx::wgmma_wait<0>();  // dK, whose operand",
              "// dK, whose operand",
              hopper,
              {register_in_flight}},
             {"hopper_backward_first_scores_not_waited_for",
              "issue_scores(s, stage_of(count), consumer_index());\n    ptx::wgmma_wait<0>();",
              "issue_scores(s, stage_of(count), consumer_index());",
              hopper,
              {register_in_flight}},
             {"hopper_backward_dp_not_waited_for",
              "ptx::wgmma_wait<0>();  // dP, and dV",
              "// dP, and dV",
              hopper,
              {register_in_flight}},
             {"hopper_backward_dk_and_dq_not_waited_for",
              "ptx::wgmma_wait<0>();  // dK and dQ",
              "// dK and dQ",
              hopper,
              {source_overwritten, shared_race, register_in_flight}}});
}

/// Which stage it reads, and when it releases it.
std::vector<Mutation> stages() {
  const KernelSpec hopper = sm90_backward();
  using enum FaultKind;
  return in("sm90/sm90_backward.cuh",
            {{"hopper_backward_ds_of_the_wrong_buffer",
              "issue_dq(dq, buffer, consumer_index());",
              "issue_dq(dq, buffer ^ 1, consumer_index());",
              hopper,
              {shared_race, shared_uninitialised, source_overwritten},
              6},
             {"hopper_backward_statistics_of_the_wrong_stage",
              "exponentiate(s, stage_of(count), again(work, round), next, first_key);\n      ",
              "exponentiate(s, stage, again(work, round), next, first_key);\n      ",
              hopper,
              {shared_race}},
             {"hopper_backward_k_released_too_early",
              "ptx::wgmma_wait<0>();\n        tie_dk(dk);\n        release(v_empty());",
              "release(k_empty());\n        ptx::wgmma_wait<0>();\n        tie_dk(dk);\n        "
              "release(v_empty());",
              hopper,
              {source_overwritten, shared_race, barrier_misuse}},
             {"hopper_backward_q_released_twice",
              "issue_scores(s, stage_of(count), consumer);\n"
              "issue_dk(dk, ds_operand, q_shared(stage));",
              "issue_scores(s, stage_of(count), consumer);\n"
              "issue_dk(dk, ds_operand, q_shared(stage));\nrelease(step_empty(stage));",
              hopper,
              {source_overwritten, shared_race, barrier_misuse}},
             {"hopper_backward_q_and_dout_not_released", "release(step_empty(stage));", "", hopper, {deadlock}, 6}});
}

/// dQ without dK and dV.
std::vector<Mutation> dq_alone() {
  const KernelSpec hopper = sm90_backward();
  const KernelSpec alone = changed(hopper, [](KernelSpec& spec) { spec.without_dk = spec.without_dv = true; });
  using enum FaultKind;
  return in("sm90/sm90_backward_dq_alone.cuh", {{"hopper_dq_alone_next_scores_not_waited_for",
                                                 "ptx::wgmma_wait<1>();  // dQ, and the next S",
                                                 "ptx::wgmma_wait<2>();  // dQ, and the next S",
                                                 alone,
                                                 {register_in_flight}},
                                                {"hopper_dq_alone_dp_not_waited_for",
                                                 "ptx::wgmma_wait<0>();  // dP, before",
                                                 "// dP, before",
                                                 alone,
                                                 {register_in_flight}},
                                                {"hopper_dq_alone_last_dq_not_waited_for",
                                                 "ptx::wgmma_wait<0>();  // the last dQ",
                                                 "// the last dQ",
                                                 alone,
                                                 {register_in_flight}},
                                                {"hopper_dq_alone_weights_of_the_next_step",
                                                 "share_ds(dp, weights, delta_shared(stage), drops, buffer);",
                                                 "share_ds(dp, s, delta_shared(stage), drops, buffer);",
                                                 alone,
                                                 {register_in_flight},
                                                 2},
                                                {"hopper_dq_alone_buffers_not_released",
                                                 "release(step_empty(stage));\n      await_dout(count);",
                                                 "await_dout(count);",
                                                 alone,
                                                 {deadlock}}});
}

/// The products and their operands.
std::vector<Mutation> products() {
  const KernelSpec hopper = sm90_backward();
  const KernelSpec narrow = changed(hopper, [](KernelSpec& spec) { spec.d_qk = 64; });
  const KernelSpec causal = changed(hopper, [](KernelSpec& spec) { spec.causal = true; });
  const KernelSpec ordered =
      changed(hopper, [](KernelSpec& spec) { spec.as<fa::plan::Sm90Backward>().ordered_dq = true; });
  using enum FaultKind;
  return in("sm90/sm90_backward_products.cuh",
            {{"hopper_backward_ds_chunks_not_swizzled",
              "(chunk ^ lane % 8) * kernel::kChunkBytes",
              "chunk * kernel::kChunkBytes",
              hopper,
              {}},
             {"hopper_backward_ds_not_transposed",
              "const int row = lane / 16 * 8 + lane % 8;\n    const int chunk = 2 * warp_index() + lane / 8 % 2;",
              "const int row = lane / 8 % 2 * 8 + lane % 8;\n    const int chunk = 2 * warp_index() + lane / 16;",
              hopper,
              {}},
             {"hopper_backward_additions_past_the_last_column",
              "if (column_group + j >= kColumnGroups) break;",
              "if (column_group + j >= kColumnGroups + 8) break;",
              narrow,
              {shared_race, shared_in_flight}},
             {"hopper_backward_dq_left_over_the_last",
              "ptx::mbarrier_wait(dq_empty(), static_cast<uint32_t>(count) % 2);",
              "static_cast<void>(count);",
              ordered,
              {source_overwritten, shared_race, barrier_misuse}},
             {"hopper_backward_dq_unfenced",
              "ptx::fence_proxy_async();\n    ptx::sync_warp();  // these rows",
              "ptx::sync_warp();  // these rows",
              ordered,
              {unfenced}},
             {"hopper_backward_dq_leaves_before_it_is_there",
              "ptx::sync_warp();  // these rows",
              "// these rows",
              ordered,
              {shared_race, shared_uninitialised, unfenced}},
             {"hopper_backward_no_causal_mask",
              "if (Config::kCausal && first_limit < 15)",
              "if (Config::kCausal && first_limit < -150)",
              causal,
              {}},
             {"hopper_backward_infinite_keys_not_told",
              "ptx::vote_any(zero != 0.f)",
              "ptx::vote_any(zero > 0.f)",
              spoilt_key(causal),
              {}},
             {"hopper_backward_operands_of_the_wrong_rows",
              "operand[i / 4][i % 4] = ptx::convert_pair<T>(s[2 * i], s[2 * i + 1])",
              "operand[i / 4][(i + 1) % 4] = ptx::convert_pair<T>(s[2 * i], s[2 * i + 1])",
              hopper,
              {}}});
}

/// Rows and keys, cleared where they do not count.
std::vector<Mutation> rows() {
  const KernelSpec hopper = sm90_backward();
  const KernelSpec causal = changed(hopper, [](KernelSpec& spec) { spec.causal = true; });
  using enum FaultKind;
  return in("sm90/sm90_backward_rows.cuh",
            {{"hopper_backward_wrong_parity_of_q",
              "ptx::mbarrier_wait(q_full(stage), parity_of(count));",
              "ptx::mbarrier_wait(q_full(stage), parity_of(count) ^ 1);",
              hopper,
              {shared_in_flight, shared_uninitialised, shared_race, deadlock}},
             {"hopper_backward_v_read_without_waiting",
              "ptx::mbarrier_wait(v_full(), parity);",
              "static_cast<void>(parity);",
              hopper,
              {shared_in_flight, shared_uninitialised, shared_race}},
             {"hopper_backward_dout_read_without_waiting",
              "ptx::mbarrier_wait(do_full(stage), parity_of(count));",
              "",
              hopper,
              {shared_in_flight, shared_uninitialised, shared_race}},
             {"hopper_backward_rows_without_keys_of_dout_not_cleared",
              "clear_rows<DoTile>(do_shared(stage), rows);",
              "",
              spoilt_row(causal),
              {}},
             {"hopper_backward_rows_cleared_before_dout_is_there",
              "      await_dout(count);\n    } else {",
              "      static_cast<void>(count);\n    } else {",
              spoilt_row(causal),
              {shared_in_flight, shared_race, shared_uninitialised}},
             {"hopper_backward_cleared_rows_unfenced",
              "ptx::fence_proxy_async();\n    ptx::barrier_sync(first_of(NamedBarrier::clean_tiles),",
              "ptx::barrier_sync(first_of(NamedBarrier::clean_tiles),",
              spoilt_row(causal),
              {unfenced}}});
}

/// The copies of the producer.
std::vector<Mutation> copies() {
  const KernelSpec hopper = sm90_backward();
  using enum FaultKind;
  return in("sm90/sm90_backward_copies.cuh",
            {{"hopper_backward_statistics_of_the_kernel_before",
              "ptx::griddepcontrol_wait();\n    load_lse",
              "load_lse",
              hopper,
              {too_early}},
             {"hopper_backward_k_loaded_without_waiting",
              "ptx::mbarrier_wait(k_empty(), parity ^ 1);",
              "static_cast<void>(parity);",
              hopper,
              {source_overwritten, shared_race, shared_in_flight, barrier_misuse}},
             {"hopper_backward_statistics_not_announced",
              "mbarrier_arrive_expect_tx(q_full(stage), QTile::kBytes + kLayout.stats_bytes);",
              "mbarrier_arrive_expect_tx(q_full(stage), QTile::kBytes);",
              hopper,
              {deadlock, shared_in_flight, shared_uninitialised}},
             {"hopper_backward_statistics_of_the_wrong_rows",
              "params.delta + row_index(work, query)",
              "params.delta + row_index(work, query) + 8",
              hopper,
              {}},
             {"hopper_backward_k_of_another_map", "p.map_k, k_full()", "p.map_q, k_full()", hopper, {deadlock}}});
}

/// The additions to dQ.
std::vector<Mutation> additions_to_dq() {
  const KernelSpec hopper = sm90_backward();
  const KernelSpec causal = changed(hopper, [](KernelSpec& spec) { spec.causal = true; });
  const KernelSpec ordered =
      changed(hopper, [](KernelSpec& spec) { spec.as<fa::plan::Sm90Backward>().ordered_dq = true; });
  using enum FaultKind;
  return in("sm90/sm90_backward_add_dq.cuh",
            {{"hopper_backward_dq_of_the_next_rows",
              "const int64_t group = at.row_group;",
              "const int64_t group = at.row_group + 4;",
              hopper,
              {}},
             {"hopper_backward_additions_not_committed",
              "    ptx::tma_commit();",
              "",
              hopper,
              {source_overwritten, copies_at_exit}},
             {"hopper_backward_adds_beside_the_kernel_before",
              "ptx::griddepcontrol_wait();  // for the cleared accumulator and counters",
              "// for the cleared accumulator and counters",
              ordered,
              {too_early}},
             {"hopper_backward_dq_out_of_turn",
              "ptx::await_global(turn_of(at), work.tile.block);",
              "static_cast<void>(at);",
              ordered,
              {out_of_turn}},
             {"hopper_backward_turn_given_before_the_sum_is_there",
              "ptx::tma_wait();  // the sum is there for the next",
              "// the sum is there for the next",
              ordered,
              {unfenced}},
             {"hopper_backward_dq_given_back_while_it_is_read",
              "ptx::tma_wait_read();\n    ptx::mbarrier_arrive(dq_empty());",
              "ptx::mbarrier_arrive(dq_empty());",
              ordered,
              {source_overwritten, shared_race}},
             {"hopper_backward_nan_of_hidden_keys_added",
              "if (infinite) have_looked_at(",
              "if (infinite && count < 0) have_looked_at(",
              spoilt_key(causal),
              {}},
             {"hopper_backward_dq_multiplied_by_ds_of_another_step",
              "look(ds_shared(static_cast<int>(what % 2))",
              "look(ds_shared(static_cast<int>(what % 2 ^ 1))",
              spoilt_key(causal),
              {shared_race, shared_uninitialised}},
             {"hopper_backward_dq_added_while_it_is_looked_at",
              "    ptx::barrier_sync(first_of(NamedBarrier::dq_clean), 2 * kWarpSize);\n  }\n  FA_DEVICE void give",
              "    ptx::barrier_arrive(first_of(NamedBarrier::dq_clean), 2 * kWarpSize);\n  }\n  FA_DEVICE void give",
              spoilt_key(causal),
              {shared_race, source_overwritten, barrier_misuse, unfenced}},
             {"hopper_backward_dq_multiplied_anew_unfenced",
              "ptx::fence_proxy_async();  // for the copy engine",
              "// for the copy engine",
              spoilt_key(causal),
              {unfenced}},
             {"hopper_backward_keys_kept_for_ever",
              "if (lane_index() == 0) ptx::mbarrier_arrive(k_empty());",
              "",
              causal,
              {deadlock}}});
}

/// Which tile comes next.
std::vector<Mutation> jobs() {
  const KernelSpec hopper = sm90_backward();
  const KernelSpec causal = changed(hopper, [](KernelSpec& spec) { spec.causal = true; });
  const KernelSpec ordered =
      changed(hopper, [](KernelSpec& spec) { spec.as<fa::plan::Sm90Backward>().ordered_dq = true; });
  return in("sm90/sm90_backward_jobs.cuh",
            {{"hopper_backward_next_head_at_the_wrong_row",
              "place.row_group += params.padded_rows / kernel::kRowGroup - (stop(work) - first) * kGroups;",
              "place.row_group += params.padded_rows / kernel::kRowGroup - stop(work) * kGroups;",
              causal,
              {}},
             {"hopper_backward_head_in_front_at_the_wrong_row",
              "place.row_group -= params.padded_rows / kernel::kRowGroup - (stop(work) - first) * kGroups;",
              "",
              ordered,
              {}}});
}

/// The block and its barriers.
std::vector<Mutation> block() {
  const KernelSpec hopper = sm90_backward();
  const KernelSpec no_dq = changed(hopper, [](KernelSpec& spec) { spec.write_dq = false; });
  using enum FaultKind;
  return in("sm90/sm90_backward_block.cuh",
            {{"hopper_backward_statistics_read_by_one_lane_only",
              "if constexpr (!Config::kWriteDq) ptx::sync_warp();",
              "",
              no_dq,
              {shared_race}},
             {"hopper_backward_barrier_counts_one_reader_less",
              "constexpr int kReaders = 4 * kConsumers;",
              "constexpr int kReaders = 4 * kConsumers - 1;",
              hopper,
              {shared_race, source_overwritten, shared_in_flight, deadlock, barrier_misuse}},
             {"hopper_backward_barriers_unfenced", "ptx::fence_mbarrier_init();", "", hopper, {unfenced}}});
}

/// The registers.
std::vector<Mutation> traits() {
  const KernelSpec hopper = sm90_backward();
  using enum FaultKind;
  return in("sm90/sm90_backward_traits.cuh", {{"hopper_backward_more_registers_than_there_are",
                                               "kConsumers == 2 ? 240 : 160",
                                               "kConsumers == 2 ? 248 : 160",
                                               hopper,
                                               {deadlock}}});
}

}  // namespace

std::vector<Mutation> sm90_backward_mutations() {
  return joined(
      {waits(), stages(), dq_alone(), products(), rows(), copies(), additions_to_dq(), jobs(), block(), traits()});
}

std::vector<Mutation> sm90_backward_store_mutations() {
  const KernelSpec hopper = sm90_backward();
  const KernelSpec split = changed(hopper, [](KernelSpec& spec) { spec.split = true; });
  using enum FaultKind;
  return in("sm90/sm90_backward_store.cuh", {
                                                {"hopper_backward_keys_past_the_end",
                                                 "const bool inside = key < keys;",
                                                 "const bool inside = key < keys + 64;",
                                                 hopper,
                                                 {global_out_of_bounds, global_not_writable}},
                                                {"hopper_backward_partials_past_the_end",
                                                 "if (key >= s_kv) continue;",
                                                 "if (key >= s_kv + 64) continue;",
                                                 split,
                                                 {global_out_of_bounds, global_not_writable}},
                                            });
}

}  // namespace emulator
