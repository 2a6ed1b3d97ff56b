#include "emulator/mutations.hpp"

#include <iterator>
#include <utility>

#include "emulator/backward_specs.hpp"
#include "emulator/specs.hpp"

namespace emulator {
namespace {

using fa::DType;
using fa::plan::KernelSpec;
using fa::plan::Op;

constexpr const char* kForward = "sm80/sm80_forward.cuh";
constexpr const char* kMma16 = "sm80/sm80_mma16.cuh";
constexpr const char* kTf32 = "sm80/sm80_tf32x3.cuh";
constexpr const char* kTile = "common/shared_tile.cuh";
constexpr const char* kSoftmax = "common/online_softmax.cuh";
constexpr const char* kHopper = "sm90/sm90_forward.cuh";
constexpr const char* kSlabs = "sm90/sm90_shared_tile.cuh";
constexpr const char* kCombine = "common/forward_combine.cuh";
constexpr const char* kBackward = "sm80/sm80_backward.cuh";
constexpr const char* kBackwardDq = "sm80/sm80_backward_dq.cuh";
constexpr const char* kPreprocess = "common/backward_preprocess.cuh";
constexpr const char* kReduce = "common/backward_reduce.cuh";

/// Two warps, 16 rows each; ragged sequences take three key tiles.
KernelSpec base(int stages) {
  KernelSpec spec;
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

/// Two consumer warpgroups that take turns, two stages; V has two slabs.
KernelSpec hopper_base() {
  KernelSpec spec;
  spec.family = fa::Family::sm90;
  spec.arch = {9, 0, 'a'};
  spec.d_qk = 64;
  spec.d_v = 80;
  spec.tile_m = 128;
  spec.tile_n = 32;
  spec.warps = 12;
  spec.stages = 2;
  spec.q_buffers = 1;
  spec.take_turns = true;
  return spec;
}

/// Two steps of queries, four warps: two groups of keys by two of queries.
KernelSpec backward_base() {
  KernelSpec spec = base(2);
  spec.op = Op::backward;
  spec.warps = 4;
  spec.warps_n = 2;
  spec.dq_warps_m = 2;
  return spec;
}

template <class Change>
KernelSpec changed(KernelSpec spec, const Change& change) {
  change(spec);
  return spec;
}

std::vector<Mutation> make_mutations() {
  const KernelSpec q_in_registers = changed(base(2), [](KernelSpec& spec) { spec.q_in_registers = true; });
  const KernelSpec unaligned = changed(base(1), [](KernelSpec& spec) { spec.aligned = false; });
  const KernelSpec split = changed(base(1), [](KernelSpec& spec) { spec.split = true; });
  const KernelSpec packed = changed(base(1), [](KernelSpec& spec) { spec.pack_gqa = true; });
  const KernelSpec fp32 = changed(base(1), [](KernelSpec& spec) { spec.dtype = DType::f32; });
  const KernelSpec hopper = hopper_base();
  const KernelSpec causal_hopper = changed(hopper, [](KernelSpec& spec) { spec.causal = true; });
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
      {"rows_past_the_end_of_kv", kForward, "lengths.s_kv - first,", "kTileN,", 2, base(1), {global_out_of_bounds}},
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
      // Hopper.
      {"hopper_k_not_released", kHopper, "release(k_empty(k_slot.index), lane);", "", 2, hopper, {deadlock}},
      {"hopper_v_not_released", kHopper, "release(v_empty(v_slot.index), lane);", "", 1, hopper, {deadlock}},
      {"hopper_q_not_released", kHopper, "release(q_empty(q_slot.index), lane);", "", 1, hopper, {deadlock}},
      {"hopper_k_released_too_early",
       kHopper,
       "ptx::wgmma_wait<1>();\n      ptx::wgmma_tie(s);\n      release(k_empty(k_slot.index), lane);",
       "release(k_empty(k_slot.index), lane);\n      ptx::wgmma_wait<1>();\n      ptx::wgmma_tie(s);",
       1,
       hopper,
       {source_overwritten, shared_race}},
      {"hopper_k_loaded_without_waiting",
       kHopper,
       "ptx::mbarrier_wait(k_empty(slot.index), slot.parity ^ 1);",
       "",
       1,
       hopper,
       {source_overwritten, shared_race, shared_in_flight, barrier_misuse}},
      {"hopper_wrong_parity_of_empty",
       kHopper,
       "ptx::mbarrier_wait(v_empty(slot.index), slot.parity ^ 1);",
       "ptx::mbarrier_wait(v_empty(slot.index), slot.parity);",
       1,
       hopper,
       {deadlock}},
      {"hopper_v_read_without_waiting",
       kHopper,
       "      ptx::mbarrier_wait(v_full(v_slot.index), v_slot.parity);\n",
       "",
       1,
       hopper,
       {shared_in_flight, shared_uninitialised, shared_race}},
      {"hopper_wrong_parity_of_full",
       kHopper,
       "ptx::mbarrier_wait(k_full(k_slot.index), k_slot.parity);\n      issue",
       "ptx::mbarrier_wait(k_full(k_slot.index), k_slot.parity ^ 1);\n      issue",
       1,
       hopper,
       {shared_in_flight, shared_uninitialised, deadlock}},
      {"hopper_too_many_bytes_announced",
       kHopper,
       "mbarrier_arrive_expect_tx(k_full(slot.index), KTile::kBytes);",
       "mbarrier_arrive_expect_tx(k_full(slot.index), KTile::kBytes + 16);",
       1,
       hopper,
       {deadlock}},
      {"hopper_one_slab_announced",
       kHopper,
       "mbarrier_arrive_expect_tx(v_full(slot.index), VTile::kBytes);",
       "mbarrier_arrive_expect_tx(v_full(slot.index), VTile::kSlabBytes);",
       1,
       hopper,
       {deadlock, shared_in_flight, shared_uninitialised}},
      {"hopper_barrier_counts_one_reader_less",
       kHopper,
       "constexpr int kReaders = 4 * kConsumers;",
       "constexpr int kReaders = 4 * kConsumers - 1;",
       1,
       hopper,
       {shared_race, source_overwritten, deadlock, barrier_misuse}},
      {"hopper_barriers_unfenced", kHopper, "ptx::fence_mbarrier_init();", "", 1, hopper, {unfenced}},
      {"hopper_barriers_without_block_barrier",
       kHopper,
       "ptx::sync_threads();",
       "",
       1,
       hopper,
       {barrier_misuse, shared_race}},
      {"hopper_scores_without_fence",
       kHopper,
       "ptx::wgmma_tie(s);\n    ptx::wgmma_fence();",
       "ptx::wgmma_tie(s);",
       1,
       hopper,
       {unfenced}},
      {"hopper_output_without_fence",
       kHopper,
       "ptx::wgmma_tie(o);\n    ptx::wgmma_fence();",
       "ptx::wgmma_tie(o);",
       1,
       hopper,
       {unfenced}},
      {"hopper_scores_not_waited_for", kHopper, "ptx::wgmma_wait<1>();", "", 1, hopper, {register_in_flight}},
      {"hopper_output_not_waited_for",
       kHopper,
       "ptx::wgmma_wait<0>();\n    ptx::wgmma_tie(o);\n    if",
       "if",
       1,
       hopper,
       {register_in_flight}},
      {"hopper_p_packed_before_the_wait",
       kHopper,
       "ptx::wgmma_wait<0>();\n      ptx::wgmma_tie(o);\n      release(v_empty",
       "pack(probabilities, s);\n      ptx::wgmma_wait<0>();\n      ptx::wgmma_tie(o);\n      release(v_empty",
       1,
       hopper,
       {register_in_flight}},
      {"hopper_products_not_committed",
       kHopper,
       "accumulate || step != 0);\n    }\n    ptx::wgmma_commit();",
       "accumulate || step != 0);\n    }",
       1,
       hopper,
       {register_in_flight, copies_at_exit}},
      {"hopper_stride_of_k_groups",
       kSlabs,
       "1024 / 16 | kSwizzle128",
       "2048 / 16 | kSwizzle128",
       1,
       hopper,
       {shared_in_flight, shared_uninitialised, shared_out_of_bounds, shared_race, barrier_misuse}},
      {"hopper_no_swizzle",
       kSlabs,
       "constexpr uint32_t kSwizzle128 = 1u << 30;",
       "constexpr uint32_t kSwizzle128 = 0;",
       1,
       hopper,
       {bad_descriptor}},
      {"hopper_stride_of_v_slabs",
       kSlabs,
       "step * 16 * 128 / 16, kSlabBytes / 16);",
       "step * 16 * 128 / 16, kSlabBytes / 32);",
       1,
       hopper,
       {}},
      {"hopper_step_of_k", kSlabs, "step % 4 * 32) / 16", "step % 4 * 16) / 16", 1, hopper, {}},
      {"hopper_no_mask",
       kHopper,
       "if (i / 4 * 8 + i % 2 >= limit[i / 2 % 2]) s[",
       "if (i / 4 * 8 + i % 2 >= limit[i / 2 % 2] + kTileN) s[",
       1,
       causal_hopper,
       {}},
      {"hopper_p_of_the_wrong_rows",
       kHopper,
       "probabilities[i / 4][i % 4] =",
       "probabilities[i / 4][(i + 1) % 4] =",
       1,
       hopper,
       {}},
      {"hopper_stages_exchanged",
       kHopper,
       "issue_output(o, probabilities, v_slot.index, !first);\n      if",
       "issue_output(o, probabilities, k_slot.index, !first);\n      if",
       1,
       hopper,
       {shared_in_flight, shared_uninitialised, shared_race}},
      {"hopper_output_never_rescaled", kHopper, "multiply(o, softmax.factor);", "", 1, hopper, {}},
      {"hopper_turns_not_passed_on",
       kHopper,
       "consumer == kConsumers - 1) ptx::barrier_arrive(1, 2 * kWarpgroup);",
       "consumer == kConsumers) ptx::barrier_arrive(1, 2 * kWarpgroup);",
       1,
       hopper,
       {deadlock}},
      {"hopper_turns_counted_wrong",
       kHopper,
       "ptx::barrier_sync(1 + consumer, 2 * kWarpgroup);",
       "ptx::barrier_sync(1 + consumer, 3 * kWarpgroup);",
       1,
       hopper,
       {barrier_misuse, deadlock}},
      {"hopper_registers_not_given_back",
       kHopper,
       "ptx::decrease_registers<kProducerRegisters>();",
       "",
       1,
       hopper,
       {deadlock}},
      {"hopper_odd_registers",
       kHopper,
       "kConsumers == 2 ? 40 : 32;",
       "kConsumers == 2 ? 44 : 32;",
       1,
       hopper,
       {register_pool}},
      {"hopper_lse_past_the_end",
       kHopper,
       "lane % 4 == 0 && row < row_count",
       "lane % 4 == 0",
       1,
       hopper,
       {global_out_of_bounds, global_not_writable}},
      {"hopper_k_of_another_map",
       kHopper,
       "p.map_k, k_full(slot.index)",
       "p.map_q, k_full(slot.index)",
       1,
       hopper,
       {bad_descriptor}},
  };
}

std::vector<Mutation> make_backward_mutations() {
  const KernelSpec by_keys = changed(backward_base(), [](KernelSpec& spec) {
    spec.warps = 2;  // a warp has all queries of its keys: only dS leaves its registers
    spec.dq_warps_m = 1;
    spec.stages = 1;
  });
  const KernelSpec delayed = changed(backward_base(), [](KernelSpec& spec) { spec.delayed_dq = true; });
  const KernelSpec delayed_by_keys = changed(by_keys, [](KernelSpec& spec) {
    spec.stages = 2;
    spec.delayed_dq = true;
  });
  const KernelSpec split = changed(backward_base(), [](KernelSpec& spec) { spec.split = true; });
  const KernelSpec dq = changed(base(2), [](KernelSpec& spec) { spec.op = Op::backward_dq; });
  const KernelSpec preprocess = backward_helper_spec(backward_base(), Op::backward_preprocess);
  const KernelSpec reduce = backward_helper_spec(backward_base(), Op::backward_reduce);
  using enum FaultKind;
  return {
      {"backward_no_wait_for_queries",
       kBackward,
       "ptx::cp_async_wait<0>();\n    ptx::sync_threads();  // this tile",
       "ptx::sync_threads();  // this tile",
       1,
       backward_base(),
       {shared_in_flight}},
      {"backward_no_barrier_before_a_step",
       kBackward,
       "ptx::sync_threads();  // this tile",
       "// this tile",
       1,
       backward_base(),
       {shared_race, shared_in_flight, shared_uninitialised}},
      {"backward_p_is_read_before_it_is_there",
       kBackward,
       "if constexpr (kExchange) ptx::sync_threads();  // all of P",
       "// all of P",
       1,
       backward_base(),
       {shared_race, shared_uninitialised}},
      {"backward_ds_is_read_before_it_is_there",
       kBackward,
       "ptx::sync_threads();  // all of dS is in shared memory, and",
       "// all of dS is in shared memory, and",
       1,
       by_keys,
       {shared_race, shared_uninitialised, shared_in_flight}},
      {"backward_last_ds_is_read_before_it_is_there",
       kBackward,
       "if constexpr (!kExchange) ptx::sync_threads();  // all of the last dS",
       "// all of the last dS",
       1,
       delayed_by_keys,
       {shared_race, shared_uninitialised}},
      {"backward_delayed_dq_of_the_wrong_buffer",
       kBackward,
       "add_dq(before(place, steps), stage ^ 1)",
       "add_dq(before(place, steps), stage)",
       3,
       delayed,
       {shared_race, shared_uninitialised}},
      {"backward_fills_the_stage_in_use",
       kBackward,
       "load_queries(next, stage ^ 1)",
       "load_queries(next, stage)",
       1,
       backward_base(),
       {shared_race, shared_in_flight}},
      {"backward_loads_one_step_too_many",
       kBackward,
       "begin_step(next, left > 1, stage);",
       "begin_step(next, true, stage);",
       1,
       backward_base(),
       {copies_at_exit, global_out_of_bounds, shared_in_flight}},
      {"backward_dk_staged_over_k",
       kBackward,
       "ptx::sync_threads();  // all have left K and V",
       "// all have left K and V",
       1,
       backward_base(),
       {shared_race}},
      {"backward_rows_leave_before_they_are_staged",
       kBackward,
       "ptx::sync_threads();  // dK and dV are complete",
       "// dK and dV are complete",
       1,
       backward_base(),
       {shared_race, shared_uninitialised}},
      {"backward_dq_past_the_last_row",
       kBackward,
       "if (row_group * kRowGroup >= lengths.padded_rows) break;",
       "",
       1,
       backward_base(),
       {global_out_of_bounds, global_uninitialised}},
      {"backward_queries_past_the_end",
       kBackward,
       "const int valid = lengths.s_q - row;",
       "const int valid = kTileM;",
       1,
       backward_base(),
       {global_out_of_bounds}},
      {"backward_statistics_past_the_end",
       kBackward,
       "const bool in_range = row + first < lengths.padded_rows;",
       "const bool in_range = true;",
       1,
       backward_base(),
       {global_out_of_bounds, global_uninitialised}},
      {"backward_keys_past_the_end",
       kBackward,
       "const int valid = lengths.s_kv - first_key;\n    store_tile",
       "const int valid = kTileN;\n    store_tile",
       1,
       backward_base(),
       {global_out_of_bounds, global_not_writable}},
      {"backward_partials_past_the_end",
       kBackward,
       "if (first_key + row >= params.s_kv) continue;",
       "",
       1,
       split,
       {global_out_of_bounds}},
      {"backward_reduce_reads_past_the_splits",
       kReduce,
       "split < params.splits",
       "split <= params.splits",
       1,
       reduce,
       {global_out_of_bounds}},
      {"backward_accumulator_not_zeroed",
       kPreprocess,
       "if (params.dq_accum == nullptr) return;",
       "return;",
       1,
       preprocess,
       {global_uninitialised}},
      {"backward_padding_without_statistics",
       kPreprocess,
       "ptx::st_global(params.delta + index, sum);",
       "if (valid) ptx::st_global(params.delta + index, sum);",
       1,
       preprocess,
       {global_uninitialised}},
      {"backward_dq_no_wait_for_keys",
       kBackwardDq,
       "ptx::cp_async_wait<0>();",
       "",
       1,
       dq,
       {shared_in_flight, copies_at_exit}},
      {"backward_dq_staged_over_q",
       kBackwardDq,
       "ptx::sync_threads();  // all have left Q",
       "// all have left Q",
       1,
       dq,
       {shared_race}},
      {"backward_dq_fills_the_stage_in_use",
       kBackwardDq,
       "load_keys(n_block + 1, stage ^ 1)",
       "load_keys(n_block + 1, stage)",
       1,
       dq,
       {shared_race, shared_in_flight}},
  };
}

std::vector<Mutation> all_mutations() {
  std::vector<Mutation> list = make_mutations();
  std::vector<Mutation> backward = make_backward_mutations();
  list.insert(list.end(), std::make_move_iterator(backward.begin()), std::make_move_iterator(backward.end()));
  return list;
}

}  // namespace

const std::vector<Mutation>& mutations() {
  static const std::vector<Mutation> instance = all_mutations();
  return instance;
}

bool is_backward(const Mutation& mutation) {
  return mutation.spec.op != Op::forward;
}

BackwardSpecs backward_specs_of(const Mutation& mutation) {
  BackwardSpecs specs{backward_base(), {}};
  switch (mutation.spec.op) {
    case Op::backward:
      specs.main = mutation.spec;
      break;
    case Op::backward_dq:
      specs.main.write_dq = false;
      specs.dq = mutation.spec;
      break;
    case Op::backward_reduce:
      specs.main.split = true;
      break;
    default:
      break;
  }
  return specs;
}

}  // namespace emulator
