#ifndef FA_TEMPLATES_COMMON_LOG_SUM_CUH_
#define FA_TEMPLATES_COMMON_LOG_SUM_CUH_

#include <common/constants.cuh>
#include <common/forward_params.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>
#include <ptx/thread.cuh>

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

  FA_DEVICE float value() const { return high + low; }
};

/// That of a split, high + low + ln(sum), for what joins splits. What the sum is relative to, high + low, is the
/// product of a score and a factor to the last bit, and stays apart from it: beside a large maximum ln(sum) would be
/// lost.
struct SplitSum {
  float high, low;
  float sum;  // 0 of a row without keys; NaN where a score is

  FA_DEVICE static SplitSum of(float x, float factor, float sum) {
    const float high = ptx::multiply(x, factor);
    return {high, ptx::fma(x, factor, -high), sum};
  }

  FA_DEVICE static SplitSum of_no_keys() { return {-kInfinity, 0.f, 0.f}; }

  /// In the place of a row's last split: the row is stored, and needs no merge.
  FA_DEVICE static SplitSum of_whole() { return {0.f, 0.f, -1.f}; }
  FA_DEVICE static bool is_of_whole(const float* sums, int64_t row) {
    return ptx::ld_global(sums + kSplitSumFloats * row + 2) < 0.f;
  }

  /// One term, whose logarithm is x.
  FA_DEVICE static SplitSum of_term(float x) { return {x, 0.f, 1.f}; }

  /// All terms get a factor, of logarithm x.
  FA_DEVICE void add(float x) {
    if (high == -kInfinity) return;
    const float whole = high + x, part = whole - high;
    low += (high - (whole - part)) + (x - part);
    high = whole;
  }

  /// In [rows, kSplitSumFloats].
  FA_DEVICE static SplitSum load(const float* sums, int64_t row) {
    const float* const at = sums + kSplitSumFloats * row;
    return {ptx::ld_global(at), ptx::ld_global(at + 1), ptx::ld_global(at + 2)};
  }
  FA_DEVICE void store(float* sums, int64_t row) const {
    float* const at = sums + kSplitSumFloats * row;
    ptx::st_global(at, high);
    ptx::st_global(at + 1, low);
    ptx::st_global(at + 2, sum);
  }

  /// What another lane of the warp has.
  FA_DEVICE SplitSum of_lane(int lane) const {
    const auto held = [&](float x) { return ptx::from_bits(ptx::shfl(ptx::bits(x), lane)); };
    return {held(high), held(low), held(sum)};
  }

  /// Whether the sum is relative to more than another.
  FA_DEVICE bool is_above(const SplitSum& other) const {
    return high > other.high || (high == other.high && low > other.low);
  }

  /// What a sum relative to this is multiplied with, to be relative to what another is.
  FA_DEVICE float over(const SplitSum& other) const {
    return ptx::ex2(((high - other.high) + (low - other.low)) * kLog2e);
  }

  FA_DEVICE float value() const { return sum == 0.f ? -kInfinity : high + ptx::fma(kLn2, ptx::lg2(sum), low); }
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_LOG_SUM_CUH_
