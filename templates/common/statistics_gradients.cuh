#ifndef FA_TEMPLATES_COMMON_STATISTICS_GRADIENTS_CUH_
#define FA_TEMPLATES_COMMON_STATISTICS_GRADIENTS_CUH_

#include <common/constants.cuh>
#include <common/row_statistics.cuh>
#include <common/switches.cuh>
#include <ptx/language.cuh>
#include <ptx/math.cuh>
#include <ptx/memory.cuh>

namespace fa::kernel {

/// The gradient of a key's column sum, which comes to dP of all rows.
template <class Config, class Params, class Lengths>
FA_DEVICE float column_gradient(const Params& params, const Lengths& lengths, int batch, int head, int key) {
  if (key >= lengths.s_kv) return 0.f;
  const int of_sum = head / params.sum_group;
  if constexpr (kVarlen<Config>) {
    const int64_t row = static_cast<int64_t>(of_sum) * params.sequences.total_kv;
    return ptx::ld_global(params.dcolumn_sums + row + lengths.first_key + key);
  } else {
    const int64_t row = static_cast<int64_t>(batch) * (params.h_q / params.sum_group) + of_sum;
    return ptx::ld_global(params.dcolumn_sums + row * params.s_kv + key);
  }
}

/// A row among those of all batch entries. There are fewer than 2^32 - 1, as the host has checked.
template <bool kVarlen, class Params, class Lengths>
FA_DEVICE uint32_t row_of_all(const Params& params, const Lengths& lengths, int batch, int row) {
  if constexpr (kVarlen) {
    return static_cast<uint32_t>(lengths.first_row + row);
  } else {
    return static_cast<uint32_t>(batch) * static_cast<uint32_t>(params.s_q) + static_cast<uint32_t>(row);
  }
}

/// The greatest logit of a head and its row as one number: in its upper half the logit, ordered as floats are, in the
/// lower half the row's complement. So the greatest number is of the greatest logit, and of equal ones of the first
/// row. 0 is of no row.
FA_DEVICE uint64_t logit_and_row(float logit, uint32_t row) {
  const uint32_t bits = ptx::bits(logit == 0.f ? 0.f : logit);  // zeros of both signs are equal
  const uint32_t ordered = static_cast<int32_t>(bits) < 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | static_cast<uint32_t>(~row);
}
FA_DEVICE uint32_t row_of(uint64_t logit_and_row) {
  return ~static_cast<uint32_t>(logit_and_row);
}

/// What gradients of a row's statistics add to dS of its keys:
///   by the entropy H   -dentropy P (log P + H),   of which the preprocess kernel puts H in delta,
///   by the maximum     dmax_logit at the key that it is of; by that of the head in the one row that has it,
///   by column sums     P (g - rowsum(P o g)) with the keys' g (column_gradient), of which delta has the second.
/// A Config that is given neither has nothing of it.
template <class Config>
struct RowGradients {
  static constexpr int kOfMax = kMaxLogitGradient<Config>;
  float slope = 0.f;         // dentropy, by logarithms in base 2
  float max_gradient = 0.f;  // dmax_logit
  int max_key = -1;

  /// Of a row of the batch entry. `lse_log2`: infinity where no key has a weight in it.
  template <class Params, class Lengths>
  FA_DEVICE void load(const Params& params, const Lengths& lengths, int batch, int head, int row, float lse_log2) {
    if (row >= lengths.s_q || lse_log2 == kInfinity) return;
    const int64_t at = statistic_of_row<kVarlen<Config>>(params, first(params, lengths, batch), head, row);
    if constexpr (kEntropyGradient<Config>) slope = ptx::ld_global(params.dentropy + at) * kLn2;
    if constexpr (kOfMax != 0) {
      if constexpr (kMaxLogitByHead<Config>) {
        const uint32_t row_of_max = row_of(ptx::ld_global(params.max_rows + head));
        if (row_of_max != row_of_all<kVarlen<Config>>(params, lengths, batch, row)) return;
        max_gradient = ptx::ld_global(params.dmax_logit + head);
      } else {
        max_gradient = ptx::ld_global(params.dmax_logit + at);
      }
      max_key = ptx::ld_global(params.max_keys + at);
    }
  }

  /// What comes to dP, by the logarithm of P in base 2. P of 0 has none, and is what this is multiplied with.
  FA_DEVICE float of_probability(float log2_p) const {
    if constexpr (!kEntropyGradient<Config>) return 0.f;
    constexpr float kLowest = -16384.f;
    return -slope * (ptx::max(log2_p, kLowest) + kLog2e);
  }

  /// What comes to the gradient of a key's logit: behind the score function, or with kOfScaled in front of it.
  template <bool kOfScaled>
  FA_DEVICE float of_logit(int key) const {
    if constexpr (kOfMax != (kOfScaled ? 2 : 1)) return 0.f;
    return key == max_key ? max_gradient : 0.f;
  }

 private:
  template <class Params, class Lengths>
  static FA_DEVICE int64_t first(const Params& params, const Lengths& lengths, int batch) {
    if constexpr (kVarlen<Config>) {
      return lengths.first_row;
    } else {
      return static_cast<int64_t>(batch) * params.h_q * params.s_q;
    }
  }
};

}  // namespace fa::kernel

#endif  // FA_TEMPLATES_COMMON_STATISTICS_GRADIENTS_CUH_
