#ifndef FA_SRC_PLAN_TENSOR_MAP_HPP_
#define FA_SRC_PLAN_TENSOR_MAP_HPP_

#include <cstdint>

#include <fa/tensor.hpp>

#include "support/tensor_map.hpp"

namespace fa::plan {

using support::TensorMapSpec;

/// Bytes of a box's rows, which the swizzle spans.
inline constexpr std::uint32_t kMapRowBytes = 128;

/// A map of no axes but the innermost one, in boxes of kMapRowBytes.
TensorMapSpec start_map(const TensorView& view) noexcept;

/// Appends an axis of `stride` elements.
void add_axis(TensorMapSpec& map, std::int64_t size, std::int64_t stride, std::uint32_t box) noexcept;

/// [d, s, h, b] of a view of rank 4, in boxes of `rows` rows of one head.
TensorMapSpec head_map(const TensorView& view, int rows) noexcept;

/// The same of a packed batch's view, whose maps end with the sequence that is copied (Sm90ForwardParamsWith).
TensorMapSpec bounded_map(const TensorView& view, int rows) noexcept;

/// The same of a pool [pages, h, page, d], whose axis of heads goes on over the pages.
TensorMapSpec page_map(const TensorView& pool, int rows) noexcept;

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
