// Bounds of gradients against a kernel in miniature, which rounds as kernels do: they hold, and the mistakes that they
// are there for break them.

#include "support/gradient_bounds.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <vector>

#include "reference/convert.hpp"
#include "reference/dropout.hpp"
#include "reference/forward.hpp"
#include "support/variant_case.hpp"

namespace fa::test {
namespace {

double rounded(double x, DType dtype) {
  return dtype == DType::f16 ? reference::decode_f16(reference::encode_f16(static_cast<float>(x)))
                             : reference::decode_bf16(reference::encode_bf16(static_cast<float>(x)));
}

/// As inexact as tanh.approx.
double fast_tanh(double x) {
  const auto exact = static_cast<float>(std::tanh(x));
  return static_cast<double>(std::bit_cast<float>(std::bit_cast<std::uint32_t>(exact) & ~0xfffU));
}

/// Of one batch entry, all of whose keys are seen by all rows.
struct Miniature {
  const AttentionCase& c;
  const AttentionInputs& in;
  const HostTensor& dout;
  reference::DropoutMask dropout = {};

  double dot_k(std::int64_t h, std::int64_t i, std::int64_t j) const {
    double sum = 0;
    for (std::int64_t d = 0; d < c.d_qk; ++d) sum += in.q.at(0, h, i, d) * in.k.at(0, kv_head(h), j, d);
    return sum * static_cast<double>(c.softmax_scale());
  }
  double dot_v(std::int64_t h, std::int64_t i, std::int64_t j) const {
    double sum = 0;
    for (std::int64_t d = 0; d < c.d_v; ++d) sum += dout.at(0, h, i, d) * in.v.at(0, kv_head(h), j, d);
    return sum;
  }
  std::int64_t kv_head(std::int64_t h) const { return h / (c.h_q / c.h_kv); }

