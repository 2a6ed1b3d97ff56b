// Mistakes in the Hopper backward of two blocks a tile.

#include "plan/sm90_backward_pair.hpp"
#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"

namespace emulator {
namespace {

/// Three slabs of q and k, two of v; the second block has a part of one each.
KernelSpec pair_base() {
  KernelSpec spec = sm90_backward();
  spec.d_qk = 136;
  spec.d_v = 72;
  return fa::plan::as_pair(spec);
}

/// What waits for the kernel in front.
std::vector<Mutation> kernels_in_front() {
  const KernelSpec pair = pair_base();
  using enum FaultKind;
  return in(
      "sm90/sm90_backward_pair.cuh",
      {{"pair_statistics_of_the_kernel_before", "if (count == 0) ptx::griddepcontrol_wait();", "", pair, {too_early}},
       {"pair_stores_beside_the_kernel_before",
        "ptx::griddepcontrol_wait();  // before anything is stored",
        "// before anything is stored",
        pair,
        {too_early}},
       {"pair_adds_beside_the_kernel_before",
        "ptx::griddepcontrol_wait();  // for the cleared accumulator",
        "// for the cleared accumulator",
        pair,
        {too_early}}});
}

/// What the two blocks hand to each other.
std::vector<Mutation> exchange() {
  const KernelSpec pair = pair_base();
  using enum FaultKind;
  return in("sm90/sm90_backward_pair.cuh",
            {{"pair_stores_scores_that_are_still_read",
              "ptx::mbarrier_wait_cluster(kRank == 0 ? p_empty() : ds_empty(), parity_of_one(count) ^ 1);",
              "",
              pair,
              {source_overwritten, shared_race, shared_in_flight, barrier_misuse}},
             {"pair_copies_to_the_wrong_rows",
              "ptx::bulk_copy_to_cluster(ptx::map_shared(rows, 1 - kRank), rows,",
              "ptx::bulk_copy_to_cluster(ptx::map_shared(rows + 128, 1 - kRank), rows,",
              pair,
              {shared_race, shared_in_flight, shared_uninitialised, source_overwritten, unfenced}},
             {"pair_announces_half_of_the_copies",
              "ptx::mbarrier_arrive_expect_tx_remote(full_there, kKeySlabs * kWarpBytes);",
              "ptx::mbarrier_arrive_expect_tx_remote(full_there, kWarpBytes);",
              pair,
              {deadlock, shared_in_flight, shared_uninitialised, barrier_misuse}},
             {"pair_p_given_back_while_lanes_read_it",
              "ptx::sync_warp();  // all lanes have read P",
              "",
              pair,
              {shared_race}},
             {"pair_other_block_is_not_told_that_p_is_read",
              "if (lane_index() == 0) ptx::mbarrier_arrive_remote(ptx::map_shared(p_empty(), 0));",
              "",
              pair,
              {deadlock}},
             {"pair_p_given_back_while_its_product_runs",
              "ptx::wgmma_wait<0>();  // dV",
              "ptx::wgmma_wait<1>();  // dV",
              pair,
              {source_overwritten, shared_race, shared_in_flight}},
             {"pair_ds_given_back_while_its_product_runs",
              "ptx::wgmma_wait<0>();  // dK",
              "ptx::wgmma_wait<1>();  // dK",
              pair,
              {source_overwritten, shared_race, shared_in_flight}}});
}

/// Loads, and rows and keys that do not count.
std::vector<Mutation> loads_and_hidden_rows() {
  const KernelSpec pair = pair_base();
  KernelSpec causal = pair;
  causal.causal = true;
  using enum FaultKind;
  return in("sm90/sm90_backward_pair.cuh", {{"pair_loads_over_columns_that_are_still_read",
                                             "ptx::mbarrier_wait(other_empty(others.stage), others.parity);",
                                             "",
                                             pair,
                                             {source_overwritten, shared_race}},
                                            {"pair_loads_over_q_that_is_still_read",
                                             "ptx::mbarrier_wait(q_empty(ring_q.stage), ring_q.parity);",
                                             "",
                                             pair,
                                             {source_overwritten, shared_race, shared_in_flight}},
                                            {"pair_loads_over_dout_that_is_still_read",
                                             "ptx::mbarrier_wait(do_empty(ring_do.stage), ring_do.parity);",
                                             "",
                                             pair,
                                             {source_overwritten, shared_in_flight}},
                                            {"pair_rows_without_keys_not_cleared",
                                             "clear_first_rows(do_shared<kRank>(ring_do.stage), L::kDoSlabs, rows);",
                                             "",
                                             spoilt_row(causal),
                                             {}},
                                            {"pair_rows_cleared_while_the_scores_read_them",
                                             "await_shared(ds_full(), count);  // the scores have read both",
                                             "// the scores have read both",
                                             spoilt_row(causal),
                                             {source_overwritten, shared_race}},
                                            {"pair_ds_of_rows_without_keys_not_cleared",
                                             "if (Config::kCausal && rows > 0) clear_first_rows(scores, rows);",
                                             "if (rows < -kTileM * 1000) clear_first_rows(scores, rows);",
                                             spoilt_row(causal),
                                             {}}});
}

/// Additions to dQ, in order or not.
std::vector<Mutation> additions() {
  const KernelSpec pair = pair_base();
  KernelSpec ordered = pair;
  ordered.as<fa::plan::Sm90BackwardPair>().ordered_dq = true;
  using enum FaultKind;
  return in(
      "sm90/sm90_backward_by_columns.cuh",
      {{"pair_dq_staged_over_the_last_addition",
        "ptx::mbarrier_wait(dq_empty(), parity_of_one(count));",
        "static_cast<void>(count);",
        pair,
        {source_overwritten, shared_race, barrier_misuse}},
       {"pair_dq_given_back_while_it_is_read",
        "ptx::tma_wait_read();\n    ptx::mbarrier_arrive(dq_empty());",
        "ptx::mbarrier_arrive(dq_empty());",
        pair,
        {source_overwritten}},
       {"pair_dq_added_before_it_is_there",
        "ptx::mbarrier_wait(dq_full(), parity_of_one(count));",
        "static_cast<void>(count);",
        pair,
        {source_overwritten, shared_race, shared_uninitialised, unfenced, barrier_misuse}},
       {"pair_dq_unfenced",
        "ptx::fence_proxy_async();\n    ptx::sync_warp();  // the warp's rows",
        "ptx::sync_warp();  // the warp's rows",
        pair,
        {unfenced}},
       {"pair_dq_handed_over_before_the_warp_has_stored",
        "ptx::sync_warp();  // the warp's rows are complete",
        "// the warp's rows are complete",
        pair,
        {source_overwritten, shared_race, shared_uninitialised, unfenced}},
       {"pair_additions_not_waited_for",
        "ptx::tma_wait();  // shared memory must outlive the additions",
        "// shared memory must outlive the additions",
        pair,
        {copies_at_exit}},
       {"pair_dq_of_the_wrong_columns", "addition.first_column / 8;", "addition.first_column / 16;", pair, {}},
       {"pair_dq_out_of_turn", "ptx::await_global(turn_of(addition), addition.in_front);", "", ordered, {out_of_turn}},
       {"pair_dq_added_whether_or_not_its_turn_has_come",
        "ptx::test_global(turn_of(addition), addition.in_front)",
        "(ptx::test_global(turn_of(addition), addition.in_front) || true)",
        ordered,
        {out_of_turn}},
       {"pair_turn_given_before_the_sum_is_there",
        "ptx::tma_wait();  // the sum is there for it",
        "// the sum is there for it",
        ordered,
        {unfenced}}});
}

/// Statistics.
std::vector<Mutation> statistics() {
  const KernelSpec pair = pair_base();
  using enum FaultKind;
  return in("sm90/sm90_backward_pair.cuh", {{"pair_statistics_of_the_wrong_rows",
                                             "ptx::ld_global(statistics + 8)",
                                             "ptx::ld_global(statistics + 4)",
                                             pair,
                                             {}}});
}

/// What kernels have in common whose blocks share a key tile.
std::vector<Mutation> by_columns() {
  const KernelSpec pair = pair_base();
  KernelSpec causal = pair;
  causal.causal = true;
  KernelSpec whole = pair;  // two slabs of q and k in each block
  whole.d_qk = 256;
  whole.d_v = 128;
  using enum FaultKind;
  return in("sm90/sm90_backward_by_columns.cuh",
            {{"pair_leaves_before_the_other_block",
              "ptx::cluster_sync();  // other blocks may still",
              "// other blocks may still",
              pair,
              {exited_block}},
             {"pair_barriers_not_there_for_the_other_block",
              "ptx::cluster_sync();  // the barriers exist for all blocks",
              "ptx::sync_threads();  // the barriers exist for one block",
              pair,
              {shared_race, barrier_misuse, deadlock, unfenced, exited_block}},
             {"pair_scores_unfenced",
              "ptx::fence_proxy_async();\n    ptx::sync_warp();  // the rows are complete",
              "ptx::sync_warp();  // the rows are complete",
              pair,
              {unfenced}},
             {"pair_copies_before_the_warp_has_stored",
              "ptx::sync_warp();  // the rows are complete",
              "// the rows are complete",
              pair,
              {shared_race, shared_uninitialised, unfenced}},
             {"pair_ds_read_without_waiting",
              "for (int half = 0; half < halves; ++half) await_shared(full + 8 * half, count);",
              "static_cast<void>(full);",
              pair,
              {shared_race, shared_in_flight, shared_uninitialised, unfenced}},
             {"pair_nan_of_hidden_keys_multiplied",
              "hides_keys(work, query.m_block) && kernel::any_infinite(dq);",
              "hides_keys(work, query.m_block) && false;",
              spoilt_key(causal),
              {}},
             {"pair_ds_given_back_before_it_is_read_again",
              "if (!again) give_back();",
              "give_back();",
              spoilt_key(causal),
              {barrier_misuse, shared_race, source_overwritten, deadlock}},
             {"pair_rank_in_the_descriptors_of_q", "rows = ptx::without_rank(rows);", "", whole, {bad_descriptor}},
             {"pair_rank_in_the_descriptors_of_k", "ptx::without_rank(keys)", "keys", whole, {bad_descriptor}},
             {"pair_no_causal_mask",
              "if (Config::kCausal && first_limit < 2 * kCount - 1)",
              "if (Config::kCausal && first_limit < -256)",
              causal,
              {}}});
}

}  // namespace

std::vector<Mutation> sm90_backward_pair_mutations() {
  return joined({kernels_in_front(), exchange(), loads_and_hidden_rows(), additions(), statistics(), by_columns()});
}

}  // namespace emulator
