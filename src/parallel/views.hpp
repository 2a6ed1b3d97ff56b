#ifndef FA_SRC_PARALLEL_VIEWS_HPP_
#define FA_SRC_PARALLEL_VIEWS_HPP_

#include <array>
#include <cstdint>

#include <fa/tensor.hpp>

namespace fa::parallel {

/// Sizes of a shard of q, k or v; of packed batches b is 1.
struct ShardSize {
  std::int64_t b = 0, heads = 0, rows = 0;
};

/// Throws fa::Error(invalid_argument) for other ranks than 4 and 3, packed 3.
ShardSize shard_size(const char* name, const TensorView& given, bool packed);

/// [b, h, s, d], [b, s, d] or packed [total, h, d] as the view [b, h, s, d] of this shape. Throws
/// fa::Error(invalid_argument).
TensorView shard_view(const char* name, const TensorView& given, const std::array<std::int64_t, 4>& shape, DType dtype,
                      bool packed);

/// [b, h, s], [b, s] or packed [h, total] as the view [b, h, s, 1].
TensorView statistic_view(const char* name, const TensorView& given, const std::array<std::int64_t, 4>& shape,
                          DType dtype, bool packed);

/// Whether heads, b, rows and columns lie in this order without gaps.
bool is_dense(const TensorView& view);
/// Whether rows, heads and columns do, with a b of 1.
bool is_dense_by_rows(const TensorView& view);

}  // namespace fa::parallel

#endif  // FA_SRC_PARALLEL_VIEWS_HPP_
