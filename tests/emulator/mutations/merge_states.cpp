// Mistakes in merges of partial results, and in forwards that add to one.

#include "emulator/merge_specs.hpp"
#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"

namespace emulator {
namespace {

using fa::test::MergeCase;

MergeCase usual() {
  return {};
}

MergeCase of_kinds(MergeCase::Kinds kinds, bool float_result = false) {
  MergeCase c;
  c.kinds = kinds;
  c.float_result = float_result;
  return c;
}

MergeCase of_head_dim(std::int64_t d_v, DType dtype = DType::bf16) {
  MergeCase c;
  c.dtype = dtype;
  c.d_v = d_v;
  return c;
}

MergeCase unaligned() {
  MergeCase c;
  c.aligned = false;
  return c;
}

MergeCase summed() {
  MergeCase c;
  c.sum = true;
  return c;
}

KernelSpec accumulating(KernelSpec spec) {
  spec.accumulate = true;
  return spec;
}

/// Which states count.
std::vector<Mutation> states() {
  using enum FaultKind;
  return in(
      "common/merge_states.cuh",
      {{"merge_beside_the_kernel_before",
        "if constexpr (kOverlaps<Config>) ptx::griddepcontrol_wait();",
        "",
        usual(),
        {too_early}},
       {"merge_of_rows_behind_the_last",
        "row.exists = in_warp < kRowsOfWarp && number < params.rows;",
        "row.exists = in_warp < kRowsOfWarp;",
        usual(),
        {global_out_of_bounds, global_not_writable, global_uninitialised}},
       {"merge_by_lanes_without_a_row",
        "row.exists = in_warp < kRowsOfWarp && number < params.rows;",
        "row.exists = number < params.rows;",
        of_head_dim(80),
        {}},
       {"merge_of_states_behind_the_last",
        "if (first + i < params.states && rows[r].exists) load_row",
        "if (rows[r].exists) load_row",
        usual(),
        {global_out_of_bounds, global_uninitialised}},
       {"merge_counts_infinite_logarithms", "return lse == kInfinity ? -kInfinity : lse;", "return lse;", usual(), {}},
       {"merge_reads_states_without_keys", "if (lse == -kInfinity) continue;", "", usual(), {}},
       {"merge_relative_to_no_keys", "return largest == -kInfinity ? 0.f : largest;", "return largest;", usual(), {}},
       {"merge_relative_to_the_first",
        "largest = ptx::max(largest, lse_of(row, i));",
        "largest = lse_of(row, 0);",
        usual(),
        {}},
       {"merge_of_the_first_batch_alone", "if (first > 0) load(pieces, rows, first);", "", usual(), {}}});
}

/// What is made of them.
std::vector<Mutation> results() {
  using enum FaultKind;
  return in("common/merge_states.cuh",
            {{"merge_forgets_the_distance",
              "params.lse[which] + state * params.stride_lse_state +",
              "params.lse[which] +",
              usual(),
              {}},
             {"merge_with_the_sink_of_another_head",
              "head * params.stride_sink",
              "0 * head * params.stride_sink",
              usual(),
              {}},
             {"merge_with_two_sinks",
              "sums.weights += weight(sink_of_row(row), sums.base);",
              "sums.weights += 2.f * weight(sink_of_row(row), sums.base);",
              usual(),
              {}},
             {"merge_divides_by_no_keys",
              "sums.weights == 0.f ? 0.f : 1.f / sums.weights",
              "1.f / sums.weights",
              usual(),
              {}},
             {"merge_writes_what_is_read",
              "ptx::sync_warp();  // every lane has read the logarithms of its row, in whose place the result's may be",
              "",
              usual(),
              {}},
             {"merge_of_axes_in_another_order",
              "row.index[0] = outer / params.length[1];",
              "row.index[0] = outer % params.length[0];",
              usual(),
              {global_out_of_bounds, global_not_writable, global_uninitialised}},
             {"merge_of_wide_pieces_of_unaligned_rows",
              "load_columns<(Config::kAligned ? kColumns : 1)>(",
              "load_columns<kColumns>(",
              unaligned(),
              {misaligned}},
             {"merge_takes_floats_for_elements",
              "if constexpr (kMixed) return (params.floats >> state & 1) != 0;",
              "if constexpr (kMixed) return (params.floats >> state & 0) != 0;",
              of_kinds(MergeCase::Kinds::mixed),
              {global_out_of_bounds, global_uninitialised, misaligned}},
             {"merge_of_half_of_the_floats",
              "j * kPieceElements<float> + c]",
              "c]",
              of_kinds(MergeCase::Kinds::own, true),
              {}},
             {"sum_with_weights", "float part = 1.f;", "float part = 0.5f;", summed(), {}},
             {"sum_by_the_number_of_states",
              "const float inverse = kSum ? 1.f :",
              "const float inverse = kSum ? 1.f / params.states :",
              summed(),
              {}},
             {"sum_reads_logarithms",
              "if constexpr (!kSum) sums[r].base = greatest(rows[r]);",
              "sums[r].base = greatest(rows[r]);",
              summed(),
              {global_out_of_bounds, global_uninitialised}},
             {"merge_of_the_first_pieces",
              "const int piece = i * kLanes + lane;",
              "const int piece = lane;",
              of_head_dim(256, DType::f32),
              {},
              2}});
}

}  // namespace

std::vector<Mutation> merge_states_mutations() {
  return joined({states(), results()});
}

std::vector<Mutation> accumulate_mutations() {
  using enum FaultKind;
  return in("common/accumulate.cuh", {
                                         {"accumulate_counts_infinite_logarithms",
                                          "return lse == kInfinity ? -kInfinity : lse;",
                                          "return lse;",
                                          accumulating(sm80(1)),
                                          {}},
                                         {"accumulate_reads_states_without_keys",
                                          "return !(state < 0.f);",
                                          "return state < 2.f;",
                                          accumulating(sm80(1)),
                                          {global_out_of_bounds, global_uninitialised}},
                                         {"accumulate_keeps_the_weight_of_the_keys",
                                          "keys_weight * inverse,",
                                          "keys_weight,",
                                          accumulating(sm90()),
                                          {}},
                                         {"accumulate_relative_to_the_keys",
                                          "const float largest = ptx::max(keys, state);",
                                          "const float largest = keys;",
                                          accumulating(sm90_causal()),
                                          {}},
                                     });
}

std::vector<Mutation> accumulating_epilogue_mutations() {
  using enum FaultKind;
  std::vector<Mutation> all =
      in("sm80/sm80_forward_epilogue.cuh",
         {
             {"accumulate_writes_what_is_read_by_the_pair",
              "if constexpr (kShared) f.meet();  // the state's log-sum-exp is read, in whose place the result goes",
              "",
              accumulating(sm80_pair(1)),
              {}},
             {"accumulate_reads_rows_behind_the_last",
              "states[m][r] = row < f.row_count ? state_lse(lse_row(row)) : -kInfinity;",
              "states[m][r] = state_lse(lse_row(row));",
              accumulating(sm80(1)),
              {global_out_of_bounds, global_uninitialised}},
             {"accumulate_the_other_half",
              "o_row(f.fragment_row(m, r)) + f.first_o_column() + 2 * (f.lane % 4);",
              "o_row(f.fragment_row(m, r)) + 2 * (f.lane % 4);",
              accumulating(sm80_pair(1)),
              {}},
         });
  for (Mutation& mutation : in("sm90/sm90_epilogue.cuh",
                               {
                                   {"hopper_accumulate_writes_what_is_read",
                                    "if constexpr (kAccumulate) ptx::sync_warp();",
                                    "",
                                    accumulating(sm90()),
                                    {}},
                                   {"hopper_accumulate_reads_rows_behind_the_last",
                                    "inside ? kernel::state_lse(lse_row(query, rows, row)) : -kInfinity",
                                    "inside || !inside ? kernel::state_lse(lse_row(query, rows, row)) : -kInfinity",
                                    accumulating(sm90()),
                                    {global_out_of_bounds, global_uninitialised}},
                                   {"hopper_accumulate_forgets_the_state",
                                    "if constexpr (kAccumulate) add_states(o,",
                                    "if constexpr (false) add_states(o,",
                                    accumulating(sm90_causal()),
                                    {}},
                               })) {
    all.push_back(std::move(mutation));
  }
  for (Mutation& mutation : in("common/forward_combine.cuh", {
                                                                 {"combine_forgets_the_weight_of_the_state",
                                                                  "inverse *= joined.keys;",
                                                                  "",
                                                                  accumulating(sm80_split()),
                                                                  {}},
                                                             })) {
    all.push_back(std::move(mutation));
  }
  return all;
}

}  // namespace emulator
