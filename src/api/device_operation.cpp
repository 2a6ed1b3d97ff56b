#include "api/device_operation.hpp"

#include <algorithm>
#include <exception>
#include <future>
#include <utility>
#include <vector>

#include "api/held_tiles.hpp"
#include "api/problem.hpp"
#include "api/recording.hpp"
#include "api/schedule.hpp"
#include "plan/catalogue.hpp"
#include "plan/mask_tiles.hpp"
#include "plan/schedule.hpp"
#include "support/log.hpp"
#include "tune/bucket.hpp"

namespace fa::api {
namespace {

using plan::Role;

ReadyKernel ready_kernel(const ChosenKernel& chosen, const driver::ContextRef& context, KernelInfo* info) {
  return {load_kernel(chosen, context, info), static_cast<unsigned>(chosen.spec.threads()),
          static_cast<unsigned>(plan::shared_bytes(chosen.spec))};
}

}  // namespace

template <class Op>
DeviceOperation<Op>::DeviceOperation(const AttentionConfig& config, const Functions& functions, double scale,
                                     const driver::ContextRef& context, std::shared_ptr<cache::Store> store,
                                     DevicePacked& packed, BuildQueue& builds)
    : config_(config),
      fixed_(read_override(config, Op::kOperation)),
      functions_(functions),
      scale_(scale),
      context_(context),
      store_(std::move(store)),
      packed_(packed),
      builds_(builds),
      tuning_(config_, context_, Op::kOperation) {
  Op::check_override(config_, fixed(), functions_.variants, context_.info().arch);
}

template <class Op>
plan::Problem DeviceOperation<Op>::problem(const AttentionShape& shape) const noexcept {
  return make_problem(config_, shape, context_.info().arch, &functions_.of(shape));
}

/// Of calls that take a schedule. Where those that the copy engine has maps for do, schedules are theirs; else, and
/// with first positions, of those that it has none for.
template <class Op>
plan::Problem DeviceOperation<Op>::scheduled_problem(const AttentionShape& shape, bool begins) const noexcept {
  plan::Problem result = problem(shape);
  result.given_schedule = true;
  if constexpr (Op::kOperation == Operation::forward) {
    result.tensor_maps = !begins && Op::choose(result, fixed()).scheduled;
  }
  return result;
}

template <class Op>
typename DeviceOperation<Op>::Planned DeviceOperation<Op>::plan_for(const AttentionShape& shape,
                                                                    const typename Op::Tensors& tensors, bool begins,
                                                                    const Schedule& schedule, const Shard& shard,
                                                                    Stream stream) {
  Planned planned{problem(shape), {}};
  plan::Problem& wanted = planned.wanted;
  wanted.place = shard.place;
  const int all = context_.info().multiprocessors;
  // A call that may take more than there are leaves none free: its kernel is that of any call.
  const bool is_above = wanted.bounded && shard.max_multiprocessors > all;
  wanted.bounded = wanted.bounded && !is_above;
  // The copy engine brings no page whose first rows do not count.
  wanted.tensor_maps = Op::describable(tensors, config_.varlen, config_.page_size != 0) && !begins;
  wanted.given_schedule = takes_schedule(wanted, schedule, begins);
  if constexpr (Op::kOperation == Operation::forward) plan::check_invariant(wanted, fixed());
  planned.choice = Op::choose(wanted, fixed());
  planned.code = tuning_.code(wanted, planned.choice.slot());
  const Ready* ready = &get(wanted, planned.choice, stream, Missing::stands_in);
  if (ready->interim && !takes_said_scratch(wanted, *ready)) {
    ready = &get(wanted, planned.choice, stream, Missing::waits);
  }
  planned.ready = ready;
  if (ready->fixed) planned.choice = Op::choose(wanted, *ready->fixed);
  planned.blocks = {wanted.bounded ? shard.max_multiprocessors : all, is_above ? shard.max_multiprocessors : 0};
  const plan::KernelSpec& attention = ready->specs[Role::attention];
  if (wanted.given_schedule && attention.scheduled()) {
    const plan::ScheduleShape taken = plan::schedule_shape(wanted, attention, planned.blocks.multiprocessors);
    planned.takes_schedule = true;
    planned.schedule_bytes = taken.bytes();
    planned.schedule_tag = plan::schedule_tag(wanted, attention, taken);
  }
  return planned;
}

/// Whether a call takes the schedule that it brings, if any: not one of calls with maps where it has none.
template <class Op>
bool DeviceOperation<Op>::takes_schedule(const plan::Problem& wanted, const Schedule& schedule,
                                         bool begins) const noexcept {
  if (schedule.data == nullptr) return false;
  if constexpr (Op::kOperation == Operation::forward) {
    if (wanted.tensor_maps || begins) return true;
    plan::Problem described = wanted;
    described.given_schedule = true;
    const plan::Family own = Op::choose(described, fixed()).family;
    described.tensor_maps = true;
    const Choice choice = Op::choose(described, fixed());
    return !choice.scheduled || choice.family == own;
  }
  return true;
}

template <class Op>
void DeviceOperation<Op>::launch(const Planned& planned, const typename Op::Tensors& tensors,
                                 const plan::PackedArgs& packed, const GivenTiles& tiles, const Schedule& schedule,
                                 Stream stream, const Workspace& workspace) const {
  plan::CallPlan call;
  plan::CallFacts facts{scale_, planned.blocks.multiprocessors, tiles.data != nullptr && tiles.filled, packed};
  facts.most_blocks = planned.blocks.most;
  if (planned.takes_schedule) {
    check_schedule_memory(schedule, planned.schedule_bytes);
    expect_scheduled(schedule, planned.schedule_tag);
    facts.schedule = schedule.data;
  }
  const Ready& ready = *planned.ready;
  plan_call(planned.wanted, planned.choice, ready.specs, tensors, facts, call);
  execute(call, planned.wanted, ready, tiles, stream, workspace);
}

template <class Op>
void DeviceOperation<Op>::schedule(const AttentionShape& shape, const plan::PackedArgs& packed, const Schedule& memory,
                                   Stream stream) {
  const plan::Problem wanted = scheduled_problem(shape, packed.paged.begin != nullptr);
  const Ready& ready = get(wanted, Op::choose(wanted, fixed()), stream, Missing::waits);
  const plan::KernelSpec& attention = ready.specs[Role::attention];
  if (!attention.scheduled()) return;
  plan::CallFacts facts{scale_, context_.info().multiprocessors, false, packed};
  const plan::ScheduleShape made = plan::schedule_shape(wanted, attention, facts.multiprocessors);
  check_schedule_memory(memory, made.bytes());
  facts.schedule = memory.data;
  plan::CallPlan call;
  plan_schedule(wanted, ready.specs, facts, call);
  set_held(memory.data, 0);
  execute(call, wanted, ready, {}, stream, {memory.data, memory.size});
  set_held(memory.data, plan::schedule_tag(wanted, attention, made));
}

template <class Op>
std::size_t DeviceOperation<Op>::schedule_size(const AttentionShape& shape) const {
  if (Op::runs_nothing(shape)) return 0;
  std::size_t most = 0;
  for (const bool begins : {false, true}) {
    const plan::Problem wanted = scheduled_problem(shape, begins);
    const plan::KernelChoices choices = Op::kernels(wanted, fixed(), config_.deterministic);
    for (const plan::KernelSpec& spec : choices[Role::attention]) {
      if (!spec.scheduled()) continue;
      most = std::max(most, plan::schedule_shape(wanted, spec, context_.info().multiprocessors).bytes());
    }
  }
  return most;
}

/// The ready kernels of a call: a look-up without locks once they exist.
template <class Op>
const Ready& DeviceOperation<Op>::get(const plan::Problem& wanted, const Choice& choice, Stream stream,
                                      Missing missing) {
  const std::uint64_t code = tuning_.code(wanted, choice.slot());
  const Ready* ready = ready_.find(code);
  const bool serves = ready != nullptr && !ready->open;
  if (serves && (missing == Missing::stands_in || !ready->interim)) return *ready;
  if (serves) return ready_.put(code, first_ready(wanted, stream));
  if (config_.compile == CompilePolicy::background && missing == Missing::stands_in) {
    if (const Ready* const other = stand_in(wanted, code)) return *other;
  }
  return settle(
      ready_, tuning_, code, stream, [&] { return first_ready(wanted, stream); },
      [&](const Ready& known) { decide(wanted, choice, known, stream, {}); });
}

/// The attention kernel that is known to be best first, else the planner's.
template <class Op>
typename DeviceOperation<Op>::Preferred DeviceOperation<Op>::preferred(const plan::Problem& wanted) const {
  Preferred result{Op::kernels(wanted, fixed(), config_.deterministic)};
  plan::Alternatives& specs = result.choices[Role::attention];
  if (tuning_.sources().any()) {
    const auto all_candidates = [&] {
      plan::Alternatives all = Op::candidates(wanted, fixed(), specs.front(), SIZE_MAX);
      all.insert(all.end(), specs.begin(), specs.end());
      return all;
    };
    const auto known = tuning_.known(tuning_.key(wanted, specs.front()), all_candidates);
    if (known) record_request(specs);  // what a machine asks for that does not know
    if (known) specs.insert(specs.begin(), known->spec);
    if (known) result.by = known->by;
    const bool backward = Op::kOperation == Operation::backward;
    const bool alone = specs.front().op() == plan::Op::backward_dq;  // it has no rivals
    result.open = !known && !alone && tuning_.sources().tunes && tune::worth_tuning(wanted, backward);
  }
  return result;
}

template <class Op>
Ready DeviceOperation<Op>::first_ready(const plan::Problem& wanted, Stream stream) const {
  const auto [choices, by, open] = preferred(wanted);
  const plan::KernelSpec& first = choices[Role::attention].front();
  const Supply from = supply(wanted).serialized();
  std::unique_ptr<Prefetch> candidates;
  if (open && tuning_.may_begin(stream)) candidates = prefetch(wanted, first, from, {});
  Ready ready = make(wanted, choices, from);
  ready.open = open;
  ready.info.chosen_by = ready.specs[Role::attention] == first ? by : kByPlanner;
  return ready;
}

/// Kernels that serve a call at once, without a compiler, while the planned ones are compiled; null where there are
/// none. What is shared by calls, schedules and tile lists, is of one kernel: such calls wait for it. So do bounded
/// ones, whose grids not every kernel has.
template <class Op>
const Ready* DeviceOperation<Op>::stand_in(const plan::Problem& wanted, std::uint64_t code) {
  if (wanted.given_schedule || wanted.bounded || plan::needs_tile_lists(wanted)) return nullptr;
  const auto [choices, by, open] = preferred(wanted);
  const plan::Alternatives& specs = choices[Role::attention];
  std::optional<Ready> found = stored(wanted, choices);
  if (found) {
    const auto taken = std::ranges::find(specs, found->specs[Role::attention]);
    found->interim = std::any_of(specs.begin(), taken, [&](const plan::KernelSpec& spec) { return is_missing(spec); });
    found->info.chosen_by = taken == specs.begin() ? by : kByPlanner;
    if (!found->interim) return &ready_.put_first(code, std::move(*found));
  } else {
    found = other_stored(wanted);
    if (!found) return nullptr;
    found->interim = true;
  }
  found->info.chosen_by = kByStandIn;
  const Ready& placed = ready_.put_first(code, std::move(*found));
  if (placed.interim) build_later(wanted, code);
  return &placed;
}

template <class Op>
bool DeviceOperation<Op>::is_missing(const plan::KernelSpec& spec) const {
  Supply never(config_);
  never.compile = CompilePolicy::never;
  try {
    get_kernel(spec, *store_, never);
    return false;
  } catch (const Error&) {
    return true;
  }
}

/// Kernels of these, without a compiler.
template <class Op>
std::optional<Ready> DeviceOperation<Op>::stored(const plan::Problem& wanted,
                                                 const plan::KernelChoices& choices) const {
  Supply never = supply(wanted);
  never.compile = CompilePolicy::never;
  never.command = nullptr;
  try {
    return make(wanted, choices, never);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::cache_miss) throw;
    return std::nullopt;
  }
}

