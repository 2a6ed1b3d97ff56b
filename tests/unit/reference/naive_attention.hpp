#ifndef FA_TESTS_UNIT_REFERENCE_NAIVE_ATTENTION_HPP_
#define FA_TESTS_UNIT_REFERENCE_NAIVE_ATTENTION_HPP_

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "support/attention_case.hpp"

/// Attention straight from its definition, in double, on whole rows of scores: shares no code with the reference.
namespace fa::test {

struct NaiveResult {
  std::vector<double> o;    // [b, h_q, s_q, d_v], row-major
  std::vector<double> lse;  // [b, h_q, s_q], row-major
};

struct NaiveGradients {
  std::vector<double> dq;  // [b, h_q, s_q, d_qk], row-major
  std::vector<double> dk;  // [b, h_kv, s_kv, d_qk], row-major
  std::vector<double> dv;  // [b, h_kv, s_kv, d_v], row-major
};

/// Reads one element, whatever its dtype.
inline double naive_element(const TensorView& t, std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t d) {
  const std::int64_t at = b * t.strides[0] + h * t.strides[1] + s * t.strides[2] + d * t.strides[3];
  if (t.dtype == DType::f64) return static_cast<const double*>(t.data)[at];
  if (t.dtype == DType::f32) return static_cast<const float*>(t.data)[at];
  const int bits = static_cast<const std::uint16_t*>(t.data)[at];
  const int mantissa_bits = t.dtype == DType::f16 ? 10 : 7;
  const int bias = t.dtype == DType::f16 ? 15 : 127;
  const int exponent = (bits & 0x7fff) >> mantissa_bits;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  double value = 0;
  if (exponent == 2 * bias + 1) {
    value = mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  } else {
    value = std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

inline bool naive_keeps(const AttentionCase& c, std::int64_t i, std::int64_t j) {
  if (!c.causal) return true;
  return c.causal_align == CausalAlign::top_left ? j <= i : j - c.s_kv <= i - c.s_q;
}

/// q [b, h_q, s_q, d_qk], k [b, h_kv, s_kv, d_qk], v [b, h_kv, s_kv, d_v]: sizes and mask are the case's.
inline NaiveResult naive_attention(const AttentionCase& c, const TensorView& q, const TensorView& k,
                                   const TensorView& v) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const double scale = c.softmax_scale();
  NaiveResult result;
  for (std::int64_t b = 0; b < c.b; ++b) {
    for (std::int64_t h = 0; h < c.h_q; ++h) {
      const std::int64_t kv = h * c.h_kv / c.h_q;
      for (std::int64_t i = 0; i < c.s_q; ++i) {
        std::vector<double> scores;
        std::vector<std::int64_t> keys;
        double max = -kInfinity;
        for (std::int64_t j = 0; j < c.s_kv; ++j) {
          if (!naive_keeps(c, i, j)) continue;
          double dot = 0;
          for (std::int64_t d = 0; d < c.d_qk; ++d) dot += naive_element(q, b, h, i, d) * naive_element(k, b, kv, j, d);
          scores.push_back(scale * dot);
          keys.push_back(j);
          max = std::fmax(max, scale * dot);
        }
        double sum = 0;
        for (const double score : scores) sum += std::exp(score - max);
        result.lse.push_back(keys.empty() ? -kInfinity : max + std::log(sum));
        for (std::int64_t d = 0; d < c.d_v; ++d) {
          double o = 0;
          for (std::size_t n = 0; n < keys.size(); ++n) {
            o += std::exp(scores[n] - max) / sum * naive_element(v, b, kv, keys[n], d);
          }
          result.o.push_back(o);
        }
      }
    }
  }
  return result;
}

/// The gradients of sum(dout * o) + sum(dlse * lse), row by row, by the derivative of the softmax itself:
/// dS_j = P_j * (dP_j - sum over l of P_l * dP_l + dlse).
inline NaiveGradients naive_gradients(const AttentionCase& c, const TensorView& q, const TensorView& k,
                                      const TensorView& v, const TensorView& dout, const TensorView& dlse) {
  const double scale = c.softmax_scale();
  const NaiveResult forward = naive_attention(c, q, k, v);
  NaiveGradients result{std::vector<double>(static_cast<std::size_t>(c.b * c.h_q * c.s_q * c.d_qk)),
                        std::vector<double>(static_cast<std::size_t>(c.b * c.h_kv * c.s_kv * c.d_qk)),
                        std::vector<double>(static_cast<std::size_t>(c.b * c.h_kv * c.s_kv * c.d_v))};
  for (std::int64_t row = 0; row < c.b * c.h_q * c.s_q; ++row) {
    const std::int64_t b = row / (c.h_q * c.s_q), h = row / c.s_q % c.h_q, i = row % c.s_q;
    const std::int64_t kv = h * c.h_kv / c.h_q;
    std::vector<double> p, dp;
    double mean = 0;  // sum over l of P_l * dP_l
    for (std::int64_t j = 0; j < c.s_kv; ++j) {
      double dot = 0, product = 0;
      for (std::int64_t d = 0; d < c.d_qk; ++d) dot += naive_element(q, b, h, i, d) * naive_element(k, b, kv, j, d);
      for (std::int64_t d = 0; d < c.d_v; ++d)
        product += naive_element(dout, b, h, i, d) * naive_element(v, b, kv, j, d);
      p.push_back(naive_keeps(c, i, j) ? std::exp(scale * dot - forward.lse[static_cast<std::size_t>(row)]) : 0);
      dp.push_back(product);
      mean += p.back() * dp.back();
    }
    for (std::int64_t j = 0; j < c.s_kv; ++j) {
      const auto n = static_cast<std::size_t>(j);
      const auto key = static_cast<std::size_t>((b * c.h_kv + kv) * c.s_kv + j);
      const double ds = p[n] * (dp[n] - mean + (dlse.defined() ? naive_element(dlse, b, h, i, 0) : 0));
      for (std::int64_t d = 0; d < c.d_v; ++d) {
        result.dv[key * static_cast<std::size_t>(c.d_v) + static_cast<std::size_t>(d)] +=
            p[n] * naive_element(dout, b, h, i, d);
      }
      for (std::int64_t d = 0; d < c.d_qk; ++d) {
        const auto at = static_cast<std::size_t>(d), width = static_cast<std::size_t>(c.d_qk);
        result.dq[static_cast<std::size_t>(row) * width + at] += scale * ds * naive_element(k, b, kv, j, d);
        result.dk[key * width + at] += scale * ds * naive_element(q, b, h, i, d);
      }
    }
  }
  return result;
}

}  // namespace fa::test

#endif  // FA_TESTS_UNIT_REFERENCE_NAIVE_ATTENTION_HPP_
