#include "plan/variant_launch.hpp"

#include <algorithm>
#include <bit>

namespace fa::plan {
namespace {

/// Of a packed batch, and over pages, each sequence has its own.
std::int64_t diagonal(const Problem& problem) noexcept {
  if (problem.ragged()) return 0;
  return problem.causal_align == CausalAlign::bottom_right ? problem.s_kv - problem.s_q : 0;
}

/// Distances beyond the longest sequence hide nothing.
std::int64_t within_lengths(const Problem& problem, std::int64_t distance) noexcept {
  return std::min(distance, std::max(problem.s_q, problem.s_kv));
}

void set_strides(const TensorView& view, std::int64_t (&strides)[kernel::kMaxCaptureRank]) noexcept {
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(view.rank); ++axis) {
    strides[axis] = view.shape[axis] == 1 ? 0 : view.strides[axis];
  }
}

}  // namespace

int causal_shift(const Problem& problem) noexcept {
  return static_cast<int>(diagonal(problem) + within_lengths(problem, problem.window_right));
}

kernel::VariantParams variant_params(const Problem& problem, const VariantTensors& tensors, double scale) noexcept {
  kernel::VariantParams params{};
  const std::size_t count = std::min<std::size_t>(tensors.captures.size(), kernel::kMaxCaptures);
  for (std::size_t i = 0; i < count; ++i) {
    const expression::CapturedView& from = tensors.captures[i];
    kernel::CaptureParams& to = params.captures[i];
    to.data = from.view.defined() ? from.view.data : nullptr;
    set_strides(from.view, to.strides);
    if (from.gradient.defined()) {
      to.gradient = static_cast<float*>(from.gradient.data);
      set_strides(from.gradient, to.gradient_strides);
    }
    const bool integer = problem.variants != nullptr && problem.variants->captures[i].dtype == DType::i32;
    to.bits = integer ? static_cast<std::uint32_t>(static_cast<std::int32_t>(from.scalar))
                      : std::bit_cast<std::uint32_t>(static_cast<float>(from.scalar));
  }
  if (tensors.sink.defined()) {
    params.sink = static_cast<const float*>(tensors.sink.data);
    params.stride_sink = tensors.sink.strides[0];
  }
  params.diagonal = static_cast<int>(diagonal(problem));
  params.window_left = static_cast<int>(within_lengths(problem, problem.window_left));
  params.chunk = static_cast<int>(std::max<std::int64_t>(within_lengths(problem, problem.chunk), 1));
  params.scale = static_cast<float>(scale);
  params.inverse_scale = 1.0f / params.scale;
  params.b = static_cast<int>(problem.b);
  return params;
}

}  // namespace fa::plan
