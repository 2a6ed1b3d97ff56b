// Mistakes in what compute capability 7.5 has in the place of later instructions.

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"
#include "emulator/paged_specs.hpp"

namespace emulator {

std::vector<Mutation> turing_copies_mutations() {
  using enum FaultKind;
  const std::string loads = "if (valid) chunk = ld_global_chunk(global);";
  const std::string loads_always = "if (valid || global != nullptr) chunk = ld_global_chunk(global);";
  return in("common/copies.cuh",
            {
                {"turing_rows_past_the_end_are_read", loads, loads_always, on_turing(sm80(1)), {global_out_of_bounds}},
                {"turing_keys_of_no_request_are_read",
                 loads,
                 loads_always,
                 on_turing(sm80_paged()),
                 {global_out_of_bounds, global_uninitialised}},
                {"turing_queries_past_the_end_are_read",
                 loads,
                 loads_always,
                 on_turing(sm80_backward()),
                 {global_out_of_bounds}},
                {"turing_zeros_are_not_stored",
                 "st_shared_chunk(shared, chunk);",
                 "if (valid) st_shared_chunk(shared, chunk);",
                 on_turing(sm80(1)),
                 {shared_uninitialised}},
                {"turing_rows_left_as_they_were",
                 "st_shared_chunk(shared, chunk);",
                 "if (valid) st_shared_chunk(shared, chunk);",
                 on_turing(sm80_fp32()),
                 {shared_uninitialised}},
            });
}

std::vector<Mutation> sm80_products_mutations() {
  return in(
      "sm80/sm80_products.cuh",
      {
          {"turing_lower_half_of_the_depth_alone",
           "mma_m16n8k8<T>(d, a[2], a[3], b1);",
           "mma_m16n8k8<T>(d, a[2], a[3], 0 * b1);",
           on_turing(sm80(1)),
           {}},
          {"turing_lower_half_of_b_for_both", "a[2], a[3], b1", "a[2], a[3], b0 + 0 * b1", on_turing(sm80(2)), {}},
          {"turing_rows_for_depths_of_a",
           "mma_m16n8k8<T>(d, a[0], a[1], b0); mma_m16n8k8<T>(d, a[2], a[3], b1);",
           "mma_m16n8k8<T>(d, a[0], a[2], b0); mma_m16n8k8<T>(d, a[1], a[3], b1);",
           on_turing(sm80(1)),
           {}},
          {"turing_backward_upper_half_of_a_for_both",
           "a[0], a[1], b0",
           "a[2], a[3], b0",
           on_turing(sm80_backward()),
           {}},
      });
}

std::vector<Mutation> turing_fp32_mutations() {
  using enum FaultKind;
  return joined(
      {in("sm80/sm80_tf32x3.cuh",
          {
              {"turing_fp32_depth_of_the_asking_lane",
               "const int t = k % 4;",
               "const int t = k % 4 * 0 + lane % 4;",
               on_turing(sm80_fp32()),
               {}},
              {"turing_fp32_lower_depths_of_b_for_both",
               "k < 4 ? b0.big : b1.big",
               "k < 4 ? b0.big : b0.big + 0 * b1.big",
               on_turing(sm80_fp32()),
               {}},
              {"turing_fp32_upper_rows_for_lower_ones",
               "a.big[k / 4 * 2 + 1]",
               "a.big[k / 4 * 2]",
               on_turing(sm80_fp32()),
               {}},
              {"turing_fp32_columns_of_the_asking_row",
               "(lane % 4 * 2 + e) * 4 + t",
               "(lane / 4 + 0 * e) * 4 + t",
               on_turing(sm80_fp32()),
               {}},
              {"turing_fp32_second_column_left_out",
               "d[2 + e] = ptx::fma(lower, b, d[2 + e]);",
               "d[2] = ptx::fma(lower, b, d[2]);",
               on_turing(sm80_fp32()),
               {}},
              {"turing_fp32_lanes_do_not_all_answer",
               "const float b = ptx::from_bits(ptx::shfl(",
               "const float b = lane == 5 ? 0.f : ptx::from_bits(ptx::shfl(",
               on_turing(sm80_fp32()),
               {divergence}},
              {"turing_fp32_backward_lower_depths_of_a_for_both",
               "ptx::shfl(a.big[k / 4 * 2], lane / 4 * 4 + t)",
               "ptx::shfl(a.big[0], lane / 4 * 4 + t)",
               on_turing(changed(sm80_backward(), [](KernelSpec& spec) { spec.dtype = DType::f32; })),
               {}},
          }),
       in("common/mask.cuh", {
                                 {"turing_fp32_keys_behind_the_last_are_seen",
                                  "if (8 * n + e % 2 >= limit[m][e / 2])",
                                  "if (8 * n + e % 2 >= limit[m][e / 2] + 32)",
                                  on_turing(sm80_fp32()),
                                  {}},
                                 {"turing_fp32_mask_of_the_other_row",
                                  "if (8 * n + e % 2 >= limit[m][e / 2])",
                                  "if (8 * n + e % 2 >= limit[m][1 - e / 2])",
                                  on_turing(changed(sm80_fp32(), [](KernelSpec& spec) { spec.causal = true; })),
                                  {}},
                             })});
}

/// Barriers behind copies that no thread waits for by itself.
std::vector<Mutation> turing_barrier_mutations() {
  using enum FaultKind;
  return joined({in("sm80/sm80_forward.cuh",
                    {
                        {"turing_no_barrier_before_k",
                         "ptx::sync_threads();  // this tile's K",
                         "// this tile's K",
                         on_turing(sm80(2)),
                         {shared_race, shared_uninitialised}},
                        {"turing_no_barrier_before_refill",
                         "ptx::sync_threads();  // V has landed",
                         "// V has landed",
                         on_turing(sm80(1)),
                         {shared_race, shared_uninitialised}},
                        {"turing_no_warp_barrier_after_q",
                         "ptx::sync_warp();  // the other lanes'",
                         "// the other lanes'",
                         on_turing(sm80_q_in_registers()),
                         {shared_race, shared_uninitialised}},
                        {"turing_fp32_no_barrier_before_k",
                         "ptx::sync_threads();  // this tile's K",
                         "// this tile's K",
                         on_turing(sm80_fp32()),
                         {shared_race, shared_uninitialised}},
                    }),
                 in("sm80/sm80_backward.cuh",
                    {
                        {"turing_backward_no_barrier_before_a_step",
                         "ptx::sync_threads();  // this tile",
                         "// this tile",
                         on_turing(sm80_backward()),
                         {shared_race, shared_uninitialised}},
                        {"turing_backward_fills_the_stage_in_use",
                         "load_queries(next, stage ^ 1)",
                         "load_queries(next, stage)",
                         on_turing(sm80_backward()),
                         {shared_race}},
                    }),
                 in("sm80/sm80_backward_dq.cuh",
                    {
                        {"turing_backward_dq_fills_the_stage_in_use",
                         "load_keys(n_block + 1, stage ^ 1)",
                         "load_keys(n_block + 1, stage)",
                         on_turing(sm80_backward_dq()),
                         {shared_race}},
                    }),
                 in("common/shared_tile.cuh", {
                                                  {"turing_wide_copies_of_unaligned_rows",
                                                   "if constexpr (kAligned) {",
                                                   "if constexpr (true) {",
                                                   on_turing(sm80_unaligned()),
                                                   {misaligned}},
                                              })});
}

}  // namespace emulator
