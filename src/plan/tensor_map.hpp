#ifndef FA_SRC_PLAN_TENSOR_MAP_HPP_
#define FA_SRC_PLAN_TENSOR_MAP_HPP_

#include <cstddef>
#include <cstdint>

#include <fa/tensor.hpp>

#include "support/tensor_map.hpp"

namespace fa::plan {

using support::TensorMapSpec;

/// Bytes of a box's rows, which the swizzle spans.
inline constexpr std::uint32_t kMapRowBytes = 128;

inline constexpr std::uint64_t kUnusedStride = 16;  ///< of an axis of length 1: any that is legal

/// Appends an axis of `stride` elements.
inline void add_axis(TensorMapSpec& map, std::int64_t size, std::int64_t stride, std::uint32_t box) noexcept {
  const auto rank = static_cast<std::size_t>(map.rank++);
  map.sizes[rank] = static_cast<std::uint64_t>(size);
  map.box[rank] = box;
  if (rank == 0) return;
  map.strides[rank - 1] = size > 1 ? static_cast<std::uint64_t>(stride) * size_of(map.dtype) : kUnusedStride;
}

/// A map of no axes but the innermost one, in boxes of kMapRowBytes.
inline TensorMapSpec start_map(const TensorView& view) noexcept {
  TensorMapSpec map;
  map.base = view.data;
  map.dtype = view.dtype;
  add_axis(map, view.shape[3], 1, kMapRowBytes / static_cast<std::uint32_t>(size_of(view.dtype)));
  return map;
}

/// [d, s, h, b] of a view of rank 4, in boxes of `rows` rows of one head.
TensorMapSpec head_map(const TensorView& view, int rows) noexcept;

/// The same of a packed batch's view, whose maps end with the sequence that is copied (Sm90ForwardParamsWith).
TensorMapSpec bounded_map(const TensorView& view, int rows) noexcept;

/// The same of a pool [pages, h, page, d], whose axis of heads goes on over the pages.
TensorMapSpec page_map(const TensorView& pool, int rows) noexcept;

/// [64, 8, d / 64, page / 8, h] of the same, d a multiple of 64, in boxes of all columns of `rows` rows: 8 of them lie
/// slab by slab.
TensorMapSpec wide_page_map(const TensorView& pool, int rows) noexcept;

/// Rows of a KV tile of a cache that are copied together: of one page.
int rows_together(int page_size, int tile_n) noexcept;

/// From page to page, in steps of that axis; 0 where the distance is no whole number of heads or leaves 32 bits.
std::int64_t heads_a_page(const TensorView& pool) noexcept;

/// Whether a map can describe a view of rank 4 in steps of `heads_a_step` heads: axes longer than 1 have strides above
/// 0 and below 2^40 bytes, unless there are no elements. That rows start at multiples of 16 bytes is Problem::aligned.
bool describable(const TensorView& view, std::int64_t heads_a_step) noexcept;

/// Whether the rows of such a view are near enough to each other for bounded_map.
bool boundable(const TensorView& view) noexcept;

}  // namespace fa::plan

#endif  // FA_SRC_PLAN_TENSOR_MAP_HPP_
