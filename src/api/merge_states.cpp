#include "api/merge_states.hpp"

#include <fmt/format.h>

#include <limits>
#include <string>
#include <utility>

#include "api/build.hpp"
#include "api/inspect.hpp"
#include "api/problem.hpp"
#include "api/validate.hpp"
#include "api/variants.hpp"
#include "api/views.hpp"
#include "reference/merge_states.hpp"
#include "support/log.hpp"
#include "support/text.hpp"

namespace fa::api {
namespace {

using support::throw_invalid;

constexpr std::size_t kMax = MergeInputs::kMaxListed;
constexpr std::int64_t kMaxStacked = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kMaxReach = std::int64_t{1} << 60;  // bytes from the first state to the last

/// For messages alone: calls that are served build no text.
struct StateName {
  const char* o;
  const char* lse;
};
constexpr std::array<StateName, kMax> kNames{{{"states[0].o", "states[0].lse"},
                                              {"states[1].o", "states[1].lse"},
                                              {"states[2].o", "states[2].lse"},
                                              {"states[3].o", "states[3].lse"},
                                              {"states[4].o", "states[4].lse"},
                                              {"states[5].o", "states[5].lse"},
                                              {"states[6].o", "states[6].lse"},
                                              {"states[7].o", "states[7].lse"},
                                              {"states[8].o", "states[8].lse"},
                                              {"states[9].o", "states[9].lse"},
                                              {"states[10].o", "states[10].lse"},
                                              {"states[11].o", "states[11].lse"},
                                              {"states[12].o", "states[12].lse"},
                                              {"states[13].o", "states[13].lse"},
                                              {"states[14].o", "states[14].lse"},
                                              {"states[15].o", "states[15].lse"}}};

void check_count(const MergeInputs& inputs) {
  const std::size_t listed = inputs.states.size();
  if (inputs.stacked < 0 || inputs.stacked > kMaxStacked) {
    throw_invalid("stacked", inputs.stacked, fmt::format("0 to {}", kMaxStacked));
  }
  if (inputs.stacked > 0 && listed != 1) {
    throw_invalid("states", fmt::format("{} of them", listed), "the first one, of those that are stacked");
  }
  if (listed < 1 || listed > kMax) {
    throw_invalid("states", fmt::format("{} of them", listed),
                  fmt::format("1 to {}; more can be stacked, as slices of one tensor", kMax));
  }
  if (inputs.stacked == 0 && (inputs.stride_o != 0 || inputs.stride_lse != 0)) {
    throw_invalid(inputs.stride_o != 0 ? "stride_o" : "stride_lse",
                  inputs.stride_o != 0 ? inputs.stride_o : inputs.stride_lse, "0 without `stacked`");
  }
}

/// The states of a stack lie within reach of the first.
void check_distance(const char* name, std::int64_t stride, const TensorView& view, std::int64_t stacked) {
  std::int64_t reach = 0;
  const bool far = __builtin_mul_overflow(stride, stacked, &reach) ||
                   __builtin_mul_overflow(reach, static_cast<std::int64_t>(size_of(view.dtype)), &reach) ||
                   reach > kMaxReach || reach < -kMaxReach;
  if (far) throw_invalid(name, stride, "offsets below 2^60 bytes");
}

bool is_same(const TensorView& a, const TensorView& b) noexcept {
  if (a.data != b.data || a.dtype != b.dtype || a.shape != b.shape) return false;
  for (std::size_t axis = 0; axis < a.shape.size(); ++axis) {
    if (a.shape[axis] > 1 && a.strides[axis] != b.strides[axis]) return false;
  }
  return true;
}

TensorView moved(TensorView view, std::int64_t elements) noexcept {
  view.data =
      reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(view.data) +
                              static_cast<std::uintptr_t>(elements * static_cast<std::int64_t>(size_of(view.dtype))));
  return view;
}

void refuse_shared(const char* written, const std::string& other) {
  throw_invalid(written, fmt::format("memory shared with {}", other),
                "the view of one of the states, or memory that no other tensor has");
}

/// What is written shares no memory with what is read, unless it is all of it.
void check_disjoint(const MergeCall& call) {
  const TensorView& o = call.merged.o;
  const TensorView& lse = call.merged.lse;
  const std::int64_t count = call.stacked > 0 ? call.stacked : static_cast<std::int64_t>(call.listed);
  for (std::int64_t i = 0; i < count; ++i) {
    const AttentionState& state = call.states[call.stacked > 0 ? 0 : static_cast<std::size_t>(i)];
    const TensorView state_o = call.stacked > 0 ? moved(state.o, i * call.stride_o) : state.o;
    const TensorView state_lse = call.stacked > 0 ? moved(state.lse, i * call.stride_lse) : state.lse;
    if (!is_same(o, state_o) && overlap(o, state_o)) refuse_shared("o", fmt::format("states[{}].o", i));
    if (overlap(o, state_lse)) refuse_shared("o", fmt::format("states[{}].lse", i));
    if (!is_same(lse, state_lse) && overlap(lse, state_lse)) refuse_shared("lse", fmt::format("states[{}].lse", i));
    if (overlap(lse, state_o)) refuse_shared("lse", fmt::format("states[{}].o", i));
  }
  if (overlap(o, lse)) refuse_shared("lse", "o");
  if (overlap(o, call.sink)) refuse_shared("o", "sink");
  if (overlap(lse, call.sink)) refuse_shared("lse", "sink");
}

/// Sums have neither logarithms nor a sink.
void check_sum(const MergeInputs& inputs, const ForwardOutputs& outputs) {
  for (std::size_t i = 0; i < inputs.states.size(); ++i) {
    if (inputs.states[i].lse.defined()) throw_invalid(kNames[i].lse, "given", "nothing with `sum`");
  }
  if (outputs.lse.defined()) throw_invalid("lse", "given", "nothing with `sum`");
  if (inputs.sink.defined()) throw_invalid("sink", "given", "nothing with `sum`");
  if (inputs.stride_lse != 0) throw_invalid("stride_lse", inputs.stride_lse, "0 with `sum`");
}

plan::MergeProblem problem_of(const AttentionConfig& config) noexcept {
  plan::MergeProblem problem;
  problem.dtype = config.dtype;
  problem.d_v = d_v_of(config);
  return problem;
}

/// What o of states is made of (plan::MergeStates::states).
int kind_of(const AttentionConfig& config, bool has_own, bool has_floats) noexcept {
  if (config.dtype == DType::f32 || !has_floats) return 0;
  return has_own ? 2 : 1;
}

plan::MergeProblem problem_of(const AttentionConfig& config, const MergeCall& call) noexcept {
  plan::MergeProblem problem = problem_of(config);
  bool has_own = false, has_floats = false;
  problem.aligned = rows_aligned(call.merged.o);
  for (const AttentionState& state : call.given()) {
    (state.o.dtype == config.dtype ? has_own : has_floats) = true;
    problem.aligned = problem.aligned && rows_aligned(state.o);
  }
  if (call.stacked > 1) {
    const auto elements = static_cast<std::int64_t>(16 / size_of(call.states[0].o.dtype));
    problem.aligned = problem.aligned && call.stride_o % elements == 0;
  }
  problem.states = kind_of(config, has_own, has_floats);
  problem.float_result = call.merged.o.dtype != config.dtype;
  problem.sum = call.sum;
  return problem;
}

/// Never 0, and another for every kernel of a configuration.
std::uint64_t code_of(const plan::MergeProblem& problem) noexcept {
  auto code = static_cast<std::uint64_t>(problem.states);
  code = code << 1 | (problem.float_result ? 1 : 0);
  code = code << 1 | (problem.aligned ? 1 : 0);
  code = code << 1 | (problem.sum ? 1 : 0);
  return code << 1 | 1;
}

DType checked_dtype(const AttentionConfig& config, const std::optional<DType>& given, const char* name) {
  const DType dtype = given.value_or(config.dtype);
  const bool fits = dtype == config.dtype || (dtype == DType::f32 && config.dtype != DType::f64);
  if (!fits) throw_invalid(name, to_string(dtype), state_dtypes(config));
  return dtype;
}

}  // namespace

