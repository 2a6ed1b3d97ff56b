// Mistakes in what the Hopper backward does for functions, windows, packed batches and dropout.

#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"

namespace emulator {

namespace {

/// The main loop.
std::vector<Mutation> main_loop() {
  const Sm90BackwardVariant persistent{
      .choice = "plain", .dtype = DType::f16, .d_v = 48, .tile_n = 128, .varlen = true};  // many jobs a block
  using enum FaultKind;
  return in("sm90/sm90_backward.cuh", {{"hopper_backward_job_released_before_it_is_read_again",
                                        "if (any) parity ^= 1;",
                                        "if (any) parity ^= 1;\n      release_job(round);",
                                        persistent,
                                        {shared_race, barrier_misuse, deadlock}}});
}

/// The products.
std::vector<Mutation> products() {
  const Sm90BackwardVariant packed{.choice = "plain", .d_qk = 48, .causal = true, .tile_n = 128, .varlen = true};
  const Sm90BackwardVariant dropout{.choice = "plain", .dtype = DType::f16, .tile_n = 128, .dropout = true};
  const Sm90BackwardVariant window{.choice = "two_sided", .tile_n = 128};
  using enum FaultKind;
  return in("sm90/sm90_backward_products.cuh",
            {{"hopper_backward_last_rows_of_dq_left_out",
              "16 * row_group < rows)",
              "16 * row_group < rows - 16)",
              packed,
              {shared_uninitialised}},
             {"hopper_backward_dropout_of_other_keys",
              "dropout.draw_transposed<8>(first_key, place.m_block",
              "dropout.draw_transposed<8>(first_key + 16, place.m_block",
              dropout,
              {}},
             {"hopper_backward_window_ends_a_row_late",
              "const int rows_end = kernel::rows_end<Variant>(params, work.lengths, key) - first_query;",
              "const int rows_end = kernel::rows_end<Variant>(params, work.lengths, key) - first_query + 1;",
              window,
              {}}});
}

/// The additions to dQ.
std::vector<Mutation> additions_to_dq() {
  const Sm90BackwardVariant listed{.choice = "strided", .tile_n = 128};
  return in("sm90/sm90_backward_add_dq.cuh",
            {{"hopper_backward_mixed_tile_taken_for_a_full_one",
              "place.index < ptx::ld_global_nc(tile_list(work.tile) - (kAll ? 1 : 2))",
              "place.index <= ptx::ld_global_nc(tile_list(work.tile) - (kAll ? 1 : 2))",
              listed,
              {}}});
}

/// Rows and keys of others.
std::vector<Mutation> rows() {
  const Sm90BackwardVariant packed{.choice = "plain", .d_qk = 48, .causal = true, .tile_n = 128, .varlen = true};
  const Sm90BackwardVariant persistent{
      .choice = "plain", .dtype = DType::f16, .d_v = 48, .tile_n = 128, .varlen = true};  // many jobs a block
  using enum FaultKind;
  return in(
      "sm90/sm90_backward_rows.cuh",
      {{"hopper_backward_keys_of_others_not_cleared",
        "if constexpr (kVarlen) clear_rows<KTile, kTileN>(k_shared(), work.lengths.s_kv - work.first_key());",
        "static_cast<void>(work);",
        persistent,
        {}},
       {"hopper_backward_values_of_others_not_cleared",
        "if constexpr (kVarlen) clear_rows<VTile, kTileN>(v_shared(), work.lengths.s_kv - work.first_key());",
        "static_cast<void>(work);",
        packed,
        {}},
       // with a mask dQ would be computed once more
       {"hopper_backward_rows_of_others_not_cleared", "clear_rows<QTile>(q_shared(stage), rows);", "", packed, {}},
       {"hopper_backward_tiles_read_before_they_are_clean",
        "ptx::barrier_sync(first_of(NamedBarrier::clean_tiles), kConsumers * kWarpgroup);  // the tiles are "
        "clean",
        "// the tiles are clean",
        packed,
        {shared_race}},
       {"hopper_backward_rows_of_others_have_statistics",
        "fill_stats(lse_shared(stage), rows, kernel::kInfinity);",
        "",
        packed,
        {shared_uninitialised}}});
}

/// Which tile comes next.
std::vector<Mutation> jobs() {
  const Sm90BackwardVariant persistent{
      .choice = "plain", .dtype = DType::f16, .d_v = 48, .tile_n = 128, .varlen = true};  // many jobs a block
  const Sm90BackwardVariant listed{.choice = "strided", .tile_n = 128};
  using enum FaultKind;
  return in("sm90/sm90_backward_jobs.cuh",
            {{"hopper_backward_next_tile_of_the_list",
              "return ptx::ld_global_nc(tile_list(job.tile) + index);",
              "return ptx::ld_global_nc(tile_list(job.tile) + index + 1);",
              listed,
              {global_uninitialised, global_out_of_bounds}},
             {"hopper_backward_job_released_before_all_lanes_have_read_it",
              "ptx::sync_warp();  // all lanes have read it",
              "",
              persistent,
              {shared_race}},
             {"hopper_backward_job_told_over_the_last_but_one",
              "ptx::mbarrier_wait(job_empty(slot), static_cast<uint32_t>(count) / 2 % 2 ^ 1);",
              "",
              persistent,
              {shared_race, barrier_misuse, deadlock}}});
}

}  // namespace

std::vector<Mutation> sm90_backward_variant_mutations() {
  return joined({main_loop(), products(), additions_to_dq(), rows(), jobs()});
}

std::vector<Mutation> variant_backward_mutations() {
  const Sm90BackwardVariant function{.choice = "key_bias", .tile_n = 128, .dropout = true};
  const Sm90BackwardVariant listed{.choice = "strided", .tile_n = 128};
  using enum FaultKind;
  return in("common/variant_backward.cuh", {
                                               {"hopper_backward_dropout_of_other_rows",
                                                "draw(drops, first_row + 8 * n)",
                                                "draw(drops, first_row + 8 * n + 64)",
                                                function,
                                                {}},
                                               {"hopper_backward_mask_of_other_keys",
                                                "!Variant::keep(params.variant, place(m, n, e))",
                                                "!Variant::keep(params.variant, place(m, n, e ^ 2))",
                                                listed,
                                                {}},
                                           });
}

}  // namespace emulator
