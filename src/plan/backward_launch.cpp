#include "plan/backward_launch.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

#include <fa/error.hpp>

#include "plan/catalogue.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/rounding.hpp"
#include "plan/sm90_forward.hpp"

namespace fa::plan {
namespace {

constexpr double kLog2e = 1.4426950408889634;
// Q, dO and dQ's accumulator of the heads that run together should fit the L2 cache; half of the smallest data-centre
// L2 (A100: 40 MB).
constexpr std::int64_t kL2Budget = std::int64_t{20} << 20;
constexpr int kLongTile = 32;  // steps of all query heads, measured on an H100

/// Query heads of a KV head.
std::int64_t group_of(const Problem& problem) noexcept {
  return problem.h_kv == 0 ? 0 : problem.h_q / problem.h_kv;
}

/// Whether every key tile is seen by all query rows.
bool has_equal_tiles(const Problem& problem) noexcept {
  const bool cut = problem.variants != nullptr && (problem.variants->left_window || problem.variants->chunked);
  return !problem.causal && !cut;
}

/// Sections of heads in a grid whose tiles are of unequal length and start longest first (kernel::section_of_tile), of
/// which `units` run at once. As many heads as the L2 cache has room for run together, and no fewer than fill the GPU:
/// those run side by side anyway. The last section has the tiles of the last rounds: the shortest of many heads end the
/// grid. It may exceed the cache, so that it is short where a head has tiles enough to share; a group's tiles are
/// longer, and so is what their imbalance costs.
void set_sections(std::int64_t blocks, std::int64_t heads, std::int64_t group, std::int64_t in_cache,
                  std::int64_t units, kernel::BackwardParams& params) noexcept {
  const std::int64_t last_rounds = group > 1 ? 3 : 1;
  const std::int64_t many = std::max<std::int64_t>(heads, 1);
  const std::int64_t at_once =
      std::clamp<std::int64_t>(std::max(units / std::max<std::int64_t>(blocks, 1), in_cache), 1, many);
  const std::int64_t last = ceil_div(last_rounds * units, std::max<std::int64_t>(blocks, 1));
  params.heads_in_flight = static_cast<int>(at_once);
  params.last_section = static_cast<int>(std::max<std::int64_t>(many - last, 0) / at_once);
}

/// Heads whose key tiles an ordered grid takes side by side, so that few of a head wait for each other: at most `most`,
/// which fill the L2 cache, and whole rounds of `units` tiles that run at once.
int heads_side_by_side(std::int64_t blocks, std::int64_t most, std::int64_t units) {
  most = std::max<std::int64_t>(most, 1);
  std::int64_t best = most;
  const auto idle = [&](std::int64_t heads) {
    return 1 - static_cast<double>(heads * blocks) / static_cast<double>(ceil_div(heads * blocks, units) * units);
  };
  const std::int64_t least = std::max(most / 2 + 1, most - units);  // every call searches: no more than a round
  for (std::int64_t heads = most; heads >= least; --heads) {
    if (idle(heads) < idle(best)) best = heads;
  }
  return static_cast<int>(best);
}

/// Blocks that can take whole heads, all of them equally many, and leave few multiprocessors without one; else 0.
std::int64_t blocks_of_whole_heads(std::int64_t heads, std::int64_t multiprocessors) {
  const std::int64_t rounds = ceil_div(heads, multiprocessors);
  if (rounds == 0 || heads % rounds != 0 || 8 * (heads / rounds) < 7 * multiprocessors) return 0;
  return heads / rounds;
}

void set_strides(const TensorView& view, std::int64_t& b, std::int64_t& h, std::int64_t& s) {
  b = view.strides[0];
  h = view.strides[1];
  s = view.strides[2];
}

void set_tensors(const BackwardTensors& tensors, kernel::BackwardVariantParams& params) noexcept {
  params.q = tensors.q.data;
  params.k = tensors.k.data;
  params.v = tensors.v.data;
  params.o = tensors.o.data;
  params.dout = tensors.dout.data;
  params.lse = static_cast<const float*>(tensors.lse.data);
  params.dlse = tensors.dlse.defined() ? static_cast<const float*>(tensors.dlse.data) : nullptr;
  params.dq = tensors.dq.data;
  params.dk = tensors.dk.data;
  params.dv = tensors.dv.data;
  set_strides(tensors.q, params.stride_q_b, params.stride_q_h, params.stride_q_s);
  set_strides(tensors.k, params.stride_k_b, params.stride_k_h, params.stride_k_s);
  set_strides(tensors.v, params.stride_v_b, params.stride_v_h, params.stride_v_s);
  set_strides(tensors.o, params.stride_o_b, params.stride_o_h, params.stride_o_s);
  set_strides(tensors.dout, params.stride_dout_b, params.stride_dout_h, params.stride_dout_s);
  set_strides(tensors.lse, params.stride_lse_b, params.stride_lse_h, params.stride_lse_s);
  if (tensors.dlse.defined()) {
    set_strides(tensors.dlse, params.stride_dlse_b, params.stride_dlse_h, params.stride_dlse_s);
  }
  set_strides(tensors.dq, params.stride_dq_b, params.stride_dq_h, params.stride_dq_s);
  set_strides(tensors.dk, params.stride_dk_b, params.stride_dk_h, params.stride_dk_s);
  set_strides(tensors.dv, params.stride_dv_b, params.stride_dv_h, params.stride_dv_s);
}

/// Bytes of Q, dO and dQ's accumulator of a KV head, of which `group` query heads are.
std::int64_t head_bytes_of(const Problem& problem, std::int64_t group) noexcept {
  const std::int64_t element = static_cast<std::int64_t>(size_of(problem.dtype));
  return std::max<std::int64_t>(
      group * problem.typical_s_q() * ((problem.d_qk + problem.d_v) * element + 4 * problem.d_qk), 1);
}

/// Entries of a grid: the slots of a packed batch are those of all.
std::int64_t entries_of(const Problem& problem) noexcept {
  return problem.varlen ? 1 : problem.b;
}

/// That share a key tile by columns.
int blocks_of_tile(const KernelSpec& main) noexcept {
  return main.is<Sm90BackwardPair>() ? main.cluster() : 1;
}

void set_sizes(const Problem& problem, const BackwardChoice& choice, const KernelSpec& main, std::int64_t rows,
               kernel::BackwardVariantParams& params) noexcept {
  params.b = static_cast<int>(problem.b);
  params.h_q = static_cast<int>(problem.h_q);
  params.h_kv = static_cast<int>(problem.h_kv);
  params.s_q = static_cast<int>(problem.s_q);
  params.s_kv = static_cast<int>(problem.s_kv);
  params.group = static_cast<int>(group_of(problem));
  params.causal_shift = causal_shift(problem);
  params.padded_rows = static_cast<int>(rows);
  params.m_blocks = static_cast<int>(ceil_div(problem.s_q, main.tile_m));
  params.n_blocks = static_cast<int>(problem.varlen ? slots(problem.total_kv, main.tile_n, problem.b)
                                                    : ceil_div(problem.s_kv, main.tile_n));
  // Blocks that share a key tile; those of a cluster leave no partial sums.
  params.last_section = std::numeric_limits<int>::max();
  params.splits = choice.splits * (main.cluster() / blocks_of_tile(main));
}

/// The blocks of the main kernel; tells `params` how they share the heads.
std::int64_t deal_out(const Problem& problem, const KernelSpec& main, int multiprocessors, int most_blocks,
                      kernel::BackwardVariantParams& params) noexcept {
  // In turns, a KV head has as many places in the grid as parts.
  const std::int64_t parts = main.in_turns() ? params.splits : 1;
  const std::int64_t splits = params.splits / parts;
  const std::int64_t group = params.group / parts;
  const std::int64_t all_heads = entries_of(problem) * problem.h_kv * parts;
  const std::int64_t head_bytes = head_bytes_of(problem, group);
  std::int64_t grid = std::int64_t{params.n_blocks} * all_heads * splits;
  // Blocks that stay for all their tiles hide the start of a tile behind the end of another; long tiles of unequal
  // length are balanced better by the hardware.
  const bool long_tiles = problem.causal && std::int64_t{params.m_blocks} * group >= kLongTile;
  const bool unequal = problem.varlen || needs_tile_lists(problem);
  const int cluster = main.cluster();
  const int pair = blocks_of_tile(main);
  const bool ordered = main.ordered_dq();
  const bool stays = problem.bounded || (!long_tiles && !unequal);
  if (cluster == 1 && main.kernel().persistent && stays && !ordered && !main.in_turns()) {
    params.heads_in_flight = balanced_heads(params.n_blocks * splits, all_heads, multiprocessors);
    return std::min<std::int64_t>(grid, std::max(multiprocessors, most_blocks));
  }
  grid *= pair;
  params.heads_in_flight =
      static_cast<int>(std::clamp<std::int64_t>(kL2Budget / head_bytes, 1, std::max<std::int64_t>(all_heads, 1)));
  if (!ordered || unequal) {
    if (problem.causal) {
      set_sections(params.n_blocks * splits, all_heads, group, params.heads_in_flight, multiprocessors / pair, params);
    }
    return grid;
  }
  // A block may wait for one in front of it only if that has started for certain, whatever else is on the GPU: it has a
  // lower number, and no block goes on to another tile; or a block has all key tiles of its heads.
  const std::int64_t heads = all_heads;
  const std::int64_t whole = blocks_of_whole_heads(heads, multiprocessors);
  if (cluster == 1 && params.splits == 1 && !main.in_turns() && whole != 0 && whole * head_bytes <= 2 * kL2Budget) {
    params.heads_in_flight = static_cast<int>(whole);
    grid = whole;
  } else if (!has_equal_tiles(problem)) {  // of pairs the order follows from it: never a function of the GPU
    const std::int64_t units = kHopperMultiprocessors / pair;
    const std::int64_t blocks = std::max<std::int64_t>(params.n_blocks * splits, 1);
    const std::int64_t most = std::max(2 * kL2Budget / head_bytes, units / blocks);
    params.heads_in_flight = heads_side_by_side(blocks, std::min(most, heads), units);
  } else if (pair > 1) {  // two at least: a queue of all pairs is as slow as the slowest
    params.heads_in_flight = static_cast<int>(
        std::clamp<std::int64_t>(ceil_div(kL2Budget, head_bytes), 2, std::max<std::int64_t>(heads, 2)));
  }
  return grid;
}

/// The blocks of the pass for dQ, whose parameters are the others' but for this.
std::int64_t deal_out_dq(const Problem& problem, const KernelSpec& dq, kernel::BackwardVariantParams& params) noexcept {
  const std::int64_t group = params.group;
  const std::int64_t entries = entries_of(problem);
  const std::int64_t element = static_cast<std::int64_t>(size_of(problem.dtype));
  params.m_blocks = static_cast<int>(problem.varlen ? slots(problem.total_q, dq.tile_m, problem.b)
                                                    : ceil_div(problem.s_q, dq.tile_m));
  const std::int64_t kv_bytes =
      std::max<std::int64_t>(problem.typical_s_kv() * (problem.d_qk + problem.d_v) * element, 1);
  params.last_section = std::numeric_limits<int>::max();
  params.heads_in_flight =
      static_cast<int>(std::clamp<std::int64_t>(kL2Budget / kv_bytes * group, std::max<std::int64_t>(group, 1),
                                                std::max<std::int64_t>(entries * problem.h_q, 1)));
  return std::int64_t{params.m_blocks} * problem.h_q * entries;
}

}  // namespace

BackwardGrids backward_params(const Problem& problem, const BackwardTensors& tensors, double scale,
                              const BackwardChoice& choice, const BackwardKernels& kernels, std::int64_t rows,
                              int multiprocessors, const PackedArgs& packed, kernel::BackwardVariantParams& params,
                              kernel::BackwardVariantParams& dq_params, int most_blocks) {
  const bool alone = kernels.main.op() == Op::backward_dq;  // a pass for dQ in the main kernel's place
  if (problem.gradients.dq && !alone && !kernels.main.write_dq && kernels.dq.tile_m == 0) {
    throw Error(ErrorCode::internal, "the main kernel of a backward leaves dq to one that its plan does not have");
  }
  std::memset(&params, 0, sizeof params);
  set_tensors(tensors, params);
  set_sizes(problem, choice, kernels.main, rows, params);
  params.scale = static_cast<float>(scale);
  params.scale_log2 = static_cast<float>(scale * kLog2e);
  if (problem.varlen) params.sequences = sequence_params(problem, packed.sequences);
  if (problem.dropout) {
    params.dropout = placed_dropout(problem, packed.dropout);
    params.scale = static_cast<float>(scale / params.dropout.keep);
  }
  if (problem.variants != nullptr) params.variant = variant_params(problem, tensors.variant, scale);
  BackwardGrids grids;
  if (tensors.variant.dsink.defined()) {
    params.dsink = static_cast<float*>(tensors.variant.dsink.data);
    params.stride_dsink = tensors.variant.dsink.strides[0];
    grids.sink = problem.h_q;
  }
  grids.preprocess = entries_of(problem) * problem.h_q * (rows / kernel::kRowGroup);
  if (alone) {
    grids.main = deal_out_dq(problem, kernels.main, params);
  } else if (problem.gradients != Gradients{false, false, false} || wants_captured_gradients(problem)) {
    grids.main = deal_out(problem, kernels.main, multiprocessors, most_blocks, params);
  }
  if (choice.leaves_splits() && kernels.main.sums_keys()) {
    grids.reduce = ceil_div(problem.b * problem.h_kv * problem.s_kv, std::max(kernels.reduce_warps, 1));
  }
  if (kernels.main.adds_dq()) {
    grids.convert = grids.preprocess;
  } else if (problem.gradients.dq && !alone) {
    dq_params = params;
    grids.dq = deal_out_dq(problem, kernels.dq, dq_params);
  }
  return grids;
}

}  // namespace fa::plan