/// Another kernel that the planner accepts for the problem: a candidate, one that serves other shapes here, or one of
/// the family that serves everything. It takes no more scratch memory than was said.
template <class Op>
std::optional<Ready> DeviceOperation<Op>::other_stored(const plan::Problem& wanted) {
  if (fixed().family != plan::Family::automatic || !fixed().fields().empty()) return std::nullopt;
  plan::KernelChoices choices = Op::kernels(wanted, fixed(), config_.deterministic);
  plan::Alternatives& specs = choices[Role::attention];
  specs = Op::candidates(wanted, fixed(), specs.front(), SIZE_MAX);
  if (!specs.empty()) {
    std::optional<Ready> candidate = stored(wanted, choices);
    if (candidate && takes_said_scratch(wanted, *candidate)) return candidate;
  }
  std::vector<plan::Fixed> others;
  ready_.for_each([&](const Ready& ready) { others.push_back(plan::fixed_to(ready.specs[Role::attention])); });
  others.push_back({plan::last_forward_family(wanted).family, {{"splits", 1}}});  // as of backwards
  for (const plan::Fixed& other : others) {
    try {
      std::optional<Ready> found = stored(wanted, Op::kernels(wanted, other, config_.deterministic));
      if (!found) continue;
      found->fixed = other;
      if (takes_said_scratch(wanted, *found)) return found;
    } catch (const Error&) {  // an override that does not fit the problem
    }
  }
  return std::nullopt;
}

