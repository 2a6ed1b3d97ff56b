#include "plan/call_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <new>

#include "plan/backward_launch.hpp"
#include "plan/catalogue.hpp"
#include "plan/column_sums.hpp"
#include "plan/early_start.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/rounding.hpp"
#include "plan/schedule.hpp"
#include "plan/statistic_rows.hpp"
#include "support/text.hpp"

#include <sm90/sm90_forward_layout.cuh>

namespace fa::plan {
namespace {

constexpr std::int64_t kMaxGrid = (std::int64_t{1} << 31) - 1;
constexpr std::int64_t kMergesAtOnce = 1;  // rows of a multiprocessor whose splits are merged
// Persistent kernels count tiles in an int, up to a round past the last one.
constexpr std::int64_t kMaxTiles = (std::int64_t{1} << 31) - 65536;

/// Makes `object` anew, in its place.
template <class T, class Make>
void remake(T& object, const Make& make) {
  ::new (static_cast<void*>(&object)) T(make());
}

template <class T>
T* at_section(const SectionAddresses& at, Section section) noexcept {
  return reinterpret_cast<T*>(at[static_cast<std::size_t>(section)]);
}

void check_tiles(std::int64_t tiles) {
  if (tiles <= kMaxTiles) return;
  support::throw_invalid("b * h_q * s_q", tiles, fmt::format("at most {} query tiles", kMaxTiles));
}

/// The blocks of a grid of so many tiles, which those of a bounded one share.
std::int64_t blocks_of(const KernelSpec& spec, std::int64_t tiles, int multiprocessors) {
  if (!spec.bounded) return tiles;
  check_tiles(tiles);
  return std::min<std::int64_t>(tiles, multiprocessors);
}

/// A call that leaves multiprocessors to others has no more thread blocks than it may take.
void check_bound(const Problem& problem, const KernelSpec& spec, std::int64_t grid, int multiprocessors) {
  if (!problem.bounded || grid <= multiprocessors) return;
  support::throw_unsupported(
      "max_multiprocessors", multiprocessors,
      fmt::format("0, or {} and more, for this call: its kernel, {}, has no persistent grid", grid, kernel_name(spec)));
}

void bind_lists(std::byte* memory, std::size_t classes, kernel::VariantParams& variant,
                kernel::MaskTilesParams& lists) noexcept {
  lists.lists = reinterpret_cast<std::int32_t*>(memory);
  lists.classes = reinterpret_cast<std::int32_t*>(memory + classes);
  variant.tile_lists = lists.variant.tile_lists = lists.lists;
}

}  // namespace

KernelChoices kernel_choices(const Problem& problem, const Fixed& fixed) {
  const ForwardPlan planned = plan_forward(problem, fixed);
  KernelChoices choices;
  choices[Role::attention] = kernels_of(planned).front();
  if (planned.kernel.leaves_splits()) choices[Role::combine] = {planned.combine};
  return choices;
}

KernelChoices backward_kernel_choices(const Problem& problem, const Fixed& fixed, bool deterministic) {
  const BackwardPlan planned = plan_backward(problem, fixed, deterministic);
  KernelChoices choices;
  choices[Role::statistics] = {planned.preprocess};
  if (planned.statistic_rows.warps != 0) choices[Role::statistic_rows] = {planned.statistic_rows};
  choices[Role::attention] = planned.main;
  const KernelSpec& main = planned.main.front();
  if (main.split && main.sums_keys()) choices[Role::reduce] = {planned.reduce};
  choices[Role::dq] = planned.dq;
  if (main.adds_dq()) choices[Role::convert] = {planned.convert};
  if (main.variants.sink) choices[Role::sink] = {planned.sink};
  return choices;
}

KernelSet companions(const Problem& problem, const KernelSet& kernels) {
  KernelSet result;
  const KernelSpec& attention = kernels[Role::attention];
  const KernelSpec& dq = kernels[Role::dq];
  if (attention.scheduled()) result[Role::schedule] = schedule_spec(attention);
  if (attention.affine_reach()) result[Role::norms] = row_norms_spec(attention);
  if (attention.op() == Op::forward && problem.statistics.summed_heads() != ColumnSums::none) {
    result[Role::column_sums] = column_sums_spec(problem);
    if (problem.statistics.top_keys != 0) result[Role::top_keys] = top_keys_spec(problem);
  }
  if (!needs_tile_lists(problem)) return result;
  result[Role::tile_lists] = mask_tiles_spec(attention);
  if (dq.warps != 0) result[Role::dq_tile_lists] = mask_tiles_spec(dq);
  return result;
}

std::uint64_t lists_tag(const Problem& problem, const KernelSet& kernels) noexcept {
  const KernelSpec& dq = kernels[Role::dq];
  return mix_tag(mask_tiles_tag(problem, kernels[Role::attention]), dq.warps != 0 ? mask_tiles_tag(problem, dq) : 0);
}

Step* CallPlan::step(Role role) noexcept {
  const auto found = std::ranges::find(steps(), role, &Step::role);
  return found == steps().end() ? nullptr : &*found;
}

void CallPlan::add(Role role, std::int64_t grid, void* params, bool early) {
  if (grid == 0) return;
  if (grid > kMaxGrid) {
    support::throw_invalid("b * h * s", grid, fmt::format("at most {} tiles of rows or keys", kMaxGrid));
  }
  steps_[count_++] = {role, early, grid, params, nullptr, 0};
}

void CallPlan::put_places(const Problem& problem, const KernelSet& kernels) noexcept {
  if (!problem.reads_place()) return;
  place_ = place_params(problem, *problem.place);
  for (Step& step : steps()) {
    if (kernels[step.role].place_in_memory) step.place = &place_;
  }
}

void plan_call(const Problem& problem, const Choice& choice, const KernelSet& kernels, const ForwardTensors& tensors,
               const CallFacts& facts, CallPlan& call) {
  const KernelSpec& attention = kernels[Role::attention];
  kernel::Sm90ForwardVariantParams& all = call.forward_params.attention;
  kernel::ForwardVariantParams& params = all.base;
  const ForwardGrid grid = forward_params(problem, tensors, facts.scale, choice.splits, attention,
                                          facts.multiprocessors, facts.packed, params, facts.most_blocks);
  check_tiles(grid.tiles);
  check_bound(problem, attention, grid.grid, facts.multiprocessors);
  const bool given = facts.schedule != nullptr;
  remake(call.workspace, [&] {
    ForwardNeeds needs = forward_needs(problem, attention, facts.multiprocessors, given);
    if (tensors.statistics.column_sums.defined()) needs.sums = 0;
    return forward_workspace(problem, choice, needs);
  });
  if (attention.scheduled()) {
    params.paged.schedule = facts.schedule;
    if (!given) plan_schedule(problem, kernels, facts.multiprocessors, call);
  }
  if (call.workspace.has(Section::tile_lists)) {
    kernel::MaskTilesParams& lists = call.forward_params.lists;
    const MaskTilesGrid listing = mask_tiles_params(problem, attention, params.variant, lists);
    call.classes_ = listing.list_bytes;
    if (!facts.listed) call.add(Role::tile_lists, listing.grid, &lists);
  }
  if (attention.dynamic()) call.cleared = sizeof(*params.next_tile);
  if (attention.split_keys() > 0 && call.workspace.has(Section::counters)) {
    call.cleared = call.workspace.bytes(Section::counters);
  }
  if (attention.affine_reach()) {
    call.cleared = call.workspace.bytes(Section::counters);
    call.add(Role::norms, row_norms_blocks(problem, kernels[Role::norms]), &params);
  }
  const bool early = may_start_early(attention) && !attention.place_in_memory;  // which is read ahead of all waits
  if (attention.kernel().tensor_maps) {
    remake(call.forward_params.maps, [&] { return sm90_forward_maps(tensors, attention); });
    call.mapped_ = true;
    if (problem.fp8()) call.forward_params.attention.scales = fp8_scale_params(tensors);
    if (problem.dtype == DType::i8) call.forward_params.attention.row_bias = row_bias_params(tensors);
    call.add(Role::attention, grid.grid, &all, early);
  } else if (attention.stored()) {
    call.forward_params.stored.scales = scale_params(tensors);
    call.copied_ = &call.forward_params.stored;
    *call.copied_ = params;
    call.add(Role::attention, grid.grid, &call.forward_params.stored, early);
  } else if (problem.fp8()) {
    call.forward_params.fp8.scales = fp8_scale_params(tensors);
    call.copied_ = &call.forward_params.fp8;
    *call.copied_ = params;
    call.add(Role::attention, grid.grid, &call.forward_params.fp8, early);
  } else {
    call.add(Role::attention, grid.grid, &params, early);
  }
  // Blocks of the next call, which start early, would lie beside some of these, and leave multiprocessors without any.
  Step* const step = call.step(Role::attention);
  const int alone = most_shared_bytes(attention);
  const bool few = step != nullptr && grid.grid <= facts.multiprocessors && alone >= sm90::kMoreThanHalf;
  const bool reads_alone = attention.split_keys() > 0 || attention.own_parts() || attention.whole_tiles();
  if (few && reads_alone) step->shared = alone;
  if (choice.leaves_splits()) {
    if (few && kernel::merges_few_rows(params)) {
      step->shared = alone;
      params.merge.beside_lone = true;
    }
    params.merge.some_whole = attention.whole_tiles() && problem.paged();
    const std::int64_t rows = std::int64_t{params.b} * params.h_q * params.s_q;
    const KernelSpec& combine = kernels[Role::combine];
    const std::int64_t of_row = kernel::combine_warps(combine.d_v, combine.accumulate);
    std::int64_t blocks = ceil_div(rows * of_row, combine.warps);
    // Most rows may need none: then blocks that come and go would be all that it does.
    if (params.merge.some_whole) blocks = std::min(blocks, kMergesAtOnce * facts.multiprocessors * of_row);
    call.add(Role::combine, blocks, &params, may_start_early(combine));
  }
  if (problem.statistics.summed_heads() != ColumnSums::none) {
    call.forward_params.sums.scales = scale_params(tensors);
    call.add_sums(problem, kernels, tensors.statistics, facts.multiprocessors);
  }
  call.put_places(problem, kernels);
}

void CallPlan::add_sums(const Problem& problem, const KernelSet& kernels, const StatisticsOutputs& to,
                        int multiprocessors) {
  const kernel::ForwardVariantParams& params = forward_params.attention.base;
  auto* const sums = static_cast<float*>(to.column_sums.data);
  const auto add_pass = [&](Role role, std::int64_t blocks, void* with) {
    check_bound(problem, kernels[role], blocks, multiprocessors);
    add(role, blocks, with);
  };
  add_pass(Role::column_sums,
           column_sums_params(problem, kernels[Role::column_sums], params, sums, forward_params.sums),
           &forward_params.sums);
  if (problem.statistics.top_keys == 0) return;
  kernel::TopKeysParams& top_keys = forward_params.top_keys;
  const std::int32_t* const begin = problem.paged() ? params.paged.begin : nullptr;
  add_pass(Role::top_keys, top_keys_params(problem, params.sequences, begin, sums, to.top_keys, top_keys), &top_keys);
}

void plan_call(const Problem& problem, const BackwardChoice& choice, const KernelSet& kernels,
               const BackwardTensors& tensors, const CallFacts& facts, CallPlan& call) {
  const KernelSpec& main = kernels[Role::attention];
  const KernelSpec& dq = kernels[Role::dq];
  call.backward_ = true;
  CallPlan::BackwardParams& all = call.backward_params;
  call.statistics_ = problem.statistics_gradients();
  kernel::BackwardVariantParams& params = call.statistics_ ? all.statistics : all.attention.base;
  const std::int64_t rows = padded_rows(problem, choice);
  BackwardGrids grids = backward_params(problem, tensors, facts.scale, choice, {main, dq, kernels[Role::reduce].warps},
                                        rows, facts.multiprocessors, facts.packed, params, all.dq, facts.most_blocks);
  grids.main = blocks_of(main, grids.main, facts.multiprocessors);
  grids.dq = blocks_of(dq, grids.dq, facts.multiprocessors);
  check_bound(problem, main, grids.main, facts.multiprocessors);
  check_bound(problem, dq, grids.dq, facts.multiprocessors);
  remake(call.workspace, [&] { return backward_workspace(problem, choice, backward_needs(problem, main, dq), rows); });
  // The first is launched in order: for what the caller has queued before it, no kernel waits.
  const auto add = [&](Role role, std::int64_t grid, void* with) {
    call.add(role, grid, with, !call.steps().empty() && may_start_early(kernels[role]));
  };
  const auto list = [&](Role role, const KernelSpec& of, kernel::VariantParams& variant, kernel::MaskTilesParams& lists,
                        std::size_t* classes) {
    const MaskTilesGrid listing = mask_tiles_params(problem, of, variant, lists);
    *classes = listing.list_bytes;
    if (!facts.listed) call.add(role, listing.grid, &lists);
  };
  if (call.statistics_) call.add_statistics_gradients(problem, kernels, tensors, facts);
  add(Role::statistics, grids.preprocess, &params);
  if (call.workspace.has(Section::tile_lists)) {
    list(Role::tile_lists, main, params.variant, all.lists, &call.classes_);
  }
  if (main.kernel().tensor_maps) {
    remake(all.maps, [&] { return sm90_backward_maps(tensors, main); });
    call.mapped_ = true;
    add(Role::attention, grids.main, &all.attention);
  } else {
    add(Role::attention, grids.main, &params);
  }
  add(Role::reduce, grids.reduce, &params);
  if (call.workspace.has(Section::dq_tile_lists)) {
    list(Role::dq_tile_lists, dq, all.dq.variant, all.dq_lists, &call.dq_classes_);
  }
  add(Role::dq, grids.dq, &all.dq);
  add(Role::convert, grids.convert, &params);
  add(Role::sink, grids.sink, &params);
  call.put_places(problem, kernels);
}

void CallPlan::add_statistics_gradients(const Problem& problem, const KernelSet& kernels,
                                        const BackwardTensors& tensors, const CallFacts& facts) {
  const StatisticsGradients& given = tensors.statistics;
  for (kernel::BackwardStatisticsParams* const params : {&backward_params.statistics, &backward_params.dq}) {
    params->entropy = static_cast<const float*>(given.entropy.data);
    params->dentropy = static_cast<const float*>(given.dentropy.data);
    params->dmax_logit = static_cast<const float*>(given.dmax_logit.data);
    params->dcolumn_sums = static_cast<const float*>(given.dcolumn_sums.data);
    params->sum_group = heads_of_a_sum(problem);
    params->max_keys = nullptr;
    params->max_rows = nullptr;
    params->row_sums = nullptr;
  }
  if (!problem.scans_rows()) return;
  if (workspace.has(Section::max_rows)) cleared = workspace.bytes(Section::max_rows);
  const KernelSpec& spec = kernels[Role::statistic_rows];
  const std::int64_t blocks =
      statistic_rows_params(problem, spec, tensors, facts.scale, facts.packed, backward_params.statistic_rows);
  check_bound(problem, spec, blocks, facts.multiprocessors);
  add(Role::statistic_rows, blocks, &backward_params.statistic_rows);
}

void plan_schedule(const Problem& problem, const KernelSet& kernels, int multiprocessors, CallPlan& call) {
  const ScheduleShape shape = schedule_shape(problem, kernels[Role::attention], multiprocessors);
  if (shape.segments > 1) call.cleared = sizeof(kernel::ScheduleHead::arrived);
  call.add(Role::schedule, shape.segments, &call.forward_params.attention.base,
           may_start_early(kernels[Role::schedule]) && call.cleared == 0);
}

void plan_schedule(const Problem& problem, const KernelSet& kernels, const CallFacts& facts, CallPlan& call) {
  kernel::ForwardVariantParams& params = call.forward_params.attention.base;
  const ForwardGrid grid = forward_params(problem, {}, facts.scale, 1, kernels[Role::attention], facts.multiprocessors,
                                          facts.packed, params);
  check_tiles(grid.tiles);
  params.paged.schedule = facts.schedule;
  remake(call.workspace, [] { return WorkspaceLayout(); });
  plan_schedule(problem, kernels, facts.multiprocessors, call);
}

void CallPlan::bind(const SectionAddresses& at) noexcept {
  if (backward_) return bind_backward(at);
  if (workspace.bytes() != 0) bind_forward(at);
}

void CallPlan::bind_forward(const SectionAddresses& at) noexcept {
  kernel::ForwardVariantParams& params = forward_params.attention.base;
  if (workspace.has(Section::counters)) params.next_tile = at_section<std::int32_t>(at, Section::counters);
  if (workspace.has(Section::split_flags)) params.split_flags = at_section<std::uint64_t>(at, Section::split_flags);
  if (workspace.has(Section::schedule)) params.paged.schedule = at_section<void>(at, Section::schedule);
  // Statistics of rows are in their places where keys are not split.
  if (workspace.has(Section::partial_o)) params.partial_o = at_section<float>(at, Section::partial_o);
  if (workspace.has(Section::partial_lse)) params.partial_lse = at_section<float>(at, Section::partial_lse);
  if (step(Role::norms) != nullptr) {
    params.variant.norms =
        reinterpret_cast<std::uint32_t*>(at_section<std::byte>(at, Section::counters) + kCounterBytes);
  }
  if (workspace.has(Section::column_sums)) {
    forward_params.sums.column_sums = at_section<float>(at, Section::column_sums);
    forward_params.top_keys.sums = forward_params.sums.column_sums;
  }
  if (workspace.has(Section::tile_lists)) {
    bind_lists(at_section<std::byte>(at, Section::tile_lists), classes_, params.variant, forward_params.lists);
  }
  if (copied_ != nullptr) *copied_ = params;
}

void CallPlan::bind_backward(const SectionAddresses& at) noexcept {
  const auto bind_params = [&at](kernel::BackwardVariantParams& params) {
    params.lse_log2 = at_section<float>(at, Section::lse_log2);
    params.delta = at_section<float>(at, Section::delta);
    params.dq_accum = at_section<float>(at, Section::dq_accum);
    params.turns = at_section<std::int32_t>(at, Section::turns);
    params.partial = at_section<float>(at, Section::partial_dkv);
  };
  const bool lists = workspace.has(Section::tile_lists);
  kernel::BackwardVariantParams& params = statistics_ ? backward_params.statistics : backward_params.attention.base;
  bind_params(params);
  if (statistics_) {
    CallPlan::BackwardParams& all = backward_params;
    all.statistic_rows.max_keys = at_section<std::int32_t>(at, Section::max_keys);
    all.statistic_rows.max_rows = at_section<std::uint64_t>(at, Section::max_rows);
    all.statistic_rows.row_sums = at_section<float>(at, Section::row_sums);
    all.statistics.max_keys = all.dq.max_keys = all.statistic_rows.max_keys;
    all.statistics.max_rows = all.dq.max_rows = all.statistic_rows.max_rows;
    all.statistics.row_sums = all.dq.row_sums = all.statistic_rows.row_sums;
  }
  if (lists) {
    bind_lists(at_section<std::byte>(at, Section::tile_lists), classes_, params.variant, backward_params.lists);
  }
  if (step(Role::dq) == nullptr) return;
  bind_params(backward_params.dq);
  if (!lists) return;
  bind_lists(at_section<std::byte>(at, Section::dq_tile_lists), dq_classes_, backward_params.dq.variant,
             backward_params.dq_lists);
}

}  // namespace fa::plan
