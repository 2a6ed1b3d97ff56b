#include "plan/backward.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include <fa/error.hpp>

#include "plan/catalogue.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/planner.hpp"
#include "plan/rounding.hpp"
#include "plan/sm80_backward.hpp"
#include "plan/sm90_backward_pair.hpp"
#include "plan/statistic_rows.hpp"

namespace fa::plan {
namespace {

constexpr int kPreprocessWarps = 4;
constexpr int kConvertWarps = 4;
constexpr int kReduceWarps = 4;
constexpr int kSinkWarps = 8;
constexpr std::int64_t kKeysPerBlock = 128;
constexpr std::int64_t kRowsPerSplit = 512;
constexpr std::int64_t kMaxSplits = 64;

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

/// What sums the partial dK and dV of splits.
KernelSpec reduce_spec(const RequestFacts& request, const DeviceFacts& device) noexcept {
  KernelSpec spec = helper<BackwardReduce>({request, {}, device}, kReduceWarps);
  spec.without_dk = !request.gradients.dk;
  spec.without_dv = !request.gradients.dv;
  return spec;
}

/// Query heads of a KV head.
std::int64_t group_of(const Problem& problem) noexcept {
  return problem.h_kv == 0 ? 0 : problem.h_q / problem.h_kv;
}

/// Whether dQ alone is wanted of a kernel that leaves it to a pass of its own, or whose additions are the slower.
bool passes_alone(const Problem& problem, const BackwardFamily& family, bool deterministic) noexcept {
  if (problem.gradients != Gradients{true, false, false} || wants_captured_gradients(problem)) return false;
  return family.misfit == nullptr || (deterministic && !orders_dq(problem, family.family));
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

/// The splits of a key tile's query tiles. The work of packed sequences the host does not
/// know.
int choose_splits(const Problem& problem, const Fixed& fixed, const BackwardFamily& family) noexcept {
  if (problem.varlen) return 1;
  if (fixed.has("splits")) return fixed.number("splits");
  const std::int64_t enough = family.enough_blocks(problem);
  const std::int64_t blocks = ceil_div(problem.s_kv, kKeysPerBlock) * problem.h_kv * problem.b;
  const std::int64_t rows = problem.s_q * group_of(problem);  // that meet in one key tile
  if (blocks == 0 || 2 * blocks > enough) return 1;
  return static_cast<int>(std::max<std::int64_t>(std::min({enough / blocks, rows / kRowsPerSplit, kMaxSplits}), 1));
}

/// Whether causality may hide all keys from rows of a dense batch, of which kernels with more masks look anyway. Calls
/// with places share what one of them prepared.
bool may_have_rows_without_keys(const Problem& problem) noexcept {
  if (!problem.causal || problem.varlen) return false;
  if (problem.variants != nullptr && (problem.variants->left_window || problem.variants->chunked)) return false;
  return problem.placed || problem.reads_place() || causal_shift(problem) < 0;
}

}  // namespace

BackwardChoice choose_backward(const Problem& problem, const Fixed& fixed) noexcept {
  BackwardChoice choice;
  choice.aligned = problem.aligned;
  choice.gradients = problem.gradients;
  for (const BackwardFamily* const family : backward_families()) {
    choice.family = family->family;
    if (serves(*family, problem, fixed)) break;
  }
  const BackwardFamily& family = backward_family(choice.family);
  choice.splits = choose_splits(problem, fixed, family);
  choice.rows_without_keys = family.misfit != nullptr && may_have_rows_without_keys(problem);
  if (family.shares == nullptr) return choice;
  // Neither clusters nor turns are a persistent grid.
  const bool alone = fixed.has("splits") || problem.bounded;
  const KeyTileShares planned = alone ? KeyTileShares() : family.shares(problem, choice.splits);
  choice.split_blocks = std::clamp(fixed.number("split_blocks", planned.blocks), 1, BackwardChoice::kMaxSplitBlocks);
  if (choice.split_blocks > 1) {
    choice.splits = 1;
    return choice;
  }
  if (fixed.number("in_turns", planned.turns > 1 ? 1 : 0) == 0) return choice;
  const int parts = fixed.has("splits") ? choice.splits
                    : planned.turns > 1 ? planned.turns
                                        : static_cast<int>(std::min(group_of(problem), kMaxSplits));
  if (!family.takes_turns(problem, parts)) return choice;
  choice.in_turns = true;
  choice.splits = parts;
  return choice;
}

Fixed followed_backward(const Problem& problem, const Fixed& fixed, bool deterministic) {
  const BackwardFamily& family = backward_family(choose_backward(problem, fixed).family);
  if (family.family == choose_backward(usual_call(problem), fixed).family) return fixed;
  return family.fits == nullptr || family.fits(problem, fixed, deterministic) ? fixed
                                                                              : fixed.without_tile(family.family);
}

BackwardPlan plan_backward(const Problem& problem, const Fixed& fixed, bool deterministic) {
  check_dtype(problem.arch, problem.dtype);
  if (fixed.family != Family::automatic) check_family(backward_family(fixed.family), problem);
  const BackwardChoice choice = choose_backward(problem, fixed);
  const BackwardFamily& family = backward_family(choice.family);
  BackwardPlan plan;
  plan.preprocess = helper<BackwardPreprocess>(problem, kPreprocessWarps);
  set_statistics_gradients(problem, plan.preprocess);
  plan.preprocess.max_logit = 0;  // which it has no part in
  plan.preprocess.max_logit_by_head = false;
  if (problem.scans_rows()) plan.statistic_rows = statistic_rows_spec(problem);
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
  if (passes_alone(problem, family, deterministic)) {
    plan.main = sm80_backward_dq_specs(problem);
  } else if (problem.gradients.dq && !plan.main.front().write_dq) {
    plan.dq = sm80_backward_dq_specs(problem);
  }
  plan.convert = helper<BackwardConvert>(problem, kConvertWarps);
  plan.reduce = reduce_spec(problem, problem);
  plan.sink = helper<BackwardSink>(problem, kSinkWarps);
  return plan;
}

std::vector<Alternatives> kernels_of(const BackwardPlan& plan) {
  const KernelSpec& main = plan.main.front();
  std::vector<Alternatives> kernels{{plan.preprocess}, plan.main};
  if (plan.statistic_rows.warps != 0) kernels.insert(kernels.begin(), {plan.statistic_rows});
  if (main.split && main.sums_keys()) kernels.push_back({plan.reduce});
  if (!plan.dq.empty()) kernels.push_back(plan.dq);
  if (main.adds_dq()) kernels.push_back({plan.convert});
  if (main.variants.sink) kernels.push_back({plan.sink});
  return kernels;
}

bool wants_captured_gradients(const Problem& problem) noexcept {
  return problem.variants != nullptr &&
         std::ranges::any_of(problem.variants->captures, [](const expression::Capture& c) { return c.requires_grad; });
}

void set_statistics_gradients(const Problem& problem, KernelSpec& spec) noexcept {
  spec.entropy = problem.statistics.entropy_gradient;
  spec.column_sums = problem.statistics.column_sums_gradient;
  if (!problem.statistics.max_logit_gradient) return;
  // Without a function the softmax takes the scaled scores.
  const bool of_scaled = problem.statistics.max_logit == MaxLogit::scaled && !spec.variants.score.empty();
  spec.max_logit = of_scaled ? 2 : 1;
  spec.max_logit_by_head = problem.statistics.max_logit_by_head;
}

bool orders_dq(const Problem& problem, Family family) noexcept {
  return backward_family(family).orders_dq && !needs_tile_lists(problem);
}

bool sm90_backward_describable(const BackwardTensors& tensors) noexcept {
  return describable(tensors.q, 1) && describable(tensors.k, 1) && describable(tensors.v, 1) &&
         describable(tensors.dout, 1);
}

Sm90BackwardMaps sm90_backward_maps(const BackwardTensors& tensors, const KernelSpec& spec) noexcept {
  const int keys = sm90_backward_box_keys(spec);
  return {head_map(tensors.q, spec.tile_m), head_map(tensors.k, keys), head_map(tensors.v, keys),
          head_map(tensors.dout, spec.tile_m)};
}

}  // namespace fa::plan