/// Whether kernels that stand in need no more than `workspace_size` says of the planned ones.
template <class Op>
bool DeviceOperation<Op>::takes_said_scratch(const plan::Problem& wanted, const Ready& ready) const {
  const int multiprocessors = context_.info().multiprocessors;
  const Choice choice = Op::choose(wanted, ready.fixed ? *ready.fixed : fixed());
  return Op::workspace(wanted, choice, ready.specs, multiprocessors).bytes() <=
         Op::workspace_size(wanted, fixed(), config_.deterministic, multiprocessors).bytes;
}

template <class Op>
void DeviceOperation<Op>::build_later(const plan::Problem& wanted, std::uint64_t code) {
  {
    const std::scoped_lock lock(building_mutex_);
    if (!building_.insert(code).second) return;
  }
  builds_.start([this, wanted, code] {
    try {
      const driver::ContextScope scope(context_.context());
      ready_.put(code, first_ready(wanted, nullptr));
    } catch (const std::exception& problem) {
      support::logf(LogLevel::warning, "a kernel that another stands in for cannot be had: {}", problem.what());
    }
  });
}

/// Whether a call of the shape runs its planned kernels, and waits for none.
template <class Op>
bool DeviceOperation<Op>::is_ready(const AttentionShape& shape) const noexcept {
  if (Op::runs_nothing(shape)) return true;
  const plan::Problem wanted = problem(shape);
  const Ready* const ready = ready_.find(tuning_.code(wanted, Op::choose(wanted, fixed()).slot()));
  return ready != nullptr && !ready->interim && !ready->open;
}

