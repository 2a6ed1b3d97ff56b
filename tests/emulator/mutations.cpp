#include "emulator/mutations.hpp"

#include <utility>

namespace emulator {
namespace {

using fa::DType;

constexpr const char* kForward = "sm80/sm80_forward.cuh";
constexpr const char* kMma16 = "sm80/sm80_mma16.cuh";
constexpr const char* kTf32 = "sm80/sm80_tf32x3.cuh";
constexpr const char* kTile = "common/shared_tile.cuh";
constexpr const char* kSoftmax = "common/online_softmax.cuh";
constexpr const char* kCombine = "common/forward_combine.cuh";

/// Two warps, 16 rows each; ragged sequences take three key tiles.
Spec base(int stages) {
  Spec spec;
  spec.arch = {8, 0, '\0'};
  spec.dtype = DType::bf16;
  spec.d_qk = 64;
  spec.d_v = 64;
  spec.tile_m = 32;
  spec.tile_n = 32;
  spec.warps = 2;
  spec.stages = stages;
  return spec;
}

template <class Change>
Spec changed(Spec spec, const Change& change) {
  change(spec);
  return spec;
}

std::vector<Mutation> make_mutations() {
  const Spec q_in_registers = changed(base(2), [](Spec& spec) { spec.q_in_registers = true; });
  const Spec unaligned = changed(base(1), [](Spec& spec) { spec.aligned = false; });
  const Spec split = changed(base(1), [](Spec& spec) { spec.split = true; });
  const Spec packed = changed(base(1), [](Spec& spec) { spec.pack_gqa = true; });
  const Spec fp32 = changed(base(1), [](Spec& spec) { spec.dtype = DType::f32; });
  using enum FaultKind;
  return {
      // Asynchronous copies.
      {"no_wait_before_k",
       kForward,
       "ptx::cp_async_wait<(kStages == 1 ? 1 : kStages - 2)>();",
       "",
       1,
       base(2),
       {shared_in_flight}},
      {"wait_leaves_one_group_too_many",
       kForward,
       "(kStages == 1 ? 1 : kStages - 2)",
       "(kStages - 1)",
       1,
       base(3),
       {shared_in_flight}},
      {"no_commit_in_loop",
       kForward,
       "    ptx::cp_async_commit();\n\n    Fragment",
       "\n    Fragment",
       1,
       base(2),
       {shared_in_flight, copies_at_exit}},
      {"v_waits_for_nothing",
       kForward,
       "ptx::cp_async_wait<0>();\n      ptx::sync_threads();",
       "ptx::sync_threads();",
       1,
       base(1),
       {shared_in_flight}},
      {"q_in_registers_without_wait",
       kForward,
       "ptx::cp_async_wait<0>();\n      ptx::sync_warp();",
       "ptx::sync_warp();",
       1,
       q_in_registers,
       {shared_in_flight}},
      {"loads_one_tile_too_many",
       kForward,
       "if (n_block > range.begin) load_k(n_block - 1, 0);",
       "load_k(n_block > 0 ? n_block - 1 : 0, 0);",
       1,
       base(1),
       {copies_at_exit}},
      // Barriers.
      {"no_barrier_before_k",
       kForward,
       "ptx::sync_threads();  // this tile's K",
       "// this tile's K",
       1,
       base(2),
       {shared_race, shared_in_flight}},
      {"no_barrier_before_refill",
       kForward,
       "ptx::sync_threads();  // V has landed",
       "// V has landed",
       1,
       base(1),
       {shared_race, shared_in_flight}},
      {"no_warp_barrier_after_q",
       kForward,
       "ptx::sync_warp();  // the other lanes'",
       "// the other lanes'",
       1,
       q_in_registers,
       {shared_race}},
      {"o_staged_over_q",
       kForward,
       "ptx::sync_warp();  // every lane has read",
       "// every lane has read",
       1,
       base(2),
       {shared_race}},
      {"rows_leave_before_they_are_staged",
       kForward,
       "ptx::sync_warp();  // the warp's rows",
       "// the warp's rows",
       1,
       base(1),
       {shared_race, shared_uninitialised}},
      {"barrier_in_half_a_warp",
       kForward,
       "ptx::sync_threads();  // this tile's K",
       "if (lane < 16) ptx::sync_threads();  // this tile's K",
       1,
       base(1),
       {divergence}},
      {"barrier_in_one_warp",
       kForward,
       "ptx::sync_threads();  // V has landed",
       "if (warp == 0) ptx::sync_threads();  // V has landed",
       1,
       base(1),
       {deadlock, shared_race}},
      {"rows_beyond_the_end_leave_early",
       kForward,
       "    if (range.begin < range.end) attend",
       "    if (warp_row >= row_count) return;\n    if (range.begin < range.end) attend",
       1,
       base(1),
       {deadlock}},
      // Convergence.
      {"divergent_ldmatrix",
       kMma16,
       "for (int n = 0; n + 1 < kHeadDimV / 8; n += 2) {",
       "for (int n = 0; n + 1 < kHeadDimV / 8 - (lane == 7 ? 2 : 0); n += 2) {",
       1,
       base(1),
       {divergence}},
      {"divergent_shuffle",
       kSoftmax,
       "sum[m][r] += ptx::shfl_xor(sum[m][r], 2);",
       "if (ptx::thread_index() != 9) sum[m][r] += ptx::shfl_xor(sum[m][r], 2);",
       1,
       base(1),
       {divergence}},
      // Addresses in global memory.
      {"rows_past_the_end_of_kv", kForward, "params.s_kv - first,", "kTileN,", 2, base(1), {global_out_of_bounds}},
      {"q_rows_past_the_end",
       kForward,
       "const int valid = row_count - warp_row;",
       "const int valid = kWarpRows;",
       1,
       base(1),
       {global_out_of_bounds}},
      {"packed_rows_past_the_end",
       kForward,
       "const int valid = row_count - warp_row;",
       "const int valid = kWarpRows;",
       1,
       packed,
       {global_out_of_bounds}},
      {"o_past_the_end",
       kForward,
       "if (warp_row + row >= row_count) break;",
       "",
       1,
       base(1),
       {global_out_of_bounds, global_not_writable}},
      {"lse_past_the_end",
       kForward,
       "lane % 4 == 0 && row < row_count",
       "lane % 4 == 0",
       1,
       base(1),
       {global_out_of_bounds}},
      {"wide_copies_of_unaligned_rows",
       kTile,
       "if constexpr (kAligned) {",
       "if constexpr (true) {",
       1,
       unaligned,
       {misaligned}},
      {"wide_stores_to_unaligned_rows",
       kForward,
       "ptx::st_global(target, T{ptx::ld_shared_b16(source)});",
       "ptx::st_global(reinterpret_cast<uint32_t*>(target), uint32_t{ptx::ld_shared_b16(source)});",
       1,
       unaligned,
       {misaligned, global_not_writable}},
      {"combine_reads_past_the_splits",
       kCombine,
       "for (int i = 0; i < params.splits; ++i)",
       "for (int i = 0; i <= params.splits; ++i)",
       2,
       split,
       {global_out_of_bounds}},
      {"partials_of_one_split_only",
       kForward,
       "static_cast<int64_t>(tile.split) * params.b",
       "static_cast<int64_t>(0) * params.b",
       1,
       split,
       {global_uninitialised}},
      // Addresses in shared memory.
      {"misaligned_ldmatrix_row",
       kTile,
       "return row * kPitch",
       "return row * (kPitch - 8)",
       1,
       unaligned,
       {misaligned}},
      {"pitch_larger_than_planned",
       kTile,
       "return row * kPitch",
       "return row * (kPitch + 64)",
       1,
       base(1),
       {shared_out_of_bounds}},
      {"rows_of_zeros_left_out",
       kTile,
       "const bool valid = i * kRowStep < valid_rows;",
       "const bool valid = i * kRowStep < valid_rows; if (!valid) return;",
       1,
       base(1),
       {shared_uninitialised}},
      {"last_column_chunk_left_out",
       kTile,
       "copy_chunk(target + step",
       "if (chunk + step * kLanes != Tile::kChunks - 1) copy_chunk(target + step",
       1,
       base(1),
       {shared_uninitialised}},
      {"fp32_v_of_the_next_stage",
       kTf32,
       "VTile::offset(2 * (lane % 4), lane / 4)",
       "VTile::offset(2 * (lane % 4) + kNTiles * 8, lane / 4)",
       1,
       fp32,
       {shared_out_of_bounds, shared_uninitialised}},
  };
}

}  // namespace

const std::vector<Mutation>& mutations() {
  static const std::vector<Mutation> instance = make_mutations();
  return instance;
}

}  // namespace emulator