MergeCall check_merge(const AttentionConfig& config, const MergeInputs& inputs, const ForwardOutputs& outputs) {
  check_not_fp8(config, "merge");
  check_count(inputs);
  check_without_statistics(outputs.statistics, "nothing of merge");
  check_without_dump(outputs.dump, "nothing of merge");
  if (inputs.sum) check_sum(inputs, outputs);
  MergeCall call;
  call.sum = inputs.sum;
  call.merged = check_state(config, {"o", "lse"}, {outputs.o, outputs.lse}, nullptr, false);
  check_writable("o", call.merged.o);
  if (call.merged.lse.defined()) check_writable("lse", call.merged.lse);
  call.listed = inputs.states.size();
  for (std::size_t i = 0; i < call.listed; ++i) {
    call.states[i] = check_state(config, {kNames[i].o, kNames[i].lse}, inputs.states[i], &call.merged.o, !call.sum);
  }
  call.stacked = inputs.stacked;
  if (call.stacked > 0) {
    check_distance("stride_o", inputs.stride_o, call.states[0].o, call.stacked);
    check_distance("stride_lse", inputs.stride_lse, call.states[0].lse, call.stacked);
    call.stride_o = inputs.stride_o;
    call.stride_lse = inputs.stride_lse;
  }
  if (inputs.sink.defined()) call.sink = checked_of_heads("sink", config, inputs.sink, call.merged.o.shape[1]);
  check_disjoint(call);
  call.problem = problem_of(config, call);
  call.empty = call.merged.o.elements() == 0;
  return call;
}

