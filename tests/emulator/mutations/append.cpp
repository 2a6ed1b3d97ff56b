// Mistakes in appends to KV caches.

#include "emulator/append_specs.hpp"
#include "emulator/mutations/pieces.hpp"
#include "emulator/mutations/subjects.hpp"

namespace emulator {
namespace {

using fa::test::AppendCase;

AppendCase paged(std::int64_t page_size = 16) {
  AppendCase c;
  c.page_size = page_size;
  return c;
}

/// With lengths, tables, rows and slots that do not fit.
AppendCase hostile(AppendCase c) {
  c.hostile = true;
  return c;
}

AppendCase rotary(int dims, bool interleaved = false) {
  AppendCase c;
  c.rotary_dims = dims;
  c.interleaved = interleaved;
  return c;
}

AppendCase unaligned() {
  AppendCase c;
  c.aligned = false;
  return c;
}

AppendCase with_table(AppendCase c) {
  c.table = DType::f32;
  return c;
}

/// Where a row goes.
std::vector<Mutation> places() {
  using enum FaultKind;
  return in("common/append.cuh",
            {{"append_beside_the_kernel_before",
              "if constexpr (kOverlaps<Config>) ptx::griddepcontrol_wait();",
              "",
              paged(),
              {too_early}},
             {"append_in_front_of_the_table",
              "row >= params.table_rows || place.position < 0) return;",
              "row >= params.table_rows) return;",
              hostile(paged()),
              {global_out_of_bounds}},
             {"append_behind_the_table",
              "if (place.position >= static_cast<int64_t>(params.max_pages) * page_rows()) return;",
              "",
              hostile(paged()),
              {global_out_of_bounds}},
             {"append_behind_a_contiguous_cache",
              "if (place.position >= static_cast<int64_t>(params.max_pages) * page_rows()) return;",
              "",
              hostile(paged(0)),
              {global_out_of_bounds, global_not_writable}},
             {"append_into_rows_that_no_table_has",
              "row >= params.table_rows ||",
              "",
              hostile(paged(3)),
              {global_out_of_bounds}},
             {"append_into_pages_that_no_pool_has",
              "if (page < 0 || page >= params.pages) return;",
              "",
              hostile(paged()),
              {global_out_of_bounds, global_not_writable}},
             {"append_into_pages_behind_the_pool",
              "if (page < 0 || page >= params.pages) return;",
              "if (page < 0) return;",
              hostile(paged()),
              {global_out_of_bounds, global_not_writable}},
             {"append_into_slots_behind_the_pool",
              "if (slot < 0 || slot >= static_cast<int64_t>(params.pages) * page_rows()) return;",
              "if (slot < 0) return;",
              hostile(paged()),
              {global_out_of_bounds, global_not_writable}},
             {"append_of_skipped_rows",
              "if (slot < 0 || slot >= static_cast<int64_t>(params.pages) * page_rows()) return;",
              "if (slot >= static_cast<int64_t>(params.pages) * page_rows()) return;",
              paged(),
              {global_out_of_bounds, global_not_writable}},
             {"append_into_half_of_a_slot", "const int64_t slot =", "const int slot =", hostile(paged()), {}}});
}

/// Which rows are of which request.
std::vector<Mutation> requests() {
  using enum FaultKind;
  return in("common/append.cuh",
            {{"append_counts_from_the_end", "- count + row;", "- count + row + 1;", paged(), {}},
             {"append_of_rows_of_no_request", "if (row < 0 || row >= count) return place;", "", rotary(64), {}},
             {"append_guesses_the_request",
              "if (guess < params.b && start(guess) <= token && token < start(guess + 1)) return guess;",
              "if (guess < params.b) return guess;",
              paged(),
              {}},
             {"append_ignores_the_batch_index",
              "params.batch_index == nullptr ? request : ptx::ld_global(params.batch_index + request)",
              "request",
              paged(),
              {}},
             {"append_of_heads_behind_the_last",
              "if (item.head + i < item.heads) {",
              "{",
              paged(),
              {global_out_of_bounds, global_not_writable, global_uninitialised},
              2},
             {"append_leaves_out_a_token", "i <= last && i < end", "i < last && i < end", paged(), {}}});
}

/// Which columns a thread has, and how they are turned.
std::vector<Mutation> columns() {
  using enum FaultKind;
  return in("common/append.cuh",
            {{"append_of_wide_pieces_of_unaligned_rows",
              "static constexpr int kWidthV = Config::kAligned ? kPiece : 1;",
              "static constexpr int kWidthV = kPiece;",
              unaligned(),
              {misaligned}},
             {"append_of_wide_pieces_of_narrow_halves",
              "kHalves ? common_width(kPairs, kPiece) : kPiece;",
              "kPiece;",
              rotary(24),
              {misaligned}},
             {"append_turns_columns_behind_the_pairs",
              "const int last = kHalves && item.turns ? kPairs : Config::kHeadDimQk;",
              "const int last = Config::kHeadDimQk;",
              rotary(24),
              {}},
             {"append_turns_neighbours_behind_the_pairs",
              "if (pair < count) piece.word[i] = turned.word[i];",
              "if (pair <= count) piece.word[i] = turned.word[i];",
              with_table(rotary(20, true)),
              {}},
             {"append_looks_behind_the_rotary_table",
              ": position >= params.table_positions ? params.table_positions - 1",
              ": position >= params.table_positions ? params.table_positions",
              hostile(with_table(rotary(64))),
              {global_out_of_bounds}},
             {"append_ignores_given_positions",
              "if (params.positions_64 != nullptr) place.position = ptx::ld_global(params.positions_64 + token);",
              "",
              rotary(64),
              {}}});
}

}  // namespace

std::vector<Mutation> append_mutations() {
  return joined({places(), requests(), columns()});
}

std::vector<Mutation> append_u4_mutations() {
  using enum FaultKind;
  AppendCase u4 = rotary(64);
  u4.k_dtype = u4.v_dtype = DType::u4x2;
  u4.group_size = 32;
  AppendCase extreme = u4;
  extreme.dtype = DType::f16;
  extreme.rotary_dims = 0;
  extreme.extreme = true;
  AppendCase latent = rotary(64);
  latent.latent = true;
  latent.k_dtype = DType::e4m3;
  latent.d_qk = 576;
  latent.d_v = 512;
  return in("common/append_stored.cuh",
            {
                {"append_latent_scale_of_half_a_group",
                 "for (int mask = kLanes / 2; mask > 0; mask /= 2) {",
                 "for (int mask = kLanes / 4; mask > 0; mask /= 2) {",
                 latent,
                 {}},
                {"append_latent_scales_in_another_order",
                 "reinterpret_cast<float*>(row + kCodes) + column / kCodeGroup;",
                 "reinterpret_cast<float*>(row + kCodes) + 3 - column / kCodeGroup;",
                 latent,
                 {}},
                {"append_latent_turns_the_codes",
                 "read<0>(values, source, column, position);",
                 "read<kRotaryDims>(values, source, column, position);",
                 latent,
                 {}},
                {"append_latent_turns_nothing",
                 "read<kRotaryDims>(values, source + kCodes, column, position);",
                 "read<0>(values, source + kCodes, column, position);",
                 latent,
                 {}},
                {"append_latent_columns_behind_the_row",
                 "reinterpret_cast<bf16*>(row + kCodes + kCodes / kCodeGroup * 4)",
                 "reinterpret_cast<bf16*>(row + kCodes + kCodes / kCodeGroup * 8)",
                 latent,
                 {global_out_of_bounds, global_not_writable, global_uninitialised}},
                {"append_u4_of_half_a_group",
                 "for (int mask = Stored::kGroup / kColumns / 2; mask > 0; mask /= 2) {\n        least",
                 "for (int mask = Stored::kGroup / kColumns / 4; mask > 0; mask /= 2) {\n        least",
                 u4,
                 {}},
                {"append_u4_codes_in_order", "<< (i % 2 * 16 + i / 2 * 4)", "<< 4 * i", u4, {}},
                {"append_u4_with_the_offset_not_rounded",
                 "offset = to_float(rounded_offset);",
                 "offset = least + zero;",
                 u4,
                 {}},
                {"append_u4_scale_of_sixteen_steps",
                 "half_distance(most, offset) / 7.5f",
                 "half_distance(most, offset) / 8.f",
                 u4,
                 {}},
                {"append_u4_code_15_beyond_f16",
                 "if (greatest == kInfinity) --scale.bits;",
                 "if (greatest == 0.f) --scale.bits;",
                 extreme,
                 {}},
            });
}

std::vector<Mutation> rotary_mutations() {
  return in(
      "common/rotary.cuh",
      {
          {"rotary_loses_digits_far_away",
           "static_cast<uint64_t>(position) * turns",
           "static_cast<uint64_t>(position) * (turns >> 32 << 32)",
           rotary(64),
           {}},
          {"rotary_turns_back", "-ptx::multiply(second, sine)", "ptx::multiply(second, sine)", rotary(64, true), {}},
          {"rotary_turns_what_it_has_turned",
           "const float before = first;",
           "const float before = second;",
           rotary(64),
           {}},
          {"rotary_swaps_no_quarters",
           "const bool swapped = quarter % 2 != 0;",
           "const bool swapped = false;",
           rotary(64),
           {}},
          {"rotary_in_the_wrong_half", "((quarter + 1u) & 2u) != 0", "(quarter & 2u) != 0", rotary(64), {}},
      });
}

}  // namespace emulator
