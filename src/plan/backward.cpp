#include "plan/backward.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include <fa/error.hpp>

#include "plan/catalogue.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/planner.hpp"
#include "plan/sm80_backward.hpp"
#include "plan/sm90_forward.hpp"

namespace fa::plan {
namespace {

constexpr double kLog2e = 1.4426950408889634;
// Q, dO and dQ's accumulator of the heads that run together should fit the L2 cache; half of the smallest data-centre
// L2 (A100: 40 MB).
constexpr std::int64_t kL2Budget = std::int64_t{20} << 20;
constexpr std::size_t kSectionAlignment = 256;
constexpr int kPreprocessWarps = 4;
constexpr int kConvertWarps = 4;
constexpr int kReduceWarps = 4;
constexpr int kSinkWarps = 8;
constexpr std::int64_t kMultiprocessors = 132;  // of a Hopper GPU
constexpr int kLongTile = 64;                   // steps, measured on an H200
constexpr std::int64_t kKeysPerBlock = 128;
constexpr std::int64_t kRowsPerSplit = 512;
constexpr std::int64_t kMaxSplits = 64;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

/// A small kernel around the main one.
template <class Which>
KernelSpec helper(const Problem& problem, int warps) {
  KernelSpec spec;
  spec.own = Which{};
  spec.arch = problem.arch;
  spec.dtype = problem.dtype;
  spec.d_qk = problem.d_qk;
  spec.d_v = problem.d_v;
  spec.aligned = problem.aligned;
  spec.varlen = problem.varlen;
  spec.warps = warps;
  return spec;
}

/// Query heads of a KV head.
std::int64_t group_of(const Problem& problem) noexcept {
  return problem.h_kv == 0 ? 0 : problem.h_q / problem.h_kv;
}

/// Whether every key tile is seen by all query rows.
bool has_equal_tiles(const Problem& problem) noexcept {
  const bool cut = problem.variants != nullptr && (problem.variants->left_window || problem.variants->chunked);
  return !problem.causal && !cut;
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

/// Whether a family is left to a problem, and by its override.
bool serves(const BackwardFamily& family, const Problem& problem, const Fixed& fixed) noexcept {
  if (family.misfit == nullptr) return true;
  const bool left = fixed.family == Family::automatic
                        ? fixed.fits(*family.kernel) && (family.follows == nullptr || family.follows(fixed))
                        : fixed.family == family.family;
  return left && family.misfit(problem) == nullptr && family.obstacle(problem) == nullptr;
}

/// Throws where a family that is asked for does not have the problem.
void check_family(const BackwardFamily& wanted, const Problem& problem) {
  const char* const misfit = wanted.misfit == nullptr ? nullptr : wanted.misfit(problem);
  if (misfit == nullptr) return;
  throw Error(ErrorCode::unsupported,
              fmt::format("kernel_backward.kernel = {}: accepted is {}", to_string(wanted.family), misfit),
              {{"argument", "kernel_backward.kernel"}, {"value", to_string(wanted.family)}, {"accepted", misfit}});
}

}  // namespace

BackwardChoice choose_backward(const Problem& problem, const Fixed& fixed) noexcept {
  BackwardChoice choice;
  choice.aligned = problem.aligned;
  for (const BackwardFamily* const family : backward_families()) {
    choice.family = family->family;
    if (serves(*family, problem, fixed)) break;
  }
  if (problem.varlen) return choice;  // how much work a sequence is, the host does not know
  const std::int64_t enough = backward_family(choice.family).enough_blocks(problem);
  const std::int64_t blocks = ceil_div(problem.s_kv, kKeysPerBlock) * problem.h_kv * problem.b;
  const std::int64_t rows = problem.s_q * group_of(problem);  // that meet in one key tile
  if (fixed.has("splits")) {
    choice.splits = fixed.number("splits");
  } else if (blocks != 0 && 2 * blocks <= enough) {
    choice.splits =
        static_cast<int>(std::max<std::int64_t>(std::min({enough / blocks, rows / kRowsPerSplit, kMaxSplits}), 1));
  }
  return choice;
}

Fixed followed_backward(const Problem& problem, const Fixed& fixed, bool deterministic) {
  const BackwardFamily& family = backward_family(choose_backward(problem, fixed).family);
  if (family.family == choose_backward(usual_call(problem), fixed).family) return fixed;
  return family.fits == nullptr || family.fits(problem, fixed, deterministic) ? fixed
                                                                              : fixed.without_tile(family.family);
}

BackwardPlan plan_backward(const Problem& problem, const Fixed& fixed, bool deterministic) {
  if (fixed.family != Family::automatic) check_family(backward_family(fixed.family), problem);
  const BackwardChoice choice = choose_backward(problem, fixed);
  const BackwardFamily& family = backward_family(choice.family);
  BackwardPlan plan;
  plan.preprocess = helper<BackwardPreprocess>(problem, kPreprocessWarps);
  plan.main = family.specs(problem, followed_backward(problem, fixed, deterministic), choice, deterministic);
  check_kernel(fixed, plan.main.front(), "kernel_backward");
  const bool free = fixed.family == Family::automatic && !fixed.fixes_tile();
  if (family.may_spill != nullptr && family.may_spill(problem) && free) {
    // One plan says which kernel writes dQ, so that alternatives agree on it.
    const bool write_dq = plan.main.front().write_dq;
    const Alternatives if_all_spill = backward_families().back()->specs(problem, fixed, choice, deterministic);
    std::ranges::copy_if(if_all_spill, std::back_inserter(plan.main),
                         [&](const KernelSpec& spec) { return spec.write_dq == write_dq; });
  }
  if (!plan.main.front().write_dq) plan.dq = sm80_backward_dq_specs(problem);
  plan.convert = helper<BackwardConvert>(problem, kConvertWarps);
  plan.reduce = helper<BackwardReduce>(problem, kReduceWarps);
  plan.sink = helper<BackwardSink>(problem, kSinkWarps);
  return plan;
}

std::vector<Alternatives> kernels_of(const BackwardPlan& plan) {
  std::vector<Alternatives> kernels{{plan.preprocess}, plan.main};
  if (plan.main.front().split) kernels.push_back({plan.reduce});
  kernels.push_back(plan.dq.empty() ? Alternatives{plan.convert} : plan.dq);
  if (plan.main.front().variants.sink) kernels.push_back({plan.sink});
  return kernels;
}

bool orders_dq(const Problem& problem, Family family) noexcept {
  return backward_family(family).orders_dq && !needs_tile_lists(problem);
}

BackwardWorkspace backward_workspace(const Problem& problem, const BackwardChoice& choice,
                                     bool deterministic) noexcept {
  const int splits = choice.splits;
  BackwardWorkspace layout;
  // Rows of a dense batch are padded for whole tiles; a packed one has the sequences' groups side by side.
  const std::int64_t rows_together = problem.varlen ? kernel::kRowGroup : backward_family(choice.family).rows_together;
  const std::int64_t row_tiles =
      problem.varlen ? slots(problem.total_q, rows_together, problem.b) : ceil_div(problem.s_q, rows_together);
  layout.padded_rows = row_tiles * rows_together;
  const auto section = [&](std::int64_t floats) {
    const std::size_t start = layout.bytes;
    const std::size_t size = static_cast<std::size_t>(floats) * sizeof(float);
    layout.bytes += (size + kSectionAlignment - 1) / kSectionAlignment * kSectionAlignment;
    return start;
  };
  const std::int64_t rows = (problem.varlen ? 1 : problem.b) * problem.h_q * layout.padded_rows;
  layout.lse_log2 = section(rows);
  layout.delta = section(rows);
  const bool ordered = deterministic && orders_dq(problem, choice.family);
  layout.dq_accum = section(deterministic && !ordered ? 0 : rows * problem.d_qk);
  layout.dq_turns = section(ordered ? rows / kernel::kRowGroup * kernel::kTurnsPerGroup : 0);
  layout.partial =
      section(splits > 1 ? splits * problem.b * problem.h_kv * problem.s_kv * (problem.d_qk + problem.d_v) : 0);
  return layout;
}

std::size_t backward_lists_size(const Problem& problem, const Fixed& fixed, bool deterministic) {
  if (!needs_tile_lists(problem)) return 0;
  const BackwardPlan planned = plan_backward(problem, fixed, deterministic);
  return mask_tiles_bytes(problem, planned.main) + mask_tiles_bytes(problem, planned.dq);
}

std::size_t backward_workspace_size(const Problem& problem, const Fixed& fixed, bool deterministic) {
  return backward_workspace(problem, choose_backward(problem, fixed), deterministic).bytes +
         backward_lists_size(problem, fixed, deterministic);
}

BackwardLaunch backward_launch(const Problem& problem, const BackwardTensors& tensors, double scale,
                               const BackwardChoice& choice, bool deterministic, const BackwardKernels& kernels,
                               int multiprocessors, void* workspace, const PackedArgs& packed) {
  if (!kernels.main.write_dq && kernels.dq.tile_m == 0) {
    throw Error(ErrorCode::internal, "the main kernel of a backward leaves dq to one that its plan does not have");
  }
  const int splits = choice.splits;
  BackwardLaunch launch{};
  kernel::BackwardVariantParams& params = launch.params;
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

  const BackwardWorkspace layout = backward_workspace(problem, choice, deterministic);
  const auto section = [&](std::size_t offset) {
    return reinterpret_cast<float*>(static_cast<std::byte*>(workspace) + offset);
  };
  params.lse_log2 = section(layout.lse_log2);
  params.delta = section(layout.delta);
  const bool ordered = kernels.main.ordered_dq();
  params.dq_accum = deterministic && !ordered ? nullptr : section(layout.dq_accum);
  params.dq_turns = ordered ? reinterpret_cast<std::int32_t*>(section(layout.dq_turns)) : nullptr;
  params.partial = splits > 1 ? section(layout.partial) : nullptr;

  const std::int64_t group = group_of(problem);
  params.b = static_cast<int>(problem.b);
  params.h_q = static_cast<int>(problem.h_q);
  params.h_kv = static_cast<int>(problem.h_kv);
  params.s_q = static_cast<int>(problem.s_q);
  params.s_kv = static_cast<int>(problem.s_kv);
  params.group = static_cast<int>(group);
  params.causal_shift = causal_shift(problem);
  params.padded_rows = static_cast<int>(layout.padded_rows);
  const std::int64_t entries = problem.varlen ? 1 : problem.b;  // the slots of a packed batch are those of all
  params.m_blocks = static_cast<int>(ceil_div(problem.s_q, kernels.main.tile_m));
  params.n_blocks = static_cast<int>(problem.varlen ? slots(problem.total_kv, kernels.main.tile_n, problem.b)
                                                    : ceil_div(problem.s_kv, kernels.main.tile_n));
  const std::int64_t element = static_cast<std::int64_t>(size_of(problem.dtype));
  const std::int64_t head_bytes = std::max<std::int64_t>(
      group * problem.typical_s_q() * ((problem.d_qk + problem.d_v) * element + 4 * problem.d_qk), 1);
  params.heads_in_flight = static_cast<int>(
      std::clamp<std::int64_t>(kL2Budget / head_bytes, 1, std::max<std::int64_t>(entries * problem.h_kv, 1)));
  params.splits = splits;
  params.scale = static_cast<float>(scale);
  params.scale_log2 = static_cast<float>(scale * kLog2e);
  if (problem.varlen) params.sequences = sequence_params(problem, packed.sequences);
  if (problem.dropout) {
    params.dropout = packed.dropout;
    params.scale = static_cast<float>(scale / params.dropout.keep);
  }

  if (problem.variants != nullptr) params.variant = variant_params(problem, tensors.variant, scale);
  if (tensors.variant.dsink.defined()) {
    params.dsink = static_cast<float*>(tensors.variant.dsink.data);
    params.stride_dsink = tensors.variant.dsink.strides[0];
    launch.grids.sink = problem.h_q;
  }

  const std::int64_t row_groups = entries * problem.h_q * (layout.padded_rows / kernel::kRowGroup);
  launch.grids.preprocess = row_groups;
  launch.grids.main = std::int64_t{params.n_blocks} * problem.h_kv * entries * splits;
  // Blocks that stay for all their tiles hide the start of a tile behind the end of another; long tiles of unequal
  // length are balanced better by the hardware.
  const bool long_tiles = problem.causal && std::max(problem.d_qk, problem.d_v) > 64 && params.m_blocks >= kLongTile;
  const bool unequal = problem.varlen || needs_tile_lists(problem);
  const int cluster = kernels.main.cluster();
  if (cluster > 1) {
    launch.grids.main *= cluster;
  } else if (kernels.main.kernel().persistent && !long_tiles && !unequal && !ordered) {
    params.heads_in_flight =
        balanced_heads(std::int64_t{params.n_blocks} * splits, entries * problem.h_kv, multiprocessors);
    launch.grids.main = std::min<std::int64_t>(launch.grids.main, multiprocessors);
  }
  // A block may wait for one in front of it only if that has started for certain, whatever else is on the GPU: it has a
  // lower number, and no block goes on to another tile; or a block has all key tiles of its heads.
  if (ordered && !unequal) {
    const std::int64_t heads = problem.b * problem.h_kv;
    const std::int64_t whole = blocks_of_whole_heads(heads, multiprocessors);
    if (cluster == 1 && splits == 1 && whole != 0 && whole * head_bytes <= 2 * kL2Budget) {
      params.heads_in_flight = static_cast<int>(whole);
      launch.grids.main = whole;
    } else if (!has_equal_tiles(problem)) {  // of pairs the order follows from it: never a function of the GPU
      params.heads_in_flight =
          heads_side_by_side(std::int64_t{params.n_blocks} * splits,
                             std::min<std::int64_t>(2 * kL2Budget / head_bytes, heads), kMultiprocessors / cluster);
    } else if (cluster > 1) {  // two at least: a queue of all pairs is as slow as the slowest
      params.heads_in_flight = static_cast<int>(
          std::clamp<std::int64_t>(ceil_div(kL2Budget, head_bytes), 2, std::max<std::int64_t>(heads, 2)));
    }
  }
  if (splits > 1) {
    launch.grids.reduce = ceil_div(problem.b * problem.h_kv * problem.s_kv, std::max(kernels.reduce_warps, 1));
  }
  launch.dq_params = params;
  if (!kernels.main.write_dq) {
    launch.dq_params.m_blocks = static_cast<int>(problem.varlen ? slots(problem.total_q, kernels.dq.tile_m, problem.b)
                                                                : ceil_div(problem.s_q, kernels.dq.tile_m));
    const std::int64_t kv_bytes =
        std::max<std::int64_t>(problem.typical_s_kv() * (problem.d_qk + problem.d_v) * element, 1);
    launch.dq_params.heads_in_flight =
        static_cast<int>(std::clamp<std::int64_t>(kL2Budget / kv_bytes * group, std::max<std::int64_t>(group, 1),
                                                  std::max<std::int64_t>(entries * problem.h_q, 1)));
    launch.grids.dq = std::int64_t{launch.dq_params.m_blocks} * problem.h_q * entries;
  } else {
    launch.grids.convert = row_groups;
  }
  return launch;
}

bool sm90_backward_describable(const BackwardTensors& tensors) noexcept {
  return describable(tensors.q, 1) && describable(tensors.k, 1) && describable(tensors.v, 1) &&
         describable(tensors.dout, 1);
}

Sm90BackwardMaps sm90_backward_maps(const BackwardTensors& tensors, const KernelSpec& spec) noexcept {
  return {head_map(tensors.q, spec.tile_m), head_map(tensors.k, spec.tile_n), head_map(tensors.v, spec.tile_n),
          head_map(tensors.dout, spec.tile_m)};
}

}  // namespace fa::plan