template <class Op>
Supply DeviceOperation<Op>::supply(const plan::Problem& wanted) const {
  Supply supply(config_);
  supply.accept.driver = driver::api().version;
  supply.command = [this, wanted] { return remedy(wanted, config_, Op::kOperation); };
  return supply;
}

template <class Op>
Ready DeviceOperation<Op>::make(const plan::Problem& wanted, const plan::KernelChoices& choices,
                                const Supply& from) const {
  Ready ready;
  KernelInfo around;  // what the kernels besides the attention kernel took
  const auto choose = [&](const plan::Alternatives& specs) {
    return choose_kernel(specs, *store_, from, config_.deterministic || config_.invariance != Invariance::none);
  };
  const auto take = [&](Role role, const ChosenKernel& chosen) {
    KernelInfo info;
    ready.specs[role] = chosen.spec;
    ready.kernels[role] = ready_kernel(chosen, context_, role == Role::attention ? &ready.info : &info);
    around.compile_ms += info.compile_ms;
    around.load_ms += info.load_ms;
  };
  // What has to be compiled is compiled side by side, but for a thread that may not wait for others.
  const auto policy = is_impatient() ? std::launch::deferred : std::launch::async;
  plan::ByRole<std::future<ChosenKernel>> aside;
  for (const Role role : plan::kAllRoles) {
    if (role == Role::attention || choices[role].empty()) continue;
    aside[role] = std::async(policy, [&choose, &specs = choices[role]] { return choose(specs); });
  }
  take(Role::attention, choose(choices[Role::attention]));
  for (const Role role : plan::kAllRoles) {
    if (aside[role].valid()) take(role, aside[role].get());
  }
  const plan::KernelSet companions = plan::companions(wanted, ready.specs);
  for (const Role role : plan::kAllRoles) {
    if (companions[role].warps != 0) take(role, choose({companions[role]}));
  }
  ready.info.compile_ms += around.compile_ms;
  ready.info.load_ms += around.load_ms;
  support::logf(LogLevel::debug, "ready: {} ({})", ready.info.spec, ready.info.origin);
  if (const char* const obstacle = Op::detour(wanted, fixed())) {
    support::logf(LogLevel::debug, "family {} serves what the usual one cannot: {}",
                  plan::to_string(ready.specs[Role::attention].family()), obstacle);
  }
  return ready;
}

