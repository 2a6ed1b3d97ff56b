#include "plan/merge_states.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "plan/early_start.hpp"
#include "support/text.hpp"

namespace fa::plan {
namespace {

constexpr int kMergeWarps = 8;
constexpr int kMostBlocks = 3;  // of a multiprocessor
constexpr int kFewerBlocks = 2;
constexpr std::int64_t kMaxRows = std::numeric_limits<std::int32_t>::max();

/// Rows of a thread block, as templates/common/merge_states.cuh takes them.
std::int64_t rows_of_block(const KernelSpec& kernel) noexcept {
  const int pieces = kernel.d_v * static_cast<int>(size_of(kernel.dtype)) / 16;
  const int lanes = std::min(pieces, 32);
  const int rows = pieces > lanes ? 1 : 2;
  return std::int64_t{rows} * kernel.warps * (32 / lanes);
}

/// The axes b, h_q and s_q as the result has them in memory, the outermost first.
std::array<std::size_t, 3> axes_of(const TensorView& merged) noexcept {
  std::array<std::size_t, 3> axes{0, 1, 2};
  const auto rank = [&](std::size_t axis) {
    return merged.shape[axis] > 1 ? std::abs(merged.strides[axis]) : std::numeric_limits<std::int64_t>::max();
  };
  std::ranges::stable_sort(axes, [&](std::size_t a, std::size_t b) { return rank(a) > rank(b); });
  return axes;
}

}  // namespace

Alternatives merge_specs(const MergeProblem& problem) {
  check_dtype(problem.arch, problem.dtype);
  KernelSpec spec;
  spec.own = MergeStates{problem.states, problem.float_result, problem.sum};
  spec.arch = problem.arch;
  spec.dtype = problem.dtype;
  spec.d_v = problem.d_v;
  spec.aligned = problem.aligned;
  spec.warps = kMergeWarps;
  spec.min_blocks = kMostBlocks;
  Alternatives specs{spec};
  spec.min_blocks = kFewerBlocks;
  specs.push_back(spec);
  return specs;
}

void plan_call(const MergeProblem&, const KernelSpec& kernel, const MergeTensors& tensors, CallPlan& call) {
  kernel::MergeStatesParams& params = call.merge_params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);
  const TensorView& merged = tensors.merged.o;
  // Three sizes below 2^31: the product of two does not overflow.
  const std::int64_t outer = merged.shape[0] * merged.shape[1];
  if (outer > kMaxRows / merged.shape[2]) {
    support::throw_invalid("b * h_q * s_q", static_cast<double>(outer) * static_cast<double>(merged.shape[2]),
                           "fewer than 2^31 rows");
  }
  const std::array<std::size_t, 3> axes = axes_of(merged);
  const auto set_strides = [&axes](const TensorView& view, std::int64_t(&strides)[3]) {
    for (std::size_t i = 0; i < 3; ++i) strides[i] = view.strides[axes[i]];
  };
  for (std::size_t i = 0; i < 3; ++i) {
    params.length[i] = static_cast<std::uint32_t>(merged.shape[axes[i]]);
    if (axes[i] == 1) params.head_axis = static_cast<int>(i);
  }
  params.rows = static_cast<std::uint32_t>(outer * merged.shape[2]);
  const std::span<const AttentionState> states = tensors.states;
  for (std::size_t i = 0; i < states.size(); ++i) {
    params.o[i] = states[i].o.data;
    params.lse[i] = static_cast<const float*>(states[i].lse.data);
    set_strides(states[i].o, params.stride_o[i]);
    if (states[i].lse.defined()) set_strides(states[i].lse, params.stride_lse[i]);
    if (states[i].o.dtype == DType::f32) params.floats |= 1U << i;
  }
  params.merged_o = merged.data;
  set_strides(merged, params.stride_merged_o);
  if (tensors.merged.lse.defined()) {
    params.merged_lse = static_cast<float*>(tensors.merged.lse.data);
    set_strides(tensors.merged.lse, params.stride_merged_lse);
  }
  if (tensors.sink.defined()) {
    params.sink = static_cast<const float*>(tensors.sink.data);
    params.stride_sink = tensors.sink.strides[0];
  }
  params.listed = tensors.stacked > 0 ? 1 : static_cast<int>(states.size());
  params.states = tensors.stacked > 0 ? static_cast<int>(tensors.stacked) : params.listed;
  params.stride_o_state = tensors.stacked > 0 ? tensors.stride_o : 0;
  params.stride_lse_state = tensors.stacked > 0 ? tensors.stride_lse : 0;
  const std::int64_t rows = rows_of_block(kernel);
  call.add(Role::merge, (params.rows + rows - 1) / rows, &params, may_start_early(kernel));
}

}  // namespace fa::plan
