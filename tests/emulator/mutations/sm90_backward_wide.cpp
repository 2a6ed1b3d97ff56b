// Mistakes in the Hopper backward of four blocks a tile.

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"
#include "plan/sm90_backward_pair.hpp"

namespace emulator {
namespace {

constexpr const char* kHeader = "sm90/sm90_backward_wide.cuh";

/// Five slabs, of which the fourth block has none.
KernelSpec wide_base() {
  KernelSpec spec = sm90_backward();
  spec.d_qk = spec.d_v = 264;
  spec.stages = 2;
  return fa::plan::as_pair(spec);
}

std::vector<Mutation> kernels_in_front() {
  const KernelSpec wide = wide_base();
  using enum FaultKind;
  return in(
      kHeader,
      {{"wide_statistics_of_the_kernel_before", "if (count == 0) ptx::griddepcontrol_wait();", "", wide, {too_early}},
       {"wide_stores_beside_the_kernel_before",
        "ptx::griddepcontrol_wait();  // before anything is stored",
        "// before anything is stored",
        wide,
        {too_early}},
       {"wide_adds_beside_the_kernel_before",
        "ptx::griddepcontrol_wait();  // for the cleared accumulator",
        "// for the cleared accumulator",
        wide,
        {too_early}}});
}

/// What the blocks hand to each other.
std::vector<Mutation> exchange() {
  const KernelSpec wide = wide_base();
  using enum FaultKind;
  return in(kHeader, {{"wide_stores_scores_that_are_still_read",
                       "await_shared(kPart == 0 ? p_empty() : ds_empty(), count + 1);",
                       "",
                       wide,
                       {source_overwritten, shared_race, shared_in_flight, barrier_misuse}},
                      {"wide_copies_to_the_wrong_rows",
                       "ptx::map_shared(rows, to), rows,",
                       "ptx::map_shared(rows + 128, to), rows,",
                       wide,
                       {shared_race, shared_in_flight, shared_uninitialised, source_overwritten, unfenced}},
                      {"wide_copies_to_two_of_three_blocks",
                       "for (int i = 1; i < kBlocks; ++i) {",
                       "for (int i = 1; i < kBlocks - 1; ++i) {",
                       wide,
                       {deadlock}},
                      {"wide_p_given_back_while_lanes_read_it",
                       "ptx::sync_warp();  // all lanes have read P",
                       "",
                       wide,
                       {shared_race}},
                      {"wide_p_given_back_while_its_product_runs",
                       "ptx::wgmma_wait<0>();  // dV",
                       "ptx::wgmma_wait<1>();  // dV",
                       wide,
                       {source_overwritten, shared_race, shared_in_flight}},
                      {"wide_ds_given_back_while_its_product_runs",
                       "ptx::wgmma_wait<0>();  // dK",
                       "ptx::wgmma_wait<1>();  // dK",
                       wide,
                       {source_overwritten, shared_race, shared_in_flight}},
                      {"wide_ds_of_a_half_not_given_back", "release_to(ds_empty(), 3);", "", wide, {deadlock}},
                      {"wide_scores_of_the_wrong_keys",
                       "const int first_key = work.first_key() + kKeys * half;",
                       "const int first_key = work.first_key();",
                       wide,
                       {}}});
}

/// Loads, and what does not count: rows, keys, columns.
std::vector<Mutation> loads_and_hidden_rows() {
  const KernelSpec wide = wide_base();
  KernelSpec causal = wide;
  causal.causal = true;
  using enum FaultKind;
  return in(kHeader, {{"wide_slab_given_back_while_its_product_runs",
                       "ptx::wgmma_wait<1>();\n      refill",
                       "refill",
                       wide,
                       {source_overwritten, shared_race}},
                      {"wide_loads_over_a_slab_that_is_still_read",
                       "ptx::mbarrier_wait(slab_empty(read.stage), read.parity);",
                       "",
                       wide,
                       {source_overwritten, shared_race, shared_in_flight}},
                      {"wide_loads_over_q_that_is_still_read",
                       "ptx::mbarrier_wait(q_empty(), parity_of_one(count));",
                       "",
                       wide,
                       {source_overwritten, shared_race, shared_in_flight}},
                      {"wide_loads_over_dout_that_is_still_read",
                       "ptx::mbarrier_wait(do_empty(), parity_of_one(count));",
                       "",
                       wide,
                       {source_overwritten, shared_race, shared_in_flight, barrier_misuse}},
                      {"wide_rows_without_keys_not_cleared",
                       "clear_first_rows(shared + kQOffset, 2 * kOwnSlabs, rows);",
                       "",
                       spoilt_row(causal),
                       {}},
                      {"wide_rows_read_before_both_warpgroups_have_cleared",
                       "ptx::barrier_sync(first_of(NamedBarrier::clean_tiles),",
                       "static_cast<void>(first_of(NamedBarrier::clean_tiles) +",
                       spoilt_row(causal),
                       {source_overwritten, shared_race, unfenced}},
                      {"wide_ds_of_rows_without_keys_not_cleared",
                       "if (Config::kCausal && rows > 0) clear_first_rows(scores, rows);",
                       "if (rows < -kTileM * 1000) clear_first_rows(scores, rows);",
                       spoilt_row(causal),
                       {}},
                      {"wide_columns_behind_the_last",
                       "count < kColumns ? count : kColumns",
                       "kColumns",
                       wide,
                       {global_out_of_bounds, global_not_writable}}});
}

/// In what pairs have too.
std::vector<Mutation> by_columns() {
  const KernelSpec wide = wide_base();
  using enum FaultKind;
  return in("sm90/sm90_backward_by_columns.cuh", {{"wide_ds_of_a_half_read_without_waiting",
                                                   "for (int half = 0; half < halves; ++half)",
                                                   "for (int half = 1; half < halves; ++half)",
                                                   wide,
                                                   {shared_race, shared_in_flight, shared_uninitialised, unfenced}}});
}

}  // namespace

std::vector<Mutation> sm90_backward_wide_mutations() {
  return joined({kernels_in_front(), exchange(), loads_and_hidden_rows(), by_columns()});
}

}  // namespace emulator
