// Mistakes in the Hopper backward of two blocks a tile.

#include "emulator/mutations.hpp"
#include "plan/sm90_backward_pair.hpp"

namespace emulator {
namespace {

using fa::plan::KernelSpec;

constexpr const char* kPair = "sm90/sm90_backward_pair.cuh";

/// Three slabs of q and k, two of v; the second block has a part of one each.
KernelSpec pair_base() {
  KernelSpec spec;
  spec.op = fa::plan::Op::backward;
  spec.family = fa::Family::sm90;
  spec.arch = {9, 0, 'a'};
  spec.d_qk = 136;
  spec.d_v = 72;
  spec.tile_m = 64;
  spec.tile_n = 128;
  spec.stages = 2;
  return fa::plan::as_pair(spec);
}

}  // namespace

std::vector<Mutation> pair_mutations() {
  const KernelSpec pair = pair_base();
  KernelSpec causal = pair;
  causal.causal = true;
  KernelSpec wide = pair;  // two slabs of q and k in each block
  wide.d_qk = 256;
  wide.d_v = 128;
  using enum FaultKind;
  return {
      {"pair_statistics_of_the_kernel_before",
       kPair,
       "if (count == 0) ptx::griddepcontrol_wait();",
       "",
       1,
       pair,
       {too_early}},
      {"pair_stores_beside_the_kernel_before",
       kPair,
       "ptx::griddepcontrol_wait();  // before anything is stored",
       "// before anything is stored",
       1,
       pair,
       {too_early}},
      {"pair_adds_beside_the_kernel_before",
       kPair,
       "ptx::griddepcontrol_wait();  // for the cleared accumulator",
       "// for the cleared accumulator",
       1,
       pair,
       {too_early}},
      {"pair_leaves_before_the_other_block",
       kPair,
       "ptx::cluster_sync();  // the other block may still",
       "// the other block may still",
       1,
       pair,
       {exited_block}},
      {"pair_barriers_not_there_for_the_other_block",
       kPair,
       "ptx::cluster_sync();  // the barriers exist for both blocks",
       "ptx::sync_threads();  // the barriers exist for one block",
       1,
       pair,
       {shared_race, barrier_misuse, deadlock, unfenced, exited_block}},
      {"pair_stores_scores_that_are_still_read",
       kPair,
       "ptx::mbarrier_wait_cluster(kRank == 0 ? p_empty() : ds_empty(), parity_of_one(count) ^ 1);",
       "",
       1,
       pair,
       {source_overwritten, shared_race, shared_in_flight, barrier_misuse}},
      {"pair_scores_unfenced",
       kPair,
       "ptx::fence_proxy_async();\n    ptx::sync_warp();  // the rows are complete",
       "ptx::sync_warp();  // the rows are complete",
       1,
       pair,
       {unfenced}},
      {"pair_copies_before_the_warp_has_stored",
       kPair,
       "ptx::sync_warp();  // the rows are complete",
       "// the rows are complete",
       1,
       pair,
       {shared_race, shared_uninitialised, unfenced}},
      {"pair_copies_to_the_wrong_rows",
       kPair,
       "ptx::bulk_copy_to_cluster(ptx::map_shared(rows, 1 - kRank), rows,",
       "ptx::bulk_copy_to_cluster(ptx::map_shared(rows + 128, 1 - kRank), rows,",
       1,
       pair,
       {shared_race, shared_in_flight, shared_uninitialised, source_overwritten, unfenced}},
      {"pair_announces_half_of_the_copies",
       kPair,
       "ptx::mbarrier_arrive_expect_tx_remote(full_there, kKeySlabs * kWarpBytes);",
       "ptx::mbarrier_arrive_expect_tx_remote(full_there, kWarpBytes);",
       1,
       pair,
       {deadlock, shared_in_flight, shared_uninitialised, barrier_misuse}},
      {"pair_p_given_back_while_lanes_read_it",
       kPair,
       "ptx::sync_warp();  // all lanes have read P",
       "",
       1,
       pair,
       {shared_race}},
      {"pair_other_block_is_not_told_that_p_is_read",
       kPair,
       "if (lane_index() == 0) ptx::mbarrier_arrive_remote(ptx::map_shared(p_empty(), 0));",
       "",
       1,
       pair,
       {deadlock}},
      {"pair_p_given_back_while_its_product_runs",
       kPair,
       "ptx::wgmma_wait<0>();  // dV",
       "ptx::wgmma_wait<1>();  // dV",
       1,
       pair,
       {source_overwritten, shared_race, shared_in_flight}},
      {"pair_ds_given_back_while_its_product_runs",
       kPair,
       "ptx::wgmma_wait<0>();  // dK",
       "ptx::wgmma_wait<1>();  // dK",
       1,
       pair,
       {source_overwritten, shared_race, shared_in_flight}},
      {"pair_loads_over_columns_that_are_still_read",
       kPair,
       "ptx::mbarrier_wait(other_empty(others.stage), others.parity);",
       "",
       1,
       pair,
       {source_overwritten, shared_race}},
      {"pair_loads_over_q_that_is_still_read",
       kPair,
       "ptx::mbarrier_wait(q_empty(ring_q.stage), ring_q.parity);",
       "",
       1,
       pair,
       {source_overwritten, shared_race, shared_in_flight}},
      {"pair_loads_over_dout_that_is_still_read",
       kPair,
       "ptx::mbarrier_wait(do_empty(ring_do.stage), ring_do.parity);",
       "",
       1,
       pair,
       {source_overwritten, shared_in_flight}},
      {"pair_ds_read_without_waiting",
       kPair,
       "await_shared(ds_full(), count);\n        ptx::wgmma_forget(dq);",
       "ptx::wgmma_forget(dq);",
       1,
       pair,
       {shared_race, shared_in_flight, shared_uninitialised, unfenced}},
      {"pair_dq_staged_over_the_last_addition",
       kPair,
       "if (lane == 0) ptx::tma_wait_read();",
       "",
       1,
       pair,
       {source_overwritten}},
      {"pair_additions_not_waited_for",
       kPair,
       "if (lane_index() == 0) ptx::tma_wait();",
       "",
       1,
       pair,
       {copies_at_exit}},
      {"pair_dq_of_the_wrong_columns", kPair, "L::kFirstQkColumn / 8;", "L::kFirstQkColumn / 16;", 1, pair, {}},
      {"pair_statistics_of_the_wrong_rows",
       kPair,
       "ptx::ld_global(statistics + 8)",
       "ptx::ld_global(statistics + 4)",
       1,
       pair,
       {}},
      {"pair_rank_in_the_descriptors_of_q", kPair, "rows = ptx::without_rank(rows);", "", 1, wide, {bad_descriptor}},
      {"pair_rank_in_the_descriptors_of_k",
       kPair,
       "ptx::without_rank(shared + L::kDqKeysOffset)",
       "shared + L::kDqKeysOffset",
       1,
       wide,
       {bad_descriptor}},
      {"pair_no_causal_mask",
       kPair,
       "if (Config::kCausal && first_limit < kTileN - 1)",
       "if (Config::kCausal && first_limit < -256)",
       1,
       causal,
       {}},
  };
}

}  // namespace emulator