template <class Op>
KernelInfo DeviceOperation<Op>::prepare(const AttentionShape& shape) {
  packed_.prepare();
  if (Op::runs_nothing(shape)) return {};
  const driver::ContextScope scope(context_.context());
  plan::Problem wanted = problem(shape);
  KernelInfo info = get(wanted, Op::choose(wanted, fixed()), nullptr, Missing::waits).info;
  if constexpr (Op::kOperation == Operation::forward) {
    if (wanted.paged() && Op::choose(wanted, fixed()).own_parts) {
      wanted.given_schedule = true;  // calls that bring one have another kernel
      get(wanted, Op::choose(wanted, fixed()), nullptr, Missing::waits);
    }
  }
  return info;
}

template <class Op>
std::size_t DeviceOperation<Op>::workspace_size(const AttentionShape& shape) const {
  return most_bytes(problem(shape), [&](const plan::Problem& wanted) {
    return Op::workspace_size(wanted, fixed(), config_.deterministic, context_.info().multiprocessors).bytes;
  });
}

template <class Op>
std::size_t DeviceOperation<Op>::mask_tiles_size(const AttentionShape& shape) const {
  return most_bytes(problem(shape), [&](const plan::Problem& wanted) {
    return Op::workspace_size(wanted, fixed(), config_.deterministic, context_.info().multiprocessors).lists;
  });
}

/// Starts to get what will compete with the attention kernel `first`.
template <class Op>
std::unique_ptr<Prefetch> DeviceOperation<Op>::prefetch(const plan::Problem& wanted, const plan::KernelSpec& first,
                                                        const Supply& from, const TuneOptions& options) const {
  return Tuning::prefetch(Op::candidates(wanted, fixed(), first, options.candidates), *store_, from, options);
}

/// Lets candidates compete with the attention kernel of `known` on scratch memory; the kernels around it are the same.
template <class Op>
TuneReport DeviceOperation<Op>::decide(const plan::Problem& wanted, const Choice& choice, const Ready& known,
                                       Stream stream, const TuneOptions& options) const {
  plan::Problem measured = tune::representative(wanted, Op::kOperation == Operation::backward);
  if (Op::choose(measured, fixed()).slot() != choice.slot()) measured = wanted;
  measured.place.reset();  // wherever its kind of calls stand
  measured.bounded = false;
  const Choice measured_choice = Op::choose(measured, fixed());
  const plan::KernelSpec planned = Op::kernels(wanted, fixed(), config_.deterministic)[Role::attention].front();
  const Supply from = supply(wanted).serialized();
  Contest contest;
  contest.specs = Op::candidates(wanted, fixed(), known.specs[Role::attention], options.candidates);
  std::vector<Ready> made(contest.specs.size(), known);
  for (std::size_t i = 0; i < made.size(); ++i) {
    made[i].specs[Role::attention] = contest.specs[i];
    contest.workspace =
        std::max(contest.workspace,
                 Op::workspace(measured, measured_choice, made[i].specs, context_.info().multiprocessors).bytes());
  }
  contest.make = [&](std::size_t i) {
    if (i == 0) return;
    made[i].kernels[Role::attention] = ready_kernel(contestant(contest.specs[i], *store_, from), context_, nullptr);
  };
  contest.launch = [&](std::size_t i, const TuneTensors& tensors, Stream on, Workspace workspace) {
    launch({measured, measured_choice, &made[i], {context_.info().multiprocessors}}, Op::tensors(tensors), {}, {}, {},
           on, workspace);
  };
  return tuning_.decide(tuning_.key(wanted, planned), measured, contest, stream, options);
}

template <class Op>
TuneReport DeviceOperation<Op>::tune(const AttentionShape& shape, const TuneOptions& options) const {
  const plan::Problem wanted = problem(shape);
  const Choice choice = Op::choose(wanted, fixed());
  const plan::KernelChoices choices = Op::kernels(wanted, fixed(), config_.deterministic);
  const Supply from = supply(wanted).serialized();
  const auto candidates = prefetch(wanted, choices[Role::attention].front(), from, options);
  const Ready ready = make(wanted, choices, from);
  return decide(wanted, choice, ready, nullptr, options);
}

template class DeviceOperation<ForwardOperation>;
template class DeviceOperation<BackwardOperation>;

}  // namespace fa::api