plan::MergeProblem merge_problem(const AttentionConfig& config, const MergeShape& shape) {
  check_not_fp8(config, "merge");
  const DType states = checked_dtype(config, shape.states, "states");
  const DType result = checked_dtype(config, shape.result, "result");
  if (shape.mixed && config.dtype == DType::f64) throw_invalid("mixed", "true", "false with f64");
  plan::MergeProblem problem = problem_of(config);
  problem.states = kind_of(config, shape.mixed || states == config.dtype, shape.mixed || states != config.dtype);
  problem.float_result = result != config.dtype;
  problem.aligned = shape.aligned;
  problem.sum = shape.sum;
  return problem;
}

void merge_on_host(const MergeCall& call) {
  if (call.empty) return;
  reference::merge_states(
      {call.given(), call.stacked, call.stride_o, call.stride_lse, call.merged, call.sink, call.sum});
}

KernelInfo host_merge_info(const AttentionConfig& config) {
  KernelInfo info;
  info.name = "fa_reference_merge_states";
  info.spec = fmt::format("reference_merge_states dtype={}", to_string(config.dtype));
  info.origin = "host";
  return info;
}

DeviceMerge::DeviceMerge(const AttentionConfig& config, const driver::ContextRef& context,
                         std::shared_ptr<cache::Store> store)
    : config_(config), context_(context), store_(std::move(store)) {}

const Ready& DeviceMerge::get(plan::MergeProblem problem) {
  const std::uint64_t code = code_of(problem);
  if (const Ready* const ready = ready_.find(code)) return *ready;
  problem.arch = context_.info().arch;
  Supply supply(config_);
  supply.accept.driver = driver::api().version;
  const driver::ContextScope scope(context_.context());
  const plan::Alternatives specs = plan::merge_specs(problem);
  supply.command = [&] { return remedy(specs.front(), config_); };
  const ChosenKernel chosen = choose_kernel(specs, *store_, supply, config_.deterministic);
  Ready ready;
  ready.specs[plan::Role::merge] = chosen.spec;
  ready.kernels[plan::Role::merge] = {load_kernel(chosen, context_, &ready.info),
                                      static_cast<unsigned>(chosen.spec.threads()), 0};
  ready.info.chosen_by = "planner";
  support::logf(LogLevel::debug, "ready: {} ({})", ready.info.spec, ready.info.origin);
  return ready_.put_first(code, std::move(ready));
}

void DeviceMerge::run(const MergeCall& call, Stream stream) {
  if (call.empty) return;
  const driver::ContextScope scope(context_.context());
  const Ready& ready = get(call.problem);
  plan::CallPlan plan;
  plan_call(call.problem, ready.specs[plan::Role::merge],
            {call.given(), call.stacked, call.stride_o, call.stride_lse, call.merged, call.sink}, plan);
  execute(plan, {}, ready, {}, stream, {});
}

}  // namespace fa::api
