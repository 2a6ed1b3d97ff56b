#include "plan/tensor_map.hpp"

#include <limits>
#include <numeric>

#include <sm90/sm90_forward_params.cuh>

namespace fa::plan {
namespace {

constexpr std::int64_t kStrideLimit = std::int64_t{1} << 40;  // bytes

}  // namespace

bool describable(const TensorView& view, std::int64_t heads_a_step) noexcept {
  const auto element = static_cast<std::int64_t>(size_of(view.dtype));
  if (view.elements() == 0) return true;  // nothing is copied
  for (std::size_t axis = 0; axis < 3; ++axis) {
    const std::int64_t step = axis == 1 ? heads_a_step : 1;
    const std::int64_t stride = view.strides[axis];
    if (view.shape[axis] > 1 && (stride <= 0 || stride >= kStrideLimit / element / step)) return false;
  }
  return true;
}

TensorMapSpec head_map(const TensorView& view, int rows) noexcept {
  TensorMapSpec map = start_map(view);
  add_axis(map, view.shape[2], view.strides[2], static_cast<std::uint32_t>(rows));
  add_axis(map, view.shape[1], view.strides[1], 1);
  add_axis(map, view.shape[0], view.strides[0], 1);
  return map;
}

TensorMapSpec bounded_map(const TensorView& view, int rows) noexcept {
  const auto element = static_cast<std::int64_t>(size_of(view.dtype));
  const std::int64_t unused = static_cast<std::int64_t>(kUnusedStride) / element;
  const std::int64_t stride = view.shape[2] > 1 ? view.strides[2] : unused;
  TensorMapSpec map = start_map(view);
  add_axis(map, kernel::kBoundedRows, stride, static_cast<std::uint32_t>(rows));
  add_axis(map, view.shape[1], view.strides[1], 1);
  add_axis(map, kernel::kBoundedRows + std::int64_t{1}, stride, 1);
  add_axis(map, kernel::kBoundedRows + std::int64_t{1}, kernel::kBoundedStep / element - stride, 1);
  return map;
}

int rows_together(int page_size, int tile_n) noexcept {
  return page_size > 0 ? std::gcd(page_size, tile_n) : tile_n;
}

std::int64_t heads_a_page(const TensorView& pool) noexcept {
  const std::int64_t pages = pool.shape[0];
  const std::int64_t heads = pool.shape[1];
  if (pages <= 1) return heads;
  const std::int64_t step = heads > 1 ? pool.strides[1] : pool.strides[0];
  if (step <= 0 || pool.strides[0] % step != 0) return 0;
  const std::int64_t result = pool.strides[0] / step;
  return result > 0 && result < std::numeric_limits<std::int32_t>::max() / pages - heads ? result : 0;
}

TensorMapSpec page_map(const TensorView& pool, int rows) noexcept {
  TensorView heads = pool;
  heads.shape[1] = (pool.shape[0] - 1) * heads_a_page(pool) + pool.shape[1];
  if (pool.shape[1] <= 1) heads.strides[1] = pool.strides[0];
  return bounded_map(heads, rows);
}

TensorMapSpec wide_page_map(const TensorView& pool, int rows) noexcept {
  constexpr std::int64_t kTogether = 8;
  const std::int64_t slab = kMapRowBytes / static_cast<std::int64_t>(size_of(pool.dtype));
  const std::int64_t stride = pool.strides[2];
  const std::int64_t slabs = pool.shape[3] / slab;
  TensorView first = pool;
  first.shape[3] = slab;
  TensorMapSpec map = start_map(first);
  add_axis(map, kTogether, stride, kTogether);
  add_axis(map, slabs, slab, static_cast<std::uint32_t>(slabs));
  add_axis(map, pool.shape[2] / kTogether, kTogether * stride, static_cast<std::uint32_t>(rows / kTogether));
  add_axis(map, (pool.shape[0] - 1) * heads_a_page(pool) + pool.shape[1], pool.strides[pool.shape[1] > 1 ? 1 : 0], 1);
  return map;
}

bool boundable(const TensorView& view) noexcept {
  return view.shape[2] <= 1 || view.strides[2] < kernel::kBoundedStep / static_cast<std::int64_t>(size_of(view.dtype));
}

}  // namespace fa::plan
