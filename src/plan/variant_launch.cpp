#include "plan/variant_launch.hpp"

#include <algorithm>
#include <bit>
#include <iterator>
#include <limits>

#include "support/shard_place.hpp"

namespace fa::plan {
namespace {

constexpr std::int32_t kDropoutGranule = 32;  // rows, and keys, that a call of the generator is shared by

/// Of a packed batch, and over pages, each sequence has its own.
std::int64_t diagonal(const Problem& problem) noexcept {
  if (problem.ragged()) return 0;
  return problem.causal_align == CausalAlign::bottom_right ? problem.s_kv - problem.s_q : 0;
}

/// Distances beyond the longest sequence hide nothing.
std::int64_t within_lengths(const Problem& problem, std::int64_t distance) noexcept {
  return std::min(distance, std::max(problem.s_q, problem.s_kv));
}

kernel::PlacedMasks placed_masks(const Problem& problem, const ShardPlace& place) noexcept {
  return kernel::placed_masks(place_params(problem, place), {place.b, place.h_q, place.q, place.kv});
}

/// That of a call, with the sizes of the whole.
ShardPlace place_of(const Problem& problem) noexcept {
  if (problem.place) return *problem.place;
  return support::resolved({}, {problem.b, problem.h_q, problem.s_q, problem.s_kv});
}

void set_place(const ShardPlace& place, kernel::VariantParams& params) noexcept {
  // In the order of kernel::PlaceEntry.
  const std::int64_t entries[] = {place.b,      place.h_q,     place.q,         place.kv,
                                  place.q_step, place.kv_step, place.whole_s_q, place.whole_s_kv};
  static_assert(std::size(entries) == kernel::kMaxCaptures);
  for (std::size_t i = 0; i < std::size(entries); ++i) params.captures[i].place = static_cast<std::int32_t>(entries[i]);
}

void set_strides(const TensorView& view, std::int64_t (&strides)[kernel::kMaxCaptureRank]) noexcept {
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(view.rank); ++axis) {
    strides[axis] = view.shape[axis] == 1 ? 0 : view.strides[axis];
  }
}

}  // namespace

int causal_shift(const Problem& problem) noexcept {
  if (problem.place) return static_cast<int>(placed_masks(problem, *problem.place).causal_shift);
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
  if (problem.place) {
    const kernel::PlacedMasks masks = placed_masks(problem, *problem.place);
    params.diagonal = static_cast<int>(masks.diagonal);
    params.window_left = static_cast<int>(masks.window_left);
    params.chunk = static_cast<int>(masks.chunk);
    params.chunk_keys = static_cast<int>(masks.chunk_keys);
  }
  if (problem.variants->placed) {
    const ShardPlace place = place_of(problem);
    set_place(place, params);
    params.b += static_cast<int>(place.b);  // captures are the whole's
  }
  return params;
}

kernel::PlaceParams place_params(const Problem& problem, const ShardPlace& place) noexcept {
  const auto number = [](std::int64_t value) {
    return static_cast<std::int32_t>(std::min<std::int64_t>(value, std::numeric_limits<std::int32_t>::max()));
  };
  const std::int64_t longest = std::max(place.whole_s_q, place.whole_s_kv);
  kernel::PlaceParams params{};
  params.begin = place.begin;
  params.b = number(problem.b);
  params.h_q = number(problem.h_q);
  params.s_q = number(problem.s_q);
  params.s_kv = number(problem.s_kv);
  params.group = number(problem.h_kv == 0 ? 1 : std::max<std::int64_t>(problem.h_q / problem.h_kv, 1));
  params.whole_b = number(place.whole_b);
  params.whole_h_q = number(place.whole_h_q);
  params.whole_s_q = number(place.whole_s_q);
  params.whole_s_kv = number(place.whole_s_kv);
  params.q_step = number(place.q_step);
  params.kv_step = number(place.kv_step);
  params.window_left = number(std::min(problem.window_left, longest));
  params.window_right = number(std::min(problem.window_right, longest));
  params.chunk = number(problem.chunk);
  params.bottom_right = problem.causal_align == CausalAlign::bottom_right ? 1 : 0;
  params.rows_and_keys_are = problem.dropout ? kDropoutGranule : 1;
  return params;
}

kernel::DropoutParams placed_dropout(const Problem& problem, kernel::DropoutParams params) noexcept {
  if (problem.variants == nullptr || !problem.variants->placed) return params;
  const ShardPlace place = place_of(problem);
  const auto first = static_cast<std::uint64_t>(place.b * place.whole_h_q + place.h_q);
  params.heads = static_cast<int>(place.whole_h_q);
  params.offset = params.state != nullptr ? first : params.offset + first;
  return params;
}

}  // namespace fa::plan
