#ifndef FA_TEMPLATES_COMMON_LOG_SUM_CUH_
#define FA_TEMPLATES_COMMON_LOG_SUM_CUH_

#include <common/constants.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>

namespace fa::kernel {

/// A greatest score times scale_log2 beyond this is no reference for P: rounding it to float would cost P a factor of
/// more than two.
inline constexpr float kLargestOffset = 16777216.f;  // 2^24

/// A natural log-sum-exp in two parts: near a large maximum one float would lose what the sum adds to it.
struct LogSum {
  float high, low;

  /// ln(sum) beside factor * x.
  FA_DEVICE static LogSum of(float x, float factor, float sum) {
    const float high = ptx::multiply(x, factor);
    return {high, ptx::fma(x, factor, -high) + kLn2 * ptx::lg2(sum)};
  }

  FA_DEVICE static LogSum of_no_keys() { return {-kInfinity, 0.f}; }

  /// In [rows, 2].
  FA_DEVICE static LogSum load(const float* sums, int64_t row) {
    return {ptx::ld_global(sums + 2 * row), ptx::ld_global(sums + 2 * row + 1)};
  }
  FA_DEVICE void store(float* sums, int64_t row) const {
    ptx::st_global(sums + 2 * row, high);
    ptx::st_global(sums + 2 * row + 1, low);
  }

  /// exp of what this is more than another.
  FA_DEVICE float over(const LogSum& other) const {
    return ptx::ex2(((high - other.high) + (low - other.low)) * kLog2e);
  }

  FA_DEVICE float value() const { return high + low; }
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_LOG_SUM_CUH_
