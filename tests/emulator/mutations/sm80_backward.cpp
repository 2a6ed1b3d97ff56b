// Mistakes in the backward on mma.sync.

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"

namespace emulator {

namespace {

/// The main loop.
std::vector<Mutation> main_loop() {
  const KernelSpec by_keys = changed(sm80_backward(), [](KernelSpec& spec) {
    spec.warps = 2;  // a warp has all queries of its keys: only dS leaves its registers
    spec.as<fa::plan::Sm80Backward>().dq_warps_m = 1;
    spec.stages = 1;
  });
  const KernelSpec delayed =
      changed(sm80_backward(), [](KernelSpec& spec) { spec.as<fa::plan::Sm80Backward>().delayed_dq = true; });
  const KernelSpec delayed_by_keys = changed(by_keys, [](KernelSpec& spec) {
    spec.stages = 2;
    spec.as<fa::plan::Sm80Backward>().delayed_dq = true;
  });
  const KernelSpec causal = changed(sm80_backward(), [](KernelSpec& spec) { spec.causal = true; });
  using enum FaultKind;
  return in("sm80/sm80_backward.cuh", {{"backward_no_wait_for_queries",
                                        "ptx::cp_async_wait<0>();\n    ptx::sync_threads();  // this tile",
                                        "ptx::sync_threads();  // this tile",
                                        sm80_backward(),
                                        {shared_in_flight}},
                                       {"backward_no_barrier_before_a_step",
                                        "ptx::sync_threads();  // this tile",
                                        "// this tile",
                                        sm80_backward(),
                                        {shared_race, shared_in_flight, shared_uninitialised}},
                                       {"backward_p_is_read_before_it_is_there",
                                        "if constexpr (kExchange) ptx::sync_threads();  // all of P",
                                        "// all of P",
                                        sm80_backward(),
                                        {shared_race, shared_uninitialised}},
                                       {"backward_ds_is_read_before_it_is_there",
                                        "ptx::sync_threads();  // all of dS is in shared memory, and",
                                        "// all of dS is in shared memory, and",
                                        by_keys,
                                        {shared_race, shared_uninitialised, shared_in_flight}},
                                       {"backward_last_ds_is_read_before_it_is_there",
                                        "if constexpr (!kExchange) ptx::sync_threads();  // all of the last dS",
                                        "// all of the last dS",
                                        delayed_by_keys,
                                        {shared_race, shared_uninitialised}},
                                       {"backward_delayed_dq_of_the_wrong_buffer",
                                        "add_dq(before(place, steps), stage ^ 1)",
                                        "add_dq(before(place, steps), stage)",
                                        delayed,
                                        {shared_race, shared_uninitialised},
                                        3},
                                       {"backward_fills_the_stage_in_use",
                                        "load_queries(next, stage ^ 1)",
                                        "load_queries(next, stage)",
                                        sm80_backward(),
                                        {shared_race, shared_in_flight}},
                                       {"backward_loads_one_step_too_many",
                                        "begin_step(place, next, left > 1, stage);",
                                        "begin_step(place, next, true, stage);",
                                        sm80_backward(),
                                        {copies_at_exit, global_out_of_bounds, shared_in_flight}},
                                       {"backward_rows_without_keys_not_cleared",
                                        "if (has_empty_rows(place, stage)) clear_empty_rows(place, stage);",
                                        "if (has_empty_rows(place, stage) && lane < 0) clear_empty_rows(place, stage);",
                                        spoilt_row(causal),
                                        {}},
                                       {"backward_rows_read_before_they_are_clear",
                                        "ptx::sync_threads();  // the tile is clean for all",
                                        "// the tile is clean for all",
                                        spoilt_row(causal),
                                        {shared_race}},
                                       {"backward_keys_behind_the_last_row_not_hidden",
                                        "(Config::kCausal && visible_from >= lengths.s_q - first_query)",
                                        "false",
                                        spoilt_key(causal),
                                        {}}});
}

/// What leaves the block.
std::vector<Mutation> outputs() {
  const KernelSpec split = changed(sm80_backward(), [](KernelSpec& spec) { spec.split = true; });
  const KernelSpec causal = changed(sm80_backward(), [](KernelSpec& spec) { spec.causal = true; });
  using enum FaultKind;
  return in("sm80/sm80_backward_outputs.cuh",
            {{"backward_dk_staged_over_k",
              "ptx::sync_threads();  // all have left K and V",
              "// all have left K and V",
              sm80_backward(),
              {shared_race}},
             {"backward_rows_leave_before_they_are_staged",
              "ptx::sync_threads();  // dK and dV are complete",
              "// dK and dV are complete",
              sm80_backward(),
              {shared_race, shared_uninitialised}},
             {"backward_dq_past_the_last_row",
              "if (row_group * kRowGroup >= lengths.padded_rows) break;",
              "",
              sm80_backward(),
              {global_out_of_bounds, global_uninitialised}},
             {"backward_keys_past_the_end",
              "const int valid = lengths.s_kv - first_key;\n    if constexpr (kWantsDk)",
              "const int valid = kTileN;\n    if constexpr (kWantsDk)",
              sm80_backward(),
              {global_out_of_bounds, global_not_writable}},
             {"backward_partials_past_the_end",
              "if (first_key + row >= params.s_kv) continue;",
              "",
              split,
              {global_out_of_bounds}},
             {"backward_nan_of_hidden_keys_multiplied",
              "if (hides_keys(place) && any_infinite(dq))",
              "if (hides_keys(place) && any_infinite(dq) && lane < 0)",
              spoilt_key(causal),
              {}}});
}

/// What the block loads.
std::vector<Mutation> block() {
  using enum FaultKind;
  return in("sm80/sm80_backward_block.cuh", {{"backward_queries_past_the_end",
                                              "const int valid = lengths.s_q - row;",
                                              "const int valid = kTileM;",
                                              sm80_backward(),
                                              {global_out_of_bounds}},
                                             {"backward_statistics_past_the_end",
                                              "const bool in_range = row + first < lengths.padded_rows;",
                                              "const bool in_range = true;",
                                              sm80_backward(),
                                              {global_out_of_bounds, global_uninitialised}}});
}

}  // namespace

std::vector<Mutation> sm80_backward_mutations() {
  return joined({main_loop(), outputs(), block()});
}

std::vector<Mutation> sm80_backward_dq_mutations() {
  const KernelSpec dq = sm80_backward_dq();
  const KernelSpec causal_dq = changed(dq, [](KernelSpec& spec) { spec.causal = true; });
  using enum FaultKind;
  return in(
      "sm80/sm80_backward_dq.cuh",
      {
          {"backward_dq_nan_of_hidden_keys_multiplied",
           "return kHides && masked && any_infinite(p);",
           "return kHides && masked && any_infinite(p) && lane < 0;",
           spoilt_key(causal_dq),
           {}},
          {"backward_dq_no_wait_for_keys", "ptx::cp_async_wait<0>();", "", dq, {shared_in_flight, copies_at_exit}},
          {"backward_dq_staged_over_q",
           "ptx::sync_threads();  // all have left Q",
           "// all have left Q",
           dq,
           {shared_race}},
          {"backward_dq_fills_the_stage_in_use",
           "load_keys(n_block + 1, stage ^ 1)",
           "load_keys(n_block + 1, stage)",
           dq,
           {shared_race, shared_in_flight}},
      });
}

}  // namespace emulator
