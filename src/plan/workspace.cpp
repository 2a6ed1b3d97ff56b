#include "plan/workspace.hpp"

#include <algorithm>
#include <bit>

#include <common/backward_params.cuh>
#include <common/forward_params.cuh>

#include "plan/catalogue.hpp"
#include "plan/column_sums.hpp"
#include "plan/forward_launch.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/rounding.hpp"
#include "plan/schedule.hpp"
#include "plan/statistic_rows.hpp"

namespace fa::plan {
namespace {

constexpr std::size_t kAlignment = 256;

std::size_t bytes_of(std::int64_t words) noexcept {
  return static_cast<std::size_t>(words) * sizeof(float);
}

/// Of a counter and norms, whichever of the two a kernel of this choice has.
std::size_t counter_bytes(const Problem& problem, const Choice& choice) noexcept {
  const std::int64_t heads = may_have_reach(problem, choice) ? problem.b * (problem.h_q + problem.h_kv) : 0;
  return kCounterBytes + bytes_of(heads);
}

/// Of column sums that only the search for top keys reads.
std::int64_t sums_of(const Problem& problem) noexcept {
  if (problem.statistics.top_keys == 0) return 0;
  return summed_heads(problem) * (has_packed_keys(problem) ? problem.total_kv : problem.b * problem.s_kv);
}

/// Whether a call has no output element.
bool is_empty(const Problem& problem) {
  return problem.b == 0 || problem.h_q == 0 || (problem.varlen ? problem.total_q : problem.s_q) == 0;
}

}  // namespace

const char* name_of(Section section) noexcept {
  static constexpr std::array kNames{
      "counters", "partial_o",   "partial_lse", "lse_log2", "delta",    "dq_accum", "turns",      "partial_dkv",
      "schedule", "split_flags", "column_sums", "max_rows", "max_keys", "row_sums", "tile_lists", "dq_tile_lists"};
  static_assert(kNames.size() == kSections);
  return kNames[static_cast<std::size_t>(section)];
}

void WorkspaceLayout::add(Section section, std::size_t bytes, std::size_t alignment) noexcept {
  const std::size_t offset = (end_ + alignment - 1) & ~(alignment - 1);
  offsets_[index(section)] = offset;
  sizes_[index(section)] = bytes;
  present_ |= 1U << index(section);
  end_ = offset + bytes;
}

SectionAddresses WorkspaceLayout::addresses(std::byte* base, std::byte* lists) const noexcept {
  SectionAddresses result{};
  const std::size_t first_list = other_bytes();
  for (unsigned rest = present_; rest != 0; rest &= rest - 1) {
    const auto i = static_cast<std::size_t>(std::countr_zero(rest));
    const bool of_lists = i >= index(Section::tile_lists);
    result[i] = of_lists ? lists + (offsets_[i] - first_list) : base + offsets_[i];
  }
  return result;
}

WorkspaceLayout forward_workspace(const Problem& problem, const Choice& choice, const ForwardNeeds& needs) noexcept {
  WorkspaceLayout layout;
  const auto add_sums = [&] {
    if (needs.sums != 0) layout.add(Section::column_sums, bytes_of(needs.sums), kAlignment);
  };
  if (needs.counters) {
    layout.add(Section::counters, counter_bytes(problem, choice));
    add_sums();
    return layout;
  }
  if (needs.fixed.counters != 0) {
    layout.add(Section::counters, static_cast<std::size_t>(needs.fixed.counters) * sizeof(std::int32_t));
  }
  if (needs.fixed.flags != 0) {
    layout.add(Section::split_flags, static_cast<std::size_t>(needs.fixed.flags) * sizeof(std::uint64_t), kAlignment);
  }
  if (needs.fixed.partial_o != 0) layout.add(Section::partial_o, bytes_of(needs.fixed.partial_o), kAlignment);
  if (needs.fixed.partial_lse != 0) layout.add(Section::partial_lse, bytes_of(needs.fixed.partial_lse), kAlignment);
  if (needs.schedule != 0) layout.add(Section::schedule, needs.schedule);
  if (needs.partial_rows != 0) {
    layout.add(Section::partial_o, bytes_of(needs.partial_rows * problem.d_v), kAlignment);
    layout.add(Section::partial_lse, bytes_of(needs.partial_rows * kernel::kSplitSumFloats), kAlignment);
  }
  if (choice.leaves_splits()) {
    const std::int64_t rows = choice.splits * problem.b * problem.h_q * problem.s_q;
    layout.add(Section::partial_o, bytes_of(rows * problem.d_v));
    layout.add(Section::partial_lse, bytes_of(rows * kernel::kSplitSumFloats));
  }
  add_sums();
  if (needs.lists != 0) layout.add(Section::tile_lists, needs.lists, kAlignment);
  return layout;
}

ForwardNeeds forward_needs(const Problem& problem, const KernelSpec& attention, int multiprocessors,
                           bool given) noexcept {
  ForwardNeeds needs{.counters = attention.dynamic() || attention.affine_reach(),
                     .lists = mask_tiles_bytes(problem, attention),
                     .sums = sums_of(problem)};
  if (attention.split_keys() > 0) needs.fixed = fixed_splits(problem, attention);
  if (!attention.scheduled() && !attention.own_parts()) return needs;
  const ScheduleShape shape = schedule_shape(problem, attention, multiprocessors);
  if (attention.own_parts()) {
    needs.schedule = static_cast<std::size_t>(2 * shape.parts) * sizeof(std::uint64_t);  // flags
  } else if (!given) {
    needs.schedule = shape.bytes();
  }
  needs.partial_rows = partial_rows(problem, attention, shape);
  return needs;
}

std::int64_t keys_in_tiles(const Problem& problem) noexcept {
  constexpr std::int64_t kEveryTile = 384;  // a multiple of 64, 128 and 192
  return ceil_div(problem.s_kv, kEveryTile) * kEveryTile;
}

std::int64_t padded_rows(const Problem& problem, const BackwardChoice& choice) noexcept {
  // Rows of a dense batch are padded for whole tiles; a packed one has the sequences' groups side by side.
  const std::int64_t rows_together = problem.varlen ? kernel::kRowGroup : backward_family(choice.family).rows_together;
  return rows_together *
         (problem.varlen ? slots(problem.total_q, rows_together, problem.b) : ceil_div(problem.s_q, rows_together));
}

WorkspaceLayout backward_workspace(const Problem& problem, const BackwardChoice& choice, const BackwardNeeds& needs,
                                   std::int64_t padded_rows) noexcept {
  WorkspaceLayout layout;
  const auto add = [&layout](Section section, std::int64_t words) {
    layout.add(section, (bytes_of(words) + kAlignment - 1) / kAlignment * kAlignment);
  };
  const std::int64_t rows = (problem.varlen ? 1 : problem.b) * problem.h_q * padded_rows;
  // First: it is cleared in front.
  if (problem.statistics.gradient_of_heads()) add(Section::max_rows, 2 * problem.h_q);
  add(Section::lse_log2, rows);
  add(Section::delta, rows);
  if (needs.dq_accum) add(Section::dq_accum, rows * problem.d_qk);
  if (needs.turns) add(Section::turns, rows / kernel::kRowGroup * kernel::kTurnsPerGroup);
  if (choice.splits > 1 && (choice.gradients.dk || choice.gradients.dv)) {
    const std::int64_t keys = choice.in_turns ? keys_in_tiles(problem) : choice.splits * problem.s_kv;
    add(Section::partial_dkv, problem.b * problem.h_kv * keys * (problem.d_qk + problem.d_v));
  }
  if (problem.statistics.max_logit_gradient) add(Section::max_keys, statistic_rows(problem));
  if (problem.statistics.column_sums_gradient) add(Section::row_sums, statistic_rows(problem));
  if (!needs_tile_lists(problem)) return layout;
  layout.add(Section::tile_lists, needs.lists);
  if (needs.dq_lists != 0) layout.add(Section::dq_tile_lists, needs.dq_lists);
  return layout;
}

WorkspaceLayout backward_workspace(const Problem& problem, const BackwardChoice& choice,
                                   const BackwardNeeds& needs) noexcept {
  return backward_workspace(problem, choice, needs, padded_rows(problem, choice));
}

BackwardNeeds backward_needs(const Problem& problem, const KernelSpec& main, const KernelSpec& dq) noexcept {
  BackwardNeeds needs{main.adds_dq(), main.ordered_dq() || main.in_turns()};
  if (!needs_tile_lists(problem)) return needs;
  needs.lists = mask_tiles_bytes(problem, main);
  if (dq.warps != 0) needs.dq_lists = mask_tiles_bytes(problem, dq);
  return needs;
}

WorkspaceSize forward_workspace_size(const Problem& problem, const Fixed& fixed, int multiprocessors) {
  if (is_empty(problem)) return {};
  const Choice choice = choose(problem, fixed);
  ForwardNeeds needs;
  needs.sums = sums_of(problem);
  if (needs_tile_lists(problem))
    needs.lists = mask_tiles_bytes(problem, kernels_of(plan_forward(problem, fixed)).front());
  if (problem.fixed_rows()) {
    const KernelSpec attention = plan_forward(problem, fixed).kernel;
    const WorkspaceLayout layout =
        forward_workspace(problem, choice, forward_needs(problem, attention, multiprocessors, false));
    return {layout.bytes(), needs.lists};
  }
  if (choice.scheduled || choice.own_parts) {
    std::size_t most = 0;
    const std::vector<Alternatives> kernels = kernels_of(plan_forward(problem, fixed));
    for (const KernelSpec& spec : kernels.front()) {
      most = std::max(most,
                      forward_workspace(problem, choice, forward_needs(problem, spec, multiprocessors, false)).bytes());
    }
    return {most, 0};
  }
  // Which kernel is taken, a tuner may say.
  ForwardNeeds counted = needs;
  counted.counters = may_have_counter(problem, choice);
  return {
      std::max(forward_workspace(problem, choice, counted).bytes(), forward_workspace(problem, choice, needs).bytes()),
      needs.lists};
}

WorkspaceSize backward_workspace_size(const Problem& problem, const Fixed& fixed, bool deterministic) {
  const BackwardChoice choice = choose_backward(problem, fixed);
  BackwardNeeds needs;
  const bool all = problem.gradients == Gradients{};
  const bool ordered = deterministic && orders_dq(problem, choice.family) && problem.gradients.dq;
  needs.turns = ordered || choice.in_turns;
  needs.dq_accum = problem.gradients.dq && (!deterministic || ordered);
  if (needs_tile_lists(problem) || !all) {
    const BackwardPlan planned = plan_backward(problem, fixed, deterministic);
    needs.dq_accum = planned.main.front().adds_dq();
    needs.lists = mask_tiles_bytes(problem, planned.main);
    needs.dq_lists = mask_tiles_bytes(problem, planned.dq);
  }
  const WorkspaceLayout layout = backward_workspace(problem, choice, needs);
  return {layout.bytes(), layout.list_bytes()};
}

}  // namespace fa::plan
