#include "plan/variant_launch.hpp"

#include <algorithm>
#include <bit>
#include <iterator>

#include "support/shard_place.hpp"

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

std::int64_t floor_div(std::int64_t a, std::int64_t b) noexcept {
  return a / b - (a % b != 0 && a < 0 ? 1 : 0);
}

/// Masks in closed form of a call with a place, as they are of its own rows and keys: steps are equal then.
struct PlacedMasks {
  std::int64_t causal_shift = 0;
  std::int64_t diagonal = 0;
  std::int64_t window_left = 0;
  std::int64_t chunk = 1;
  std::int64_t chunk_keys = 0;  ///< of the first key's chunk that are before it
};

PlacedMasks placed_masks(const Problem& problem, const ShardPlace& place) noexcept {
  const std::int64_t longest = std::max(place.whole_s_q, place.whole_s_kv);
  const bool ends_meet = problem.causal_align == CausalAlign::bottom_right;
  const std::int64_t first = place.q + (ends_meet ? place.whole_s_kv - place.whole_s_q : 0);  // where row 0 stands
  const std::int64_t step = place.kv_step;
  // What is hidden from all rows, or from none, is so within the call's own lengths.
  const auto within_call = [&](std::int64_t shift) { return std::clamp(shift, -problem.s_q, problem.s_kv); };
  PlacedMasks masks;
  masks.causal_shift = within_call(floor_div(first - place.kv + std::min(problem.window_right, longest), step));
  const std::int64_t begin = within_call(-floor_div(std::min(problem.window_left, longest) - (first - place.kv), step));
  masks.diagonal = within_call(floor_div(first - place.kv, step));
  if (problem.chunk > 0) {
    masks.chunk = std::max<std::int64_t>(std::min(problem.chunk, longest + step - 1) / step, 1);
    const std::int64_t keys = place.kv / step;
    masks.chunk_keys = keys % masks.chunk;
    masks.diagonal = std::clamp(floor_div(first, step) - keys + masks.chunk_keys, -problem.s_q - masks.chunk,
                                problem.s_kv + masks.chunk + masks.chunk_keys);
  }
  masks.window_left = masks.diagonal - begin;
  return masks;
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
    const PlacedMasks masks = placed_masks(problem, *problem.place);
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

kernel::DropoutParams placed_dropout(const Problem& problem, kernel::DropoutParams params) noexcept {
  if (problem.variants == nullptr || !problem.variants->placed) return params;
  const ShardPlace place = place_of(problem);
  const auto first = static_cast<std::uint64_t>(place.b * place.whole_h_q + place.h_q);
  params.heads = static_cast<int>(place.whole_h_q);
  params.offset = params.state != nullptr ? first : params.offset + first;
  return params;
}

}  // namespace fa::plan