  /// Calls visit(j, P, Z, dS) for the keys of a row with scores score(j). P Z and O are rounded.
  template <class Score, class Visit>
  void row(std::int64_t h, std::int64_t i, const Score& score, const Visit& visit) const {
    const auto keys = static_cast<std::size_t>(c.s_kv);
    std::vector<double> p(keys), z(keys, 1);
    std::vector<std::uint8_t> kept(keys, 1);
    if (dropout.active()) dropout.row(h, i, 0, c.s_kv, kept.data());
    double sum = 0;
    for (std::size_t j = 0; j < keys; ++j) sum += p[j] = std::exp(score(static_cast<std::int64_t>(j)));
    std::vector<double> o(static_cast<std::size_t>(c.d_v));
    double delta = 0;
    for (std::size_t j = 0; j < keys; ++j) {
      p[j] /= sum;
      z[j] = kept[j] != 0 ? dropout.scale() : 0;
      for (std::size_t d = 0; d < o.size(); ++d) {
        o[d] += rounded(p[j] * z[j], c.dtype) *
                in.v.at(0, kv_head(h), static_cast<std::int64_t>(j), static_cast<std::int64_t>(d));
      }
    }
    for (std::size_t d = 0; d < o.size(); ++d) {
      delta += rounded(o[d], c.dtype) * dout.at(0, h, i, static_cast<std::int64_t>(d));
    }
    for (std::size_t j = 0; j < keys; ++j) {
      const auto key = static_cast<std::int64_t>(j);
      visit(key, p[j], z[j], p[j] * (z[j] * dot_v(h, i, key) - delta));
    }
  }
};

// ---- dropout ----

HostTensor like(const AttentionCase& c, bool keys, std::int64_t d) {
  return {DType::f64, c.b, keys ? c.h_kv : c.h_q, keys ? c.s_kv : c.s_q, d, c.layout};
}

void add(HostTensor& t, std::int64_t h, std::int64_t s, std::int64_t d, double x) {
  t.set(0, h, s, d, t.at(0, h, s, d) + x);
}

void round_all(HostTensor& t, DType dtype) {
  const TensorView view = t.view();
  for (std::int64_t h = 0; h < view.shape[1]; ++h) {
    for (std::int64_t s = 0; s < view.shape[2]; ++s) {
      for (std::int64_t d = 0; d < view.shape[3]; ++d) t.set(0, h, s, d, rounded(t.at(0, h, s, d), dtype));
    }
  }
}

AttentionGradients run(const Miniature& kernel) {
  const AttentionCase& c = kernel.c;
  AttentionGradients g{like(c, false, c.d_qk), like(c, true, c.d_qk), like(c, true, c.d_v)};
  const auto scale = static_cast<double>(c.softmax_scale());
  for (std::int64_t h = 0; h < c.h_q; ++h) {
    const std::int64_t kv_head = kernel.kv_head(h);
    for (std::int64_t i = 0; i < c.s_q; ++i) {
      const auto score = [&](std::int64_t j) { return kernel.dot_k(h, i, j); };
      kernel.row(h, i, score, [&](std::int64_t j, double p, double z, double ds) {
        const double pz = rounded(p * z, c.dtype), of_score = rounded(ds, c.dtype);
        for (std::int64_t d = 0; d < c.d_v; ++d) add(g.dv, kv_head, j, d, pz * kernel.dout.at(0, h, i, d));
        for (std::int64_t d = 0; d < c.d_qk; ++d) {
          add(g.dq, h, i, d, scale * of_score * kernel.in.k.at(0, kv_head, j, d));
          add(g.dk, kv_head, j, d, scale * of_score * kernel.in.q.at(0, h, i, d));
        }
      });
    }
  }
  for (HostTensor* t : {&g.dq, &g.dk, &g.dv}) round_all(*t, c.dtype);
  return g;
}

class DropoutBounds : public testing::TestWithParam<std::tuple<DType, float>> {};

/// They grow with 1 / (1 - p), as errors do: bounds of a call without dropout do not hold.
TEST_P(DropoutBounds, HoldWhatRoundingDoes) {
  const auto [dtype, probability] = GetParam();
  const AttentionCase c{.b = 1, .h_q = 4, .h_kv = 2, .s_q = 3, .s_kv = 70, .d_qk = 32, .d_v = 24, .dtype = dtype};
  const AttentionInputs in = make_inputs(c);
  const HostTensor dout = make_dout(c);
  HostTensor o = like(c, false, c.d_v), lse(DType::f64, c.b, c.h_q, c.s_q);
  AttentionGradients expected{like(c, false, c.d_qk), like(c, true, c.d_qk), like(c, true, c.d_v)};
  reference::BackwardArgs args;
  args.q = in.q.view(), args.k = in.k.view(), args.v = in.v.view();
  args.o = o.view(), args.lse = lse.view(), args.dout = dout.view();
  args.dq = expected.dq.view(), args.dk = expected.dk.view(), args.dv = expected.dv.view();
  args.scale = static_cast<double>(c.softmax_scale());
  args.dropout = reference::DropoutMask(static_cast<double>(probability), 17, 40000000000);
  args.f64 = true;
  reference::ForwardArgs forward;
  forward.q = args.q, forward.k = args.k, forward.v = args.v, forward.o = o.view(), forward.lse = lse.view();
  forward.scale = args.scale, forward.dropout = args.dropout, forward.f64 = true;
  reference::forward(forward);
  reference::backward(args);

  const AttentionGradients actual = run({c, in, dout, args.dropout});
  const GradientBounds bounds = gradient_bounds(args, dtype);
  const auto each = [&](const GradientBounds& of) {
    return std::vector<double>{worst_ratio(actual.dq, expected.dq, of.dq, false),
                               worst_ratio(actual.dk, expected.dk, of.dk, false),
                               worst_ratio(actual.dv, expected.dv, of.dv, false)};
  };
  for (const double ratio : each(bounds)) {
    EXPECT_LE(ratio, 1);
    EXPECT_GT(ratio, 0.02) << "a bound that nothing comes near finds nothing";
  }
  args.dropout = {};
  const double of_dv = each(gradient_bounds(args, dtype)).back();
  if (probability > 0.8f) {
    EXPECT_GT(of_dv, 3);
  }
}

INSTANTIATE_TEST_SUITE_P(All, DropoutBounds,
                         testing::Combine(testing::Values(DType::f16, DType::bf16), testing::Values(0.f, 0.5f, 0.9f)));

// ---- captures under a fast tanh ----

class CaptureBounds : public testing::TestWithParam<DType> {};

/// The gradient of a slope, whose distance multiplies what is left of 1 - t^2 where tanh is flat. That of a fast t is
/// off by 2^-10, and biased.
TEST_P(CaptureBounds, TellAFastTanhInDerivatives) {
  const AttentionCase c{.b = 1, .h_q = 2, .h_kv = 1, .s_q = 40, .s_kv = 90, .d_qk = 32, .d_v = 32, .dtype = GetParam()};
  const std::vector<VariantChoice> choices = variant_choices();
  const auto choice = std::ranges::find(choices, "saturated", &VariantChoice::name);
  ASSERT_NE(choice, choices.end());
  VariantCase variant(c, *choice);
  NamedTensor& slope = variant.captures.at(0);
  ASSERT_EQ(slope.name, "slope");
  constexpr float kSlope = 0.05f;  // 1 - t^2 is 1e-6 and less
  for (std::int64_t h = 0; h < c.h_q; ++h) {
    std::memcpy(slope.bytes.data() + static_cast<std::size_t>(h) * sizeof kSlope, &kSlope, sizeof kSlope);
  }
  const AttentionInputs in = make_inputs(c);
  const HostTensor dout = make_dout(c);
  const VariantGradients expected = reference_gradients_f64(variant, in, dout.view());
  const Miniature kernel{c, in, dout};
  std::vector<float> precise(static_cast<std::size_t>(c.h_q)), fast(precise.size());
  for (std::int64_t h = 0; h < c.h_q; ++h) {
    double sums[2] = {};
    for (std::int64_t i = 0; i < c.s_q; ++i) {
      const auto argument = [&](std::int64_t j) {
        return (kernel.dot_k(h, i, j) - static_cast<double>(kSlope) * static_cast<double>(j + 300)) / 2;
      };
      kernel.row(
          h, i, [&](std::int64_t j) { return 2 * fast_tanh(argument(j)); },
          [&](std::int64_t j, double, double, double ds) {
            const double t[] = {std::tanh(argument(j)), fast_tanh(argument(j))};
            for (int n = 0; n < 2; ++n) sums[n] -= ds * (1 - t[n] * t[n]) * static_cast<double>(j + 300);
          });
    }
    precise[static_cast<std::size_t>(h)] = static_cast<float>(sums[0]);
    fast[static_cast<std::size_t>(h)] = static_cast<float>(sums[1]);
  }
  EXPECT_LE(worst_ratio(precise, expected.captures[0], expected.bounds.captures[0]), 1);
  EXPECT_GT(worst_ratio(fast, expected.captures[0], expected.bounds.captures[0]), 100);
}

INSTANTIATE_TEST_SUITE_P(All, CaptureBounds, testing::Values(DType::f16, DType::bf16));

}  // namespace
}  // namespace fa::test
