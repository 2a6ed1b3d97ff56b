#ifndef FA_SRC_REFERENCE_ROWS_HPP_
#define FA_SRC_REFERENCE_ROWS_HPP_

#include <algorithm>
#include <cstdint>

namespace fa::reference {

inline constexpr std::int64_t kLanes = 16;  ///< columns of a block that is kept in registers

constexpr std::int64_t round_up(std::int64_t value) {
  return (value + kLanes - 1) / kLanes * kLanes;
}

/// y[n] += sum over r of weights[r] * x[r, n], in the order of r, for x [rows, columns]; columns is a multiple of
/// kLanes. A block of y stays in registers while the rows go by, and its loops are of a fixed length, so that they
/// vectorise.
template <class Acc>
void add_weighted_rows(const Acc* weights, std::int64_t rows, const Acc* x, std::int64_t columns, Acc* y) {
  for (std::int64_t n0 = 0; n0 < columns; n0 += kLanes) {
    Acc block[kLanes];
    std::copy_n(y + n0, kLanes, block);
    for (std::int64_t r = 0; r < rows; ++r) {
      const Acc weight = weights[r];
      const Acc* row = x + r * columns + n0;
      for (std::int64_t n = 0; n < kLanes; ++n) block[n] += weight * row[n];
    }
    std::copy_n(block, kLanes, y + n0);
  }
}

}  // namespace fa::reference

#endif  // FA_SRC_REFERENCE_ROWS_HPP_
