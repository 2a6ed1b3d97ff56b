#ifndef FA_TESTS_DIFFERENTIAL_STORED_HPP_
#define FA_TESTS_DIFFERENTIAL_STORED_HPP_

#include <cstdint>
#include <optional>

#include "differential/configuration.hpp"
#include "differential/random.hpp"
#include "differential/tensor.hpp"

/// K and V of caches of 8 and 4 bits, as docs/quantized_caches.md describes them.
namespace fa::differential {

/// What a tensor is in memory. Both are undefined where it is of the queries' dtype.
struct Stored {
  Tensor codes, scales;
};

/// With rows that are multiples of 16 bytes from each other, where an element has one byte.
Layout with_aligned_rows(const Layout& layout);

/// Stores `values`, [b, h, s, d], and sets them to what is stored. A row of NaN gets scales of NaN. Scales of 8 bits
/// are powers of two, so that all of it is of the dtype of `values`.
Stored store(Tensor& values, const std::optional<DType>& dtype, int group_size, const Layout& layout, Random& random);

}  // namespace fa::differential

#endif  // FA_TESTS_DIFFERENTIAL_STORED_HPP_
